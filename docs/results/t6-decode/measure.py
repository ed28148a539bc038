"""How long a T6 decodes a token from its factors, as a share of the time with keys and values.

    OMP_NUM_THREADS=1 PYTHONPATH=src python docs/results/t6-decode/measure.py

Writes results.json beside itself. A model of two layers, with the sizes of the paper's small model
but for its number of layers, or with 8 heads in place of 34, decodes one token after a prompt:
float32, heads of 64, ranks of 2 or 4, one thread. ``shares``: the median time of a step of 60 from
the factors, as a share of that with keys and values. Each is of two new processes, one for each
way, because what a process freed before decides how long an allocation takes. ``chosen``: whether
the library decodes from the factors there.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache

import softfocus
from softfocus.hf.t6 import T6Config, T6ForCausalLM, factored
from softfocus.lab.run_folder.provenance import commit, machine

PAIRS, STEPS, SIZE = 3, 60, 64
CELLS = ((8, 1024, 2), (8, 8192, 2), (34, 1024, 2), (34, 2048, 2), (34, 2048, 4), (34, 4096, 2))


def step_time(name: str, heads: int, length: int, rank: int, least: int) -> float:
    """The median time of a step, in seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    factored.MIN_NUMBERS, factored.MAX_RANK = least, 4
    config = T6Config(
        vocab_size=256,
        num_attention_heads=heads,
        num_hidden_layers=2,
        k_rank=rank,
        v_rank=rank,
        max_position_embeddings=16384,
        bos_token_id=0,
        eos_token_id=0,
    )
    t6 = softfocus.hf.use(T6ForCausalLM(config), name).eval()
    cache = DynamicCache(config=config)
    ids = torch.randint(256, (1, length))
    took = []
    with torch.inference_mode():
        for part in ids.split(512, dim=1):
            t6(part, past_key_values=cache)
        for _ in range(STEPS):
            begin = time.perf_counter()
            t6(ids[:, :1], past_key_values=cache)
            took.append(time.perf_counter() - begin)
            cache.crop(-1)
    return median(took)


def main() -> None:
    """Measure all cells, and write them."""
    lines = []
    for name in ("lssar", "softmax"):
        for heads, length, rank in CELLS:
            shares = []
            for number in range(PAIRS):
                took = {}
                for least in (1, 1 << 60) if number % 2 else (1 << 60, 1):
                    arguments = (name, heads, length, rank, least)
                    command = [sys.executable, "-W", "ignore", __file__, *map(str, arguments)]
                    took[least] = float(subprocess.run(command, capture_output=True, check=True).stdout)
                shares.append(round(took[1] / took[1 << 60], 3))
            chosen = heads * length * SIZE >= factored.MIN_NUMBERS and rank <= factored.MAX_RANK
            lines.append(
                {"mechanism": name, "heads": heads, "tokens": length, "rank": rank, "chosen": chosen, "shares": shares}
            )
            print(lines[-1], flush=True)
    about = {"commit": commit(), "torch": torch.__version__, "cpu": machine("cpu").cpu, "lines": lines}
    (Path(__file__).parent / "results.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(step_time(sys.argv[1], *map(int, sys.argv[2:])))
    else:
        main()
