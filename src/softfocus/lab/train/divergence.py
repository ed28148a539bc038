"""Training that has gone wrong for good: how, at which step, and on which batch."""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

EXPLODED = 3.0
"""A mean loss so many times that of guessing, or that of the run's first steps if it was higher,
has exploded.
"""


class Divergence:
    """Keeps the loss and the gradient's norm of every step, where they are computed, until they are
    looked at.

    Args:
        guessing: the loss of a model that has learned nothing, in nats.
        windows: what the steps read, in order.
        batch: windows a step.
    """

    def __init__(self, guessing: float, windows: Dataset[Any], batch: int):
        self._guessing, self._windows, self._batch = guessing, windows, batch
        self._losses: dict[int, torch.Tensor] = {}
        self._norms: dict[int, torch.Tensor] = {}

    def add_loss(self, step: int, share: torch.Tensor) -> None:
        """What a micro-batch adds to the loss of its step. Steps count from 1."""
        self._losses[step] = self._losses.get(step, 0) + share.detach()

    def add_norm(self, step: int, norm: torch.Tensor) -> None:
        """Of the gradient of a step."""
        self._norms[step] = norm.detach()

    def largest_norm(self) -> float:
        """Of the gradients since the last look; NaN if one of them is."""
        return float(torch.stack(list(self._norms.values())).max())

    def look(self, first: float | None, mean: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
        """What went wrong in the steps since the last look, None if nothing did.

        Args:
            first: the first mean loss that the run has logged; None if it has logged none.
            mean: over processes, so that all of them find the same.
        """
        steps = list(self._losses)
        facts = torch.stack([torch.stack([self._losses[step], self._norms[step]]) for step in steps])
        losses, norms = mean(facts.float()).T.tolist()
        self._losses.clear()
        self._norms.clear()
        for step, loss, norm in zip(steps, losses, norms, strict=True):
            if not math.isfinite(loss):
                return f"the loss became {loss} at {self._place(step)}"
            if not math.isfinite(norm):
                return f"the gradient became {norm} at {self._place(step)}"
        limit = EXPLODED * max(self._guessing, losses[0] if first is None else first)
        if sum(losses) / len(losses) > limit:
            step, loss = next((step, loss) for step, loss in zip(steps, losses, strict=True) if loss > limit)
            return f"the loss exploded, to {loss:.4g} at {self._place(step)}"
        return None

    def _place(self, step: int) -> str:
        return f"step {step}, on the batch {fingerprint(self._windows, step, self._batch)}"


def fingerprint(windows: Dataset[Any], step: int, batch: int) -> str:
    """A digest of all that a step reads, such as tokens and labels: the same wherever they are the
    same.

    Args:
        windows: what the steps read, in order.
        step: which one, counted from 1.
        batch: windows a step.
    """
    digest = hashlib.sha256()
    for index in range((step - 1) * batch, step * batch):
        window = windows[index]
        for name in sorted(window):
            digest.update(window[name].numpy().tobytes())
    return digest.hexdigest()[:12]
