"""Transformers' Trainer, told to train on windows of tokens, to measure, and to stop cleanly."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event as EventRecord
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

import softfocus.hf
from softfocus.lab import objective
from softfocus.lab.errors import Diverged, LabError
from softfocus.lab.progress import Event, Listener
from softfocus.lab.recipes.recipe import Recipe, TrainTable
from softfocus.lab.run_folder import provenance
from softfocus.lab.run_folder.files import CHECKPOINTS, TENSORBOARD
from softfocus.lab.signals import ENDING
from softfocus.lab.train import checkpoints, records
from softfocus.lab.train.anneal import Annealing
from softfocus.lab.train.divergence import Divergence

LARGEST_NORM = "largest_grad_norm"
"""In Trainer's logs: the largest norm of a gradient since the entry before, not clipped. Trainer's
own is the last one.
"""
WARM_UP_STEPS = 5
"""Steps left out of tokens per second: allocators, caches and compilers settle in them."""


class WindowTrainer(checkpoints.CheckpointTrainer):
    """Training on windows of a text, or samples of another kind, in the order in which the dataset
    gives them.

    Args:
        recipe: what is trained.
        keeping: which checkpoint to go on from, and how to keep others.
        arguments: of Trainer.
    """

    def __init__(self, recipe: Recipe, keeping: checkpoints.Keeping, **arguments: Any):
        super().__init__(keeping, **arguments)
        self._recipe = recipe
        config = self.model.config
        outcomes = config.num_labels if recipe.data.images is not None else config.vocab_size
        self._divergence = Divergence(math.log(outcomes), self.train_dataset, recipe.train.batch)
        # All windows make as many predictions, so a step's loss is the plain mean of its
        # micro-batches' means, over devices too. Trainer divides by the number of micro-batches
        # only where it believes that the model does not.
        self.model_accepts_loss_kwargs = False
        self._projections = records.projection_weights(self.model) if recipe.train.projection_norms else {}
        self._norms: dict[str, torch.Tensor] = {}

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        # The dataset's own seed decides the order; Trainer skips as many windows as a checkpoint
        # has seen
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def training_step(self, *arguments: Any, **others: Any) -> torch.Tensor:
        """Trainer's, and a note of the loss."""
        loss = super().training_step(*arguments, **others)
        self._divergence.add_loss(self.state.global_step + 1, loss)
        self._norms = records.norms(self._projections)  # before clipping; after the last micro-batch they are whole
        return loss

    def _get_grad_norm(self, *arguments: Any, **others: Any) -> Any:
        norm = super()._get_grad_norm(*arguments, **others)
        self._divergence.add_norm(self.state.global_step + 1, norm)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's, and an end of a training that has gone wrong. Checkpoints come after it."""
        first = next((entry["loss"] for entry in self.state.log_history if "loss" in entry), None)
        if "loss" in logs:
            logs[LARGEST_NORM] = self._divergence.largest_norm()
            logs |= {name + records.NORM: float(norm) for name, norm in self._norms.items()}
        super().log(logs, start_time)
        if "loss" not in logs:
            return
        if (wrong := self._divergence.look(first, lambda facts: self.accelerator.reduce(facts, "mean"))) is not None:
            train = self._recipe.train
            newest = self.keeping.newest
            kept = f"its last good checkpoint is {newest.name}" if newest else "it had no checkpoint yet"
            raise Diverged(
                f"training {self._recipe.name}, {wrong}; {kept}",
                f"lower train.learning_rate ({train.learning_rate}), raise train.warmup ({train.warmup}), or choose a "
                "smaller power, and start again with --overwrite",
            )

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Matrices and embeddings: what a mechanism learns for each head is a scale, like a norm's,
        and does not decay.
        """
        return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        """That of the recipe's kind of data."""
        return objective.loss(self._recipe.data.kind, model, inputs)


class Watch(TrainerCallback):
    """Reports progress, measures speed, stops on Ctrl-C.

    Attributes:
        first_step: that a resumed training goes on from.
        tokens_per_second: of this call, without the first steps; None until it is known.
        interrupted: whether a signal ended the training early, after a checkpoint.
    """

    def __init__(self, recipe: Recipe, listener: Listener):
        self.recipe, self.listener = recipe, listener
        self.tokens_per_second: float | None = None
        self.interrupted, self.first_step = False, 0
        self._away = 0.0
        self._loss: float | None = None
        self._from: tuple[int, float] = (0, 0.0)

    def leave_out(self, seconds: float) -> None:
        """Time that is not training."""
        self._away += seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember where it starts."""
        self.first_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure and tell; ask for a checkpoint when a signal came."""
        step, now = state.global_step, time.perf_counter() - self._away
        warm_up = min(WARM_UP_STEPS, max(1, (state.max_steps - self.first_step) // 2))
        if step == self.first_step + warm_up:
            self._from = (step, now)
        elif step > self.first_step + warm_up:
            a_step = (now - self._from[1]) / (step - self._from[0])
            self.tokens_per_second = self.recipe.train.batch * self.recipe.train.length / a_step
        if self.interrupted:
            control.should_save = control.should_training_stop = True
        # A checkpoint starts a fresh mean of the loss, so that a resumed run logs the same numbers;
        # and a model that has diverged is noticed before it is kept
        control.should_log = control.should_log or control.should_save
        self.listener(
            Event(
                kind="step",
                run=self.recipe.name,
                done=step,
                total=state.max_steps,
                loss=self._loss,
                tokens_per_second=self.tokens_per_second,
            )
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Remember the loss."""
        if logs is not None and "loss" in logs:
            self._loss = logs["loss"]


class Curves(TrainerCallback):
    """What Trainer logs, for TensorBoard. Its own callback names the file after the host and stores
    the arguments' paths.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: RecordWriter | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start a file; a resumed run has several."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = RecordWriter((self._folder / f"events.out.tfevents.{time.time_ns()}").open("wb"))
        self._write(file_version="brain.Event:2")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Write the numbers."""
        values = [Summary.Value(tag=f"train/{name}", simple_value=value) for name, value in (logs or {}).items()]
        self._write(step=state.global_step, summary=Summary(value=values))

    def close(self) -> None:
        """Close the file. A training that fails has no end that Trainer tells of."""
        if self._writer is not None:
            with suppress(OSError):  # the disk is full, and what failed to write has said so
                self._writer.close()

    def _write(self, **facts: Any) -> None:
        assert self._writer is not None
        self._writer.write(EventRecord(wall_time=time.time(), **facts).SerializeToString())
        self._writer.flush()


@contextmanager
def interruptible(watch: Watch, enabled: bool) -> Iterator[None]:
    """While this is entered, the first signal to stop asks for a checkpoint and a clean end; the
    second one ends at once.

    Signals are Ctrl-C, SIGTERM, and the end of the terminal unless nohup holds it off.
    """
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()

    def ask(number: int, frame: FrameType | None) -> None:
        watch.interrupted = True
        restore()

    # Signals belong to the main thread; and processes of a group would stop at different steps and
    # wait for one another
    if enabled and threading.current_thread() is threading.main_thread():
        asking = [n for n in ENDING if n == signal.SIGTERM or signal.getsignal(n) != signal.SIG_IGN]
        before.update({number: signal.signal(number, ask) for number in (signal.SIGINT, *asking)})
    try:
        yield
    finally:
        restore()


def make_trainer(
    recipe: Recipe,
    folder: Path,
    model: Any,
    windows: Dataset[Any],
    watch: Watch,
    keeping: checkpoints.Keeping,
    held_out: torch.Tensor | None = None,
) -> WindowTrainer:
    """A trainer for a recipe, which goes on from a checkpoint if there is one; train.validations
    read what is held out.

    Raises:
        LabError: the batch does not divide over devices, or this machine cannot compute in the
            precision asked for.
    """
    train, arguments = recipe.train, _arguments(recipe, folder)
    trainer = WindowTrainer(
        recipe,
        keeping,
        model=model,
        args=arguments,
        train_dataset=windows,
        callbacks=[watch],
        optimizer_cls_and_kwargs=_lamb(train) if train.optimizer == "lamb" else None,
    )
    trainer.remove_callback(PrinterCallback)
    layout = softfocus.hf.layout_of(model)
    if train.power is not None and layout is not None:
        trainer.add_callback(Annealing(train.power, layout))
    if held_out is not None:
        batch = arguments.per_device_train_batch_size
        trainer.add_callback(
            records.Validation(held_out, train.validations, batch=batch, bf16=train.bf16, away=watch.leave_out)
        )
    if arguments.should_log:
        trainer.add_callback(Curves(folder / TENSORBOARD))
    return trainer


def _arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """What Trainer is told of a recipe. The batch of each device is the recipe's, divided."""
    train = recipe.train
    try:
        arguments = TrainingArguments(
            output_dir=str(folder / CHECKPOINTS / checkpoints.UNFINISHED),
            max_steps=train.steps,
            gradient_accumulation_steps=train.accumulate,
            optim="adamw_torch",
            learning_rate=train.learning_rate,
            adam_beta1=train.betas[0],
            adam_beta2=train.betas[1],
            weight_decay=train.weight_decay,
            max_grad_norm=train.clip,
            warmup_steps=train.warmup,
            # Warm-up, constant, warm-down covers them all: plain cosine or linear is a warm-down
            # that starts at once
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={
                "num_decay_steps": train.steps - train.warmup if train.warmdown is None else train.warmdown,
                "decay_type": train.decay,
                "min_lr_ratio": train.final_learning_rate,
            },
            use_cpu=not torch.accelerator.is_available(),  # without it Trainer refuses bf16 on a CPU
            bf16=train.bf16,
            seed=train.seed,
            data_seed=train.seed,
            logging_steps=train.log_every,
            logging_nan_inf_filter=False,  # a loss of NaN must be seen, not smoothed over
            save_steps=train.checkpoint_every,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            dataloader_num_workers=_readers(recipe),
            ddp_find_unused_parameters=recipe.data.kind == "speech",  # layers may be left out
        )
    except ValueError as error:
        raise LabError(
            f"this machine cannot train {recipe.name}: {error}", "try --set train.precision=float32"
        ) from error
    if arguments.parallel_mode.value == "not_distributed":
        arguments._n_gpu = 1  # several devices are for torchrun; Trainer's DataParallel would change the batch
    arguments.per_device_train_batch_size = _share(train.batch, train.accumulate, arguments.world_size)
    return arguments


def _lamb(train: TrainTable) -> tuple[Any, dict[str, Any]]:
    """The paper's (its version 3). Trainer sets the decay of each group of parameters."""
    try:
        from pytorch_optimizer import Lamb  # an extra, which takes seconds to import
    except ModuleNotFoundError:
        raise LabError(
            "train.optimizer = 'lamb' needs the package pytorch-optimizer",
            "in your checkout of softfocus run pip install -e '.[lamb]'",
        ) from None
    # Decay is part of what the trust ratio scales, and the first steps are not divided by 1 - beta,
    # as they are by default
    return Lamb, {
        "lr": train.learning_rate,
        "betas": tuple(train.betas),
        "eps": 1e-6,
        "weight_decouple": False,
        "adam_debias": True,
    }


def _readers(recipe: Recipe) -> int:
    """Processes, forks, that read files, or make samples for a GPU (13 ms for an utterance)."""
    methods = torch.multiprocessing
    # Without allow_none asking would settle the default for good
    method = methods.get_start_method(allow_none=True) or methods.get_all_start_methods()[0]
    samples = recipe.data.kind in ("images", "speech") and method == "fork"
    gpus = torch.cuda.device_count()
    return max(1, min(8, provenance.cores() // max(1, gpus))) if samples and (recipe.data.source or gpus) else 0


def _share(batch: int, accumulate: int, devices: int) -> int:
    share, rest = divmod(batch, accumulate * devices)
    if rest or not share:
        raise LabError(
            f"train.batch={batch} does not divide over {devices} processes with train.accumulate={accumulate}",
            "change train.batch, train.accumulate or the number of processes",
        )
    return share
