"""Progress: events that work hands to a callback, and a callback that shows them as a bar."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from softfocus.lab.run_folder.results import Row


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened in a run. Plain data: it pickles, so it can cross to another process.

    Attributes:
        kind: "prepare" (the corpus: `message` says what, `done` of `total` how far), "step" (of
            training or evaluation: so far `done` of `total`), "row" (a finished row: `row` of an
            evaluation, `message` of anything else).
        run: the run's name.
        message: for people.
        done: optimiser steps, or evaluated tokens.
        total: what `done` will end at.
        loss: the last known training loss, nats per token.
        tokens_per_second: measured without the first steps.
        row: of an evaluation.
    """

    kind: Literal["prepare", "step", "row"]
    run: str
    message: str = ""
    done: int = 0
    total: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    row: Row | None = None


Listener = Callable[[Event], None]

EVERY = 10.0
"""Seconds between progress lines where there is no terminal to redraw."""
SOON = 2.0
"""Seconds after which something that has no line of its own yet is said."""


def say(console: Console, text: str, *, style: str = "", wrap: bool = False) -> None:
    """Print a text as it is: brackets are no markup, `:key:` is no emoji, and numbers are not
    coloured.

    Args:
        console: where.
        text: what.
        style: of rich, such as "bold".
        wrap: break lines between words; else a long line is left to the terminal, so that paths can
            be copied.
    """
    console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=not wrap)


@contextmanager
def telling(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """What says the steps of some work: a terminal shows the last one, anything else gets a line of
    each.

    Args:
        console: where.
        title: of the work.
    """
    if not console.is_terminal:
        yield lambda text: say(console, f"{title}: {text}", wrap=True)
        return
    with console.status(Text(f"{title}: starting")) as status:
        yield lambda text: status.update(Text(f"{title}: {text}"))


def told_of(tell: Callable[[str], None]) -> Listener:
    """A listener to a preparation: hands its messages on, the first after two seconds, then one
    every ten.
    """
    due = time.monotonic() + SOON

    def listen(event: Event) -> None:
        nonlocal due
        if event.kind == "prepare" and time.monotonic() >= due:
            due = time.monotonic() + EVERY
            tell(event.message + (f", {event.done} %" if event.total else ""))

    return listen


def preparing(run: str, message: str, share: float | None) -> Event:
    """A "prepare" event, in per cent.

    Args:
        run: the run's name.
        message: what is being done.
        share: of it that is done, 0 to 1; None where the end is not known.
    """
    done, total = (0, 0) if share is None else (round(100 * share), 100)
    return Event(kind="prepare", run=run, message=message, done=done, total=total)


def silent(event: Event) -> None:
    """The listener that shows nothing."""


class Pace:
    """Counts what is done, and tells how far it is and how fast it goes.

    Attributes:
        done, total: tokens.
    """

    def __init__(self, run: str, total: int, listener: Listener):
        self.run, self.total, self.done = run, total, 0
        self._listener, self._start, self._skipped = listener, time.perf_counter(), 0

    def skip(self, tokens: int) -> None:
        """Count tokens that took no time."""
        self.done += tokens
        self._skipped += tokens

    def add(self, tokens: int) -> None:
        """Count tokens and tell."""
        self.done += tokens
        pace = (self.done - self._skipped) / (time.perf_counter() - self._start)
        self._listener(Event(kind="step", run=self.run, done=self.done, total=self.total, tokens_per_second=pace))


class Display:
    """A progress bar, fed by events; use it as a context manager and as a listener.

    Writes to stderr, so that stdout stays free for results; where that is no terminal, a plain line
    every ten seconds.

    Args:
        unit: what is counted: "steps".
        quiet: show nothing.
        parts: what the speed is counted in: of images "patches", of speech "frames".
    """

    def __init__(self, unit: str, quiet: bool = False, parts: str = "tokens"):
        self.console = Console(stderr=True, quiet=quiet)
        self._unit, self._parts = unit, parts
        self._tasks: dict[str, TaskID] = {}
        self._told = -math.inf
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,.0f} {task.fields[unit]}"),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            with suppress(OSError):
                self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show an event. A terminal that is gone, or a full disk, does not stop the work."""
        with suppress(OSError):
            self._tell(event)

    def _tell(self, event: Event) -> None:
        if event.row is not None:
            row = event.row
            measured = "" if row.setting.wrong else "loss "
            say(
                self.console,
                f"{event.run}: length {row.length:>7,} {row.setting.name():12} {measured}{row.text}",
                wrap=True,
            )
        elif event.kind == "row":
            say(self.console, f"{event.run}: {event.message}")
        if event.kind == "prepare":
            self._show(event.message, event.done, event.total or None, "", "%")
        elif event.kind == "step":
            facts = f"loss {event.loss:.3f} " if event.loss is not None else ""
            if event.tokens_per_second:
                facts += f"{event.tokens_per_second:,.0f} {self._parts}/s"
            self._show(event.run, event.done, event.total, facts, self._unit)

    def _show(self, name: str, done: int, total: int | None, facts: str, unit: str) -> None:
        if not self.console.is_terminal:
            if time.monotonic() - self._told >= EVERY:
                self._told = time.monotonic()
                far = f"{done:,} of {total:,} {unit}" if total else ""
                say(self.console, f"{name}: {far}  {facts}".rstrip(" :"))
            return
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total, facts=facts, unit=unit)
        self._bar.update(self._tasks[name], completed=done, total=total, facts=facts)
