"""From runs to verdicts: each kind of statement is one small function."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from softfocus.lab.claims import kinds
from softfocus.lab.claims.claim import (
    Answers,
    Attends,
    Claim,
    Classifies,
    Close,
    Exact,
    Faint,
    Finds,
    Flat,
    Lower,
    Saves,
    Sooner,
    Statement,
    Steeper,
    Trains,
)
from softfocus.lab.claims.parts import (
    Lost,
    Part,
    Verdict,
    corrected,
    decide,
    lost_alone,
    lost_lower,
    lost_of,
    lost_text,
    pairs_of,
    sides_of,
    together,
)
from softfocus.lab.claims.results import Results, Run
from softfocus.lab.report.points import Cell, cell
from softfocus.lab.run_folder.results import AS_TRAINED


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict: it holds where all its comparisons hold, and fails where one of
    them fails after Holm's correction.
    """

    statement: Statement
    verdict: Verdict
    parts: tuple[Part, ...]

    @property
    def shown(self) -> Part:
        """The comparison that decided: the one that speaks most against the statement."""
        deciding = [part for part in self.parts if part.verdict == self.verdict]
        return min(deciding, key=lambda part: -math.inf if math.isnan(part.sureness) else part.sureness)


def judge(claim: Claim, results: Results | None) -> list[Judged]:
    """Every statement of a claim. Without results only what tests decide has a verdict."""
    there = results or Results.model_construct(runs=[])
    found = []
    for statement in claim.statements:
        parts = corrected(_JUDGES[type(statement)](claim, there, statement))
        found.append(Judged(statement, together([part.verdict for part in parts]), parts))
    return found


def _exact(claim: Claim, results: Results, statement: Exact) -> list[Part]:
    return [Part("holds" if statement.kind == "proved" else "fails", f"exact, by `{statement.by}`")]


def _trains(claim: Claim, results: Results, statement: Trains) -> list[Part]:
    parts = []
    for row in statement.row:
        (runs,), early = sides_of(results, [row])
        lost = lost_of(runs)
        parts.append(early or Part("fails" if lost[0] else "holds", lost_text([row], [lost])))
    return parts


def _lower(claim: Claim, results: Results, statement: Lower) -> list[Part]:
    setting, other_setting = statement.setting, statement.than_setting or statement.setting
    parts = []
    for (row, than), at in product(pairs_of(claim, statement), statement.at):
        there = statement.than_at or at
        parts.append(
            _compare(
                results,
                (row, at, setting),
                (than, there, other_setting),
                *((_within, _lost_close) if isinstance(statement, Close) else (_below, lost_lower)),
                statement.by,
            )
        )
    return parts


def _flat(claim: Claim, results: Results, statement: Flat) -> list[Part]:
    here = statement.setting
    return [
        _compare(results, (row, statement.to, here), (row, "1x", here), _below, _lost_flat, -statement.within)
        for row in statement.row
    ]


_JUDGES: dict[type, Callable[[Claim, Results, Any], list[Part]]] = {
    Lower: _lower,
    Close: _lower,
    Flat: _flat,
    Trains: _trains,
    Steeper: kinds.steeper,
    Sooner: kinds.sooner,
    Faint: kinds.faint,
    Attends: kinds.attends,
    Classifies: kinds.classifies,
    Finds: kinds.finds,
    Answers: kinds.answers,
    Saves: kinds.saves,
    Exact: _exact,
}

Place = tuple[str, str, str]
"""A row, a multiple of the training length, and a setting."""


def _compare(
    results: Results,
    place: Place,
    other: Place,
    rule: Callable[[Cell, Cell, float, str], Part],
    rule_of_lost: Callable[[Lost, Lost], Verdict],
    by: float,
) -> Part:
    """Two losses, paired by document and seed. The rules are told the share of the other loss."""
    sides, early = sides_of(results, [place[0], other[0]])
    if early:
        return early
    cells = [_cell(results, one) for one in (place, other)]
    for one, runs, there in zip((place, other), sides, cells, strict=True):
        if there is None and not all(run.diverged for run in runs):
            return Part("not run", f"{_name(one)} was not measured")
    lost = [(_lost(runs, there), len(runs)) for runs, there in zip(sides, cells, strict=True)]
    if any(count for count, _ in lost):
        counts = [
            f"{_name(one)} diverged in {count} of {of} trainings"
            for one, (count, of) in zip((place, other), lost, strict=True)
            if count
        ]
        return Part(rule_of_lost(*lost), ", ".join(counts))
    first, second = cells
    assert first is not None  # nothing was lost
    assert second is not None
    found = first.minus(second)
    text = (
        f"{_name(place)} {first.loss:.3f}, {_name(other)} {second.loss:.3f}: "
        f"{found.value:+.3f} ± {found.standard_error:.3f}"
    )
    return rule(first, second, by, text)


def _below(first: Cell, second: Cell, by: float, text: str) -> Part:
    """Below another loss by more than a share of it; by a negative share it may be above it.

    The other loss has an error, too. So the difference from 1 - by times the other loss is judged,
    with the error of that difference.
    """
    return _from_share(first, second, 1 - by, text)


def _within(first: Cell, second: Cell, by: float, text: str) -> Part:
    """Two one-sided decisions, as tests of equivalence have them. The nearer line is shown."""
    sides = [_from_share(first, second, 1 + by, text), _from_share(first, second, 1 - by, text, above=True)]
    sureness, p_value = (min(getattr(side, name) for side in sides) for name in ("sureness", "p_value"))
    shown = sides[first.loss < second.loss].text
    return Part(together([side.verdict for side in sides]), shown, sureness, p_value)


def _from_share(first: Cell, second: Cell, share: float, text: str, *, above: bool = False) -> Part:
    """Below a share of another loss, or above it. The text says what is judged."""
    found = first.minus(second, share)
    if share != 1:
        text += f"; minus {share:.6g} times the second loss: {found.value:+.3f} ± {found.standard_error:.3f}"
    return decide(-found if above else found, 0.0, text)


def _lost_close(first: Lost, second: Lost) -> Verdict:
    """A row that diverged is not close to one that did not."""
    apart = {lost_lower(first, second), lost_lower(second, first)} == {"holds", "fails"}
    return "fails" if apart else "inconclusive"


def _lost_flat(there: Lost, at_first: Lost) -> Verdict:
    """A row that diverged in every training is not flat."""
    return lost_alone(there)


def _lost(runs: Sequence[Run], there: Cell | None) -> int:
    """How many trainings diverged, or have a loss there that is not a number."""
    values = there.values if there is not None else []
    return sum(run.diverged for run in runs) + sum(not math.isfinite(value) for value in values)


def _cell(results: Results, place: Place) -> Cell | None:
    row, at, setting = place
    group = results.group(row)
    return cell(group, float(at.removesuffix("x")), setting) if group else None


def _name(place: Place) -> str:
    row, at, setting = place
    return f"{row} {at}" + (
        "" if setting == AS_TRAINED.name() or (at == "1x" and setting == "dynamic NTK") else f", {setting}"
    )
