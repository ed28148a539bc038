"""The figures: loss over length, loss over position, and training curves. As PNG for a file, as SVG for the page."""

import io
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from softfocus.lab.points import SCALINGS, Axis, cell, column_name, columns, labels
from softfocus.lab.results import Evaluation, RunInfo

# Okabe and Ito's palette, which people with any of the common colour blindnesses can tell apart, in an order that also
# differs in lightness; the second entry is the shade for a dark page. Softmax comes first in every shipped comparison.
PALETTE = (
    ("#5c5c5c", "#b9b9b9"),
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff8a3d"),
    ("#009e73", "#2fd3a4"),
    ("#b5548f", "#e39ac6"),
    ("#a67c00", "#f0e442"),
)
_PREFERRED = {"softmax": 0, "lssa": 1, "lssar": 2, "laser": 3}
_MARKERS = ("o", "s", "D", "^", "v", "P")

# Neutral colours that the page's stylesheet replaces in the SVG, so that one drawing suits light and dark
_TEXT, _RULE = "#1f2329", "#d0d3d9"
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _TEXT,
    "axes.labelcolor": _TEXT,
    "text.color": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _RULE,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
    "figure.dpi": 100,
}
PANEL = (5.4, 4.0)  # inches; narrow, so that text stays readable when a phone shrinks it
Draw = Callable[[Any], None]


def colours(evaluations: Sequence[Evaluation]) -> list[int]:
    """A place in the palette for each run."""
    return places([evaluation.mechanism for evaluation in evaluations])


def places(mechanisms: Sequence[str]) -> list[int]:
    """A place in the palette for each run, by its mechanism. The demo's four keep theirs in every figure, where free."""
    taken: list[int] = []
    for mechanism in mechanisms:
        free = [i for i in range(len(PALETTE)) if i not in taken] or [len(taken) % len(PALETTE)]
        wanted = _PREFERRED.get(mechanism)
        later = [i for i in free if i not in _PREFERRED.values()] or free
        taken.append(wanted if wanted in free else later[0])
    return taken


def figure1(evaluations: Sequence[Evaluation], *, title: str, axis: Axis = "multiple") -> Figure:
    """Loss over length: a panel for each scaling of RoPE, on one y axis."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for ax, (ntk, name) in zip(panels, SCALINGS, strict=True):
            _draw_lengths(ax, evaluations, ntk, axis)
            ax.set_title(f"RoPE: {name}")
        panels[1].set_ylabel("")
        panels[1].tick_params(labelleft=True)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, parse_math=False)  # "$" is a dollar
        return figure


def save_figure1(evaluations: Sequence[Evaluation], path: Path, *, title: str, axis: Axis = "multiple") -> None:
    """Write figure1 as a PNG, whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    figure = figure1(evaluations, title=title, axis=axis)
    try:
        figure.savefig(temporary, format="png", dpi=160, facecolor="white", metadata={"Title": title})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def length_svgs(evaluations: Sequence[Evaluation], *, axis: Axis = "multiple") -> list[str]:
    """Loss over length for a page: one drawing a scaling, on the same y axis, to stand side by side or not."""
    return _same_height([partial(_draw_lengths, evaluations=evaluations, ntk=ntk, axis=axis) for ntk, _ in SCALINGS])


def position_svgs(evaluations: Sequence[Evaluation]) -> list[str]:
    """Loss over the position inside the longest window of each run, one drawing a scaling, on the same y axis."""
    return _same_height([partial(_draw_positions, evaluations=evaluations, ntk=ntk) for ntk, _ in SCALINGS])


def training_svg(infos: Sequence[RunInfo], evaluations: Sequence[Evaluation]) -> str:
    """Training loss over steps."""
    return _same_height([partial(_draw_training, infos=infos, evaluations=evaluations)])[0]


def _draw_lengths(ax: Any, evaluations: Sequence[Evaluation], ntk: bool, axis: Axis) -> None:
    ticks = columns(evaluations, axis)
    ends = []
    for evaluation, label, colour in zip(evaluations, labels(evaluations), colours(evaluations), strict=True):
        rows = [(x, row) for x in columns([evaluation], axis) if (row := cell(evaluation, x, ntk, axis)) is not None]
        end = _line(ax, [(x, row.loss, row.standard_error) for x, row in rows], colour)
        ends.append((label, colour, end))
        if axis == "tokens":
            ax.axvline(evaluation.train_length, color=PALETTE[colour][0], linestyle=":", linewidth=1.2)
    if axis == "multiple":
        ax.axvline(1, color=_TEXT, linestyle=":", linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [_tick(evaluations, tick, axis) for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("evaluation length (tokens); dotted: training length")
    ax.set_ylabel("validation loss (nats per token)")
    _label_ends(ax, ends)


def _draw_positions(ax: Any, evaluations: Sequence[Evaluation], ntk: bool) -> None:
    ends = []
    for evaluation, label, colour in zip(evaluations, labels(evaluations), colours(evaluations), strict=True):
        rows = [row for row in evaluation.rows if row.ntk == ntk and row.buckets]
        longest = max(rows, key=lambda row: row.length, default=None)
        # A bucket stands at its geometric middle, which is its middle on a logarithmic axis; the first starts at 0
        middles = (
            [(math.sqrt(max(b.start, 1) * b.end), b.loss, b.standard_error) for b in longest.buckets] if longest else []
        )
        ends.append((label, colour, _line(ax, middles, colour)))
    for length in sorted({evaluation.train_length for evaluation in evaluations}):
        ax.axvline(length, color=_TEXT, linestyle=":", linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.set_xlabel("position in the window (tokens); dotted: training length")
    ax.set_ylabel("validation loss (nats per token)")
    _label_ends(ax, ends)


def _draw_training(ax: Any, infos: Sequence[RunInfo], evaluations: Sequence[Evaluation]) -> None:
    ends = []
    curves = zip(infos, labels(evaluations), colours(evaluations), strict=True)
    for info, label, colour in curves:
        points = [(float(step), loss, math.nan) for step, loss in info.train_loss]
        ends.append((label, colour, _line(ax, points, colour, markers=False)))
    ax.set_xlabel("optimiser step")
    ax.set_ylabel("training loss (nats per token)")
    _label_ends(ax, ends)


def _line(
    ax: Any, points: Sequence[tuple[float, float, float]], colour: int, *, markers: bool = True
) -> tuple[float, float] | None:
    """One line with its band of one standard error, with gaps where a loss is not finite; returns its last point."""
    shade, marker = PALETTE[colour][0], _MARKERS[colour] if markers else ""
    finite = [(x, y if math.isfinite(y) else math.nan, e if math.isfinite(e) else 0.0) for x, y, e in points]
    x, y, e = ([point[i] for point in finite] for i in range(3))
    ax.plot(x, y, color=shade, marker=marker)
    ax.fill_between(
        x,
        [a - b for a, b in zip(y, e, strict=True)],
        [a + b for a, b in zip(y, e, strict=True)],
        color=shade,
        alpha=0.2,
        linewidth=0,
    )
    drawn = [(a, b) for a, b, _ in finite if math.isfinite(b)]
    return drawn[-1] if drawn else None


def _label_ends(ax: Any, ends: Sequence[tuple[str, int, tuple[float, float] | None]]) -> None:
    """Write each label beside the end of its line, moved apart where lines end close together."""
    ax.yaxis.set_major_locator(MaxNLocator(6))
    low, high = ax.get_ylim()
    placed = sorted(ends, key=lambda end: end[2][1] if end[2] else math.inf)
    heights = spread([end[1] if end else high for _, _, end in placed], gap=0.062 * (high - low))  # a line of text
    for (label, colour, end), height in zip(placed, heights, strict=True):
        ax.annotate(
            label if end else f"{label}: diverged",
            xy=(1.0, height),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=PALETTE[colour][0],
            fontweight="bold",
            annotation_clip=False,
            parse_math=False,
        )
    ax.set_ylim(low, high)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending heights, moved as little as possible (in least squares) so that neighbours lie at least a gap apart."""
    # With i*gap taken off, "a gap apart" reads "not descending", and pooling neighbours that descend solves it
    groups: list[list[float]] = []
    for index, height in enumerate(wanted):
        groups.append([height - index * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    level = [fmean(group) for group in groups for _ in group]
    return [height + index * gap for index, height in enumerate(level)]


def _tick(evaluations: Sequence[Evaluation], column: float, axis: Axis) -> str:
    lengths = {round(column * evaluation.train_length) for evaluation in evaluations}
    name = column_name(column, axis).replace("x", "×")
    return f"{lengths.pop():,}\n{name}" if axis == "multiple" and len(lengths) == 1 else name


def _same_height(draws: Sequence[Draw]) -> list[str]:
    """Draw each panel by itself, then all with the y limits that hold every one."""
    with rc_context(STYLE):
        figures = [Figure(figsize=PANEL, layout="constrained") for _ in draws]
        panels = [figure.subplots() for figure in figures]
        for ax, draw in zip(panels, draws, strict=True):
            draw(ax)
        low, high = min(ax.get_ylim()[0] for ax in panels), max(ax.get_ylim()[1] for ax in panels)
        for index, draw in enumerate(draws):
            figures[index] = Figure(figsize=PANEL, layout="constrained")
            ax = figures[index].subplots()
            ax.set_ylim(low, high)
            draw(ax)
        return [svg(figure) for figure in figures]


def svg(figure: Figure) -> str:
    """A drawing to stand inside an HTML page: no header, no metadata, colours as the page's variables."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)  # it would style the whole page
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # nothing refers to them, and every drawing has the same ones
    for index, (shade, _) in enumerate(PALETTE):
        text = text.replace(shade, f"var(--line-{index})")
    return text.replace(_TEXT, "currentColor").replace(_RULE, "var(--rule)")
