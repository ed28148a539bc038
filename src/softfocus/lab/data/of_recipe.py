"""What a recipe's [data] table stands for, text, images, speech, a task: what training reads, and
its name.
"""

import filecmp
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import AutoTokenizer

from softfocus.lab.data import tokenizer
from softfocus.lab.data.images import Glyphs, ImageFolder
from softfocus.lab.data.samples import HeldOut, InOrder, Inputs, folders_of, hide
from softfocus.lab.data.speech import LibriSpeech, Syllables
from softfocus.lab.data.tasks import Mqar, Passkey, Task, digest, random_for
from softfocus.lab.data.tokens import TokenStore, default_cache, plan_of, prepare
from softfocus.lab.data.windows import EvaluationWindows, TaskWindows, TrainingWindows
from softfocus.lab.errors import LabError
from softfocus.lab.progress import Listener, preparing, silent
from softfocus.lab.recipes.data import TRAINED_ON
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import MODEL, to_train_again
from softfocus.lab.run_folder.results import RunInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """Tokens of a corpus."""

    store: TokenStore

    @property
    def key(self) -> str:
        """The key of the token cache."""
        return self.store.folder.name

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer."""
        return self.store.vocab_size

    @property
    def end_of_document(self) -> int:
        """The id that ends a document."""
        return tokenizer.end_of_document(AutoTokenizer.from_pretrained(self.store.tokenizer))

    def training_windows(self, recipe: Recipe) -> Dataset[Any]:
        """Windows of the training tokens."""
        train = recipe.train
        return TrainingWindows(self.store, train.length, seed=train.seed, count=train.windows)

    def validation_windows(self, recipe: Recipe) -> torch.Tensor:
        """Windows of the training length with `evaluate.tokens` validation tokens, int64 [W, L +
        1].
        """
        windows = EvaluationWindows(self.store, [recipe.train.length], recipe.evaluate.tokens)
        ((found, _),) = windows.batches(recipe.train.length, windows.tokens)
        return torch.from_numpy(found)

    def save_tokenizer(self, folder: Path) -> None:
        """The files as they are in the token cache: evaluation compares them."""
        shutil.copytree(self.store.tokenizer, folder, dirs_exist_ok=True)


@dataclass(frozen=True)
class Masked(Text):
    """Windows of a corpus with a share of the tokens hidden. The mask is one token more than the
    tokenizer has.
    """

    share: float

    @property
    def vocab_size(self) -> int:
        """With the mask."""
        return self.store.vocab_size + 1

    def training_windows(self, recipe: Recipe) -> Dataset[Any]:
        """The windows of the text; what is hidden is drawn anew in every pass."""
        train, text = recipe.train, super().training_windows(recipe)
        return InOrder(
            lambda random, index: self._hide(text[index]["input_ids"].numpy(), random),
            seed=train.seed,
            count=train.windows,
        )

    def held_out(self, recipe: Recipe) -> HeldOut:
        """Windows of the validation documents. What is hidden is the same for every run."""
        length = recipe.train.length
        spans = EvaluationWindows(self.store, [length], recipe.evaluate.tokens)
        found = [(row[:-1], int(document)) for (row,), (document,) in spans.batches(length, length)]
        return HeldOut(
            lambda index: self._hide(found[index][0], random_for("evaluation", 0, index)),
            [document for _, document in found],
        )

    def _hide(self, tokens: NDArray[np.int64], random: np.random.Generator) -> Inputs:
        return hide(tokens, self.share, self.store.vocab_size, random)


@dataclass(frozen=True)
class Generated:
    """Sequences of a task."""

    task: Task

    @property
    def key(self) -> str:
        """A digest of the first sequence: it changes with the generator."""
        return digest(self.task)

    @property
    def vocab_size(self) -> int:
        """The words, and the end of a document."""
        return len(self.task.words) + 1

    @property
    def end_of_document(self) -> int:
        """The last id, which no sequence holds."""
        return len(self.task.words)

    def training_windows(self, recipe: Recipe) -> TaskWindows:
        """Sequences of the task."""
        train = recipe.train
        return TaskWindows(self.task, train.length, seed=train.seed, count=train.windows)

    def save_tokenizer(self, folder: Path) -> None:
        """A word for each id."""
        tokenizer.save(tokenizer.word_tokenizer(self.task.words), folder)


Sampled = Masked | Glyphs | ImageFolder | Syllables | LibriSpeech
"""What is measured sample by sample, too: no step reads what `held_out` gives."""

Data = Text | Generated | Sampled
"""What training reads. Its `key` changes when the same recipe no longer gives the same windows.
`save_tokenizer` writes nothing where there is no tokenizer.
"""


def load(recipe: Recipe, listener: Listener) -> Data:
    """What a recipe is trained on."""
    if recipe.data.kind in ("masked", "images", "speech"):
        return sampled(recipe, listener)
    task = task_of(recipe)
    return Text(_tokens(recipe, listener)) if task is None else Generated(task)


def sampled(recipe: Recipe, listener: Listener) -> Sampled:
    """What a recipe is trained on and measured on, sample by sample."""
    if recipe.data.masked is not None:
        return Masked(_tokens(recipe, listener), recipe.data.masked)
    if recipe.data.speech is not None:
        return Syllables(recipe.data.speech) if recipe.data.source is None else LibriSpeech(recipe, listener)
    assert recipe.data.images is not None
    return Glyphs(recipe.data.images) if recipe.data.source is None else ImageFolder(recipe)


def task_of(recipe: Recipe) -> Task | None:
    """The generated task of a recipe, or None if it is trained on text."""
    table = recipe.data
    if table.mqar is not None:
        return Mqar(**table.mqar.model_dump())
    return Passkey(**table.passkey.model_dump()) if table.passkey is not None else None


def refuse_without_text(recipe: Recipe) -> None:
    """Refuse a recipe whose model does not learn to go on with a text.

    Raises:
        LabError: it is trained on something else.
    """
    kind = recipe.data.kind
    if kind != "text":
        command = "recall" if kind == "task" else "evaluate"
        raise LabError(
            f"{recipe.name} is trained on {TRAINED_ON[kind]} and not on text",
            f"measure it with `softfocus {command} RUN`",
        )


def tokens(recipe: Recipe, folder: Path, info: RunInfo, listener: Listener) -> TokenStore:
    """The tokens that a run was trained on, from the cache if they are there.

    Other ids would make losses meaningless, and are refused; of another corpus there is a warning.

    Raises:
        LabError: what `prepare` raises, a recipe whose model does not learn to go on with a text,
            or a tokenizer that is not the run's.
    """
    refuse_without_text(recipe)
    store = _tokens(recipe, listener)
    now, then = store.tokenizer / "tokenizer.json", folder / MODEL / "tokenizer.json"
    same = not (now.is_file() and then.is_file()) or filecmp.cmp(now, then, shallow=False)
    if not same or store.vocab_size != info.vocabulary:
        raise LabError(
            f"the tokenizer of {folder} is not the one that its recipe now gives: "
            f"what it was made from has changed, or {folder / MODEL} is damaged",
            f"put it back, or train again with {to_train_again(folder)}",
        )
    if info.corpus_key and info.corpus_key != store.folder.name:
        _log.warning(
            "the corpus of %s has changed since it was trained (or moved, or was copied): "
            "what is held out now may have been trained on",
            folder,
        )
    return store


def key(recipe: Recipe) -> str:
    """The key of what a recipe is trained on. No text is tokenised for it, and no shard copied.

    Raises:
        LabError: data that cannot be found.
    """
    if recipe.data.kind not in ("text", "masked"):
        return load(recipe, silent).key
    return plan_of(recipe.data).key


def to_copy(recipes: Iterable[Recipe]) -> int:
    """Bytes of shards that are copied into the token cache before recipes train, and are not there
    yet. What several of them read is copied once.

    Raises:
        LabError: data that cannot be found.
    """
    tables = list(dict.fromkeys(recipe.data for recipe in recipes))
    for table in tables:
        if table.kind in ("images", "speech") and table.source is not None:
            folders_of(table)
    plans = {plan.key: plan for plan in map(plan_of, (table for table in tables if table.kind in ("text", "masked")))}
    return sum(plan.shard_bytes for key, plan in plans.items() if not (default_cache() / key).exists())


def _tokens(recipe: Recipe, listener: Listener) -> TokenStore:
    """Of a recipe, from the cache if they are there. The order of documents and what is held out do
    not depend on train.seed: runs with several seeds share their data.
    """

    return prepare(recipe.data, progress=lambda what, share: listener(preparing(recipe.name, what, share)))
