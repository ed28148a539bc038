"""What the programs of the stages share: lines of JSON that are written as they come, and their command line."""

import argparse
import json
from collections.abc import Callable
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
