"""What a benchmark shows while it runs: a few lines as each cell is finished, and how much time is
left.
"""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from softfocus.lab.bench.cells import Cell
from softfocus.lab.bench.results import CellResult, Memory, SubjectResult
from softfocus.lab.progress import say

_WIDTHS = {
    "": 10,
    "time": 11,
    "quartiles": 17,
    "x SDPA": 8,
    "x quartiles": 15,
    "memory": 10,
    "x SDPA's": 8,
    "TFLOP/s": 8,
    "backend": 10,
}

BUSY = 2.0
"""sdpa's upper quartile over its lower one, from which on the times of a cell say little."""


def weight(cell: Cell) -> float:
    """How long a cell takes beside others, roughly: a budget that each spends, and calls that
    outgrow it.
    """
    square = (cell.length / 4096) ** 2 * {"forward": 1, "backward": 3, "decode": 0}[cell.what]
    return 1.0 + square * cell.batch * cell.heads / 4


def left(cells: list[Cell], done: int, elapsed: float) -> float | None:
    """Seconds until all cells are measured, from what the first took; None before there is one."""
    spent = sum(weight(cell) for cell in cells[:done])
    return elapsed / spent * sum(weight(cell) for cell in cells[done:]) if spent else None


class Screen:
    """A context manager that the run tells of each cell before (`begin`) and after (`end`) it."""

    def __init__(self, cells: list[Cell], console: Console, now: Callable[[], float] = time.monotonic):
        self.console = console
        self._cells, self._now, self._started, self._done = cells, now, now(), 0
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"),
            console=console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=sum(map(weight, cells)), left="")

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._bar.stop()

    def begin(self, cell: Cell, step: str) -> None:
        """Say what is going on: `step` is "parity", "time" or "memory" of somebody."""
        remaining = left(self._cells, self._done, self._now() - self._started)
        self._bar.update(
            self._task,
            description=f"{self._done + 1} of {len(self._cells)}: {cell.label}, {step}",
            completed=sum(map(weight, self._cells[: self._done])),
            left="" if remaining is None else f"about {_duration(remaining)} left",
        )

    def end(self, result: CellResult) -> None:
        """Print a finished cell."""
        self._done += 1
        heading = f"{result.mechanism}, {result.what}, {result.length:,} tokens"
        remaining = left(self._cells, self._done, self._now() - self._started)
        if not self.console.is_terminal and remaining:
            heading += f"   ({self._done} of {len(self._cells)} cells, about {_duration(remaining)} left)"
        say(self.console, heading, style="bold")
        for failure in result.failures:
            say(self.console, f"  parity failed: {failure}", style="red")
        if not result.failures:
            measured = [one for one in result.subjects if one.refused is None]
            _wide(self.console).print(_lines(measured))
        if result.noise > BUSY:
            slow = f"the slowest quarter of sdpa's calls took at least {result.noise:.1f} times as long as the fastest"
            said = f"  the machine was busy: {slow}"
            say(self.console, said, style="yellow")
        for one in result.subjects:
            for why in (one.refused, one.memory_message and f"memory unknown: {one.memory_message}"):
                if why:
                    say(self.console, f"  {one.name}: {why}", style="dim")


def _wide(console: Console) -> Console:
    """Into a file or a pipe nothing is cut off to fit a terminal that is not there."""
    return console if console.is_terminal else Console(file=console.file, width=120)


def _lines(subjects: list[SubjectResult]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading, width in _WIDTHS.items():
        table.add_column(
            heading, min_width=width, no_wrap=True, justify="left" if heading in ("", "backend") else "right"
        )
    for one in subjects:
        table.add_row(
            Text(f"  {one.name}", style="bold" if one.ratio else ""),
            time_text(one.seconds.median) if one.seconds else "",
            f"{time_text(one.seconds.lower_quartile)}–{time_text(one.seconds.upper_quartile)}" if one.seconds else "",
            f"{one.ratio.median:.2f}" if one.ratio else "",
            f"{one.ratio.lower_quartile:.2f}–{one.ratio.upper_quartile:.2f}" if one.ratio else "",
            _megabytes(one.memory),
            f"{one.memory_ratio:.2f}" if one.memory_ratio else "",
            f"{one.tflops:#.3g}".rstrip(".") if one.tflops else "",
            one.backend,
        )
    return table


def time_text(seconds: float) -> str:
    """A time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds * 1e6:#.3g}".rstrip(".") + " µs"


def _megabytes(memory: Memory | None) -> str:
    return f"{memory.bytes / 2**20:,.1f} MiB" if memory else ""


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes > 1 else "a minute"
