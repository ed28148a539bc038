"""Any finished runs, compared: one table, one figure, one report."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from softfocus.lab.errors import LabError
from softfocus.lab.report.points import Axis
from softfocus.lab.report.recall_compare import RecallReport, compare_recall
from softfocus.lab.report.report import build, show, write
from softfocus.lab.report.results import (
    RESULTS,
    Entry,
    Report,
    load_diverged,
    load_entry,
    read_as,
    refuse_twice,
    say_replaced,
)
from softfocus.lab.run_folder.files import EVALUATION, RECALL
from softfocus.lab.run_folder.results import RunInfo

Comparison = Report | RecallReport


def compare(
    folders: Sequence[Path],
    out: Path,
    *,
    axis: Axis = "multiple",
    title: str | None = None,
    remarks: Sequence[str] = (),
    console: Console | None = None,
) -> Comparison:
    """Compare runs: print the table and the finding, write results.json, figure1.png and
    report.html.

    Runs that were trained on a generated task and measured by `softfocus recall` are compared by
    their right answers.

    A run that diverged is named in the notes and in results.json. It has no losses.

    Runs need not share a training length, the lengths at which they were evaluated, a recipe or a
    tokenizer; in what they differ is written into the report's notes.

    Args:
        folders: run folders, each trained and measured, in the order in which they are to stand. A
            results.json of an earlier comparison stands for its runs.
        out: where to write; made if need be.
        axis: count lengths in multiples of each run's own training length, or in tokens.
        title: the report's heading.
        remarks: what the reader should know beyond what the runs themselves tell.
        console: where to print; stdout if not given.

    Raises:
        LabError: no folder, the same run twice, one that is not finished and measured, runs of
            which some have losses and some right answers, or `out` cannot be written to.
    """
    if not folders:
        raise LabError("there is nothing to compare", "name at least one run folder")
    resolved = [folder.resolve() for folder in folders]
    for index, folder in enumerate(resolved):
        if folder in resolved[:index]:
            raise LabError(f"{folders[index]} is named twice", "name each run once")
    console = console or Console()
    lost = {folder: info for folder in folders if (info := load_diverged(folder)) is not None}
    if len(lost) < len(folders):  # where all diverged, reading the first one says so
        folders = [folder for folder in folders if folder not in lost]
    kinds = {_kind(folder): folder for folder in folders}
    if "recall" in kinds and "evaluation" in kinds:
        raise LabError(
            f"{kinds['recall']} holds shares of right answers, and {kinds['evaluation']} holds losses",
            "compare runs that were measured alike",
        )
    if "recall" in kinds:
        return compare_recall(
            folders,
            out,
            title=title or "Recall over length",
            remarks=remarks,
            diverged=lost,
            console=console,
        )
    # All are read before anything is written, so that a broken one leaves an older report as it was
    reports = [_read(folder) for folder in folders]
    entries = [entry for runs, _ in reports for entry in runs]
    diverged = [*(info for _, infos in reports for info in infos), *lost.values()]
    read = zip(folders, reports, strict=True)
    held = [(path, info) for path, (runs, infos) in read for info in (*(entry.info for entry in runs), *infos)]
    refuse_twice([*held, *lost.items()])
    report = build(entries, title=title or "Loss over length", axis=axis, remarks=remarks, diverged=diverged)
    say_replaced(out / RESULTS, [*(entry.info for entry in entries), *diverged], console)
    show(report, write(report, out), console)
    return report


def _kind(path: Path) -> str | None:
    """What was measured, "evaluation" or "recall"; None where neither can be told, which reading
    the path explains.
    """
    if path.suffix != ".json":
        return next(
            (kind for kind, name in (("evaluation", EVALUATION), ("recall", RECALL)) if (path / name).exists()), None
        )
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return "recall" if "recall" in json.loads(path.read_text())["runs"][0] else "evaluation"
    return None


def _read(path: Path) -> tuple[list[Entry], list[RunInfo]]:
    """The finished runs, and those that diverged."""
    if path.suffix != ".json":
        return [load_entry(path)], []
    report = read_as(Report, path)
    if not report.runs:
        raise LabError(f"{path} has no run", "leave it out, or write it again with `softfocus compare RUN...`")
    return report.runs, report.diverged
