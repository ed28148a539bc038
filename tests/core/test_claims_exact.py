"""What the papers say of their formulas, decided without training. The ledger of claims cites these
tests by name.

Formulas of the papers are written out here, and the library is compared with them: `attention()` in
float64 with torch's own gradients. One head, one query and keys of one number each: with q = 1 and
d = 1 a key is its own score.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import softfocus

untimed = settings(deadline=None, max_examples=30)


def output_and_jacobian(mechanism: str, scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The output of one row and its derivative by each score, for scores [N] and values [N]."""
    keys = scores.detach().clone().requires_grad_()

    def attend(one: Tensor) -> Tensor:
        query = torch.ones(1, 1, 1, 1, dtype=one.dtype)
        return softfocus.attention(query, one.view(1, 1, -1, 1), values.view(1, 1, -1, 1), mechanism=mechanism).sum()

    out = attend(keys)
    return out.detach(), torch.autograd.grad(out, keys)[0]


def random_row(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        2 * torch.randn(count, dtype=torch.float64, generator=generator),
        3 * torch.randn(count, dtype=torch.float64, generator=generator),
    )


def two_keys(weight: float, value: float) -> tuple[float, float]:
    """The derivatives of softmax and LASER by the first score, for values (value, 0) and a weight
    of the first key.
    """
    scores = torch.tensor([math.log(weight) - math.log1p(-weight), 0.0], dtype=torch.float64)
    values = torch.tensor([value, 0.0], dtype=torch.float64)
    plain, ours = (float(output_and_jacobian(name, scores, values)[1][0]) for name in ("softmax", "laser"))
    return plain, ours


# The causal mask


@pytest.mark.parametrize(("length", "dimension"), [(24, 4), (64, 8), (5, 1)])
def test_a_causal_mask_raises_the_rank_from_d_to_l(length: int, dimension: int) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(length, dimension, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = q @ k.T / math.sqrt(dimension)
    assert torch.linalg.matrix_rank(scores) == dimension
    # Triangular, so its determinant is the product of its diagonal. The smallest singular values of
    # random triangular matrices shrink with the size, in the end below float64's rounding
    assert (scores.diagonal() != 0).all()
    assert dimension < torch.linalg.matrix_rank(scores.tril()) <= length
    if length < 64:
        assert torch.linalg.matrix_rank(scores.tril()) == length
    # Attention without softmax (scenario I) applies just this matrix to the values
    values = torch.eye(length, dtype=torch.float64)
    wide = [one.reshape(1, 1, length, -1) for one in (q, k, values)]
    applied = softfocus.attention(*wide, is_causal=True, mechanism="scenario_i")[0, 0]
    torch.testing.assert_close(applied, scores.tril(), rtol=1e-12, atol=1e-12)


# LASER: Jacobians


@pytest.mark.parametrize("value", [-3.0, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("weight", [1e-6, 0.1, 0.5, 0.9, 1 - 1e-6])
def test_jacobians_of_two_keys_are_the_papers(weight: float, value: float) -> None:
    """Softmax: (v1 - v2) s (1 - s). LASER: s (1 - s) (e^v1 - e^v2) / (s e^v1 + (1 - s) e^v2)."""
    plain, ours = two_keys(weight, value)
    spread = weight * (1 - weight)
    assert plain == pytest.approx(value * spread, rel=1e-9)
    assert ours == pytest.approx(spread * math.expm1(value) / (weight * math.exp(value) + 1 - weight), rel=1e-9)


@pytest.mark.parametrize("weight", [0.01, 0.5, 0.99])
def test_laser_in_the_limit_has_one_factor_of_the_sigmoid(weight: float) -> None:
    """With e^v1 far above e^v2 it is 1 - s, and softmax's has both factors, s (1 - s)."""
    plain, ours = two_keys(weight, 60.0)
    assert ours == pytest.approx(1 - weight, rel=1e-12)
    assert plain == pytest.approx(60 * weight * (1 - weight), rel=1e-12)


@pytest.mark.parametrize("value", [0.1, 1.0, 5.0, 20.0])
def test_laser_has_the_larger_jacobian_below_a_weight(value: float) -> None:
    """The key of the larger value, by v: below 1/v - 1/(e^v - 1) LASER's derivative is the larger
    one.
    """
    line = 1 / value - 1 / math.expm1(value)
    assert 0 < line < 0.5
    for share in (0.001, 0.5, 0.99):
        plain, ours = two_keys(share * line, value)
        assert abs(ours) > abs(plain)


def test_softmax_has_the_larger_jacobian_where_it_attends_to_the_larger_value() -> None:
    """The counterexample: above that weight LASER's derivative is the smaller one, and the more
    saturated, the more so.
    """
    for value in (0.1, 1.0, 5.0, 20.0):
        line = 1 / value - 1 / math.expm1(value)
        for share in (0.01, 0.5, 0.999):
            plain, ours = two_keys(line + share * (1 - line), value)
            assert abs(ours) < abs(plain)
    plain, ours = two_keys(1 - 1e-9, 20.0)
    assert plain / ours == pytest.approx(20.0, rel=1e-6)


@untimed
@given(st.integers(2, 40), st.integers(0, 2**31))
def test_jacobians_of_any_number_of_keys(count: int, seed: int) -> None:
    """Softmax: a_j (v_j - o). LASER: b_j - a_j, where b is softmax of the scores plus the
    values.
    """
    scores, values = random_row(count, seed)
    weights = scores.softmax(0)
    out, jacobian = output_and_jacobian("softmax", scores, values)
    torch.testing.assert_close(jacobian, weights * (values - out), rtol=1e-9, atol=1e-12)
    _, jacobian = output_and_jacobian("laser", scores, values)
    torch.testing.assert_close(jacobian, (scores + values).softmax(0) - weights, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@untimed
@given(st.integers(2, 40), st.integers(0, 2**31))
def test_softmax_passes_no_more_gradient_than_its_probability(count: int, seed: int) -> None:
    """Its Jacobian is diag(a) - a a^T, and no element is larger than the probability of its key."""
    scores, _ = random_row(count, seed)
    weights = scores.softmax(0)
    rows = [output_and_jacobian("softmax", scores, unit)[1] for unit in torch.eye(count, dtype=torch.float64)]
    jacobian = torch.stack(rows)  # [which weight, which score]
    torch.testing.assert_close(jacobian, weights.diag() - weights.outer(weights), rtol=1e-9, atol=1e-12)
    assert (jacobian.abs() <= weights + 1e-15).all()


# LASER: between the mean and the maximum


@untimed
@given(st.lists(st.floats(-500, 500), min_size=1, max_size=50))
def test_log_sum_exp_lies_within_log_n_of_the_maximum(numbers: list[float]) -> None:
    """And LASER over equal weights is that less log n, so it lies between the maximum less log n
    and the maximum.
    """
    values = torch.tensor(numbers, dtype=torch.float64)
    count, largest = len(numbers), max(numbers)
    tolerance = 1e-12 * max(1.0, abs(largest))
    total = float(values.logsumexp(0))
    assert largest - tolerance <= total <= largest + math.log(count) + tolerance
    out = float(output_and_jacobian("laser", torch.zeros_like(values), values)[0])
    assert out == pytest.approx(total - math.log(count), abs=1e-9)


@untimed
@given(st.integers(1, 40), st.integers(0, 2**31))
def test_laser_lies_between_the_mean_and_the_maximum(count: int, seed: int) -> None:
    """For any weights: by Jensen's inequality not below what softmax gives."""
    scores, values = random_row(count, seed)
    ours, plain = (float(output_and_jacobian(name, scores, values)[0]) for name in ("laser", "softmax"))
    assert plain - 1e-12 <= ours <= float(values.max()) + 1e-12


# LASER: the shift


@pytest.mark.parametrize("largest", [89.0, 200.0])
def test_without_the_shift_laser_overflows(largest: float) -> None:
    """log(A e^V) as it is written: infinite in float32 from V = 88.8 on, with gradients that are
    not numbers.

    With the shift it is finite and right, on every backend that runs here.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 12, 8, generator=generator) for _ in range(3))
    value[0, 0, 5, 3] = largest

    def naive(one: Tensor) -> Tensor:
        weights = (query @ key.mT / math.sqrt(8)).softmax(-1)
        return (weights @ one.exp()).log()

    bare = value.clone().requires_grad_()
    out = naive(bare)
    assert out[..., 3].isinf().all()
    out.sum().backward()
    assert bare.grad is not None
    assert bare.grad.isnan().any()
    exact = softfocus.attention(query.double(), key.double(), value.double(), mechanism="laser", backend="reference")
    for backend in ("reference", "tiled", "auto"):
        shifted = value.clone().requires_grad_()
        out = softfocus.attention(query, key, shifted, mechanism="laser", backend=backend)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        out.sum().backward()
        assert shifted.grad is not None
        assert shifted.grad.isfinite().all()


def test_below_the_limit_the_shift_changes_nothing() -> None:
    """So the test above is about overflow alone."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, 12, 8, generator=generator) for _ in range(3))
    naive = ((query @ key.mT / math.sqrt(8)).softmax(-1) @ value.exp()).log()
    out = softfocus.attention(query, key, value, mechanism="laser")
    torch.testing.assert_close(out, naive, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gap", "gradient", "spoiled"), [(88.6, 1.0, False), (88.8, 1.0, True), (90.0, 1e-3, False), (95.8, 1e-3, True)]
)
def test_without_the_shift_a_hidden_value_spoils_gradients(gap: float, gradient: float, spoiled: bool) -> None:
    """dL/dA_ij is the sum over d of dL/dout_id e^(V_jd - out_id). Where the value of a hidden key
    lies more than 88.7 - ln |dL/dout| above the output it overflows, and 0 times infinity is NaN.
    Every value is below 48 here, and out is finite and right.
    """
    score = torch.zeros(1, 1, 2, 2, requires_grad=True)
    value = torch.tensor([-gap / 2, gap / 2]).view(1, 1, 2, 1)
    weights = score.masked_fill(torch.ones(2, 2).triu(1).bool(), -math.inf).softmax(-1)
    out = (weights @ value.exp()).log()
    torch.testing.assert_close(out.flatten(), torch.tensor([-gap / 2, gap / 2 - math.log(2)]))
    (gradient * out).sum().backward()
    assert score.grad is not None
    assert score.grad[..., 0, :].isnan().any() == spoiled
    query, key = (torch.zeros(1, 1, 2, 4, requires_grad=True) for _ in range(2))
    for backend in ("reference", "tiled", "auto"):
        softfocus.attention(query, key, value, is_causal=True, mechanism="laser", backend=backend).sum().backward()
        for x in (query, key):
            assert x.grad is not None
            assert x.grad.isfinite().all()


# Re-weighting


@untimed
@given(st.integers(4, 40), st.integers(0, 2**31))
def test_a_growing_power_moves_all_weight_to_the_largest(count: int, seed: int) -> None:
    """Equations 6 and 7: the distance from the largest weight to any other grows with p, towards
    1.
    """
    scores, _ = random_row(count, seed)
    query = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    key = torch.stack([scores.cos(), scores.sin()], -1).view(1, 1, count, 2)
    gaps = []
    for power in (1, 2, 5, 15, 50, 100):
        weights = softfocus.weights(query, key, rows=[-1], mechanism=f"sharpened(lssa, {power})").flatten()
        ordered = weights.sort(descending=True).values
        assert float(weights.sum()) == pytest.approx(1)
        gaps.append(float(ordered[0] - ordered[1]))
        first = softfocus.weights(query, key, rows=[-1], mechanism="lssa").flatten() * count - 1
        ratio = (first / first.max()).clamp(min=0) ** power
        torch.testing.assert_close(weights, ratio / ratio.sum(), rtol=1e-7, atol=1e-12)
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(gaps))


# Softplus paper, table 1


def test_negated_weights_change_the_sign_of_the_output_projection() -> None:
    """Outputs and all gradients are bitwise equal, but that of the projection W_O, which has the
    other sign.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 33, 8, generator=generator).requires_grad_() for _ in range(3))
    projection = torch.randn(32, 32, generator=generator)
    grad_out = torch.randn(2, 33, 32, generator=generator)
    results = []
    for mechanism, sign in (("softmax", 1.0), ("softmax_negated", -1.0)):
        weight = (sign * projection).requires_grad_()
        heads = softfocus.attention(query, key, value, mechanism=mechanism, is_causal=True, backend="tiled")
        out = heads.transpose(1, 2).reshape(2, 33, 32) @ weight
        grads = torch.autograd.grad(out, (query, key, value, weight), grad_out)
        results.append([out.detach(), *grads[:3], sign * grads[3]])
    for plain, negated in zip(*results, strict=True):
        assert plain.any()
        assert torch.equal(plain, negated)


# Re-weighting in float32 and bfloat16


def plain_re_weighting(mechanism: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Equations 4 and 5 as they are written, with p = 15: relu(A N - 1)^p over its sum, for one row
    that sees all N keys.
    """
    width, count = query.shape[-1], key.shape[-2]
    if mechanism == "softmax_p15":
        weights = (query @ key.mT / math.sqrt(width)).softmax(-1)
    else:
        cosines = torch.nn.functional.normalize(query, dim=-1) @ torch.nn.functional.normalize(key, dim=-1).mT
        phi = torch.nn.functional.softplus(math.log(width) * math.log(count) * cosines)
        weights = phi / phi.sum(-1, keepdim=True)
    sharp = (weights * count - 1).relu() ** 15
    return sharp / sharp.sum(-1, keepdim=True) @ value


def a_row(count: int, dtype: torch.dtype, *, single_key: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A query, and keys of its direction: one with it and all others against it, or random ones;
    and values.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, rows, 64, generator=generator) for rows in (1, count, count))
    if single_key:
        key = -query.expand(-1, -1, count, -1).clone()
        key[:, :, 5] *= -1
    return (3 * query).to(dtype), (3 * key).to(dtype), value.to(dtype)


def with_gradients(attend: Any, tensors: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mechanism", ["softmax_p15", "lssar"])
def test_the_plain_power_overflows_where_ours_does_not(mechanism: str, dtype: torch.dtype) -> None:
    """At p = 15 a weight of 372 times the mean is infinite in float32 and bfloat16, so a row that
    gives most of its weight to one of 1,024 keys is infinity over infinity. Ours divides by the
    row's maximum first.
    """
    row = a_row(1024, dtype, single_key=True)
    assert all(found.isnan().any() for found in with_gradients(partial(plain_re_weighting, mechanism), row))
    exact = partial(softfocus.attention, mechanism=mechanism, backend="reference")
    expected = with_gradients(exact, tuple(tensor.double() for tensor in row))  # type: ignore[arg-type]
    for backend in ("reference", "tiled", "auto"):
        found = with_gradients(partial(softfocus.attention, mechanism=mechanism, backend=backend), row)
        assert all(one.isfinite().all() for one in found)
        torch.testing.assert_close(found[0].double(), expected[0], rtol=0.02, atol=0.02)


def test_at_the_same_keys_the_plain_power_overflows_with_softmax_alone() -> None:
    """Random keys of norm 24: softmax gives one of them over a third of the weight, and cosines are
    the same whatever the norm. So the plain form makes softmax explode and spares LSSAR.
    """
    row = a_row(1024, torch.float32, single_key=False)
    assert with_gradients(partial(plain_re_weighting, "softmax_p15"), row)[1].isnan().any()
    assert all(one.isfinite().all() for one in with_gradients(partial(plain_re_weighting, "lssar"), row))


@pytest.mark.parametrize("mechanism", ["softmax_p15", "lssar"])
def test_without_an_overflow_the_plain_power_is_ours(mechanism: str) -> None:
    """So the tests above are about overflow alone."""
    row = a_row(200, torch.float64, single_key=False)
    ours = with_gradients(partial(softfocus.attention, mechanism=mechanism), row)
    for one, other in zip(with_gradients(partial(plain_re_weighting, mechanism), row), ours, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
