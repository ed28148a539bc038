"""The table of losses over length, for a terminal: it can be drawn while it is still filling."""

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from softfocus.lab.points import SCALINGS, Axis, cell, column_name, columns, growth, shared_columns
from softfocus.lab.results import Evaluation, Row

PENDING = "…"
ABSENT = "–"


def loss_table(
    runs: Sequence[tuple[str, Evaluation | None]],
    *,
    planned: Sequence[float] | None = None,
    axis: Axis = "multiple",
    title: str | None = "Validation loss, nats per token",
) -> Table:
    """Losses over length: one line a run and scaling of RoPE, the lowest loss of each column in bold.

    Args:
        runs: a label and what is known so far; None for a run that has no number yet.
        planned: the columns of a table that is still filling; what is missing in them shows as "…". Without it the
            table is final, and a length at which a run was not evaluated shows as "–".
        axis: what lengths are counted in.
        title: above the table.

    Returns:
        A table whose last column is the loss at the longest length that all runs share, over the run's own at 1x.
    """
    known = [evaluation for _, evaluation in runs if evaluation is not None]
    across = list(planned) if planned is not None else columns(known, axis)
    ends = across if planned is not None else shared_columns(known, axis)
    last = ends[-1] if ends else None
    blank = ABSENT if planned is None else PENDING

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("RoPE", no_wrap=True)
    table.add_column("model", no_wrap=True)
    for column in across:
        table.add_column(_head(known, column, axis), justify="right", no_wrap=True)
    table.add_column(f"{column_name(last, axis)} / 1x" if last else "", justify="right", no_wrap=True)
    for ntk, name in SCALINGS:
        best = [_lowest([cell(e, column, ntk, axis) for e in known]) for column in across]
        for line, (label, evaluation) in enumerate(runs):
            rows = [cell(evaluation, column, ntk, axis) if evaluation else None for column in across]
            grown = growth(evaluation, last, ntk, axis) if evaluation and last else None
            table.add_row(
                name if line == 0 else "",
                Text(label),
                *(_loss(row, blank, low) for row, low in zip(rows, best, strict=True)),
                f"{grown.ratio:.3f}" if grown and math.isfinite(grown.ratio) else Text(blank, style="dim"),
                end_section=line == len(runs) - 1,
            )
    return table


def _head(known: Sequence[Evaluation], column: float, axis: Axis) -> str:
    """A length in multiples, with the tokens below it where all runs agree on them."""
    lengths = {round(column * evaluation.train_length) for evaluation in known}
    if axis == "tokens" or len(lengths) != 1:
        return column_name(column, axis)
    return f"{column_name(column)}\n{lengths.pop():,}"


def _lowest(rows: Sequence[Row | None]) -> float | None:
    losses = [row.loss for row in rows if row is not None and math.isfinite(row.loss)]
    return min(losses) if len(losses) > 1 else None


def _loss(row: Row | None, blank: str, lowest: float | None) -> Text:
    if row is None:
        return Text(blank, style="dim")
    if not math.isfinite(row.loss):
        return Text("nan" if math.isnan(row.loss) else "inf", style="red")
    return Text(f"{row.loss:.3f}", style="bold" if row.loss == lowest else "")
