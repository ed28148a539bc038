"""The two custom operators that every fused backend runs behind: schemas, shapes for tracing, and autograd.

Imports no backend: the implementation is looked up by name when the operator runs, so that the very first call may stand
inside ``torch.compile(fullgraph=True)``.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from softfocus.mechanism import Mechanism
from softfocus.reference import Problem, compute_dtype
from softfocus.visibility import Visibility

_decoded = lru_cache(maxsize=256)(Mechanism.from_json)


@torch.library.custom_op("softfocus::attend", mutates_args=())
def attend(
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
    """Attention by a named backend: out [B, H, Lq, Dv] and the row statistics [4, B, H, Lq].

    ``mechanism`` is ``Mechanism.code``; ``left`` and ``right`` are the window, -1 for no bound; ``seed`` is an int64 scalar
    when ``dropout_p`` is not 0. Arguments are taken as checked: call ``softfocus.attention``.
    """
    problem = Problem(query, key, value, bias, head_scale, power, scale, dropout_p)
    visibility = Visibility(query.size(2), key.size(2), left, right, mask, key_mask, document_ids)
    with own_dtypes(query):
        out, statistics = _load(backend).forward(problem, visibility, _decoded(mechanism), _item(seed))
    return out, statistics


@torch.library.custom_op("softfocus::attend_backward", mutates_args=())
def attend_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, bias, head_scale, power; what is not there or not wanted comes back empty."""
    problem = Problem(query, key, value, bias, head_scale, power, scale, dropout_p)
    visibility = Visibility(query.size(2), key.size(2), left, right, mask, key_mask, document_ids)
    with own_dtypes(query):
        grads = _load(backend).backward(grad, problem, visibility, _decoded(mechanism), _item(seed), bias_grad)
    # an operator may neither return None nor one of its own arguments
    return tuple(query.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


def own_dtypes(query: Tensor) -> AbstractContextManager[Any]:
    """Autocast has done its part before the operator; inside, it would round the statistics' products too."""
    kind = query.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _load(backend: str) -> Any:
    return import_module(f"softfocus.backends.{backend}")


def _item(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed.item())


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, h, lq, _d = query.shape
    out = query.new_empty(b, h, lq, value.size(-1))
    return out, query.new_empty(4, b, h, lq, dtype=compute_dtype(query.dtype))


@attend_backward.register_fake
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
    bias_grad = rest[-1]
    like = [query, key, value, bias if bias_grad else None, head_scale, power]
    return tuple(query.new_empty(0) if x is None else x.new_empty(x.shape) for x in like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.rest = inputs[:10], inputs[10:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor, _statistics: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = attend_backward(grad, *ctx.saved_tensors, *ctx.rest, ctx.needs_input_grad[3])
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, *[None] * (len(ctx.needs_input_grad) - 6)


attend.register_autograd(_backward, setup_context=_setup_context)
