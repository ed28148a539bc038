"""Train a recipe into a run folder."""

import logging
import pickle
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import set_seed

from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.errors import Diverged, Interrupted, LabError, first_line
from softfocus.lab.progress import Listener, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder import provenance
from softfocus.lab.run_folder.disk import FULL, PARTIAL, check_room, disk_error, folder_bytes
from softfocus.lab.run_folder.files import (
    CHECKPOINTS,
    GONE,
    MODEL,
    RECIPE,
    RUN,
    clear_run,
    load_run,
    recipe_token,
    refuse_file,
    save_run,
    to_resume,
    write_recipe,
)
from softfocus.lab.run_folder.manifest import seal
from softfocus.lab.run_folder.owner import LOCK, Owner, owning
from softfocus.lab.run_folder.results import RunInfo, Session, Status
from softfocus.lab.signals import stoppable
from softfocus.lab.train import checkpoints, memory, processes, records
from softfocus.lab.train.trainer import (
    LARGEST_NORM,
    Curves,
    Watch,
    WindowTrainer,
    interruptible,
    make_trainer,
)

_log = logging.getLogger(__name__)


@processes.together()
def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Listener = silent,
) -> RunInfo:
    """Train a recipe.

    Runs as it is in one process, and under ``torchrun`` or ``accelerate launch`` in many: the
    result is that of one process with the whole batch, and only the main process writes.

    Args:
        recipe: what to train.
        folder: the run folder, made if need be.
        resume: go on from the newest checkpoint, exactly: weights, optimiser, schedule and order of
            the data. Without a checkpoint it starts again; a run that is complete is returned as it
            is.
        overwrite: delete a run that is already there.
        progress: called with every :class:`~softfocus.lab.progress.Event`.

    Returns:
        What run.json holds.

    Raises:
        LabError: a run is already there, the recipe is not the one to resume, the data or the model
            cannot be made, memory cannot hold the model, the corpus is not the one to resume with,
            all checkpoints are damaged, training has diverged, the disk or the device's memory is
            full, another process is gone, or the run was interrupted (its checkpoint is kept).
    """
    models.quiet()
    models.check(recipe)  # a corpus may take hours to prepare
    state = processes.start()
    _refuse_foreign(folder)
    # Only the main process writes, and so it alone owns the folder
    owning_it = owning(folder) if state.is_main_process else nullcontext(None)
    with stoppable(), _made(folder), owning_it as owner:
        return _train(recipe, folder, resume, overwrite, progress, state, owner)


def _train(
    recipe: Recipe,
    folder: Path,
    resume: bool,
    overwrite: bool,
    progress: Listener,
    state: PartialState,
    owner: Owner | None,
) -> RunInfo:
    """Train in a folder that is ours; without an owner, as one of the processes that do not write
    there.
    """
    state.wait_for_everyone()  # the folder is owned before anybody looks at it
    there = _check(recipe, folder, resume, overwrite)
    state.wait_for_everyone()  # all have looked at it before one of them changes it
    if there is not None and there.status == "complete":
        return there
    data.to_copy([recipe])  # says what is not there, before memory is looked at
    memory.check_memory([recipe], 1, state.num_processes)  # a corpus may take hours to prepare
    listener = silent if owner is None else progress
    with processes.main_first(state):
        source = data.load(recipe, listener)
    if there is not None and there.corpus_key not in ("", source.key):
        raise LabError(
            f"the corpus of {folder} has changed (or moved, or was copied) since the run was started",
            "put it back as it was, or start again with --overwrite",
        )
    checkpoint = _checkpoint(folder, recipe, there.token, listener, owner is not None) if there is not None else None
    windows = source.training_windows(recipe)
    set_seed(recipe.train.seed)
    model = models.build(recipe, source.vocab_size, source.end_of_document)
    info = _describe(recipe, folder, model, source, str(state.device))
    info.token = secrets.token_hex(8) if there is None else there.token
    if there is not None:
        _continue(info, there, folder)
    if owner is not None:
        if there is None:
            # Only now: without a corpus or a model the old run stays
            _make_room(folder, info.parameters)
        checkpoints.clear(folder, checkpoint)
        write_recipe(folder, recipe.to_toml(), info.token)
    with _recording(folder, info, owner), processes.together():
        if owner is not None:
            save_run(folder, info)
        watch = Watch(recipe, listener)
        keeping = checkpoints.Keeping(
            checkpoint, info.token, lambda: owner.check(folder) if owner is not None else None
        )
        noted = recipe.train.validations > 0
        held_out = source.validation_windows(recipe) if noted and isinstance(source, data.Text) else None
        trainer = make_trainer(recipe, folder, model, windows, watch, keeping, held_out)
        try:
            with models.memory(f"raise train.accumulate ({recipe.train.accumulate}), or lower train.length"):
                _run(trainer, watch, folder, single_process=state.num_processes == 1)
            state.wait_for_everyone()  # at its end Trainer lists the folder that is cleared below
        finally:
            if (curves := trainer.pop_callback(Curves)) is not None:
                curves.close()
            _take_stock(info, trainer, watch)
            if owner is not None:
                checkpoints.clear(folder, keeping.newest)
        if owner is not None:
            owner.check(folder)
            _save_model(folder, trainer, source, info.token)
    if owner is not None:
        owner.check(folder)
        info.status, info.finished = "complete", provenance.now()
        save_run(folder, info)
    state.wait_for_everyone()
    return info


def _refuse_foreign(folder: Path) -> None:
    refuse_file(folder)
    if not folder.is_dir() or (folder / RUN).exists():
        return
    # A recipe that somebody wrote by hand has no token, and a folder that a run's recipe was copied
    # to has no lock: what lies there is not the lab's
    if recipe_token(folder) and (folder / LOCK).exists():
        return
    # What is hidden may be the lab's own, left by a process that was killed before it had a corpus
    if any(not path.name.startswith(".") for path in folder.iterdir()):
        raise LabError(f"{folder} is not empty and holds no run", "choose a new folder with --out")


def _check(recipe: Recipe, folder: Path, resume: bool, overwrite: bool) -> RunInfo | None:
    """Refuse what would destroy or mix runs. Returns the run that is to be resumed, None where a
    new one begins.
    """
    if overwrite or not (folder / RUN).exists():
        return None
    there = load_run(folder, complete=False)
    if not resume:
        then = {
            "complete": "--overwrite to train it again",
            "diverged": "--overwrite to train another recipe there (this one diverges again)",
        }.get(there.status, "--resume to go on, --overwrite to start again")
        # The folder is ours, so whoever was running is gone
        status = f"interrupted: {GONE}" if there.status == "running" else there.status
        raise LabError(f"there is already a run in {folder} (status: {status})", f"add {then}, or choose another --out")
    before = load(folder / RECIPE)
    for table in ("model", "data", "train"):
        was, now = getattr(before, table).model_dump(), getattr(recipe, table).model_dump()
        for key in was:
            if was[key] != now[key]:
                raise LabError(
                    f"the run in {folder} was started with {table}.{key} = {was[key]!r}, not {now[key]!r}",
                    f"resume it with {to_resume(folder)}",
                )
    was, now = before.evaluate.tokens, recipe.evaluate.tokens
    if recipe.train.validations and was != now:
        raise LabError(
            f"the run in {folder} measures its validation loss on evaluate.tokens = {was}, not {now}",
            f"resume it with {to_resume(folder)}",
        )
    return there


def _make_room(folder: Path, parameters: int) -> None:
    """See that the disk has room for checkpoints of so many parameters, and delete the run that was
    there.
    """
    left = [name for name in (MODEL, CHECKPOINTS) if (folder / name).exists()]
    # Three checkpoints (two are kept, one is being written) of float32 weights and two moments, and
    # the model
    needed = parameters * 4 * (3 * 3 + 1) - sum(folder_bytes(folder / name) for name in left)
    remedy = "free some space, or choose another disk with --out"
    check_room(folder, max(0, needed), "training needs {} for its checkpoints", remedy)
    # What a run left whose run.json is gone must not be resumed or reported as this one's
    if left and not (folder / RUN).exists():
        names = " and ".join(left)
        _log.warning("%s has no %s: its %s, of a run of which nothing is known, are deleted", folder, RUN, names)
    clear_run(folder)
    (folder / RECIPE).unlink(missing_ok=True)


def _describe(recipe: Recipe, folder: Path, model: Any, source: data.Data, device: str) -> RunInfo:
    return RunInfo(
        name=folder.resolve().name,
        recipe=recipe.name,
        mechanism=models.label(recipe, model.config),
        status="running",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seed=recipe.train.seed,
        commit=provenance.commit(),
        versions=provenance.versions(),
        machine=provenance.machine(device),
        started=provenance.now(),
        train_length=recipe.train.length,
        vocabulary=source.vocab_size,
        corpus_key=source.key,
        steps=recipe.train.steps,
        tokens_per_step=recipe.train.batch * recipe.train.length,
    )


def _continue(info: RunInfo, there: RunInfo, folder: Path) -> None:
    """Keep what is known of the sessions before, and say where this one differs from the last."""
    fields = ("commit", "versions", "machine", "started")
    info.sessions = [*there.sessions, Session(**{name: getattr(there, name) for name in fields})]
    info.tokens_per_second = there.tokens_per_second
    if changed := [name for name in fields[:-1] if getattr(info, name) != getattr(there, name)]:
        _log.warning("%s goes on with other %s than its last session had", folder, ", ".join(changed))


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder, made before the corpus is prepared, which may take long; and taken away again if
    nothing came of it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"cannot make the folder {folder}: {error.strerror}", "choose another one with --out") from error
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty: a run, or another process of this one
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
            folder.rmdir()
        raise


@contextmanager
def _recording(folder: Path, info: RunInfo, owner: Owner | None) -> Iterator[None]:
    """Whatever ends the training early is written into run.json while the folder is ours."""
    try:
        yield
    except BaseException as error:
        why = disk_error(error)
        if why is not None and why.errno in FULL:
            error = LabError(f"cannot write to {folder}: {why.strerror}", "free some space; then --resume")
        elif why is not None and why.errno is not None:  # without a number it is some library's own error
            file = why.filename if str(why.filename).startswith(str(folder)) else folder
            error = LabError(f"cannot read or write {file}: {why.strerror}", "put that right; then --resume")
        elif isinstance(error, KeyboardInterrupt):
            error = Interrupted("training was interrupted", _resume_remedy(folder))
        ends: tuple[tuple[type[LabError], Status], ...] = ((Interrupted, "interrupted"), (Diverged, "diverged"))
        info.status = next((status for kind, status in ends if isinstance(error, kind)), "failed")
        info.finished = provenance.now()
        # Results say nothing about where on a machine they lay
        what = error.what if isinstance(error, LabError) else str(error)  # the remedy depends on who asks
        info.error = what.replace(str(folder), folder.name) or type(error).__name__
        if owner is not None:
            with suppress(LabError):  # on a full disk this fails too; what is there still says "running"
                owner.check(folder)
                save_run(folder, info)
        raise error


def _checkpoint(folder: Path, recipe: Recipe, token: str, listener: Listener, main: bool) -> Path | None:
    """Where to go on: the main process looks, for all."""
    found = [checkpoints.newest(folder, recipe.name, token, listener) if main else None]
    broadcast_object_list(found)
    return found[0]


def _run(trainer: WindowTrainer, watch: Watch, folder: Path, single_process: bool) -> None:
    keeping = trainer.keeping
    try:
        with interruptible(watch, enabled=single_process):
            trainer.resume()
    except pickle.UnpicklingError as error:
        raise LabError(
            f"{keeping.newest} holds more than numbers, which torch does not load: {first_line(error)}",
            "softfocus has not written that: do not trust the folder, and start again with --overwrite",
        ) from error
    except RuntimeError as error:
        if (said := _error_of_reader(error)) is None:
            raise
        raise said from error
    except KeyboardInterrupt:
        kept = keeping.newest
        what = f"its newest checkpoint, {kept.name}, is kept" if kept else "it had no checkpoint yet"
        raise Interrupted(f"training was interrupted; {what}", _resume_remedy(folder)) from None
    if watch.interrupted and trainer.state.global_step < trainer.state.max_steps:
        step = trainer.state.global_step
        raise Interrupted(f"training was interrupted at step {step}; its checkpoint is kept", _resume_remedy(folder))


def _error_of_reader(error: RuntimeError) -> LabError | None:
    """The LabError of a process that reads files for the training; None for any other error. torch
    hands it over as the text of its traceback.
    """
    found = re.search(rf"\.{LabError.__name__}: (.+); (.+)\s*$", str(error))
    return LabError(found[1], found[2]) if found and "DataLoader worker" in str(error) else None


def _resume_remedy(folder: Path) -> str:
    return f"go on with {to_resume(folder)}"


def _take_stock(info: RunInfo, trainer: WindowTrainer, watch: Watch) -> None:
    info.steps_done = trainer.state.global_step
    info.train_loss = _logged(trainer, "loss")
    info.gradient_norm = _logged(trainer, LARGEST_NORM, 5)
    info.validation_loss = _logged(trainer, records.VALIDATION, 6)
    by_name = {name: _logged(trainer, name + records.NORM, 5) for name in records.PROJECTIONS}
    info.projection_norms = {name: norms for name, norms in by_name.items() if norms}
    info.tokens_per_second = _speed(info, watch)


def _speed(info: RunInfo, watch: Watch) -> float | None:
    """Tokens per second of a training, over all of its sessions: each counts for the steps that are
    its own. The steps of one that was killed, whose speed is not known, count at that of others.
    """
    before, now = info.tokens_per_second, watch.tokens_per_second
    if before is None or now is None:
        return now or before
    return info.steps_done / (watch.first_step / before + (info.steps_done - watch.first_step) / now)


def _logged(trainer: WindowTrainer, name: str, digits: int | None = None) -> list[tuple[int, float]]:
    """(step, value) of every entry that holds a name, rounded to so many digits."""
    found = [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]
    return found if digits is None else [(step, float(f"{value:.{digits}g}")) for step, value in found]


def _save_model(folder: Path, trainer: WindowTrainer, source: data.Data, token: str) -> None:
    temporary = folder / f".{MODEL}{PARTIAL}"
    try:
        # safetensors is the only format that save_pretrained writes
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(temporary)
        source.save_tokenizer(temporary)
        seal(temporary, token)
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        temporary.rename(folder / MODEL)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
