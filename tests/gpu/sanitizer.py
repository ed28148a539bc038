"""A few calls under NVIDIA's compute-sanitizer: accesses out of bounds (memcheck) and races
(racecheck).

A line for each tool. `make sanitize-gpu` runs many tests so, for hours.
"""

import os
import shutil
import subprocess
import sys

from lines import arguments, writer

CALLS = """
import torch
from softfocus import attention
for name in ("lssar", "laser"):
    for queries, keys in ((150, 150), (1, 200)):
        shapes = (1, 2, queries, 64), (1, 2, keys, 64), (1, 2, keys, 64)
        leaves = [torch.randn(shape, device=DEVICE, dtype=torch.DTYPE).requires_grad_() for shape in shapes]
        out = attention(*leaves, is_causal=True, mechanism=name, backend="triton")
        torch.autograd.grad(out, leaves, torch.ones_like(out))
"""


def main() -> int:
    given = arguments(__doc__)
    write = writer(given.out)
    device, dtype = ("'cpu'", "float32") if given.dry_run else ("'cuda'", "bfloat16")
    code = CALLS.replace("DEVICE", device).replace("DTYPE", dtype)
    if given.dry_run:
        code = code.replace('("lssar", "laser")', '("lssar",)').replace("((150, 150), (1, 200))", "((9, 9),)")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SOFTFOCUS_TUNE": "off"}
    sanitizer, wrong = shutil.which("compute-sanitizer"), 0
    for tool in ("memcheck", "racecheck"):
        before = [sanitizer, "--tool", tool, "--error-exitcode", "9"] if sanitizer and not given.dry_run else []
        ran = subprocess.run(
            [*before, sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        wrong += ran.returncode != 0
        write(tool=tool if before else "none", exit=ran.returncode, tail=(ran.stdout + ran.stderr)[-1500:])
    return wrong


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
