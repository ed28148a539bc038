"""The CPU kernels against the float64 reference: what they support of the catalogue, every case,
three dtypes; and what is their own: the borders of their blocks, strides, few queries, threads,
forks.

Every comparison is ``softfocus.testing.check`` as it stands, or bit by bit.

Over 400 lines: one backend, and its cases share the lists of mechanisms and shapes.
"""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

import softfocus
from softfocus import Mechanism
from softfocus.mechanism import CHOICES
from softfocus.pointwise import FUSED
from softfocus.testing import CASES, Case, check

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

COMBINATIONS = (
    "laser(relu_l1)",
    "laser(sharpened(relu2_l1, 100))",
    "laser(sharpened(sigmoid_l1, 3))",
    "laser(ssmax)",
    "sharpened(relu_l1, 2.5)",
    "sharpened(softplus_l1, 1)",
    "sharpened(lssa, 100)",
)
ALIASES = ("scenario_iv", "exp_l1", "relu_li")  # equal to another entry
REFUSED = {
    "softmax_negated": "post='negate' is not supported",
    "softmax_recentred": "post='recentre' is not supported",
    "softmax_recentred_l1": "post='recentre+l1' is not supported",
    "scenario_i": "phi='identity' is not among",
    "scenario_iii": "phi='identity' is not among",
    "gelu_l1": "phi='gelu' is not among",
    "mish_l1": "phi='mish' is not among",
}
"""What of the catalogue runs on the tiled backend, and why."""
MECHANISMS = [name for name in softfocus.mechanisms() if name not in (*ALIASES, *REFUSED)] + list(COMBINATIONS)
WAYS = (
    "softmax",  # e^(s - max)
    "scenario_ii",  # e^s as it is
    "lssa",  # cosines, softplus, log N
    "sigmoid_log_n",  # phi from the score itself, no norm, a bias of the row
    "sigmoid_l1",  # along e^s far below zero
    "relu_shen",  # a norm that does not depend on phi
    "relu2_l1",
    "relu6_l1",
    "lssar",  # lists of the keys that weigh something
    "sharpened(sigmoid_log_n_l1, 2.5)",  # a power that is no whole number
    "laser",
    "laser_lssar",
)
"""Mechanisms that each take another way through the kernels."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
cpu = partial(softfocus.attention, backend="cpu")


def ids(cases):
    return [case.name for case in cases]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_parity(mechanism, dtype):
    for case in CASES:
        check(cpu, case, mechanism, dtype)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_statistics_equal_the_reference(mechanism):
    """As outputs: within twice the eager formula's error in float32 and four units in the last
    place.
    """
    algebra = softfocus.named(mechanism)
    for case in CASES:
        arguments = case.arguments(algebra, torch.float32)
        exact = {k: x.detach().double() if is_floating(x) else x for k, x in arguments.items()}
        (_, got), (_, eager), (_, want) = (
            softfocus.attention(**given, backend=name, return_statistics=True)
            for given, name in ((arguments, "cpu"), (arguments, "reference"), (exact, "reference"))
        )
        assert torch.equal(got.count.double(), want.count), case.name
        for name in ("maximum", "log_norm", "peak"):
            a, b, c = (getattr(statistics, name).double() for statistics in (got, eager, want))
            if name == "log_norm" and algebra.phi.startswith("relu"):  # whose norm may be next to 0
                a, b, c = a.exp(), b.exp(), c.exp()
            finite = c.isfinite()
            assert torch.equal(a[~finite], c[~finite]), (case.name, name)
            if finite.any():
                allowed = 2 * (b - c)[finite].abs().max() + 4 * torch.finfo(torch.float32).eps * c[finite].abs().max()
                assert (a - c)[finite].abs().max() <= allowed, (case.name, name)


def is_floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


# What is refused


def why_not(device="cpu", dtype=torch.float32, **arguments):
    query = torch.empty(1, 1, 4, 8, device=device, dtype=dtype)
    return softfocus.explain(query, query, query, **arguments).reasons["cpu"]


def test_of_the_catalogue_just_this_is_refused():
    for name in softfocus.mechanisms():
        answer = softfocus.explain(*(torch.empty(1, 1, 4, 8) for _ in range(3)), mechanism=name)
        assert answer.backend == ("tiled" if name in REFUSED else "cpu"), name
        assert REFUSED.get(name, "fused C++ kernels") in answer.reasons["cpu"], name


def test_of_the_algebra_just_this_is_refused():
    """Every name that a field may have, one at a time: a new one is supported, or refused here by
    name.
    """
    refused = {("phi", "gelu"), ("phi", "mish"), ("phi", "identity")}
    refused |= {("post", "negate"), ("post", "recentre"), ("post", "recentre+l1")}
    for field, values in CHOICES.items():
        for value in values:
            why = why_not(mechanism=Mechanism(**{field: value}))
            assert (f"{field}={value!r} is not" in why) == ((field, value) in refused), why
            assert ("fused C++ kernels" in why) == ((field, value) not in refused), why
    assert {value for field, value in refused if field == "phi"} == set(CHOICES["phi"]) - set(FUSED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": torch.float64}, "torch.float64 is not among float32, bfloat16 and float16"),
        ({"device": "meta"}, "on 'meta', not on the CPU"),
    ],
    ids=["float64", "device"],
)
def test_the_rest_that_is_refused(arguments, words):
    assert words in why_not(**arguments)


def test_more_keys_than_32_bits_count_are_refused():
    """Expanded keys take no memory, and explain() reads none."""
    query, key = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 1, 8).expand(1, 1, 2**31, 8)
    reason = softfocus.explain(query, key, key).reasons["cpu"]
    assert reason == "2147483648 keys are 2^31 or more, and the kernels compare their indices in 32 bits"
    shorter = key[:, :, 1:]
    assert "2^31" not in softfocus.explain(query, shorter, shorter).reasons["cpu"]


@pytest.mark.parametrize("mechanism", REFUSED)
def test_asked_for_by_name_it_does_not_fall_back(mechanism):
    query = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="'cpu' was asked for and does not support this call") as caught:
        cpu(query, query, query, mechanism=mechanism)
    assert REFUSED[mechanism] in str(caught.value)


# Borders: rows come in blocks of 64 and groups of 4, keys in chunks of 128, in panels, and in
# vectors

# Cases of few rows have a larger batch: the eager formula's largest error is a measure only if it
# is the largest of many

LENGTHS = [
    Case(f"{n} of {n}", batch=max(1, 64 // n), query_length=n, key_length=n, head_dim=8, value_dim=8)
    for n in (1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 257)
] + [
    Case(
        f"{q} of {k}{'' if causal else ', both ways'}",
        batch=max(1, 64 // q), query_length=q, key_length=k, head_dim=8, value_dim=8, is_causal=causal,
    )
    for q, k in ((5, 128), (64, 129), (65, 257), (9, 256), (130, 64), (129, 1), (67, 300))
    for causal in (True, False)
]  # fmt: skip
SHAPES = [
    Case(f"{d} and {dv} dimensions", query_length=70, key_length=70, head_dim=d, value_dim=dv)
    for d, dv in ((1, 1), (3, 5), (8, 1), (17, 33), (40, 24), (64, 64), (80, 16), (128, 96), (256, 40), (16, 256))
] + [
    Case("four to a key head", batch=3, heads=8, key_heads=2, query_length=70, key_length=133),
    Case("one key head", batch=3, heads=5, key_heads=1, query_length=6, key_length=40, is_causal=False),
    Case("many heads", batch=3, heads=7, key_heads=7, query_length=12, key_length=12, head_dim=4),
]
MASKS = [
    Case("window", query_length=257, key_length=257, window_size=(70, 0), head_dim=8, value_dim=8, batch=1),
    Case("window of one", query_length=130, key_length=130, window_size=(0, 0), head_dim=8, batch=1),
    Case(
        "window both ways", query_length=200, key_length=331, window_size=(60, 70), is_causal=False, head_dim=8, batch=1
    ),
    Case("window ahead", query_length=70, key_length=200, window_size=(-1, 3), is_causal=False, head_dim=8, batch=1),
    Case("window behind", query_length=200, key_length=70, window_size=(3, -1), is_causal=False, head_dim=8, batch=1),
    Case("borders of documents", documents=7, query_length=257, key_length=257, head_dim=8, batch=2),
    Case("documents and a cache", documents=3, query_length=70, key_length=300, head_dim=8, batch=2),
    Case("documents, both ways", documents=5, query_length=140, key_length=140, is_causal=False, head_dim=8),
    Case("random mask", mask=0.5, query_length=257, key_length=257, head_dim=8, batch=1),
    Case("thin mask", mask=0.98, query_length=130, key_length=257, head_dim=8, batch=1, is_causal=False),
    Case("mask, padding, window", mask=0.3, padding="right", window_size=(100, 9), query_length=140, key_length=260),
    Case("padding", padding="left", query_length=260, key_length=260, batch=2, head_dim=8),
    Case("mask and bias", mask=0.4, bias="bhqk", query_length=70, key_length=140, batch=1, heads=4, key_heads=2),
]


def everywhere(cases, ways=WAYS, others=DTYPES[1:], long=()):
    """Mechanisms in float32 and in one of the other dtypes, in turn; all the cases in one test.

    How 16 bits are read and rounded does not depend on the mechanism; test_parity has all pairs.
    """
    pairs = [
        pytest.param(way, dtype, marks=[pytest.mark.long] * (way in long))
        for n, way in enumerate(ways)
        for dtype in (DTYPES[0], *others[n % 2 : n % 2 + 1])
    ]

    def spread(test):
        test = pytest.mark.parametrize(("mechanism", "dtype"), pairs, ids=str)(test)
        return pytest.mark.parametrize("cases", [cases], ids=[""])(test)

    return spread


@everywhere(LENGTHS)
def test_lengths_around_the_blocks(holds, cases, mechanism, dtype):
    for case in cases:
        holds(cpu, case, mechanism, dtype)


@everywhere(SHAPES)
def test_dimensions_and_groups(holds, cases, mechanism, dtype):
    for case in cases:
        holds(cpu, case, mechanism, dtype)


@everywhere(MASKS, long=("laser", "laser_lssar"))
def test_masks_across_the_blocks(holds, cases, mechanism, dtype):
    for case in cases:
        holds(cpu, case, mechanism, dtype)


# Tensors as they come


def other_strides(x):
    """The last dimension is not the one that lies side by side."""
    return x.mT.contiguous().mT


def gappy(x):
    """Every other number of a wider tensor, beginning in the middle of a cache line."""
    wide = torch.full((*x.shape[:3], 2 * x.size(3) + 3), math.nan, dtype=x.dtype)
    return torch.cat([wide[..., :3], torch.stack([x, wide[..., : x.size(3)]], -1).flatten(-2)], -1)[..., 3::2]


def relaid(layout, **arguments):
    for name in ("query", "key", "value"):
        arguments[name] = layout(arguments[name])
    return layout(cpu(**arguments))  # and so comes what is handed to the backward


STRIDED = [
    Case("plain", query_length=70, key_length=133, heads=4, key_heads=2, head_dim=16, value_dim=16),
    Case("odd", query_length=5, key_length=20, heads=2, head_dim=7, value_dim=9, is_causal=False),
    Case("transposed", query_length=70, key_length=70, transposed=True),
    Case("one query", query_length=1, key_length=150, heads=4, key_heads=2),
]


@pytest.mark.parametrize("layout", [other_strides, gappy])
@everywhere(STRIDED, ways=("softmax", "lssar", "sigmoid_log_n", "laser_lssar"))
def test_any_strides(holds, cases, mechanism, dtype, layout):
    for case in cases:
        holds(partial(relaid, layout), case, mechanism, dtype)


@pytest.mark.parametrize("mechanism", ["softmax", "lssar", "laser"])
def test_expanded_inputs(holds, mechanism):
    """One key head stands for four by a stride of 0, and one query for the whole batch."""

    def expanded(query, key, value, enable_gqa, **arguments):
        key, value = (x.expand(-1, 4, -1, -1) for x in (key, value))
        return cpu(query=query, key=key, value=value, **arguments)

    holds(expanded, Case("expanded", heads=4, key_heads=1, query_length=70, key_length=70), mechanism, torch.float32)
    query, key = torch.randn(1, 2, 9, 8).expand(3, -1, -1, -1), torch.randn(3, 2, 9, 8)
    same = cpu(query.contiguous(), key, key, mechanism=mechanism)
    assert torch.equal(cpu(query, key, key, mechanism=mechanism), same)


@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
def test_an_expanded_gradient(mechanism):
    """out.sum() hands down one number with strides of 0."""
    leaves = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    out = cpu(*leaves, is_causal=True, mechanism=mechanism)
    one = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    other = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# What is learned

BIASES = [b + h + q + k for b in "b1" for h in "h1" for q in "q1" for k in "k1"]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("bias", BIASES)
def test_a_bias_of_any_shape(holds, threads, bias, number):
    """Its gradient sums over what it is broadcast over, in every thread's rows."""
    threads(number)
    # Where the gradient of a bias is summed does not depend on the mechanism
    for heads, key_heads, mechanisms in (
        (4, 2, ("softmax", "sigmoid_log_n") if number > 1 else ("lssar",)),
        (3, 3, ("lssar",)),
    ):
        case = Case(
            f"bias {bias}", bias=bias, batch=2, heads=heads, key_heads=key_heads, query_length=130, key_length=133,
            head_dim=8, value_dim=8, mask=0.2,
        )  # fmt: skip
        for mechanism in mechanisms:
            holds(cpu, case, mechanism, torch.float32)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2048), (1, 1, 2048, 1)], ids=str)
def test_a_bias_that_sums_millions_of_equal_terms(shape):
    """8 M scores of zero: phi is 1 / (1 + L), its derivative L / (1 + L)^2. With one
    element their float32 running sum would lose a tenth.
    """
    length = 2048
    query, value = torch.zeros(1, 2, length, 8), torch.ones(1, 2, length, 8)
    bias = torch.zeros(shape, requires_grad=True)
    out = cpu(query, query, value, mechanism="sigmoid_log_l", bias=bias)
    (grad,) = torch.autograd.grad(out, bias, torch.ones_like(out))
    each = 8 * length / (1 + length) ** 2 * 2 * length**2 / bias.numel()  # 8: grad_out times the value
    ulps = 4  # of a term: an exponential, a quotient, a product
    torch.testing.assert_close(grad.double(), torch.full(shape, each, dtype=torch.float64), rtol=ulps * 2**-23, atol=0)


def test_a_bias_of_many_sequences():
    """Broadcast over the batch alone, an element is still a sum of as many terms."""
    query, value = torch.zeros(20_000, 1, 4, 4), torch.ones(20_000, 1, 4, 4)
    bias = torch.zeros(1, 1, 4, 4, requires_grad=True)
    out = cpu(query, query, value, mechanism="sigmoid_log_l", bias=bias)
    (grad,) = torch.autograd.grad(out, bias, torch.ones_like(out))
    each = 4 * 4 / 5**2 * 20_000  # no multiple of a power of two, whose sum would be exact
    ulps = 4  # as above
    want = torch.full((1, 1, 4, 4), each, dtype=torch.float64)
    torch.testing.assert_close(grad.double(), want, rtol=ulps * 2**-23, atol=0)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("mechanism", ["softmax", "softmax_p3", "laser", "laser(sharpened(softmax, 3))"])
def test_a_value_that_many_queries_see(mechanism, large):
    """Terms of one sign: the roundings of a running sum of all rows would add up. With a large
    value of no weight LASER's sums are exact ones.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 8, generator=generator) for n in (30_000, 4, 4))
    if large:
        query, key[:, :, 3], value[:, :, 3] = query.abs() + 1, -200, 150
    grad_out = torch.rand(1, 1, 30_000, 8, generator=generator)

    def grad_value(dtype, backend):
        leaf = value.to(dtype).requires_grad_()
        out = softfocus.attention(query.to(dtype), key.to(dtype), leaf, mechanism=mechanism, backend=backend)
        return torch.autograd.grad(out, leaf, grad_out.to(dtype))[0].double()

    exact = grad_value(torch.float64, "reference")
    ours, eager = ((grad_value(torch.float32, name) - exact).abs().max() for name in ("cpu", "reference"))
    assert ours <= 2 * eager + 4 * 2**-23 * exact.abs().max()  # as softfocus.testing has it


@pytest.mark.parametrize("number", [1, 3])
@everywhere([Case("learned", head_scale=True, power=True, heads=6, key_heads=2, query_length=130, key_length=140)])
def test_learned_scales_and_powers(holds, threads, cases, mechanism, dtype, number):
    threads(number)
    for case in cases:
        holds(cpu, case, mechanism, dtype)


@dataclass(frozen=True)
class WideValues(Case):
    """Values of standard deviation 50, and powers up to 100: u^p lies far below what a float holds,
    and e^V far above.
    """

    def arguments(self, mechanism, dtype, seed=0, device="cpu"):
        arguments = super().arguments(mechanism, dtype, seed, device)
        with torch.no_grad():
            arguments["value"] *= 50.0
            if self.power:
                arguments["power"].copy_(torch.linspace(2.0, 100.0, self.heads))
        return arguments


@pytest.mark.parametrize("mechanism", ["laser_lssar", "laser(sharpened(relu2_l1, 100))", "laser(sharpened(lssa, 40))"])
@pytest.mark.parametrize("learned", [False, True])
def test_laser_over_any_power(holds, mechanism, learned):
    for length in (37, 150):
        case = WideValues(
            f"wide {length}", heads=4, key_heads=2, query_length=length, key_length=length, power=learned, value_dim=24
        )
        holds(cpu, case, mechanism, torch.float32)


def test_laser_takes_no_weight_from_a_phi_that_is_zero():
    """A score of -200, or of -inf by a bias, under a large value."""
    key = torch.zeros(1, 1, 8, 4)
    key[0, 0, 3, 0] = -200.0
    query = torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 8, 4)
    value = torch.zeros(1, 1, 8, 4)
    value[0, 0, 3] = 150.0
    algebra = Mechanism(phi="softplus", laser=True, scale="1", length_scale="1")
    out = cpu(query, key, value, mechanism=algebra)
    assert out.abs().max() < 1e-6
    hidden = torch.zeros(8, 8)
    hidden[:, 3] = -math.inf
    out = cpu(query, torch.ones(1, 1, 8, 4), value, bias=hidden, mechanism="laser(lssa)")
    assert out.abs().max() < 1e-6


@pytest.mark.parametrize("score", [-60.0, -95.0, -200.0])
def test_laser_over_softmax_weights_that_no_float_could_hold(score):
    """Against float64, where e^-200 is a number."""
    key = torch.zeros(1, 1, 8, 4)
    key[0, 0, 3, 0] = score
    query = torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 8, 4)
    value = torch.zeros(1, 1, 8, 4)
    value[0, 0, 3] = 300.0
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = []
    for given, name in ((inputs, "cpu"), (exact, "reference")):
        out = softfocus.attention(*given, is_causal=True, mechanism="laser", scale=1.0, backend=name)
        results.append((out, *torch.autograd.grad(out.sum(), given)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


def test_laser_gradients_of_a_tiny_weight_on_a_huge_value():
    """A * dL/dA is ordinary where dL/dA is beyond float32."""
    query = torch.tensor([[86.0, 0.0]])[None, None].requires_grad_()
    key = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])[None, None].requires_grad_()
    value = torch.tensor([[0.0], [300.0]])[None, None].requires_grad_()
    inputs = [query, key, value]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    above = torch.full((1, 1, 1, 1), 100.0)
    got, want = (
        torch.autograd.grad(
            softfocus.attention(*given, mechanism="laser", scale=1.0, backend=name), given, above.to(given[0].dtype)
        )
        for given, name in ((inputs, "cpu"), (exact, "reference"))
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mechanism", ["relu_l1", "relu2_l1", "laser(relu_l1)", "sharpened(relu2_l1, 2)"])
@pytest.mark.parametrize("size", [1e-5, 1e-8, 1e-10, 1e-15, 1e-19])
def test_phi_that_add_up_to_next_to_nothing(mechanism, size):
    """Such a row has weights, or none: never numbers that are not finite."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 16, generator=generator) for _ in range(3))
    inputs = [(query * size).requires_grad_(), (key * size).requires_grad_(), value.requires_grad_()]
    out = cpu(*inputs, mechanism=mechanism)
    grads = torch.autograd.grad(out.sum(), inputs[2:])
    assert all(x.isfinite().all() for x in (out, *grads))
    if size >= 1e-5:
        want = softfocus.attention(*inputs, mechanism=mechanism, backend="reference")
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class EqualScores(Case):
    """With a scale of 1 every score of the rows is ``score``, and every other row's 1 if
    ``alternating``. The values have this mean and standard deviation.
    """

    score: float = 1.0
    mean: float = 0.0
    deviation: float = 1.0
    alternating: bool = False

    def arguments(self, mechanism, dtype, seed=0, device="cpu"):
        arguments = super().arguments(mechanism, dtype, seed, device)
        with torch.no_grad():
            for name in ("query", "key"):
                arguments[name].zero_()[..., 0] = self.score**0.5
            if self.alternating:
                arguments["query"][:, :, 1::2, 0] = self.score**-0.5
            arguments["value"].mul_(self.deviation).add_(self.mean)
        return arguments


EXTREME_PHI = [
    ({"phi": "softplus"}, {"score": 1e30, "deviation": 1e9}),
    ({"phi": "softplus"}, {"score": 1e30, "deviation": 1e9, "alternating": True}),
    ({"phi": "relu"}, {"score": 1e30, "deviation": 1e9}),
    ({"phi": "relu", "power": 3}, {"score": 1e30, "deviation": 1e9}),
    ({"phi": "relu2", "power": 3}, {"score": 1e12, "deviation": 1e15}),
    ({"phi": "softplus", "laser": True}, {"score": 1e30, "mean": 19.5, "deviation": 0.1}),
    ({"phi": "softplus", "power": 3, "laser": True}, {"score": 1e30, "mean": 19.5, "deviation": 0.1}),
    ({"phi": "relu", "power": 3, "laser": True}, {"score": 1e30, "mean": 19.5, "deviation": 0.1}),
    ({"phi": "relu"}, {"score": 1e-24, "deviation": 1e-18}),
    ({"phi": "relu2"}, {"score": 1e-12, "deviation": 1e-18}),
    ({"phi": "relu", "power": 3}, {"score": 1e-24, "deviation": 1e-18}),
]
"""phi times V over- or underflows in float32, but the weights times V do not."""


@pytest.mark.parametrize("queries", [1, 37])
@pytest.mark.parametrize(("algebra", "numbers"), EXTREME_PHI, ids=str)
def test_phi_whose_product_with_the_values_no_float_could_hold(holds, algebra, numbers, queries):
    case = EqualScores(f"{numbers}", query_length=queries, **numbers)
    holds(cpu, case, Mechanism(scale="1", **algebra), torch.float32)


def test_the_bits_of_a_row_do_not_depend_on_larger_phi_beside_it():
    algebra = Mechanism(phi="softplus", scale="1")
    case = EqualScores("", score=1e30, alternating=True)
    both, alone = (case.arguments(algebra, torch.float32) for _ in range(2))
    with torch.no_grad():
        alone["query"][..., 0] = both["query"][:, :, 1:2, 0]
    both, alone = cpu(**both), cpu(**alone)
    assert torch.equal(both[:, :, 1::2], alone[:, :, 1::2])
    assert not torch.equal(both[:, :, ::2], alone[:, :, ::2])


@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize(
    ("mechanism", "size"),
    [("relu_l1", 1e-28), ("relu2_l1", 1e-14), ("relu6_l1", 1e-28), ("sharpened(relu_l1, 3)", 1e-28),
     ("sharpened(relu2_l1, 2.5)", 1e-14), ("laser(relu_l1)", 1e-28), ("laser(sharpened(relu_l1, 3))", 1e-28)],
)  # fmt: skip
def test_a_row_whose_phi_add_up_to_too_little_is_without_weights(mechanism, size, queries):
    """docs/numerics.md: below 1e-25 a row sum counts as 0, and so do the output and every
    gradient of the row.
    """
    algebra = softfocus.named(mechanism)
    key, value, grad = (torch.randn(1, 2, n, 64, generator=seeded(i)) for i, n in enumerate((18, 18, queries)))
    given = {"query": torch.full((1, 2, queries, 64), size), "key": key, "value": value}
    assert (given["query"] @ key.mT > 0).any(-1).all()
    given |= {"bias": torch.zeros(1, 2, queries, 18), "head_scale": torch.ones(2)}
    if algebra.power is not None:
        given["power"] = torch.full((2,), algebra.power)
    for x in given.values():
        x.requires_grad_()
    for dropout_p in (0.0, 0.3)[: 1 if algebra.laser else 2]:
        out = cpu(**given, mechanism=mechanism, dropout_p=dropout_p)
        assert (out == 0).all()
        for name, x in zip(given, torch.autograd.grad(out, list(given.values()), grad), strict=True):
            assert (x == 0).all(), name


def test_a_bool_is_true_whatever_its_byte():
    """As a mask that is another type's memory may have it."""
    query, key, value = (torch.randn(1, 2, 40, 16) for _ in range(3))
    seen = torch.rand(40, 40) < 0.5
    bytes_of_two = (seen.to(torch.uint8) * 2).view(torch.bool)
    assert torch.equal(cpu(query, key, value, bytes_of_two), cpu(query, key, value, seen))
    assert torch.equal(cpu(query, key, value, key_mask=bytes_of_two[:1]), cpu(query, key, value, key_mask=seen[:1]))


@pytest.mark.parametrize("kind", ["causal", "window", "mask", "padding", "documents"])
@pytest.mark.parametrize("mechanism", WAYS)
def test_nan_in_masked_places_of_a_bias(mechanism, kind):
    """... changes no bit, in value or gradient, of few rows or of many."""
    for queries in (1, 3, 70):
        keys = 140
        i, j = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
        arguments, hidden = {
            "causal": ({"is_causal": True}, j > i),
            "window": ({"window_size": (9, 3)}, (j < i - 9) | (j > i + 3)),
            "mask": ({"attn_mask": (i + j) % 3 > 0}, (i + j) % 3 == 0),
            "padding": ({"key_mask": (j > 20)[None]}, (j <= 20).expand(queries, -1)),
            "documents": ({"document_ids": (j // 50)[None]}, i // 50 != j // 50),
        }[kind]
        inputs = [torch.randn(1, 2, n, 8, generator=seeded(n)) for n in (queries, keys, keys)]
        clean = torch.randn(queries, keys, generator=seeded(0))
        results = []
        for bias in (clean, clean.masked_fill(hidden, math.nan), clean.masked_fill(hidden, math.inf)):
            leaves = [x.clone().requires_grad_() for x in (*inputs, bias)]
            out = cpu(*leaves[:3], bias=leaves[3], mechanism=mechanism, **arguments)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(x.isfinite().all() for x in results[0])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), queries


@pytest.mark.parametrize("mechanism", ["softmax", "lssa", "lssar", "relu_l1", "laser"])
def test_a_bias_of_minus_infinity_over_a_row(mechanism):
    """A bias is to be finite; one that is not makes this row 0 here, and changes no other."""
    for queries in (3, 70):
        inputs = [torch.randn(1, 1, n, 8, generator=seeded(n)) for n in (queries, 90, 90)]
        bias = torch.randn(queries, 90, generator=seeded(0))
        clean = cpu(*inputs, bias=bias, mechanism=mechanism)
        bias[1] = -math.inf
        out = cpu(*inputs, bias=bias, mechanism=mechanism)
        assert (out[:, :, 1] == 0).all()
        assert torch.equal(out[:, :, 2:], clean[:, :, 2:])


# Few queries among many keys, as in decoding

FEW = [
    Case(
        f"{q} of {k}", batch=2, heads=8, key_heads=2, query_length=q, key_length=k, head_dim=d, value_dim=dv,
    )
    for q, k, d, dv in (
        (1, 1, 16, 16), (1, 15, 8, 8), (1, 16, 64, 64), (1, 17, 40, 24), (1, 128, 17, 5), (1, 129, 64, 64),
        (1, 1000, 64, 64), (2, 255, 16, 16), (3, 256, 64, 32), (4, 300, 64, 64), (5, 300, 33, 64), (8, 1000, 64, 64),
    )
] + [
    replace(case, query_length=n, name=f"{case.name}, {n}")
    for n in (1, 4)
    for case in (
        Case("window", batch=2, heads=4, key_heads=2, key_length=1000, window_size=(300, 0), head_dim=8),
        Case("short window", batch=2, heads=4, key_heads=4, key_length=300, window_size=(5, 0), head_dim=16),
        Case("left padding", batch=4, heads=4, key_heads=2, key_length=500, padding="left", head_dim=64, value_dim=64),
        Case("right padding", batch=4, heads=4, key_heads=1, key_length=300, padding="right", head_dim=8),
        Case("mask", batch=2, heads=4, key_heads=2, key_length=400, mask=0.7, head_dim=16),
        Case("almost blind", batch=3, heads=4, key_heads=2, key_length=70, mask=0.99, head_dim=16),
        Case("documents", batch=2, heads=2, key_length=300, documents=3, head_dim=16),
        Case("bias", batch=2, heads=4, key_heads=2, key_length=300, bias="1h1k", head_dim=16),
        Case("full bias", batch=2, heads=4, key_heads=2, key_length=300, bias="bhqk", mask=0.3, head_dim=64),
        Case("learned", batch=2, heads=4, key_heads=2, key_length=300, head_scale=True, power=True, head_dim=64),
        Case("transposed", batch=2, heads=3, key_heads=3, key_length=300, transposed=True, head_dim=64, value_dim=40),
        Case("large", batch=2, heads=4, key_heads=2, key_length=300, magnitude=4.0, head_dim=64),
        Case("outlier", batch=2, heads=4, key_heads=4, key_length=200, outlier=300.0, head_dim=16),
    )
]  # fmt: skip


@everywhere(FEW, long=("lssar", "laser", "laser_lssar"))
def test_few_queries(holds, cases, mechanism, dtype):
    for case in cases:
        holds(cpu, case, mechanism, dtype)


@everywhere(FEW, ways=("softmax", "lssa", "lssar", "laser_lssar"))
def test_few_queries_that_pass_no_gradient(cases, mechanism, dtype, threads):
    """Without a gradient another way may be taken: equal to the bit, for any number of threads."""
    algebra = softfocus.named(mechanism)
    for case in cases:
        arguments = case.arguments(algebra, dtype)
        threads(1)
        watched = cpu(**arguments)
        for number in (1, 2, 3):
            threads(number)
            with torch.no_grad():
                assert torch.equal(cpu(**arguments), watched.detach()), (case.name, number)


def every(dtype):
    """All numbers of a dtype of 16 bits, but the largest, in order; beside them the next ones."""
    pattern = torch.arange(-(2**15), 2**15).to(torch.int16)
    numbers = pattern.view(dtype)
    numbers = numbers[numbers.abs() < 2.0**120].sort().values  # the sum of four is a float
    return numbers[:-1], numbers[1:]


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("keys", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_to_the_nearest_as_torch_rounds(dtype, keys, queries):
    """A half, and quarters, of the way between every number and the next: of keys alike the weights
    are 1/2 or 1/4.
    """
    one, other = every(dtype)
    for some in range(1, keys):
        value = torch.stack([other] * some + [one] * (keys - some))[None, None]
        query, key = torch.ones(1, 1, queries, 8, dtype=dtype), torch.ones(1, 1, keys, 8, dtype=dtype)
        # In double: torch's own sum in float may be rounded once more on the way
        between = (one.double() * (keys - some) + other.double() * some) / keys
        out = cpu(query, key, value, mechanism="softmax")
        assert torch.equal(out, between.float().to(dtype).expand_as(out)), some


@pytest.mark.parametrize("queries", [1, 5])
def test_small_float16_numbers_are_read_where_the_processor_flushes(queries):
    """Numbers below 2^-14 are subnormal in float16, and normal in float32."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, 40, 16, generator=generator).mul(2e-5).half() for _ in range(3)]
    inputs[0] = inputs[0][:, :, :queries]
    plain = cpu(*inputs, mechanism="cosine_log_n")
    try:
        assert torch.set_flush_denormal(True), "this processor cannot"
        flushed = cpu(*inputs, mechanism="cosine_log_n")
    finally:
        torch.set_flush_denormal(False)
    assert plain.abs().max() > 1e-5
    assert torch.equal(flushed, plain)


def test_what_float16_cannot_hold_is_infinite():
    value = torch.tensor([[65504.0, 65504, 65504], [65504, 65504, 65504], [32, 30, 65504]]).half()
    value = torch.cat([value, -value], 1)[None, None]
    zero = torch.zeros(1, 1, 1, 8).half()
    mechanism = Mechanism(phi="sigmoid", normaliser="none", similarity="dot")  # of a score of 0: 1/2
    for queries in (1, 5):
        query, key = zero.expand(1, 1, queries, 8), zero.expand(1, 1, 3, 8)
        out = cpu(query, key, value, mechanism=mechanism)
        assert out[0, 0, -1].tolist() == [math.inf, 65504, math.inf, -math.inf, -65504, -math.inf]


@pytest.mark.parametrize("mechanism", ["softmax", "lssa", "relu_shen", "laser", "sharpened(softmax, 1)"])
@pytest.mark.parametrize(
    ("dtype", "width", "turned"),
    [
        *((torch.float32, 64, False), (torch.float32, 5, False), (torch.float32, 64, True)),
        *((torch.bfloat16, 64, False), (torch.float16, 64, False), (torch.float16, 5, False)),
    ],
    ids=["in place", "odd width", "turned", "bfloat16", "float16", "float16, odd width"],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_seen_by_few_queries(mechanism, dtype, width, turned, bad):
    """However the values lie: some are converted on the way."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, 1, 300, 64, generator=generator).to(dtype)
    value = torch.randn(1, 1, 300, width, generator=generator).to(dtype)
    query = key[:, :, 7:8]  # sees key 7 well, by every phi
    value[0, 0, 7, 0] = bad
    if turned:
        value = value.mT.contiguous().mT
    with torch.no_grad():
        out, want = (
            softfocus.attention(query, key, value, mechanism=mechanism, backend=name) for name in ("cpu", "reference")
        )
    assert torch.equal(out.isnan(), want.isnan())
    assert out[0, 0, 0].isnan().tolist() == [True] + [False] * (width - 1)


def test_a_value_that_weighs_nothing_is_not_read_in_decoding():
    """The one exception to the rule that a visible NaN makes the output NaN: a query by itself
    fetches only the values whose weights are not 0, which is what makes it fast. Among many queries
    the rule holds.
    """
    query, key, value = (torch.randn(1, 2, 70, 8, generator=seeded(n)) for n in range(3))
    weights = cpu(query[:, :, -1:], key, torch.eye(70).expand(1, 2, -1, -1), mechanism="lssar")[0, :, 0]
    least, most = weights.argmin(-1), weights.argmax(-1)
    assert (weights.gather(1, least[:, None]) == 0).all()
    clean = cpu(query[:, :, -1:], key, value, mechanism="lssar")
    bad, worse = value.clone(), value.clone()
    for h in range(2):
        bad[0, h, least[h], 1] = math.nan
        worse[0, h, most[h], 1] = math.nan
    assert torch.equal(cpu(query[:, :, -1:], key, bad, mechanism="lssar"), clean)
    for value, queries in ((worse, query[:, :, -1:]), (bad, query), (worse, query)):
        out = cpu(queries, key, value, mechanism="lssar")[:, :, -1]
        assert out[..., 1].isnan().all()
        assert out[..., [0, 2, 3, 4, 5, 6, 7]].isfinite().all()


def test_a_query_in_decoding_is_not_changed_by_what_another_reads():
    query, key, value = (torch.randn(1, 1, 70, 8, generator=seeded(n)) for n in range(3))
    query = query[:, :, -2:]
    weights = cpu(query, key, torch.eye(70)[None, None], mechanism="lssar")[0, 0]
    (only_first,) = torch.nonzero((weights[0] > 0) & (weights[1] == 0), as_tuple=True)
    value[0, 0, only_first[weights[0, only_first].argmax()], 1] = math.nan
    together = cpu(query, key, value, mechanism="lssar")
    assert together[0, 0, 0, 1].isnan()
    assert together[0, 0, 1].isfinite().all()
    for i in range(2):
        single = cpu(query[:, :, i : i + 1], key, value, mechanism="lssar")
        assert torch.equal(single[0, 0, 0].nan_to_num(9.0), together[0, 0, i].nan_to_num(9.0))


@pytest.mark.parametrize("width", [8, 64])
def test_a_column_in_decoding_is_not_changed_by_what_another_column_reads(width):
    """A live key's infinity in one column does not make another column see the NaN of a key that is
    not read.
    """
    query, key = (torch.randn(1, 1, n, 8, generator=seeded(n)) for n in (1, 70))
    value = torch.randn(1, 1, 70, width, generator=seeded(0))
    weights = cpu(query, key, torch.eye(70)[None, None], mechanism="lssar")[0, 0, 0]
    assert weights.min() == 0
    value[0, 0, weights.argmin(), 3] = math.nan
    clean = cpu(query, key, value, mechanism="lssar")
    assert clean.isfinite().all()
    value[0, 0, weights.argmax(), 0] = math.inf
    out = cpu(query, key, value, mechanism="lssar")
    assert out[..., 0].isnan().all()
    assert torch.equal(out[..., 1:], clean[..., 1:])


@pytest.mark.parametrize("mechanism", ["relu_l1", "sharpened(relu_l1, 3)", "sharpened(relu6_l1, 3)", "lssar"])
@pytest.mark.parametrize("which", [0, 1], ids=["query", "key"])
def test_a_nan_row_passes_nan_to_its_query_and_the_keys_that_it_sees(mechanism, which):
    """relu' of a NaN is 0, and the gradients of such a row were."""
    leaves = [torch.randn(1, 1, 140, 8, generator=seeded(n)) for n in range(3)]
    leaves[which][0, 0, 100, 0] = math.nan
    leaves = [x.requires_grad_() for x in leaves]
    query, key, _value = torch.autograd.grad(cpu(*leaves, is_causal=True, mechanism=mechanism).sum(), leaves)
    nan_rows, keys_seen = (slice(100, 101), 101) if which == 0 else (slice(100, 140), 140)
    rows = torch.zeros(140, dtype=torch.bool)
    rows[nan_rows] = True
    assert query[0, 0, rows].isnan().all()
    assert query[0, 0, ~rows].isfinite().all()
    assert key[0, 0, :keys_seen].isnan().all()
    assert key[0, 0, keys_seen:].isfinite().all()


# Threads

SHARED = [
    Case("two heads", query_length=300, key_length=300, batch=1),
    Case("one head", query_length=200, key_length=260, batch=1, heads=1, key_heads=1, mask=0.2),
    Case("grouped", query_length=140, key_length=140, heads=6, key_heads=2, batch=1, bias="1h1k", padding="left"),
    Case("one row", query_length=1, key_length=500, heads=6, key_heads=2, batch=1),
]


ALL_NUMBERS = ("lssar", "laser", "laser_lssar")
"""The gradients of re-weighted rows and of LASER are summed by code of their own. Mechanisms with
dense rows share theirs: a number of threads for each in turn.
"""


@pytest.mark.parametrize(
    ("mechanism", "number"),
    [
        (way, number)
        for n, way in enumerate(WAYS)
        for number in ((2, 3, 5) if way in ALL_NUMBERS else ((2, 3, 5)[n % 3],))
    ],
)
def test_parity_with_threads(holds, threads, mechanism, number):
    """What does not sum over the queries is equal to the bit for any number (see below)."""
    threads(number)
    for case in SHARED:
        holds(cpu, case, mechanism, torch.float32)


def outcome(case, mechanism, dtype=torch.float32):
    arguments = case.arguments(softfocus.named(mechanism), dtype)
    leaves = {name: x for name, x in arguments.items() if is_floating(x) and x.requires_grad}
    out, statistics = cpu(**arguments, return_statistics=True)
    grads = torch.autograd.grad(out, list(leaves.values()), torch.randn(out.shape, generator=seeded(1)).to(dtype))
    return {"out": out.detach(), **statistics._asdict(), **dict(zip(leaves, grads, strict=True))}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def differing(one, other):
    return {name for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("mechanism", WAYS)
def test_the_same_number_of_threads_gives_the_same_bits(threads, mechanism, number):
    threads(number)
    for case in SHARED:
        for dtype in (torch.float32, torch.bfloat16):
            first = outcome(case, mechanism, dtype)
            assert all(not differing(first, outcome(case, mechanism, dtype)) for _ in range(2)), case.name


@pytest.mark.parametrize("mechanism", WAYS)
def test_the_number_of_threads_changes_sums_over_the_queries_alone(threads, mechanism):
    """Where heads are fewer than threads their rows are dealt out, so that what is summed over the
    rows of a head comes in another order: the gradients of key, value and of a bias that the rows
    share. All else is equal to the bit, and with a head for every thread everything is.
    """
    for case in SHARED:
        results = []
        for number in (1, 2, 3, 5):
            threads(number)
            results.append(outcome(case, mechanism))
        for number, result in zip((2, 3, 5), results[1:], strict=True):
            assert differing(results[0], result) <= {"key", "value", "bias"}, case.name
            if case.batch * case.key_heads >= number:
                assert not differing(results[0], result), case.name


def test_threads_of_python_may_call_at_once(threads):
    """... each with a problem of its own, forward and backward, on two threads each."""
    threads(2)
    problems = [(case, mechanism) for case in SHARED[:3] for mechanism in ("softmax", "lssar", "laser_lssar")]
    single = [outcome(*problem) for problem in problems]

    def work(first):
        torch.set_num_threads(2)  # OpenMP has a number for every thread of Python's
        order = [(first + n) % len(problems) for n in range(len(problems))]
        return {n: outcome(*problems[n]) for n in order}

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(work, range(8)):
            assert not [n for n, result in results.items() if differing(single[n], result)]


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("number", "before"), [(1, "both(inputs)"), (2, "both(inputs)"), (2, "torch.ones(10**7).exp()")]
)
def test_a_forked_child_computes_the_same(number, before):
    """OpenMP's threads stay with the parent, whoever started them; the child must not wait for
    them.
    """
    code = f"""
import hashlib, os, signal, torch, softfocus
torch.set_num_threads({number})
torch.manual_seed(0)
inputs = [torch.randn(1, 6, 300, 16, requires_grad=True) for _ in range(3)]

def both(inputs):
    out = softfocus.attention(*inputs, is_causal=True, mechanism="lssar", backend="cpu")
    found = [out.detach(), *torch.autograd.grad(out.sum(), inputs)]
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in found)).hexdigest()

{before}
read, write = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os.write(write, both(inputs).encode())
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(os.read(read, 64).decode() == both(inputs))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["0", "True"], done.stdout + done.stderr[-2000:]


TILE = 128
"""Keys of a tile of the CPU kernels (BLOCK_K)."""
LONG_ROWS = {
    "decoding": (1, 56_000, None),
    "five queries": (5, 56_000, None),
    "decoding in eight streams": (1, 8 * 64 * TILE, None),  # 8 divides the tiles of a stream
    "every eighth tile is hidden": (5, 70_000, 7),
    "every eighth tile is hidden, decoding": (1, 70_000, 7),
}
"""Queries, keys, and which of eight tiles a mask hides."""


@pytest.mark.parametrize(("queries", "length", "hidden"), LONG_ROWS.values(), ids=LONG_ROWS)
def test_a_long_row_of_nearly_equal_scores(queries, length, hidden):
    """A running sum in float errs by more than TIE_EPS there, always the same way: the threshold
    moves, and ties are no ties.
    """
    name = "sharpened(softplus_l1, 3)"
    query, key = torch.zeros(1, 1, queries, 64), torch.ones(1, 1, length, 64)
    value = torch.zeros(1, 1, length, 1)
    value[0, 0, 100] = 1.0
    tile = torch.arange(length) // TILE
    seen = (tile % 8 != hidden) if hidden is not None else None
    key_mask = None if seen is None else seen[None]
    count = length if seen is None else int(seen.sum())
    for more in (0.0, 1e-3):
        bias = torch.zeros(1, 1, queries, length).requires_grad_()
        with torch.no_grad():
            bias[..., 100] = more
        out, rows = softfocus.attention(
            query, key, value, mechanism=name, bias=bias, key_mask=key_mask, backend="cpu", is_causal=False,
            return_statistics=True,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(out.sum(), bias)
        if more:  # one key is above the mean and has all the weight
            torch.testing.assert_close(out, torch.ones_like(out))
        else:
            assert rows.peak.max() < 1e-6
            torch.testing.assert_close(out, torch.full_like(out, 1 / count), rtol=1e-5, atol=0)
            assert grad.abs().max() < 1e-4


@pytest.mark.parametrize("name", ["lssa", "softmax"])
def test_the_gradients_of_a_long_row_whose_values_share_an_offset(name):
    """dA - delta cancels there. The delta was summed in float over all keys."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, d, generator=generator) for n, d in ((1, 16), (65_536, 16), (65_536, 4)))
    inputs, grad_out = (0.1 * query, key, value + 100.0), torch.randn(1, 1, 1, 4, generator=generator)

    def gradients(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = softfocus.attention(*leaves, mechanism=name, backend=backend)
        return torch.autograd.grad(out, leaves, grad_out.to(dtype))

    exact = gradients("reference", torch.float64)
    ours, formula = ([(x - y).abs().max() for x, y in zip(gradients(backend, torch.float32), exact, strict=True)]
                     for backend in ("cpu", "reference"))  # fmt: skip
    assert all(mine <= 2 * its for mine, its in zip(ours, formula, strict=True))


@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
@pytest.mark.parametrize(
    "exponents", [(-130, 122), (-126, 124), (124, -126), (-70, 125), (125, -70), (60, -62), (0, -131), (-3, 3)], ids=str
)
@pytest.mark.parametrize("width", [8, 72])
def test_scores_of_bfloat16_elements_of_extreme_size(mechanism, exponents, width):
    """Where they run on AMX, which takes subnormal elements for 0, rows are scaled first. The
    reference is in float32, whose subnormal rows have no direction.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 37, width, generator=generator, dtype=torch.float64) for _ in range(3))
    query, key = ((x * 2.0**e) for x, e in zip((query, key), exponents, strict=True))
    inputs = [x.bfloat16() for x in (query, key, value)]
    got, want = (
        softfocus.attention(*given, is_causal=True, mechanism=mechanism, backend=backend).double()
        for given, backend in ((inputs, "cpu"), ([x.float() for x in inputs], "reference"))
    )
    torch.testing.assert_close(got, want, rtol=2**-8, atol=2**-12)
