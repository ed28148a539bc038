"""The Triton kernels against the reference: on a GPU where there is one (``-m gpu``), elsewhere
under Triton's interpreter.

The interpreter takes seconds for a problem. What every run tests meets each kind of mask, each phi
and each dtype once; all of them together are marked slow (``pytest -m slow
tests/core/test_triton.py``).

Over 400 lines: one backend, and its cases share the lists of cases and the tuner's stand-ins.
"""

import gc
import math
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch._subclasses import FakeTensorMode

from softfocus import Mechanism, attention, attention_with_cache, dispatch, explain, functional, mechanisms, named, ops
from softfocus.backends import cpu, triton
from softfocus.contract import Call, Dropout, pack
from softfocus.mechanism import CHOICES, SIGNED_PHI
from softfocus.pointwise import FUSED, POINTWISE
from softfocus.testing import CASES, check
from softfocus.visibility import Cache, Visibility

pytest.importorskip("triton", reason="Triton is not installed")
from triton import jit, knobs
from triton import language as tl
from triton.language import constexpr
from triton.runtime import interpreter
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction

from softfocus.backends.triton import tuning, variants
from softfocus.backends.triton.kernels import backward_rows, forward, weighting
from softfocus.backends.triton.tuning import TileShape

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), *([pytest.mark.gpu] if GPU else [])]
CASE = {case.name: case for case in CASES}
KERNELS = ("forward", "query_gradients", "key_gradients", "bias_gradients", "decode")
SUPPORTED_NAMES = sorted(
    name for name, entry in mechanisms().items() if entry.mechanism.phi in FUSED and entry.mechanism.post == "none"
)
SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
QUICK = [
    ("causal", "lssar", SINGLE),
    ("causal", "lssa", BRAIN),
    ("bidirectional", "sigmoid_l1", SINGLE),
    ("more queries than keys", "relu_l1", SINGLE),
    ("one key", "lssar", SINGLE),
    ("window of both sides", "relu2_l1", HALF),
    ("documents", "lssar", SINGLE),
    ("mask and grouped", "softmax", HALF),
    ("blind rows", "sigmoid_log_n", SINGLE),
    ("bias", "softmax", SINGLE),
    ("broadcast bias", "relu6_l1", SINGLE),
    ("learned", "lssar", SINGLE),
    ("transposed", "relu_wortsman", SINGLE),
    ("causal", "laser", SINGLE),
    ("mask and grouped", "laser", HALF),
    ("learned", "laser_lssar", SINGLE),
    ("dropout", "lssar", SINGLE),
    ("dropout", "lssa", BRAIN),
]


TF32_IGNORES = 0x1FFF


@pytest.fixture
def quiet(monkeypatch):
    """The interpreter computes with numpy, which speaks of every infinity, and sums a product in
    another order where its operands change sides: compiled products do not, and the backward counts
    on the forward's scores. Numbers of bfloat16 it cuts off, where GPUs round. In a product of tf32
    it takes all of a float32, of which tensor cores ignore the low bits.
    """
    import numpy

    def operand(x, precision):
        if str(precision).endswith(".TF32") and x.dtype == numpy.float32:
            x = (numpy.ascontiguousarray(x).view(numpy.int32) & ~TF32_IGNORES).view(numpy.float32)
        return x

    def dot(self, a, b, d, precision, *rest):
        terms = (operand(x.data, precision).astype(d.data.dtype) for x in (a, b))
        left, right = terms
        return TensorHandle((left[:, :, None] * right).sum(1) + d.data, d.dtype.scalar)

    converted = interpreter._convert_float

    def rounded(x, kind, to, mode):
        if (str(kind), str(to)) != ("fp32", "bf16"):
            return converted(x, kind, to, mode)
        return torch.from_numpy(numpy.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy().view(numpy.uint16)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    with numpy.errstate(all="ignore"):
        yield


fused = partial(attention, backend="triton")


@pytest.mark.long
@pytest.mark.parametrize(("case", "name", "dtype"), QUICK, ids=lambda x: str(x).removeprefix("torch."))
def test_parity(quiet, case, name, dtype):
    check(fused, CASE[case], name, dtype, device=DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [SINGLE, BRAIN, HALF], ids=str)
@pytest.mark.parametrize("name", SUPPORTED_NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_parity(quiet, case, name, dtype):
    check(fused, case, name, dtype, device=DEVICE)


DECODED = [
    ("decode", "softmax", SINGLE),
    ("decode", "lssar", BRAIN),
    ("cache", "laser_lssar", SINGLE),
    ("grouped", "lssa", HALF),
    ("left padding", "lssar", SINGLE),
    ("mask and grouped", "relu_shen", SINGLE),
    ("bias", "relu2_l1", SINGLE),
    ("documents", "laser", SINGLE),
]


def split_keys(monkeypatch, programs):
    """So many programs share the keys of a head in decoding, however few there are."""
    from softfocus.backends.triton import call

    monkeypatch.setattr(call, "_programs", lambda device: programs)
    monkeypatch.setattr(call, "TILES_PER_SPLIT", 1)
    if not knobs.runtime.interpret:  # whose tiles are small
        candidates, small = tuning.candidates, (TileShape(16, 16, 4, 2),)
        monkeypatch.setattr(
            tuning, "candidates", lambda kernel, one: small if kernel == "decode" else candidates(kernel, one)
        )


@pytest.mark.long
@pytest.mark.parametrize(("case", "name", "dtype"), DECODED, ids=lambda x: str(x).removeprefix("torch."))
def test_parity_of_keys_split_among_programs(quiet, monkeypatch, case, name, dtype):
    from softfocus.backends.triton import call

    split_keys(monkeypatch, 64)
    monkeypatch.setattr(call, "FEW_ROWS", 512)
    ran = []
    decode = call.Launcher._decode
    monkeypatch.setattr(call.Launcher, "_decode", lambda *a: ran.append(a[-1]) or decode(*a))
    check(fused, CASE[case], name, dtype, device=DEVICE)
    assert min(ran) > 1


@pytest.mark.long
def test_values_that_weigh_nothing_or_less_than_rounding_are_not_read_in_decoding(quiet, monkeypatch):
    split_keys(monkeypatch, 4)
    query, key, value = (
        torch.randn(1, 1, n, 8, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (1, 90, 91)
    )
    value = value[:, :, :90]
    weights = fused(query, key, torch.eye(90, device=DEVICE)[None, None], mechanism="lssar")[0, 0, 0]
    clean = fused(query, key, value, mechanism="lssar")
    exact = attention(query.double(), key.double(), torch.eye(90)[None, None].double().to(DEVICE), backend="reference")[
        0, 0, 0
    ]
    tiny = ((exact > 0.0) & (exact < 2.0**-24 / 15 * exact.max())).nonzero()[0]
    assert weights[tiny] == 0.0
    value[0, 0, [weights.argmin(), tiny]] = math.nan
    assert torch.equal(fused(query, key, value, mechanism="lssar"), clean)
    assert fused(query, key, value, mechanism="laser(lssar)").isnan().all()
    value[0, 0, weights.argmax(), 1] = math.nan
    assert fused(query, key, value, mechanism="lssar")[0, 0, 0].isnan().tolist() == [n == 1 for n in range(8)]


def test_how_many_values_decoding_reads():
    """The shares of random keys that docs/performance-gpu.md names, by the threshold of
    ``decode._negligible``.
    """
    generator, length = torch.Generator().manual_seed(0), 16384
    query, key = (torch.randn(1, 1, n, 64, generator=generator, dtype=torch.float64) for n in (4, length))
    score = (
        math.log(64)
        * math.log(length)
        * torch.nn.functional.cosine_similarity(query.mT[..., None], key.mT[..., None, :], 2)
    )
    f = torch.nn.functional.softplus(score)
    mean = f.mean(-1, keepdim=True)
    weight = ((f - mean) / (f.amax(-1, keepdim=True) - mean)).clamp(min=0.0) ** 15
    assert (weight > 0.0).double().mean() == pytest.approx(0.35, abs=0.01)
    assert (weight > 2.0**-24 / (15 * length / 15**2)).double().mean() == pytest.approx(0.13, abs=0.015)


def test_decoding_refuses_more_threads_than_scores(monkeypatch):
    """Two threads would hold one score, and no barrier is between the load of one and the store of
    the other.
    """
    from softfocus.backends.triton.kernels import decode

    split_keys(monkeypatch, 4)
    monkeypatch.setattr(decode, "SCORES_AT_ONCE", constexpr(16))
    query, key = (torch.ones(1, 1, n, 8, device=DEVICE) for n in (1, 90))
    with pytest.raises(AssertionError, match="score of its own"):
        fused(query, key, key)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "lssa", "lssar", "relu_l1"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("laser", "laser_lssar")),
    ],
)
@pytest.mark.parametrize(("dtype", "near"), [(SINGLE, 1e-4), (BRAIN, 0.05)], ids=["float32", "bfloat16"])
def test_decoding_numbers_out_of_the_ordinary(quiet, monkeypatch, name, heads, dtype, near):
    """A query alone, and a few: norms whose squares float32 does not hold, values beyond what LASER
    takes as it is, values and keys that are no numbers where nobody sees them, and where somebody
    does. A wrong path is off by far more than ``near``; parity is tested elsewhere.
    """
    split_keys(monkeypatch, 4)
    query, key, value = (
        torch.randn(1, n, length, 16, generator=torch.Generator().manual_seed(length)).to(dtype)
        for n, length in ((heads, 1), (1, 90), (1, 91))
    )
    value = value[:, :, :90].clone()
    if mechanisms()[name].mechanism.similarity == "cosine":
        key[0, 0, 3], key[0, 0, 5], key[0, 0, 9] = key[0, 0, 3] * 1e-30, key[0, 0, 5] * 1e30, 0.0
    key[0, 0, 7], value[0, 0, 7], value[0, 0, 11, 2] = math.inf, math.nan, 50.0
    seen = torch.arange(90)[None] != 7

    def both():
        given = {"mechanism": name, "enable_gqa": True}
        doubles = (x.double() for x in (query, key, value))
        exact = attention(*doubles, key_mask=seen, backend="reference", **given)
        on_device = (x.to(DEVICE) for x in (query, key, value))
        return fused(*on_device, key_mask=seen.to(DEVICE), **given).double().cpu(), exact

    got, exact = both()
    torch.testing.assert_close(got, exact, rtol=near, atol=near / 10 if dtype == SINGLE else near)
    value[0, 0, 20:60, 1] = math.nan
    got, exact = both()
    assert got[..., 1].isnan().all()
    torch.testing.assert_close(got[..., 2:], exact[..., 2:], rtol=near, atol=near / 10 if dtype == SINGLE else near)


@pytest.mark.long
@pytest.mark.parametrize("name", ["lssar", "laser"])
def test_the_operators(quiet, name):
    """What the forward leaves to the backward passes torch's own checks of an operator."""
    query, key, value = (torch.randn(1, 2, 20, 8, device=DEVICE) for _ in range(3))
    mechanism = mechanisms()[name].mechanism
    call = Call(query, key, value, Visibility(20, 20, -1, 0), mechanism, 0.3)
    watched = call._replace(
        **{part: getattr(call, part).clone().requires_grad_() for part in ("query", "key", "value")}
    )
    torch.library.opcheck(ops.attend, (*pack(watched), "triton"))
    out, rows = ops.attend(*pack(call), "triton")
    assert rows.size(0) == ops.saved_vectors_of(call, "triton")
    torch.library.opcheck(ops.attend_backward, (torch.randn_like(out), *pack(call), "triton", True, out, rows))


@pytest.mark.long
@pytest.mark.parametrize(("power", "dtype"), [(1.5, SINGLE), (40.0, HALF), (40.0, SINGLE)])
def test_powers(quiet, power, dtype):
    mechanism = Mechanism(phi="softplus", similarity="cosine", scale="log(d)", length_scale="log(N)", power=power)
    check(fused, CASE["causal"], mechanism, dtype, device=DEVICE)


class OneKeyDominates(NamedTuple):
    """Rows with one score of ``high`` and the others near ``low``. Their weights are small, and so
    is dL/dA - delta.
    """

    high: float
    low: float
    name: str = "one key dominates"

    def arguments(self, mechanism, dtype, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (torch.randn(1, 1, n, 16, generator=generator, dtype=torch.float64) for n in (8, 40, 40))
        query, key = 0.1 * query, 0.1 * key
        query[..., 0], key[..., 0], key[:, :, 5, 0] = 4.0, self.low / 4, self.high / 4
        leaves = {"query": query, "key": key, "value": value}
        given = {name: x.to(device, dtype).requires_grad_() for name, x in leaves.items()}
        return {**given, "mechanism": mechanism, "is_causal": False, "scale": 1.0}


DOMINATED = [("softplus", 40.3, -8), ("softplus", -5, -15), ("sigmoid", 2, -10), ("exp", 2, -8)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("laser", [False, True])
@pytest.mark.parametrize(("phi", "high", "low"), DOMINATED)
def test_delta_is_of_what_was_rounded_where_one_key_dominates(quiet, monkeypatch, phi, high, low, laser, split):
    if split:
        split_keys(monkeypatch, 64)
    check(fused, OneKeyDominates(high, low), Mechanism(phi=phi, laser=laser), BRAIN, device=DEVICE)


@pytest.fixture(params=["truncated", pytest.param("whole", marks=pytest.mark.slow)])
def tf32(request, quiet, monkeypatch):
    """Products of tf32 as tensor cores compute them, and as the interpreter does."""
    if request.param == "whole":
        if not knobs.runtime.interpret:
            pytest.skip("tensor cores truncate")
        monkeypatch.setattr(sys.modules[__name__], "TF32_IGNORES", 0)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("phi", "high", "low"), DOMINATED)
def test_one_key_dominates_in_tf32(tf32, monkeypatch, phi, high, low, split):
    """A float16 call rounds what it multiplies in tf32, since tensor cores would truncate it."""
    if split:
        split_keys(monkeypatch, 64)
    check(fused, OneKeyDominates(high, low), Mechanism(phi=phi, laser=True), HALF, device=DEVICE)


@pytest.mark.parametrize("name", ["laser", pytest.param("sigmoid_log_n", marks=pytest.mark.slow), "relu_l1"])
def test_parity_in_tf32(tf32, name):
    check(fused, CASE["causal"], name, HALF, device=DEVICE)


@pytest.mark.parametrize("queries", [1, 8, 100])
def test_products_of_tf32_are_not_biased(tf32, monkeypatch, queries):
    """LASER of values 0 is 0. Weights that are truncated, by 2^-12 of themselves on average, sum to
    less than one.
    """
    split_keys(monkeypatch, 64)
    query, key = (torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(n)) for n in (queries, 300))
    query, key = query.to(DEVICE, HALF), key.to(DEVICE, HALF)
    for name in ("laser", "laser_lssa"):
        assert fused(query, key, torch.zeros_like(key), mechanism=name).abs().max() < 2.0**-13


class LostInRounding(NamedTuple):
    """Rows with one score of 1 and the others near ``low``, which the sum of phi loses."""

    low: float
    name: str = "lost in rounding"

    def arguments(self, mechanism, dtype, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (torch.rand(1, 1, n, 16, generator=generator, dtype=torch.float64) for n in (8, 40, 40))
        query[..., 1:], query[..., 0], key[..., 0], key[:, :, 5, 0] = 0.0, 1.0, self.low * (1 + key[..., 0]), 1.0
        leaves = {"query": query, "key": key, "value": value}
        given = {name: x.to(device, dtype).requires_grad_() for name, x in leaves.items()}
        return {**given, "mechanism": mechanism, "is_causal": False, "scale": 1.0}


@pytest.mark.parametrize("laser", [False, True])
@pytest.mark.parametrize(("phi", "low"), [("relu", 1e-10), ("relu2", 1e-5), ("relu6", 1e-10)])
def test_keys_that_the_sum_of_phi_loses_have_gradients(quiet, phi, low, laser):
    """phi' of relu is 1 however small phi is."""
    check(fused, LostInRounding(low), Mechanism(phi=phi, laser=laser), SINGLE, device=DEVICE)


class OneMarkedRow(NamedTuple):
    """LASER: the last row alone sees a large value. The scores of the others are near ``low``."""

    low: float
    name: str = "one marked row"

    def arguments(self, mechanism, dtype, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (torch.randn(1, 1, 6, 16, generator=generator, dtype=torch.float64) for _ in range(3))
        query[:, :, :-1] *= 0.1
        query[:, :, :-1, 0], key[..., 0], value[:, :, -1] = self.low, 1.0, 40.0
        leaves = {"query": query, "key": key, "value": value}
        given = {name: x.to(device, dtype).requires_grad_() for name, x in leaves.items()}
        return {**given, "mechanism": mechanism, "is_causal": True, "scale": 1.0}


@pytest.mark.parametrize("phi", ["exp", "sigmoid", "softplus"])
@pytest.mark.parametrize("power", [None, 3])
def test_rows_beside_a_marked_one_add_nothing_to_its_gradients(quiet, phi, power):
    """The kernel of marked rows gives the others a score of 0, whose phi over a sum of e^-100 is
    infinite.
    """
    low = -80 if phi == "sigmoid" else -100
    check(fused, OneMarkedRow(low), Mechanism(phi=phi, laser=True, power=power), SINGLE, device=DEVICE)


@pytest.mark.long
@pytest.mark.parametrize("phi", ["softplus", "relu"])
def test_laser_with_a_learned_power_of_zero(quiet, phi):
    """All keys above the threshold weigh the same. Every row is marked: it sees a large value. The
    first three have no threshold, and relu is 0 on some of their keys.
    """
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3)]
    given[2][:, :, 0, 2] += 40
    given += [torch.tensor([0.0, 1.5]), torch.zeros(1, 2, 20, 20)]
    mechanism, results = Mechanism(phi=phi, power=3.0, laser=True), []
    for backend, dtype in (("triton", SINGLE), ("tiled", SINGLE), ("reference", torch.float64)):
        query, key, value, power, bias = (x.to(DEVICE, dtype).requires_grad_() for x in given)
        out = attention(query, key, value, mechanism=mechanism, power=power, bias=bias, is_causal=True, backend=backend)
        leaves = (query, key, value, power, bias)
        grads = torch.autograd.grad(out, leaves, torch.linspace(-1, 1, 8, device=DEVICE, dtype=dtype).expand_as(out))
        results.append([x.double() for x in (out, *grads)])
    for *computed, want in zip(*results, strict=True):
        for got in computed:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


def test_laser_of_a_key_at_the_threshold(quiet):
    """Every row is marked. The phi of keys 0 and 7 is the threshold. A GPU computes u of 16-bit
    dtypes with one rounding less than the interpreter, and u of these keys may then be 2^-25 in
    place of 0. Only the emulator and a GPU can fail here.
    """
    phi = torch.tensor([24.0, 19, 31, 3, 27, 21, 23, 24, 22, 45, 18, 30, 17, 31, 29, 20]).repeat(16, 1)
    spread = torch.arange(8.0, 24.0)
    phi[:, 3], phi[:, 9] = 24 - spread, 24 + spread
    assert (phi.mean(1) == 24).all()
    query, key, value, grad_out = (
        torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(4)
    )
    key[0, ..., 0], query[..., 0], query[..., 1:] = phi, torch.arange(1.0, 17.0), 0.0
    value[..., 3, :8] = 200.0  # of a key below the threshold
    mechanism, results = Mechanism(phi="relu", scale="1", power=2.0, laser=True), []
    for backend, dtype in (("triton", torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.to(DEVICE, dtype, copy=True).requires_grad_() for x in (query, key, value)]
        out = attention(*leaves, mechanism=mechanism, backend=backend)
        results.append(torch.autograd.grad(out, leaves, grad_out.to(out))[1][0, :, [0, 7], 0].double())
    torch.testing.assert_close(*results, rtol=0.008, atol=1e-4)


def test_a_tied_row_of_subnormal_phi_has_gradients(quiet):
    """LASER, re-weighted. The squares of the scores are subnormal in float32, and 1 over them is
    infinite.
    """
    mechanism, results = Mechanism(phi="relu2", scale="1", power=3, laser=True), []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        key, value = torch.full((1, 1, 5, 1), 1e-20), torch.tensor([0.0, 1.0, 2.0, 92.0, 4.0])[None, None, :, None]
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (key, value)]
        query = torch.ones(1, 1, 1, 1, device=DEVICE, dtype=dtype)
        out = attention(query, *leaves, mechanism=mechanism, backend=backend)
        results.append([x.double() for x in (out, *torch.autograd.grad(out.sum(), leaves))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0.0)


def test_a_gradient_that_spans_too_much_is_copied(quiet, monkeypatch):
    """The kernels compute offsets within a head in 32 bits. They see no tensor beyond that, here
    with a smaller number of bits.
    """
    from softfocus.backends.triton import call

    query, wide = (torch.randn(1, 1, 20, n, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (8, 80))
    grad = wide[..., :8]
    query.requires_grad_()
    expected = torch.autograd.grad(fused(query, query, query), query, grad)[0]
    array, spans = call.array, []
    monkeypatch.setattr(variants, "MAX_HEAD_SPAN", 1000)
    monkeypatch.setattr(call, "array", lambda x: spans.append(0 if x is None else x.size(2) * x.stride(2)) or array(x))
    torch.testing.assert_close(torch.autograd.grad(fused(query, query, query), query, grad)[0], expected)
    assert 0 < max(spans) < 1000


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_norms_that_no_product_could_hold(quiet, size):
    inputs = [torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(s)).to(DEVICE) for s in range(3)]
    plain = fused(*inputs, is_causal=True)
    exact = attention(*(x.double() for x in inputs), is_causal=True, backend="reference")
    got = fused(inputs[0] * size, inputs[1] * size, inputs[2], is_causal=True)
    assert (got.double() - exact).abs().max() <= 4 * (plain.double() - exact).abs().max() + 1e-6


@pytest.mark.parametrize("name", ["softmax", pytest.param("lssar", marks=pytest.mark.slow)])
def test_a_nan_that_a_row_cannot_see_never_reaches_it(quiet, name):
    """In the future of a row and in its padding, in queries, keys and values; a visible one makes
    the row NaN.
    """
    length, at = 50, 37
    inputs = [torch.randn(1, 1, length, 8, generator=torch.Generator().manual_seed(s)).to(DEVICE) for s in range(3)]
    real = torch.ones(1, length, dtype=torch.bool, device=DEVICE)
    real[:, :3] = False

    def run(query, key, value):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = fused(*leaves, is_causal=True, key_mask=real, mechanism=name)
        return [out.detach(), *torch.autograd.grad(out[:, :, :at].sum(), leaves)]

    base = run(*inputs)
    for n, bad in ((1, math.nan), (2, math.nan), (1, math.inf), (2, -math.inf)):
        poisoned = [x.clone() for x in inputs]
        poisoned[n][:, :, at:] = bad
        poisoned[n][:, :, :3] = bad
        got = run(*poisoned)
        assert torch.equal(got[0][:, :, :at], base[0][:, :, :at])
        assert got[0][:, :, at:].isnan().all()
        assert torch.equal(got[1][:, :, :at], base[1][:, :, :at])


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN], ids=str)
def test_the_gradient_of_a_power_is_nan_where_a_row_is(quiet, dtype):
    query, key, value = (
        torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(s)).to(DEVICE, dtype) for s in range(3)
    )
    query[0, 0, 4, 0] = math.nan
    power = torch.full((2,), 3.0, device=DEVICE, requires_grad=True)
    out = fused(query, key, value, is_causal=True, mechanism="lssar", power=power)
    (grad,) = torch.autograd.grad(out.float().sum(), power)
    assert grad[0].isnan()
    assert grad[1].isfinite()


@pytest.mark.parametrize(
    ("name", "dtype"), [("lssar", BRAIN), ("lssar", HALF), ("sharpened(relu_l1, 3)", HALF)], ids=str
)
def test_values_that_a_nan_row_sees_have_nan_gradients(quiet, name, dtype):
    query, key, value = (
        torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(s)).to(DEVICE, dtype) for s in range(3)
    )
    query[0, 0, 4, 0] = math.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    grads = torch.autograd.grad(fused(*leaves, is_causal=True, mechanism=name).sum(), leaves)
    for grad in grads[1:]:
        assert grad[:, :, :5].isnan().all()
        assert grad[:, :, 5:].isfinite().all()


@pytest.mark.parametrize("name", ["lssar", "softmax", "laser(lssa)"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_nobody_sees_changes_no_gradient(quiet, name, bad):
    query, key, value = (
        torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(s)).to(DEVICE) for s in range(3)
    )
    real = torch.arange(20, device=DEVICE)[None] < 15

    def gradients(key, value):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = fused(*leaves, is_causal=True, key_mask=real, mechanism=name)
        return torch.autograd.grad(out.square().sum(), leaves)

    expected = gradients(key, value)
    assert not any(x[:, :, 15:].any() for x in expected[1:])
    key[:, :, 15:] = bad
    value[:, :, 15:] = bad
    for got, wanted in zip(gradients(key, value), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["laser(softmax)", *(pytest.param(f"laser({name})", marks=pytest.mark.slow) for name in ("lssar", "relu2_l1"))],
)
def test_laser_on_values_that_no_exponential_could_hold(quiet, name):
    """Rows that see them are summed in logarithms; the others, before them, do not change by a bit,
    nor do their gradients.
    """
    length, at = 40, 25
    inputs = [torch.randn(1, 1, length, 8, generator=torch.Generator().manual_seed(s)).to(DEVICE) for s in range(3)]
    inputs[2] = inputs[2][..., :2].contiguous()
    bias = torch.zeros(1, 1, 1, length, device=DEVICE)

    def run(value, rows, dtype=SINGLE, **how):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (*inputs[:2], value, bias)]
        out = attention(*leaves[:3], leaves[3], is_causal=True, mechanism=name, **how)
        return [out.detach(), *torch.autograd.grad(out[:, :, rows].square().sum(), leaves)]

    base = run(inputs[2], slice(None, at), backend="triton")
    for size in (1e4, -1e4):
        value = inputs[2].clone()
        value[0, 0, at, 1] = size
        got = run(value, slice(None, at), backend="triton")
        assert torch.equal(got[0][:, :, :at], base[0][:, :, :at])
        assert all(map(torch.equal, got[1:], base[1:]))
        got = run(value, slice(None), backend="triton")
        exact = run(value.double(), slice(None), torch.float64, backend="reference")
        for name_of, x, y in zip(("out", "query", "key", "value", "bias"), got, exact, strict=True):
            # The dense formula rounds log A + V to |V| eps, and the square makes that a part of the
            # gradients
            assert (x - y).abs().max() <= 4 * abs(size) * torch.finfo(SINGLE).eps * y.abs().max(), (size, name_of)


def test_laser_on_a_key_with_a_nan_and_a_huge_value(quiet):
    """The one makes its column NaN, the other's is summed in logarithms: neither hides the
    other.
    """
    query, key, value = (
        torch.randn(1, 1, n, 6, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (9, 40, 41)
    )
    value = value[:, :, :40].clone()
    value[0, 0, 5, :2] = torch.tensor([math.nan, 100.0])
    for causal in (False, True):
        out, exact = (
            attention(query, key, value, is_causal=causal, mechanism="laser", backend=backend)
            for backend in ("triton", "reference")
        )
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert out.isnan().any()
        assert (out[..., 1] > 50).any()


@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_an_infinite_key_makes_rows_nan_whatever_the_sign_of_the_scale(quiet, scale):
    query, key, value = (
        torch.randn(1, 1, n, 8, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (9, 40, 41)
    )
    key[0, 0, 5] = torch.tensor([math.inf, *[0.0] * 7])
    assert fused(query, key, value[:, :, :40], scale=scale).isnan().all()


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 3), (1, 1, 3, 1), (1, 1, 3, 3)], ids=str)
def test_a_bias_of_a_large_and_many_small_terms(shape):
    """A float32 running sum would lose all gradients but those of the first sequence."""
    sequences, small = 28, 1.25
    query, value = torch.zeros(sequences, 1, 3, 4, device=DEVICE), torch.ones(sequences, 1, 3, 4, device=DEVICE)
    bias = torch.zeros(shape, device=DEVICE, requires_grad=True)
    grad_out = torch.full((sequences, 1, 3, 4), small, device=DEVICE)
    grad_out[0] = 2.0**25
    out = fused(query, query, value, mechanism="sigmoid_log_l", bias=bias)
    (grad,) = torch.autograd.grad(out, bias, grad_out)
    each = 4 * 3 / 4**2 * (2.0**25 + (sequences - 1) * small)
    exact = torch.full_like(grad, each * 9 / bias.numel(), dtype=torch.float64)
    torch.testing.assert_close(grad.double(), exact, rtol=2**-21, atol=0)  # of the large term alone: 2^-22


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["softmax", "lssar"])
def test_a_bias_that_log2_e_would_make_infinite(quiet, monkeypatch, name, split):
    """Two rows of equal biases keep the mean of V, and a third one the value of its largest bias.

    The gradients of softmax are those of the third row. In the others the backward's logsumexp,
    some 1e38, has lost log N (docs/numerics.md).
    """
    if split:
        split_keys(monkeypatch, 64)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 1, n, 8, generator=generator).to(DEVICE) for n in (3, 40, 40)]
    bias = torch.zeros(1, 1, 3, 40, device=DEVICE)
    bias[0, 0, 0], bias[0, 0, 1], bias[0, 0, 2, 7] = torch.finfo(SINGLE).min, torch.finfo(BRAIN).min, 2.5e38
    results = []
    for backend in ("triton", "tiled"):
        leaves = [x.clone().requires_grad_() for x in (*given, bias)]
        out = attention(*leaves[:3], bias=leaves[3], mechanism=name, backend=backend)
        loss = (out if name == "lssar" else out[:, :, 2:]).square().sum()
        results.append((out, *torch.autograd.grad(loss, leaves)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    value = given[2][0, 0]
    torch.testing.assert_close(results[0][0][0, 0], torch.stack([value.mean(0), value.mean(0), value[7]]))


@jit
def sum_of_equal_terms(out, x, n):
    total = tl.zeros([16], tl.float32)
    error = total
    for _ in range(n):
        total, error = forward.two_sum(total, error, tl.zeros([16], tl.float32) + x)
    tl.store(out + tl.arange(0, 16), forward.compensated(total, error))


@pytest.mark.long
def test_a_long_row_of_equal_scores_is_summed_exactly():
    """A plain sum of so many tiles errs by more than TIE_TOLERANCE."""
    out, x, n = torch.empty(16, device=DEVICE), 88.7231, 3000
    sum_of_equal_terms[(1,)](out, x, n)
    exact = float(torch.tensor(x)) * n
    assert (out.double() / exact - 1).abs().max() < 2.0**-23
    plain = torch.zeros(())
    for _ in range(n):
        plain += x
    assert abs(float(plain) / exact - 1) > weighting.TIE_TOLERANCE.value
    sum_of_equal_terms[(1,)](out, 3e38, 3)
    assert out.isinf().all()


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("large", [0.0, 40.0])
@pytest.mark.parametrize("name", ["laser(sharpened(softplus_l1, 2))", "laser(softplus_l1)"])
def test_laser_is_nan_in_rows_with_an_infinite_product(quiet, name, large, queries):
    """Whether or not a large value marks them. The row maximum does not show a product of -inf."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, n, 8, generator=generator).to(DEVICE) for n in (queries, 40, 40))
    query[..., 0], key[0, 0, 5, 0], value[0, 0, 7, 0] = -3.0, 3e38, large
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = fused(*leaves, mechanism=name, is_causal=False)
    assert out.isnan().all()
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert not any(grad.isinf().any() for grad in grads)


@pytest.mark.parametrize("name", ["relu2_l1", "lssa", "softmax"])
def test_statistics_in_float16(quiet, name):
    query, key, value = (
        torch.randn(1, 1, n, 8, generator=torch.Generator().manual_seed(n)).to(DEVICE, HALF) for n in (9, 40, 41)
    )
    given = {"mechanism": name, "return_statistics": True}
    _out, got = fused(query * 4, key * 4, value[:, :, :40], **given)
    _out, exact = attention(
        query.double() * 4, key.double() * 4, value[:, :, :40].double(), backend="reference", **given
    )
    for field in ("count", "maximum", "log_norm"):
        # phi's polynomial of float16 is exact to 2^-17, and scores are made in float32
        torch.testing.assert_close(getattr(got, field).double(), getattr(exact, field), rtol=2.0**-17, atol=2.0**-17)


@pytest.mark.parametrize(("phi", "finite"), [(44e3, True), (46e3, False)])
def test_where_softplus_overflows_float16(quiet, phi, finite):
    """docs/numerics.md: where it exceeds about 45,000. softplus of such a score is the score."""
    query, key, value = (
        torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(n)).to(DEVICE, HALF) for n in (17, 20, 21)
    )
    key[0, 0, 5], query[..., 0], key[0, 0, 5, 0] = 0.0, 200.0, phi / 200
    mechanism = Mechanism(phi="softplus", scale="1")
    for backend in ("triton", "tiled"):
        out = attention(query, key, value[:, :, :20], mechanism=mechanism, backend=backend)
        assert out.isfinite().all() == (finite or backend == "tiled")


@pytest.mark.long
@pytest.mark.parametrize(
    ("phi", "derivative", "size", "finite"),
    [("softplus", 0.5, 0.2, True), ("softplus", 0.5, 1.1, False), ("sigmoid", 0.25, 1.1, False), ("exp", 1, 4.0, True)],
)
def test_where_gradients_overflow_float16(quiet, phi, derivative, size, finite):
    """docs/numerics.md: where |dL/dA - delta| phi' exceeds 65504, for keys a quarter of that.
    Here that product is ``size`` times 65504: scores and delta are near 0.
    """
    generator = torch.Generator().manual_seed(0)
    query, key = (0.01 * torch.randn(1, 1, 64, 16, generator=generator) for _ in range(2))
    value = (size * 65504 / derivative / 16) ** 0.5 * torch.tensor([1.0, -1.0]).repeat(32)
    value = value[None, None, :, None].expand(1, 1, 64, 16)
    for backend in ("triton", "tiled"):
        leaves = [x.to(DEVICE, HALF).requires_grad_() for x in (query, key, value)]
        out = attention(*leaves, mechanism=Mechanism(phi=phi), backend=backend)
        grads = torch.autograd.grad(out, leaves, torch.full_like(out, value[0, 0, 0, 0].item()))
        assert out.isfinite().all()
        for grad in grads[:2]:
            assert grad.isfinite().all() == (finite or backend == "tiled")
        assert grads[2].isfinite().all()


def test_gradients_of_exact_rows_of_nearly_equal_scores_in_float16(quiet):
    """LASER over LSSAR: a value of 40 marks every row. dL/df is 15 / 1e-4 times the others', beyond
    float16, and its sum with the keys is not.
    """
    query, key, value = torch.zeros(3, 1, 1, 64, 64, dtype=torch.float64)
    query[..., 0] = 1.0
    key[0, 0, 2:, 3] = 1.0
    key[0, 0, :2, 0], key[0, 0, 0, 1], key[0, 0, 1, 2] = 0.9, 0.43, 0.43
    value[0, 0, 1], value[0, 0, 63] = 1.0, 40.0
    grads = []
    for backend, dtype in (("triton", HALF), ("reference", torch.float64)):
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (query, key, value)]
        out = attention(*leaves, mechanism="laser_lssar", scale=5e-5, backend=backend)
        grads.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    # softplus f is near 1 in units of log 2. An error of 2^-22 of 2^s moves it by 2^-22.5, and its
    # rounding by 2^-24 above 1 and 2^-25 below. The mean is a quotient, which errs by 2^-22. dL/df
    # is proportional to 1 / (f - mean). Inputs, tf32 and gradients err by 2^-11 each. (An H200
    # missed 2^-9.)
    spread = 0.5 * 5e-5 * 0.9 * math.log2(math.e)
    tolerance = (2**-22.5 + 2**-24 + 2**-25 + 2**-22) / spread + 3 * 2**-11
    for got, expected in zip(*grads, strict=True):
        assert (got.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_gradients_of_keys_beside_a_tiny_query(quiet):
    """Cosines do not know how long a query is, and a power of two of its length changes not a bit:
    also where keys are nearly alike, so that what multiplies their gradients is large.
    """
    query, key, value = (
        torch.randn(1, 1, n, 8, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (9, 40, 41)
    )
    key = key[:, :, :1] + 1e-3 * key

    def gradients(size):
        leaves = [x.clone().requires_grad_() for x in (query * size, key, value[:, :, :40])]
        return torch.autograd.grad(fused(*leaves, mechanism="lssar").square().sum(), leaves[1:])

    for plain, tiny in zip(gradients(1.0), gradients(2.0**-112), strict=True):
        assert plain.isfinite().all()
        assert torch.equal(plain, tiny)


@pytest.mark.parametrize("name", ["lssa", "lssar", "cosine_log_n"])
def test_gradients_of_queries_that_see_a_tiny_key_in_float16(quiet, name):
    """A power of two in the length of a key changes no bit. The gradient through a key of 2^-24 is
    multiplied by 2^24, and the other keys' gradients keep their precision beside it.
    """
    query, key, value = (
        torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(n)).to(DEVICE, HALF) for n in (19, 40, 41)
    )

    def gradient(size):
        lengths = key.clone()
        lengths[:, :, 5] = 0.0
        lengths[:, :, 5, 3] = size
        leaf = query.clone().requires_grad_()
        return torch.autograd.grad(fused(leaf, lengths, value[:, :, :40], mechanism=name).square().sum(), leaf)[0]

    plain, tiny = gradient(1.0), gradient(2.0**-24)
    assert plain.abs().amax() > 1e-3
    assert torch.equal(plain, tiny)


@pytest.mark.parametrize("name", ["lssar", "laser(lssar)", "sharpened(softmax, 3)"])
def test_gradients_of_keys_beside_a_row_of_nearly_equal_scores_in_float16(quiet, name):
    """Such a row divides by its spread, 4e-5. Without grad_out of its own it changes no bit of the
    keys' gradients.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad_out = (torch.randn(1, 1, n, 16, generator=generator) for n in (19, 40, 40, 19))
    key[..., 0] *= 2.0**-14
    grad_out[:, :, 5] = 0.0
    query, key, value, grad_out = (x.to(DEVICE, HALF) for x in (query, key, value, grad_out))

    def gradient(entry):
        queries, leaf = query.clone(), key.clone().requires_grad_()
        queries[:, :, 5] = 0.0
        queries[:, :, 5, entry] = 1.0  # its scores are key[..., entry]
        return torch.autograd.grad(fused(queries, leaf, value, mechanism=name), leaf, grad_out)[0]

    nearly_equal, plain = gradient(0), gradient(1)
    assert plain.abs().amax() > 1e-3
    assert torch.equal(nearly_equal, plain)


class TinyQueries(NamedTuple):
    """c_i / |q_i|, in units of log 2, is beyond float32's largest number. The gradients of the
    queries, which it multiplies, may be, too.
    """

    name: str = "tiny queries"

    def arguments(self, mechanism, dtype, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (torch.randn(1, 1, n, 16, generator=generator, dtype=torch.float64) for n in (9, 40, 40))
        query[:, :, ::2] *= 2.0**-125 / query[:, :, ::2].abs().amax(-1, keepdim=True)
        query = query.where(query.abs() >= 2.0**-126, 0.0)  # the interpreter misreads bfloat16 below it
        given = {name: x.to(device, dtype).requires_grad_() for name, x in (("key", key), ("value", value))}
        return {"query": query.to(device, dtype), **given, "mechanism": mechanism, "is_causal": False}


@pytest.mark.parametrize(("name", "dtype"), [("lssar", SINGLE), ("lssa", SINGLE), ("lssar", BRAIN), ("lssa", BRAIN)])
def test_gradients_of_keys_that_the_tiniest_queries_see(quiet, name, dtype):
    check(fused, TinyQueries(), name, dtype, device=DEVICE)


def test_a_tile_that_does_not_fit_gives_way_to_a_smaller_one(quiet, monkeypatch):
    from softfocus.backends.triton import call

    query = torch.randn(1, 1, 40, 8, device=DEVICE)
    validated = functional.validated_call(query, query, query, mechanism="softmax")
    ran = []

    def run(tile, least=16):
        ran.append(tile)
        if tile.rows > least:
            raise OutOfResources(2, 1, "shared memory")

    one = call.Launcher(validated)
    assert one._with_shape("bias_gradients", run) == tuning.SMALLER[-1]
    assert len(ran) == 4
    with pytest.raises(OutOfResources):
        one._with_shape("bias_gradients", partial(run, least=8))


def test_marked_rows_whose_tile_does_not_fit_take_a_smaller_one(quiet, monkeypatch):
    """LASER's second kernel needs more memory than the forward, whose tile it tries first."""
    from softfocus.backends.triton import call
    from softfocus.backends.triton.kernels import laser

    launch, tried = call.Launcher._launch, []

    def full(self, kernel, constants, *rest, **options):
        if kernel is laser.exact_forward:
            tried.append(constants[0].rows)
            if constants[0].rows > 16:
                raise OutOfResources(2, 1, "shared memory")
        launch(self, kernel, constants, *rest, **options)

    query, key, value = (
        torch.randn(1, 1, n, 8, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (9, 40, 41)
    )
    value = value[:, :, :40] + 50.0
    expected = fused(query, key, value, mechanism="laser")
    monkeypatch.setattr(call.Launcher, "_launch", full)
    torch.testing.assert_close(fused(query, key, value, mechanism="laser"), expected)
    assert len(tried) > 1
    assert tried[-1] == 16


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 1, 1, -1), (1, 1, -1, 1), (1, 1, -1, -1)], ids=str)
def test_only_the_first_dimension_of_a_grid_grows_with_the_length(quiet, monkeypatch, shape):
    """CUDA's others end at 65535."""
    from softfocus.backends.triton import call

    launch, grids = call.Launcher._launch, []
    monkeypatch.setattr(call.Launcher, "_launch", lambda *a, **k: grids.append(a[3][1:]) or launch(*a, **k))

    def others(length):
        grids.clear()
        x = torch.randn(1, 1, length, 8, device=DEVICE)
        bias = torch.zeros([length if size == -1 else size for size in shape], device=DEVICE, requires_grad=True)
        torch.autograd.grad(fused(x, x, x, bias=bias).sum(), bias)
        return list(grids)

    assert others(20) == others(70)


def test_documents_in_any_order(quiet):
    """Counts and results do not depend on their standing one after another; only how many tiles are
    looked at does.
    """
    generator = torch.Generator().manual_seed(0)
    for ids in (torch.randint(-2, 3, (2, 100), generator=generator), torch.arange(100).expand(2, -1) // 30 * -7):
        query, key, value = (torch.randn(2, 1, 100, 8, generator=generator).to(DEVICE) for _ in range(3))
        given = {"is_causal": True, "document_ids": ids.to(DEVICE), "return_statistics": True}
        out, rows = fused(query[:, :, 20:], key, value, **given)
        exact, exact_rows = attention(query[:, :, 20:], key, value, backend="reference", **given)
        assert torch.equal(rows.count, exact_rows.count)
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)


def test_only_the_lists_of_tiles_that_a_kernel_reads_are_made(quiet, monkeypatch):
    """Their number of bytes grows as the square of the length."""
    from softfocus.backends.triton import call
    from softfocus.backends.triton.arguments import Masks

    made, listed, given = [], call.tile_lists, []
    monkeypatch.setattr(call, "tile_lists", lambda states: made.append(tuple(states.shape)) or listed(states))
    launch = call.Launcher._launch

    def watched(self, kernel, *rest, **options):
        if kernel.__name__ != "survey":
            lists = ((x.key_tiles is not None, x.query_tiles is not None) for x in rest if isinstance(x, Masks))
            given.extend((kernel.__name__, *found) for found in lists)
        launch(self, kernel, *rest, **options)

    monkeypatch.setattr(call.Launcher, "_launch", watched)
    query, key = (torch.randn(1, 1, length, 8, device=DEVICE, requires_grad=True) for length in (40, 70))
    bias = torch.zeros(1, 1, 1, 70, device=DEVICE, requires_grad=True)
    real = torch.ones(1, 70, dtype=torch.bool, device=DEVICE)
    out = fused(query, key, key, bias=bias, key_mask=real, mechanism="lssa")
    assert given == [("forward", True, False)]
    assert len(made) == 1
    torch.autograd.grad(out.sum(), [query, key, bias])
    backward = [("query_gradients", True, False), ("key_gradients", False, True), ("bias_gradients", False, False)]
    assert given[1:] == backward
    assert len(made) == 3
    split_keys(monkeypatch, 4)
    fused(query[:, :, :1], key, key, key_mask=real, mechanism="lssa")
    assert given[4:] == [("statistics", False, False), ("combine", False, False)]
    assert len(made) == 3


@pytest.mark.parametrize("what", ["key_mask", "document_ids"])
def test_strides_that_take_offsets_beyond_32_bits(quiet, what):
    """``refuses`` checks the strides of queries, keys and values only."""
    import numpy

    stride, length = 2**30, 3
    memory = torch.from_numpy(numpy.zeros((length - 1) * stride + 1, dtype=numpy.int8)).to(DEVICE)  # not touched
    far = memory.as_strided((1, length), (0, stride))
    far[:, -1] = 1
    far = far.view(torch.bool) if what == "key_mask" else far
    query, key, value = (torch.randn(1, 1, length, 8, device=DEVICE) for _ in range(3))
    got, wanted = (fused(query, key, value, **{what: x}) for x in (far, far.contiguous()))
    assert torch.equal(got, wanted)
    assert not torch.equal(wanted, fused(query, key, value))


def far_vectors(n, stride, length):
    """Vectors [n, 1, 1, length], ``stride`` apart, in memory that is not touched. Where an offset
    wraps at 32 bits, it still lies in this memory.
    """
    import numpy

    memory = torch.from_numpy(numpy.zeros(2**31 + (n - 1) * stride + length, dtype=numpy.int8)).to(DEVICE)
    return memory.as_strided((n, 1, 1, length), (stride, stride, stride, 1), 2**31)


def test_saved_vectors_that_lie_beyond_32_bits(quiet, monkeypatch):
    """As with 3.1e8 rows or more over all heads."""
    from softfocus.backends.triton import call

    row_array, length = call.row_array, 16
    saved = far_vectors(variants.SAVED_VECTORS, 2**28 + 2**26, length)
    monkeypatch.setattr(call, "row_array", lambda x: row_array(saved if x.size(0) == variants.SAVED_VECTORS else x))
    query = torch.ones(1, 1, length, 1, device=DEVICE)
    fused(query, 5 * query, query, scale=1.0, mechanism="relu_l1")
    assert (saved[-1] == 5).all()  # the largest score


@jit
def _store_and_load(row_vectors, out, algebra):
    q_offsets = tl.arange(0, 16)
    x = q_offsets.to(tl.float32)
    row = weighting.GradientRow(x * 0, x * 0, x * 0, x * 0, x * 0, x * 0, x)
    mask = q_offsets < 16
    backward_rows.store_row_vectors(
        row_vectors, algebra, x * 0, x * 0, x * 0, row, x * 0, 0, 0, q_offsets, mask, mask, False
    )
    _mean_grad, _scale, _bias, loaded = backward_rows.load_row_vectors(
        row_vectors, algebra, 0, 0, q_offsets, mask, False
    )
    tl.store(out + q_offsets, loaded.delta)


@jit
def _value_at_infinite_shift(out, algebra):
    s = tl.arange(0, 16).to(tl.float32) - 8.0
    f = algebra.phi.f(s, tl.zeros_like(s) + float("inf"), algebra)
    tl.store(out + tl.arange(0, 16), f)


@pytest.mark.parametrize("phi", FUSED)
def test_phi_at_an_infinite_shift_is_what_it_declares(quiet, phi):
    """The backward gives rows that it does not compute such a shift."""
    from softfocus.backends.triton.inputs import algebra_of

    out = torch.empty(16, device=DEVICE)
    for dtype in (SINGLE, HALF):
        algebra = algebra_of(Mechanism(phi=phi), False, False, dtype)
        if algebra.shifted.value:
            _value_at_infinite_shift[(1,)](out, algebra)
            assert bool((out == 0).all()) == algebra.phi.zero_at_infinite_shift.value


def test_row_vectors_that_lie_beyond_32_bits(quiet):
    """As with 2^28 rows or more over all heads."""
    from softfocus.backends.triton.inputs import algebra_of, row_array

    vectors, loaded = far_vectors(backward_rows.ROW_VECTORS[0], 2**28, 16), torch.zeros(16, device=DEVICE)
    _store_and_load[(1,)](row_array(vectors), loaded, algebra_of(named("softmax"), False, False, SINGLE))
    assert loaded.tolist() == vectors[-1, 0, 0].tolist() == list(range(16))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (16, 128)], ids=str)
def test_dropout_in_tiles_of_any_width(quiet, monkeypatch, shape):
    """A group of 64 keys lies in four tiles, or one, or two in one tile; parity is tested with two
    to a group.
    """
    monkeypatch.setattr(tuning, "INTERPRETED", TileShape(*shape, 1, 1))
    monkeypatch.setattr(tuning, "candidates", lambda *a: (TileShape(*shape, 4, 1),))
    case = replace(CASE["dropout"], batch=1, heads=2, key_heads=1, query_length=20, key_length=150, bias="1hqk")
    check(fused, case, "softmax", SINGLE, device=DEVICE)


def test_another_seed_is_no_other_kernel(quiet):
    """Triton compiles anew for a number that 16 divides, for 1, and for one of fewer bits; here
    launches are kept by layout.
    """
    from softfocus.backends.triton.inputs import inputs_of

    query = torch.randn(1, 2, 40, 8, device=DEVICE)
    call = functional.validated_call(query, query, query, mechanism="softmax", dropout_p=0.5)
    for seed in (0, 8, 2**31, 2**62 - 1):
        given = inputs_of(call._replace(dropout=Dropout(0.5, torch.tensor(seed))))
        assert 2**63 < given.seed < 2**64
        assert given.seed % 16 != 0
    outs = []
    for torch_seed in (1, 2, 1):
        both = []
        for backend in ("triton", "reference"):
            torch.manual_seed(torch_seed)
            both.append(attention(query, query, query, dropout_p=0.5, mechanism="softmax", backend=backend))
        torch.testing.assert_close(*both)
        outs.append(both[0])
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.long
def test_dropout_among_few_queries(quiet, monkeypatch):
    """The decoding kernels support none: these queries are left to the others."""
    split_keys(monkeypatch, 64)
    case = replace(CASE["dropout"], query_length=2, key_length=100)
    check(fused, case, "lssar", SINGLE, device=DEVICE, draws=8)


# Tiles, and the choice between them


TABLES = (
    tuning.TILES,
    tuning.TILES_BEFORE_HOPPER,
    tuning.TILES_SINCE_BLACKWELL,
    tuning.TILES_HDIM256,
    tuning.TILES_FP32,
)
ALL_TILES = {tile for table in TABLES for tiles in table.values() for tile in tiles}
SHAPES = sorted({(tile.rows, tile.keys) for tile in ALL_TILES})


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=[] if n % 3 == 0 else pytest.mark.slow) for n, shape in enumerate(SHAPES)]
)
def test_every_tile_that_may_be_chosen_is_right(quiet, monkeypatch, shape):
    """Whatever it is made for: a GPU that cannot hold it takes a smaller one."""
    monkeypatch.setattr(tuning, "INTERPRETED", TileShape(*shape, 1, 1))
    most = max(tile for tile in ALL_TILES if (tile.rows, tile.keys) == shape)
    monkeypatch.setattr(tuning, "candidates", lambda *call: (most,))
    check(fused, replace(CASE["cache"], batch=1), "lssar", SINGLE if knobs.runtime.interpret else BRAIN, device=DEVICE)


def test_there_are_tiles_for_every_kernel_of_every_mechanism(monkeypatch):
    """And no table holds what nothing would take."""
    taken = set()
    for arch in (80, 90, 100, "gfx942"):
        active = SimpleNamespace(get_current_target=lambda arch=arch: SimpleNamespace(arch=arch))
        monkeypatch.setattr(tuning, "driver", SimpleNamespace(active=active))
        for name, width, kernel, dtype in product(SUPPORTED_NAMES, (16, 64, 72, 128, 256), KERNELS, (SINGLE, BRAIN)):
            query = torch.ones(1, 1, 8, width, dtype=dtype)
            taken.add(tuning.candidates(kernel, functional.validated_call(query, query, query, mechanism=name)))
    assert taken == {tiles for table in TABLES for tiles in table.values()}


def test_a_tile_of_few_registers_is_compiled_so(monkeypatch):
    """But on AMD's GPUs, whose compiler has no such option."""
    assert {tile.registers for tile in ALL_TILES} == {0, 128, 168}
    assert TileShape(128, 64, 8, 3).options == {"num_warps": 8, "num_stages": 3}
    assert TileShape(128, 64, 8, 3, 128).options == {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert TileShape(128, 64, 8, 3, 128).options == {"num_warps": 8, "num_stages": 3}


MEASURED = (TileShape(64, 32, 8, 2), TileShape(128, 32, 8, 2), TileShape(64, 64, 8, 2))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The tiles that are timed, in order, on a device that is not there: the more keys, the
    faster.
    """
    timed = []

    def run(tile):
        if tile.rows == 128:
            raise OutOfResources(1, 2, "shared memory")
        timed.append(tile)

    def time(call):
        call()
        return 1.0 / timed[-1].keys

    torch.use_deterministic_algorithms(False)  # which poisoned_memory turned on
    monkeypatch.setenv(tuning.TUNE, "on")
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_time", time)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def choose(key=("forward", 1)):
        return tuning.fastest(key, torch.device("cuda"), MEASURED, run)

    choose.timed = timed
    return choose


def test_the_fastest_tile_is_taken_and_remembered(measured, monkeypatch):
    assert measured() == TileShape(64, 64, 8, 2)
    assert measured.timed == [tile for tile in MEASURED if tile.rows == 64]
    assert measured() == TileShape(64, 64, 8, 2)
    monkeypatch.setattr(tuning, "_known", {})  # as in another process
    assert measured() == TileShape(64, 64, 8, 2)
    assert len(measured.timed) == 2
    measured(("forward", 2))
    assert len(measured.timed) == 4


def test_processes_that_measure_at_once_take_one_tile(measured, monkeypatch):
    """They may measure different tiles. One that was kept by the end of a measurement is taken."""
    ours, others = tuning._time, []

    def while_another_process_measures(call):
        if not others:
            others.append(None)
            with monkeypatch.context() as other:
                other.setattr(tuning, "_known", {})
                other.setattr(tuning, "_time", lambda call: (call(), measured.timed[-1].keys)[1])
                others[0] = measured()
        return ours(call)

    monkeypatch.setattr(tuning, "_time", while_another_process_measures)
    assert measured() == others[0] == MEASURED[0]
    monkeypatch.setattr(tuning, "_known", {})
    assert measured() == others[0]


def test_a_broken_record_is_measured_again(measured, monkeypatch, tmp_path):
    measured()
    (record,) = tmp_path.rglob("tile.json")
    for text in ("", "[1, 2]", "[64, 48, 8, 2]", "{}"):
        record.write_text(text)
        monkeypatch.setattr(tuning, "_known", {})
        assert measured() == TileShape(64, 64, 8, 2)


def test_nothing_is_measured_while_a_graph_is_captured_or_when_told_so(measured, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert measured() == MEASURED[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("SOFTFOCUS_TUNE", "off")
    assert measured() == MEASURED[0]
    monkeypatch.setenv("SOFTFOCUS_TUNE", "on")
    torch.use_deterministic_algorithms(True)
    assert measured() == MEASURED[0]
    assert not measured.timed
    monkeypatch.setenv("SOFTFOCUS_TUNE", "maybe")
    with pytest.raises(ValueError, match="SOFTFOCUS_TUNE=maybe is neither on nor off"):
        measured()


def test_a_captured_graph_runs_in_the_tile_that_was_measured_before(measured, monkeypatch):
    found = measured()
    assert found != MEASURED[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert measured() == found
    monkeypatch.setattr(tuning, "_known", {})
    assert measured() == found
    assert len(measured.timed) == 2


def test_nothing_is_remembered_where_nothing_could_be_measured(measured, monkeypatch):
    def full(call):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(tuning, "_time", full)
        assert measured() == MEASURED[0]
    assert measured() == TileShape(64, 64, 8, 2)


def test_another_length_is_no_other_kernel():
    """What is constant to the compiler, without pages, does not depend on how many keys there
    are.
    """
    from softfocus.backends.triton import inputs
    from softfocus.backends.triton.inputs import inputs_of

    def constants(length, pages=None):
        query, key = torch.ones(1, 1, 1, 8), torch.ones(1, 1, length, 8)
        call = functional.validated_call(query, key, key, mechanism="lssar")
        made = inputs_of(call._replace(cache=Cache(torch.tensor([length]), pages)))
        return [x.value for x in made if isinstance(x, type(inputs.END))]

    assert constants(1040) == constants(1056) != []
    assert constants(16, torch.tensor([[0]])) != constants(32, torch.tensor([[0]]))


def test_lengths_beyond_int32_are_clamped():
    """On a device nobody checks them: they must not wrap around into valid ones."""
    from softfocus.backends.triton.inputs import inputs_of

    query, key = torch.ones(3, 1, 1, 8), torch.ones(3, 1, 40, 8)
    call = functional.validated_call(query, key, key)
    for lengths, wanted in (([2**32 + 5, -(2**32) + 5, 7], [40, 0, 7]), ([41, 0, 39], [40, 0, 39])):
        given = inputs_of(call._replace(cache=Cache(torch.tensor(lengths), None))).lengths
        assert given.dtype == torch.int32
        assert given.tolist() == wanted


def test_unit_vectors_know_no_norms(quiet):
    """Powers of two in queries and keys change no bit of the output, and of gradients only the
    scale; zero vectors are fine.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 40, 16, generator=generator).to(DEVICE, BRAIN) for _ in range(4))
    query[:, :, 3], key[:, :, 5] = 0.0, 0.0
    results = []
    for scale in (1.0, 2.0**100):
        leaves = [x.requires_grad_() for x in (query * scale, key / scale, value.clone())]
        assert variants.takes_unit_vectors(functional.validated_call(*leaves, is_causal=True, mechanism="lssa"))
        out = fused(*leaves, is_causal=True, mechanism="lssa")
        grad_query, grad_key, grad_value = torch.autograd.grad(out, leaves, grad)
        results.append([out, grad_query * scale, grad_key / scale, grad_value])
    assert all(map(torch.equal, *results))
    assert all(x.isfinite().all() and x.any() for x in results[0])
    assert not results[0][1][:, :, 3].any()
    assert not results[0][2][:, :, 5].any()


@pytest.mark.parametrize("field", ["length_scale", "score_bias", "normaliser"])
def test_no_kernel_takes_a_value_that_it_does_not_know(field):
    from softfocus.backends.triton.call import Launcher

    query = torch.ones(1, 1, 9, 24, device=DEVICE)
    launcher = Launcher(functional.validated_call(query, query, query, mechanism="softmax"))
    launcher.algebra = launcher.algebra._replace(**{field: constexpr("another")})
    with pytest.raises(Exception) as caught:  # the compiler has its own, around the kernel.s
        launcher.forward()
    errors, error = [], caught.value
    while error is not None:
        errors, error = [*errors, str(error)], error.__cause__ or error.__context__
    assert any(f"{field} is not known" in text for text in errors)


def test_calls_of_a_layout_ask_once_what_is_compiled(monkeypatch):
    """And others, as of tensors that begin anywhere, do ask."""
    if knobs.runtime.interpret:
        pytest.skip("nothing is compiled in the interpreter")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 24, generator=generator).to(DEVICE, BRAIN) for _ in range(3))
    asked, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: asked.append(self.__name__) or run(self, *a, **k))

    def gradients(*tensors, **given):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = fused(*leaves, is_causal=True, **given)
        asked.clear()
        out = fused(*leaves, is_causal=True, **given)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    first = gradients(query, key, value)
    assert "forward" not in asked
    repeated = gradients(query, key, value)
    assert not asked
    away = []
    for x in (query, key, value):
        memory = x.new_empty(x.numel() + 1)[1:].view(x.shape)
        away.append(memory.copy_(x))
    fused(*away, is_causal=True)
    assert "forward" in asked
    for wanted, *got in zip(first, repeated, gradients(*away), strict=True):
        assert all(torch.equal(x, wanted) for x in got)
    with torch.no_grad():
        for length in (1, 40, 17):  # what is compiled does not depend on numbers
            lengths = torch.tensor([length], device=DEVICE)
            made = attention_with_cache(query[:, :, :1], key, value, lengths, backend="triton")
            wanted = fused(query[:, :, :1], key[:, :, :length], value[:, :, :length])
            torch.testing.assert_close(made, wanted, rtol=2.0**-6, atol=2.0**-6)


def test_what_is_ready_keeps_no_tensor(quiet):
    ops.runners.clear()
    query, key, value = (torch.randn(1, 1, 20, 8, device=DEVICE) for _ in range(3))
    alive = [weakref.ref(x) for x in (query, key, value)]
    with torch.no_grad():
        first = fused(query, key, value, mechanism="lssa")
        assert len(ops.runners) == 1
        assert torch.equal(fused(query, key, value, mechanism="lssa"), first)
    del query, key, value
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_calls_that_share_a_measurement():
    def key(length, **given):
        query = torch.ones(1, 2, length, 8)
        return tuning.measurement_key("forward", functional.validated_call(query, query, query, **given))

    assert key(65) == key(128, is_causal=False) == key(100)
    keys = [
        key(64),
        key(65),
        key(65, is_causal=True),
        key(65, bias=torch.ones(1, 1, 1, 65)),
        key(65, mechanism="lssa"),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.long
def test_two_runs_are_equal_to_the_bit(quiet):
    arguments = CASE["cache"].arguments(mechanisms()["lssar"].mechanism, SINGLE, device=DEVICE)
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    first, second = (torch.autograd.grad(fused(**arguments).sum(), leaves) for _ in range(2))
    assert all(map(torch.equal, first, second))


# What only a GPU can show. These had no time on the GPUs that we had


@pytest.fixture
def on_gpu(monkeypatch):
    if not GPU:
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("SOFTFOCUS_TUNE", "off")
    torch.use_deterministic_algorithms(False)  # or torch fills what it allocates, in the graph as well
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(2, 4, 300, 64, generator=generator, device="cuda", dtype=BRAIN) for _ in range(4)]


@pytest.mark.parametrize("name", ["softmax", "lssar", "laser"])
def test_forward_and_backward_in_a_cuda_graph(on_gpu, name):
    leaves, grad = [x.clone().requires_grad_() for x in on_gpu[:3]], on_gpu[3]

    def step():
        out = fused(*leaves, is_causal=True, mechanism=name)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    with torch.no_grad():
        for x in leaves:
            x.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(made, step(), strict=True))


def test_a_step_of_decoding_in_a_cuda_graph(on_gpu):
    """The lengths grow in the graph's own tensor."""
    query, key, value = (
        on_gpu[0][:, :, :1].clone(),
        *(x.repeat(1, 1, 14, 1) for x in on_gpu[1:3]),
    )  # enough keys to split
    lengths = torch.tensor([4000, 7], device="cuda")
    attention_with_cache(query, key, value, lengths, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = attention_with_cache(query, key, value, lengths, backend="triton")
    for _ in range(3):
        lengths += 50
        graph.replay()
        assert torch.equal(made, attention_with_cache(query, key, value, lengths, backend="triton"))


def test_the_host_never_waits_for_the_device(on_gpu):
    leaves = [x.clone().requires_grad_() for x in on_gpu[:3]]
    ids = torch.arange(300, device="cuda").expand(2, -1) // 70
    lengths = torch.tensor([100, 7], device="cuda")
    for attempt in range(2):  # compilers may
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            for given in ({}, {"document_ids": ids}, {"key_mask": ids > 0}, {"mechanism": "laser"}):
                out = fused(*leaves, is_causal=True, **given)
                torch.autograd.grad(out, leaves, on_gpu[3])
            with torch.no_grad():
                attention_with_cache(leaves[0][:, :, :1], *leaves[1:], lengths, backend="triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_compiled_whole_on_a_gpu(on_gpu):
    leaves, grad = [x.clone().requires_grad_() for x in on_gpu[:3]], on_gpu[3]
    plain = torch.autograd.grad(fused(*leaves, is_causal=True), leaves, grad)
    compiled = torch.compile(fused, fullgraph=True)
    assert all(map(torch.equal, torch.autograd.grad(compiled(*leaves, is_causal=True), leaves, grad), plain))


def test_one_table_of_what_is_supported(monkeypatch):
    """Both kinds of kernels support the same names. The reference's and the catalogue's are these
    and what is not supported.
    """
    from softfocus.backends.triton.kernels.pointwise import PHI

    monkeypatch.delenv("SOFTFOCUS_KERNELS", raising=False)  # off would be a reason of its own
    assert tuple(PHI) == triton.SUPPORTED.phi == cpu.SUPPORTED.phi
    assert set(CHOICES["phi"]) == set(POINTWISE) == set(FUSED) | set(SIGNED_PHI)
    drawn = [Mechanism(**{field: choice}) for field in CHOICES for choice in CHOICES[field] if field != "phi"]
    drawn += [Mechanism(phi=phi, normaliser=normaliser) for phi in POINTWISE for normaliser in CHOICES["normaliser"]]
    drawn += [Mechanism(phi=phi, laser=True) for phi in FUSED] + [Mechanism(phi=phi, power=15.0) for phi in FUSED]
    query = torch.ones(1, 1, 4, 8, device=DEVICE)
    supported = set()
    for mechanism in [*drawn, *(entry.mechanism for entry in mechanisms().values())]:
        calls = [functional.validated_call(x, x, x, mechanism=mechanism) for x in (query.cpu(), query)]
        whys = [dispatch.why_unsupported(name, call) for name, call in zip(("cpu", "triton"), calls, strict=True)]
        assert (whys[0] is None) == (whys[1] is None), (mechanism, whys)
        assert (whys[0] is None) == (mechanism.phi in FUSED and mechanism.post == "none"), (mechanism, whys)
        assert attention(query, query, query, mechanism=mechanism, backend="reference").isfinite().all()
        supported |= {(field, getattr(mechanism, field)) for field in CHOICES} if whys[0] is None else set()
    missed = {("phi", phi) for phi in SIGNED_PHI} | {("post", post) for post in CHOICES["post"] if post != "none"}
    assert supported == {(field, choice) for field in CHOICES for choice in CHOICES[field]} - missed


def test_auto_takes_them_where_the_environment_says_so(monkeypatch):
    monkeypatch.setattr(cpu, "refuses", lambda call, to_run: "not here")
    refuses = triton.refuses
    query = torch.ones(1, 1, 4, 8, device=DEVICE)
    for interpreted, setting, chosen in (
        ("1", "", "tiled"), ("1", "off", "tiled"), ("1", "on", "triton"), ("0", "", "triton"), ("0", "off", "tiled")
    ):  # fmt: skip
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        monkeypatch.setenv("SOFTFOCUS_TRITON", setting)
        if interpreted == "0" and not GPU:  # as on a GPU
            monkeypatch.setattr(triton, "refuses", lambda call, to_run: None)
        assert explain(query, query, query).backend == chosen
    if not GPU:
        monkeypatch.setattr(triton, "refuses", refuses)
    wide = torch.ones(1, 1, 4, 264, device=DEVICE)
    assert explain(wide, wide, wide).backend == "tiled"
    monkeypatch.setenv("SOFTFOCUS_TRITON", "perhaps")
    with pytest.raises(ValueError, match="SOFTFOCUS_TRITON=perhaps is neither on, off nor trusted"):
        explain(query, query, query)


def test_what_is_not_carried_is_said(monkeypatch):
    query = torch.randn(1, 1, 4, 8, device=DEVICE)
    for given, reason in (
        ({"mechanism": "softmax_negated"}, "post='negate'"),
        ({"mechanism": "gelu_l1"}, "phi='gelu'"),
    ):
        assert reason in explain(query, query, query, **given).reasons["triton"]
    assert ("by name" in explain(query, query, query).reasons["triton"]) is not GPU
    many = torch.randn(65536, 1, 1, 8, device=DEVICE)
    assert "65536 heads" in explain(many, many, many).reasons["triton"]
    wide = torch.randn(1, 1, 4, 264, device=DEVICE)
    assert "264 dimensions" in explain(wide, wide, wide).reasons["triton"]
    with FakeTensorMode():
        far = torch.empty_strided((1, 1, 2, 8), (2**32, 2**32, 2**31, 1), device=DEVICE)
        assert "a head of query spans 2^31" in explain(far, far, far).reasons["triton"]
        # Each input is within 2^31 elements, but out, or the gradient of an expanded key, is not
        query, key = (torch.empty(1, 1, length, 64, device=DEVICE) for length in (2**23, 4))
        wide, repeated = torch.empty(1, 1, 4, 256, device=DEVICE), key[:, :, :1].expand(1, 1, 2**25, 64)
        for inputs, rows in (((query, key, wide), "8388608 rows of 256"), ((key, repeated, repeated), "33554432 rows")):
            assert rows in explain(*inputs).reasons["triton"]
            assert "2^31" not in explain(*(x[:, :, :-1] for x in inputs)).reasons["triton"]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "not on 'cuda'" in explain(query.cpu(), query.cpu(), query.cpu()).reasons["triton"]


WITHOUT = """
import importlib.abc, sys
class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError(name)
sys.meta_path.insert(0, Nothing())
import torch, softfocus
q = torch.ones(1, 1, 2, 2)
softfocus.attention(q, q, q)
print(softfocus.explain(q, q, q))
"""


@pytest.mark.long
def test_nothing_else_needs_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ran = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300, check=True)
    assert "triton: the tensors are on 'cpu'" in ran.stdout
