"""The files of a run folder: their names, writing them, and reading them back as parts of one
run.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError

from softfocus.lab.errors import LabError, first_mistake
from softfocus.lab.run_folder.disk import write_atomically
from softfocus.lab.run_folder.manifest import token_of
from softfocus.lab.run_folder.owner import holder, owning
from softfocus.lab.run_folder.results import (
    Classification,
    Evaluation,
    HeadsMeasured,
    Induction,
    Labelled,
    Recall,
    Row,
    RunInfo,
    Tasks,
    Unfinished,
    json_text,
)

_log = logging.getLogger(__name__)

RUN = "run.json"
RECIPE = "recipe.toml"
MODEL = "model"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
EVALUATION = "evaluation.json"
UNFINISHED = "evaluation.unfinished.json"
RECALL = "recall.json"
INDUCTION = "induction.json"
HEADS = "heads.json"
CLASSIFICATION = "classification.json"
UNFINISHED_CLASSIFICATION = "classify.unfinished"  # a folder; of fine-tunings on labelled examples, too
LABELLED = "labelled.json"
TASKS = "tasks.json"
INSPECTION = "inspect"

GONE = "its process is gone"
"""What is known of a run that was killed, or ended by NCCL, before it could write down why."""

MEASURED: dict[type[BaseModel], tuple[str, str]] = {
    Evaluation: (EVALUATION, "evaluate it with `softfocus evaluate {}`"),
    Recall: (RECALL, "run `softfocus recall {}`"),
    Induction: (INDUCTION, "run `softfocus induction {}`"),
    HeadsMeasured: (HEADS, "run `softfocus heads {}`"),
    Classification: (CLASSIFICATION, "run `softfocus classify {}`"),
    Labelled: (LABELLED, "run `softfocus classify {} --data FOLDER`"),
    Tasks: (TASKS, "run the study or claim of {} again"),
}
"""What a finished run may be measured by: the file, and how to make it."""

Measured = TypeVar("Measured", Evaluation, Recall, Induction, HeadsMeasured, Classification, Labelled, Tasks)
_ByRow = TypeVar("_ByRow", Recall, Induction, HeadsMeasured)
_Model = TypeVar("_Model", bound=BaseModel)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def refuse_file(folder: Path) -> None:
    """Raise LabError where a file is in the place of a run folder."""
    if folder.exists() and not folder.is_dir():
        raise LabError(f"{folder} is a file, not a folder", "choose another folder with --out")


def save_run(folder: Path, info: RunInfo) -> None:
    """Write run.json, whole or not at all."""
    write_atomically(folder / RUN, json_text(info))


def load_run(folder: Path, *, complete: bool = True) -> RunInfo:
    """Read run.json. A run that it calls running, but that no process owns, was killed: it is
    returned as interrupted.

    Args:
        folder: the run folder.
        complete: refuse a run that has not finished.

    Raises:
        LabError: no such folder, no run in it, a run that did not finish, files of two trainings,
            or a file that cannot be read.
    """
    if not folder.is_dir():
        raise _no_run(folder)
    missing = f"{folder} is not a run folder: it has no {RUN}"
    damaged = f"put back a copy, or train again with {to_train_again(folder)}, which replaces the folder"
    info = read_json(folder / RUN, RunInfo, missing, _TRAIN, damaged)
    if info.status == "running" and holder(folder) is None:
        info = read_json(folder / RUN, RunInfo, missing, _TRAIN, damaged)  # it may just have finished
        if info.status == "running":
            info.status, info.error = "interrupted", GONE
    for part, token in ((RECIPE, recipe_token(folder)), (MODEL, token_of(folder / MODEL))):
        if token not in (None, info.token):
            raise LabError(
                f"{folder} holds parts of two trainings: its {part} is not of the run that {RUN} tells of",
                "put back the one that belongs to it, or train again with --overwrite",
            )
    if complete and info.status != "complete":
        _refuse_unfinished(folder, info)
    return info


def _refuse_unfinished(folder: Path, info: RunInfo) -> None:
    if info.status == "running" and (by := holder(folder)):
        raise LabError(f"the run {folder} is not finished: it is being trained by {by}", "wait until that is done")
    why = f" ({info.error})" if info.error else ""
    what = f"the run {folder} is not finished: its status is {info.status}{why}"
    if info.status == "diverged":
        raise LabError(what, "train another recipe; this one diverges again")
    raise LabError(what, f"finish it with {to_resume(folder)}")


def to_resume(folder: Path) -> str:
    """The command that goes on with a run, for a sentence."""
    return f"`softfocus train {folder / RECIPE} --out {folder} --resume`"


def to_train_again(folder: Path) -> str:
    """The command that trains a run from its start, for a sentence."""
    return f"`softfocus train {folder / RECIPE} --out {folder} --overwrite`"


def clear_run(folder: Path) -> None:
    """Delete a run, all but its recipe, which marks the folder as the lab's."""
    # run.json first: without it nothing that is left looks like a run
    (folder / RUN).unlink(missing_ok=True)
    for name in (MODEL, CHECKPOINTS, TENSORBOARD, INSPECTION, UNFINISHED_CLASSIFICATION):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (UNFINISHED, *(name for name, _ in MEASURED.values())):
        (folder / name).unlink(missing_ok=True)
        (folder / name).with_suffix(".png").unlink(missing_ok=True)


def write_recipe(folder: Path, recipe: str, token: str) -> None:
    """Write recipe.toml, TOML with the run's token in a comment, whole or not at all."""
    write_atomically(folder / RECIPE, f"{_TOKEN_LINE}{token}\n{recipe}")


_TOKEN_LINE = "# Resolved. Of the run "
_TRAIN = "train one with `softfocus train RECIPE --out FOLDER`"


def recipe_token(folder: Path) -> str | None:
    """The token in recipe.toml, "" where early runs have none; None where there is no recipe."""
    with suppress(OSError):  # whoever needs the recipe says what is wrong with it
        first = (folder / RECIPE).read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        return first.removeprefix(_TOKEN_LINE) if first.startswith(_TOKEN_LINE) else ""
    return None


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders of checkpoints, the newest first, damaged ones included."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def measures(function: Callable[Concatenate[Path, _P], _R]) -> Callable[Concatenate[Path, _P], _R]:
    """Decorates what measures a finished run and writes into its folder, which nobody else then
    does meanwhile.
    """

    @wraps(function)
    def locked(folder: Path, *arguments: _P.args, **options: _P.kwargs) -> _R:
        load_run(folder)  # where there is no finished run, nothing is written
        with owning(folder):
            return function(folder, *arguments, **options)

    return locked


def save_measured(folder: Path, result: Measured) -> None:
    """Write evaluation.json, or what else :data:`MEASURED` names, whole or not at all.

    Raises:
        LabError: the run is no longer the one that was measured, or the file cannot be written.
    """
    if load_run(folder, complete=False).token != result.token:
        raise LabError(f"the run {folder} was trained again while it was measured", "measure it again")
    write_atomically(folder / MEASURED[type(result)][0], json_text(result))


def _no_run(folder: Path) -> LabError:
    """Runs are in runs/ unless a command is told otherwise: its users forget to write it."""
    there = Path("runs") / folder.name
    return LabError(
        f"there is no run at {folder}", f"name {there}, which is one" if (there / RUN).is_file() else _TRAIN
    )


def load_measured(folder: Path, kind: type[Measured]) -> Measured:
    """Read evaluation.json, or what else :data:`MEASURED` names.

    Raises:
        LabError: no such folder, no such file in it, one of another training, or one that cannot be
            read.
    """
    name, command = MEASURED[kind]
    if not folder.is_dir():
        raise _no_run(folder)
    remedy = command.format(folder)
    found = read_json(folder / name, kind, f"the run {folder} has no {name}", remedy)
    if found.token != load_run(folder, complete=False).token:
        raise LabError(f"{folder / name} is of another training than {RUN} beside it", f"delete it; then {remedy}")
    return found


def with_rows_so_far(folder: Path, fresh: _ByRow) -> _ByRow:
    """What the file of a measurement holds if it is of the same one, rows and the run's name aside;
    else the fresh one.
    """
    path = folder / MEASURED[type(fresh)][0]
    if not path.exists():
        return fresh
    found = load_measured(folder, type(fresh))
    if found.model_copy(update={"rows": [], "run": fresh.run}) == fresh:
        return found
    _log.warning(
        "%s held %d rows that were measured otherwise (other text or options); they are gone", path, len(found.rows)
    )
    return fresh


def load_unfinished(folder: Path, key: str) -> list[Row]:
    """The rows of an evaluation of the same key that was stopped; none where the file is of another
    key or damaged.
    """
    try:
        found = Unfinished.model_validate_json((folder / UNFINISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found.rows if found.key == key else []


def read_json(path: Path, model: type[_Model], missing: str, remedy: str, damaged: str | None = None) -> _Model:
    """Read what is kept as JSON.

    Raises:
        LabError: no such file (`missing`, `remedy`), or one that cannot be read (`damaged`, or else
            delete it, and `remedy`).
    """
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LabError(missing, remedy) from None
    except ValidationError as error:
        what = f"{path} cannot be read: {first_mistake(error)}"
        raise LabError(what, damaged or f"delete it; then {remedy}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path} cannot be read: {error}", damaged or remedy) from error
