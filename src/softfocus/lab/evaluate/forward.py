"""Forward passes of a run's model: under a window, and the loss of every token without ever holding
all logits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

import softfocus.hf
from softfocus.lab import model as models
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import RECIPE, load_run
from softfocus.lab.run_folder.results import RunInfo

LOGITS = 2**24
"""Logits held at once: 64 MB in float32, whatever the vocabulary and the length."""


def open_run(folder: Path, longest: int, remedy: str, window: int | None = None) -> tuple[RunInfo, Recipe, Any]:
    """A run, its recipe, and its model's configuration.

    Args:
        folder: a finished run.
        longest: tokens that the model is to read.
        remedy: what to do where it has fewer positions, with {} for how many.
        window: keys that every attention sees; None for as trained.

    Raises:
        LabError: a run that is not finished, or too few positions.
    """
    models.quiet()
    info, recipe, config = load_run(folder), load(folder / RECIPE), models.load_config(folder)
    models.check_positions(config, longest, remedy)
    if window is not None:
        softfocus.hf.window(config, window)
    return info, recipe, config


def losses_of(model: Any, recipe: Recipe) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    """A model's losses, in the precision of its training: a function from windows of tokens
    [B, L + 1] to the loss of every prediction, [B, L] in nats.
    """
    plain = has_plain_head(model)

    def losses(windows: NDArray[np.int64]) -> NDArray[np.float64]:
        found = token_losses(model, torch.from_numpy(windows), bf16=recipe.train.bf16, plain=plain)
        return found.double().cpu().numpy()

    return losses


@torch.inference_mode()
def has_plain_head(model: Any) -> bool:
    """Whether the logits are the output embeddings of the body's last hidden state, and nothing
    more.

    Some architectures scale or cap them (Cohere, Granite, Gemma); asking the model is the only way
    to know.
    """
    tokens = torch.arange(2, device=model.device)[None]
    whole = model(input_ids=tokens, use_cache=False).logits
    head = model.get_output_embeddings()
    if head is None:
        return False
    return torch.allclose(head(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state), whole)


@torch.inference_mode()
def token_losses(
    model: Any, windows: torch.Tensor, *, bf16: bool = False, plain: bool = True, logits: int = LOGITS
) -> torch.Tensor:
    """The loss of every prediction, without ever holding all logits.

    Args:
        model: a causal language model.
        windows: tokens [B, L + 1].
        bf16: compute as a model trained with bf16 did, under autocast.
        plain: :func:`has_plain_head`. Without one, the logits of one window at a time are whole.
        logits: how many logits to hold at once.

    Returns:
        [B, L] in nats, float32.
    """
    windows = windows.to(model.device)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):
        if not plain:
            rows = (model(input_ids=one[None], use_cache=False).logits[0] for one in inputs)
            return torch.stack([_cross_entropy(row, wanted) for row, wanted in zip(rows, targets, strict=True)])
        head = model.get_output_embeddings()
        hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)  # [B L, D]
        chunk = max(1, logits // head.weight.shape[0])
        pieces = zip(hidden.split(chunk), targets.flatten().split(chunk), strict=True)
        return torch.cat([_cross_entropy(head(rows), wanted) for rows, wanted in pieces]).view(targets.shape)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")
