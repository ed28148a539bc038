"""phi and its slope, and u^p, for the kernels: plugged in at compile time. Every phi here is non-negative.

``shift`` is taken off in the exponent: a row whose scores all lie far below zero (for exp: any row) has phi(s) e^-shift.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.arguments import Phi

TAIL = tl.constexpr(-20.0)
"""Below it softplus and sigmoid are e^s to the last digit of float32."""


@triton.jit
def _log1p_exp(s):
    """log(1 + e^-|s|), to the last digits also where it is tiny; a polynomial of e^-|s| instead of a second transcendental."""
    x = tl.exp(-tl.abs(s))
    y = x * 0.005232690027 - 0.02950521992
    y = y * x + 0.07822591751
    y = y * x - 0.136632425
    y = y * x + 0.1910600499
    y = y * x - 0.2484298169
    y = y * x + 0.3331909673
    y = y * x - 0.4999949314
    y = y * x + 0.9999999699
    return y * x


@triton.jit
def _positive(s):
    return tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _along_exp(f, s, shift, SHIFTED: tl.constexpr):
    """f, but e^(s - shift) in the rows that have a shift."""
    if SHIFTED:
        f = tl.where(shift < 0.0, tl.exp(s - shift), f)
    return f


@triton.jit
def _no_shift(largest):
    return tl.zeros_like(largest)


@triton.jit
def _tail_shift(largest):
    return tl.where((largest < TAIL) & (largest > float("-inf")), largest, 0.0)


@triton.jit
def _exp_shift(largest):
    return tl.where(largest > float("-inf"), largest, 0.0)


@triton.jit
def _score(s, f):
    return s


@triton.jit
def _log(s, f):
    return tl.where(f == 0.0, float("-inf"), tl.log(tl.where(f == 0.0, 1.0, f)))


@triton.jit
def _score_or_log(s, f):
    return tl.where(s < TAIL, s, _log(s, f))


@triton.jit
def _exp(s, shift, SHIFTED: tl.constexpr):
    if SHIFTED:
        s = s - shift
    return tl.exp(s)


@triton.jit
def _exp_slope(s, shift, SHIFTED: tl.constexpr):
    return _exp(s, shift, SHIFTED)


@triton.jit
def _softplus(s, shift, SHIFTED: tl.constexpr):
    return _along_exp(_positive(s) + _log1p_exp(s), s, shift, SHIFTED)


@triton.jit
def _sigmoid(s, shift, SHIFTED: tl.constexpr):
    x = tl.exp(-tl.abs(s))
    return _along_exp(tl.where(s < 0.0, x, 1.0) / (1.0 + x), s, shift, SHIFTED)


@triton.jit
def _sigmoid_slope(s, shift, SHIFTED: tl.constexpr):
    x = tl.exp(-tl.abs(s))
    return _along_exp(x / ((1.0 + x) * (1.0 + x)), s, shift, SHIFTED)


@triton.jit
def _relu(s, shift, SHIFTED: tl.constexpr):
    return _positive(s)


@triton.jit
def _relu_slope(s, shift, SHIFTED: tl.constexpr):
    return tl.where(s > 0.0, 1.0, 0.0)


@triton.jit
def _relu2(s, shift, SHIFTED: tl.constexpr):
    return _positive(s) * _positive(s)


@triton.jit
def _relu2_slope(s, shift, SHIFTED: tl.constexpr):
    return 2.0 * _positive(s)


@triton.jit
def _relu6(s, shift, SHIFTED: tl.constexpr):
    return tl.minimum(_positive(s), 6.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _relu6_slope(s, shift, SHIFTED: tl.constexpr):
    return tl.where((s > 0.0) & (s < 6.0), 1.0, 0.0)


PHI = {
    "exp": Phi(_exp, _exp_slope, _score, _exp_shift, tl.constexpr(False)),
    "softplus": Phi(_softplus, _sigmoid, _score_or_log, _tail_shift, tl.constexpr(False)),
    "sigmoid": Phi(_sigmoid, _sigmoid_slope, _score_or_log, _tail_shift, tl.constexpr(False)),
    "relu": Phi(_relu, _relu_slope, _log, _no_shift, tl.constexpr(True)),
    "relu2": Phi(_relu2, _relu2_slope, _log, _no_shift, tl.constexpr(True)),
    "relu6": Phi(_relu6, _relu6_slope, _log, _no_shift, tl.constexpr(True)),
}


@triton.jit
def whole_power(u, POWER: tl.constexpr):
    """u^n for a whole n >= 0 by squaring."""
    result = tl.full(u.shape, 1.0, u.dtype)
    square = u
    n: tl.constexpr = POWER
    for bit in tl.static_range(7):
        if (n >> bit) & 1:
            result = result * square
        if n >> (bit + 1):
            square = square * square
    return result


@triton.jit
def any_power(u, power):
    """u^p for 0 < u <= 1 and a number p that is known when the kernel runs.

    Its relative error grows with p |log u|, which is large only where u^p is small beside the row's largest.
    """
    return tl.exp(power * tl.log(tl.where(u > 0.0, u, 1.0)))
