"""report.html: one file that needs nothing but itself, for a wide screen, a phone, a dark room or a screen reader."""

import math
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from softfocus.lab import figure
from softfocus.lab.points import (
    SCALINGS,
    Axis,
    cell,
    column_name,
    columns,
    growth,
    labels,
    loss_text,
    mechanism_name,
    shared_columns,
)
from softfocus.lab.report import Report, provenance, same_text, short_commit
from softfocus.lab.results import Evaluation, RunInfo

_VERDICTS = {
    "holds": "The expected shape holds",
    "does not hold": "The expected shape does not hold",
    "not judged": "The expected shape is not judged here",
}


def template(name: str) -> Template:
    """A page of the lab. All have the look of page.html.j2."""
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
    evaluations, infos = report.evaluations, [entry.info for entry in report.runs]
    names = labels(evaluations)
    has_buckets = any(row.buckets for evaluation in evaluations for row in evaluation.rows)
    return template("page.html.j2").render(
        report=report,
        provenance=provenance(report),
        verdict=_VERDICTS[report.finding.verdict],
        palette=figure.PALETTE,
        same_text=same_text(evaluations),
        lengths=_drawings(figure.length_svgs(evaluations, axis=report.axis)),
        positions=_drawings(figure.position_svgs(evaluations)) if has_buckets else [],
        training=Markup(figure.training_svg(infos, evaluations)) if any(info.train_loss for info in infos) else None,
        tables=_loss_tables(evaluations, names, report.axis),
        runs=[list(line) for line in zip(("", *_RUN), *map(_run, infos, names), strict=True)],
        recipes=[(name, entry.recipe) for name, entry in zip(names, report.runs, strict=True) if entry.recipe],
        machines=sorted({f"{i.machine.cpu}, {i.machine.cores} cores, on {i.machine.device}" for i in infos}),
        versions=sorted({f"{name} {version}" for info in infos for name, version in info.versions.items()}),
    )


def _drawings(svgs: list[str]) -> list[tuple[str, Markup]]:
    return [(name, Markup(svg)) for (_, name), svg in zip(SCALINGS, svgs, strict=True)]


def _loss_tables(evaluations: list[Evaluation], names: list[str], axis: Axis) -> list[dict[str, Any]]:
    across, shared = columns(evaluations, axis), shared_columns(evaluations, axis)
    tables = []
    for ntk, scaling in SCALINGS:
        lines = []
        for evaluation, name in zip(evaluations, names, strict=True):
            grown = growth(evaluation, shared[-1], ntk, axis) if shared else None
            rows = [cell(evaluation, column, ntk, axis) for column in across]
            cells = [("–", "") if row is None else (loss_text(row.loss), _error(row.standard_error)) for row in rows]
            lines.append((name, cells, f"{grown.ratio:.3f}" if grown and math.isfinite(grown.ratio) else "–"))
        tables.append({"scaling": scaling, "lines": lines})
    heads = [(column_name(column, axis), _tokens(evaluations, column, axis)) for column in across]
    return [table | {"heads": heads, "last": column_name(shared[-1], axis) if shared else "1x"} for table in tables]


def _tokens(evaluations: list[Evaluation], column: float, axis: Axis) -> str:
    lengths = {round(column * evaluation.train_length) for evaluation in evaluations}
    return f"{lengths.pop():,}" if axis == "multiple" and len(lengths) == 1 else ""


def _error(standard_error: float) -> str:
    return f"± {standard_error:.3f}" if math.isfinite(standard_error) else ""


_RUN = (
    "Mechanism",
    "Parameters",
    "Training length",
    "Steps",
    "Training tokens",
    "Last training loss",
    "Tokens per second",
    "Minutes",
    "Seed",
    "Commit",
)


def _run(info: RunInfo, name: str) -> list[str]:
    """A column of the table of runs: a heading, then what _RUN names."""
    took = (info.finished - info.started).total_seconds() / 60 if info.finished else None
    return [
        name,
        mechanism_name(info.mechanism),
        f"{info.parameters:,}",
        f"{info.train_length:,}",
        f"{info.steps_done:,}",
        f"{info.steps_done * info.tokens_per_step:,}",
        "–" if info.final_loss is None else loss_text(info.final_loss),
        "–" if info.tokens_per_second is None else f"{info.tokens_per_second:,.0f}",
        "–" if took is None else f"{took:.1f}",
        str(info.seed),
        short_commit(info.commit),
    ]
