"""The test that ended in an illegal memory access on an H200, alone, with each ptxas that is there,
and under compute-sanitizer.

A line each. Compiled with Triton 3.6 its kernels pass on the emulated GPU, so that their PTX is not
suspected first. NVIDIA lists wrong code of older ptxas around wgmma (release notes of CUDA 13.3).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from lines import arguments, writer

TEST = "tests/core/test_triton.py"
WHICH = "test_parity_of_keys_split_among_programs and grouped"


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
    runs: list[tuple[str, str | None, list[str]]] = [(name, path, []) for name, path in assemblers().items()]
    if (sanitizer := shutil.which("compute-sanitizer")) and not given.dry_run:
        runs.append(("Triton", None, [sanitizer, "--tool", "memcheck", "--error-exitcode", "9"]))
    wrong = 0
    for name, path, before in runs[: 1 if given.dry_run else None]:
        environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1", "TRITON_CACHE_DIR": str(given.out) + f".{name}"}
        if path is not None:
            environment["TRITON_PTXAS_PATH"] = path
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST, "-k", WHICH]
        ran = subprocess.run([*before, *command], env=environment, capture_output=True, text=True, check=False)
        wrong += ran.returncode != 0
        tool = "memcheck" if before else "none"
        tail = (ran.stdout + ran.stderr)[-2000:]
        write(ptxas=name, version=path and version(path), tool=tool, exit=ran.returncode, tail=tail)
    return wrong


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
