"""Windows of tokens: what a model is trained on, and what it is evaluated on at several lengths."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from softfocus.lab.data.samples import InOrder, Inputs
from softfocus.lab.data.tasks import Task, check_length
from softfocus.lab.data.tokens import TokenStore
from softfocus.lab.errors import LabError

_log = logging.getLogger(__name__)


class TrainingWindows(Dataset[dict[str, torch.Tensor]]):
    """Windows of the training tokens, in an order that the index and the seed alone decide:
    resuming is exact.

    Read them in order of index; a sampler that shuffles is not needed. One pass over the tokens
    cuts them into windows that do not overlap and gives each once, in random order; the next pass
    cuts them elsewhere and orders them anew. Windows run across the ends of documents, as in
    GPT-2's training.

    An item is {"input_ids": int64 [length], "labels": int64 [length]}, where labels[i] is the token
    after input_ids[i]: they are shifted already, so that a window makes `length` predictions.

    Args:
        store: the tokens.
        length: predictions a window.
        seed: of the order.
        count: how many windows there are, over as many passes as it takes; by default one pass.

    Raises:
        LabError: fewer training tokens than one window takes.
    """

    def __init__(self, store: TokenStore, length: int, *, seed: int = 0, count: int | None = None) -> None:
        if len(store.train) <= length:
            raise LabError(
                f"the corpus has {len(store.train)} training tokens, one window of {length} takes {length + 1}",
                "choose a shorter training length, or a larger corpus",
            )
        self.store, self.length, self.seed = store, length, seed
        # The last length - 1 predictions that there are give the cut room to move from pass to pass
        self.per_pass = max(1, (len(store.train) - length) // length)
        spare = len(store.train) - 1 - self.per_pass * length
        self._room = min(length - 1, spare)
        self._rest = spare - self._room  # tokens at the end that no cut in that room reaches
        self._passes: dict[int, tuple[int, NDArray[np.int64]]] = {}
        self._count = self.per_pass if count is None else count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(f"window {index} of {self._count}")
        number, place = divmod(index, self.per_pass)
        if number not in self._passes:
            random = np.random.default_rng((self.seed, number))
            first = int(random.integers(self._room + 1)) + number % 2 * self._rest  # every second pass reaches the end
            self._passes[number] = first, random.permutation(self.per_pass)
        first, order = self._passes[number]
        start = first + int(order[place]) * self.length
        tokens = torch.from_numpy(self.store.train[start : start + self.length + 1].astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class TaskWindows(InOrder):
    """Sequences of a generated task, each of which its index and the seed alone decide: resuming is
    exact.

    An item is like one of :class:`TrainingWindows`; labels are -100 where nothing is asked for.

    Args:
        task: what to generate.
        length: tokens a sequence.
        seed: of all sequences.
        count: how many there are.

    Raises:
        LabError: the length is too short for the task.
    """

    def __init__(self, task: Task, length: int, *, seed: int, count: int) -> None:
        check_length(task, length)

        def make(random: np.random.Generator, _: int) -> Inputs:
            sample = task.sample(random, length)
            return {"input_ids": torch.from_numpy(sample.tokens), "labels": torch.from_numpy(sample.labels)}

        super().__init__(make, seed=seed, count=count)


class EvaluationWindows:
    """Windows of several lengths that make the very same predictions, so that their losses can be
    compared.

    Spans of the longest length are laid out first, each inside one document, and then cut into the
    windows of a shorter length: every length predicts the same tokens, each once, and differs only
    in what it sees before them. One span of each document comes first, then another of each, so
    that few tokens still come from many documents. Where in its document a span lies is random, so
    that a position in the window is not one in the file: files begin with licences and imports.
    Where the documents are too short to hold enough spans, further spans run across the ends of
    documents, with a warning.

    Args:
        store: the validation tokens.
        lengths: predictions a window; each divides the longest.
        tokens: predictions at each length, rounded down to whole spans (at least one), fewer if
            there are not as many.
        seed: of the places; the same for all runs that are to be compared.

    Attributes:
        tokens: predictions that each length makes.
        longest: predictions a span.
        documents: how many documents the spans start in.
        starts: where the spans start, in the order in which they are read, int64 [spans].
        crossing: how many of them cross the end of a document.

    Raises:
        LabError: fewer validation tokens than one span takes, or a length that does not divide the
            longest.
    """

    def __init__(self, store: TokenStore, lengths: Sequence[int], tokens: int, *, seed: int = 0) -> None:
        self.store, self.longest = store, max(lengths)
        if odd := [length for length in lengths if self.longest % length]:
            raise LabError(
                f"the length {odd[0]} does not divide the longest, {self.longest}, so both cannot read the same tokens",
                "choose lengths that do, such as doublings of the training length",
            )
        if len(store.validation) <= self.longest:
            raise LabError(
                f"there are {len(store.validation)} validation tokens, one window of {self.longest} takes "
                f"{self.longest + 1}",
                "evaluate shorter lengths, or hold out more of the corpus",
            )
        wanted = max(1, tokens // self.longest)
        inside = self._inside(np.random.default_rng(seed))[:wanted]
        across = self._across(inside)[: wanted - len(inside)]
        self.starts = np.concatenate([inside, across])
        self.tokens = len(self.starts) * self.longest
        self.documents = len(np.unique(self._document(self.starts)))
        self.crossing = int(np.sum(self._document(across) != self._document(across + self.longest)))
        if self.crossing:
            _log.warning(
                "%d of %d windows of %d tokens cross the end of a document: too few of the %d documents are that long",
                self.crossing, len(self.starts), self.longest, len(store.validation_documents),
            )  # fmt: skip

    def batches(self, length: int, batch_tokens: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Windows with the documents they start in, in the same order whatever the batch.

        Args:
            length: one of the lengths.
            batch_tokens: predictions a batch, at least one window.

        Yields:
            (tokens [B, length + 1], documents [B]): the model reads tokens[:, :-1] and predicts
            tokens[:, 1:].
        """
        assert self.longest % length == 0, f"{length} is not among the lengths"
        starts = (self.starts[:, None] + np.arange(0, self.longest, length)).ravel()
        size = max(1, batch_tokens // length)
        for first in range(0, len(starts), size):
            some = starts[first : first + size]
            rows = self.store.validation[some[:, None] + np.arange(length + 1)]  # [B, length + 1]
            yield rows.astype(np.int64), self._document(some)

    def _document(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.store.validation_documents, tokens, side="right") - 1

    def _inside(self, random: np.random.Generator) -> NDArray[np.int64]:
        """Starts of as many spans as fit inside documents: one of each document, another of each,
        and so on.
        """
        starts = np.asarray(self.store.validation_documents)
        sizes = np.diff(starts, append=len(self.store.validation))
        counts = np.maximum(0, sizes - 1) // self.longest  # a span ends with the last token that it predicts
        document = np.repeat(np.arange(len(starts)), counts)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        first = starts + random.integers(np.maximum(1, sizes - counts * self.longest))  # the room that is left over
        shuffled = np.lexsort((random.random(len(number)), document))  # the spans of each document in random order
        found = first[document] + number[shuffled] * self.longest
        return found[np.lexsort((document, number))]

    def _across(self, taken: NDArray[np.int64]) -> NDArray[np.int64]:
        """Starts of the spans that fit between those that are taken, from the first token to the
        last.
        """
        taken = np.sort(taken)
        gaps = zip([0, *(taken + self.longest)], [*taken, len(self.store.validation) - 1], strict=True)
        found = [np.arange(first, last - self.longest + 1, self.longest) for first, last in gaps]
        return np.concatenate(found).astype(np.int64)
