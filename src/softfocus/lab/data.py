"""What a recipe's [data] table stands for: prepared tokens, and the windows of them that training and evaluation read."""

from transformers import AutoTokenizer

from softfocus.lab import tokenizer
from softfocus.lab.progress import Event, Listener
from softfocus.lab.recipe import Recipe
from softfocus.lab.tokens import TokenStore, prepare
from softfocus.lab.windows import TrainingWindows

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
