"""How long a call's Python takes on the Triton kernels, with launches that do nothing; writes
medians in microseconds.

    PYTHONPATH=tests/emulated/gpu:src python tests/emulated/gpu/host.py RESULT.json

Another commit's package: another ``src``. Run the two in turn, on one core that does nothing else
(OMP_NUM_THREADS=1).
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import plugin
import torch

from softfocus import attention
from softfocus.backends.triton import call
from softfocus.lab.run_folder import provenance

plugin.Launcher.__call__ = lambda self, *arguments: None
call._programs = lambda device: 264


def microseconds(function, calls=60, rounds=5):
    for _ in range(20):
        function()
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        took.append((time.perf_counter() - start) / calls * 1e6)
    return round(median(took), 1)


def forward_and_backward(leaves, grad_out, given):
    return torch.autograd.grad(attention(*leaves, is_causal=True, **given), leaves, grad_out)


def main(to):
    query, key, one = (torch.zeros(1, 16, length, 64, dtype=torch.bfloat16) for length in (128, 16384, 1))
    leaves = [query.clone().requires_grad_() for _ in range(3)]
    found = {}
    for name in ("softmax", "lssa", "lssar", "laser"):
        given = {"mechanism": name, "backend": "triton"}
        with torch.no_grad():
            found[f"decode {name}"] = microseconds(partial(attention, one, key, key, **given))
            found[f"forward {name}"] = microseconds(partial(attention, query, query, query, is_causal=True, **given))
        found[f"both {name}"] = microseconds(partial(forward_and_backward, leaves, query, given))
    path = Path(to)
    results = json.loads(path.read_text()) if path.exists() else []
    results.append(
        {
            "commit": provenance.commit(),
            "cpu": provenance.machine("cpu").cpu,
            "versions": provenance.versions(),
            "us": found,
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
