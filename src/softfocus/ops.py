"""The custom operators behind which the backends run: schemas, shapes for tracing, and autograd.

All of it follows from the fields of :class:`softfocus.contract.Call`. A backend is looked up by
name when an operator runs, so that the very first call may be inside
``torch.compile(fullgraph=True)``.
"""

import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from itertools import compress
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from softfocus import reference, validation
from softfocus.contract import (
    GRADIENTS,
    LEAVES,
    PARTS,
    Backend,
    Call,
    Runner,
    compute_dtype,
    optional_arguments,
    pack,
    unpack,
)

# Defined by schema: torch's wrappers around decorated functions take longer than a decode step
_library = torch.library.Library("softfocus", "DEF")
_UNCACHED_LEAVES = {name: kind for name, kind in LEAVES.items() if name not in PARTS["cache"][0]}
_SCHEMA, _CACHED_SCHEMA = (
    ", ".join(f"{kind} {name}" for name, kind in leaves.items()) for leaves in (_UNCACHED_LEAVES, LEAVES)
)
_HOLD_TENSORS = [kind.startswith("Tensor") for kind in LEAVES.values()]
_library.define(f"attend({_SCHEMA}, str backend) -> (Tensor, Tensor)")
_library.define(f"attend_cache({_CACHED_SCHEMA}, str backend) -> (Tensor, Tensor)")
_library.define(
    f"attend_backward(Tensor grad, {_SCHEMA}, str backend, bool bias_grad, Tensor? out, Tensor? rows) -> "
    f"({', '.join('Tensor' for _ in GRADIENTS)})"
)


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    *leaves, backend = arguments
    # Traced and exported graphs call the operator without ``refuse_tangents``
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        _refuse_duals(*(x for x in leaves if isinstance(x, Tensor)))
    call = unpack(leaves)
    _refuse_unfit(call, backend)
    return _forward(call, backend)


def _refuse_unfit(call: Call, backend: str) -> None:
    """Refuse the dtypes and devices of which the backend's kernels know nothing. A compiled call
    chooses a backend anew for them; an exported graph has the name of the one that was chosen.
    """
    supported, query = _load(backend).SUPPORTED, call.query
    if query.dtype not in supported.dtypes or not {query.device.type, "any"} & set(supported.devices):
        raise ValueError(
            f"softfocus: the backend {backend!r} was chosen when the graph was made, and {supported.lacks(call)}; "
            "export it again from inputs like these, or with backend='tiled'"
        )


def _attend_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *leaves, backend, bias_grad, out, rows = arguments
    call = unpack(leaves)
    _refuse_unfit(call, backend)
    kept = () if rows is None else (out, rows)
    backward = _load(backend).backward
    assert backward is not None, backend
    with without_autocast(grad):
        grads = backward(call, grad, bias_grad, *kept)
    for name in GRADIENTS:
        if name not in grads and getattr(call, name) is not None and (bias_grad or name != "bias"):
            raise RuntimeError(f"softfocus: backend {backend!r} returned no gradient of {name}; please report this")
    # An operator may return neither None nor one of its arguments
    return tuple(grads[name] if name in grads else grad.new_empty(0) for name in GRADIENTS)


_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("attend_cache", _attend, "CompositeExplicitAutograd")
_library.impl("attend_backward", _attend_backward, "CompositeExplicitAutograd")

attend = torch.ops.softfocus.attend.default
"""Attention by a named backend: out [B, H, Lq, Dv] and vectors of the rows [4 or more, B, H, Lq],
first the row statistics.

It takes the leaves of a call (``contract.pack``) and the backend's name. It checks nothing: use
``softfocus.attention``.
"""
attend_cache = torch.ops.softfocus.attend_cache.default
"""The same for a call with a cache. It has no gradient."""
attend_backward = torch.ops.softfocus.attend_backward.default
"""The gradients of a call, in the order of ``contract.GRADIENTS``. A gradient is empty if its
tensor is missing or if it is not needed.

``out`` and ``rows`` are what ``attend`` returned if the backend has ``saved_vector_count``, else
None.
"""


def run(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Returns what ``attend`` returns. Two kinds of calls run without the operator: those of the
    reference, which torch differentiates, and those that :func:`can_bypass_dispatcher`.
    """
    leaves = pack(call)
    tensors = [x for x in compress(leaves, _HOLD_TENSORS) if x is not None]
    if (backend == "reference" and call.cache is None) or can_bypass_dispatcher(*tensors):
        return _forward(call, backend)
    refuse_tangents(*tensors)
    _refuse_functional_gradients()
    result: tuple[Tensor, Tensor] = (attend if call.cache is None else attend_cache)(*leaves, backend)
    return result


def _forward(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor]
    with without_autocast(call.query):
        if call.cache is None:
            result = _load(backend).forward(call)
            return result
        lengths, reads_cache = call.cache.lengths, "cache" in _load(backend).SUPPORTED.features
        if lengths.is_cpu or not reads_cache:
            numbers = validation.check_cache_values(call.key, lengths, call.cache.page_table)
        rows = _empty_rows(call, backend)
        if reads_cache:
            return _load(backend).forward(call)[0], rows
        out, leaves = _empty_out(call), pack(call)
        shared_layout: tuple[Any, ...] | None = None
        if not optional_arguments(leaves):
            shared_layout = (
                backend, call.query.dtype, torch.get_num_threads(),
                *(x for x, is_tensor in zip(leaves, _HOLD_TENSORS, strict=True) if not is_tensor),
            )  # fmt: skip
        for b, length in enumerate(numbers):
            out[b : b + 1] = _of_sequence(call.of_sequence(b, length), backend, shared_layout)
        return out, rows


def _of_sequence(call: Call, backend: str, shared_layout: tuple[Any, ...] | None) -> Tensor:
    """``out`` of one sequence.

    Args:
        shared_layout: the part of the layout that all sequences share: everything except shapes and
            strides. None if the call has optional arguments.
    """
    run = None
    if shared_layout:
        tensors = call.query, call.key, call.value
        layout = (*shared_layout, *[(x.shape, x.stride()) for x in tensors])
        run = runners.get(layout) or add_runner(call, backend, layout)
    out: Tensor = run(*tensors) if run else _load(backend).forward(call)[0]
    return out


runners: dict[Hashable, Runner] = {}
"""The runners of the fast path, by layout. A call whose layout is here is not validated again:
validation takes longer than decoding.
"""
MAX_RUNNERS = 1024
if hasattr(os, "register_at_fork"):
    # The layouts contain the parent's number of threads; a forked child computes on one
    os.register_at_fork(after_in_child=runners.clear)


def add_runner(call: Call, backend: str, layout: Hashable) -> Runner | None:
    """Store a backend's runner for calls of this layout in ``runners``, and return it. None if the
    backend has no runner.

    A runner may be called only where :func:`can_bypass_dispatcher` is true.
    """
    make = _load(backend).runner
    runner = None if make is None else make(call)
    if runner is None:
        return None
    if len(runners) >= MAX_RUNNERS:
        runners.clear()
    runners[layout] = runner
    return runner


_PLAIN = (Tensor, torch.nn.Parameter)
try:  # private names of torch, which may change
    _OBSERVERS: tuple[Callable[[], Any], ...] = (
        torch._C._len_torch_dispatch_stack,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._get_tracing_state,
        torch._C._autograd._profiler_enabled,
    )
    forward_ad._current_level  # noqa: B018
    torch.empty(0)._is_zerotensor()
except (AttributeError, TypeError):
    _OBSERVERS = (lambda: True,)  # without them every call takes the operator


def can_bypass_dispatcher(*tensors: Tensor) -> bool:
    """Whether a call may bypass torch's dispatcher, which takes as long as a decode step on a short
    cache.

    Two conditions must hold. Nothing observes the operator: no gradient, forward-mode tangent,
    trace, dispatch mode, profiler or tensor subclass. And the memory of every tensor holds its
    numbers: no lazy negation, no zero tensor without memory.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    for observes in _OBSERVERS:
        if observes():
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
    """The operator has no forward-mode derivative, and torch would silently drop a tangent
    where nothing requires grad.

    Raises:
        NotImplementedError: a tensor has a tangent.
    """
    if torch.compiler.is_compiling():
        if _is_inside("Jvp"):
            raise NotImplementedError(NO_TANGENTS)
    elif forward_ad._current_level >= 0:
        _refuse_duals(*(x for x in tensors if x is not None))


NO_TANGENTS = "softfocus: only backend='reference' has forward-mode derivatives (a tangent was given)"


def _refuse_duals(*tensors: Tensor) -> None:
    level = forward_ad._current_level
    if any(torch._VF._unpack_dual(x, level=level)[1] is not None for x in tensors):
        raise NotImplementedError(NO_TANGENTS)


def _is_inside(transform: Literal["Grad", "Jvp"]) -> bool:
    """Whether a call, or what torch.compile traces, is inside torch.func.grad, vjp or a jacobian
    (Grad), or torch.func.jvp or jacfwd (Jvp).
    """
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == getattr(torch._C._functorch.TransformType, transform) for level in levels)


_is_inside._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refuse_functional_gradients() -> None:
    """torch.func's gradients cannot go through the operator, and torch's own error speaks of
    ``setup_context``.

    Raises:
        NotImplementedError: inside torch.func.grad, vjp or a jacobian.
    """
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None:
        return
    if _is_inside("Grad"):
        raise NotImplementedError(
            "softfocus: only backend='reference' works under torch.func.grad, vjp and jacobians; "
            "torch.autograd.grad and .backward() work with every backend"
        )


def without_autocast(query: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast. Its casts are already done, and inside a backend it would round
    the products of statistics.
    """
    device_type = query.device.type
    return torch.autocast(device_type, enabled=False) if autocasts(device_type) else nullcontext()


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a type of device. Not every type supports autocast, and whether
    one does is a question that torch.compile of torch 2.11 cannot trace.
    """
    supported = device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)
    return supported and torch.is_autocast_enabled(device_type)


def _load(backend: str) -> Backend:
    return reference if backend == "reference" else _imported(backend)


@cache
def _imported(backend: str) -> Backend:
    return cast(Backend, import_module(f"softfocus.backends.{backend}"))


def saved_vectors_of(call: Call, backend: str) -> int:
    """The number of saved vectors that a backend's backward needs from its forward, in addition to
    ``out``. 0 if it needs neither.
    """
    kept = _load(backend).saved_vector_count
    return kept(call) if kept else 0


def _empty_out(call: Call) -> Tensor:
    return call.query.new_empty(*call.query.shape[:3], call.value.size(-1))


def _empty_rows(call: Call, backend: str) -> Tensor:
    """The saved vectors of a call, empty. A call with a cache has no backward, and so none."""
    query, vectors = call.query, 0 if call.cache else saved_vectors_of(call, backend) or 4
    return query.new_empty(vectors, *query.shape[:3], dtype=compute_dtype(query.dtype))


@torch.library.register_fake("softfocus::attend_cache", lib=_library)
@torch.library.register_fake("softfocus::attend", lib=_library)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    *leaves, backend = arguments
    call = unpack(leaves)
    return _empty_out(call), _empty_rows(call, backend)


@torch.library.register_fake("softfocus::attend_backward", lib=_library)
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *leaves, _backend, bias_grad, _out, _rows = arguments
    by_name = dict(zip(_UNCACHED_LEAVES, leaves, strict=True))
    if not bias_grad:
        by_name["bias"] = None
    return tuple(
        grad.new_empty(0) if by_name[name] is None else by_name[name].new_empty(by_name[name].shape)
        for name in GRADIENTS
    )


_ARE_TENSORS = _HOLD_TENSORS[: len(_UNCACHED_LEAVES)]
_ARE_NUMBERS = [not is_tensor for is_tensor in _ARE_TENSORS]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.backend = inputs[-1]
    ctx.mark_non_differentiable(output[1])
    ctx.numbers = tuple(compress(inputs, _ARE_NUMBERS))
    kept = output if _load(ctx.backend).saved_vector_count else (None, None)
    ctx.save_for_backward(*compress(inputs, _ARE_TENSORS), *kept)


def _backward(ctx: Any, grad: Tensor, _rows: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, out, rows = ctx.saved_tensors
    tensors, numbers = iter(saved), iter(ctx.numbers)
    leaves = [next(tensors if is_tensor else numbers) for is_tensor in _ARE_TENSORS]
    wanted = dict(zip(_UNCACHED_LEAVES, ctx.needs_input_grad, strict=False))  # the last is the backend's
    grads = dict(zip(GRADIENTS, attend_backward(grad, *leaves, ctx.backend, wanted["bias"], out, rows), strict=True))
    return *[grads[name] if need else None for name, need in wanted.items()], None


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("softfocus: the fused backends are differentiable once; backend='reference' is twice")


torch.library.register_autograd("softfocus::attend_backward", _no_second_derivative, lib=_library)
torch.library.register_autograd("softfocus::attend", _backward, setup_context=_setup_context, lib=_library)
