"""What goes wrong when files are written, whichever library writes them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from softfocus.lab.errors import LabError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What freeing space helps against."""


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

    tokenizers raises a bare Exception and safetensors its own, both ending in "(os error 28)"; torch.save raises a
    RuntimeError of its C++ writer, which keeps the reason to itself.
    """
    if isinstance(error, OSError):
        return error
    if code := re.search(r"\(os error (\d+)\)", str(error)):
        return OSError(int(code[1]), os.strerror(int(code[1])))
    if isinstance(error, RuntimeError) and re.search("PyTorchStreamWriter|unexpected pos", str(error), re.IGNORECASE):
        return OSError(errno.ENOSPC, "torch could not write all of it; the disk may be full")
    return None
