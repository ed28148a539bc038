"""The float64 reference as oracle, and tolerances that are computed from what the eager formula
loses in the same dtype.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from softfocus import catalog, functional, validation
from softfocus.mechanism import Mechanism, default_scale
from softfocus.reference import base_scale
from softfocus.testing.cases import Case
from softfocus.visibility import Visibility

REPLICAS = 16
"""One evaluation of the eager formula is one draw of its rounding errors, and can be lucky.
Shuffling the head dimension and the keys leaves the mathematics alone and draws again; the worst of
so many draws is the yardstick.
"""
NUDGE = 2.0**-12
"""Where little is summed every order gives the same errors. All replicas but the first therefore
move the queries' numbers as well, each by up to this part of it (or an ulp, if that is more), and
are held against the exact result of those.
"""
BAND = 4.0
"""Rounding band: this many units in the last place of a tensor's largest value, on top of twice the
eager error.
"""


@dataclass(frozen=True)
class Outcome:
    """Everything that a call and its backward gave, by name: "out", "query.grad", "bias.grad", ...,
    "log_norm".
    """

    tensors: dict[str, Tensor]


def run(attention: Callable[..., Any], arguments: dict[str, Any], seed: int = 1) -> Outcome:
    """Call, draw an upstream gradient from the seed, go backward, collect.

    Args:
        attention: takes ``arguments``; returns out [B, H, Lq, Dv].
        arguments: of ``attention()``; gradients are taken of every tensor that requires them.
        seed: of the upstream gradient, which does not depend on dtype or device; and of torch's own
            generator, from which dropout draws.

    Raises:
        AssertionError: a tensor that requires grad got none.
    """
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it formats a traceback for each kind of device not in use
        torch.default_generator.manual_seed(seed)
        out = attention(**arguments)
    generator = torch.Generator().manual_seed(seed)
    above = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    leaves = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if out.requires_grad:
        grads = torch.autograd.grad(out, list(leaves.values()), above, allow_unused=True)
    tensors = {"out": out.detach()}
    for name, grad in zip(leaves, grads, strict=True):
        assert grad is not None, f"{name}.grad: there is none; the output does not depend on {name}, or was detached"
        tensors[f"{name}.grad"] = grad
    return Outcome(tensors)


def check(
    attention: Callable[..., Any],
    case: Case,
    mechanism: str | Mechanism,
    dtype: torch.dtype,
    device: str = "cpu",
    draws: int = 1,
) -> None:
    """Hold an implementation against the float64 reference, with the eager formula's error as the
    yardstick.

    Args:
        attention: takes the arguments of ``softfocus.attention`` that the case uses, ``mechanism=``
            among them.
        case: the problem.
        mechanism: a name or a Mechanism.
        dtype, device: of the inputs.
        draws: the yardstick is the eager formula's worst error over so many draws of the case's
            numbers; what is held against it is always the first draw's result. More than one for
            cases of few rows, over which the formula may be lucky in every order of summation.

    Raises:
        AssertionError: naming the tensor, its error, and the tolerance; or the gradient that there
            is none of.
    """
    algebra = catalog.named(mechanism) if isinstance(mechanism, str) else mechanism
    arguments = case.arguments(algebra, dtype, device=device)
    exact = _exactly(arguments)
    expected = run(_reference, exact)
    actual, sizes, label = run(attention, arguments), _sizes(exact, expected), f"{case.name}, {algebra}, {dtype}"
    assert (got := actual.tensors["out"].dtype) == dtype, f"{label}: out has dtype {got}, expected the query's {dtype}"
    for yardstick in _yardsticks(case, algebra, arguments, expected, dtype, device, draws):
        try:
            return compare(actual, expected, yardstick, sizes, label)
        except AssertionError:
            continue
    # The terms take another run of the reference, which few problems need
    return compare(actual, expected, yardstick, sizes, label, _summed(exact))


def _yardsticks(
    case: Case,
    algebra: Mechanism,
    arguments: dict[str, Any],
    expected: Outcome,
    dtype: torch.dtype,
    device: str,
    draws: int,
) -> Iterator[dict[str, float]]:
    """The eager formula's worst errors over more and more draws. They only grow: who is content
    needs no further draw.

    The first is 0, which costs nothing: the rounding band alone often suffices.
    """
    yardstick = dict.fromkeys(expected.tensors, 0.0)
    yield yardstick
    # In float64 nothing is more exact than the oracle, whose own errors are as large as the eager
    # formula's and come on top: half as much again of the yardstick. Shuffling does not show all of
    # them, so that what float32 loses on the same problem, in units of the last place, counts as
    # well.
    double = dtype == torch.float64
    share = 1.5 if double else 1.0
    for draw in range(draws):
        given = case.arguments(algebra, dtype, seed=draw, device=device) if draw else arguments
        wanted = run(_reference, _exactly(given)) if draw else expected
        for seed in range(REPLICAS):
            if seed:
                near = _nudged(given, seed)
                errors = _eager_errors(seed, near, run(_reference, _exactly(near)))
            else:
                errors = _eager_errors(seed, given, wanted)
            if double:
                single = case.arguments(algebra, torch.float32, seed=draw, device=device)
                ulps = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
                in_single = _eager_errors(seed, single, run(_reference, _exactly(single)))
                errors = {name: max(error, ulps * in_single[name]) for name, error in errors.items()}
            yardstick = {name: max(yardstick[name], share * error) for name, error in errors.items()}
            yield yardstick


def compare(
    actual: Outcome,
    expected: Outcome,
    yardstick: dict[str, float],
    sizes: dict[str, float],
    label: str,
    summed: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Every tensor's largest error is at most twice the eager formula's, plus BAND units in the
    last place.

    Args:
        actual: of the implementation.
        expected: of the dense formula in float64 on the same numbers.
        yardstick: the eager formula's largest error, tensor by tensor.
        sizes: the size of what each tensor was summed from: what a unit in the last place is
            counted of.
        label: stands in the message.
        summed: the size of the largest term that a tensor is summed from in float32 or better,
            whatever its dtype. Terms may cancel all but exactly, in the eager formula altogether:
            then what is left says nothing of their rounding.
    """
    assert actual.tensors.keys() == expected.tensors.keys(), f"{label}: got {list(actual.tensors)}"
    for name, want in expected.tensors.items():
        got, unavoidable, size = actual.tensors[name], yardstick[name], sizes[name]
        assert got.shape == want.shape, f"{label}: {name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        if math.isinf(unavoidable):  # the formula is NaN altogether: there is nothing to measure with
            assert bool((got.isfinite() | ~want.isfinite()).all()), f"{label}: {name} is not finite"
            continue
        error = _error(got, want)
        finfo, terms = torch.finfo(got.dtype), summed.get(name, 0.0)
        ulp = finfo.eps * max(size, finfo.smallest_normal) + min(finfo.eps, torch.finfo(torch.float32).eps) * terms
        tolerance = 2.0 * unavoidable + BAND * ulp
        assert error <= tolerance, (
            f"{label}: {name} is off by {error:.3g}, more than the tolerance {tolerance:.3g} = twice the "
            f"eager formula's error {unavoidable:.3g} + {BAND:g} ulp of {size:.3g}, summed from {terms:.3g}"
        )


def _sizes(exact: dict[str, Any], expected: Outcome) -> dict[str, float]:
    """The largest value of each tensor; for the gradients of a bias and of head_scale, of the sum
    of absolute terms.

    These two are long sums of dL/ds and of s dL/ds, which for many mechanisms cancel (softmax does
    not see a constant added to a row, nor l1 of the identity a factor), so that their own size says
    nothing of their rounding.
    """
    sizes = {name: _largest(x) for name, x in expected.tensors.items()}
    if "bias" not in exact and "head_scale" not in exact:
        return sizes
    terms = _terms(exact)
    if "bias" in exact:
        sizes["bias.grad"] = _largest(terms.sum_to_size(exact["bias"].shape))
    if "head_scale" in exact:
        bound = _scale(exact)  # of |s|, by Cauchy and Schwarz
        if exact["mechanism"].similarity == "dot":
            bound = bound * _largest(exact["query"].norm(dim=-1)) * _largest(exact["key"].norm(dim=-1))
        sizes["head_scale.grad"] = _largest(terms.sum((0, 2, 3)) * bound)
    return sizes


def _summed(exact: dict[str, Any]) -> dict[str, float]:
    """The largest term that the gradients of queries and of keys are summed from.

    dL/dq = c sum_j dL/ds_j ds_j/dq, where ds/dq is k, or for the cosine k/|q||k| - cos q/|q|^2; and
    so for k. Where terms cancel, no sum is more exact than a unit in the last place of its largest
    term.
    """
    query, key, terms = exact["query"].detach(), exact["key"].detach(), _terms(exact) * _scale(exact)
    if "head_scale" in exact:
        terms = terms * exact["head_scale"].detach().abs()[:, None, None]
    queries, keys = (x.norm(dim=-1, keepdim=True).nan_to_num(0.0) for x in (query, key))  # what is no number is hidden
    keys = keys.repeat_interleave(query.size(1) // key.size(1), dim=1).mT  # [B, H, 1, Lk]
    if exact["mechanism"].similarity == "dot":
        to_query, to_key = terms * keys, terms * queries
    else:
        to_query = (2.0 * terms / queries).where(queries > 0, 0.0)
        to_key = (2.0 * terms / keys).where(keys > 0, 0.0)
    sizes = {"query.grad": _largest(to_query), "key.grad": _largest(to_key)}
    return {name: size for name, size in sizes.items() if math.isfinite(size)}


def _terms(exact: dict[str, Any]) -> Tensor:
    """|dL/ds|, [B, H, Lq, Lk]."""
    query, key, bias = exact["query"], exact["key"], exact.get("bias")
    probe = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias.detach()
    probe = probe.expand(*query.shape[:3], key.size(2)).clone().requires_grad_()
    return run(_reference, {**exact, "bias": probe}).tensors["bias.grad"].abs()


def _scale(exact: dict[str, Any]) -> Tensor:
    """What multiplies the similarity in a row that sees every key."""
    query, mechanism = exact["query"], exact["mechanism"]
    count = query.new_tensor(float(exact["key"].size(2)))
    return base_scale(mechanism, default_scale(mechanism, query.size(-1)), count)


def _nudged(arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    query = arguments["query"]
    generator = torch.Generator().manual_seed(seed)
    part = max(NUDGE, torch.finfo(query.dtype).eps)
    factor = 1.0 + part * (2.0 * torch.rand(query.shape, generator=generator, dtype=torch.float64) - 1.0)
    moved = (query.detach().double() * factor.to(query.device)).to(query.dtype)
    return {**arguments, "query": moved.requires_grad_(query.requires_grad)}


def _reference(**arguments: Any) -> Tensor:
    return functional.attention(**arguments, backend="reference")


def _exactly(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in arguments.items()
    }


def _eager_errors(seed: int, arguments: dict[str, Any], exact: Outcome) -> dict[str, float]:
    """The largest errors of the eager formula, summed in one order. Where it is NaN (its numbers
    too large for the dtype) it measures nothing; infinite where it is NaN altogether.
    """
    eager = run(partial(_shuffled, seed), arguments).tensors
    errors = {}
    for name, want in exact.tensors.items():
        lost = eager[name].isnan() & ~want.isnan()
        errors[name] = math.inf if lost.any() and lost.all() else _error(eager[name][~lost], want[~lost])
    return errors


def _shuffled(seed: int, **arguments: Any) -> Tensor:
    """The reference with the head dimension and the keys in another order; seed 0 is the order as
    given.
    """
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    given = {name: arguments.pop(name, None) for name in ("attn_mask", "key_mask", "document_ids", "window_size")}
    left, right = validation.window_of(given["window_size"], arguments.pop("is_causal"))
    if given["attn_mask"] is not None and given["attn_mask"].is_floating_point():
        given["attn_mask"] = given["attn_mask"] > functional.HIDDEN  # the cases' own additive masks hide, and add 0
    visibility = Visibility(
        query.size(2), key.size(2), left, right, given["attn_mask"], given["key_mask"], given["document_ids"]
    )
    visible = visibility.block(0, query.size(2), 0, key.size(2), query.device)
    generator = torch.Generator().manual_seed(seed)
    dims, keys = (
        (torch.randperm(n, generator=generator) if shuffled else torch.arange(n)).to(query.device)
        # dropout goes by a key's place
        for n, shuffled in ((query.size(3), seed), (key.size(2), seed and "dropout_p" not in arguments))
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


def _error(got: Tensor, want: Tensor) -> float:
    """The largest difference; what the dtype cannot hold counts as the largest number that it
    can.
    """
    most = torch.finfo(got.dtype).max
    return _largest(got.double().clamp(-most, most) - want.clamp(-most, most))


def _largest(x: Tensor) -> float:
    """The largest absolute value; inf where anything is NaN, so that no comparison with it passes
    by accident.
    """
    if x.numel() == 0:
        return 0.0
    value = float(x.detach().abs().max())
    return math.inf if math.isnan(value) else value
