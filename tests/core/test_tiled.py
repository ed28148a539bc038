"""The tiled backend against the float64 reference: the whole catalogue, every case, four dtypes, computed tolerances."""

from functools import partial

import pytest
import torch

import softfocus
from softfocus.testing import CASES, Case, check

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
tiled = partial(softfocus.attention, backend="tiled")


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch.empty comes filled with NaN, so that what is never written fails."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_parity_float32(mechanism, case):
    check(tiled, case, mechanism, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_parity_other_dtypes(mechanism, dtype):
    for case in CASES:
        if case.name in ("causal", "mask and grouped", "learned", "cache"):
            check(tiled, case, mechanism, dtype)


def test_poison_is_real():
    assert torch.empty(8).isnan().all()


def test_a_wrong_result_is_caught():
    def off(**arguments):
        return tiled(**arguments) * (1 + 1e-4)

    with pytest.raises(AssertionError, match="out is off by"):
        check(off, CASES[0], "lssa", torch.float32)


def test_a_wrong_gradient_is_caught():
    def off(query, **arguments):
        return tiled(query=query + 1e-4 * (query - query.detach()), **arguments)

    with pytest.raises(AssertionError, match=r"query.grad is off by"):
        check(off, CASES[0], "lssa", torch.float32)


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
    from softfocus.backends import tiles as backend

    monkeypatch.setattr(backend, "TILE_ROWS", rows)
    monkeypatch.setattr(backend, "TILE_ELEMENTS", elements)
    case = Case("cut", batch=3, heads=6, key_heads=3, query_length=33, key_length=47, mask=0.3)
    for mechanism in ("lssar", "laser", "sigmoid_log_n"):
        check(tiled, case, mechanism, torch.float64)


def test_memory_grows_with_the_length_not_its_square():
    """The largest tensor alive inside a forward and backward stays within a few tiles and a few inputs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else [result]:
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.untyped_storage().nbytes())
            return result

    from softfocus.backends import tiles as backend

    length = 4096
    query, key, value = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        softfocus.attention(query, key, value, is_causal=True, mechanism="lssar").sum().backward()
    assert 0 < largest.size <= 4 * max(backend.TILE_ELEMENTS, backend.TILE_ROWS * length, query.numel())
