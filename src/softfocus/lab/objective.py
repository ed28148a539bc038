"""What a model is trained for, and measured by: the loss of a batch, and which of its predictions
are wrong.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from softfocus.lab import model as models
from softfocus.lab.data.samples import Inputs
from softfocus.lab.data.speech import BLANK, SPACE
from softfocus.lab.data.tasks import IGNORED
from softfocus.lab.recipes.data import Kind


class Scores(NamedTuple):
    """Of each sample of a batch, each [B].

    Attributes:
        loss: in nats, summed over its predictions.
        predictions: how many there are.
        wrong: how many answers are wrong.
        answers: how many there are.
    """

    loss: Tensor
    predictions: Tensor
    wrong: Tensor
    answers: Tensor


def loss(kind: Kind, model: Any, inputs: Inputs) -> Tensor:
    """The mean over the predictions of a batch, in nats, in float32 whatever the model computes in.

    Of speech, the mean over utterances of CTC's loss a character.
    """
    if kind == "speech":
        _, each, lengths, _ = _transcribed(model, inputs)
        return (each / lengths).mean()
    return F.cross_entropy(logits(kind, model, inputs).flatten(0, -2), inputs["labels"].flatten())


def scores(kind: Kind, model: Any, inputs: Inputs) -> Scores:
    """What is measured of a batch. The likeliest prediction is the answer.

    Of speech, predictions are characters and answers are words. The likeliest id of each frame is
    taken, without a search.
    """
    if kind == "speech":
        predicted, each, lengths, frames = _transcribed(model, inputs)
        likeliest = zip(predicted.argmax(-1).tolist(), frames.tolist(), strict=True)
        read = [_words(_collapsed(row[:count])) for row, count in likeliest]
        meant = [_words([id for id in row if id != IGNORED]) for row in inputs["labels"].tolist()]
        errors = [edit_distance(one, other) for one, other in zip(read, meant, strict=True)]
        return Scores(each, lengths, torch.tensor(errors), torch.tensor([len(words) for words in meant]))
    predicted, labels = logits(kind, model, inputs), inputs["labels"]
    each = F.cross_entropy(predicted.flatten(0, -2), labels.flatten(), reduction="none").view(len(labels), -1)
    asked = labels.view(len(labels), -1) != IGNORED
    wrong = asked & (predicted.argmax(-1) != labels).view(len(labels), -1)
    return Scores(each.sum(1), asked.sum(1), wrong.sum(1), asked.sum(1))


def logits(kind: Kind, model: Any, inputs: Inputs) -> Tensor:
    """The logits of a model, in float32. Labels among the inputs are left out."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    options = {"use_cache": False} if kind in ("text", "task") else {}
    return model(**given, **options).logits.float()


def _transcribed(model: Any, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits [B, frames, characters], CTC's loss [B] in nats, characters of the text [B], frames
    that were heard [B]).
    """
    mask, labels = inputs["attention_mask"], inputs["labels"]
    predicted = logits("speech", model, inputs)
    frames = models.frames(getattr(model, "module", model).config, mask.sum(1))  # DDP's model is in another one
    lengths = (labels != IGNORED).sum(1)
    # Under autocast ctc_loss is float32 by itself
    chances = predicted.log_softmax(-1).transpose(0, 1)
    each = F.ctc_loss(chances, labels.clamp(min=0), frames, lengths, blank=BLANK, reduction="none")
    return predicted, each, lengths, frames


def _collapsed(ids: Sequence[int]) -> list[int]:
    """The text of a sequence of frames, by CTC: repeats count once, and blanks not at all."""
    return [id for id, before in zip(ids, [BLANK, *ids], strict=False) if id not in (before, BLANK)]


def _words(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Ids between spaces."""
    return [tuple(word) for space, word in groupby(ids, lambda id: id == SPACE) if not space]


def edit_distance(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Levenshtein's: how many insertions, deletions and replacements make one sequence of the
    other.
    """
    distances = list(range(len(other) + 1))
    for count, item in enumerate(one, start=1):
        before, distances = distances, [count]
        for place, wanted in enumerate(other):
            replaced = before[place] + (item != wanted)
            distances.append(min(before[place + 1] + 1, distances[place] + 1, replaced))
    return distances[-1]
