"""The float64 reference as oracle, and tolerances computed from the rounding errors of the eager
formula in the same dtype.

The eager formula is the reference itself, evaluated in the dtype of the inputs.
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

REPETITIONS = 16
"""How often the eager formula is evaluated. One evaluation is one sample of its rounding errors,
and may be accurate by chance. All repetitions but the first permute the head dimension and the
keys: the result is mathematically the same, the rounding errors differ. The largest error counts.
"""
PERTURBATION = 2.0**-12
"""The largest relative perturbation of an element of the queries; at least eps of the dtype. Sums
of few terms have the same rounding errors in every order. All repetitions but the first therefore
perturb the queries as well, and are compared with the exact result for the perturbed queries.
"""
TOLERANCE_ULPS = 4.0
"""The tolerance is twice the eager formula's error plus this many units in the last place (ulp) of
the largest value of the tensor.
"""


@dataclass(frozen=True)
class Outcome:
    """Everything that a call and its backward gave, by name: "out", "query.grad", "bias.grad", ...,
    "log_norm".
    """

    tensors: dict[str, Tensor]


def run(attention: Callable[..., Any], arguments: dict[str, Any], seed: int = 1) -> Outcome:
    """Run forward and backward, with a random grad_out from the seed.

    Args:
        attention: takes ``arguments``; returns out [B, H, Lq, Dv].
        arguments: of ``attention()``; gradients are taken of every tensor that requires them.
        seed: of grad_out, which does not depend on dtype or device; and of torch's own generator,
            from which dropout draws.

    Raises:
        AssertionError: a tensor that requires grad got none.
    """
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it formats a traceback for each kind of device not in use
        torch.default_generator.manual_seed(seed)
        out = attention(**arguments)
    generator = torch.Generator().manual_seed(seed)
    grad_out = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    leaves = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if out.requires_grad:
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out, allow_unused=True)
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
    """Compare an implementation with the float64 reference, with a tolerance computed from the
    eager formula's error.

    Args:
        attention: takes the arguments of ``softfocus.attention`` that the case uses, ``mechanism=``
            among them.
        case: the problem.
        mechanism: a name or a Mechanism.
        dtype, device: of the inputs.
        draws: how many random inputs of the case the eager formula's largest error is taken over.
            The implementation is compared on the first of them alone. More than one is for cases
            of few rows, where the formula may be accurate by chance in every order of summation.

    Raises:
        AssertionError: an error exceeds the tolerance; the message names the tensor and both. Or a
            gradient is missing.
    """
    algebra = catalog.named(mechanism) if isinstance(mechanism, str) else mechanism
    arguments = case.arguments(algebra, dtype, device=device)
    exact = _in_float64(arguments)
    expected = run(_reference, exact)
    actual, sizes, label = run(attention, arguments), _sizes(exact, expected), f"{case.name}, {algebra}, {dtype}"
    assert (got := actual.tensors["out"].dtype) == dtype, f"{label}: out has dtype {got}, expected the query's {dtype}"
    for eager_errors in _growing_eager_errors(case, algebra, arguments, expected, dtype, device, draws):
        try:
            return compare(actual, expected, eager_errors, sizes, label)
        except AssertionError:
            continue
    # The largest terms take another run of the reference, which few cases need
    return compare(actual, expected, eager_errors, sizes, label, _largest_terms(exact))


def _growing_eager_errors(
    case: Case,
    algebra: Mechanism,
    arguments: dict[str, Any],
    expected: Outcome,
    dtype: torch.dtype,
    device: str,
    draws: int,
) -> Iterator[dict[str, float]]:
    """The eager formula's largest errors, tensor by tensor, after 0, 1, 2, ... evaluations.

    They never decrease. The caller stops at the first that suffice. The first are 0, which cost
    nothing: ``TOLERANCE_ULPS`` alone often suffices.
    """
    largest = dict.fromkeys(expected.tensors, 0.0)
    yield largest
    # In float64 the oracle is no more exact than the eager formula, and its own errors are added to
    # those of the formula. The factor is therefore 3 in place of 2. Permutations do not show all of
    # these errors. So the errors in float32 on the same case, in ulp, count as well.
    is_float64 = dtype == torch.float64
    factor = 1.5 if is_float64 else 1.0
    for draw in range(draws):
        inputs = case.arguments(algebra, dtype, seed=draw, device=device) if draw else arguments
        exact = run(_reference, _in_float64(inputs)) if draw else expected
        for seed in range(REPETITIONS):
            if seed:
                perturbed = _perturbed(inputs, seed)
                errors = _eager_errors(seed, perturbed, run(_reference, _in_float64(perturbed)))
            else:
                errors = _eager_errors(seed, inputs, exact)
            if is_float64:
                float32_inputs = case.arguments(algebra, torch.float32, seed=draw, device=device)
                ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
                float32_errors = _eager_errors(seed, float32_inputs, run(_reference, _in_float64(float32_inputs)))
                errors = {name: max(error, ratio * float32_errors[name]) for name, error in errors.items()}
            largest = {name: max(largest[name], factor * error) for name, error in errors.items()}
            yield largest


def compare(
    actual: Outcome,
    expected: Outcome,
    yardstick: dict[str, float],
    sizes: dict[str, float],
    label: str,
    summed: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Assert that every tensor's largest error is at most twice the eager formula's plus four units
    in the last place.

    Args:
        actual: of the implementation.
        expected: of the dense formula in float64 on the same inputs.
        yardstick: the eager formula's largest error, tensor by tensor.
        sizes: of each tensor, the number whose unit in the last place counts: its largest value, or
            that of the sum of absolute terms.
        label: begins the message.
        summed: of a tensor, the largest term of its sum, which is computed in float32 or better
            whatever the dtype. If the terms cancel nearly or, in the eager formula, exactly, the
            size of the result is no measure of their rounding errors.
    """
    assert actual.tensors.keys() == expected.tensors.keys(), f"{label}: got {list(actual.tensors)}"
    for name, want in expected.tensors.items():
        got, eager_error, size = actual.tensors[name], yardstick[name], sizes[name]
        assert got.shape == want.shape, f"{label}: {name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        if math.isinf(eager_error):  # every element of the eager formula is NaN: there is no tolerance
            assert bool((got.isfinite() | ~want.isfinite()).all()), f"{label}: {name} is not finite"
            continue
        error = _error(got, want)
        finfo, terms = torch.finfo(got.dtype), summed.get(name, 0.0)
        ulp = finfo.eps * max(size, finfo.smallest_normal) + min(finfo.eps, torch.finfo(torch.float32).eps) * terms
        tolerance = 2.0 * eager_error + TOLERANCE_ULPS * ulp
        assert error <= tolerance, (
            f"{label}: {name} is off by {error:.3g}, more than the tolerance {tolerance:.3g} = twice the "
            f"eager formula's error {eager_error:.3g} + {TOLERANCE_ULPS:g} ulp of {size:.3g}, summed from {terms:.3g}"
        )


def _sizes(exact: dict[str, Any], expected: Outcome) -> dict[str, float]:
    """The largest value of each tensor; for the gradients of a bias and of head_scale, of the sum
    of absolute terms.

    These two are long sums of dL/ds and of s dL/ds. For many mechanisms the terms cancel: a
    constant added to a row does not change softmax, nor a factor l1 of the identity. Their own size
    is then no measure of their rounding errors.
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


def _largest_terms(exact: dict[str, Any]) -> dict[str, float]:
    """The largest term of the sums that are the gradients of queries and of keys.

    dL/dq = c sum_j dL/ds_j ds_j/dq, where ds/dq is k, or with cosine k/|q||k| - cos q/|q|^2. The
    gradient of the keys is analogous. If terms cancel, no sum is more exact than a unit in the last
    place of its largest term.
    """
    query, key, terms = exact["query"].detach(), exact["key"].detach(), _terms(exact) * _scale(exact)
    if "head_scale" in exact:
        terms = terms * exact["head_scale"].detach().abs()[:, None, None]
    queries, keys = (x.norm(dim=-1, keepdim=True).nan_to_num(0.0) for x in (query, key))  # NaNs are masked
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
    """The score scale c_i of a row that sees every key."""
    query, mechanism = exact["query"], exact["mechanism"]
    count = query.new_tensor(float(exact["key"].size(2)))
    return base_scale(mechanism, default_scale(mechanism, query.size(-1)), count)


def _perturbed(arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    query = arguments["query"]
    generator = torch.Generator().manual_seed(seed)
    amplitude = max(PERTURBATION, torch.finfo(query.dtype).eps)
    factor = 1.0 + amplitude * (2.0 * torch.rand(query.shape, generator=generator, dtype=torch.float64) - 1.0)
    perturbed = (query.detach().double() * factor.to(query.device)).to(query.dtype)
    return {**arguments, "query": perturbed.requires_grad_(query.requires_grad)}


def _reference(**arguments: Any) -> Tensor:
    return functional.attention(**arguments, backend="reference")


def _in_float64(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in arguments.items()
    }


def _eager_errors(seed: int, arguments: dict[str, Any], exact: Outcome) -> dict[str, float]:
    """The largest errors of the eager formula, in one order of its sums. Its elements that are NaN,
    because they overflow the dtype, are left out. If all are NaN, the error is infinite.
    """
    eager = run(partial(_permuted, seed), arguments).tensors
    errors = {}
    for name, want in exact.tensors.items():
        overflows = eager[name].isnan() & ~want.isnan()
        all_overflow = overflows.any() and overflows.all()
        errors[name] = math.inf if all_overflow else _error(eager[name][~overflows], want[~overflows])
    return errors


def _permuted(seed: int, **arguments: Any) -> Tensor:
    """The reference with the head dimension and the keys permuted. Seed 0 leaves their order."""
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    names = ("attn_mask", "key_mask", "document_ids", "window_size")
    mask, key_mask, document_ids, window_size = (arguments.pop(name, None) for name in names)
    left, right = validation.window_of(window_size, arguments.pop("is_causal"))
    if mask is not None and mask.is_floating_point():
        mask = mask > functional.HIDDEN  # additive masks of a Case hold only 0 and finfo.min
    visibility = Visibility(query.size(2), key.size(2), left, right, mask, key_mask, document_ids)
    visible = visibility.block(0, query.size(2), 0, key.size(2), query.device)
    generator = torch.Generator().manual_seed(seed)
    dims, keys = (
        (torch.randperm(n, generator=generator) if permuted else torch.arange(n)).to(query.device)
        # Which weights dropout drops depends on the position of the key
        for n, permuted in ((query.size(3), seed), (key.size(2), seed and "dropout_p" not in arguments))
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
    """The largest difference. Numbers beyond the range of the dtype are clamped to it."""
    limit = torch.finfo(got.dtype).max
    return _largest(got.double().clamp(-limit, limit) - want.clamp(-limit, limit))


def _largest(x: Tensor) -> float:
    """The largest absolute value. It is infinite if any element is NaN, so that no comparison with
    it passes.
    """
    if x.numel() == 0:
        return 0.0
    value = float(x.detach().abs().max())
    return math.inf if math.isnan(value) else value
