"""A call like one before is not checked again: the same bits must come, and whatever makes it
another call must be noticed.
"""

import inspect
import os
import signal
import sys
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import softfocus
from softfocus import ops

pytestmark = pytest.mark.kernels
NAMES = ("query", "key", "value")


@pytest.fixture(autouse=True)
def nothing_ready():
    ops.runners.clear()
    yield
    ops.runners.clear()


def tensors(dtype=torch.float32, seed=0, heads=2, length=9, queries=9, width=8, value_width=5):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, queries, width), (2, 2, length, width), (2, 2, length, value_width))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def fresh(*arguments, **keywords):
    ops.runners.clear()
    return softfocus.attention(*arguments, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_gives_the_same_bits(dtype):
    for seed in range(3):
        given = tensors(dtype, seed)
        second = softfocus.attention(*given)
        assert len(ops.runners) == 1
        assert second.dtype == dtype
        runners = dict(ops.runners)
        assert torch.equal(second, fresh(*given))
        ops.runners.update(runners)


OTHER_VALUES = {
    "attn_mask": torch.ones(9, 9, dtype=torch.bool).tril(),
    "dropout_p": 0.5,
    "is_causal": True,
    "scale": 2.0,
    "enable_gqa": True,
    "mechanism": "softmax",
    "window_size": (2, 0),
    "key_mask": torch.ones(2, 9, dtype=torch.bool),
    "document_ids": torch.zeros(2, 9, dtype=torch.int64),
    "bias": torch.ones(9, 9),
    "head_scale": torch.ones(2),
    "power": torch.full((2,), 3.0),
    "return_statistics": True,
    "backend": "tiled",
}


def test_every_argument_has_another_value():
    assert set(OTHER_VALUES) | set(NAMES) == set(inspect.signature(softfocus.attention).parameters)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_no_argument_passes_for_the_call_without_it(name):
    """The stored call must not run for a call that differs from it in one argument."""

    def stored(*_tensors):
        raise AssertionError(f"{name} was ignored")

    given = tensors()
    softfocus.attention(*given)
    ops.runners.update(dict.fromkeys(ops.runners, stored))
    with pytest.raises(AssertionError, match="was ignored"):
        softfocus.attention(*given)
    softfocus.attention(*given, **{name: OTHER_VALUES[name]})


def test_one_call_after_another():
    """Every argument that makes it another call, and back again."""
    given = tensors(heads=4)
    calls = [
        {"enable_gqa": True} | more
        for more in (
            {}, {"is_causal": True}, {"scale": 2.0}, {"mechanism": "softmax"}, {"mechanism": softfocus.named("laser")},
            {"window_size": (2, 0)}, {"window_size": (3, 0)}, {"window_size": [3, 0]}, {"backend": "tiled"},
    {"backend": "cpu"},
            {"backend": "reference"}, {"mechanism": "lssar", "is_causal": True, "scale": 2.0},
        )
    ]  # fmt: skip
    want = [fresh(*given, **call) for call in calls]
    ops.runners.clear()
    for _ in range(2):
        for call, out in zip(calls, want, strict=True):
            assert torch.equal(softfocus.attention(*given, **call), out), call
    assert 5 < len(ops.runners) < len(calls)


def test_other_strides_of_the_same_shapes():
    given = tensors(length=8, width=8, value_width=8, queries=8)
    softfocus.attention(*given)
    for i in range(3):
        turned = list(given)
        turned[i] = given[i].mT.contiguous().mT
        assert torch.equal(softfocus.attention(*turned), fresh(*turned))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_wrong_is_still_said(name):
    softfocus.attention(*tensors())
    given = dict(zip(NAMES, tensors(), strict=True))
    for wrong, error in (
        (given[name].double(), TypeError),
        (given[name][0], ValueError),
        (None, TypeError),
        (given[name].numpy(), TypeError),
        (given[name].to("meta"), ValueError),
    ):
        with pytest.raises(error):
            softfocus.attention(**{**given, name: wrong})
    for wrong in (
        {"mechanism": []}, {"scale": []}, {"scale": True}, {"window_size": (True, 1)},
        {"dropout_p": None}, {"dropout_p": False},
    ):  # fmt: skip
        softfocus.attention(**given, scale=1.0)
        softfocus.attention(**given, window_size=(1, 1))
        with pytest.raises((TypeError, ValueError)):
            softfocus.attention(**given, **wrong)


def test_grouped_heads_are_asked_for_each_time():
    query, key = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    softfocus.attention(query, key, key, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        softfocus.attention(query, key, key)


def test_a_flag_that_changes_is_looked_at():
    given, flag = tensors(), torch.tensor(True)
    first = softfocus.attention(*given, is_causal=flag)
    assert torch.equal(first, fresh(*given, is_causal=True))
    flag.fill_(False)
    assert torch.equal(softfocus.attention(*given, is_causal=flag), fresh(*given))
    assert len(ops.runners) == 1


SEEN = torch.ones(9, 9, dtype=torch.bool).tril()


@pytest.mark.parametrize("mask", [{}, {"attn_mask": SEEN}], ids=["plain", "mask"])
def test_a_lazy_negation(mask):
    query, key, value = tensors()
    negative = torch.complex(torch.zeros_like(query), query).conj().imag
    assert negative.is_neg()
    for _ in range(2):
        out = softfocus.attention(negative, key, value, **mask)
        assert torch.equal(out, softfocus.attention(-query, key, value, **mask))


@pytest.mark.parametrize("mask", [{}, {"attn_mask": SEEN}], ids=["plain", "mask"])
def test_zeros_without_memory(mask):
    query, key, value = tensors()
    zeros = torch._efficientzerotensor(query.shape)
    softfocus.attention(torch.zeros_like(query), key, value, **mask)
    want = softfocus.attention(torch.zeros_like(query), key, value, **mask)
    assert torch.equal(softfocus.attention(zeros, key, value, **mask), want)


@pytest.mark.parametrize("mask", [{}, {"attn_mask": SEEN}], ids=["plain", "mask"])
def test_forward_mode_is_not_dropped_in_silence(mask):
    query, key, value = tensors()
    softfocus.attention(query, key, value, **mask)
    with forward_ad.dual_level():
        softfocus.attention(query, key, value, **mask)
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotImplementedError, match="backend='reference'"):
            softfocus.attention(dual, key, value, **mask)
        out = softfocus.attention(dual, key, value, backend="reference", **mask)
        assert forward_ad.unpack_dual(out).tangent is not None


@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_forward_mode_is_not_dropped_by_compiled_code(backend):
    query, key, value = tensors()
    attend = partial(softfocus.attention, key=key, value=value, backend=backend)
    compiled = torch.compile(attend, backend="aot_eager")
    exported = torch.export.export(Attends(key, value, backend), (query,)).module()
    for run in (compiled, exported):
        torch.testing.assert_close(run(query), attend(query))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="backend='reference'"):
            run(forward_ad.make_dual(query, torch.ones_like(query)))

    def tangent(query):
        return torch.func.jvp(attend, (query,), (torch.ones_like(query),))[1]

    with pytest.raises(Exception, match=r"backend='reference'|NotImplementedError"):
        torch.compile(tangent, backend="aot_eager", fullgraph=True)(query)


class Attends(torch.nn.Module):
    def __init__(self, key, value, backend):
        super().__init__()
        self.key, self.value, self.backend = key, value, backend

    def forward(self, query):
        return softfocus.attention(query, self.key, self.value, backend=self.backend)


def test_a_profiler_sees_every_call():
    given = tensors()
    softfocus.attention(*given)
    with torch.profiler.profile() as profile:
        softfocus.attention(*given)
    assert any(event.key == "softfocus::attend" for event in profile.key_averages())


@pytest.mark.parametrize("window", [(sys.maxsize, 0), (0, sys.maxsize), (2**62, 2**62), (2**70, 3)])
@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_a_window_wider_than_an_integer(window, backend):
    given = tensors()
    narrow = tuple(min(n, 9) for n in window)
    want = softfocus.attention(*given, window_size=narrow, backend=backend)
    assert torch.equal(softfocus.attention(*given, window_size=window, backend=backend), want)


def test_gradients_are_recorded():
    query, key, value = tensors()
    softfocus.attention(query, key, value)
    value.requires_grad_()
    softfocus.attention(query, key, value).sum().backward()
    assert value.grad.abs().sum() > 0
    with torch.no_grad():
        assert not softfocus.attention(query, key, value).requires_grad


def test_optional_tensors_count():
    query, key, value = tensors()
    plain = softfocus.attention(query, key, value)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    for optional in (
        {"attn_mask": mask},
        {"key_mask": torch.arange(9).expand(2, 9) < 5},
        {"document_ids": (torch.arange(9) // 4).expand(2, 9)},
        {"bias": torch.randn(9, 9)},
        {"head_scale": torch.tensor([2.0, 0.5])},
        {"power": torch.tensor([2.0, 3.0])},
    ):
        assert not torch.equal(softfocus.attention(query, key, value, **optional), plain), optional
    _, statistics = softfocus.attention(query, key, value, return_statistics=True)
    assert statistics.count.eq(9).all()


def test_the_defaults_of_torch_do_not_matter():
    given = tensors()
    want = softfocus.attention(*given)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            for out in (softfocus.attention(*given), fresh(*given)):
                assert out.dtype == torch.float32
                assert torch.equal(out, want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast_and_modes_see_every_call():
    given = tensors()
    softfocus.attention(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert softfocus.attention(*given).dtype == torch.bfloat16
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        softfocus.attention(*given)
    assert seen == ["softfocus.attend.default"]


def test_the_number_of_threads_is_the_one_of_the_call(threads):
    given = tensors(length=200, queries=200)
    outs = []
    for number in (1, 2, 1):
        threads(number)
        outs.append(softfocus.attention(*given))
    assert torch.equal(outs[0], outs[1])
    assert len(ops.runners) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_anew(threads):
    """On one thread: OpenMP's others stay with the parent."""
    threads(2)
    given = tensors(length=300, queries=300)
    want = softfocus.attention(*given)
    child = os.fork()
    if not child:
        signal.alarm(60)  # a child that waits for threads it does not have dies
        good = False
        try:
            good = not ops.runners and torch.equal(softfocus.attention(*given), want)
        finally:
            os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_more_are_kept_than_fit(monkeypatch):
    monkeypatch.setattr(ops, "MAX_RUNNERS", 4)
    for length in range(1, 20):
        softfocus.attention(*tensors(length=length))
        assert len(ops.runners) <= 4
