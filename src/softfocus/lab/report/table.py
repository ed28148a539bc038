"""The table of losses over length, for a terminal: it can be drawn while it is still filling."""

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from softfocus.lab.report.points import (
    Axis,
    Cell,
    Group,
    cell,
    column_name,
    columns,
    predicts,
    settings,
    shared_columns,
    tokens_at,
    unit,
)

PENDING = "…"
ABSENT = "–"


def loss_table(
    groups: Sequence[Group],
    *,
    planned: Sequence[float] | None = None,
    axis: Axis = "multiple",
) -> Table:
    """Losses over length: one line a group of runs and setting, the lowest loss of each column in
    bold.

    Args:
        groups: what is known so far.
        planned: the columns of a table that is still filling; what is missing in them shows as "…".
            Without it the table is final, and a length at which a run was not evaluated shows as
            "–".
        axis: what lengths are counted in.

    Returns:
        A table of means over the runs of each group, with their standard deviation below where
        there are several. Its last column is the gain from context at the longest length that all
        groups share.
    """
    across = list(planned) if planned is not None else columns(groups, axis)
    ends = across if planned is not None else shared_columns(groups, axis)
    last = ends[-1] if ends else None
    blank = ABSENT if planned is None else PENDING

    what = f"{unit(groups)}, and share of wrong ones" if predicts(groups) else unit(groups)
    table = Table(title=f"Validation loss, {what}", title_justify="left", box=box.SIMPLE)
    table.add_column("setting")
    table.add_column("model")
    for column in across:
        table.add_column(_head(groups, column, axis), justify="right", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)
    for name in settings(groups):
        lines = [[cell(group, column, name, axis) for column in across] for group in groups]
        best = [_lowest([line[place] for line in lines]) for place in range(len(across))]
        for index, (group, line) in enumerate(zip(groups, lines, strict=True)):
            end = cell(group, last, name, axis) if last else None
            gain = end.gain if end else None
            table.add_row(
                name if index == 0 else "",
                Text(group.label + (f"\nsd of {group.count}" if len(group.evaluations) > 1 else "")),
                *(_loss(one, blank, low) for one, low in zip(line, best, strict=True)),
                f"{gain.value:z.3f}" if gain and math.isfinite(gain.value) else Text(blank, style="dim"),
                end_section=index == len(groups) - 1,
            )
    return table


def _head(groups: Sequence[Group], column: float, axis: Axis) -> str:
    """A length in multiples, with the tokens below it where all runs agree on them."""
    tokens = tokens_at(groups, column, axis)
    return column_name(column, axis) + (f"\n{tokens:,}" if tokens else "")


def _lowest(cells: Sequence[Cell | None]) -> float | None:
    losses = [one.loss for one in cells if one is not None and math.isfinite(one.loss)]
    return min(losses) if len(losses) > 1 else None


def _loss(one: Cell | None, blank: str, lowest: float | None) -> Text:
    if one is None:
        return Text(blank, style="dim")
    if not math.isfinite(one.loss):
        return Text("nan" if math.isnan(one.loss) else "inf", style="red")
    text = Text(f"{one.loss:.3f}", style="bold" if one.loss == lowest else "")
    return text if math.isnan(one.spread) else text.append(f"\n{one.spread:.3f}", style="not bold dim")
