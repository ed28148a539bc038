"""The kernels' arguments: tensors as pointers with strides, and the algebra as compile-time
constants.

A NamedTuple whose last field would be another tuple gets a constant ``end`` after it. Without it
Triton 3.6 forgets, inside loops, that values of the inner tuple, such as a stride of 1, are
constants. ``Outputs`` ends with a tensor or None, and has one, too: whether it needs one was not
tested. Triton 3.9 compiles the same kernels without either.
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


class RowArray(NamedTuple):
    """Some vectors of rows [n, B, H, Lq], the rows contiguous: pointer, and strides in elements, 0
    where a dimension has size 1.
    """

    pointer: Any
    stride_n: Any
    stride_b: Any
    stride_h: Any


class Masks(NamedTuple):
    """Which keys a query sees: ``softfocus.visibility.Visibility``.

    Attributes:
        left, right: keys before and after its own position that a query sees; not used on a side
            without a bound.
        offset: the key position of query 0.
        mask: bool [B, H, Lq, Lk] as bytes, or None.
        key_mask: bool [B, 1, 1, Lk] as bytes, or None.
        document_ids: integers [B, 1, 1, Lk], or None.
        counts: N_i, int32 [B, H, Lq, 1]; None where the window alone determines it.
        key_tiles: for each block of queries, the tiles of keys that it visits. None where
            ``counts`` is, and in kernels that do not read it: key_gradients, bias_gradients and
            decoding.
        query_tiles: for each block of keys, the tiles of queries that it visits. None where
            ``counts`` is, and in all kernels but key_gradients.
        has_left, has_right: constexpr, whether the window has a bound on the left, on the right.
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
        partial, full: indices of tiles, int32 [B, H, blocks, tiles of the other side].
        partial_count, full_count: how many of these are valid, from the first on, int32 [B, H,
            blocks, 1].
        end: a constant; see the module's docstring.
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
        value_operand: what the kernels load to multiply it by the weights, shaped like value:
            LASER's e^V where it is computed once per call, else value. With LASER and a cache, or
            in decoding, the kernels compute e^V from the tile of values that they load.
        value_flags: float32 [B, Hk, Lk, 1], where value_operand is e^V: for each key 1 if a value
            is large, plus 2 if one is non-finite. Else None.
        query_rnorm, key_rnorm: 1 / |q|, 1 / |k|, float32 [B, H, L, 1], or None without cosine.
            key_rnorm is also None where the kernel computes it from the keys that it reads.
        unit_key_fp16, unit_query_fp16: k / |k| and c q / |q| (in the score unit) where scores are
            products of these; or None.
        unit_key_bf16, unit_query_bf16: the same in bfloat16, for products with the gradient of the
            scores. unit_query_*: only in the backward. query_gradients stores them for
            key_gradients.
        scaled_query: of the backward, with cosine where scores are not products of unit vectors:
            q scaled by a power of two to a norm in (1/2, 1]. query_gradients stores it for
            key_gradients. Or None.
        bias: added to the scores, or None.
        head_scale, power: float32 [H], or None.
        batch, heads, group: B, H, H / Hk.
        query_length, key_length, head_dim, value_dim: Lq, Lk, D, Dv.
        scale: the caller's ``scale``, or its default, scale(d): a factor of c_i.
        lengths: of a cache: int32 [B], how many of its keys each sequence has
            (``loading.sequence_length``); or None.
        page_table: of a cache in pages: int32 [B, 1, 1, n], whose entry i is the page of the
            sequence's keys from i page_size on; or None.
        seed: of dropout, 2^63 + 2 seed + 1; or None.
        drop_below: constexpr; a weight whose 16 random bits are below it is dropped.
        keep_scale: constexpr, what multiplies the weights that are kept.
        page_size: constexpr, keys of a page; 0 without pages.
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
    scaled_query: Array | None
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
        out_extra: what the backward needs beside out, shaped like out, in the memory of ``saved``
            after the first SAVED_VECTORS vectors; or None. It holds

            * of float16 and bfloat16 with an l1 norm, without LASER: the rounding error of out as
              int8, in units of ``weighting.rounding_step``;
            * for LASER: A e^V in float32;
            * in LASER's marked rows: the rounding error of out in float32.

        saved: the saved vectors, float32 [n, B, H, Lq], n = ``saved_vector_count(call)``.
        exact_heads: LASER's, int32 [B, H]: not 0 where the head has marked rows; or None.
        end: a constant; see the module's docstring.
    """

    out: Array
    out_extra: Array | None
    saved: RowArray
    exact_heads: Any
    end: tl.constexpr


class Algebra(NamedTuple):
    """The mechanism, all of it constexpr: a kernel is compiled for each.

    Attributes:
        cosine: cosine similarity, or the dot product.
        length_scale, score_bias, normaliser: as in ``Mechanism``.
        phi: the functions of ``pointwise.py``.
        reweighted: whether there is a power. The normaliser is then l1.
        power: p where it is an integer, at most 32 and the same for all heads. Otherwise 0, and
            ``Inputs`` holds p.
        laser: the logarithm of the weighted mean of e^V instead of the weighted mean of V.
        shifted: whether phi of a row is multiplied by 2^-shift, where the shift follows from the
            row's largest score, against overflow and underflow. Only with an l1 norm: always for
            exp and in float16, for softplus and sigmoid unless scores are bounded
            (``variants.SCORE_BOUND``).
        shift_holds_norm: whether the shift is the logsumexp in the backward, so that phi is the
            weight.
        terms: the number of terms of phi's polynomials (``inputs.TERMS``).
        inputs_are_fp32, inputs_are_fp16: whether query, key and value have this dtype. If neither
            is true, they are bfloat16.
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
    inputs_are_fp32: tl.constexpr
    inputs_are_fp16: tl.constexpr


class Phi(NamedTuple):
    """phi as jit functions. Scores s are in the score unit: multiplied by ``score_unit``.

    Attributes:
        f: (s, shift, algebra) to f = phi 2^-shift, multiplied by ``phi_unit``.
        derivative: (s, shift, algebra) to phi' 2^-shift, not multiplied by ``phi_unit``. phi' is
            always d phi / ds of the score in natural units.
        log: (s, shift, f) to the natural logarithm of f. It is accurate even where f underflows;
            relu and relu6 take it from f, and give -inf where f is 0.
        log_derivative: s to phi' / phi, where phi is too small to be divided by: 1 in the
            exponential tail, 1 / s of relu, 2 / s of relu2.
        has_zeros: constexpr, whether phi is 0 below a score of 0.
        shift: a row's largest s to its shift; None for the default (``pointwise.row_shift``), which
            a phi with zeros may take.
        score_unit: constexpr, the factor of the scores: log2 e for a phi made of exponentials, else
            1.
        phi_unit: constexpr, the factor of phi: log2 e for softplus, else 1.
        zero_at_infinite_shift: constexpr. True if shift = inf makes f 0, which removes rows past
            the end (``backward_rows.load_row_vectors``). False if it would give 0 * inf (softplus).
            Such rows then get shift 0, where f must be finite, and weight_factor = 0 removes them.
    """

    f: Any
    derivative: Any
    log: Any
    log_derivative: Any
    has_zeros: tl.constexpr
    shift: Any = None
    score_unit: tl.constexpr = tl.constexpr(1.0)
    phi_unit: tl.constexpr = tl.constexpr(1.0)
    zero_at_infinite_shift: tl.constexpr = tl.constexpr(True)


class Tiling(NamedTuple):
    """The shape of a kernel's tiles, and how their products are computed; constexpr.

    Attributes:
        BLOCK_Q, BLOCK_K: queries and keys of a tile.
        BLOCK_D, BLOCK_DV: D and Dv, rounded up to powers of two, and to at least 16 (tl.dot).
        dims_fill_tile: whether D and Dv equal BLOCK_D and BLOCK_DV.
        precision: of products of float32 operands: "ieee" or "tf32".
        widen: whether bfloat16 operands are multiplied in float32, as Triton's interpreter needs.
    """

    BLOCK_Q: tl.constexpr
    BLOCK_K: tl.constexpr
    BLOCK_D: tl.constexpr
    BLOCK_DV: tl.constexpr
    dims_fill_tile: tl.constexpr
    precision: tl.constexpr
    widen: tl.constexpr
