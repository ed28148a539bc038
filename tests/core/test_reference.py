"""The reference against the papers' equations, worked out here one number at a time in plain
Python.

Nothing below calls softfocus to learn what to expect: ``ROWS`` writes every mechanism of the
catalogue as the paper does, on the list of one row's scores. Tolerance in float64: 1e-12 of the
largest expected number. Six keys and sums of at most six terms lose a few units of 2e-16 each; the
power p = 15 multiplies a relative error by 15, p = 100 by 100.

Over 400 lines: every formula of the catalogue is written out a second time here.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from softfocus import Mechanism, attention, laser, mechanisms, named, sharpened

NAMES = sorted(mechanisms())
DISTINCT = sorted({named(name): name for name in reversed(NAMES)}.values())
BACKENDS = ("reference", "tiled")


# The equations, by hand


class Row(NamedTuple):
    """One query among its visible keys."""

    dots: list[float]
    cosines: list[float]
    d: int
    length: int  # L: the key positions given
    head_scale: float = 1.0
    scale: float | None = None
    bias: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        return len(self.dots)

    def score(self, similarity: list[float], factor: float) -> list[float]:
        factor *= self.head_scale
        bias = self.bias or [0.0] * self.n
        return [factor * x + b for x, b in zip(similarity, bias, strict=True)]

    def plain(self, length_scale: float = 1.0) -> list[float]:
        """q.k / sqrt(d)"""
        return self.score(self.dots, (1 / math.sqrt(self.d) if self.scale is None else self.scale) * length_scale)

    def lssa(self) -> list[float]:
        """log d log N cos(q, k): eq. 4"""
        return self.score(self.cosines, (math.log(self.d) if self.scale is None else self.scale) * math.log(self.n))


def l1(f: list[float]) -> list[float]:
    total = math.fsum(abs(x) for x in f)
    return [x / total if total else 0.0 for x in f]


def each(phi: Callable[[float], float], scores: list[float]) -> list[float]:
    return [phi(s) for s in scores]


def sharp(weights: list[float], p: float) -> list[float]:
    """Eq. 5, with the paper's footnote 2: O is 0 in the first three rows."""
    n = len(weights)
    o = 0.0 if n <= 3 else 1.0
    return l1([max(w * n - o, 0.0) ** p for w in weights])


def recentred(weights: list[float], second: bool) -> list[float]:
    if len(weights) <= 3:  # footnote 1: the first three rows were left unmodified
        return weights
    mean = math.fsum(weights) / len(weights)
    centred = [w - mean for w in weights]
    return l1(centred) if second else centred


def sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s))


def softplus(s: float) -> float:
    return math.log1p(math.exp(s))


def softmax(r: Row) -> list[float]:
    return l1(each(math.exp, r.plain()))


def lssa(r: Row) -> list[float]:
    return l1(each(softplus, r.lssa()))


def sigmoid_log_n_l1(r: Row) -> list[float]:
    return l1(each(lambda s: sigmoid(s - math.log(r.n)), r.plain()))


ROWS: dict[str, Callable[[Row], list[float]]] = {
    "softmax": softmax,
    "softmax_negated": lambda r: [-w for w in softmax(r)],
    "softmax_recentred": lambda r: recentred(softmax(r), second=False),
    "softmax_recentred_l1": lambda r: recentred(softmax(r), second=True),
    "scenario_i": lambda r: r.plain(),
    "scenario_ii": lambda r: each(math.exp, r.plain()),
    "scenario_iii": lambda r: l1(r.plain()),
    "scenario_iv": softmax,
    "relu_l1": lambda r: l1(each(lambda s: max(s, 0.0), r.plain())),
    "relu2_l1": lambda r: l1(each(lambda s: max(s, 0.0) ** 2, r.plain())),
    "relu6_l1": lambda r: l1(each(lambda s: min(max(s, 0.0), 6.0), r.plain())),
    "gelu_l1": lambda r: l1(each(lambda s: s * 0.5 * (1 + math.erf(s / math.sqrt(2))), r.plain())),
    "sigmoid_l1": lambda r: l1(each(sigmoid, r.plain())),
    "softplus_l1": lambda r: l1(each(softplus, r.plain())),
    "mish_l1": lambda r: l1(each(lambda s: s * math.tanh(softplus(s)), r.plain())),
    "exp_l1": softmax,
    "sigmoid_log_l": lambda r: each(lambda s: sigmoid(s - math.log(r.length)), r.plain()),
    "sigmoid_log_n": lambda r: each(lambda s: sigmoid(s - math.log(r.n)), r.plain()),
    "sigmoid_log_n_l1": sigmoid_log_n_l1,
    "relu_wortsman": lambda r: each(lambda s: max(s, 0.0) / r.length, r.plain()),
    "relu_li": lambda r: l1(each(lambda s: max(s, 0.0), r.plain())),
    "relu_shen": lambda r: each(lambda s: max(s, 0.0) / math.sqrt(r.n / 2), r.plain()),
    "lssa": lssa,
    "softmax_p3": lambda r: sharp(softmax(r), 3),
    "softmax_p15": lambda r: sharp(softmax(r), 15),
    "sigmoid_log_n_l1_p3": lambda r: sharp(sigmoid_log_n_l1(r), 3),
    "sigmoid_log_n_l1_p15": lambda r: sharp(sigmoid_log_n_l1(r), 15),
    "lssar_p3": lambda r: sharp(lssa(r), 3),
    "lssar": lambda r: sharp(lssa(r), 15),
    "laser": softmax,
    "laser_lssa": lssa,
    "laser_lssar": lambda r: sharp(lssa(r), 15),
    "ssmax": lambda r: l1(each(math.exp, r.plain(math.log(r.n)))),
    "log512_softmax": lambda r: l1(each(math.exp, r.plain(math.log(r.n) / math.log(512)))),
    "qknorm": lambda r: l1(each(math.exp, r.score(r.cosines, 1.0 if r.scale is None else r.scale))),
    "cosine_log_n": lambda r: l1(each(math.exp, r.lssa())),
}


class Drawn(NamedTuple):
    """Lists of numbers, [head][position][coordinate], and the tensors of the same."""

    query: list[list[list[float]]]
    key: list[list[list[float]]]
    value: list[list[list[float]]]

    def tensors(self, requires_grad: bool = False) -> list[torch.Tensor]:
        return [torch.tensor([x], dtype=torch.float64, requires_grad=requires_grad) for x in self]


def draw(seed: int, heads: int, queries: int, keys: int, d: int, dv: int, spread: float = 1.0) -> Drawn:
    chance = random.Random(seed)

    def numbers(n: int, width: int) -> list[list[list[float]]]:
        return [[[chance.gauss(0, spread) for _ in range(width)] for _ in range(n)] for _ in range(heads)]

    return Drawn(numbers(queries, d), numbers(keys, d), numbers(keys, dv))


def by_hand(
    rows: Callable[[Row], list[float]],
    drawn: Drawn,
    sees: Callable[[int, int], bool],
    is_laser: bool = False,
    head_scale: tuple[float, ...] | None = None,
    scale: float | None = None,
    bias: list[list[float]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [1, H, Lq, Dv] and weights [1, H, Lq, Lk], number by number."""
    outs, weights = [], []
    for h in range(len(drawn.query)):
        head_out, head_weights = [], []
        for i, q in enumerate(drawn.query[h]):
            keys, values = drawn.key[h], drawn.value[h]
            seen = [j for j in range(len(keys)) if sees(i, j)]
            dots = [math.fsum(a * b for a, b in zip(q, keys[j], strict=True)) for j in seen]
            cosines = [x / (math.hypot(*q) * math.hypot(*keys[j])) for x, j in zip(dots, seen, strict=True)]
            row = Row(
                dots, cosines, len(q), len(keys),
                1.0 if head_scale is None else head_scale[h], scale,
                () if bias is None else tuple(bias[i][j] for j in seen),
            )  # fmt: skip
            a = dict(zip(seen, rows(row), strict=True)) if seen else {}
            head_weights.append([a.get(j, 0.0) for j in range(len(keys))])
            out = []
            for c in range(len(values[0])):
                if is_laser:
                    out.append(math.log(math.fsum(w * math.exp(values[j][c]) for j, w in a.items())))
                else:
                    out.append(math.fsum(w * values[j][c] for j, w in a.items()))
            head_out.append(out)
        outs.append(head_out)
        weights.append(head_weights)
    return torch.tensor([outs], dtype=torch.float64), torch.tensor([weights], dtype=torch.float64)


def same(actual: torch.Tensor, expected: torch.Tensor, relative: float = 1e-12) -> None:
    error = (actual - expected).abs().max().item()
    scale = max(expected.abs().max().item(), 1e-300)
    assert error <= relative * scale, f"{error:.3e} off, {error / scale:.3e} of {scale:.3e}"


def weights_of(query: torch.Tensor, key: torch.Tensor, **arguments) -> torch.Tensor:
    """A itself, read through V = identity (not for LASER)."""
    identity = torch.eye(key.size(2), dtype=query.dtype).expand(*key.shape[:2], -1, -1)
    return attention(query, key, identity, **arguments)


def causal(i: int, j: int) -> bool:
    return j <= i


def test_every_mechanism_is_written_out_here():
    assert set(ROWS) == set(NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_causal(name, backend):
    """Rows 1 to 6: the first three with the footnotes' exception, the last three without."""
    drawn = draw(1, heads=2, queries=6, keys=6, d=4, dv=3, spread=1.5)
    out, weights = by_hand(ROWS[name], drawn, causal, is_laser=named(name).laser)
    query, key, value = drawn.tensors()
    same(attention(query, key, value, mechanism=name, is_causal=True, backend=backend), out)
    if not named(name).laser:
        same(weights_of(query, key, mechanism=name, is_causal=True, backend=backend), weights)


@pytest.mark.parametrize("name", NAMES)
def test_any_mask(name):
    """N counts what the mask leaves, 1 to 5 of 6 keys; L stays 6."""
    drawn = draw(2, heads=1, queries=5, keys=6, d=3, dv=2)
    seen = [{2}, {0, 5}, {1, 3, 4}, {0, 2, 3, 5}, {0, 1, 2, 4, 5}]
    out, _ = by_hand(ROWS[name], drawn, lambda i, j: j in seen[i], is_laser=named(name).laser)
    mask = torch.tensor([[j in row for j in range(6)] for row in seen])
    same(attention(*drawn.tensors(), mask, mechanism=name, backend="reference"), out)


@pytest.mark.parametrize("name", NAMES)
def test_head_scale_scale_and_bias(name):
    drawn = draw(3, heads=2, queries=4, keys=6, d=4, dv=2)
    chance = random.Random(9)
    bias = [[chance.gauss(0, 1) for _ in range(6)] for _ in range(4)]
    head_scale = (0.43, 2.5)
    for scale in (None, 0.7):
        out, _ = by_hand(
            ROWS[name], drawn, lambda i, j: True, named(name).laser, head_scale=head_scale, scale=scale, bias=bias
        )
        given = torch.tensor(bias, dtype=torch.float64)
        heads = torch.tensor(head_scale, dtype=torch.float64)
        for where in ({"bias": given}, {"attn_mask": given}):
            got = attention(
                *drawn.tensors(), mechanism=name, scale=scale, head_scale=heads, backend="reference", **where
            )
            same(got, out)


@pytest.mark.parametrize("power", [1, 1.5, 2, 2.5, 3, 7.5, 15, 100])
@pytest.mark.parametrize("base", ["softmax", "sigmoid_l1", "sigmoid_log_n_l1", "lssa", "relu2_l1"])
def test_any_power(base, power):
    drawn = draw(4, heads=1, queries=6, keys=6, d=4, dv=3)
    out, _ = by_hand(lambda r: sharp(ROWS[base](r), power), drawn, causal)
    got = attention(*drawn.tensors(), mechanism=sharpened(named(base), power), is_causal=True, backend="reference")
    # p multiplies the relative error of u, up to 1e-15 after the subtraction of o near a large u
    same(got, out, 1e-12 * max(1.0, power / 15))


@pytest.mark.parametrize("normaliser", ["l1", "none", "1/N", "1/L", "1/sqrt(N/2)"])
@pytest.mark.parametrize(
    ("phi", "function"),
    [
        ("exp", math.exp),
        ("softplus", softplus),
        ("relu", lambda s: max(s, 0.0)),
        ("relu2", lambda s: max(s, 0.0) ** 2),
        ("relu6", lambda s: min(max(s, 0.0), 6.0)),
        ("gelu", lambda s: s * 0.5 * math.erfc(-s / math.sqrt(2))),
        ("sigmoid", sigmoid),
        ("mish", lambda s: s * math.tanh(softplus(s))),
        ("identity", lambda s: s),
    ],
)
def test_every_phi_with_every_normaliser(phi, function, normaliser):
    drawn = draw(5, heads=1, queries=5, keys=5, d=4, dv=3, spread=2.5)  # scores beyond 6, for ReLU6

    def rows(r: Row) -> list[float]:
        f = each(function, r.plain())
        if normaliser == "l1":
            return l1(f)
        factor = {"none": 1.0, "1/N": 1 / r.n, "1/L": 1 / r.length, "1/sqrt(N/2)": 1 / math.sqrt(r.n / 2)}[normaliser]
        return [x * factor for x in f]

    out, _ = by_hand(rows, drawn, causal)
    mechanism = Mechanism(phi=phi, normaliser=normaliser)
    for backend in BACKENDS:
        same(attention(*drawn.tensors(), mechanism=mechanism, is_causal=True, backend=backend), out)
    assert max(max(map(abs, head)) for head in drawn.query[0]) > 2.5


def test_power_per_head():
    drawn = draw(6, heads=3, queries=6, keys=6, d=4, dv=3)
    powers = (1.0, 2.5, 15.0)
    expected = [by_hand(lambda r, p=p: sharp(lssa(r), p), drawn, causal)[0][:, h] for h, p in enumerate(powers)]
    got = attention(
        *drawn.tensors(), mechanism="lssar", power=torch.tensor(powers, dtype=torch.float64), is_causal=True,
        backend="reference",
    )  # fmt: skip
    same(got, torch.stack(expected, 1))


def test_ssmax_is_softmax_of_s_log_n_z():
    """SSMax with s = 0.43, written as n^(s z) / sum n^(s z), as its paper does."""
    drawn = draw(7, heads=1, queries=6, keys=6, d=4, dv=3)

    def rows(r: Row) -> list[float]:
        return l1([r.n ** (0.43 * x / math.sqrt(r.d)) for x in r.dots])

    out, _ = by_hand(rows, drawn, causal)
    head_scale = torch.tensor([0.43], dtype=torch.float64)
    same(
        attention(*drawn.tensors(), mechanism="ssmax", head_scale=head_scale, is_causal=True, backend="reference"), out
    )


def test_log512_is_softmax_at_512_keys():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64, generator=generator) for n in (2, 512, 512))
    same(
        attention(q, k, v, mechanism="log512_softmax", backend="reference"),
        attention(q, k, v, mechanism="softmax", backend="reference"),
    )


@pytest.mark.parametrize("power", [1, 2.5, 3, 15])
def test_lssar_is_relu_of_softplus_minus_its_mean(power):
    """Without the inner l1 norm: the weights are proportional to relu(f_ij - o_i fbar_i)^p, with no
    l1 norm in between.
    """
    drawn = draw(8, heads=2, queries=6, keys=6, d=5, dv=3)

    def rows(r: Row) -> list[float]:
        f = each(softplus, r.lssa())
        mean = math.fsum(f) / r.n
        o = 0.0 if r.n <= 3 else 1.0
        return l1([max(x - o * mean, 0.0) ** power for x in f])

    out, _ = by_hand(rows, drawn, causal)
    mechanism = sharpened(named("lssa"), power)
    for backend in BACKENDS:
        same(attention(*drawn.tensors(), mechanism=mechanism, is_causal=True, backend=backend), out)


def test_the_first_three_rows_are_those_that_see_three_keys_or_fewer():
    """Row 3 (N = 3) has no zero weights under LSSAR, row 4 (N = 4) has: its keys below the mean."""
    drawn = draw(9, heads=1, queries=5, keys=5, d=4, dv=2)
    weights = weights_of(*drawn.tensors()[:2], mechanism="lssar", is_causal=True, backend="reference")[0, 0]
    for i in range(3):
        assert (weights[i, : i + 1] > 0).all()
    for i in (3, 4):
        assert (weights[i, : i + 1] == 0).any()
    # ... also where they are not the first: a window of three leaves every row unthresholded
    windowed = weights_of(*drawn.tensors()[:2], mechanism="lssar", window_size=(2, 0), backend="reference")[0, 0]
    assert all((windowed[i, max(0, i - 2) : i + 1] > 0).all() for i in range(5))


def test_recentred_rows_sum_to_zero_and_their_absolute_values_to_one():
    drawn = draw(10, heads=1, queries=7, keys=7, d=4, dv=2)
    query, key, _ = drawn.tensors()
    weights = weights_of(query, key, mechanism="softmax_recentred_l1", is_causal=True, backend="reference")[0, 0]
    assert weights[:3].sum(-1).sub(1).abs().max() < 1e-15
    assert weights[3:].sum(-1).abs().max() < 1e-15
    assert weights[3:].abs().sum(-1).sub(1).abs().max() < 1e-15
    assert torch.equal(
        weights[:3], weights_of(query, key, mechanism="softmax", is_causal=True, backend="reference")[0, 0, :3]
    )


@pytest.mark.parametrize("base", ["softmax", "lssa", "sigmoid_l1", "softmax_p3"])
def test_laser_is_log_of_the_weighted_sum_of_exponentials(base):
    drawn = draw(11, heads=2, queries=6, keys=6, d=4, dv=3, spread=2.0)
    out, _ = by_hand(ROWS[base], drawn, causal, is_laser=True)
    got = attention(*drawn.tensors(), mechanism=laser(named(base)), is_causal=True, backend="reference")
    same(got, out)
    # Between the weighted mean (Jensen) and the largest visible value
    mean, _ = by_hand(ROWS[base], drawn, causal)
    assert (got >= mean - 1e-12).all()
    largest = drawn.tensors()[2].cummax(2).values
    assert (got <= largest + 1e-12).all()


# Against torch


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_is_sdpa(backend):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q, k, v = normal(2, 4, 7, 8), normal(2, 4, 7, 8), normal(2, 4, 7, 5)
    bool_mask = torch.rand(2, 1, 7, 7, generator=generator) < 0.7
    bool_mask[..., 0] = True
    added = normal(4, 7, 7).masked_fill(~bool_mask[0], -math.inf)
    for arguments in (
        {},
        {"is_causal": True},
        {"attn_mask": bool_mask},
        {"attn_mask": added},
        {"scale": 0.3},
        {"attn_mask": added, "scale": 2.0},
    ):
        expected = F.scaled_dot_product_attention(q, k, v, **arguments)
        same(attention(q, k, v, **arguments, mechanism="softmax", backend=backend), expected)
    small_k, small_v = k[:, :2], v[:, :2]
    expected = F.scaled_dot_product_attention(q, small_k, small_v, is_causal=True, enable_gqa=True)
    got = attention(q, small_k, small_v, is_causal=True, enable_gqa=True, mechanism="softmax", backend=backend)
    same(got, expected)
    # rectangular: SDPA aligns causality top-left, softfocus bottom-right, as SDPA's own
    # causal_lower_right does
    from torch.nn.attention.bias import causal_lower_right

    long_k, long_v = normal(2, 4, 11, 8), normal(2, 4, 11, 5)
    expected = F.scaled_dot_product_attention(q, long_k, long_v, attn_mask=causal_lower_right(7, 11))
    same(attention(q, long_k, long_v, is_causal=True, mechanism="softmax", backend=backend), expected)


HIDERS = {
    "finfo.min": torch.finfo(torch.float64).min,
    "-inf": -math.inf,
    "half of finfo.min": torch.finfo(torch.float16).min / 2,
    "-1e4": -1e4,
    "-1e4 in bfloat16": torch.tensor(-1e4).bfloat16().item(),
    "-1e4 in float16": torch.tensor(-1e4).half().item(),
    "-1e4 and a position bias": -1e4 + 300.0,
    "-1e4 and ALiBi that grows, in bfloat16": torch.tensor(-1e4 + 0.5 * 8192).bfloat16().item(),
}


@pytest.mark.parametrize("lowest", HIDERS.values(), ids=HIDERS)
def test_every_spelling_of_hidden_in_an_additive_mask(lowest):
    """N_i must not count them: LSSA's log N would see."""
    drawn = draw(12, heads=1, queries=4, keys=6, d=3, dv=2)
    hidden = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)) < 0.4
    expected = attention(*drawn.tensors(), ~hidden, mechanism="lssar", backend="reference")
    added = torch.zeros(4, 6, dtype=torch.float64).masked_fill(hidden, lowest)
    for backend in BACKENDS:
        same(attention(*drawn.tensors(), added, mechanism="lssar", backend=backend), expected)


def test_a_position_bias_in_an_additive_mask_hides_no_key():
    """ALiBi falls by at most half a unit a token in eight heads; here over 8,192 of them."""
    drawn = draw(12, heads=1, queries=4, keys=6, d=3, dv=2)
    alibi = -0.5 * torch.tensor([8192.0, 4096.0, 100.0, 2.0, 1.0, 0.0], dtype=torch.float64).expand(4, 6)
    for backend in BACKENDS:
        counted = attention(*drawn.tensors(), alibi, mechanism="lssa", backend=backend)
        same(counted, attention(*drawn.tensors(), bias=alibi, mechanism="lssa", backend=backend))


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("lengths", [(5, 5), (3, 8), (8, 3), (1, 6)])
@pytest.mark.parametrize("name", ["softmax", "lssar", "sigmoid_log_l"])
def test_pytorchs_causal_bias_is_the_mask_that_it_stands_for(lengths, name):
    """Its memory is never written; SDPA reads its variant, too."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    queries, keys = lengths
    generator = torch.Generator().manual_seed(13)
    shapes = (2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 5)
    given = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    keywords = {"mechanism": name, "enable_gqa": True}
    for make, diagonal in ((causal_upper_left, 0), (causal_lower_right, keys - queries)):
        mask = torch.ones(lengths, dtype=torch.bool).tril(diagonal)
        for backend in BACKENDS:
            got = attention(*given, make(*lengths), **keywords, backend=backend)
            assert type(got) is torch.Tensor
            same(got, attention(*given, mask, **keywords, backend=backend))
            narrow = attention(*given, make(*lengths), **keywords, window_size=(1, 0), backend=backend)
            same(narrow, attention(*given, mask, **keywords, window_size=(1, 0), backend=backend))
        if name == "softmax" and make is causal_upper_left:
            same(got, F.scaled_dot_product_attention(*given, make(*lengths), enable_gqa=True))


# Derivatives


def smooth_inputs(mechanism: Mechanism) -> list[torch.Tensor]:
    """Small inputs away from every kink: scores further than 0.02 from those of ReLU (0), ReLU6 (0
    and 6) and |s| (0), weights further than 1e-4 from the row's mean (the re-weighting's threshold,
    and the zero of |A - mean|).

    gradcheck moves each number by 1e-6, which moves a score by less than 1e-5. Seeds are tried in
    order; none is trusted.
    """
    for seed in range(200):
        drawn = draw(seed, heads=1, queries=5, keys=5, d=3, dv=2, spread=1.2)
        query, key, value = drawn.tensors()
        base = mechanism.replace(power=None, laser=False, post="none")
        scores = weights_of(
            query, key, is_causal=True, mechanism=base.replace(phi="identity", normaliser="none"), backend="reference"
        )
        scores = scores[0, 0][torch.ones(5, 5).tril().bool()]
        weights = weights_of(query, key, is_causal=True, mechanism=base, backend="reference")[0, 0]
        count = torch.arange(1, 6, dtype=torch.float64)[:, None]
        distance = (weights * count - 1).abs()[torch.ones(5, 5).tril().bool() & (count > 3)]
        near_kink = mechanism.phi not in ("exp", "softplus", "sigmoid") and bool(
            (scores.abs() < 0.02).any() or ((scores - 6).abs() < 0.02).any()
        )
        # a ReLU row without a positive score has no weights at all: leave it to test_edges
        dead = bool((weights.abs().sum(-1) == 0).any())
        if not near_kink and not dead and bool((distance > 1e-2).all()):
            return [x.requires_grad_() for x in (query, key, value)]
    raise AssertionError("no smooth inputs found")


@pytest.mark.parametrize("name", DISTINCT)
def test_gradients_and_gradients_of_gradients(name):
    mechanism = named(name)
    inputs = smooth_inputs(mechanism)

    def function(query, key, value):
        return attention(query, key, value, mechanism=mechanism, is_causal=True, backend="reference")

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("power", [1.0, 2.5, 7.5])
def test_gradients_with_other_powers(power):
    mechanism = sharpened(named("lssa"), power)
    inputs = smooth_inputs(mechanism)

    def function(query, key, value):
        return attention(query, key, value, mechanism=mechanism, is_causal=True, backend="reference")

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["lssar_p3", "laser_lssar", "softmax_p15"])
def test_gradients_of_bias_head_scale_and_power(name):
    query, key, value = smooth_inputs(named(name))
    bias = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    head_scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    power = torch.tensor([named(name).power], dtype=torch.float64, requires_grad=True)

    def function(query, bias, head_scale, power):
        return attention(
            query, key.detach(), value.detach(), mechanism=name, is_causal=True, bias=bias, head_scale=head_scale,
            power=power, backend="reference",
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (query, bias, head_scale, power))
    assert torch.autograd.gradgradcheck(function, (query, bias, head_scale, power), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("power", [1.0, 2.5, 15.0])
def test_lssar_backward_is_the_closed_form(power, backend):
    """The closed form of DESIGN.md, line by line; Q and K are unit vectors there, the last lines go
    on to those given.
    """
    n, d, dv = 9, 5, 4
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(n, d, dtype=torch.float64, generator=generator) for _ in range(2))
    v, grad = (torch.randn(n, dv, dtype=torch.float64, generator=generator) for _ in range(2))
    visible = torch.ones(n, n, dtype=torch.float64).tril()
    q_norm, k_norm = q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)
    unit_q, unit_k = q / q_norm, k / k_norm
    count = visible.sum(-1, keepdim=True)  # N
    o = (count > 3).double()
    c = math.log(d) * count.log()
    s = c * (unit_q @ unit_k.T)
    f = torch.log1p(s.exp()) * visible
    z = f.sum(-1, keepdim=True)
    u = (f * count / z - o).clamp(min=0) * visible
    r = u**power * visible
    total = r.sum(-1, keepdim=True)  # R
    p = r / total
    out = p @ v
    big_d = (grad * out).sum(-1, keepdim=True)
    slope = torch.where(u > 0, u ** (power - 1), 0.0)
    g = power * slope * (grad @ v.T - big_d) / total
    e = o * g.sum(-1, keepdim=True)
    ds = (g - e / count) * (count / z) * torch.sigmoid(s) * visible
    d_unit_q, d_unit_k, dv_expected = c * ds @ unit_k, (c * ds).T @ unit_q, p.T @ grad
    dq = (d_unit_q - unit_q * (unit_q * d_unit_q).sum(-1, keepdim=True)) / q_norm
    dk = (d_unit_k - unit_k * (unit_k * d_unit_k).sum(-1, keepdim=True)) / k_norm

    given = [x[None, None].clone().requires_grad_() for x in (q, k, v)]
    got = attention(*given, mechanism=sharpened(named("lssa"), power), is_causal=True, backend=backend)
    got.backward(grad[None, None])
    same(got.detach()[0, 0], out)
    for x, expected in zip(given, (dq, dk, dv_expected), strict=True):
        same(x.grad[0, 0], expected)


def test_statistics_carry_no_gradient_and_change_nothing():
    drawn = draw(13, heads=2, queries=5, keys=5, d=3, dv=2)
    inputs = drawn.tensors(requires_grad=True)
    for backend in BACKENDS:
        out, statistics = attention(*inputs, mechanism="lssar", return_statistics=True, backend=backend)
        assert torch.equal(out, attention(*inputs, mechanism="lssar", backend=backend))
        assert out.requires_grad
        assert not any(x.requires_grad for x in statistics)
