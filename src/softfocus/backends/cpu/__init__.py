"""Fused C++ kernels for CPUs, compiled for the machine at first use (``build.py``).

They work on blocks of at most 128 whole rows. The forward keeps their scores, 128 Lk floats per
thread, which for long rows exceed the processor's cache. The backward also allocates as many floats
for dL/dA, and with re-weighting as many again for u and a byte per key and row. LASER needs as
many again for its exact terms. The forward is
deterministic for any number of threads, the backward for a given number.
"""

from collections.abc import Callable
from ctypes import c_char_p, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from softfocus.backends.cpu import build as build
from softfocus.backends.cpu.call import SUPPORTED, TENSOR_VIEW, broadcastable_view, pack_params, tensor_view
from softfocus.contract import Call
from softfocus.pointwise import FUSED

__all__ = ["ABOUT", "SUPPORTED", "backward", "build", "forward", "refuses", "runner", "saved_vector_count"]

ABOUT = "fused C++ kernels, compiled for this machine at first use: memory O(L)"
# Members of contract.Backend that this backend does not need
saved_vector_count = None
KEY_LENGTH_LIMIT = 2**31
"""The kernels compare the indices of keys in 32 bits (``csrc/params.h``)."""


def refuses(call: Call, to_run: bool) -> str | None:
    """Why the kernels are switched off or do not compile, or that there are too many keys. Whether
    they compile is tried only for a call that is to run.
    """
    if call.visibility.key_length >= KEY_LENGTH_LIMIT:
        return f"{call.visibility.key_length} keys are 2^31 or more, and the kernels compare their indices in 32 bits"
    return build.why_unavailable(compiling=to_run)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and the row statistics [4, B, H, Lq]."""
    query, key, value = call.query, call.key, call.value
    out = _empty(*query.shape[:3], value.size(-1), dtype=query.dtype)
    statistics = _empty(4, *query.shape[:3])
    arguments, _temporaries = pack_params(call)
    _run("softfocus_forward", arguments, query, key, value, out, statistics)
    return out, statistics


def runner(call: Call) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function from query, key and value, laid out as the call's, to ``out``; for calls without
    other tensors. The packed arguments of such a call hold no pointer but the three that ``run``
    replaces. They also hold the number of threads and the dropout seed: the caller makes a new
    runner where these change.
    """
    arguments, _temporaries = pack_params(call)
    kernel = _kernel("softfocus_forward")
    one = _empty(1, dtype=call.query.dtype)
    # empty_like() takes half the time of empty(). The strides of ``empty_out`` are 0. Such strides
    # give no order of the dimensions, so that ``out`` is contiguous
    empty_out = one.expand(*call.query.shape[:3], call.value.size(-1))

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(empty_out)
        if kernel(arguments, query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), None):
            raise MemoryError(_NO_MEMORY)
        return out

    return run


def backward(call: Call, grad: Tensor, bias_grad: bool) -> dict[str, Tensor]:
    """Gradients by name."""
    query, bias = call.query, call.bias
    arguments, _temporaries = pack_params(call)
    grads = {name: _empty(*x.shape, dtype=x.dtype) for name, x in zip(("query", "key", "value"), call[:3], strict=True)}
    grad_bias = None
    if bias is not None and bias_grad:
        # A running sum of millions of terms in float32 loses digits
        grad_bias = _empty(*bias.shape, dtype=torch.float64 if call.sums_bias else torch.float32).zero_()
    by_row = {name: _empty(*query.shape[:3]) for name in ("head_scale", "power") if getattr(call, name) is not None}
    arrays = TENSOR_VIEW.pack(*tensor_view(grad)), TENSOR_VIEW.pack(*broadcastable_view(grad_bias))
    _run("softfocus_backward", arguments, *arrays, *grads.values(), by_row.get("head_scale"), by_row.get("power"))
    grads |= {name: x.sum((0, 2)).to(getattr(call, name).dtype) for name, x in by_row.items()}
    if bias is not None and grad_bias is not None:
        grads["bias"] = grad_bias.to(bias.dtype)
    return grads


_NO_MEMORY = "softfocus: a kernel could not get the memory it works in"


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")  # whatever torch's default device is


def _run(name: str, *arguments: bytes | Tensor | None) -> None:
    pointers = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    if _kernel(name)(*pointers):
        raise MemoryError(_NO_MEMORY)


_PARAMETERS = {"softfocus_forward": 6, "softfocus_backward": 8}


def _kernel(name: str) -> Callable[..., int]:
    """A kernel, with its argument types declared, so that ctypes takes numbers for pointers.

    Raises:
        RuntimeError: ``with_phi`` in ``csrc/pointwise.h`` lacks a phi of FUSED, or ``Dtype`` in
            ``csrc/params.h`` a dtype of SUPPORTED; or one of them has one more. A number without a
            case would compute nothing, or read memory as another dtype.
    """
    library = build.library()
    kernel: Any = getattr(library, name)
    if kernel.argtypes is None:
        count = c_int64.in_dll(library, "softfocus_phi_count").value
        if count != len(FUSED):
            raise RuntimeError(
                f"softfocus: the CPU kernels have {count} phi and pointwise.FUSED has {len(FUSED)}: see "
                "docs/adding-a-phi.md"
            )
        count, dtypes = c_int64.in_dll(library, "softfocus_dtype_count").value, len(SUPPORTED.dtypes)
        if count != dtypes:
            raise RuntimeError(
                f"softfocus: the CPU kernels have {count} dtypes and SUPPORTED has {dtypes}: see csrc/tensor.h"
            )
        kernel.argtypes = [c_char_p] + [c_void_p] * (_PARAMETERS[name] - 1)
    return kernel
