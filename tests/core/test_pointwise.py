"""phi, phi' and log phi against arbitrary-precision values, far beyond where scores should ever
be.
"""

import math

import mpmath
import pytest
import torch

from softfocus.mechanism import CHOICES, SIGNED_PHI
from softfocus.pointwise import FUSED, POINTWISE

mpmath.mp.dps = 60

POINTS = [
    -1e4, -1000.0, -746.0, -700.0, -200.0, -100.0, -88.0, -50.0, -40.0, -37.0, -36.0, -35.0, -30.0, -21.0, -20.0000001,
    -20.0, -19.9999999, -19.0, -10.0, -6.0, -3.0, -1.0, -0.5, -1e-3, -1e-8, -1e-300, 0.0, 1e-300, 1e-8, 1e-3, 0.5, 1.0,
    2.0, 3.0, 5.9999, 6.0, 6.0001, 10.0, 19.0, 20.0, 20.0000001, 21.0, 30.0, 36.0, 50.0, 88.0, 100.0, 700.0, 709.0, 1e4,
]  # fmt: skip
KINKS = {"relu": (0.0,), "relu6": (0.0, 6.0)}

VALUE = {
    "exp": mpmath.exp,
    "softplus": lambda s: mpmath.log1p(mpmath.exp(s)),
    "relu": lambda s: max(s, mpmath.mpf(0)),
    "relu2": lambda s: max(s, mpmath.mpf(0)) ** 2,
    "relu6": lambda s: min(max(s, mpmath.mpf(0)), mpmath.mpf(6)),
    "gelu": lambda s: s * mpmath.ncdf(s),
    "sigmoid": lambda s: 1 / (1 + mpmath.exp(-s)),
    "mish": lambda s: s * mpmath.tanh(mpmath.log1p(mpmath.exp(s))),
    "identity": lambda s: s,
}
LOG = {
    "exp": lambda s: s,
    "softplus": lambda s: mpmath.log(mpmath.log1p(mpmath.exp(s))),
    "sigmoid": lambda s: -mpmath.log1p(mpmath.exp(-s)),
}
DERIVATIVE = {
    "exp": mpmath.exp,
    "softplus": lambda s: 1 / (1 + mpmath.exp(-s)),
    "relu": lambda s: mpmath.mpf(s > 0),
    "relu2": lambda s: 2 * max(s, mpmath.mpf(0)),
    "relu6": lambda s: mpmath.mpf(0 < s < 6),
    "gelu": lambda s: mpmath.ncdf(s) + s * mpmath.npdf(s),
    "sigmoid": lambda s: mpmath.exp(-s) / (1 + mpmath.exp(-s)) ** 2,
    "mish": lambda s: (
        mpmath.tanh(VALUE["softplus"](s)) + s * mpmath.sech(VALUE["softplus"](s)) ** 2 / (1 + mpmath.exp(-s))
    ),
    "identity": lambda s: mpmath.mpf(1),
}


def representable(exact: mpmath.mpf, dtype: torch.dtype) -> bool:
    info = torch.finfo(dtype)
    return abs(exact) <= info.max and (exact == 0 or abs(exact) >= info.tiny)


def test_the_table_covers_the_algebra():
    assert set(POINTWISE) == set(CHOICES["phi"]) == set(VALUE)
    # a logarithm for every strictly positive phi, and for no other
    assert {name for name, phi in POINTWISE.items() if phi.positive} == {"exp", "softplus", "sigmoid"}


@pytest.mark.parametrize("name", [name for name in POINTWISE if name not in SIGNED_PHI])
def test_what_the_backends_take_for_granted(name):
    """docs/adding-a-phi.md: one that is positive everywhere is e^s far below zero; any other is 0
    from there on. The kernels' phi are non-decreasing.
    """
    phi, below = POINTWISE[name], torch.tensor([-20.0, -25.0, -40.0, -80.0], dtype=torch.float64)
    if phi.positive:
        torch.testing.assert_close(phi.value(below), below.exp(), rtol=3e-9, atol=0.0)
        torch.testing.assert_close(phi.derivative(below), below.exp(), rtol=5e-9, atol=0.0)
    else:
        assert not phi.value(torch.cat([below, below.new_zeros(1)])).any()
        assert not phi.derivative(below).any()
    if name in FUSED:
        assert phi.value(torch.tensor(POINTS, dtype=torch.float64)).diff().min() >= 0.0
    assert set(SIGNED_PHI) == {name for name in VALUE if VALUE[name](mpmath.mpf(-1)) < 0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", VALUE)
def test_value(name, dtype):
    """Within 8 units in the last place (torch's vectorised exp and tanh promise 1; they are
    composed up to four deep).

    Below zero GELU is s e^(-s^2 / 2) times a slow function, which multiplies the rounding of s by
    s^2. It is relative there too, because the l1 norm divides a row of small GELU by its sum.
    """
    s = torch.tensor([*POINTS, -12.4, -8.0, -5.0, -4.0], dtype=dtype)
    eps = torch.finfo(dtype).eps
    for point, got in zip(s.tolist(), POINTWISE[name].value(s).tolist(), strict=True):
        exact = VALUE[name](mpmath.mpf(point))
        if not representable(exact, dtype):
            limit = math.inf if abs(exact) > 1 else torch.finfo(dtype).tiny
            assert got == limit if limit == math.inf else abs(got) <= limit, (point, got)
            continue
        unit = eps * abs(exact) * (max(1, point**2) if name == "gelu" and point < 0 else 1)
        assert abs(mpmath.mpf(got) - exact) <= 8 * unit, (point, got, float(exact))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", VALUE)
def test_derivative(name, dtype):
    """Within 16 units in the last place of max(|exact|, |s| phi'): sums that cancel lose what they
    cancel.
    """
    s = torch.tensor([p for p in POINTS if p not in KINKS.get(name, ())], dtype=dtype)
    eps = torch.finfo(dtype).eps
    for point, got in zip(s.tolist(), POINTWISE[name].derivative(s).tolist(), strict=True):
        if point in KINKS.get(name, ()):  # 1e-300 is 0 in float32
            continue
        exact = DERIVATIVE[name](mpmath.mpf(point))
        if abs(exact) > torch.finfo(dtype).max:
            assert got == math.inf
            continue
        # GELU', Mish' and sigmoid' add or multiply terms of size up to 1, which cancel for large
        # |s|
        terms = {"gelu": 1.0, "mish": min(1.0, abs(point)), "sigmoid": 0.25}.get(name, 0.0)
        if name == "mish" and abs(exact) < eps:
            terms = float(abs(exact)) * 4
        if name == "gelu" and point < -2:
            terms = float(abs(exact)) * point**2  # as in test_value
        unit = eps * max(abs(exact), terms) + torch.finfo(dtype).tiny
        assert abs(mpmath.mpf(got) - exact) <= 16 * unit, (point, got, float(exact))


@pytest.mark.parametrize("name", VALUE)
def test_derivative_is_what_autograd_gives(name):
    """The hand-written derivative runs in the tiled backend, autograd's in the reference: also at
    the kinks.
    """
    s = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    value = POINTWISE[name].value(s)
    (slope,) = torch.autograd.grad(value.sum(), s)
    mine = POINTWISE[name].derivative(s.detach())
    scale = torch.where(slope.abs() > 1, slope.abs(), 1.0)
    wrong = ((mine - slope).abs() > 1e-14 * scale) & (mine != slope)
    assert not wrong.any(), [
        (p, m, a) for p, m, a, w in zip(POINTS, mine.tolist(), slope.tolist(), wrong, strict=True) if w
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["exp", "softplus", "sigmoid"])
def test_log(name, dtype):
    """log phi(s) to its last digits from -700 to 700 (and beyond), where phi itself has long
    vanished.
    """
    s = torch.tensor([*POINTS, *[x / 7.0 for x in range(-4900, 4901, 50)]], dtype=dtype)
    got = POINTWISE[name].log(s)
    assert got.isfinite().all()
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for point, value in zip(s.tolist(), got.tolist(), strict=True):
        exact = LOG[name](mpmath.mpf(point))
        # log(softplus(s)) crosses zero at s = 0.54, where the error of its argument, relative to 1,
        # remains
        unit = eps * max(abs(exact), 1.0 if name == "softplus" else 0.0) + tiny
        assert abs(mpmath.mpf(value) - exact) <= 8 * unit, (point, value, float(exact))


@pytest.mark.parametrize("name", ["exp", "softplus", "sigmoid"])
def test_log_has_finite_slopes_everywhere(name):
    s = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(POINTWISE[name].log(s).sum(), s, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), s, allow_unused=True) if slope.requires_grad else (None,)
    assert slope.isfinite().all()
    assert curvature is None or curvature.isfinite().all()
    for point, value in zip(POINTS, slope.tolist(), strict=True):
        x = mpmath.mpf(point)
        exact = DERIVATIVE[name](x) / VALUE[name](x)
        assert abs(value - exact) <= 1e-13 * max(1, abs(exact)), point


@pytest.mark.parametrize("name", VALUE)
def test_differentiable_twice(name):
    points = [-30.0, -22.0, -5.0, -1.3, -0.2, 0.3, 1.1, 4.0, 7.5, 12.0]  # away from the kinks at 0 and 6
    s = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    functions = [POINTWISE[name].value] + ([POINTWISE[name].log] if POINTWISE[name].positive else [])
    for function in functions:
        assert torch.autograd.gradcheck(function, s)
        assert torch.autograd.gradgradcheck(function, s)


@pytest.mark.parametrize("name", VALUE)
def test_nan_stays_nan_and_value_is_a_new_tensor(name):
    s = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    value = POINTWISE[name].value(s)
    assert value.isnan().tolist() == [True, False]
    assert value.data_ptr() != s.data_ptr()
