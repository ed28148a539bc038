"""Several models trained and measured at a time, each in a process of its own: what the demo and
studies run on.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console

from softfocus.lab.errors import Interrupted, LabError
from softfocus.lab.inspect.results import RESULTS as INSPECTED
from softfocus.lab.recipes.lengths import parse
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.disk import write_atomically, writing
from softfocus.lab.run_folder.files import (
    CLASSIFICATION,
    INDUCTION,
    INSPECTION,
    RECALL,
    RECIPE,
    RUN,
    TASKS,
    load_measured,
    load_run,
)
from softfocus.lab.run_folder.owner import owning
from softfocus.lab.run_folder.provenance import cores
from softfocus.lab.run_folder.results import Evaluation, Induction, Recall
from softfocus.lab.studies.screen import Job, Screen
from softfocus.lab.studies.worker import from_line, possible

LOGS = "logs"

ELSEWHERE = "choose another folder with --out, or free some space"
_PATIENCE = 30.0  # seconds for a worker that was asked to stop: it writes a checkpoint first


def plan(folder: Path, recipes: Sequence[Recipe], labels: Sequence[str], *, overwrite: bool = False) -> list[Job]:
    """A job for each recipe, in a folder of its name; those that an earlier call finished are
    finished, or diverged.

    Raises:
        LabError: two recipes of one name, a folder that is itself a run, or one of its folders that
            holds a run of another recipe.
    """
    if (folder / RUN).exists():
        raise LabError(f"{folder} is the folder of a run, and not of several", "choose another folder with --out")
    names = [recipe.name for recipe in recipes]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        what = f"there are two runs of the name {twice[0]}, and both would be made in {folder / twice[0]}"
        raise LabError(what, "give each model a name of its own (name = ... in its recipe), and list each seed once")
    jobs = [
        Job(
            label=label,
            recipe=recipe,
            folder=folder / recipe.name,
            log=folder / LOGS / f"{recipe.name}.log",
            lengths=parse(recipe.evaluate.lengths, recipe.train.length),
            evaluation=empty(recipe),
        )
        for recipe, label in zip(recipes, labels, strict=True)
    ]
    for job in jobs:
        if not overwrite and _is_finished(job):
            job.status = "finished"
        elif not overwrite:
            _look_for_divergence(job)
    return jobs


def work(
    folder: Path,
    jobs: Sequence[Job],
    *,
    workers: int | None,
    overwrite: bool,
    console: Console,
    processes: int = 1,
) -> None:
    """Run every job that is not finished, a few at a time, and show how far they are.

    Args:
        folder: gets the logs.
        jobs: what to run; each says afterwards whether it is finished or failed, and why.
        workers: jobs at a time; as many as there are cores by default.
        overwrite: train again what is there.
        console: where to draw.
        processes: of each job, a device each, under torchrun.

    Raises:
        LabError: the folder cannot be written to, another demo or study works in it, or Ctrl-C.
    """
    count = max(1, workers or min(len(jobs), cores()))
    with writing(folder, ELSEWHERE):
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        for job in jobs:
            job.log.touch()
    with owning(folder), Screen(console, jobs, count) as screen:
        Crew(count, overwrite, screen, processes).run([job for job in jobs if job.status == "waiting"])


def missing(jobs: Sequence[Job]) -> list[str]:
    """The report's lines about failed and diverged jobs, without paths."""
    lost = [job for job in jobs if job.status in ("failed", "diverged")]
    return [f"{job.label} is missing: {job.error.replace(str(job.folder), job.folder.name)}" for job in lost]


def refuse_failed(jobs: Sequence[Job]) -> None:
    """After the report on the others has been written.

    Raises:
        LabError: at least one job failed.
    """
    if failed := [job for job in jobs if job.status == "failed"]:
        what = "; ".join(f"{job.label}: {job.error} (log: {job.log})" for job in failed)
        raise LabError(f"{len(failed)} of {len(jobs)} models failed: {what}", "start again to go on with those")


def empty(recipe: Recipe) -> Evaluation:
    """An evaluation without rows, to be filled with those that a worker reports. For the screen;
    files come from disk.
    """
    return Evaluation(
        run=recipe.name,
        mechanism=recipe.model.label,
        train_length=recipe.train.length,
        vocabulary=0,
        tokens=recipe.evaluate.tokens,
        seed=recipe.train.seed,
        rows=[],
    )


def is_trained(job: Job) -> bool:
    """Whether an earlier call trained a job to its end."""
    with suppress(LabError):
        return load_run(job.folder).status == "complete"
    return False


def _is_finished(job: Job) -> bool:
    """Whether an earlier call trained and measured all that the job asks for; an evaluation is put
    into the job.
    """
    if not (job.folder / RUN).exists():
        return False
    there = load(job.folder / RECIPE)
    if (there.model, there.data, there.train) != (job.recipe.model, job.recipe.data, job.recipe.train):
        raise LabError(f"{job.folder} holds a run of another recipe", "choose another folder with --out, or delete it")
    try:
        load_run(job.folder)
        if job.recipe.data.kind == "task":
            from softfocus.lab.evaluate.recall import is_measured  # torch: seconds, which text does without

            return is_measured(job.folder, job.lengths)
        evaluation = load_measured(job.folder, Evaluation)
        planned = {(length, setting) for length in job.lengths for setting in possible(job.recipe, job.folder)}
    except LabError:
        return False
    if there.evaluate.tokens != job.recipe.evaluate.tokens or not planned <= {
        (row.length, row.setting) for row in evaluation.rows
    }:
        return False
    # Runs are compared on the same text. Early evaluations do not say how many tokens were wanted
    if evaluation.longest and evaluation.longest != max(job.lengths):
        return False
    if evaluation.asked not in (0, job.recipe.evaluate.tokens):
        return False
    job.evaluation = evaluation
    files = {
        "attention": Path(INSPECTION) / INSPECTED,
        "classification": Path(CLASSIFICATION),
        "induction": Path(INDUCTION),
        "passkeys": Path(RECALL),
        "tasks": Path(TASKS),
    }
    if not all((job.folder / files[one]).exists() for one in job.recipe.evaluate.also):
        return False
    if "attention" in job.recipe.evaluate.also and not _is_inspected(job):
        return False
    # The others are written when all is measured, these row by row
    also, rows = job.recipe.evaluate.also, []
    try:
        if "passkeys" in also:
            rows.append({row.length for row in load_measured(job.folder, Recall).rows if not row.window})
        if "induction" in also:
            rows.append({row.length for row in load_measured(job.folder, Induction).rows if not row.window})
    except LabError:  # damaged: it is measured again
        return False
    return all(set(job.lengths) <= there for there in rows)


def _is_inspected(job: Job) -> bool:
    """Whether what `softfocus inspect` left is of the validation text, at a study's lengths."""
    from softfocus.lab.inspect.results import VALIDATION_TEXT, read

    try:
        runs = read(job.folder / INSPECTION / INSPECTED).runs
    except LabError:  # of another version
        return False
    wanted = {job.recipe.train.length, max(job.lengths)}
    return any(run.text == VALIDATION_TEXT and wanted <= {row.length for row in run.rows} for run in runs)


def _look_for_divergence(job: Job) -> None:
    """A training that has diverged does so again, so it is not repeated; the job says why."""
    if (job.folder / RUN).exists():
        with suppress(LabError):  # whoever trains there says what is wrong with the folder
            info = load_run(job.folder, complete=False)
            if info.status == "diverged":
                job.status, job.error = "diverged", info.error or ""


class Crew:
    """Worker processes, a few at a time, and what they say."""

    def __init__(self, count: int, overwrite: bool, screen: Screen, processes: int = 1):
        self._count, self._overwrite, self._screen, self._processes = count, overwrite, screen, processes
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
                "training was interrupted", "start the command again to go on: nothing that was done is lost"
            ) from None
        finally:
            self._stop()

    def _start(self, job: Job) -> None:
        recipe = job.log.with_suffix(".toml")
        write_atomically(recipe, job.recipe.to_toml())
        command = [sys.executable, "-m"]
        if self._processes > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={self._processes}", "-m"]
        command += ["softfocus.lab.studies.worker", str(recipe), str(job.folder)]
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
        try:
            said = from_line(line)
        except json.JSONDecodeError:
            return False  # the worker was killed in the middle of a line; _end() says so
        if isinstance(said, str):
            job.error = said
            return False
        phase, event = said
        job.status = "training" if phase == "train" else "evaluating"
        job.take(event, time.monotonic())
        if event.row is not None:
            job.evaluation.rows.append(event.row)
            self._screen.row(job, event.row)
        return event.kind == "step" or phase == "evaluate"

    def _end(self, job: Job) -> None:
        code = self._working.pop(job.recipe.name).wait()
        if code == 0:
            job.status, job.error = "finished", ""
        else:
            job.status = "failed"
            job.error = job.error or (f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
            _look_for_divergence(job)
        self._screen.ended(job)

    def _stop(self) -> None:
        """Stop the workers that are left: politely, so that they keep a checkpoint, then for
        good.
        """
        for worker in self._working.values():
            worker.terminate()
        deadline = time.monotonic() + _PATIENCE
        try:
            for worker in self._working.values():
                worker.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            for worker in self._working.values():
                worker.kill()
