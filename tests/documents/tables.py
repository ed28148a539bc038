"""What stands in the tables of several pages, made from the committed results."""

import re
import statistics
from collections.abc import Iterable, Sequence

from softfocus.lab.evaluate.means import Estimate, Mean
from softfocus.lab.report.points import Cell, Group, cell

from .committed import FAR, HERE, WINDOWED, report

NAMES = {
    "lssa-hybrid": "local LSSA layers, global LSSAR, p = 31, half of RoPE",
    "lssa-local": "local LSSA layers, global LSSA",
    "hybrid-half-rope": "local softmax layers, global LSSAR, p = 31, half of RoPE",
    "LSSAR": "LSSAR, p = 15, in every layer",
    "LSSA": "LSSA in every layer",
    "softplus_l1": "softplus in place of the exponential, in every layer",
    "LASER": "LASER in every layer",
    "hybrid": "the same with all of RoPE",
    "local-cosine": "local softmax layers, global cosine softmax with log N",
    "local-softmax": "local softmax layers, global softmax",
    "local-nope": "local softmax layers, global softmax without RoPE",
    "cosine-local": "local cosine softmax layers, global cosine softmax, with log N",
    "local-ssmax": "local softmax layers, global SSMax",
    "softplus-local": "local softplus layers, global softplus",
    "laser-local": "LASER, every other layer local",
    "laser(softplus_l1)": "LASER over softplus, in every layer",
    "laser-softplus-local": "LASER over softplus, every other layer local",
    "laser-lssa-local": "LASER over LSSA, every other layer local",
    "cosine-nope": "global heads",
    "softmax-pair-head": "Softmax with a previous-token head in layer 0",
}
"""The rows of studies of layouts, as pages name them."""
COLUMNS = {"1x": HERE, "16x, as trained": FAR, "16x, window": WINDOWED}


def tables_of(page: str) -> dict[str, str]:
    """What stands between marks, by their name."""
    found = re.findall(r"<!-- (\w+):begin -->\n(.*?)\n<!-- \1:end -->", page, re.DOTALL)
    assert len(dict(found)) == page.count(":begin -->"), "each mark has its end, and occurs once"
    return dict(found)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return "\n".join([first.replace("|  |", "| |"), "|" + "---|" * len(header), *others])


def shown(found: Estimate | Mean, sign: str = "") -> str:
    return f"{found.value:{sign}.3f} ± {found.standard_error:.3f}"


def said(found: Estimate) -> str:
    return shown(found, "+") + ("" if found.sure else ", inconclusive")


def over_seeds(values: Sequence[float], digits: int = 3, scale: float = 1.0) -> str:
    """Mean and standard error of seeds."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{scale * statistics.mean(values):z.{digits}f} ± {scale * error:.{digits}f}"


def shown_loss(one: Cell) -> str:
    """The mean of a group of runs, and their standard deviation if there are several."""
    return f"{one.loss:.3f}" + (f" ± {one.spread:.3f}" if len(one.rows) > 1 else "")


def shown_losses(group: Group, columns: Iterable[tuple[float, str]] = COLUMNS.values()) -> list[str]:
    return [shown_loss(cell(group, *at)) for at in columns]


def scale_table(study: str) -> str:
    """Losses of a study at 1x and 16x, as trained and with the window, by layout."""
    groups = sorted(report(study).groups, key=lambda group: cell(group, *HERE).loss)
    rows = ([group.first.mechanism, str(len(group.evaluations)), *shown_losses(group)] for group in groups)
    return table(["layout", "seeds", *COLUMNS], rows)


def rates_table(rates: Iterable[str], rows: dict[str, Iterable[float | None]]) -> str:
    """Losses at 1x by row and learning rate."""
    cells = ([name, *("" if one is None else f"{one:.3f}" for one in losses)] for name, losses in rows.items())
    return table(["loss at 1x", *rates], cells)
