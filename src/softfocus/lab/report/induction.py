"""What `softfocus induction` shows: a table and a figure of the loss by distance of the latest
repeat.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from softfocus.lab.evaluate.induction import difference
from softfocus.lab.report.curves import Line, Panel, Point, curve_table, save_curves
from softfocus.lab.run_folder.results import Induction, Repeats

FIGURE = "induction.png"


def induction_table(found: Induction) -> Table:
    """A row for each length and window, a column for each bucket of distances.

    The last rows are what the keys beyond a window change: the loss as trained less that with the
    window, of the same tokens, paired by document.
    """
    parts = {part.start: part for row in found.rows for part in row.by_distance}
    return curve_table(
        f"Loss by tokens since the same {found.ngram} tokens stood before; {found.tokens:,} tokens, "
        f"{found.documents} documents",
        "windows of",
        [*_lines(found), *_differences(found)],
        {_place(part): f"{_name(part)}\n{part.tokens:,} tokens" for part in parts.values()},
    )


def save_induction_figure(found: Induction, folder: Path) -> None:
    """Write induction.png beside induction.json. Tokens that repeat nothing are in the table
    alone.
    """
    lines = [Line(line.name, [point for point in line.points if point.at > 0]) for line in _lines(found)]
    panel = Panel("distance to the latest repeat (tokens)", "loss (nats per token)", lines)
    title = f"{found.run}: loss on repeated {found.ngram}-grams (dotted: training length)"
    save_curves([panel], folder / FIGURE, title=title, train_length=found.train_length)


def _lines(found: Induction) -> Iterator[Line]:
    for row in found.rows:
        narrow = f", window {row.window}" if row.window else ""
        points = [Point(_place(part), part.loss, part.standard_error) for part in row.by_distance]
        yield Line(f"{row.length / found.train_length:g}x{narrow}", points)


def _differences(found: Induction) -> Iterator[Line]:
    """What the keys beyond each window change at each length that was measured with and without
    it.
    """
    whole = {row.length: row.by_distance for row in found.rows if not row.window}
    for row in found.rows:
        if not row.window or row.length not in whole:
            continue
        pairs = zip(whole[row.length], row.by_distance, strict=True)
        apart = [(part, difference(part, narrow)) for part, narrow in pairs]
        points = [Point(_place(part), mean.value, mean.standard_error) for part, mean in apart if mean is not None]
        if points:
            yield Line(f"{row.length / found.train_length:g}x, as trained less window {row.window}", points)


def _place(part: Repeats) -> float:
    return math.sqrt(part.start * part.end)


def _name(part: Repeats) -> str:
    return f"{part.start:,} to {part.end - 1:,}" if part.start else "never"
