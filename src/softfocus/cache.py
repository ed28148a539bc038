"""``attention_with_cache()``: new tokens against keys and values in a preallocated or paged
cache.
"""

import torch
from torch import Tensor

from softfocus import dispatch, ops, validation
from softfocus.contract import Call
from softfocus.mechanism import Mechanism, default_scale
from softfocus.visibility import Cache, Visibility

__all__ = ["attention_with_cache"]


def attention_with_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    mechanism: str | Mechanism = "lssar",
    window_size: tuple[int, int] | None = None,
    head_scale: Tensor | None = None,
    power: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of the last tokens of each sequence to all of its tokens, which are in a cache
    already.

    For each sequence b the result is that of ``attention(query[b], keys[b], values[b],
    is_causal=True)``. keys and values are the first ``lengths[b]`` in the cache. The last query is
    at the last of them, and N_i is counted from them. The rest of the cache is never read. If there
    are more queries than ``lengths[b]``, the first ones see no key and are zero.

    The triton backend reads lengths and pages on the device. It does not synchronise, so that a
    step can be captured in a CUDA graph. Other backends run each sequence in turn and first copy
    its pages into one tensor.

    Args:
        query: [B, H, Lq, D], the last Lq tokens of each sequence.
        key_cache: [B, Hk, capacity, D], or with ``page_table`` [pages, Hk, page_size, D]; with any
            strides. For pages [pages, page_size, Hk, D], as in vLLM and FlashAttention, pass
            ``.transpose(1, 2)``. It has the query's dtype. Autocast does not cast a cache, so cast
            the query to it.
        value_cache: the same with Dv.
        lengths: int32 or int64 [B], how many tokens each sequence has, the new ones included. They
            are checked, except by the triton backend on a device, which would have to synchronise.
            There they are clamped to [0, capacity].
        page_table: int32 or int64 [B, n]. Entry j is the page of tokens j * page_size to (j + 1) *
            page_size - 1. The capacity is n * page_size. Entries beyond a sequence's length are not
            read. The others are checked where lengths are.
        scale, enable_gqa, mechanism, window_size, head_scale, power, backend: as in
            :func:`softfocus.attention`.

    Returns:
        out [B, H, Lq, Dv] in the query's dtype, without gradient.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it.
        RuntimeError: a gradient is recorded and a tensor requires it.
        NotImplementedError: a tensor has a forward-mode tangent.
    """
    algebra = validation.mechanism_of(mechanism)
    validation.check_tensors(
        query, key_cache, value_cache, enable_gqa, ("key_cache", "value_cache"), page_table is not None
    )
    validation.check_cache(query, key_cache, lengths, page_table)
    left, _right = validation.window_of(window_size, is_causal=True)
    validation.check_learned(head_scale, power, query, algebra)
    floating = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "head_scale": head_scale, "power": power,
    }  # fmt: skip
    for name, x in floating.items():
        if torch.is_grad_enabled() and x is not None and x.requires_grad:
            raise RuntimeError(
                f"{name}: requires grad, and attention with a cache has none; call it under torch.no_grad(), or call "
                "softfocus.attention with the keys and values themselves"
            )
    ops.refuse_tangents(*floating.values())
    d = query.size(-1)
    scale = default_scale(algebra, d) if scale is None else validation.scale_of(scale, algebra, d)
    capacity = key_cache.size(2) * (1 if page_table is None else page_table.size(1))
    visibility = Visibility(query.size(2), capacity, left, 0)
    cache = Cache(lengths, page_table)
    call = Call(
        query, key_cache, value_cache, visibility, algebra, scale, head_scale=head_scale, power=power, cache=cache
    )
    return ops.run(call, dispatch.module_for(dispatch.choose(call, backend), backend))[0]
