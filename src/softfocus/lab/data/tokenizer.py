"""A specification, in one string, to a Transformers tokenizer: bytes, a byte-level BPE, a folder,
or one of the hub's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from softfocus.lab.data.listing import HUB
from softfocus.lab.errors import LabError, first_line
from softfocus.lab.run_folder.disk import disk_error

BYTES = "bytes"
BPE = "bpe:"
END = "<|endoftext|>"
_LOST = "\0lost\0"
"""Stands where a tokenizer drops something. It is counted, and no ids hold it."""

_LEAST = 257  # 256 bytes and the end of a document
_MOST = 1 << 20  # several times the largest in use; the trainer claims memory for all at once, and aborts without it
_TRAINING_CHARACTERS = 100_000_000  # what a BPE is trained on at most: its merges settle long before


def load_tokenizer(spec: str, corpus_documents: Iterable[str] | None = None) -> Any:
    """A tokenizer that `save_pretrained` writes and `AutoTokenizer` reads back, without softfocus.

    The two that are made here give back any text exactly, and spell out special tokens that a text
    happens to contain.

    Args:
        spec: "bytes": the 256 byte values, each its own id, and 256 for the end of a document;
            "bpe:VOCAB": a byte-level BPE of VOCAB tokens, trained on `corpus_documents` (their
            first 100 million characters), the same for the same documents; id 0 ends a document. A
            small corpus may give fewer tokens; the path of a Transformers tokenizer folder, or
            "hub:NAME".
        corpus_documents: what a BPE is trained on; the others leave it alone.

    Returns:
        A `transformers.PreTrainedTokenizerBase`, with an `eos_token`.

    Raises:
        LabError: a spec that says nothing, a VOCAB below 257 or above 2^20, a BPE without
            documents, a folder or a name that cannot be loaded, or a tokenizer that has no token to
            end a document with.
    """
    if spec == BYTES:
        return _bytes()
    if spec.startswith(BPE):
        return _bpe(spec.removeprefix(BPE), corpus_documents)
    if spec.startswith(HUB) or (spec and Path(spec).expanduser().is_dir()):  # "" would be the current directory
        return _pretrained(spec)
    raise LabError(
        f"there is no tokenizer '{spec}'",
        f"use '{BYTES}', '{BPE}VOCAB', a Transformers tokenizer folder or '{HUB}NAME'",
    )


def word_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer for a generated task: each word is its place in the list, and the id after them
    ends a document.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate([*words, END])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(backend)


class Encoder:
    """Turns texts into ids: nothing added, nothing truncated, special tokens spelt out as text.

    A document that writes about "<|endoftext|>" does not end there.

    Attributes:
        lost: in words, what is counted where the tokenizer has no token for a part of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._encode: Callable[[list[str]], list[list[int]]]
        self._as_it_is: Callable[[list[str]], list[list[int]]] | None = None
        unknown = tokenizer.unk_token if tokenizer.unk_token_id is not None else None
        self._unknown: int | None = tokenizer.unk_token_id
        if tokenizer.is_fast:
            backend = type(tokenizer.backend_tokenizer)
            described = json.loads(tokenizer.backend_tokenizer.to_str())
            model = described["model"]
            # The backend's own unknown token is the one in its output. Transformers may have none,
            # or another one, which the backend never returns
            unknown = model.get("unk_token") or None
            self._unknown = model.get("unk_id") if unknown is None else tokenizer.backend_tokenizer.token_to_id(unknown)
            if unknown is None and self._unknown is not None:
                unknown = tokenizer.backend_tokenizer.id_to_token(self._unknown)
            self._encode = _fast(backend.from_str(tokenizer.backend_tokenizer.to_str()))
            if model["type"] == "BPE" and unknown is None:
                # It drops what it has no token for. In a copy, an unknown token beyond the
                # vocabulary takes that place
                self._as_it_is, self._unknown = self._encode, vocabulary(tokenizer)
                model |= {"unk_token": _LOST, "fuse_unk": False, "vocab": {**model["vocab"], _LOST: self._unknown}}
                self._encode = _fast(backend.from_str(json.dumps(described)))
        else:
            self._encode = lambda texts: (
                tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
            )
        dropped = "characters (or bytes) that the tokenizer has no token for and drops"
        self.lost = f"tokens that are only {unknown!r}" if unknown is not None else dropped

    def __call__(self, texts: list[str]) -> list[tuple[list[int], int]]:
        """The ids of each text, and how often the tokenizer had no token.

        Raises:
            LabError: the tokenizer fails on what it has no token for.
        """
        found = []
        for text, ids in zip(texts, self._encode(texts), strict=True):
            lost = 0 if self._unknown is None else ids.count(self._unknown)
            found.append((self._as_it_is([text])[0] if lost and self._as_it_is else ids, lost))
        return found


def _fast(backend: Any) -> Callable[[list[str]], list[list[int]]]:
    """What encodes with a copy of a tokenizer: the settings below are for corpora and not for
    whoever else uses it.

    Three times as fast as calling the tokenizer, which also makes masks and offsets.
    """
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # tokenizers raises no other
            remedy = "give the tokenizer an unknown token, or name another one"
            raise LabError(f"the tokenizer cannot encode the text: {first_line(error)}", remedy) from error

    return encode


def vocabulary(tokenizer: Any) -> int:
    """How many rows an embedding needs: one more than the largest id, which can be more than there
    are tokens.
    """
    return int(max(tokenizer.get_vocab().values())) + 1


def end_of_document(tokenizer: Any) -> int:
    """The id that ends a document: of `eos_token`, or of `sep_token` where there is none."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    assert end is not None, "load_tokenizer refuses such a tokenizer"
    return int(end)


def save(tokenizer: Any, folder: Path) -> None:
    """Like `save_pretrained`, but a disk that is full raises OSError, as with every other file.

    Raises:
        OSError: of writing. `tokenizers` raises a bare Exception that ends in "(os error 28)".
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if (why := disk_error(error)) in (None, error):
            raise
        raise why from error


def _bytes() -> Any:
    from tokenizers import models
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # Without merges a byte-level BPE is its alphabet, and ids are byte values
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    return _wrapped(_byte_level(models.BPE(vocab={**alphabet, END: len(alphabet)}, merges=[]), use_regex=False))


def _bpe(size: str, documents: Iterable[str] | None) -> Any:
    from tokenizers import models, pre_tokenizers, trainers

    if not size.isdecimal() or len(size) > 9 or not _LEAST <= int(size) <= _MOST:
        raise LabError(
            f"the tokenizer '{BPE}{size}' has no vocabulary size from {_LEAST} to {_MOST}",
            f"say how many tokens, such as {BPE}8192: all 256 bytes and the end of a document come first",
        )
    if documents is None:
        raise LabError(
            f"the tokenizer '{BPE}{size}' is trained on text, and there is none", f"use a folder or {HUB}NAME"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend = _byte_level(models.BPE(), use_regex=True)
    backend.train_from_iterator(_first(documents, _TRAINING_CHARACTERS), trainer)
    return _wrapped(backend)


def _first(documents: Iterable[str], characters: int) -> Iterator[str]:
    for text in documents:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _byte_level(model: Any, *, use_regex: bool) -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _wrapped(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, split_special_tokens=True, clean_up_tokenization_spaces=False
    )


def _pretrained(spec: str) -> Any:
    if spec.startswith(HUB):
        tokenizer = load_saved(spec.removeprefix(HUB), "check the name and the network", spec)
    else:
        tokenizer = load_saved(Path(spec).expanduser(), "name a folder that holds a tokenizer.json", spec)
    if tokenizer.eos_token_id is None and tokenizer.sep_token_id is None:
        raise LabError(f"the tokenizer {spec} has no token to end a document with", "set eos_token in its config")
    return tokenizer


def load_saved(name: Path | str, remedy: str, spec: str | None = None) -> Any:
    """The tokenizer of a folder, or of a name of the hub; an error calls it by its spec, where
    there is one.

    Raises:
        LabError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(name))
    except Exception as error:  # the hub's client, the network, Transformers and tokenizers each raise their own
        raise LabError(f"cannot load the tokenizer {spec or name}: {first_line(error)}", remedy) from error
