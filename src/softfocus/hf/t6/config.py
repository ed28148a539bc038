"""The sizes of a T6 model."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters


@strict
class T6Config(PreTrainedConfig):
    """The sizes of a T6 model; by default those of the paper's small one (124 M parameters).

    Attributes:
        q_rank: R_Q, how many tensor products a query is the mean of.
        k_rank: R_K, of a key.
        v_rank: R_V, of a value.
        head_dim: d. It need not be hidden_size / num_attention_heads: the paper has more heads than
            that.
        intermediate_size: of the SwiGLU; floor(8/3 hidden_size) unless given.
    """

    model_type = "t6"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "cache"]

    vocab_size: int = 50304
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 34
    head_dim: int = 64
    q_rank: int = 6
    k_rank: int = 2
    v_rank: int = 2
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    tie_word_embeddings: bool = True
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 8 * self.hidden_size // 3
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by ``strict`` when a config is made or saved.

        Raises:
            ValueError: a rank below 1, or an odd head_dim: RoPE rotates pairs of dimensions.
        """
        for name in ("q_rank", "k_rank", "v_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 1 or more")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, expected an even number, as RoPE turns pairs")
