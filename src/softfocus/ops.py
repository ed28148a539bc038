"""The two custom operators that every fused backend runs behind: schemas, shapes for tracing, and autograd.

Imports no backend: the implementation is looked up by name when the operator runs, so that the very first call may stand
inside ``torch.compile(fullgraph=True)``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from softfocus.mechanism import Mechanism
from softfocus.reference import Problem, compute_dtype
from softfocus.visibility import Visibility

decoded = lru_cache(maxsize=256)(Mechanism.from_json)


# Defined by schema, not by decorating a function: torch's wrappers around such functions take longer than a decode step
_library = torch.library.Library("softfocus", "DEF")
_PROBLEM = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? head_scale, Tensor? power, Tensor? mask, Tensor? key_mask, "
    "Tensor? document_ids, Tensor? seed, int left, int right, float scale, float dropout_p, str mechanism, str backend"
)
_library.define(f"attend({_PROBLEM}) -> (Tensor, Tensor)")
_library.define(
    f"attend_backward(Tensor grad, {_PROBLEM}, bool bias_grad, Tensor? out=None, Tensor? rows=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    head_scale: Tensor | None,
    power: Tensor | None,
    mask: Tensor | None,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    scale: float,
    dropout_p: float,
    mechanism: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    problem = Problem(query, key, value, bias, head_scale, power, scale, dropout_p)
    visibility = Visibility(query.size(2), key.size(2), left, right, mask, key_mask, document_ids)
    return run_unwatched(problem, visibility, decoded(mechanism), seed, backend)


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    head_scale: Tensor | None,
    power: Tensor | None,
    mask: Tensor | None,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    scale: float,
    dropout_p: float,
    mechanism: str,
    backend: str,
    bias_grad: bool,
    out: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, ...]:
    problem = Problem(query, key, value, bias, head_scale, power, scale, dropout_p)
    visibility = Visibility(query.size(2), key.size(2), left, right, mask, key_mask, document_ids)
    with own_dtypes(query):
        algebra = decoded(mechanism)
        kept = (out, rows) if rows_of(backend, algebra, value) else ()
        grads = _load(backend).backward(grad, problem, visibility, algebra, _item(seed), bias_grad, *kept)
    # an operator may neither return None nor one of its own arguments
    return tuple(query.new_empty(0) if g is None else g for g in grads)


_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("attend_backward", _attend_backward, "CompositeExplicitAutograd")

attend = torch.ops.softfocus.attend.default
"""Attention by a named backend: out [B, H, Lq, Dv] and vectors of the rows [4 or more, B, H, Lq], first the row statistics.

``mechanism`` is ``Mechanism.code``; ``left`` and ``right`` are the window, -1 for no bound; ``seed`` is an int64 scalar when
``dropout_p`` is not 0. Arguments are taken as checked: call ``softfocus.attention``.
"""
attend_backward = torch.ops.softfocus.attend_backward.default
"""Gradients of query, key, value, bias, head_scale, power; what is not there or not wanted comes back empty.

``out`` and ``rows`` are what ``attend`` returned, for a backend that wants them back (:func:`rows_of`), else None.
"""


def run_unwatched(
    problem: Problem, visibility: Visibility, mechanism: Mechanism, seed: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """What ``attend`` computes, without the dispatcher; only where :func:`unwatched`."""
    with own_dtypes(problem.query):
        result: tuple[Tensor, Tensor] = _load(backend).forward(problem, visibility, mechanism, _item(seed))
        return result


def prepare(
    problem: Problem, visibility: Visibility, mechanism: Mechanism, backend: str
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """A function of query, key and value laid out as the problem's, which does only what has to be done each time.

    None from a backend that has none. The function's ``out`` is ``attend``'s; call it only where :func:`unwatched`.
    """
    prepared = None if backend == "reference" else getattr(_load(backend), "prepare", None)
    return prepared(problem, visibility, mechanism) if prepared else None


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


@cache
def _load(backend: str) -> Any:
    return import_module(f"softfocus.backends.{backend}")


def rows_of(backend: str, mechanism: Mechanism, value: Tensor) -> int:
    """How many vectors of the rows a backend's forward leaves to its backward, with ``out``; 0 where that begins anew."""
    kept: Callable[[Mechanism, Tensor], int] | None = getattr(_load(backend), "rows_kept", None)
    return kept(mechanism, value) if kept else 0


def cache_of(backend: str) -> Callable[..., Tensor] | None:
    """A backend's own ``attend_cache``, or None: it then takes the sequences one after another."""
    return None if backend == "reference" else getattr(_load(backend), "attend_cache", None)


def _item(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed.item())


@torch.library.register_fake("softfocus::attend", lib=_library)
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    b, h, lq, _d = query.shape
    out = query.new_empty(b, h, lq, value.size(-1))
    vectors = rows_of(rest[-1], decoded(rest[-2]), value) or 4
    return out, query.new_empty(vectors, b, h, lq, dtype=compute_dtype(query.dtype))


@torch.library.register_fake("softfocus::attend_backward", lib=_library)
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    head_scale: Tensor | None,
    power: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    bias_grad = rest[10]
    like = [query, key, value, bias if bias_grad else None, head_scale, power]
    return tuple(query.new_empty(0) if x is None else x.new_empty(x.shape) for x in like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.rest = inputs[:10], inputs[10:]
    ctx.mark_non_differentiable(output[1])
    kept = output if rows_of(ctx.rest[-1], decoded(ctx.rest[-2]), tensors[2]) else (None, None)
    ctx.save_for_backward(*tensors, *kept)


def _backward(ctx: Any, grad: Tensor, _statistics: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, rows = ctx.saved_tensors
    grads = attend_backward(grad, *tensors, *ctx.rest, ctx.needs_input_grad[3], out, rows)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, *[None] * (len(ctx.needs_input_grad) - 6)


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("softfocus: the fused backends are differentiable once; backend='reference' is twice")


torch.library.register_autograd("softfocus::attend_backward", _no_second_derivative, lib=_library)
torch.library.register_autograd("softfocus::attend", _backward, setup_context=_setup_context, lib=_library)
