"""The loss and the error rate of a run that is measured sample by sample: hidden tokens, images,
speech.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from softfocus.lab import model as models
from softfocus.lab import objective
from softfocus.lab.data import of_recipe as data
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.loss import earlier, warn_of_other_text
from softfocus.lab.evaluate.means import Mean
from softfocus.lab.progress import Event, Listener, Pace, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import RECIPE, load_run, measures, save_measured, to_train_again
from softfocus.lab.run_folder.results import AS_TRAINED, WRONG, Bucket, Evaluation, Row, Setting


@measures
def evaluate_samples(
    folder: Path, *, tokens: int | None = None, batch_tokens: int = 4096, progress: Listener = silent
) -> Evaluation:
    """Mean loss and share of wrong answers of a run, over all samples that were held out.

    The standard errors take documents as what was drawn at random: an image, an utterance, a text.
    Sums by document are kept, so that runs can be compared on the same documents.

    Args:
        folder: a finished run of a recipe with hidden tokens, images or speech.
        tokens: validation tokens of a text with hidden ones; by default the recipe's.
        batch_tokens: tokens a forward pass, at least one sample.
        progress: called with a "row" event for each of the two, and "step" events between.

    Returns:
        What evaluation.json holds.

    Raises:
        LabError: a run that is not finished, or data that are no longer those of its training.
    """
    models.quiet()
    info, recipe = load_run(folder), load(folder / RECIPE)
    if tokens is not None:
        recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"tokens": tokens})})
    source = data.sampled(recipe, progress)
    if source.key != info.corpus_key:
        raise LabError(
            f"the data of {folder} have changed (or moved, or were copied) since it was trained",
            f"put them back as they were, or train again with {to_train_again(folder)}",
        )
    held = source.held_out(recipe)
    length, count = info.train_length, len(held.documents)
    model = models.load(folder, kind=recipe.data.kind)
    found, pace = [], Pace(info.name, count * length, progress)
    size = max(1, batch_tokens // length)
    with models.memory("lower --batch-tokens"), torch.inference_mode():
        for first in range(0, count, size):
            numbers = range(first, min(first + size, count))
            found.append(_scores(model, recipe, [held.sample(number) for number in numbers]))
            pace.add(len(numbers) * length)
    loss, predictions, wrong, answers = np.concatenate(found, axis=1)  # [samples] each
    rows = [
        _row(length, setting, sums, counts, held.documents)
        for setting, sums, counts in ((AS_TRAINED, loss, predictions), (WRONG, wrong, answers))
    ]
    for row in rows:
        progress(Event(kind="row", run=info.name, row=row, done=count * length, total=count * length))
    evaluation = Evaluation(
        **info.named,
        vocabulary=info.vocabulary,
        tokens=count * length,
        corpus_key=source.key,
        longest=length,
        asked=recipe.evaluate.tokens,
        documents=len(set(held.documents)),
        rows=rows,
    )
    warn_of_other_text(folder, earlier(folder, info), evaluation)
    save_measured(folder, evaluation)
    return evaluation


def _scores(model: Any, recipe: Recipe, samples: list[Any]) -> np.ndarray[Any, Any]:
    """[4, samples]."""
    batch = {name: value.to(model.device) for name, value in default_collate(samples).items()}
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=recipe.train.bf16):
        found = objective.scores(recipe.data.kind, model, batch)
    return np.stack([one.double().cpu().numpy() for one in found])


def _row(length: int, setting: Setting, sums: Any, counts: Any, documents: Sequence[int]) -> Row:
    """A mean, with what each document adds to it. A "window" is one prediction."""
    names, place = np.unique(documents, return_inverse=True)
    sums, counts = (np.bincount(place, values, len(names)) for values in (sums, counts))
    mean, total = Mean.of(sums, counts), int(counts.sum())
    bucket = Bucket(
        start=0,
        end=1,
        loss=mean.value,
        standard_error=mean.standard_error,
        tokens=total,
        sums=sums.round(4).tolist(),
    )
    return Row(
        length=length,
        setting=setting,
        loss=mean.value,
        standard_error=mean.standard_error,
        tokens=total,
        windows=total,
        documents=names.tolist(),
        windows_by_document=counts.astype(int).tolist(),
        buckets=[bucket],
    )
