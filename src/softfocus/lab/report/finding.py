"""What was found: who is better where, by how much, and whether that is more than noise."""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from softfocus.lab.report.points import Axis, Cell, Group, best, column_name, shared_columns, tokens_at
from softfocus.lab.run_folder.results import AS_TRAINED

_NAMED = 4  # groups that a sentence still can name

Verdict = Literal["higher", "lower", "inconclusive"]


class Difference(BaseModel):
    """A group's loss at one length less another's, each with its best setting there."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

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
    verdict: Verdict
    """"inconclusive" where noise alone may have made the difference (`Estimate.sure`), or where it is not a number."""


class Finding(BaseModel):
    """What the runs show at the training length and at the longest length that all of them share."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    sentence: str
    differences: list[Difference]


def finding(groups: Sequence[Group], axis: Axis = "multiple") -> Finding:
    """What was found, in a sentence for each length, with the numbers that they rest on.

    Each group is shown with its best setting at that length. At the training length all are held against
    Softmax, if one group is Softmax: that is the price of a mechanism. Elsewhere they are held against the lowest loss.
    """
    shared = shared_columns(groups, axis)
    if not shared:
        reason = "there is no run" if not groups else "no length is shared by all runs"
        return Finding(sentence=f"Nothing can be said: {reason}.", differences=[])
    if len({group.first.vocabulary for group in groups}) > 1:
        return Finding(
            sentence="Nothing can be said: nats per token of different vocabularies do not compare.", differences=[]
        )
    first = 1.0 if axis == "multiple" and 1.0 in shared else shared[0]
    sentences, differences = [], []
    for column in dict.fromkeys((first, shared[-1])):
        cells = sorted((_best(group, column, axis) for group in groups), key=_height)
        softmax = [one for one in cells if one.group.first.mechanism == "softmax"]
        priced = column == first and len(softmax) == 1 and math.isfinite(softmax[0].loss)
        reference = softmax[0] if priced else cells[0]
        others = [one for one in cells if one is not reference]
        found = [_difference(one, reference, column) for one in others]
        chosen = len(cells) > 1 and (column != 1 or axis == "tokens")
        where = f"At {_place(groups, column, axis)}" + (", each under its best setting," if chosen else "")
        sentences.append(_sentence(where, reference, found, column, price=priced))
        differences += found
    counts = sorted({len(group.evaluations) for group in groups})
    if counts[-1] > 1:
        sentences.append(
            f"Losses are means over {' to '.join(map(str, counts[:: max(1, len(counts) - 1)]))} trainings."
        )
    if any(not one.training_noise for one in differences):
        sentences.append("The noise of training is not known: that takes several seeds of each.")
    return Finding(sentence=" ".join(sentences), differences=differences)


def _best(group: Group, column: float, axis: Axis) -> Cell:
    found = best(group, column, axis)
    assert found is not None, "the column is shared"
    return found


def _height(one: Cell) -> float:
    return one.loss if math.isfinite(one.loss) else math.inf


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
        verdict=("higher" if found.value > 0 else "lower") if found.sure else "inconclusive",
    )


def _sentence(where: str, reference: Cell, others: Sequence[Difference], column: float, *, price: bool) -> str:
    """At 16x Softmax with window 1x has the lowest loss, 1.356; LSSAR as trained is 0.165 ± 0.012 higher."""
    if not math.isfinite(reference.loss):
        return f"{where} every loss diverged."
    known = price or not others
    name = _name(reference.group.label, reference.setting, column)
    clauses = [f"{where} {name} has {'a loss of' if known else 'the lowest loss,'} {reference.loss:.3f}"]
    named = others[:_NAMED]
    if decided := [_text(one, column) for one in named if one.verdict != "inconclusive" or not math.isfinite(one.loss)]:
        clauses.append(_listed(decided))
    if unsure := [_text(one, column) for one in named if one.verdict == "inconclusive" and math.isfinite(one.loss)]:
        clauses.append(f"inconclusive: {_listed(unsure)}")
    if len(others) > _NAMED:
        clauses.append(f"{len(others) - _NAMED} more are in the report")
    return "; ".join(clauses) + "."


def _listed(texts: Sequence[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]


def _name(label: str, setting: str, column: float) -> str:
    plain = AS_TRAINED.name()
    if setting == plain:
        return label if column == 1 else f"{label} {plain}"
    return f"{label} with {setting}"


def _place(groups: Sequence[Group], column: float, axis: Axis) -> str:
    tokens = tokens_at(groups, column, axis)
    return column_name(column, axis) + (f" ({tokens:,} tokens)" if tokens else " tokens" if axis == "tokens" else "")


def _text(one: Difference, column: float) -> str:
    name = _name(one.label, one.setting, column)
    if not math.isfinite(one.loss):
        return f"{name} diverged"
    error = f"{one.standard_error:.3f}" if math.isfinite(one.standard_error) else "unknown"
    if one.verdict == "inconclusive":
        return f"{name} ({one.difference:+.3f} ± {error})"
    return f"{name} is {abs(one.difference):.3f} ± {error} {one.verdict}"
