"""Runs that were trained on one generated task: results.json, a table and a figure that
compare them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev

from pydantic import Field
from rich.console import Console

from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.means import Runs
from softfocus.lab.progress import say
from softfocus.lab.report.curves import Line, Panel, Point, curve_table, save_curves
from softfocus.lab.report.notes import DIRTY, is_dirty, training_notes
from softfocus.lab.report.points import count_text, labels, of_seeds, without_seed
from softfocus.lab.report.recall import BLIND
from softfocus.lab.report.recall_finding import Asked, RecallFinding, recall_finding, share_of
from softfocus.lab.report.results import (
    FIGURE,
    RESULTS,
    load_recipe_text,
    lost_lines,
    read_as,
    refuse_twice,
    say_replaced,
)
from softfocus.lab.run_folder.disk import write_atomically
from softfocus.lab.run_folder.files import load_measured, load_run
from softfocus.lab.run_folder.provenance import now
from softfocus.lab.run_folder.results import Recall, Record, RunInfo, json_text

_PANELS = ((False, "more filler"), (True, "more to remember"))


class RecallEntry(Record):
    """One run."""

    info: RunInfo
    recall: Recall
    recipe: str


@dataclass(frozen=True)
class RecallGroup:
    """Runs of one model with different seeds; most often one."""

    label: str
    entries: tuple[RecallEntry, ...]

    @property
    def title(self) -> str:
        """The label, with the number of runs where there are several."""
        seeds = [entry.info.seed for entry in self.entries]
        return self.label if len(seeds) == 1 else f"{self.label} ({count_text(seeds)})"

    @property
    def windows(self) -> list[int | None]:
        """The windows that it was measured with, first None, as trained."""
        found = {row.window for entry in self.entries for row in entry.recall.shown}
        return sorted(found, key=lambda window: window or 0)

    def points(self, grown: bool, window: int | None = None) -> list[Point]:
        """The share of right answers by length: a mean and standard deviation over seeds; one run's
        standard error.

        A length that one of the runs lacks is left out.
        """
        by_run = [
            {row.length: row for row in entry.recall.shown if (row.grown, row.window) == (grown, window)}
            for entry in self.entries
        ]
        found = []
        for length in sorted(set.intersection(*map(set, by_run))):
            rows = [run[length] for run in by_run]
            values = of_seeds((entry.info.seed, row.accuracy) for entry, row in zip(self.entries, rows, strict=True))
            spread = stdev(values) if len(values) > 1 else rows[0].standard_error
            found.append(Point(length, fmean(values), spread, BLIND if all(row.blind for row in rows) else ""))
        return found

    def shares(self, length: int, grown: bool, window: int | None = None) -> Runs:
        """The share of right answers of each run at one length, with its error over sequences."""
        place = length, grown, window
        return [
            (entry.info.seed, share_of(row))
            for entry in self.entries
            for row in entry.recall.shown
            if row.place == place
        ]


class RecallReport(Record):
    """Everything that the table and the figure show. results.json is this, and reads back equal."""

    title: str
    created: datetime
    notes: list[str]
    runs: list[RecallEntry]
    diverged: list[RunInfo] = Field(default=[], description="trainings that diverged, so that they were not measured")
    finding: RecallFinding | None = Field(default=None, description="None in results of earlier versions")


def grouped(entries: Sequence[RecallEntry]) -> list[RecallGroup]:
    """The runs, those of one model with different seeds together."""
    kinds: dict[object, list[RecallEntry]] = {}
    for index, entry in enumerate(entries):
        known = (without_seed(entry.recipe), entry.info.corpus_key) if entry.recipe else index
        kinds.setdefault(known, []).append(entry)
    first, several = zip(*((members[0].recall, len(members) > 1) for members in kinds.values()), strict=True)
    names = labels(first, several)
    return [RecallGroup(name, tuple(members)) for name, members in zip(names, kinds.values(), strict=True)]


def compare_recall(
    paths: Sequence[Path],
    out: Path,
    *,
    title: str,
    remarks: Sequence[str] = (),
    diverged: Mapping[Path, RunInfo] | None = None,
    console: Console,
) -> RecallReport:
    """Compare runs of one task; those that were trained alike but for the seed are grouped.

    Args:
        paths: run folders, or a results.json of an earlier comparison, which stands for its runs.
        out: where to write.
        title: the figure's heading.
        remarks: what the reader should know beyond what the runs themselves tell.
        diverged: trainings that diverged, beside those of the paths, by their folders; named in the
            notes.
        console: where to print.

    Raises:
        LabError: a run that is not finished or not measured, runs of several tasks or training
            lengths, a run that comes twice, seeds that share no length, or a folder that cannot be
            written to.
    """
    reports = [_read(path) for path in paths]
    entries = [entry for runs, _ in reports for entry in runs]
    diverged = diverged or {}
    lost = [*(info for _, infos in reports for info in infos), *diverged.values()]
    read = zip(paths, reports, strict=True)
    held = [(path, info) for path, (runs, infos) in read for info in (*(entry.info for entry in runs), *infos)]
    refuse_twice([*held, *diverged.items()])
    for path, (runs, _) in zip(paths, reports, strict=True):
        if empty := [entry.info.name for entry in runs if not entry.recall.rows]:
            raise LabError(
                f"{path}: the recall of {empty[0]} has no rows", "measure it again with `softfocus recall RUN`"
            )
    if len({(entry.recall.task, entry.recall.train_length) for entry in entries}) > 1:
        raise LabError("the runs were trained on different tasks or lengths", "compare runs of one task")
    groups = grouped(entries)
    drawn = [_lines(groups, grown) for grown, _ in _PANELS]
    if not any(drawn):
        raise LabError(
            "the seeds of each model share no length", "measure all of them at the same lengths with `softfocus recall`"
        )
    notes = [*remarks, *lost_lines(lost), *_notes(groups)]
    report = RecallReport(
        title=title, created=now(), notes=notes, runs=entries, diverged=lost, finding=_finding(groups)
    )
    say_replaced(out / RESULTS, [*(entry.info for entry in entries), *lost], console)
    write_atomically(out / RESULTS, json_text(report))
    first, panels = entries[0].recall, []
    chance = first.rows[0].chance
    for (_, name), lines in zip(_PANELS, drawn, strict=True):
        if lines:
            lengths = sorted({int(point.at) for line in lines for point in line.points})
            heads = {float(length): f"{length / first.train_length:g}x\n{length:,}" for length in lengths}
            heading = f"Right answers, lengthened by {name}; chance is {first.rows[0].chance_text}"
            console.print(curve_table(heading, "", lines, heads))
            panels.append(Panel(f"sequence length (tokens), {name}", "share of right answers", lines, chance))
    if report.finding:
        say(console, report.finding.sentence, wrap=True)
    for note in report.notes:
        say(console, f"Note: {note}", wrap=True)
    save_curves(panels, out / FIGURE, title="\n".join([title, *_errors(groups)]), train_length=first.train_length)
    for name in (RESULTS, FIGURE):
        say(console, f"  {out / name}")
    return report


def _read(path: Path) -> tuple[list[RecallEntry], list[RunInfo]]:
    """The finished runs, and those that diverged."""
    if path.suffix == ".json":
        report = read_as(RecallReport, path)
        return report.runs, report.diverged
    return [RecallEntry(info=load_run(path), recall=load_measured(path, Recall), recipe=load_recipe_text(path))], []


def _lines(groups: Sequence[RecallGroup], grown: bool) -> list[Line]:
    """One for each group and window in which all its runs share a length."""
    lines = []
    for group in groups:
        for window in group.windows:
            if points := group.points(grown, window):
                lines.append(Line(_windowed(group.title, window), points))
    return lines


def _windowed(name: str, window: int | None) -> str:
    return name + (f", window {window}" if window else "")


def _finding(groups: Sequence[RecallGroup]) -> RecallFinding:
    """At the training length, and at the longest length of either kind, of those that all groups
    have as trained. Windows are compared where they have the length.
    """
    asked: list[Asked] = []
    near = groups[0].entries[0].recall.train_length
    for grown, kind in _PANELS:
        lengths = {
            (group.label, window): {int(point.at) for point in group.points(grown, window)}
            for group in groups
            for window in group.windows
        }
        shared = set.intersection(*(lengths.get((group.label, None), set()) for group in groups))
        # At the training length the two kinds are the same sequences
        first = [near] if near in shared and near not in {one.length for one in asked} else []
        for length in first + [one for one in sorted(shared)[-1:] if one > near]:
            name = f"{length / near:g}x ({length:,} tokens)"
            shares = {
                _windowed(group.label, window): group.shares(length, grown, window)
                for group in groups
                for window in group.windows
                if length in lengths[group.label, window]
            }
            asked.append(Asked(length, grown, name if length == near else f"{name}, {kind},", shares))
    return recall_finding(asked)


def _notes(groups: Sequence[RecallGroup]) -> list[str]:
    """How to read the numbers, and in what the runs differ although a comparison takes it to be
    equal.
    """
    found = _errors(groups)
    entries = [entry for group in groups for entry in group.entries]
    if any(row.blind for entry in entries for row in entry.recall.shown):
        found.append(f"{BLIND} every answer lies beyond what the windows reach through all layers.")
    if any(len({frozenset(row.place for row in e.recall.shown) for e in group.entries}) > 1 for group in groups):
        found.append("Some lengths or windows were not measured on every seed: they are left out.")
    found += training_notes([entry.info for entry in entries])
    if any(is_dirty(entry.info) for entry in entries):
        found.append(DIRTY)
    return found


def _errors(groups: Sequence[RecallGroup]) -> list[str]:
    """What the errors are."""
    sizes = {len(group.entries) > 1 for group in groups}
    several = ["Several seeds: ± is their standard deviation."] if True in sizes else []
    one = ["One seed: ± is the standard error over sequences, and the noise of training is not known."]
    return several + (one if False in sizes else [])
