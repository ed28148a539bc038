"""inspect.html: maps, charts and tables of an inspection in one file that needs nothing but
itself.
"""

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from softfocus.lab.inspect import figure
from softfocus.lab.inspect.results import Inspection, Inspections, Row, Value
from softfocus.lab.inspect.run import Map
from softfocus.lab.report.figure import PALETTE
from softfocus.lab.report.notes import short_commit
from softfocus.lab.report.page import svg, template

COLUMNS = {
    "zeros": "Exactly 0",
    "above_1e_9": "Above 1e-9",
    "above_1e_3": "Above 1e-3",
    "entropy": "Entropy",
    "uniform": "of uniform",
    "distance": "Distance",
    "beyond": "Beyond",
}
_SHARES = ("zeros", "above_1e_9", "above_1e_3", "beyond")


def render(found: Inspections, names: Sequence[str], maps: Sequence[Sequence[Map]], title: str) -> str:
    """The page, as text. One name and one list of maps for each run."""
    named = list(zip(names, found.runs, strict=True))
    dashes = [(name, "" if style == "-" else " ".join(map(str, style[1]))) for name, style in figure.styles(found.runs)]
    return template("inspect/page.html.j2").render(
        title=title,
        provenance=provenance(found),
        sentences=[sentence(name, one) for name, one in named],
        palette=PALETTE,
        scale=Markup(figure.scale()),
        maps=_maps(named, maps),
        lines=list(zip(names, figure.colours(found.runs), strict=True)),
        lengths=dashes,
        measures=[(name, svg(drawing)) for name, drawing in figure.measure_figures(found.runs)],
        columns=list(COLUMNS.values()),
        tables=[_table(name, one, length.length) for name, one in named for length in one.lengths],
        learned=[table for name, one in named if (table := _learned(name, one)) is not None],
        methods=[_method(name, one) for name, one in named],
        created=found.created,
        schema=found.schema_version,
    )


def provenance(found: Inspections) -> str:
    """One line: what was looked at."""
    runs = [f"{one.run} (seed {one.seed}, commit {short_commit(one.commit)})" for one in found.runs]
    return f"{'; '.join(runs)}. Read: {', '.join(dict.fromkeys(one.text for one in found.runs))}."


def sentence(name: str, one: Inspection) -> str:
    """What stands out in one run, at its longest length."""
    length = one.lengths[-1].length
    row = one.row(length)
    return (
        f"{name}, at {figure.tokens(one, length)}: {_phrase('zeros', row.zeros)} of the visible weights are "
        f"exactly zero and {_phrase('above_1e_3', row.above_1e_3)} exceed 1e-3 of their row's largest. "
        f"The entropy of a row is {_phrase('entropy', row.entropy)} nats, where uniform weights would "
        f"have {row.uniform.mean:.2f}; "
        f"{_phrase('beyond', row.beyond)} of the weight lies a training length away or farther."
    )


def text(measure: str, value: float) -> str:
    """A measure for people."""
    if not math.isfinite(value):
        return "–"
    if measure in _SHARES:
        return "0 %" if value == 0 else f"{100 * value:.1f} %" if value > 5e-4 else f"{100 * value:.1g} %"
    return f"{value:.1f}" if measure == "distance" else f"{value:.2f}"


def lines(one: Inspection, length: int) -> list[tuple[str, Row]]:
    """The lines of a table: layer by layer, then all layers."""
    rows = [(str(layer), one.row(length, layer)) for layer in one.layers]
    return [*rows, ("all", one.row(length))]


def _with_error(measure: str, value: Value) -> tuple[str, str, str]:
    """(mean, "± error", unit), with as many digits as the error allows; no error where it is
    unknown or 0.
    """
    unit = " %" if measure in _SHARES else ""
    factor, least = 100 if unit else 1, 1 if unit or measure == "distance" else 2
    error = factor * value.standard_error
    if not math.isfinite(error) or error == 0:
        return text(measure, value.mean).removesuffix(" %"), "", unit
    digits = min(4, max(least, -math.floor(math.log10(error))))
    return f"{factor * value.mean:.{digits}f}", f"± {error:.{digits}f}", unit


def _phrase(measure: str, value: Value) -> str:
    mean, error, unit = _with_error(measure, value)
    return f"{mean} {error}".strip() + unit


def _maps(
    named: Sequence[tuple[str, Inspection]], maps: Sequence[Sequence[Map]]
) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(run, length, its maps), the longest lengths first, where the runs stand one below the
    other.
    """
    groups = []
    for place in range(max(len(one.lengths) for _, one in named)):
        for (name, one), its in zip(named, maps, strict=True):
            descending = [length.length for length in reversed(one.lengths)]
            for length in descending[place : place + 1]:  # none where this run has fewer lengths
                shown = [_caption(one, found) | {"image": figure.png(found)} for found in its if found.length == length]
                groups.append((name, figure.tokens(one, length), shown))
    return groups


def _caption(one: Inspection, found: Map) -> dict[str, Any]:
    row, runs = one.row(found.length, found.layer, found.head), one.runs(found.layer, found.head)
    return {
        "layer": found.layer,
        "head": found.head,
        "numbers": f"{text('zeros', row.zeros.mean)} zero, {row.entropy.mean:.2f} nats",
        "runs": runs if runs != one.mechanism else "",
    }


def _table(name: str, one: Inspection, length: int) -> dict[str, Any]:
    found = []
    for layer, row in lines(one, length):
        cells = []
        for measure in COLUMNS:
            mean, error, unit = _with_error(measure, getattr(row, measure))
            cells.append((mean + unit, error if measure != "uniform" else ""))
        found.append((layer, cells))
    return {"caption": f"{name}, {figure.tokens(one, length)}", "lines": found}


def _learned(name: str, one: Inspection) -> dict[str, Any] | None:
    """What the heads of a run learned, a line for each layer and argument; None if empty."""
    values = {
        (argument.argument, group.layer, head): (argument.start, value)
        for group in one.heads
        for argument in group.learned
        for head, value in zip(group.heads, argument.values, strict=True)
    }
    if not values:
        return None
    heads = range(1 + max(head for _, _, head in values))
    found = []
    for argument, layer in sorted({(argument, layer) for argument, layer, _ in values}):
        row = [values.get((argument, layer, head)) for head in heads]
        starts = dict.fromkeys(f"{cell[0]:.3g}" for cell in row if cell is not None)
        cells = ["" if cell is None else f"{cell[1]:.3f}" for cell in row]
        found.append((argument, str(layer), [", ".join(starts), *cells]))
    return {"caption": f"{name}: what its heads have learned", "heads": list(heads), "lines": found}


def _method(name: str, one: Inspection) -> str:
    parts = []
    for length in one.lengths:
        rows = f"all {length.rows:,}" if length.rows == length.length else f"{length.rows:,} evenly spaced"
        parts.append(
            f"{length.windows:,} windows of {length.length:,} tokens from {length.documents:,} documents, "
            f"{rows} rows of each"
        )
    return f"{name}: {'; '.join(parts)}."
