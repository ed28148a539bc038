"""What table, figure and finding read from an Evaluation: which columns there are, and what stands where."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from softfocus.lab.results import Evaluation, Row

Axis = Literal["multiple", "tokens"]
"""What lengths are counted in: multiples of each run's own training length, or tokens."""

SCALINGS = ((False, "no scaling"), (True, "dynamic NTK"))
"""The scalings of RoPE that a report shows, in its order: (Row.ntk, name)."""

_NAMES = {"softmax": "Softmax", "lssa": "LSSA", "lssar": "LSSAR", "laser": "LASER"}


@dataclass(frozen=True)
class Growth:
    """A loss at one length over the same model's loss at its training length."""

    first: float
    last: float
    ratio: float
    standard_error: float
    """Of the ratio, as if the two losses were independent. They share their tokens, so this is on the safe side."""


def position(evaluation: Evaluation, row: Row, axis: Axis) -> float:
    """Where a row stands on the axis."""
    return float(row.length) if axis == "tokens" else round(row.length / evaluation.train_length, 4)


def columns(evaluations: Iterable[Evaluation], axis: Axis = "multiple") -> list[float]:
    """Every place on the axis where at least one run was evaluated, ascending."""
    return sorted({position(evaluation, row, axis) for evaluation in evaluations for row in evaluation.rows})


def shared_columns(evaluations: Sequence[Evaluation], axis: Axis = "multiple") -> list[float]:
    """The places on the axis where every run was evaluated under at least one scaling, ascending."""
    sets = [set(columns([evaluation], axis)) for evaluation in evaluations]
    return sorted(set.intersection(*sets)) if sets else []


def cell(evaluation: Evaluation, column: float, ntk: bool, axis: Axis = "multiple") -> Row | None:
    """The row at a place on the axis.

    Up to the training length dynamic NTK changes nothing, so the row without scaling stands for a missing one with it.
    """
    found = {row.ntk: row for row in evaluation.rows if position(evaluation, row, axis) == column}
    if ntk and ntk not in found and False in found and found[False].length <= evaluation.train_length:
        return found[False]
    return found.get(ntk)


def growth(evaluation: Evaluation, column: float, ntk: bool, axis: Axis = "multiple") -> Growth | None:
    """How the loss at a place on the axis compares with the run's own at 1x, or None if not evaluated."""
    last = cell(evaluation, column, ntk, axis)
    first = cell(evaluation, 1.0, ntk)
    if first is None or last is None:
        return None
    ratio = last.loss / first.loss if first.loss else math.nan
    relative = math.hypot(_share(first), _share(last))
    return Growth(first.loss, last.loss, ratio, 0.0 if first is last else abs(ratio) * relative)


def column_name(column: float, axis: Axis = "multiple") -> str:
    """ "16x", or "2,048" when lengths are counted in tokens."""
    return f"{column:,.0f}" if axis == "tokens" else f"{column:g}x"


def mechanism_name(mechanism: str) -> str:
    """A mechanism as the papers spell it."""
    return _NAMES.get(mechanism.strip(), mechanism)


def labels(evaluations: Sequence[Evaluation]) -> list[str]:
    """A name for each run: its mechanism's, with the run's where two share a mechanism, numbered where those agree."""
    mechanisms = Counter(evaluation.mechanism for evaluation in evaluations)
    names = [mechanism_name(e.mechanism) + (f" · {e.run}" if mechanisms[e.mechanism] > 1 else "") for e in evaluations]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return unique


def loss_text(loss: float) -> str:
    """A loss for people: a diverged one is said to be so, never printed as a number."""
    return f"{loss:.3f}" if math.isfinite(loss) else "diverged"


def _share(row: Row) -> float:
    return row.standard_error / row.loss if row.loss else math.nan
