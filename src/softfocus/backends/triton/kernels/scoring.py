"""Scores of a tile: s = c_i similarity(q_i, k_j) + b_i + b_ij. All kernels use these functions. In
re-weighted float32 rows their scores are bitwise equal, except those of decoding.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import loading, masking, norms, pointwise, products

LOG_512 = tl.constexpr(6.238324625039508)
LARGEST_BIAS = tl.constexpr(2.35e38)
"""Where scores are in units of log 2, the magnitude of a finite bias is first limited to this, in
natural units. Times log2 e it is 3.39e38, which float32 holds, and leaves room for the other terms
of a score. finfo.min of float32 and bfloat16, which models write for "hidden", would become -inf.
"""


@triton.jit
def base_scale(inputs, algebra, count):
    """c_i without the head scale [BLOCK_Q]: scale(d) · length_scale."""
    factor = tl.zeros_like(count) + inputs.scale
    log_n = tl.log(tl.maximum(count, 1.0))
    if algebra.length_scale == "log(N)":
        factor = factor * log_n
    elif algebra.length_scale == "log512(N)":
        factor = factor * (log_n / LOG_512)
    elif algebra.length_scale != "1":
        tl.static_assert(False, "length_scale is not known")
    return factor


@triton.jit
def score_scale(inputs, algebra, count, h):
    """c_i [BLOCK_Q], in natural units. Times ``score_unit`` it is ``scale_in_unit``. h is a head,
    or the head of each row.
    """
    factor = base_scale(inputs, algebra, count)
    if inputs.head_scale is not None:
        factor = factor * tl.load(inputs.head_scale + h)
    return factor


@triton.jit
def row_bias_of(inputs, algebra, count, b):
    """b_i [BLOCK_Q], in the score unit."""
    row_bias = tl.zeros_like(count)
    if algebra.score_bias == "-log(N)":
        row_bias = -tl.log(tl.maximum(count, 1.0))
    elif algebra.score_bias == "-log(L)":
        row_bias = row_bias - tl.log(tl.zeros_like(count) + loading.sequence_length(inputs, b))
    elif algebra.score_bias != "0":
        tl.static_assert(False, "score_bias is not known")
    return row_bias * algebra.phi.score_unit


@triton.jit
def load_query_rnorm(inputs, algebra, b, h, q_offsets):
    """1 / |q_i| [BLOCK_Q]; without cosine 0, which nothing uses."""
    rnorm = tl.zeros(q_offsets.shape, tl.float32)
    if algebra.cosine:
        rnorm = loading.load_column(inputs.query_rnorm, b, h, q_offsets, inputs.query_length)
    return rnorm


@triton.jit
def query_operand(query, rnorm, scale_in_unit, inputs, algebra):
    """The query operand [BLOCK_Q, BLOCK_D] of the dot products with keys, and product_scale
    [BLOCK_Q], which turns these dot products into scores.

    ``scale_in_unit`` [BLOCK_Q] is c_i in the score unit, ``rnorm`` [BLOCK_Q] is 1 / |q_i|.
    product_scale is ``scale_in_unit``, with cosine times the mantissa of ``rnorm``. With unit
    vectors, where ``inputs.unit_key_fp16`` is given, the operand includes product_scale, and
    ``tile_scores`` ignores the returned one.
    """
    product_scale = scale_in_unit
    if algebra.cosine:
        query, mantissa = norms.scaled_operand(query, rnorm)
        product_scale = scale_in_unit * mantissa
    if inputs.unit_key_fp16 is not None:
        query = (query.to(tl.float32) * product_scale[:, None]).to(tl.float16)
    return query, product_scale


@triton.jit
def load_score_keys(inputs, algebra, b, h, k_offsets, IS_PARTIAL: tl.constexpr, tiling):
    """The key operand [BLOCK_K, BLOCK_D] of the dot products with queries, and with cosine 1 / |k|
    [BLOCK_K].
    """
    rnorm = k_offsets.to(tl.float32)  # not used without cosine, but Triton needs the name in both branches
    if inputs.unit_key_fp16 is not None:
        key = loading.load_tile(
            inputs.unit_key_fp16, inputs, b, h, k_offsets, inputs.head_dim, tiling.BLOCK_D, IS_PARTIAL, tiling
        )
    else:
        key = loading.load_keys(inputs, b, h, k_offsets, IS_PARTIAL, tiling)
    if algebra.cosine:
        if inputs.key_rnorm is None:
            rnorm = norms.reciprocal_norm(key.to(tl.float32))
        else:
            rnorm = loading.load_column(inputs.key_rnorm, b, h // inputs.group, k_offsets, inputs.key_length)
    return key, rnorm


@triton.jit
def first_key(masks, tile_range, b, h, block, n, IS_PARTIAL: tl.constexpr, tiling):
    """The first key of a block's n-th tile: of the partial ones if IS_PARTIAL, else full ones."""
    return masking.tile_index(masks.key_tiles, tile_range, b, h, block, n, IS_PARTIAL) * tiling.BLOCK_K


@triton.jit
def key_offsets(masks, tile_range, b, h, block, n, IS_PARTIAL: tl.constexpr, tiling):
    """The keys [BLOCK_K] of the tile whose first key is ``first_key``."""
    return first_key(masks, tile_range, b, h, block, n, IS_PARTIAL, tiling) + tl.arange(0, tiling.BLOCK_K)


@triton.jit
def tile_scores(
    dots, inputs, algebra, masks, b, h, q_offsets, k_offsets, product_scale, rnorm, row_bias,
    IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in the score unit, -inf where masked; whether they are visible; and
    scaled_dots, the dot products with their scale but no bias, 0 where masked. All three are shaped
    like ``dots``.

    A -inf in scaled_dots is an infinite dot product, because masked ones are 0 there. A -inf in the
    scores may also be a masked score. ``forward.nan_if_infinite`` needs the difference.

    Args:
        dots: dot products of queries and keys, [BLOCK_Q, BLOCK_K] or [BLOCK_K, BLOCK_Q].
        h: the query head, or the head of each row, which broadcasts to ``dots``.
        q_offsets, k_offsets, product_scale, rnorm, row_bias: vectors that broadcast to ``dots``.
            The dot products are multiplied by ``product_scale`` and ``rnorm`` (1 / |k|, or its
            mantissa), unless they are those of unit vectors, which include both.
    """
    s = dots
    if inputs.unit_key_fp16 is None:
        s = pointwise.unfused_product(s, product_scale, algebra)
        if algebra.cosine:
            s = pointwise.unfused_product(s, rnorm, algebra)
    scaled_dots = s
    if algebra.score_bias != "0":
        s = s + row_bias
    if inputs.bias is not None:
        offsets = q_offsets.to(tl.int64) * inputs.bias.stride_l + k_offsets.to(tl.int64) * inputs.bias.stride_d
        mask = (q_offsets < inputs.query_length) & (k_offsets < inputs.key_length)
        bias = tl.load(loading.head_pointer(inputs.bias, b, h) + offsets, mask=mask, other=0.0).to(tl.float32)
        if algebra.phi.score_unit != 1.0:
            clamped = tl.minimum(tl.maximum(bias, -LARGEST_BIAS), LARGEST_BIAS)
            bias = tl.where(tl.abs(bias) < float("inf"), clamped, bias)  # NaN and infinities stay
        s += pointwise.unfused_product(bias, algebra.phi.score_unit, algebra)
    visible = tl.full(s.shape, True, tl.int1)
    if IS_PARTIAL:
        visible = masking.visible(masks, inputs, b, h, q_offsets, k_offsets)
        s = tl.where(visible, s, float("-inf"))
        scaled_dots = tl.where(visible, scaled_dots, 0.0)
    return s, visible, scaled_dots


@triton.jit
def scores_of_keys(
    query, inputs, algebra, masks, b, h, q_offsets, k_offsets, product_scale, row_bias, IS_PARTIAL: tl.constexpr, tiling
):
    """The key operand [BLOCK_K, BLOCK_D], 1 / |k| [BLOCK_K], and what ``tile_scores`` returns,
    [BLOCK_Q, BLOCK_K]. ``product_scale`` and ``row_bias`` are [BLOCK_Q].
    """
    key, key_rnorm = load_score_keys(inputs, algebra, b, h, k_offsets, IS_PARTIAL, tiling)
    s, visible, scaled_dots = tile_scores(
        products.dot(query, tl.trans(key), tiling), inputs, algebra, masks, b, h, q_offsets[:, None],
        k_offsets[None, :], product_scale[:, None], key_rnorm[None, :], row_bias[:, None], IS_PARTIAL,
    )  # fmt: skip
    return key, key_rnorm, s, visible, scaled_dots
