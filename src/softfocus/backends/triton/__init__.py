"""Fused Triton kernels: two sweeps over the keys where rows are re-weighted, one otherwise, memory O(L), no atomics.

Triton is imported when a call runs, never before. The same kernels run on the CPU under Triton's interpreter
(``TRITON_INTERPRET=1`` before Triton is imported), which is how they are tested where there is no GPU.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from softfocus.mechanism import Mechanism
from softfocus.reference import Problem
from softfocus.visibility import Cache, Visibility

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PHI = ("exp", "softplus", "sigmoid", "relu", "relu2", "relu6")
"""What ``kernels/pointwise.py`` holds."""
MOST_DIMENSIONS = 256
OLDEST = (8, 0)
MOST_HEADS = 65535
"""Of all sequences together: CUDA's limit of the second dimension of a grid."""


WHOLE_POWER = 32
"""Whole powers up to this are raised by squaring, with a kernel compiled for each; others are read when the kernel runs."""


def compiled_as(mechanism: Mechanism) -> Mechanism:
    """A mechanism that has the same compiled kernels: what stands for all powers that are read when a kernel runs."""
    power = mechanism.power
    if power is None or (power == int(power) and 1 <= power <= WHOLE_POWER):
        return mechanism
    return mechanism.replace(power=1.5)


def _there() -> bool:
    try:
        return find_spec("triton") is not None
    except ImportError:
        return False


THERE = _there()
"""Triton; asked here since torch 2.11 cannot trace the question."""
ROWS = 8
"""Vectors of the rows that every forward leaves: the four of RowStatistics; sum phi(s) 2^-shift and sum u^p; LASER's marks; the
largest score in the kernels' unit."""


def rows_kept(mechanism: Mechanism, value: Tensor) -> int:
    """So many vectors of the rows come from the forward: ROWS, and after them in their memory what the backward wants beside
    out."""
    rest = rest_dtype(mechanism, value.dtype)
    return ROWS + (0 if rest is None else -(-value.size(-1) * rest.itemsize // 4))


def rest_dtype(mechanism: Mechanism, dtype: torch.dtype) -> torch.dtype | None:
    """Of what the backward wants beside an output of a dtype: LASER's e^-out; of halves, what rounding has taken off, where the
    weights sum to one and the gradients hold D = sum(out dL/dout). Or None."""
    if mechanism.laser:
        return exponential_dtype(dtype)
    return torch.int8 if dtype != torch.float32 and mechanism.normaliser == "l1" else None


def exponential_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of LASER's e^V and e^-out beside values of a dtype: float16 could not hold them."""
    return torch.float32 if dtype == torch.float16 else dtype


def supports(problem: Problem, visibility: Visibility, mechanism: Mechanism) -> str | None:
    """Calls on a CUDA device, with what the kernels carry."""
    kind = problem.query.device.type
    if kind != "cuda" and not (kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"the tensors are on {kind!r}, not on 'cuda' (TRITON_INTERPRET=1 would run the kernels in Python)"
    if torch.version.hip:
        return "the Triton kernels have not been compiled for AMD's GPUs"
    if kind == "cuda" and torch.cuda.get_device_capability(problem.query.device) < OLDEST:
        return f"{torch.cuda.get_device_name(problem.query.device)} is older than Ampere (compute capability 8.0)"
    if not THERE:
        return "Triton is not installed (pip install triton)"
    if problem.query.dtype not in DTYPES:
        return f"{problem.query.dtype} is not among float32, bfloat16 and float16"
    if mechanism.phi not in PHI:
        return f"phi={mechanism.phi!r} is not among {', '.join(PHI)}"
    if mechanism.post != "none":
        return f"post={mechanism.post!r} is not carried"
    for name, x in (("query", problem.query), ("key", problem.key), ("value", problem.value)):
        if (x.size(2) - 1) * x.stride(2) + (x.size(3) - 1) * x.stride(3) >= 2**31:
            return f"a head of {name} reaches over 2^31 elements and more, within which places are counted in 32 bits"
    heads = problem.query.size(0) * problem.query.size(1)
    if heads > MOST_HEADS:
        return f"{heads} heads in all sequences are more than a grid of {MOST_HEADS} programs holds"
    most = max(problem.query.size(-1), problem.value.size(-1))
    return f"{most} dimensions a head are more than {MOST_DIMENSIONS}" if most > MOST_DIMENSIONS else None


def forward(problem: Problem, visibility: Visibility, mechanism: Mechanism, seed: int) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and the rows' vectors [rows_kept, B, H, Lq]."""
    from softfocus.backends.triton.call import forward_of

    with _current(problem.query):
        return forward_of(problem, visibility, mechanism, seed=seed)


def prepare(
    problem: Problem, visibility: Visibility, mechanism: Mechanism
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function from query, key and value, laid out as the problem's, to ``out``; for problems without other tensors."""
    from softfocus.backends.triton.call import forward_of

    like: Any = problem
    like = like._replace(query=None, key=None, value=None)  # these tensors are not to live as long as the function

    def ready(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with _current(query):
            return forward_of(like._replace(query=query, key=key, value=value), visibility, mechanism)[0]

    return ready


def backward(
    grad: Tensor,
    problem: Problem,
    visibility: Visibility,
    mechanism: Mechanism,
    seed: int,
    bias_grad: bool,
    out: Tensor,
    rows: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, bias, head_scale and power; None where there is nothing to differentiate."""
    from softfocus.backends.triton.call import backward_of

    with _current(problem.query):
        return backward_of(problem, visibility, mechanism, seed, grad, bias_grad, out, rows)


def attend_cache(problem: Problem, cache: Cache, left: int, mechanism: Mechanism) -> Tensor:
    """out [B, H, Lq, Dv] of queries at the ends of the sequences of a cache, read where it lies."""
    from softfocus.backends.triton.call import forward_of

    pages = 1 if cache.page_table is None else cache.page_table.size(1)
    visibility = Visibility(problem.query.size(2), problem.key.size(2) * pages, left, 0)
    with _current(problem.query):
        return forward_of(problem, visibility, mechanism, cache)[0]


def _current(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the device that is current."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
