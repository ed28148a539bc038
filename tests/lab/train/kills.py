"""Trains while being killed: at random points, anew after each kill, until it is through; and the
weights must be the same.

python kills.py RECIPE FOLDER KILLS SEED

A program and not a test, so that it can fork: it has imported everything, and started no threads.
"""

import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from softfocus.lab.progress import Event
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import MODEL, RECIPE, RUN, load_run
from softfocus.lab.train.run import train


def attempt(recipe: Path, run: Path, points: Path | None = None, at: int | None = None, size: int | None = None) -> int:
    """Go on with a run in a process of its own. Returns the signal that killed it, 0 where it came
    to its end.

    Args:
        recipe: of the run.
        run: its folder.
        points: a file to write down how many points the process passed: whenever it touched the
            run's files, and steps.
        at: the point at which it is killed.
        size: it is killed when a file becomes larger, so that a part of it is written.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            sys.exit(f"{run} failed")
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    try:
        passed = _count_points(run, at)
        if size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        train(load(recipe), run, resume=True, progress=lambda event: passed(event))
        if points is not None:
            points.write_text(str(passed(None) - 1))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _count_points(run: Path, at: int | None) -> Callable[[Event | None], int]:
    count = 0

    def passed(event: Event | None) -> int:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(str(run)):
            passed(None)

    sys.addaudithook(hook)
    return passed


def main(recipe: Path, folder: Path, kills: int, seed: int) -> None:
    """Train undisturbed, and then run after run until there were as many kills as asked for."""
    draw = random.Random(seed)
    whole, points = folder / "whole", folder / "points"
    attempt(recipe, whole, points)
    largest = max(path.stat().st_size for path in whole.rglob("*"))
    done = runs = 0
    while done < kills:
        runs += 1
        run = folder / f"run{runs}" / "whole"  # the same name: it is in run.json
        run.parent.mkdir()
        while True:
            if done == kills:
                killed = attempt(recipe, run)
            elif draw.random() < 0.3:
                killed = attempt(recipe, run, size=draw.randrange(largest))
            else:
                killed = attempt(recipe, run, at=draw.randint(1, int(points.read_text())))
            if not killed:
                break
            done += 1
        name = Path(MODEL) / "model.safetensors"
        if (run / name).read_bytes() != (whole / name).read_bytes():
            sys.exit(f"{run} has other weights")
        if load_run(run).train_loss != load_run(whole).train_loss:
            sys.exit(f"{run} has other losses")
        if files(run) != files(whole):
            sys.exit(f"{run} has other files: {sorted(files(run) ^ files(whole))}")
    print(f"{done} kills in {runs} runs with seed {seed}: the same weights and losses")


def files(run: Path) -> set[str]:
    """What a run has left behind, but for the curves (each start has a file of its own) and
    half-written JSON.
    """
    found = {str(path.relative_to(run)) for path in run.rglob("*") if "tensorboard" not in path.parts}
    return {name for name in found if not name.startswith((f".{RUN}.", f".{RECIPE}."))}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
