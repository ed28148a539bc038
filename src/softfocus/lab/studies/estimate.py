"""What the runs of a study will take, from a trial of a few steps of each row."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from softfocus.lab.progress import Listener, silent, told_of
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.points import without_seed
from softfocus.lab.run_folder.disk import folder_bytes, size_text
from softfocus.lab.run_folder.provenance import cores
from softfocus.lab.studies.jobs import TRAINING, Job
from softfocus.lab.studies.screen import clock

TRIAL = 3
"""Steps of each row that are timed for the estimate. One before them sets things up."""
TRIAL_SECONDS = 10.0
"""After which no further step of a row is timed, if one was. Where a step takes longer on a CPU, a
step of one sequence stands for it.
"""
CHECKPOINT = 4 * 3
"""Bytes a parameter: its weight and two moments in float32."""
KEPT = 2 * CHECKPOINT + 4
"""Bytes a parameter that a run leaves: two checkpoints, and the model."""
START_SECONDS = 6.0
"""The start of a run's process, which imports torch and Transformers, measured on a CPU."""


@dataclass(frozen=True)
class Expected:
    """Runs, time and disk space."""

    runs: int
    left: int
    seconds: float
    bytes: int
    left_out: Sequence[str] = ()
    """The words of evaluate.also whose time is not in it."""

    @property
    def text(self) -> str:
        """In one line."""
        hours = self.seconds / 3600
        takes = f"{hours:,.1f} hours" if hours >= 1 else f"{clock(self.seconds)} (minutes:seconds)"
        takes += f", without the measuring of {', '.join(self.left_out)}" if self.left_out else ""
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        if not self.left:
            return f"{runs}, none of them left"
        return f"{runs}, {self.left} of them left: about {takes}, and {size_text(self.bytes)} on disk"


def estimate(
    jobs: Sequence[Job], workers: int, processes: int = 1, tell: Callable[[str], None] = lambda text: None
) -> Expected:
    """What the runs that are not finished will take. Rows that are trained alike but for the seed
    are timed once.

    Each run is a process, which has to start. One that was stopped goes on from its newest
    checkpoint. Of one that is trained the evaluation is left. That is the screen's share of a run,
    and as long as training takes for the tokens on which a run is fine-tuned for a classification.
    What passkeys, tasks and the rest of evaluate.also take is not known. ``tell`` is called before
    each row, and while its corpus is prepared. From the second row on it says what time is left.
    """
    timed: dict[object, tuple[float, int]] = {}
    began = time.perf_counter()
    left = [job for job in jobs if job.status == "waiting"]
    rows = [without_seed(job.recipe.to_toml()) for job in left]
    for job, row in zip(left, rows, strict=True):
        if row not in timed:
            all_rows = len(set(rows))
            to_go = (time.perf_counter() - began) / max(1, len(timed)) * (all_rows - len(timed))
            time_left = f", about {clock(to_go)} left" if timed else ""
            tell(f"timing a few steps of {job.row}, {len(timed) + 1} of {all_rows}{time_left}")
            timed[row] = _trial(job.recipe, max(1, cores() // workers), processes, told_of(tell))
    seconds = 0.0
    for job, row in zip(left, rows, strict=True):
        training = TRAINING * timed[row][0]
        seconds += START_SECONDS + timed[row][0] - training * job.trained_share
        if "classification" in job.recipe.evaluate.also:
            seconds += training * _fine_tuning(job.recipe, processes)
    seconds /= min(workers, max(1, len(left)))
    # What an earlier call left of a run is a part of what it needs
    kept = sum(
        max(0, KEPT * timed[row][1] - folder_bytes(job.folder))
        for job, row in zip(left, rows, strict=True)
        if not job.trained
    )
    # A training writes a third checkpoint while it keeps two; a fine-tuning has three of its own
    peaks = [
        (3 if "classification" in job.recipe.evaluate.also else not job.trained) * CHECKPOINT * timed[row][1]
        for job, row in zip(left, rows, strict=True)
    ]
    size = kept + sum(sorted(peaks)[-workers:])
    left_out = sorted({word for job in left for word in job.recipe.evaluate.also} - {"classification"})
    return Expected(runs=len(jobs), left=len(left), seconds=seconds, bytes=size, left_out=left_out)


def _fine_tuning(recipe: Recipe, processes: int) -> float:
    """The tokens of the fine-tuning for a classification, which one process does, as a share of
    those that it trains on.
    """
    from softfocus.lab.evaluate import classify

    train = recipe.train
    tokens = classify.EPOCHS * classify.TRAINING * min(classify.LONGEST, train.length)
    return tokens * processes / (train.steps * train.batch * train.length)


def _trial(recipe: Recipe, threads: int, processes: int, listener: Listener = silent) -> tuple[float, int]:
    """Seconds for a whole run, evaluation included, and its parameters."""
    import torch
    from torch.utils.data import default_collate

    from softfocus.lab import model as models
    from softfocus.lab import objective
    from softfocus.lab.data import of_recipe as data

    models.quiet()
    source = data.load(recipe, listener)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = models.build(recipe, source.vocab_size, source.end_of_document).to(device)
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.0)
        windows = source.training_windows(recipe)

        def step(sequences: int) -> tuple[float, float]:
            """Seconds for the gradients, and for the update."""
            began = time.perf_counter()
            batch = default_collate([windows[index] for index in range(sequences)])
            batch = {name: value.to(device) for name, value in batch.items()}
            with torch.autocast(device, torch.bfloat16, enabled=recipe.train.bf16):
                loss = objective.loss(recipe.data.kind, model, batch)
            loss.backward()
            wait()
            between = time.perf_counter()
            optimiser.step()
            optimiser.zero_grad()
            wait()
            return between - began, time.perf_counter() - between

        rows = max(1, recipe.train.batch // (recipe.train.accumulate * processes))
        few = rows if device == "cuda" else 1  # there alone the time grows with the sequences
        step(few)
        gradients, update = step(few)
        steps = [(gradients * rows / few, update)]
        if device == "cpu" and sum(steps[0]) < TRIAL_SECONDS:
            steps = [step(rows)]
        while len(steps) < TRIAL and sum(map(sum, steps)) < TRIAL_SECONDS:
            steps.append(step(rows))
    finally:
        torch.set_num_threads(before)
    a_step = sum(gradients * recipe.train.accumulate + update for gradients, update in steps) / len(steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return a_step * recipe.train.steps / TRAINING, parameters
