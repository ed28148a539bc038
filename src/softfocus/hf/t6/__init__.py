"""T6: a Transformer with Tensor Product Attention (arXiv 2501.06425), as an architecture of
Transformers.

Attention whose queries, keys and values are sums of a few tensor products, each made from the token
x_t (3.1)::

    Q_t = 1/R_Q sum_r a_r^Q(x_t) (x) b_r^Q(x_t) = 1/R_Q A_Q(x_t)^T B_Q(x_t)         [h, d]
    A_Q(x_t) = W^{aQ} x_t  [R_Q, h]        B_Q(x_t) = W^{bQ} x_t  [R_Q, d]

and K_t with rank R_K, V_t with rank R_V, alike. The heads of a token share its B and differ in A.
RoPE turns the rows of B_Q and B_K, which is to turn those of Q_t and K_t (3.5, 3.6). Head i is then
any attention (3.2; here any mechanism)::

    head_i = attention(Q_i, K_i, V_i)      TPA = Concat(head_1, ..., head_h) W^O     (3.3)

The KV cache holds A_K, the turned B_K, A_V and B_V: (R_K + R_V)(h + d) numbers a token in place of
2 h d (section 3.3). A step with many keys attends to these (:mod:`softfocus.hf.t6.factored`).

The rest is Llama's, as in the authors' code: RMSNorm before each part, here without weights, SwiGLU
of width floor(8/3 of the hidden size), no biases, tied embeddings. The factors' weights are
initialised by Xavier (their appendix G), the projections that write into the residual stream as
zeros, all others from N(0, initializer_range).
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from softfocus.hf.t6.config import T6Config
from softfocus.hf.t6.model import T6ForCausalLM, T6Model

__all__ = ["T6Config", "T6ForCausalLM", "T6Model"]


def register() -> None:
    """Make ``model_type`` "t6" known to Transformers' Auto classes."""
    AutoConfig.register(T6Config.model_type, T6Config, exist_ok=True)
    AutoModel.register(T6Config, T6Model, exist_ok=True)
    AutoModelForCausalLM.register(T6Config, T6ForCausalLM, exist_ok=True)
