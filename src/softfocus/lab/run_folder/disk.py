"""Files that are written whole or not at all, and what goes wrong there, whichever library writes
them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from softfocus.lab.errors import LabError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What freeing space helps against."""

PARTIAL = ".partial"
"""Ends the name of a file or folder that is being written: ".run.json.k3x.partial". A writer that
is killed leaves it.
"""


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in UTF-8 under a temporary name and rename it, so that a crash leaves the
    old file or none.

    What is no file, such as /dev/null, is written to as it is.

    Raises:
        LabError: the folder cannot be written to, or the disk is full.
    """
    # A path that this locale cannot spell has bytes that stand in for its letters; they are written
    # as they came
    data = text.encode("utf-8", "surrogateescape")
    with writing(path, "name a folder that can be written to, with space left on its disk"):
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL, delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                temporary.chmod(0o666 & ~_umask())  # a temporary file is private to its owner; a result is not
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise


def folder_bytes(folder: Path) -> int:
    """What the files in a folder take; 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a training that runs there deletes old checkpoints
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def size_text(size: int) -> str:
    """So many bytes, for people: "1.5 GB", "836 MB", "12.3 KB"."""
    for unit, count in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= 0.9995 * count:  # 999.6 KB would be rounded to 1,000 KB
            return f"{size / count:,.{0 if size >= 99.95 * count else 1}f} {unit}"
    return f"{size} byte{'s' * (size != 1)}"


def check_room(folder: Path, needed: int, use: str, remedy: str) -> None:
    """Refuse what a disk has no room for.

    Args:
        folder: on the disk; it need not be there yet.
        needed: bytes.
        use: what they are for, with {} for how many: "{} are needed".
        remedy: what to do.

    Raises:
        LabError: there is no room.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(there).free) < needed:
        what = f"{folder} has {size_text(free)} free, and {use.format(size_text(needed))}"
        raise LabError(what, remedy)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """While this is entered, a disk that is full or cannot be written to is a LabError."""
    try:
        yield
    except Exception as error:
        if (why := disk_error(error)) is None:
            raise
        raise LabError(f"cannot write {path}: {why.strerror or why}", remedy) from error


def disk_error(error: BaseException) -> OSError | None:
    """The OSError that an error is, or stands for; None where it is about something else.

    tokenizers raises a bare Exception and safetensors its own, both ending in "(os error 28)";
    torch.save raises a RuntimeError of its C++ writer, which keeps the reason to itself.
    """
    if isinstance(error, OSError):
        return error
    if code := re.search(r"\(os error (\d+)\)", str(error)):
        return OSError(int(code[1]), os.strerror(int(code[1])))
    if isinstance(error, RuntimeError) and re.search("PyTorchStreamWriter|unexpected pos", str(error), re.IGNORECASE):
        return OSError(errno.ENOSPC, "torch could not write all of it; the disk may be full")
    return None
