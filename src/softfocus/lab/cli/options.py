"""Options that several commands take, and where their results go."""

from pathlib import Path
from typing import Annotated, Any

import typer

from softfocus.lab.errors import UsageError

SEEDS = 2**32
"""A seed is below this: NumPy takes no larger one."""

BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens a forward pass: lower it if memory is short.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as `softfocus train` makes it.")]


def seeds_of(text: str) -> list[int]:
    """ "0,1,2".

    Raises:
        UsageError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 10 and int(part) < SEEDS for part in parts):
        raise UsageError(f"--seeds: {text!r} is not a list of whole numbers below 2^32", "write it like 0,1,2")
    return list(dict.fromkeys(map(int, parts)))


def takes_stdout(json: Path | None) -> bool:
    """Whether --json writes to stdout."""
    return json is not None and str(json) == "-"


def console_beside(json: Path | None) -> Any:
    """A console for what is said to people: stderr where --json has stdout."""
    from rich.console import Console

    aside = takes_stdout(json)
    console = Console(stderr=aside)
    # Into a file or a pipe nothing is cut off to fit a terminal that is not there
    return console if console.is_terminal else Console(stderr=aside, width=200)


def print_table(table: Any, *files: Path) -> None:
    """Print what rich can draw to stdout, and the files that hold it."""
    from softfocus.lab.progress import say

    console = console_beside(None)
    console.print(table)
    for file in files:
        say(console, f"  {file}")


def write_json(path: Path | None, result: Any) -> bool:
    """Write what pydantic can dump where --json says. Whether it did so to stdout, where a table
    would be in the way.
    """
    if path is None:
        return False
    from softfocus.lab.run_folder.disk import write_atomically
    from softfocus.lab.run_folder.results import json_text

    text = json_text(result)
    if takes_stdout(path):
        typer.echo(text, nl=False)
        return True
    write_atomically(path, text)
    return False
