"""Fused C++ kernels for CPUs: blocks of whole rows kept in cache, no pass over the scores more than the algebra needs.

The kernels are compiled for the machine at first use (``build.py``). Deterministic: the forward for any number of threads,
the backward for a given number.
"""

from ctypes import c_void_p

import torch
from torch import Tensor

from softfocus.backends.cpu import build as build
from softfocus.backends.cpu.call import ARRAY, DTYPES, PHI, array, broadcast, call
from softfocus.mechanism import Mechanism
from softfocus.reference import Problem
from softfocus.visibility import Visibility


def supports(problem: Problem, visibility: Visibility, mechanism: Mechanism) -> str | None:
    """Calls on the CPU, where the kernels can be compiled, with what they carry."""
    if problem.query.device.type != "cpu":
        return f"the tensors are on {problem.query.device.type!r}, not on the CPU"
    if problem.query.dtype not in DTYPES:
        return f"{problem.query.dtype} is not among float32, bfloat16 and float16"
    if mechanism.phi not in PHI:
        return f"phi={mechanism.phi!r} is not among {', '.join(PHI)}"
    if mechanism.post != "none":
        return f"post={mechanism.post!r} is not carried"
    if mechanism.laser and (mechanism.power or 0.0) > 15.0:
        return f"LASER over re-weighting with power={mechanism.power:g} is not carried: above 15, u^p may underflow"
    if problem.dropout_p:
        return "dropout is not carried"
    return build.why_unavailable()


def forward(problem: Problem, visibility: Visibility, mechanism: Mechanism, seed: int) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and the row statistics [4, B, H, Lq]."""
    query = problem.query
    out = torch.empty(*query.shape[:3], problem.value.size(-1))
    statistics = torch.empty(4, *query.shape[:3])
    arguments, _made = call(problem, visibility, mechanism)
    _run("softfocus_forward", arguments, out, statistics)
    return out.to(query.dtype), statistics


def backward(
    grad: Tensor,
    problem: Problem,
    visibility: Visibility,
    mechanism: Mechanism,
    seed: int,
    bias_grad: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, bias, head_scale and power; None where there is nothing to differentiate."""
    query, key, value, bias, head_scale, power = problem[:6]
    arguments, _made = call(problem, visibility, mechanism)
    grads = [torch.empty(x.shape) for x in (query, key, value)]
    bias_to = torch.zeros(bias.shape) if bias is not None and bias_grad else None
    rows = [None if x is None else torch.empty(query.shape[:3]) for x in (head_scale, power)]
    arrays = ARRAY.pack(*array(grad)), ARRAY.pack(*broadcast(bias_to))
    _run("softfocus_backward", arguments, *arrays, *grads, *rows)
    to_heads = (None if x is None else x.sum((0, 2)) for x in rows)
    return tuple(
        None if g is None or x is None else g.to(x.dtype)
        for g, x in zip((*grads, bias_to, *to_heads), problem[:6], strict=True)
    )


def _run(name: str, *arguments: bytes | Tensor | None) -> None:
    pointers = [c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
    if getattr(build.library(), name)(*pointers):
        raise MemoryError(f"softfocus: {name} could not get the memory it works in")
