"""Peak memory of a subject, in a process of its own: `python -m softfocus.lab.bench.memory CELL`,
which prints JSON.
"""

import gc
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch

from softfocus.lab.bench.cells import Cell, call, make
from softfocus.lab.bench.results import Memory
from softfocus.lab.bench.subjects import SUBJECTS

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM = 64
"""Tokens of the call that loads libraries and starts threads before anything is counted."""
PATIENCE = 900.0
"""Seconds beyond which a process is given up: it imports torch, may compile, and makes two
calls.
"""
FRUGAL = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc's own initial values, held there: it then gives freed tensors back at once, and the peak is
what was really needed, not what the allocator kept from the warm-up.
"""


def peak(subject: str, cell: Cell, threads: int) -> Memory | str:
    """The peak memory of one call of a subject, or the sentence that says why it is not known.

    Args:
        subject: its name in SUBJECTS.
        cell: what it computes.
        threads: that torch uses.
    """
    task = json.dumps({"subject": subject, "threads": threads, "cell": asdict(cell)})
    command = [sys.executable, "-m", "softfocus.lab.bench.memory", task]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **FRUGAL}, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its process took more than {PATIENCE:.0f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        killed = f"killed by signal {-done.returncode}; memory may have run out" if done.returncode < 0 else last
        return f"its process failed: {killed}"
    return Memory.model_validate_json(done.stdout.splitlines()[-1])


def measure(subject: str, cell: Cell) -> Memory:
    """In the process that is measured: warm up, note what is held, make the inputs, call once, read
    the peak.
    """
    chosen = SUBJECTS[subject]
    cell = chosen.cell(cell)
    # Compiling takes memory of its own, and would happen at this length inside the count
    warm = cell if chosen.compiles else replace(cell, length=min(WARM, cell.length))
    function = chosen.build(warm)
    call(function, warm, make(warm))()
    if not chosen.compiles:
        function = chosen.build(cell)
    gc.collect()
    if cell.device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        ready = call(function, cell, make(cell))
        torch.cuda.reset_peak_memory_stats()  # making the inputs took more than they hold
        kept = ready()
        torch.cuda.synchronize()
        return Memory(bytes=torch.cuda.max_memory_allocated() - before, method="cuda")
    _trim()
    method = _reset()
    before = _peak(method)
    ready = call(function, cell, make(cell))
    _reset()
    kept = ready()
    after = _peak(method)
    del kept
    return Memory(bytes=max(0, after - before), method=method)


def _reset() -> Literal["VmHWM", "ru_maxrss"]:
    """Set the peak back to what is held now, where the system can; and which peak to read from here
    on.
    """
    try:
        CLEAR.write_text("5")
        _status("VmHWM")
    except (OSError, KeyError):
        return "ru_maxrss"
    return "VmHWM"


def _peak(method: str) -> int:
    """The peak, in bytes."""
    if method == "VmHWM":
        return _status("VmHWM")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if not found:
        raise KeyError(name)
    return int(found[1]) * 1024


def _trim() -> None:
    """Have the allocator give back what it keeps, where it is glibc's."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def main(task: str) -> None:
    """What the process does."""
    asked = json.loads(task)
    torch.set_num_threads(asked["threads"])
    print(measure(asked["subject"], Cell(**asked["cell"])).model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1])
