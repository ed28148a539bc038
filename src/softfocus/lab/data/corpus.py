"""A source, in one string, to its documents: the standard library, files and folders, or a dataset
of the hub.

stdlib                           the sources of this Python's standard library
path/to/file, folder, "*.txt"    text, JSONL and parquet, mixed; .gz, .xz and .zst are unpacked
hub:NAME[:CONFIG][#SPLIT]        streamed with `datasets`: hub:HuggingFaceFW/fineweb:sample-10BT
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from softfocus.lab.data.listing import HUB, STDLIB, LeftOut, files, standard_library, stat
from softfocus.lab.errors import LabError, first_line

JSON_LINES = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".xz", ".zst")

_PIECE = 1 << 20  # characters of a text file that make one document at most: what is held in memory at once
_SNIFF = 1 << 16  # bytes that tell text from anything else

_NO_TEXT, _NOT_TEXT, _EMPTY = "documents without text", "files that are not UTF-8 text", "empty files"


class Corpus:
    """The documents of a source, in an order that is the same every time. Iterate as often as
    needed.

    A text file is one document; one of more than 1 Mi characters is cut at line ends into documents
    of about that length, so that memory stays bounded. A line of JSONL, or a row of parquet, is a
    document. In a folder hidden files are not looked at. A file that is named outright has to be
    text, and .json is then read as JSONL.

    Whatever else is not read is in `left_out`: documents without text, empty files, files that are
    not UTF-8 text, links to folders (which may lead in circles), broken links, and second names of
    the same file.

    Args:
        source: "stdlib", a path or glob, or "hub:NAME[:CONFIG][#SPLIT]" (see the module).
        text_field: the field of JSONL, or the column of parquet and of hub datasets, that holds the
            text.
        max_documents: stop after so many.
        seed: shuffles the files of "stdlib", whose folders would otherwise follow one another;
            files and folders that are named come sorted by path.

    Raises:
        LabError: from the constructor where there is nothing at a path, or a folder cannot be read;
            while iterating, for a file that cannot be read (naming file and line) or changed
            meanwhile, a field that is not there, or a hub dataset that cannot be loaded.
    """

    def __init__(
        self, source: str, *, text_field: str = "text", max_documents: int | None = None, seed: int = 0
    ) -> None:
        if max_documents is not None and max_documents < 1:
            raise LabError(f"max_documents is {max_documents}", "ask for at least one document, or leave it out")
        self.source, self.text_field, self.max_documents = source, text_field, max_documents
        self.left_out = LeftOut()
        if not source.removeprefix(HUB).strip():
            raise LabError(
                f"the source of a corpus is '{source}', which names nothing",
                f"let data.source or data.validation_source name a file or folder, '{STDLIB}' or '{HUB}NAME'",
            )
        if source.startswith(HUB):
            self.files: list[Path] = []
        elif source == STDLIB:
            self.files = standard_library(seed)
        else:
            self.files = files(source, self.left_out)
        # Only what changes the documents: a changed identity makes everything that is cached from
        # them stale.
        self.identity: dict[str, Any] = {"source": source, "text_field": text_field, "max_documents": max_documents}
        if self.files:
            self._stats = {path: stat(path) for path in self.files}
            self.identity["source"] = [[str(path.resolve()), *stat] for path, stat in self._stats.items()]
        self._named = len(self.files) == 1 and Path(source).expanduser() == self.files[0]
        if self._named and _inner(self.files[0]).suffix.lower() == ".json":
            self.identity["json"] = "lines"  # in a folder the same file is read as plain text
        self._before = self._count = 0  # bytes in the files before this one; documents so far
        self._open: io.BufferedReader | None = None

    @property
    def share(self) -> float | None:
        """How much of the corpus the iteration under way has read, 0 to 1; None where the source
        has no known end.
        """
        shares = []
        if self.files:
            shares.append(
                (self._before + (self._open.tell() if self._open else 0))
                / max(1, sum(size for size, _ in self._stats.values()))
            )
        if self.max_documents:
            shares.append(self._count / self.max_documents)
        return min(1.0, max(shares)) if shares else None

    def check_unchanged(self, path: Path) -> None:
        """Refuse a file that is no longer what it was when the corpus was made, whose tokens might
        be of both.

        Raises:
            LabError: its size or time is another one.
        """
        if stat(path) != self._stats[path]:
            raise LabError(f"{path} changed while the corpus was read", "run again when nothing writes to it any more")

    def __iter__(self) -> Iterator[str]:
        self._before = self._count = 0
        for kind in (_NO_TEXT, _NOT_TEXT, _EMPTY):  # a second reading finds them again
            self.left_out.clear(kind)
        documents = self._from_files() if self.files else _hub(self.source, self.text_field)
        for text in documents:
            if not text:
                self.left_out.add(_NO_TEXT, self._open.name if self._open else self.source)
                continue
            self._count += 1
            yield text
            if self._count == self.max_documents:
                return

    def _from_files(self) -> Iterator[str]:
        for path, (size, _) in self._stats.items():
            try:
                with path.open("rb") as raw:
                    self._open = raw
                    documents, empty = self._read(path, raw), True
                    for text in documents or ():
                        empty = False
                        yield text
                    if empty:
                        self.left_out.add(_NOT_TEXT if documents is None else _EMPTY, path)
            except (OSError, EOFError, lzma.LZMAError) as error:  # what unpacking raises is among these
                why = getattr(error, "strerror", None) or error
                raise LabError(f"cannot read {path}: {why}", "get the file anew, or leave it out") from error
            finally:
                self._open = None
            self.check_unchanged(path)
            self._before += size

    def _read(self, path: Path, raw: io.BufferedReader) -> Iterator[str] | None:
        """The documents of a file, or None where it is not text and nobody asked for it by name."""
        stream = _unpacked(path, raw)
        inner = _inner(path)
        if inner.suffix.lower() in JSON_LINES or (self._named and inner.suffix.lower() == ".json"):
            return _json_lines(path, stream, self.text_field)
        if path.suffix.lower() == ".parquet":
            return _parquet(path, raw, self.text_field)
        head = stream.peek(_SNIFF)
        if _is_text(head, whole=stream is raw and len(head) == os.fstat(raw.fileno()).st_size):
            return _pieces(path, stream)
        if self._named:
            known = ", ".join((".txt", ".md", ".py", *JSON_LINES, ".parquet"))
            raise LabError(
                f"{path} is not UTF-8 text, and no other format with the extension '{path.suffix}' is known",
                f"give text in UTF-8, or one of {known} ({', '.join(COMPRESSED)} may follow)",
            )
        return None


def _inner(path: Path) -> Path:
    """The name of what a compressed file holds."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


def _unpacked(path: Path, raw: io.BufferedReader) -> io.BufferedReader:
    suffix = path.suffix.lower()
    stream: Any = raw
    if suffix == ".gz":
        stream = gzip.GzipFile(fileobj=raw)
    elif suffix == ".xz":
        stream = lzma.LZMAFile(raw)  # noqa: SIM115 - the caller closes what it is read from
    elif suffix == ".zst":
        import pyarrow

        # Not the reader of `zstandard`: at the end of a truncated file that one stops without a
        # word.
        stream = pyarrow.CompressedInputStream(raw, "zstd")
    else:
        return raw
    return io.BufferedReader(stream, _SNIFF)


def _is_text(head: bytes, whole: bool) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)  # the last character of a part may be cut
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _pieces(path: Path, stream: io.BufferedReader) -> Iterator[str]:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    try:
        while piece := text.read(_PIECE):
            yield piece + text.readline(_PIECE) if len(piece) == _PIECE else piece
    except UnicodeDecodeError as error:
        raise LabError(
            f"{path} is not UTF-8 text: {error.reason}", "convert the file to UTF-8, or leave it out"
        ) from error


def json_objects(path: Path, stream: io.BufferedReader) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, each with the number of its line; blank lines are left out.

    Raises:
        LabError: a line that is not JSON, or not an object.
    """
    for number, line in enumerate(stream, 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LabError(f"{path}, line {number} is not JSON: {error}", "put one JSON object on each line") from None
        if not isinstance(row, dict):
            raise LabError(f"{path}, line {number} is not a JSON object", 'put one object {"text": ...} on each line')
        yield number, row


def _json_lines(path: Path, stream: io.BufferedReader, field: str) -> Iterator[str]:
    for number, row in json_objects(path, stream):
        if field not in row:
            raise LabError(f"{path}, line {number} has no field '{field}'", _fields("text_field", row))
        text = row[field]
        if text is not None and not isinstance(text, str):
            given = json.dumps(text)
            given = given if len(given) <= 40 else f"{given[:40]}..."
            others = ", ".join(repr(name) for name, value in row.items() if isinstance(value, str)) or "none"
            raise LabError(
                f"{path}, line {number}: the field '{field}' is {given}, and must be text",
                f"correct the line (null is left out), or name another field with text_field; with text: {others}",
            )
        yield whole(text or "")


def whole(text: str) -> str:
    """Text in which half a surrogate pair, which JSON can spell and no encoding holds, is "?"."""
    return text.encode("utf-8", "replace").decode()


def _parquet(path: Path, raw: io.BufferedReader, field: str) -> Iterator[str]:
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(raw)
        schema = table.schema_arrow
        if field not in schema.names:
            raise LabError(f"{path} has no column '{field}'", _fields("text_field", schema.names))
        if not _holds_text(schema.field(field).type):
            others = [name for name in schema.names if _holds_text(schema.field(name).type)]
            what = f"the column '{field}' of {path} holds no text but {schema.field(field).type}"
            raise LabError(what, _fields("text_field", others))
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            for text in batch.column(0):
                row += 1
                yield text.as_py() or ""
    except UnicodeDecodeError as error:
        raise LabError(
            f"row {row} of {path} is not UTF-8 text: {error.reason}", "get the parquet file anew, or leave it out"
        ) from error
    except ArrowException as error:
        raise LabError(f"cannot read {path}: {error}", "get the parquet file anew, or leave it out") from error


def _holds_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def hub_address(source: str) -> tuple[str, str | None, str]:
    """hub:NAME[:CONFIG][#SPLIT] as (name, config, split)."""
    address, _, split = source.removeprefix(HUB).partition("#")
    name, _, config = address.partition(":")
    return name, config or None, split or "train"


def _hub(source: str, field: str) -> Iterator[str]:
    from datasets import load_dataset

    name, config, split = hub_address(source)
    try:
        for row in load_dataset(name, config, split=split, streaming=True):
            if not isinstance(row.get(field), str | None) or field not in row:
                raise LabError(f"{source} has no text column '{field}'", _fields("text_field", row))
            yield row[field] or ""
    except LabError:
        raise
    except Exception as error:  # the hub's client, the network and the dataset's own files each raise their own
        remedy = "check the name, the network and, for a private dataset, `hf auth login`"
        raise LabError(f"cannot load the dataset {source}: {first_line(error)}", remedy) from error


def _fields(option: str, names: Any) -> str:
    return f"name the right one with {option}; there are {', '.join(map(repr, names)) or 'none'}"
