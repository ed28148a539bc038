"""The kernels' arguments: tensors as pointers with strides, and the algebra as compile-time
constants.

A NamedTuple whose last field would be another tuple gets a constant ``end`` after it: otherwise
Triton 3.6 forgets, inside loops, that values of the inner tuple (a stride of 1) are constants.
"""

from typing import Any, NamedTuple

import triton.language as tl


class Array(NamedTuple):
    """A tensor [B, H, L, D]: pointer, and strides in elements, 0 where it is broadcast."""

    pointer: Any
    stride_b: Any
    stride_h: Any
    stride_l: Any
    stride_d: Any


class Masks(NamedTuple):
    """Which keys a query sees: ``softfocus.visibility.Visibility``.

    Attributes:
        left, right: the window; unused on a side where it has no bound.
        offset: the key position of query 0.
        mask: bool [B, H, Lq, Lk] as bytes, or None.
        key_mask: bool [B, 1, 1, Lk] as bytes, or None.
        document_ids: integers [B, 1, 1, Lk], or None.
        counts: N_i, int32 [B, H, Lq, 1], or None where the window alone says it.
        key_tiles, query_tiles: the tiles that a block of queries, or of keys, visits; None as
            ``counts``.
        has_left, has_right: constexpr, whether the window has these sides.
    """

    left: Any
    right: Any
    offset: Any
    mask: Array | None
    key_mask: Array | None
    document_ids: Array | None
    counts: Array | None
    key_tiles: "TileLists | None"
    query_tiles: "TileLists | None"
    has_left: tl.constexpr
    has_right: tl.constexpr


class TileLists(NamedTuple):
    """For each block of one side, the partial and the full tiles of the other side.

    Attributes:
        partial, full: their indices, int32 [B, H, blocks, most].
        partial_count, full_count: how many of them count, int32 [B, H, blocks, 1].
        end: see above.
    """

    partial: Array
    partial_count: Array
    full: Array
    full_count: Array
    end: tl.constexpr


class Inputs(NamedTuple):
    """One call's tensors and sizes.

    Attributes:
        query, key, value: [B, H, L, D]; in pages, key and value are [pages, Hk, page size, D].
        value_operand: like value, what the weights are multiplied with: value, or LASER's e^V where
            it is made once a call.
        value_flags: with that, of each key 1 where a value is large, plus 2 where one is
            non-finite; or None.
        query_rnorm, key_rnorm: 1 / |q|, 1 / |k|, float32 [B, H, L, 1], or None without cosine;
            key_rnorm also where the kernel computes it from the keys that it reads.
        unit_key_fp16, unit_query_fp16: k / |k| and c q / |q| (in the score unit) where scores are
            products of these; or None.
        unit_key_bf16, unit_query_bf16: the same, for products with the gradient of the scores.
        bias: added to the scores, or None.
        head_scale, power: float32 [H], or None.
        batch, heads, group: B, H, H / Hk.
        query_length, key_length, head_dim, value_dim: Lq, Lk, D, Dv.
        scale: the d-dependent factor of the scores.
        lengths: of a cache: int32 [B], how many of its keys each sequence has
            (``loading.sequence_length``); or None.
        page_table: of a cache in pages: int32 [B, 1, 1, n], which page holds which keys; or None.
        seed: of dropout, 2^63 + 2 seed + 1; or None.
        drop_below: constexpr, weights whose 16 bits are less are dropped.
        keep_scale: constexpr, what multiplies the others.
        page_size: constexpr.
    """

    query: Array
    key: Array
    value: Array
    value_operand: Array
    value_flags: Array | None
    query_rnorm: Array | None
    key_rnorm: Array | None
    unit_key_fp16: Array | None
    unit_query_fp16: Array | None
    unit_key_bf16: Array | None
    unit_query_bf16: Array | None
    bias: Array | None
    head_scale: Any
    power: Any
    batch: Any
    heads: Any
    group: Any
    query_length: Any
    key_length: Any
    head_dim: Any
    value_dim: Any
    scale: Any
    lengths: Any
    page_table: Array | None
    seed: Any
    drop_below: tl.constexpr
    keep_scale: tl.constexpr
    page_size: tl.constexpr


class Outputs(NamedTuple):
    """What the forward writes.

    Attributes:
        out: [B, H, Lq, Dv].
        residual: like out, saved for the backward: the rounding error of out in units of
            ``weighting.rounding_step``; for LASER A e^V, and in marked rows the rounding error
            itself. Or None.
        saved: vectors of the rows, float32 [rows_kept, B, H, Lq].
        exact_heads: LASER's, int32 [B, H]: not 0 where the head has marked rows; or None.
        end: see above.
    """

    out: Array
    residual: Array | None
    saved: Array
    exact_heads: Any
    end: tl.constexpr


class Algebra(NamedTuple):
    """The mechanism, all of it constexpr: a kernel is compiled for each.

    Attributes:
        cosine: cosine similarity, or the dot product.
        length_scale, score_bias, normaliser: as in ``Mechanism``.
        phi: the functions of ``pointwise.py``.
        reweighted: whether there is a power.
        power: p where it is whole, at most 32 and the same for all heads; otherwise 0, and it is in
            the inputs.
        laser: the logarithm of the mean of e^V in place of the mean of V.
        shifted: whether phi of a row is scaled by a power of two, found from its largest score,
            against overflow and underflow.
        shift_holds_norm: whether the shift is the logsumexp in the backward, so that phi is the
            weight.
        terms: how many terms phi's polynomials have.
        float32, float16: whether the inputs have this dtype. Neither: bfloat16.
    """

    cosine: tl.constexpr
    length_scale: tl.constexpr
    score_bias: tl.constexpr
    normaliser: tl.constexpr
    phi: "Phi"
    reweighted: tl.constexpr
    power: tl.constexpr
    laser: tl.constexpr
    shifted: tl.constexpr
    shift_holds_norm: tl.constexpr
    terms: tl.constexpr
    float32: tl.constexpr
    float16: tl.constexpr


class Phi(NamedTuple):
    """Jit functions.

    Attributes:
        value, derivative: phi 2^-shift in its unit, and phi' 2^-shift, from scores in theirs.
        log: the value's logarithm, from score, shift and value; right also where the value
            underflows.
        rate: phi' / phi, from the score, for scores where phi is too small to be divided by: 1 in
            the exponential tail, 1 / s of relu, 2 / s of relu2.
        shift: of a row, from its largest score.
        has_zeros: constexpr, whether phi is 0 below a score of 0.
        score_unit, unit: constexpr, the factors of scores and of phi.
    """

    value: Any
    derivative: Any
    log: Any
    rate: Any
    shift: Any
    has_zeros: tl.constexpr
    score_unit: tl.constexpr
    unit: tl.constexpr


class Blocks(NamedTuple):
    """The shape of a kernel's tiles, constexpr.

    Attributes:
        BLOCK_Q, BLOCK_K: queries and keys of a tile.
        BLOCK_D, BLOCK_DV: D and Dv, rounded up to sizes that tensor cores multiply.
        dims_fill_tile: whether D and Dv need no rounding up.
        precision: of float32 products: "ieee" or "tf32".
        widen: whether half operands are multiplied in float32, as Triton's interpreter needs.
    """

    BLOCK_Q: tl.constexpr
    BLOCK_K: tl.constexpr
    BLOCK_D: tl.constexpr
    BLOCK_DV: tl.constexpr
    dims_fill_tile: tl.constexpr
    precision: tl.constexpr
    widen: tl.constexpr
