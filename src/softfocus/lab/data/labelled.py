"""Labelled examples: JSONL files in the layout of SuperGLUE's tasks, as ids of a tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from softfocus.lab.data.corpus import json_objects, whole
from softfocus.lab.data.tokenizer import Encoder
from softfocus.lab.errors import LabError
from softfocus.lab.run_folder.manifest import digest

LABEL = "label"
TRAINING, HELD_OUT = "train.jsonl", ("val.jsonl", "validation.jsonl")
"""SuperGLUE's names; its test.jsonl has no labels."""
_REMEDY = f"a line is an object with text fields and a field '{LABEL}'"


class Examples(Dataset[dict[str, Any]]):
    """Examples of one file.

    Args:
        inputs: ids of each example, not empty.
        labels: int64 [count], the place of each example's label among the names.

    Attributes:
        inputs, labels: the arguments.
    """

    def __init__(self, inputs: list[list[int]], labels: NDArray[np.int64]) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.inputs[index], "labels": int(self.labels[index])}


@dataclass(frozen=True)
class Labelled:
    """A data set of two files.

    Attributes:
        name: of its folder.
        key: a digest of the two files.
        fields: whose texts make an example, in this order.
        labels: the names of the classes.
        training, held_out: the examples.
        cut: how many of them were longer than the model takes.
    """

    name: str
    key: str
    fields: tuple[str, ...]
    labels: tuple[str, ...]
    training: Examples
    held_out: Examples
    cut: int


def read(folder: Path, tokenizer: Any, longest: int, fields: Sequence[str] = ()) -> Labelled:
    """Read train.jsonl and val.jsonl of a folder.

    The fields of an example are joined by line ends. Of an example that is too long the last
    tokens are kept.

    Args:
        folder: holds train.jsonl, and val.jsonl or validation.jsonl.
        tokenizer: of the model.
        longest: tokens that an example may have.
        fields: whose texts make an example; by default all that hold text in the first line of
            train.jsonl, but the label.

    Raises:
        LabError: a file that is missing, empty, or not JSONL; a line that lacks a field or its
            label, or that holds no text; fewer than two labels; a label that is only held out.
    """
    if LABEL in fields:
        raise LabError(f"--fields: '{LABEL}' is the answer", "name the fields that an example is made of")
    files = [_file(folder, names) for names in ((TRAINING,), HELD_OUT)]
    training, held_out = map(_lines, files)
    wanted = tuple(fields) or _text_fields(training[0].values)
    names = tuple(sorted({_label(line) for line in training}))
    if len(names) < 2:
        raise LabError(f"{TRAINING}: every label is {names[0]!r}", "classify examples of two labels or more")
    encode, made, cut = Encoder(tokenizer), [], 0
    for lines in (training, held_out):
        inputs = [ids for ids, _ in encode([_text(line, wanted) for line in lines])]
        for line, ids in zip(lines, inputs, strict=True):
            if not ids:
                raise LabError(f"{line.place}: there is no text in {', '.join(wanted)}", "remove the line")
            if _label(line) not in names:
                raise LabError(f"{line.place}: no line of {TRAINING} has the label {_label(line)!r}", "use its labels")
        cut += sum(len(ids) > longest for ids in inputs)
        labels = np.array([names.index(_label(line)) for line in lines], dtype=np.int64)
        made.append(Examples([ids[-longest:] for ids in inputs], labels))
    key = hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()[:12]
    return Labelled(folder.resolve().name, key, wanted, names, made[0], made[1], cut)


def padded(batch: Sequence[dict[str, Any]], end: int) -> dict[str, torch.Tensor]:
    """Examples of one batch, padded on the right.

    Args:
        batch: of `Examples`.
        end: the id of the padding.

    Returns:
        input_ids and attention_mask, int64 [batch, longest]; labels, int64 [batch].
    """
    inputs = [torch.tensor(one["input_ids"]) for one in batch]
    return {
        "input_ids": pad_sequence(inputs, batch_first=True, padding_value=end),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in inputs], batch_first=True),
        "labels": torch.tensor([one["labels"] for one in batch]),
    }


def _file(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    what = f"there is no {' or '.join(names)} in {folder}" if folder.is_dir() else f"there is no folder {folder}"
    raise LabError(what, f"--data takes a folder with {TRAINING} and {HELD_OUT[0]}, as SuperGLUE's tasks have them")


@dataclass(frozen=True)
class _Line:
    place: str  # file and line, for errors
    values: dict[str, Any]


def _lines(file: Path) -> list[_Line]:
    try:
        with file.open("rb") as stream:
            found = [_Line(f"{file}, line {number}", values) for number, values in json_objects(file, stream)]
    except OSError as error:
        raise LabError(f"cannot read {file}: {error.strerror}", _REMEDY) from None
    if not found:
        raise LabError(f"{file} has no line", _REMEDY)
    return found


def _text_fields(values: dict[str, Any]) -> tuple[str, ...]:
    return tuple(key for key, value in values.items() if key != LABEL and isinstance(value, str))


def _text(line: _Line, fields: Sequence[str]) -> str:
    for field in fields:
        if not isinstance(line.values.get(field), str):
            there = ", ".join(_text_fields(line.values)) or "none"
            what = f"{line.place}: the field {field!r} holds no text (fields that do: {there})"
            raise LabError(what, "name fields that every line has, with --fields")
    if not fields:
        raise LabError(f"{line.place}: no field holds text", _REMEDY)
    return whole("\n".join(line.values[field] for field in fields))


def _label(line: _Line) -> str:
    value = line.values.get(LABEL)
    if not isinstance(value, str | int):
        raise LabError(f"{line.place}: the field '{LABEL}' is {value!r}", "a label is text, a whole number or a bool")
    return whole(value) if isinstance(value, str) else json.dumps(value)
