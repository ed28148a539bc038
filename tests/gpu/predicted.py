"""What docs/performance-gpu.md predicts for the goals' cells, from counted instructions: its table, as text.

    python tests/gpu/predicted.py

A multiprocessor of an H200 issues 128 instructions of threads a clock, and does 4,096 operations of products in bfloat16. A
kernel takes at least the larger of the two times, where they overlap whole, and about their sum where they take turns. Between
the two lies the prediction. SDPA's times are those of published rates of its fastest kernels on a Hopper GPU.
"""

from typing import NamedTuple

INSTRUCTIONS, OPERATIONS = 128, 4096
PEAK = 949.0
"""TFLOP/s of 132 multiprocessors at 1.755 GHz."""
RATES = {64: (430.0, 380.0), 128: (600.0, 500.0)}
"""TFLOP/s of causal attention in bfloat16 at 16K, forward and backward, by dimensions of a head."""


class Counted(NamedTuple):
    """Instructions a score of the forward and of the backward, and products of the forward."""

    forward: float
    backward: float
    products: int = 2


COUNTED = {
    64: {
        "lssa": Counted(16.0, 19.5 + 28.2),
        "lssar": Counted(14.8 + 21.8, 34.3 + 40.9, products=3),
        "laser": Counted(12.2, 8.5 + 25.8),
        "softmax": Counted(11.8, 8.6 + 19.2),
    },
    128: {
        "lssa": Counted(21.1, 26.1 + 93.2),
        "lssar": Counted(18.5 + 26.7, 78.4 + 120.0, products=3),
        "laser": Counted(21.2, 14.4 + 45.2),
        "softmax": Counted(13.9, 15.0 + 34.9),
    },
}
BACKWARD_PRODUCTS, SDPA_PRODUCTS = 7, (2, 5)


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


def table() -> str:
    """In Markdown."""
    lines = ["| of SDPA's time | d = 64 | d = 128 |", "|---|---|---|"]
    for mechanism in ("lssa", "lssar", "laser", "softmax"):
        for what, said in (("forward", "forward"), ("backward", "forward and backward")):
            spans = ("{:.1f} to {:.1f}".format(*ratio(d, mechanism, what)) for d in (64, 128))
            lines.append(f"| {mechanism}, {said} | {' | '.join(spans)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
