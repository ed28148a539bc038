"""The models of a demo, study or claim as jobs: how far each is, and what an earlier call has left
to do.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from softfocus.lab.errors import LabError
from softfocus.lab.inspect.results import RESULTS, TOKENS, VALIDATION_TEXT, read
from softfocus.lab.progress import Event
from softfocus.lab.recipes.data import DataTable
from softfocus.lab.recipes.lengths import parse
from softfocus.lab.recipes.loading import differences, flat, load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import (
    CHECKPOINTS,
    CLASSIFICATION,
    INSPECTION,
    RECIPE,
    RUN,
    TASKS,
    checkpoints_in,
    load_measured,
    load_run,
    step_of,
)
from softfocus.lab.run_folder.results import NGRAM, SEQUENCES, Evaluation, Induction, Recall, RunInfo
from softfocus.lab.studies.worker import passkey_lengths, possible_settings

LOGS = "logs"

Status = Literal["waiting", "starting", "training", "evaluating", "finished", "diverged", "failed"]

TRAINING = 0.9
"""The share of a model's time that is training, the rest being evaluation: measured on the demo's
recipes, two cores.
"""


@dataclass
class Job:
    """One model, and how far it is."""

    label: str
    recipe: Recipe
    folder: Path
    log: Path
    lengths: list[int]
    evaluation: Evaluation
    status: Status = "waiting"
    trained: bool = False
    """Whether an earlier call trained it to the end. It is then only evaluated."""
    steps_done: int = 0
    """Steps of a training that an earlier call began, up to its newest checkpoint."""
    error: str = ""
    replaced: str = ""
    """What its measurement will replace, and why; empty where nothing will be lost."""
    event: Event | None = None
    share: float = 0.0
    _began: tuple[float, float] | None = field(default=None, repr=False)
    _now: float = 0.0

    def take(self, event: Event, now: float) -> None:
        """Take in an event that reached us at `now`, on the monotonic clock."""
        if event.kind not in ("step", "row") or not event.total:
            return
        if event.kind == "step":
            self.event = event
        part = event.done / event.total
        self.share = TRAINING * part if self.status == "training" else TRAINING + (1 - TRAINING) * part
        # A resumed run begins in the middle, so the pace is that of this session
        self._began = self._began or (now, self.share)
        self._now = now

    @property
    def trained_share(self) -> float:
        """The share of the steps that an earlier call has done."""
        return 1.0 if self.trained else self.steps_done / self.recipe.train.steps

    @property
    def row(self) -> str:
        """The name of the study's row."""
        return self.recipe.name.removesuffix(f"-s{self.recipe.train.seed}")

    @property
    def pace(self) -> float | None:
        """Seconds for the whole of a model at the speed so far, without start-up."""
        if self._began is None or self.share <= self._began[1]:
            return None
        return (self._now - self._began[0]) / (self.share - self._began[1])

    @property
    def facts(self) -> str:
        """Loss and speed."""
        if self.status in ("failed", "diverged"):
            return self.error
        if self.event is None or self.status not in ("training", "evaluating"):
            return ""
        loss = f"loss {self.event.loss:.3f}  " if self.event.loss is not None else ""
        speed = self.event.tokens_per_second
        return loss + (f"{speed:,.0f} {self.recipe.data.parts}/s" if speed else "")


def plan_jobs(folder: Path, recipes: Sequence[Recipe], labels: Sequence[str], *, overwrite: bool = False) -> list[Job]:
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
            evaluation=empty_evaluation(recipe),
        )
        for recipe, label in zip(recipes, labels, strict=True)
    ]
    for job in jobs:
        if not overwrite and _is_finished(job):
            job.status = "finished"
        elif not overwrite and (diverged := divergence(job.folder)):
            job.status, job.error = "diverged", diverged.error or ""
        job.trained = not overwrite and _is_trained(job)
        if job.status == "waiting" and not overwrite and not job.trained and (job.folder / RUN).exists():
            job.steps_done = next(map(step_of, checkpoints_in(job.folder / CHECKPOINTS)), 0)
        job.share = TRAINING * job.trained_share
    return jobs


def refuse_other_data(jobs: Sequence[Job]) -> None:
    """Runs that are compared read the same data: those that are trained already, and those that
    will be trained or evaluated. (A file of a text may have changed since, or Python, whose sources
    are "stdlib".)

    Raises:
        LabError: a trained run has read other data than its recipe stands for now.
    """
    left = {job.recipe.data for job in jobs if job.status == "waiting"}
    if not left:
        return
    from softfocus.lab.data import of_recipe  # imports torch, which takes seconds

    keys: dict[DataTable, str] = {}
    for job in jobs:
        data = job.recipe.data
        # Early runs do not know what they were trained on
        if not job.trained or data not in left or not (before := load_run(job.folder).corpus_key):
            continue
        if data not in keys:
            keys[data] = of_recipe.key(job.recipe)
        if before != keys[data]:
            raise LabError(
                f"{job.folder} was trained on {before}, and what is left would be trained or evaluated on "
                f"{keys[data]}: the corpus (or its tokenizer) has changed, or moved, or was copied",
                "put it back as it was, choose another folder with --out, or train all runs again with --overwrite; "
                f"`softfocus evaluate {job.folder}` evaluates one run alone, whatever its corpus is now",
            )


def missing_lines(jobs: Sequence[Job]) -> list[str]:
    """The report's lines about failed jobs, without paths."""
    lost = [job for job in jobs if job.status == "failed"]
    return [f"{job.label} is missing: {job.error.replace(str(job.folder), job.folder.name)}" for job in lost]


def again(overwrite: bool) -> str:
    """How a call is made that goes on with what this one has done."""
    return "started again without --overwrite" if overwrite else "started again"


def refuse_failed(jobs: Sequence[Job], *, overwrite: bool = False) -> None:
    """After the report on the others has been written.

    Args:
        jobs: of the call.
        overwrite: whether it trained again what was there.

    Raises:
        LabError: at least one job failed.
    """
    if failed := [job for job in jobs if job.status == "failed"]:
        what = "; ".join(f"{job.label}: {job.error} (log: {job.log})" for job in failed)
        raise LabError(
            f"{len(failed)} of {len(jobs)} models failed: {what}", f"{again(overwrite)}, the command goes on with those"
        )


def empty_evaluation(recipe: Recipe) -> Evaluation:
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


def _is_trained(job: Job) -> bool:
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
    before, now = (flat(recipe.model_dump(include={"model", "data", "train"})) for recipe in (there, job.recipe))
    if found := differences(before, now):
        others = ", and others" if len(found) > 3 else ""
        raise LabError(
            f"{job.folder} holds a run of another recipe: {', '.join(found[:3])}{others}",
            "give the same options as before, choose another folder with --out, or train it again with --overwrite",
        )
    try:
        load_run(job.folder)
        if job.recipe.data.kind == "task":
            # It imports torch, which takes seconds and which text does without
            from softfocus.lab.evaluate.recall import is_measured

            return is_measured(job.folder, job.lengths)
        if not _is_evaluated(job, there.evaluate.tokens):
            return False
        return all(_is_measured(job, kind) for kind in job.recipe.evaluate.also)
    except LabError:  # not trained to its end, not measured, damaged, or of another version
        return False


def _is_evaluated(job: Job, tokens: int) -> bool:
    """Whether evaluation.json, of so many tokens, holds all losses; it is then put into the job."""
    found, wanted = load_measured(job.folder, Evaluation), job.recipe.evaluate.tokens
    planned = {(length, setting) for length in job.lengths for setting in possible_settings(job.recipe, job.folder)}
    # Runs are compared on the same text. Early evaluations do not say how many tokens were wanted
    asked = found.asked or tokens
    same_text = asked == wanted and found.longest in (0, max(job.lengths))
    if not same_text and found.rows:
        longest = found.longest or max(row.length for row in found.rows)
        before = f"{asked:,} tokens, at up to {longest:,} each"
        now = f"{wanted:,}, at up to {max(job.lengths):,}"
        job.replaced = f"its {len(found.rows)} losses are of other text ({before}; asked for are {now})"
    if not same_text or not planned <= {(row.length, row.setting) for row in found.rows}:
        return False
    job.evaluation = found
    return True


def _is_measured(job: Job, kind: str) -> bool:
    """Whether what else a study measures of a text, a word of `evaluate.also`, is there."""
    if kind == "attention":
        wanted, token = {job.recipe.train.length, max(job.lengths)}, load_run(job.folder).token
        return any(
            (run.text, run.tokens) == (VALIDATION_TEXT, TOKENS)
            and run.token in ("", token)
            and wanted <= {row.length for row in run.rows}
            for run in read(job.folder / INSPECTION / RESULTS).runs
        )
    if kind == "induction":
        found = load_measured(job.folder, Induction)
        as_asked = found.ngram == NGRAM and (found.corpus_key, found.longest, found.tokens) == job.evaluation.text_key
        return as_asked and set(job.lengths) <= {row.length for row in found.rows if not row.window}
    if kind == "passkeys":
        rows = [row for row in load_measured(job.folder, Recall).rows if not row.window and row.sequences >= SEQUENCES]
        return set(passkey_lengths(job.recipe, job.lengths)) <= {row.length for row in rows}
    # Induction and recall are written row by row, these when all is measured
    return (job.folder / {"classification": CLASSIFICATION, "tasks": TASKS}[kind]).exists()


def divergence(folder: Path) -> RunInfo | None:
    """What is known of a training that has diverged; None where it has not. It would diverge again,
    so it is not repeated.
    """
    with suppress(LabError):  # whoever trains there says what is wrong with the folder
        if (folder / RUN).exists() and (info := load_run(folder, complete=False)).status == "diverged":
            return info
    return None
