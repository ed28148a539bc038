"""The power of re-weighted heads, annealed: small powers let many keys learn, the last one is the
model's own.
"""

from dataclasses import replace
from typing import Any

from transformers import TrainerCallback

import softfocus.hf
from softfocus.lab.recipes.recipe import PowerTable
from softfocus.layout import Heads, Layout


class Annealing(TrainerCallback):
    """Sets the power before each step, and the model's own at the end. The step alone decides:
    resuming is exact.

    Args:
        table: the schedule.
        layout: what the model runs, with its own powers. Learned powers are left alone.
    """

    def __init__(self, table: PowerTable, layout: Layout):
        self._table, self._layout = table, layout

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Set the power of this step."""
        self._set(model, state.global_step / state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Set the power that the model is saved with."""
        self._set(model, 1.0)

    def _set(self, model: Any, progress: float) -> None:
        def annealed(group: Heads) -> Heads:
            power = group.mechanism.power
            if power is None or "power" in group.learned:
                return group
            return replace(group, mechanism=group.mechanism.replace(power=self._table.at(power, progress)))

        layout = self._layout.map(annealed)
        if layout != softfocus.hf.layout_of(model):
            softfocus.hf.assign(model, layout)
