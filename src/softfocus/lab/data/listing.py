"""The files that a source names, and what of it is not read."""

from __future__ import annotations

import fnmatch
import glob
import os
import random
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from softfocus.lab.errors import LabError

STDLIB = "stdlib"
HUB = "hub:"
FINEWEB = "fineweb10B"
"""The folder of shards that the recipes of the scale gpt2 read."""
FETCH_FINEWEB = "hf download kjj0/fineweb10B-gpt2 --repo-type dataset"

_STDLIB_BYTES = 16 * 1024  # a shorter source holds no window that is long enough to evaluate on
_STDLIB_LEAST = 1_000_000  # characters; below it, Python came without its sources
_NO_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class LeftOut:
    """What of a source is not read: by kind, how many there are, and where the first of them is."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, where: object, count: int = 1) -> None:
        """Count some."""
        before, first = self._found.get(kind, (0, str(where)))
        self._found[kind] = before + count, first

    def clear(self, kind: str) -> None:
        """Forget a kind."""
        self._found.pop(kind, None)

    @property
    def text(self) -> str:
        """In one line; "" where nothing was left out."""
        return "; ".join(f"{kind}: {count:,} (the first: {first})" for kind, (count, first) in self._found.items())


def files(source: str, left_out: LeftOut) -> list[Path]:
    """The files at a path or glob, folders searched to the bottom, hidden ones not looked at,
    sorted, each once.

    Raises:
        LabError: there are none, or a folder cannot be read.
    """
    path = Path(source).expanduser()
    os.fsencode(path)  # a name that this locale cannot spell would look like a file that is not there
    try:
        if path.is_file():
            return [path]
        if path.is_dir():
            found = _expand(path, ["**"], left_out)
            what, remedy = f"the folder {source} holds no file", "put text, .jsonl or .parquet files there"
        else:
            top = Path(path.anchor)
            found = _expand(top, path.relative_to(top).parts, left_out)
            what, remedy = f"there is no file or folder {source}", f"check the path, or use '{STDLIB}' or '{HUB}NAME'"
            if path.name == FINEWEB:
                remedy = f"fetch its 20 GB with `{FETCH_FINEWEB} --local-dir {source}`, or check the path"
        kept = _kept(sorted(found), left_out)
    except OSError as error:  # a folder that is closed to us, a name that is too long
        raise _closed(source, error) from error
    if not kept:
        raise LabError(what, remedy)
    return kept


def _expand(folder: Path, parts: Sequence[str], left_out: LeftOut) -> Iterator[Path]:
    """What a glob matches below a folder, as `glob.glob` would have it, with two exceptions.

    "**" follows no links to folders, which may lead in circles. A folder that cannot be read is an
    OSError.
    """
    if not parts:
        yield folder
        return
    part, *rest = parts
    if not glob.has_magic(part):
        yield from _expand(folder / part, rest, left_out)
    elif not folder.is_dir():
        return
    elif part == "**":
        for parent, names in _walk(folder, left_out=left_out):
            yield from _expand(parent, rest, left_out) if rest else (parent / name for name in names)
    else:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if fnmatch.fnmatch(entry.name, part)]
        for name in names:
            if not name.startswith(".") or part.startswith("."):
                yield from _expand(folder / name, rest, left_out)


def _kept(found: list[Path], left_out: LeftOut) -> list[Path]:
    """The files among the paths that a glob matched, each once: a second name of a document could
    be held out.
    """
    known: dict[Path, Path] = {}
    folders = []
    for path in found:
        if path.is_dir():
            folders.append(path)
        elif not path.is_file():
            if path.is_symlink() or path.exists():  # else a name without wildcards that is not there
                left_out.add("broken links and special files", path)
        elif known.setdefault(path.resolve(), path) != path:
            left_out.add("second names of files", path)
    searched = {parent for path in known.values() for parent in path.parents}
    for folder in folders:
        if folder not in searched:
            left_out.add("folders that match (end the pattern with ** for their files)", folder)
    return list(known.values())


def _walk(
    folder: Path, without: Collection[str] = (), left_out: LeftOut | None = None
) -> Iterator[tuple[Path, list[str]]]:
    """Each folder at or below one with the names of its files, without what is hidden or has one of
    the names.

    Raises:
        OSError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave the folder out

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        for name in folders:
            if left_out is not None and os.path.islink(os.path.join(parent, name)):
                left_out.add("links to folders", Path(parent, name))
        yield Path(parent), [name for name in names if not name.startswith(".")]


def stat(path: Path) -> tuple[int, int]:
    """What changes with a file: its size, and when it was written.

    Raises:
        LabError: it is not there any more.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}", "get the file anew, or leave it out") from error
    return found.st_size, found.st_mtime_ns


def standard_library(seed: int) -> list[Path]:
    """The sources of this Python's standard library over 16 KB, in an order that the seed decides.

    Raises:
        LabError: there are next to none, or a folder cannot be read.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        walked = _walk(folder, _NO_LIBRARY) if folder.is_dir() else ()
        sources = sorted(parent / name for parent, names in walked for name in names if name.endswith(".py"))
    except OSError as error:
        raise _closed(STDLIB, error) from error
    found = [path for path in sources if path.stat().st_size > _STDLIB_BYTES]
    if sum(path.stat().st_size for path in found) < _STDLIB_LEAST:
        raise LabError(
            f"this Python has next to no sources of its standard library: {len(found)} files over 16 KB in {folder}",
            "name a file or folder of text as the corpus, or use a Python that was installed with its sources",
        )
    random.Random(seed).shuffle(found)
    return found


def _closed(source: str, error: OSError) -> LabError:
    where = f" ({error.filename})" if error.filename not in (None, source) else ""
    remedy = "check the path and who may read it, or name the files to read with a glob"
    return LabError(f"cannot look for {source}: {error.strerror}{where}", remedy)
