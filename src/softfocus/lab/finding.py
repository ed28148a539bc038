"""One sentence of finding, computed from the numbers, whatever they are."""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from softfocus.catalog import named
from softfocus.lab.points import SCALINGS, growth, labels, loss_text, mechanism_name, shared_columns
from softfocus.lab.results import Evaluation

MULTIPLE = 16.0
LSSAR_AT_MOST = 1.15
SOFTMAX_ABOVE = 1.5
_NAMED = 4  # mechanisms that a sentence still can name

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
    So a run that was measured under one of them only is not judged. With several runs of a mechanism the worst for the
    claim decides.
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
    ratios = _ratios(evaluations, multiple)
    verdict, why = _judge(lssar, softmax, multiple)
    tokens = {round(multiple * evaluation.train_length) for evaluation in subjects}
    sentence = (
        f"At {multiple:g} times the training length{_tokens(tokens)} {_growths(subjects, multiple)}, "
        f"{_choice(subjects, multiple)} ({_seeds(subjects)}), {why}."
    )
    return Finding(sentence=sentence, verdict=verdict, ratios=ratios)


def details(evaluations: Sequence[Evaluation], found: Finding) -> list[str]:
    """The numbers that a sentence has no room for: every run's under both scalings, its loss at 1x, and doubts."""
    if not found.ratios:
        return []
    by_run: dict[str, list[Ratio]] = {}
    for ratio in found.ratios:
        by_run.setdefault(ratio.label, []).append(ratio)
    both = [
        f"{label} {' / '.join(_either([r.ratio for r in ratios if r.ntk == ntk]) for ntk, _ in SCALINGS)}"
        for label, ratios in by_run.items()
    ]
    firsts = [f"{label} {loss_text(ratios[0].first)}" for label, ratios in by_run.items()]
    said = [
        f"Loss at {found.ratios[0].multiple:g}x over the run's own at 1x, without RoPE scaling / with dynamic NTK: "
        f"{', '.join(both)}.",
        f"Loss at 1x, nats per token: {', '.join(firsts)}; a ratio to one's own 1x says nothing about who is better there.",
    ]
    close = [
        f"{ratio.label} ({ratio.ratio:.3f} ± {ratio.standard_error:.3f}, {name})"
        for ratio in found.ratios
        for ntk, name in SCALINGS
        if ratio.ntk == ntk
        and (limit := _limit(ratio.mechanism))
        and abs(ratio.ratio - limit) <= 2 * ratio.standard_error
    ]
    if close and found.verdict != "not judged":
        # An upper bound: the two losses of a ratio share their documents, and an Evaluation does not hold their covariance
        said.append(
            f"Within two standard errors (cautiously, as of unpaired losses) of the expected limit: {', '.join(close)}."
        )
    if len({evaluation.seed for evaluation in evaluations}) == 1:
        said.append(f"One training seed ({evaluations[0].seed}): the spread over seeds is unknown.")
    return said


def _either(found: list[float]) -> str:
    return loss_text(found[0]) if found else "not measured"


def _limit(mechanism: str) -> float | None:
    limits = {"lssar": LSSAR_AT_MOST, "softmax": SOFTMAX_ABOVE}
    return next((limit for name, limit in limits.items() if _algebra(mechanism) == named(name)), None)


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


def _measured(evaluation: Evaluation, multiple: float) -> list[float]:
    """The ratios to 1x under the scalings that the run was measured with."""
    return [g.ratio for ntk, _ in SCALINGS if (g := growth(evaluation, multiple, ntk)) is not None]


def _best(evaluation: Evaluation, multiple: float) -> float | None:
    """The ratio under the scaling that serves the run better; a diverged one only where there is no other."""
    found = _measured(evaluation, multiple)
    return min(found, key=lambda ratio: ratio if math.isfinite(ratio) else math.inf, default=None)


def _judge(lssar: list[Evaluation], softmax: list[Evaluation], multiple: float) -> tuple[Verdict, str]:
    """The verdict, and how the sentence ends."""
    missing = [name for name, runs in (("LSSAR", lssar), ("Softmax", softmax)) if not runs]
    refused = "and the expected shape is not judged, because "
    if missing:
        return "not judged", f"{refused}that takes a run of {' and one of '.join(missing)}"
    if multiple != MULTIPLE:
        return "not judged", f"{refused}it is stated for {MULTIPLE:g} times"
    judged = [*lssar, *softmax]
    if any(growth(evaluation, multiple, ntk) is None for evaluation in judged for ntk, _ in SCALINGS):
        return "not judged", f"{refused}that takes both scalings of every run, there and at 1x"
    high = max((_best(run, multiple) or 0.0 for run in lssar), key=lambda r: r if math.isfinite(r) else math.inf)
    low = min((_best(run, multiple) or 0.0 for run in softmax), key=lambda r: r if math.isfinite(r) else -math.inf)
    if math.isfinite(high) and not math.isfinite(low):
        return "not judged", f"{refused}a loss that diverged proves nothing"
    holds = high <= LSSAR_AT_MOST and low > SOFTMAX_ABOVE  # a diverged LSSAR is NaN or infinite, so it does not
    verdict: Verdict = "holds" if holds else "does not hold"
    return verdict, f"so the expected shape (at most {LSSAR_AT_MOST:g}, above {SOFTMAX_ABOVE:g}) {verdict}"


def _growths(evaluations: list[Evaluation], multiple: float) -> str:
    """LSSAR's loss is 1.04 times its own at 1x and Softmax's 1.70 times"""
    texts: list[str] = []
    whole = "loss is {} times its own at 1x"
    mechanisms = list(dict.fromkeys(evaluation.mechanism for evaluation in evaluations))
    for mechanism in mechanisms[:_NAMED]:
        found = [_best(run, multiple) for run in evaluations if run.mechanism == mechanism]
        known = [ratio for ratio in found if ratio is not None]
        if not known:
            said = "is unknown" if texts else "loss is unknown"
        elif not all(map(math.isfinite, known)):
            said = "diverged" if texts else "loss diverged"
        else:
            said = whole.format(_range(known, _limit(mechanism)))
            whole = "{} times"
        texts.append(f"{mechanism_name(mechanism)}'s {said.removeprefix('loss ') if texts else said}")
    if len(mechanisms) > _NAMED:
        texts.append(f"{len(mechanisms) - _NAMED} more in the notes")
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]


def _range(ratios: list[float], limit: float | None) -> str:
    low, high = _ratio(min(ratios), limit), _ratio(max(ratios), limit)
    return low if low == high else f"{low} to {high}"


def _ratio(ratio: float, limit: float | None) -> str:
    """Two decimals, or as many more as it takes to show on which side of its limit a ratio lies."""
    digits = 2
    while limit is not None and (float(f"{ratio:.{digits}f}") > limit) != (ratio > limit):
        digits += 1
    return f"{ratio:.{digits}f}"


def _choice(evaluations: list[Evaluation], multiple: float) -> str:
    both = all(len(_measured(evaluation, multiple)) == len(SCALINGS) for evaluation in evaluations)
    each = "each under" if len(evaluations) > 1 else "under"
    return f"{each} the RoPE scaling that serves it better" if both else f"{each} the better measured scaling of RoPE"


def _tokens(tokens: set[int]) -> str:
    return f" ({tokens.pop():,} tokens)" if len(tokens) == 1 else ""


def _seeds(evaluations: list[Evaluation]) -> str:
    """How many seeds each mechanism was trained with."""
    seeds: dict[str, set[int]] = {}
    for evaluation in evaluations:
        seeds.setdefault(evaluation.mechanism, set()).add(evaluation.seed)
    counts = sorted({len(found) for found in seeds.values()})
    if counts == [1]:
        return "one seed each" if len(seeds) > 1 else "one seed"
    return f"{' to '.join(map(str, (counts[0], counts[-1])[: len(counts)]))} seeds" + (
        " each" if len(seeds) > 1 else ""
    )
