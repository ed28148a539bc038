"""The float64 reference as oracle, and tolerances that are computed from what the eager formula loses in the same dtype."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from softfocus import catalog, functional, validation
from softfocus.mechanism import Mechanism
from softfocus.testing.cases import Case
from softfocus.visibility import Visibility

REPLICAS = 8
BAND = 4.0
"""Rounding band: this many units in the last place of a tensor's largest value, on top of twice the eager error."""


@dataclass(frozen=True)
class Outcome:
    """Everything that a call and its backward gave, by name: "out", "query.grad", "bias.grad", ..., "log_norm"."""

    tensors: dict[str, Tensor]


def run(attention: Callable[..., Any], arguments: dict[str, Any], seed: int = 1) -> Outcome:
    """Call, draw an upstream gradient from the seed, go backward, collect.

    Args:
        attention: takes ``arguments``; returns out [B, H, Lq, Dv].
        arguments: of ``attention()``; gradients are taken of every tensor that requires them.
        seed: of the upstream gradient, which does not depend on dtype or device.
    """
    out = attention(**arguments)
    generator = torch.Generator().manual_seed(seed)
    above = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    leaves = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    grads = torch.autograd.grad(out, list(leaves.values()), above)
    return Outcome({"out": out.detach(), **{f"{name}.grad": g for name, g in zip(leaves, grads, strict=True)}})


def check(
    attention: Callable[..., Any], case: Case, mechanism: str | Mechanism, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Hold an implementation against the float64 reference, with the eager formula's error as the yardstick.

    Args:
        attention: takes the arguments of ``softfocus.attention`` that the case uses, ``mechanism=`` among them.
        case: the problem.
        mechanism: a name or a Mechanism.
        dtype, device: of the inputs.

    Raises:
        AssertionError: naming the tensor, its error, and the tolerance.
    """
    algebra = catalog.named(mechanism) if isinstance(mechanism, str) else mechanism
    arguments = case.arguments(algebra, dtype, device=device)
    # float64 has no exact oracle above it: there the yardstick is what the eager formula loses in float32, in ulp, and half
    # as much again for what the oracle itself loses
    low = torch.float32 if dtype == torch.float64 else dtype
    plain = arguments if low == dtype else case.arguments(algebra, low, device=device)
    yardstick = _eager_errors(plain, run(_reference, _exactly(plain)))
    ulp = 1.0 if low == dtype else 1.5 * torch.finfo(dtype).eps / torch.finfo(low).eps
    expected = run(_reference, _exactly(arguments))
    compare(
        run(attention, arguments),
        expected,
        {k: e * ulp for k, e in yardstick.items()},
        f"{case.name}, {algebra}, {dtype}",
    )


def compare(actual: Outcome, expected: Outcome, yardstick: dict[str, float], label: str) -> None:
    """Every tensor's largest error is at most twice the eager formula's, plus BAND units in the last place.

    Args:
        actual: of the implementation.
        expected: of the dense formula in float64 on the same numbers.
        yardstick: the eager formula's largest error, tensor by tensor.
        label: stands in the message.
    """
    assert actual.tensors.keys() == expected.tensors.keys(), f"{label}: got {list(actual.tensors)}"
    for name, want in expected.tensors.items():
        got, unavoidable = actual.tensors[name], yardstick[name]
        assert got.shape == want.shape, f"{label}: {name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        error = _largest(got.double() - want)
        tolerance = 2.0 * unavoidable + BAND * torch.finfo(got.dtype).eps * _largest(want)
        assert error <= tolerance, (
            f"{label}: {name} is off by {error:.3g}, more than the tolerance {tolerance:.3g} = twice the eager formula's "
            f"error {unavoidable:.3g} + {BAND:g} ulp of {_largest(want):.3g}"
        )


def _reference(**arguments: Any) -> Tensor:
    return functional.attention(**arguments, backend="reference")


def _exactly(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in arguments.items()
    }


def _eager_errors(arguments: dict[str, Any], exact: Outcome) -> dict[str, float]:
    """The largest error of the eager formula over a few orders of summation.

    One evaluation is one draw of its rounding errors, and can be lucky. Shuffling the head dimension and the keys leaves
    the mathematics alone and draws again.
    """
    worst = dict.fromkeys(exact.tensors, 0.0)
    for seed in range(REPLICAS):
        outcome = run(partial(_shuffled, seed), arguments)
        for name, want in exact.tensors.items():
            worst[name] = max(worst[name], _largest(outcome.tensors[name].double() - want))
    return worst


def _shuffled(seed: int, **arguments: Any) -> Tensor:
    """The reference with the head dimension and the keys in another order; seed 0 is the order as given."""
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    given = {name: arguments.pop(name, None) for name in ("attn_mask", "key_mask", "document_ids", "window_size")}
    left, right = validation.window_of(given["window_size"], arguments.pop("is_causal"))
    visibility = Visibility(
        query.size(2), key.size(2), left, right, given["attn_mask"], given["key_mask"], given["document_ids"]
    )
    visible = visibility.block(0, query.size(2), 0, key.size(2), query.device)
    generator = torch.Generator().manual_seed(seed)
    dims, keys = (
        (torch.randperm(n, generator=generator) if seed else torch.arange(n)).to(query.device)
        for n in (query.size(3), key.size(2))
    )
    if visible is not None:
        visible = visible.expand(*visible.shape[:3], key.size(2))[..., keys]
    bias = arguments.pop("bias", None)
    if bias is not None and bias.size(3) != 1:
        bias = bias[..., keys]
    return _reference(
        query=query[..., dims],
        key=key[:, :, keys][..., dims],
        value=value[:, :, keys],
        attn_mask=visible,
        bias=bias,
        **arguments,
    )


def _largest(x: Tensor) -> float:
    """The largest absolute value; inf where anything is NaN, so that no comparison with it passes by accident."""
    if x.numel() == 0:
        return 0.0
    value = float(x.abs().max())
    return math.inf if math.isnan(value) else value
