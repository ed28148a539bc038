"""How soon one training has the best loss of another."""

import math
from collections.abc import Sequence

from softfocus.lab.run_folder.results import RunInfo


def reached(curve: Sequence[tuple[int, float]], loss: float) -> float:
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


def share(ours: RunInfo, other: RunInfo, *, of_time: bool) -> float:
    """Our steps, or seconds, to the other's best validation loss, as a share of those that the
    other took to it.

    Seconds come from tokens per second, which leave validations out.
    """
    step, best = min(other.validation_loss, key=lambda point: point[1])
    steps = reached(ours.validation_loss, best) / step
    if not of_time:
        return steps
    return steps * (_seconds_a_step(ours) / _seconds_a_step(other))


def _seconds_a_step(info: RunInfo) -> float:
    return info.tokens_per_step / (info.tokens_per_second or math.nan)
