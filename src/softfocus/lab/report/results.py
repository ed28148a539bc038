"""results.json: the runs of a report with all that it shows, and reading it back."""

import contextlib
import json
import tomllib
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, computed_field, model_validator
from pydantic_core import PydanticCustomError
from rich.console import Console

from softfocus.lab.errors import LabError, first_mistake
from softfocus.lab.progress import say
from softfocus.lab.report.finding import Finding, finding
from softfocus.lab.report.points import Axis, Group, groups
from softfocus.lab.run_folder.files import EVALUATION, RECIPE, load_measured, load_run
from softfocus.lab.run_folder.provenance import without_folders
from softfocus.lab.run_folder.results import Evaluation, Record, RunInfo

RESULTS = "results.json"
FIGURE = "figure1.png"
PAGE = "report.html"
SCHEMA_VERSION = 2
_NEWER = "newer"
"""The type of pydantic's error where a file is of a later version."""

_Kind = TypeVar("_Kind", bound=BaseModel)


class Entry(Record):
    """One run in a report."""

    info: RunInfo
    evaluation: Evaluation
    recipe: str = Field(default="", description="the resolved recipe, as TOML")

    @model_validator(mode="after")
    def _has_rows(self) -> "Entry":
        if not self.evaluation.rows:
            raise ValueError(f"the evaluation of {self.info.name} has no rows")
        return self


class Report(Record):
    """Everything that a report shows. results.json is this, and reads back equal.

    The finding follows from the runs, so it is computed anew when a file is read: early files hold
    another kind.
    """

    schema_version: int = SCHEMA_VERSION
    title: str
    created: datetime
    axis: Axis = "multiple"
    notes: list[str] = Field(description="what to keep in mind when the runs are held against each other")
    runs: list[Entry]
    diverged: list[RunInfo] = Field(default=[], description="trainings that diverged, so that they have no losses")

    @model_validator(mode="before")
    @classmethod
    def _without_finding(cls, values: Any) -> Any:
        if isinstance(values, dict):
            kept = {key: value for key, value in values.items() if key != "finding"}
            version = kept.get("schema_version")
            if isinstance(version, int) and version > SCHEMA_VERSION:
                raise PydanticCustomError(
                    _NEWER, f"schema_version is {version}, and this softfocus reads up to {SCHEMA_VERSION}"
                )
            return kept | ({"schema_version": SCHEMA_VERSION} if isinstance(version, int) else {})
        return values

    @computed_field(description="who is better where")  # type: ignore[prop-decorator]
    @cached_property
    def finding(self) -> Finding:
        """Who is better where, by how much, and whether that is more than noise."""
        return finding(self.groups, self.axis)

    @cached_property
    def groups(self) -> list[Group]:
        """The runs, those of one model with different seeds together."""
        return grouped(self.runs)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations, in the report's order."""
        return [entry.evaluation for entry in self.runs]


def grouped(entries: Sequence[Entry]) -> list[Group]:
    """The runs, those of one model with different seeds together."""
    return groups([entry.evaluation for entry in entries], [entry.recipe for entry in entries])


def load_entry(folder: Path) -> Entry:
    """Read what a run folder holds.

    Raises:
        LabError: not a run folder, a run that did not finish, or one without an evaluation.
    """
    info, evaluation = load_run(folder), load_measured(folder, Evaluation)
    if not evaluation.rows:
        raise LabError(
            f"{folder / EVALUATION} has no rows", f"evaluate the run again with `softfocus evaluate {folder}`"
        )
    return Entry(info=info, evaluation=evaluation, recipe=load_recipe_text(folder))


def load_recipe_text(folder: Path) -> str:
    """The resolved recipe of a run without names of folders; "" where an early run has none.

    Raises:
        LabError: the recipe is damaged, or missing in a run that is not an early one.
    """
    recipe, lacks = folder / RECIPE, ""
    try:
        text = recipe.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except FileNotFoundError:
        text, lacks = "", "is missing"
    except (OSError, ValueError) as error:
        text, lacks = "", f"cannot be read: {error}"
    else:
        if missing := [key for key in ("model", "data", "train") if key not in values]:
            lacks = f"is cut off: it has no [{missing[0]}]"
    if lacks and load_run(folder, complete=False).token:
        raise LabError(f"{recipe} {lacks}", "put back a copy, or train the run again")
    return without_folders(text)


def load_diverged(path: Path) -> RunInfo | None:
    """What run.json says where a path is the folder of a run that diverged; None where it is not.

    Raises:
        LabError: no such folder, or one that is damaged.
    """
    if path.suffix == ".json":
        return None
    info = load_run(path, complete=False)
    return info if info.status == "diverged" else None


def lost_lines(diverged: Sequence[RunInfo]) -> list[str]:
    """The notes about trainings that diverged."""
    return [f"{info.name} is missing: {info.error or 'its training diverged'}" for info in diverged]


def refuse_twice(found: Sequence[tuple[Path, RunInfo]]) -> None:
    """Refuse a run that stands twice in a comparison: as two folders, or as a folder and in an
    earlier results.json.

    Args:
        found: each run, with the folder or the results.json that holds it.

    Raises:
        LabError: it does.
    """
    for index, (path, info) in enumerate(found):
        if first := next((one for one, other in found[:index] if _is_same(other, info)), None):
            what = f"the run {info.name} is there twice"
            if first == path:
                raise LabError(f"{what} in {path}", "write it again with `softfocus compare RUN... --out FOLDER`")
            if first.suffix == path.suffix == ".json":
                raise LabError(f"{what}: in {first} and in {path}", "leave one of them out, or name the runs' folders")
            if ".json" in (first.suffix, path.suffix):
                raise LabError(f"{what}: in {first} and in {path}", "name its folder or the results.json that holds it")
            raise LabError(f"{what}: {first} and {path} hold the same run", "leave one of them out")


def _is_same(one: RunInfo, other: RunInfo) -> bool:
    """Whether two are of one training: a copy may have been resumed since."""
    if one.token and other.token:
        return one.token == other.token
    return one.model_dump_json() == other.model_dump_json()  # a NaN read twice is not equal


def say_replaced(path: Path, runs: Sequence[RunInfo], console: Console) -> None:
    """Say which runs of an earlier results.json the one that replaces it does not hold. A file that
    holds no runs is replaced without a word.
    """
    before: list[tuple[str, str]] = []  # by name and mechanism: two runs of one recipe may share a name
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        held = [entry["info"] for entry in json.loads(path.read_text(encoding="utf-8"))["runs"]]
        before = [(info["name"], info["mechanism"]) for info in held]
    now = {(info.name, info.mechanism) for info in runs}
    names = {name for name, _ in now}
    if lost := [f"{one[0]} ({one[1]})" if one[0] in names else one[0] for one in before if one not in now]:
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        together = "`softfocus compare RUN...` shows runs together, if their folders are there"
        say(console, f"Note: {path} is replaced. It also held {', '.join(lost[:4])}{more}; {together}", wrap=True)


def read_as(kind: type[_Kind], path: Path) -> _Kind:
    """Read a results.json of a kind of report.

    Raises:
        LabError: no such file, or not one that this version wrote.
    """
    remedy = "write it again with `softfocus compare RUN... --out FOLDER`"
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}", remedy) from None
    except ValidationError as error:
        if error.errors()[0]["type"] == _NEWER:
            what = f"{path} was written by a newer version: {first_mistake(error)}"
            raise LabError(what, "update softfocus, or write the file with this version") from None
        raise LabError(f"{path} is not a report: {first_mistake(error)}", remedy) from None
