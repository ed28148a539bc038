"""Loss over length: how well a model trained on short windows predicts in long ones."""

import filecmp
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from softfocus.lab import data
from softfocus.lab import model as models
from softfocus.lab.errors import LabError
from softfocus.lab.means import ClusteredMeans, default_edges
from softfocus.lab.progress import Event, Listener, silent
from softfocus.lab.recipe import load
from softfocus.lab.results import (
    EVALUATION,
    MODEL,
    RECIPE,
    Bucket,
    Evaluation,
    Row,
    RunInfo,
    load_evaluation,
    load_run,
    save_evaluation,
)
from softfocus.lab.rope import with_dynamic_ntk
from softfocus.lab.tokens import TokenStore
from softfocus.lab.windows import EvaluationWindows

_log = logging.getLogger(__name__)

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

    Every length reads the same validation tokens: spans of the longest length (of these, or of an earlier evaluation of
    this run, if these divide it and as many tokens are asked for), cut into windows of that length
    (:class:`softfocus.lab.windows.EvaluationWindows`). Spans lie inside documents as far as the documents are long enough;
    how many cross the end of one is kept with the result. The standard error takes documents, not windows, as what was
    drawn at random: windows of one document are correlated (:class:`softfocus.lab.means.ClusteredMeans` has the formula).

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
        What evaluation.json holds: these rows, and those that it held already if they were measured on the same text.

    Raises:
        LabError: a run that is not finished, a length longer than the tokens at hand, no rotary embedding to scale.
    """
    models.quiet()
    info = load_run(folder)
    recipe = load(folder / RECIPE)
    lengths = sorted(set(lengths))
    wanted = tokens or recipe.evaluate.tokens
    # All that can be refused is refused before the first pass
    configs = {scaled: models.load_config(folder) for scaled in ntk}
    for scaled, config in configs.items():
        models.check_positions(config, max(lengths), "evaluate --lengths up to {}")
        if scaled:
            with_dynamic_ntk(config, info.train_length)
    store = data.tokens(recipe, progress)
    check_tokens(store, folder, info)
    before = _earlier(folder, info)
    windows = _windows(store, lengths, wanted, before)
    evaluation = Evaluation(
        run=info.name,
        mechanism=info.mechanism,
        train_length=info.train_length,
        vocabulary=info.vocabulary,
        tokens=windows.tokens,
        seed=info.seed,
        corpus_key=store.folder.name,
        longest=windows.longest,
        documents=windows.documents,
        crossing=windows.crossing,
        rows=[],
    )
    pace = _Pace(info.name, len(lengths) * len(ntk) * windows.tokens, progress)
    for scaled, config in configs.items():
        model = models.load(folder, config)
        plain = has_plain_head(model)
        # Ascending: with dynamic NTK, Transformers computes the frequencies anew for a length beyond those seen before
        for length in lengths:
            same = evaluation.row(length) if length <= info.train_length else None
            if same is not None:  # dynamic NTK leaves RoPE as it is there, so nothing is left to compute
                row = same.model_copy(update={"ntk": scaled})
                pace.add(windows.tokens)
            else:
                edges = _edges(buckets, info.train_length, length)
                losses = partial(token_losses, model, bf16=recipe.train.precision == "bf16", plain=plain)
                with models.memory("lower --batch-tokens, or evaluate shorter lengths"):
                    row = _row(losses, windows.batches(length, batch_tokens), edges, scaled, pace.add)
            evaluation.rows.append(row)
            progress(Event(kind="row", run=info.name, row=row, done=pace.done, total=pace.total))
    if before is not None:
        _keep_others(evaluation, before, folder)
    save_evaluation(folder, evaluation)
    return evaluation


def _earlier(folder: Path, info: RunInfo) -> Evaluation | None:
    """What evaluation.json holds of this training."""
    try:
        found = load_evaluation(folder)
    except LabError:  # there is none, or it cannot be read
        return None
    return found if (found.mechanism, found.seed) == (info.mechanism, info.seed) else None


def _windows(store: TokenStore, lengths: list[int], tokens: int, before: Evaluation | None) -> EvaluationWindows:
    """Windows on the text of an earlier evaluation, where these lengths divide its longest; else on their own."""
    if before is not None and before.longest and not any(before.longest % length for length in lengths):
        windows = EvaluationWindows(store, [*lengths, before.longest], tokens)
        if (store.folder.name, windows.longest, windows.tokens) == before.text:
            return windows
    return EvaluationWindows(store, lengths, tokens)


def _keep_others(evaluation: Evaluation, before: Evaluation, folder: Path) -> None:
    """Take over the rows of an earlier evaluation at other lengths, where they can stand beside the new ones."""
    measured = {(row.length, row.ntk) for row in evaluation.rows}
    others = [row for row in before.rows if (row.length, row.ntk) not in measured]
    if before.text == evaluation.text:
        evaluation.rows = sorted(evaluation.rows + others, key=lambda row: (row.ntk, row.length))
    elif others:
        _log.warning(
            "%s held %d losses at other lengths; they were measured on other text, which follows from the longest length "
            "and --tokens, and are gone",
            folder / EVALUATION,
            len(others),
        )


class _Pace:
    """Counts tokens and tells how fast they go."""

    def __init__(self, run: str, total: int, progress: Listener):
        self.run, self.total, self.done = run, total, 0
        self._progress, self._start = progress, time.perf_counter()

    def add(self, tokens: int) -> None:
        self.done += tokens
        pace = self.done / (time.perf_counter() - self._start)
        self._progress(Event(kind="step", run=self.run, done=self.done, total=self.total, tokens_per_second=pace))


def check_tokens(store: TokenStore, folder: Path, info: RunInfo) -> None:
    """Other ids would make the losses meaningless; another cut of the corpus only makes them less than held-out."""
    now, then = store.tokenizer / "tokenizer.json", folder / MODEL / "tokenizer.json"
    if now.is_file() and then.is_file() and not filecmp.cmp(now, then, shallow=False):
        raise LabError(
            f"the tokenizer of {folder} is not the one that its recipe now gives: the corpus it was made from has changed",
            f"put the corpus back, or train again with `softfocus train {folder / RECIPE} --out {folder} --overwrite`",
        )
    if info.corpus_key and info.corpus_key != store.folder.name:
        _log.warning(
            "the corpus of %s has changed since it was trained (or moved, or was copied): what is held out now may have "
            "been trained on",
            folder,
        )


def _edges(buckets: Sequence[int] | None, train_length: int, length: int) -> list[int]:
    if buckets is None:
        return default_edges(train_length, length)
    return sorted({0, length, *(edge for edge in buckets if 0 < edge < length)})


def _row(
    losses: Callable[[torch.Tensor], torch.Tensor],
    batches: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]],
    edges: list[int],
    ntk: bool,
    add: Callable[[int], None],
) -> Row:
    means, windows = ClusteredMeans(edges), 0
    for batch, documents in batches:
        found = losses(torch.from_numpy(batch))  # [B, L]
        means.add(found.double().cpu().numpy(), documents)
        windows += len(batch)
        add(found.numel())
    loss, error, tokens = means.bucket()
    by_position = []
    for index, (start, end) in enumerate(itertools.pairwise(edges)):
        mean, deviation, count = means.bucket(index)
        by_position.append(Bucket(start=start, end=end, loss=mean, standard_error=deviation, tokens=count))
    return Row(
        length=edges[-1], ntk=ntk, loss=loss, standard_error=error, tokens=tokens, windows=windows, buckets=by_position
    )


@torch.inference_mode()
def has_plain_head(model: Any) -> bool:
    """Whether the logits are the output embeddings of the body's last hidden state, and nothing more.

    Some architectures scale or cap them (Cohere, Granite, Gemma); asking the model is the only way to know.
    """
    tokens = torch.arange(2, device=model.device)[None]
    whole = model(input_ids=tokens, use_cache=False).logits
    head = model.get_output_embeddings()
    if head is None:
        return False
    return torch.allclose(head(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state), whole)


@torch.inference_mode()
def token_losses(
    model: Any, windows: torch.Tensor, *, bf16: bool = False, plain: bool = True, logits: int = LOGITS
) -> torch.Tensor:
    """The loss of every prediction, without ever holding all logits.

    Args:
        model: a causal language model.
        windows: tokens [B, L + 1].
        bf16: compute as a model trained with bf16 did, under autocast.
        plain: :func:`has_plain_head`. Without one, the logits of one window at a time are whole.
        logits: how many logits to hold at once.

    Returns:
        [B, L] in nats, float32.
    """
    windows = windows.to(model.device)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):
        if not plain:
            rows = (model(input_ids=one[None], use_cache=False).logits[0] for one in inputs)
            return torch.stack([_cross_entropy(row, wanted) for row, wanted in zip(rows, targets, strict=True)])
        head = model.get_output_embeddings()
        hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)  # [B L, D]
        chunk = max(1, logits // head.weight.shape[0])
        pieces = zip(hidden.split(chunk), targets.flatten().split(chunk), strict=True)
        return torch.cat([_cross_entropy(head(rows), wanted) for rows, wanted in pieces]).view(targets.shape)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")
