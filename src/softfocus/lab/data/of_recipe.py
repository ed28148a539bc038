"""What a recipe's [data] table stands for, text or a generated task: what training reads of it, and how it is named."""

import filecmp
import hashlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer

from softfocus.lab.data import tokenizer
from softfocus.lab.data.tasks import Mqar, Passkey, Task, random_for
from softfocus.lab.data.tokens import TokenStore, prepare
from softfocus.lab.data.windows import EvaluationWindows, TaskWindows, TrainingWindows
from softfocus.lab.errors import LabError
from softfocus.lab.progress import Event, Listener
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import MODEL, RECIPE
from softfocus.lab.run_folder.results import RunInfo

_log = logging.getLogger(__name__)

PERCENT = 100


class Data(Protocol):
    """What training needs of what it reads."""

    @property
    def key(self) -> str:
        """Changes when the same recipe no longer gives the same windows."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""

    @property
    def end_of_document(self) -> int:
        """The id that ends a document."""

    def training_windows(self, recipe: Recipe) -> Dataset[Any]:
        """Exactly the windows that the steps of a recipe read, in their order."""

    def save_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer's files into a folder, for `AutoTokenizer.from_pretrained`."""


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

    def training_windows(self, recipe: Recipe) -> TrainingWindows:
        """Windows of the training tokens."""
        train = recipe.train
        return TrainingWindows(self.store, train.length, seed=train.seed, count=train.steps * train.batch)

    def validation_windows(self, recipe: Recipe) -> torch.Tensor:
        """Windows of the training length with `evaluate.tokens` validation tokens, int64 [W, L + 1]."""
        windows = EvaluationWindows(self.store, [recipe.train.length], recipe.evaluate.tokens)
        ((found, _),) = windows.batches(recipe.train.length, windows.tokens)
        return torch.from_numpy(found)

    def save_tokenizer(self, folder: Path) -> None:
        """The files as they are in the token cache: evaluation compares them."""
        shutil.copytree(self.store.tokenizer, folder, dirs_exist_ok=True)


@dataclass(frozen=True)
class Generated:
    """Sequences of a task."""

    task: Task

    @property
    def key(self) -> str:
        """A digest of the first sequence: it changes with the generator."""
        sample = self.task.sample(random_for("training", 0, 0), 2 * self.task.least())
        digest = hashlib.sha256(sample.tokens.tobytes() + sample.labels.tobytes()).hexdigest()
        return f"{type(self.task).__name__.lower()}-{digest[:12]}"

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
        return TaskWindows(self.task, train.length, seed=train.seed, count=train.steps * train.batch)

    def save_tokenizer(self, folder: Path) -> None:
        """A word for each id."""
        tokenizer.save(tokenizer.word_tokenizer(self.task.words), folder)


def load(recipe: Recipe, listener: Listener) -> Data:
    """What a recipe is trained on."""
    task = task_of(recipe)
    return Text(tokens(recipe, listener)) if task is None else Generated(task)


def task_of(recipe: Recipe) -> Task | None:
    """The generated task of a recipe, or None if it is trained on text."""
    table = recipe.data
    if table.mqar is not None:
        return Mqar(**table.mqar.model_dump())
    return Passkey(**table.passkey.model_dump()) if table.passkey is not None else None


def tokens(recipe: Recipe, listener: Listener) -> TokenStore:
    """The tokens of a recipe, from the cache if they are there.

    The order of documents and what is held out do not depend on train.seed: runs with several seeds share their data.

    Raises:
        LabError: what `prepare` raises, or a recipe that is trained on a generated task.
    """

    def tell(what: str, share: float | None) -> None:
        done, total = (0, 0) if share is None else (round(PERCENT * share), PERCENT)
        listener(Event(kind="prepare", run=recipe.name, message=what, done=done, total=total))

    table = recipe.data
    if table.source is None:
        raise LabError(
            f"{recipe.name} is trained on a generated task and not on text", "measure it with `softfocus recall RUN`"
        )
    return prepare(
        table.source,
        table.tokenizer,
        validation_source=table.validation_source,
        validation_fraction=table.validation_fraction,
        text_field=table.text_field,
        max_documents=table.max_documents,
        progress=tell,
    )


def check_unchanged(store: TokenStore, folder: Path, info: RunInfo) -> None:
    """Refuse other ids than a run was trained on, which would make losses meaningless; warn of another corpus.

    Raises:
        LabError: the tokenizer is another one.
    """
    now, then = store.tokenizer / "tokenizer.json", folder / MODEL / "tokenizer.json"
    same = not (now.is_file() and then.is_file()) or filecmp.cmp(now, then, shallow=False)
    if not same or store.vocab_size != info.vocabulary:
        raise LabError(
            f"the tokenizer of {folder} is not the one that its recipe now gives: what it was made from has changed, or "
            f"{folder / MODEL} is damaged",
            f"put it back, or train again with `softfocus train {folder / RECIPE} --out {folder} --overwrite`",
        )
    if info.corpus_key and info.corpus_key != store.folder.name:
        _log.warning(
            "the corpus of %s has changed since it was trained (or moved, or was copied): what is held out now may have "
            "been trained on",
            folder,
        )
