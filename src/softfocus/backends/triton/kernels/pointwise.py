"""phi and its derivative, and u^p, for the kernels: selected at compile time. Every phi here is
non-negative.

If phi is computed from exponentials, scores are in units of log 2: the score scale includes log2 e.
2^x takes one instruction, e^x five. phi is multiplied by 2^-shift, which an exponential does by
subtracting ``shift`` in the exponent. For exp the shift is the row maximum. For softplus and
sigmoid it is 0, except in rows whose scores are all below SHIFT_BELOW, where the largest phi(s)
2^-shift is about 1. The relu family has a shift in float16 only, where weights that are not
normalised yet might overflow or underflow. Its shift is an integer, so that the scaling is exact.

softplus is computed in units of log 2: f is phi times ``phi_unit`` = log2 e, which cancels in A.
``Phi.derivative`` does not include it: ``GradientRow.grad_factor`` multiplies by it instead.

Far below zero softplus keeps its relative precision: for s <= 0, log2(1 + 2^s) = x y(x) with
x = 2^s. A polynomial y replaces the logarithm, which takes 20 instructions. Its relative error is
2^-11 for bfloat16, 2^-17 for float16, 2^-22.5 for float32.
"""

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from softfocus.backends.triton.arguments import Phi

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
SHIFT_BELOW = tl.constexpr(-4.0)  # unmeasured
"""In units of log 2. Rows of softplus and sigmoid whose scores are all below it have a shift, since
their phi may underflow. phi(-4 log 2) is 0.06, which every dtype holds.
"""
LOG_FROM_SCORE_BELOW = tl.constexpr(-100.0)
"""In units of log 2. Where s - shift of softplus or sigmoid is below it, phi 2^-shift may
underflow, and its log is computed from s. float32 is normal down to 2^-126; the rest is margin.
"""
MAX_TERMS = tl.constexpr(9)
"""The number of terms of the most accurate polynomial, that of float32 (``inputs.TERMS``)."""
LOG_LOG2E = tl.constexpr(0.36651292058166435)  # the logarithm of ``phi_unit`` of softplus


@triton.jit
def _minus_abs(s):
    """-|s| as |s| times -1, whose sign the next instruction takes; 0 - |s| takes an instruction."""
    return tl.abs(s) * -1.0


@triton.jit
def _log2_1p_over_x(x, TERMS: tl.constexpr):
    """log2(1 + x) / x for x in [0, 1]: the polynomial of TERMS terms of smallest relative error."""
    if TERMS == MAX_TERMS:
        y = x * 0.00754918205 - 0.0425670631
        y = y * x + 0.112856194
        y = y * x - 0.197118968
        y = y * x + 0.275641412
        y = y * x - 0.358408481
        y = y * x + 0.480692953
        y = y * x - 0.721340179
        y = y * x + 1.44269502
    elif TERMS == 6:
        y = x * -0.0344359055 + 0.146032885
        y = y * x - 0.303036213
        y = y * x + 0.469174057
        y = y * x - 0.720426142
        y = y * x + 1.44268286
    elif TERMS == 4:
        y = x * -0.10725442 + 0.36648062
        y = y * x - 0.70174724
        y = y * x + 1.4421281
    else:
        tl.static_assert(False, "there is no polynomial of so many terms")
    return y


@triton.jit
def _log2_1p_exp2_of_minus_abs(s, TERMS: tl.constexpr):
    """log2(1 + 2^-|s|)."""
    x = tl.exp2(_minus_abs(s))
    return _log2_1p_over_x(x, TERMS) * x


if knobs.runtime.interpret or torch.version.hip:

    @triton.jit
    def _fast_log2(x):
        return tl.log2(x)

    @triton.jit
    def _rounded_product(a, b):
        return a * b

    @triton.jit
    def saturated(a, b, c):
        """a b + c within [0, 1], 0 where it is NaN."""
        return tl.minimum(tl.maximum(a * b + c, 0.0), 1.0)
else:
    _fast_log2, _rounded_product = libdevice.fast_log2f, libdevice.mul_rn

    @triton.jit
    def saturated(a, b, c):
        """a b + c within [0, 1], 0 where it is NaN: one instruction."""
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def unfused_product(a, b, algebra):
    """a b, not fused with a sum (no FMA) in re-weighted rows of float32.

    Otherwise the compiler might fuse the product with a sum in some kernels or tiles and not in
    others. Scores would then differ in the last bit, and u^p by p times that.
    """
    if algebra.reweighted and algebra.inputs_are_fp32:
        result = _rounded_product(a, b)
    else:
        result = a * b
    return result


@triton.jit
def log2(x, ACCURATE: tl.constexpr):
    """log2 x for x > 0. Not ACCURATE, for 16-bit dtypes: 1 instruction, not 20, error 2^-22."""
    if ACCURATE:
        result = tl.log2(x)
    else:
        result = _fast_log2(x)
    return result


@triton.jit
def _positive_part(s):
    return tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _floor_log2(x):
    """floor(log2 x) for a normal x > 0, -127 for a subnormal one, else 0."""
    bits = (x.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where((x > 0.0) & (x < float("inf")), bits.to(tl.float32), 0.0)


@triton.jit
def row_shift(row_max, algebra):
    """The shift of rows from their largest scores, in any shape.

    The default is floor(log2 phi(row_max)). A phi that is positive everywhere gives a function of
    its own, since phi(row_max) may underflow.
    """
    if algebra.phi.shift is None:
        tl.static_assert(algebra.phi.has_zeros, "a phi without zeros gives its own shift")
        shift = _floor_log2(algebra.phi.f(row_max, tl.zeros_like(row_max), algebra))
    else:
        shift = algebra.phi.shift(row_max)
    return shift


@triton.jit
def _shifted(f, shift, algebra):
    """f 2^-shift."""
    if algebra.shifted:
        f = f * tl.exp2(-shift)
    return f


@triton.jit
def _if_small(row_max, log2_f):
    """log2_f if row_max is finite and below SHIFT_BELOW. Else 0: the row needs no shift."""
    return tl.where((row_max < SHIFT_BELOW) & (row_max > float("-inf")), log2_f, 0.0)


@triton.jit
def _softplus_shift(row_max):
    """log2 f(s) = s + log2 y(2^s), with y of the module's docstring; s < 0 here."""
    return _if_small(row_max, row_max + tl.log2(_log2_1p_over_x(tl.exp2(tl.minimum(row_max, 0.0)), MAX_TERMS)))


@triton.jit
def _sigmoid_shift(row_max):
    """log2 sigmoid(s) = s - log2(1 + 2^s), for s < 0."""
    return _if_small(row_max, row_max - _log2_1p_exp2_of_minus_abs(row_max, MAX_TERMS))


@triton.jit
def _exp_shift(row_max):
    return tl.where(row_max > float("-inf"), row_max, 0.0)


@triton.jit
def _log(f):
    return tl.where(f == 0.0, float("-inf"), tl.log(tl.where(f == 0.0, 1.0, f)))


@triton.jit
def _log_of_f(s, shift, f):
    return _log(f)


@triton.jit
def _log_relu2(s, shift, f):
    """Computed from s, because s^2 may underflow."""
    return 2.0 * _log(_positive_part(s)) - shift * LN2


@triton.jit
def _log_exp(s, shift, f):
    return (s - shift) * LN2


@triton.jit
def _log_softplus(s, shift, f):
    """LOG_LOG2E is added because f includes ``phi_unit``."""
    return tl.where(s - shift < LOG_FROM_SCORE_BELOW, (s - shift) * LN2 + LOG_LOG2E, _log(f))


@triton.jit
def _log_sigmoid(s, shift, f):
    return tl.where(s - shift < LOG_FROM_SCORE_BELOW, (s - shift) * LN2, _log(f))


@triton.jit
def _exp2(x, algebra):
    """2^x. In re-weighted rows of float32 it is accurate to the last bit, for x up to 254. Callers
    pass -|s|, or a score minus the row's shift: about 0 at most where the result is used. The
    hardware's instruction may be wrong in the last two or three bits. If the phi of a row are
    nearly equal, u is a small difference of them, and their errors count.
    """
    if algebra.reweighted and algebra.inputs_are_fp32:
        x = tl.maximum(x, -252.0, propagate_nan=tl.PropagateNan.ALL)  # 2^-252 = 2^-126 2^-126 is 0 in float32
        whole = tl.floor(x + 0.5)
        r = x - whole  # 2^r for |r| <= 1/2, by its Taylor series
        y = r * 1.5252734e-05 + 1.5403530e-04
        y = y * r + 1.3333558e-03
        y = y * r + 9.6181291e-03
        y = y * r + 5.5504109e-02
        y = y * r + 2.4022651e-01
        y = y * r + 6.9314718e-01
        y = y * r + 1.0
        # 2^whole in two factors, since it may lie below the smallest normal number
        first_part = tl.floor(whole * 0.5)
        result = y * _exp2_of_whole(first_part) * _exp2_of_whole(whole - first_part)
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def _exp2_of_whole(n):
    """2^n of an integer n from -126 to 127."""
    return ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exp(s, shift, algebra):
    if algebra.shifted:
        s = s - shift
    return _exp2(s, algebra)


@triton.jit
def _softplus(s, shift, algebra):
    """softplus 2^-shift in units of log 2. If the shift is not 0, all scores of the row are below
    zero, so that max(s, 0) needs no shift.
    """
    x = _minus_abs(s)
    if algebra.shifted:
        x = _exp2(x - shift, algebra)
        y = _log2_1p_over_x(x * tl.exp2(shift), algebra.terms)
    else:
        x = _exp2(x, algebra)
        y = _log2_1p_over_x(x, algebra.terms)
    return tl.maximum(s, 0.0) + y * x


@triton.jit
def _sigmoid(s, shift, algebra):
    """sigmoid 2^-shift. For 16-bit dtypes it is 2^(min(s, 0) - log2(1 + 2^-|s|) - shift), which
    avoids a division (eight instructions). Float32 rounds its division correctly: see ``_exp2``.
    """
    exponent = tl.minimum(s, 0.0)
    if algebra.shifted:
        exponent = exponent - shift
    if algebra.inputs_are_fp32:
        f = tl.div_rn(_exp2(exponent, algebra), 1.0 + _exp2(_minus_abs(s), algebra))
    else:
        f = tl.exp2(exponent - _log2_1p_exp2_of_minus_abs(s, algebra.terms))
    return f


@triton.jit
def _softplus_derivative(s, shift, algebra):
    """sigmoid 2^-shift. For 16-bit dtypes without a shift it is 2^(s - softplus), which is less
    accurate for large scores, but reuses the softplus that the kernel computes anyway.
    """
    if algebra.shifted or algebra.inputs_are_fp32:
        derivative = _sigmoid(s, shift, algebra)
    else:
        derivative = tl.exp2(s - _softplus(s, shift, algebra))
    return derivative


@triton.jit
def _sigmoid_derivative(s, shift, algebra):
    exponent = _minus_abs(s)
    if algebra.shifted:
        exponent = exponent - shift
    if algebra.inputs_are_fp32:
        denominator = 1.0 + tl.exp2(_minus_abs(s))
        derivative = tl.exp2(exponent) / (denominator * denominator)
    else:
        derivative = tl.exp2(exponent - 2.0 * _log2_1p_exp2_of_minus_abs(s, algebra.terms))
    return derivative


@triton.jit
def _relu(s, shift, algebra):
    return _shifted(_positive_part(s), shift, algebra)


@triton.jit
def _relu_derivative(s, shift, algebra):
    return _shifted(tl.where(s > 0.0, 1.0, 0.0), shift, algebra)


@triton.jit
def _relu2(s, shift, algebra):
    return _shifted(_positive_part(s) * _positive_part(s), shift, algebra)


@triton.jit
def _relu2_derivative(s, shift, algebra):
    return _shifted(2.0 * _positive_part(s), shift, algebra)


@triton.jit
def _relu6(s, shift, algebra):
    return _shifted(tl.minimum(_positive_part(s), 6.0, propagate_nan=tl.PropagateNan.ALL), shift, algebra)


@triton.jit
def _relu6_derivative(s, shift, algebra):
    return _shifted(tl.where((s > 0.0) & (s < 6.0), 1.0, 0.0), shift, algebra)


@triton.jit
def _tail_log_derivative(s):
    return tl.zeros_like(s) + 1.0


@triton.jit
def _relu_log_derivative(s):
    return 1.0 / s


@triton.jit
def _relu2_log_derivative(s):
    return 2.0 / s


_NO_ZEROS, _HAS_ZEROS = tl.constexpr(False), tl.constexpr(True)
PHI = {
    "exp": Phi(_exp, _exp, _log_exp, _tail_log_derivative, _NO_ZEROS, shift=_exp_shift, score_unit=LOG2E),
    "softplus": Phi(
        _softplus, _softplus_derivative, _log_softplus, _tail_log_derivative, _NO_ZEROS,
        shift=_softplus_shift, score_unit=LOG2E, phi_unit=LOG2E, zero_at_infinite_shift=tl.constexpr(False)),
    "sigmoid": Phi(
        _sigmoid, _sigmoid_derivative, _log_sigmoid, _tail_log_derivative, _NO_ZEROS,
        shift=_sigmoid_shift, score_unit=LOG2E),
    "relu": Phi(_relu, _relu_derivative, _log_of_f, _relu_log_derivative, _HAS_ZEROS),
    "relu2": Phi(_relu2, _relu2_derivative, _log_relu2, _relu2_log_derivative, _HAS_ZEROS),
    "relu6": Phi(_relu6, _relu6_derivative, _log_of_f, _relu_log_derivative, _HAS_ZEROS),
}  # fmt: skip


@triton.jit
def whole_power(u, POWER: tl.constexpr):
    """u^POWER for an integer POWER >= 0, by repeated squaring of u, or of u^3 where 3 divides
    POWER, which saves products for powers such as 15.
    """
    tl.static_assert(POWER < 64, "larger powers have more bits than the loop reads")
    n: tl.constexpr = POWER if POWER % 3 else POWER // 3
    square = u
    if POWER > 0 and POWER % 3 == 0:
        square = u * u * u
    result = tl.full(u.shape, 1.0, u.dtype)
    for bit in tl.static_range(6):  # POWER is at most 32 (``variants.WHOLE_POWER``)
        if (n >> bit) & 1:
            result = result * square
        if n >> (bit + 1):
            square = square * square
    return result


@triton.jit
def any_power(u, power, ACCURATE: tl.constexpr):
    """u^p for 0 < u <= 1 and a p that the kernel loads at run time. ACCURATE: as in ``log2``.

    The relative error grows with p |log u|, which is large only where u^p is small compared with
    the row's largest. NaN gives 1; f_sum carries the NaN of such rows.
    """
    return tl.exp2(power * log2(tl.where(u > 0.0, u, 1.0), ACCURATE))
