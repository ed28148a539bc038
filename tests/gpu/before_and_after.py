"""The kernels of two source trees, timed in turn on one GPU: a process for each.

python tests/gpu/before_and_after.py --old OLD/src --new NEW/src --out FILE.jsonl

A line for each kind of call: whether the new kernels agree with the float64 reference, and the new
time as a share of the old one, its median and quartiles over rounds. `old_over_old` has the old
tree on both sides, which shows the noise. Tiles are the defaults. Kernels are compiled before, many
at a time. Nothing else should use the GPU.
"""

import argparse
import hashlib
import itertools
import json
import os
import select
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lines import writer

NAMES = ("softmax", "laser", "lssa", "lssar", "laser(lssa)")
CELLS = [
    *itertools.product(("backward", "forward"), (64, 128), NAMES),
    *itertools.product(("decode",), (64, 128), ("softmax", "lssar")),
]
ROUNDS, SECONDS = 7, 0.04
PATIENCE = 100.0
"""Seconds that an answer is waited for: the first one compiles kernels."""
BEGAN = time.perf_counter()


def prepared(what: str, head_dim: int, name: str, device: str) -> Any:
    """A function that runs a kind of call of 16 heads: 32K tokens in sequences of 4K, causal, or
    one query of a cache of 16K.
    """
    from softfocus import attention

    batch, heads, length = (8, 16, 4096) if what != "decode" else (1, 16, 16384)
    if device == "cpu":
        batch, heads, length = 1, 1, 32
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query, key, value = (torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3))
    if what == "decode":
        query = query[:, :, -1:].contiguous()
    leaves = [x.requires_grad_(what == "backward") for x in (query, key, value)]
    grad_out = torch.randn_like(query)

    def run() -> None:
        out = attention(*leaves, is_causal=True, mechanism=name, backend="triton")
        if what == "backward":
            torch.autograd.grad(out, leaves, grad_out)

    return run


def held(what: str, head_dim: int, name: str, device: str) -> str:
    """What is wrong with a smaller call of the same kind; "" where nothing is."""
    from softfocus import attention
    from softfocus.testing import Case, check

    length = 32 if device == "cpu" else 4096 if what == "decode" else 512  # keys that decoding splits
    rows = 1 if what == "decode" else length
    case = Case(what, batch=1, heads=2, query_length=rows, key_length=length, head_dim=head_dim, value_dim=head_dim)
    try:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        check(partial(attention, backend="triton"), case, name, dtype, device=device)
    except Exception as error:  # of whatever kind: it is what is looked for
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def timed(run: Any, calls: int, device: str) -> float:
    """Seconds of so many calls, by the device's own clock."""
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def worker(device: str) -> None:
    """Answer lines: [what, head_dim, name] prepares a call, "check" compares it, "where" names the
    package, a number times so many calls.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # a line that something prints is no answer
    cell: list[Any] = []
    run: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, list):
            cell, run = asked, None  # frees the last one's tensors
            run = prepared(*asked, device)
            for _ in range(3):
                run()
            answer: Any = timed(run, 2, device) / 2
        elif asked == "where":
            import softfocus

            answer = softfocus.__file__
        elif asked == "check":
            answer = held(cell[0], cell[1], cell[2], device)
        else:
            answer = timed(run, asked, device)
        print(json.dumps(answer), file=answers, flush=True)


class Side:
    """A process that runs calls with one source tree."""

    def __init__(self, source: Path, device: str) -> None:
        self.source = source.resolve()
        if not (self.source / "softfocus/__init__.py").is_file():
            raise SystemExit(f"{source} has no package softfocus")
        paths = (str(self.source), os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"SOFTFOCUS_KERNELS": "off", "SOFTFOCUS_TUNE": "off", "SOFTFOCUS_TRITON": "trusted"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker", device],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: Any) -> Any:
        """What the worker answers.

        Raises:
            RuntimeError: it ended, or does not answer. A kernel may never end.
        """
        pipes = self.process.stdin, self.process.stdout
        if pipes[0] is None or pipes[1] is None:
            raise RuntimeError("the worker has no pipes")
        try:
            pipes[0].write(json.dumps(what) + "\n")
            pipes[0].flush()
        except OSError as error:
            raise RuntimeError(f"the worker ended before it was asked {what}") from error
        if not select.select([pipes[1]], [], [], PATIENCE)[0]:
            raise RuntimeError(f"no answer to {what} within {PATIENCE} seconds")
        if not (line := pipes[1].readline()):
            raise RuntimeError(f"the worker ended; it was asked {what}")
        return json.loads(line)

    def is_its_own(self) -> None:
        """The worker has imported the package of this tree.

        Raises:
            SystemExit: it has imported another one.
        """
        if not (where := Path(self.ask("where"))).is_relative_to(self.source):
            raise SystemExit(f"the worker of {self.source} imported {where}")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def closed(sides: list[Side]) -> None:
    """End the processes, and empty the list."""
    while sides:
        sides.pop().close()


def compiled(source: Path, cell: tuple[str, int, str], device: str) -> str:
    """Compile what a cell runs, and compare it with the reference; what is wrong with it."""
    side = Side(source, device)
    try:
        side.is_its_own()
        side.ask(cell)
        return str(side.ask("check"))
    except RuntimeError as error:
        return str(error)
    finally:
        side.close()


def digest(source: Path) -> str:
    """Of the package's sources, to tell two trees apart."""
    found = hashlib.sha256()
    for path in sorted((source / "softfocus").rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def shares(first: Side, second: Side, cell: tuple[str, int, str]) -> dict[str, float]:
    """The time of the second as a share of the first's: median and quartiles over rounds."""
    once = first.ask(cell)
    second.ask(cell)
    calls = max(1, int(SECONDS / max(once, 1e-6)))
    ratios = []
    for number in range(ROUNDS):
        order = (first, second) if number % 2 else (second, first)
        took = {id(side): side.ask(calls) for side in order}
        ratios.append(took[id(second)] / took[id(first)])
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": round(median, 4), "lower_quartile": round(low, 4), "upper_quartile": round(high, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="the folder that the old package is imported from")
    parser.add_argument("--new", type=Path, required=True, help="the same of the new one")
    parser.add_argument("--out", type=Path, required=True, help="a file of lines of JSON")
    parser.add_argument("--dry-run", action="store_true", help="a tiny cell, by Triton's interpreter")
    given = parser.parse_args()
    write = writer(given.out)
    device, cells = ("cpu", CELLS[:1]) if given.dry_run else ("cuda", CELLS)
    if given.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    trees = {"old": given.old, "new": given.new}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as threads:
        # A backward compiles the forward's kernels, too
        kinds = [(tree, cell) for cell in cells if cell[0] != "forward" for tree in trees]
        found = threads.map(lambda kind: compiled(trees[kind[0]], kind[1], device), kinds)
        said = dict(zip(kinds, found, strict=True))
    took, sources = round(time.perf_counter() - BEGAN, 1), {name: digest(tree) for name, tree in trees.items()}
    write(seconds_to_compile=took, triton=metadata.version("triton"), sources=sources)
    wrong, sides = 0, list[Side]()
    for cell in cells:
        what, head_dim, name = cell
        kind = ("backward", head_dim, name) if what == "forward" else cell
        faults = [f"{tree}: {said[tree, kind]}" for tree in trees if said[tree, kind]]
        line: dict[str, Any] = {"what": what, "head_dim": head_dim, "mechanism": name}
        if not faults:  # no speed of a kernel that is wrong
            sides = sides or [Side(tree, device) for tree in (given.old, given.new, given.old)]
            try:
                line["new_over_old"] = shares(sides[0], sides[1], cell)
                line["old_over_old"] = shares(sides[0], sides[2], cell)
            except RuntimeError as error:
                faults = [str(error)]
                closed(sides)  # the next cell gets new ones
        wrong += bool(faults)
        write(**line, said="; ".join(faults))
    closed(sides)
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        raise SystemExit(min(1, main()))
