"""A report on finished runs: results.json, figure1.png and report.html, all computed from what the
run folders hold.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from softfocus.lab.progress import say
from softfocus.lab.report.notes import notes, provenance
from softfocus.lab.report.points import Axis
from softfocus.lab.report.results import FIGURE, PAGE, RESULTS, Entry, Report, lost_lines
from softfocus.lab.report.table import loss_table
from softfocus.lab.run_folder.disk import write_atomically
from softfocus.lab.run_folder.provenance import now
from softfocus.lab.run_folder.results import RunInfo, json_text


def build(
    entries: Sequence[Entry],
    *,
    title: str = "Loss over length",
    axis: Axis = "multiple",
    remarks: Sequence[str] = (),
    diverged: Sequence[RunInfo] = (),
) -> Report:
    """Compute a report from finished runs.

    Args:
        entries: the runs, in the order in which they are to stand.
        title: the page's heading.
        axis: what lengths are counted in, in the figure and the table.
        remarks: what the reader should know beyond what the runs themselves tell; stands first
            among the notes.
        diverged: trainings that diverged; named in the notes.
    """
    return Report(
        title=title,
        created=now(),
        axis=axis,
        notes=[*remarks, *lost_lines(diverged), *notes(entries, axis)],
        runs=list(entries),
        diverged=list(diverged),
    )


def write(report: Report, folder: Path) -> list[Path]:
    """Write results.json, figure1.png and report.html into a folder, each whole or not at all.

    Returns:
        The three paths, in that order.

    Raises:
        LabError: the folder cannot be written to.
    """
    # matplotlib takes a second to load, and a table needs none of it
    from softfocus.lab.report.figure import figure1, save_png
    from softfocus.lab.report.page import render

    paths = [folder / name for name in (RESULTS, FIGURE, PAGE)]
    write_atomically(paths[0], json_text(report))
    title = f"{report.title}\n{provenance(report)}"
    save_png(figure1(report.groups, title=title, axis=report.axis), paths[1])
    write_atomically(paths[2], render(report))
    return paths


def show(report: Report, paths: Sequence[Path], console: Console) -> None:
    """Print the table, what to keep in mind, the finding, and where the files lie."""
    console.print(loss_table(report.groups, axis=report.axis))
    for note in report.notes:
        say(console, f"Note: {note}", wrap=True)
    say(console, report.finding.sentence, style="bold", wrap=True)
    for path in paths:
        say(console, f"  {path}")
