"""What Transformers calls in place of its attention: its arguments, translated for ``softfocus.attention()``."""

from typing import Any

import torch
from torch import Tensor, nn

from softfocus.functional import attention
from softfocus.hf.config import mechanism_of
from softfocus.hf.learned import parameter_of
from softfocus.visibility import document_ids_from_lengths

_REFUSED = {
    "softcap": "caps the scores before the softmax (Gemma 2)",
    "s_aux": "adds attention sinks to the softmax's denominator (GPT-OSS)",
    "sinks": "adds attention sinks to the softmax's denominator",
    "indices": "picks the keys of sparse attention",
    "block_indices": "picks the blocks of sparse attention",
    "head_mask": "scales the finished weights head by head",
    "cache": "holds the paged cache of continuous batching",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function behind ``attn_implementation="softfocus"``.

    Args:
        module: the attention module; its config names the mechanism, and it owns what the mechanism learns.
        query: [B, H, Lq, D].
        key: [B, Hk, Lk, D]; Hk divides H.
        value: [B, Hk, Lk, Dv].
        attention_mask: what :func:`transformers.masking_utils.sdpa_mask` makes, bool [B, 1, Lq, Lk] (True where a query
            may see a key) or None; or a model's own float mask, which is added to the scores and hides keys at -1e4 or less.
            None means causal if the module is causal. Then one query sees every key, and of more keys than queries
            those after the first Lq are the empty slots of a static cache: Transformers makes a mask in all other cases.
        dropout: probability with which a weight is dropped.
        scaling: the model's own factor of the scores. It takes the place of 1/sqrt(d), also where a model deviates from
            it; a mechanism with another scale, such as log(d), keeps its own.
        is_causal: takes the place of ``module.is_causal`` when given.
        sliding_window: how many keys a query sees, itself included; to each side, where attention is not causal (the
            convention of Transformers' FlashAttention). Used only without a mask: a mask carries its window already.
        position_bias: float, broadcastable to [B, H, Lq, Lk], added to the scores.
        kwargs: ``cu_seq_lens_q`` of padding-free batches is honoured; what the models pass on for others is ignored.

    Returns:
        [B, Lq, H, Dv], and None for the weights.

    Raises:
        ValueError: the config names no mechanism, or the model asks for what cannot be honoured (soft-capping, sinks,
            attention weights).
    """
    mechanism = mechanism_of(module.config)
    if mechanism is None:
        raise ValueError(
            "attn_implementation='softfocus' without a mechanism: the config has no entry 'softfocus'. Call "
            "softfocus.hf.use(model, 'lssar') instead of setting attn_implementation."
        )
    _refuse(module, kwargs)
    query_length, key_length = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None
    if attention_mask is None:
        if sliding_window is not None:
            window = (sliding_window - 1, 0 if causal else sliding_window - 1)
        causal = causal and query_length > 1
        if causal and key_length > query_length:
            key, value = key[:, :, :query_length], value[:, :, :query_length]
            position_bias = position_bias if position_bias is None else position_bias[..., :query_length]
    out = attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=bool(causal) and attention_mask is None,
        scale=scaling if mechanism.scale == "1/sqrt(d)" else None,
        enable_gqa=query.shape[1] != key.shape[1],
        mechanism=mechanism,
        window_size=window,
        document_ids=_documents(kwargs.get("cu_seq_lens_q"), key),
        bias=position_bias,
        head_scale=parameter_of(module, "head_scale"),
        power=parameter_of(module, "power"),
    )
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name}, which {what}; softfocus has no such thing and would leave it "
                f"out in silence. Use an architecture without {name}."
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: softfocus never holds the whole matrix of weights, so a model cannot return it. "
            "To look at those of one layer, call softfocus.attention on its query and key, with the mechanism (without "
            "laser) and torch.eye(key_length).expand(batch, key_heads, -1, -1) as the value."
        )


def _documents(cu_seq_lens: Tensor | None, key: Tensor) -> Tensor | None:
    """int [1, Lk] from the cumulated lengths of the sequences in a padding-free batch, None where there are none."""
    if cu_seq_lens is None:
        return None
    if key.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q describes a padding-free batch of size 1; got a batch of {key.shape[0]}")
    return document_ids_from_lengths(torch.diff(cu_seq_lens).to(key.device), total=key.shape[2])
