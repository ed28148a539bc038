"""Statements about more than the losses of an evaluation: gradients, speed, probabilities,
classification, passkeys, tasks, sizes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median

import numpy as np

from softfocus.lab.claims.claim import Answers, Claim, Classifies, Faint, Finds, Saves, Sooner, Steeper, named_in
from softfocus.lab.claims.parts import SEEDS, Part, decide, lost_lower, pairs_of, too_few
from softfocus.lab.claims.power_law import families, saved
from softfocus.lab.claims.results import Results, Run
from softfocus.lab.evaluate.means import Estimate, Mean, difference, estimate
from softfocus.lab.run_folder.results import Classification, RunInfo
from softfocus.lab.run_folder.tasks import Tasks


def steeper(claim: Claim, results: Results | None, statement: Steeper) -> list[Part]:
    """Of natural logarithms of norms, over trainings alone: every seed has one."""
    of = "" if statement.part == "all" else f" of the {statement.part} projections"
    parts = []
    for row, than in pairs_of(claim, statement):
        sides = [results.of(name) if results else [] for name in (row, than)]
        if early := too_few(row, sides[0]) or too_few(than, sides[1]):
            parts.append(early)
            continue
        known = [all(run.diverged or _norms(run, statement) for run in runs) for runs in sides]
        if not all(known):
            after = " after the warm-up" if statement.of == "largest" else ""
            parts.append(Part("not run", f"{(row, than)[known.index(False)]} has no norms of gradients{of}{after}"))
            continue
        ours, others = ([(run.info.seed, Mean(_log_norm(run, statement), 0.0)) for run in runs] for runs in sides)
        if any(math.isinf(mean.value) for _, mean in (*ours, *others)):
            first, second = ((sum(math.isinf(mean.value) for _, mean in side), len(side)) for side in (ours, others))
            text = f"{first[0]} of {first[1]} trainings of {row} diverged, {second[0]} of {second[1]} of {than}"
            parts.append(Part(lost_lower(second, first), text))
            continue
        found = difference(others, ours)
        ratio, error = math.exp(-found.value), found.standard_error
        text = (
            f"the {statement.of} gradient{of} of {row} has {_times(ratio)} times the norm of that of {than} "
            f"(log ± {error:.2f})"
        )
        parts.append(decide(found, -math.log(statement.factor), text))
    return parts


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.1 <= ratio < 100 else f"{ratio:.3g}"


def sooner(claim: Claim, results: Results | None, statement: Sooner) -> list[Part]:
    """Of losses, over trainings alone: our best loss within (1 - by) of the steps that the other
    took to its best one, less that best one.

    Ours is below it there just where it was reached sooner. So this asks the same as a share of
    steps would, of a number that each training has: where a curve never has the other's best loss,
    its share of the steps is infinite, and one such training would leave no mean. A test of signs
    or ranks takes six seeds before it decides anything. This one takes three, as all others.
    """
    parts = []
    for row, than in pairs_of(claim, statement):
        sides = [results.of(name) if results else [] for name in (row, than)]
        if early := too_few(row, sides[0]) or too_few(than, sides[1]):
            parts.append(early)
            continue
        ours, others = ({run.info.seed: run for run in runs} for runs in sides)
        pairs = [(seed, ours[seed], others[seed]) for seed in sorted(ours.keys() & others.keys())]
        lost = [sum(run.diverged for run in runs) for runs in sides]
        if any(lost):
            text = f"{lost[0]} of {len(ours)} trainings of {row} diverged, {lost[1]} of {len(others)} of {than}"
            parts.append(Part(lost_lower((lost[0], len(ours)), (lost[1], len(others))), text))
            continue
        if len(pairs) < SEEDS or not all(one.info.validation_loss for _, *both in pairs for one in both):
            parts.append(Part("not run", f"{row} and {than} have no validation losses of {SEEDS} shared seeds"))
            continue
        in_time = statement.of == "time"
        known = [all(run.info.tokens_per_second for run in runs) for runs in sides]
        if in_time and not all(known):
            parts.append(Part("not run", f"{(row, than)[known.index(False)]} has no speed"))
            continue
        apart = [
            (seed, Mean(_apart(one.info, other.info, statement.by, of_time=in_time), 0.0)) for seed, one, other in pairs
        ]
        found = estimate(apart)
        shares = [_share(one.info, other.info, of_time=in_time) for _, one, other in pairs]
        parts.append(decide(found, 0.0, _sooner_text(row, than, statement, found, shares)))
    return parts


def _sooner_text(row: str, than: str, statement: Sooner, found: Estimate, shares: Sequence[float]) -> str:
    """The differences of losses, and the median of the shares with `never` as the last."""
    middle, never = median(shares), sum(map(math.isinf, shares))
    reached = "never reached" if math.isinf(middle) else f"reached after {middle:.1%} of the {statement.of}"
    lost = f"; in {never} of {len(shares)} trainings never" if never and not math.isinf(middle) else ""
    much = "many" if statement.of == "steps" else "much"
    after = f"{1 - statement.by:.0%} of the {statement.of}" if statement.by else f"as {much} {statement.of}"
    return (
        f"loss of {row} after {after}, less the best of {than}: {found.value:+.3f} ± {found.standard_error:.3f} "
        f"(median: that loss is {reached}{lost})"
    )


def faint(claim: Claim, results: Results | None, statement: Faint) -> list[Part]:
    """Of shares, over documents and trainings."""
    parts = []
    for row in named_in(statement, "row"):
        runs = results.of(row) if results else []
        known = [(run.info.seed, value) for run in runs if (value := _probabilities(run, statement)) is not None]
        if early := too_few(row, runs):
            parts.append(early)
        elif len(known) < len(runs):
            parts.append(Part("not run", f"{row} {statement.at} has no probabilities: diverged, or not inspected"))
        else:
            found = estimate(known)
            above = Estimate(-found.value, found.standard_error, found.freedom, found.training_noise)
            text = f"{row} {statement.at}: {found.value:.1%} ± {found.standard_error:.1%} below {statement.below}"
            parts.append(decide(above, -statement.share, text))
    return parts


def classifies(claim: Claim, results: Results | None, statement: Classifies) -> list[Part]:
    """Of errors, paired by document and seed as losses are."""

    def errors(run: Run) -> Mean | None:
        return None if run.classification is None else _errors(run.classification)

    return [
        _fewer_errors(results, pair, errors, word="right", missing="was not fine-tuned")
        for pair in pairs_of(claim, statement)
    ]


def finds(claim: Claim, results: Results | None, statement: Finds) -> list[Part]:
    """Of shares that are missed, over sequences and trainings."""
    parts = []
    for pair, at in product(pairs_of(claim, statement), named_in(statement, "at")):
        missing = f"was not asked for passkeys at {at}"
        missed = partial(_missed, at=at)
        parts.append(_fewer_errors(results, pair, missed, prefix=f"{at}: ", word="found", missing=missing))
    return parts


def answers(claim: Claim, results: Results | None, statement: Answers) -> list[Part]:
    """Of errors, paired by question and seed. Each task counts alike."""

    def errors(run: Run) -> Mean | None:
        return None if run.tasks is None else _mistaken(run.tasks)

    return [
        _fewer_errors(results, pair, errors, word="right", missing="was not asked the tasks")
        for pair in pairs_of(claim, statement)
    ]


def _fewer_errors(
    results: Results | None,
    rows: tuple[str, str],
    errors: Callable[[Run], Mean | None],
    *,
    word: str,
    missing: str,
    prefix: str = "",
) -> Part:
    """Whether a row has a smaller share of errors than another.

    Args:
        results: of the claim.
        rows: the row, and the other.
        errors: the share of a run, None where it was not measured.
        word: what an answer without error is, such as "right".
        missing: what is wrong with a run that has no share.
        prefix: what the text starts with.
    """
    sides = [results.of(name) if results else [] for name in rows]
    if early := too_few(rows[0], sides[0]) or too_few(rows[1], sides[1]):
        return early
    known = [[(run.info.seed, one) for run in runs if (one := errors(run)) is not None] for runs in sides]
    if any(len(some) < len(runs) for some, runs in zip(known, sides, strict=True)):
        return Part("not run", f"{rows[0]} or {rows[1]} diverged, or {missing}")
    found = difference(*known)
    ours, others = (1 - estimate(some).value for some in known)
    shares = f"{rows[0]} {ours:.1%}, {rows[1]} {others:.1%} {word}"
    return decide(found, 0.0, f"{prefix}{shares}: {-found.value:+.1%} ± {found.standard_error:.1%}")


def _errors(found: Classification) -> Mean:
    wrong = [count - right for count, right in zip(found.counts, found.right, strict=True)]
    return Mean.of(wrong, found.counts, (found.corpus_key, found.length, *found.documents))


def _mistaken(found: Tasks) -> Mean:
    """The mean of the shares of wrong answers over tasks. All models answer the same questions."""
    questions = (found.harness, *((row.task, len(row.right)) for row in found.rows))
    return Mean.of_groups([1 - np.array(row.right) for row in found.rows], questions)


def _missed(run: Run, at: str) -> Mean | None:
    """The share of passkeys that is missed, if it was measured."""
    length = int(at.removesuffix("x")) * run.info.train_length
    there = next((row for row in run.passkeys if row.length == length), None)
    return None if there is None else Mean(1 - there.accuracy, there.standard_error)


def saves(claim: Claim, results: Results | None, statement: Saves) -> list[Part]:
    """Of power laws, over trainings alone. Where the curves miss a size by more than they are
    apart, the answer is the curve's and not the models'.
    """
    for row in (*statement.row, *statement.than):
        if early := too_few(row, results.of(row) if results else []):
            return [early]
    assert results is not None  # every row has runs
    both = families(results, statement)
    if both is None or both[0].losses.keys() != both[1].losses.keys():
        return [Part("inconclusive", "a size diverged, was not measured, or has other seeds")]
    ours, others = both
    found = saved(ours, others)
    if found is None:
        return [Part("inconclusive", "the loss does not fall with the size")]
    gap, misfit = ours.gap(others, statement.by), max(ours.misfit, others.misfit)
    text = (
        f"for the loss that the curve of the others has at {others.parameters[-1] / 1e6:.2f} M parameters, "
        f"{math.expm1(found.value):+.1%} parameters (log {found.value:+.3f} ± {found.standard_error:.3f}); "
        f"what is judged is a gap of {gap:.2%} between the curves, which miss losses by up to {misfit:.2%}"
    )
    part = decide(found, math.log1p(-statement.by), text)
    return [replace(part, verdict="inconclusive") if misfit > gap else part]


def _norms(run: Run, statement: Steeper) -> list[float]:
    """Over a training, of the largest after the warm-up; none where they were not noted."""
    noted = run.info.projection_norms
    norms = run.info.gradient_norm if statement.part == "all" else noted.get(statement.part, [])
    return [norm for step, norm in norms if statement.of == "median" or step >= run.settled]


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


def _reached(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """The step at which a curve first has a loss, on straight lines between its points; infinite
    where it never has it.
    """
    for number, (step, there) in enumerate(curve):
        if there <= loss:
            if number == 0:
                return step
            before, higher = curve[number - 1]
            return before + (step - before) * (higher - loss) / (higher - there)
    return math.inf


def _apart(ours: RunInfo, other: RunInfo, by: float, *, of_time: bool) -> float:
    """Our best loss after all but a share `by` of the other's steps, or seconds, to its own best
    one, less that. Where our training is over by then it is that of its end.
    """
    step, best = min(other.validation_loss, key=lambda point: point[1])
    until = (1 - by) * step
    if of_time:
        until *= _seconds_a_step(other) / _seconds_a_step(ours)
    steps, losses = zip(*ours.validation_loss, strict=True)
    there = float(np.interp(until, steps, losses))  # straight lines between, the ends beyond
    return min([there, *(loss for at, loss in ours.validation_loss if at <= until)]) - best


def _share(ours: RunInfo, other: RunInfo, *, of_time: bool) -> float:
    """Our steps, or seconds, to the other's best validation loss, as a share of those that the
    other took to it.

    Seconds come from tokens per second, which leave validations out.
    """
    step, best = min(other.validation_loss, key=lambda point: point[1])
    steps = _reached(ours.validation_loss, best) / step
    if not of_time:
        return steps
    return steps * (_seconds_a_step(ours) / _seconds_a_step(other))


def _seconds_a_step(info: RunInfo) -> float:
    return info.tokens_per_step / (info.tokens_per_second or math.nan)
