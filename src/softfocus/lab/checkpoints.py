"""Checkpoints: whole with checksums, or not there; and the newest one that is still as it was written."""

import hashlib
import logging
import os
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from softfocus.lab.errors import LabError
from softfocus.lab.progress import Event, Listener
from softfocus.lab.results import CHECKPOINTS, json_text, write_atomically

MANIFEST = "manifest.json"

UNFINISHED = ".unfinished"
"""A folder beside the checkpoints, in which one is written until it is whole."""

_log = logging.getLogger(__name__)


class File(BaseModel):
    """A file as it was written."""

    model_config = ConfigDict(extra="forbid")

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The files of a checkpoint by their names. It is written after all of them."""

    model_config = ConfigDict(extra="forbid")

    files: dict[str, File] = Field(min_length=1)


def keep(written: Path, before: Path | None) -> Path:
    """Make a checkpoint of a folder that Trainer has written, and delete all others but one.

    Args:
        written: the folder, in `UNFINISHED`.
        before: the checkpoint that the run comes from; it stays, should something happen to the new one.

    Returns:
        The checkpoint.
    """
    files = {}
    for path in sorted(written.iterdir()):
        with path.open("r+b") as file:
            os.fsync(file.fileno())  # after a power cut there must be no manifest without its files
        files[path.name] = File(bytes=path.stat().st_size, sha256=_digest(path))
    write_atomically(written / MANIFEST, json_text(Manifest(files=files)))
    checkpoint = place(written)
    shutil.rmtree(checkpoint, ignore_errors=True)  # a damaged one, which the run went back from
    written.rename(checkpoint)
    for other in _all(checkpoint.parent):
        if other not in (checkpoint, before):
            shutil.rmtree(other, ignore_errors=True)
    return checkpoint


def place(written: Path) -> Path:
    """Where a checkpoint lies that was written to a folder in `UNFINISHED`."""
    return written.parent.parent / written.name


def clear_unfinished(folder: Path) -> None:
    """Delete what is left of a checkpoint of a run folder that was never finished."""
    shutil.rmtree(folder / CHECKPOINTS / UNFINISHED, ignore_errors=True)


def newest(folder: Path, run: str, listener: Listener) -> Path | None:
    """The newest checkpoint of a run folder that is as it was written; None where there is none at all.

    A newer one that is damaged is named in a warning.

    Args:
        folder: the run folder.
        run: the run's name, for the listener.
        listener: told how far the checking is.

    Raises:
        LabError: there are checkpoints, and all of them are damaged.
    """
    damaged: list[str] = []
    for checkpoint in _all(folder / CHECKPOINTS):
        why = _flaw(checkpoint, run, listener)
        if why is None:
            if damaged:
                _log.warning("%s goes on from %s: %s", folder, checkpoint.name, ", ".join(damaged))
            return checkpoint
        damaged.append(f"{checkpoint.name} is damaged ({why})")
    if damaged:
        raise LabError(
            f"{folder} has no checkpoint to go on from: {', '.join(damaged)}",
            "put the files back as they were, or start again with --overwrite",
        )
    return None


def _all(folder: Path) -> list[Path]:
    """The newest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: -int(steps[path]))


def _flaw(checkpoint: Path, run: str, listener: Listener) -> str | None:
    """What is wrong with a checkpoint, naming the file."""
    try:
        manifest = Manifest.model_validate_json((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValidationError):
        return f"{MANIFEST} cannot be read"
    total = max(1, sum(file.bytes for file in manifest.files.values()))
    done = 0
    for name, file in manifest.files.items():
        share = round(100 * done / total)
        listener(Event(kind="prepare", run=run, message=f"checking {checkpoint.name}", done=share, total=100))
        try:
            if (size := (checkpoint / name).stat().st_size) != file.bytes:
                return f"{name} has {size:,} bytes instead of {file.bytes:,}"
            if _digest(checkpoint / name) != file.sha256:
                return f"{name} is not as it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        done += file.bytes
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
