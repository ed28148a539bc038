"""What the programs of the stages share: lines of JSON that are written as they come, processes,
and their command line.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def writer(path: Path) -> Callable[..., None]:
    """A function that writes its keywords as one line of JSON, at once, and prints it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")

    def write(**line: Any) -> None:
        text = json.dumps(line)
        with path.open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)

    return write


def arguments(description: str | None, *flags: str) -> argparse.Namespace:
    """--out FILE, --dry-run, and some flags."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="a file of lines of JSON")
    for flag in ("--dry-run", *flags):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def each_alone(function: Callable[..., dict[str, Any]], tasks: Sequence[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """What ``function(*task)`` gives, as it comes: many at a time, each in a process of its own.

    An error of the device leaves a process unable to use it, and a crash ends it: neither is to
    cost the other tasks.
    """

    def single(task: tuple[Any, ...]) -> dict[str, Any]:
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                return pool.submit(function, *task).result()
        except BrokenProcessPool:
            return {"task": repr(task), "said": "its process died"}

    with ThreadPoolExecutor(min(len(tasks), max(1, (os.cpu_count() or 2) - 2))) as threads:
        for done in as_completed([threads.submit(single, task) for task in tasks]):
            yield done.result()
