"""The tables of a claim's page, in Markdown."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from softfocus.lab.claims.claim import Claim, Saves
from softfocus.lab.claims.power_law import families
from softfocus.lab.claims.results import WINDOW, Results, Run
from softfocus.lab.report.points import Cell, Group, cell, column_name, columns, count_text, loss_text, settings
from softfocus.lab.run_folder.results import WRONG


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a head; a bar in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def sampled(groups: Sequence[Group]) -> bool:
    """Whether they were measured sample by sample: hidden tokens, images, speech."""
    return WRONG.name() in settings(groups)


def reading(claim: Claim, results: Results, groups: Sequence[Group]) -> str:
    """How to read the tables of losses."""
    if sampled(groups):
        return (
            "Validation loss in nats per prediction, and the share of wrong answers: "
            "mean ± standard deviation over seeds."
        )
    text = "Validation loss in nats per token: mean ± standard deviation over seeds."
    yard = _yardstick(claim, results, groups)
    if yard is None:
        return text
    last = column_name(columns(groups)[-1])
    return (
        f"{text} The last column is the paired difference from {yard.group.label} with {WINDOW} at {last}, "
        "± one standard error."
    )


def _yardstick(claim: Claim, results: Results, groups: Sequence[Group]) -> Cell | None:
    """What the last column is beside, at the longest length; None where there is no such row."""
    yard = results.yardstick(claim)
    return None if yard is None or sampled(groups) else cell(yard, columns(groups)[-1], WINDOW)


def losses(claim: Claim, results: Results, groups: Sequence[Group], setting: str) -> str:
    """A table of the groups under one setting."""
    across = columns(groups)
    reference = _yardstick(claim, results, groups)
    lines = []
    for group in groups:
        cells = [cell(group, column, setting) for column in across]
        if not any(cells):
            continue
        texts = ["" if one is None else _loss(one.loss, one.spread) for one in cells]
        last = cells[-1]
        apart = ""
        if last is not None and reference is not None and (group, setting) != (reference.group, WINDOW):
            found = last.minus(reference)
            if math.isfinite(found.value):
                apart = f"{found.value:+.3f} ± {found.standard_error:.3f}"
        lines.append([group.label, _count(results.of(group.label)), *texts, *([] if reference is None else [apart])])
    head = ["mean"] if sampled(groups) else [*map(column_name, across)]
    return table([setting, "trained", *head, *([] if reference is None else ["beside the window"])], lines)


def _count(runs: Sequence[Run]) -> str:
    lost = sum(run.diverged for run in runs)
    return count_text([run.info.seed for run in runs]) + (f", {lost} diverged" if lost else "")


def _loss(loss: float, spread: float) -> str:
    return loss_text(loss) + (f" ± {spread:.3f}" if math.isfinite(spread) else "")


def gradients(results: Results) -> str:
    """The largest gradient of each row after the warm-up, the usual one of a training, and the
    usual one of its projections where they were noted.
    """
    lines = []
    parts = list(dict.fromkeys(name for run in results.runs for name in run.info.projection_norms))
    for row in results.rows:
        known = [run.gradients for run in results.of(row) if run.gradients is not None]
        if known:
            largest = [late for late, _ in known if not math.isnan(late)]
            usual = median(norm for _, norm in known)
            lines.append([row, f"{median(largest):.3g}" if largest else "", f"{usual:.3g}"])
            lines[-1] += [_projection(results.of(row), name) for name in parts]
    head = ["gradient norm, median over seeds", "largest after the warm-up", "median of a training"]
    return table([*head, *(f"of the {name} projections" for name in parts)], lines)


def shares(results: Results) -> str:
    """What was measured beside losses: mean and standard deviation over seeds."""
    names = list(dict.fromkeys(name for run in results.runs for name in run.shares))
    lines = []
    for row in results.rows:
        by_run = [run.shares for run in results.of(row)]
        known = [[one[name] for one in by_run if name in one] for name in names]
        lines.append([row, _count(results.of(row)), *map(_share, known)])
    return table(["mean ± standard deviation over seeds", "trained", *names], lines)


def _share(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.1%}" if len(values) > 1 else ""
    return f"{fmean(values):.1%}{spread}" if values else ""


def _projection(runs: Sequence[Run], name: str) -> str:
    """The usual gradient of a projection; nothing where it was not noted."""
    noted = [[norm for _, norm in run.info.projection_norms[name]] for run in runs if name in run.info.projection_norms]
    return f"{median(map(median, noted)):.3g}" if noted else ""


def sizes(results: Results, statement: Saves) -> str:
    """The power law of each family; nothing where there is none."""
    lines = []
    for one in families(results, statement) or ():
        span = " to ".join(f"{one.parameters[end] / 1e6:.2f} M" for end in (0, -1))
        power = f"{one.exponent.value:.4f} ± {one.exponent.standard_error:.4f}"
        lines.append([one.label, str(len(one.parameters)), span, power, f"{one.misfit:.2%}"])
    return table(["power law", "sizes", "parameters", "exponent", "largest misfit"], lines) if lines else ""
