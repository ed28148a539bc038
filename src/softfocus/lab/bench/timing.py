"""Times: interleaved calls, a clock for each kind of device, medians and quartiles."""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

import torch

from softfocus.lab.bench.results import Spread

Call = Callable[[], object]
Clock = Callable[[Call], float]
"""Runs a call and says how many seconds it took."""

ROUNDS, ROUNDS_OF_SLOW, SLOW = 5, 3, 5.0
"""At least so many rounds; fewer where a call takes longer than SLOW seconds."""
MOST = 1000
"""Rounds that are enough for any quartile."""


def wall(call: Call) -> float:
    """Seconds on the wall: for a CPU, where a call returns when it is done."""
    start = time.perf_counter()
    kept = call()
    elapsed = time.perf_counter() - start
    del kept  # freeing the result belongs to no subject
    return elapsed


HEAD_START = 6_000_000
"""Cycles for which a GPU sleeps before it is timed, some three milliseconds: the host has put
everything in its queue by then, and what Python takes, which is not the kernels' time, lies before
the first event.
"""


def cuda(call: Call) -> float:
    """Seconds between two events on the device, where a call returns before its work is done."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    start.record()
    kept = call()
    stop.record()
    stop.synchronize()
    del kept
    return start.elapsed_time(stop) / 1000.0


def clock_of(device: str) -> Clock:
    """The clock for a device."""
    return cuda if device == "cuda" else wall


def interleave(calls: Mapping[str, Call], clock: Clock, seconds: float, seed: int) -> dict[str, list[float]]:
    """Time calls in turn: every round runs each of them once, in an order of its own.

    A machine that grows slower or faster for a while does so to all of them alike, and a ratio
    within a round hardly sees it.

    Args:
        calls: by name, warmed up.
        clock: runs and times one.
        seconds: the budget: as many rounds as fit, but never fewer than ROUNDS, or ROUNDS_OF_SLOW.
        seed: of the orders.

    Returns:
        For each name its times, a round each.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    orders, spent, rounds, slowest = random.Random(seed), 0.0, 0, 0.0
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection in the middle of a call would be that call's bad luck
    try:
        while rounds < (ROUNDS_OF_SLOW if slowest > SLOW else ROUNDS) or spent + spent / rounds <= seconds:
            if rounds == MOST or not calls:
                break
            names = list(calls)
            orders.shuffle(names)
            for name in names:
                times[name].append(clock(calls[name]))
            last = [taken[-1] for taken in times.values()]
            spent, slowest, rounds = spent + sum(last), max(slowest, *last), rounds + 1
    finally:
        if collects:
            gc.enable()
    return times


def spread(numbers: Sequence[float]) -> Spread:
    """Median, quartiles and minimum of at least one number."""
    low, _, high = quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else [numbers[0]] * 3
    return Spread(
        median=median(numbers), lower_quartile=low, upper_quartile=high, minimum=min(numbers), rounds=len(numbers)
    )


def ratios(times: Sequence[float], yardstick: Sequence[float]) -> Spread:
    """The spread of time over the yardstick's time in the same round."""
    return spread([mine / its for mine, its in zip(times, yardstick, strict=True)])
