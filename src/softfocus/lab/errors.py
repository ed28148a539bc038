"""The one error that the lab shows to people."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class LabError(Exception):
    """Something that the reader of the command line can put right: a missing file, a misspelt
    field, a full disk.

    `str(error)` is one line, "what; remedy": what is wrong with which thing, then what to do about
    it. The command line prints that line and leaves with exit code 1; anything that is not a
    LabError is a bug and keeps its traceback.

    Args:
        what: what is wrong, naming the thing ("corpus.jsonl, line 3: no field 'text'").
        remedy: what to do about it ("name the field with text_field").
    """

    exit_code = 1

    def __init__(self, what: str, remedy: str) -> None:
        # Both go to Exception, so that the error survives pickling between processes
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return " ".join(f"{self.what}; {self.remedy}".split())


class UsageError(LabError):
    """Wrong use: an option of the command line that cannot be read. A LabError is a failure."""

    exit_code = 2


class Diverged(LabError):
    """Training has diverged. That is a result: the same recipe diverges again."""


class Interrupted(LabError):
    """Somebody stopped the work. The remedy says how to go on with it."""


def first_line(error: BaseException) -> str:
    """What a library's error says, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def first_mistake(error: ValidationError) -> str:
    """The first thing that pydantic found wrong, in one line: "train.steps: Field required"."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), message)))


def did_you_mean(word: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """A remedy for a misspelt name: the nearest one that exists, or else what is said otherwise."""
    near = get_close_matches(word, list(known), n=1)
    return f"did you mean {prefix + near[0]!r}?" if near else otherwise
