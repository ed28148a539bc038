"""Calls that "auto" gives to the Triton kernels: the first of each kind is compared with the tiled
backend.

On a GPU where there is one, elsewhere under Triton's interpreter.
"""

import math
import warnings
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from softfocus import attention, attention_with_cache, explain, named
from softfocus.backends import checked, cpu, tiled, triton
from softfocus.functional import validated_call
from softfocus.testing import CASES

pytest.importorskip("triton", reason="Triton is not installed")
from triton import knobs

from softfocus.backends.triton import call as triton_call
from softfocus.backends.triton import inputs, variants
from softfocus.backends.triton.call import splits_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []
CALL = {"is_causal": True, "enable_gqa": True, "mechanism": "lssar"}


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Nothing has been seen of the Triton kernels, which "auto" takes. (The interpreter speaks of
    every infinity.)
    """
    import numpy

    monkeypatch.setenv("SOFTFOCUS_TRITON", "on")
    monkeypatch.setattr(cpu, "refuses", lambda call, to_run: "not here")
    monkeypatch.setattr(checked, "_verdicts", {})
    with numpy.errstate(all="ignore"):
        yield


@pytest.fixture
def calls(monkeypatch):
    """The backend that the check sees in place of Triton's, which counts its calls and can be made
    wrong: ``calls.spoil`` is a function of what a direction returned.
    """
    spy = SimpleNamespace(forward=0, backward=0, spoil={})

    def counted(direction):
        def run(*arguments):
            setattr(spy, direction, getattr(spy, direction) + 1)
            return spy.spoil.get(direction, lambda result: result)(getattr(triton, direction)(*arguments))

        return run

    kernels = {direction: counted(direction) for direction in ("forward", "backward")}
    monkeypatch.setattr(
        checked,
        "triton",
        SimpleNamespace(**kernels, runner=triton.runner, splits_keys=triton.splits_keys),
    )
    return spy


def tensors(dtype=torch.float32, queries=20, keys=20):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 2, queries, 16), (2, 1, keys, 16), (2, 1, keys, 16)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def results(backend, leaves, **call):
    out = attention(*leaves, **{**CALL, **call}, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, above(out))]


def above(out):
    """A gradient of an output that depends on nothing that a backend computes."""
    return torch.arange(out.numel(), device=out.device).cos().view(out.shape).to(out)


def equal(some, others):
    return all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


def ours(warned):
    """The warnings that are not the interpreter's (of Triton 3.6, where numpy is newer)."""
    return [one for one in warned if str(one.message).startswith("softfocus")]


def largest_off(result):
    """The largest number of a result is off by a tenth: beyond rounding in each dtype, and not to
    be seen by eye.
    """
    out = result[0] if isinstance(result, tuple) else result
    out.view(-1)[out.abs().argmax()] *= 1.1
    return result


def keys_off(result):
    largest_off(result["key"])
    return result


ALL = list(product([case.name for case in CASES], ["softmax", "lssar", "laser"], [torch.float32, torch.bfloat16]))
QUICK = [
    ("grouped", "lssar", torch.float32),
    ("decode", "laser", torch.float32),
    ("row bias", "softmax", torch.bfloat16),
    ("learned", "lssar", torch.bfloat16),
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "name", "dtype"), QUICK, ids=lambda x: str(x).removeprefix("torch."))
def test_right_kernels_raise_no_alarm(case, name, dtype, monkeypatch):
    raises_no_alarm(case, name, dtype, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name", "dtype"), ALL, ids=lambda x: str(x).removeprefix("torch."))
def test_right_kernels_raise_no_alarm_anywhere(case, name, dtype, monkeypatch):
    raises_no_alarm(case, name, dtype, monkeypatch)


def raises_no_alarm(case, name, dtype, monkeypatch):
    if dtype == torch.bfloat16 and knobs.runtime.interpret:
        monkeypatch.setattr(checked, "ROUNDING", 1.0)  # the interpreter truncates to bfloat16
    case = next(one for one in CASES if one.name == case)
    case = replace(case, query_length=min(case.query_length, 20), key_length=min(case.key_length, 20))
    arguments = case.arguments(named(name), dtype, device=DEVICE)
    leaves = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="softfocus")
        for backend in ("auto", "triton"):
            torch.manual_seed(0)  # of dropout
            out = attention(**arguments, backend=backend)
            found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert list(checked._verdicts.values()) == [None, None]
    assert equal(*found)


@pytest.mark.long
def test_a_kind_is_looked_into_once(calls):
    """Neither another length nor other numbers make another kind; another mechanism and another
    head do.
    """
    for length in (36, 40, 36):
        results("auto", tensors(keys=length, queries=length))
    assert (calls.forward, calls.backward) == (1 + 3 + 1, 1 + 3)  # to look: one forward, and one of each to go back
    assert len(checked._verdicts) == 2
    results("auto", tensors(), mechanism="softmax")
    assert len(checked._verdicts) == 4


@pytest.mark.long
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_kernel_gives_way_to_the_tiled_backend(calls, direction, dtype):
    leaves = tensors(dtype)
    right = results("tiled", leaves)
    calls.spoil[direction] = largest_off if direction == "forward" else keys_off
    with pytest.warns(RuntimeWarning, match="not taken for .* off by") as warned:
        found = results("auto", leaves)
    assert len(ours(warned)) == 1
    assert equal(found[1:], right[1:])
    assert equal(found[:1], right[:1] if direction == "forward" else results("triton", leaves)[:1])
    explanation = explain(*leaves, **CALL)
    assert explanation.backend == "tiled"
    assert "off by" in explanation.reasons["triton"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="softfocus")
        assert equal(results("auto", leaves), right)
        calls.spoil.clear()
        assert equal(results("auto", leaves, mechanism="lssa"), results("triton", leaves, mechanism="lssa"))


@pytest.mark.long
def test_a_kernel_that_does_not_compile_gives_way(calls):
    def no_compiler(result):
        raise RuntimeError("ptxas died\nof something")

    calls.spoil["forward"] = no_compiler
    leaves = tensors()
    with pytest.warns(RuntimeWarning, match=r"they do not run here \(RuntimeError: ptxas died\)"):
        assert equal(results("auto", leaves), results("tiled", leaves))


def test_keys_far_from_zero_raise_no_alarm():
    """The sum of dL/ds k cancels: its own size says nothing of the rounding of dL/ds."""
    query, key, value = (x.detach() for x in tensors(torch.bfloat16))
    key[..., :4] += 200
    results("auto", [x.requires_grad_() for x in (query, key, value)], mechanism="softmax")
    assert list(checked._verdicts.values()) == [None, None]


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_value_that_is_not_finite_raises_no_alarm(number):
    """The kernels make gradients of rows that see it NaN, and the tiled backend leaves it out."""
    query, key, value = (x.detach() for x in tensors())
    value[0, 0, 2, 3] = number
    leaves = [x.requires_grad_() for x in (query, key, value)]
    results("auto", leaves, mechanism="softmax")
    assert list(checked._verdicts.values()) == [None, None]


def test_short_memory_is_not_the_kernels_fault(calls, monkeypatch):
    """Nothing is remembered: a later call is compared."""

    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    leaves = [x.detach() for x in tensors()]
    with monkeypatch.context() as patch:
        patch.setattr(checked, "tiled", SimpleNamespace(forward=full))
        out = attention(*leaves, **CALL)
    assert checked._verdicts == {}
    assert torch.equal(out, attention(*leaves, **CALL))
    assert list(checked._verdicts.values()) == [None]


def test_what_shows_nothing_is_no_proof():
    query, key, value = (x.detach() for x in tensors())
    attention(query, key, torch.zeros_like(value), **CALL)
    empty = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    attention_with_cache(query[:, :, :1], key, value, empty, enable_gqa=True)
    assert checked._verdicts == {}
    none = attention_with_cache(query[:0, :, :1], key[:0], value[:0], empty[:0], enable_gqa=True)
    assert none.shape == (0, 2, 1, 16)


def test_an_annealed_power_makes_no_new_kinds():
    leaves = [x.detach() for x in tensors()]
    for power in (1.25, 1.5, 7.75):
        attention(*leaves, **{**CALL, "mechanism": named("lssar").replace(power=power)})
    assert len(checked._verdicts) == 1


def test_calls_of_one_kind_run_the_same_kernels():
    """A scale or a length that makes the compiler choose otherwise makes a kind of its own."""
    kinds: dict[object, set[object]] = {}
    for name, scale, length, dtype in product(
        ("lssa", "lssar", "softmax", "cosine_log_n", "laser(lssa)"),
        (None, 1e-6, 1.0, 500.0),
        (4, 40),
        (torch.float32, torch.bfloat16, torch.float16),
    ):
        query = torch.ones(1, 1, length, 8, dtype=dtype, device=DEVICE)
        call = validated_call(query, query, query, mechanism=name, scale=scale)
        launched = (
            inputs.algebra_of(call.mechanism, False, variants.bounded(call), dtype),
            variants.takes_unit_vectors(call),
        )
        kinds.setdefault(checked._kind(call), set()).add(repr(launched))
    assert all(len(kernels) == 1 for kernels in kinds.values())
    assert len(kinds) > 15


@pytest.fixture
def split_keys(monkeypatch):
    """Keys of few queries are split among programs, as on a GPU that runs 264 at a time."""
    monkeypatch.setattr(triton_call, "_programs", lambda device: 264)


def test_a_kind_says_whether_the_keys_are_split(split_keys):
    """And for how many rows the kernels are compiled."""

    def kind(queries, keys, batch=1, heads=1, dtype=None):
        query = torch.ones(1, heads, queries, 8, device=DEVICE).expand(batch, -1, -1, -1)
        key = torch.ones(1, 1, keys, 8, device=DEVICE).expand(batch, -1, -1, -1)
        ids = None if dtype is None else torch.zeros(batch, keys, dtype=dtype, device=DEVICE)
        call = validated_call(query, key, key, mechanism="lssa", enable_gqa=True, document_ids=ids)
        return checked._kind(call), splits_of(call) > 1

    few, many = kind(1, 16), kind(1, 4096)
    assert (few[1], many[1]) == (False, True)
    assert few[0] != many[0]
    assert kind(1, 4096) == kind(1, 2048)
    assert kind(1, 4096, batch=200)[0] != many[0], "as many programs as the device runs, unsplit"
    assert len({kind(queries, 4096)[0] for queries in (1, 2, 3, 5, 9, 17, 33)}) == 7
    assert kind(3, 4096) == kind(4, 4096)
    assert kind(4, 4096)[0] == kind(1, 4096, heads=4)[0]
    assert kind(1, 4096, dtype=torch.int32)[0] != kind(1, 4096, dtype=torch.int64)[0]


def test_a_part_takes_the_kernels_of_its_call(split_keys, monkeypatch):
    """The call has as many sequences as the device runs programs, its part has fewer."""
    monkeypatch.setattr(checked, "MAX_KEY_ELEMENTS", 256 * 16)
    query = torch.randn(300, 1, 1, 16, device=DEVICE)
    key = torch.randn(300, 1, 256, 16, device=DEVICE)
    call = validated_call(query, key, key, mechanism="lssa")
    part = checked._part_of(call)
    assert (splits_of(call) > 1, splits_of(part) > 1) == (False, True)
    seen = []
    monkeypatch.setattr(triton, "forward", lambda call, split=True: seen.append(split) or tiled.forward(call))
    checked._fails("forward", call)
    assert seen == [False]


@pytest.mark.long
def test_what_is_seen_is_said():
    leaves = tensors()
    assert "the first call is compared with 'tiled'" in explain(*leaves, **CALL).reasons["triton"]
    with torch.no_grad():
        attention(*leaves, **CALL)
    assert "forward seen to agree" in explain(*leaves, **CALL).reasons["triton"]
    results("auto", leaves)
    assert "forward and backward seen to agree" in explain(*leaves, **CALL).reasons["triton"]


@pytest.mark.parametrize("setting", ["trusted", "Trusted"])
def test_trusted_kernels_are_not_looked_into(calls, monkeypatch, setting):
    monkeypatch.setenv("SOFTFOCUS_TRITON", setting)
    leaves = tensors()
    assert "tiled" not in explain(*leaves, **CALL).reasons["triton"]
    assert equal(results("auto", leaves), results("triton", leaves))
    assert (calls.forward, calls.backward) == (0, 0)


def test_asked_for_by_name_they_are_not_looked_into(calls):
    results("triton", tensors())
    assert (calls.forward, calls.backward) == (0, 0)


def test_once_seen_calls_without_gradient_take_the_short_way(calls):
    leaves = [x.detach() for x in tensors()]
    outs = [attention(*leaves, **CALL) for _ in range(4)]
    assert calls.forward == 3  # one to look, the first call, and the second, which prepares the others
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.long
@pytest.mark.parametrize("queries", [1, 5], ids="{} queries".format)
def test_few_queries(calls, queries):
    leaves = tensors(queries=queries)
    assert equal(results("auto", leaves), results("triton", leaves))
    assert set(checked._verdicts.values()) == {None}
    calls.spoil["forward"] = largest_off
    with pytest.warns(RuntimeWarning, match="not taken"):
        results("auto", leaves, mechanism="softmax")


def cached(**call):
    query, key, value = (x.detach() for x in tensors(queries=1, keys=64))
    pages = [x.reshape(2, 1, 4, 16, 16).transpose(1, 2).flatten(0, 1).contiguous() for x in (key, value)]
    lengths = torch.tensor([37, 50], device=DEVICE)
    table = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], device=DEVICE)
    settings = {"enable_gqa": True, "mechanism": "lssar", **call}
    return [
        attention_with_cache(query, key, value, lengths, **settings),
        attention_with_cache(query, *pages, lengths, table, **settings),
    ]


@pytest.mark.long
def test_caches(calls):
    assert equal(cached(), cached(backend="triton"))
    assert set(checked._verdicts.values()) == {None}
    assert len(checked._verdicts) == 2
    calls.spoil["forward"] = lambda result: (result[0] * 1.1, result[1])
    with pytest.warns(RuntimeWarning, match="not taken") as warned:
        found = cached(mechanism="softmax")
    assert len(ours(warned)) == 2
    assert equal(found, cached(mechanism="softmax", backend="tiled"))


@pytest.mark.long
def test_compiled_code_falls_back_too(calls):
    """A graph holds the operator's name; what runs under it is decided when it runs."""
    leaves = tensors()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    calls.spoil["forward"] = largest_off
    with pytest.warns(RuntimeWarning, match="not taken"):
        out = compiled(*leaves, **CALL)
    assert equal([out, *torch.autograd.grad(out, leaves, above(out))], results("tiled", leaves))


def test_the_part_holds_what_the_call_holds():
    """Queries, masks, bias, documents and learned tensors of a part belong together: its rows are
    the call's.
    """
    for case in CASES:
        arguments = case.arguments(named("lssar"), torch.float64)
        call = validated_call(**{**arguments, "mechanism": named("lssar")})
        whole = tiled.forward(call)[0]
        out = tiled.forward(checked._part_of(call))[0]
        batch, heads, rows = out.shape[:3]
        assert torch.allclose(out, whole[:batch, :heads, whole.size(2) - rows :], rtol=1e-9, atol=1e-12), case.name
