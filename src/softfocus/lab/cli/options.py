"""Options that several commands take, and where their results go."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

SEEDS = 2**32
"""A seed is below this: NumPy takes no larger one."""

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for stdout.")]


def beside(json: Path | None) -> Any:
    """A console for what is said to people: stderr where --json has stdout."""
    from rich.console import Console

    aside = json is not None and str(json) == "-"
    console = Console(stderr=aside)
    # Into a file or a pipe nothing is cut off to fit a terminal that is not there
    return console if console.is_terminal else Console(stderr=aside, width=200)


def write_json(path: Path | None, result: "BaseModel | Sequence[BaseModel]") -> bool:
    """Write where --json says. Whether it did so to stdout, where a table would be in the way."""
    if path is None:
        return False
    from softfocus.lab.run_folder.disk import write_atomically
    from softfocus.lab.run_folder.results import json_text

    text = json_text(result)
    if str(path) == "-":
        typer.echo(text, nl=False)
        return True
    write_atomically(path, text)
    return False
