"""What a recipe's [data] table stands for: prepared tokens, and the windows of them that training and evaluation read."""

import filecmp
import logging
from pathlib import Path

from transformers import AutoTokenizer

from softfocus.lab import tokenizer
from softfocus.lab.errors import LabError
from softfocus.lab.progress import Event, Listener
from softfocus.lab.recipe import Recipe
from softfocus.lab.results import MODEL, RECIPE, RunInfo
from softfocus.lab.tokens import TokenStore, prepare
from softfocus.lab.windows import TrainingWindows

_log = logging.getLogger(__name__)

PERCENT = 100


def tokens(recipe: Recipe, listener: Listener) -> TokenStore:
    """The tokens of a recipe, from the cache if they are there.

    The order of documents and what is held out do not depend on train.seed: runs with several seeds share their data.
    """

    def tell(what: str, share: float | None) -> None:
        done, total = (0, 0) if share is None else (round(PERCENT * share), PERCENT)
        listener(Event(kind="prepare", run=recipe.name, message=what, done=done, total=total))

    data = recipe.data
    return prepare(
        data.source,
        data.tokenizer,
        validation_source=data.validation_source,
        validation_fraction=data.validation_fraction,
        text_field=data.text_field,
        max_documents=data.max_documents,
        progress=tell,
    )


def training_windows(recipe: Recipe, store: TokenStore) -> TrainingWindows:
    """Exactly the windows that the steps of a recipe read, in their order."""
    train = recipe.train
    return TrainingWindows(store, train.length, seed=train.seed, count=train.steps * train.batch)


def end_of_document(store: TokenStore) -> int:
    """The id that ends a document."""
    return tokenizer.end_of_document(AutoTokenizer.from_pretrained(store.tokenizer))


def check_unchanged(store: TokenStore, folder: Path, info: RunInfo) -> None:
    """Refuse other ids than a run was trained on, which would make losses meaningless; warn of another corpus.

    Raises:
        LabError: the tokenizer is another one.
    """
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
