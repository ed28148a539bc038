"""Why a head of a model that lost its flat line attends to far keys: its weight by distance, and
what of RoPE does it.

    PYTHONPATH=src python docs/results/lost-line/why.py RUN LAYER HEAD

RUN is a run of the recipe demo-lssar, or of toy with LSSAR (GPT-NeoX, heads of 64, all of RoPE,
LSSAR in every layer). One head is computed by hand, with the rotation of some frequencies clipped:
a key farther away than the training length is scored as if it stood at the training length. Writes
RUN/why.json and RUN/why.png.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize, softplus
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import softfocus
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.windows import EvaluationWindows
from softfocus.lab.evaluate.forward import token_losses
from softfocus.lab.progress import silent
from softfocus.lab.recipes.loading import load

TIMES, TOKENS, POWER, BIN = 16, 16384, 15, 8
D, BASE = 64, 10_000.0
FREQUENCIES = BASE ** (-torch.arange(D // 2) * 2 / D)  # [D / 2]
WAVELENGTHS = 2 * math.pi / FREQUENCIES


def clips(trained: int) -> dict[str, Tensor]:
    """Which wavelengths are clipped, by name."""
    waves, far = WAVELENGTHS, 4 * trained
    return {
        "none": waves < 0,
        "all": waves > 0,
        f"up to {trained}": waves <= trained,
        f"above {trained}": waves > trained,
        f"{trained} to {far}": (waves > trained) & (waves <= far),
        f"above {far}": waves > far,
    }


class Probe:
    """LSSAR in all heads by softfocus, but for one head, which is computed here."""

    def __init__(self, layer: int, head: int, trained: int):
        self.layer, self.head, self.trained = layer, head, trained
        self.clipped, self.most_n = WAVELENGTHS < 0, TIMES * trained
        self.by_distance: Tensor | None = None  # [16 T / BIN]

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """What Transformers calls for attention: [B, L, H, D], and no weights."""
        out = softfocus.attention(query, key, value, is_causal=True, mechanism="lssar")
        if module.layer_idx == self.layer:
            weights = self.weights(query[:, self.head], key[:, self.head])
            if self.by_distance is not None and query.size(2) == TIMES * self.trained:
                self.by_distance += by_distance(weights)
            out = out.clone()
            out[:, self.head] = weights @ value[:, self.head]
        return out.transpose(1, 2).contiguous(), None

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """The weights [B, L, L] of queries and keys [B, L, D] that RoPE has turned already."""
        length = query.size(1)
        places = torch.arange(length)
        q, k = normalize(query, dim=-1), normalize(key, dim=-1)
        cosine = q @ k.mT
        if self.clipped.any():
            clipped = self.clipped.repeat(2)  # [D]: RoPE pairs a feature with the one D / 2 after it
            farthest = turn(turn(q, -places), torch.full((length,), self.trained - 1))
            as_if = torch.where(clipped, farthest, 0) @ turn(k, -places).mT + torch.where(clipped, 0, q) @ k.mT
            cosine = torch.where(places[:, None] - places >= self.trained, as_if, cosine)
        n = places + 1.0  # keys in sight
        f = softplus(math.log(D) * n.clamp(max=self.most_n).log()[:, None] * cosine).tril()
        floor = torch.where(n <= 3, 0.0, 1.0)[:, None] * f.sum(-1, keepdim=True) / n[:, None]
        u = (f - floor).clamp(min=0).tril()
        r = (u / u.amax(-1, keepdim=True)) ** POWER
        return r / r.sum(-1, keepdim=True)


def turn(x: Tensor, by: Tensor) -> Tensor:
    """RoPE: features [B, L, D] turned on by places [L]."""
    angle = (by[:, None] * FREQUENCIES).repeat(1, 2)
    half = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * angle.cos() + half * angle.sin()


def by_distance(weights: Tensor) -> Tensor:
    """Weight a query, by distance in bins, summed over the sequences [B, L, L]; of queries in the
    second half.
    """
    length = weights.size(1)
    places = torch.arange(length)
    bins = ((places[:, None] - places).clamp(min=0) // BIN)[length // 2 :].flatten()
    found = torch.zeros(length // BIN)
    for sequence in weights[:, length // 2 :]:
        found.index_add_(0, bins, sequence.flatten())
    return found / (length - length // 2)


def draw(mass: list[float], trained: int, path: Path, title: str) -> None:
    """The weight by distance."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    ax = figure.subplots()
    ax.bar(np.arange(len(mass)) * BIN, mass, width=BIN, align="edge")
    ax.axvline(trained, color="black", linestyle=":")
    ax.set_yscale("log")
    ax.set_ylim(1e-4, 1)
    ax.set_xlabel("distance (tokens; dotted: training length)")
    ax.set_ylabel("share of the weight")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=160, metadata={"Title": title})


def main(folder: Path, layer: int, head: int) -> None:
    """Measure, write, draw."""
    models.quiet()
    recipe = load(folder / "recipe.toml")
    trained = recipe.train.length
    longest = TIMES * trained
    windows = EvaluationWindows(data.load(recipe, silent).store, [trained, longest], TOKENS)
    probe = Probe(layer, head, trained)
    AttentionInterface.register("probe", probe)
    AttentionMaskInterface.register("probe", sdpa_mask)
    model = models.load(folder, models.load_config(folder))

    def loss(length: int = longest) -> float:
        losses = [token_losses(model, torch.from_numpy(batch)).mean() for batch, _ in windows.batches(length, 4096)]
        return float(torch.stack(losses).mean())

    by_the_library = loss()
    # Past the guard, which would rightly refuse another implementation
    model.config.__dict__["_attn_implementation_internal"] = "probe"
    probe.by_distance = torch.zeros(longest // BIN)
    trained_at = json.loads((folder / "run.json").read_text())
    about = {"run": folder.name, "commit": trained_at["commit"], "cpu": trained_at["machine"]["cpu"]}
    found: dict[str, Any] = {**about, "layer": layer, "head": head, "tokens": TOKENS}
    found["loss at 1x"] = round(loss(trained), 4)
    found["loss at 16x"] = {"by the library": round(by_the_library, 4)}
    for name, clipped in clips(trained).items():
        probe.clipped = clipped
        found["loss at 16x"][f"clipped wavelengths: {name}"] = round(loss(), 4)
        if name == "none":
            mass, probe.by_distance = probe.by_distance / (TOKENS // longest), None
    probe.clipped, probe.most_n = WAVELENGTHS < 0, trained
    found["loss at 16x"][f"N at most {trained}"] = round(loss(), 4)
    found["weight by distance"] = {str(n * BIN): round(float(share), 5) for n, share in enumerate(mass) if share > 1e-3}
    (folder / "why.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    title = f"Layer {layer}, head {head}: weight of queries {longest // 2:,} to {longest - 1:,} by distance"
    draw(mass.tolist(), trained, folder / "why.png", title)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
