"""The benchmark's figure: time over SDPA's, by length."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from softfocus.lab.bench.cells import TITLES
from softfocus.lab.bench.results import Benchmark, Spread
from softfocus.lab.bench.subjects import YARDSTICK
from softfocus.lab.report.figure import PALETTE, titled

_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v")
_NICE = (1, 2, 5)


def figure(benchmark: Benchmark) -> Figure:
    """A panel for each of forward, backward and decode; a colour a mechanism, a line style a
    subject; quartiles as bands.
    """
    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    width = max(6.5, 4.4 * len(benchmark.what))
    with titled((width, 5.4), _title(benchmark), fontsize=11, style=style) as drawn:
        panels = drawn.subplots(1, len(benchmark.what), squeeze=False)[0]
        subjects = _names(benchmark)
        for ax, what in zip(panels, benchmark.what, strict=True):
            _panel(ax, benchmark, what, subjects)
        panels[0].set_ylabel("time / time of SDPA's softmax")
        drawn.legend(handles=_legend(benchmark, subjects), loc="outside lower center", ncols=4)
        return drawn


def _names(benchmark: Benchmark) -> list[str]:
    """The subjects that have a ratio anywhere, in the registry's order."""
    found = [one.name for cell in benchmark.cells for one in cell.subjects if one.ratio and one.name != YARDSTICK]
    return list(dict.fromkeys(found))


def _panel(ax: Any, benchmark: Benchmark, what: str, subjects: Sequence[str]) -> None:
    ax.axhline(1.0, color="#1f2329", linewidth=1.6, zorder=1)
    values = [1.0]
    for number, mechanism in enumerate(benchmark.mechanisms):
        for style, subject in enumerate(subjects):
            points = _points(benchmark, what, mechanism, subject)
            if not points:
                continue
            values += [spread.median for _, spread in points]
            x, y = [length for length, _ in points], [spread.median for _, spread in points]
            colour = PALETTE[number % len(PALETTE)][0]
            dashes, marker = _DASHES[style % len(_DASHES)], _MARKERS[style % len(_MARKERS)]
            ax.plot(x, y, color=colour, linestyle=dashes, marker=marker, linewidth=1.8, markersize=5)
            low, high = ([getattr(s, f"{end}_quartile") for _, s in points] for end in ("lower", "upper"))
            ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    ax.set_title(TITLES[what], loc="left", fontsize=11, fontweight="bold")  # type: ignore[index]
    ax.set_xscale("log", base=2)
    ax.set_xticks(benchmark.lengths, [f"{length:,}" for length in benchmark.lengths])
    ax.set_yscale("log")
    ax.set_ylim(min(values) / 1.25, max(values) * 1.25)
    ticks = [nice * 10.0**power for power in range(-3, 5) for nice in _NICE]
    low, high = ax.get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    ax.set_yticks(shown, [f"{tick:g}" for tick in shown])
    ax.minorticks_off()
    ax.grid(axis="y", color="#d0d3d9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_xlabel("length L (tokens)")
    if len(values) == 1:
        ax.text(0.5, 0.6, "nothing was measured", transform=ax.transAxes, ha="center")


def _points(benchmark: Benchmark, what: str, mechanism: str, subject: str) -> list[tuple[int, Spread]]:
    cells = [cell for cell in benchmark.cells if (cell.what, cell.mechanism) == (what, mechanism)]
    found = [(cell.length, one.ratio) for cell in cells if (one := cell.subject(subject)) is not None]
    return sorted((length, ratio) for length, ratio in found if ratio is not None)


def _legend(benchmark: Benchmark, subjects: Sequence[str]) -> list[Line2D]:
    lines = [Line2D([], [], color="#1f2329", linewidth=1.6, label="SDPA, softmax")]
    for number, mechanism in enumerate(benchmark.mechanisms):
        colour = PALETTE[number % len(PALETTE)][0]
        lines.append(Line2D([], [], color=colour, linewidth=4, label=mechanism))
    for style, subject in enumerate(subjects):
        dashes, marker = _DASHES[style % len(_DASHES)], _MARKERS[style % len(_MARKERS)]
        lines.append(Line2D([], [], color="#5c5c5c", linestyle=dashes, marker=marker, label=subject))
    return lines


def _title(benchmark: Benchmark) -> str:
    batch = (
        f"B = {benchmark.batch}"
        if benchmark.tokens is None
        else f"B L = {benchmark.tokens:,} (decode: B = {benchmark.batch})"
    )
    shape = f"{batch}, H = {benchmark.heads}, d = {benchmark.head_dim}, {benchmark.dtype}"
    where = (
        benchmark.machine.device
        if benchmark.device == "cuda"
        else f"{benchmark.machine.cpu}, {benchmark.threads} threads"
    )
    failed = f"; {len(benchmark.failed)} cells failed parity and are not shown" if benchmark.failed else ""
    return f"{where}; {shape}, causal{failed}"
