"""The figures: loss over length, loss over position, and training curves.

Over 400 lines: the drawings of a report share their lines, colours and ends.
"""

import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from softfocus.lab.report.points import (
    Axis,
    Cell,
    Group,
    best_setting,
    cell,
    column_name,
    columns,
    settings,
    tokens_at,
    unit,
)
from softfocus.lab.run_folder.disk import PARTIAL, writing
from softfocus.lab.run_folder.results import AS_TRAINED, WRONG, Bucket, RunInfo

# Okabe and Ito's palette, which people with any of the common colour blindnesses can tell apart, in
# an order that also differs in lightness; the second entry is the shade for a dark page. Softmax
# comes first in every shipped comparison.
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
_STYLES = ("-", "--", "-.", ":")

# Neutral colours that the page's stylesheet replaces in the SVG, so that one drawing suits light
# and dark
TEXT, RULE = "#1f2329", "#d0d3d9"
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
    "figure.dpi": 100,
}
PANEL = (5.4, 4.0)  # inches; narrow, so that text stays readable when a phone shrinks it
_LABEL, _MARGIN = 0.19, 0.95  # inches that a label takes, and that a panel has above and below its axes
BEST = "each under its best setting"
"""The name of a panel, as settings are names of panels."""
BANDS = (
    "Bands: one standard error of the difference from the lowest line (of the loss itself, where there is one line).\n"
    "Dots: every run of several seeds."
)
Ends = list[tuple[str, int, tuple[float, float] | None]]
"""Label, colour and last point of each line; no point where nothing could be drawn."""
Draw = Callable[[Any], Ends]


def colours(groups: Sequence[Group]) -> list[int]:
    """A place in the palette for each group. The demo's four keep theirs in every figure, where
    free.
    """
    return places([group.first.mechanism for group in groups])


def places(mechanisms: Sequence[str]) -> list[int]:
    """A place in the palette for each of these, by mechanism."""
    taken: list[int] = []
    for mechanism in mechanisms:
        free = [i for i in range(len(PALETTE)) if i not in taken] or [len(taken) % len(PALETTE)]
        wanted = _PREFERRED.get(mechanism)
        later = [i for i in free if i not in _PREFERRED.values()] or free
        taken.append(wanted if wanted in free else later[0])
    return taken


def line_style(index: int) -> str:
    """How the line of this number is drawn: in another way in each round of the palette."""
    return _STYLES[index // len(PALETTE) % len(_STYLES)]


def _wrapped(text: str, columns: int) -> str:
    """A text whose lines have at most so many characters. Matplotlib's own wrapping reads dollars
    as mathematics.
    """
    return "\n".join(part for line in text.split("\n") for part in textwrap.wrap(line, columns) or [""])


@contextmanager
def titled(
    size: tuple[float, float], title: str, *, fontsize: int = 12, style: dict[str, Any] = STYLE
) -> Iterator[Figure]:
    """A figure of so many inches to be drawn while this is entered, with its title at the top left,
    in as many lines as it takes.
    """
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        lines = _wrapped(title, columns=int(72 * size[0] / (0.6 * fontsize)))
        figure.suptitle(lines, x=0.01, ha="left", fontsize=fontsize, parse_math=False)  # "$" is a dollar
        yield figure


def figure1(
    groups: Sequence[Group], *, title: str, axis: Axis = "multiple", names: Sequence[str] | None = None
) -> Figure:
    """Loss over length, two panels a row.

    The panel :data:`BEST` shows each group with its best setting at the longest length, on a y axis
    of its own: who is ahead. Each other panel shows one setting, all on one y axis: what the
    setting does.

    Args:
        groups: a line each.
        title: above all panels.
        axis: what lengths are counted in.
        names: of panels, one below the other, in place of all.
    """
    names, most = (names, 1) if names else (panels(groups), 2)
    across, down = min(most, len(names)), math.ceil(len(names) / most)
    with titled((max(8.0, 5.5 * across), _height(len(groups)) * down + 1), title) as figure:
        grid = figure.subplots(down, across, squeeze=False).flatten()
        ends = [_draw_lengths(ax, groups, name, axis) for ax, name in zip(grid, names, strict=False)]
        for ax in grid[len(names) :]:
            ax.remove()
        _same_limits([ax for ax, name in zip(grid, names, strict=False) if name != BEST])
        for ax, name, lines in zip(grid, names, ends, strict=False):
            ax.set_title(name)
            _label_ends(ax, lines)
        figure.supxlabel(BANDS, x=0.01, ha="left", fontsize=9)
        return figure


@contextmanager
def any_letters() -> Iterator[None]:
    """While this is entered, a letter that the font lacks (an emoji in a run's name) is drawn as a
    box without a warning.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
        yield


def save_png(figure: Figure, path: Path, *, dpi: int = 160, source: str = "") -> None:
    """Write a figure as a PNG, whole or not at all. The file also holds its title and what it shows
    (:func:`source_of`).

    Raises:
        LabError: the folder cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    with writing(path, "free some space or use another folder"):
        try:
            metadata = {"Title": " ".join(figure.get_suptitle().split())} | ({"Source": source} if source else {})
            with any_letters():
                figure.savefig(temporary, format="png", dpi=dpi, facecolor="white", metadata=metadata)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def source_of(path: Path) -> str:
    """What a PNG says that it shows; nothing where it does not say, or is not there."""
    try:
        with Image.open(path) as image:
            return str(image.info.get("Source", ""))
    except (OSError, ValueError):  # what cannot be read is drawn anew
        return ""


def length_figures(groups: Sequence[Group], *, axis: Axis = "multiple") -> list[tuple[str, Figure]]:
    """Loss over length for a page: the panels of figure1 with their names, to stand side by side or
    not.
    """
    names = panels(groups)
    draws = [partial(_draw_lengths, groups=groups, name=name, axis=axis) for name in names]
    apart = len(names) - len(settings(groups))  # the panel with a y axis of its own, if it is there
    return list(zip(names, [*_figures(draws[:apart]), *_figures(draws[apart:])], strict=True))


def position_figures(groups: Sequence[Group]) -> list[tuple[str, Figure]]:
    """Loss over the position inside the longest window of each group, one drawing a setting, on the
    same y axis.
    """
    names = settings(groups)
    draws = [partial(_draw_positions, groups=groups, name=name) for name in names]
    return list(zip(names, _figures(draws), strict=True))


def training_figure(infos: Sequence[Sequence[RunInfo]], groups: Sequence[Group]) -> Figure:
    """Training loss over steps: a line for each run, in the colour of its group."""
    return _figures([partial(_draw_training, infos=infos, groups=groups)])[0]


def panels(groups: Sequence[Group]) -> list[str]:
    """The names of the panels of loss over length: the best of each group, then one for each
    setting.
    """
    names = settings(groups)
    return names if len(names) == 1 else [BEST, *names]


def _draw_lengths(ax: Any, groups: Sequence[Group], name: str, axis: Axis) -> Ends:
    """Lines with bands of one standard error of the difference from the lowest line: what documents
    share cancels.
    """
    ticks = columns(groups, axis)
    chosen = [best_setting(group, groups, axis) if name == BEST else name for group in groups]
    grid = [[cell(group, x, setting, axis) for x in ticks] for group, setting in zip(groups, chosen, strict=True)]
    lowest = [_lowest([line[place] for line in grid]) for place in range(len(ticks))]
    counts = {x: sum(line[place] is not None for line in grid) for place, x in enumerate(ticks)}
    ends: Ends = []
    drawn = zip(groups, chosen, grid, colours(groups), strict=True)
    for index, (group, setting, line, colour) in enumerate(drawn):
        cells = [(x, there, low) for x, there, low in zip(ticks, line, lowest, strict=True) if there is not None]
        points = [(x, there.loss, _error(there, low, len(groups), counts[x])) for x, there, low in cells]
        end = _line(ax, points, colour, line_style(index))
        _every_run(ax, [(x, there) for x, there, _ in cells], colour)
        label = f"{group.label}, {setting}" if name == BEST and setting != AS_TRAINED.name() else group.label
        ends.append((label, colour, end))
        if axis == "tokens":
            ax.axvline(group.first.train_length, color=PALETTE[colour][0], linestyle=":", linewidth=1.2)
    if axis == "multiple":
        ax.axvline(1, color=TEXT, linestyle=":", linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [_tick(groups, tick, axis) for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("evaluation length (tokens); dotted: training length")
    ax.set_ylabel("share of wrong predictions" if name == WRONG.name() else f"validation loss ({unit(groups)})")
    return ends


def _lowest(cells: Sequence[Cell | None]) -> Cell | None:
    finite = [there for there in cells if there is not None and math.isfinite(there.loss)]
    return min(finite, key=lambda there: there.loss, default=None)


def _error(there: Cell, lowest: Cell | None, lines: int, measured: int) -> float:
    """Of the difference from the lowest line, which has none; of the loss itself where there is one
    line. NaN at a length at which one line alone was measured.
    """
    if lines == 1 or lowest is None:
        return there.standard_error
    if measured == 1:
        return math.nan
    return 0.0 if there is lowest else there.minus(lowest).standard_error


def _every_run(ax: Any, cells: Sequence[tuple[float, Cell]], colour: int) -> None:
    """A dot for each run, where there are several."""
    points = [(x, value) for x, there in cells if len(there.rows) > 1 for value in there.values]
    if points:
        ax.scatter(*zip(*points, strict=True), s=14, color=PALETTE[colour][0], alpha=0.55, linewidth=0, zorder=3)


def _draw_positions(ax: Any, groups: Sequence[Group], name: str) -> Ends:
    ends: Ends = []
    for index, (group, colour) in enumerate(zip(groups, colours(groups), strict=True)):
        there = [one for x in columns([group]) if (one := cell(group, x, name)) is not None]
        # A bucket stands at its geometric middle, which is its middle on a logarithmic axis; the
        # first starts at 0
        middles = [
            (math.sqrt(max(some[0].start, 1) * some[0].end), fmean(bucket.loss for bucket in some), math.nan)
            for some in (_alike(there[-1]) if there else [])
        ]
        ends.append((group.label, colour, _line(ax, middles, colour, line_style(index))))
    for length in sorted({group.first.train_length for group in groups}):
        ax.axvline(length, color=TEXT, linestyle=":", linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.set_xlabel("position in the window (tokens); dotted: training length")
    ax.set_ylabel("validation loss (nats per token)")
    return ends


def _alike(there: Cell) -> list[tuple[Bucket, ...]]:
    """The buckets of all runs by position; none where the runs were not cut alike."""
    cuts = {tuple((bucket.start, bucket.end) for bucket in row.buckets) for row in there.rows}
    return list(zip(*(row.buckets for row in there.rows), strict=True)) if len(cuts) == 1 else []


def _draw_training(ax: Any, infos: Sequence[Sequence[RunInfo]], groups: Sequence[Group]) -> Ends:
    ends: Ends = []
    for index, (members, group, colour) in enumerate(zip(infos, groups, colours(groups), strict=True)):
        curves = [[(float(step), loss, math.nan) for step, loss in info.train_loss] for info in members]
        last = [_line(ax, points, colour, line_style(index), markers=False) for points in curves]
        ends.append((group.label, colour, next((end for end in last if end), None)))
    ax.set_xlabel("optimiser step")
    ax.set_ylabel(f"training loss ({unit(groups)})")
    return ends


def _line(
    ax: Any, points: Sequence[tuple[float, float, float]], colour: int, style: str, *, markers: bool = True
) -> tuple[float, float] | None:
    """One line with its band of one standard error, with gaps where either is not finite; returns
    its last point.
    """
    shade, marker = PALETTE[colour][0], _MARKERS[colour] if markers else ""
    finite = [(x, y if math.isfinite(y) else math.nan, e if math.isfinite(e) else math.nan) for x, y, e in points]
    x, y, e = ([point[i] for point in finite] for i in range(3))
    ax.plot(x, y, style, color=shade, marker=marker)
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


def _height(lines: int) -> float:
    """Of a panel, in inches: there is room for every label."""
    return max(PANEL[1], _LABEL * lines + _MARGIN)


def _label_ends(ax: Any, ends: Ends) -> None:
    """Write each label beside the end of its line, moved apart where lines end close together."""
    ax.yaxis.set_major_locator(MaxNLocator(6))
    low, high = ax.get_ylim()
    placed = sorted(ends, key=lambda end: end[2][1] if end[2] else math.inf)
    gap = _LABEL / (_height(len(ends)) - _MARGIN) * (high - low)
    heights = within(spread([end[1] if end else high for _, _, end in placed], gap), gap, low, high)
    for (label, colour, end), height in zip(placed, heights, strict=True):
        text = label if end else f"{label}: diverged"
        write_beside(ax, text, height, color=PALETTE[colour][0], fontweight="bold", parse_math=False)
    ax.set_ylim(low, high)


def write_beside(ax: Any, text: str, height: float, **style: Any) -> None:
    """Write to the right of a panel, at a height of its y axis."""
    at: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (6, 0), "textcoords": "offset points"}
    ax.annotate(text, xy=(1.0, height), va="center", annotation_clip=False, **at, **style)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending heights, moved as little as possible (in least squares) so that neighbours lie at
    least a gap apart.
    """
    # With i*gap taken off, "a gap apart" reads "not descending", and pooling neighbours that
    # descend solves it
    groups: list[list[float]] = []
    for index, height in enumerate(wanted):
        groups.append([height - index * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    level = [fmean(group) for group in groups for _ in group]
    return [height + index * gap for index, height in enumerate(level)]


def within(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending heights at least a gap apart, moved between two others that have room for them."""
    below = [high - gap * left for left in reversed(range(len(heights)))]
    return [min(max(height, low + gap * n), most) for n, (height, most) in enumerate(zip(heights, below, strict=True))]


def _tick(groups: Sequence[Group], column: float, axis: Axis) -> str:
    tokens, name = tokens_at(groups, column, axis), column_name(column, axis).replace("x", "×")
    return f"{tokens:,}\n{name}" if tokens else name


def _same_limits(panels: Sequence[Any]) -> None:
    limits = [ax.get_ylim() for ax in panels]
    for ax in panels:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def _figures(draws: Sequence[Draw]) -> list[Figure]:
    """Each panel as a figure of its own, all with the y limits that hold every one."""
    with rc_context(STYLE):
        figures = [Figure(figsize=PANEL, layout="constrained") for _ in draws]
        panels = [figure.subplots() for figure in figures]
        ends = [draw(ax) for ax, draw in zip(panels, draws, strict=True)]
        for figure, lines in zip(figures, ends, strict=True):
            figure.set_figheight(_height(len(lines)))
        _same_limits(panels)
        for ax, lines in zip(panels, ends, strict=True):
            _label_ends(ax, lines)
        return figures
