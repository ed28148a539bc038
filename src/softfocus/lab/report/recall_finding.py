"""What runs of one generated task show: who finds most where, by how much, and whether that is more
than noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from softfocus.lab.evaluate.means import Mean, Runs, difference, estimate
from softfocus.lab.report.points import listed
from softfocus.lab.run_folder.results import RecallRow, Record

_NAMED = 4  # rows that a sentence still can name


def share_of(row: RecallRow) -> Mean:
    """The share of right answers, with its error over sequences.

    Where all sequences have the same share, most often 1, they show no error. It is then that of
    one other sequence among two more (Laplace's rule of succession).
    """
    count = row.sequences
    error = row.standard_error or math.sqrt(1 / (count + 2) * (1 - 1 / (count + 2)) / count)
    return Mean(row.accuracy, error, freedom=max(count - 1, 1))


@dataclass(frozen=True)
class Asked:
    """Sequences of one length.

    Attributes:
        length: in tokens.
        grown: whether longer sequences have more to remember, or only more filler.
        name: of the length, as a sentence has it.
        shares: of right answers, by the name of the row.
    """

    length: int
    grown: bool
    name: str
    shares: Mapping[str, Runs]


class RecallDifference(Record):
    """A row's share of right answers at one length less another's."""

    length: int
    grown: bool
    label: str
    share: float
    against: str
    against_share: float
    difference: float
    standard_error: float
    training_noise: bool
    """Whether the standard error holds the noise of training, which takes several seeds of both."""
    paired_by_seed: bool
    verdict: Literal["smaller", "inconclusive"]
    """"inconclusive" where noise alone may have made the difference (`Estimate.sure`)."""


class RecallFinding(Record):
    """What the runs show at the training length and at the longest ones that all of them share."""

    sentence: str
    differences: list[RecallDifference]


def recall_finding(asked: Sequence[Asked]) -> RecallFinding:
    """Compare rows with the one that finds the most, at each of these lengths."""
    if not asked:
        reason = "the models share no length. Measure all at the same lengths: `softfocus recall RUN --lengths LIST`."
        return RecallFinding(sentence=f"Nothing can be said: {reason}", differences=[])
    sentences: list[str] = []
    differences: list[RecallDifference] = []
    for one in asked:
        means = {label: estimate(runs).value for label, runs in one.shares.items()}
        most, *others = sorted(means, key=lambda label: -means[label])
        found = [_difference(one, label, most, means) for label in others]
        differences += found
        sentences.append(_sentence(one, most, means[most], found))
    counts = sorted({len(runs) for one in asked for runs in one.shares.values()})
    if counts and counts[-1] > 1:
        between = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        sentences.append(f"Shares are means over {between} trainings.")
    if any(not one.training_noise for one in differences):
        sentences.append("The noise of training is not known: that takes several seeds of each.")
    return RecallFinding(sentence=" ".join(sentences), differences=differences)


def _difference(asked: Asked, label: str, most: str, means: Mapping[str, float]) -> RecallDifference:
    found = difference(asked.shares[label], asked.shares[most])
    return RecallDifference(
        length=asked.length,
        grown=asked.grown,
        label=label,
        share=means[label],
        against=most,
        against_share=means[most],
        difference=found.value,
        standard_error=found.standard_error,
        training_noise=found.training_noise,
        paired_by_seed=found.by_seed,
        verdict="smaller" if found.sure else "inconclusive",
    )


def _sentence(asked: Asked, most: str, share: float, others: Sequence[RecallDifference]) -> str:
    """At 16x (1,024 tokens), more filler, LSSAR finds most, 0.998; the share of softmax is smaller
    by 0.840 ± 0.012; inconclusive: LASER (-0.002 ± 0.003).
    """
    equal = [one.label for one in others if one.difference == 0]
    apart = [one for one in others if one.difference != 0]
    named = [most, *equal][: _NAMED + 1]
    more = [f"{1 + len(equal) - len(named)} more"] if len(named) < 1 + len(equal) else []
    verb = "find" if len(named) > 1 else "finds"
    clauses = [f"At {asked.name} {listed([*named, *more])} {verb} {'most, ' if others else ''}{share:.3f}"]
    decided = [one for one in apart if one.verdict == "smaller"]
    unsure = [one for one in apart if one.verdict == "inconclusive"]
    smaller = [f"the share of {one.label} is smaller by {_apart(-one.difference, one)}" for one in decided[:_NAMED]]
    noise = [f"{one.label} ({_apart(one.difference, one)})" for one in unsure[:_NAMED]]
    hidden = len(apart) - len(smaller) - len(noise)
    for prefix, texts in (("", smaller), ("inconclusive: ", noise)):
        if texts:
            clauses.append(prefix + listed(texts))
    if hidden:
        clauses.append(f"for {hidden} more see the results")
    return "; ".join(clauses) + "."


def _apart(value: float, one: RecallDifference) -> str:
    error = "unknown" if math.isnan(one.standard_error) else f"{one.standard_error:.3f}"
    return f"{value:{'+' if value < 0 else ''}.3f} ± {error}"
