"""One of several models, in a process of its own: train, measure, and tell the parent by lines of
JSON on stdout.

python -m softfocus.lab.studies.worker RECIPE FOLDER
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TextIO

from softfocus.lab.allocator import keep_freed_memory
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.rope import scale_rope
from softfocus.lab.progress import Event, Listener
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import (
    INSPECTION,
    MODEL,
    RECIPE,
    load_run,
    refuse_file,
    to_train_again,
    write_recipe,
)
from softfocus.lab.run_folder.owner import LOCK, owning
from softfocus.lab.run_folder.results import Rope, Row, Setting

Phase = Literal["train", "evaluate"]


def to_line(phase: Phase, event: Event) -> str:
    """An event as one line of JSON; NaN goes through as Python's json writes and reads it."""
    row = event.row.model_dump() if event.row else None
    return json.dumps({"phase": phase, "event": asdict(event) | {"row": row}})


def from_line(line: str) -> tuple[Phase, Event] | str:
    """What a worker said: an event with its phase, or the message of the error that stopped it."""
    message: dict[str, Any] = json.loads(line)
    if "error" in message:
        return str(message["error"])
    fields = message["event"]
    row = Row.model_validate(fields["row"]) if fields["row"] else None
    return message["phase"], Event(**fields | {"row": row})


def main(arguments: list[str] | None = None) -> int:
    """Run the worker; the exit code is 1 when the model failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a shipped name or a TOML file")
    parser.add_argument("folder", type=Path, help="the run folder")
    options = parser.parse_args(arguments)
    out = _own_stdout()
    keep_freed_memory()
    try:
        options.folder.parent.mkdir(parents=True, exist_ok=True)
        if _is_first() and (options.folder / LOCK).exists():
            with owning(options.folder, wait=True):
                pass  # a worker whose parent was killed may still have been writing its checkpoint
        _work(options.recipe, options.folder, out)
    except LabError as error:
        return _fail(out, str(error))
    except KeyboardInterrupt:
        return _fail(out, "interrupted")
    except Exception as error:  # a bug, or a library's: the log has the traceback, the parent one line
        traceback.print_exc()
        return _fail(out, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return 0


def _work(name: str, folder: Path, out: TextIO) -> None:
    # torch and Transformers take seconds to import, so the arguments are checked first
    refuse_file(folder)
    from softfocus.lab.evaluate.loss import evaluate
    from softfocus.lab.evaluate.recall import recall
    from softfocus.lab.evaluate.samples import evaluate_samples
    from softfocus.lab.recipes.lengths import parse
    from softfocus.lab.recipes.loading import load
    from softfocus.lab.train.run import train

    recipe = load(name)
    train(recipe, folder, resume=True, progress=_teller("train", out))
    if not _is_first():
        return
    lengths, tell = parse(recipe.evaluate.lengths, recipe.train.length), _teller("evaluate", out)
    if recipe.data.kind == "task":
        recall(folder, lengths, progress=tell)
    elif recipe.data.kind == "text":
        # All runs of a study read the same text, whatever one of them was evaluated on by hand
        asked = recipe.evaluate.tokens
        evaluate(
            folder, lengths, settings=possible_settings(recipe, folder), tokens=asked, span=max(lengths), progress=tell
        )
        if "attention" in recipe.evaluate.also:
            from softfocus.lab.inspect.report import write
            from softfocus.lab.inspect.run import inspect

            write([inspect(folder, [recipe.train.length, max(lengths)], progress=tell)], folder / INSPECTION)
        if "classification" in recipe.evaluate.also:
            from softfocus.lab.evaluate.classify import classify

            classify(folder, progress=tell)
        if "induction" in recipe.evaluate.also:
            from softfocus.lab.evaluate.induction import induction

            induction(folder, lengths, tokens=asked, progress=tell)
        if "passkeys" in recipe.evaluate.also:
            recall(folder, passkey_lengths(recipe, lengths), progress=tell)
        if "tasks" in recipe.evaluate.also:
            from softfocus.lab.evaluate.tasks import answer

            answer(folder, progress=tell)
    else:
        evaluate_samples(folder, tokens=recipe.evaluate.tokens, progress=tell)
    with owning(folder):
        # An earlier call may have asked for other text; what was measured now is told by the recipe
        before, now = load(folder / RECIPE).evaluate, recipe.evaluate
        if (before.tokens, before.lengths) != (now.tokens, now.lengths):
            write_recipe(folder, recipe.to_toml(), load_run(folder).token)


def passkey_lengths(recipe: Recipe, lengths: Sequence[int]) -> list[int]:
    """Where a run of a text is asked for passkeys: at the lengths of its losses. If the training
    length is one of them, also at 1.5 times it, for which the softplus paper has a number.
    """
    own = recipe.train.length
    return sorted({*lengths, own * 3 // 2}) if own in lengths else list(lengths)


def possible_settings(recipe: Recipe, folder: Path) -> tuple[Setting, ...]:
    """What can be measured of a run: the recipe's settings, without scalings of RoPE that its model
    cannot have.

    Raises:
        LabError: the configuration of its model is damaged.
    """
    path = folder / MODEL / "config.json"
    if recipe.data.kind != "text" or not path.exists():
        return tuple(recipe.settings)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config["model_type"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        what = f"the model in {path.parent} is damaged ({path.name} cannot be read)"
        raise LabError(what, f"put the file back as it was, or train it again with {to_train_again(folder)}") from None
    can = {rope: _scales(config, rope) for rope in {setting.rope for setting in recipe.settings}}
    return tuple(setting for setting in recipe.settings if can[setting.rope])


def _scales(config: dict[str, Any], rope: Rope) -> bool:
    """Whether the rotary embedding of a model of a configuration can be scaled so."""
    try:
        scale_rope(SimpleNamespace(**deepcopy(config)), rope, 1, 1)
    except LabError:
        return False
    except AttributeError:  # it has other names for its sizes; the evaluation knows them
        return True
    return True


def _is_first() -> bool:
    """Whether this is the only process, or of several under torchrun the one that measures and
    speaks.
    """
    return os.environ.get("RANK", "0") == "0"


def _teller(phase: Phase, out: TextIO) -> Listener:
    return lambda event: _say(out, to_line(phase, event))


def _fail(out: TextIO, message: str) -> int:
    print(message, file=sys.stderr)
    if _is_first():
        _say(out, json.dumps({"error": message}))
    return 1


def _say(out: TextIO, line: str) -> None:
    try:
        out.write(line + "\n")
        out.flush()
    except OSError:
        # The parent is gone, so nobody waits for this: end as on a request to stop, which keeps a
        # checkpoint
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        os.kill(os.getpid(), signal.SIGTERM)


def _own_stdout() -> TextIO:
    """Keep stdout for the lines to the parent; whatever a library prints goes to the log with
    stderr.
    """
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


if __name__ == "__main__":
    sys.exit(main())
