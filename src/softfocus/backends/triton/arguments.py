"""What the kernels are handed: tensors as places with strides, and the algebra as compile-time constants.

A tuple that holds tuples ends with a constant: Triton 3.6 otherwise forgets, in loops, the constants in those (a stride of 1).
"""

from typing import Any, NamedTuple

import triton.language as tl


class Array(NamedTuple):
    """A tensor [B, H, L, D]: where it lies, and strides in elements, 0 where it is broadcast."""

    at: Any
    b: Any
    h: Any
    l: Any
    d: Any


class Sight(NamedTuple):
    """Who sees whom: ``softfocus.visibility.Visibility``.

    Attributes:
        left, right: the window; meaningless where it has no such side.
        offset: the key position of query 0.
        mask: bool [B, H, Lq, Lk] as bytes, or None.
        key_mask: bool [B, 1, 1, Lk] as bytes, or None.
        documents: integers [B, 1, 1, Lk], or None.
        counts: N_i, int32 [B, H, Lq, 1], or None where the window alone says it.
        tiles, tiles_of_keys: which tiles to visit, row block by row block and key block by key block; None as ``counts``.
        has_left, has_right: constexpr, whether the window has these sides.
    """

    left: Any
    right: Any
    offset: Any
    mask: Array | None
    key_mask: Array | None
    documents: Array | None
    counts: Array | None
    tiles: "Tiles | None"
    tiles_of_keys: "Tiles | None"
    has_left: tl.constexpr
    has_right: tl.constexpr


class Tiles(NamedTuple):
    """For each block of one side, the tiles of the other that it meets: those that a mask cuts, and those that it does not.

    Attributes:
        cut, whole: int32 [B, H, blocks, most].
        cuts, wholes: how many of them count, int32 [B, H, blocks, 1].
        end: see above.
    """

    cut: Array
    cuts: Array
    whole: Array
    wholes: Array
    end: tl.constexpr


class Problem(NamedTuple):
    """One call's tensors and sizes.

    Attributes:
        query, key, value: [B, H, L, D]; in pages, key and value are [pages, Hk, page size, D].
        mixed: like value, what the weights are multiplied with: LASER's e^V, made once where keys are met more than once.
        flaws: LASER's, with that: of each key 0, 1 where a value is beyond its HIGH, NaN where one is not finite; or None.
        query_norm, key_norm: 1 / |q|, 1 / |k|, float32 [B, H, L, 1], or None without cosine; the latter also where the kernel
            makes it of the keys that it reads.
        unit_key, unit_query: k / |k| and c q / |q| in float16, where scores are products of such; or None.
        slope_key, slope_query: the same in the dtype of the call: what dL/ds is multiplied with.
        bias: added to the scores, or None.
        head_scale, power: float32 [H], or None.
        heads, group, batch: H, H / Hk, B.
        query_length, key_length, head_dim, value_dim: Lq, Lk, D, Dv.
        scale: the d-dependent factor of the scores.
        lengths: of a cache: int32 [B], how many of its keys each sequence has (``sight.length_of``); or None.
        pages: of a cache in pages: int32 [B, 1, 1, n], which page holds which keys; or None.
        seed: of dropout, 2^63 + 2 seed + 1; or None.
        dropped: constexpr, weights whose 16 bits are less are dropped.
        growth: constexpr, what multiplies the others.
        page_size: constexpr.
    """

    query: Array
    key: Array
    value: Array
    mixed: Array
    flaws: Array | None
    query_norm: Array | None
    key_norm: Array | None
    unit_key: Array | None
    unit_query: Array | None
    slope_key: Array | None
    slope_query: Array | None
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
    pages: Array | None
    seed: Any
    dropped: tl.constexpr
    growth: tl.constexpr
    page_size: tl.constexpr


class Made(NamedTuple):
    """What the forward makes.

    Attributes:
        out: [B, H, Lq, Dv].
        rest: like out, for the backward: of LASER e^-out, in marked rows what the rounding of out leaves; else what it
            leaves, in ``rows.step`` s. Or None.
        saved: vectors of the rows, float32 [rows_kept, B, H, Lq].
        marked_heads: LASER's, int32 [B, H]: not 0 where rows of the head are marked; or None.
        end: see above.
    """

    out: Array
    rest: Array | None
    saved: Array
    marked_heads: Any
    end: tl.constexpr


class Algebra(NamedTuple):
    """The mechanism, all of it constexpr: a kernel is compiled for each.

    Attributes:
        cosine: cosine similarity instead of the dot product.
        length_scale, score_bias, normaliser: as in ``Mechanism``.
        phi: the functions of ``pointwise.py``.
        sharp: re-weighting.
        power: p where it is whole, at most 32 and the same for all heads; otherwise it stands in the problem.
        laser: the logarithm of the mean of e^V in place of the mean of V.
        shifted: whether phi of a row is scaled by a power of two, which its largest score gives, where phi would overflow or
            vanish.
        folded: whether it is the logarithm of the whole sum in the backward, so that phi is the weight.
        terms: of phi's polynomials.
        narrow: whether what is multiplied has the range of float16.
    """

    cosine: tl.constexpr
    length_scale: tl.constexpr
    score_bias: tl.constexpr
    normaliser: tl.constexpr
    phi: "Phi"
    sharp: tl.constexpr
    power: tl.constexpr
    laser: tl.constexpr
    shifted: tl.constexpr
    folded: tl.constexpr
    terms: tl.constexpr
    narrow: tl.constexpr


class Phi(NamedTuple):
    """Jit functions.

    Attributes:
        value, slope: phi 2^-shift in its unit, and its slope times 2^-shift, from scores in theirs.
        log: the value's logarithm, from score, shift and value; also where the value is too small for a float.
        rate: slope over value of a score above which it is large beside its own, and the value may be too small for a float.
        shift: of a row, from its largest score.
        vanishes: constexpr, whether phi is 0 below a score of 0.
        score_unit, unit: constexpr, what scores and phi are multiplied by.
    """

    value: Any
    slope: Any
    log: Any
    rate: Any
    shift: Any
    vanishes: tl.constexpr
    score_unit: tl.constexpr
    unit: tl.constexpr


class Blocks(NamedTuple):
    """The shape of a kernel's tiles, constexpr.

    Attributes:
        rows, keys: of a tile.
        head_dim, value_dim: D and Dv, rounded up to what the tensor cores multiply.
        whole: whether they were that already.
        precision: of float32 products: "ieee", "tf32x3" or "tf32".
        widen: half operands are multiplied in float32, as Triton's interpreter needs.
    """

    rows: tl.constexpr
    keys: tl.constexpr
    head_dim: tl.constexpr
    value_dim: tl.constexpr
    whole: tl.constexpr
    precision: tl.constexpr
    widen: tl.constexpr
