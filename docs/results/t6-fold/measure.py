"""How long a T6 decodes a token from its factors (factored.py), which for LSSAR needs 1/|k_h| in
row h of A_K, as a share of the time with keys and values.

    OMP_NUM_THREADS=1 PYTHONPATH=src python docs/results/t6-fold/measure.py [NAME]

Writes NAME (results.json) beside itself: again.json is a second process. A model of two layers,
with the sizes of the paper's small model but for its number of layers, or with 8 heads in place of
34, decodes one token after a prompt: float32, ranks of 2. ``model``: the call of the model, its
embedding and head of 256 tokens included. ``attention``: the attention of one layer alone, from
cached factors to its output. Both are quartiles of 60 pairs of runs, one after the other in
changing order. ``error``: the largest difference of that attention's output from the formula in
float64, from the factors and usually.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from factored import Factored
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import softfocus
from softfocus.hf import adapter
from softfocus.hf.t6 import T6Config, T6ForCausalLM, model
from softfocus.hf.t6.model import combine
from softfocus.lab.run_folder.provenance import commit, machine

PAIRS, RANK, SIZE = 60, 2, 64


def shares(ours: Callable[[], object], usual: Callable[[], object]) -> list[float]:
    """Quartiles of the time of one call as a share of that of another."""
    found = []
    for number in range(PAIRS):
        took = {}
        for call in (ours, usual) if number % 2 else (usual, ours):
            begin = time.perf_counter()
            call()
            took[call] = time.perf_counter() - begin
        found.append(took[ours] / took[usual])
    return [round(share, 3) for share in quantiles(found, n=4)]


def of_model(name: str, heads: int, length: int) -> list[float]:
    """Shares of the time of a model's step."""
    config = T6Config(
        vocab_size=256,
        num_attention_heads=heads,
        num_hidden_layers=2,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=0,
    )
    t6 = softfocus.hf.use(T6ForCausalLM(config), name).eval()
    cache = DynamicCache(config=config)
    ids = torch.randint(256, (1, length))
    for part in ids.split(512, dim=1):
        t6(part, past_key_values=cache)

    def step() -> None:
        t6(ids[:, :1], past_key_values=cache)
        cache.crop(-1)

    def from_factors() -> None:
        model.combine = pair_or_combine
        step()
        model.combine = combine

    return shares(from_factors, step)


def pair_or_combine(a: Tensor, b: Tensor) -> Any:
    """The query of one token; the factors of the keys or values of several."""
    return combine(a, b) if a.shape[1] == 1 else (a, b)


def forward(module: Any, query: Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """The adapter's function, which attends to factors where it gets them."""
    if isinstance(key, Tensor):
        return adapter.attention_forward(module, query, key, value, *args, **kwargs)
    (k_a, k_b), (v_a, v_b) = key, value
    rows = (x.permute(0, 3, 1, 2) for x in (k_a, v_a))
    adapter.attention, kept = Factored(k_b, v_b), adapter.attention
    found = adapter.attention_forward(module, query, *rows, *args, **kwargs)
    adapter.attention = kept
    return found


def of_attention(name: str, heads: int, length: int) -> dict[str, list[float]]:
    """Shares of the time of one call of attention, and errors."""
    mechanism = softfocus.named(name)
    query = torch.randn(1, heads, 1, SIZE)
    (a, b), (v_a, v_b) = ((torch.randn(1, length, RANK, heads), torch.randn(1, length, RANK, SIZE)) for _ in range(2))

    def from_factors() -> Tensor:
        rows = (x.permute(0, 3, 1, 2) for x in (a, v_a))
        return Factored(b, v_b)(query, *rows, mechanism=mechanism, scale=None, dropout_p=0.0)

    def usual() -> Tensor:
        key, value = combine(a, b), combine(v_a, v_b)
        return softfocus.attention(query, key, value, mechanism=mechanism)

    key, value = (combine(*(x.double() for x in pair)) for pair in ((a, b), (v_a, v_b)))
    exact = softfocus.attention(query.double(), key, value, mechanism=mechanism, backend="reference")
    return {
        "attention": shares(from_factors, usual),
        "error": [(call() - exact).abs().max().item() for call in (from_factors, usual)],
    }


def main() -> None:
    """Measure all lines, and write them."""
    torch.set_num_threads(1)
    ALL_ATTENTION_FUNCTIONS["softfocus"] = forward
    lines = []
    for name in ("lssar", "softmax"):
        for heads, length in ((8, 1024), (8, 4096), (34, 1024), (34, 2048), (34, 4096)):
            torch.manual_seed(0)
            with torch.inference_mode():
                line = {"model": of_model(name, heads, length), **of_attention(name, heads, length)}
            lines.append({"mechanism": name, "heads": heads, "tokens": length, **line})
            print(lines[-1], flush=True)
    found = {"commit": commit(), "torch": torch.__version__, "cpu": machine("cpu").cpu, "lines": lines}
    (Path(__file__).parent / "".join(sys.argv[1:2] or ["results.json"])).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
