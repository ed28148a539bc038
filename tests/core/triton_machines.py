"""Compiles every Triton kernel that a call launches, for a GPU that need not be there: one line of
JSON a kernel.

    python triton_machines.py ARCH MECHANISM HEAD_DIM QUERIES... [--given] [--group N]
        [--dropout P] [--dtype float16] [--loops-of KERNEL...]

QUERIES 0: of one query against a cache in pages; several are one call after another. --group: heads
of queries to one of keys. --given: with a mask, padding, documents, a window, a bias with gradient,
learned scales and powers.

A process of its own: Triton must not have been told to interpret. The line holds the call's
queries, the kernel's name, registers a thread, bytes of stack (spilled registers) and of shared
memory; and of each loop with tensor-core products how many instructions a score takes, in the order
of the code: of tiles that something cuts, then of whole ones, for each sweep. In decoding of every
loop of 100 instructions or more, by the scores of a tile (those that make weights of scores have
512 a turn, whatever the tile). To disassemble takes half a second a kernel: --loops-of does it for
kernels of these names alone, or with no name for none.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Absent:
    """Stands in for the driver of a GPU."""

    def __init__(self, arch: int):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def output_of(cubin: bytes, tool: str, option: str) -> str:
    """What one of NVIDIA's tools says of compiled code."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, option, file.name], capture_output=True, text=True, check=True).stdout


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of stack."""
    output = output_of(cubin, "cuobjdump", "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", output)
    assert found, output
    return int(found[1]), int(found[2])


def loops(cubin: bytes, at_least: int | None = None) -> list[int]:
    """How many instructions each innermost loop has that multiplies on tensor cores, or that is so
    long.
    """
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in output_of(cubin, "nvdisasm", "-c").splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?);", line):
            code.append(instruction[1])
    found = []
    for end, instruction in enumerate(code):
        to = re.match(r"BRA.*(\.L_x_\d+)", instruction)
        begin = labels.get(to[1], end + 1) if to else end + 1
        long = at_least is not None and end + 1 - begin >= at_least
        if long or any(re.match(r"\w*(MMA|UTCMMA)", x) for x in code[begin : end + 1]):
            found.append((begin, end))
    inner = [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [end + 1 - begin for begin, end in inner]


def main(
    arch: int,
    mechanism: str,
    head_dim: int,
    queries: list[int],
    given: bool,
    group: int,
    dropout_p: float,
    dtype: str,
    loops_of: list[str] | None,
) -> None:
    driver.set_active(Absent(arch))
    os.environ["SOFTFOCUS_TUNE"] = "off"
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(self, *arguments, grid=grid, warmup=True, **options)
        registers, stack = usage(compiled.asm["cubin"])
        tiling = arguments[-1]
        scores = getattr(tiling, "BLOCK_Q", 1) * getattr(tiling, "BLOCK_K", 1)
        exact = "gradients" in self.__name__ and arguments[-2] is True
        line = {
            "queries": of_call,
            "kernel": f"{self.__name__}{' exact' * exact}",
            "registers": registers,
            "stack": stack,
            "shared": compiled.metadata.shared,
        }
        if loops_of is None or self.__name__ in loops_of:
            at_least = 100 if self.__name__ in ("statistics", "weights") else None
            line["loops"] = [
                round(32 * options.get("num_warps", 4) * count / int(scores), 1)
                for count in loops(compiled.asm["cubin"], at_least)
            ]
        print(json.dumps(line), flush=True)

    JITFunction.run = compile_only
    from softfocus.backends.triton import call

    call._programs = lambda device: 264
    for of_call in queries:  # compile_only reads it
        one_call(mechanism, head_dim, of_call, given, group, dropout_p, getattr(torch, dtype))


def one_call(
    mechanism: str, head_dim: int, queries: int, given: bool, group: int, dropout_p: float, dtype: torch.dtype
) -> None:
    import softfocus
    from softfocus import functional
    from softfocus.backends.triton import call
    from softfocus.visibility import Cache

    query = torch.zeros(1, 2 * group, queries or 1, head_dim, dtype=dtype)
    key = torch.zeros(1, 2, 4096, head_dim, dtype=dtype)
    held = None
    if not queries:
        held = Cache(torch.tensor([4096]), torch.arange(256)[None])
    optional: dict[str, Any] = {}
    if given:
        optional = {
            "attn_mask": torch.ones(1, 2, queries, 4096, dtype=torch.bool),
            "key_mask": torch.ones(1, 4096, dtype=torch.bool),
            "document_ids": torch.zeros(1, 4096, dtype=torch.int64),
            "window_size": (1000, 0),
            "bias": torch.zeros(1, 2, queries, 4096),
            "head_scale": torch.ones(2),
            "power": torch.ones(2) if softfocus.named(mechanism).power else None,
        }
    one = functional.validated_call(
        query, key, key, dropout_p=dropout_p, is_causal=True, enable_gqa=True, mechanism=mechanism, **optional
    )
    if held:
        pages = key.view(2, 256, 16, head_dim).transpose(0, 1)
        one = one._replace(key=pages, value=pages, cache=held)
    launcher = call.Launcher(one)
    out, rows = launcher.forward()
    if group * queries > call.FEW_ROWS:
        launcher.backward(torch.zeros_like(out), given, out, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, kind in (("arch", int), ("mechanism", str), ("head_dim", int)):
        parser.add_argument(name, type=kind)
    parser.add_argument("queries", type=int, nargs="+")
    parser.add_argument("--given", action="store_true")
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0, dest="dropout_p")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--loops-of", nargs="*", metavar="KERNEL")
    main(**vars(parser.parse_args()))
