"""CPU seconds of decoding calls with the kernels of two commits, each in a new process.

    python docs/results/before-and-after/decode_cpu_time.py OLD/src NEW/src RESULT.json

measure.py times a call of 0.1 ms by the clock, between two processes that live on: where their
arrays lie in memory is drawn once. Here it is drawn anew eight times for each commit, and the CPU
time of 20,000 calls is taken (4 heads of 64, 4,096 keys, float32, one thread). Writes the
microseconds a call of every process, and the ratio of the medians.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from measure import commit_of

PROCESSES, CALLS = 8, 20_000
MECHANISMS = ("lssar", "lssa", "softmax")

WORKER = f"""
import sys, time
import torch
from softfocus import attention

torch.set_num_threads(1)
torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, rows, 64) for rows in (1, 4096, 4096))

def run(calls):
    for _ in range(calls):
        attention(query, key, value, is_causal=True, mechanism=sys.argv[1], backend="cpu")

run(200)
started = time.process_time()
run({CALLS})
print((time.process_time() - started) / {CALLS} * 1e6)
"""


def microseconds(source: str, mechanism: str) -> float:
    """Of one call, in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(Path(source).resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", WORKER, mechanism]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main(old: str, new: str, result: str) -> None:
    """Measure, in turn, and write."""
    found = {"old": commit_of(old), "new": commit_of(new), "cells": []}
    for mechanism in MECHANISMS:
        took: dict[str, list[float]] = {old: [], new: []}
        for number in range(PROCESSES):
            for source in (old, new) if number % 2 else (new, old):
                took[source].append(round(microseconds(source, mechanism), 2))
        ratio = round(statistics.median(took[new]) / statistics.median(took[old]), 3)
        found["cells"].append({"mechanism": mechanism, "new_over_old": ratio, "old": took[old], "new": took[new]})
        print(found["cells"][-1], flush=True)
    Path(result).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
