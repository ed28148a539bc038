"""Dropout: one mask for every backend, from the seed and a weight's place; its statistics; results
and gradients.

The mask is read through V = identity, which makes the output the weights, and compared with
Philox in plain Python.
"""

import math
from functools import partial

import pytest
import torch

import softfocus
from softfocus import dropout
from softfocus.testing import Case, check

BACKENDS = [pytest.param("cpu", marks=pytest.mark.kernels), "tiled", "reference"]
WAYS = (
    "softmax", "scenario_ii", "lssa", "sigmoid_log_n", "sigmoid_l1", "relu_shen", "relu2_l1", "lssar",
    "sharpened(sigmoid_log_n_l1, 2.5)",
)  # fmt: skip
"""Mechanisms that each take another way through the kernels; LASER refuses dropout."""
factors = partial(dropout.factors, dtype=torch.float64)


# The definition

KNOWN = [  # of seven rounds, from kat_vectors of Random123: counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert tuple(map(int, dropout.philox(tuple(map(torch.tensor, counter)), key))) == words
    assert plainly(counter, key) == words


def plainly(counter, key):
    """Philox-4x32 with seven rounds on Python's own numbers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(7):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ k, y % 2**32, (x >> 32) ^ d ^ m, x % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def number(seed, place, row, column):
    """The 16 bits that decide over one weight; ``place`` is batch * H + head."""
    words = plainly((column // 64 * 8 + column % 8, row, place, 0), (seed % 2**32, seed >> 32))
    n = column // 8 % 8
    return words[n // 2] >> 16 * (n % 2) & 0xFFFF


def seed_of(torch_seed):
    torch.manual_seed(torch_seed)
    return int(torch.randint(2**62, ()))


def drawn(backend, p, shape=(2, 4, 70, 140), torch_seed=5, mechanism="relu_shen", key_heads=2, **arguments):
    """bool [B, H, Lq, Lk], the weights that a backend keeps. No weight is 0 before."""
    batch, heads, rows, columns = shape
    query, key = torch.ones(batch, heads, rows, 8), torch.ones(batch, key_heads, columns, 8)
    value = torch.eye(columns).expand(batch, key_heads, columns, columns)
    torch.manual_seed(torch_seed)
    out = softfocus.attention(
        query, key, value, dropout_p=p, mechanism=mechanism, backend=backend, enable_gqa=True, **arguments
    )
    return out != 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_dropped_is_what_the_definition_says(backend):
    p, shape = 0.3, (2, 4, 70, 140)
    kept, seed = drawn(backend, p, shape), seed_of(5)
    generator = torch.Generator().manual_seed(0)
    for b, h, i, j in zip(*(torch.randint(n, (300,), generator=generator).tolist() for n in shape), strict=True):
        assert bool(kept[b, h, i, j]) == (number(seed, 4 * b + h, i, j) >= round(p * 2**16)), (b, h, i, j)


@pytest.mark.parametrize("p", [2.0**-16, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_every_backend_drops_the_same(backend, p):
    for shape in ((1, 2, 1, 300), (2, 2, 3, 65), (1, 2, 130, 64), (3, 4, 129, 257)):
        assert torch.equal(drawn(backend, p, shape), drawn("reference", p, shape)), shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_does_not_depend_on_what_is_seen(backend):
    """Windows and masks move the borders of tiles, and leave what is dropped where it is."""
    full = drawn(backend, 0.3)
    row, column = torch.arange(70, 140)[:, None], torch.arange(140)
    for arguments, seen in (
        ({"is_causal": True}, column <= row),
        ({"window_size": (30, 3)}, (column >= row - 30) & (column <= row + 3)),
        ({"attn_mask": (row + column) % 3 > 0}, (row + column) % 3 > 0),
    ):
        assert torch.equal(drawn(backend, 0.3, **arguments), full & seen)


def test_a_part_of_the_factors_is_that_of_the_whole():
    places = torch.arange(6).view(2, 3)
    whole = factors(2**61 + 12345, 0.3, places, (0, 200), (0, 300))
    assert whole.shape == (2, 3, 200, 300)
    part = factors(2**61 + 12345, 0.3, places[1:, :2], (17, 130), (61, 193))
    assert torch.equal(part, whole[1:, :2, 17:130, 61:193])
    assert torch.equal(factors(torch.tensor(2**61 + 12345), 0.3, places, (0, 200), (0, 300)), whole)


@pytest.mark.kernels
def test_the_mask_does_not_depend_on_the_threads(threads):
    expected = drawn("reference", 0.3)
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(drawn("cpu", 0.3), expected)


# Its statistics


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    """Within five standard deviations of the binomial distribution, and the expectation of a weight
    is the weight.
    """
    found = factors(7, p, torch.arange(16), (0, 256), (0, 512))
    n = found.numel()
    rounded = dropout.threshold(p) / 2**16
    assert abs(rounded - p) <= 2**-17
    assert abs((found == 0).sum() - n * rounded) <= 5 * math.sqrt(n * rounded * (1 - rounded))
    assert sorted(found.unique().tolist()) == [0.0, pytest.approx(1 / (1 - rounded), rel=1e-15)]


@pytest.mark.parametrize(
    "shift", [(0, 0, 1), (0, 0, 8), (0, 0, 16), (0, 0, 64), (0, 1, 0), (1, 0, 0), (1, 1, 1)], ids=str
)
def test_neighbours_are_independent(shift):
    """In columns, the halves, words and counters of a group; in rows, in heads: both dropped with
    probability p^2.
    """
    p = 0.25
    gone = factors(11, p, torch.arange(17), (0, 257), (0, 576)) == 0
    here = gone[tuple(slice(0, n - s) for n, s in zip(gone.shape, shift, strict=True))]
    there = gone[tuple(slice(s, None) for s in shift)]
    n = here.numel()
    assert abs((here & there).sum() - n * p**2) <= 6 * math.sqrt(n * p**2 * (1 - p**2))


def test_seeds_that_differ_in_one_bit_drop_other_weights():
    masks = [factors(s, 0.5, torch.arange(4), (0, 64), (0, 256)) == 0 for s in (0, 1, 2**31, 2**32, 2**61)]
    n = masks[0].numel()
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs((one == other).sum() - n / 2) <= 5 * math.sqrt(n / 4)


# Results and gradients

CASES = [
    Case("plain", dropout_p=0.1, batch=1, query_length=150, key_length=150, head_dim=64, value_dim=64),
    Case("window", dropout_p=0.5, batch=1, query_length=257, key_length=300, window_size=(70, 9), is_causal=False),
    Case("few", dropout_p=0.3, heads=4, key_heads=2, query_length=3, key_length=300, batch=3),
    Case("decode", dropout_p=0.3, heads=4, key_heads=2, query_length=1, key_length=300, batch=8),
    Case("one key", dropout_p=0.3, query_length=40, key_length=1, is_causal=False),
    Case(
        "learned", dropout_p=0.3, head_scale=True, power=True, bias="bhqk", heads=4, key_heads=2, query_length=130,
        key_length=140, padding="left",
    ),
    Case("odd", dropout_p=0.9, query_length=33, key_length=65, head_dim=7, value_dim=5, transposed=True),
    Case("all", dropout_p=1.0, query_length=33, key_length=65),
    Case("masks", dropout_p=0.2, query_length=140, key_length=260, mask=0.3, padding="right", documents=3),
]  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mechanism", WAYS)
@pytest.mark.usefixtures("poisoned_memory")
def test_parity_of_the_kernels(holds, mechanism, dtype):
    for case in CASES:
        holds(partial(softfocus.attention, backend="cpu"), case, mechanism, dtype)


@pytest.mark.kernels
@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
def test_parity_with_threads(holds, threads, mechanism):
    threads(3)
    for case in CASES[:3]:
        holds(partial(softfocus.attention, backend="cpu"), case, mechanism, torch.float32)


@pytest.mark.parametrize("mechanism", [*WAYS, "gelu_l1", "softmax_recentred_l1", "scenario_i"])
def test_parity_of_the_tiled_backend(mechanism):
    for case in CASES[:6]:
        check(partial(softfocus.attention, backend="tiled"), case, mechanism, torch.float64)


@pytest.mark.kernels
def test_small_weights_count_when_the_large_ones_are_dropped():
    """LSSAR's kernels pass over weights below the rounding of a row's largest, which may be the one
    that is dropped.
    """
    length, p, mechanism = 64, 0.5, "sharpened(softmax, 15)"
    kept = drawn("reference", p, (1, 1, length, length), torch_seed=1, key_heads=1)[0, 0]
    # In each row a key that is dropped scores far higher than the others, which are all but equal
    scores = torch.where(torch.arange(length) == (~kept).int().argmax(-1)[:, None], 3.0, 0.0)
    scores += 0.5 * torch.randn(length, length, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(1, 1, length, 4)
    value = torch.randn(1, 1, length, 4, generator=torch.Generator().manual_seed(1))
    outs = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        torch.manual_seed(1)
        given = [x.to(dtype) for x in (zeros, zeros, value)]
        outs.append(
            softfocus.attention(*given, bias=scores.to(dtype), dropout_p=p, mechanism=mechanism, backend=backend)
        )
    out, want = (x.double() for x in outs)
    small = (want.abs().amax(-1) < 1e-7) & (want.abs().amax(-1) > 1e-30)
    assert small.sum() > 10
    assert ((out - want).abs().amax(-1) <= 1e-4 * want.abs().amax(-1))[small].all()


@pytest.mark.parametrize("mechanism", ["softmax", "lssar", "relu_l1", "sigmoid_log_l"])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_gradients_by_finite_differences(backend, mechanism):
    """With the seed held: torch's own check, in float64."""
    case = Case("small", batch=1, heads=2, key_heads=1, query_length=4, key_length=6, head_dim=3, value_dim=2)
    arguments = case.arguments(softfocus.named(mechanism), torch.float64, seed=3)
    names = ["query", "key", "value"]

    def f(*leaves):
        torch.manual_seed(11)
        given = {**arguments, **dict(zip(names, leaves, strict=True))}
        return softfocus.attention(**given, dropout_p=0.3, backend=backend)

    assert torch.autograd.gradcheck(f, [arguments[name] for name in names], eps=1e-6, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
def test_a_p_of_0_is_no_dropout_and_draws_nothing(backend, mechanism):
    inputs = [
        torch.randn(1, 2, 70, 8, generator=torch.Generator().manual_seed(n), requires_grad=True) for n in range(3)
    ]
    before = torch.get_rng_state()
    plain = softfocus.attention(*inputs, mechanism=mechanism, backend=backend)
    none = softfocus.attention(*inputs, mechanism=mechanism, backend=backend, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(plain, none)
    for a, b in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (plain, none)), strict=True):
        assert torch.equal(a, b)


# Around it


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_under_torch_compile(backend):
    """fullgraph: the seed is drawn inside the graph, by the same generator."""
    inputs = [torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3)]

    def f(*x):
        return softfocus.attention(*x, dropout_p=0.4, mechanism="lssa", backend=backend)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    results = []
    for call in (f, compiled):
        torch.manual_seed(3)
        out = call(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    torch.manual_seed(4)
    assert not torch.equal(compiled(*inputs), results[1][0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing_draws_the_same_again(backend):
    from torch.utils.checkpoint import checkpoint

    inputs = [torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3)]

    def f(*x):
        return softfocus.attention(*x, dropout_p=0.4, mechanism="lssar", backend=backend)

    results = []
    for call in (f, partial(checkpoint, f, use_reentrant=False)):
        torch.manual_seed(5)
        out = call(*inputs)
        results.append(torch.autograd.grad(out.square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.kernels
def test_explain_says_that_the_kernels_carry_it():
    query = torch.randn(1, 2, 70, 8)
    for mechanism in ("softmax", "lssa", "lssar"):
        assert softfocus.explain(query, query, query, mechanism=mechanism, dropout_p=0.1).backend == "cpu"


@pytest.mark.kernels
def test_a_module_drops_only_while_it_trains():
    module = softfocus.nn.MultiheadAttention(16, 2, dropout=0.5, mechanism="lssar", batch_first=True)
    x = torch.randn(2, 30, 16)
    torch.manual_seed(0)
    one, other = (module(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(one, other)
    module.eval()
    one, other = (module(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(one, other)
