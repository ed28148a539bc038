"""Samples that are not windows of a text to be gone on with: images, speech, windows with hidden
tokens.
"""

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from softfocus.lab.data.tasks import IGNORED, random_for
from softfocus.lab.errors import LabError
from softfocus.lab.recipes.data import DataTable

Inputs = Mapping[str, torch.Tensor]
"""What a model's forward takes, by name, and "labels"."""


@dataclass(frozen=True)
class HeldOut:
    """What is measured.

    Attributes:
        sample: makes one, from its number.
        documents: what each sample is a part of. Samples of different documents are independent.
    """

    sample: Callable[[int], Inputs]
    documents: Sequence[int]


class WithoutTokens:
    """Data of which no text is read: images, speech."""

    end_of_document = None

    def save_tokenizer(self, folder: Path) -> None:
        """There is none."""


class InOrder(Dataset[Any]):
    """Samples that the index and the seed alone decide: resuming is exact.

    Args:
        make: makes a sample, of random numbers and its number.
        seed: of the random numbers.
        count: how many are read.
    """

    def __init__(self, make: Callable[[np.random.Generator, int], Inputs], *, seed: int, count: int) -> None:
        self._make, self._seed, self._count = make, seed, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Inputs:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return self._make(random_for("training", self._seed, index), self._place(index))

    def _place(self, index: int) -> int:
        return index


class Passes(InOrder):
    """As many samples as there are in each pass, every one once, in a new random order.

    Args:
        make: makes a sample, of random numbers for what varies from pass to pass, and which of
            those there are.
        there: how many different ones there are.
        seed: of the order, and of what varies.
        count: how many are read.
    """

    def __init__(
        self, make: Callable[[np.random.Generator, int], Inputs], there: int, *, seed: int, count: int
    ) -> None:
        super().__init__(make, seed=seed, count=count)
        self._there = there
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.array([], np.int64))

    def _place(self, index: int) -> int:
        number, place = divmod(index, self._there)
        if self._order[0] != number:
            self._order = number, random_for("order", self._seed, number).permutation(self._there)
        return int(self._order[1][place])


def hold_out(count: int, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(training, held out): numbers below a count, each ascending; the same ones for every run.

    Raises:
        LabError: nothing is left to train on.
    """
    order = np.random.default_rng(0).permutation(count)
    held = max(1, round(share * count))
    if held >= count:
        raise LabError(
            f"of {count} samples {held} would be held out, and none is left to train on",
            "lower data.validation_fraction, or name a data.validation_source",
        )
    return np.sort(order[held:]), np.sort(order[:held])


def folders_of(table: DataTable) -> tuple[list[Path], list[Path]]:
    """The folders of data.source, and those of data.validation_source, if it is named. All are read
    to the bottom. Of speech each may be a pattern, such as LibriSpeech/train-*.

    Raises:
        LabError: one is not there, or lies in another, so that what is held out would be trained
            on, or is another.
    """
    assert table.source is not None
    source, held = ([] if name is None else _folders(name, table) for name in (table.source, table.validation_source))
    for one, other in combinations([*source, *held], 2):
        inner, outer = one.resolve(), other.resolve()
        if inner.is_relative_to(outer) or outer.is_relative_to(inner):
            raise LabError(
                f"{one} and {other} share files, which would be read twice, or trained on and held out",
                "name folders of which none holds another, or leave data.validation_source out",
            )
    return source, held


def _folders(name: str, table: DataTable) -> list[Path]:
    """A folder; of speech also those that a pattern fits."""
    path = Path(name).expanduser()
    if path.is_dir():
        return [path]
    if table.speech:
        if found := [Path(one) for one in sorted(glob.glob(str(path))) if Path(one).is_dir()]:
            return found
        what = f"no folder fits the pattern {path}" if glob.has_magic(name) else f"there is no folder {path}"
        named = "name a folder in LibriSpeech's layout, or a pattern of several, such as LibriSpeech/train-*"
        raise LabError(what, named + (" (in a pattern, [[] stands for [)" if "[" in name else ""))
    remedy = "name a folder, not a pattern, that holds a folder of images for each class"
    raise LabError(f"there is no folder {path}", remedy)


def hide(tokens: NDArray[np.int64], share: float, vocabulary: int, random: np.random.Generator) -> Inputs:
    """A window with a share of its tokens hidden, always as many, so that all windows weigh the
    same.

    Of those 80 % become the mask, 10 % any token, and 10 % stay as they are (Devlin et al. 2018,
    arXiv 1810.04805).

    Args:
        tokens: [L].
        share: of them.
        vocabulary: size of the tokenizer's; the mask is the id after its last.
        random: decides which and how.

    Returns:
        {"input_ids": int64 [L], "labels": int64 [L]}; labels are -100 where nothing is hidden.
    """
    count = max(1, round(share * len(tokens)))
    places = random.choice(len(tokens), count, replace=False)
    labels = np.full_like(tokens, IGNORED)
    labels[places] = tokens[places]
    kind = random.random(count)
    shown = np.where(kind < 0.9, random.integers(vocabulary, size=count), tokens[places])
    seen = tokens.copy()
    seen[places] = np.where(kind < 0.8, vocabulary, shown)
    return {"input_ids": torch.from_numpy(seen), "labels": torch.from_numpy(labels)}
