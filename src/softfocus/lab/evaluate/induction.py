"""Induction: the loss of a language model on tokens that repeat something, by how far back it
stood.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.windows import EvaluationWindows
from softfocus.lab.evaluate.forward import losses_of, open_run
from softfocus.lab.evaluate.means import Mean
from softfocus.lab.progress import Event, Listener, silent
from softfocus.lab.run_folder.files import measures, save_measured, with_rows_so_far
from softfocus.lab.run_folder.results import NGRAM, Induction, InductionRow, Repeats


@measures
def induction(
    folder: Path,
    lengths: Sequence[int],
    *,
    ngram: int = NGRAM,
    window: int | None = None,
    tokens: int | None = None,
    batch_tokens: int = 4096,
    progress: Listener = silent,
) -> Induction:
    """Mean loss of a run by how far back the n-gram that ends with the predicted token stood
    before.

    A token that continues a repeat can be copied by a model that sees the repeat. Spans of the
    longest length are laid out as for :func:`softfocus.lab.evaluate.loss.evaluate`, and the latest
    repeat of each token is looked for in its span. Each length then predicts the same tokens in
    windows of that length, so that a token stands in the same bucket at every length: at the
    longest the model is given all repeats, at 1x none that lie beyond the training length.

    Each row is written to induction.json as it is finished. Rows that are there already are kept,
    if they were measured on the same text with the same n-grams: what was killed goes on with
    those. Else they are replaced, with a warning.

    Args:
        folder: a finished run of a recipe with text.
        lengths: tokens a window, in any order; each divides the longest.
        ngram: tokens that have to repeat, the predicted one included; at least 2.
        window: let every attention see only so many of the last keys; by default as trained.
        tokens: validation tokens a length; by default the recipe's.
        batch_tokens: tokens a forward pass, at least one window.
        progress: called with a "row" event as each row is finished, and "step" events between.

    Returns:
        What induction.json holds.

    Raises:
        LabError: a run that is not finished, one that was trained on a task, or lengths that do not
            fit the text.
    """
    info, recipe, config = open_run(folder, max(lengths), "induction --lengths up to {}", window)
    store = data.tokens(recipe, folder, info, progress)
    spans = EvaluationWindows(store, lengths, tokens or recipe.evaluate.tokens)
    found = with_rows_so_far(
        folder,
        Induction(
            **info.named,
            corpus_key=store.folder.name,
            ngram=ngram,
            longest=spans.longest,
            tokens=spans.tokens,
            documents=spans.documents,
            rows=[],
        ),
    )
    there = {(row.length, row.window) for row in found.rows}
    wanted = [length for length in sorted(set(lengths)) if (length, window) not in there]
    if not wanted:
        return found
    losses_in = losses_of(models.load(folder, config), recipe)
    limits = edges(info.train_length, spans.longest)
    done, total = 0, spans.tokens * len(wanted)
    for length in wanted:
        sums, counts = (np.zeros((len(store.validation_documents), len(limits) - 1)) for _ in range(2))
        with models.memory("lower --batch-tokens, or measure shorter lengths"):
            for span, document in _spans(spans):
                losses = _losses(losses_in, span, length, batch_tokens)
                bucket = np.searchsorted(limits, repeats(span, ngram), side="right") - 1
                np.add.at(sums[document], bucket, losses)
                np.add.at(counts[document], bucket, 1)
                done += len(losses)
                progress(Event(kind="step", run=info.name, done=done, total=total))
        row = InductionRow(length=length, window=window, by_distance=list(_buckets(limits, sums, counts)))
        found.rows = sorted([*found.rows, row], key=lambda row: (row.window or 0, row.length))
        save_measured(folder, found)
        message = f"length {length:>7,}: loss by distance of the repeat measured"
        progress(Event(kind="row", run=info.name, message=message, done=done, total=total))
    return found


def repeats(tokens: NDArray[np.int64], ngram: int) -> NDArray[np.int64]:
    """How far before each predicted token the n-gram that ends with it stood last.

    Args:
        tokens: [L + 1]; tokens[1:] are predicted.
        ngram: at least 2.

    Returns:
        Distances [L], 0 where it never stood before.
    """
    found = np.zeros(len(tokens) - 1, np.int64)
    if len(tokens) > ngram:
        grams = np.lib.stride_tricks.sliding_window_view(tokens, ngram)  # [L + 2 - n, n]
        _, kinds = np.unique(grams, axis=0, return_inverse=True)
        order = np.argsort(kinds.ravel(), kind="stable")  # by n-gram, then by place
        repeated = np.diff(kinds.ravel()[order]) == 0
        found[order[1:][repeated] + ngram - 2] = np.diff(order)[repeated]
    return found


def difference(one: Repeats, other: Repeats) -> Mean | None:
    """The loss of one less that of the other, both of the same tokens, paired by document; None
    where an early result does not have the sums of documents.
    """
    if not one.counts or one.counts != other.counts:
        return None
    return _mean(one.sums, one.counts) - _mean(other.sums, other.counts)


def edges(train_length: int, longest: int) -> list[int]:
    """Bucket edges of distances: 0 (never), 1, and powers of two of the training length from a half
    on.
    """
    found, edge = [0, 1], max(2, train_length // 2)
    while edge < longest:
        found.append(edge)
        edge *= 2
    return [*found, longest + 1]


def _spans(spans: EvaluationWindows) -> Iterator[tuple[NDArray[np.int64], int]]:
    for batch, documents in spans.batches(spans.longest, spans.longest):
        yield from zip(batch, documents.tolist(), strict=True)


def _losses(
    losses_in: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    span: NDArray[np.int64],
    length: int,
    batch_tokens: int,
) -> NDArray[np.float64]:
    """The loss of every prediction of a span [longest + 1], in windows of a length: [longest]."""
    starts = np.arange(0, len(span) - 1, length)
    windows, size = span[starts[:, None] + np.arange(length + 1)], max(1, batch_tokens // length)
    return np.concatenate([losses_in(windows[first : first + size]) for first in range(0, len(windows), size)]).ravel()


def _buckets(limits: list[int], sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Iterator[Repeats]:
    read = counts.any(axis=1)  # documents that the spans start in
    sums, counts = sums[read], counts[read].astype(np.int64)
    for index, (start, end) in enumerate(pairwise(limits)):
        if counts[:, index].any():
            mean = _mean(sums[:, index], counts[:, index])
            yield Repeats(
                start=start,
                end=end,
                loss=mean.value,
                standard_error=mean.standard_error,
                tokens=int(counts[:, index].sum()),
                sums=[round(total, 4) for total in sums[:, index].tolist()],
                counts=counts[:, index].tolist(),
            )


def _mean(sums: ArrayLike, counts: ArrayLike) -> Mean:
    """Over the documents that have such tokens."""
    total, count = np.asarray(sums, np.float64), np.asarray(counts, np.int64)
    return Mean.of(total[count > 0], count[count > 0], tuple(count.tolist()))
