"""T6 as modules: the factors and their attention, the decoder, the causal language model."""

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward, rotate_half
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from softfocus.hf.adapter import REPLACED, attention_forward
from softfocus.hf.t6.config import T6Config
from softfocus.hf.t6.factored import Factored, combine, suits


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Factors [B, L, R, d] turned by the tables [B, L, d] of their positions."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return (x * cos) + (rotate_half(x) * sin)


def pack(a: Tensor, b: Tensor) -> Tensor:
    """Factors A [B, L, R, h] and B [B, L, R, d] as a cache takes keys or values: of one head, [B,
    1, L, R (h + d)].
    """
    return torch.cat((a, b), dim=-1).flatten(2)[:, None]


# Of modules outside its own files Transformers initialises those alone that own parameters: not the
# modules around them
class FactorProjection(nn.Linear):
    """W^a or W^b of all products of a rank, one below the other: initialised by Xavier."""


class ResidualProjection(nn.Linear):
    """Writes into the residual stream: initialised as zeros."""


class T6Factors(nn.Module):
    """The factors of the queries, the keys or the values of some tokens: A [B, L, R, h] and B [B,
    L, R, d].
    """

    def __init__(self, config: T6Config, rank: int):
        super().__init__()
        self.rank, self.sizes = rank, [config.num_attention_heads, config.head_dim]
        self.a = FactorProjection(config.hidden_size, rank * config.num_attention_heads, bias=False)
        self.b = FactorProjection(config.hidden_size, rank * config.head_dim, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """A and B of hidden states [B, L, hidden size]."""
        a, b = self.a(hidden_states), self.b(hidden_states)
        return a.unflatten(-1, (self.rank, -1)), b.unflatten(-1, (self.rank, -1))

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """A and B of what a cache holds."""
        a, b = packed[:, 0].unflatten(-1, (self.rank, -1)).split(self.sizes, dim=-1)
        return a, b


class T6Attention(nn.Module):
    """Tensor Product Attention; see :mod:`softfocus.hf.t6`."""

    def __init__(self, config: T6Config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.num_key_value_groups = 1
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.query = T6Factors(config, config.q_rank)
        self.key = T6Factors(config, config.k_rank)
        self.value = T6Factors(config, config.v_rank)
        self.o_proj = ResidualProjection(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The output [B, L, hidden size], and the attention weights where the implementation
        returns them.
        """
        (q_a, q_b), (k_a, k_b), (v_a, v_b) = (make(hidden_states) for make in (self.query, self.key, self.value))
        cos, sin = position_embeddings
        q_b, k_b = apply_rotary_pos_emb(q_b, cos, sin), apply_rotary_pos_emb(k_b, cos, sin)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            key, value = cache.update(pack(k_a, k_b), pack(v_a, v_b), self.layer_idx)
            k_a, k_b = self.key.unpack(key)
            v_a, v_b = self.value.unpack(value)
        attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        query = combine(q_a, q_b)
        plain = attention is attention_forward and not hasattr(self, REPLACED)
        if plain and not self.training and suits(query, k_a, v_a, v_b):
            key, value = k_a.permute(0, 3, 1, 2), v_a.permute(0, 3, 1, 2)
            kwargs["attend"] = Factored(k_b, v_b)
        else:
            key, value = combine(k_a, k_b), combine(v_a, v_b)
        out, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(out.flatten(-2)), weights


class T6MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: T6Config):
        super().__init__()
        assert config.intermediate_size is not None
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ResidualProjection(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """W_down(silu(W_gate x) * W_up x)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class T6DecoderLayer(GradientCheckpointingLayer):
    """x + TPA(norm(x)), then that plus SwiGLU of its norm."""

    def __init__(self, config: T6Config, layer_idx: int):
        super().__init__()
        self.self_attn = T6Attention(config, layer_idx)
        self.mlp = T6MLP(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, elementwise_affine=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """What the layer makes of hidden states; ``kwargs`` are those of the attention."""
        hidden_states = hidden_states + self.self_attn(self.norm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.norm(hidden_states))


class T6PreTrainedModel(PreTrainedModel):
    """What T6 models share: what they support, and how they are initialised."""

    config_class = T6Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["T6DecoderLayer"]
    _skip_keys_device_placement: ClassVar = ["past_key_values", "cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar = {"hidden_states": T6DecoderLayer, "attentions": T6Attention}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FactorProjection):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, ResidualProjection):
            init.zeros_(module.weight)


class T6Model(T6PreTrainedModel):
    """The decoder, without a head."""

    def __init__(self, config: T6Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(T6DecoderLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, elementwise_affine=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """As every decoder of Transformers. ``past_key_values`` is the older name of ``cache``."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: got both or neither, expected one of them")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + seen)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
        )
        tables = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer, while assistant_early_exit drafts
            hidden_states = layer(
                hidden_states,
                position_embeddings=tables,
                attention_mask=mask,
                position_ids=position_ids,
                cache=cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)


class T6ForCausalLM(T6PreTrainedModel, GenerationMixin):
    """The decoder with a head that predicts the next token."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: T6Config):
        super().__init__(config)
        self.model = T6Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As every causal language model of Transformers: the loss where labels are given, the last
        logits where asked.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=past_key_values if cache is None else cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cache=outputs.cache,
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse continuous batching, which `generate_batch()` and the server start. Its pages hold
        keys and values of all heads, not factors. An error in a forward would only reach the log of
        its thread.
        """
        raise ValueError("continuous batching: T6 caches factors of its keys and values; call generate()")

    def _get_static_cache_init_shape(self) -> None:
        """None: Transformers must not guess from heads and head_dim how large the keys of a static
        cache are.
        """
