"""What memory cannot hold is refused before anything starts."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.disk import size_text
from softfocus.lab.run_folder.provenance import available_memory

if TYPE_CHECKING:
    import torch

_STATE = 16
"""Bytes a parameter: weight, gradient and two moments in float32."""
_GRADIENT = 4
"""The gradient's share of these. A step of one micro-batch has no gradients when its backward pass
begins.
"""
_LOGITS = 8
"""Bytes a logit when the backward pass begins: gradients of its log-probability and of itself."""
SMALLER = "choose a smaller model, raise train.accumulate"
"""How to change a recipe that does not fit."""


def check_processes(processes: int) -> None:
    """Refuse more processes of a run than there are GPUs. On CPUs they share the cores.

    Raises:
        UsageError: there are more.
    """
    import torch

    if torch.cuda.is_available() and processes > (gpus := torch.cuda.device_count()):
        raise UsageError(
            f"--processes: got {processes}, expected at most {gpus}", "each process needs a GPU of its own"
        )


class Least(NamedTuple):
    """What a run cannot train without, in one of its processes.

    Attributes:
        size: bytes, a lower bound.
        with_activations: whether activations are in it. They are not where the model's own code
            fails on tensors without data.
    """

    size: int
    with_activations: bool


def least_memory(recipe: Recipe, processes: int = 1) -> Least:
    """The larger of two moments: the optimizer's step, with weights, gradients and moments; and the
    start of the backward pass, with weights, moments, all that autograd has saved, and the
    gradients of the logits.

    Nothing is allocated: the forward pass runs on tensors without data.
    """
    import torch

    from softfocus.lab import model as models

    kind, _, size = recipe.data.tokenizer.partition(":")
    least = 2 if recipe.data.kind in ("images", "speech") else 256
    if kind == "bpe" and size.isdecimal() and len(size) < 10:  # else the tokenizer says what is wrong with it
        least = max(least, int(size))
    vocabulary = recipe.model.config.get("vocab_size") or least
    with torch.device("meta"):  # shapes without memory
        model = models.build(recipe, vocabulary)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = max(1, recipe.train.batch // (recipe.train.accumulate * processes))
    step = _STATE * parameters
    try:
        saved = _saved(model, recipe, rows)
    except Exception:  # a model's code may ask for values, which are not there, in any way
        logging.getLogger(__name__).debug("%s: its activations are not counted", recipe.name, exc_info=True)
        return Least(step, with_activations=False)
    kept = _STATE if recipe.train.accumulate > 1 else _STATE - _GRADIENT
    return Least(max(step, kept * parameters + saved), with_activations=True)


def _saved(model: Any, recipe: Recipe, rows: int) -> int:
    """Bytes that autograd has saved of so many samples, parameters left out, and those of the
    gradients of the logits.
    """
    import torch
    from torch._subclasses import FakeTensorMode

    from softfocus.lab import objective

    sizes: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # A storage that is kept leaves its address to no other
        sizes.setdefault(storage._cdata, (storage.nbytes(), storage))
        return tensor

    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.bf16)
    with FakeTensorMode(allow_non_fake_inputs=True), bf16, _not_packed():
        # Some architectures drop layers or hide frames at random in training, which needs values
        model = model.to_empty(device="cpu").eval()
        inputs = _inputs(model, recipe, rows)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            logits = objective.logits(recipe.data.kind, model, inputs)
            logits.log_softmax(-1)  # the loss's
        own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return sum(size for key, (size, _) in sizes.items() if key not in own) + _LOGITS * logits.numel()


@contextmanager
def _not_packed() -> Iterator[None]:
    """While this is entered, Transformers takes no sample for packed documents.

    It looks for them in the positions. Where these have no values it makes a mask that no training
    has.
    """
    from transformers import masking_utils

    own = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = own


def _inputs(model: Any, recipe: Recipe, rows: int) -> dict[str, "torch.Tensor"]:
    """What the model of a recipe is given, but for the values."""
    import torch

    if recipe.data.images is not None:
        size = recipe.data.images.size
        return {"pixel_values": torch.zeros(rows, model.config.num_channels, size, size)}
    if (speech := recipe.data.speech) is not None:
        samples = rows, round(speech.seconds * speech.rate)
        return {"input_values": torch.zeros(samples), "attention_mask": torch.ones(samples, dtype=torch.int64)}
    return {"input_ids": torch.zeros(rows, recipe.train.length, dtype=torch.int64)}


def check_memory(
    recipes: Sequence[Recipe], at_a_time: int, processes: int = 1, remedies: Sequence[str] = (SMALLER,)
) -> None:
    """Refuse what certainly does not fit.

    Args:
        recipes: of the runs.
        at_a_time: so many runs.
        processes: of each run. Each has a GPU of its own; without GPUs those of this machine share
            its memory.
        remedies: what whoever started this can change, beside fewer runs or processes at a time.

    Raises:
        LabError: it does not.
    """
    import torch

    if not recipes:
        return
    alike: dict[tuple[object, ...], list[Recipe]] = {}
    for recipe in recipes:  # rows of a study differ most often by what _shapes leaves out
        alike.setdefault(_shapes(recipe), []).append(recipe)
    needs = [(least_memory(some[0], processes), some[0].name, len(some)) for some in alike.values()]
    largest = [(least, name) for least, name, count in sorted(needs, reverse=True) for _ in range(count)]
    largest = largest[: min(at_a_time, len(recipes))]
    (size, with_activations), name = largest[0]
    total, together = sum(least.size for least, _ in largest), len(largest)
    on_gpu = torch.cuda.is_available()
    # torchrun, which starts them, says how many of them are here
    sharing = 1 if on_gpu else min(processes, int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
    place, free = _free_memory()
    if total * sharing <= free:
        return
    several = {"processes": sharing, "at a time": together}
    times = " of each".join(f" of {count} {what}" for what, count in several.items() if count > 1)
    remedies = list(remedies)
    remedies += ["take fewer runs at a time"] if together > 1 else []
    remedies += ["take fewer processes a run"] if sharing > 1 else []
    remedies += [f"use a {'GPU' if on_gpu else 'machine'} with more memory"]
    if total == size * together:
        needed = f"{name} needs at least {size_text(size)} of memory{times and f' in each{times}'}"
    else:
        needed = f"the {together} largest runs need at least {size_text(total * sharing)} of memory together"
    raise LabError(
        f"{needed}{'' if with_activations else ' (activations are not counted)'}, and {place} has {size_text(free)} "
        "free",
        " or ".join([", ".join(remedies[:-1]), remedies[-1]] if remedies[1:] else remedies),
    )


def _shapes(recipe: Recipe) -> tuple[object, ...]:
    """What the sizes of a training's tensors depend on, but for the mechanism and the layout, which
    change them by a few per cent.
    """
    model, data, train = recipe.model, recipe.data, recipe.train
    return (
        model.architecture,
        repr(sorted(model.config.items())),
        repr((data.kind, data.tokenizer, data.images, data.speech)),
        (train.length, train.batch, train.accumulate, train.precision),
    )


def _free_memory() -> tuple[str, int]:
    """Whose memory models train in, and what is free of it."""
    import torch

    if torch.cuda.is_available():
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch's own, and free
        return "the GPU", torch.cuda.mem_get_info()[0] + cached
    free = available_memory()
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "this machine", everything if free is None else free
