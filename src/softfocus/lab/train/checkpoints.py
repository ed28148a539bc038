"""Checkpoints: whole with checksums, or not there; and the newest one that is still as it was
written.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer

from softfocus.lab.errors import LabError
from softfocus.lab.progress import Listener, preparing
from softfocus.lab.run_folder.files import CHECKPOINTS, checkpoints_in, step_of
from softfocus.lab.run_folder.manifest import damage, seal

UNFINISHED = ".unfinished"
"""A folder beside the checkpoints, in which one is written until it is whole."""

_log = logging.getLogger(__name__)


@dataclass
class Keeping:
    """What a training does about checkpoints.

    Attributes:
        newest: the newest checkpoint, None before the first; at first the one to go on from.
        token: the run's, which every checkpoint gets.
        before: called before each one; what it raises ends the training.
    """

    newest: Path | None
    token: str
    before: Callable[[], None]


class CheckpointTrainer(Trainer):
    """Transformers' Trainer, whose checkpoints are whole with checksums, or not there. Its
    output_dir is `UNFINISHED`, beside the checkpoints.

    Args:
        keeping: which checkpoint to go on from, and how to keep others.
        arguments: of Trainer.
    """

    def __init__(self, keeping: Keeping, **arguments: Any):
        super().__init__(**arguments)
        self.keeping = keeping

    def resume(self) -> None:
        """Train, from the newest checkpoint on if there is one."""
        self.train(resume_from_checkpoint=str(self.keeping.newest) if self.keeping.newest else None)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.keeping.before()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # each process has written the state of its random numbers
        unfinished, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            keep(unfinished / name, unfinished.parent / name, self.keeping.newest, self.keeping.token)
        self.keeping.newest = unfinished.parent / name

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Trainer's own silently leaves out what a file holds under another name than the model:
        # GPT-NeoX's untied head, Mixtral's experts
        model = self.model if model is None else model
        model.load_state_dict(type(model).from_pretrained(resume_from_checkpoint).state_dict())


def keep(written: Path, checkpoint: Path, before: Path | None, token: str) -> None:
    """Make a checkpoint of what Trainer has written, and delete all others but one.

    Args:
        written: the folder, in `UNFINISHED`.
        checkpoint: what it becomes.
        before: the checkpoint that the run comes from; it stays, should something happen to the new
            one.
        token: the run's.
    """
    seal(written, token)
    shutil.rmtree(checkpoint, ignore_errors=True)  # a damaged one, which the run went back from
    written.rename(checkpoint)
    for other in checkpoints_in(checkpoint.parent):
        if other not in (checkpoint, before):
            shutil.rmtree(other, ignore_errors=True)


def clear(folder: Path, checkpoint: Path | None) -> None:
    """Delete what a kill may have left in a run folder: an unfinished checkpoint, and those that
    `keep` had yet to delete.

    Args:
        folder: the run folder.
        checkpoint: where the run goes on from; it stays, and so does the one before it.
    """
    shutil.rmtree(folder / CHECKPOINTS / UNFINISHED, ignore_errors=True)
    if checkpoint is not None:
        older = [other for other in checkpoints_in(checkpoint.parent) if step_of(other) < step_of(checkpoint)]
        for other in older[1:]:
            shutil.rmtree(other, ignore_errors=True)


def newest(folder: Path, run: str, token: str, listener: Listener) -> Path | None:
    """The newest checkpoint of a run folder that is as it was written; None where there is none at
    all.

    A newer one that is damaged is named in a warning.

    Args:
        folder: the run folder.
        run: the run's name, for the listener.
        token: the run's; a checkpoint with another one is of another training.
        listener: told how far the checking is.

    Raises:
        LabError: there are checkpoints, and all of them are damaged.
    """
    damaged: list[str] = []
    for checkpoint in checkpoints_in(folder / CHECKPOINTS):
        why = damage(checkpoint, token, lambda share: listener(preparing(run, "checking checkpoints", share)))
        if why is None:
            if damaged:
                _log.warning("%s goes on from %s: %s", folder, checkpoint.name, ", ".join(damaged))
            return checkpoint
        damaged.append(f"{checkpoint.name} is damaged ({why})")
    if damaged:
        raise LabError(
            f"{folder} has no checkpoint to go on from: {', '.join(damaged)}",
            "put the files back as they were, or start again with --overwrite (so, too, "
            "a run of a version of softfocus that wrote no manifest.json)",
        )
    return None
