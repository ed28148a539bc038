"""Tables and figures of anything measured with its standard error at several places: a line is a
name and its points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from softfocus.lab.report.figure import PALETTE, line_style, save_png, titled


@dataclass(frozen=True)
class Point:
    """A value and its error, NaN where it is unknown."""

    at: float
    value: float
    error: float
    note: str = ""


@dataclass(frozen=True)
class Line:
    """Points under a name."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Panel:
    """Lines on one pair of axes.

    Attributes:
        x: what `Point.at` is; its axis is logarithmic.
        y: what the values are.
        lines: what is drawn.
        level: a horizontal line, such as chance.
    """

    x: str
    y: str
    lines: Sequence[Line]
    level: float | None = None


def number(point: Point) -> str:
    """ "0.912 ± 0.010", with the note behind it."""
    error = "" if math.isnan(point.error) else f" ± {point.error:.3f}"
    return f"{point.value:.3f}{error}{point.note}"


def curve_table(title: str, first: str, lines: Sequence[Line], heads: dict[float, str], *, tall: bool = False) -> Table:
    """A row for each line and a column for each place; or the other way round.

    Args:
        title: above the table.
        first: what the rows' names are.
        lines: what is measured.
        heads: the places, and what they are called.
        tall: give each place a row, where there are many of them.
    """
    there = [{point.at: number(point) for point in line.points} for line in lines]
    cells = [[line.get(place, "–") for place in heads] for line in there]
    across, down = list(heads.values()), [line.name for line in lines]
    if tall:
        across, down, cells = down, across, [list(row) for row in zip(*cells, strict=True)]
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column(first, no_wrap=True)
    for head in across:
        table.add_column(head, justify="right", no_wrap=not tall)
    for name, row in zip(down, cells, strict=True):
        table.add_row(name, *row)
    return table


def save_curves(panels: Sequence[Panel], path: Path, *, title: str, train_length: int) -> None:
    """Write a figure as a PNG, whole or not at all: bars are the points' errors, dotted is the
    training length.
    """
    with titled((5.5 * len(panels), 4.6), title) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, panel in zip(grid, panels, strict=True):
            for index, line in enumerate(panel.lines):
                errors = [0.0 if math.isnan(point.error) else point.error for point in line.points]
                places, values = [point.at for point in line.points], [point.value for point in line.points]
                colour, style = PALETTE[index % len(PALETTE)][0], line_style(index)
                ax.errorbar(places, values, errors, fmt=style, marker="o", capsize=3, color=colour, label=line.name)
            ax.axvline(train_length, color="black", linestyle=":", linewidth=1.2)
            if panel.level is not None:
                ax.axhline(panel.level, color="black", linestyle="--", linewidth=1.0)
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            ax.minorticks_off()
            ax.set_xlabel(panel.x)
            ax.set_ylabel(panel.y)
            ax.legend(fontsize=9)
        save_png(figure, path)
