"""What the backward's kernels share: which rows they compute, grad_out and delta, and the row
vectors.

No kernel needs an atomic: each program owns the memory that it writes. query_gradients runs first.
With LASER each kernel has two variants: EXACT computes the rows that the forward marked, the other
variant computes all other rows. EXACT runs second. It replaces its rows of grad_query, and adds to
grad_key, grad_value and grad_bias.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import laser, loading, weighting

ROW_VECTORS = (9, 11)
"""The number of row vectors that query_gradients writes for the other kernels: MEAN_GRAD to DELTA
below, and with LASER the two of its EXACT variant. Index 0: without LASER. Index 1: with LASER.

The other kernels load them for each tile. In key_gradients the tile is [BLOCK_K, BLOCK_Q]: a row
vector is broadcast over the keys, and takes as many registers of a thread as one row of the tile.
``load_row_vectors`` therefore loads only the vectors that the algebra needs.
"""
MEAN_GRAD, PRODUCT_SCALE, ROW_BIAS, SHIFT, THRESHOLD, INVERSE_SPREAD, WEIGHT_FACTOR, GRAD_FACTOR_OVER_UNIT, DELTA = (
    tl.constexpr(n) for n in range(9)
)
"""Indices of the row vectors. PRODUCT_SCALE is c_i, with cosine times the mantissa of 1 / |q_i|.
ROW_BIAS is the row bias. Both are in the score unit. SHIFT to DELTA are the fields of GradientRow,
``grad_factor`` over the score unit. Without re-weighting THRESHOLD is ``zero_grad_above``. In
LASER's marked rows all are 0 but PRODUCT_SCALE, ROW_BIAS and SHIFT. In key_gradients only EXACT
loads the marks: in the other variant these rows add nothing, and no load waits for their marks.
"""
EXACT_MEAN_GRAD, EXACT_DELTA = tl.constexpr(9), tl.constexpr(10)
"""Of the marked rows: o_i times the mean of dL/df, and delta. dL/df has all factors of the row,
while the g of MEAN_GRAD lacks those of ``grad_factor`` (``weighting.GradientRow``).
"""


@triton.jit
def active_rows(outputs, inputs, algebra, b, h, q_offsets, EXACT: tl.constexpr):
    """Whether this variant computes each row, bool [BLOCK_Q]: EXACT computes the rows that the
    forward marked, the other variant the rest.
    """
    active = q_offsets < inputs.query_length
    if algebra.laser:
        active = active & ((laser.load_marks(outputs.saved, inputs, b, h, q_offsets) > 0.0) == EXACT)
    return active


@triton.jit
def laser_grad_exp_out(grad_out, outputs, inputs, b, h, q_offsets, active, tiling):
    """LASER's dL/d(A e^V) [BLOCK_Q, BLOCK_DV] in the dtype of the products, 0 in rows that are not
    active; and delta [BLOCK_Q].

    delta is computed from the rounded gradient. Where one key dominates a row, dL/dA - delta is
    smaller than this rounding, and the rounding cancels.
    """
    # grad_tile, exp_out, mask, grad_exp_out [BLOCK_Q, BLOCK_DV]. exp_out is A e^V, except in marked
    # rows, which are not active here
    grad_tile = loading.load_like_out(grad_out, inputs, b, h, q_offsets, tiling)
    exp_out = loading.load_like_out(outputs.out_extra, inputs, b, h, q_offsets, tiling)
    # exp_out is stored as 1 in rows without weight, so that grad_exp_out is finite there. Their
    # weights of 0 remove it again. NaN outputs fail exp_out > 0 and pass no gradient
    mask = (exp_out > 0.0) & active[:, None]
    grad_exp_out = laser.exponential_operand(tl.where(mask, grad_tile.to(tl.float32) / exp_out, 0.0), grad_tile.dtype)
    return grad_exp_out, tl.sum(tl.where(mask, grad_exp_out.to(tl.float32) * exp_out, 0.0), 1)


@triton.jit
def load_delta(grad_out, outputs, inputs, algebra, b, h, q_offsets, tiling):
    """delta [BLOCK_Q], from grad_out and out.

    For LASER's marked rows it is the sum of grad_out: out is a logsumexp, whose terms' shares sum
    to one in each column.
    """
    # grad_tile, out_tile, rounding_steps [BLOCK_Q, BLOCK_DV]; rounding_steps are the rounding error
    # of out (``weighting.rounding_steps``)
    grad_tile = loading.load_like_out(grad_out, inputs, b, h, q_offsets, tiling).to(tl.float32)
    out_tile = loading.load_like_out(outputs.out, inputs, b, h, q_offsets, tiling).to(tl.float32)
    if algebra.laser:
        return tl.sum(tl.where(out_tile == out_tile, grad_tile, 0.0), 1)
    if outputs.out_extra is not None:
        rounding_steps = loading.load_like_out(outputs.out_extra, inputs, b, h, q_offsets, tiling).to(tl.float32)
        out_tile += rounding_steps * weighting.rounding_step(out_tile, algebra)
    return tl.sum(grad_tile * out_tile, 1)


@triton.jit
def load_row_vectors(row_vectors, algebra, b, h, q_offsets, active, EXACT: tl.constexpr):
    """The row vectors [BLOCK_Q] that query_gradients wrote: (mean_grad, product_scale, row_bias,
    GradientRow). EXACT needs no other field of GradientRow than delta and ``grad_factor``.

    Rows that are not active: all 0. Exception: with ``algebra.shifted``, not EXACT, the shift is
    inf, so that f is 0; for softplus it is 0, and weight_factor = 0 removes f.

    ``product_scale`` is in the score unit, and ``grad_factor`` is divided by that unit. Both are
    factors of grad_key. Scores need ``product_scale`` alone.
    """
    zeros = tl.zeros(q_offsets.shape, tl.float32)
    mean_grad, row_bias, shift, delta = zeros, zeros, zeros, zeros
    threshold, zero_grad_above, inverse_spread = zeros, zeros, zeros
    product_scale = loading.load_vector(row_vectors, b, h, q_offsets, PRODUCT_SCALE, active, 0.0)
    if algebra.score_bias != "0":
        row_bias = loading.load_vector(row_vectors, b, h, q_offsets, ROW_BIAS, active, 0.0)
    if EXACT:  # ``laser.gradients_of_marked`` includes all factors of the row
        weight_factor, grad_factor = zeros, tl.where(active, 1.0 / algebra.phi.score_unit, 0.0)
        if algebra.reweighted:
            mean_grad = loading.load_vector(row_vectors, b, h, q_offsets, EXACT_MEAN_GRAD, active, 0.0)
        if algebra.normaliser == "l1":
            delta = loading.load_vector(row_vectors, b, h, q_offsets, EXACT_DELTA, active, 0.0)
    else:
        weight_factor = loading.load_vector(row_vectors, b, h, q_offsets, WEIGHT_FACTOR, active, 0.0)
        grad_factor = loading.load_vector(row_vectors, b, h, q_offsets, GRAD_FACTOR_OVER_UNIT, active, 0.0)
        if algebra.shifted:
            # In key_gradients rows past the end must add nothing. The infinite shift makes their f
            # 0, also with ``shift_holds_norm``, where weight_factor is not applied. bias_gradients
            # masks rows that are not active
            inactive_shift: tl.constexpr = float("inf") if algebra.phi.zero_at_infinite_shift else 0.0
            shift = loading.load_vector(row_vectors, b, h, q_offsets, SHIFT, active, inactive_shift)
        if algebra.reweighted:
            mean_grad = loading.load_vector(row_vectors, b, h, q_offsets, MEAN_GRAD, active, 0.0)
            inverse_spread = loading.load_vector(row_vectors, b, h, q_offsets, INVERSE_SPREAD, active, 0.0)
            threshold = loading.load_vector(row_vectors, b, h, q_offsets, THRESHOLD, active, 0.0)
        elif algebra.phi.has_zeros and algebra.normaliser == "l1":
            zero_grad_above = loading.load_vector(row_vectors, b, h, q_offsets, THRESHOLD, active, 0.0)
        if algebra.normaliser == "l1":
            delta = loading.load_vector(row_vectors, b, h, q_offsets, DELTA, active, 0.0)
    row = weighting.GradientRow(shift, threshold, zero_grad_above, inverse_spread, weight_factor, grad_factor, delta)
    return mean_grad, product_scale, row_bias, row


@triton.jit
def store_row_vectors(
    row_vectors, algebra, mean_grad, product_scale, row_bias, row, grad_factor, b, h, q_offsets, mask, active,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Store the row vectors [BLOCK_Q] for the other kernels; ``row.grad_factor`` is replaced by
    ``grad_factor``. The rows of ``mask`` [BLOCK_Q] are stored. ``active`` [BLOCK_Q] are the rows
    that this variant computes (``active_rows``).
    """
    threshold = row.threshold if algebra.reweighted else row.zero_grad_above
    inverse_spread, weight_factor, delta = row.inverse_spread, row.weight_factor, row.delta
    if EXACT:
        loading.store_vector(row_vectors, b, h, q_offsets, EXACT_MEAN_GRAD, mean_grad, mask)
        loading.store_vector(row_vectors, b, h, q_offsets, EXACT_DELTA, delta, mask)
    else:
        if algebra.laser:
            mean_grad, threshold = tl.where(active, mean_grad, 0.0), tl.where(active, threshold, 0.0)
            inverse_spread = tl.where(active, inverse_spread, 0.0)
            weight_factor, grad_factor = tl.where(active, weight_factor, 0.0), tl.where(active, grad_factor, 0.0)
            delta = tl.where(active, delta, 0.0)
        loading.store_vector(row_vectors, b, h, q_offsets, MEAN_GRAD, mean_grad, mask)
        loading.store_vector(row_vectors, b, h, q_offsets, PRODUCT_SCALE, product_scale, mask)
        loading.store_vector(row_vectors, b, h, q_offsets, ROW_BIAS, row_bias, mask)
        loading.store_vector(row_vectors, b, h, q_offsets, SHIFT, row.shift, mask)
        loading.store_vector(row_vectors, b, h, q_offsets, THRESHOLD, threshold, mask)
        loading.store_vector(row_vectors, b, h, q_offsets, INVERSE_SPREAD, inverse_spread, mask)
        loading.store_vector(row_vectors, b, h, q_offsets, WEIGHT_FACTOR, weight_factor, mask)
        loading.store_vector(row_vectors, b, h, q_offsets, GRAD_FACTOR_OVER_UNIT, grad_factor, mask)
        loading.store_vector(row_vectors, b, h, q_offsets, DELTA, delta, mask)


@triton.jit
def store_or_add(pointers, x, mask, ADD: tl.constexpr):
    """Store x, shaped like ``pointers`` and ``mask``, or add it to what the memory holds."""
    if ADD:
        x += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)
