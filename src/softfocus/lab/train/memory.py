"""What memory cannot hold is refused before anything starts."""

import os
from collections.abc import Sequence

from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.provenance import available_memory

_STATE = 16
"""Bytes a parameter: weight, gradient and two moments in float32."""
_LOGITS = 12
"""Bytes a logit: itself in float32, its probability, its gradient."""
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


def least_memory(recipe: Recipe, processes: int = 1) -> int:
    """Bytes without which a run cannot train, in one of its processes: a lower bound, from
    parameters and logits alone.
    """
    import torch

    from softfocus.lab import model as models

    kind, _, size = recipe.data.tokenizer.partition(":")
    least = 2 if recipe.data.kind in ("images", "speech") else 256
    if kind == "bpe" and size.isdecimal() and len(size) < 10:  # else the tokenizer says what is wrong with it
        least = max(least, int(size))
    vocabulary = recipe.model.config.get("vocab_size") or least
    with torch.device("meta"):  # shapes without memory
        parameters = sum(parameter.numel() for parameter in models.build(recipe, vocabulary).parameters())
    rows = max(1, recipe.train.batch // (recipe.train.accumulate * processes))
    return _STATE * parameters + _LOGITS * rows * recipe.train.length * vocabulary


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

    sizes = {recipe.name: least_memory(recipe, processes) for recipe in recipes}
    if not sizes:
        return
    name = max(sizes, key=lambda one: sizes[one])
    together = min(at_a_time, len(sizes))
    on_gpu = torch.cuda.is_available()
    # torchrun, which starts them, says how many of them are here
    sharing = 1 if on_gpu else min(processes, int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
    place, free = _free_memory()
    if sizes[name] * sharing * together <= free:
        return
    several = {"processes": sharing, "at a time": together}
    times = " of each".join(f" of {count} {what}" for what, count in several.items() if count > 1)
    remedies = list(remedies)
    remedies += ["take fewer runs at a time"] if together > 1 else []
    remedies += ["take fewer processes a run"] if sharing > 1 else []
    remedies += [f"use a {'GPU' if on_gpu else 'machine'} with more memory"]
    raise LabError(
        f"{name} needs at least {sizes[name] / 1e9:.1f} GB of memory{times and f' in each{times}'} "
        f"(activations are not counted), and {place} has {free / 1e9:.1f} GB free",
        " or ".join([", ".join(remedies[:-1]), remedies[-1]] if remedies[1:] else remedies),
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
