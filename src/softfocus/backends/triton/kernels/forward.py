"""The forward: one sweep over the keys, or two where rows are re-weighted: the first for
statistics, the second for weights.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import dropout, laser, loading, masking, products, scoring, weighting
from softfocus.backends.triton.kernels.pointwise import LN2, log2, row_shift


@triton.jit
def forward(inputs, algebra, masks, outputs, tiling):
    """Computes all of ``outputs``, except the rows that it marks for ``laser.exact_forward``. A
    program has BLOCK_Q rows of a head.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first: under a causal mask they take longest
    b, h = tl.program_id(1) // inputs.heads, tl.program_id(1) % inputs.heads
    q_offsets = block * tiling.BLOCK_Q + tl.arange(0, tiling.BLOCK_Q)  # [BLOCK_Q]
    row_heads = tl.zeros_like(q_offsets) + h
    query = loading.load_queries(inputs, b, h, q_offsets, tiling)  # [BLOCK_Q, BLOCK_D]
    # [BLOCK_Q], as scale_in_unit, row_bias, query_rnorm and product_scale
    count = masking.visible_count(masks, inputs, b, h, q_offsets)
    scale_in_unit = scoring.score_scale(inputs, algebra, count, h) * algebra.phi.score_unit
    row_bias = scoring.row_bias_of(inputs, algebra, count, b)
    query_rnorm = scoring.load_query_rnorm(inputs, algebra, b, h, q_offsets)
    query, product_scale = scoring.query_operand(query, query_rnorm, scale_in_unit, inputs, algebra)
    tile_range = masking.key_tile_range(masks, inputs, tiling, b, block)

    # The statistics so far, [BLOCK_Q]
    row_max = tl.full([tiling.BLOCK_Q], float("-inf"), tl.float32)
    smallest_scaled_dot = tl.zeros([tiling.BLOCK_Q], tl.float32)
    shift = tl.zeros([tiling.BLOCK_Q], tl.float32)
    f_sum = tl.zeros([tiling.BLOCK_Q], tl.float32)
    f_sum_error = tl.zeros([tiling.BLOCK_Q], tl.float32)
    power_sum = tl.zeros([tiling.BLOCK_Q], tl.float32)
    # [BLOCK_Q]; not used where rows are not re-weighted, but Triton needs the names
    threshold, inverse_spread, peak = shift, shift, shift
    tied = f_sum > 0.0  # all False
    needs_exact = tied
    # [BLOCK_K], by place in a tile: 1 if some full tile has a large value there. A scalar would
    # need a reduction per tile
    has_large_value = tl.zeros([tiling.BLOCK_K], tl.float32)
    # Re-weighted rows have two sweeps: the first computes statistics, the last the weights. Other
    # rows have only the last sweep, which computes both
    for LAST in tl.static_range(0 if algebra.reweighted else 1, 2):
        if LAST:
            acc = tl.zeros([tiling.BLOCK_Q, tiling.BLOCK_DV], tl.float32)
        if algebra.reweighted and LAST:
            f_sum = compensated(f_sum, f_sum_error)
            largest_f = algebra.phi.f(row_max, shift, algebra)
            threshold, inverse_spread, tied, peak = weighting.row_threshold(algebra, count, f_sum, largest_f)
        for IS_PARTIAL in tl.static_range(1, -1, -1):  # partial tiles first; any order would do
            for n in range(masking.tile_count(masks.key_tiles, tile_range, b, h, block, IS_PARTIAL)):
                k_offsets = scoring.key_offsets(masks, tile_range, b, h, block, n, IS_PARTIAL, tiling)  # [BLOCK_K]
                if LAST:  # load the values before the scores take registers
                    # [BLOCK_K, BLOCK_DV]
                    value = loading.load_value_operand(inputs, b, h, k_offsets, IS_PARTIAL, tiling)
                    value, acc, needs_exact, has_large_value = value_operand_and_checks(
                        value, acc, needs_exact, has_large_value, inputs, algebra, masks, b, h, row_heads,
                        q_offsets, k_offsets, IS_PARTIAL, tiling, numerator=None,
                    )  # fmt: skip
                # s, scaled_dots, numerator [BLOCK_Q, BLOCK_K]; numerator is f or u^p
                _key, _rnorm, s, _visible, scaled_dots = scoring.scores_of_keys(
                    query, inputs, algebra, masks, b, h, q_offsets, k_offsets, product_scale, row_bias, IS_PARTIAL,
                    tiling,
                )  # fmt: skip
                if algebra.reweighted and LAST:
                    numerator = power_of_scores(s, shift, threshold, inverse_spread, tied, inputs, algebra, h)
                    power_sum += tl.sum(numerator, 1)
                else:
                    numerator, row_max, smallest_scaled_dot, shift, f_sum, f_sum_error, rescale = online_statistics(
                        s, scaled_dots, row_max, smallest_scaled_dot, shift, f_sum, f_sum_error, algebra
                    )
                    if LAST and algebra.shifted:
                        acc = acc * rescale[:, None]
                if LAST:
                    if inputs.seed is not None:
                        first = scoring.first_key(masks, tile_range, b, h, block, n, IS_PARTIAL, tiling)
                        kept = dropout.kept(inputs, b, h, q_offsets, first, tiling.BLOCK_K, KEY_AXIS=1)
                        numerator = tl.where(kept, numerator, 0.0)
                    acc += products.dot_weights(numerator, value, algebra, tiling)  # [BLOCK_Q, BLOCK_DV]
    f_sum = nan_if_infinite(f_sum, row_max, smallest_scaled_dot)
    if inputs.seed is not None:
        acc = acc * inputs.keep_scale
    store_results(
        inputs, algebra, outputs, b, row_heads, q_offsets, count, row_max, shift, f_sum, power_sum, peak, acc,
        needs_exact, has_large_value, tiling,
    )  # fmt: skip


@triton.jit
def online_statistics(s, scaled_dots, row_max, smallest_scaled_dot, shift, f_sum, f_sum_error, algebra):
    """f (``Phi.f``) of a tile [BLOCK_Q, BLOCK_K], and the statistics of its rows so far,
    [BLOCK_Q].

    The statistics are the largest score, the smallest scaled dot product (without cosine), the
    shift, the sum of f, and of re-weighted rows the rounding error of that sum. A dot product of
    -inf makes the row NaN, but the largest score does not show it. So the smallest one is kept, too
    (``nan_if_infinite``). The last result, ``rescale`` [BLOCK_Q], multiplies the
    caller's sums over earlier tiles, because the shift may have grown.
    """
    row_max = tl.maximum(row_max, tl.max(s, 1))
    if not algebra.cosine:
        smallest_scaled_dot = tl.minimum(smallest_scaled_dot, tl.min(scaled_dots, 1))
    rescale = f_sum  # not used unless shifted, but Triton needs the name in both branches
    if algebra.shifted:
        before = shift
        shift = row_shift(row_max, algebra)
        # The shift falls only if all phi so far are 0, and 0 times the factor must stay 0, not
        # become 0 * inf
        rescale = tl.exp2(tl.minimum(before - shift, 0.0))
        f_sum = f_sum * rescale
        f_sum_error = f_sum_error * rescale
    f = algebra.phi.f(s, shift[:, None], algebra)
    tile_sum = tl.sum(f, 1)
    if algebra.reweighted:
        f_sum, f_sum_error = two_sum(f_sum, f_sum_error, tile_sum)
    else:
        f_sum += tile_sum
    return f, row_max, smallest_scaled_dot, shift, f_sum, f_sum_error, rescale


@triton.jit
def two_sum(total, error, x):
    """total + x, and ``error`` plus what that addition rounds off (Knuth's TwoSum).

    A running sum over n equal tiles has a relative error of up to n 2^-25, and all roundings may
    have the same sign. Measured, it is up to half of that: with 64 keys per tile it exceeds
    TIE_TOLERANCE from some 70,000 keys on. A row of equal scores would then no longer be tied, and
    its gradients would be divided by a spread that is only rounding.
    """
    result = total + x
    added = result - total
    return result, error + ((total - (result - added)) + (x - added))


@triton.jit
def compensated(total, error):
    """``total`` plus its rounding error, which is NaN where the total is not finite."""
    return total + tl.where(error == error, error, 0.0)


@triton.jit
def nan_if_infinite(f_sum, row_max, smallest_scaled_dot):
    """The sums of f [BLOCK_Q], NaN in rows that see an infinite dot product of query and key or a
    score of +inf, as from a bias of +inf. A bias of -inf alone changes nothing.

    With cosine the reciprocal norm of an infinite query or key is NaN, and so are its scores.
    """
    return tl.where((row_max == float("inf")) | (smallest_scaled_dot == float("-inf")), float("nan"), f_sum)


@triton.jit
def power_of_scores(s, shift, threshold, inverse_spread, tied, inputs, algebra, h):
    """u^p of a tile [BLOCK_Q, BLOCK_K]; f in tied rows. ``h`` as in ``scoring.tile_scores``."""
    f = algebra.phi.f(s, shift[:, None], algebra)
    u = weighting.phi_to_u(f, threshold[:, None], inverse_spread[:, None], algebra)
    return tl.where(tied[:, None], f, weighting.u_to_the_power(u, inputs, algebra, h, MINUS=0))


@triton.jit
def value_operand_and_checks(
    value, acc, needs_exact, has_large_value, inputs, algebra, masks, b, h, row_heads, q_offsets, k_offsets,
    IS_PARTIAL: tl.constexpr, tiling, numerator,
):  # fmt: skip
    """Returns the operand [BLOCK_K, BLOCK_DV] that the weights are multiplied with, values or
    LASER's e^V; then acc [BLOCK_Q, BLOCK_DV], needs_exact [BLOCK_Q] and the flags has_large_value
    [BLOCK_K], updated.

    A row *meets* a key if it sees it, or, with ``numerator``, if it gives it weight. Partial tile:
    ``acc`` becomes NaN in rows that meet a non-finite value. With LASER, ``needs_exact`` becomes
    true in rows that meet a large one. Full tile, with LASER: ``has_large_value`` becomes 1 for
    keys with a large value. A non-finite value needs no check in a full tile, which all rows see:
    the product makes ``acc`` non-finite in every row, and ``store_results`` makes it NaN.

    Args:
        value: [BLOCK_K, BLOCK_DV], a tile of ``inputs.value_operand``: values, or LASER's e^V where
            ``inputs.value_flags`` is given.
        numerator: [BLOCK_Q, BLOCK_K], or None.
        row_heads: the query heads of the rows, [BLOCK_Q].
        h: any of these heads; they share a key head.
    """
    if IS_PARTIAL:
        if algebra.laser:
            key_flags = laser.load_flags(value, inputs, b, h, k_offsets)  # [BLOCK_K]
            largest_flag = tl.max(key_flags, 0)
            nonfinite, has_large_or_nonfinite = largest_flag >= 2.0, largest_flag != 0.0
        else:
            x = value.to(tl.float32)
            zero_or_nan = tl.sum(x - x)
            nonfinite = zero_or_nan != zero_or_nan
            has_large_or_nonfinite = nonfinite
        # A tile with a large or non-finite value is rare, so that visibility is computed again here
        # instead of being kept in registers. meets [BLOCK_Q, BLOCK_K]
        if has_large_or_nonfinite:
            if numerator is None:
                meets = masking.visible(masks, inputs, b, row_heads[:, None], q_offsets[:, None], k_offsets[None, :])
            else:
                meets = numerator != 0.0
            if algebra.laser:
                large = laser.is_large(key_flags)
                needs_exact = needs_exact | (tl.max((meets & large[None, :]).to(tl.int32), 1) > 0)
            if nonfinite:
                acc = _with_nonfinite(acc, meets, inputs, b, h, k_offsets, tiling)
                # The operand must be finite: 0, or 1 where e^V is computed below. Rows that do not
                # meet it have the numerator 0, and acc of the others is NaN
                value = products.finite_or_zero(value)
    elif algebra.laser:
        key_flags = laser.load_flags(value, inputs, b, h, k_offsets)
        has_large_value = tl.maximum(has_large_value, tl.where(laser.is_large(key_flags), 1.0, 0.0))
    if algebra.laser and inputs.value_flags is None:
        value = laser.exponential(value)
    return value, acc, needs_exact, has_large_value


@triton.jit
def _with_nonfinite(acc, meets, inputs, b, h, k_offsets, tiling):
    """acc [BLOCK_Q, BLOCK_DV], with NaN in the columns in which a row meets a non-finite value;
    ``meets`` [BLOCK_Q, BLOCK_K] is as in ``value_operand_and_checks``.
    """
    dv_offsets = tl.arange(0, tiling.BLOCK_DV)  # [BLOCK_DV]
    for c in range(inputs.value_dim):
        pointers = loading.key_pointers(inputs.value, inputs, b, h, k_offsets) + c * inputs.value.stride_d
        value = tl.load(pointers, mask=k_offsets < loading.sequence_length(inputs, b), other=0.0).to(tl.float32)
        nonfinite = (tl.abs(value) < float("inf")) == 0  # [BLOCK_K], as value: column c of the values
        meets_it = tl.max((meets & nonfinite[None, :]).to(tl.int32), 1) > 0  # [BLOCK_Q]
        acc = tl.where(meets_it[:, None] & (dv_offsets[None, :] == c), float("nan"), acc)
    return acc


@triton.jit
def store_results(
    inputs, algebra, outputs, b, row_heads, q_offsets, count, row_max, shift, f_sum, power_sum, peak, acc,
    needs_exact, has_large_value, tiling,
):  # fmt: skip
    """Store ``outputs``, from acc [BLOCK_Q, BLOCK_DV] and vectors [BLOCK_Q]; ``row_heads``
    [BLOCK_Q] are the query heads of the rows. ``has_large_value`` has any length; its maximum
    counts.
    """
    mask = q_offsets < inputs.query_length
    dv_offsets = tl.arange(0, tiling.BLOCK_DV)
    numerator_sum = power_sum if algebra.reweighted else f_sum
    # The product rounds the largest weight, so the sum must, too. A re-weighted row gets no such
    # correction: its largest u^p is 1 up to the float32 rounding of phi_to_u, and so rounds to 1,
    # unless the row is nearly tied (threshold / spread is large). A tied row gets none: out errs by
    # up to half an ulp, as FlashAttention's does
    if not algebra.inputs_are_fp32 and algebra.normaliser == "l1" and not algebra.reweighted:
        dtype = inputs.value_operand.pointer.dtype.element_ty
        numerator_sum = weighting.sum_with_largest_rounded(f_sum, row_max, shift, algebra, dtype)
    if algebra.laser:
        needs_exact = _needs_exact(acc, numerator_sum, f_sum, needs_exact, has_large_value, dv_offsets, inputs)
        tl.store(outputs.exact_heads + b * inputs.heads + row_heads, 1, mask=needs_exact & mask)
        # exp_out [BLOCK_Q, BLOCK_DV] is A e^V; NaN where f_sum is
        exp_out = acc * (weighting.reciprocal_sum(numerator_sum, algebra) + (f_sum - f_sum))[:, None]
        # exp_out becomes 1 (log 1 = 0) in rows without weight, in padding columns, and where it
        # underflowed. Rows where it underflowed are marked, and EXACT replaces them
        exp_out = tl.where((numerator_sum[:, None] == 0.0) | (exp_out <= 0.0), 1.0, exp_out)
        loading.store_like_out(outputs.out_extra, inputs, b, row_heads, q_offsets, mask, exp_out, tiling)
        acc = log2(exp_out, algebra.inputs_are_fp32) * LN2
    else:
        acc = _normalised(acc, numerator_sum, inputs, algebra, count, b)
    acc = acc + (acc - acc) + (f_sum - f_sum)[:, None]  # infinity, of values or products, becomes NaN
    acc = tl.where(count[:, None] > 0.0, acc, 0.0)
    loading.store_like_out(outputs.out, inputs, b, row_heads, q_offsets, mask, acc, tiling)
    if outputs.out_extra is not None and not algebra.laser:
        rounding_steps = weighting.rounding_steps(
            acc, acc.to(outputs.out.pointer.dtype.element_ty).to(tl.float32), algebra
        )
        loading.store_like_out(outputs.out_extra, inputs, b, row_heads, q_offsets, mask, rounding_steps, tiling)
    row_max = tl.where(f_sum == f_sum, row_max, float("nan"))
    log_norm = tl.where(f_sum == 0.0, float("-inf"), tl.log(tl.where(f_sum == 0.0, 1.0, f_sum) / algebra.phi.phi_unit))
    log_norm = log_norm + shift * LN2
    loading.store_vector(outputs.saved, b, row_heads, q_offsets, loading.COUNT, count, mask)
    loading.store_vector(
        outputs.saved, b, row_heads, q_offsets, loading.MAXIMUM, row_max / algebra.phi.score_unit, mask
    )
    loading.store_vector(outputs.saved, b, row_heads, q_offsets, loading.LOG_NORM, log_norm, mask)
    loading.store_vector(outputs.saved, b, row_heads, q_offsets, loading.PEAK, peak, mask)
    loading.store_vector(outputs.saved, b, row_heads, q_offsets, loading.F_SUM, f_sum, mask)
    loading.store_vector(outputs.saved, b, row_heads, q_offsets, loading.POWER_SUM, power_sum, mask)
    loading.store_vector(outputs.saved, b, row_heads, q_offsets, loading.MARK, needs_exact.to(tl.float32), mask)
    loading.store_vector(outputs.saved, b, row_heads, q_offsets, loading.MAXIMUM_IN_UNIT, row_max, mask)


@triton.jit
def _needs_exact(acc, numerator_sum, f_sum, needs_exact, has_large_value, dv_offsets, inputs):
    """Which rows LASER marks [BLOCK_Q]: those of ``needs_exact``, those that see a large value, and
    those whose sum in some column of ``acc`` is small.
    """
    lowest = tl.min(tl.where(dv_offsets[None, :] < inputs.value_dim, acc, float("inf")), 1)  # [BLOCK_Q]
    large = tl.zeros_like(numerator_sum) + tl.max(has_large_value, 0)  # [BLOCK_Q]
    # The sum counts as at least 1. Where the shift is 0 or there is none (relu; softplus and
    # sigmoid) it may be less, and the products themselves may underflow
    needs_exact = needs_exact | (large > 0.0) | (lowest < laser.SMALL_SUM * tl.maximum(numerator_sum, 1.0))
    # Rows without weight and NaN rows have nothing to compute again. power_sum of 16-bit dtypes
    # hides a NaN; f_sum has it
    return needs_exact & (numerator_sum > 0.0) & (f_sum == f_sum)


@triton.jit
def _normalised(acc, numerator_sum, inputs, algebra, count, b):
    """acc [BLOCK_Q, BLOCK_DV], divided by numerator_sum or multiplied by the row's factor."""
    if algebra.reweighted or algebra.normaliser == "l1":
        if algebra.phi.has_zeros:  # the reciprocal of a small sum of such phi may overflow
            divisor = tl.where(numerator_sum == 0.0, 1.0, numerator_sum)[:, None]
            divisor = tl.broadcast_to(divisor, acc.shape)  # [BLOCK_Q, BLOCK_DV]
            if algebra.inputs_are_fp32:
                acc = tl.div_rn(acc, divisor)
            else:
                acc = acc / divisor
        else:
            acc = acc * weighting.reciprocal_sum(numerator_sum, algebra)[:, None]
    else:
        acc = acc * (weighting.row_factor(inputs, algebra, count, b) / algebra.phi.phi_unit)[:, None]
    return acc
