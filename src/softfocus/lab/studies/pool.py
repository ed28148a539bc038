"""Worker processes, each of which trains and measures one model."""

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from softfocus.lab.errors import Interrupted
from softfocus.lab.progress import say
from softfocus.lab.run_folder.disk import write_atomically, writing
from softfocus.lab.run_folder.files import RUN, clear_run, write_recipe
from softfocus.lab.run_folder.owner import owning
from softfocus.lab.run_folder.provenance import cores
from softfocus.lab.signals import stoppable
from softfocus.lab.studies.jobs import LOGS, Job, again, divergence
from softfocus.lab.studies.screen import Screen
from softfocus.lab.studies.worker import from_line

ELSEWHERE = "choose another folder with --out, or free some space"
_PATIENCE = 30.0  # seconds for a worker that was asked to stop: it writes a checkpoint first


def work(
    folder: Path,
    jobs: Sequence[Job],
    *,
    workers: int,
    overwrite: bool,
    console: Console,
    processes: int = 1,
) -> None:
    """Run every job that is not finished, a few at a time, and show how far they are.

    Args:
        folder: gets the logs.
        jobs: what to run; each says afterwards whether it is finished or failed, and why.
        workers: jobs at a time. They share the cores.
        overwrite: delete the runs that are there first. A later call without it then goes on with
            the new ones, and finds none of the old ones.
        console: where to draw.
        processes: of each job, a device each, under torchrun.

    Raises:
        LabError: the folder cannot be written to, another demo or study works in it, or a signal to
            stop.
    """
    with writing(folder, ELSEWHERE):
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        for job in jobs:
            job.log.touch()
    at_once = max(1, min(workers, sum(job.status == "waiting" for job in jobs)))
    with stoppable(), owning(folder), Screen(console, jobs, at_once, again=again(overwrite)) as screen:
        try:
            if overwrite:
                _clear(jobs, console)
            WorkerPool(workers, screen, processes).run([job for job in jobs if job.status == "waiting"])
        except KeyboardInterrupt:
            lost = "nothing that was done since" if overwrite else "nothing that was done"
            remedy = f"{again(overwrite)}, the command goes on: {lost} is lost"
            raise Interrupted("training was interrupted", remedy) from None


def _clear(jobs: Sequence[Job], console: Console) -> None:
    """Delete the runs that are there. First all of their run.json: if this is stopped halfway, none
    is left that looks finished.
    """
    there = [job for job in jobs if (job.folder / RUN).exists()]
    if there:
        say(console, f"Deleting the earlier runs (--overwrite): {', '.join(job.label for job in there)}")
    for job in there:
        with owning(job.folder, wait=True):
            # What has a recipe with a token is the lab's, and is trained in
            write_recipe(job.folder, job.recipe.to_toml(), secrets.token_hex(8))
            (job.folder / RUN).unlink()
    for job in there:
        with owning(job.folder, wait=True):
            clear_run(job.folder)


class WorkerPool:
    """Worker processes, a few at a time, and what they say."""

    def __init__(self, count: int, screen: Screen, processes: int = 1):
        self._count, self._screen, self._processes = count, screen, processes
        self._said: queue.Queue[tuple[Job, str | None]] = queue.Queue()
        self._working: dict[str, subprocess.Popen[str]] = {}

    def run(self, jobs: list[Job]) -> None:
        """Run every job to its end, whatever happens to the others."""
        waiting = list(jobs)
        # The first worker goes alone until it trains: by then the corpus is tokenised, for all
        ready = False
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
        finally:
            self._stop()

    def _start(self, job: Job) -> None:
        recipe = job.log.with_suffix(".toml")
        write_atomically(recipe, job.recipe.to_toml())
        command = [sys.executable, "-m"]
        if self._processes > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={self._processes}", "-m"]
        command += ["softfocus.lab.studies.worker", str(recipe), str(job.folder)]
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
                # Ctrl-C is for this process, which then stops its workers one by one
                start_new_session=True,
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
            if diverged := divergence(job.folder):
                job.status, job.error = "diverged", diverged.error or ""
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
