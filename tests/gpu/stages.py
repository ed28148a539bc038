"""Half an hour on a GPU, in four stages of under nine minutes: `make gpu STAGE=1`, or

    PYTHONPATH=src python tests/gpu/stages.py 1 --out runs/gpu

Needs a source tree and installed packages, no installation and no network. A stage is a list of
items, the most valuable first. Each item is a process under a time limit of its own: one that hangs
costs the others nothing but its limit. After each item `stage1.json` is written whole; `stage1.log`
has what the items print. What an item had written when it was stopped is kept. --dry-run goes
through a stage without a GPU, on tiny shapes, in Triton's interpreter: it shows typing errors, not
speed.

The first stage has what fifteen minutes each on two H100 and five H200 left out and what matters
most (docs/performance-gpu.md). The last has what an H200 has run: on another GPU, or after a change
of the kernels, run it first.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SECONDS = 515.0
"""Of a stage: what does not begin within it is recorded as left out, and what is not done then is
stopped.
"""
DYING = 20.0
"""Seconds that a stopped item is waited for."""
MECHANISMS = ("lssar", "lssa", "laser", "softmax")
LONG_CACHES = (16384, 65536, 131072)


class Goal(NamedTuple):
    """A ratio of times that docs/performance-gpu.md sets, and where it is to hold."""

    mechanism: str
    what: str
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    to: str
    most: float


GOALS = (
    Goal("lssa", "forward", (4096, 16384), (64, 128), "sdpa", 1.2),
    Goal("lssar", "forward", (4096, 16384), (64, 128), "sdpa", 1.6),
    Goal("lssar", "backward", (4096, 16384), (64, 128), "sdpa", 1.5),
    Goal("laser", "forward", (4096, 16384), (64, 128), "sdpa", 1.15),
    Goal("laser", "backward", (4096, 16384), (64, 128), "sdpa", 1.15),
    Goal("lssar", "decode", LONG_CACHES, (64, 128), "sdpa", 0.7),
    Goal("lssar", "forward", (4096,), (64, 128), "flex", 0.5),
    Goal("lssar", "backward", (4096,), (64, 128), "flex", 0.5),
)
"""backward is forward and backward; decode is one query."""


class Benchmark(NamedTuple):
    """Cells of `softfocus bench`: every combination."""

    mechanisms: tuple[str, ...]
    whats: tuple[str, ...]
    lengths: tuple[int, ...]
    head_dim: int
    subjects: tuple[str, ...] = ("sdpa", "softfocus")
    memory: bool = False

    @property
    def arguments(self) -> list[str]:
        """For the command line."""
        lists = {
            "--mechanisms": self.mechanisms,
            "--what": self.whats,
            "--lengths": map(str, self.lengths),
            "--subjects": self.subjects,
        }
        words = [word for option, values in lists.items() for word in (option, ",".join(values))]
        return [*words, "--head-dim", str(self.head_dim), "--memory" if self.memory else "--no-memory"]


@dataclass(frozen=True)
class Item:
    """A process of a stage.

    Attributes:
        name: also of the file that it writes, if it writes one: NAME.jsonl, or NAME/results.json.
        words: what follows the Python interpreter; {folder} is the stage's own.
        dry: the same without a GPU.
        limit: seconds.
        environment: on top of the process's own and of EVERYWHERE.
        cells: what it measures, if that is a benchmark.
    """

    name: str
    words: tuple[str, ...]
    dry: tuple[str, ...]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    cells: Benchmark | None = None


EVERYWHERE = {"SOFTFOCUS_KERNELS": "off"}
"""The time of a GPU is not for compiling what runs on the CPU."""
TRUSTED = {"SOFTFOCUS_TRITON": "trusted"}
"""The items compare the kernels with the reference themselves."""


def script(
    name: str,
    *arguments: str,
    dry: tuple[str, ...],
    limit: float,
    call: str = "",
    environment: Mapping[str, str] | None = None,
) -> Item:
    """One of the programs beside this file; it writes a line of JSON for each thing that it has
    done.
    """
    call = call or name
    shared = (str(HERE / f"{name}.py"), "--out", f"{{folder}}/{call}.jsonl")
    return Item(call, (*shared, *arguments), (*shared, *dry), limit, TRUSTED if environment is None else environment)


def pytest_of(name: str, files: str, *, dry: str, limit: float) -> Item:
    """Tests, eight at a time where pytest-xdist is there."""
    many = ("-n", "8") if importlib.util.find_spec("xdist") else ()
    common = ("-m", "pytest", "-v", "--no-header", "-p", "no:cacheprovider")
    paths = tuple(f"tests/core/test_{file}.py" for file in files.split())
    return Item(name, (*common, *many, "-m", "gpu and not slow", *paths), (*common, *paths, "-k", dry), limit)


def bench(name: str, cells: Benchmark, limit: float) -> Item:
    """Cells of a benchmark, a fifth of a second of timing each: inputs and parity take longer."""
    common = ("-m", "softfocus.lab", "bench", "--out", f"{{folder}}/{name}", "--seconds")
    tiny = cells._replace(lengths=(32,), whats=cells.whats[:1], mechanisms=("lssar",), memory=False)
    dry = (*common, "0", "--device", "cpu", "--heads", "1", "--threads", "1", *tiny.arguments)
    return Item(name, (*common, "0.2", "--device", "cuda", *cells.arguments), dry, limit, TRUSTED, cells)


BOTH = ("forward", "backward")
WARNINGS_ARE_ERRORS = {"PYTHONWARNINGS": "error:softfocus:RuntimeWarning"}
"""Of the check of the first calls, at the sizes of a real training."""
STAGES: dict[int, tuple[Item, ...]] = {
    1: (
        Item(
            "doctor",
            ("-m", "softfocus.lab", "doctor", "--json", "{folder}/doctor.json"),
            ("-m", "softfocus.lab", "doctor", "--json", "{folder}/doctor.json"),
            100,
            TRUSTED,
        ),
        script("sanitizer", dry=("--dry-run",), limit=150),
        bench("decode", Benchmark(("lssar", "softmax", "lssa", "laser(lssa)"), ("decode",), LONG_CACHES, 128), 70),
        bench("decode_narrow", Benchmark(("lssar", "softmax"), ("decode",), LONG_CACHES, 64), 40),
        script("first_calls", dry=("--dry-run",), limit=120),
    ),
    2: (
        script("compile_all", dry=("--dry-run",), limit=110),
        bench("wide_longer", Benchmark((*MECHANISMS, "laser(lssa)"), BOTH, (4096, 16384), 128), 110),
        bench("narrow", Benchmark(MECHANISMS, BOTH, (4096, 16384), 64), 90),
        bench("flex_wide", Benchmark(("lssar",), BOTH, (4096,), 128, ("sdpa", "softfocus", "flex")), 70),
        bench("memory", Benchmark(("lssar", "laser"), ("backward",), (16384,), 64, memory=True), 60),
        bench("flex_others", Benchmark(("lssa", "laser"), BOTH, (4096,), 64, ("sdpa", "softfocus", "flex")), 90),
        bench("lengths", Benchmark(MECHANISMS, BOTH, (1024, 2048, 8192, 32768), 64), 120),
        bench("flex", Benchmark(("lssar",), BOTH, (4096,), 64, ("sdpa", "softfocus", "flex")), 65),
    ),
    3: (
        script("tuned", dry=("--dry-run",), limit=90),
        script("training", dry=("--dry-run",), limit=120, call="training_checked", environment=WARNINGS_ARE_ERRORS),
        script("training", "--compile", dry=("--dry-run",), limit=250, call="training_compiled"),
    ),
    4: (
        script("fault", dry=("--dry-run",), limit=170),
        pytest_of("tests", "triton cache checked", dry="test_parity and lssa and causal", limit=250),
        bench("wide", Benchmark((*MECHANISMS, "laser(lssa)"), BOTH[1:], (4096,), 128), 75),
    ),
}


def covered(goal: Goal) -> Iterator[tuple[int, int, bool]]:
    """Of each (length, dimension of a head) of a goal whether a stage measures it."""
    for length, head_dim in product(goal.lengths, goal.head_dims):
        yield (
            length,
            head_dim,
            any(
                item.cells
                and (item.cells.head_dim, goal.mechanism in item.cells.mechanisms) == (head_dim, True)
                and goal.what in item.cells.whats
                and length in item.cells.lengths
                and goal.to in item.cells.subjects
                for items in STAGES.values()
                for item in items
            ),
        )


def run(item: Item, folder: Path, log: Path, limit: float, dry: bool) -> dict[str, Any]:
    """One item to its end or its limit; what it wrote, and how it ended."""
    words = [word.replace("{folder}", str(folder)) for word in (item.dry if dry else item.words)]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {**EVERYWHERE, **item.environment}
    if dry:
        environment |= {"TRITON_INTERPRET": "1", "SOFTFOCUS_TUNE": "off"}
    began = time.monotonic()
    with log.open("ab") as to:
        to.write(f"\n=== {item.name}: {' '.join(words)}\n".encode())
        to.flush()
        start = to.tell()
        process = subprocess.Popen(
            [sys.executable, *words], stdout=to, stderr=to, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            ended: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            _end(process)
    said = log.read_bytes()[start:].decode(errors="replace")
    found = {
        "item": item.name,
        "seconds": round(time.monotonic() - began, 1),
        "limit": round(limit, 1),
        "exit": "stopped at its limit" if ended is None else ended,
    }
    return found | _results(item, folder, said)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Nothing that an item started outlives it. One that a driver keeps alive even then is not
    waited for.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(DYING)


def _results(item: Item, folder: Path, said: str) -> dict[str, Any]:
    """What an item has left: lines of JSON, a document, or the outcome of its tests."""
    lines, document = folder / f"{item.name}.jsonl", folder / item.name / "results.json"
    if item.name == "doctor":
        document = folder / "doctor.json"
    if lines.exists():
        return {"results": [json.loads(line) for line in lines.read_text().splitlines() if line.endswith("}")]}
    if document.exists():
        try:
            return {"results": json.loads(document.read_text())}
        except json.JSONDecodeError:
            return {"tail": said[-2000:]}
    if "pytest" in item.words:
        words = ("PASSED", "FAILED", "ERROR", "SKIPPED")
        outcomes = [(word, line) for line in said.splitlines() for word in words if f" {word}" in f" {line}"]
        bad = sorted({line.strip() for word, line in outcomes if word in ("FAILED", "ERROR")})
        counts = {word.lower(): sum(one == word and "%]" in line for one, line in outcomes) for word in words}
        return {"tests": counts, "bad": bad, "tail": said[-2000:]}
    return {"tail": said[-2000:]}


def provenance() -> dict[str, Any]:
    """What it takes to believe the results."""
    code = (
        "import json, torch, triton, platform;"
        "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__, 'triton': "
        "triton.__version__,"
        "'device': torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU', 'cuda': "
        "torch.version.cuda}))"
    )
    versions: dict[str, Any] = json.loads(_said([sys.executable, "-c", code]) or "{}")
    return {"commit": _said(["git", "describe", "--always", "--dirty"]) or "unknown", **versions}


def _said(command: list[str]) -> str:
    """What a command prints; "" where it cannot."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
    return ""


def main(stage: int, out: Path, work: Path | None = None, dry: bool = False, seconds: float = SECONDS) -> int:
    """Run a stage.

    Args:
        stage: its number.
        out: the folder for its results and its log.
        work: the folder for what its items write; a folder of ``out`` if None.
        dry: without a GPU.
        seconds: of the whole stage.

    Returns:
        How many items did not end well.
    """
    began = time.monotonic()
    folder = (work or out / f"stage{stage}").resolve()
    for needed in (folder, out):
        needed.mkdir(parents=True, exist_ok=True)
    log, results = out.resolve() / f"stage{stage}.log", out.resolve() / f"stage{stage}.json"
    found: dict[str, Any] = {"stage": stage, "dry_run": dry, **provenance(), "items": []}
    for number, item in enumerate(STAGES[stage], 1):
        left = seconds - (time.monotonic() - began)
        if left < min(20.0, item.limit):
            found["items"].append({"item": item.name, "exit": "left out: no time"})
        else:
            print(f"[{number}/{len(STAGES[stage])}] {item.name}: {min(item.limit, left):.0f} s at most", flush=True)
            found["items"].append(run(item, folder, log, min(item.limit, left), dry))
            print(f"    exit {found['items'][-1]['exit']} after {found['items'][-1]['seconds']} s", flush=True)
        partial = results.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(results)
    print(summary(found))
    return sum(one["exit"] != 0 for one in found["items"])


def summary(found: dict[str, Any]) -> str:
    """The results in a few lines: the ratios of each cell, tests that failed, items that did not
    end.
    """
    lines = [f"stage {found['stage']} on {found.get('device')}, commit {found['commit']}"]
    for one in found["items"]:
        lines.append(f"{one['item']}: exit {one['exit']}")
        results = one.get("results")
        if "tests" in one:
            lines += [f"    {one['tests']}", *(f"    {line[:150]}" for line in one["bad"][:20])]
        elif isinstance(results, dict) and "cells" in results:
            for cell in results["cells"]:
                ratios = {who["name"]: round(who["ratio"]["median"], 3) for who in cell["subjects"] if who.get("ratio")}
                where = f"{cell['mechanism']} {cell['what']} {cell['length']}"
                lines.append(f"    {where}: parity {cell['parity']}, of sdpa's time {ratios}")
        elif isinstance(results, list):
            lines += [f"    {json.dumps(line)[:150]}" for line in results[:40]]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", type=int, choices=sorted(STAGES))
    parser.add_argument("--out", type=Path, default=Path("runs") / "gpu", help="the folder for results")
    parser.add_argument("--work", type=Path, help="the folder for what the items write (a folder of --out)")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, on tiny shapes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole stage")
    given = parser.parse_args()
    sys.exit(min(1, main(given.stage, given.out, given.work, given.dry_run, given.seconds)))
