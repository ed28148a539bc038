"""How many instructions the CPU kernels execute for 16 scores, by what they do.

    python docs/results/cpu-instructions/count.py

Writes results.json beside itself. Needs Linux on x86-64, AVX-512, g++ and addr2line. The kernels
are compiled for an Ice Lake server. A block of 32 queries meets 256 random keys: no mask, one head
of 64, float32, one thread. The processor's trap flag stops it after each instruction of a call. The
handler counts the instruction at its address. Nothing is timed, so other work on the machine does
no harm.
"""

import ctypes
import json
import os
import subprocess
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import torch

import softfocus
from softfocus.backends.cpu.plan import CXXFLAGS, plan

HERE = Path(__file__).parent
QUERIES, KEYS, DIM, LANES = 32, 256, 64, 16
FLAGS = os.environ[CXXFLAGS] = "-g -march=icelake-server"
MECHANISMS = ("lssar", "softmax")
STAGES = {
    "products": ("register_tile",),
    "scores to phi": ("convert_strip", "convert_row", "exponentiate_row"),
    "finding live keys": ("gather_live",),
    "powers of live keys": ("with_powers", "raise_to_power"),
    "live keys: A V": ("add_listed_rows",),
    "live keys: dL/dA": ("listed_dots",),
    "live keys: grad_value": ("scatter_add",),
    "dL/ds": ("multiply_by_derivative", "scatter_grad_phi", "dense_grad_scores"),
    "delta": ("listed_grad_weights", "dense_grad_weights"),
}
"""By names of functions, inlined or not. An instruction belongs to the innermost that is named."""

TRAP = r"""
#include <csignal>
#include <cstdint>
#include <ucontext.h>
static volatile bool tracing = false;
static uint64_t begin, size, *counts;
static void handler(int, siginfo_t*, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  uint64_t at = uint64_t(registers[REG_RIP]) - begin;
  if (at < size) ++counts[at];
  if (!tracing) registers[REG_EFL] &= ~0x100;
}
extern "C" void start(uint64_t from, uint64_t bytes, uint64_t* to) {
  struct sigaction action = {};
  action.sa_sigaction = handler, action.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &action, nullptr);
  begin = from, size = bytes, counts = to, tracing = true;
  asm volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
}
extern "C" void stop() { tracing = false; }
"""


def mapped(name):
    """Where a library lies in memory, and how many bytes."""
    spans = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(name)]
    ends = [[int(x, 16) for x in span.split("-")] for span in spans]
    return min(x[0] for x in ends), max(x[1] for x in ends) - min(x[0] for x in ends)


def stages_of(library, addresses):
    """The stage of each address, by addr2line's chain of inlined functions, innermost first."""
    command = ["addr2line", "-a", "-f", "-i", "-e", str(library)]
    text = "\n".join(map(hex, addresses))
    lines = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    chains = []
    for line in lines:
        if line.startswith("0x"):
            chains.append([])
        chains[-1].append(line)
    found = {name: stage for stage, names in STAGES.items() for name in names}
    for chain in chains:
        yield next((found[n] for line in chain for n in found if n in line and "/" not in line), "the rest")


def count(trap, library, run):
    """Instructions of a call for LANES scores, by stage, and how many of LANES keys are live."""
    begin, size = mapped(library.name)
    counts = (ctypes.c_uint64 * size)()
    trap.start(ctypes.c_uint64(begin), ctypes.c_uint64(size), counts)
    run()
    trap.stop()
    executed = {address: n for address, n in enumerate(counts) if n}
    total, live = Counter(), 0
    for stage, n in zip(stages_of(library, executed), executed.values(), strict=True):
        total[stage] += n
        if stage == "live keys: grad_value":  # one turn of its loop is one live key
            live = max(live, n)
    scores = QUERIES * KEYS / LANES
    return {
        "instructions": {stage: round(total[stage] / scores, 1) for stage in STAGES if total[stage]},
        **({"live_keys": round(live / scores, 2)} if live else {}),
    }


def traps():
    """The library that counts."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "trap.cpp"), Path(folder, "libtrap.so")
        source.write_text(TRAP)
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", source, "-o", made], check=True)
        return ctypes.CDLL(str(made))


def main():
    """Count the forward and the backward of each mechanism."""
    torch.set_num_threads(1)
    trap, library, cells = traps(), plan().library, []
    for mechanism in MECHANISMS:
        torch.manual_seed(0)
        inputs = [torch.randn(1, 1, n, DIM, requires_grad=True) for n in (QUERIES, KEYS, KEYS)]
        grad_out = torch.randn(1, 1, QUERIES, DIM)
        forward = partial(softfocus.attention, *inputs, mechanism=mechanism, backend="cpu")
        torch.autograd.grad(forward(), inputs, grad_out)
        backward = partial(torch.autograd.grad, forward(), inputs, grad_out)
        for what, run in (("forward", forward), ("backward", backward)):
            cells.append({"what": what, "mechanism": mechanism, **count(trap, library, run)})
            write(cells)


def write(cells):
    """What was counted so far, and where."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    about = {"commit": commit.strip(), "compiler": compiler(), "flags": FLAGS, "queries": QUERIES, "keys": KEYS}
    (HERE / "results.json").write_text(json.dumps({**about, "head_dim": DIM, "cells": cells}, indent=1) + "\n")


def compiler():
    """g++'s name and version."""
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


if __name__ == "__main__":
    main()
