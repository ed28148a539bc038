"""From runs to verdicts: each kind of statement is one small function."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any, Literal

from softfocus.lab.claims.claim import (
    Claim,
    Classifies,
    Close,
    Disproved,
    Faint,
    Flat,
    Lower,
    Proved,
    Saves,
    Sooner,
    Statement,
    Steeper,
    Trains,
    named_in,
)
from softfocus.lab.claims.power_law import families, saved
from softfocus.lab.claims.results import Results, Run
from softfocus.lab.claims.speed import share
from softfocus.lab.evaluate.means import Estimate, Mean, difference, estimate, t_quantile
from softfocus.lab.report.points import Cell, cell
from softfocus.lab.run_folder.results import AS_TRAINED, Classification

Verdict = Literal["holds", "fails", "inconclusive", "too few seeds", "not run"]
SEEDS = 3
"""With fewer trainings of a row there is no verdict."""


@dataclass(frozen=True)
class Part:
    """What one comparison within a statement shows."""

    verdict: Verdict
    text: str
    sureness: float = math.nan
    """How many of the standard errors that it takes lie between the estimate and the other verdict; NaN without one."""


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict: it holds where all its comparisons hold, and fails where one of them fails."""

    statement: Statement
    verdict: Verdict
    parts: tuple[Part, ...]

    @property
    def shown(self) -> Part:
        """The comparison that decided: the one that speaks most against the statement."""
        deciding = [part for part in self.parts if part.verdict == self.verdict]
        return min(deciding, key=lambda part: -math.inf if math.isnan(part.sureness) else part.sureness)


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for several that all have to hold."""
    order: tuple[Verdict, ...] = ("fails", "not run", "too few seeds", "inconclusive")
    return next((verdict for verdict in order if verdict in verdicts), "holds")


def judge(claim: Claim, results: Results | None) -> list[Judged]:
    """Every statement of a claim. Without results only what tests decide has a verdict."""
    found = []
    for statement in claim.statements:
        parts = tuple(_JUDGES[type(statement)](claim, results, statement))
        found.append(Judged(statement, together([part.verdict for part in parts]), parts))
    return found


def _proved(claim: Claim, results: Results | None, statement: Proved) -> list[Part]:
    return [Part("holds", f"exact, by `{statement.by}`")]


def _disproved(claim: Claim, results: Results | None, statement: Disproved) -> list[Part]:
    return [Part("fails", f"exact, by `{statement.by}`")]


def _trains(claim: Claim, results: Results | None, statement: Trains) -> list[Part]:
    parts = []
    for row in named_in(statement, "row"):
        runs = results.of(row) if results else []
        count = sum(run.diverged for run in runs)
        text = f"{count} of {len(runs)} trainings of {row} diverged"
        parts.append(_too_few(row, runs) or Part("fails" if count else "holds", text))
    return parts


def _lower(claim: Claim, results: Results | None, statement: Lower) -> list[Part]:
    lengths = [statement.at] if isinstance(statement.at, str) else statement.at
    pairs = _pairs(claim, statement)
    setting, other_setting = statement.setting, statement.than_setting or statement.setting
    parts = []
    for (row, than), at in product(pairs, lengths):
        there = statement.than_at or at
        parts.append(
            _compare(
                results,
                (row, at, setting),
                (than, there, other_setting),
                *((_within, _lost_close) if isinstance(statement, Close) else (_below, _lost_lower)),
                statement.by,
            )
        )
    return parts


def _flat(claim: Claim, results: Results | None, statement: Flat) -> list[Part]:
    here = statement.setting
    return [
        _compare(results, (row, statement.to, here), (row, "1x", here), _below, _lost_flat, -statement.within)
        for row in named_in(statement, "row")
    ]


def _steeper(claim: Claim, results: Results | None, statement: Steeper) -> list[Part]:
    """Of natural logarithms of norms, over trainings alone: every seed has one."""
    of = "" if statement.part == "all" else f" of the {statement.part} projections"
    parts = []
    for row, than in _pairs(claim, statement):
        sides = [results.of(name) if results else [] for name in (row, than)]
        if early := _too_few(row, sides[0]) or _too_few(than, sides[1]):
            parts.append(early)
            continue
        known = [all(run.diverged or _norms(run, statement) for run in runs) for runs in sides]
        if not all(known):
            parts.append(Part("not run", f"{(row, than)[known.index(False)]} has no norms of gradients{of}"))
            continue
        ours, others = ([(run.info.seed, Mean(_log_norm(run, statement), 0.0)) for run in runs] for runs in sides)
        if any(math.isinf(mean.value) for _, mean in (*ours, *others)):
            first, second = ((sum(math.isinf(mean.value) for _, mean in side), len(side)) for side in (ours, others))
            text = f"{first[0]} of {first[1]} trainings of {row} diverged, {second[0]} of {second[1]} of {than}"
            parts.append(Part(_lost_lower(second, first), text))
            continue
        found = difference(others, ours)
        ratio, error = math.exp(-found.value), found.standard_error
        text = (
            f"the {statement.of} gradient{of} of {row} has {ratio:.3g} times the norm of that of {than} "
            f"(log ± {error:.2f})"
        )
        parts.append(_decide(found, -math.log(statement.factor), text))
    return parts


def _sooner(claim: Claim, results: Results | None, statement: Sooner) -> list[Part]:
    """Of natural logarithms of shares, over trainings alone. A loss that is never reached counts as infinitely late."""
    parts = []
    for row, than in _pairs(claim, statement):
        sides = [results.of(name) if results else [] for name in (row, than)]
        if early := _too_few(row, sides[0]) or _too_few(than, sides[1]):
            parts.append(early)
            continue
        ours, others = ({run.info.seed: run for run in runs} for runs in sides)
        pairs = [(seed, ours[seed], others[seed]) for seed in sorted(ours.keys() & others.keys())]
        lost = [sum(run.diverged for run in runs) for runs in sides]
        if any(lost):
            text = f"{lost[0]} of {len(ours)} trainings of {row} diverged, {lost[1]} of {len(others)} of {than}"
            parts.append(Part(_lost_lower((lost[0], len(ours)), (lost[1], len(others))), text))
            continue
        if len(pairs) < SEEDS or not all(one.info.validation_loss for _, *both in pairs for one in both):
            parts.append(Part("not run", f"{row} and {than} have no validation losses of {SEEDS} shared seeds"))
            continue
        shares = [(seed, share(one.info, other.info, of_time=statement.of == "time")) for seed, one, other in pairs]
        never = sum(math.isinf(one) for _, one in shares)
        if never:
            text = f"{row} never has the best loss of {than} in {never} of {len(shares)} trainings"
            parts.append(Part("fails" if never == len(shares) else "inconclusive", text))
            continue
        found = estimate([(seed, Mean(math.log(one), 0.0)) for seed, one in shares])
        text = (
            f"{row} has the best loss of {than} after {math.exp(found.value):.1%} of its {statement.of} "
            f"(log {found.value:+.3f} ± {found.standard_error:.3f})"
        )
        parts.append(_decide(found, math.log1p(-statement.by), text))
    return parts


def _faint(claim: Claim, results: Results | None, statement: Faint) -> list[Part]:
    parts = []
    for row in named_in(statement, "row"):
        runs = results.of(row) if results else []
        known = [(run.info.seed, value) for run in runs if (value := _probabilities(run, statement)) is not None]
        if early := _too_few(row, runs):
            parts.append(early)
        elif len(known) < len(runs):
            parts.append(Part("not run", f"{row} {statement.at} has no probabilities: diverged, or not inspected"))
        else:
            found = estimate(known)
            above = Estimate(-found.value, found.standard_error, found.freedom, found.training_noise)
            text = f"{row} {statement.at}: {found.value:.1%} ± {found.standard_error:.1%} below {statement.below}"
            parts.append(_decide(above, -statement.share, text))
    return parts


def _classifies(claim: Claim, results: Results | None, statement: Classifies) -> list[Part]:
    """Of errors, paired by document and seed as losses are."""
    parts = []
    for row, than in _pairs(claim, statement):
        sides = [results.of(name) if results else [] for name in (row, than)]
        errors = [
            [(run.info.seed, _errors(run.classification)) for run in runs if run.classification] for runs in sides
        ]
        if early := _too_few(row, sides[0]) or _too_few(than, sides[1]):
            parts.append(early)
        elif any(len(known) < len(runs) for known, runs in zip(errors, sides, strict=True)):
            parts.append(Part("not run", f"{row} or {than} diverged, or was not fine-tuned"))
        else:
            found = difference(*errors)
            ours, others = (1 - estimate(known).value for known in errors)
            text = f"{row} {ours:.1%}, {than} {others:.1%} right: {-found.value:+.1%} ± {found.standard_error:.1%}"
            parts.append(_decide(found, 0.0, text))
    return parts


def _errors(found: Classification) -> Mean:
    wrong = [count - right for count, right in zip(found.counts, found.right, strict=True)]
    return Mean.of(wrong, found.counts, (found.corpus_key, found.length, *found.documents))


def _saves(claim: Claim, results: Results | None, statement: Saves) -> list[Part]:
    for row in (*statement.row, *statement.than):
        if early := _too_few(row, results.of(row) if results else []):
            return [early]
    assert results is not None  # every row has runs
    both = families(results, statement)
    if both is None or both[0].losses.keys() != both[1].losses.keys():
        return [Part("inconclusive", "a size diverged, was not measured, or has other seeds")]
    ours, others = both
    found = saved(ours, others)
    if found is None:
        return [Part("inconclusive", "the loss does not fall with the size")]
    text = (
        f"for the loss that the curve of the others has at {others.parameters[-1] / 1e6:.2f} M parameters, "
        f"{math.expm1(found.value):+.1%} parameters (log {found.value:+.3f} ± {found.standard_error:.3f})"
    )
    return [_decide(found, math.log1p(-statement.by), text)]


_JUDGES: dict[type, Callable[[Claim, Results | None, Any], list[Part]]] = {
    Lower: _lower,
    Close: _lower,
    Flat: _flat,
    Trains: _trains,
    Steeper: _steeper,
    Sooner: _sooner,
    Faint: _faint,
    Classifies: _classifies,
    Saves: _saves,
    Proved: _proved,
    Disproved: _disproved,
}

Place = tuple[str, str, str]
"""A row, a multiple of the training length, and a setting."""


Lost = tuple[int, int]
"""How many trainings of a row diverged, or have no finite loss at a place, and how many there are."""


def _compare(
    results: Results | None,
    place: Place,
    other: Place,
    rule: Callable[[Estimate, float, str], Part],
    rule_of_lost: Callable[[Lost, Lost], Verdict],
    by: float,
) -> Part:
    """Two losses, paired by document and seed. The rules are told by how large a share of the other loss."""
    sides = [results.of(row) if results else [] for row, _, _ in (place, other)]
    for (row, _, _), runs in zip((place, other), sides, strict=True):
        if early := _too_few(row, runs):
            return early
    cells = [_cell(results, one) for one in (place, other)]
    for one, runs, there in zip((place, other), sides, cells, strict=True):
        if there is None and not all(run.diverged for run in runs):
            return Part("not run", f"{_name(one)} was not measured")
    lost = [(_lost(runs, there), len(runs)) for runs, there in zip(sides, cells, strict=True)]
    if any(count for count, _ in lost):
        said = [
            f"{_name(one)} diverged in {count} of {of} trainings"
            for one, (count, of) in zip((place, other), lost, strict=True)
            if count
        ]
        return Part(rule_of_lost(*lost), ", ".join(said))
    first, second = cells
    assert first is not None  # nothing was lost
    assert second is not None
    found = first.minus(second)
    text = (
        f"{_name(place)} {first.loss:.3f}, {_name(other)} {second.loss:.3f}: "
        f"{found.value:+.3f} ± {found.standard_error:.3f}"
    )
    return rule(found, by * second.loss, text)


def _below(found: Estimate, room: float, text: str) -> Part:
    """Below another loss by more than some room; by negative room it may be above it."""
    return _decide(found, -room, text)


def _within(found: Estimate, room: float, text: str) -> Part:
    """Two one-sided decisions, as tests of equivalence have them."""
    above = Estimate(-found.value, found.standard_error, found.freedom, found.training_noise)
    sides = [_decide(one, room, text) for one in (found, above)]
    return Part(together([side.verdict for side in sides]), text, min(side.sureness for side in sides))


def _decide(found: Estimate, line: float, text: str) -> Part:
    """Whether an estimate is below a line by more than noise, above it by more than noise, or neither."""
    room = t_quantile(found.freedom) * found.standard_error
    sureness = (line - found.value) / room if room > 0 else math.copysign(math.inf, line - found.value)
    if not found.training_noise or math.isnan(sureness):
        return Part("inconclusive", text)
    return Part("holds" if sureness > 1 else "fails" if sureness < -1 else "inconclusive", text, sureness)


def _lost_lower(first: Lost, second: Lost) -> Verdict:
    """Whether a first loss is the lower one where some trainings diverged: they count as infinitely high.

    Only where all of one row and none of the other did can that be said: the others would be chosen by their luck.
    """
    if first[0] == 0 and second[0] == second[1]:
        return "holds"
    return "fails" if first[0] == first[1] and second[0] == 0 else "inconclusive"


def _lost_close(first: Lost, second: Lost) -> Verdict:
    """A row that diverged is not close to one that did not."""
    apart = {_lost_lower(first, second), _lost_lower(second, first)} == {"holds", "fails"}
    return "fails" if apart else "inconclusive"


def _lost_flat(there: Lost, at_first: Lost) -> Verdict:
    """A row that diverged in every training is not flat."""
    return "fails" if there[0] == there[1] else "inconclusive"


def _lost(runs: Sequence[Run], there: Cell | None) -> int:
    """How many trainings diverged, or have a loss there that is not a number."""
    values = there.values if there is not None else []
    return sum(run.diverged for run in runs) + sum(not math.isfinite(value) for value in values)


def _cell(results: Results | None, place: Place) -> Cell | None:
    row, at, setting = place
    group = results.group(row) if results else None
    return cell(group, float(at.removesuffix("x")), setting) if group else None


def _norms(run: Run, statement: Steeper) -> list[float]:
    """Over a training; none where they were not noted."""
    noted = run.info.projection_norms
    return [norm for _, norm in (run.info.gradient_norm if statement.part == "all" else noted.get(statement.part, []))]


def _log_norm(run: Run, statement: Steeper) -> float:
    """Infinite where training diverged."""
    norms = _norms(run, statement)
    if run.diverged or not all(map(math.isfinite, norms)):
        return math.inf
    return math.log(max(max(norms) if statement.of == "largest" else median(norms), 1e-30))


def _probabilities(run: Run, statement: Faint) -> Mean | None:
    """The share of them that is below, if it was measured."""
    length = int(statement.at.removesuffix("x")) * run.info.train_length
    there = next((row for row in run.attention if row.length == length), None)
    value = None if there is None else there.below_1e_3 if statement.below == "1e-3" else there.below_1e_7
    return None if value is None else Mean(value.mean, value.standard_error)


def _too_few(row: str, runs: Sequence[Run]) -> Part | None:
    seeds = {run.info.seed for run in runs}
    if not seeds:
        return Part("not run", f"{row} was not run")
    return (
        None if len(seeds) >= SEEDS else Part("too few seeds", f"{row} was trained with {len(seeds)} of {SEEDS} seeds")
    )


def _pairs(claim: Claim, statement: Lower | Steeper | Sooner | Classifies) -> list[tuple[str, str]]:
    ours = named_in(statement, "row")
    others = [name for name in claim.rows if name not in ours] if "*" in named_in(statement, "than") else None
    return list(product(ours, others if others is not None else named_in(statement, "than")))


def _name(place: Place) -> str:
    row, at, setting = place
    return f"{row} {at}" + (
        "" if setting == AS_TRAINED.name() or (at == "1x" and setting == "dynamic NTK") else f", {setting}"
    )
