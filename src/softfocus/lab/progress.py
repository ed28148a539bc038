"""How long work tells what it is doing: events to a callback, and a callback that shows them as a progress bar."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from softfocus.lab.results import Row


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened in a run. Plain data: it pickles, so it can cross to another process.

    Attributes:
        kind: "prepare" (the corpus: `message` says what, `done` of `total` how far), "step" (of training or evaluation:
            so far `done` of `total`), "row" (a finished row of an evaluation), "checkpoint", "done".
        run: the run's name.
        message: for people.
        done: optimiser steps, or evaluated tokens.
        total: what `done` will end at.
        loss: the last known training loss, nats per token.
        tokens_per_second: measured without the first steps.
        seconds_left: estimated from that.
        row: of an evaluation.
    """

    kind: Literal["prepare", "step", "row", "checkpoint", "done"]
    run: str
    message: str = ""
    done: int = 0
    total: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    row: Row | None = None


Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """The listener that shows nothing."""


class Display:
    """A progress bar on the terminal, fed by events; use it as a context manager and as a listener.

    Writes to stderr, so that stdout stays free for results.
    """

    def __init__(self, unit: str, quiet: bool = False):
        self.console = Console(stderr=True, quiet=quiet)
        self._unit = unit
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Display":
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} {task.fields[unit]}"),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bar is not None
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        assert self._bar is not None, "use Display as a context manager"
        if event.row is not None:
            row = event.row
            how = "NTK" if row.ntk else "as trained"
            self._bar.print(
                f"{event.run}: length {row.length:>7,} {how:10} loss {row.loss:.3f} ± {row.standard_error:.3f}",
                highlight=False,
            )
        if event.kind == "prepare":
            self._show(event.message, event.done, event.total or None, "", "%")
        elif event.kind == "step":
            facts = f"loss {event.loss:.3f} " if event.loss is not None else ""
            if event.tokens_per_second:
                facts += f"{event.tokens_per_second:,.0f} tokens/s"
            self._show(event.run, event.done, event.total, facts, self._unit)

    def _show(self, name: str, done: int, total: int | None, facts: str, unit: str) -> None:
        assert self._bar is not None
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total, facts=facts, unit=unit)
        self._bar.update(self._tasks[name], completed=done, total=total, facts=facts)
