"""The demo: train and evaluate four small models side by side, show the table as it fills, and write the report."""

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from softfocus.catalog import named
from softfocus.lab.demo_screen import Job, Screen
from softfocus.lab.demo_worker import from_line
from softfocus.lab.disk import writing
from softfocus.lab.errors import Interrupted, LabError, UsageError
from softfocus.lab.lengths import parse
from softfocus.lab.points import labels
from softfocus.lab.progress import Event
from softfocus.lab.provenance import cores
from softfocus.lab.recipe import Recipe, load, shipped
from softfocus.lab.report import Report, build, load_entry, show, write
from softfocus.lab.results import RECIPE, RUN, Evaluation, default_settings, load_evaluation, load_run

MODELS = ("demo-softmax", "demo-lssa", "demo-lssar", "demo-laser")
FOLDER = Path("runs/demo")
LOGS = "logs"

FAST = (
    "train.steps=8",
    "train.warmup=2",
    "train.batch=8",
    "train.length=32",
    "train.checkpoint_every=4",
    "train.log_every=2",
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=1",
    "model.config.intermediate_size=64",
    "evaluate.lengths=1x,2x,4x",
    "evaluate.tokens=2048",
    "data.max_documents=40",
)
"""What makes a recipe tiny: enough to see every part work, far too little to learn anything."""

_PATIENCE = 30.0  # seconds for a worker that was asked to stop: it writes a checkpoint first


def run_demo(
    folder: Path = FOLDER,
    *,
    models: Sequence[str] | None = None,
    seed: int | None = None,
    fast: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    console: Console | None = None,
) -> Report:
    """Train and evaluate models side by side, then print and write the report.

    Each model has a process of its own. What is finished is kept: started again after a failure, a kill or Ctrl-C, the
    demo goes on from the checkpoints.

    Args:
        folder: gets a run folder for each model, logs, results.json, figure1.png and report.html.
        models: shipped recipes ("demo-lssar"), mechanisms ("lssar", "sharpened(lssa, 3)") to put into the demo's recipe,
            or recipe files; the four of the headline figure by default.
        seed: of the training; the recipes' own by default. A folder holds the runs of one seed.
        fast: tiny models and a few steps.
        overwrite: train again what is already there.
        workers: models at a time; as many as there are cores by default.
        console: where to draw; stdout by default.

    Returns:
        The report.

    Raises:
        LabError: an unknown model, runs of other recipes in the folder, a model that failed (after the report on the
            others has been written), or Ctrl-C.
    """
    console = console or Console()
    overrides = (*(FAST if fast else ()), *(() if seed is None else (f"train.seed={seed}",)))
    names = list(dict.fromkeys(_source(name) for name in models or MODELS))
    jobs = _jobs(folder, names, overrides, overwrite)
    count = max(1, workers or min(len(jobs), cores()))
    with writing(folder, "choose another folder with --out, or free some space"):
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        for job in jobs:
            job.log.touch()
    with Screen(console, jobs, count) as screen:
        _Crew(count, overwrite, screen).run([job for job in jobs if job.status == "waiting"])
    failed = [job for job in jobs if job.status == "failed"]
    # A report says nothing about where on a machine it was made
    remarks = [f"{job.label} is missing: {job.error.replace(str(job.folder), job.folder.name)}" for job in failed]
    if fast:
        remarks.insert(0, "A fast trial of tiny models: every part works, and the numbers mean nothing.")
    if entries := [load_entry(job.folder) for job in jobs if job.status == "finished"]:
        report = build(entries, title="softfocus demo: loss over length", remarks=remarks)
        show(report, write(report, folder), console)
    if failed:
        what = "; ".join(f"{job.label}: {job.error} (log: {job.log})" for job in failed)
        raise LabError(f"{len(failed)} of {len(jobs)} models failed: {what}", "start again to go on with those")
    return report


def _source(name: str) -> tuple[str, tuple[str, ...]]:
    """Where a model's recipe comes from: what to load, and what to override in it.

    Raises:
        UsageError: neither a recipe nor a mechanism.
    """
    if name in shipped() or name.endswith(".toml"):
        return name, ()
    if f"demo-{name}" in shipped():
        return f"demo-{name}", ()
    try:
        named(name)
    except ValueError as error:
        raise UsageError(
            f"--model: {str(error).rstrip('.')}", "or give a shipped recipe, or the path of a .toml file"
        ) from None
    slug = "-".join(re.findall(r"[\w.]+", name))
    return "demo", (f"name=demo-{slug}", f"model.mechanism={name}")


def _jobs(
    folder: Path, names: list[tuple[str, tuple[str, ...]]], overrides: Sequence[str], overwrite: bool
) -> list[Job]:
    recipes = [load(name, [*changes, *overrides]) for name, changes in names]
    nothing = [_empty(recipe) for recipe in recipes]
    jobs = [
        Job(
            label=label,
            recipe=recipe,
            source=name,
            overrides=(*changes, *overrides),
            folder=folder / recipe.name,
            log=folder / LOGS / f"{recipe.name}.log",
            lengths=parse(recipe.evaluate.lengths, recipe.train.length),
            evaluation=empty,
        )
        for (name, changes), recipe, label, empty in zip(names, recipes, labels(nothing), nothing, strict=True)
    ]
    for job in jobs:
        if not overwrite and (found := _finished(job)) is not None:
            job.evaluation, job.status = found, "finished"
    return jobs


def _empty(recipe: Recipe) -> Evaluation:
    """An evaluation without rows, to be filled with those that a worker reports. For the screen; files come from disk."""
    return Evaluation(
        run=recipe.name,
        mechanism=recipe.model.label,
        train_length=recipe.train.length,
        vocabulary=0,
        tokens=recipe.evaluate.tokens,
        seed=recipe.train.seed,
        rows=[],
    )


def _finished(job: Job) -> Evaluation | None:
    """The evaluation of a run that an earlier demo finished, or None where there is work left."""
    if not (job.folder / RUN).exists():
        return None
    there = load(job.folder / RECIPE)
    if (there.model, there.data, there.train) != (job.recipe.model, job.recipe.data, job.recipe.train):
        raise LabError(f"{job.folder} holds a run of another recipe", "choose another folder with --out, or delete it")
    try:
        load_run(job.folder)
        evaluation = load_evaluation(job.folder)
    except LabError:
        return None
    settings = default_settings(job.recipe.train.length)
    planned = {(length, setting) for length in job.lengths for setting in settings}
    same = there.evaluate == job.recipe.evaluate and planned <= {(row.length, row.setting) for row in evaluation.rows}
    return evaluation if same else None


class _Crew:
    """Worker processes, a few at a time, and what they say."""

    def __init__(self, count: int, overwrite: bool, screen: Screen):
        self._count, self._overwrite, self._screen = count, overwrite, screen
        self._said: queue.Queue[tuple[Job, str | None]] = queue.Queue()
        self._working: dict[str, subprocess.Popen[str]] = {}

    def run(self, jobs: list[Job]) -> None:
        """Run every job to its end, whatever happens to the others."""
        waiting = list(jobs)
        ready = False  # the first worker goes alone until it trains: by then the corpus is tokenised and cached for all
        try:
            while waiting or self._working:
                while waiting and len(self._working) < (self._count if ready else 1):
                    self._start(waiting.pop(0))
                self._screen.update()
                try:
                    job, line = self._said.get(timeout=1.0)
                except queue.Empty:
                    continue
                if line is None:
                    self._end(job)
                    ready = ready or job.status == "finished"
                else:
                    ready = self._hear(job, line) or ready
        except KeyboardInterrupt:
            raise Interrupted(
                "the demo was interrupted", "start it again to go on: nothing that was done is lost"
            ) from None
        finally:
            self._stop()

    def _start(self, job: Job) -> None:
        command = [sys.executable, "-m", "softfocus.lab.demo_worker", job.source, str(job.folder)]
        command += [part for override in job.overrides for part in ("--set", override)]
        command += ["--overwrite"] if self._overwrite else []
        threads = str(max(1, cores() // self._count))
        with job.log.open("w") as log:
            worker = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
                env=os.environ
                | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # Ctrl-C is for this process, which then stops its workers one by one
            )
        self._working[job.recipe.name] = worker
        job.status = "starting"
        assert worker.stdout is not None
        threading.Thread(target=self._listen, args=(job, worker.stdout), daemon=True).start()

    def _listen(self, job: Job, lines: TextIO) -> None:
        with lines:
            for line in lines:
                self._said.put((job, line))
        self._said.put((job, None))

    def _hear(self, job: Job, line: str) -> bool:
        """Take in what a worker said. Returns whether it has begun to train, or is past that."""
        said = from_line(line)
        if isinstance(said, str):
            job.error = said
            return False
        phase, event = said
        job.status = "training" if phase == "train" else "evaluating"
        self._note(job, event)
        return event.kind == "step" or phase == "evaluate"

    def _note(self, job: Job, event: Event) -> None:
        job.take(event, time.monotonic())
        if event.row is not None:
            job.evaluation.rows.append(event.row)
            self._screen.row(job, event.row)

    def _end(self, job: Job) -> None:
        code = self._working.pop(job.recipe.name).wait()
        if code == 0:
            job.status, job.error = "finished", ""
        else:
            job.status = "failed"
            job.error = job.error or (f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
        self._screen.ended(job)

    def _stop(self) -> None:
        """Stop the workers that are left: politely, so that they keep a checkpoint, then for good."""
        for worker in self._working.values():
            worker.terminate()
        deadline = time.monotonic() + _PATIENCE
        try:
            for worker in self._working.values():
                worker.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            for worker in self._working.values():
                worker.kill()
