"""`softfocus bench`: who is measured, the order, the gate, the memory, what is written. No test
asserts a time.

Over 400 lines: the cases share the stand-in subjects.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from softfocus import attention
from softfocus.lab import cli
from softfocus.lab.bench import flex, memory, parity, subjects, timing
from softfocus.lab.bench.cells import WHATS, Cell, make
from softfocus.lab.bench.results import Benchmark, CellResult, Memory, SubjectResult
from softfocus.lab.bench.run import Plan, measure
from softfocus.lab.bench.screen import Screen, left
from softfocus.lab.bench.subjects import SUBJECTS
from softfocus.lab.cli.bench import _split
from softfocus.lab.errors import LabError

CELL = Cell("lssar", "forward", 64, heads=2, head_dim=16)
SMALL = ("--lengths", "64", "--heads", "2", "--head-dim", "16", "--seconds", "0", "--no-memory")
WITHOUT_FLEX = {name: subject for name, subject in SUBJECTS.items() if name != "flex"}


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run `softfocus bench` in this process: (exit code, stdout, stderr)."""
    code = 0
    try:
        cli.main(["bench", *map(str, arguments)])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def cell(mechanism: str = "lssar", what: Any = "forward", **changes: Any) -> Cell:
    return dataclasses.replace(CELL, mechanism=mechanism, what=what, **changes)


# Who is measured


def test_the_yardstick_on_a_gpu_is_the_fastest_of_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is not there: flash takes 3 seconds, cuDNN 2, and the last is not in this
    build.
    """
    enabled = []

    def clock(ready: object) -> float:
        return {"flash": 3.0, "cudnn": 2.0}[enabled[-1]]

    def ready() -> None:
        if enabled[-1] == "mem_efficient":
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(subjects, "_only", enabled.append)
    monkeypatch.setattr(subjects, "make", lambda cell: None)
    monkeypatch.setattr(subjects, "call", lambda function, cell, inputs: ready)
    monkeypatch.setattr(subjects.timing, "clock_of", lambda device: clock)
    subjects._fastest_of_shape.cache_clear()
    one = cell(device="cuda")
    assert SUBJECTS["sdpa"].backend(one) == "cudnn"
    assert enabled == list(subjects.SDPA)
    SUBJECTS["sdpa"].build(one)
    assert enabled[-1] == "cudnn"
    assert SUBJECTS["sdpa"].backend(dataclasses.replace(one, mechanism="laser")) == "cudnn"
    assert len(enabled) == len(subjects.SDPA) + 1  # of one shape they are measured once
    subjects._fastest_of_shape.cache_clear()
    assert SUBJECTS["sdpa"].backend(cell()) == ""


def test_only_one_of_torchs_kernels_is_left() -> None:
    names = (*subjects.SDPA, "math")
    before = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names}
    try:
        for chosen in names:
            subjects._only(chosen)
            assert [name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()] == [chosen]
    finally:
        for name, on in before.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


# What is written


@pytest.mark.long
def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(
        capsys, *SMALL, "--mechanisms", "lssar", "--out", tmp_path / "b", "--threads", 1, "--json", "-"
    )
    assert code == 0, err
    found = Benchmark.model_validate_json((tmp_path / "b" / "results.json").read_text())
    assert Benchmark.model_validate_json(out) == found
    assert Benchmark.model_validate_json(found.model_dump_json()) == found
    assert (tmp_path / "b" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"results.json", "figure.png"}
    assert [(one.mechanism, one.what, one.length) for one in found.cells] == [("lssar", what, 64) for what in WHATS]
    assert found.threads == 1
    assert found.finished
    assert found.dirty == found.commit.endswith("+dirty")
    for one in found.cells:
        ours, sdpa = one.subject("softfocus"), one.subject("sdpa")
        assert ours
        assert sdpa
        assert (one.parity, ours.parity, sdpa.parity) == ("passed", "passed", "not checked")
        assert ours.backend
        assert ours.seconds
        assert ours.seconds.rounds == timing.ROUNDS
        assert ours.ratio
        assert sdpa.ratio
        assert sdpa.ratio.median == 1.0
        assert "lssar, " + one.what in err
    assert "64 tokens" in err
    assert "x SDPA" in err


def test_help_explains_and_does_not_wait_for_torch() -> None:
    code = """
import sys
from softfocus.lab.cli import main
try:
    main(["bench", "--help"])
except SystemExit as exit:
    print("TORCH", "torch" in sys.modules, exit.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "TORCH False 0" in done.stdout
    assert "Example: softfocus bench" in " ".join(done.stdout.split())


# The order


class Fake:
    """Calls that do nothing, and a clock that notes who was called and says what the test wants."""

    def __init__(self, **seconds: float):
        self.order: list[str] = []
        self.seconds = seconds
        self.calls = {name: (lambda name=name: name) for name in seconds}

    def clock(self, call: timing.Call) -> float:
        name = str(call())
        self.order.append(name)
        return self.seconds[name]

    def rounds(self) -> list[list[str]]:
        size = len(self.calls)
        return [self.order[i : i + size] for i in range(0, len(self.order), size)]


def test_everybody_is_called_once_a_round_in_changing_orders() -> None:
    fake = Fake(a=0.25, b=0.5, c=0.25)
    times = timing.interleave(fake.calls, fake.clock, seconds=10.0, seed=3)
    assert [sorted(one) for one in fake.rounds()] == [["a", "b", "c"]] * 10  # as many as fit the budget, no more
    assert len({tuple(one) for one in fake.rounds()}) > 2
    assert times == {"a": [0.25] * 10, "b": [0.5] * 10, "c": [0.25] * 10}
    second = Fake(a=0.25, b=0.5, c=0.25)
    timing.interleave(second.calls, second.clock, seconds=10.0, seed=3)
    assert second.order == fake.order


@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, 5), (5.5, 3), (1e-6, 1000)])
def test_rounds_have_a_least_and_a_most(seconds: float, rounds: int) -> None:
    fake = Fake(a=seconds, b=seconds / 100)
    assert len(timing.interleave(fake.calls, fake.clock, seconds=1.0, seed=0)["a"]) == rounds


def test_ratios_are_taken_within_rounds() -> None:
    """A machine that is twice as slow half of the time: the ratio does not see it."""
    found = timing.ratios([2.0, 4.0, 2.0, 4.0], [1.0, 2.0, 1.0, 2.0])
    assert (found.median, found.lower_quartile, found.upper_quartile, found.minimum, found.rounds) == (2, 2, 2, 2, 4)
    spread = timing.spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.median, spread.lower_quartile, spread.upper_quartile, spread.minimum) == (3, 2, 4, 1)
    assert timing.spread([7.0]).upper_quartile == 7.0


def test_a_rival_that_fails_is_a_finding() -> None:
    def fail(one: Cell) -> Any:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            raise RuntimeError("no compiler\nsecond line")

        return function

    registry = {**WITHOUT_FLEX, "flex": dataclasses.replace(SUBJECTS["flex"], refuses=lambda one: None, build=fail)}
    found = measure(CELL, seconds=0, with_memory=False, registry=registry)
    flex, sdpa = found.subject("flex"), found.subject("sdpa")
    assert flex
    assert (flex.refused, flex.seconds) == ("raised RuntimeError: no compiler", None)
    assert found.parity == "passed"
    assert sdpa
    assert sdpa.ratio


# The gate


def wrong(function: Any) -> Any:
    """The subject softfocus, computing something else."""
    return dataclasses.replace(SUBJECTS["softfocus"], build=lambda one: function)


def off_by_a_little(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = attention(query, key, value, is_causal=query.size(2) > 1, mechanism="lssar")
    return out * (1 + 1e-4)


def test_no_ratio_without_parity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(subjects.SUBJECTS, "softfocus", wrong(off_by_a_little))
    code, out, err = call(
        capsys, *SMALL, "--mechanisms", "lssar", "--what", "forward,decode", "--out", tmp_path, "--memory"
    )
    assert code == 1
    assert "parity failed: softfocus: lssar forward at 64, float32: out is off by" in out
    assert err.startswith("softfocus: parity failed in 2 of 2 cells, the first lssar forward at 64")
    assert "x SDPA" not in out
    assert "µs" not in out
    found = json.loads((tmp_path / "results.json").read_text())
    for one in found["cells"]:
        assert one["parity"] == "failed"
        for subject in one["subjects"]:
            assert subject["ratio"] is subject["seconds"] is subject["memory"] is subject["memory_ratio"] is None


def test_the_calls_that_are_timed_are_the_ones_that_are_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A subject that is right once."""
    calls = []

    def once(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        calls.append(query)
        out = attention(query, key, value, is_causal=query.size(2) > 1, mechanism="lssar")
        return out if len(calls) == 1 else out * 1.1

    monkeypatch.setitem(subjects.SUBJECTS, "softfocus", wrong(once))
    (tmp_path / "results.json").write_text("{}")
    code, out, _ = call(capsys, *SMALL, "--mechanisms", "lssar", "--what", "forward", "--out", tmp_path)
    assert "results.json, an earlier benchmark, is replaced" in " ".join(out.split())
    assert code == 1
    assert "parity failed" in out


def wrong_gradient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = attention(query, key, value, is_causal=True, mechanism="lssar")
    return out + 1e-3 * (key - key.detach())


def wrong_in_one_row(row: int) -> Any:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attention(query, key, value, is_causal=True, mechanism="lssar").clone()
        out[:, :, row] += 1e-3
        return out

    return function


def not_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, mechanism="lssar")


def all_nan(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, is_causal=True, mechanism="lssar") * torch.nan


def raising(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    raise IndexError("out of range")


FAULTS = [
    (off_by_a_little, "forward", "out is off"),
    (not_causal, "forward", "out is off"),
    (all_nan, "forward", "off by inf"),
    (raising, "forward", "raised IndexError: out of range"),
    (wrong_gradient, "backward", "key.grad is off"),
    (wrong_in_one_row(-1), "forward", "out is off"),
    (wrong_in_one_row(5), "forward", "out is off"),
    (lambda q, k, v: q[:, :, :3], "decode", ""),
]


def test_decoding_has_a_single_row_however_large_its_dense_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "DENSE", 64)
    cell = Cell("laser", "decode", 128, heads=1, head_dim=8)
    assert parity._rows(cell).tolist() == [0]
    assert parity.check(SUBJECTS["softfocus"].build(cell), cell, make(cell)) is None


@pytest.mark.parametrize("dense", [2**23, 2**10], ids=["all rows", "some rows"])
@pytest.mark.parametrize(("function", "what", "says"), FAULTS)
def test_faults_are_noticed(function: Any, what: Any, says: str, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not says:
        function, says = (lambda q, k, v: attention(q, k[:, :, 1:], v[:, :, 1:])), "out is off"
    monkeypatch.setattr(parity, "DENSE", dense)
    one = cell(what=what, length=128)
    assert says in (parity.check(function, one, make(one)) or "")


@pytest.mark.parametrize("dense", [2**23, 2**12], ids=["all rows", "some rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mechanism", ["lssar", "laser", "sigmoid_log_l"])
def test_what_is_right_passes(mechanism: str, dtype: str, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "DENSE", dense)
    for what in WHATS:
        one = cell(mechanism, what, length=128, dtype=dtype)
        assert parity.check(SUBJECTS["tiled"].build(one), one, make(one)) is None


def test_the_gate_does_not_open_without_assertions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parity.ASSERTIONS
    monkeypatch.setattr(parity, "ASSERTIONS", False)  # as under python -O
    with pytest.raises(LabError, match="run the benchmark without -O"):
        parity.check(SUBJECTS["softfocus"].build(CELL), CELL, make(CELL))


# Who is measured


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize(
    "mechanism", ["softmax", "lssa", "lssar", "laser", "laser(lssar)", "softmax_p3", "ssmax", "qknorm", "cosine_log_n"]
)
def test_the_formula_by_hand_computes_the_mechanism(mechanism: str, what: Any) -> None:
    one = cell(mechanism, what)
    query, key, value, _ = make(one)
    want = attention(query, key, value, is_causal=one.causal, mechanism=mechanism, backend="reference")
    torch.testing.assert_close(SUBJECTS["eager"].build(one)(query, key, value), want, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("what", ["forward", "decode"])
@pytest.mark.parametrize("mechanism", ["lssa", "lssar", "laser(softmax_p3)", "ssmax"])
def test_flex_computes_the_mechanism(mechanism: str, what: Any) -> None:
    """By torch's dense stand-in, which needs no compiler and has the log-sum-exp that LSSAR
    takes.
    """
    one = cell(mechanism, what, length=32)
    query, key, value, _ = make(one)
    want = attention(query, key, value, is_causal=one.causal, mechanism=mechanism, backend="reference")
    with torch.no_grad():
        got = flex.build(one, compiled=False)(query, key, value)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_flex_gets_small_tiles_where_they_were_measured() -> None:
    given = {
        (device, dtype, head_dim): flex.kernel_options(cell(device=device, dtype=dtype, head_dim=head_dim))
        for device in ("cpu", "cuda")
        for dtype in ("float32", "bfloat16", "float16")
        for head_dim in (32, 64, 128)
    }
    small = {("cuda", dtype, head_dim) for dtype in ("bfloat16", "float16") for head_dim in (32, 64)}
    assert {key for key, options in given.items() if options == flex.SMALL_TILES} == small
    assert {options is None for key, options in given.items() if key not in small} == {True}


@pytest.mark.slow  # the compiler takes a quarter of a minute
def test_flex_compiled() -> None:
    """Once as the benchmark does it, parity and ratio included."""
    one = Cell("lssa", "forward", 128, heads=1, head_dim=32)
    found = measure(one, seconds=0, with_memory=False).subject("flex")
    assert found
    if found.refused:  # a machine without a C++ compiler
        assert found.refused.startswith("raised ")
    else:
        assert found.ratio


def test_refusals_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = {name: subject.refuses for name, subject in SUBJECTS.items()}
    assert refuses["flex"](cell("softmax", "backward")) == "FlexAttention has no backward on a CPU"
    assert "log-sum-exp" in (refuses["flex"](cell("lssar")) or "")
    assert refuses["flex"](cell("lssa")) is None
    assert refuses["flex"](cell("lssar", "backward", device="cuda")) is None
    for name in ("eager", "flex"):
        assert "only for softmax and softplus" in (refuses[name](cell("relu_l1")) or "")
        assert "table 1" in (refuses[name](cell("softmax_recentred")) or "")
    assert refuses["eager"](cell("lssar", "backward")) is None
    monkeypatch.setattr(subjects, "free_memory", lambda device: 2**30)
    said = refuses["eager"](cell("lssar", "backward", length=16384, heads=4))
    assert said == ("its dense [L, L] weights would take 40.0 GiB; the limit is half of the free memory, 0.5 GiB")
    for name in ("sdpa", "softfocus"):
        assert refuses[name](cell(length=16384)) is None


def test_tiled_is_not_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "_backend", lambda one: "tiled")
    assert "measured under that name" in (SUBJECTS["tiled"].refuses(CELL) or "")
    monkeypatch.setattr(subjects, "_backend", lambda one: "another")
    assert SUBJECTS["tiled"].refuses(CELL) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "32k,1k"), "--tokens takes one number, not '32k,1k'"),
        (("--tokens", "abc"), "write --tokens like 32k"),
        (("--tokens", "1k", "--batch", "2"), "--batch and --tokens exclude each other"),
    ],
)
def test_tokens_that_make_no_sense(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_tokens_set_the_batch_but_not_in_decoding() -> None:
    plan = Plan(lengths=(64, 256), mechanisms=("lssa",), tokens=512)
    assert [one.batch for one in plan.cells()] == [8, 8, 1, 2, 2, 1]


@pytest.mark.long
def test_a_smaller_dtype_is_measured_beside_float32() -> None:
    registry = {name: SUBJECTS[name] for name in ("sdpa", "softfocus", "float32")}
    seen = []
    watched = dataclasses.replace(
        SUBJECTS["float32"], build=lambda one: seen.append(one) or SUBJECTS["softfocus"].build(one)
    )
    found = measure(cell(dtype="bfloat16"), seconds=0, with_memory=True, registry={**registry, "float32": watched})
    result = found.subject("float32")
    assert result
    assert result.parity == "passed"
    assert result.ratio
    assert result.memory
    assert seen == [CELL]
    assert SUBJECTS["float32"].refuses(CELL)


def test_the_memory_beside_it_is_float32s(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(memory, "make", lambda one: made.append(one.dtype) or make(one))
    memory.measure("float32", cell(dtype="bfloat16"))
    assert set(made) == {"float32"}


def test_free_memory_is_known() -> None:
    assert subjects.free_memory("cpu") > 2**26


def test_inputs_do_not_depend_on_the_dtype() -> None:
    single, half = make(CELL), make(cell(dtype="bfloat16"))
    assert torch.equal(single.query.bfloat16(), half.query)
    assert not torch.equal(single.query, single.key)
    assert make(cell(what="decode")).query.size(2) == 1
    assert make(cell(what="backward")).value.requires_grad


# Memory


@pytest.mark.long
def test_peak_memory_of_a_process_of_its_own() -> None:
    one = Cell("softmax", "forward", 1024, heads=2)
    inputs, weights = 4 * 2 * 1024 * 64 * 4, 2 * 1024 * 1024 * 4  # bytes
    fused, dense = (memory.peak(name, one, 1) for name in ("sdpa", "eager"))
    assert isinstance(fused, Memory), fused
    assert isinstance(dense, Memory), dense
    if fused.method == "VmHWM":
        assert inputs < fused.bytes < weights + inputs
        assert dense.bytes > 2 * weights


@pytest.mark.long
def test_a_process_that_fails_says_so() -> None:
    said = memory.peak("sdpa", cell("no_such_mechanism", dtype="no_such_dtype"), 1)
    assert isinstance(said, str)
    assert said.startswith("its process failed: ")
    assert "no_such_dtype" in said


def test_memory_is_over_sdpas(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"sdpa": Memory(bytes=200, method="VmHWM"), "softfocus": Memory(bytes=300, method="VmHWM")}
    monkeypatch.setattr(memory, "peak", lambda name, one, threads: known.get(name, "its process failed: why"))
    found = measure(CELL, seconds=0, with_memory=True, registry=WITHOUT_FLEX)
    assert {one.name: one.memory_ratio for one in found.subjects if one.memory} == {"sdpa": 1.0, "softfocus": 1.5}
    eager = found.subject("eager")
    assert eager
    assert eager.memory_message == "its process failed: why"


# The screen, and wrong use


def test_time_left_and_noise(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell(length=64)] * 4
    assert left(cells, 0, 0.0) is None
    assert left(cells, 1, 60.0) == pytest.approx(180.0)
    sdpa = SubjectResult(name="sdpa", computes="", seconds=timing.spread([1e-3, 1e-2]))
    with Screen(cells, Console(), now=iter([0.0, 120.0]).__next__) as screen:
        screen.end(CellResult(mechanism="lssar", what="decode", length=64, parity="passed", subjects=[sdpa]))
    out = capsys.readouterr().out
    assert "(1 of 4 cells, about 6 minutes left)" in out
    assert "5.50 ms" in out
    assert "the machine was busy" in out


def test_names_with_commas() -> None:
    assert _split("lssar, laser(sharpened(lssa, 3)),softmax,lssar") == ["lssar", "laser(sharpened(lssa, 3))", "softmax"]


WRONG = [
    (["--lengths", "long"], 2, "'long' is not a length; write --lengths like 1k,4k,16k"),
    (["--lengths", "2x"], 2, "'2x' is not a length"),
    (["--what", "forwards"], 2, "did you mean 'forward'?"),
    (["--what", ","], 2, "choose from forward, backward, decode"),
    (["--mechanisms", ","], 2, "--mechanisms names none"),
    (["--dtype", "float64"], 2, "float64"),
    (["--device", "tpu"], 2, "tpu"),
    (["--mechanisms", "lsar"], 1, "did you mean 'lssar'"),
    (["--quick", "--out", "/proc/none"], 1, "cannot write /proc/none"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_wrong_use(arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, _, err = call(capsys, *arguments)
    assert (found, says in err) == (code, True), err
    assert "Traceback" not in err


def test_no_cuda_is_said_loudly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = call(capsys, "--device", "cuda", "--out", tmp_path / "b")
    assert (code, out) == (1, "")
    assert err.startswith("softfocus: there is no CUDA device: NOTHING WAS MEASURED")
    assert not (tmp_path / "b").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("what", WHATS)
def test_on_a_gpu(what: Any) -> None:
    found = measure(cell("lssar", what, length=256, heads=2, device="cuda"), seconds=0, with_memory=True)
    assert found.parity == "passed"
    assert all(one.ratio and one.memory for one in found.subjects if one.refused is None)
