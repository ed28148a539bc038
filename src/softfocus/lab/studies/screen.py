"""What is shown while workers train: bars, a time estimate and the table on a terminal, plain lines
in a log.
"""

import math
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from softfocus.lab.progress import EVERY, say
from softfocus.lab.report import points
from softfocus.lab.report.points import column_name, position
from softfocus.lab.report.table import loss_table
from softfocus.lab.run_folder.results import Row
from softfocus.lab.studies.jobs import Job


def seconds_left(jobs: Sequence[Job], workers: int) -> float | None:
    """How long all of them will still take, or None before anything is known."""
    paces = [job.pace for job in jobs if job.pace is not None]
    open_jobs = [job for job in jobs if job.status not in ("finished", "diverged", "failed")]
    if not open_jobs:
        return 0.0
    if not paces:
        return None
    usual = sum(paces) / len(paces)
    left = [(1 - job.share) * (job.pace or usual) for job in open_jobs]
    return max(*left, sum(left) / workers) if len(left) > 1 else left[0]


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Screen:
    """The display, as a context manager."""

    def __init__(self, console: Console, jobs: Sequence[Job], workers: int, again: str = "started again"):
        self._console, self._jobs, self._workers, self._again = console, jobs, workers, again
        self._start = time.monotonic()
        self._told = -math.inf
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=2, transient=True)

    def __enter__(self) -> "Screen":
        left = [job for job in self._jobs if job.status == "waiting"]
        told = {
            "Training and evaluating": [job.label for job in left if not job.trained],
            "Evaluating what is trained:": [job.label for job in left if job.trained],
        }
        for what, labels in told.items():
            if labels:
                self._say(f"{what} {', '.join(labels)}.")
        for job in left:
            if job.steps_done:
                self._say(f"{job.label}: goes on from step {job.steps_done:,} of {job.recipe.train.steps:,}")
        self._say(
            f"{self._workers} at a time. Stop with Ctrl-C; {self._again}, it goes on."
            if left
            else "Nothing is left to train or evaluate."
        )
        for job in self._jobs:
            if job.status == "finished":
                self._say(f"{job.label}: already done, in {job.folder}")
            elif job.status == "diverged":
                self._say(f"{job.label}: has diverged already, in {job.folder}")
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self) -> None:
        """Tell how far everything is, where that is due. (A terminal redraws itself.)"""
        if self._console.is_terminal or time.monotonic() - self._told < EVERY:
            return
        self._told = time.monotonic()
        for job in self._jobs:
            if job.status in ("starting", "training", "evaluating"):
                self._say(f"{job.label}: {job.status} {job.share:.0%}  {job.facts}")
        self._say(self._overall())

    def row(self, job: Job, row: Row) -> None:
        """A loss has come."""
        if not self._console.is_terminal:
            how = row.setting.name(job.evaluation.train_length)
            at = column_name(position(job.evaluation, row, "multiple"))
            self._say(f"{job.label}: {at} ({row.length:,} {job.recipe.data.parts}), {how}: {row.text}")

    def ended(self, job: Job) -> None:
        """A model is finished, has diverged, or failed."""
        why = f": {job.error} (log: {job.log})" if job.error else ""
        self._say(f"{job.label}: {job.status}{why}")

    def _say(self, line: str) -> None:
        say(self._console, line)

    def _overall(self) -> str:
        done = sum(job.status in ("finished", "diverged") for job in self._jobs)
        seconds = seconds_left(self._jobs, self._workers)
        left = "time left not known yet" if seconds is None else f"about {clock(seconds)} left"
        return f"{done} of {len(self._jobs)} done, {clock(time.monotonic() - self._start)} elapsed, {left}"

    def _draw(self) -> Group:
        bars = Table.grid(padding=(0, 1))
        for job in self._jobs:
            left = (1 - job.share) * job.pace if job.pace and job.status in ("training", "evaluating") else None
            bars.add_row(
                Text(job.label),
                Text(job.status, style="red" if job.status in ("failed", "diverged") else "dim"),
                ProgressBar(total=1, completed=1 if job.status == "finished" else job.share, width=20),
                Text("" if left is None else f"{clock(left)} left"),
                Text(job.facts, overflow="ellipsis", no_wrap=True),
            )
        planned = sorted({length / job.recipe.train.length for job in self._jobs for length in job.lengths})
        table = loss_table([points.Group(job.label, (job.evaluation,)) for job in self._jobs], planned=planned)
        return Group(table, bars, Text(self._overall(), style="bold"))
