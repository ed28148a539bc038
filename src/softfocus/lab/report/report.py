"""A report on finished runs: results.json, figure1.png and report.html, all computed from what the run folders hold."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator
from rich.console import Console

from softfocus.lab.errors import LabError
from softfocus.lab.report.finding import Finding, finding
from softfocus.lab.report.points import Axis, Group, best, column_name, groups, shared_columns
from softfocus.lab.report.table import loss_table
from softfocus.lab.run_folder.disk import write_atomically, writing
from softfocus.lab.run_folder.provenance import without_folders
from softfocus.lab.run_folder.results import RECIPE, Evaluation, RunInfo, json_text, load_evaluation, load_run

RESULTS = "results.json"
FIGURE = "figure1.png"
PAGE = "report.html"
SCHEMA_VERSION = 2

_Kind = TypeVar("_Kind", bound=BaseModel)


class Entry(BaseModel):
    """One run in a report."""

    model_config = ConfigDict(extra="forbid")

    info: RunInfo
    evaluation: Evaluation
    recipe: str = Field(default="", description="the resolved recipe, as TOML")


class Report(BaseModel):
    """Everything that a report shows. results.json is this, and reads back equal.

    The finding follows from the runs, so it is computed anew when a file is read: early files hold another kind.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    schema_version: int = SCHEMA_VERSION
    title: str
    created: datetime
    axis: Axis = "multiple"
    notes: list[str] = Field(description="what to keep in mind when the runs are held against each other")
    runs: list[Entry]

    @model_validator(mode="before")
    @classmethod
    def _without_finding(cls, values: Any) -> Any:
        if isinstance(values, dict):
            kept = {key: value for key, value in values.items() if key != "finding"}
            return kept | ({"schema_version": SCHEMA_VERSION} if "schema_version" in kept else {})
        return values

    @computed_field(description="who is better where")  # type: ignore[prop-decorator]
    @cached_property
    def finding(self) -> Finding:
        """Who is better where, by how much, and whether that is more than noise."""
        return finding(self.groups, self.axis)

    @cached_property
    def groups(self) -> list[Group]:
        """The runs, those together that differ by their seed alone."""
        return grouped(self.runs)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations, in the report's order."""
        return [entry.evaluation for entry in self.runs]


def grouped(entries: Sequence[Entry]) -> list[Group]:
    """The runs, those together that differ by their seed alone."""
    return groups([entry.evaluation for entry in entries], [entry.recipe for entry in entries])


def load_entry(folder: Path) -> Entry:
    """Read what a run folder holds.

    Raises:
        LabError: not a run folder, a run that did not finish, or one without an evaluation.
    """
    return Entry(info=load_run(folder), evaluation=load_evaluation(folder), recipe=load_recipe_text(folder))


def load_recipe_text(folder: Path) -> str:
    """The resolved recipe of a run without names of folders; "" where there is none."""
    recipe = folder / RECIPE
    return without_folders(recipe.read_text(encoding="utf-8")) if recipe.is_file() else ""


def refuse_twice(infos: Sequence[RunInfo]) -> None:
    """Refuse a run that stands twice in a comparison, as a folder and in an earlier results.json.

    Raises:
        LabError: it does.
    """
    for index, info in enumerate(infos):
        if info in infos[:index]:
            raise LabError(f"the run {info.name} is there twice", "name its folder or the results.json that holds it")


def build(
    entries: Sequence[Entry], *, title: str = "Loss over length", axis: Axis = "multiple", remarks: Sequence[str] = ()
) -> Report:
    """Compute a report from finished runs.

    Args:
        entries: the runs, in the order in which they are to stand.
        title: the page's heading.
        axis: what lengths are counted in, in the figure and the table.
        remarks: what the reader should know beyond what the runs themselves tell; stands first among the notes.
    """
    return Report(
        title=title,
        created=datetime.now(UTC).replace(microsecond=0),
        axis=axis,
        notes=[*remarks, *notes(entries, axis)],
        runs=list(entries),
    )


def write(report: Report, folder: Path) -> list[Path]:
    """Write results.json, figure1.png and report.html into a folder, each whole or not at all.

    Returns:
        The three paths, in that order.

    Raises:
        LabError: the folder cannot be written to.
    """
    from softfocus.lab.report.figure import (
        save_figure1,  # matplotlib takes a second to load, and a table needs none of it
    )
    from softfocus.lab.report.page import render

    paths = [folder / name for name in (RESULTS, FIGURE, PAGE)]
    write_atomically(paths[0], json_text(report))
    with writing(paths[1], "free some space or use another folder"):
        save_figure1(report.groups, paths[1], title=f"{report.title}\n{provenance(report)}", axis=report.axis)
    write_atomically(paths[2], render(report))
    return paths


def show(report: Report, paths: Sequence[Path], console: Console) -> None:
    """Print the table, what to keep in mind, the finding, and where the files lie."""
    console.print(loss_table(report.groups, axis=report.axis))
    for note in report.notes:
        console.print(f"Note: {note}", markup=False, highlight=False)
    console.print(report.finding.sentence, style="bold", markup=False, highlight=False)
    for path in paths:
        console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)


def read(path: Path) -> Report:
    """Read a results.json.

    Raises:
        LabError: no such file, or not one that this version wrote.
    """
    return read_as(Report, path)


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
        first = error.errors()[0]
        raise LabError(f"{path} is not a report: {'.'.join(map(str, first['loc']))}: {first['msg']}", remedy) from None


def provenance(report: Report) -> str:
    """Recipes, commits and seeds in one line: what a figure that is passed around must say about itself."""
    infos = [entry.info for entry in report.runs]
    return " · ".join(
        _several(one, many, [str(read_out(info)) for info in infos])
        for one, many, read_out in (
            ("recipe", "recipes", lambda info: info.recipe),
            ("commit", "commits", lambda info: short_commit(info.commit)),
            ("seed", "seeds", lambda info: info.seed),
        )
    )


def short_commit(commit: str) -> str:
    """A commit's first 10 digits, with its "+dirty"; anything else as it is."""
    digits, plus, dirty = commit.partition("+")
    return (digits[:10] if len(digits) == 40 else digits) + plus + dirty


def notes(entries: Sequence[Entry], axis: Axis = "multiple") -> list[str]:
    """In what the runs differ although a comparison takes it to be equal, and what else limits what they show."""
    found = _statistics(grouped(entries), axis)
    for what, read_out, consequence in _COMMON:
        values = list(dict.fromkeys(read_out(entry) for entry in entries))
        if len(values) > 1:
            found.append(f"The runs differ in {what} ({', '.join(values)}): {consequence}")
    found += _text_notes(entries)
    if any(entry.info.commit.endswith("+dirty") for entry in entries):
        found.append("The source tree had changes that the commit does not hold (+dirty).")
    for entry in entries:
        if entry.evaluation.seed != entry.info.seed or entry.evaluation.mechanism != entry.info.mechanism:
            found.append(f"{entry.info.name}: its evaluation belongs to another training; evaluate it again.")
    return found


def _statistics(found: Sequence[Group], axis: Axis) -> list[str]:
    """How to read the numbers."""
    shared = shared_columns(found, axis)
    if not shared:
        return []
    ends = [there for group in found if (there := best(group, shared[-1], axis)) is not None]
    said = [
        "±: one standard error, from the documents and, where there are several seeds, from those. Differences are paired "
        "by document and by seed. One within two standard errors is inconclusive. It takes more of them where there are "
        "few seeds or documents: 14 with two, 4.5 with three, 3.3 with four (Student's t)."
    ]
    if any(there.gain for there in ends):
        said.append(
            f"Gain: in windows of {column_name(shared[-1], axis)}, the loss at the positions of the first training length "
            "less the loss at all later positions of the same windows. Later text may be harder or easier for every "
            "model, so hold gains against each other."
        )
    if len(found) > 1 and not all(row.documents for there in ends for row in there.rows):
        said.append(
            "Some results hold no losses by document: their differences are not paired, and their standard errors too wide."
        )
    return said


_COMMON: tuple[tuple[str, Callable[[Entry], str], str], ...] = (
    (
        "vocabulary",
        lambda e: f"{e.evaluation.vocabulary:,}",
        "nats per token are not comparable, ratios to 1x only with care.",
    ),
    (
        "training length",
        lambda e: f"{e.evaluation.train_length:,}",
        "the same multiple is not the same number of tokens.",
    ),
    ("commit", lambda e: short_commit(e.info.commit), "it was not the same code that trained them."),
    (
        "training tokens",
        lambda e: f"{e.info.steps_done * e.info.tokens_per_step:,}",
        "a lower loss may come from more training.",
    ),
    ("size", lambda e: f"{e.info.parameters / 1e6:.2f} M parameters", "a lower loss may come from a larger model."),
)


def same_text(evaluations: Sequence[Evaluation]) -> bool:
    """Whether all are known to have read the same validation text, so that losses differ by model and length alone."""
    return len({evaluation.text for evaluation in evaluations}) == 1 and all(e.corpus_key for e in evaluations)


def _text_notes(entries: Sequence[Entry]) -> list[str]:
    """What the losses were measured on."""
    found = []
    texts = {entry.evaluation.text: entry.evaluation for entry in entries}
    for one in texts.values():
        if one.documents:
            found.append(
                f"Evaluated on {one.tokens:,} validation tokens{_of(one, entries)}: spans of {one.longest:,}, at random "
                f"places in {one.documents:,} documents, cut into windows of each length."
            )
        if one.crossing:
            found.append(
                f"{one.crossing} of the {one.tokens // one.longest} spans{_of(one, entries)} cross the end of a document: "
                "there, a long context is partly another text."
            )
    if len(texts) > 1:
        found.append("The runs were evaluated on different text: their losses are means over different tokens.")
    changed = [
        entry.info.name
        for entry in entries
        if "" not in (entry.info.corpus_key, entry.evaluation.corpus_key)
        and entry.info.corpus_key != entry.evaluation.corpus_key
    ]
    if changed:
        found.append(
            f"The corpus of {', '.join(changed)} changed (or moved, or was copied) after training: what it was evaluated on "
            "may have been trained on."
        )
    return found


def _of(one: Evaluation, entries: Sequence[Entry]) -> str:
    names = [entry.info.name for entry in entries if entry.evaluation.text == one.text]
    return f" ({', '.join(names)})" if len(names) < len(entries) else ""


def _several(one: str, many: str, values: Sequence[str]) -> str:
    values = list(dict.fromkeys(values))
    shown = ", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else "")
    return f"{one if len(values) == 1 else many} {shown}"
