"""A folder's files with their checksums: what is missing, cut off or changed is found before it is
used.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from softfocus.lab.run_folder.disk import write_atomically

MANIFEST = "manifest.json"


class File(BaseModel):
    """A file as it was written."""

    model_config = ConfigDict(extra="forbid")

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The files of a folder by their names."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(description="of the run that wrote them")
    files: dict[str, File] = Field(min_length=1)


def seal(folder: Path, token: str) -> None:
    """Write down the files of a folder that is complete, and the token of the run they belong
    to.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("r+b") as file:
            os.fsync(file.fileno())  # after a power cut there must be no manifest without its files
        files[path.name] = File(bytes=path.stat().st_size, sha256=digest(path))
    write_atomically(folder / MANIFEST, Manifest(token=token, files=files).model_dump_json(indent=2) + "\n")


def token_of(folder: Path) -> str | None:
    """The token of the run that wrote a folder; None where there is no manifest that can be
    read.
    """
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes()).token
    except (OSError, ValidationError):
        return None


def damage(folder: Path, token: str | None = None, tell: Callable[[float], None] = lambda share: None) -> str | None:
    """What is not as it was sealed, naming the file; None if all is.

    Args:
        folder: what was sealed.
        token: of the run that it has to belong to, if any.
        tell: called with the share of the bytes that have been looked at.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValidationError):
        return f"{MANIFEST} cannot be read"
    if token not in (None, manifest.token):
        return "it is of another training"
    files = manifest.files
    total, done = sum(file.bytes for file in files.values()), 0
    for name, file in files.items():
        try:
            if (size := (folder / name).stat().st_size) != file.bytes:
                return f"{name} has {size:,} bytes instead of {file.bytes:,}"
            if digest(folder / name) != file.sha256:
                return f"{name} is not as it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        done += file.bytes
        tell(done / max(1, total))
    return None


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
