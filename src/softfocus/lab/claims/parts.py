"""What one comparison shows, and how it is decided: what all kinds of statements share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from softfocus.lab.claims.claim import Claim, Classifies, Finds, Lower, Sooner, Steeper, named_in
from softfocus.lab.claims.results import Run
from softfocus.lab.evaluate.means import Estimate, t_quantile

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


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for several that all have to hold."""
    order: tuple[Verdict, ...] = ("fails", "not run", "too few seeds", "inconclusive")
    return next((verdict for verdict in order if verdict in verdicts), "holds")


def decide(found: Estimate, line: float, text: str) -> Part:
    """Whether an estimate is below a line by more than noise, above it by more than noise, or
    neither.
    """
    room = t_quantile(found.freedom) * found.standard_error
    below = line - found.value
    sureness = below / room if room > 0 else math.copysign(math.inf, below) if below else 0.0
    if not found.training_noise or math.isnan(sureness):
        return Part("inconclusive", text)
    return Part("holds" if sureness > 1 else "fails" if sureness < -1 else "inconclusive", text, sureness)


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


def too_few(row: str, runs: Sequence[Run]) -> Part | None:
    """Why a row has no verdict, None where it has enough trainings."""
    seeds = {run.info.seed for run in runs}
    if not seeds:
        return Part("not run", f"{row} was not run")
    return (
        None if len(seeds) >= SEEDS else Part("too few seeds", f"{row} was trained with {len(seeds)} of {SEEDS} seeds")
    )


def pairs_of(claim: Claim, statement: Lower | Steeper | Sooner | Classifies | Finds) -> list[tuple[str, str]]:
    """Each row of a statement with each of the others."""
    ours = named_in(statement, "row")
    others = [name for name in claim.rows if name not in ours] if "*" in named_in(statement, "than") else None
    return list(product(ours, others if others is not None else named_in(statement, "than")))
