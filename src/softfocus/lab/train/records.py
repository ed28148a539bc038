"""What a training notes of itself where its recipe asks: the loss on held-out text, and gradients
of projections.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import TrainerCallback

from softfocus.hf.learned import attention_modules
from softfocus.lab.errors import LabError

VALIDATION = "validation_loss"
"""In Trainer's logs, and so in checkpoints."""
PROJECTIONS = ("query", "key", "value")
NORM = "_projection_norm"
"""In Trainer's logs, after the name of a projection."""


class Validation(TrainerCallback):
    """Measures the loss on held-out windows so many times in a training, evenly, the last time at
    its end.

    It draws no random numbers and changes nothing, so the training stays what it is without it.

    Args:
        windows: int64 [W, L + 1].
        count: how many times.
        batch: windows a forward pass.
        bf16: compute as the training does.
        away: called with the seconds that each one took, so that they do not count as training.
    """

    def __init__(
        self, windows: torch.Tensor, count: int, *, batch: int, bf16: bool, away: Callable[[float], None]
    ) -> None:
        self._windows, self._count, self._batch, self._bf16, self._away = windows, count, batch, bf16, away

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Measure, where it is time to; a checkpoint of this step comes later and holds it."""
        done, total = state.global_step * self._count, state.max_steps
        if done // total > (done - self._count) // total:
            began = time.perf_counter()
            state.log_history.append({"step": state.global_step, VALIDATION: self._loss(model)})
            self._away(time.perf_counter() - began)

    @torch.no_grad()
    def _loss(self, model: Any) -> float:
        model.eval()
        total = 0.0
        for windows in self._windows.split(self._batch):
            windows = windows.to(model.device)
            with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=self._bf16):
                logits = model(input_ids=windows[:, :-1], use_cache=False).logits.flatten(0, 1)
            total += F.cross_entropy(logits.float(), windows[:, 1:].flatten(), reduction="sum").item()
        model.train()
        return total / self._windows[:, 1:].numel()


def projection_weights(model: nn.Module) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """How to read the gradients of W_Q, W_K and W_V of every layer.

    Raises:
        LabError: an architecture whose projections are not known.
    """
    found: dict[str, list[Callable[[], torch.Tensor]]] = {name: [] for name in PROJECTIONS}
    for module in attention_modules(model):
        for number, name in enumerate(PROJECTIONS):
            found[name].append(_gradient(module, number))
    return found


def _gradient(module: nn.Module, number: int) -> Callable[[], torch.Tensor]:
    """One projection's, by its place among the three."""
    config: Any = module.config
    single = getattr(module, f"{PROJECTIONS[number][0]}_proj", None)
    if isinstance(single, nn.Sequential):  # one that goes on with a norm or a scale: the lab's architectures
        single = single[0]
    if isinstance(single, nn.Linear):
        return lambda: _of(single)
    fused = getattr(module, "query_key_value", None)
    if config.model_type == "gpt_neox" and isinstance(fused, nn.Linear):  # head by head: its queries, keys, values
        heads = config.num_attention_heads
        return lambda: _of(fused).unflatten(0, (heads, 3, -1))[:, number]
    raise LabError(
        f"train.projection_norms: the projections of the architecture {config.model_type!r} are not known",
        "leave it out, or choose gpt_neox, llama or another architecture with q_proj, k_proj and v_proj",
    )


def _of(linear: nn.Linear) -> torch.Tensor:
    assert linear.weight.grad is not None
    return linear.weight.grad


@torch.no_grad()
def norms(gradients: dict[str, list[Callable[[], torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The norm over all layers of each projection's gradient, where it was computed."""
    return {
        name: torch.stack([gradient().float().square().sum() for gradient in its]).sum().sqrt()
        for name, its in gradients.items()
    }
