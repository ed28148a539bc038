"""Fused Triton kernels: two sweeps over the keys where rows are re-weighted, one otherwise, no
atomics. Memory is O(L), and under a mask, key_mask or document_ids a few bytes per tile of scores.

Triton is imported when a call runs, never before. The checks that ``supports()`` and ``explain()``
need are in this module and in ``variants``. The same kernels run on the CPU in Triton's interpreter
(``TRITON_INTERPRET=1`` before Triton is imported). The tests use it where there is no GPU.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from softfocus.backends.triton import variants
from softfocus.contract import Call, Supported
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
saved_vector_count = variants.saved_vector_count


def _triton_found() -> bool:
    try:
        return find_spec("triton") is not None
    except ImportError:
        return False


TRITON_FOUND = _triton_found()
"""Whether Triton is installed. Found at import, because torch 2.11 cannot trace find_spec()."""


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
        if variants.spans_too_much(x):
            return f"a head of {name} spans 2^31 elements or more, and the kernels compute offsets within it in 32 bits"
    widest = max(query.size(-1), call.value.size(-1))
    # out, gradients, unit vectors and e^V are new, contiguous tensors, also of expanded inputs
    longest = max(query.size(2), call.key.size(2))
    if longest * widest >= variants.MAX_HEAD_SPAN:
        return (
            f"{longest} rows of {widest} numbers a head are 2^31 or more, "
            "and the kernels compute offsets within a head in 32 bits"
        )
    heads = query.size(0) * query.size(1)
    if heads > MAX_HEADS:
        return f"{heads} heads in all sequences are more than a grid of {MAX_HEADS} programs holds"
    return f"{widest} dimensions a head are more than {MAX_HEAD_DIM}" if widest > MAX_HEAD_DIM else None


def forward(call: Call, split: bool = True) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and ``saved``, the saved vectors [n, B, H, Lq] with
    n = ``saved_vector_count(call)``.
    The kernels read a cache in place. ``split``: whether the keys of few queries may be split among
    programs, which takes other kernels.
    """
    from softfocus.backends.triton.call import Launcher

    with _current(call.query):
        return Launcher(call).forward(split)


def splits_keys(call: Call) -> bool:
    """Whether the keys of a head are split among programs."""
    from softfocus.backends.triton.call import splits_of

    with _current(call.query):
        return splits_of(call) > 1


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
