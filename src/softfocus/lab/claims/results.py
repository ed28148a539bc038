"""What the runs of a claim showed at one scale: results.json, and how it is made from run
folders.
"""

import math
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from softfocus.catalog import named
from softfocus.lab.claims.claim import Claim, Scale
from softfocus.lab.errors import LabError
from softfocus.lab.inspect import results as inspections
from softfocus.lab.inspect.results import Row as Attention
from softfocus.lab.recipes.loading import changed, flat
from softfocus.lab.recipes.recipe import Recipe, toml_value
from softfocus.lab.report.points import Group
from softfocus.lab.report.results import load_recipe_text
from softfocus.lab.run_folder.files import INSPECTION, load_measured, load_run, read_json
from softfocus.lab.run_folder.provenance import now, without_folders
from softfocus.lab.run_folder.results import (
    Bucket,
    Classification,
    Evaluation,
    Induction,
    InductionRow,
    Recall,
    RecallRow,
    Record,
    Row,
    RunInfo,
    Tasks,
)
from softfocus.mechanism import Mechanism

RESULTS = "results.json"
FIGURE = "figure.png"
SIZES = "sizes.png"
TRAINING = "training.png"
POWERS = "powers.png"
SHARES = "shares.png"
_Windowed = TypeVar("_Windowed", InductionRow, RecallRow)
WINDOW = "window 1x"
"""The setting of the yardstick: softmax that sees a window of the training length."""


class Run(Record):
    """One training of a row."""

    row: str
    info: RunInfo
    recipe: str = Field(description="the resolved recipe, as TOML, without names of folders")
    evaluation: Evaluation | None = Field(description="None where training diverged")
    attention: list[Attention] = Field(
        default=[], description="what its attention is like, a row a length, with evaluate.also = ['attention']"
    )

    classification: Classification | None = Field(default=None, description="with evaluate.also = ['classification']")

    induction: list[InductionRow] = Field(
        default=[],
        description="loss by distance of what repeats, a row a length, with evaluate.also = ['induction']",
    )

    passkeys: list[RecallRow] = Field(
        default=[], description="shares of passkeys that were found, a row a length, with evaluate.also = ['passkeys']"
    )

    tasks: Tasks | None = Field(default=None, description="with evaluate.also = ['tasks']")

    @property
    def also(self) -> list[str]:
        """The words of evaluate.also whose measurements it holds."""
        held = "attention", "classification", "induction", "passkeys", "tasks"
        return [word for word in held if getattr(self, word)]

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """What was noted over the training: (step, value) by name."""
        losses = {"validation loss": self.info.validation_loss} if self.info.validation_loss else {}
        return losses | {f"gradient of the {name} projections": c for name, c in self.info.projection_norms.items()}

    @property
    def shares(self) -> dict[str, float]:
        """What was measured beside losses, by name: shares of answers, or of probabilities."""
        trained = self.info.train_length
        found = {"right after fine-tuning": self.classification.accuracy} if self.classification else {}
        for passkey in self.passkeys:
            found[f"passkeys found at {passkey.length / trained:g}x"] = passkey.accuracy
        for task in self.tasks.rows if self.tasks else ():
            found[f"right in {task.task}"] = fmean(task.right)
        for row in self.attention:
            for limit, share in (("1e-3", row.below_1e_3), ("1e-7", row.below_1e_7)):
                found[f"below {limit} at {row.length / trained:g}x"] = share.mean
        return found

    @property
    def settled(self) -> int:
        """The first logged step that is judged. Each entry holds the largest gradient since the
        entry before it; from here on, that is after twice the warm-up.

        The first steps have the largest gradients of most trainings, whatever the mechanism. They
        fall until some steps after the learning rate has risen to its height.
        """
        train = tomllib.loads(self.recipe)["train"]
        return 2 * int(train.get("warmup", 0)) + int(train.get("log_every", 0))

    @property
    def gradients(self) -> tuple[float, float] | None:
        """The largest norm of the gradient once it has settled, NaN if training ended before, and
        the median of the whole training; None where none was noted.
        """
        norms, settled = self.info.gradient_norm, self.settled  # which reads the recipe
        late = [norm for at, norm in norms if at >= settled]
        return (max(late, default=math.nan), median(norm for _, norm in norms)) if norms else None

    @property
    def diverged(self) -> bool:
        """Whether training went wrong for good; info.error says at which step."""
        return self.info.status == "diverged"


class Results(Record):
    """All runs of a claim at one scale."""

    claim: str
    scale: Scale
    created: datetime
    overrides: list[str] = Field(
        default=[], description="keys that --set changed in all rows, without names of folders"
    )
    missing: list[str] = Field(default=[], description="runs that failed for reasons that say nothing about the claim")
    runs: list[Run]

    @model_validator(mode="after")
    def _each_run_once(self) -> Self:
        """Otherwise one of them would weigh double."""
        runs = [(run.row, run.info.seed) for run in self.runs]
        if twice := [one for number, one in enumerate(runs) if one in runs[:number]]:
            raise ValueError(f"the run {twice[0][0]}-s{twice[0][1]} is there twice")
        return self

    def of(self, row: str) -> list[Run]:
        """The trainings of a row, by seed."""
        return sorted((run for run in self.runs if run.row == row), key=lambda run: run.info.seed)

    @cached_property
    def rows(self) -> list[str]:
        """The names of the rows that have runs."""
        return list(dict.fromkeys(run.row for run in self.runs))

    @cached_property
    def by_power(self) -> list[tuple[float | None, str]]:
        """The rows that differ in the power of their re-weighting alone, by it; first, with None,
        that without re-weighting. Nothing where fewer than five rows do.
        """
        families: dict[Mechanism, list[tuple[float | None, str]]] = {}
        for row in self.rows:
            with suppress(ValueError):  # an algebra of the recipe's own, which has no name
                mechanism = named(self.of(row)[0].info.mechanism)
                families.setdefault(mechanism.replace(power=None), []).append((mechanism.power, row))
        most = max(families.values(), key=len, default=[])
        found = sorted(most, key=lambda one: one[0] or 0.0)
        return found if len(found) == len({power for power, _ in found}) > 4 else []

    def group(self, row: str) -> Group | None:
        """The evaluations of a row as reports take them; None where no training of it came to
        one.
        """
        found = tuple(run.evaluation for run in self.of(row) if run.evaluation is not None)
        return Group(row, found) if found else None

    def yardstick(self, claim: Claim) -> Group | None:
        """What every row stands beside, with WINDOW: the row that the claim names, or the only row
        that runs softmax, whatever its architecture. None where there is no such row, or several,
        of different sizes, say.
        """
        if claim.yardstick is not None:
            return self.group(claim.yardstick)
        found = dict.fromkeys(run.row for run in self.runs if run.info.mechanism == "softmax")
        return self.group(*found) if len(found) == 1 else None


def collect(
    claim: Claim,
    scale: Scale,
    plan: Sequence[Recipe],
    folder: Path,
    missing: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> Results:
    """Results from the run folders of those recipes whose training is over.

    Args:
        claim: whose rows they are.
        scale: of the recipes.
        plan: named "ROW-sSEED".
        folder: holds a run folder of each name.
        missing: what to say of runs that are not there.
        overrides: what was changed in all rows: `"data.source=texts"`.

    Raises:
        LabError: a folder that cannot be read.
    """
    runs = []
    for recipe in plan:
        place = folder / recipe.name
        info = load_run(place, complete=False)
        if info.status not in ("complete", "diverged"):
            continue
        measured = None if info.status == "diverged" else _slim(load_measured(place, Evaluation), recipe)
        row = recipe.name.removesuffix(f"-s{recipe.train.seed}")
        also = recipe.evaluate.also if measured is not None else []
        runs.append(
            Run(
                row=row,
                info=info,
                recipe=load_recipe_text(place),
                evaluation=measured,
                attention=_attention(place, info.token) if "attention" in also else [],
                classification=load_measured(place, Classification) if "classification" in also else None,
                induction=_without_window(load_measured(place, Induction).rows) if "induction" in also else [],
                passkeys=_without_window(load_measured(place, Recall).shown) if "passkeys" in also else [],
                tasks=load_measured(place, Tasks) if "tasks" in also else None,
            )
        )
    told = [without_folders(f"{key}={toml_value(value)}") for key, value in flat(changed(overrides)).items()]
    return Results(claim=claim.name, scale=scale, created=now(), overrides=told, missing=list(missing), runs=runs)


def _without_window(rows: Sequence[_Windowed]) -> list[_Windowed]:
    return [row for row in rows if not row.window]


def _attention(place: Path, token: str) -> list[Attention]:
    """The means over all layers, of the run of that token; early results have none."""
    file = place / INSPECTION / inspections.RESULTS
    for found in inspections.read(file).runs:
        if found.token in ("", token):
            return [row for row in found.rows if row.layer is None]
    raise LabError(f"{file} is not of this training", f"make it again with `softfocus inspect {place}`")


def _slim(evaluation: Evaluation, recipe: Recipe) -> Evaluation:
    """Without what no statement reads: losses by position, and mechanisms that another claim had
    evaluated.
    """
    wanted = {None, *recipe.evaluate.mechanisms}
    rows = [_whole(row) for row in evaluation.rows if row.setting.mechanism in wanted]
    return evaluation.model_copy(update={"rows": rows})


def _whole(row: Row) -> Row:
    """All positions in one bucket, which keeps the sums by document."""
    if len(row.buckets) < 2:
        return row
    sums = np.sum([bucket.sums for bucket in row.buckets], axis=0).round(4).tolist()
    one = Bucket(
        start=0,
        end=row.length,
        loss=row.loss,
        standard_error=row.standard_error,
        tokens=row.tokens,
        sums=sums,
    )
    return row.model_copy(update={"buckets": [one]})


def read(path: Path) -> Results:
    """Read a results.json.

    Raises:
        LabError: no such file, or not one that this version wrote.
    """
    return read_json(path, Results, f"there is no {path}", "make it again with `softfocus reproduce NAME`")
