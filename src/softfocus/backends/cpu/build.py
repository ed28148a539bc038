"""The CPU kernels' library: compiled for this machine at first use, kept in a cache, loaded once
per process.

The sources in ``csrc/`` are plain C++17 with OpenMP pragmas. They include neither torch's headers
nor Python's, so that one library fits any Python. It must fit the processor, and is therefore
compiled here.
"""

import ctypes
import hashlib
import json
import os
import shlex
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from softfocus.backends.cpu.compile import compile_kernels, load, say
from softfocus.backends.cpu.plan import CACHE, Plan, Unavailable, compiler, plan, switched_off
from softfocus.warn import warn

__all__ = ["Built", "Unavailable", "build", "library", "state", "why_unavailable"]


class _NoCache(Unavailable):
    """The cache cannot be read or written. The process may still compile a library for itself."""


@dataclass(frozen=True)
class Built:
    """A compiled library: how it was compiled, how long that took, and whether it was compiled now
    or found in the cache.
    """

    library: Path
    compiler: str
    version: str
    flags: str
    seconds: float
    fresh: bool


# What library() found: the kernels, or why there are none; None before the first try
_outcome: tuple[Built, ctypes.CDLL] | Unavailable | None = None
_warned = False
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child forked while another thread compiles would wait for that thread for ever
    os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


def library() -> ctypes.CDLL:
    """The kernels, compiled at the first use on this machine. Safe to call from any thread.

    Raises:
        Unavailable: switched off; or they cannot be compiled or loaded, which is found out once per
            process.
    """
    global _outcome
    # Asked at every call of this function, because the switch may change. ops.runners does not ask:
    # a layout that it holds keeps its kernel (docs/limitations.md)
    if off := switched_off():
        raise off
    if _outcome is None:
        with _lock:
            if _outcome is None:
                try:
                    _outcome = _obtain()
                except Unavailable as error:
                    _outcome = error
    if isinstance(_outcome, Unavailable):
        raise _outcome
    return _outcome[1]


def why_unavailable(compiling: bool = True) -> str | None:
    """None where the kernels run, or the sentence that says why not; the first time also a
    RuntimeWarning.

    Args:
        compiling: whether to try to load the kernels, which may compile them. Otherwise no disk is
            touched, and None also stands for "not tried yet".
    """
    global _warned
    try:
        if off := switched_off():
            return str(off)
        if isinstance(_outcome, Unavailable) or (compiling and _outcome is None):
            library()
    except Unavailable as error:
        if not _warned:
            _warned = True  # first: where warnings are errors, the next line does not return
            warn(f"softfocus: attention on the CPU takes the slower tiled backend: {error}", RuntimeWarning)
        return str(error)
    return None


# As torch.compiler.assume_constant_result does, without importing the whole compiler. Under
# torch.compile the answer is a constant, and locks, processes and ctypes are not traced.
why_unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def build(force: bool = False) -> Built:
    """Compile ahead of time, and see that the result loads.

    Args:
        force: compile again what lies in the cache.

    Raises:
        Unavailable: no compiler, an error while compiling or loading, a cache that cannot be
            written to.
    """
    return _ready(plan(), force)[0]


def state() -> Built | None:
    """The library of this process, or else of the cache; None where it is not compiled yet.
    Compiles nothing.

    Raises:
        Unavailable: the kernels are switched off, this process could not compile or load them, or
            nothing is compiled and there is no compiler.
    """
    if off := switched_off():
        raise off
    if isinstance(_outcome, Unavailable):
        raise _outcome
    found = None
    with suppress(_NoCache):
        found = _outcome[0] if _outcome else _cached(plan())
    if not found:
        compiler()  # raises if there is none
    return found


def _obtain() -> tuple[Built, ctypes.CDLL]:
    planned = plan()
    try:
        return _ready(planned)
    except _NoCache as error:
        try:
            folder = Path(tempfile.mkdtemp(prefix="softfocus-kernels-"))
        except OSError:
            raise error from None
        say(f"softfocus: {error.what}, so the CPU kernels are compiled for this process alone; {error.remedy}")
        built = _ready(replace(planned, folder=folder))
        shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays loaded. After an error the log stays
        return built


def _ready(planned: Plan, force: bool = False) -> tuple[Built, ctypes.CDLL]:
    """From the cache, or compiled into it."""
    if not force and (found := _load_cached(planned)):
        return found
    command_and_version = compiler()
    with _locked(planned.folder):
        # Another process may have compiled it while this one waited
        return (None if force else _load_cached(planned)) or _compile(planned, *command_and_version)


def _load_cached(planned: Plan) -> tuple[Built, ctypes.CDLL] | None:
    with suppress(OSError):  # one that does not load is compiled again
        return (found, load(found.library)) if (found := _cached(planned)) else None
    return None


def _cached(planned: Plan) -> Built | None:
    """A library with the checksum that was written: one cut short by a full disk would crash the
    process.

    Whoever can write a library can write its checksum, and its code runs as the user who loads it.
    A library that another user can write is therefore not loaded.

    Raises:
        _NoCache: others own the folder, or may write to it.
    """
    _refuse_others(planned.folder)
    try:
        files = [file.stat() for file in (planned.library, planned.about)]
        if any(_another_owner(file) or _open_to_others(file) for file in files):
            return None
        about = json.loads(planned.about.read_text())
        if about.pop("sha256") != _checksum(planned.library):
            return None
        return Built(planned.library, fresh=False, **about)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _another_owner(found: os.stat_result) -> str:
    """Which other user a file or a folder belongs to; empty for our own and for root's: root may do
    anything anyway.
    """
    return "" if found.st_uid in (0, os.getuid()) else f"belongs to another user (uid {found.st_uid})"


def _open_to_others(found: os.stat_result) -> str:
    """Whether others may write to a file or a folder, with its mode; empty if not."""
    if not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return ""
    return f"can be written to by others (mode {stat.S_IMODE(found.st_mode):03o})"


def _refuse_others(folder: Path) -> None:
    """Neither the folder nor the cache around it may be others' to write. A folder that is not
    there is fine.
    """
    for path in (folder.parent, folder):
        try:
            found = path.stat()
        except OSError:
            continue
        # Others may write to a sticky folder such as /tmp, but only a file's owner can move or
        # remove it
        sticky = path == folder.parent and found.st_mode & stat.S_ISVTX
        why = _another_owner(found) or ("" if sticky else _open_to_others(found))
        if why:
            remedy = f"remove it, or let {CACHE} name a folder that is yours alone"
            raise _NoCache(f"the folder of compiled kernels {path} {why}", remedy)


def _make(folder: Path) -> None:
    """Create a folder and those above it, closed to others whatever the umask."""
    if not folder.is_dir():
        _make(folder.parent)
        with suppress(FileExistsError):  # another process was faster, or a file is in the way, which shows next
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time compile into the folder.

    Raises:
        _NoCache: the folder cannot be written to. An OSError of the body, such as a full disk, is
            _NoCache too.
    """
    from filelock import FileLock, Timeout

    try:
        _make(folder)
        _refuse_others(folder)
        lock = FileLock(folder / "lock")  # the operating system lets go of it when its process dies
        try:
            held = lock.acquire(timeout=0.2)
        except Timeout:
            say("softfocus: waiting for another process that compiles the CPU kernels ...")
            held = lock.acquire()
        with held:
            yield
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        why = getattr(error, "strerror", None) or error
        remedy = f"let {CACHE} name a folder that can be written to"
        raise _NoCache(f"cannot write to {folder.parent}: {why}", remedy) from error


def _compile(planned: Plan, command: tuple[str, ...], version: str) -> tuple[Built, ctypes.CDLL]:
    """Compile in a temporary folder inside the cache's, then rename: a process that is killed at
    any moment leaves no library that looks complete and is not.
    """
    for left in planned.folder.glob("building-*"):
        # Of a process that died. Its compilers may live on: they write into their own folder, not
        # into the next one's
        shutil.rmtree(left, ignore_errors=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="building-", dir=planned.folder, ignore_cleanup_errors=True) as name:
        library_file, about_file = Path(name, planned.library.name), Path(name, planned.about.name)
        kernels = compile_kernels(planned, command, Path(name))
        if plan().digest != planned.digest:
            raise Unavailable("the CPU kernels' sources changed while they were compiled", "start again")
        about: dict[str, Any] = {
            "compiler": shlex.join(command), "version": version, "flags": shlex.join(planned.flags),
            "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip
        about_file.write_text(json.dumps({**about, "sha256": _checksum(library_file)}, indent=2) + "\n")
        library_file.chmod(0o700)  # not what the umask left: a file that others can write is not loaded
        about_file.chmod(0o600)
        os.replace(library_file, planned.library)
        os.replace(about_file, planned.about)
    return Built(planned.library, fresh=True, **about), kernels
