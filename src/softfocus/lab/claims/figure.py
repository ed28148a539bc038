"""A claim's figures: loss over length of all rows, softmax under a window in each panel; over size;
over training; over the power of the re-weighting.

Of what is measured sample by sample: loss and error rate, a panel each.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from softfocus.lab.claims.claim import Claim, Saves, Scale
from softfocus.lab.claims.power_law import Family, families
from softfocus.lab.claims.results import FIGURE, POWERS, RESULTS, SHARES, SIZES, TRAINING, WINDOW, Results
from softfocus.lab.report.figure import (
    PALETTE,
    TEXT,
    colours,
    line_style,
    places,
    save_png,
    source_of,
    spread,
    titled,
    within,
    write_beside,
)
from softfocus.lab.report.points import Cell, Group, cell, column_name, columns, count_text, settings
from softfocus.lab.run_folder.results import AS_TRAINED, WRONG

_LINE, _MARGIN = 0.21, 0.9  # inches that a label takes, and that a panel has above and below its axes


def write_figures(claim: Claim, scale: Scale, results: Results, folder: Path) -> None:
    """Draw, beside the results.json of a claim, the figures that have something to show. One that
    was drawn from the same results stays, and so does one that has nothing to show any more.

    Raises:
        LabError: the folder cannot be written to, or the disk is full.
    """
    judged = count_text(sorted({run.info.seed for run in results.runs}))
    title = f"{claim.title}\n{claim.source} · scale {scale}, {judged}"
    digest = hashlib.sha256(title.encode() + (folder / RESULTS).read_bytes()).hexdigest()
    source = f"title and {RESULTS}, SHA-256 {digest}"
    for file, drawn in _figures(claim, results, title).items():
        if source_of(folder / file) != source:
            save_png(drawn(), folder / file, dpi=110, source=source)


def _figures(claim: Claim, results: Results, title: str) -> dict[str, Callable[[], Figure]]:
    """Those that the results have something to show in, by their files."""
    found: dict[str, Callable[[], Figure]] = {}
    if groups := [group for row in results.rows if (group := results.group(row)) is not None]:
        found[FIGURE] = partial(draw, groups, results.yardstick(claim), title=title)
    if any(run.curves for run in results.runs):
        found[TRAINING] = partial(draw_training, results, title=title)
    if any(run.shares for run in results.runs):
        found[SHARES] = partial(draw_shares, results, title=title)
    if results.by_power:
        found[POWERS] = partial(draw_powers, results, title=title)
    if (by_size := claim.first(Saves)) is not None and (both := families(results, by_size)):
        found[SIZES] = partial(draw_sizes, both, title=title)
    return found


def draw_sizes(families: Sequence[Family], *, title: str) -> Figure:
    """The loss of every training over its parameters, and each family's power law with its
    confidence band.
    """
    with titled((8.0, 4.6), title) as figure:
        panel = figure.subplots()
        for family, shade in zip(families, places([family.label for family in families]), strict=True):
            color = PALETTE[shade][0]
            for losses in family.losses.values():
                panel.plot(family.parameters, losses, "o", color=color, alpha=0.5, markersize=4)
            across = np.geomspace(family.parameters[0], family.parameters[-1], 50).tolist()
            middle, low, high = zip(*map(family.band, across), strict=True)
            panel.plot(across, middle, color=color, label=family.label)
            panel.fill_between(across, low, high, color=color, alpha=0.15, linewidth=0)
        panel.set_xscale("log")
        panel.set_yscale("log")
        for axis, unit, digits in ((panel.xaxis, 1e6, "g"), (panel.yaxis, 1.0, ".2f")):
            plain = FuncFormatter(lambda value, _, unit=unit, digits=digits: f"{value / unit:{digits}}")
            axis.set_major_formatter(plain)
            axis.set_minor_formatter(plain)  # sizes and losses lie within a decade
        panel.set_xlabel("parameters (millions)")
        panel.set_ylabel("validation loss (nats per token)")
        panel.legend(frameon=False)
        return figure


def draw_training(results: Results, *, title: str) -> Figure:
    """A panel for each curve, with a line for each training, in the colour of its row."""
    names = list(dict.fromkeys(name for run in results.runs for name in run.curves))
    shades = places([results.of(row)[0].info.mechanism for row in results.rows])
    with titled((12.0, 3.4 * math.ceil(len(names) / 2) + 0.6), title) as figure:
        grid = figure.subplots(math.ceil(len(names) / 2), 2, squeeze=False).flatten()
        for panel, name in zip(grid, names, strict=False):
            for row, shade in zip(results.rows, shades, strict=True):
                for number, run in enumerate(run for run in results.of(row) if name in run.curves):
                    label = row if number == 0 else None
                    panel.plot(*zip(*run.curves[name], strict=True), color=PALETTE[shade][0], alpha=0.7, label=label)
            panel.set_yscale("linear" if name == "validation loss" else "log")
            panel.set_title(name)
            panel.set_xlabel("step")
            panel.legend(frameon=False)
        for panel in grid[len(names) :]:
            panel.remove()
        return figure


def draw_shares(results: Results, *, title: str) -> Figure:
    """What was measured beside losses: a dot for each training, a line at each row's mean."""
    names = list(dict.fromkeys(name for run in results.runs for name in run.shares))
    shades = places([results.of(row)[0].info.mechanism for row in results.rows])
    with titled((max(6.0, 1.8 * len(names)), 4.0), title) as figure:
        panel = figure.subplots()
        for number, (row, shade) in enumerate(zip(results.rows, shades, strict=True)):
            color, label = PALETTE[shade][0], row
            for place, name in enumerate(names):
                if values := [run.shares[name] for run in results.of(row) if name in run.shares]:
                    middle = place + 0.25 * (number - (len(results.rows) - 1) / 2)
                    panel.plot([middle] * len(values), values, "o", color=color, alpha=0.7, label=label)
                    panel.hlines(float(np.mean(values)), middle - 0.1, middle + 0.1, color=color)
                    label = ""  # one entry of the legend a row
        panel.set_xticks(range(len(names)), names)
        panel.set_xlim(-0.5, len(names) - 0.5)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        panel.legend(frameon=False)
        return figure


def draw_powers(results: Results, *, title: str) -> Figure:
    """Loss at each length, and gradient norms, over the power; "none" is without re-weighting.

    Lines join means (losses, with a bar of one standard deviation) and medians (norms); each
    training has a dot. A row that diverged leaves a gap.
    """
    powers = [power for power, _ in results.by_power]
    groups = [results.group(row) for _, row in results.by_power]
    known = [group for group in groups if group is not None]
    names = [name for name in settings(known) if name != WINDOW]
    with titled((6.0 * (len(names) + 1), 4.4), title) as figure:
        *losses, norms = figure.subplots(1, len(names) + 1)
        for panel, name in zip(losses, names, strict=True):
            for number, column in enumerate(columns(known)):
                cells = [None if group is None else cell(group, column, name) for group in groups]
                means = [math.nan if one is None else one.loss for one in cells]
                spreads = [0.0 if one is None or math.isnan(one.spread) else one.spread for one in cells]
                color = PALETTE[number % len(PALETTE)][0]
                label = column_name(column).replace("x", "×")
                panel.errorbar(range(len(powers)), means, yerr=spreads, fmt="o-", color=color, capsize=2, label=label)
            panel.set_title(f"validation loss (nats per token), {name}")
        for place, label in enumerate(("largest after the warm-up", "median of a training")):
            color, middles = PALETTE[place][0], []
            for number, (_, row) in enumerate(results.by_power):
                all_norms = [run.gradients[place] for run in results.of(row) if run.gradients is not None]
                # NaN: the training ended before its gradients had settled
                found = [norm for norm in all_norms if not math.isnan(norm)]
                norms.plot([number] * len(found), found, "o", color=color, alpha=0.5, markersize=4)
                middles.append(np.median(found) if found else math.nan)
            norms.plot(range(len(powers)), middles, "-", color=color, label=label)
        norms.set_yscale("log")
        norms.set_title("gradient norm, before clipping")
        for panel in (*losses, norms):
            panel.set_xticks(range(len(powers)), ["none" if power is None else f"{power:g}" for power in powers])
            panel.set_xlabel("power p of the re-weighting")
            panel.legend(frameon=False)
        return figure


def draw(groups: Sequence[Group], yardstick: Group | None, *, title: str) -> Figure:
    """Means over seeds, with a bar of one standard deviation; a row that is not finite somewhere
    has a gap there.
    """
    names = [name for name in settings(groups) if name != WINDOW]
    if WRONG.name() in names:
        return _draw_samples(groups, names, title=title)
    shades = colours(groups)
    height = _height(groups)
    down = math.ceil(len(names) / 2)
    with titled((12.0, height * down + 0.6), title) as figure:
        grid = figure.subplots(down, 2, squeeze=False, sharey=True).flatten()
        for panel, name in zip(grid, names, strict=False):
            _panel(panel, groups, yardstick, shades, name)
        for panel, name in zip(grid, names, strict=False):  # once all have drawn, and the common y axis is known
            _label(panel, groups, yardstick, shades, name)
        for panel in grid[len(names) :]:
            panel.remove()
        return figure


def _draw_samples(groups: Sequence[Group], names: Sequence[str], *, title: str) -> Figure:
    """A dot for each training, and a line at each row's mean."""
    shades = colours(groups)
    with titled((4.5 * len(names), 3.6), title) as figure:
        for panel, name in zip(figure.subplots(1, len(names)), names, strict=True):
            for place, (group, shade) in enumerate(zip(groups, shades, strict=True)):
                for _, one in _cells(group, name):
                    panel.plot([place] * len(one.values), one.values, "o", color=PALETTE[shade][0])
                    panel.hlines(one.loss, place - 0.2, place + 0.2, color=PALETTE[shade][0])
            panel.set_xticks(range(len(groups)), [group.label for group in groups])
            panel.set_xlim(-0.5, len(groups) - 0.5)
            panel.set_title("validation loss (nats per prediction)" if name == AS_TRAINED.name() else name)
        return figure


def _height(groups: Sequence[Group]) -> float:
    """Of a panel, in inches: there is room for every label."""
    return max(3.6, _LINE * (len(groups) + 2) + _MARGIN)


def _panel(panel: Any, groups: Sequence[Group], yardstick: Group | None, shades: Sequence[int], name: str) -> None:
    across = columns(groups)
    for index, (group, shade) in enumerate(zip(groups, shades, strict=True)):
        if cells := _cells(group, name):
            spreads = [0.0 if math.isnan(one.spread) else one.spread for _, one in cells]
            panel.errorbar(*_points(cells), yerr=spreads, fmt=line_style(index), color=PALETTE[shade][0], capsize=2)
    if cells := _window(yardstick):
        panel.plot(*_points(cells), ":", color=TEXT)
    panel.set_xscale("log", base=2)
    panel.set_xticks(across, [column_name(column).replace("x", "×") for column in across])
    panel.minorticks_off()
    panel.set_title(name)
    panel.set_xlabel("evaluation length, in training lengths")
    panel.set_ylabel("validation loss (nats per token)")
    panel.tick_params(labelleft=True)


def _label(panel: Any, groups: Sequence[Group], yardstick: Group | None, shades: Sequence[int], name: str) -> None:
    """Each line's name beside its end, moved apart where lines end close together."""
    drawn = [(group.label, shade, _cells(group, name)) for group, shade in zip(groups, shades, strict=True)]
    ends = [(cells[-1][1].loss, label, PALETTE[shade][0]) for label, shade, cells in drawn if cells]
    if yardstick is not None and (cells := _window(yardstick)):
        ends.append((cells[-1][1].loss, f"{yardstick.label}, {WINDOW}", TEXT))
    low, high = panel.get_ylim()
    gap = _LINE / (_height(groups) - _MARGIN) * (high - low)
    ends.sort()
    heights = within(spread([end for end, _, _ in ends], gap), gap, low, high)
    for (_, label, shade), height in zip(ends, heights, strict=True):
        write_beside(panel, label, height, fontsize=9, color=shade)


def _cells(group: Group, setting: str) -> list[tuple[float, Cell]]:
    found = [(column, cell(group, column, setting)) for column in columns([group])]
    return [(column, one) for column, one in found if one is not None and math.isfinite(one.loss)]


def _window(yardstick: Group | None) -> list[tuple[float, Cell]]:
    return [] if yardstick is None else _cells(yardstick, WINDOW)


def _points(cells: Sequence[tuple[float, Cell]]) -> tuple[list[float], list[float]]:
    return [column for column, _ in cells], [one.loss for _, one in cells]
