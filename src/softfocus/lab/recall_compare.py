"""Runs that were trained on one generated task, held against each other: results.json, a table and a figure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from softfocus.lab.curves import Line, Panel, Point, curve_table, save_curves
from softfocus.lab.disk import write_atomically, writing
from softfocus.lab.errors import LabError
from softfocus.lab.means import Mean, estimate
from softfocus.lab.points import without_seed
from softfocus.lab.provenance import without_folders
from softfocus.lab.recall_report import BLIND
from softfocus.lab.results import RECIPE, Recall, RecallRow, RunInfo, json_text, load_recall, load_run

RESULTS = "results.json"
FIGURE = "figure1.png"
_WAYS = ((False, "more filler"), (True, "more to remember"))


class RecallEntry(BaseModel):
    """One run."""

    model_config = ConfigDict(extra="forbid")

    info: RunInfo
    recall: Recall
    recipe: str


class RecallReport(BaseModel):
    """Everything that the table and the figure show. results.json is this, and reads back equal."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    title: str
    created: datetime
    notes: list[str]
    runs: list[RecallEntry]


def compare_recall(
    folders: Sequence[Path], out: Path, *, title: str, remarks: Sequence[str] = (), console: Console
) -> RecallReport:
    """Compare runs of one task; those whose recipes differ by seed and name alone are grouped.

    Raises:
        LabError: a run that is not finished or not measured, runs of several tasks or training lengths, seeds that share
            no length, or a folder that cannot be written to.
    """
    entries = [_entry(folder) for folder in folders]
    if len({(entry.recall.task, entry.recall.train_length) for entry in entries}) > 1:
        raise LabError("the runs were trained on different tasks or lengths", "compare runs of one task")
    drawn = [_lines(entries, grown) for grown, _ in _WAYS]
    if not any(drawn):
        raise LabError(
            "the seeds of each model share no length", "measure all of them at the same lengths with `softfocus recall`"
        )
    report = RecallReport(
        title=title, created=datetime.now(UTC).replace(microsecond=0), notes=[*remarks, *_notes(entries)], runs=entries
    )
    write_atomically(out / RESULTS, json_text(report))
    first = entries[0].recall
    panels = []
    for (_, name), lines in zip(_WAYS, drawn, strict=True):
        if lines:
            heads = {
                float(length): f"{length / first.train_length:g}x\n{length:,}"
                for length in sorted({int(point.at) for line in lines for point in line.points})
            }
            console.print(
                curve_table(
                    f"Right answers, lengthened by {name}; chance is {first.rows[0].chance:.3f}", "", lines, heads
                )
            )
            panels.append(
                Panel(f"sequence length (tokens), {name}", "share of right answers", lines, first.rows[0].chance)
            )
    for note in report.notes:
        console.print(f"Note: {note}", markup=False, highlight=False)
    with writing(out / FIGURE, "free some space or use another folder"):
        save_curves(panels, out / FIGURE, title=title, train_length=first.train_length)
    for name in (RESULTS, FIGURE):
        console.print(f"  {out / name}", markup=False, highlight=False, soft_wrap=True)
    return report


def _entry(folder: Path) -> RecallEntry:
    return RecallEntry(
        info=load_run(folder),
        recall=load_recall(folder),
        recipe=without_folders((folder / RECIPE).read_text(encoding="utf-8")),
    )


def _lines(entries: Sequence[RecallEntry], grown: bool) -> list[Line]:
    """One for each group of seeds and each window: the mean over the seeds, with its error from seeds and sequences.

    A length that one of the seeds lacks is left out.
    """
    groups = _groups(entries)
    names = [members[0].info.mechanism for members in groups]
    lines = []
    for members, name in zip(groups, names, strict=True):
        label = name if names.count(name) == 1 else f"{name} · {members[0].info.name}"
        found: dict[tuple[int, int], list[tuple[int, RecallRow]]] = {}
        for entry in members:
            for row in entry.recall.shown:
                if row.grown == grown:
                    found.setdefault((row.window or 0, row.length), []).append((entry.info.seed, row))
        whole = {place: rows for place, rows in sorted(found.items()) if len(rows) == len(members)}
        for window in dict.fromkeys(window for window, _ in whole):
            points = [_point(length, rows) for (its, length), rows in whole.items() if its == window]
            count = f" ({len(members)} seeds)" if len(members) > 1 else ""
            lines.append(Line(label + (f", window {window}" if window else "") + count, points))
    return lines


def _groups(entries: Sequence[RecallEntry]) -> list[list[RecallEntry]]:
    groups: dict[object, list[RecallEntry]] = {}
    for entry in entries:
        groups.setdefault(without_seed(entry.recipe), []).append(entry)
    return list(groups.values())


def _point(length: int, rows: Sequence[tuple[int, RecallRow]]) -> Point:
    mean = estimate([(seed, Mean(row.accuracy, row.standard_error)) for seed, row in rows])
    return Point(length, mean.value, mean.standard_error, BLIND if all(row.blind for _, row in rows) else "")


def _notes(entries: Sequence[RecallEntry]) -> list[str]:
    found = []
    if any(row.blind for entry in entries for row in entry.recall.shown):
        found.append(f"{BLIND} every answer lies beyond what the windows reach through all layers.")
    if any(len({frozenset(row.place for row in e.recall.shown) for e in group}) > 1 for group in _groups(entries)):
        found.append("Some lengths or windows were not measured on every seed: they are left out.")
    if len({entry.info.commit for entry in entries}) > 1:
        found.append("The runs differ in commit: it was not the same code that trained them.")
    if len({entry.info.seed for entry in entries}) == 1:
        found.append("One seed: the noise of training is not known.")
    return found
