"""Tokenise once, keep the tokens on disk, map them into memory.

A cache folder holds one folder for each combination of source, tokenizer and options:

    store.json                  counts, sizes, what they were made from, and what was left out of it
    tokenizer/                  as `save_pretrained` writes it
    train.tokens                uint16, or uint32 where the vocabulary is larger than 65536
    train.documents             int64: where each document starts
    validation.{tokens,documents}
    checksums.json              of all other files; every run checks them once

It is made as `.KEY.partial` and renamed, under a lock: what has the right name is complete, and of
two processes that want the same tokens the second waits for the first. What is damaged is made
anew.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softfocus.lab.data.corpus import Corpus, hub_address
from softfocus.lab.data.listing import HUB
from softfocus.lab.data.tokenise import SPLITS, Plan, Progress, fill
from softfocus.lab.errors import LabError
from softfocus.lab.recipes.data import DataTable
from softfocus.lab.run_folder import disk

CACHE = "SOFTFOCUS_CACHE"

STORE = "store.json"
CHECKSUMS = "checksums.json"

_BLOCK = 1 << 24  # bytes that are read at once
_LONG = 1 << 30  # bytes; to check fewer takes a second or two

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Training and validation tokens of a corpus, memory-mapped and read-only. Pickles as the name
    of its folder.

    Every document ends with the tokenizer's end-of-document token, except in shards, where it
    starts with it.

    Attributes:
        folder: in the cache.
        train: training token ids, uint16 or uint32.
        validation: validation token ids, of the same type.
        train_documents: where each training document starts in `train`, int64 [documents]; the
            first is 0.
        validation_documents: the same for `validation`.
        vocab_size: every id is below it.
    """

    folder: Path
    train: NDArray[Any]
    validation: NDArray[Any]
    train_documents: NDArray[np.int64]
    validation_documents: NDArray[np.int64]
    vocab_size: int

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer, for `AutoTokenizer.from_pretrained`."""
        return self.folder / "tokenizer"

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Map what :func:`prepare` made.

        Raises:
            LabError: a file is missing, or its size is not what store.json says.
        """
        try:
            about = json.loads((folder / STORE).read_text())
            tokens = [np.memmap(folder / f"{split}.tokens", about["dtype"], "r") for split in SPLITS]
            documents = [np.memmap(folder / f"{split}.documents", "<i8", "r") for split in SPLITS]
            if [len(array) for array in tokens + documents] != about["counts"]:
                raise ValueError("a file is not as long as it was")
            return cls(folder, tokens[0], tokens[1], documents[0], documents[1], about["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"the tokens in {folder} are damaged: {error}", "delete that folder, run again") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore.open, (self.folder,)


def prepare(
    table: DataTable,
    *,
    seed: int = 0,
    cache_folder: Path | None = None,
    progress: Progress = lambda what, share: None,
) -> TokenStore:
    """The tokens of a table's source, from the cache if they are there. Memory is bounded by the
    longest document.

    Without a validation source, one document in 1 / validation_fraction is held out, evenly from
    the first to the last; where that gives none, the documents that start in the last
    validation_fraction of the tokens are, or else the end of the last document. Of shards, which
    are copied into the cache, those with "val" in the name validate, or else the first one, with
    the first 10,485,760 tokens; a shard that is alone is cut like text.

    The cache notices a file that changed its path, size or time. It does not notice a dataset of
    the hub that changed. Every call compares the cached files with their checksums, and makes them
    anew where they are damaged, with a warning. What was left out of the sources is said in a
    warning, also where they were tokenised earlier.

    Args:
        table: of text. The source is what :class:`~softfocus.lab.data.corpus.Corpus` takes, or a
            file, folder or glob of .bin shards of tokens; the tokenizer what
            :func:`~softfocus.lab.data.tokenizer.load_tokenizer` takes. For shards, the tokenizer
            they were made with: "hub:openai-community/gpt2" for FineWeb's.
        seed: of the order of "stdlib" and of the choice of held-out documents. Not a training seed:
            runs that are to be compared need the same.
        cache_folder: by default $SOFTFOCUS_CACHE, or ~/.cache/softfocus/tokens.
        progress: called now and then.

    Raises:
        LabError: what Corpus and load_tokenizer raise; an empty corpus; a file or dataset that is
            in both sources; a shard that is none, or holds ids that the tokenizer does not have; a
            disk that is full or cannot be written to.
    """
    plan = plan_of(table, seed)
    cache = cache_folder or default_cache()
    folder = cache / plan.key
    if folder.exists() and _damage(folder, progress) is None:
        return _opened(folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{plan.key}.lock"):
            there = folder.exists()
            damage = _damage(folder, progress) if there else None
            if damage:
                _log.warning("the tokens in %s %s: they are made anew", folder, damage)
            if damage or not there:
                check_room(cache, plan.shard_bytes)
                _build(folder, plan, progress)
    except OSError as error:  # of writing: whoever reads a source turns its errors into LabErrors
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"no space is left for the tokens in {cache}"
            remedy = f"free some, or let {CACHE} name a folder on a larger disk"
        else:
            what = f"cannot write the tokens to {cache}: {error.strerror or error}"
            remedy = f"let {CACHE} name a folder that can be written to"
        raise LabError(what, remedy) from error
    return _opened(folder)


def check_room(cache: Path, needed: int) -> None:
    """Refuse to copy shards of so many bytes into a cache whose disk has no room for them.

    Raises:
        LabError: it has not.
    """
    remedy = f"free some, or let {CACHE} name a folder on a larger disk"
    disk.check_room(cache, needed, "{} of shards are copied there", remedy)


def plan_of(table: DataTable, seed: int = 0) -> Plan:
    """What is to be in a store. Its key is the name of the folder that :func:`prepare` would make.

    Raises:
        LabError: what Corpus raises.
    """

    def corpus(name: str) -> Corpus:
        return Corpus(name, text_field=table.text_field, max_documents=table.max_documents, seed=seed)

    assert table.source is not None  # of text
    training = corpus(table.source)
    validation = corpus(table.validation_source) if table.validation_source is not None else None
    if validation is not None and (both := _parts(training) & _parts(validation)):
        raise LabError(f"{min(both)} is in the source and in the validation source", "take it out of one of them")
    return Plan(training, validation, table.validation_fraction, seed, table.tokenizer)


def default_cache() -> Path:
    """$SOFTFOCUS_CACHE, or ~/.cache/softfocus/tokens."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "softfocus" / "tokens")


def _parts(corpus: Corpus) -> set[str]:
    """What a corpus is made of, by names that do not depend on how it was spelt."""
    if corpus.source.startswith(HUB):
        name, config, split = hub_address(corpus.source)
        return {f"{HUB}{name}{f':{config}' if config else ''}#{split}"}
    return {str(path.resolve()) for path in corpus.files}


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)  # the operating system lets go of it when its process dies
    try:
        held = lock.acquire(timeout=1)
    except Timeout:
        _log.warning("waiting for another process that prepares the same tokens")
        held = lock.acquire()
    with held:
        yield


def _opened(folder: Path) -> TokenStore:
    store = TokenStore.open(folder)
    for line in json.loads((folder / STORE).read_text())["left_out"]:
        _log.warning("%s", line)
    return store


def _build(folder: Path, plan: Plan, progress: Progress) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # the lock is ours: what is there was left by a process that died
    partial.mkdir()
    try:
        about = fill(partial, plan, progress)
        (partial / STORE).write_text(json.dumps(about, indent=2) + "\n")
        (partial / CHECKSUMS).write_text(json.dumps(_checksums(partial, progress), indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _damage(folder: Path, progress: Progress) -> str | None:
    """What is wrong with the files in a folder of the cache, for a sentence; None where they are as
    they were written.
    """
    try:
        written = dict(json.loads((folder / CHECKSUMS).read_text()))
        found = _checksums(folder, progress)
    except FileNotFoundError:
        return "have no checksums (early versions wrote none)"
    except (OSError, ValueError, TypeError) as error:
        return f"are damaged (a file cannot be read: {error})"
    other = sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name))
    return f"are damaged ({other[0]} is not as it was written)" if other else None


def _checksums(folder: Path, progress: Progress) -> dict[str, int]:
    """CRC-32 by file: it finds damage at more than twice the speed of SHA-256."""
    sizes = {path: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    sizes.pop(folder / CHECKSUMS, None)
    found, done, total = {}, 0, sum(sizes.values())
    for path in sizes:
        value = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                value = zlib.crc32(block, value)
                done += len(block)
                if total >= _LONG:
                    progress("checking the tokens", done / total)
        found[path.relative_to(folder).as_posix()] = value
    return found
