"""What docs/performance-gpu.md predicted for the goals' cells, from counted instructions.

A multiprocessor of an H200 issues 128 instructions of threads a clock, and does 4,096 operations of
products in bfloat16. A kernel takes at least the larger of the two times, where they overlap
completely, and about their sum where they take turns. The prediction lies between the two. Its
ratios do not depend on the length: launches and partial tiles, which weigh more in short calls, are
left out. SDPA's times are those of published rates of its fastest kernels on a Hopper GPU.
"""

from typing import NamedTuple

from stages import GOALS

INSTRUCTIONS, OPERATIONS = 128, 4096
PEAK = 949.0
"""TFLOP/s of 132 multiprocessors at 1.755 GHz."""
CLOCKS = 132 * 1.755e9
"""A second, of all of them together."""
TOKENS, HEADS = 32768, 16
"""Of every cell of `softfocus bench` on a GPU but those of decoding."""
RATES = {64: (430.0, 380.0), 128: (600.0, 500.0)}
"""TFLOP/s of causal attention in bfloat16 at 16K, forward and backward, by dimensions of a head."""


class Counted(NamedTuple):
    """Instructions a score of the forward and of the backward, and products of the forward."""

    forward: float
    backward: float
    products: int = 2


COUNTED = {
    64: {
        "lssa": Counted(12.1, 15.1 + 24.7),
        "lssar": Counted(13.6 + 19.8, 32.4 + 38.9, products=3),
        "laser": Counted(12.2, 8.5 + 21.5),
        "softmax": Counted(11.8, 8.6 + 19.2),
    },
    128: {
        "lssa": Counted(16.4, 21.6 + 103.0),
        "lssar": Counted(17.4 + 24.7, 74.2 + 116.0, products=3),
        "laser": Counted(21.1, 14.4 + 36.5),
        "softmax": Counted(13.9, 15.0 + 34.9),
    },
}
BACKWARD_PRODUCTS, SDPA_PRODUCTS = 7, (2, 5)
READ = 0.13
"""Of the values, in decoding: those that weigh more than rounding, of random keys."""
FLEX_MORE = 25
"""Instructions of its logarithm and its exponential of a score, at the least: 20 and 5, as counted
in our kernels once.
"""


def clocks(head_dim: int, instructions: float, products: int) -> tuple[float, float]:
    """Of a multiprocessor, a score: where everything overlaps, and where nothing does."""
    issue, multiply = instructions / INSTRUCTIONS, 2 * head_dim * products / OPERATIONS
    return max(issue, multiply), issue + multiply


def sdpa(head_dim: int) -> tuple[float, float]:
    """Clocks a score of SDPA, forward and backward."""
    forward, backward = (
        2 * head_dim * products / OPERATIONS * PEAK / rate
        for products, rate in zip(SDPA_PRODUCTS, RATES[head_dim], strict=True)
    )
    return forward, backward


def ratio(head_dim: int, mechanism: str, what: str) -> tuple[float, float]:
    """Of SDPA's time: at best and at worst."""
    counted = COUNTED[head_dim][mechanism]
    low, high = clocks(head_dim, counted.forward, counted.products)
    its, backward = sdpa(head_dim)
    if what == "backward":
        more = clocks(head_dim, counted.backward, BACKWARD_PRODUCTS)
        low, high, its = low + more[0], high + more[1], its + backward
    return low / its, high / its


def decoding(head_dim: int) -> tuple[float, float]:
    """Of softmax's time, where bytes decide: LSSAR reads all keys and an eighth of the values. At
    worst it also moves a score of each key through memory, once there and twice back.
    """
    key, value, score = 2 * head_dim, 2 * head_dim, 4
    low = key + READ * value
    return low / (key + value), (low + 3 * score) / (key + value)


def of_flex(head_dim: int, what: str) -> tuple[float, float]:
    """Of the time of FlexAttention's two calls, if each takes our softmax's instructions and
    FLEX_MORE a score: the least that can be assumed, so that the share is more likely below this
    than above.
    """
    forward, backward = COUNTED[head_dim]["softmax"][:2]
    theirs = clocks(head_dim, 2 * (forward + FLEX_MORE), 4)
    ours = clocks(head_dim, *COUNTED[head_dim]["lssar"][::2])
    if what == "backward":
        their_more = clocks(head_dim, 2 * (backward + FLEX_MORE), 2 * BACKWARD_PRODUCTS)
        our_more = clocks(head_dim, COUNTED[head_dim]["lssar"].backward, BACKWARD_PRODUCTS)
        theirs = theirs[0] + their_more[0], theirs[1] + their_more[1]
        ours = ours[0] + our_more[0], ours[1] + our_more[1]
    low, high = sorted(mine / its for mine, its in zip(ours, theirs, strict=True))
    return low, high


ROWS = (
    *(
        (mechanism, what, "sdpa")
        for mechanism in ("lssa", "lssar", "laser", "softmax")
        for what in ("forward", "backward")
    ),
    ("lssar", "decode", "sdpa"),
    ("lssar", "forward", "flex"),
    ("lssar", "backward", "flex"),
)
"""mechanism, what, beside whose time: in the order of the table."""
MOST = {(goal.mechanism, goal.what, goal.to): goal.most for goal in GOALS}


def predicted(head_dim: int, mechanism: str, what: str, to: str) -> tuple[float, float]:
    """Of the time of SDPA or of FlexAttention: at best and at worst."""
    if what == "decode":
        return decoding(head_dim)
    return of_flex(head_dim, what) if to == "flex" else ratio(head_dim, mechanism, what)
