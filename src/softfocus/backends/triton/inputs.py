"""Turns a call into the kernels' arguments: its tensors into pointers with strides, its mechanism
and tiles into constants.
"""

from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from softfocus import dropout
from softfocus.backends.triton import tuning
from softfocus.backends.triton.arguments import Algebra, Array, Inputs, Masks, RowArray, TileLists, Tiling
from softfocus.backends.triton.kernels import masking
from softfocus.backends.triton.kernels.pointwise import PHI
from softfocus.backends.triton.tuning import next_power_of_two
from softfocus.backends.triton.variants import runtime_power
from softfocus.contract import Call
from softfocus.mechanism import Mechanism
from softfocus.pointwise import POINTWISE
from softfocus.visibility import UNLIMITED, Visibility

# The number of terms of phi's polynomials (kernels/pointwise.py), by the dtype of the inputs
TERMS = {torch.float32: 9, torch.float16: 6, torch.bfloat16: 4}
END = tl.constexpr(0)
"""The last field of some arguments: see the docstring of ``arguments``."""
COSINE = {"dot": False, "cosine": True}


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up. Triton's own function takes microseconds on the host."""
    return -(-x // y)


def array(x: Tensor | None) -> Any:
    """The Array of a 4-D tensor. A dimension of size 1 gets stride 0, so that kernels broadcast
    it.
    """
    if x is None:
        return None
    strides = x.stride()
    if 1 in x.shape:
        strides = tuple(0 if size == 1 else stride for size, stride in zip(x.shape, strides, strict=True))
    return Array(x, *strides)


def row_array(x: Tensor) -> RowArray:
    """The RowArray of vectors [n, B, H, Lq], with strides as in :func:`array`."""
    pointer, *strides, _stride_of_rows = array(x)
    return RowArray(pointer, *strides)


@lru_cache(maxsize=256)
def tiling_of(head_dim: int, value_dim: int, dtype: torch.dtype, tile: tuning.TileShape) -> Tiling:
    """A tile's shape, and how its products are computed."""
    widths = [max(16, next_power_of_two(size)) for size in (head_dim, value_dim)]
    # A float16 call multiplies LASER's e^V, and weights and gradients that float16 might not hold,
    # as float32. They are computed from float16, so that tf32 is precise enough. Tensor cores
    # truncate operands to tf32: products.to_operand_dtype rounds them
    precision = "tf32" if dtype == torch.float16 else "ieee"
    dims_fill_tile = widths == [head_dim, value_dim]
    # The interpreter of Triton 3.9 multiplies the bit patterns of bfloat16
    widen = knobs.runtime.interpret and dtype == torch.bfloat16
    return Tiling(*map(tl.constexpr, (tile.rows, tile.keys, *widths, dims_fill_tile, precision, widen)))


def _needs_shift(mechanism: Mechanism, bounded: bool, dtype: torch.dtype) -> bool:
    """``Algebra.shifted`` where the normaliser is l1. ``bounded`` is ``variants.bounded`` of the
    call.
    """
    if mechanism.phi == "exp" or dtype == torch.float16:
        return True
    return POINTWISE[mechanism.phi].positive and not bounded


@lru_cache(maxsize=256)
def algebra_of(mechanism: Mechanism, power_given: bool, bounded: bool, dtype: torch.dtype) -> Algebra:
    """The mechanism as constants. Its power is one of them, unless ``Inputs`` has it."""
    assert mechanism.post == "none"
    power = 0 if mechanism.power is None or power_given else int(mechanism.power)
    l1 = mechanism.normaliser == "l1"
    plain_exp = mechanism.phi == "exp" and l1 and mechanism.power is None
    return Algebra(
        cosine=tl.constexpr(COSINE[mechanism.similarity]),
        length_scale=tl.constexpr(mechanism.length_scale),
        score_bias=tl.constexpr(mechanism.score_bias),
        normaliser=tl.constexpr(mechanism.normaliser),
        phi=PHI[mechanism.phi],
        reweighted=tl.constexpr(mechanism.power is not None),
        power=tl.constexpr(power),
        laser=tl.constexpr(mechanism.laser),
        shifted=tl.constexpr(l1 and _needs_shift(mechanism, bounded, dtype)),
        shift_holds_norm=tl.constexpr(plain_exp),
        terms=tl.constexpr(TERMS[dtype]),
        inputs_are_fp32=tl.constexpr(dtype == torch.float32),
        inputs_are_fp16=tl.constexpr(dtype == torch.float16),
    )


def inputs_of(call: Call) -> Inputs:
    """The call's tensors and numbers, without norms and e^V, which other kernels compute first."""
    query, value, cache, dropout_of_call, power = call.query, call.value, call.cache, call.dropout, call.power
    batch, heads, query_length, head_dim = query.shape
    _, key_heads, page_size, value_dim = value.shape
    table = lengths = None
    if cache is not None:
        lengths = cache.lengths
        if lengths.dtype != torch.int32:  # kernels clamp int32. A larger number would wrap around
            lengths = lengths.clamp(0, call.visibility.key_length).int()
    if cache is not None and cache.page_table is not None:
        table = cache.page_table.int()[:, None, None]
    else:
        page_size = 0  # a constexpr. Without pages it is 0, so that one kernel serves every key length
    if power is None and (power_number := runtime_power(call.mechanism)) is not None:
        power = query.new_full((heads,), power_number, dtype=torch.float32)
    return Inputs(
        query=array(query),
        key=array(call.key),
        value=array(value),
        value_operand=array(value),
        value_flags=None,
        query_rnorm=None,
        key_rnorm=None,
        unit_key_fp16=None,
        unit_query_fp16=None,
        unit_key_bf16=None,
        unit_query_bf16=None,
        scaled_query=None,
        bias=array(call.bias),
        head_scale=None if call.head_scale is None else call.head_scale.detach().float().contiguous(),
        power=None if power is None else power.detach().float().contiguous(),
        batch=batch,
        heads=heads,
        group=heads // max(key_heads, 1),
        query_length=query_length,
        key_length=call.visibility.key_length,
        head_dim=head_dim,
        value_dim=value_dim,
        scale=call.scale,
        lengths=None if lengths is None else lengths.contiguous(),
        page_table=array(table),
        # Triton specialises kernels on integers that 16 divides and on their number of bits. This
        # number is odd and at least 2^63, so that one kernel serves every seed
        seed=2**63 + 2 * dropout_of_call.number + 1 if dropout_of_call.p else None,
        drop_below=tl.constexpr(dropout.threshold(dropout_of_call.p)),
        keep_scale=tl.constexpr(dropout.keep_scale(dropout_of_call.p)),
        page_size=tl.constexpr(page_size),
    )


def masks_of(visibility: Visibility) -> Masks:
    """The masks without what ``masking.survey`` computes: counts and lists of tiles."""
    mask, key_mask, documents = visibility.mask, visibility.key_mask, visibility.document_ids
    return Masks(
        left=visibility.left,
        right=visibility.right,
        offset=visibility.offset,
        mask=None if mask is None else array(mask.view(torch.uint8)),
        key_mask=None if key_mask is None else array(key_mask[:, None, None].view(torch.uint8)),
        document_ids=None if documents is None else array(documents[:, None, None]),
        counts=None,
        key_tiles=None,
        query_tiles=None,
        has_left=tl.constexpr(visibility.left != UNLIMITED),
        has_right=tl.constexpr(visibility.right != UNLIMITED),
    )


def document_bounds(documents: Tensor, width: int) -> tuple[Array, Array]:
    """The lowest and the highest document number of each tile of ``width`` keys, [B, 1, 1, tiles].

    ``documents`` [B, Lk] are the keys' document numbers.
    """
    beyond = documents[:, -1:].expand(-1, -documents.size(1) % width)
    low, high = torch.cat([documents, beyond], 1).unflatten(1, (-1, width)).aminmax(dim=-1)
    return array(low[:, None, None]), array(high[:, None, None])


def tile_lists(states: Tensor) -> TileLists:
    """The partial and the full tiles of each block; ``states`` is [B, H, blocks, tiles].

    A state is ``masking.EMPTY``, ``PARTIAL`` or ``FULL``.
    """
    partial, full = (_listed(states == state.value) for state in (masking.PARTIAL, masking.FULL))
    return TileLists(*partial, *full, END)


def _listed(chosen: Tensor) -> tuple[Any, Any]:
    """Indices of the last dimension, the chosen tiles first, and the number of chosen tiles."""
    # Contiguous: the kernels multiply a tile's number by its stride in 32 bits
    flags = chosen.to(torch.int8).contiguous()
    return (
        array(flags.argsort(dim=-1, descending=True, stable=True).to(torch.int32)),
        array(flags.sum(-1, keepdim=True, dtype=torch.int32)),
    )
