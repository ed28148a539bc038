"""What one comparison shows, and how it is decided: what all kinds of statements share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from softfocus.lab.claims.claim import Claim, Compared
from softfocus.lab.claims.results import Results, Run
from softfocus.lab.evaluate.means import Estimate, holm_rejections

Verdict = Literal["holds", "fails", "inconclusive", "too few seeds", "not run"]
SEEDS = 3
"""With fewer trainings of a row there is no verdict."""


@dataclass(frozen=True)
class Part:
    """What one comparison within a statement shows."""

    verdict: Verdict
    text: str
    sureness: float = math.nan
    """How many of the standard errors that it takes lie between the estimate and the other verdict;
    NaN without one.
    """
    p_value: float = math.nan
    """How often noise brings an estimate so far from the line, to either side; 1 where the estimate
    speaks for the statement, NaN without one.
    """


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for several that all have to hold."""
    order: tuple[Verdict, ...] = ("fails", "not run", "too few seeds", "inconclusive")
    return next((verdict for verdict in order if verdict in verdicts), "holds")


def corrected(parts: Sequence[Part]) -> tuple[Part, ...]:
    """What fails of several comparisons by Holm's correction. What no longer fails is inconclusive,
    and its text says so.

    One comparison that fails makes the statement fail, so the chance that any of them does by noise
    grows with their number. It holds only where all of them hold, which noise makes rarer, so that
    needs no correction.
    """
    found = list(parts)
    failing = [number for number, part in enumerate(parts) if part.verdict == "fails" and not math.isnan(part.p_value)]
    comparisons = len(parts) - sum(part.verdict == "fails" for part in parts) + len(failing)
    failing.sort(key=lambda number: parts[number].p_value)
    for lost in failing[holm_rejections([parts[number].p_value for number in failing], comparisons) :]:
        text = f"{parts[lost].text} (fails alone, but not as one of {len(parts)})"
        found[lost] = replace(parts[lost], verdict="inconclusive", text=text)
    return tuple(found)


def decide(found: Estimate, line: float, text: str) -> Part:
    """Whether an estimate is below a line by more than noise, above it by more than noise, or
    neither.
    """
    margin = found.margin
    below = line - found.value
    if not found.training_noise or math.isnan(margin) or math.isnan(below):
        return Part("inconclusive", text)
    sureness = below / margin if margin > 0 else math.copysign(math.inf, below) if below else 0.0
    p_value = found.outside(-below) if below < 0 else 1.0
    return Part("holds" if sureness > 1 else "fails" if sureness < -1 else "inconclusive", text, sureness, p_value)


Lost = tuple[int, int]
"""How many trainings of a row diverged, or have no finite loss at a place, and how many there
are.
"""


def lost_lower(first: Lost, second: Lost) -> Verdict:
    """Whether a first loss is the lower one where some trainings diverged: they count as infinitely
    high.

    Only where all of one row and none of the other did can that be said: the others would be chosen
    by their luck.
    """
    if first[0] == 0 and second[0] == second[1]:
        return "holds"
    return "fails" if first[0] == first[1] and second[0] == 0 else "inconclusive"


def lost_alone(row: Lost) -> Verdict:
    """What becomes of a statement about a row alone where some of its trainings diverged."""
    return "fails" if row[0] == row[1] else "inconclusive"


def lost_text(rows: Sequence[str], lost: Sequence[Lost]) -> str:
    """How many trainings of each row diverged."""
    (count, of), *others = lost
    more = "".join(f", {count} of {of} of {row}" for row, (count, of) in zip(rows[1:], others, strict=True))
    return f"{count} of {of} trainings of {rows[0]} diverged{more}"


def lost_of(runs: Sequence[Run]) -> Lost:
    """How many of some trainings diverged."""
    return sum(run.diverged for run in runs), len(runs)


def sides_of(results: Results, rows: Sequence[str]) -> tuple[list[list[Run]], Part | None]:
    """The trainings of some rows, and why there is no verdict on them; None where there are
    enough.
    """
    sides = [results.of(row) for row in rows]
    for row, runs in zip(rows, sides, strict=True):
        seeds = len({run.info.seed for run in runs})
        if not seeds:
            return sides, Part("not run", f"{row} was not run")
        if seeds < SEEDS:
            return sides, Part("too few seeds", f"{row} was trained with {seeds} of {SEEDS} seeds")
    return sides, None


def pairs_of(claim: Claim, statement: Compared) -> list[tuple[str, str]]:
    """Each row of a statement with each of the others."""
    others = statement.than
    if "*" in others:
        others = [name for name in claim.rows if name not in statement.row]
    return list(product(statement.row, others))
