"""The benchmark: for each cell parity, then times in turn, then memory; written down as each cell
is finished.
"""

import gc
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from softfocus.catalog import named
from softfocus.lab.bench import memory, parity, subjects, timing
from softfocus.lab.bench.cells import WHATS, Cell, Function, What, call, make
from softfocus.lab.bench.figure import figure
from softfocus.lab.bench.results import FIGURE, RESULTS, Benchmark, CellResult, Memory, SubjectResult, save_benchmark
from softfocus.lab.bench.screen import Screen
from softfocus.lab.bench.subjects import YARDSTICK, Subject
from softfocus.lab.errors import LabError, UsageError, did_you_mean, first_line
from softfocus.lab.progress import say
from softfocus.lab.report.figure import save_png
from softfocus.lab.run_folder import provenance

Tell = Callable[[Cell, str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure, and for how long.

    Attributes:
        device, dtype, batch, heads, head_dim, seed: of every cell.
        tokens: B L of every cell that is not decoding, in place of the batch; None for the same
            batch at every length.
        mechanisms, lengths, whats: every combination is a cell.
        threads: of torch on the CPU; None for as many as torch takes.
        subjects: who is measured, by names of ``subjects.SUBJECTS``; None for all. The yardstick
            always is.
        seconds: of timing, a cell.
        memory: also peak memory, a process for each subject of each cell.
    """

    device: str = "cpu"
    mechanisms: tuple[str, ...] = ("lssar", "lssa", "softmax", "laser")
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    whats: tuple[What, ...] = WHATS
    dtype: str = "float32"
    batch: int = 1
    tokens: int | None = None
    heads: int = 4
    head_dim: int = 64
    threads: int | None = None
    subjects: tuple[str, ...] | None = None
    seconds: float = 20.0
    memory: bool = True
    seed: int = 0

    def cells(self) -> list[Cell]:
        """In the order in which they are measured: short ones first, so that there is soon
        something to see.
        """
        return [
            Cell(
                name,
                what,
                length,
                self._batch(what, length),
                self.heads,
                self.head_dim,
                self.dtype,
                self.device,
                self.seed,
            )
            for length, what, name in itertools.product(self.lengths, self.whats, self.mechanisms)
        ]

    def _batch(self, what: What, length: int) -> int:
        return self.batch if self.tokens is None or what == "decode" else max(1, self.tokens // length)


def run(plan: Plan, out: Path, console: Console) -> Benchmark:
    """Measure a plan; results.json is written after every cell, figure.png at the end.

    Args:
        plan: what to measure.
        out: the folder for both.
        console: where progress and results are shown.

    Raises:
        LabError: no such device, an unknown mechanism, or a folder that cannot be written to.
    """
    for name in plan.mechanisms:
        try:
            named(name)
        except ValueError as error:
            raise LabError(str(error).rstrip("."), "`softfocus mechanisms` lists them all") from None
    for name in plan.subjects or ():
        if name not in subjects.SUBJECTS:
            known = list(subjects.SUBJECTS)
            remedy = did_you_mean(name, known, f"choose from {', '.join(known)}")
            raise UsageError(f"--subjects: {name!r} is not known", remedy)
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise LabError(
            "there is no CUDA device: NOTHING WAS MEASURED", "run it with --device cpu, or see `softfocus doctor`"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(plan.threads or before)
    try:
        return _run(plan, out, console)
    finally:
        torch.set_num_threads(before)


def _run(plan: Plan, out: Path, console: Console) -> Benchmark:
    commit = provenance.commit()
    found = Benchmark(
        commit=commit,
        dirty=commit.endswith("+dirty"),
        versions=provenance.versions(),
        machine=provenance.machine(plan.device),
        device=plan.device,
        threads=torch.get_num_threads(),
        dtype=plan.dtype,
        batch=plan.batch,
        tokens=plan.tokens,
        heads=plan.heads,
        head_dim=plan.head_dim,
        lengths=list(plan.lengths),
        mechanisms=list(plan.mechanisms),
        what=list(plan.whats),
        seed=plan.seed,
        seconds=plan.seconds,
        started=datetime.now(UTC),
    )
    if (out / RESULTS).exists():
        say(console, f"Note: {out / RESULTS}, an earlier benchmark, is replaced; choose another folder with --out")
    save_benchmark(out, found)  # a folder that cannot be written to is said now, not after an hour
    cells = plan.cells()
    registry = {
        name: one
        for name, one in subjects.SUBJECTS.items()
        if plan.subjects is None or name in (YARDSTICK, *plan.subjects)
    }
    with Screen(cells, console) as screen:
        for cell in cells:
            result = measure(cell, seconds=plan.seconds, with_memory=plan.memory, tell=screen.begin, registry=registry)
            found.cells.append(result)
            save_benchmark(out, found)
            screen.end(result)
            _forget(plan.device)
    found.finished = datetime.now(UTC)
    save_benchmark(out, found)
    save_png(figure(found), out / FIGURE, dpi=150)
    say(console, f"{out / RESULTS}, {out / FIGURE}")
    return found


def measure(
    cell: Cell,
    *,
    seconds: float,
    with_memory: bool,
    tell: Tell = lambda cell, step: None,
    registry: Mapping[str, Subject] | None = None,
) -> CellResult:
    """One cell.

    Args:
        cell: what to compute.
        seconds: the budget of timing.
        with_memory: also measure peak memory.
        tell: is told of each step.
        registry: who is measured; SUBJECTS by default.
    """
    registry = subjects.SUBJECTS if registry is None else registry
    results = [SubjectResult(name=one.name, computes=one.computes) for one in registry.values()]
    functions: dict[str, Function] = {}
    for result in results:
        if (function := _built(registry[result.name], cell, result)) is not None:
            functions[result.name] = function
    cells = {name: registry[name].cell(cell) for name in functions}
    made = {one: make(one) for one in set(cells.values())}
    inputs = {name: made[one] for name, one in cells.items()}
    tell(cell, "parity")
    for result in results:
        if registry[result.name].ours and result.name in functions:
            wrong = parity.check(functions[result.name], cells[result.name], inputs[result.name])
            result.parity, result.parity_message = ("failed", wrong) if wrong else ("passed", "")
    calls: dict[str, timing.Call] = {}
    clock = timing.clock_of(cell.device)
    if _passed(results):
        tell(cell, "time")
        ready = {name: call(functions[name], cells[name], inputs[name]) for name in functions}
        calls = _warm(ready, results, clock)
    if _passed(results):
        _time(calls, results, clock, seconds, cell.seed, cell.operations)
        if with_memory:
            _remember(cell, [result for result in results if result.seconds], tell)
    return CellResult(
        mechanism=cell.mechanism,
        what=cell.what,
        length=cell.length,
        parity="passed" if _passed(results) else "failed",
        subjects=results,
    )


def _forget(device: str) -> None:
    """What torch keeps of freed memory goes back to the device: other processes are measured, and
    asked for, what is free.
    """
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _passed(results: list[SubjectResult]) -> bool:
    return all(result.parity != "failed" for result in results)


def _built(subject: Subject, cell: Cell, result: SubjectResult) -> Function | None:
    """A subject's function, or None and the reason in its result."""
    try:
        result.refused = subject.refuses(cell)
        if result.refused is not None:
            return None
        result.backend = subject.backend(subject.cell(cell))
        return subject.build(subject.cell(cell))
    except Exception as error:
        _raised(subject.ours, result, error)
        return None


def _raised(ours: bool, result: SubjectResult, error: Exception) -> None:
    """An error ends no benchmark: of a rival it is a finding, of softfocus as bad as a wrong
    result.
    """
    text = f"raised {type(error).__name__}: {first_line(error)}"
    if ours:
        result.parity, result.parity_message = "failed", text
    else:
        result.refused = text


def _warm(made: Mapping[str, timing.Call], results: list[SubjectResult], clock: timing.Clock) -> dict[str, timing.Call]:
    """Everything that can be called, called before it is timed: the first call compiles, packs or
    loads.
    """
    calls: dict[str, timing.Call] = {}
    for result in results:
        if (ready := made.get(result.name)) is None:
            continue
        try:
            if clock(ready) < 1.0:  # where calls are quick a second one costs nothing, and warms the caches
                clock(ready)
        except Exception as error:
            _raised(result.parity != "not checked", result, error)
        else:
            calls[result.name] = ready
    return calls


def _time(
    calls: Mapping[str, timing.Call],
    results: list[SubjectResult],
    clock: timing.Clock,
    seconds: float,
    seed: int,
    operations: float,
) -> None:
    """Time in turn, and write times and ratios into the results."""
    times = timing.interleave(calls, clock, seconds, seed)
    for result in results:
        if mine := times.get(result.name):
            result.seconds = timing.spread(mine)
            if yardstick := times.get(YARDSTICK):
                result.ratio = timing.ratios(mine, yardstick)
            result.tflops = operations / result.seconds.median / 1e12


def _remember(cell: Cell, results: list[SubjectResult], tell: Tell) -> None:
    """Write peak memories into the results."""
    _forget(cell.device)
    for result in results:
        tell(cell, f"memory of {result.name}")
        found = memory.peak(result.name, cell, torch.get_num_threads())
        if isinstance(found, Memory):
            result.memory = found
        else:
            result.memory_message = found
    its = next((one.memory.bytes for one in results if one.name == YARDSTICK and one.memory), 0)
    for result in results:
        if result.memory and its:
            result.memory_ratio = result.memory.bytes / its


def verdict(found: Benchmark, out: Path) -> None:
    """Say that a parity check failed.

    Raises:
        LabError: at least one did.
    """
    if failed := found.failed:
        first = failed[0]
        raise LabError(
            f"parity failed in {len(failed)} of {len(found.cells)} cells, the first {first.mechanism} {first.what} at "
            f"{first.length:,} ({first.failures[0]})",
            f"no ratio is given there; see {out / RESULTS}",
        )
