"""Loss over length: how well a model trained on short windows predicts in long ones."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from softfocus.lab import data
from softfocus.lab import model as models
from softfocus.lab.means import ClusteredMeans, default_edges
from softfocus.lab.progress import Event, Listener, silent
from softfocus.lab.recipe import Recipe, load
from softfocus.lab.results import RECIPE, Bucket, Evaluation, Row, load_run, save_evaluation
from softfocus.lab.rope import forget_lengths, with_dynamic_ntk
from softfocus.lab.windows import EvaluationWindows

LOGITS = 2**24
"""Logits held at once: 64 MB in float32, whatever the vocabulary and the length."""


def evaluate(
    folder: Path,
    lengths: Sequence[int],
    *,
    ntk: Sequence[bool] = (False, True),
    tokens: int | None = None,
    buckets: Sequence[int] | None = None,
    batch_tokens: int = 4096,
    progress: Listener = silent,
) -> Evaluation:
    """Mean loss of a run at several lengths, over all positions and by bucket of positions.

    Every length reads the same validation tokens, cut into windows of that length, and never across a document's end. The
    standard error takes documents, not windows, as what was drawn at random: windows of one document are correlated
    (:class:`softfocus.lab.means.ClusteredMeans` has the formula).

    Memory is bounded by `batch_tokens` for the model and by :data:`LOGITS` for the logits, which are never whole.

    Args:
        folder: a finished run.
        lengths: tokens a window, in any order.
        ntk: False for the rotary embedding as trained, True for dynamic NTK scaling by each length.
        tokens: validation tokens a length; by default the recipe's.
        buckets: edges of positions; by default quarters and powers of two of the training length.
        batch_tokens: tokens a forward pass, at least one window.
        progress: called with a "row" event as each row is finished, and "step" events between.

    Returns:
        What evaluation.json holds. While rows are missing they are kept in evaluation.partial.json.

    Raises:
        LabError: a run that is not finished, a length longer than the tokens at hand, no rotary embedding to scale.
    """
    models.quiet()
    info = load_run(folder)
    recipe = load(folder / RECIPE)
    lengths = sorted(set(lengths))
    wanted = tokens or recipe.evaluate.tokens
    windows = EvaluationWindows(data.tokens(recipe, progress), lengths, wanted)
    evaluation = Evaluation(
        run=info.name,
        mechanism=info.mechanism,
        train_length=info.train_length,
        vocabulary=info.vocabulary,
        tokens=windows.tokens,
        seed=info.seed,
        rows=[],
    )
    pace = _Pace(info.name, len(lengths) * len(ntk) * windows.tokens, progress)
    for scaled in ntk:
        config = models.load_config(folder)
        model = models.load(folder, with_dynamic_ntk(config, info.train_length) if scaled else config)
        for length in lengths:
            forget_lengths(model)
            edges = _edges(buckets, info.train_length, length)
            row = _row(model, windows.batches(length, batch_tokens), edges, scaled, recipe, pace.add)
            evaluation.rows.append(row)
            save_evaluation(folder, evaluation, partial=True)
            progress(Event(kind="row", run=info.name, row=row, done=pace.done, total=pace.total))
    save_evaluation(folder, evaluation)
    progress(Event(kind="done", run=info.name, done=pace.total, total=pace.total))
    return evaluation


class _Pace:
    """Counts tokens and tells how long the rest will take."""

    def __init__(self, run: str, total: int, progress: Listener):
        self.run, self.total, self.done = run, total, 0
        self._progress, self._start = progress, time.perf_counter()

    def add(self, tokens: int) -> None:
        self.done += tokens
        pace = self.done / (time.perf_counter() - self._start)
        left = max(0, self.total - self.done) / pace
        self._progress(
            Event(
                kind="step", run=self.run, done=self.done, total=self.total, tokens_per_second=pace, seconds_left=left
            )
        )


def _edges(buckets: Sequence[int] | None, train_length: int, length: int) -> list[int]:
    if buckets is None:
        return default_edges(train_length, length)
    return sorted({0, length, *(edge for edge in buckets if 0 < edge < length)})


def _row(
    model: Any,
    batches: Iterable[tuple[NDArray[np.integer], NDArray[np.integer]]],
    edges: list[int],
    ntk: bool,
    recipe: Recipe,
    add: Callable[[int], None],
) -> Row:
    means, windows = ClusteredMeans(edges), 0
    for batch, documents in batches:
        losses = token_losses(model, torch.from_numpy(batch.astype(np.int64)), bf16=recipe.train.precision == "bf16")
        means.add(losses.cpu().double().numpy(), documents)
        windows += len(batch)
        add(losses.numel())
    loss, error, tokens = means.bucket()
    found = []
    for index, (start, end) in enumerate(itertools.pairwise(edges)):
        mean, deviation, count = means.bucket(index)
        found.append(Bucket(start=start, end=end, loss=mean, standard_error=deviation, tokens=count))
    return Row(
        length=edges[-1], ntk=ntk, loss=loss, standard_error=error, tokens=tokens, windows=windows, buckets=found
    )


@torch.inference_mode()
def token_losses(model: Any, windows: torch.Tensor, *, bf16: bool = False, logits: int = LOGITS) -> torch.Tensor:
    """The loss of every prediction, without ever holding all logits.

    Args:
        model: a causal language model.
        windows: tokens [B, L + 1].
        bf16: compute as a model trained with bf16 did, under autocast.
        logits: how many logits to hold at once.

    Returns:
        [B, L] in nats, float32.
    """
    windows = windows.to(model.device)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    head = model.get_output_embeddings()
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):
        hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state  # [B, L, D]
        rows, wanted = hidden.flatten(0, 1), targets.flatten()  # [B L, D], [B L]
        chunk = max(1, logits // head.weight.shape[0])
        losses = [
            F.cross_entropy(head(rows[start : start + chunk]).float(), wanted[start : start + chunk], reduction="none")
            for start in range(0, len(rows), chunk)
        ]
    return torch.cat(losses).view(targets.shape)
