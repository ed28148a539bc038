"""What was found: who is better where, by how much, and whether that is more than noise."""

import math
from collections.abc import Sequence
from typing import Literal

from softfocus.lab.report.points import (
    Axis,
    Cell,
    Group,
    best,
    cell,
    column_name,
    columns,
    listed,
    predicts,
    shared_columns,
    tokenizers_may_differ,
    tokens_at,
)
from softfocus.lab.run_folder.results import AS_TRAINED, Record

_NAMED = 4  # groups that a sentence still can name
_RISES = 8  # and those of which it can give one number

Verdict = Literal["higher", "lower", "inconclusive"]
Pairing = Literal["by document and seed", "by document alone", "by seed alone", "by nothing"]
_PAIRINGS: dict[tuple[bool, bool], Pairing] = {
    (True, True): "by document and seed",
    (True, False): "by document alone",
    (False, True): "by seed alone",
    (False, False): "by nothing",
}


class Difference(Record):
    """A group's loss at one length less another's, each with its best setting there."""

    column: float
    label: str
    setting: str
    loss: float
    against: str
    against_setting: str
    against_loss: float
    difference: float
    standard_error: float
    training_noise: bool
    """Whether the standard error holds the noise of training, which takes several seeds of both."""
    paired: Pairing
    """By seed where both have the same seeds."""
    verdict: Verdict
    """"inconclusive" where noise alone may have made the difference (`Estimate.sure`), or where it
    is not a number.
    """


class Finding(Record):
    """What the runs show at the training length and at the longest length that all of them
    share.
    """

    sentence: str
    differences: list[Difference]


def finding(groups: Sequence[Group], axis: Axis = "multiple") -> Finding:
    """What was found, in a sentence for each length, with the numbers that they rest on.

    At the training length groups are shown as trained, and compared with Softmax, if one group is
    Softmax: that is the price of a mechanism. Elsewhere each is shown with its best setting at that
    length, and they are compared with the lowest loss.
    """
    shared = shared_columns(groups, axis)
    if not shared:
        reason = _apart(groups, axis) if groups else "there is no run."
        return Finding(sentence=f"Nothing can be said: {reason}", differences=[])
    if len({group.first.vocabulary for group in groups}) > 1:
        return Finding(
            sentence="Nothing can be said: nats per token of different vocabularies do not compare.", differences=[]
        )
    if tokenizers_may_differ(evaluation for group in groups for evaluation in group.evaluations):
        reason = "the models read different text, and nats per token compare only with the same tokenizer"
        return Finding(sentence=f"Nothing can be said: {reason}.", differences=[])
    first = 1.0 if axis == "multiple" and 1.0 in shared else shared[0]
    sentences = []
    if len({group.first.text_key for group in groups}) > 1:
        sentences.append("The models read different text, so a difference may be that of the texts.")
    differences: list[Difference] = []
    for column in dict.fromkeys((first, shared[-1])):
        at_training_length = column == 1 and axis == "multiple"
        found_cells = (_as_trained(group) if at_training_length else best(group, column, axis) for group in groups)
        cells = [there for there in found_cells if there is not None]
        cells.sort(key=lambda there: there.loss if math.isfinite(there.loss) else math.inf)
        softmax = [there for there in cells if there.group.first.mechanism == "softmax"]
        priced = column == first and len(softmax) == 1 and math.isfinite(softmax[0].loss)
        reference = softmax[0] if priced else cells[0]
        found = [_difference(there, reference, column) for there in cells if there is not reference]
        differences += found
        tokens = tokens_at(groups, column, axis)
        unit = f" ({tokens:,} tokens)" if tokens else " tokens" if axis == "tokens" else ""
        chosen = ", each under its best setting," if len(cells) > 1 and not at_training_length else ""
        where = f"At {column_name(column, axis)}{unit}{chosen}"
        sentences.append(_sentence(where, reference, found, column, price=priced))
    if len(groups) > 1 and axis == "multiple" and first == 1.0 < shared[-1] and (rises := _rises(groups, shared[-1])):
        sentences.append(rises)
    counts = sorted({len(group.evaluations) for group in groups})
    if counts[-1] > 1:
        between = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        sentences.append(f"Losses are means over {between} trainings.")
        if pairings := {one.paired for one in differences if "seed" in one.paired}:
            others = "Other differences" if len(pairings) < len({one.paired for one in differences}) else "Differences"
            sentences.append(f"{others} are paired {' or '.join(sorted(pairings))}.")
    if any(not one.training_noise for one in differences):
        sentences.append("The noise of training is not known: that takes several seeds of each.")
    return Finding(sentence=" ".join(sentences), differences=differences)


def _apart(groups: Sequence[Group], axis: Axis) -> str:
    """Which lengths each group has, where they share none, and how they come to share some."""
    has = [
        (group, [column_name(at, axis) for at in columns([group], axis) if best(group, at, axis)])
        for group in groups[:_RISES]
    ]
    named = [f"{group.label} has {', '.join(found) or 'none that all its runs have'}" for group, found in has]
    named += [f"{len(groups) - _RISES} more are in the report"] if len(groups) > _RISES else []
    unit = "in tokens" if axis == "tokens" else "in multiples of the training length"
    remedy = "" if predicts(groups) else " Evaluate all at the same lengths: `softfocus evaluate RUN --lengths LIST`."
    return f"no length is shared by all runs ({unit}: {'; '.join(named)}).{remedy}"


def _as_trained(group: Group) -> Cell | None:
    """The loss at the training length. Another mechanism or a shorter window would price another
    model.
    """
    return cell(group, 1.0, AS_TRAINED.name()) or best(group, 1.0)


def _difference(one: Cell, reference: Cell, column: float) -> Difference:
    found = one.minus(reference)
    return Difference(
        column=column,
        label=one.group.label,
        setting=one.setting,
        loss=one.loss,
        against=reference.group.label,
        against_setting=reference.setting,
        against_loss=reference.loss,
        difference=found.value,
        standard_error=found.standard_error,
        training_noise=found.training_noise,
        paired=_PAIRINGS[found.by_document, found.by_seed],
        verdict=("higher" if found.value > 0 else "lower") if found.sure else "inconclusive",
    )


def _sentence(where: str, reference: Cell, others: Sequence[Difference], column: float, *, price: bool) -> str:
    """At 16x Softmax with window 1x has the lowest loss, 1.356; LSSAR as trained is 0.165 ± 0.012
    higher.
    """
    if not math.isfinite(reference.loss):
        return f"{where} every loss diverged."
    has = "has a loss of" if price or not others else "has the lowest loss,"
    clauses = [f"{where} {_name(reference.group.label, reference.setting, column)} {has} {reference.loss:.3f}"]
    decided, unsure = [], []
    for one in others[:_NAMED]:
        name = _name(one.label, one.setting, column)
        error = f"{one.standard_error:.3f}" if math.isfinite(one.standard_error) else "unknown"
        apart = [f"paired {one.paired}"] if "seed" not in one.paired else []
        if not math.isfinite(one.loss):
            decided.append(f"{name} diverged")
        elif one.verdict == "inconclusive":
            unsure.append(f"{name} ({', '.join([f'{one.difference:+.3f} ± {error}', *apart])})")
        else:
            decided.append(
                " ".join([f"{name} is {abs(one.difference):.3f} ± {error} {one.verdict}", *map("({})".format, apart)])
            )
    for prefix, texts in (("", decided), ("inconclusive: ", unsure)):
        if texts:
            clauses.append(prefix + listed(texts))
    if len(others) > _NAMED:
        clauses.append(f"{len(others) - _NAMED} more are in the report")
    return "; ".join(clauses) + "."


def _rises(groups: Sequence[Group], column: float) -> str:
    """How far each loss rises as trained: who keeps a flat line."""
    plain, texts = AS_TRAINED.name(), []
    for group in groups:
        start, last = cell(group, 1.0, plain), cell(group, column, plain)
        if start is None or last is None:
            continue
        if math.isfinite(start.loss) and math.isfinite(last.loss):
            rise = last.minus(start)
            texts.append(f"{group.label} {rise.value:+.3f} ± {rise.standard_error:.3f}")
        else:
            texts.append(f"{group.label} diverged")
    if not texts:
        return ""
    more = f"; {len(texts) - _RISES} more are in the report" if len(texts) > _RISES else ""
    return f"From 1x to {column_name(column)} the losses as trained change by: {', '.join(texts[:_RISES])}{more}."


def _name(label: str, setting: str, column: float) -> str:
    if setting != AS_TRAINED.name():
        return f"{label} with {setting}"
    return label if column == 1 else f"{label} {setting}"
