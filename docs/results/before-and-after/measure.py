"""The CPU kernels of two commits, timed in turn: a process for each, one call each a round.

    python docs/results/before-and-after/measure.py OLD/src NEW/src RESULT.json [CELL ...]

A cell is written like forward:4096:lssar:float32; without any, all are timed.
Goes on where RESULT.json ends. Writes for every cell the median and quartiles, over rounds, of the
new time as a share of the old one; then the same with NEW on both sides, which shows the noise. One
thread each: idle threads of one process would slow the other. Nothing else should run.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HEADS, DIM = 4, 64  # as `softfocus bench`
MECHANISMS = ("lssar", "lssa", "softmax", "laser")
LENGTHS = {"forward": (1024, 4096), "backward": (1024, 4096), "decode": (4096, 16384)}
CELLS = [(what, n, name, "float32") for what, lengths in LENGTHS.items() for n in lengths for name in MECHANISMS]
CELLS += [(what, n, "lssar", "float32") for what, n in (("decode", 1024), ("forward", 16384), ("backward", 16384))]
CELLS += [(what, n, "lssar", "bfloat16") for what in ("forward", "backward", "decode") for n in (1024, 4096)]

WORKER = f"""
import json, sys, time
import torch
from softfocus import attention

torch.set_num_threads(1)

def prepare(what, length, mechanism, dtype):
    torch.manual_seed(0)
    rows = 1 if what == "decode" else length
    grad = what == "backward"
    made = [torch.randn(1, {HEADS}, n, {DIM}).to(getattr(torch, dtype)) for n in (rows, length, length, rows)]
    query, key, value = (x.requires_grad_(grad) for x in made[:3])
    above = made[3]
    def run():
        out = attention(query, key, value, is_causal=True, mechanism=mechanism, backend="cpu")
        if grad:
            torch.autograd.grad(out, (query, key, value), above)
    return run

print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, list):
        run = prepare(*asked)
        run(), run()
        print(0.0, flush=True)
    else:
        started = time.perf_counter()
        for _ in range(asked):
            run()
        print(time.perf_counter() - started, flush=True)
"""


class Side:
    """A process that runs calls with one source tree."""

    def __init__(self, source):
        environment = {**os.environ, "PYTHONPATH": str(Path(source).resolve()), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WORKER],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, what):
        """Prepare a cell (a list), or time so many calls of it (a number): seconds."""
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def compare(pairs, cell):
    """Median and quartiles of new / old, over rounds of all pairs (old, new) of processes.

    A round asks both, in turn the one and the other first. There are several pairs because it makes
    a difference where a process has its memory. Of the longest cells one pair has to do.
    """
    ratios = []
    for old, new in pairs[: 1 if cell[1] == 16384 and cell[0] != "decode" else None]:
        for side in (old, new):
            side.ask(list(cell))
        calls = max(1, int(0.04 / old.ask(1)))
        for number in range(9 if old.ask(calls) < 0.2 else 4):
            order = (old, new) if number % 2 else (new, old)
            took = {side: side.ask(calls) for side in order}
            ratios.append(took[new] / took[old])
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": round(median, 3), "lower_quartile": round(low, 3), "upper_quartile": round(high, 3)}


def commit_of(source):
    """The commit that a source tree is checked out at."""
    command = ["git", "-C", source, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(old_source, new_source, to, *chosen):
    """Time every cell, or those that are chosen, and write as it goes."""
    sources = {"new_over_old": (old_source, new_source), "new_over_new": (new_source, new_source)}
    pairs = {name: [(Side(first), Side(second)) for _ in range(4)] for name, (first, second) in sources.items()}
    cells = json.loads(Path(to).read_text())["cells"] if Path(to).exists() else []
    wanted = [cell for cell in CELLS if not chosen or ":".join(map(str, cell)) in chosen]
    for what, length, mechanism, dtype in wanted[len(cells) :]:
        found = {name: compare(some, (what, length, mechanism, dtype)) for name, some in pairs.items()}
        cells.append({"what": what, "length": length, "mechanism": mechanism, "dtype": dtype, **found})
        noise = found["new_over_new"]["median"]
        print(f"{what:9} {length:6} {mechanism:8} {dtype:8} {found['new_over_old']}  noise {noise}", flush=True)
        about = {"old": commit_of(old_source), "new": commit_of(new_source), "threads": 1, "heads": HEADS}
        Path(to).write_text(json.dumps({**about, "head_dim": DIM, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
