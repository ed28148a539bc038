"""One sentence of finding, computed from the numbers, whatever they are."""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from softfocus.catalog import named
from softfocus.lab.points import SCALINGS, Growth, growth, labels, loss_text, mechanism_name, shared_columns
from softfocus.lab.results import Evaluation

MULTIPLE = 16.0
LSSAR_AT_MOST = 1.15
SOFTMAX_ABOVE = 1.5
_EXPECTED = (
    f"LSSAR at most {LSSAR_AT_MOST:g}, Softmax above {SOFTMAX_ABOVE:g}, each under the scaling that serves it better"
)

Verdict = Literal["holds", "does not hold", "not judged"]


class Ratio(BaseModel):
    """A loss at a multiple of the training length over the same run's at 1x."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    label: str
    mechanism: str
    seed: int
    ntk: bool
    multiple: float
    first: float
    last: float
    ratio: float
    standard_error: float


class Finding(BaseModel):
    """What the runs show about the expected shape.

    Every run is judged by one rule: under whichever scaling of RoPE serves it better. That is the generous choice for
    Softmax, whose loss is expected to grow, so the claim does not lean on a scaling that happens to hurt the rival.
    With several runs of a mechanism the worst for the claim decides.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    sentence: str
    verdict: Verdict
    ratios: list[Ratio]


def finding(evaluations: Sequence[Evaluation]) -> Finding:
    """What was found, in one sentence, with the numbers that it rests on."""
    lssar, softmax = (_runs_of(evaluations, name) for name in ("lssar", "softmax"))
    subjects = [*lssar, *softmax] if lssar and softmax else list(evaluations)
    shared = [column for column in shared_columns(subjects) if column > 1]
    if not shared:
        reason = "there is no run" if not subjects else "no length beyond 1x is shared by all runs"
        return Finding(
            sentence=f"Nothing can be said about longer contexts: {reason}.", verdict="not judged", ratios=[]
        )
    multiple = MULTIPLE if MULTIPLE in shared else shared[-1]
    tokens = {round(multiple * evaluation.train_length) for evaluation in subjects}
    verdict, why = _judge(lssar, softmax, multiple)
    parts = [
        f"At {multiple:g} times the training length{_tokens(tokens)} {_growth_in_words(subjects, multiple)}",
        *([_price(lssar, softmax)] if lssar and softmax else []),
        f"the expected shape ({_EXPECTED}) {why}",
        _spread(subjects),
    ]
    return Finding(sentence="; ".join(parts) + ".", verdict=verdict, ratios=_ratios(subjects, multiple))


def _runs_of(evaluations: Sequence[Evaluation], name: str) -> list[Evaluation]:
    return [evaluation for evaluation in evaluations if _algebra(evaluation.mechanism) == named(name)]


def _algebra(mechanism: str) -> object:
    try:
        return named(mechanism)
    except ValueError:  # a run of another version, whose catalogue had more
        return None


def _ratios(evaluations: Sequence[Evaluation], multiple: float) -> list[Ratio]:
    return [
        Ratio(
            label=label,
            mechanism=evaluation.mechanism,
            seed=evaluation.seed,
            ntk=ntk,
            multiple=multiple,
            first=found.first,
            last=found.last,
            ratio=found.ratio,
            standard_error=found.standard_error,
        )
        for evaluation, label in zip(evaluations, labels(evaluations), strict=True)
        for ntk, _ in SCALINGS
        if (found := growth(evaluation, multiple, ntk)) is not None
    ]


def _best(evaluation: Evaluation, multiple: float) -> Growth | None:
    """The growth under the scaling that serves the run better; a diverged one only where there is no other."""
    found = [g for ntk, _ in SCALINGS if (g := growth(evaluation, multiple, ntk)) is not None]
    return min(found, key=lambda g: g.ratio if math.isfinite(g.ratio) else math.inf, default=None)


def _judge(lssar: list[Evaluation], softmax: list[Evaluation], multiple: float) -> tuple[Verdict, str]:
    missing = [name for name, runs in (("LSSAR", lssar), ("Softmax", softmax)) if not runs]
    if missing:
        return "not judged", f"cannot be judged without a run of {' and '.join(missing)}"
    if multiple != MULTIPLE:
        return "not judged", f"is stated for {MULTIPLE:g} times and not judged here"
    ours = [_best(evaluation, multiple) for evaluation in lssar]
    theirs = [_best(evaluation, multiple) for evaluation in softmax]
    if None in ours or None in theirs:
        return "not judged", "cannot be judged without the loss at 1x"
    high = max((g for g in ours if g), key=lambda g: g.ratio if math.isfinite(g.ratio) else math.inf)
    low = min((g for g in theirs if g), key=lambda g: g.ratio if math.isfinite(g.ratio) else -math.inf)
    if not math.isfinite(high.ratio):
        return "does not hold", "does not hold, because LSSAR diverged"
    if not math.isfinite(low.ratio):
        return "not judged", "cannot be judged, because Softmax diverged"
    holds = high.ratio <= LSSAR_AT_MOST and low.ratio > SOFTMAX_ABOVE
    close = [
        name
        for name, g, limit in (("LSSAR", high, LSSAR_AT_MOST), ("Softmax", low, SOFTMAX_ABOVE))
        if abs(g.ratio - limit) <= 2 * g.standard_error
    ]
    verdict: Verdict = "holds" if holds else "does not hold"
    # An upper bound: the two losses of a ratio share their documents, and an Evaluation does not hold their covariance
    within = "within two standard errors (cautiously, as of unpaired losses) of the limit"
    caution = f", with {' and '.join(close)} {within}" if close else ""
    return verdict, verdict + caution


def _growth_in_words(evaluations: list[Evaluation], multiple: float) -> str:
    """LSSAR's loss relative to its own at 1x is 1.042 without scaling and 1.122 with dynamic NTK, Softmax's ..."""
    texts = []
    for mechanism in dict.fromkeys(evaluation.mechanism for evaluation in evaluations):
        runs = [evaluation for evaluation in evaluations if evaluation.mechanism == mechanism]
        found = {ntk: [g for run in runs if (g := growth(run, multiple, ntk)) is not None] for ntk, _ in SCALINGS}
        words = {False: "without scaling", True: "with dynamic NTK"}
        stated = [f"{_range(found[ntk])} {words[ntk]}" for ntk in words if found[ntk]]
        name = mechanism_name(mechanism)
        if not stated:
            texts.append(f"{name}'s is unknown, its loss at 1x being missing")
        elif texts:
            texts.append(f"{name}'s {' and '.join(stated)}")
        else:
            texts.append(f"{name}'s loss relative to its own at 1x is {' and '.join(stated)}")
    return ", ".join(texts)


def _range(found: list[Growth]) -> str:
    ratios = [g.ratio for g in found]
    if not all(map(math.isfinite, ratios)):
        return "not finite"
    low, high = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
    return low if low == high else f"{low} to {high}"


def _price(lssar: list[Evaluation], softmax: list[Evaluation]) -> str:
    """What each mechanism's loss is at 1x: a ratio to one's own 1x says nothing about who is better there."""

    def mean(runs: list[Evaluation]) -> str:
        firsts = [g.first for run in runs if (g := growth(run, 1.0, False)) is not None]
        return loss_text(sum(firsts) / len(firsts)) if firsts else "unknown"

    return f"at 1x LSSAR has {mean(lssar)} and Softmax {mean(softmax)} nats per token"


def _tokens(tokens: set[int]) -> str:
    return f" ({tokens.pop():,} tokens)" if len(tokens) == 1 else ""


def _spread(evaluations: list[Evaluation]) -> str:
    seeds = sorted({evaluation.seed for evaluation in evaluations})
    if len(seeds) == 1:
        return f"one seed ({seeds[0]}), so the spread over seeds is unknown"
    return f"{len(seeds)} seeds ({', '.join(map(str, seeds))})"
