"""Fused Triton kernels: two sweeps over the keys where rows are re-weighted, one otherwise, no
atomics. Memory is O(L), and under a mask, key_mask or document_ids a few bytes per tile of scores.

Triton is imported when a call runs, never before. The checks that ``supports()`` and ``explain()``
need are in this module. The same kernels run on the CPU in Triton's interpreter
(``TRITON_INTERPRET=1`` before Triton is imported). The tests use it where there is no GPU.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from softfocus.contract import Call, Supported
from softfocus.mechanism import Mechanism
from softfocus.pointwise import FUSED

SUPPORTED = Supported(
    similarity=("dot", "cosine"), length_scale=("1", "log(N)", "log512(N)"), score_bias=("0", "-log(N)", "-log(L)"),
    phi=FUSED, normaliser=("l1", "none", "1/N", "1/L", "1/sqrt(N/2)"),
    post=("none",), reweighting=True, laser=True,
    dtypes=(torch.float32, torch.bfloat16, torch.float16), devices=("cuda", "cpu"),
    features=("bias", "head_scale", "power", "mask", "key_mask", "document_ids", "dropout", "cache"),
)  # fmt: skip
"""The device "cpu" stands for Triton's interpreter."""
ABOUT = "fused Triton kernels: memory O(L), under masks a few bytes per tile of scores"
MAX_HEAD_DIM = 256
OLDEST_CAPABILITY = (8, 0)
MAX_HEADS = 65535
"""The largest number of heads of all sequences together: CUDA's limit of the second dimension of a
grid.
"""
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
    """Which variants of the kernels run: (no shift needed, scores are products of unit vectors)."""
    return bounded(call), takes_unit_vectors(call)


def _triton_found() -> bool:
    try:
        return find_spec("triton") is not None
    except ImportError:
        return False


TRITON_FOUND = _triton_found()
"""Whether Triton is installed. Found at import, because torch 2.11 cannot trace find_spec()."""
SAVED_VECTORS = 8
"""The number of vectors [B, H, Lq] that every forward saves: the four of RowStatistics, the sum of
f (``Phi.f``), sum u^p, LASER's marks, and the largest score in the score unit.
``kernels/loading.py`` has their indices.
"""


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


def refuses(call: Call, to_run: bool) -> str | None:
    """Why the kernels do not run on this machine or at these sizes; None if they do. ``to_run`` is
    not used: nothing is compiled to find out.
    """
    query = call.query
    device_type = query.device.type
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on 'cpu', not on 'cuda' (TRITON_INTERPRET=1 would run the kernels in Python)"
    if torch.version.hip:
        return "the Triton kernels have not been compiled for AMD's GPUs"
    if device_type == "cuda" and torch.cuda.get_device_capability(query.device) < OLDEST_CAPABILITY:
        return f"{torch.cuda.get_device_name(query.device)} is older than Ampere (compute capability 8.0)"
    if not TRITON_FOUND:
        return "Triton is not installed (pip install triton)"
    for name, x in (("query", query), ("key", call.key), ("value", call.value)):
        if spans_too_much(x):
            return f"a head of {name} spans 2^31 elements or more, and the kernels compute offsets within it in 32 bits"
    widest = max(query.size(-1), call.value.size(-1))
    # out, gradients, unit vectors and e^V are new, contiguous tensors, also of expanded inputs
    longest = max(query.size(2), call.key.size(2))
    if longest * widest >= MAX_HEAD_SPAN:
        return (
            f"{longest} rows of {widest} numbers a head are 2^31 or more, "
            "and the kernels compute offsets within a head in 32 bits"
        )
    heads = query.size(0) * query.size(1)
    if heads > MAX_HEADS:
        return f"{heads} heads in all sequences are more than a grid of {MAX_HEADS} programs holds"
    return f"{widest} dimensions a head are more than {MAX_HEAD_DIM}" if widest > MAX_HEAD_DIM else None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and ``saved``, the saved vectors [n, B, H, Lq] with
    n = ``saved_vector_count(call)``.
    The kernels read a cache in place.
    """
    from softfocus.backends.triton.call import Launcher

    with _current(call.query):
        return Launcher(call).forward()


def runner(call: Call) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function that computes ``out`` from query, key and value of the call's layout, for a call
    without other tensors.
    """
    from softfocus.backends.triton.call import Launcher

    template: Any = call
    template = template._replace(query=None, key=None, value=None)  # the function must not keep these tensors alive

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with _current(query):
            return Launcher(template._replace(query=query, key=key, value=value)).forward()[0]

    return run


def backward(call: Call, grad: Tensor, bias_grad: bool, out: Tensor, saved: Tensor) -> dict[str, Tensor]:
    """Gradients by name, from what :func:`forward` returned."""
    from softfocus.backends.triton.call import Launcher

    with _current(call.query):
        return Launcher(call).backward(grad, bias_grad, out, saved)


def _current(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which x's device is the current one, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
