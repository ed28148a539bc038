"""The two custom operators that every fused backend runs behind: schemas, shapes for tracing, and autograd.

All of it follows from the fields of :class:`softfocus.contract.Call`. No backend is imported here: the implementation is
looked up by name when the operator runs, so that the very first call may stand inside ``torch.compile(fullgraph=True)``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from softfocus import reference, validation
from softfocus.contract import GRADIENTS, LEAVES, Call, compute_dtype, pack, unpack

# Defined by schema, not by decorating a function: torch's wrappers around such functions take longer than a decode step
_library = torch.library.Library("softfocus", "DEF")
_CALL = ", ".join(f"{kind} {name}" for name, kind in LEAVES.items()) + ", str backend"
_library.define(f"attend({_CALL}) -> (Tensor, Tensor)")
_library.define(
    f"attend_backward(Tensor grad, {_CALL}, bool bias_grad, Tensor? out, Tensor? rows) -> "
    f"({', '.join('Tensor' for _ in GRADIENTS)})"
)


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    *leaves, backend = arguments
    return _forward(unpack(leaves), backend)


def _attend_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *leaves, backend, bias_grad, out, rows = arguments
    call = unpack(leaves)
    kept = () if rows is None else (out, rows)
    with own_dtypes(grad):
        grads = _load(backend).backward(call, grad, bias_grad, *kept)
    # an operator may neither return None nor one of its own arguments
    return tuple(grads[name] if name in grads else grad.new_empty(0) for name in GRADIENTS)


_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("attend_backward", _attend_backward, "CompositeExplicitAutograd")

attend = torch.ops.softfocus.attend.default
"""Attention by a named backend: out [B, H, Lq, Dv] and vectors of the rows [4 or more, B, H, Lq], first the row statistics.

Takes what ``contract.pack`` makes of a call, and the backend. The call is taken as checked: use ``softfocus.attention``.
"""
attend_backward = torch.ops.softfocus.attend_backward.default
"""``contract.GRADIENTS`` of a call; what is not there or not wanted comes back empty.

``out`` and ``rows`` are what ``attend`` returned, for a backend that wants them back (:func:`rows_of`), else None.
"""


def run(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """What ``attend`` returns. Without it run the reference, which torch differentiates, and what nothing watches."""
    leaves = pack(call)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if (backend == "reference" and call.cache is None) or unwatched(*tensors):
        return _forward(call, backend)
    refuse_tangents(*tensors)
    result: tuple[Tensor, Tensor] = attend(*leaves, backend)
    return result


def _forward(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor]
    with own_dtypes(call.query):
        if call.cache is None:
            result = _load(backend).forward(call)
            return result
        lengths, own = call.cache.lengths, "cache" in _load(backend).CARRIES.features
        if lengths.is_cpu or not own:
            numbers = validation.check_cache_values(call.key, lengths, call.cache.page_table)
        if own:
            result = _load(backend).forward(call)
            return result
        out, rows = _empty(call, backend)
        for b, length in enumerate(numbers):
            out[b : b + 1], rows[:, b : b + 1] = _load(backend).forward(call.of_sequence(b, length))
        return out, rows


def prepare(call: Call, backend: str) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """A function of query, key and value laid out as the call's, which does only what has to be done each time.

    None from a backend that has none. The function's ``out`` is ``attend``'s; call it only where :func:`unwatched`.
    """
    prepared = getattr(_load(backend), "prepare", None)
    return prepared(call) if prepared else None


_PLAIN = (Tensor, torch.nn.Parameter)
try:  # torch's own names, not promised to stay
    _WATCHERS: tuple[Callable[[], Any], ...] = (
        torch._C._len_torch_dispatch_stack,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._get_tracing_state,
        torch._C._autograd._profiler_enabled,
    )
    forward_ad._current_level  # noqa: B018
    torch.empty(0)._is_zerotensor()
except (AttributeError, TypeError):
    _WATCHERS = (lambda: True,)  # without them every call takes the operator


def unwatched(*tensors: Tensor) -> bool:
    """Whether nothing would see the operator go by, and a tensor's memory holds what the tensor says.

    No gradient in either direction, no trace, no dispatch mode, no profiler, no tensor subclass; no lazy negation, no zeros
    without memory. Then the dispatcher may be left out: its way through autograd takes as long as a decode step on a short
    cache.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    for watches in _WATCHERS:
        if watches():
            return False
    recording = torch.is_grad_enabled()
    for x in tensors:
        if (
            type(x) not in _PLAIN
            or (recording and x.requires_grad)
            or x.is_meta
            or x.layout is not torch.strided
            or x.is_nested
            or x.is_neg()
            or x._is_zerotensor()
        ):
            return False
    return True


def refuse_tangents(*tensors: Tensor | None) -> None:
    """The operator has no forward-mode derivative; torch would drop a tangent in silence where nothing requires grad.

    Raises:
        NotImplementedError: a tensor has a tangent.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "softfocus: only backend='reference' has forward-mode derivatives (a tangent was given)"
        )


def own_dtypes(query: Tensor) -> AbstractContextManager[Any]:
    """Autocast has done its part before the operator; inside, it would round the statistics' products too."""
    kind = query.device.type
    return torch.autocast(kind, enabled=False) if autocasts(kind) else nullcontext()


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a kind of device; not every kind knows it."""
    return (kind == "cpu" or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


def _load(backend: str) -> Any:
    return reference if backend == "reference" else _imported(backend)


@cache
def _imported(backend: str) -> Any:
    return import_module(f"softfocus.backends.{backend}")


def rows_of(call: Call, backend: str) -> int:
    """How many vectors of the rows a backend's forward leaves to its backward, with ``out``; 0 where that begins anew."""
    kept: Callable[[Call], int] | None = getattr(_load(backend), "rows_kept", None)
    return kept(call) if kept else 0


def _empty(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Of the shapes that ``attend`` returns."""
    query, vectors = call.query, rows_of(call, backend) or 4
    out = query.new_empty(*query.shape[:3], call.value.size(-1))
    return out, query.new_empty(vectors, *query.shape[:3], dtype=compute_dtype(query.dtype))


@torch.library.register_fake("softfocus::attend", lib=_library)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    *leaves, backend = arguments
    return _empty(unpack(leaves), backend)


@torch.library.register_fake("softfocus::attend_backward", lib=_library)
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *leaves, _backend, bias_grad, _out, _rows = arguments
    given = dict(zip(LEAVES, leaves, strict=True))
    if not bias_grad:
        given["bias"] = None
    return tuple(
        grad.new_empty(0) if given[name] is None else given[name].new_empty(given[name].shape) for name in GRADIENTS
    )


_ARE_TENSORS = [kind.startswith("Tensor") for kind in LEAVES.values()]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *leaves, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.numbers = [x for x, is_tensor in zip(leaves, _ARE_TENSORS, strict=True) if not is_tensor]
    tensors = [x for x, is_tensor in zip(leaves, _ARE_TENSORS, strict=True) if is_tensor]
    ctx.save_for_backward(*tensors, *(output if rows_of(unpack(leaves), ctx.backend) else (None, None)))


def _backward(ctx: Any, grad: Tensor, _rows: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, out, rows = ctx.saved_tensors
    tensors, numbers = iter(saved), iter(ctx.numbers)
    leaves = [next(tensors if is_tensor else numbers) for is_tensor in _ARE_TENSORS]
    *needed, _ = ctx.needs_input_grad  # the last is the backend's
    wanted = dict(zip(LEAVES, needed, strict=True))
    grads = dict(zip(GRADIENTS, attend_backward(grad, *leaves, ctx.backend, wanted["bias"], out, rows), strict=True))
    return *(grads[name] if need else None for name, need in wanted.items()), None


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("softfocus: the fused backends are differentiable once; backend='reference' is twice")


torch.library.register_autograd("softfocus::attend_backward", _no_second_derivative, lib=_library)
torch.library.register_autograd("softfocus::attend", _backward, setup_context=_setup_context, lib=_library)
