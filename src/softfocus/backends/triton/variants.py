"""Decides from a call alone which variants of the kernels run and what they save. Needs no
Triton.
"""

import math

import torch
from torch import Tensor

from softfocus.contract import Call
from softfocus.mechanism import Mechanism

MAX_HEAD_SPAN = 2**31
"""A head spans fewer elements than this in any tensor [B, H, L, D]: the kernels compute offsets
within a head in 32 bits.
"""
FEW_ROWS = 64  # unmeasured
"""The largest number of rows (queries of all heads that share a key head) of a decoding call.
Decoding splits the keys among programs.
"""
SCORE_BOUND = 60.0
"""In natural units. While all absolute scores are below this, phi, its sums and the spread need no
shift, except in float16: they neither overflow nor underflow. exp is always shifted.
"""
LEAST_SCALE = 0.1  # unmeasured
"""The smallest scale(d) with which scores are products of unit vectors. Typical entries of a scaled
unit vector are scale(d) / sqrt(D). With a smaller scale more entries would be subnormal in float16
(below 2^-14).
"""
WHOLE_POWER = 32
"""For integer powers up to this u^p is computed by squaring, with a kernel compiled for each."""
SAVED_VECTORS = 8
"""The number of vectors [B, H, Lq] that every forward saves: the four of RowStatistics, the sum of
f (``Phi.f``), sum u^p, LASER's marks, and the largest score in the score unit.
``kernels/loading.py`` has their indices.
"""


def runtime_power(mechanism: Mechanism) -> float | None:
    """The power if kernels load it at run time; None if it is a compile-time constant, or if there
    is none.
    """
    power = mechanism.power
    return None if power is None or (power.is_integer() and power <= WHOLE_POWER) else power


def compiled_as(mechanism: Mechanism) -> Mechanism:
    """A mechanism that has the same compiled kernels. One power stands for all that kernels load at
    run time.
    """
    return mechanism if runtime_power(mechanism) is None else mechanism.replace(power=1.5)


def _bounded_without_bias(call: Call) -> bool:
    """Whether scores without their biases are below ``SCORE_BOUND``: cosines times a known
    scale.
    """
    if call.mechanism.similarity != "cosine" or call.head_scale is not None:
        return False
    # N <= L, so the length scale is at most max(1, log L)
    return abs(call.scale) * max(1.0, math.log(max(call.visibility.key_length, 1))) < SCORE_BOUND


def bounded(call: Call) -> bool:
    """Whether all scores are close enough to 0 that phi needs no shift in float32 and bfloat16."""
    if call.mechanism.score_bias != "0" or call.query.dtype == torch.float16 or call.bias is not None:
        return False
    return _bounded_without_bias(call)


def takes_unit_vectors(call: Call) -> bool:
    """Whether scores are products of unit vectors in float16, which saves two to three instructions
    per score.

    It is true only for bfloat16 inputs, whose own rounding is eight times as large. It is false for
    re-weighted rows, where u^p multiplies that rounding beyond the tests' tolerance, and where the
    scale is below LEAST_SCALE. The scale must also be known to be below SCORE_BOUND, because each
    operand is rounded by up to 2^-11: a score errs by up to 2^-10 times the scale.
    """
    if call.query.dtype != torch.bfloat16 or call.mechanism.power is not None or abs(call.scale) < LEAST_SCALE:
        return False
    return _bounded_without_bias(call)


def variant(call: Call) -> tuple[bool, bool]:
    """Which variants of the kernels run: (scores are bounded, so that no phi but exp needs a shift;
    scores are products of unit vectors).
    """
    return bounded(call), takes_unit_vectors(call)


def saved_vector_count(call: Call) -> int:
    """The number of saved vectors that the forward returns: SAVED_VECTORS, plus enough float32
    vectors to hold ``Outputs.out_extra``, which lies behind them in the same tensor.
    """
    dtype = out_extra_dtype(call.mechanism, call.value.dtype)
    return SAVED_VECTORS + (0 if dtype is None else -(-call.value.size(-1) * dtype.itemsize // 4))


def out_extra_dtype(mechanism: Mechanism, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of what the backward needs beside an output of ``dtype``; None if it needs nothing.

    With LASER that is A e^V, or in marked rows the rounding error of out. Else, for 16-bit dtypes
    with an l1 norm, it is the rounding error of out: the backward adds it to out before it computes
    delta = sum(out dL/dout).
    """
    if mechanism.laser:
        return torch.float32
    return torch.int8 if dtype != torch.float32 and mechanism.normaliser == "l1" else None


def exponential_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of LASER's e^V and dL/d(A e^V) for values of ``dtype``. float16 cannot hold
    them.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def spans_too_much(x: Tensor) -> bool:
    """Whether offsets within a head of x [B, H, L, D] exceed 32 bits."""
    return (x.size(2) - 1) * x.stride(2) + (x.size(3) - 1) * x.stride(3) >= MAX_HEAD_SPAN
