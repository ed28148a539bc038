"""LASER on scores and values that no float's exponential holds, forward and backward, against arbitrary precision."""

import random

import mpmath
import pytest
import torch

from softfocus import Mechanism, attention
from softfocus.reference import FREE_ROWS

PHI = {
    "exp": mpmath.exp,
    "softplus": lambda s: mpmath.log1p(mpmath.exp(s)),
    "sigmoid": lambda s: 1 / (1 + mpmath.exp(-s)),
    "relu": lambda s: max(s, 0),
    "relu2": lambda s: max(s, 0) ** 2,
    "relu6": lambda s: min(max(s, 0), 6),
}
STEP = mpmath.mpf(10) ** -25  # of central differences in 60 digits
ABOVE = (1.0, -2.0, 0.5)  # dL/dO
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(60):
        yield


def weights(phi, power, scores):
    """A of one row by the definition; None for a row near a tie, where another definition takes over."""
    f = [PHI[phi](s) for s in scores]
    a = [x / mpmath.fsum(f) for x in f]
    if power is None:
        return a
    u = [max(x * len(a) - (len(a) > FREE_ROWS), 0) for x in a]
    if max(u) < 0.01:
        return None
    r = [(x / max(u)) ** power if x else mpmath.mpf(0) for x in u]
    return [x / mpmath.fsum(r) for x in r]


def mixed(a, column):
    return mpmath.log(mpmath.fsum(x * mpmath.exp(v) for x, v in zip(a, column, strict=True)))


def exactly(phi, power, scores, value):
    """out [Dv], dL/ds [K] and dL/dV [K, Dv] in one row of numbers each."""
    a = weights(phi, power, scores)
    columns = list(zip(*value, strict=True))
    out = [mixed(a, column) for column in columns]

    def moved(j, step):
        near = weights(phi, power, [*scores[:j], scores[j] + step, *scores[j + 1 :]])
        return mpmath.fsum(g * mixed(near, column) for g, column in zip(ABOVE, columns, strict=True))

    to_scores = [(moved(j, STEP) - moved(j, -STEP)) / (2 * STEP) for j in range(len(scores))]
    shares = [[x * mpmath.exp(v - o) for v, o in zip(row, out, strict=True)] for x, row in zip(a, value, strict=True)]
    return out, to_scores, [g * share for row in shares for g, share in zip(ABOVE, row, strict=True)]


def drawn(phi, rng):
    """Scores [K] and values [K, 3], with gaps from ordinary to beyond float64's exponential."""
    keys = rng.choice([1, 2, 3, 4, 6])
    if phi.startswith("relu"):  # beside a largest of 1, and some below 0
        scores = [rng.choice([1, -1, 1]) * 10 ** (-rng.choice([1, 3, 8, 15]) * rng.random()) for _ in range(keys)]
        scores[0] = 1.0
    else:
        top, gap = rng.choice([0, -50, -90, 5, 40]), rng.choice([1, 30, 60, 88, 95, 104, 120, 300, 730, 2000])
        scores = [top, *(top - gap * rng.choice([0, rng.random(), 1]) for _ in range(keys - 1))]
    far = rng.choice([1, 25, 35, 70, 100, 150, 700, 1300, 4000])
    value = [[rng.choice([0, 1, -1, rng.random()]) * far + rng.random() for _ in range(3)] for _ in range(keys)]
    return torch.tensor(scores), torch.tensor(value)


def holds(phi, power, scores, value, backend, dtype):
    """Query and scale are 1, so that the scores are the keys. What is left to err is the rounding of p log A + V, which exp
    makes a relative error of the gradients."""
    key = scores.to(dtype)[None, None, :, None].requires_grad_()
    given = value.to(dtype)[None, None].requires_grad_()
    mechanism = Mechanism(phi=phi, scale="1", power=power, laser=True)
    out = attention(torch.ones_like(key[:, :, :1]), key, given, mechanism=mechanism, backend=backend)
    grads = torch.autograd.grad(out, (key, given), torch.tensor(ABOVE, dtype=dtype)[None, None, None])
    rounding = 1 + 8 * (power or 1) + scores.abs().max().item()
    steep = 1 / scores[scores > 0].min().item() if phi.startswith("relu") else 1.0  # log phi, of relu
    slack = rounding, (rounding + value.abs().max().item()) * steep, rounding + value.abs().max().item()
    wanted = exactly(
        phi, power, [mpmath.mpf(s) for s in scores.tolist()], [list(map(mpmath.mpf, v)) for v in value.tolist()]
    )
    for got, want, part in zip((out, *grads), wanted, slack, strict=True):
        assert got.isfinite().all()
        error = max(abs(x - y) for x, y in zip(got.flatten().tolist(), want, strict=True))
        assert error <= 20 * torch.finfo(dtype).eps * part * max(1, *map(abs, want)), (scores, value, got, want)


@pytest.mark.parametrize("power", [None, 1, 2.5, 15, 100])
@pytest.mark.parametrize("phi", PHI)
def test_any_scores_and_values(phi, power):
    rng = random.Random(f"{phi} {power}")
    held = 0
    while held < 8:
        scores, value = drawn(phi, rng)
        if weights(phi, power, [mpmath.mpf(s) for s in scores.tolist()]) is None:
            continue
        held += 1
        for dtype in DTYPES:
            holds(phi, power, scores, value, "tiled", dtype)
        holds(phi, power, scores, value, "reference", torch.float64)


@pytest.mark.parametrize("far", [119.0, 150.0, 1200.0])
@pytest.mark.parametrize("gap", [60.0, 89.0, 110.0, 715.0, 760.0])
def test_a_weight_that_is_no_number_on_a_value_that_brings_it_back(gap, far):
    """Two keys, whose answer is max(0, far - gap), and softmax over these two."""
    scores, value = torch.tensor([0.0, -gap]), torch.tensor([[0.0, 0.0, 1.0], [far, 0.0, 2.0]])
    for backend, dtype in (("tiled", torch.float32), ("tiled", torch.float64), ("reference", torch.float64)):
        holds("exp", None, scores, value, backend, dtype)
    holds("exp", None, scores, value, "cpu", torch.float32)


def test_exact_rows_among_ordinary_ones():
    """Rows in logarithms beside rows that are products, heads with a learned power, grouped queries, a mask: one tile."""
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
