"""Recall over length: how many answers of a generated task a run finds, and how far back they lie.
A run that was trained on text is asked for passkeys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import softfocus.hf
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.tasks import IGNORED, Asking, PasskeyInText, check_length, digest, random_for
from softfocus.lab.data.tokenizer import Encoder
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.forward import has_plain_head, open_run
from softfocus.lab.evaluate.means import Mean
from softfocus.lab.progress import Event, Listener, silent
from softfocus.lab.recipes.data import TRAINED_ON
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import RECIPE, load_run, measures, save_measured, with_rows_so_far
from softfocus.lab.run_folder.results import SEQUENCES, Answers, Recall, RecallRow, RunInfo


@dataclass(frozen=True)
class _Plan:
    """A row to measure."""

    task: Asking
    length: int
    grown: bool
    nearest: int


@measures
def recall(
    folder: Path,
    lengths: Sequence[int],
    *,
    window: int | None = None,
    sequences: int = SEQUENCES,
    batch_tokens: int = 4096,
    progress: Listener = silent,
) -> Recall:
    """Share of right answers of a run at several lengths, over all answers and by how far back they
    lie.

    A run of a generated task is asked what it was trained on. A language model that was trained on
    text is asked for a number of five digits that stands in filler text, without any training for
    it (:class:`~softfocus.lab.data.tasks.PasskeyInText`).

    Sequences are lengthened in two ways: by filler alone, and with as many times more to remember
    (where the task has that, and keys enough). Up to the training length they are like those of
    training. Beyond it every answer lies at least half the sequence back, or as far as there is
    room, and never nearer than in training: at a length of 4 times the training length or more, a
    window of the training length in two layers reaches none.

    Each row is written to recall.json as it is finished. Rows that are there already are kept and
    not measured again.

    Args:
        folder: a finished run of a recipe with a generated task, or with text.
        lengths: tokens a sequence, in any order.
        window: let every attention see only so many of the last keys; by default as trained.
        sequences: how many at each length; the same ones for every run.
        batch_tokens: tokens a forward pass, at least one sequence.
        progress: called with a "row" event as each row is finished, and "step" events between.

    Returns:
        What recall.json holds.

    Raises:
        LabError: a run that is not finished, one that was trained on hidden tokens, images or
            speech, or a length that cannot hold a sequence.
    """
    info, recipe, config = open_run(folder, max(lengths), "recall --lengths up to {}", window)
    task = _task(folder, recipe)
    found, plans = _left(folder, info, task, lengths, window, sequences)
    if not plans:
        return found
    model = models.load(folder, config)
    plain, bf16 = has_plain_head(model), recipe.train.bf16
    done, total = 0, sequences * sum(plan.length for plan in plans)
    for plan in plans:
        with models.memory("lower --batch-tokens, or measure shorter lengths"):
            parts = []
            for first in range(0, sequences, size := max(1, batch_tokens // plan.length)):
                count = min(size, sequences - first)
                parts.append(_answers(model, plan, range(first, first + count), bf16=bf16, plain=plain))
                done += count * plan.length
                progress(Event(kind="step", run=info.name, done=done, total=total))
        right, distances = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        row = _row(plan, right, distances, info.train_length, window, reach(config))
        found.rows = sorted([*found.rows, row], key=lambda row: (row.window or 0, row.grown, row.length))
        save_measured(folder, found)
        progress(Event(kind="row", run=info.name, message=row_text(row), done=done, total=total))
    return found


def least_length(folder: Path) -> int:
    """Tokens that the shortest sequence of a run's task takes.

    Raises:
        LabError: a run that is not finished, or one that was trained on hidden tokens, images or
            speech.
    """
    load_run(folder)
    return _task(folder, load(folder / RECIPE)).least()


def is_measured(folder: Path, lengths: Sequence[int]) -> bool:
    """Whether recall.json holds all that :func:`recall` measures at these lengths when nothing else
    is asked for.

    Raises:
        LabError: a run that is not finished, a recall.json that cannot be read, or a length that
            cannot hold a sequence.
    """
    task = _task(folder, load(folder / RECIPE))
    return not _left(folder, load_run(folder), task, lengths, None, SEQUENCES)[1]


def reach(config: Any) -> int | None:
    """How many tokens back can matter to a prediction: windows add up through the layers. None
    where there is no limit.
    """
    layout = softfocus.hf.layout_of(config)
    assert layout is not None, "every run has a mechanism"
    total = 0
    for number in range(config.num_hidden_layers):
        for group in (groups := layout.layer(number)):
            if group.window is None or group.sinks:
                return None
        total += max((group.window or 0) - 1 for group in groups)
    return total


def row_text(row: RecallRow) -> str:
    """A row in one line."""
    how = "more to remember" if row.grown else "more filler"
    return (
        f"length {row.length:>7,}, {how:16} {row.accuracy:.3f} ± {row.standard_error:.3f} of {row.answers:,} answers "
        f"right (chance is {row.chance_text}), all of them in {row.complete:.3f} of {row.sequences:,} sequences"
    )


def edges(train_length: int, length: int) -> list[int]:
    """Bucket edges of distances: powers of two of the training length from a quarter on, and the
    midpoints between them.
    """
    found, edge = {0, length + 1}, max(1, train_length // 4)
    while edge < length:
        found |= {edge, edge + edge // 2}
        edge *= 2
    return sorted(edge for edge in found if edge <= length + 1)


def _task(folder: Path, recipe: Recipe) -> Asking:
    """What a run is asked for."""
    if (task := data.task_of(recipe)) is not None:
        return task
    if recipe.data.kind != "text":
        raise LabError(
            f"{folder} was trained on {TRAINED_ON[recipe.data.kind]}, and this is for models that go on with a text",
            f"measure it with `softfocus evaluate {folder}`",
        )
    encode = Encoder(models.load_tokenizer(folder))

    def ids(text: str) -> list[int]:
        ((found, lost),) = encode([text])
        if lost:
            what = f"the tokenizer of {folder} has no tokens for parts of the passkey's sentences"
            raise LabError(what, "measure a run on English text")
        return list(found)

    return PasskeyInText(ids)


def _left(
    folder: Path, info: RunInfo, task: Asking, lengths: Sequence[int], window: int | None, sequences: int
) -> tuple[Recall, list[_Plan]]:
    """What recall.json holds, and what is still to be measured."""
    plans = list(_plans(task, sorted(set(lengths)), info.train_length))
    fresh = Recall(**info.named, task=digest(task), rows=[])
    found = with_rows_so_far(folder, fresh)
    there = {row.key for row in found.rows}
    return found, [plan for plan in plans if (plan.length, plan.grown, window, sequences) not in there]


def _plans(task: Asking, lengths: Sequence[int], train_length: int) -> Iterator[_Plan]:
    """First with more filler, then with more to remember."""
    for grown in (False, True):
        for length in lengths:
            factor, rest = divmod(length, train_length)
            there = task if not grown else task.grown(factor) if factor > 1 and not rest else None
            if there is None:
                continue
            check_length(there, length, remedy="measure {} tokens or more, with --lengths")
            half = min(length // 2, there.farthest(length)) if length > train_length else 0
            yield _Plan(there, length, grown, nearest=max(half, there.nearest))


@torch.inference_mode()
def _answers(
    model: Any, plan: _Plan, indices: Sequence[int], *, bf16: bool, plain: bool
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """(right [B, answers], distances [B, answers]) of some sequences. Logits are made where
    something is asked for. One answer is right where all of its tokens are.
    """
    samples = [plan.task.sample(random_for("evaluation", 0, index), plan.length, plan.nearest) for index in indices]
    tokens, labels, distances = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("tokens", "labels", "distances")
    )
    asked = labels != IGNORED
    tokens = tokens.to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):
        if plain:
            hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            logits = model.get_output_embeddings()(hidden[asked])
        else:
            logits = model(input_ids=tokens, use_cache=False).logits[asked]
    right = logits.argmax(-1).cpu() == labels[asked]
    sizes = asked.sum(1).tolist()
    if plan.task.answers == 1:
        right = torch.stack([tokens.all() for tokens in right.split(sizes)])
        first = torch.stack([places[0] for places in distances[asked].split(sizes)])
        return right[:, None].numpy(), first[:, None].numpy()
    shape = len(samples), plan.task.answers
    return right.view(shape).numpy(), distances[asked].view(shape).numpy()


def _share(right: NDArray[np.bool_], of: NDArray[np.bool_]) -> tuple[float, float]:
    """Share of right answers among some [sequences, answers], and its standard error, for which a
    sequence is the unit.
    """
    counts = of.sum(1)
    mean = Mean.of((right & of).sum(1)[counts > 0], counts[counts > 0])
    return mean.value, mean.standard_error


def _row(
    plan: _Plan,
    right: NDArray[np.bool_],
    distances: NDArray[np.int64],
    train_length: int,
    window: int | None,
    reach: int | None,
) -> RecallRow:
    """What came out of a plan: right and distances are [sequences, answers]."""
    assert distances.min() >= plan.nearest
    each = np.ones_like(right)
    accuracy, error = _share(right, each)
    complete, complete_error = _share(np.array(right.all(1, keepdims=True)), each[:, :1])
    by_distance = []
    for start, end in pairwise(edges(train_length, plan.length)):
        inside = (start <= distances) & (distances < end)
        if inside.any():
            mean, deviation = _share(right, inside)
            by_distance.append(
                Answers(start=start, end=end, accuracy=mean, standard_error=deviation, answers=int(inside.sum()))
            )
    return RecallRow(
        length=plan.length,
        grown=plan.grown,
        window=window,
        nearest=plan.nearest,
        reach=reach,
        chance=plan.task.chance,
        sequences=len(right),
        answers=right.size,
        accuracy=accuracy,
        standard_error=error,
        complete=complete,
        complete_error=complete_error,
        by_distance=by_distance,
    )
