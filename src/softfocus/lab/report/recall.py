"""What `softfocus recall` shows: a table by length, a table by distance, and both as a figure."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Group, RenderableType

from softfocus.lab.report.curves import Line, Panel, Point, curve_table, save_curves
from softfocus.lab.run_folder.results import Recall, RecallRow

FIGURE = "recall.png"
BLIND = "*"


def recall_tables(recall: Recall) -> RenderableType:
    """Right answers by length and by distance, whatever a row's window."""
    lengths = sorted({row.length for row in recall.shown})
    limits = sorted({(part.start, part.end) for row in recall.shown for part in row.by_distance})
    tables: list[RenderableType] = [
        curve_table(
            f"Right answers; chance is {recall.rows[0].chance_text}",
            "lengthened by",
            [*_by_length(recall), *_complete(recall)],
            {length: f"{length / recall.train_length:g}x\n{length:,}" for length in lengths},
        ),
        f"Sequences per entry: {_counts(recall, lengths)}",
        curve_table(
            "Right answers by how many tokens back they lie, in the shortest sequences that reach so far",
            "tokens",
            list(_by_distance(recall)),
            {_middle(start, end): f"{start:,} to {end - 1:,}" for start, end in limits},
            tall=True,
        ),
    ]
    if any(row.blind for row in recall.shown):
        tables.append(f"{BLIND} every answer lies beyond what the window reaches through all layers")
    return Group(*tables)


def save_recall_figure(recall: Recall, folder: Path) -> None:
    """Write recall.png beside recall.json."""
    level = recall.rows[0].chance
    panels = [
        Panel("sequence length (tokens)", "share of right answers", list(_by_length(recall)), level),
        Panel("distance to the answer (tokens)", "share of right answers", list(_by_distance(recall)), level),
    ]
    title = f"{recall.run}: recall beyond the training length (dotted); dashed: chance"
    save_curves(panels, folder / FIGURE, title=title, train_length=recall.train_length)


def _counts(recall: Recall, lengths: Sequence[int]) -> str:
    """Sequences of each length that were answered."""
    counts = []
    for length in lengths:
        of_rows = {row.sequences for row in recall.shown if row.length == length}
        counts.append(" to ".join(f"{count:,}" for count in sorted({min(of_rows), max(of_rows)})))
    if len(set(counts)) == 1:
        return f"{counts[0]} of each length"
    return ", ".join(f"{count} of {length:,} tokens" for count, length in zip(counts, lengths, strict=True))


def _by_length(recall: Recall) -> Iterator[Line]:
    for name, rows in _groups(recall):
        yield Line(name, [Point(r.length, r.accuracy, r.standard_error, BLIND if r.blind else "") for r in rows])


def _complete(recall: Recall) -> Iterator[Line]:
    for name, rows in _groups(recall):
        yield Line(f"{name}: whole sequences", [Point(r.length, r.complete, r.complete_error) for r in rows])


def _by_distance(recall: Recall) -> Iterator[Line]:
    """One length has room for few distances, so the lengths are put together; the shortest counts
    where they meet.
    """
    for name, rows in _groups(recall):
        found: dict[float, Point] = {}
        for row in rows:
            for part in row.by_distance:
                place = _middle(part.start, part.end)
                note = BLIND if row.blind else ""
                found.setdefault(place, Point(place, part.accuracy, part.standard_error, note))
        yield Line(name, sorted(found.values(), key=lambda point: point.at))


def _groups(recall: Recall) -> Iterator[tuple[str, list[RecallRow]]]:
    for (window, grown), rows in groupby(recall.shown, key=lambda row: (row.window, row.grown)):
        narrow = f", window {window}" if window else ""
        yield ("more to remember" if grown else "more filler") + narrow, list(rows)


def _middle(start: int, end: int) -> float:
    return math.sqrt(max(start, 1) * end)
