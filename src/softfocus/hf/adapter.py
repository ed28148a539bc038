"""What Transformers calls in place of its attention: its arguments, translated for
``softfocus.attention()``.
"""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from softfocus.functional import HIDDEN, attention
from softfocus.hf.config import layer_of
from softfocus.hf.learned import is_causal as is_causal_itself
from softfocus.hf.learned import parameter_of
from softfocus.hf.masks import EAGER, expected_by
from softfocus.hf.refusals import refuse_arguments, refuse_other_heads
from softfocus.hf.rotary import at_first_window
from softfocus.hf.watch import Call, listeners
from softfocus.layout import Heads
from softfocus.mechanism import Mechanism, default_scale
from softfocus.visibility import document_ids_from_lengths

UNKNOWN_POSITIONS = (
    "window: got a mask of several queries in a cache that shows queries their future or ends in padding, so that "
    "their positions are not known; pad on the left, and pass the whole prompt at once, with a dynamic cache or none"
)
"""What compiled code can say: CUDA's assertions hold 254 characters."""
PAD_TOKEN = (
    "generate() takes tokens that equal pad_token_id for padding where it has no attention_mask, and in what an "
    "assistant model reads: set a pad_token_id that no text has"
)
UNKNOWN_KEYS = (
    "window: got a mask of more keys than there are, in which no query sees the last key, so that the two do not end "
    "at the same position; a mask of your own has as many keys as the cache hands over"
)
REPLACED = "_softfocus_attention"
"""The attribute of an attention module with what is called in place of ``softfocus.attention()``.
The lab's ablations set it.
"""


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
    attend: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function behind ``attn_implementation="softfocus"``.

    Args:
        module: the attention module; its config says what its heads run, and it owns what they
            learn.
        query: [B, H, Lq, D].
        key: [B, Hk, Lk, D]; Hk divides H.
        value: [B, Hk, Lk, Dv].
        attention_mask: what :func:`transformers.masking_utils.sdpa_mask` makes, bool [B, 1, Lq, Lk]
            (True where a query may see a key) or None; or a model's own float mask, which is added
            to the scores and hides keys at -5,000 or less. None means causal if the module is
            causal. Then one query sees every key, and of more keys than queries those after the
            first Lq are the empty slots of a static cache: Transformers makes a mask in all other
            cases. Models that expect the masks of eager attention (:mod:`softfocus.hf.masks`) mean
            no mask by None.
        dropout: probability with which a weight is dropped.
        scaling: the model's own factor of the scores. It takes the place of 1/sqrt(d), also where a
            model deviates from it; a mechanism with another scale, such as log(d), keeps its own.
        is_causal: takes the place of ``module.is_causal`` when given.
        sliding_window: the model's own: how many keys a query sees, itself included; to each side,
            where attention is not causal (the convention of Transformers' FlashAttention). Used
            only in padding-free batches: a mask carries its window already, and some models pass on
            a window that their eager attention does not have. A window of the layout comes on top.
        position_bias: float, broadcastable to [B, H, Lq, Lk], added to the scores.
        attend: what computes attention, called as ``softfocus.attention``, which it is by default.
            Its keys and values [B, Hk, Lk, ...] need not have the dimensions of the queries, except
            with sinks.
        kwargs: ``cu_seq_lens_q`` of padding-free batches is honoured where it describes the queries
            of the module; what the models pass on for others is ignored.

    Returns:
        [B, Lq, H, Dv], and None for the weights.

    Raises:
        ValueError: the config names no mechanism, or the model asks for what cannot be honoured
            (soft-capping, sinks, attention weights, ``cu_seq_lens_q`` of other queries).
    """
    layer = layer_of(module)
    if layer is None:
        raise ValueError(
            "attn_implementation='softfocus' without a mechanism: the config has no entry 'softfocus'. Call "
            "softfocus.hf.use(model, 'lssar') instead of setting attn_implementation."
        )
    refuse_arguments(module, kwargs)
    query_length, key_length = query.shape[2], key.shape[2]
    decodes = causal = is_causal_itself(module) if is_causal is None else bool(is_causal)
    if expected_by(module.config) == EAGER:
        if any(group.window is not None for group in layer):
            raise ValueError(
                f"window: {type(module).__name__} belongs to a model without SDPA support, "
                "whose masks do not say at which position a query stands; leave the window out"
            )
        # The whole visibility is in the mask, the model's own window and causality included
        sliding_window, causal = None, False
    if attention_mask is None and causal and 1 < query_length < key_length:
        key, value = key[:, :, :query_length], value[:, :, :query_length]
        position_bias = position_bias if position_bias is None else position_bias[..., :query_length]
    documents = _documents(module, kwargs.get("cu_seq_lens_q"), query, key, decodes)
    total, shared = query.shape[1], query.shape[1] // key.shape[1]
    refuse_other_heads(module, layer, total, shared)
    outs, start = [], 0
    for number, group in enumerate(layer):
        heads = slice(start, start + (group.heads or total))
        keys = slice(heads.start // shared, heads.stop // shared)
        start = heads.stop
        # Without a mask the model has no window, whatever it passes on for FlashAttention: of more
        # keys than its window Transformers makes a mask. Padding-free batches have none
        window = sliding_window if attention_mask is None and documents is not None else None
        if group.window is not None:
            window = group.window if window is None else min(window, group.window)
        outs.append(
            _attend(
                module,
                group,
                heads,
                query[:, heads],
                key[:, keys],
                value[:, keys],
                mask=_of_heads(attention_mask, heads, total),
                causal=causal,
                window=window,
                scaling=scaling,
                dropout_p=dropout,
                document_ids=documents,
                bias=_of_heads(position_bias, heads, total),
                attend=attend,
                head_scale=parameter_of(module, layer, number, "head_scale"),
                power=parameter_of(module, layer, number, "power"),
            )
        )
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    return out.transpose(1, 2).contiguous(), None


_SCALED = re.compile("Esm|EvollaSaProt")
"""Classes that multiply the query by 1/sqrt(d), and whose `scaling` says 1."""


def _scale(module: nn.Module, mechanism: Mechanism, scaling: float | None, head_dim: int) -> float | None:
    """The factor of the scores: the model's in place of 1/sqrt(d), None for the mechanism's own."""
    # OPT, Whisper and others multiply the query (or query and key) by 1/sqrt(d) themselves, TimesFM
    # by a learned factor, too. Cosines do not see that
    own = getattr(module, "scaling", None)
    factor = isinstance(own, Tensor) or (isinstance(own, float) and own != 1.0)
    applied = scaling == 1.0 and (factor or bool(_SCALED.match(type(module).__name__)))
    if mechanism.scale == "1/sqrt(d)":
        return None if applied and mechanism.similarity == "cosine" else scaling
    if applied and mechanism.similarity == "dot":
        return default_scale(mechanism, head_dim) * math.sqrt(head_dim)
    return None


def _attend(
    module: nn.Module,
    group: Heads,
    heads: slice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    scaling: float | None,
    dropout_p: float,
    attend: Callable[..., Tensor] | None,
    **others: Any,
) -> Tensor:
    """One group of heads. query, key and value are views of the module's."""
    scale = _scale(module, group.mechanism, scaling, query.shape[-1])
    if group.sinks:
        if others["document_ids"] is not None:
            raise ValueError(
                "sinks: they are the first keys of one text, and cu_seq_lens_q packs several; pass them alone"
            )
        query, key, mask, scale = _with_sinks(module, group, heads, query, key, mask, causal, scale)
        window = None
    elif window is not None:
        if group.window is not None and getattr(module, "_softfocus_crosses", False):
            raise ValueError(
                f"window: {type(module).__name__} is cross-attention, whose keys stand at other positions than its "
                "queries; leave the window out"
            )
        if (
            group.window is not None
            and not causal
            and query.shape[2] != key.shape[2]
            and not _decodes(module, query, mask)
        ):
            raise ValueError(
                f"window: {type(module).__name__} is not causal and hands over {query.shape[2]} queries "
                f"and {key.shape[2]} keys, as cross-attention does; a window needs queries and keys at the same "
                "positions. Leave it out"
            )
        if mask is not None:
            mask = _of_kept_keys(mask, query.shape[2], key.shape[2], window)
            mask, window = _windowed(mask, query.shape[2], window), None
    causal = causal and mask is None and query.shape[2] > 1
    arguments: dict[str, Any] = {
        "attn_mask": mask,
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": query.shape[1] != key.shape[1],
        "mechanism": group.mechanism,
        "window_size": None if window is None else (window - 1, 0 if causal or query.shape[2] == 1 else window - 1),
        **others,
    }
    for listener in listeners:
        listener(Call(module, range(heads.start, heads.stop), query, key, arguments))
    compute: Any = attend or getattr(module, REPLACED, attention)
    out: Tensor = compute(query, key, value, dropout_p=dropout_p, **arguments)
    return out


def _decodes(module: nn.Module, query: Tensor, mask: Tensor | None) -> bool:
    """Whether a module that is not causal has a KV cache, as PaliGemma's decoder: then its last
    query stands at the last key. Of several queries the mask says that.
    """
    has_cache = bool({"past_key_values", "cache"} & inspect.signature(module.forward).parameters.keys())
    return has_cache and (mask is not None or query.shape[2] == 1)


def _of_heads(x: Tensor | None, heads: slice, total: int) -> Tensor | None:
    """The part of a mask or bias [B or 1, H or 1, Lq, Lk] that belongs to some of all heads."""
    return x[:, heads] if x is not None and x.dim() == 4 and x.shape[1] == total and total > 1 else x


def _of_kept_keys(mask: Tensor, rows: int, keys: int, window: int) -> Tensor:
    """The columns of a mask [.., Lk or more] that belong to the keys. A cache that keeps only the
    keys of a window returns fewer keys than the mask has columns. They are those of the last
    columns.

    Raises:
        ValueError: keys that the window sees are not there.
        RuntimeError: rows see keys, and none sees the last one. So the mask does not end where the
            keys do, as one that is longer than a static cache; or the new keys of all sequences are
            masked, which looks the same. On a GPU CUDA's assertion fails.
    """
    if mask.shape[-1] == 1:
        return mask.expand(*mask.shape[:-1], keys)
    if mask.shape[-1] <= keys:
        return mask
    if keys - rows < window - 1:
        raise ValueError(
            f"window: got a mask of {mask.shape[-1]} keys and {keys} keys, {rows} of them new, where a window of "
            f"{window} may see older ones. Either the cache was made under another layout: make a new one from "
            "model.config. Or the mask is your own: it has as many keys as the cache hands over"
        )
    visible = mask if mask.dtype == torch.bool else mask > HIDDEN
    # A chunk of a prompt in which all sequences have padding sees nothing at all
    torch._assert_async(visible[..., -1].any() | ~visible.any(), UNKNOWN_KEYS)
    return mask[..., -keys:]


def _windowed(mask: Tensor, rows: int, window: int) -> Tensor:
    """A mask [.., Lq or 1, Lk] that hides, beside what it hid, what lies beyond a window to either
    side.

    As many rows as columns stand at the same positions. In a cache the last row stands at the last
    key that is seen, and the others before it. Empty slots of a static cache, and padding after the
    last key, do not count. Where no row sees a key, as in a chunk of padding, there is nothing to
    place.

    Raises:
        ValueError: the mask of several rows in a cache does not say where they stand.
    """
    mask = mask.expand(*mask.shape[:-2], rows, -1)
    visible = mask if mask.dtype == torch.bool else mask > HIDDEN
    places, own = (torch.arange(size, device=mask.device) for size in (mask.shape[-1], rows))
    if rows != mask.shape[-1]:
        last = torch.where(visible, places, -1).amax(-1)  # [.., Lq]
        before = last.amax() - (rows - 1)
        starts = torch.where(last >= 0, last - own, before)  # a row that sees nothing says nothing
        wrong = (starts.amax() > before) | ((last.amax() >= 0) & (before < 0))
        if rows > 1 and torch.compiler.is_compiling():  # compiled code looks when it runs
            torch._assert_async(~wrong, UNKNOWN_POSITIONS)
        elif rows > 1 and wrong:
            raise ValueError(f"{UNKNOWN_POSITIONS}. {PAD_TOKEN}")
        own = own + before
    near = (places - own[:, None]).abs() < window
    return visible & near if mask.dtype == torch.bool else mask.masked_fill(~near, -math.inf)


def _with_sinks(
    module: nn.Module,
    group: Heads,
    heads: slice,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries and keys of twice the dimensions, whose product is StreamingLLM's score, and who sees
    whom.

    A sink is met by the query as it stands at the end of the first window, every other key by the
    query as it is. So the query is [as it is, as there], a sink [0, key] and another key [key, 0].
    """
    length, window = query.shape[2], group.window
    assert window is not None
    if not causal or mask is not None or key.shape[2] != length:
        raise ValueError(
            "sinks: they are for causal attention without padding and without a KV cache. While torch.compile traces a "
            "whole model there is always a mask: compile the layers one by one"
        )
    places = torch.arange(length, device=query.device)
    sink = places < group.sinks
    # The cache that StreamingLLM keeps is `window` keys long, its sinks among them
    visible = (places <= places[:, None]) & (sink | (places > places[:, None] - window + group.sinks))
    visible |= places[:, None].ge(places) & (places[:, None] < window)
    doubled = torch.cat([query, at_first_window(module, query, heads, window)], dim=-1)
    apart = torch.cat([key.masked_fill(sink[:, None], 0.0), key.masked_fill(~sink[:, None], 0.0)], dim=-1)
    # The scale is that of the dimensions as they were; a doubled query is longer by the root of two
    scale = default_scale(group.mechanism, query.shape[-1]) if scale is None else scale
    return doubled, apart, visible[None, None], scale * (math.sqrt(2) if group.mechanism.similarity == "cosine" else 1)


def _documents(
    module: nn.Module, cu_seq_lens: Tensor | None, query: Tensor, key: Tensor, causal: bool
) -> Tensor | None:
    """int [1, Lk] from the cumulated lengths of the sequences in a padding-free batch, None where
    there are none.

    Models pass the lengths of a text on to all of their parts. Where they are not those of the
    queries, a part that is not causal (a vision tower) ignores them, as under SDPA.

    Raises:
        ValueError: they are not those of a causal module's queries. Values on a GPU are not
            compared, because they would have to be waited for.
    """
    if cu_seq_lens is None:
        return None
    length = query.shape[2]
    seen = cu_seq_lens.device.type == "cpu" and not torch.compiler.is_compiling()
    text = causal or getattr(module.config, "vocab_size", None) is not None
    end = int(cu_seq_lens[-1]) if seen else length
    # What stands after the last sequence of a text is padding: one more document
    fits = end <= length if text else end == length
    if key.shape[0] == 1 and key.shape[2] == length and fits:
        documents = document_ids_from_lengths(torch.diff(cu_seq_lens).to(key.device), total=length)
        # One document where the values turn out to be those of another part
        return documents if text or seen else documents * (cu_seq_lens[-1] == length).to(key.device)
    if causal:
        raise ValueError(
            f"cu_seq_lens_q: {type(module).__name__} got a batch of {key.shape[0]} with {length} queries and "
            f"{key.shape[2]} keys; expected a batch of 1 whose queries and keys are those of the packed sequences"
            f"{f' ({int(cu_seq_lens[-1])} tokens)' if seen else ''}. Leave cu_seq_lens_q out, and pack by position_ids "
            "with use_cache=False"
        )
    return None
