"""What it would save to fold 1/|k_h| into row h of T6's A_K before it is cached, so that LSSAR
needs no lengths of keys.

    OMP_NUM_THREADS=1 python docs/results/t6-fold/measure.py

Writes results.json beside itself. One query meets a cache of L tokens, ranks of 2, heads of 64,
float32, LSSAR. |k_h|^2 is a_h^T (B B^T) a_h / R^2, so it needs no key. ``attention``: the call of
attention alone, on unit keys without their lengths divided out again, as a share of the usual one.
``step``: with the keys and values made from the factors, and with the lengths of the one new token.
Quartiles of 200 pairs of runs, one after the other in changing order. ``error``: the largest
difference from the formula in float64, of the folded and of the usual call.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import torch
from torch import Tensor
from torch.nn.functional import normalize

import softfocus
from softfocus.hf.t6.model import combine

PAIRS, RANK, SIZE = 200, 2, 64
LSSAR = softfocus.named("lssar")
UNIT = LSSAR.replace(similarity="dot")


def fold(a: Tensor, b: Tensor) -> Tensor:
    """A [B, L, R, h] whose keys 1/R A^T B have length 1."""
    squared = ((b @ b.transpose(-1, -2)) @ a * a).sum(-2, keepdim=True) / RANK**2
    return a * squared.rsqrt()


def shares(folded: Callable[[], Tensor], usual: Callable[[], Tensor]) -> list[float]:
    """Quartiles of the time of one call as a share of that of another."""
    found = []
    for number in range(PAIRS):
        took = {}
        for call in (folded, usual) if number % 2 else (usual, folded):
            begin = time.perf_counter()
            call()
            took[call] = time.perf_counter() - begin
        found.append(took[folded] / took[usual])
    return [round(share, 3) for share in quantiles(found, n=4)]


def measure(heads: int, length: int) -> dict[str, object]:
    """One line of the results."""
    torch.manual_seed(0)
    query = torch.randn(1, heads, 1, SIZE)
    unit_query = normalize(query, dim=-1)
    (a, b), (v_a, v_b) = ((torch.randn(1, length, RANK, heads), torch.randn(1, length, RANK, SIZE)) for _ in range(2))
    new_a, new_b = a[:, -1:], b[:, -1:]
    folded_a = fold(a, b)
    key, unit_key, value = combine(a, b), combine(folded_a, b), combine(v_a, v_b)

    def attention(key: Tensor, query: Tensor, value: Tensor, mechanism: softfocus.Mechanism) -> Tensor:
        return softfocus.attention(query, key, value, mechanism=mechanism)

    def usual_step() -> Tensor:
        return attention(combine(a, b), query, combine(v_a, v_b), LSSAR)

    def folded_step() -> Tensor:
        fold(new_a, new_b)
        return attention(combine(folded_a, b), normalize(query, dim=-1), combine(v_a, v_b), UNIT)

    exact = softfocus.attention(
        query.double(), combine(a.double(), b.double()), value.double(), mechanism=LSSAR, backend="reference"
    )
    return {
        "heads": heads,
        "tokens": length,
        "attention": shares(
            lambda: attention(unit_key, unit_query, value, UNIT), lambda: attention(key, query, value, LSSAR)
        ),
        "step": shares(folded_step, usual_step),
        "error": [(call() - exact).abs().max().item() for call in (folded_step, usual_step)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        lines = [measure(heads, length) for heads in (8, 34) for length in (1024, 4096)]
    found = {"torch": torch.__version__, "lines": lines}
    (Path(__file__).parent / "results.json").write_text(json.dumps(found, indent=1) + "\n")
