"""Calls that ptxas 12.8 made wrong on an H200, and calls of other sizes, each alone: with the
assembler that softfocus takes, and with Triton's own for the device.

A line for each call. docs/performance-gpu.md says what was wrong.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from lines import arguments, writer

SIZES = ((8, 24), (16, 24), (24, 8), (24, 24), (32, 32), (48, 48), (72, 72), (80, 80), (96, 96))
"""Dimensions of a query and of a value. The first two were wrong or did not end."""
MECHANISMS = ("lssa", "softmax", "lssar", "laser")
LIMIT = 100
"""Seconds of a call. With ptxas 12.8 a kernel did not end."""


def one(mechanism: str, head_dim: int, value_dim: int, dry: bool) -> str:
    """Forward and backward of 37 tokens, compared with the reference; what was wrong, or ""."""
    from softfocus import attention
    from softfocus.testing import CASES, check

    grouped = next(case for case in CASES if case.name == "grouped")
    case = replace(grouped, head_dim=head_dim, value_dim=value_dim)
    device, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    try:
        check(partial(attention, backend="triton"), case, mechanism, dtype, device=device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def alone(assembler: str, *call: Any) -> dict[str, Any]:
    """``one`` in a process of its own."""
    environment = {**os.environ, "SOFTFOCUS_TUNE": "off"}
    if assembler == "Triton's own":
        import triton

        environment["TRITON_PTXAS_PATH"] = str(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")
        environment["TRITON_CACHE_DIR"] = str(Path.home() / ".triton" / "of-its-own-ptxas")
    line = dict(zip(("mechanism", "head_dim", "value_dim"), call, strict=False), assembler=assembler)
    command = [sys.executable, __file__, "--call", json.dumps(call)]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {**line, "said": f"not done after {LIMIT} seconds"}
    return {**line, "said": ran.stdout.strip() if ran.returncode == 0 else (ran.stdout + ran.stderr)[-500:]}


def main() -> int:
    if sys.argv[1] == "--call":
        print(one(*json.loads(sys.argv[2])))
        return 0
    given = arguments(__doc__)
    write = writer(given.out)
    calls = [
        (assembler, name, *sizes, given.dry_run)
        for assembler, sizes, name in product(("softfocus's choice", "Triton's own"), SIZES, MECHANISMS)
    ]
    wrong = 0
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as threads:
        for line in threads.map(lambda call: alone(*call), calls[: 1 if given.dry_run else None]):
            wrong += line["assembler"] != "Triton's own" and bool(line["said"])
            write(**line)
    return wrong


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
