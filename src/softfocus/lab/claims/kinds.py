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

from softfocus.lab.claims.claim import Answers, Attends, Claim, Classifies, Faint, Finds, Saves, Sooner, Steeper
from softfocus.lab.claims.parts import (
    SEEDS,
    Part,
    decide,
    lost_alone,
    lost_lower,
    lost_of,
    lost_text,
    pairs_of,
    sides_of,
)
from softfocus.lab.claims.power_law import families, saved
from softfocus.lab.claims.results import Results, Run
from softfocus.lab.evaluate.means import Estimate, Mean, difference, estimate
from softfocus.lab.run_folder.results import RunInfo


def steeper(claim: Claim, results: Results, statement: Steeper) -> list[Part]:
    """Of natural logarithms of norms, over trainings alone: every seed has one."""
    return [_steeper(results, statement, pair) for pair in pairs_of(claim, statement)]


def _steeper(results: Results, statement: Steeper, rows: tuple[str, str]) -> Part:
    sides, early = sides_of(results, rows)
    if early:
        return early
    of = "" if statement.part == "all" else f" of the {statement.part} projections"
    known = [all(run.diverged or _norms(run, statement) for run in runs) for runs in sides]
    if not all(known):
        after = " after the warm-up" if statement.of == "largest" else ""
        return Part("not run", f"{rows[known.index(False)]} has no norms of gradients{of}{after}")
    ours, others = ([(run.info.seed, Mean(_log_norm(run, statement), 0.0)) for run in runs] for runs in sides)
    if any(math.isinf(mean.value) for _, mean in (*ours, *others)):
        first, second = ((sum(math.isinf(mean.value) for _, mean in side), len(side)) for side in (ours, others))
        return Part(lost_lower(second, first), lost_text(rows, (first, second)))
    found = difference(others, ours)
    ratio, error = math.exp(-found.value), found.standard_error
    times = f"{ratio:.2f}" if 0.1 <= ratio < 100 else f"{ratio:.3g}"
    text = (
        f"the {statement.of} gradient{of} of {rows[0]} has {times} times the norm of that of {rows[1]} "
        f"(log ± {error:.2f})"
    )
    return decide(found, -math.log(statement.factor), text)


def sooner(claim: Claim, results: Results, statement: Sooner) -> list[Part]:
    """Of losses, over trainings alone: our best loss within (1 - by) of the steps that the other
    took to its best one, less that best one.

    Ours is below it there just where it was reached sooner. So this asks the same as a share of
    steps would, of a number that each training has: where a curve never has the other's best loss,
    its share of the steps is infinite, and one such training would leave no mean. A test of signs
    or ranks takes six seeds before it decides anything. This one takes three, as all others.
    """
    return [_sooner(results, statement, pair) for pair in pairs_of(claim, statement)]


def _sooner(results: Results, statement: Sooner, rows: tuple[str, str]) -> Part:
    sides, early = sides_of(results, rows)
    if early:
        return early
    ours, others = ({run.info.seed: run.info for run in runs} for runs in sides)
    pairs = [(seed, ours[seed], others[seed]) for seed in sorted(ours.keys() & others.keys())]
    first, second = lost = [lost_of(runs) for runs in sides]
    if first[0] or second[0]:
        return Part(lost_lower(first, second), lost_text(rows, lost))
    if len(pairs) < SEEDS or not all(one.validation_loss for _, *both in pairs for one in both):
        return Part("not run", f"{rows[0]} and {rows[1]} have no validation losses of {SEEDS} shared seeds")
    in_time = statement.of == "time"
    known = [all(run.info.tokens_per_second for run in runs) for runs in sides]
    if in_time and not all(known):
        return Part("not run", f"{rows[known.index(False)]} has no speed")
    apart = [(seed, _apart(one, other, statement.by, of_time=in_time)) for seed, one, other in pairs]
    if any(math.isnan(loss) for _, loss in apart):
        return Part("not run", f"{rows[0]} has no validation loss as early as that")
    found = estimate([(seed, Mean(loss, 0.0)) for seed, loss in apart])
    shares = [_share(one, other, of_time=in_time) for _, one, other in pairs]
    return decide(found, 0.0, _sooner_text(*rows, statement, found, shares))


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


def faint(claim: Claim, results: Results, statement: Faint) -> list[Part]:
    """Of shares, over documents and trainings."""
    name = f"below_{statement.below.replace('-', '_')}"
    parts = []
    for row in statement.row:
        (runs,), early = sides_of(results, [row])
        known = [(run.info.seed, value) for run in runs if (value := _attention(run, name, statement.at)) is not None]
        lost = lost_of(runs)
        if early:
            parts.append(early)
        elif len(known) + lost[0] < len(runs):
            parts.append(Part("not run", f"{row} {statement.at} has no probabilities: it was not inspected"))
        elif lost[0]:
            parts.append(Part(lost_alone(lost), lost_text([row], [lost])))
        else:
            found = estimate(known)
            text = f"{row} {statement.at}: {found.value:.1%} ± {found.standard_error:.1%} below {statement.below}"
            parts.append(decide(-found, -statement.share, text))
    return parts


def attends(claim: Claim, results: Results, statement: Attends) -> list[Part]:
    """Of means over attention weights, over documents and trainings."""
    if not statement.than:
        return [_attends(results, statement, (row,)) for row in statement.row]
    return [_attends(results, statement, pair) for pair in pairs_of(claim, statement)]


def _attends(results: Results, statement: Attends, rows: Sequence[str]) -> Part:
    """Weights of a training that diverged are no larger and no smaller than others."""
    sides, early = sides_of(results, rows)
    if early:
        return early
    lost = [lost_of(runs) for runs in sides]
    known = [[(run.info.seed, one) for run in runs if (one := _mean(run, statement)) is not None] for runs in sides]
    for row, some, (gone, of) in zip(rows, known, lost, strict=True):
        if len(some) + gone < of:
            return Part("not run", f"{row} was not inspected at {statement.at}")
    if any(gone for gone, _ in lost):
        return Part("inconclusive", lost_text(rows, lost))
    found = difference(known[0], known[1]) if len(rows) > 1 else estimate(known[0])
    name, form = _MEANS[statement.mean]
    sign = "+" if statement.since else ""
    means = [f"{row} {estimate(some).value:{sign}{form}}" for row, some in zip(rows, known, strict=True)]
    growth = f"from {statement.since} to {statement.at}" if statement.since else f"at {statement.at}"
    judged = f"{', '.join(means)}: {found.value:+{form}}" if len(means) > 1 else means[0]
    return decide(-found, 0.0, f"{name} {growth}: {judged} ± {found.standard_error:{form}}")


_MEANS = {
    "distance": ("mean distance in tokens", ".2f"),
    "entropy": ("entropy in nats", ".3f"),
    "below_1e_3": ("share below 1e-3", ".1%"),
    "below_1e_7": ("share below 1e-7", ".1%"),
}
"""What a mean is called, and how its numbers are written."""


def _mean(run: Run, statement: Attends) -> Mean | None:
    """The mean of a run, or its growth; None where it was not measured."""
    there = _attention(run, statement.mean, statement.at)
    if there is None or statement.since is None:
        return there
    before = _attention(run, statement.mean, statement.since)
    # Windows of two lengths start in other places: their errors are taken as independent
    if before is None:
        return None
    return Mean(there.value - before.value, math.hypot(there.standard_error, before.standard_error))


def _attention(run: Run, name: str, at: str) -> Mean | None:
    """What the attention of a run is like at a length, if it was measured."""
    there = next((row for row in run.attention if row.length == _length(run, at)), None)
    value = None if there is None else getattr(there, name)
    return None if value is None else Mean(value.mean, value.standard_error)


def classifies(claim: Claim, results: Results, statement: Classifies) -> list[Part]:
    """Of errors, paired by document and seed as losses are."""
    missing = "was not fine-tuned"
    pairs = pairs_of(claim, statement)
    return [_fewer_errors(results, pair, _misclassified, word="right", missing=missing) for pair in pairs]


def finds(claim: Claim, results: Results, statement: Finds) -> list[Part]:
    """Of shares that are missed, over sequences and trainings."""
    parts = []
    for pair, at in product(pairs_of(claim, statement), statement.at):
        missing = f"was not asked for passkeys at {at}"
        missed = partial(_missed, at=at)
        parts.append(_fewer_errors(results, pair, missed, prefix=f"{at}: ", word="found", missing=missing))
    return parts


def answers(claim: Claim, results: Results, statement: Answers) -> list[Part]:
    """Of errors, paired by question and seed. Each task counts alike."""
    missing = "was not asked the tasks"
    return [
        _fewer_errors(results, pair, _mistaken, word="right", missing=missing) for pair in pairs_of(claim, statement)
    ]


def _fewer_errors(
    results: Results,
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
        missing: what is wrong with a run that has no share, and did not diverge.
        prefix: what the text starts with.
    """
    sides, early = sides_of(results, rows)
    if early:
        return early
    known = [[(run.info.seed, one) for run in runs if (one := errors(run)) is not None] for runs in sides]
    first, second = lost = [lost_of(runs) for runs in sides]
    for row, some, (gone, of) in zip(rows, known, lost, strict=True):
        if len(some) + gone < of:
            return Part("not run", f"{row} {missing}")
    if first[0] or second[0]:
        return Part(lost_lower(first, second), prefix + lost_text(rows, lost))
    found = difference(*known)
    ours, others = (1 - estimate(some).value for some in known)
    shares = f"{rows[0]} {ours:.1%}, {rows[1]} {others:.1%} {word}"
    return decide(found, 0.0, f"{prefix}{shares}: {-found.value:+.1%} ± {found.standard_error:.1%}")


def _misclassified(run: Run) -> Mean | None:
    if (found := run.classification) is None:
        return None
    wrong = [count - right for count, right in zip(found.counts, found.right, strict=True)]
    return Mean.of(wrong, found.counts, (found.corpus_key, found.length, *found.documents))


def _mistaken(run: Run) -> Mean | None:
    """The mean of the shares of wrong answers over tasks. All models answer the same questions."""
    if (found := run.tasks) is None:
        return None
    questions = (found.harness, *((row.task, len(row.right)) for row in found.rows))
    return Mean.of_groups([1 - np.array(row.right) for row in found.rows], questions)


def _missed(run: Run, at: str) -> Mean | None:
    """The share of passkeys that is missed, if it was measured."""
    there = next((row for row in run.passkeys if row.length == _length(run, at)), None)
    return None if there is None else Mean(1 - there.accuracy, there.standard_error)


def _length(run: Run, at: str) -> int:
    """A multiple of the training length, in tokens."""
    return round(float(at.removesuffix("x")) * run.info.train_length)


def saves(claim: Claim, results: Results, statement: Saves) -> list[Part]:
    """Of power laws, over trainings alone. Where the curves miss a size by more than they are
    apart, the answer is the curve's and not the models'.
    """
    _, early = sides_of(results, [*statement.row, *statement.than])
    if early:
        return [early]
    first, second = lost = [
        lost_of([run for row in rows for run in results.of(row)]) for rows in (statement.row, statement.than)
    ]
    if first[0] or second[0]:
        return [Part(lost_lower(first, second), lost_text(("one family", "the other"), lost))]
    both = families(results, statement)
    if both is None or both[0].losses.keys() != both[1].losses.keys():
        return [Part("inconclusive", "a size was not measured, or has other seeds")]
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
    first = 0 if statement.of == "median" else run.settled  # which reads the recipe
    return [norm for step, norm in norms if step >= first]


def _log_norm(run: Run, statement: Steeper) -> float:
    """Infinite where training diverged."""
    norms = _norms(run, statement)
    if run.diverged or not all(map(math.isfinite, norms)):
        return math.inf
    return math.log(max(max(norms) if statement.of == "largest" else median(norms), 1e-30))


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
    one, less that. Where our training is over by then it is that of its end; NaN before our first
    validation.
    """
    step, best = min(other.validation_loss, key=lambda point: point[1])
    until = (1 - by) * step
    if of_time:
        until *= _seconds_a_step(other) / _seconds_a_step(ours)
    steps, losses = zip(*ours.validation_loss, strict=True)
    # Straight lines between, the last loss beyond
    there = float(np.interp(until, steps, losses, left=math.nan))
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
