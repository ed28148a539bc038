"""Figures of an inspection: maps of attention, and what layers are like. As PNG for files, as parts
of the page.
"""

import io
import textwrap
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from softfocus.lab.inspect.measure import HIDDEN
from softfocus.lab.inspect.results import Inspection
from softfocus.lab.inspect.run import Map
from softfocus.lab.report.figure import PALETTE, PANEL, STYLE, places, save_png, titled

_SHARE = "share of the visible weights"
PANELS = {
    "zeros": ("Exactly zero", _SHARE),
    "above_1e_9": ("Above 1e-9 of the row's largest", _SHARE),
    "above_1e_3": ("Above 1e-3 of the row's largest", _SHARE),
    "entropy": ("Entropy", "nats; dotted: of uniform weights"),
    "distance": ("Mean distance to what is attended to", "tokens"),
    "beyond": ("Weight beyond the training length", "share of the weight"),
}
"""What is drawn of each measure: its title and its unit."""
_WEAK, _STRONG = np.array([86, 180, 233]), np.array([196, 62, 0])
"""The colours of a weight of 1e-9 of its row's largest, and of the largest itself."""
_DECADES = 9
_LABEL = 22
"""Letters that fit beside a row of maps."""
_UNSEEN = (128, 128, 128, 40)
"""What no row sees: a grey that shows on white and on black."""


def shade(shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The colours of a map, RGBA [R, cells, 4]. On a logarithmic scale; a weight of exactly 0 is
    fully transparent.
    """
    strength = np.clip(1 + np.log10(np.maximum(shares, 1e-30)) / _DECADES, 0, 1)[..., None]  # 0 at 1e-9, 1 at 1
    colour = _WEAK + (_STRONG - _WEAK) * strength
    alpha = np.where(shares[..., None] > 0, 255 * (0.12 + 0.88 * strength**2), 0)
    pixels = np.concatenate([colour, alpha], axis=-1).round().astype(np.uint8)
    pixels[shares == HIDDEN] = _UNSEEN
    return pixels


def scale() -> str:
    """The colours of :func:`shade` from 1e-9 to 1, as the stops of a CSS gradient."""
    pixels = shade(np.logspace(-_DECADES, 0, 10, dtype=np.float32)[None])[0]
    return ", ".join(f"rgb({r} {g} {b} / {a / 255:.2f})" for r, g, b, a in pixels.tolist())


def png(one: Map) -> str:
    """A map as a data URI."""
    buffer = io.BytesIO()
    imsave(buffer, shade(one.shares), format="png")
    return "data:image/png;base64," + b64encode(buffer.getvalue()).decode()


def save_maps(found: Sequence[tuple[str, Inspection, Sequence[Map]]], path: Path, title: str) -> None:
    """A row of maps for each run and length, as a PNG, whole or not at all."""
    lines = [
        (name, one, length.length, [m for m in maps if m.length == length.length])
        for name, one, maps in found
        for length in one.lengths
    ]
    across = max(len(maps) for *_, maps in lines)
    style = STYLE | {"axes.grid": False, "font.size": 9, "axes.titlesize": 9}
    size = max(8.0, 1.6 * across + 1.1), 1.85 * len(lines) + 0.9
    with titled(size, title, fontsize=11, style=style) as figure:
        grid = figure.subplots(len(lines), across, squeeze=False)
        for line, (name, one, length, maps) in zip(grid, lines, strict=True):
            for ax in line[len(maps) :]:
                ax.remove()
            for ax, shown in zip(line, maps, strict=False):
                ax.imshow(shade(shown.shares), interpolation="nearest", aspect="auto")
                ax.set_box_aspect(1)
                ax.set_xticks([])
                ax.set_yticks([])
                ax.set_title(f"layer {shown.layer}, head {shown.head}", fontweight="normal")
            label = [*textwrap.wrap(name, _LABEL), tokens(one, length)]
            line[0].set_ylabel("\n".join(label), parse_math=False)
        save_png(figure, path, dpi=150)


def save_measures(found: Sequence[tuple[str, Inspection]], path: Path, title: str) -> None:
    """What the layers are like, a panel a measure, as a PNG, whole or not at all."""
    looks = [one for _, one in found]
    with titled((13, 7.4), title) as figure:
        for ax, (measure, (title_of, _)) in zip(figure.subplots(2, 3).flatten(), PANELS.items(), strict=True):
            _draw(ax, looks, measure)
            ax.set_title(title_of)
        handles = [
            Line2D([], [], color=PALETTE[place][0], label=name)
            for (name, _), place in zip(found, colours(looks), strict=True)
        ]
        handles += [
            Line2D([], [], color=STYLE["text.color"], linestyle=style, label=name) for name, style in styles(looks)
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
        save_png(figure, path, dpi=150)


def measure_figures(inspections: Sequence[Inspection]) -> list[tuple[str, Figure]]:
    """The panels of :func:`save_measures` with their titles, each a figure of its own for a
    page.
    """
    drawn = []
    with rc_context(STYLE):
        for measure, (title, _) in PANELS.items():
            figure = Figure(figsize=PANEL, layout="constrained")
            _draw(figure.subplots(), inspections, measure)
            drawn.append((title, figure))
    return drawn


def tokens(one: Inspection, length: int) -> str:
    """ "2,048 tokens (16x)"."""
    return f"{length:,} tokens ({length / one.train_length:g}x)"


def colours(inspections: Sequence[Inspection]) -> list[int]:
    """A place in the palette for each run."""
    return places([one.mechanism for one in inspections])


def styles(inspections: Sequence[Inspection]) -> Iterator[tuple[str, Any]]:
    """What the lines of each length are called, and what they look like."""
    count = max(len(one.lengths) for one in inspections)
    for place in range(count):
        there = [one for one in inspections if place < len(one.lengths)]
        yield " / ".join(dict.fromkeys(tokens(one, one.lengths[place].length) for one in there)), _style(place, count)


def _style(place: int, count: int) -> Any:
    """Dashes that grow with the length; the longest is a full line."""
    return "-" if place == count - 1 else (0, (1.5 + 2 * place, 1.5))


def _draw(ax: Any, inspections: Sequence[Inspection], measure: str) -> None:
    for one, number in zip(inspections, colours(inspections), strict=True):
        colour = PALETTE[number][0]
        for place, length in enumerate(one.lengths):
            rows = [one.row(length.length, layer) for layer in one.layers]
            values = [getattr(row, measure) for row in rows]
            means, errors = [v.mean for v in values], np.nan_to_num([v.standard_error for v in values])
            style = _style(place, len(one.lengths))
            ax.errorbar(one.layers, means, errors, color=colour, linestyle=style, marker="o", markersize=4)
            if measure == "entropy":
                uniform = [row.uniform.mean for row in rows]
                ax.plot(one.layers, uniform, color=STYLE["text.color"], linestyle=":", linewidth=1.2)
            if place == len(one.lengths) - 1:
                dots = [(layer, getattr(one.row(length.length, layer, head), measure).mean)
                        for layer in one.layers for head in one.heads_of(layer)]  # fmt: skip
                ax.plot(*zip(*dots, strict=True), color=colour, linestyle="", marker="_", markersize=9)
    ax.set_xlabel("layer")
    _, unit = PANELS[measure]
    ax.set_ylabel(unit)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    low, high = ax.get_ylim()
    ax.set_ylim(min(0.0, low), max(high, 0.01))
    if unit.startswith("share"):
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
