"""Who writes into a run folder: one process at a time, and the others are told which."""

import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from softfocus.lab.errors import LabError
from softfocus.lab.run_folder.disk import PARTIAL, write_atomically

LOCK = ".lock"
"""Is locked while a process owns the folder. The operating system lets go of it when that process
dies.
"""
OWNER = ".owner.json"
"""Says which process that is, and is there no longer than the process owns the folder."""

_log = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds; whoever only asks who owns a folder holds its lock for a moment


class Displaced(LabError):
    """Another process has taken the folder over, so nothing more may be written there."""


class Owner(BaseModel):
    """A process that owns a folder."""

    host: str
    process: int
    since: datetime

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since:%Y-%m-%d %H:%M:%S} UTC"

    @property
    def is_gone(self) -> bool:
        """Whether it ran on this machine and does no more. A process of another machine may run or
        not.
        """
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it is another user's
            return False
        return False

    def check(self, folder: Path) -> None:
        """See that the folder is still this process's own.

        The lock alone does not say so. Somebody may have deleted the folder and made it again while
        this process was stopped, and some file systems have locks that other machines do not see.

        Raises:
            Displaced: it is not.
        """
        if (now := _recorded(folder)) != self:
            who = f"belongs to another process now: {now}" if now else "was deleted or replaced by something else"
            raise Displaced(f"{folder} {who}", "nothing more was written to it; choose another folder with --out")


@contextmanager
def owning(folder: Path, *, wait: bool = False) -> Iterator[Owner]:
    """While this is entered no other process owns the folder. What a writer that was killed left
    there is cleaned up.

    Args:
        folder: is there already.
        wait: for another process that owns it; else that is an error.

    Raises:
        LabError: another process owns the folder, or it cannot be written to.
    """
    lock = FileLock(folder / LOCK)
    try:
        try:
            held = lock.acquire(timeout=_PATIENCE)
        except Timeout:
            if not wait:
                raise _in_use(folder, _holder(folder)) from None
            _log.warning("%s is in use by %s: waiting", folder, _holder(folder))
            held = lock.acquire()
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        why = getattr(error, "strerror", None) or error
        raise LabError(
            f"cannot lock {folder}: {why}", "choose a folder that you can write to, on another disk"
        ) from error
    with held:
        owner = Owner(host=socket.gethostname(), process=os.getpid(), since=datetime.now(UTC))
        write_atomically(folder / OWNER, owner.model_dump_json() + "\n")
        for left in folder.glob(f".*{PARTIAL}"):
            with suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield owner
        finally:
            if _recorded(folder) == owner:
                (folder / OWNER).unlink(missing_ok=True)


def holder(folder: Path) -> str | None:
    """The process that owns a folder, for a sentence; None where there is none."""
    if not (folder / LOCK).exists():
        return None
    try:
        with FileLock(folder / LOCK).acquire(timeout=0):
            return None
    except Timeout:
        return _holder(folder)
    except (OSError, NotImplementedError):  # we may not write there; the record is all there is to go by
        return str(found) if (found := _recorded(folder)) and not found.is_gone else None


def refuse_in_use(folder: Path) -> None:
    """For work that makes a folder its own only later.

    Raises:
        LabError: another process owns it.
    """
    if who := holder(folder):
        raise _in_use(folder, who)


def _in_use(folder: Path, who: str) -> LabError:
    return LabError(f"{folder} is in use by {who}", "wait until that is done, or stop it; then run this again")


def _holder(folder: Path) -> str:
    return str(_recorded(folder) or "another process")


def _recorded(folder: Path) -> Owner | None:
    with suppress(OSError, ValidationError):
        return Owner.model_validate_json((folder / OWNER).read_bytes())
    return None
