"""Fused Triton kernels: two sweeps over the keys where rows are re-weighted, one otherwise, memory O(L), no atomics.

Triton is imported when a call runs, never before. The same kernels run on the CPU under Triton's interpreter
(``TRITON_INTERPRET=1`` before Triton is imported), which is how they are tested where there is no GPU.
"""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from softfocus.mechanism import Mechanism
from softfocus.reference import Problem
from softfocus.visibility import Visibility

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PHI = ("exp", "softplus", "sigmoid", "relu", "relu2", "relu6")
"""What ``kernels/pointwise.py`` holds."""
MOST_DIMENSIONS = 256
ROWS = 7
"""Vectors of the rows that the forward leaves: the four of RowStatistics, sum phi(s) e^-shift, sum u^p, LASER's marks."""


def supports(problem: Problem, visibility: Visibility, mechanism: Mechanism) -> str | None:
    """Calls on a CUDA device, with what the kernels carry."""
    kind = problem.query.device.type
    if kind != "cuda" and not (kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"the tensors are on {kind!r}, not on 'cuda' (TRITON_INTERPRET=1 would run the kernels in Python)"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if problem.query.dtype not in DTYPES:
        return f"{problem.query.dtype} is not among float32, bfloat16 and float16"
    if mechanism.phi not in PHI:
        return f"phi={mechanism.phi!r} is not among {', '.join(PHI)}"
    if mechanism.post != "none":
        return f"post={mechanism.post!r} is not carried"
    if problem.dropout_p:
        return "dropout is not carried"
    most = max(problem.query.size(-1), problem.value.size(-1))
    return f"{most} dimensions a head are more than {MOST_DIMENSIONS}" if most > MOST_DIMENSIONS else None


def forward(problem: Problem, visibility: Visibility, mechanism: Mechanism, seed: int) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and the rows' vectors [ROWS, B, H, Lq]."""
    from softfocus.backends.triton.call import Call

    return Call(problem, visibility, mechanism).forward()


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
    from softfocus.backends.triton.call import Call

    return Call(problem, visibility, mechanism).backward(grad, bias_grad, out, rows)
