"""Fine-tuning on text classification: of labelled examples, or whether one piece of text goes on
where another one ends. Accuracy on examples that are held out.
"""

import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from softfocus.hf.config import layout_of
from softfocus.lab import laser_ablation
from softfocus.lab import model as models
from softfocus.lab.data import labelled
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.tasks import random_for
from softfocus.lab.data.tokenizer import end_of_document
from softfocus.lab.errors import LabError, first_line
from softfocus.lab.evaluate.means import Mean
from softfocus.lab.progress import Event, Listener, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder import provenance
from softfocus.lab.run_folder.disk import check_room, folder_bytes, writing
from softfocus.lab.run_folder.files import (
    CHECKPOINTS,
    LABELLED,
    MODEL,
    RECIPE,
    UNFINISHED_CLASSIFICATION,
    load_measured,
    load_run,
    measures,
    save_measured,
)
from softfocus.lab.run_folder.results import Classification, Labelled, LabelledRow, RunInfo
from softfocus.lab.train import checkpoints

_log = logging.getLogger(__name__)

LONGEST = 128
"""Tokens an example, both pieces together; fewer where the training length is shorter."""
TRAINING, EPOCHS, TEST, BATCH = 4096, 3, 2048, 32
RATE = 0.25
"""The learning rate at the start, as a share of that of the training before; it falls linearly to
0.
"""
SAVED = 0.1
"""The share of the steps between two checkpoints, rounded up to whole steps."""
_REMEDY = "free some space, or make the folder writable; then call it again"
CHECKPOINTS_SIZE = 3 * 12
"""Bytes a parameter: weight and two moments in float32, of two checkpoints that are kept and one
that is written.
"""


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Two pieces of text of one length, after one another: of one document, where the second
    follows the first, or of two.

    The seed decides all of them, so every run sees the same ones.

    Args:
        tokens: of all documents, one after another.
        starts: where each document starts.
        length: of both pieces together.
        count: how many pairs.
        random: draws them.

    Attributes:
        inputs: int64 [count, length].
        labels: int64 [count], 1 where the second piece follows.
        documents: of the first piece, int64 [count].

    Raises:
        LabError: fewer than two documents are long enough.
    """

    def __init__(
        self, tokens: NDArray[Any], starts: NDArray[np.int64], length: int, count: int, random: np.random.Generator
    ) -> None:
        ends = np.append(starts[1:], len(tokens)) - 1  # a document's first or last token is the mark of its end
        starts, half = starts + 1, length // 2
        long = np.flatnonzero(ends - starts >= 2 * half)
        if len(long) < 2:
            raise LabError(
                f"{len(long)} documents have the {2 * half} tokens of an example, and two pieces need two documents",
                "classify with a corpus of longer documents",
            )
        first = random.integers(len(long), size=count)
        other = (first + random.integers(1, len(long), size=count)) % len(long)
        self.labels = random.integers(2, size=count)
        self.documents = long[first]
        begin = starts[self.documents] + random.integers(ends[self.documents] - starts[self.documents] - 2 * half + 1)
        apart = starts[long[other]] + random.integers(ends[long[other]] - starts[long[other]] - half + 1)
        second = np.where(self.labels == 1, begin + half, apart)
        places = np.stack([begin, second], axis=1)[:, :, None] + np.arange(half)  # [count, 2, half]
        self.inputs = np.asarray(tokens[places.reshape(count, -1)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self.inputs[index]), "labels": torch.tensor(self.labels[index])}


@measures
def classify(folder: Path, *, progress: Listener = silent) -> Classification:
    """Fine-tune a run's model, with a new head of two classes, and measure its accuracy on
    documents that are held out.

    The model of the run stays as it is. Examples are the same for every run of a corpus and a
    training length; the run's seed decides the head's first weights and the order of the examples.
    It takes minutes. Started again after it was stopped, it goes on from its last checkpoint,
    unless the run has been fine-tuned on other examples since.

    Args:
        folder: a finished run of a recipe with text.
        progress: called with "step" events.

    Returns:
        What classification.json holds.

    Raises:
        LabError: a run that is not finished or was trained on a task, a damaged model, an
            architecture that has no classifier in Transformers, too few documents, or a disk
            without room for checkpoints.
    """
    models.quiet()
    info, recipe = load_run(folder), load(folder / RECIPE)
    store = data.tokens(recipe, folder, info, progress)
    length = min(LONGEST, info.train_length)
    examples = Pairs(store.train, store.train_documents, length, TRAINING, random_for("training", 0, 0))
    test = Pairs(store.validation, store.validation_documents, length, TEST, random_for("evaluation", 0, 0))
    set_seed(info.seed)
    model = _classifier(folder, data.Text(store).end_of_document, labels=2)
    unfinished = _unfinished(folder, info, recipe, store.folder.name, length, TRAINING, EPOCHS)
    predicted = _fine_tuned(model, recipe, info, examples, test, unfinished, progress)
    right = predicted == test.labels
    documents, of = np.unique(test.documents, return_inverse=True)
    counts: list[int] = np.bincount(of).tolist()
    by_document: list[int] = np.bincount(of, weights=right).astype(int).tolist()
    mean = Mean.of(by_document, counts)
    found = Classification(
        **info.named,
        corpus_key=store.folder.name,
        length=length,
        accuracy=mean.value,
        standard_error=mean.standard_error,
        documents=documents.tolist(),
        right=by_document,
        counts=counts,
    )
    save_measured(folder, found)
    shutil.rmtree(unfinished.parent, ignore_errors=True)
    return found


@measures
def classify_labelled(
    folder: Path,
    source: Path,
    *,
    fields: Sequence[str] = (),
    epochs: int | None = None,
    progress: Listener = silent,
) -> LabelledRow:
    """Fine-tune a run's model, with a new head, on labelled examples, and measure its accuracy on
    those that are held out.

    The model of the run stays as it is. The run's seed decides the head's first weights and the
    order of the examples. Started again after it was stopped, it goes on from its last checkpoint,
    unless the run has been fine-tuned on other examples since.

    Args:
        folder: a finished run of a recipe with text.
        source: a folder with train.jsonl and val.jsonl, as SuperGLUE's tasks have them.
        fields: whose texts make an example; by default all that hold text.
        epochs: passes over the training examples; 3 by default.
        progress: called with "step" events.

    Returns:
        What labelled.json holds of this data set. An earlier row of it is replaced; one of other
            files in a folder of the same name stays.

    Raises:
        LabError: a run that is not finished or was trained on a task, a damaged model, an
            architecture that has no classifier in Transformers, a layout with sinks, files that
            `softfocus.lab.data.labelled.read` refuses, a labelled.json that cannot be read, or a
            disk without room for checkpoints.
    """
    models.quiet()
    info, recipe = load_run(folder), load(folder / RECIPE)
    data.refuse_without_text(recipe)
    tokenizer = models.load_tokenizer(folder)
    end = end_of_document(tokenizer)
    _refuse_sinks(folder)
    found = labelled.read(source, tokenizer, info.train_length, fields)
    earlier = load_measured(folder, Labelled).rows if (folder / LABELLED).exists() else []
    set_seed(info.seed)
    model = _classifier(folder, end, labels=len(found.labels))
    passes, batches = epochs or EPOCHS, partial(labelled.padded, end=end)
    unfinished = _unfinished(folder, info, recipe, found.key, *found.fields, passes)
    sets = found.training, found.held_out
    predicted = _fine_tuned(model, recipe, info, *sets, unfinished, progress, epochs=passes, batches=batches)
    answers = found.held_out.labels
    ((commonest, _),) = Counter(found.training.labels.tolist()).most_common(1)
    mean = Mean.of((predicted == answers).astype(int).tolist(), [1] * len(answers))
    row = LabelledRow(
        data=found.name,
        key=found.key,
        fields=list(found.fields),
        labels=list(found.labels),
        examples=len(found.training),
        held_out=len(answers),
        cut=found.cut,
        epochs=passes,
        accuracy=mean.value,
        standard_error=mean.standard_error,
        commonest=float((answers == commonest).mean()),
        answers=[found.labels[place] for place in predicted],
    )
    kept = [one for one in earlier if not _same_data(one, row)]
    if any(one.data == row.data for one in kept):
        _log.warning("%s holds a row of other files named %s, too", folder / LABELLED, row.data)
    save_measured(folder, Labelled(**info.named, rows=[*kept, row]))
    shutil.rmtree(unfinished.parent, ignore_errors=True)
    return row


def _same_data(one: LabelledRow, other: LabelledRow) -> bool:
    """Whether two rows are of one data set. Early ones have no key; their numbers have to do."""
    if one.key and other.key:
        return (one.data, one.key) == (other.data, other.key)
    return all(getattr(one, name) == getattr(other, name) for name in ("data", "labels", "examples", "held_out"))


def _unfinished(folder: Path, info: RunInfo, recipe: Recipe, *what: str | int) -> Path:
    """Where a fine-tuning has its checkpoints until it is finished: a folder whose name tells it
    from others, and from those of other versions. These are deleted. ``what`` is what it trains on,
    and how long.
    """
    how = RATE, BATCH, recipe.train.learning_rate, recipe.train.weight_decay, recipe.train.bf16
    versions = provenance.commit(), provenance.versions()
    key = hashlib.sha256(repr((info.token, what, how, versions)).encode()).hexdigest()[:16]
    unfinished = folder / UNFINISHED_CLASSIFICATION / key
    for other in unfinished.parent.glob("*"):
        if other != unfinished:
            shutil.rmtree(other, ignore_errors=True)
    return unfinished


def _keeping(unfinished: Path, info: RunInfo, progress: Listener) -> checkpoints.Keeping:
    """From the newest checkpoint on that is not damaged, or from the start."""
    token = unfinished.name
    try:
        newest = checkpoints.newest(unfinished, info.name, token, progress)
    except LabError as error:
        _log.warning("%s; the fine-tuning starts again", error.what)
        newest = None
    checkpoints.clear(unfinished, newest)
    return checkpoints.Keeping(newest, token, lambda: None)


def _refuse_sinks(folder: Path) -> None:
    layout = layout_of(models.load_config(folder))
    if layout is not None and any(group.sinks for kind in layout.kinds for group in kind):
        raise LabError(f"the layout of {folder} has sinks, which take no padding", "classify a run without sinks")


def _classifier(folder: Path, end: int, labels: int) -> Any:
    """The model with a head of so many classes on its last token that is no padding."""
    models.refuse_damage(folder)
    try:
        config = models.load_config(folder)
        config.num_labels, config.pad_token_id = labels, end
        model = AutoModelForSequenceClassification.from_pretrained(folder / MODEL, config=config, use_safetensors=True)
    except (OSError, SafetensorError) as error:
        raise models.not_loaded(folder, error) from error
    except ValueError as error:
        raise LabError(
            f"Transformers makes no classifier of the model in {folder}: {first_line(error)}",
            "classify a run of another architecture",
        ) from error
    return laser_ablation.apply(model)


def _fine_tuned(
    model: Any,
    recipe: Recipe,
    info: RunInfo,
    examples: Pairs | labelled.Examples,
    test: Pairs | labelled.Examples,
    unfinished: Path,
    progress: Listener,
    *,
    epochs: int | None = None,
    batches: Callable[[Sequence[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
) -> NDArray[np.int64]:
    """The class that the fine-tuned model gives each test example, int64 [tests]."""
    passes = epochs or EPOCHS
    arguments = TrainingArguments(
        output_dir=str(unfinished / CHECKPOINTS / checkpoints.UNFINISHED),
        num_train_epochs=passes,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=RATE * recipe.train.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=min(BATCH, passes * len(examples) // BATCH // 4),
        weight_decay=recipe.train.weight_decay,
        use_cpu=not torch.accelerator.is_available(),
        bf16=recipe.train.bf16,
        seed=info.seed,
        save_steps=SAVED,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    arguments._n_gpu = min(1, arguments._n_gpu)  # Trainer's DataParallel would change the batch
    steps = _Steps(info.name, progress)
    keeping = _keeping(unfinished, info, progress)
    needed = CHECKPOINTS_SIZE * sum(parameter.numel() for parameter in model.parameters())
    there = folder_bytes(unfinished)
    check_room(unfinished, max(0, needed - there), "fine-tuning needs {} for its checkpoints", _REMEDY)
    with models.memory("classify on a device with more memory"):
        trainer = _FineTuner(
            keeping,
            model=model,
            args=arguments,
            train_dataset=examples,
            data_collator=batches,
            callbacks=[steps],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.resume()
        scores: Any = trainer.predict(test).predictions
    predicted: NDArray[np.int64] = scores.argmax(-1)
    return predicted


class _FineTuner(checkpoints.CheckpointTrainer):
    """A disk that cannot be written to is a LabError."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with writing(Path(self.args.output_dir), _REMEDY):
            super()._save_checkpoint(model, trial)


class _Steps(TrainerCallback):
    """Tells how far fine-tuning is."""

    def __init__(self, run: str, progress: Listener) -> None:
        self._run, self._progress = run, progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell it."""
        self._progress(Event(kind="step", run=self._run, done=state.global_step, total=state.max_steps))
