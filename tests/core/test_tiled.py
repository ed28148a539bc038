"""The tiled backend against the float64 reference: the whole catalogue, every case, float32 and
another dtype; and what is its own.
"""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import softfocus
from softfocus.backends import tiled as backend
from softfocus.backends import tiles
from softfocus.contract import Call
from softfocus.testing import CASES, Case, Outcome, check, compare
from softfocus.visibility import Visibility

COMBINATIONS = (
    "laser(relu_l1)",
    "laser(sharpened(sigmoid_l1, 3))",
    "laser(ssmax)",
    "sharpened(relu_l1, 2.5)",
    "sharpened(softplus_l1, 1)",
    "sharpened(lssa, 100)",
)
ALIASES = ("scenario_iv", "exp_l1", "relu_li")  # equal to another entry
MECHANISMS = [name for name in softfocus.mechanisms() if name not in ALIASES] + list(COMBINATIONS)
OTHERS = (torch.float64, torch.bfloat16, torch.float16)
tiled = partial(softfocus.attention, backend="tiled")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
either = pytest.mark.parametrize("backend", ["tiled", "cpu"])


@pytest.mark.parametrize(
    ("mechanism", "dtype"),
    # Every mechanism makes the same torch calls in all dtypes: another one in turn, all for three
    [
        (name, dtype)
        for n, name in enumerate(MECHANISMS)
        for dtype in (torch.float32, *(OTHERS if name in ("softmax", "lssar", "laser") else OTHERS[n % 3 : n % 3 + 1]))
    ],
    ids=str,
)
def test_parity(holds, mechanism, dtype):
    for case in CASES:
        # The differences of nearly equal weights: their largest error has a heavy tail
        ill = case.name == "tiny scores" and mechanism == "sharpened(softplus_l1, 1)"
        (holds if ill else check)(tiled, case, mechanism, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_parity_on_a_gpu(mechanism, dtype):
    for case in CASES:
        check(tiled, case, mechanism, dtype, device="cuda")


def test_poison_is_real():
    assert torch.empty(8).isnan().all()


def test_a_wrong_result_is_caught():
    def off(**arguments):
        return tiled(**arguments) * (1 + 1e-4)

    with pytest.raises(AssertionError, match="out is off by"):
        check(off, CASES[0], "lssa", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_dtype_is_caught(dtype):
    """It would set its own tolerance."""
    with pytest.raises(AssertionError, match=r"out has dtype torch\.float64, expected the query's"):
        check(lambda **arguments: tiled(**arguments).double(), CASES[0], "lssa", dtype)


def test_a_wrong_gradient_is_caught():
    def off(query, **arguments):
        return tiled(query=query + 1e-4 * (query - query.detach()), **arguments)

    with pytest.raises(AssertionError, match=r"query.grad is off by"):
        check(off, CASES[0], "lssa", torch.float32)


@pytest.mark.parametrize("lost", ["query", "all"])
def test_a_missing_gradient_is_caught(lost):
    def without(query, **arguments):
        out = tiled(query=query.detach(), **arguments)
        return out.detach() if lost == "all" else out

    with pytest.raises(AssertionError, match=r"query\.grad: there is none"):
        check(without, CASES[0], "lssa", torch.float32)


@pytest.mark.parametrize(
    ("dtype", "summed", "ulp"),
    [
        (torch.float16, 0.0, 2.0**-24),  # the smallest number
        (torch.float32, 3.0, 3 * 2.0**-23),
        (torch.bfloat16, 3.0, 3 * 2.0**-23),  # the terms are float32's
        (torch.float64, 3.0, 3 * 2.0**-52),
    ],
    ids=str,
)
def test_where_everything_cancels_four_units_of_the_terms_are_left(dtype, summed, ulp):
    """The result is 0, and the eager formula gives just that."""
    nothing = Outcome({"query.grad": torch.zeros(3, dtype=torch.float64)})
    given = nothing, {"query.grad": 0.0}, {"query.grad": 0.0}, "case", {"query.grad": summed}
    compare(Outcome({"query.grad": torch.tensor([0.0, -3 * ulp, 3 * ulp], dtype=dtype)}), *given)
    with pytest.raises(AssertionError, match="off by"):
        compare(Outcome({"query.grad": torch.tensor([0.0, 0.0, 5 * ulp], dtype=dtype)}), *given)


def test_a_nan_is_caught():
    def off(**arguments):
        return tiled(**arguments) * float("nan")

    with pytest.raises(AssertionError, match="off by inf"):
        check(off, CASES[0], "lssa", torch.float32)


@pytest.mark.parametrize("mechanism", ["softmax", "lssar", "laser_lssar", "relu_l1"])
def test_statistics_equal_the_reference(mechanism):
    for case in CASES:
        arguments = case.arguments(softfocus.named(mechanism), torch.float64)
        _, got = softfocus.attention(**arguments, backend="tiled", return_statistics=True)
        _, want = softfocus.attention(**arguments, backend="reference", return_statistics=True)
        for name, a, b in zip(got._fields, got, want, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=name, c=case: f"{c.name}: {n}: {m}"
            )


@pytest.mark.parametrize(("rows", "elements"), [(5, 1), (7, 2000), (33, 10**9)])
def test_tiles_may_be_cut_anywhere(monkeypatch, rows, elements):
    monkeypatch.setattr(tiles, "TILE_ROWS", rows)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", elements)
    case = Case("cut", batch=3, heads=6, key_heads=3, query_length=33, key_length=47, mask=0.3)
    for mechanism in ("lssar", "laser", "sigmoid_log_n"):
        check(tiled, case, mechanism, torch.float64)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes())
        return result


LENGTH = 1024
MASKS = {
    "causal": {"right": 0},
    "full": {},
    "window": {"left": 100, "right": 0},
    "key mask": {"key_mask": torch.arange(LENGTH).expand(2, -1) > 300},
    "documents": {"document_ids": (torch.arange(LENGTH) // 700).expand(2, -1), "right": 0},
}


def largest_inside(mechanism, visibility, forward=backend.forward):
    """Bytes of the largest tensor inside a forward and a backward, called directly: a mode sees
    nothing inside an operator.
    """
    query = torch.randn(2, 4, LENGTH, 8)
    key, value = (torch.randn(2, 2, LENGTH, 8) for _ in range(2))
    call = Call(query, key, value, visibility, softfocus.named(mechanism), 0.3, head_scale=torch.ones(4))
    with Largest() as largest:
        out, _ = forward(call)
        backend.backward(call, torch.ones_like(out), False)
    return largest.size


@pytest.mark.parametrize("mechanism", ["softmax", "lssar", "laser", "laser_lssar"])
@pytest.mark.parametrize("mask", MASKS)
def test_memory_grows_with_the_length_not_its_square(mask, mechanism):
    tile = 2 * tiles.TILE_ROWS * LENGTH * 4  # the two query heads of one key head, in float32
    assert (
        0 < largest_inside(mechanism, Visibility(LENGTH, LENGTH, **MASKS[mask])) <= max(tile, 4 * tiles.TILE_ELEMENTS)
    )


def test_a_dense_forward_would_be_noticed():
    def dense(call):
        (call.query @ call.key.repeat_interleave(2, 1).mT).softmax(-1)
        return backend.forward(call)

    assert largest_inside("softmax", Visibility(LENGTH, LENGTH), dense) >= 4 * LENGTH * LENGTH


@pytest.mark.parametrize("window", [(0, -1), (-1, 0), (3, 200), (900, 900)])
def test_the_rows_that_see_the_most_set_the_size_of_all_tiles(window):
    """The first rows, the last, or those between them."""
    query, key, value = (torch.randn(1, 64, 1024, 2) for _ in range(3))
    call = Call(query, key, value, Visibility(1024, 1024, *window), softfocus.named("softmax"), 0.5)
    sizes = [
        (tile.keys.stop - tile.keys.start) * tile.query.shape[:3].numel()
        for chunk in tiles.chunks(call)
        for tile in chunk.tiles()
    ]
    assert max(sizes) <= tiles.TILE_ELEMENTS


@pytest.mark.parametrize("name", ["head_scale", "bias"])
def test_sums_over_many_tiles_are_kept_in_double(name):
    """Terms of one sign: each sum is one of 3,000 tiles."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.rand(1, 1, n, 8, generator=generator) for n in (200_000, 4, 4))
    shape = {"head_scale": (1,), "bias": (1, 1, 1, 1)}[name]

    def gradient(dtype, backend):
        leaf = torch.ones(shape, dtype=dtype, requires_grad=True)
        inputs = [x.to(dtype) for x in (query, key, value)]
        out = softfocus.attention(*inputs, mechanism="sigmoid_log_l", backend=backend, **{name: leaf})
        return torch.autograd.grad(out.sum(), leaf)[0].double()

    exact = gradient(torch.float64, "reference")
    torch.testing.assert_close(gradient(torch.float32, "tiled"), exact, rtol=4 * 2**-23, atol=0)


def test_long_rows_make_thin_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "MAX_TILE_ELEMENTS", 8 * 256)
    query, key, value = (torch.randn(1, 2, 256, 4) for _ in range(3))
    for chunk in tiles.chunks(Call(query, key, value, Visibility(256, 256), softfocus.named("softmax"), 0.5)):
        assert {tile.rows.stop - tile.rows.start for tile in chunk.tiles()} == {8}


@either
def test_lasers_exact_sums_are_deterministic_with_threads(threads, backend):
    """Values 400 apart take the path that is not a product; with index_put_ or index_add_ its sums
    came in any order.
    """
    torch.use_deterministic_algorithms(False)
    threads(2)
    query, key, value = (torch.randn(1, 2, 512, 16) for _ in range(3))
    leaves = [query.requires_grad_(), key.requires_grad_(), (value * 200).requires_grad_()]
    grads = [
        torch.autograd.grad(softfocus.attention(*leaves, mechanism="laser", backend=backend).square().sum(), leaves)
        for _ in range(6)
    ]
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


@pytest.mark.parametrize(("backend", "dtype"), [("tiled", torch.float64), ("cpu", torch.float32)])
@pytest.mark.parametrize("learned", [0.0, -1.0, 0.5])
def test_a_learned_power_may_go_astray_and_stays_causal(learned, backend, dtype):
    query, key = (torch.randn(1, 2, 9, 4, dtype=dtype) for _ in range(2))
    value = torch.zeros(1, 2, 9, 4, dtype=dtype)
    value[:, :, -1] = 1.0
    power = torch.full((2,), learned, dtype=dtype)
    got, want = (
        softfocus.attention(query, key, value, is_causal=True, mechanism="lssar", power=power, backend=name)
        for name in (backend, "reference")
    )
    assert (got[:, :, :-1] == 0).all()
    if dtype == torch.float64:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    else:
        assert got.isfinite().all()


@either
def test_a_score_that_overflows_poisons_no_key_that_it_cannot_see(backend):
    query, key = torch.randn(1, 1, 4, 4), torch.rand(1, 1, 4, 4) * 1e20
    query[0, 0, 0] = 1e20  # a score of +inf
    value = torch.randn(1, 1, 4, 4, requires_grad=True)
    out = softfocus.attention(query, key, value, is_causal=True, mechanism="softmax", backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), value)
    assert out[0, 0, 0].isnan().all()
    assert grad[0, 0, 1:].isfinite().all()


@either
@pytest.mark.parametrize("mask", ["key_mask", "attn_mask"])
def test_padding_with_nan_under_grouped_queries_and_broadcast_masks(mask, backend):
    attention = partial(softfocus.attention, enable_gqa=True, backend=backend)
    query = torch.randn(1, 4, 6, 8)
    key, value = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    real = torch.arange(6) < 5
    clean = attention(query, key[:, :, :5], value[:, :, :5])
    key[:, :, 5], value[:, :, 5] = float("nan"), float("inf")
    given = {"key_mask": real[None]} if mask == "key_mask" else {"attn_mask": real[None, None, None]}
    torch.testing.assert_close(attention(query, key, value, **given), clean)
    rows = torch.arange(6)[:, None] > 2  # [Lq, 1]
    seen = attention(query, key, value, attn_mask=rows)
    assert (seen[:, :, :3] == 0).all()
    assert seen[:, :, 3:].isnan().all()
