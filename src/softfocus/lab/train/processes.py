"""Several processes that train as one: how they wait for one another, and what is said when one of
them is gone.
"""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from textwrap import shorten

import torch
from accelerate import PartialState
from torch import distributed

from softfocus.lab.errors import LabError, first_line

PATIENCE = timedelta(minutes=30)
"""How long processes wait for one that says nothing: one whose machine is gone, say. Checkpoints
are written in between.
"""

PREPARATION = timedelta(days=1)
"""How long they wait for the main one, which may have a large corpus to tokenise."""


def start() -> PartialState:
    """Find the other processes, as torchrun or accelerate have named them.

    Raises:
        LabError: weights would be in pieces, for which there are no checkpoints.
    """
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true", "yes", "on"):
            raise LabError(
                f"a run under {name} is not supported: its weights and checkpoints are in pieces",
                "use torchrun, or `accelerate config` for several devices without it",
            )
    # Told of a CPU, Accelerate joins the processes there too
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)


def _leave() -> None:
    """Leave the others while Python still runs: threads of torch that are stopped later may abort a
    process that has done all its work.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def main_first(state: PartialState) -> Iterator[None]:
    """The main process goes through this before the others, however long it takes."""
    if state.num_processes == 1:
        yield
        return
    group = distributed.new_group(timeout=PREPARATION, backend="gloo")
    if not state.is_main_process:
        distributed.barrier(group)
    yield
    if state.is_main_process:
        distributed.barrier(group)
    distributed.destroy_process_group(group)


@contextmanager
def together() -> Iterator[None]:
    """While this is entered, another process that is gone is a LabError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        # What torch says may name machines, which run.json does not: it stands where it is not kept
        raise LabError(
            f"another process of this training is gone, or said nothing for "
            f"{PATIENCE.total_seconds() / 60:.0f} minutes",
            f"read what it said last, then go on with --resume (torch: {shorten(first_line(error), 160)})",
        ) from error
    else:
        atexit.register(_leave)  # not after an error: it could wait for a process that is gone
