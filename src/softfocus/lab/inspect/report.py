"""Inspections of several runs together: inspect.json, two figures, one page, and a table for the
terminal.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softfocus.lab.errors import LabError
from softfocus.lab.inspect import figure, page
from softfocus.lab.inspect.results import MAPS_FIGURE, MEASURES_FIGURE, PAGE, RESULTS, Inspection, Inspections, read
from softfocus.lab.inspect.run import Map
from softfocus.lab.progress import say
from softfocus.lab.report.points import labels
from softfocus.lab.run_folder.disk import write_atomically
from softfocus.lab.run_folder.provenance import now

TITLE = "What attention looks at"


def write(found: Sequence[tuple[Inspection, Sequence[Map]]], folder: Path) -> tuple[Inspections, list[Path]]:
    """Write everything into a folder, each file whole or not at all.

    Returns:
        What inspect.json holds, and the four paths.

    Raises:
        LabError: the folder cannot be written to.
    """
    result = Inspections(created=now(), runs=[one for one, _ in found])
    names, maps = labels(result.runs), [its for _, its in found]
    paths = [folder / name for name in (RESULTS, PAGE, MAPS_FIGURE, MEASURES_FIGURE)]
    write_atomically(paths[0], result.model_dump_json(indent=2) + "\n")
    write_atomically(paths[1], page.render(result, names, maps, TITLE))
    title = f"{TITLE}\n{page.provenance(result)}"
    figure.save_maps(list(zip(names, result.runs, maps, strict=True)), paths[2], title)
    figure.save_measures(list(zip(names, result.runs, strict=True)), paths[3], title)
    return result, paths


def say_replaced(folder: Path, found: Sequence[Inspection], console: Console) -> None:
    """Say what an earlier inspect.json of the folder holds and this one will not: other runs, and
    the same runs on another text, at other lengths or of another training.
    """
    with contextlib.suppress(LabError):
        if not (folder / RESULTS).exists():
            return
        now = {one.run: one for one in found}
        lost = []
        for one in read(folder / RESULTS).runs:
            same = now.get(one.run)
            if same is None:
                lost.append(one.run)
            elif one.token != same.token:
                lost.append(f"{one.run} of another training")
            elif (one.text, one.tokens, one.lengths) != (same.text, same.tokens, same.lengths):
                lengths = ", ".join(f"{length.length:,}" for length in one.lengths)
                lost.append(f"{one.run} on {one.text}, {one.tokens:,} tokens at lengths {lengths}")
        if lost:
            what = f"{folder / RESULTS} and its page are replaced. They also held {'; '.join(lost)}"
            say(console, f"Note: {what}. Choose another folder with --out to keep both", wrap=True)


def show(found: Inspections, paths: Sequence[Path], console: Console) -> None:
    """Print the table, a sentence for each run, and where the files lie."""
    names = labels(found.runs)
    for name, one in zip(names, found.runs, strict=True):
        console.print(table(name, one))
    for name, one in zip(names, found.runs, strict=True):
        say(console, page.sentence(name, one), style="bold", wrap=True)
    for path in paths:
        say(console, f"  {path}")


def table(name: str, one: Inspection) -> Table:
    """What the layers of a run are like, length by length."""
    drawn = Table(title=f"{name}: weights of a row", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("length", "layer", *page.COLUMNS.values()):
        drawn.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for length in one.lengths:
        for number, (layer, row) in enumerate(page.lines(one, length.length)):
            values = [page.text(measure, getattr(row, measure).mean) for measure in page.COLUMNS]
            name = f"{length.length:,}" if number == 0 else ""
            drawn.add_row(name, layer, *map(Text, values), end_section=layer == "all")
    return drawn
