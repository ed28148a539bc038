"""LASER on scores and values that no float's exponential holds, forward and backward, against
arbitrary precision.
"""

import random
from functools import cache

import mpmath
import numpy
import pytest
import torch

from softfocus import Mechanism, attention
from softfocus.mechanism import MAX_UNTHRESHOLDED_COUNT

PHI = {
    "exp": mpmath.exp,
    "softplus": lambda s: mpmath.log1p(mpmath.exp(s)),
    "sigmoid": lambda s: 1 / (1 + mpmath.exp(-s)),
    "relu": lambda s: max(s, 0),
    "relu2": lambda s: max(s, 0) ** 2,
    "relu6": lambda s: min(max(s, 0), 6),
}
STEP = mpmath.mpf(10) ** -18  # of central differences in 60 digits: this part of a score below 1
ABOVE = (1.0, -2.0, 0.5)  # dL/dO
BACKENDS = (
    ("tiled", torch.float32),
    ("tiled", torch.float64),
    ("cpu", torch.float32),
    ("reference", torch.float64),
)


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(60):
        yield


def weights(phi, power, scores):
    """A of one row by the definition; None for a row near a tie, where another definition takes
    over.
    """
    f = [PHI[phi](s) for s in scores]
    a = [x / mpmath.fsum(f) for x in f]
    if power is None:
        return a
    u = [max(x * len(a) - (len(a) > MAX_UNTHRESHOLDED_COUNT), 0) for x in a]
    if max(u) < 0.01:
        return None
    r = [(x / max(u)) ** power if x else mpmath.mpf(0) for x in u]
    return [x / mpmath.fsum(r) for x in r]


def mixed(a, column):
    return mpmath.log(mpmath.fsum(x * mpmath.exp(v) for x, v in zip(a, column, strict=True)))


@cache
def exactly(phi, power, scores, value):
    """Of one row of numbers: out [Dv], dL/ds [K], dL/dV [K, Dv] and dL/dp [1] in one list each; and
    the size of what the last is summed from.
    """
    a = weights(phi, power, scores)
    columns = list(zip(*value, strict=True))
    out = [mixed(a, column) for column in columns]

    def slope(power, scores, over):
        ends = [weights(phi, *end) for end in zip(power, scores, strict=True)]
        high, low = (mpmath.fsum(g * mixed(a, c) for g, c in zip(ABOVE, columns, strict=True)) for a in ends)
        return (high - low) / over

    def slope_of_score(j):
        step = STEP * min(1, abs(scores[j]) or 1)
        ends = [(*scores[:j], x, *scores[j + 1 :]) for x in (scores[j] + step, scores[j] - step)]
        return slope((power, power), ends, 2 * step)

    to_scores = [slope_of_score(j) for j in range(len(scores))]
    shares = [[x * mpmath.exp(v - o) for v, o in zip(row, out, strict=True)] for x, row in zip(a, value, strict=True)]
    to_value = [g * share for row in shares for g, share in zip(ABOVE, row, strict=True)]
    if power is None:
        return out, to_scores, to_value, [], 0
    to_power = slope((power + STEP, power - STEP), (scores, scores), 2 * STEP)
    summed = [
        mpmath.fsum(g * (share - x) for g, share in zip(ABOVE, row, strict=True)) * mpmath.log(x / max(a)) / power
        for x, row in zip(a, shares, strict=True)
        if x
    ]
    return out, to_scores, to_value, [to_power], mpmath.fsum(map(abs, summed))


def drawn(phi, rng):
    """Scores [K] and values [K, 3], with gaps from ordinary to beyond float64's exponential."""
    keys = rng.choice([1, 2, 3, 4, 6])
    if phi.startswith("relu"):  # beside a largest of 1, and some below 0
        scores = [rng.choice([1, -1, 1]) * 10 ** (-rng.choice([1, 3, 15, 36]) * rng.random()) for _ in range(keys)]
        scores[0] = 1.0
    else:
        top, gap = rng.choice([0, -50, -90, 5, 40]), rng.choice([1, 30, 60, 88, 95, 104, 120, 300, 730, 2000])
        scores = [top, *(top - gap * rng.choice([0, rng.random(), 1]) for _ in range(keys - 1))]
    far = rng.choice([1, 25, 35, 70, 100, 150, 700, 1300, 4000])
    value = [[rng.choice([0, 1, -1, rng.random()]) * far + rng.random() for _ in range(3)] for _ in range(keys)]
    return torch.tensor(scores), torch.tensor(value)


def holds(phi, power, scores, value, backend, dtype):
    """Query and scale are 1, so that the scores are the keys. What is left to err is the rounding
    of p log A + V, which exp makes a relative error of the gradients.
    """
    key = scores.to(dtype)[None, None, :, None].requires_grad_()
    given = value.to(dtype)[None, None].requires_grad_()
    learned = None if power is None else torch.tensor([power], dtype=dtype, requires_grad=True)
    mechanism = Mechanism(phi=phi, scale="1", power=power, laser=True)
    out = attention(torch.ones_like(key[:, :, :1]), key, given, mechanism=mechanism, power=learned, backend=backend)
    leaves = [x for x in (key, given, learned) if x is not None]
    grads = torch.autograd.grad(out, leaves, torch.tensor(ABOVE, dtype=dtype)[None, None, None])
    exact_scores = tuple(map(mpmath.mpf, scores.tolist()))
    *wanted, size_of_power = exactly(phi, power, exact_scores, tuple(tuple(map(mpmath.mpf, v)) for v in value.tolist()))
    rounding = 1 + 8 * (power or 1) + scores.abs().max().item()
    far = rounding + value.abs().max().item()
    steep = [1 / min(s, 1) if phi.startswith("relu") and s > 0 else 1.0 for s in scores.tolist()]  # log phi, of relu
    slack = rounding, far, far, far
    factors = [1.0] * value.size(1), steep, [1.0] * value.numel(), [max(1, size_of_power)]
    for got, want, part, factor in zip((out, *grads), wanted, slack, factors, strict=False):
        assert got.isfinite().all()
        error = max(abs(x - y) / f for x, y, f in zip(got.flatten().tolist(), want, factor, strict=True))
        size = max(1, *(abs(x) / f for x, f in zip(want, factor, strict=True)))
        assert error <= 20 * torch.finfo(dtype).eps * part * size, (scores, value, got, want)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=str)
@pytest.mark.parametrize("power", [None, 1, 2.5, 15, 100])
@pytest.mark.parametrize("phi", PHI)
def test_any_scores_and_values(phi, power, backend, dtype):
    rng = random.Random(f"{phi} {power}")
    held = 0
    while held < 6:
        scores, value = (x.float() for x in drawn(phi, rng))
        if weights(phi, power, [mpmath.mpf(s) for s in scores.tolist()]) is None:
            continue
        held += 1
        holds(phi, power, scores, value, backend, dtype)


def bring_back(phi, power, backend, dtype):
    """Rows of up to three keys have no threshold: even there no weight is lost."""
    scores = {"relu": [1, 1e-30, 1e-36], "relu2": [1, 1e-21, 1e-30]}.get(phi.replace("6", ""), [0.5, -95, -210])
    value = torch.tensor([[0.0, 1.0, 2.0], [1000.0, 2.0, 3.0], [3.0, 1500.0, 1000.0]])
    holds(phi, power, torch.tensor(scores), value, backend, dtype)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=str)
@pytest.mark.parametrize("power", [None, 1, 2.5])
@pytest.mark.parametrize("phi", PHI)
def test_weights_that_are_no_numbers_on_values_that_bring_them_back(phi, power, backend, dtype):
    bring_back(phi, power, backend, dtype)


INTERPRETED = [("softplus", 2.5), ("relu", None), ("relu2", 2.5)]  # seconds each


@pytest.mark.parametrize(
    ("phi", "power"),
    [
        pytest.param(phi, power, marks=[] if (phi, power) in INTERPRETED else pytest.mark.slow)
        for phi in PHI
        for power in (None, 1, 2.5)
    ],
)
def test_the_same_in_the_interpreter(phi, power):
    pytest.importorskip("triton", reason="Triton is not installed")
    with numpy.errstate(all="ignore"):
        bring_back(phi, power, "triton", torch.float32)


SUBNORMAL = (
    [1.0, 0.5, 0.25, 1e-20, 3e-22],
    [[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 4.0], [92.0, 0.0, 1.0], [4.0, 99.0, 0.0]],
)
"""Scores whose squares are subnormal in float32, and values that give those keys about half of a
column, without a threshold.
"""


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=str)
def test_a_subnormal_phi_among_more_than_three_keys(backend, dtype):
    holds("relu2", None, *map(torch.tensor, SUBNORMAL), backend, dtype)


def test_a_subnormal_phi_among_more_than_three_keys_in_the_interpreter():
    """The threshold is not 0 in such a row, but a row without re-weighting does not use it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    with numpy.errstate(all="ignore"):
        holds("relu2", None, *map(torch.tensor, SUBNORMAL), "triton", torch.float32)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=str)
@pytest.mark.parametrize("far", [119.0, 150.0, 1200.0])
@pytest.mark.parametrize("gap", [60.0, 89.0, 110.0, 715.0, 760.0])
def test_a_weight_that_is_no_number_on_a_value_that_brings_it_back(gap, far, backend, dtype):
    """Two keys, whose answer is max(0, far - gap), and softmax over these two."""
    scores, value = torch.tensor([0.0, -gap]), torch.tensor([[0.0, 0.0, 1.0], [far, 0.0, 2.0]])
    holds("exp", None, scores, value, backend, dtype)


def test_exact_rows_among_ordinary_ones():
    """Rows in logarithms beside rows that are products, heads with a learned power, grouped
    queries, a mask: one tile.
    """
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
    value[0, 1, 5, 2], value[1, 0, 9, :3] = 200.0, -300.0
    mask = torch.rand(2, 1, 20, 20, generator=generator) > 0.3
    power = torch.tensor([1.5, 3.0, 15.0, 40.0])
    above = torch.randn(2, 4, 20, 8, generator=generator)
    results = []
    for backend, dtype in (("tiled", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value, power)]
        out = attention(
            *leaves[:3],
            mask,
            enable_gqa=True,
            mechanism="laser_lssar",
            power=leaves[3],
            is_causal=True,
            backend=backend,
        )
        results.append([out.detach(), *torch.autograd.grad(out, leaves, above.to(dtype))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-4 * want.abs().max().item())


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_without_keys_the_powers_gradient_is_zero(backend):
    query, key, power = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4), torch.full((2,), 2.5, requires_grad=True)
    attention(query, key, key, mechanism="laser_lssar", power=power, backend=backend).sum().backward()
    assert torch.equal(power.grad, torch.zeros(2))
