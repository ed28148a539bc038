"""Fused C++ kernels for CPUs: blocks of whole rows kept in cache, no pass over the scores more than the algebra needs.

The kernels are compiled for the machine at first use (``build.py``). Deterministic: the forward for any number of threads,
the backward for a given number.
"""

from collections.abc import Callable
from ctypes import c_char_p, c_void_p
from typing import Any

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
    return build.why_unavailable()


def forward(problem: Problem, visibility: Visibility, mechanism: Mechanism, seed: int) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and the row statistics [4, B, H, Lq]."""
    query, key, value = problem[:3]
    out = _empty(*query.shape[:3], value.size(-1), dtype=query.dtype)
    statistics = _empty(4, *query.shape[:3])
    arguments, _made = call(problem, visibility, mechanism, seed)
    _run("softfocus_forward", arguments, query, key, value, out, statistics)
    return out, statistics


def prepare(
    problem: Problem, visibility: Visibility, mechanism: Mechanism
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function from query, key and value, laid out as the problem's, to ``out``; for problems without other tensors."""
    arguments, _made = call(problem, visibility, mechanism, seed=0)
    kernel = _kernel("softfocus_forward")
    one = _empty(1, dtype=problem.query.dtype)
    like = one.expand(*problem.query.shape[:3], problem.value.size(-1))  # takes torch half the time of a shape

    def ready(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(like)
        if kernel(arguments, query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), None):
            raise MemoryError(_NO_MEMORY)
        return out

    return ready


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
    arguments, _made = call(problem, visibility, mechanism, seed)
    grads = [_empty(*x.shape, dtype=x.dtype) for x in (query, key, value)]
    bias_to = _empty(*bias.shape).zero_() if bias is not None and bias_grad else None
    rows = [None if x is None else _empty(*query.shape[:3]) for x in (head_scale, power)]
    arrays = ARRAY.pack(*array(grad)), ARRAY.pack(*broadcast(bias_to))
    _run("softfocus_backward", arguments, *arrays, *grads, *rows)
    to_heads = (None if x is None else x.sum((0, 2)) for x in rows)
    return tuple(
        None if g is None or x is None else g.to(x.dtype)
        for g, x in zip((*grads, bias_to, *to_heads), problem[:6], strict=True)
    )


_NO_MEMORY = "softfocus: a kernel could not get the memory it works in"


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")  # whatever torch's defaults are


def _run(name: str, *arguments: bytes | Tensor | None) -> None:
    pointers = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    if _kernel(name)(*pointers):
        raise MemoryError(_NO_MEMORY)


_PARAMETERS = {"softfocus_forward": 6, "softfocus_backward": 8}


def _kernel(name: str) -> Callable[..., int]:
    """A kernel that takes bytes and addresses: told so, ctypes takes plain numbers for pointers."""
    kernel: Any = getattr(build.library(), name)
    if kernel.argtypes is None:
        kernel.argtypes = [c_char_p] + [c_void_p] * (_PARAMETERS[name] - 1)
    return kernel
