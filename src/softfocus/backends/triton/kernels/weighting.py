"""Weights of a tile from its scores: threshold, u^p, and what the backward needs of a row to
compute the weights again.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import loading, pointwise, products

MAX_UNTHRESHOLDED_COUNT = tl.constexpr(3)
"""As in ``softfocus.mechanism``: the largest N_i of a row without threshold."""
LARGE_POWER = tl.constexpr(12.0)
"""``gradient_row`` takes the gradients of a row as 0 where its sum of u^p equals its largest term.
Smaller terms may be lost in that sum, and their gradients, which u^(p - 1) multiplies, are
negligible only for a p at or above this: there u^(p - 1) is below 2^-22 where u^p is below 2^-24.
"""
TIE_TOLERANCE = tl.constexpr(128.0 * 2.0**-23)
"""``softfocus.mechanism.TIE_EPS`` eps of float32."""


@triton.jit
def row_factor(inputs, algebra, count, b):
    """What multiplies phi [BLOCK_Q] where no row sum divides it."""
    factor = tl.full(count.shape, 1.0, tl.float32)
    if algebra.normaliser == "1/N":
        factor = 1.0 / tl.maximum(count, 1.0)
    elif algebra.normaliser == "1/sqrt(N/2)":
        factor = 1.0 / tl.sqrt(tl.maximum(count, 1.0) / 2.0)
    elif algebra.normaliser == "1/L":
        factor = factor / (tl.zeros_like(factor) + loading.sequence_length(inputs, b))
    elif algebra.normaliser != "none":
        tl.static_assert(False, "normaliser is not known")
    return factor


@triton.jit
def reciprocal_sum(total, algebra):
    """1 / total, or 1 where total is 0; total is the sum of phi or u^p of a row.

    In float32 it is correctly rounded: where one key dominates a row, delta must equal that key's
    dL/dA.
    """
    total = tl.where(total == 0.0, 1.0, total)
    if algebra.inputs_are_fp32:
        result = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)
    else:
        result = 1.0 / total
    return result


@triton.jit
def sum_with_largest_rounded(f_sum, row_max, shift, algebra, dtype):
    """The sum of phi [BLOCK_Q], with its largest term rounded as the product with the values rounds
    it: to ``dtype``, or for LASER in float16 to tf32.

    The product rounds each f. Where one key dominates a row, its rounding must cancel in
    out = acc / sum: dL/dA - delta, where delta is computed from out, is smaller than that rounding.
    The sum therefore takes the rounded largest term, too. The roundings of many equal f do
    not cancel: out errs by up to half an ulp of ``dtype``, as FlashAttention's does. Only the
    division, and LASER's test for marked rows, use this sum. The saved F_SUM is not rounded so.
    """
    largest_f = algebra.phi.f(row_max, shift, algebra)
    rounded = products.to_operand_dtype(largest_f, dtype, algebra.inputs_are_fp16 and algebra.laser)
    return f_sum + (rounded.to(tl.float32) - largest_f)


@triton.jit
def head_power(inputs, algebra, h):
    """p of head h, or of the head of each row.

    ``algebra.power`` is an integer up to 32. Any other p, and a p for each head, is in
    ``inputs.power``.
    """
    if inputs.power is None:
        power = algebra.power
    else:
        power = tl.load(inputs.power + h)
    return power


@triton.jit
def u_to_the_power(u, inputs, algebra, h, MINUS: tl.constexpr):
    """u^(p - MINUS) of any shape, 0 where u is 0; MINUS is 0 or 1.

    u^(p - 1) is a factor of dA/du. For p = 1 it is 1, but 0 at u = 0: u = relu(..) does not depend
    on a phi below the threshold.
    """
    if inputs.power is None and algebra.power > MINUS:
        result = pointwise.whole_power(u, algebra.power - MINUS)
    elif inputs.power is None:  # algebra.power is at least 1: p - MINUS is 0
        result = tl.where(u == 0.0, 0.0, 1.0)
    else:
        result = tl.where(
            u == 0.0, 0.0, pointwise.any_power(u, tl.load(inputs.power + h) - MINUS, algebra.inputs_are_fp32)
        )
    return result


@triton.jit
def row_threshold(algebra, count, f_sum, largest_f):
    """(threshold, 1 / spread, tied, peak) of rows [BLOCK_Q], from the sum and the largest f of
    each; eq. 5 of arXiv 2501.13428.

    u = (f - threshold) / spread. Tied rows keep their l1 weights.
    """
    threshold_on = tl.where(count > MAX_UNTHRESHOLDED_COUNT, 1.0, 0.0)
    # float32 rounds correctly: the approximate division errs by two ulps, and u^p multiplies that
    # by p.
    # 1 / spread may be approximate: its error is a factor of the row, and cancels in A
    if algebra.inputs_are_fp32:
        mean = tl.div_rn(f_sum, tl.maximum(count, 1.0))
        largest_share = tl.div_rn(largest_f, tl.where(mean == 0.0, 1.0, mean))
    else:
        mean = f_sum / tl.maximum(count, 1.0)
        largest_share = largest_f / tl.where(mean == 0.0, 1.0, mean)
    threshold = threshold_on * mean
    peak = tl.maximum(largest_share - threshold_on, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tied = peak <= TIE_TOLERANCE
    return threshold, 1.0 / tl.where(tied, 1.0, largest_f - threshold), tied, peak


@triton.jit
def phi_to_u(f, threshold, inverse_spread, algebra):
    """u, at least 0, shaped like f: a tile [BLOCK_Q, BLOCK_K] or [BLOCK_K, BLOCK_Q], or [BLOCK_Q].
    The vectors of the rows, threshold and inverse_spread, broadcast to it.

    For 16-bit dtypes u is computed in one instruction, which also limits it to 1. That instruction
    uses the rounded threshold / spread. This extra rounding is smaller than that of the dtype.
    """
    if algebra.inputs_are_fp32:
        u = tl.maximum((f - threshold) * inverse_spread, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        u = pointwise.saturated(f, inverse_spread, threshold * -inverse_spread)
    return u


class GradientRow(NamedTuple):
    """The backward's constants of its rows: vectors [BLOCK_Q], or ``expanded`` to broadcast to a
    tile.

    Let phi_s = phi 2^-shift. ``Phi.f`` returns f = phi_unit phi_s. Without re-weighting

        A = weight_factor f
        dL/dphi_s = grad_factor (dL/dA - delta)

    With re-weighting, where u = max(f - threshold, 0) |inverse_spread|,

        A = weight_factor u^p
        dL/dphi_s = grad_factor (g - mean_grad),   g = (dL/dA - delta) u^(p-1)

    This g, and with it mean_grad = o_i mean_j g_ij, lacks the factor p / sum_j u_ij^p of dL/du_ij,
    which grad_factor includes. mean_grad is not a field: query_gradients computes it, from all
    keys. In a tile, dL/ds = dL/dphi_s phi' 2^-shift. ``Phi.derivative`` returns phi' 2^-shift.

    Attributes:
        shift: of phi, as in the forward; where ``algebra.shift_holds_norm`` the logsumexp, in the
            score unit, so that f is the weight.
        threshold: of re-weighted rows: what is subtracted from f, 0 in tied rows.
        zero_grad_above: without re-weighting, for a phi with zeros and an l1 norm: a key with f
            above it has the gradient 0. It is half the largest f of a row in which one key has all
            the weight, else inf. The row vector THRESHOLD holds one of these two fields.
        inverse_spread: of re-weighted rows. Its sign says whether the row is tied (``is_tied``),
            which saves a row vector. In a tied row it is -1 over the largest f, and p is 1.
        weight_factor: 0 in fully masked rows.
        grad_factor: as in the formulas above; ``load_row_vectors`` returns it over the score unit.
            0 where one key has all the weight: its gradient is 0, and rounding must not change it.
            Re-weighted rows: only if N = 1 or p >= LARGE_POWER. A phi with zeros, not re-weighted:
            never 0, see zero_grad_above. No l1 norm: never 0.
        delta: sum_j A_ij dL/dA_ij, where the weights sum to one; else 0.
    """

    shift: tl.tensor
    threshold: tl.tensor
    zero_grad_above: tl.tensor
    inverse_spread: tl.tensor
    weight_factor: tl.tensor
    grad_factor: tl.tensor
    delta: tl.tensor


@triton.jit
def is_tied(row):
    """Whether rows of a ``GradientRow`` are tied. Of re-weighted rows only: without re-weighting
    ``gradient_row`` sets inverse_spread to -1 in every row. False where it is NaN, in a row that
    sees a NaN.
    """
    return row.inverse_spread < 0.0


@triton.jit
def saved_statistics(saved, inputs, algebra, b, h, q_offsets):
    """Statistics of the rows [BLOCK_Q] from what the forward saved: shift, largest f, sum f, sum
    u^p.
    """
    mask = q_offsets < inputs.query_length
    row_max = loading.load_vector(saved, b, h, q_offsets, loading.MAXIMUM_IN_UNIT, mask, 0.0)
    f_sum = loading.load_vector(saved, b, h, q_offsets, loading.F_SUM, mask, 1.0)
    power_sum = loading.load_vector(saved, b, h, q_offsets, loading.POWER_SUM, mask, 1.0)
    shift = tl.zeros_like(row_max)
    if algebra.shifted:
        shift = pointwise.row_shift(row_max, algebra)
    return shift, algebra.phi.f(row_max, shift, algebra), f_sum, power_sum


@triton.jit
def gradient_row(saved, inputs, algebra, count, b, h, q_offsets, delta):
    """The ``GradientRow`` of the rows [BLOCK_Q], from what the forward saved."""
    shift, largest_f, f_sum, power_sum = saved_statistics(saved, inputs, algebra, b, h, q_offsets)
    zeros = tl.zeros_like(shift)  # all vectors here are [BLOCK_Q]
    threshold, zero_grad_above = zeros, zeros
    inverse_spread = zeros - 1.0  # not read without re-weighting, but stored: a row vector
    if algebra.reweighted:
        threshold, inverse_spread, weight_factor, grad_factor = _reweighted_row_factors(
            largest_f, f_sum, power_sum, inputs, algebra, count, h
        )
    elif algebra.normaliser == "l1":
        weight_factor = reciprocal_sum(f_sum, algebra)
        if algebra.shift_holds_norm:
            # shift + log2 of the sum: the logsumexp. f is then the weight
            shift = shift - tl.log2(weight_factor)
            weight_factor = tl.full(weight_factor.shape, 1.0, tl.float32)
        single_key, grad_factor = (count == 1.0) | (f_sum == largest_f), weight_factor
        # Where one key has all the weight, dL/ds of that key is 0, and rounding must not change it.
        # The other keys have phi = 0 or far below the largest. Without zeros phi' is then as small,
        # and the whole row gets 0. relu' of such a key is 1, and its dL/ds may be large: only keys
        # above half the largest phi, which is the one key, get 0 (``weights_and_gradients``)
        if algebra.phi.has_zeros:
            zero_grad_above = tl.where(single_key, 0.5 * largest_f, float("inf"))
        else:
            grad_factor = tl.where(single_key, 0.0, weight_factor)
    else:
        # f_sum is NaN in a row with an infinite dot product (``nan_if_infinite``), which
        # f_sum - f_sum passes on
        weight_factor = row_factor(inputs, algebra, count, b) / algebra.phi.phi_unit + (f_sum - f_sum)
        grad_factor = weight_factor
        delta = tl.zeros_like(weight_factor)
    weight_factor = tl.where(count > 0.0, weight_factor, 0.0)
    grad_factor *= algebra.phi.phi_unit
    return GradientRow(shift, threshold, zero_grad_above, inverse_spread, weight_factor, grad_factor, delta)


@triton.jit
def _reweighted_row_factors(largest_f, f_sum, power_sum, inputs, algebra, count, h):
    """threshold, inverse_spread, weight_factor and grad_factor of a ``GradientRow`` [BLOCK_Q], of
    re-weighted rows.
    """
    threshold, inverse_spread, tied, _peak = row_threshold(algebra, count, f_sum, largest_f)
    largest_u = phi_to_u(largest_f, threshold, inverse_spread, algebra)
    largest_u_power = u_to_the_power(largest_u, inputs, algebra, h, MINUS=0)
    # One key has all the weight if power_sum equals its largest term: an exact comparison.
    # Other terms, if any, are below the rounding of power_sum. Their gradients, which u^(p - 1)
    # multiplies, are negligible only if p is large
    large_power = (tl.zeros_like(f_sum) + head_power(inputs, algebra, h)) >= LARGE_POWER
    single_key = (count == 1.0) | ((power_sum == largest_u_power) & (tied == 0) & large_power)
    reciprocal_f_sum, reciprocal_power_sum = reciprocal_sum(f_sum, algebra), reciprocal_sum(power_sum, algebra)
    largest_f_or_1 = tl.where(largest_f > 0.0, largest_f, 1.0)
    weight_factor = tl.where(tied, reciprocal_f_sum * largest_f_or_1, reciprocal_power_sum)
    untied_factor = head_power(inputs, algebra, h) * reciprocal_power_sum * inverse_spread
    grad_factor = tl.where(tied, reciprocal_f_sum, untied_factor)
    # u and power_sum of 16-bit dtypes have lost the NaN of a row (``phi_to_u``); f_sum has it
    weight_factor += f_sum - f_sum
    # A tied row keeps its l1 weights. Its u is f over the largest f, because ``phi_to_u`` limits u
    # of 16-bit dtypes to 1; weight_factor multiplies by the largest f again
    threshold = tl.where(tied, 0.0, threshold)
    inverse_spread = tl.where(tied, -1.0 / largest_f_or_1, inverse_spread)
    return threshold, inverse_spread, weight_factor, tl.where(single_key, 0.0, grad_factor)


@triton.jit
def expanded(row, KEY_AXIS: tl.constexpr):
    """The vectors [BLOCK_Q] as [BLOCK_Q, 1] or [1, BLOCK_Q]. KEY_AXIS: the keys' axis, 1 or 0."""
    return GradientRow(
        tl.expand_dims(row.shift, KEY_AXIS), tl.expand_dims(row.threshold, KEY_AXIS),
        tl.expand_dims(row.zero_grad_above, KEY_AXIS), tl.expand_dims(row.inverse_spread, KEY_AXIS),
        tl.expand_dims(row.weight_factor, KEY_AXIS), tl.expand_dims(row.grad_factor, KEY_AXIS),
        tl.expand_dims(row.delta, KEY_AXIS),
    )  # fmt: skip


@triton.jit
def weights_and_gradients(s, grad_weights, row, inputs, algebra, h):
    """A, grad_phi, phi' 2^-shift and u of a tile [BLOCK_Q, BLOCK_K], or [BLOCK_K, BLOCK_Q], from
    its scores and dL/dA.

    grad_phi is dL/dphi_s before mean_grad is subtracted and grad_factor multiplied:

        dL/dphi_s = grad_factor (grad_phi - mean_grad),   dL/ds = dL/dphi_s phi' 2^-shift

    It is g = (dL/dA - delta) u^(p-1) in re-weighted rows, dL/dA - delta in tied rows and in others
    with an l1 norm, and dL/dA without one. The EXACT kernels take it from
    ``laser.gradients_of_marked``, as dL/df with all factors of the row: there grad_factor is 1.
    """
    f = algebra.phi.f(s, row.shift, algebra)
    derivative = algebra.phi.derivative(s, row.shift, algebra)
    u, weights = f, f
    grad_phi = grad_weights
    if algebra.normaliser == "l1":
        grad_phi = grad_weights - row.delta
        if algebra.phi.has_zeros and not algebra.reweighted:
            grad_phi = tl.where(f > row.zero_grad_above, 0.0, grad_phi)
    if algebra.reweighted:
        u = phi_to_u(f, row.threshold, tl.abs(row.inverse_spread), algebra)
        u_to_p_minus_1 = tl.where(is_tied(row), 1.0, u_to_the_power(u, inputs, algebra, h, MINUS=1))
        grad_phi = grad_phi * u_to_p_minus_1
        weights = u_to_p_minus_1 * u
    if not algebra.shift_holds_norm:
        weights = weights * row.weight_factor
    return weights, grad_phi, derivative, u


@triton.jit
def rounding_step(rounded, algebra):
    """The unit in which the rounding error of the output is saved in eight bits, [BLOCK_Q,
    BLOCK_DV]: one ulp of the output's dtype, float16 or bfloat16, divided by 127; 0 where the
    output is not finite, or below 2^-99. ``rounded`` [BLOCK_Q, BLOCK_DV] is the output as stored.

    The error is saved for delta, which is computed from the output: where one key dominates a row,
    dL/dA - delta is smaller than the output's rounding. 127 is the largest int8, so that an error
    of one ulp fits. GPUs round to nearest and err by half an ulp at most, but Triton's interpreter
    truncates bfloat16. For a subnormal float16 output the step is computed as if it were normal: it
    is smaller than an ulp / 127, and an error of more than 127 steps is saved as 0.

    The limit is far above 2^-112, below which the step of bfloat16 is subnormal in float32. It was
    chosen, not measured. A float16 output is at least 2^-24.
    """
    bits = rounded.to(tl.int32, bitcast=True) & 0x7F800000
    pow2 = bits.to(tl.float32, bitcast=True)
    part: tl.constexpr = (2.0**-10 if algebra.inputs_are_fp16 else 2.0**-7) / 127.0
    return tl.where((pow2 > 2.0**-100) & (pow2 < float("inf")), pow2 * part, 0.0)


@triton.jit
def rounding_steps(x, rounded, algebra):
    """x - rounded [BLOCK_Q, BLOCK_DV] in units of ``rounding_step``; 0 where that is above 127. The
    caller stores it as int8.

    0.5 is added to the absolute value, so that the conversion to int8, which truncates, rounds to
    the nearest integer.
    """
    step = rounding_step(rounded, algebra)
    steps = (x - rounded) / tl.where(step > 0.0, step, 1.0)
    steps = tl.where((step > 0.0) & (tl.abs(steps) <= 127.0), steps, 0.0)
    return steps + tl.where(steps < 0.0, -0.5, 0.5)
