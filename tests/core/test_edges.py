"""Where attention goes wrong in practice: empty rows, ties, NaN, padding, caches, packing, huge
numbers, dropout.

Tolerances. float64: 1e-12 of the largest expected number, as in test_reference.py. float32 is never
compared with a fixed number: an error against float64 may be at most twice the error of a plain
float32 computation of the same thing (the eager formula written here, or the unpadded run), plus
four units in the last place of the largest number, for results that the plain computation happens
to hit exactly. What must be *equal* is compared bit by bit.

Over 400 lines: every edge runs on all backends through the same parametrisation.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from softfocus import Mechanism, attention, mechanisms, named, sharpened, weights
from softfocus.pointwise import FUSED

NAMES = sorted(mechanisms())
DISTINCT = sorted({named(name): name for name in reversed(NAMES)}.values())
HAS_L = {"sigmoid_log_l", "relu_wortsman"}  # defined with the number of key positions given, padding and cache included
WITHOUT_L = [name for name in DISTINCT if name not in HAS_L]
VARIED = ("softmax", "lssar", "laser", "laser_lssar", "gelu_l1", "relu6_l1", "sigmoid_l1", "softmax_recentred_l1")
LASERS = ["laser", "laser_lssa", "laser_lssar"]
TILE = 64  # rows of a block of the tiled backend and of the CPU kernels: lengths beyond it cross a border
BACKENDS = ("reference", "tiled")  # support everything
SINGLE = ("cpu",)  # support float32 and less, and not every mechanism


def supported(backend, name):
    """Whether the backend takes the mechanism."""
    algebra = named(name)
    return backend in BACKENDS or (algebra.phi in FUSED and algebra.post == "none")


def ways(names, dtypes=lambda name: (torch.float64, torch.float32)):
    """Backends, dtypes and mechanisms that go together, as a decorator."""
    cases = [
        (backend, dtype, name)
        for dtype in (torch.float64, torch.float32)
        for name in names
        for backend in (*BACKENDS, *(SINGLE if dtype == torch.float32 else ()))
        if supported(backend, name) and (dtype in dtypes(name) or backend in SINGLE)
    ]
    ids = [f"{name}-{str(dtype).removeprefix('torch.')}-{backend}" for backend, dtype, name in cases]
    return pytest.mark.parametrize(("backend", "dtype", "name"), cases, ids=ids)


def everywhere(test):
    """Every backend, in float64 and float32 as far as it has them."""
    cases = [(backend, dtype) for backend in BACKENDS for dtype in (torch.float64, torch.float32)]
    cases += [(backend, torch.float32) for backend in SINGLE]
    ids = [f"{str(dtype).removeprefix('torch.')}-{backend}" for backend, dtype in cases]
    return pytest.mark.parametrize(("backend", "dtype"), cases, ids=ids)(test)


def everywhere_for(names):
    """Every mechanism in float64, or in float32 where a backend has no better; besides, in float32
    on every backend, those that each take another way through the code.
    """
    return ways(names, lambda name: (torch.float64, *([torch.float32] if name in VARIED else [])))


def length_for(backend, tiles=1):
    """Beyond the border of a tile where there are tiles."""
    return 13 if backend == "reference" else tiles * TILE + 6


def normal(*shape, seed=0, dtype=torch.float64):
    """Random numbers that float32 and float64 share exactly, so that inputs of both dtypes are the
    same problem.
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(inputs, grad=None, **arguments):
    """Output and the gradients of query, key and value, as fresh tensors."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*leaves, **arguments)
    out.backward(torch.ones_like(out) if grad is None else grad)
    return [out.detach(), *(x.grad for x in leaves)]


def within(actual, exact, plain=None, plain_exact=None, conditioning=0.0):
    """``actual`` against float64, with the tolerance of this file's docstring.

    ``plain`` is the eager float32 result and ``plain_exact`` its own float64 twin, if it has more
    rows than ``actual``. ``conditioning`` is how much rounding the problem's own numbers magnifies,
    relative to the result.
    """
    exact = exact.double()
    scale = exact.abs().max().item() if exact.numel() else 0.0
    assert actual.isfinite().all()
    error = (actual.double() - exact).abs().max().item() if exact.numel() else 0.0
    if actual.dtype == torch.float64:
        allowed = (1e-12 + conditioning * torch.finfo(torch.float64).eps) * scale
    else:
        assert plain is not None
        assert plain.dtype == torch.float32
        twin = exact if plain_exact is None else plain_exact.double()
        allowed = 2 * (plain.double() - twin).abs().max().item() + 4 * torch.finfo(torch.float32).eps * scale
    assert error <= allowed, f"{error:.3e} off, {allowed:.3e} allowed, values up to {scale:.3e}"


def same_problem(actual, exact, plain, conditioning=0.0):
    """Several results (output and gradients) at once."""
    for name, a, e, p in zip(("out", "query", "key", "value"), actual, exact, plain, strict=True):
        try:
            within(a, e, p if a.dtype == torch.float32 else None, conditioning=conditioning)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def worst_order(compute, inputs, exact):
    """Eager results with the head dimension summed in sixteen orders, of each tensor the worst.

    One order is one draw of the rounding errors; where few rows make out the error, it can be
    lucky.
    """
    results = []
    for seed in range(16):
        width = inputs[0].size(-1)
        order = torch.randperm(width, generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(width)
        back = order.argsort()
        out, query, key, value = compute([inputs[0][..., order], inputs[1][..., order], inputs[2]])
        results.append((out, query[..., back], key[..., back], value))

    def error(x, want):
        return float((x.double() - want.double()).abs().max().nan_to_num(-1.0))

    return [max(tensors, key=lambda x: error(x, want)) for *tensors, want in zip(*results, exact, strict=True)]


def doubled(inputs):
    return [x.double() for x in inputs]


# Rows that see nothing


@everywhere_for(DISTINCT)
def test_rows_that_see_nothing_are_zero_and_pass_nothing(backend, dtype, name):
    """... also when their query, or what comes down to them, is NaN. The other rows do not
    notice.
    """
    inputs = [normal(2, 2, 7, 4, seed=s, dtype=dtype) for s in range(3)]
    grad = normal(2, 2, 7, 4, seed=3, dtype=dtype)
    mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[..., 0] = True
    mask[0, 0, 2] = mask[1, 0, 6] = False
    fully_masked = ~mask.any(-1).expand(2, 2, 7)
    clean = run(inputs, grad, attn_mask=mask, mechanism=name, backend=backend)
    assert (clean[0][fully_masked] == 0).all()
    assert (clean[1][fully_masked] == 0).all()
    assert (clean[0][~fully_masked] != 0).any()

    bad_query = inputs[0].masked_fill(fully_masked[..., None], math.nan)
    bad_grad = grad.masked_fill(fully_masked[..., None], math.nan)
    for query, above in ((bad_query, grad), (inputs[0], bad_grad), (bad_query, bad_grad)):
        got = run([query, *inputs[1:]], above, attn_mask=mask, mechanism=name, backend=backend)
        for what, g, c in zip(("out", "query", "key", "value"), got, clean, strict=True):
            assert torch.equal(g, c), what


@everywhere_for(DISTINCT)
def test_a_batch_that_is_all_padding(backend, dtype, name):
    inputs = [normal(2, 1, 5, 4, seed=s, dtype=dtype) for s in range(3)]
    key_mask = torch.ones(2, 5, dtype=torch.bool)
    key_mask[1] = False
    for x in run(inputs, key_mask=key_mask, is_causal=True, mechanism=name, backend=backend):
        assert x.isfinite().all()
        assert (x[1] == 0).all()
        assert (x[0] != 0).any()


@everywhere_for(DISTINCT)
def test_more_queries_than_keys(backend, dtype, name):
    """Bottom-right alignment: the first queries stand before the first key."""
    inputs = [normal(1, 1, n, 4, seed=n, dtype=dtype) for n in (70, 3, 3)]
    out, *grads = run(inputs, is_causal=True, mechanism=name, backend=backend)
    assert (out[:, :, :67] == 0).all()
    assert (grads[0][:, :, :67] == 0).all()
    single = attention(inputs[0][:, :, 67:], *inputs[1:], is_causal=True, mechanism=name, backend="reference")
    exact = attention(
        *doubled([inputs[0][:, :, 67:], *inputs[1:]]), is_causal=True, mechanism=name, backend="reference"
    )
    within(out[:, :, 67:], exact, single)


@everywhere_for([n for n in DISTINCT if "relu" in n])
def test_relu_rows_without_a_positive_score(backend, dtype, name):
    q = normal(1, 1, 6, 4, dtype=dtype).abs()
    inputs = [q, -q - 0.1, normal(1, 1, 6, 4, seed=1, dtype=dtype)]
    for x in run(inputs, is_causal=True, mechanism=name, backend=backend):
        assert torch.equal(x, torch.zeros_like(x))


# Rows whose scores are all equal


def tie(kind, length, dtype):
    query, key, value = (normal(1, 2, length, 16, seed=s, dtype=dtype) for s in range(3))
    if kind == "zero queries":
        query = torch.zeros_like(query)
    elif kind == "zero keys":
        key = torch.zeros_like(key)
    else:
        key = key[:, :, :1].expand_as(key).contiguous()
    return [query, key, value]


@pytest.mark.parametrize("kind", ["zero queries", "zero keys", "identical keys"])
@pytest.mark.parametrize(
    "name", ["lssar", "lssar_p3", "softmax_p3", "softmax_p15", "sigmoid_log_n_l1_p15", "lssa", "softmax"]
)
@everywhere
def test_equal_scores_give_uniform_weights_and_finite_gradients(backend, dtype, name, kind):
    """Eq. 5 divides 0 by 0 there. Uniform: out is the running mean of V, and dV what a uniform A
    gives.
    """
    length = length_for(backend)
    inputs = tie(kind, length, dtype)
    grad = normal(1, 2, length, 16, seed=5, dtype=dtype)
    out, *grads = run(inputs, grad, is_causal=True, mechanism=name, backend=backend)
    mean = torch.ones(length, length, dtype=torch.float64).tril()
    mean /= mean.sum(-1, keepdim=True)
    for got, exact, plain in (
        (out, mean @ inputs[2].double(), mean.to(dtype) @ inputs[2]),
        (grads[2], mean.T @ grad.double(), mean.to(dtype).T @ grad),
    ):
        within(got, exact, plain if dtype == torch.float32 else None)
    assert all(g.isfinite().all() for g in grads)
    if kind != "identical keys" and name in ("lssar", "lssa", "lssar_p3"):
        # a zero vector has no direction: its cosine passes no gradient
        assert (grads[0 if kind == "zero queries" else 1] == 0).all()


@everywhere_for(DISTINCT)
def test_one_identical_token_repeated(backend, dtype, name):
    """A sequence of one token, as in padding that nobody masked: finite, in value and gradient."""
    token = normal(1, 1, 1, 8, seed=1, dtype=dtype).expand(1, 1, 70, 8).contiguous()
    for x in run([token, token, token], is_causal=True, mechanism=name, backend=backend):
        assert x.isfinite().all()


@everywhere_for(DISTINCT)
def test_a_zero_key_among_positive_scores(backend, dtype, name):
    """One score of exactly 0, where ReLU6 has its kink and |phi| of GELU, Mish and the identity has
    its own.

    The gradient must be the one that autograd gives the dense formula, whatever the other rows of a
    tile hold.
    """
    query, key = (normal(1, 1, 6, 4, seed=s).abs() + 0.1 for s in range(2))
    key[:, :, 2] = 0
    inputs = [query.to(dtype), key.to(dtype), normal(1, 1, 6, 3, seed=2, dtype=dtype)]
    grad = normal(1, 1, 6, 3, seed=3, dtype=dtype)
    arguments = {"is_causal": True, "mechanism": name}
    got = run(inputs, grad, **arguments, backend=backend)
    exact = run(doubled(inputs), grad.double(), **arguments, backend="reference")
    same_problem(got, exact, worst_order(lambda x: run(x, grad, **arguments, backend="reference"), inputs, exact))
    # a second head full of negative scores does not change the first
    both = [torch.cat([x, y], 1) for x, y in zip(inputs, [query.to(dtype), -key.to(dtype), inputs[2]], strict=True)]
    two = run(both, torch.cat([grad, grad], 1), **arguments, backend=backend)
    one = run([x[:, :1] for x in both], grad, **arguments, backend=backend)
    same_problem([x[:, :1] for x in two], [x.double() for x in exact], one)


@ways(["gelu_l1", "mish_l1", "scenario_iii"])
def test_a_row_of_a_signed_phi_without_weights_passes_no_gradient(backend, dtype, name):
    """Its scores are all 0, as those of a query of 0, and phi' is not."""
    inputs = [normal(1, 2, 6, 4, seed=s, dtype=dtype) for s in range(3)]
    inputs[0][:, :, 3] = 0
    out, *grads = run(inputs, normal(1, 2, 6, 4, seed=3, dtype=dtype), mechanism=name, backend=backend)
    assert (out[:, :, 3] == 0).all()
    assert (grads[0][:, :, 3] == 0).all()
    assert (grads[0][:, :, 4] != 0).all()


@ways(["gelu_l1"])
def test_scores_far_below_zero_keep_the_weights_of_gelu(backend, dtype, name):
    """The l1 norm divides what is left of a row: -5 of GELU is 1e-6, and 1 + erf would have lost
    most of its digits.
    """
    scores = -torch.tensor([5.0, 5.5, 6.0, 8.0], dtype=dtype)
    query, key, value = torch.ones(1, 1, 1, 1, dtype=dtype), scores.view(1, 1, 4, 1), torch.eye(4, dtype=dtype)
    got = attention(query, key, value[None, None], scale=1.0, mechanism=name, backend=backend)[0, 0, 0]
    terms = [s * 0.5 * math.erfc(-s / math.sqrt(2)) for s in scores.tolist()]
    want = torch.tensor([term / sum(map(abs, terms)) for term in terms], dtype=torch.float64)
    # the scores' own rounding, magnified by their squares
    assert (got.double() - want).abs().max() <= 64 * torch.finfo(dtype).eps


@ways(["gelu_l1", "mish_l1"])
def test_scores_far_below_zero_have_their_gradient_or_none(backend, dtype, name):
    """From a score on, nothing is left of a row. Before it the gradient is right, not a quotient of
    numbers that underflow.
    """
    end = {"gelu_l1": (12.5, 37.0), "mish_l1": (88.0, 700.0)}[name][dtype == torch.float64]
    for first in (-end + 0.5, -end - 0.1, -end - 1.0, -end - 14.0):
        scores = torch.tensor([first, first - 0.25], dtype=dtype)
        inputs = [torch.ones(1, 1, 1, 1, dtype=dtype), scores.view(1, 1, 2, 1), torch.tensor([[[[1.0], [3.0]]]])]
        inputs[2] = inputs[2].to(dtype)
        out, _, grad_key, _ = run(inputs, scale=1.0, mechanism=name, backend=backend)
        if first < -end:
            assert out.item() == 0
            assert (grad_key == 0).all()
            continue
        # A_0 = 1 / (1 + ratio), of which the second score changes the ratio alone
        slope = {"gelu_l1": lambda s: -s, "mish_l1": lambda s: 1 + 1 / s}[name]
        ratio = math.exp({"gelu_l1": (first**2 - scores[1].item() ** 2) / 2, "mish_l1": -0.25}[name])
        ratio *= {"gelu_l1": 1.0, "mish_l1": scores[1].item() / first}[name]
        want = -2 * ratio / (1 + ratio) ** 2 * slope(scores[1].item())
        assert grad_key[0, 0, 1, 0].item() == pytest.approx(want, rel=0.02)


@everywhere
def test_a_zero_keys_gradient_is_zero_through_relu6(backend, dtype):
    """torch's own relu6 has slope 0 at 0. Dot products with a zero key are 0, so that is where the
    key would learn.
    """
    query = normal(1, 1, 6, 4).abs().to(dtype) + 0.1
    key = query.clone()
    key[:, :, 2] = 0
    inputs = [query, key, normal(1, 1, 6, 3, seed=2, dtype=dtype)]
    grads = run(inputs, normal(1, 1, 6, 3, seed=3, dtype=dtype), is_causal=True, mechanism="relu6_l1", backend=backend)
    assert (grads[2][:, :, 2] == 0).all()


# NaN and infinity


def hidden(kind, length):
    """Arguments that hide keys; bool [Lq, Lk], who sees whom; and keys to poison."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    if kind == "key_mask":
        real = torch.rand(length, generator=torch.Generator().manual_seed(8)) < 0.7
        real[0] = True
        return {"key_mask": real.expand(2, -1), "is_causal": True}, (j <= i) & real, ~real
    if kind == "attn_mask":
        mask = torch.rand(length, length, generator=torch.Generator().manual_seed(9)) < 0.6
        mask[:, ::7] = False
        return {"attn_mask": mask}, mask, ~mask.any(0)
    if kind == "window":
        return {"window_size": (3, 0)}, (j <= i) & (j >= i - 3), j == 7
    documents = j // 5
    return (
        {"document_ids": documents.expand(2, -1), "is_causal": True},
        (j <= i) & (documents[:, None] == documents),
        (j == 5) | (j == 8),
    )


@pytest.mark.parametrize("kind", ["key_mask", "attn_mask", "window", "documents"])
@everywhere_for(DISTINCT)
def test_nan_and_infinity_reach_only_who_sees_them(backend, dtype, name, kind):
    """Poisoned keys and values change no bit of a row that does not see them, and none of the
    gradients that only such rows contribute to. In the first batch alone: the second does not
    change at all.
    """
    length = 14
    arguments, sees, at = hidden(kind, length)
    inputs = [normal(2, 2, length, 4, seed=s, dtype=dtype) for s in range(3)]
    grad = normal(2, 2, length, 4, seed=3, dtype=dtype)
    hit = (sees & at).any(-1)  # rows that see poison
    touched = sees[hit].any(0)  # keys that those rows see: their gradients may be anything
    assert at.any()
    assert not touched.all()
    clean = run(inputs, grad, **arguments, mechanism=name, backend=backend)
    first = torch.zeros(2, 1, length, 1, dtype=torch.bool)
    first[0, 0, at] = True
    for poison, which in ((math.nan, (1, 2)), (math.inf, (1,)), (-math.inf, (2,))):
        bad = [x.masked_fill(first, poison) if n in which else x for n, x in enumerate(inputs)]
        got = run(bad, grad, **arguments, mechanism=name, backend=backend)
        for what, g, c, free in zip(
            ("out", "query", "key", "value"), got, clean, (~hit, ~hit, ~touched, ~touched), strict=True
        ):
            assert torch.equal(g[1], c[1]), (what, poison, which)
            assert torch.equal(g[0][:, free], c[0][:, free]), (what, poison, which)
        if not hit.any():
            assert (got[2][:, :, at] == 0).all()
            assert (got[3][:, :, at] == 0).all()


@everywhere_for(DISTINCT)
def test_a_visible_nan_is_seen_by_those_who_see_it_and_by_no_other(backend, dtype, name):
    length = length_for(backend)
    at = length - 4
    inputs = [normal(1, 1, length, 4, seed=s, dtype=dtype) for s in range(3)]
    clean = attention(*inputs, is_causal=True, mechanism=name, backend=backend)
    for which, poison in ((0, math.nan), (1, math.nan), (2, math.nan), (2, -math.inf)):
        bad = [x.clone() for x in inputs]
        bad[which][0, 0, at, 1] = poison
        out = attention(*bad, is_causal=True, mechanism=name, backend=backend)
        hit = torch.zeros_like(out, dtype=torch.bool)
        if which == 0:
            hit[:, :, at] = True
        elif which == 1:
            hit[:, :, at:] = True
        else:
            hit[:, :, at:, 1] = True  # a value's own column
        assert torch.equal(out.isnan(), hit), (which, poison)
        assert torch.equal(out[~hit], clean[~hit])


@pytest.mark.parametrize("power", [None, 3.0])
@ways(("relu2_l1", "relu_l1"), dtypes=lambda name: (torch.float32,))
def test_a_row_whose_phi_overflow_in_their_sum_is_nan(backend, dtype, name, power):
    """Each phi is finite. Divided by an infinite sum all weights would be 0."""
    length, first = 10, 4
    largest = {"relu2_l1": 1e19, "relu_l1": 2e38}[name]
    query = torch.ones(1, 1, length, 1, dtype=dtype, requires_grad=True)
    key, value = normal(1, 1, length, 1, dtype=dtype).abs(), normal(1, 1, length, 1, seed=1, dtype=dtype) / 8
    key[:, :, first:] = largest
    mechanism = named(name) if power is None else sharpened(named(name), power)
    out = attention(query, key, value, mechanism=mechanism, backend=backend, is_causal=True, scale=1.0)
    overflows = torch.arange(length) >= first + {"relu2_l1": 3, "relu_l1": 1}[name]
    assert torch.equal(out.isnan().flatten(), overflows)
    (dq,) = torch.autograd.grad(out.sum(), query)
    assert dq.flatten()[overflows].isnan().all()


def _gradients(backend, name, query, key, value, grad_out, **arguments):
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = attention(*leaves, mechanism=name, backend=backend, **arguments)
    return torch.autograd.grad(out, leaves, grad_out)


@ways((*VARIED, "relu2_l1", "sigmoid_log_n"), dtypes=lambda name: (torch.float32,))
@pytest.mark.parametrize("hidden_by", ["key_mask", "is_causal"])
def test_a_huge_value_that_a_row_does_not_see_leaves_its_gradients_alone(backend, dtype, name, hidden_by):
    """dA = dO . v of that key overflows, and 0 * inf is NaN."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad_out = (torch.randn(1, 2, 12, 16, generator=generator, dtype=dtype) for _ in range(4))
    grad_out *= 10
    huge, at = value.clone(), 3 if hidden_by == "key_mask" else 11
    huge[:, :, at], value[:, :, at] = 3e38, 0.0
    if hidden_by == "key_mask":
        arguments = {"key_mask": (torch.arange(12) != at)[None]}
    else:
        arguments = {"is_causal": True}
        grad_out[:, :, at] = 0.0  # of the row that sees it nothing comes
        if name in LASERS:
            pytest.skip("a row of LASER that sees 3e38 has a gradient of its own")
    got, want = (_gradients(backend, name, query, key, v, grad_out, **arguments) for v in (huge, value))
    rows = slice(None) if hidden_by == "key_mask" else slice(0, at)
    assert torch.equal(got[0][:, :, rows], want[0][:, :, rows])
    if hidden_by == "key_mask":
        assert all(torch.equal(x, y) for x, y in zip(got[1:], want[1:], strict=True))


@ways(["softmax", "softmax_p3", "relu_shen", "scenario_i"], dtypes=lambda name: (torch.float32,))
def test_a_huge_key_that_a_row_does_not_see_leaves_the_scales_gradient_alone(backend, dtype, name):
    """q . k of that key overflows, and 0 * inf is NaN."""
    query, key, value = (normal(1, 2, 12, 4, seed=s, dtype=dtype) for s in range(3))
    seen = torch.arange(12) != 3
    grads = []
    for k in (key, key.masked_fill(~seen[:, None], 3e38)):
        head_scale = torch.ones(2, requires_grad=True)
        arguments = {"key_mask": seen[None], "mechanism": name, "backend": backend}
        attention(10 * query, k, value, head_scale=head_scale, **arguments).sum().backward()
        grads.append(head_scale.grad)
    assert grads[0].isfinite().all()
    assert torch.equal(*grads)


@ways((*VARIED, "relu2_l1", "sigmoid_log_n"), dtypes=lambda name: (torch.float32,))
def test_a_nan_in_grad_out_reaches_only_the_keys_that_its_row_sees(backend, dtype, name):
    """The value's gradient is a product with all weights, in which 0 * NaN is NaN, as in eager
    attention.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad_out = (torch.randn(1, 2, 12, 16, generator=generator, dtype=dtype) for _ in range(4))
    grad_out[:, :, 5] = math.nan
    grads = _gradients(backend, name, query, key, value, grad_out, is_causal=True)
    others = torch.arange(12) != 5
    assert grads[0][:, :, others].isfinite().all()
    assert grads[1][:, :, 6:].isfinite().all()
    assert grads[1][:, :, :6].isnan().any()


@pytest.mark.parametrize("backend", [*BACKENDS, *SINGLE])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC000FF, 0x7F800001])
@pytest.mark.parametrize("name", ["softmax", "sigmoid_log_n", "lssa"])
def test_a_head_scale_that_is_any_nan_makes_nan(backend, bits, name):
    head_scale = torch.tensor([bits, 0x3F800000], dtype=torch.int32).view(torch.float32)
    query = torch.randn(1, 2, 12, 16)
    out = attention(query, query, query, mechanism=name, head_scale=head_scale, backend=backend)
    assert out[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()


@pytest.mark.parametrize("backend", [*BACKENDS, *SINGLE])
def test_the_gradient_of_a_power_is_nan_where_a_row_is(backend):
    query, power = torch.randn(1, 2, 12, 16), torch.full((2,), 3.0, requires_grad=True)
    nonfinite = query.clone()
    nonfinite[0, 0, 4, 0] = math.nan
    out = attention(nonfinite, query, query, mechanism="lssar", power=power, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), power)
    assert grad[0].isnan()
    assert grad[1].isfinite()


# Norms


@pytest.mark.parametrize("exponent", [100, -100, 60, -60])
@pytest.mark.parametrize("name", ["lssa", "lssar", "qknorm", "cosine_log_n", "laser_lssar"])
@everywhere
def test_cosines_do_not_depend_on_the_norm(backend, dtype, name, exponent):
    """Norms of about 1e30 and 1e-30. A power of two changes no mantissa: the output is bit-equal,
    gradients scale exactly.
    """
    inputs = [normal(1, 2, 9, 8, seed=s, dtype=dtype) for s in range(3)]
    grad = normal(1, 2, 9, 8, seed=4, dtype=dtype)
    plain = run(inputs, grad, is_causal=True, mechanism=name, backend=backend)
    factor = 2.0**exponent
    scaled = run(
        [inputs[0] * factor, inputs[1] * factor, inputs[2]], grad, is_causal=True, mechanism=name, backend=backend
    )
    assert torch.equal(scaled[0], plain[0])
    assert torch.equal(scaled[3], plain[3])
    for got, expected in zip(scaled[1:3], plain[1:3], strict=True):
        assert got.isfinite().all()
        if exponent in (60, -60):  # beyond, float32 gradients go below its smallest normal number
            assert torch.equal(got * factor, expected)


@pytest.mark.parametrize("norm", [1e30, 1e-30])
@everywhere
def test_extreme_norms_beside_ordinary_ones(backend, dtype, norm):
    inputs = [normal(1, 1, 6, 4, seed=s, dtype=dtype) for s in range(3)]
    inputs[0][0, 0, 3] *= norm
    inputs[1][0, 0, 2] *= norm
    inputs[1][0, 0, 4] = 0
    exact = run(doubled(inputs), is_causal=True, mechanism="lssar", backend="reference")
    got = run(inputs, is_causal=True, mechanism="lssar", backend=backend)
    ordinary = run(
        [F.normalize(x.double(), dim=-1).to(dtype) for x in inputs[:2]] + inputs[2:],
        is_causal=True,
        mechanism="lssar",
        backend=backend,
    )
    within(got[0], exact[0], ordinary[0] if dtype == torch.float32 else None)
    assert all(x.isfinite().all() for x in got)
    assert (got[2][0, 0, 4] == 0).all()


@pytest.mark.parametrize("name", ["lssar", "qknorm"])
@everywhere
def test_a_subnormal_vector_counts_as_zero_or_as_its_direction(backend, dtype, name):
    inputs = [normal(1, 1, 5, 4, seed=s, dtype=dtype) for s in range(3)]
    inputs[1][0, 0, 2] = torch.finfo(dtype).tiny / 8
    for x in run(inputs, is_causal=True, mechanism=name, backend=backend):
        assert x.isfinite().all()


# Scores far from zero


@everywhere
def test_huge_scores_in_softmax_pick_the_largest(backend, dtype):
    """Scores in the tens of thousands, thousands apart: e^(s - max) is 0 for all but one key, so
    out is that value.
    """
    length = 9
    query = torch.ones(1, 1, length, 1, dtype=dtype)
    key = torch.tensor([3.0, -7, 1, 9, -2, 8, 10, -10, 5], dtype=dtype).view(1, 1, length, 1) * 1e4
    value = normal(1, 1, length, 3, dtype=dtype)
    out, *grads = run([query, key, value], is_causal=True, mechanism="softmax", backend=backend)
    best = [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert torch.equal(out, value[:, :, best])
    assert (grads[0] == 0).all()
    assert (grads[1] == 0).all()


@pytest.mark.parametrize("name", ["softmax", "lssa", "sigmoid_l1", "softplus_l1", "laser", "laser_lssa", "lssar"])
@pytest.mark.parametrize("level", [-1e9, -1e6, -1e4, 1e4, 1e6, 1e9])
@everywhere
def test_rows_sum_to_one_however_large_the_scores(backend, dtype, name, level):
    """The log of a row's sum of N equal terms is |s| + log N, and log N is lost in the rounding of
    a huge s. Of values that are 1 every mean is 1, LASER's too.
    """
    inputs = [normal(1, 2, 5, 8, seed=s, dtype=dtype) for s in range(2)]
    bias, ones = torch.full((1, 1, 5, 5), level, dtype=dtype), torch.ones(1, 2, 5, 3, dtype=dtype)
    out = attention(*inputs, ones, bias=bias, mechanism=name, backend=backend)
    assert (out - 1.0).abs().max() <= 8 * torch.finfo(dtype).eps
    sums = weights(*inputs, bias=bias, mechanism=name).sum(-1)
    assert (sums - 1.0).abs().max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("phi", ["softplus", "sigmoid"])
@pytest.mark.parametrize("level", [-200.0, -80.0, -30.0])
@everywhere
def test_all_negative_scores_stay_a_distribution(backend, dtype, phi, level):
    """phi(s) = e^s (1 + O(e^s)) there: l1 of it is softmax, though e^-200 is no float32 number."""
    length = TILE + 6
    inputs = [normal(1, 1, length, 8, seed=s, dtype=dtype) for s in range(3)]
    bias = torch.full((1, 1), level, dtype=dtype)
    grad = normal(1, 1, length, 8, seed=3, dtype=dtype)
    mechanism = Mechanism(phi=phi)
    got = run(inputs, grad, mechanism=mechanism, is_causal=True, bias=bias, backend=backend)

    def eager(q, k, v):
        s = q @ k.mT / math.sqrt(8) + bias.to(q.dtype)
        hidden_keys = torch.ones(length, length, dtype=torch.bool).triu(1)
        # log phi(s), which is s minus a trifle here
        log_phi = s - (0.5 if phi == "softplus" else 1.0) * s.exp()
        return log_phi.masked_fill(hidden_keys, -math.inf).softmax(-1) @ v

    def derived(tensors, upstream):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = eager(*leaves)
        out.backward(upstream)
        return [out.detach(), *(x.grad for x in leaves)]

    same_problem(got, derived(doubled(inputs), grad.double()), derived(inputs, grad))
    rows = attention(
        *inputs[:2],
        torch.eye(length, dtype=dtype)[None, None],
        mechanism=mechanism,
        is_causal=True,
        bias=bias,
        backend=backend,
    )
    # each weight is rounded a few times, and a row has up to 70 of them: half a unit each, in the
    # worst case
    assert (rows.sum(-1) - 1).abs().max() <= length * torch.finfo(dtype).eps


@pytest.mark.parametrize("level", [-200.0, -30.0])
@everywhere
def test_re_weighting_of_all_negative_scores(backend, dtype, level):
    """LSSAR's threshold and power work on ratios: a shift of all scores far below zero is a
    softmax, sharpened.
    """
    inputs = [normal(1, 1, 8, 4, seed=s, dtype=dtype) for s in range(3)]
    got = attention(
        *inputs, mechanism=Mechanism(phi="softplus", power=3), is_causal=True,
        bias=torch.full((1, 1), level, dtype=dtype),
        backend=backend,
    )  # fmt: skip

    def eager(q, k, v):
        s = q @ k.mT / 2 + level
        s = s - 0.5 * s.exp()
        count = torch.arange(1, 9, dtype=s.dtype)[:, None]
        a = s.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
        r = (a * count - (count > 3).to(s.dtype)).clamp(min=0) ** 3
        return r / r.sum(-1, keepdim=True) @ v

    within(got, eager(*doubled(inputs)), eager(*inputs) if dtype == torch.float32 else None)


@everywhere
def test_power_100_where_the_naive_power_overflows(backend, dtype):
    """1,500 keys of which one dominates: u reaches 1,300, and 1300^100 is no float64 number."""
    keys = 1500
    score = torch.zeros(1, 1, keys, 1, dtype=torch.float64)
    score[0, 0, [3, 700, 1499], 0] = torch.tensor([14.0, 11.0, 10.0], dtype=torch.float64)
    score = score.float().to(dtype)
    query = torch.ones(1, 1, 2, 1, dtype=dtype)
    value = normal(1, 1, keys, 4, dtype=dtype)
    got = run([query, score, value], mechanism=sharpened(Mechanism(), 100), scale=1.0, backend=backend)

    s = score[..., 0].expand(1, 2, keys)[:, None]  # [1, 1, 2, keys]
    assert (s.double().softmax(-1) * keys - 1).max() ** 100 == math.inf
    plain = eager_log_power(s, value, keys) if dtype == torch.float32 else None
    within(got[0], eager_log_power(s.double(), value.double(), keys), plain)
    assert all(x.isfinite().all() for x in got)


def eager_log_power(s, v, keys):
    u = torch.relu(s.softmax(-1) * keys - 1)
    return (u.log() * 100).softmax(-1) @ v


# LASER


def dense(name, query, key, value, sees, kept=None):
    """The plain formula in the inputs' dtype, as one would write it without a thought for its
    rounding.
    """
    dtype, d = query.dtype, query.size(-1)
    count = sees.sum(-1, keepdim=True).to(dtype)
    if "lssa" in name:
        cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
        f = torch.where(sees, torch.log1p((math.log(d) * count.log() * cosine).exp()), 0.0)
        weights = f / f.sum(-1, keepdim=True)
    else:
        weights = (query @ key.mT / math.sqrt(d)).masked_fill(~sees, -math.inf).softmax(-1)
    power = 15 if "lssar" in name else 1
    if power > 1:
        weights = (weights * count - (count > 3).to(dtype)).clamp(min=0.0)
        weights = weights / weights.detach().amax(-1, keepdim=True)
    if not name.startswith("laser"):
        weights = weights**power / (weights**power).sum(-1, keepdim=True)
        return (weights if kept is None else weights * kept) @ value
    live = weights > 0
    log_weights = torch.where(live, power * torch.where(live, weights, 1.0).log(), -math.inf).log_softmax(-1)
    return torch.logsumexp(log_weights[..., None] + value[..., None, :, :], -2)


def dense_run(name, inputs, grad, sees, kept=None):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = dense(name, *leaves, sees, kept)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def sight(kind, length):
    """Arguments, and bool [Lq, Lk]: who sees whom."""
    if kind == "causal":
        return {"is_causal": True}, causal(length)
    if kind == "causal window":
        window = length // 3
        return {"window_size": (window, 0)}, causal(length).triu(-window)
    documents = torch.arange(length) * 3 // length
    return {"document_ids": documents[None], "is_causal": True}, causal(length) & (documents[:, None] == documents)


@pytest.mark.parametrize("kind", ["causal", "causal window", "packed documents"])
@pytest.mark.parametrize("name", LASERS)
@everywhere
def test_one_future_outlier_leaves_lasers_earlier_rows_bit_equal(backend, dtype, name, kind):
    """1e4, infinity or NaN in V, at tile borders and inside: no row before it changes a bit, in
    value or gradient.

    Rows after it that do not see it (a window, another document) may round otherwise, and no more.
    """
    length = length_for(backend, tiles=3)
    arguments, sees = sight(kind, length)
    arguments |= {"mechanism": name, "backend": backend}
    inputs = [normal(1, 1, length, 8, seed=s, dtype=dtype) for s in range(3)]
    inputs[2] = inputs[2][..., :3]
    grad = normal(1, 1, length, 3, seed=4, dtype=dtype)
    exact = attention(*doubled(inputs), **arguments | {"backend": "reference"})
    for at, outliers in ((7, [1e4]), (length // 3, [1e4, math.nan]), (length - 5, [1e4, -1e4, math.inf, math.nan])):
        unaware = ~sees[:, at]
        above = grad * unaware[:, None].to(dtype)
        base = run(inputs, above, **arguments)
        for outlier in outliers:
            value = inputs[2].clone()
            value[0, 0, at, 1] = outlier
            out, *grads = run([*inputs[:2], value], above, **arguments)
            assert torch.equal(out[:, :, :at], base[0][:, :, :at]), (at, outlier)
            assert torch.equal(grads[0][:, :, :at], base[1][:, :, :at]), (at, outlier)
            if kind == "causal":
                assert torch.equal(grads[1], base[2]), (at, outlier)
                assert torch.equal(grads[2], base[3]), (at, outlier)
            assert all(g.isfinite().all() for g in grads), (at, outlier)
            assert grads[2][0, 0, at, 1] == 0
            plain = base[0][:, :, unaware] if dtype == torch.float32 else None
            within(out[:, :, unaware], exact[:, :, unaware], plain)


@pytest.mark.parametrize("at", [1, TILE - 1, TILE, TILE + 1, 2 * TILE])
@pytest.mark.parametrize("name", LASERS)
@pytest.mark.parametrize("backend", ["tiled", "cpu"])
def test_one_future_outlier_at_every_side_of_a_tile_border(backend, name, at):
    """Within a tile, rows before and after the outlier share a matrix product."""
    inputs = [normal(1, 1, 2 * TILE + 9, 8, seed=s, dtype=torch.float32) for s in range(3)]
    plain = attention(*inputs, mechanism=name, is_causal=True, backend=backend)
    for outlier in (1e4, math.inf):
        value = inputs[2].clone()
        value[0, 0, at] = outlier
        out = attention(*inputs[:2], value, mechanism=name, is_causal=True, backend=backend)
        assert torch.equal(out[:, :, :at], plain[:, :, :at])
        assert bool(out[:, :, at:].isnan().all()) is (outlier == math.inf)


@pytest.mark.parametrize("spread", ["200", "early -1e4", "every other -1e4", "late 1e4", "all -1e4"])
@pytest.mark.parametrize("name", LASERS)
@everywhere
def test_laser_on_values_that_no_exponential_could_hold(backend, dtype, name, spread):
    """exp(200) overflows float32, and exp(-1e4) is 0 in float64: finite, and equal to log-sum-exp
    over log A + V.

    log A + V is rounded to |V| eps, in the expected values as well, and exp makes that a relative
    error of the gradients.
    """
    length = TILE + 16
    inputs = [normal(1, 2, length, 8, seed=s, dtype=dtype) for s in range(3)]
    inputs[2] = inputs[2][..., :3].clone()
    where = {"early -1e4": slice(0, 20), "every other -1e4": slice(0, None, 2), "late 1e4": slice(TILE + 3, None)}
    if spread == "200":
        inputs[2] *= 200
    else:
        inputs[2][:, :, where.get(spread, slice(None))] += 1e4 if "late" in spread else -1e4
    grad = normal(1, 2, length, 3, seed=4, dtype=dtype)
    got = run(inputs, grad, is_causal=True, mechanism=name, backend=backend)
    exact = dense_run(name, doubled(inputs), grad.double(), causal(length))
    plain = worst_order(lambda x: dense_run(name, x, grad, causal(length)), inputs, exact)
    same_problem(got, exact, plain, conditioning=2 * inputs[2].abs().max().item())


LOG_PHI = {
    "exp": lambda s: s,
    "softplus": lambda s: torch.where(
        s < -20.0, s - 0.5 * s.clamp(max=0.0).exp(), F.softplus(s.clamp(min=-20.0)).log()
    ),
    "sigmoid": F.logsigmoid,
}


def laser_by_logarithms(phi, inputs, grad, visible):
    """Output and gradients of LASER over q k, from log A alone."""
    query, key, value = leaves = [x.detach().clone().requires_grad_() for x in inputs]
    log_f = LOG_PHI[phi](query @ key.mT).masked_fill(~visible, -math.inf)
    log_a = log_f - log_f.logsumexp(-1, keepdim=True)
    out = (log_a[..., None] + value[..., None, :, :]).logsumexp(-2)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def laser_over(phi):
    return Mechanism(phi=phi, similarity="dot", scale="1", laser=True)


@pytest.mark.parametrize("rows", [1, 3, TILE + 16])
@pytest.mark.parametrize("phi", list(LOG_PHI))
@everywhere
def test_laser_sees_a_weight_that_no_float32_holds(backend, dtype, phi, rows):
    """A weight of e^-110 beside a value that lies 300 above the others, in one column."""
    length = TILE + 16
    query, key, value = (normal(1, 2, length, 3, seed=s, dtype=dtype) for s in range(3))
    query[..., 0], key[..., 0] = 1.0, 0.0
    key[:, :, ::3, 0] = -110.0
    value[:, :, ::3, 1] += 300.0
    inputs, grad = (query[:, :, -rows:], key, value), normal(1, 2, rows, 3, seed=4, dtype=dtype)
    got = run(inputs, grad, is_causal=True, mechanism=laser_over(phi), backend=backend)
    visible = causal(length)[..., -rows:, :]
    exact = laser_by_logarithms(phi, doubled(inputs), grad.double(), visible)
    plain = laser_by_logarithms(phi, inputs, grad, visible)
    assert exact[0][..., 1].min() > 150
    assert plain[0][..., 1].min() > 150
    same_problem(got, exact, plain, conditioning=2 * 300.0)


@pytest.mark.parametrize("phi", ["softplus", "sigmoid"])
def test_laser_sees_many_such_weights_where_all_are_small(phi):
    """A thousand phi of e^-87, each beside a value that is not large enough to be looked at alone,
    in rows whose largest is e^-20: what float32 drops is a fifteenth of the sum.
    """
    rows, length = 128, 1024
    query, value = torch.ones(1, 1, rows, 1), torch.full((1, 1, length, 1), 29.99)
    key = -87.05 - 0.1 * normal(1, 1, length, 1, dtype=torch.float32).abs()
    key[0, 0, :2, 0], value[0, 0, :2, 0] = torch.tensor([-50.0, -19.95]), torch.tensor([0.0, -27.55])
    visible = torch.arange(length) % rows != torch.arange(rows)[:, None]
    visible[:, :2] = True
    inputs, grad = (query, key, value), torch.ones(1, 1, rows, 1)
    got = run(inputs, grad, attn_mask=visible, mechanism=laser_over(phi), backend="cpu")
    exact = laser_by_logarithms(phi, doubled(inputs), grad.double(), visible)
    same_problem(got, exact, laser_by_logarithms(phi, inputs, grad, visible))


# The same rows by other ways: padding, a cache, packing, strides


@everywhere_for(WITHOUT_L)
def test_padding_equals_the_run_without(backend, dtype, name):
    """Left, right, and left without causality."""
    length, padding = length_for(backend), 11
    inputs = [normal(1, 2, length, 4, seed=s, dtype=dtype) for s in range(3)]
    grad = normal(1, 2, length, 4, seed=3, dtype=dtype)
    for is_causal, sides in ((True, [(padding, 0), (0, padding)]), (False, [(padding, 0)])):
        arguments = {"is_causal": is_causal, "mechanism": name}
        exact = run(doubled(inputs), grad.double(), **arguments, backend="reference")
        plain = run(inputs, grad, **arguments, backend=backend)
        for around in sides:
            padded = [F.pad(x, (0, 0, *around), value=7.5) for x in inputs]
            above = F.pad(grad, (0, 0, *around))
            key_mask = F.pad(torch.ones(1, length, dtype=torch.bool), around)
            got = run(padded, above, **arguments, key_mask=key_mask, backend=backend)
            same_problem([x[:, :, key_mask[0]] for x in got], exact, plain)
            for x in got[2:]:
                assert (x[:, :, ~key_mask[0]] == 0).all()


@everywhere_for(DISTINCT)
def test_a_cache_gives_the_rows_of_the_full_run(backend, dtype, name):
    """The last row alone, and the last five, among all keys: N comes from what they see, not from
    where they stand.
    """
    inputs = [normal(1, 2, length_for(backend), 4, seed=s, dtype=dtype) for s in range(3)]
    exact = attention(*doubled(inputs), is_causal=True, mechanism=name, backend="reference")
    full = attention(*inputs, is_causal=True, mechanism=name, backend=backend)
    for rows, is_causal in ((1, True), (5, True), (1, False)):
        got = attention(inputs[0][:, :, -rows:], *inputs[1:], is_causal=is_causal, mechanism=name, backend=backend)
        plain = {"plain": full, "plain_exact": exact} if dtype == torch.float32 else {}
        within(got, exact[:, :, -rows:], **plain)


@everywhere_for(WITHOUT_L)
def test_packed_documents_equal_separate_runs(backend, dtype, name):
    lengths = [5, TILE, 1, 30] if backend != "reference" else [5, 8, 1, 3]
    inputs = [normal(1, 2, sum(lengths), 4, seed=s, dtype=dtype) for s in range(3)]
    grad = normal(1, 2, sum(lengths), 4, seed=3, dtype=dtype)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]

    def apart(inputs, grad, backend):
        pieces = zip(*(x.split(lengths, dim=2) for x in (*inputs, grad)), strict=True)
        ran = [run(piece[:3], piece[3], is_causal=True, mechanism=name, backend=backend) for piece in pieces]
        return [torch.cat(parts, 2) for parts in zip(*ran, strict=True)]

    got = run(inputs, grad, document_ids=documents, is_causal=True, mechanism=name, backend=backend)
    same_problem(got, apart(doubled(inputs), grad.double(), "reference"), apart(inputs, grad, backend))


@ways(["softmax", "lssar", "laser", "softmax_recentred_l1", "gelu_l1"])
def test_strided_inputs_equal_contiguous_ones(backend, dtype, name):
    """[B, L, H, D] transposed, every other key, one value head for all."""
    query = normal(2, 9, 4, 8, seed=0, dtype=dtype).transpose(1, 2)
    key = normal(2, 4, 18, 8, seed=1, dtype=dtype)[:, :, ::2]
    value = normal(2, 1, 9, 8, seed=2, dtype=dtype).expand(2, 4, 9, 8)
    grad = normal(2, 9, 4, 8, seed=3, dtype=dtype).transpose(1, 2)
    inputs = [query, key, value]
    assert not any(x.is_contiguous() for x in inputs)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves, is_causal=True, mechanism=name, backend=backend)
    grads = torch.autograd.grad(out, leaves, grad)
    dense_inputs = [x.contiguous() for x in inputs]
    plain = run(dense_inputs, grad.contiguous(), is_causal=True, mechanism=name, backend=backend)
    exact = run(doubled(dense_inputs), grad.double(), is_causal=True, mechanism=name, backend="reference")
    same_problem([out.detach(), *grads], exact, plain)


@everywhere_for(DISTINCT)
def test_two_runs_are_bit_equal(backend, dtype, name):
    length = length_for(backend, tiles=2)
    inputs = [normal(1, 2, length, 8, seed=s, dtype=dtype) for s in range(3)]
    grad = normal(1, 2, length, 8, seed=3, dtype=dtype)
    first = run(inputs, grad, is_causal=True, mechanism=name, backend=backend)
    second = run(inputs, grad, is_causal=True, mechanism=name, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(x.isfinite().all() for x in first)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 5)])
@everywhere_for(DISTINCT)
def test_empty_sizes(backend, dtype, name, batch, queries, keys):
    inputs = [torch.randn(batch, 2, n, 4, dtype=dtype).requires_grad_() for n in (queries, keys, keys)]
    for arguments in ({}, {"is_causal": True}, {"key_mask": torch.ones(batch, keys, dtype=torch.bool)}):
        out, statistics = attention(*inputs, mechanism=name, return_statistics=True, backend=backend, **arguments)
        assert out.shape == (batch, 2, queries, 4)
        assert out.dtype == dtype
        assert (out == 0).all()
        assert all(x.shape == (batch, 2, queries) for x in statistics)
        assert (statistics.count == 0).all()
        assert (statistics.maximum == -math.inf).all()
        assert (statistics.log_norm == -math.inf).all()
        assert (statistics.peak == 0).all()
        for x, g in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
            assert g.shape == x.shape
            assert (g == 0).all()


# Dropout


def dropped(name, inputs, p, seed, **arguments):
    torch.manual_seed(seed)
    return attention(*inputs, mechanism=name, dropout_p=p, **arguments)


@pytest.mark.parametrize("name", ["softmax", "lssar", "sigmoid_log_n"])
@everywhere
def test_dropout_acts_on_the_weights(backend, dtype, name):
    """Read through V = identity: each weight is 0 or A / (1 - p), a fraction p of them 0,
    differently in every place.
    """
    p, length = 0.25, length_for(backend, tiles=2)  # of a p that 16 bits hold 1 / (1 - p) is exact
    query, key = (normal(2, 2, length, 4, seed=s, dtype=dtype) for s in range(2))
    identity = torch.eye(length, dtype=dtype).expand(2, 2, -1, -1)
    arguments = {"backend": backend}
    weights = attention(query, key, identity, mechanism=name, **arguments)
    assert torch.equal(dropped(name, [query, key, identity], 0.0, 1, **arguments), weights)
    some = dropped(name, [query, key, identity], p, 1, **arguments)
    kept = (some != 0) & (weights != 0)
    # scaled by 1 / (1 - p): one product or quotient more, and 1 / (1 - p) itself is rounded
    error = (some - weights / (1 - p)).abs()[kept]
    assert (error <= 4 * torch.finfo(dtype).eps * some[kept]).all()
    places = int((weights != 0).sum())
    fraction = 1 - kept.sum().item() / places
    assert abs(fraction - p) <= 5 * math.sqrt(p * (1 - p) / places)
    if name != "lssar":  # whose zeros are its own
        rows = length // 2 if backend == "reference" else TILE
        tiles = [some[b, h, start : start + rows] != 0 for b in range(2) for h in range(2) for start in (0, rows)]
        assert all(not torch.equal(x, y) for n, x in enumerate(tiles) for y in tiles[:n])
    assert torch.equal(dropped(name, [query, key, identity], p, 1, **arguments), some)
    assert not torch.equal(dropped(name, [query, key, identity], p, 2, **arguments), some)
    assert (dropped(name, [query, key, identity], 1.0, 1, **arguments) == 0).all()


@everywhere
def test_dropout_leaves_the_expectation(backend, dtype):
    """2,000 copies of one problem, each with its own mask: their mean is within 5 standard errors
    of the undropped output.
    """
    inputs = [normal(1, 1, 5, 4, seed=s, dtype=dtype) for s in range(3)]
    many = dropped(
        "lssa", [x.expand(2000, -1, -1, -1) for x in inputs], 0.4, 3, backend=backend, is_causal=True
    ).double()
    plain = attention(*inputs, mechanism="lssa", is_causal=True, backend=backend).double()
    standard_error = many.std(0) / math.sqrt(2000)
    assert ((many.mean(0) - plain[0]).abs() <= 5 * standard_error).all()
    assert (standard_error > 0).all()


@pytest.mark.parametrize("name", ["softmax", "lssa", "lssar"])
@everywhere
def test_the_backward_of_dropout_drops_the_same_weights(backend, dtype, name):
    """The gradients are those of (A * M) V, with the M of the forward pass read through V =
    identity and the same seed.
    """
    length, p = length_for(backend), 0.25
    inputs = [normal(1, 2, length, length, seed=s, dtype=dtype) for s in range(3)]
    identity = torch.eye(length, dtype=dtype).expand(1, 2, -1, -1)
    arguments = {"is_causal": True, "backend": backend}
    some = dropped(name, [*inputs[:2], identity], p, 4, **arguments)
    mask = (some != 0).to(dtype) / (1 - p)
    grad = normal(1, 2, length, length, seed=5, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = dropped(name, leaves, p, 4, **arguments)
    torch.manual_seed(99)  # the backward must not draw anew
    out.backward(grad)
    exact = dense_run(name, doubled(inputs), grad.double(), causal(length), mask.double().round() / (1 - p))
    plain = dense_run(name, inputs, grad, causal(length), mask)
    same_problem([out.detach(), *(x.grad for x in leaves)], exact, plain)


# Dtypes


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("backend", "name"), [(b, name) for b in (*BACKENDS, *SINGLE) for name in DISTINCT if supported(b, name)]
)
def test_half_inputs_return_their_dtype(name, backend, half):
    inputs = [normal(1, 2, 9, 4, seed=s, dtype=half) for s in range(3)]
    results = run(inputs, is_causal=True, mechanism=name, backend=backend)
    assert all(x.dtype == half for x in results)
    assert all(x.isfinite().all() for x in results)
    _, statistics = attention(*inputs, is_causal=True, mechanism=name, return_statistics=True, backend=backend)
    assert all(x.dtype == torch.float32 for x in statistics)
    # Everything is computed in float32 or better: what is left is the rounding of the result, half
    # a unit in its last place, and float32's own error, 1000 times smaller than that
    exact = run(doubled(inputs), is_causal=True, mechanism=name, backend="reference")
    allowed = 0.5 * torch.finfo(half).eps * exact[0].abs() * 1.01 + 1e-3 * torch.finfo(half).eps * exact[0].abs().max()
    assert ((results[0].double() - exact[0]).abs() <= allowed + torch.finfo(half).smallest_normal).all()


@pytest.mark.parametrize("backend", [*BACKENDS, *SINGLE])
def test_float16_scores_beyond_its_range(backend):
    """q.k = 1e5 is no float16 number; in float32 it is one."""
    query = torch.full((1, 1, 3, 4), 160.0, dtype=torch.float16)
    key = query.clone()
    key[0, 0, 1] = -160.0
    value = normal(1, 1, 3, 4, dtype=torch.float16)
    out = attention(query, key, value, is_causal=True, mechanism="softmax", backend=backend)
    assert torch.equal(out[0, 0, :2], value[0, 0, [0, 0]])
    assert out.isfinite().all()


# Statistics


@ways(["softmax", "lssa", "gelu_l1", "sigmoid_log_n_l1", "scenario_i", "relu_wortsman"])
def test_statistics_of_the_norm(backend, dtype, name):
    """count is N, maximum max s, log_norm log sum |phi(s)|: log-sum-exp for softmax."""
    length = TILE + 5
    inputs = [normal(1, 2, length, 4, seed=s, dtype=dtype) for s in range(3)]
    mask = torch.rand(length, length, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[7] = False
    mask[:, 0] |= torch.arange(length) != 7
    _, got = attention(*inputs, mask, mechanism=name, return_statistics=True, backend=backend)

    def expected(dtype):
        q, k = (x.to(dtype) for x in inputs[:2])
        count = mask.sum(-1).to(dtype)
        if name == "lssa":
            log_n = count.clamp(min=1).log()[:, None]
            s = math.log(4) * log_n * (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT)
        else:
            s = q @ k.mT / 2
            if name == "sigmoid_log_n_l1":
                s = s - count.clamp(min=1).log()[:, None]
        phi = {
            "softmax": torch.exp,
            "lssa": lambda s: torch.log1p(s.exp()),
            "gelu_l1": F.gelu,
            "sigmoid_log_n_l1": torch.sigmoid,
            "scenario_i": lambda s: s,
            "relu_wortsman": torch.relu,
        }[name]
        norm = torch.where(mask, phi(s).abs(), 0.0).sum(-1)
        return count.expand(1, 2, -1), s.masked_fill(~mask, -math.inf).amax(-1), norm.log()

    exact, plain = expected(torch.float64), expected(dtype)
    assert torch.equal(got.count.double(), exact[0])
    assert (got.maximum[:, :, 7] == -math.inf).all()
    assert (got.log_norm[:, :, 7] == -math.inf).all()
    assert (got.peak == 0).all()
    rows = torch.arange(length) != 7
    for a, e, p in zip(got[1:3], exact[1:], plain[1:], strict=True):
        within(a[:, :, rows], e[:, :, rows], p[:, :, rows] if dtype == torch.float32 else None)
    if name == "softmax":
        within(
            got.log_norm[:, :, rows],
            torch.logsumexp((inputs[0].double() @ inputs[1].double().mT / 2).masked_fill(~mask, -math.inf), -1)[
                :, :, rows
            ],
            plain[2][:, :, rows] if dtype == torch.float32 else None,
        )


@pytest.mark.parametrize("name", ["lssar", "lssar_p3", "softmax_p15"])
@everywhere
def test_the_peak_is_the_highest_weight_over_the_mean(backend, dtype, name):
    """max_j A_ij N_i - o before the power: 0 in a row of equal weights, and without o in the first
    three rows.
    """
    inputs = [normal(1, 1, TILE + 5, 4, seed=s, dtype=dtype) for s in range(3)]
    inputs[1][:, :, :5] = inputs[1][:, :, :1]  # rows 1 to 5 see equal keys
    _, got = attention(*inputs, is_causal=True, mechanism=name, return_statistics=True, backend=backend)
    length = TILE + 5

    def expected(dtype):
        q, k = (x.to(dtype) for x in inputs[:2])
        eye = torch.eye(length, dtype=dtype)[None, None]
        weights = dense("lssa" if "lssar" in name else "softmax", q, k, eye, causal(length))
        count = torch.arange(1, length + 1, dtype=dtype)
        return (weights.amax(-1) * count - (count > 3).to(dtype)).clamp(min=0)

    within(got.peak, expected(torch.float64), expected(dtype) if dtype == torch.float32 else None)
    one = got.peak[0, 0, :3].double()
    assert (one - 1).abs().max() <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", [*BACKENDS, *SINGLE])
def test_the_peak_of_a_huge_score_is_finite(backend):
    """One score of 1e36 among a thousand. Its product with N overflows; the peak is N - 1."""
    key = torch.zeros(1, 1, 1000, 1)
    key[0, 0, 3] = 1e36
    mechanism = sharpened(named("relu_l1"), 3)
    inputs = torch.ones(1, 1, 1, 1), key, normal(1, 1, 1000, 2, seed=0, dtype=torch.float32)
    out, rows = attention(*inputs, mechanism=mechanism, scale=1.0, backend=backend, return_statistics=True)
    torch.testing.assert_close(rows.peak, torch.full((1, 1, 1), 999.0))
    assert torch.equal(out[0, 0, 0], inputs[2][0, 0, 3])
