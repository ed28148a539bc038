"""What `softfocus heads` shows: which heads far keys disturb, as a table, a sentence and a
figure.
"""

import math
from pathlib import Path

from rich.table import Table

from softfocus.lab.evaluate.heads import head_name
from softfocus.lab.evaluate.means import Mean, holm_rejections, t_outside
from softfocus.lab.report.curves import Line, Point, curve_table
from softfocus.lab.report.figure import PALETTE, save_png, titled
from softfocus.lab.run_folder.results import HeadRow, HeadsMeasured

FIGURE = "heads.png"


def mean(found: HeadsMeasured, row: HeadRow) -> Mean:
    """The mean loss of a row; differences of rows are paired by document."""
    return Mean.of(row.sums, [windows * found.length for windows in row.windows], (found.corpus_key, len(row.sums)))


def gains(found: HeadsMeasured) -> list[tuple[HeadRow, Mean]]:
    """What each single head's window takes off the loss, the most first."""
    base = mean(found, found.rows[0])
    single = [(row, base - mean(found, row)) for row in found.rows if row.layer is not None]
    return sorted(single, key=lambda pair: -pair[1].value)


def heads_table(found: HeadsMeasured) -> Table:
    """A row for each head, the most disturbed first, below the model as it is and with all heads
    narrowed.
    """
    base = mean(found, found.rows[0])
    narrowed = [("all", mean(found, row)) for row in found.rows[1:2]]
    narrowed += [(head_name(row.layer, row.head), mean(found, row)) for row, _ in gains(found)]
    lines = [Line("none", [_point(0, base)])]
    lines += [Line(name, [_point(0, loss), _point(1, base - loss)]) for name, loss in narrowed]
    title = (
        f"Loss in windows of {found.length:,} tokens when a head sees the last {found.window:,} keys only; "
        f"{found.tokens:,} tokens"
    )
    return curve_table(title, "narrowed", lines, {0: "loss", 1: "less than without"})


def sentence(found: HeadsMeasured) -> str:
    """Whether far keys disturb some head for certain, and which most. By Holm's correction over all
    heads: of many one would gain by noise.
    """
    ordered = gains(found)
    p_values = sorted(_p_value(gain) for _, gain in ordered)
    limit = [*p_values, math.inf][holm_rejections(p_values, len(p_values))]
    sure = [(row, gain) for row, gain in ordered if _p_value(gain) < limit]
    if not sure:
        return "No head alone is better with the window for certain."
    row, gain = sure[0]
    others = "; ".join(head_name(row.layer, row.head) for row, _ in sure[1:])
    more = f" They disturb these for certain, too: {others}." if others else ""
    # A head above it in the table may gain more, but not for certain
    much = "most" if row is ordered[0][0] else "for certain"
    head = head_name(row.layer, row.head)
    return f"Far keys disturb {head} {much}: its window takes {gain.value:.3f} off the loss.{more}"


def _p_value(gain: Mean) -> float:
    """How often noise gives a gain so far from zero, to either side; 1 where there is none."""
    if not gain.value > 0 or math.isnan(gain.standard_error):
        return 1.0
    return t_outside(gain.value / gain.standard_error, gain.freedom) if gain.standard_error > 0 else 0.0


def save_heads_figure(found: HeadsMeasured, folder: Path) -> None:
    """Write heads.png beside heads.json: a bar for each head, in the order of the model."""
    by_place = sorted(gains(found), key=lambda pair: (pair[0].layer or 0, pair[0].head or 0))
    title = f"{found.run}: heads that far keys disturb"
    with titled((max(5.5, 0.5 * len(by_place)), 4.2), title) as figure:
        ax = figure.subplots()
        errors = [0.0 if math.isnan(gain.standard_error) else gain.standard_error for _, gain in by_place]
        ax.bar(
            [f"{row.layer}.{row.head}" for row, _ in by_place],
            [gain.value for _, gain in by_place],
            yerr=errors,
            color=PALETTE[0][0],
            capsize=3,
        )
        ax.axhline(0, color="black", linewidth=1.0)
        ax.set_xlabel("layer.head that keeps to the last keys")
        ax.set_ylabel("loss taken off (nats per token)")
        save_png(figure, folder / FIGURE)


def _point(column: int, value: Mean) -> Point:
    return Point(column, value.value, value.standard_error)
