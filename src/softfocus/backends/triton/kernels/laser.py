"""LASER: log(A e^V), column by column (arXiv 2411.03493).

The kernels multiply the weights with e^V in place of V. No shift is subtracted, because it could
come from a key that the row does not see. Values above LARGE_VALUE are clamped instead, and every
row that sees one is marked. In decoding, a re-weighted row is marked only if it gives such a value
some weight. A row is also marked if its sum is so small that weights which underflow might count.
The EXACT variants of the kernels compute the marked rows in logarithms. They apply no dropout:
LASER refuses it (``validation.py``).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import loading, masking, products, scoring, weighting
from softfocus.backends.triton.kernels.pointwise import LOG2E

LARGE_VALUE = tl.constexpr(30.0)
"""Larger values are clamped, and rows that see one are marked. e^30 = 1e13 is far from overflow."""
SMALL_SUM = tl.constexpr(1e-12)
"""A row is marked if sum_j r_ij e^V_jd, with the numerators r (f or u^p), is below
SMALL_SUM max(sum_j r_ij, 1) in some column d.

Both limits follow from underflow. A weight below 1e-38 underflows. On a value up to LARGE_VALUE it
would add at most 1e-38 e^30 = 1e-25 to the sum. Half a million such keys add 5e-20, less than the
rounding of a sum of 1e-12, 6e-20.
"""
SINGLE_KEY = tl.constexpr(2.0)
"""The mark of a marked row in which one key has all the weight. The mark of other marked rows is 1,
that of all other rows 0. Marks are float32, as the other saved vectors.
"""
TINY_BELOW = tl.constexpr(2.0**-100)  # unmeasured
"""Up to this limit f is tiny. A phi without zeros is there e^s times a factor of the row, so that
phi' / phi is 1.
"""
RELU_TINY_BELOW = tl.constexpr(2.0**-60)  # unmeasured
"""The same limit for a phi with zeros, whose phi' / phi is there computed from s. Chosen for relu2:
s^2 = f 2^shift is normal while f >= 2^-60 and shift >= -66.
"""


@triton.jit
def exponential_operand(x, dtype):
    """e^V or dL/d(A e^V), shaped like x, as an operand of products in a call of ``dtype``. For
    float16, which x may overflow, it is in tf32.
    """
    return products.to_operand_dtype(x, dtype, dtype == tl.float16)


@triton.jit
def exponential(value):
    """e^V, shaped like ``value``; e^LARGE_VALUE for larger values, NaN for non-finite ones."""
    x = value.to(tl.float32)
    x = tl.minimum(x + (x - x), LARGE_VALUE, propagate_nan=tl.PropagateNan.ALL)
    return exponential_operand(tl.exp2(x * LOG2E), value.dtype)


@triton.jit
def load_flags(value, inputs, b, h, k_offsets):
    """The flags of the keys of a tile (see ``compute_flags``), [BLOCK_K]: loaded, or computed from
    the values [BLOCK_K, BLOCK_DV].
    """
    if inputs.value_flags is not None:
        flags = loading.load_column(inputs.value_flags, b, h // inputs.group, k_offsets, inputs.key_length)
    else:
        flags = compute_flags(value.to(tl.float32))
    return flags


@triton.jit
def compute_flags(x):
    """Flags [BLOCK_K] of the keys with values x [BLOCK_K, BLOCK_DV]: 1 if a value is large, plus 2
    if one is non-finite.
    """
    nonfinite = tl.max(((tl.abs(x) < float("inf")) == 0).to(tl.int32), 1)
    large = tl.max((products.finite_or_zero(x) > LARGE_VALUE).to(tl.int32), 1)
    return (large + 2 * nonfinite).to(tl.float32)


@triton.jit
def is_large(flags):
    """Whether each key has a large value, bool [BLOCK_K], by its flag."""
    return (flags == 1.0) | (flags == 3.0)


@triton.jit
def exponentials(
    value, exp_values, flags, heads, length, width, FINITE: tl.constexpr, BLOCK_ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Stores e^V of ``value`` [B, Hk, Lk, Dv] in ``exp_values``, shaped like it, and the keys'
    flags in ``flags`` [B, Hk, Lk, 1]. FINITE, for the backward: e^0 = 1 for non-finite values, and
    no flags.
    """
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row_offsets = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dv_offsets = tl.arange(0, WIDTH)
    # [BLOCK_ROWS, WIDTH]
    x = loading.load_matrix(value, loading.head_pointer(value, b, h), row_offsets, dv_offsets, length, width)
    if FINITE:
        x = products.finite_or_zero(x)
    else:
        pointers = loading.head_pointer(flags, b, h) + row_offsets * flags.stride_l
        tl.store(pointers, compute_flags(x.to(tl.float32)), mask=row_offsets < length)
    pointers = (
        loading.head_pointer(exp_values, b, h)
        + row_offsets[:, None] * exp_values.stride_l
        + dv_offsets[None, :] * exp_values.stride_d
    )
    tl.store(pointers, exponential(x), mask=(row_offsets[:, None] < length) & (dv_offsets[None, :] < width))


class ExactRow(NamedTuple):
    """The constants of the EXACT kernels' rows: vectors [BLOCK_Q], or ``expanded`` to broadcast to
    a tile.

    Attributes:
        shift: of phi, as in the forward.
        f_sum: sum_j phi(s_ij) 2^-shift, times ``phi_unit``.
        threshold, inverse_spread, tied: as ``weighting.row_threshold`` returns them; used in
            re-weighted rows only.
        power_sum: sum_j u_ij^p; in tied rows sum_j f_ij, which is not used.
        delta: sum_j A_ij dL/dA_ij.
        single_key: whether one key has all the weight; for the backward.
    """

    shift: tl.tensor
    f_sum: tl.tensor
    threshold: tl.tensor
    inverse_spread: tl.tensor
    tied: tl.tensor
    power_sum: tl.tensor
    delta: tl.tensor
    single_key: tl.tensor


@triton.jit
def exact_row(saved, inputs, algebra, count, b, h, q_offsets, delta):
    """The ``ExactRow`` of the rows [BLOCK_Q], from what the forward saved."""
    shift, largest_f, f_sum, power_sum = weighting.saved_statistics(saved, inputs, algebra, b, h, q_offsets)
    f_sum = tl.where(f_sum == 0.0, 1.0, f_sum)
    power_sum = tl.where(power_sum == 0.0, 1.0, power_sum)
    threshold, inverse_spread, tied, _peak = weighting.row_threshold(algebra, count, f_sum, largest_f)
    marks = load_marks(saved, inputs, b, h, q_offsets)
    return ExactRow(shift, f_sum, threshold, inverse_spread, tied, power_sum, delta, marks == SINGLE_KEY)


@triton.jit
def load_marks(saved, inputs, b, h, q_offsets):
    """The marks of the rows [BLOCK_Q]: SINGLE_KEY, 1, or 0 for rows that are not marked."""
    return loading.load_vector(saved, b, h, q_offsets, loading.MARK, q_offsets < inputs.query_length, 0.0)


@triton.jit
def expanded(exact, KEY_AXIS: tl.constexpr):
    """The vectors [BLOCK_Q] as [BLOCK_Q, 1] or [1, BLOCK_Q]. KEY_AXIS: the keys' axis, 1 or 0."""
    return ExactRow(
        tl.expand_dims(exact.shift, KEY_AXIS), tl.expand_dims(exact.f_sum, KEY_AXIS),
        tl.expand_dims(exact.threshold, KEY_AXIS), tl.expand_dims(exact.inverse_spread, KEY_AXIS),
        tl.expand_dims(exact.tied, KEY_AXIS), tl.expand_dims(exact.power_sum, KEY_AXIS),
        tl.expand_dims(exact.delta, KEY_AXIS), tl.expand_dims(exact.single_key, KEY_AXIS),
    )  # fmt: skip


@triton.jit
def log_weights(s, exact, inputs, algebra, h):
    """log A and log u of a tile [BLOCK_Q, BLOCK_K], or [BLOCK_K, BLOCK_Q], -inf where A or u is 0.
    ``exact`` is the ``ExactRow`` of its rows, ``expanded`` to broadcast to the tile.

    A may underflow, and its logarithm is therefore a difference of logarithms: log phi - log Z, or
    in re-weighted rows p log u - log sum u^p. Where the threshold is not 0, log u is computed from
    u, which does not underflow: it is 0 or at least one ulp of phi divided by the spread. (For
    16-bit dtypes it may also be the rounding error of threshold / spread: ``phi_to_u``.) In rows
    with threshold 0 (N_i <= 3) u is phi over the largest phi and may underflow, too. There log u is
    computed from log phi. In tied rows, and without re-weighting, the second result is arbitrary:
    the callers use it for the gradient of the power alone.
    """
    f = algebra.phi.f(s, exact.shift, algebra)
    log_f = algebra.phi.log(s, exact.shift, f)
    log_weight = log_f - tl.log(exact.f_sum)  # l1 weights: without re-weighting, and in tied rows
    log_u = log_weight  # not used without re-weighting, but Triton needs the name
    if algebra.reweighted:
        u = weighting.phi_to_u(f, exact.threshold, exact.inverse_spread, algebra)
        log_u = tl.where(u > 0.0, tl.log(tl.where(u > 0.0, u, 1.0)), float("-inf"))
        log_u = tl.where(exact.threshold == 0.0, log_f + tl.log(exact.inverse_spread), log_u)
        log_reweighted = weighting.head_power(inputs, algebra, h) * log_u - tl.log(exact.power_sum)
        # A learned power may be 0, and 0 * -inf is NaN
        log_reweighted = tl.where(log_u == float("-inf"), float("-inf"), log_reweighted)
        log_weight = tl.where(exact.tied, log_weight, log_reweighted)
    return log_weight, log_u


@triton.jit
def gradients_of_marked(s, weighted_grad, exact, inputs, algebra, h):
    """dL/d(log r) = A (dL/dA - delta), dL/df and phi' of a tile [BLOCK_Q, BLOCK_K], or [BLOCK_K,
    BLOCK_Q], from scores, ``weighted_grad`` = A dL/dA and the ``expanded`` ``ExactRow``. r is the
    numerator, f or u^p. dL/df is that before mean_grad is subtracted.

    It does the work of ``weighting.weights_and_gradients``, but from A dL/dA, which is finite even
    where A underflows and dL/dA overflows. Up to a factor of the row, which no derivative of log r
    has, r is (f - threshold)^p. So

        d log r / ds = p phi' / (f - threshold).

    In rows without a threshold f may underflow, and the quotient is 0 / 0. It is then p phi' / phi,
    from ``Phi.log_derivative``. Here phi' has the factors 2^-shift and ``phi_unit``, as f has.
    dL/df = dL/d(log r) p / (f - threshold) includes all factors of the row. The callers use it as
    grad_phi with a grad_factor of 1.

    Where f is ``tiny`` (TINY_BELOW), the second result is p dL/d(log r) and the third phi' / phi,
    so that their product is still dL/ds. They may take this form because no mean_grad is subtracted
    from the second: only rows without a threshold, and tied ones, have a limit above 0, and their
    mean_grad is 0. A key at or below a threshold also gets p dL/d(log r), which is 0, or for 16-bit
    dtypes a rounding error. Its third result stays phi'.
    """
    f = algebra.phi.f(s, exact.shift, algebra)
    # derivative includes phi_unit here, unlike in weights_and_gradients
    derivative = algebra.phi.derivative(s, exact.shift, algebra) * algebra.phi.phi_unit
    weight = f / exact.f_sum
    above_threshold = f
    power = 1.0
    tiny_below = RELU_TINY_BELOW if algebra.phi.has_zeros else TINY_BELOW
    if algebra.reweighted:
        # Above a threshold f - threshold is 0 or at least one ulp of f: f needs no such limit
        tiny_below = tl.where(exact.tied | (exact.threshold == 0.0), tiny_below, 0.0)
        u = weighting.phi_to_u(f, exact.threshold, exact.inverse_spread, algebra)
        weight = tl.where(
            exact.tied, weight, weighting.u_to_the_power(u, inputs, algebra, h, MINUS=0) / exact.power_sum
        )
        above_threshold = tl.where(exact.tied, f, tl.maximum(f - exact.threshold, 0.0))
        power = tl.where(exact.tied, 1.0, weighting.head_power(inputs, algebra, h))
    grad_log_numerator = tl.where(exact.single_key, 0.0, weighted_grad - weight * exact.delta)
    grad_f = grad_log_numerator * power / tl.where(above_threshold <= tiny_below, 1.0, above_threshold)
    # f decides here, not f - threshold: a key at or below a threshold must keep phi', which
    # multiplies mean_grad. For 16-bit dtypes a key at the threshold may have a u, and with it a
    # grad_log_numerator, that is not 0 (``phi_to_u``)
    tiny = (f <= tiny_below) & (grad_log_numerator != 0.0)
    derivative = tl.where(tiny, algebra.phi.log_derivative(s), derivative)
    return grad_log_numerator, grad_f, derivative


@triton.jit
def weighted_grad_of(
    log_weights, grad_out, outputs, inputs, b, h, q_offsets, active, k_offsets, KEY_AXIS: tl.constexpr
):
    """A dL/dA of a tile, shaped like it: the sum over the columns c of ``_term``.

    ``active`` [BLOCK_Q] are the rows that are computed. In the others grad_out is taken as 0.
    """
    weighted_grad = tl.zeros_like(log_weights)
    for c in range(inputs.value_dim):
        weighted_grad += _term(log_weights, grad_out, outputs, inputs, b, h, q_offsets, active, k_offsets, c, KEY_AXIS)
    return weighted_grad


@triton.jit
def weighted_grad_and_value_sum(
    log_weights, value_sum, grad_out, outputs, inputs, b, h, q_offsets, active, k_offsets, tiling
):
    """``weighted_grad_of`` a tile [BLOCK_K, BLOCK_Q]; and value_sum [BLOCK_K, BLOCK_DV] plus this
    tile's dL/dV, the sums of the same terms over the rows.
    """
    weighted_grad = tl.zeros_like(log_weights)
    dv_offsets = tl.arange(0, tiling.BLOCK_DV)
    for c in range(inputs.value_dim):
        term = _term(log_weights, grad_out, outputs, inputs, b, h, q_offsets, active, k_offsets, c, KEY_AXIS=0)
        weighted_grad += term
        value_sum += tl.where(dv_offsets[None, :] == c, tl.sum(term, 1)[:, None], 0.0)
    return weighted_grad, value_sum


@triton.jit
def _term(
    log_weights, grad_out, outputs, inputs, b, h, q_offsets, active, k_offsets, c, KEY_AXIS: tl.constexpr
):  # fmt: skip
    """grad_out e^(log A + v - out) of column c of the values, for a tile [BLOCK_Q, BLOCK_K] or
    [BLOCK_K, BLOCK_Q]. KEY_AXIS: the keys' axis, 1 or 0.
    """
    grad = _column(grad_out, b, h, q_offsets, active, c)  # [BLOCK_Q], as out and rounding_error
    out = _column(outputs.out, b, h, q_offsets, active, c)
    # All active rows are marked: out_extra holds the rounding error of out, not A e^V
    rounding_error = _column(outputs.out_extra, b, h, q_offsets, active, c)
    grad = tl.where(out == out, grad, 0.0)  # an output that is NaN passes no gradient on
    value = _column(inputs.value, b, h // inputs.group, k_offsets, k_offsets < inputs.key_length, c)  # [BLOCK_K]
    value = products.finite_or_zero(value)
    # v - out first: for large values the difference is exact, but a sum with log A is not.
    # difference and exponent are shaped like ``log_weights``
    difference = tl.expand_dims(value, 1 - KEY_AXIS) - tl.expand_dims(tl.where(out == out, out, 0.0), KEY_AXIS)
    exponent = log_weights + (difference - tl.expand_dims(tl.where(out == out, rounding_error, 0.0), KEY_AXIS))
    # In active rows A e^(v - out) is at most 1. The exponent of other rows is arbitrary. The limit
    # keeps 0 * e^x from being NaN (e^89 is inf)
    return tl.expand_dims(grad, KEY_AXIS) * tl.exp(tl.minimum(exponent, 80.0))


@triton.jit
def _column(array, b, h, offsets, mask, c):
    """Column c of a head's matrix, float32, shaped like ``offsets``; 0 where ``mask`` is false."""
    pointers = loading.head_pointer(array, b, h) + offsets * array.stride_l + c * array.stride_d
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def exact_forward(inputs, algebra, masks, outputs, tiling):
    """Stores the output of the marked rows, its rounding error, and SINGLE_KEY marks. The output is
    a logsumexp with a running maximum per row and column.
    """
    if tl.load(outputs.exact_heads + tl.program_id(1)) == 0:
        return
    block = tl.program_id(0)
    b, h = tl.program_id(1) // inputs.heads, tl.program_id(1) % inputs.heads
    q_offsets = block * tiling.BLOCK_Q + tl.arange(0, tiling.BLOCK_Q)  # [BLOCK_Q]
    dv_offsets = tl.arange(0, tiling.BLOCK_DV)  # [BLOCK_DV]
    marked = load_marks(outputs.saved, inputs, b, h, q_offsets) > 0.0  # [BLOCK_Q]
    if tl.max(marked.to(tl.int32)) == 0:
        return
    query = loading.load_queries(inputs, b, h, q_offsets, tiling)  # [BLOCK_Q, BLOCK_D]
    # count, scale_in_unit, row_bias, query_rnorm, product_scale [BLOCK_Q]; the fields of exact
    # [BLOCK_Q, 1]
    count = masking.visible_count(masks, inputs, b, h, q_offsets)
    exact = exact_row(outputs.saved, inputs, algebra, count, b, h, q_offsets, delta=tl.zeros_like(count))
    exact = expanded(exact, KEY_AXIS=1)
    scale_in_unit = scoring.score_scale(inputs, algebra, count, h) * algebra.phi.score_unit
    row_bias = scoring.row_bias_of(inputs, algebra, count, b)
    query_rnorm = scoring.load_query_rnorm(inputs, algebra, b, h, q_offsets)
    query, product_scale = scoring.query_operand(query, query_rnorm, scale_in_unit, inputs, algebra)
    tile_range = masking.key_tile_range(masks, inputs, tiling, b, block)
    # The largest log A + v of each row and column, the sum of e^(log A + v - running_max), and the
    # number of keys with a weight above 0
    running_max = tl.full([tiling.BLOCK_Q, tiling.BLOCK_DV], float("-inf"), tl.float32)
    total = tl.zeros([tiling.BLOCK_Q, tiling.BLOCK_DV], tl.float32)
    weighted_count = tl.zeros([tiling.BLOCK_Q], tl.float32)
    for IS_PARTIAL in tl.static_range(1, -1, -1):  # partial tiles first; any order would do
        for n in range(masking.tile_count(masks.key_tiles, tile_range, b, h, block, IS_PARTIAL)):
            k_offsets = scoring.key_offsets(masks, tile_range, b, h, block, n, IS_PARTIAL, tiling)  # [BLOCK_K]
            # s, visible [BLOCK_Q, BLOCK_K]
            _key, _rnorm, s, visible, _scaled_dots = scoring.scores_of_keys(
                query, inputs, algebra, masks, b, h, q_offsets, k_offsets, product_scale, row_bias, IS_PARTIAL, tiling
            )
            log_weight, _log_u = log_weights(s, exact, inputs, algebra, h)  # [BLOCK_Q, BLOCK_K]
            log_weight = tl.where(visible, log_weight, float("-inf"))
            weighted_count += tl.sum(tl.where(log_weight > float("-inf"), 1.0, 0.0), 1)
            for c in range(inputs.value_dim):
                # value [BLOCK_K]: column c
                pointers = loading.key_pointers(inputs.value, inputs, b, h, k_offsets) + c * inputs.value.stride_d
                value = tl.load(pointers, mask=k_offsets < loading.sequence_length(inputs, b), other=0.0).to(tl.float32)
                # [BLOCK_Q]: NaN where a row sees a non-finite value, else 0
                nonfinite = tl.sum(tl.where(visible, (value - value)[None, :], 0.0), 1)
                value = products.finite_or_zero(value)[None, :]  # [1, BLOCK_K]
                this_column = dv_offsets[None, :] == c  # [1, BLOCK_DV]
                # old_max, new_max, base, rescale, tile_sum [BLOCK_Q]. base is new_max, but 0 if no
                # key had weight, because -inf - -inf is NaN
                old_max = tl.max(tl.where(this_column, running_max, float("-inf")), 1)
                new_max = tl.maximum(old_max, tl.max(log_weight + value, 1))
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
                rescale = tl.exp(old_max - base)
                tile_sum = tl.sum(tl.exp(log_weight + (value - base[:, None])), 1) + nonfinite
                total = tl.where(this_column, total * rescale[:, None] + tile_sum[:, None], total)
                running_max = tl.where(this_column, new_max[:, None], running_max)
    marks = tl.where(weighted_count == 1.0, SINGLE_KEY, 1.0)
    loading.store_vector(outputs.saved, b, h, q_offsets, loading.MARK, marks, marked)
    row_heads, log_total = tl.zeros_like(q_offsets) + h, tl.log(total)
    rounded = (running_max + log_total).to(outputs.out.pointer.dtype.element_ty)
    loading.store_like_out(outputs.out, inputs, b, row_heads, q_offsets, marked, rounded, tiling)
    rounding_error = (running_max - rounded.to(tl.float32)) + log_total
    loading.store_like_out(outputs.out_extra, inputs, b, row_heads, q_offsets, marked, rounding_error, tiling)
