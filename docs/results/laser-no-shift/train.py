"""Train LASER without its shift: log(A e^V) as it is written, beside the shifted form.

    OMP_NUM_THREADS=1 PYTHONPATH=src python docs/results/laser-no-shift/train.py

Writes results.json beside itself. Recipe `toy` (0.3 M parameters, float32, three seeds). Each row
multiplies the values by a factor before attention, so that they reach the size at which e^V
overflows (88.7). The rows "as written" compute softmax and log(A e^V) with torch's operations, the
others call softfocus.attention. `largest_value` is the largest |V| of all layers and steps until
the training stopped.
"""

import json
import math
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softfocus import attention
from softfocus.hf import adapter
from softfocus.lab.errors import LabError
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.provenance import commit, machine
from softfocus.lab.train.run import train

SEEDS = (0, 1, 2)
FACTORS = (1, 8, 32)


@dataclass
class Values:
    """Stands in place of the adapter's call of attention."""

    factor: float
    shifted: bool
    largest: float = 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        """out [B, H, L, D], of values that are multiplied by the factor."""
        value = value * self.factor
        if torch.isfinite(value).all():
            self.largest = max(self.largest, value.abs().max().item())
        if self.shifted:
            return attention(query, key, value, **arguments)
        assert arguments["is_causal"]
        assert arguments["attn_mask"] is None
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return (weights @ value.exp()).log()


def row(seed: int, factor: float, shifted: bool) -> dict[str, Any]:
    """One training. A loss of None: it diverged."""
    values = Values(factor, shifted)
    adapter.attention = values
    recipe = load("toy", ["model.mechanism=laser", "train.log_every=10", f"train.seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        try:
            info = train(recipe, Path(folder) / "run")
            steps, loss, said = info.steps_done, info.train_loss[-1][1], ""
        except LabError as error:
            steps, loss, said = None, None, str(error).replace(folder, "")
    return {
        "seed": seed,
        "factor": factor,
        "form": "shifted" if shifted else "as written",
        "steps": steps,
        "training_loss": loss,
        "largest_value": round(values.largest, 1),
        "error": said,
    }


def main() -> None:
    """Train all rows, and write them."""
    rows = []
    for seed, factor, shifted in product(SEEDS, FACTORS, (True, False)):
        rows.append(row(seed, factor, shifted))
        print(rows[-1], flush=True)
    where = machine("cpu")
    found = {"commit": commit(), "torch": torch.__version__, "cpu": where.cpu, "rows": rows}
    Path(__file__).with_name("results.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
