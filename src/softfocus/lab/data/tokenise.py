"""The documents of a corpus, or the shards, to the files of a token store.
`softfocus.lab.data.tokens` says when and where.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softfocus.lab.data import tokenizer as tokenizers
from softfocus.lab.data.corpus import Corpus
from softfocus.lab.data.shards import SUFFIX, VALIDATION_TOKENS, read_shard, split_shards
from softfocus.lab.errors import LabError

FORMAT = 2
"""Part of the key of a store: raise it when the same source gives other tokens, or other files."""

SPLITS = ("train", "validation")

Progress = Callable[[str, float | None], None]
"""Called with what is being done, and the share of it that is done, 0 to 1, or None where the end
is not known.
"""

_BATCH = 1 << 20  # characters that are tokenised at once
_CHUNK = 1 << 22  # tokens of a shard that are copied at once


class Plan:
    """What goes into a store, and its key: everything that its content follows from."""

    def __init__(self, train: Corpus, validation: Corpus | None, fraction: float, seed: int, spec: str) -> None:
        self.train, self.validation, self.fraction, self.spec = train, validation, fraction, spec
        self._phase = random.Random(seed).random() * (1 - fraction)  # below 1 - fraction: the first document trains
        parts = [train.identity, validation.identity if validation else [fraction, seed], _tokenizer_identity(spec)]
        self.key = hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:24]

    @property
    def shard_bytes(self) -> int:
        """Of the shards that are copied."""
        corpora = [self.train, self.validation] if self.validation else [self.train]
        return sum(path.stat().st_size for one in corpora for path in one.files if path.suffix == SUFFIX)

    def holds_out(self, index: int) -> bool:
        """Whether document `index` of the training source validates; decided without knowing how
        many there are.
        """
        if self.validation is not None:
            return False
        return math.floor((index + 1) * self.fraction + self._phase) > math.floor(index * self.fraction + self._phase)


def _tokenizer_identity(spec: str) -> Any:
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        return spec
    stats = [(path, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def fill(folder: Path, plan: Plan, progress: Progress) -> dict[str, Any]:
    """Write tokens, documents and tokenizer into a folder; returns what store.json is to say.

    Raises:
        LabError: of the source or of the tokenizer, see `softfocus.lab.data.tokens.prepare`.
        OSError: of writing.
    """
    shards = _shards(plan.train)
    cut = None if shards or plan.validation else _cut(plan)
    texts = None if shards else _training_texts(plan, cut, progress)
    tokenizer = tokenizers.load_tokenizer(plan.spec, texts)
    size, end = tokenizers.vocabulary(tokenizer), tokenizers.end_of_document(tokenizer)
    encode = tokenizers.Encoder(tokenizer)
    with _Writer(folder, "train", size) as train, _Writer(folder, "validation", size) as validation:
        if shards:
            shards, held_out = (shards, []) if plan.validation else split_shards(shards)
            _copy(plan.train, shards, end, train, progress)
            _copy(plan.train, held_out, end, validation, progress, VALIDATION_TOKENS)
        else:
            parts = _split(plan, cut)
            for part, tokens in _tokenised(plan.train, parts, encode, end, progress):
                (validation if part.held_out else train).append(tokens, np.zeros(1, np.int64))
        if plan.validation and (held_out := _shards(plan.validation)):
            _copy(plan.validation, held_out, end, validation, progress, VALIDATION_TOKENS)
        elif plan.validation:
            whole = map(_Part, plan.validation)
            for _, tokens in _tokenised(plan.validation, whole, encode, end, progress):
                validation.append(tokens, np.zeros(1, np.int64))
        if train.count < 2:
            raise _empty(plan.train)
        if plan.validation and not validation.count:
            raise _empty(plan.validation)
        if not validation.count:
            validation.append(*train.cut(plan.fraction))
    tokenizers.save(tokenizer, folder / "tokenizer")
    counts = [train.count, validation.count, train.documents, validation.documents]
    corpora = [plan.train, plan.validation] if plan.validation else [plan.train]
    return {
        "counts": counts,
        "dtype": train.dtype.str,
        "vocab_size": size,
        "sources": [plan.train.source, plan.validation and plan.validation.source],
        "tokenizer": plan.spec,
        "left_out": [f"left out of {one.source}: {text}" for one in corpora if (text := one.left_out.text)],
    }


def _empty(corpus: Corpus) -> LabError:
    return LabError(f"there is no text in {corpus.source}", "name a corpus that holds some")


def _shards(corpus: Corpus) -> list[Path]:
    shards = [path for path in corpus.files if path.suffix == SUFFIX]
    if shards and corpus.max_documents is not None:
        raise LabError("max_documents does not apply to shards", "leave it out, and name fewer shards with a glob")
    for path in corpus.files if shards else ():
        if path.suffix != SUFFIX:
            corpus.left_out.add("files beside shards of tokens", path)
    return shards


class _Part(NamedTuple):
    """A document, or one side of the document that the cut goes through."""

    text: str
    held_out: bool = False
    ends: bool = True


def _cut(plan: Plan) -> int | None:
    """Where to cut, in characters, if the documents are too few for one of them to be held out;
    else None.

    Decided on the text, before there is a tokenizer, so that a BPE sees nothing of what is held
    out.
    """
    starts, total, text = [], 0, ""
    for index, text in enumerate(plan.train):
        if plan.holds_out(index):
            return None
        starts.append(total)
        total += len(text)
    at = max(1, round(total * (1 - plan.fraction)))
    if later := [start for start in starts if start >= at]:
        return later[0]
    inside = at - (total - len(text))
    between_words = max(text.rfind(space, max(0, inside - 100), inside) for space in " \n") + 1
    return at - inside + (between_words or inside)


def _split(plan: Plan, cut: int | None) -> Iterator[_Part]:
    read = 0
    for index, text in enumerate(plan.train):
        if cut is None:
            yield _Part(text, plan.holds_out(index))
            continue
        before, after = text[: max(0, cut - read)], text[max(0, cut - read) :]
        read += len(text)
        if before:
            yield _Part(before, ends=not after)
        if after:
            yield _Part(after, held_out=True)


def _training_texts(plan: Plan, cut: int | None, progress: Progress) -> Iterator[str]:
    for part in _split(plan, cut):
        if not part.held_out:
            yield part.text
        progress("training the tokenizer", plan.train.share)


def _tokenised(
    corpus: Corpus,
    parts: Iterable[_Part],
    encode: tokenizers.Encoder,
    end: int,
    progress: Progress,
) -> Iterator[tuple[_Part, NDArray[Any]]]:
    """Each part of a corpus with its tokens; a document's include the end."""
    for batch in _batches(parts):
        for part, (ids, lost) in zip(batch, encode([part.text for part in batch]), strict=True):
            if lost:
                corpus.left_out.add(encode.lost, f"in {part.text[:30]!r}", lost)
            yield part, np.array([*ids, end] if part.ends else ids)
        progress(f"tokenising {corpus.source}", corpus.share)


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part.text)
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _copy(
    corpus: Corpus, paths: list[Path], end: int, writer: _Writer, progress: Progress, limit: int | None = None
) -> None:
    """Copy whole shards, or their first `limit` tokens. A document starts at each `end`, as GPT-2's
    shards have it.
    """
    for number, path in enumerate(paths):
        whole = read_shard(path)
        shard = whole[: None if limit is None else limit - writer.count]
        for start in range(0, len(shard), _CHUNK):
            tokens = np.asarray(shard[start : start + _CHUNK])
            try:
                writer.append(tokens, np.flatnonzero(tokens == end))
            except ValueError as error:
                raise LabError(f"{path} holds {error}", "name the tokenizer that made the shards") from None
            progress("copying shards", (number + (start + len(tokens)) / len(shard)) / len(paths))
        if len(shard) < len(whole):
            kind = f"tokens of the shards that validate, after the first {limit:,}"
            corpus.left_out.add(kind, path, len(whole) - len(shard))
        corpus.check_unchanged(path)


class _Writer:
    """Appends to the two files of a split."""

    def __init__(self, folder: Path, split: str, vocabulary: int) -> None:
        self.dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
        self.count = self.documents = 0
        self._vocabulary = vocabulary
        self._tokens, self._starts = ((folder / f"{split}.{kind}").open("w+b") for kind in ("tokens", "documents"))

    def append(self, tokens: NDArray[Any], starts: NDArray[np.int64]) -> None:
        """Append tokens, [n]; documents start at `starts` among them, and at the very first token.

        Raises:
            ValueError: an id that the vocabulary does not have.
        """
        if len(tokens) and (largest := int(tokens.max())) >= self._vocabulary:
            raise ValueError(f"the token {largest}, beyond the tokenizer's vocabulary of {self._vocabulary}")
        if not self.count and len(tokens) and 0 not in starts[:1]:
            starts = np.concatenate([[0], starts])
        self._starts.write((starts + self.count).astype("<i8").tobytes())
        self._tokens.write(tokens.astype(self.dtype).tobytes())
        self.count += len(tokens)
        self.documents += len(starts)

    def cut(self, fraction: float) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Take the documents off that start in the last fraction, or else the last fraction itself:
        (tokens, starts).
        """
        self._starts.seek(0)
        starts = np.frombuffer(self._starts.read(), "<i8")
        at = min(max(1, round(self.count * (1 - fraction))), self.count - 1)
        keep = int(np.searchsorted(starts, at))
        if keep < len(starts):
            at = int(starts[keep])
        self._tokens.seek(at * self.dtype.itemsize)
        tokens = np.frombuffer(self._tokens.read(), self.dtype)
        self._tokens.truncate(at * self.dtype.itemsize)
        self._starts.truncate(keep * 8)
        self.count, self.documents = at, keep
        return tokens, starts[keep:] - at

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens, self._starts):
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave a renamed folder with empty files
            file.close()
