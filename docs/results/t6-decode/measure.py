"""How long a T6 decodes a token from its factors, as a share of the time with keys and values.

    OMP_NUM_THREADS=1 PYTHONPATH=src python docs/results/t6-decode/measure.py

Writes results.json beside itself. A model of two layers, with the sizes of the paper's small model
but for its number of layers, or with 8 heads in place of 34, decodes one token after a prompt:
float32, ranks of 2. ``model``: the call of the model, its embedding and head of 256 tokens
included. ``attention``: the attention of one layer alone, from cached factors to its output. Both
are the quartiles of 60 pairs of runs, one after the other in changing order, in each of three
processes. ``error``: the largest difference of that attention's output from the formula in float64,
from the factors and usually. ``chosen``: whether the library decodes from the factors there.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import softfocus
from softfocus.hf.t6 import T6Config, T6ForCausalLM, factored
from softfocus.hf.t6.factored import Factored, combine
from softfocus.lab.run_folder.provenance import commit, machine

PROCESSES, PAIRS, RANK, SIZE = 3, 60, 2, 64


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
        max_position_embeddings=16384,
        bos_token_id=0,
        eos_token_id=0,
    )
    t6 = softfocus.hf.use(T6ForCausalLM(config), name).eval()
    cache = DynamicCache(config=config)
    ids = torch.randint(256, (1, length))
    for part in ids.split(512, dim=1):
        t6(part, past_key_values=cache)

    def step(least: int) -> None:
        factored.MIN_NUMBERS = least
        t6(ids[:, :1], past_key_values=cache)
        cache.crop(-1)

    return shares(lambda: step(1), lambda: step(1 << 60))


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


def worker(name: str, heads: int, length: int) -> dict[str, Any]:
    """One process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = heads * length * SIZE >= factored.MIN_NUMBERS
    with torch.inference_mode():
        return {"chosen": chosen, "model": of_model(name, heads, length), **of_attention(name, heads, length)}


def main() -> None:
    """Measure all lines, each in new processes, and write them."""
    lines = []
    for name in ("lssar", "softmax"):
        for heads, length in ((8, 1024), (8, 4096), (8, 8192), (34, 1024), (34, 2048), (34, 4096)):
            command = [sys.executable, "-W", "ignore", __file__, name, str(heads), str(length)]
            made = [
                subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(PROCESSES)
            ]
            found = [json.loads(line) for line in made]
            line = {key: [one[key] for one in found] for key in ("model", "attention", "error")}
            lines.append({"mechanism": name, "heads": heads, "tokens": length, "chosen": found[0]["chosen"], **line})
            print(lines[-1], flush=True)
    about = {"commit": commit(), "torch": torch.__version__, "cpu": machine("cpu").cpu, "lines": lines}
    (Path(__file__).parent / "results.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
