"""Fused Triton kernels: two sweeps over the keys where rows are re-weighted, one otherwise, memory
O(L), no atomics.

Triton is imported when a call runs, never before: what ``supports()`` and ``explain()`` ask stands
in this module. The same kernels run on the CPU under Triton's interpreter (``TRITON_INTERPRET=1``
before Triton is imported), which is how they are tested where there is no GPU.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from softfocus.contract import Call, Carries
from softfocus.mechanism import Mechanism
from softfocus.pointwise import FUSED

CARRIES = Carries(
    similarity=("dot", "cosine"), length_scale=("1", "log(N)", "log512(N)"), score_bias=("0", "-log(N)", "-log(L)"),
    phi=FUSED, normaliser=("l1", "none", "1/N", "1/L", "1/sqrt(N/2)"),
    post=("none",), reweighting=True, laser=True,
    dtypes=(torch.float32, torch.bfloat16, torch.float16), devices=("cuda", "cpu"),
    features=("bias", "head_scale", "power", "mask", "key_mask", "document_ids", "dropout", "cache"),
)  # fmt: skip
"""The device "cpu" stands for Triton's interpreter."""
ABOUT = "fused Triton kernels: memory O(L)"
MAX_HEAD_DIM = 256
OLDEST_CAPABILITY = (8, 0)
MAX_HEADS = 65535
"""The most heads, of all sequences together: CUDA's limit of the second dimension of a grid."""
MAX_HEAD_SPAN = 2**31
"""A head spans fewer elements than this in any tensor: the kernels count within it in 32 bits."""

FEW_ROWS = 64
"""Up to so many queries, of all heads that share a key head, are decoded: the keys split among
programs. Chosen, not measured.
"""
SCORE_BOUND = 60.0
"""Up to this absolute score phi, its sums and the spread neither overflow nor underflow without a
shift.
"""
LEAST_SCALE = 0.1
"""Below this scale(d) unit vectors times their score scale may be subnormal numbers of float16."""
WHOLE_POWER = 32
"""Whole powers up to this are raised by squaring, with a kernel compiled for each."""


def runtime_power(mechanism: Mechanism) -> float | None:
    """The power where kernels read it when they run; None where it is compiled in, or there is
    none.
    """
    power = mechanism.power
    return None if power is None or (power.is_integer() and power <= WHOLE_POWER) else power


def compiled_as(mechanism: Mechanism) -> Mechanism:
    """A mechanism with the same compiled kernels: one power stands for all that are read when a
    kernel runs.
    """
    return mechanism if runtime_power(mechanism) is None else mechanism.replace(power=1.5)


def _bounded_factor(call: Call) -> bool:
    """Whether scores before any bias are bounded by ``SCORE_BOUND``: cosines times a known
    scale.
    """
    if call.mechanism.similarity != "cosine" or call.head_scale is not None:
        return False
    return abs(call.scale) * max(1.0, math.log(max(call.visibility.key_length, 1))) < SCORE_BOUND


def bounded(call: Call) -> bool:
    """Whether no score can be so small that phi leaves what float32 and bfloat16 hold."""
    if call.mechanism.score_bias != "0" or call.query.dtype == torch.float16 or call.bias is not None:
        return False
    return _bounded_factor(call)


def takes_unit_vectors(call: Call) -> bool:
    """Whether scores are products of unit vectors in float16, which saves two to three instructions
    a score.

    Only for bfloat16 inputs, whose own rounding is eight times as large. Not for re-weighted rows,
    where u^p multiplies that rounding beyond what the tests allow. Not where the scale is so small
    that float16 would lose it.
    """
    if call.query.dtype != torch.bfloat16 or call.mechanism.power is not None or abs(call.scale) < LEAST_SCALE:
        return False
    return _bounded_factor(call)


def variant(call: Call) -> tuple[bool, bool]:
    """What decides, besides mechanism and dtype, which compiled kernels run: it follows from scale
    and length.
    """
    return bounded(call), takes_unit_vectors(call)


def _triton_found() -> bool:
    try:
        return find_spec("triton") is not None
    except ImportError:
        return False


TRITON_FOUND = _triton_found()
"""Triton; asked here since torch 2.11 cannot trace the question."""
SAVED_VECTORS = 8
"""Vectors of the rows that every forward saves: the four of RowStatistics; sum phi(s) 2^-shift; sum
u^p; LASER's marks; the largest score in the score unit. ``loading`` has their indices.
"""


def rows_kept(call: Call) -> int:
    """How many vectors of the rows the forward returns: SAVED_VECTORS, and behind them memory for
    the residual.
    """
    residual = residual_dtype(call.mechanism, call.value.dtype)
    return SAVED_VECTORS + (0 if residual is None else -(-call.value.size(-1) * residual.itemsize // 4))


def residual_dtype(mechanism: Mechanism, dtype: torch.dtype) -> torch.dtype | None:
    """Of the residual that the backward wants beside an output of a dtype; or None.

    It is LASER's A e^V. For halves whose weights sum to one it is the rounding error of out, since
    the gradients hold D = sum(out dL/dout).
    """
    if mechanism.laser:
        return torch.float32
    return torch.int8 if dtype != torch.float32 and mechanism.normaliser == "l1" else None


def exponential_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of LASER's e^V and dL/d(A e^V) beside values of a dtype: float16 cannot hold them."""
    return torch.float32 if dtype == torch.float16 else dtype


def spans_too_much(x: Tensor) -> bool:
    """Whether a head of x [B, H, L, D] spans more elements than the kernels can count."""
    return (x.size(2) - 1) * x.stride(2) + (x.size(3) - 1) * x.stride(3) >= MAX_HEAD_SPAN


def refuses(call: Call, to_run: bool) -> str | None:
    """Machines and sizes that the kernels are not for."""
    query = call.query
    kind = query.device.type
    if kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on 'cpu', not on 'cuda' (TRITON_INTERPRET=1 would run the kernels in Python)"
    if torch.version.hip:
        return "the Triton kernels have not been compiled for AMD's GPUs"
    if kind == "cuda" and torch.cuda.get_device_capability(query.device) < OLDEST_CAPABILITY:
        return f"{torch.cuda.get_device_name(query.device)} is older than Ampere (compute capability 8.0)"
    if not TRITON_FOUND:
        return "Triton is not installed (pip install triton)"
    for name, x in (("query", query), ("key", call.key), ("value", call.value)):
        if spans_too_much(x):
            return f"a head of {name} spans 2^31 elements or more, and the kernels count places in 32 bits"
    widest = max(query.size(-1), call.value.size(-1))
    # out, gradients, unit vectors and e^V are new, contiguous tensors, also of expanded inputs
    longest = max(query.size(2), call.key.size(2))
    if longest * widest >= MAX_HEAD_SPAN:
        return f"{longest} rows of {widest} numbers a head are 2^31 or more, and the kernels count places in 32 bits"
    heads = query.size(0) * query.size(1)
    if heads > MAX_HEADS:
        return f"{heads} heads in all sequences are more than a grid of {MAX_HEADS} programs holds"
    return f"{widest} dimensions a head are more than {MAX_HEAD_DIM}" if widest > MAX_HEAD_DIM else None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and the rows' vectors [rows_kept, B, H, Lq]. Reads a cache where it
    lies.
    """
    from softfocus.backends.triton.call import Launcher

    with _current(call.query):
        return Launcher(call).forward()


def runner(call: Call) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function from query, key and value, laid out as the call's, to ``out``; for calls without
    other tensors.
    """
    from softfocus.backends.triton.call import Launcher

    template: Any = call
    template = template._replace(
        query=None, key=None, value=None
    )  # these tensors are not to live as long as the function

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with _current(query):
            return Launcher(template._replace(query=query, key=key, value=value)).forward()[0]

    return run


def backward(call: Call, grad: Tensor, bias_grad: bool, out: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Gradients by name, from what :func:`forward` returned."""
    from softfocus.backends.triton.call import Launcher

    with _current(call.query):
        return Launcher(call).backward(grad, bias_grad, out, rows)


def _current(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the device that is current."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
