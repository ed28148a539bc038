"""report.html: one file that needs nothing but itself, for a wide screen, a phone, a dark room or a
screen reader.
"""

import io
import math
import re
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from softfocus.lab.evaluate.means import Estimate
from softfocus.lab.recipes.data import parts_of
from softfocus.lab.report import figure
from softfocus.lab.report.finding import Difference
from softfocus.lab.report.notes import provenance, same_text, short_commit
from softfocus.lab.report.points import (
    Axis,
    Cell,
    Group,
    cell,
    column_name,
    columns,
    growth,
    labels,
    loss_text,
    mechanism_name,
    predicts,
    settings,
    shared_columns,
    tokens_at,
    unit,
)
from softfocus.lab.report.results import Report
from softfocus.lab.run_folder.results import RunInfo


def template(name: str) -> Template:
    """A page of the lab. All have the look of report/page.html.j2."""
    environment = Environment(
        loader=PackageLoader("softfocus.lab", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def render(report: Report) -> str:
    """The page, as text."""
    evaluations, infos, groups = report.evaluations, [entry.info for entry in report.runs], report.groups
    names = labels(evaluations)
    by_run = {id(entry.evaluation): entry.info for entry in report.runs}
    members = [[by_run[id(evaluation)] for evaluation in group.evaluations] for group in groups]
    parts = " or ".join(sorted({parts_of(entry.recipe) for entry in report.runs}, reverse=True))
    units = parts, parts.capitalize()
    has_buckets = any(row.buckets for evaluation in evaluations for row in evaluation.rows)
    return template("report/page.html.j2").render(
        report=report,
        provenance=provenance(report),
        palette=figure.PALETTE,
        bands=figure.BANDS,
        same_text=same_text(evaluations),
        predicts=predicts(groups),
        unit=unit(groups),
        lengths=_drawings(figure.length_figures(groups, axis=report.axis)),
        positions=_drawings(figure.position_figures(groups)) if has_buckets else [],
        training=svg(figure.training_figure(members, groups)) if any(info.train_loss for info in infos) else None,
        tables=_loss_tables(groups, report.axis),
        differences=[_difference(one, report.axis) for one in report.finding.differences],
        runs=[["", *names], *([heading.format(*units), *map(of_run, infos)] for heading, of_run in _RUN)],
        recipes=[(name, entry.recipe) for name, entry in zip(names, report.runs, strict=True) if entry.recipe],
        machines=sorted({f"{i.machine.cpu}, {i.machine.cores} cores, on {i.machine.device}" for i in infos}),
        versions=sorted({f"{name} {version}" for info in infos for name, version in info.versions.items()}),
    )


def _drawings(figures: list[tuple[str, Figure]]) -> list[tuple[str, Markup]]:
    return [(name, svg(drawing)) for name, drawing in figures]


def svg(drawing: Figure) -> Markup:
    """A drawing to stand inside an HTML page: no header, no metadata, colours as the page's
    variables.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(figure.STYLE), figure.any_letters():  # text stays text
        drawing.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)  # it would style the whole page
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # nothing refers to them, and every drawing has the same ones
    for index, (shade, _) in enumerate(figure.PALETTE):
        text = text.replace(shade, f"var(--line-{index})")
    return Markup(text.replace(figure.TEXT, "currentColor").replace(figure.RULE, "var(--rule)"))


def _loss_tables(groups: list[Group], axis: Axis) -> list[dict[str, Any]]:
    across, shared = columns(groups, axis), shared_columns(groups, axis)
    heads = [(column_name(column, axis), tokens_at(groups, column, axis)) for column in across]
    last = column_name(shared[-1], axis) if shared else "1x"
    softmax = [group for group in groups if group.first.mechanism == "softmax"]
    reference = softmax[0] if len(softmax) == 1 else groups[0]
    tables = []
    for setting in settings(groups):
        lines = []
        beside = cell(reference, shared[-1], setting, axis) if shared else None
        for group in groups:
            grown = growth(group, shared[-1], setting, axis) if shared else None
            end = cell(group, shared[-1], setting, axis) if shared else None
            apart = end.gain_minus(beside) if end and beside and group is not reference else None
            lines.append(
                (
                    group.title,
                    [_cell(cell(group, column, setting, axis)) for column in across],
                    f"{grown:.3f}" if grown is not None and math.isfinite(grown) else "–",
                    [_gain(end.gain if end else None), _gain(apart, "+")],
                )
            )
        tables.append({"setting": setting, "lines": lines, "heads": heads, "last": last, "reference": reference.label})
    return tables


def _gain(found: Estimate | None, sign: str = "") -> tuple[str, str]:
    """A gain from context, or how much larger one is than another, and its standard error."""
    if found is None or not math.isfinite(found.value):
        return "–", ""
    return f"{found.value:{sign}z.3f}", _error(found.standard_error)


def _cell(one: Cell | None) -> tuple[str, ...]:
    """A loss, its standard error, and the standard deviation over runs."""
    if one is None:
        return ("–",)
    spread = f"sd {one.spread:.3f}" if math.isfinite(one.spread) else ""
    return tuple(filter(None, (loss_text(one.loss), _error(one.standard_error), spread)))


def _difference(one: Difference, axis: Axis) -> list[str]:
    """A line of the table of differences: where, who, beside whom, how much, by what it is paired,
    what it amounts to.
    """
    more = f"{one.difference:+.3f}" if math.isfinite(one.difference) else "–"
    verdict = f"more than noise: {one.verdict}" if one.verdict != "inconclusive" else one.verdict
    known = "" if one.training_noise else " (noise of training unknown)"
    return [
        column_name(one.column, axis),
        f"{one.label}, {one.setting}",
        f"{one.against}, {one.against_setting}",
        f"{more} {_error(one.standard_error)}".strip(),
        one.paired.removeprefix("by "),
        verdict + known,
    ]


def _error(standard_error: float) -> str:
    return f"± {standard_error:.3f}" if math.isfinite(standard_error) else ""


def minutes(info: RunInfo) -> str:
    """How long a training took. Of a run that was resumed only the last session's end is known."""
    if info.finished is None or info.sessions:
        return "–"
    return f"{(info.finished - info.started).total_seconds() / 60:.1f}"


_RUN: tuple[tuple[str, Callable[[RunInfo], str]], ...] = (
    ("Mechanism", lambda info: mechanism_name(info.mechanism)),
    ("Parameters", lambda info: f"{info.parameters:,}"),
    ("Training length", lambda info: f"{info.train_length:,}"),
    ("Steps", lambda info: f"{info.steps_done:,}"),
    ("Training {0}", lambda info: f"{info.steps_done * info.tokens_per_step:,}"),
    ("Last training loss", lambda info: "–" if info.final_loss is None else loss_text(info.final_loss)),
    ("{1} per second", lambda info: "–" if info.tokens_per_second is None else f"{info.tokens_per_second:,.0f}"),
    ("Minutes", minutes),
    ("Seed", lambda info: str(info.seed)),
    ("Commit", lambda info: short_commit(info.commit)),
)
"""The lines of the table of runs: a heading, with what windows are counted in ("tokens", "Tokens"),
and what stands there of a run.
"""
