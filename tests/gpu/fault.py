"""The test in which an illegal memory access was reported on an H200, alone: as it was, under
memcheck, with each launch waited for, and with each ptxas that is there.

A line each, the most telling first. Compiled with Triton 3.6 its kernels pass on the emulated GPU,
so that their PTX is not suspected first. ptxas 12.8 and 13.0 have miscompiled a Triton kernel of
another project (docs/performance-gpu.md). memcheck has reported accesses of wgmma that were right:
its report alone proves nothing.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from lines import arguments, writer

TEST = "tests/core/test_triton.py::test_parity_of_keys_split_among_programs[grouped-lssa-float16]"
REPEATS = 5


def assemblers() -> dict[str, str | None]:
    """ptxas by origin; None is Triton's own for the device."""
    import triton

    own = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    found = {"torch": Path(torch.__file__).parent / "bin/ptxas", "Triton, for Blackwell": own}
    if toolkit := shutil.which("ptxas"):
        found["toolkit"] = Path(toolkit)
    return {"Triton": None} | {name: str(path) for name, path in found.items() if path.exists()}


def version(path: str) -> str:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return next((line for line in said.splitlines() if "release" in line), "")


def main() -> int:
    given = arguments(__doc__)
    write = writer(given.out)
    found = assemblers()
    runs: list[tuple[str, str, dict[str, str]]] = [("plain", "Triton", {})] * REPEATS
    if shutil.which("compute-sanitizer"):
        # Without the caching allocator each tensor is an allocation, whose end memcheck knows
        runs.append(("memcheck", "Triton", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
    runs += [("each launch waited for", name, {"CUDA_LAUNCH_BLOCKING": "1"}) for name in found]
    wrong = 0
    for how, name, settings in runs[: 1 if given.dry_run else None]:
        environment = {**os.environ, **settings, "TRITON_CACHE_DIR": str(given.out) + f".{name}"}
        if (path := found[name]) is not None:
            environment["TRITON_PTXAS_PATH"] = path
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST]
        if how == "memcheck":
            command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *command]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        wrong += ran.returncode != 0
        tail = (ran.stdout + ran.stderr)[-2000:]
        write(how=how, ptxas=name, version=path and version(path), exit=ran.returncode, tail=tail)
    return wrong


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
