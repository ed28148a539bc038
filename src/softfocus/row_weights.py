"""``weights()``: the attention weights of chosen rows, by the reference's maths. (A module of that
name would shadow the function in the package.)
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softfocus import dispatch, ops, reference, validation
from softfocus.functional import validated_call
from softfocus.mechanism import Mechanism

BLOCK_ELEMENTS = 1 << 22
"""The most weights of a block, which has at least one row of every head: 16 MiB of float32. The
reference holds some ten such tensors.
"""


class Block(NamedTuple):
    """The weights of some rows.

    Attributes:
        rows: which queries, int64 [R].
        weights: [B, H, R, Lk], float32 or float64.
        visible: bool [B, H, R, Lk], the keys that each row sees.
    """

    rows: Tensor
    weights: Tensor
    visible: Tensor


def weights(
    query: Tensor,
    key: Tensor,
    *,
    rows: Sequence[int] | Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    mechanism: str | Mechanism = "lssar",
    window_size: tuple[int, int] | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    bias: Tensor | None = None,
    head_scale: Tensor | None = None,
    power: Tensor | None = None,
) -> Tensor:
    """The attention weights A of any mechanism, for chosen query rows.

    Exact by the reference's maths, differentiable, and 0 on every key that a row does not see.
    LASER's are those of its A in log(A exp(V)). The rows are computed in blocks: beside the result
    itself, memory is that of a few rows.

    Args:
        query: [B, H, Lq, D].
        key: [B, Hk, Lk, D].
        rows: integers [R], which of the queries, in the order wanted; -1 is the last one. All of
            them if left out.
        attn_mask, is_causal, scale, enable_gqa, mechanism, window_size, key_mask, document_ids:
            as in :func:`softfocus.attention`, for all Lq queries.
        bias, head_scale, power: likewise.

    Returns:
        [B, H, R, Lk], float64 for float64 inputs and float32 for all others.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it.
        RuntimeError: rows that are not there, in compiled code. On a GPU that is an assertion of
            the device: the process cannot use the GPU after it.

    Example: ``weights(q, k, rows=[-1], is_causal=True, mechanism="lssar")`` is what the last token
    looks at.
    """
    found = blocks(
        query, key, rows=rows, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        mechanism=mechanism, window_size=window_size, key_mask=key_mask, document_ids=document_ids, bias=bias,
        head_scale=head_scale, power=power,
    )  # fmt: skip
    return torch.cat([block.weights for block in found], dim=2)


def blocks(
    query: Tensor, key: Tensor, *, rows: Sequence[int] | Tensor | None = None, **arguments: Any
) -> Iterator[Block]:
    """What :func:`weights` returns, a block of rows at a time, with the visible keys. There is at
    least one block. While torch compiles there is one block of all rows: memory is not bounded.
    """
    call = validated_call(query, key, key, **arguments)
    dispatch.choose(call, "reference")  # raises where the reference does not support the call
    chosen = validation.rows_of(rows, call.query)
    batch, heads, _, _ = call.query.shape
    key_length, bias = call.visibility.key_length, call.bias
    if torch.compiler.is_compiling():  # a number of blocks would fix the lengths of the trace
        parts: tuple[Tensor, ...] = (chosen,)
    else:
        parts = chosen.split(max(1, BLOCK_ELEMENTS // max(1, batch * heads * key_length)))
    for block_rows in parts:
        visible = call.visibility.of_rows(block_rows).expand(batch, heads, block_rows.size(0), key_length)
        part = call._replace(
            query=call.query[:, :, block_rows],
            bias=bias if bias is None or bias.size(-2) == 1 else bias[..., block_rows, :],
        )
        with ops.without_autocast(query):  # left before the yield: the caller's code keeps its autocast
            block_weights = reference.weights_of(part, visible).weights
        yield Block(block_rows, block_weights, visible)
