"""Why a head of a model that lost its flat line attends to far keys: its weight by distance, and
what of RoPE does it.

    PYTHONPATH=src python docs/results/lost-line/why.py RUN LAYER HEAD

RUN is a run of the recipe demo-lssar (GPT-NeoX, all of RoPE, LSSAR in every layer). One head is
computed by hand, with the rotation of some frequencies clipped: a key farther away than the
training length is scored as if it stood at the training length. Writes RUN/why.json and
RUN/why.png.
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

T, LONG, TOKENS, POWER, BIN = 128, 2048, 16384, 15, 8
D, BASE = 64, 10_000.0
FREQUENCIES = BASE ** (-torch.arange(D // 2) * 2 / D)  # [D / 2]
WAVELENGTHS = 2 * math.pi / FREQUENCIES
CLIPS = {
    "none": WAVELENGTHS < 0,
    "all": WAVELENGTHS > 0,
    "up to 128": WAVELENGTHS <= 128,
    "above 128": WAVELENGTHS > 128,
    "128 to 512": (WAVELENGTHS > 128) & (WAVELENGTHS <= 512),
    "above 512": WAVELENGTHS > 512,
}


class Probe:
    """LSSAR in all heads by softfocus, but for one head, which is computed here."""

    def __init__(self, layer: int, head: int):
        self.layer, self.head = layer, head
        self.clipped, self.most_n = CLIPS["none"], LONG
        self.by_distance: Tensor | None = None  # [LONG / BIN]

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """What Transformers calls for attention: [B, L, H, D], and no weights."""
        out = softfocus.attention(query, key, value, is_causal=True, mechanism="lssar")
        if module.layer_idx == self.layer:
            weights = self.weights(query[:, self.head], key[:, self.head])
            if self.by_distance is not None and query.size(2) == LONG:
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
            farthest = turn(turn(q, -places), torch.full((length,), T - 1))
            as_if = torch.where(clipped, farthest, 0) @ turn(k, -places).mT + torch.where(clipped, 0, q) @ k.mT
            cosine = torch.where(places[:, None] - places >= T, as_if, cosine)
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
    """Weight a query, by distance in bins, summed over the sequences; of queries in the second
    half.
    """
    places = torch.arange(LONG)
    bins = ((places[:, None] - places).clamp(min=0) // BIN)[LONG // 2 :].flatten()
    found = torch.zeros(LONG // BIN)
    for sequence in weights[:, LONG // 2 :]:
        found.index_add_(0, bins, sequence.flatten())
    return found / (LONG - LONG // 2)


def draw(mass: list[float], path: Path, title: str) -> None:
    """The weight by distance."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    ax = figure.subplots()
    ax.bar(np.arange(len(mass)) * BIN, mass, width=BIN, align="edge")
    ax.axvline(T, color="black", linestyle=":")
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
    windows = EvaluationWindows(data.load(recipe, silent).store, [T, LONG], TOKENS)
    probe = Probe(layer, head)
    AttentionInterface.register("probe", probe)
    AttentionMaskInterface.register("probe", sdpa_mask)
    model = models.load(folder, models.load_config(folder))

    def loss(length: int = LONG) -> float:
        losses = [token_losses(model, torch.from_numpy(batch)).mean() for batch, _ in windows.batches(length, 4096)]
        return float(torch.stack(losses).mean())

    trained = loss()
    # Past the guard, which would rightly refuse another implementation
    model.config.__dict__["_attn_implementation_internal"] = "probe"
    probe.by_distance = torch.zeros(LONG // BIN)
    found: dict[str, Any] = {"run": folder.name, "layer": layer, "head": head, "tokens": TOKENS}
    found["loss at 1x"] = round(loss(T), 4)
    found["loss at 16x"] = {"by the library": round(trained, 4)}
    for name, clipped in CLIPS.items():
        probe.clipped = clipped
        found["loss at 16x"][f"clipped wavelengths: {name}"] = round(loss(), 4)
        if name == "none":
            mass, probe.by_distance = probe.by_distance / (TOKENS // LONG), None
    probe.clipped, probe.most_n = CLIPS["none"], T
    found["loss at 16x"]["N at most 128"] = round(loss(), 4)
    found["weight by distance"] = {str(n * BIN): round(float(share), 5) for n, share in enumerate(mass) if share > 1e-3}
    (folder / "why.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    draw(mass.tolist(), folder / "why.png", f"Layer {layer}, head {head}: weight of queries 1,024 to 2,047 by distance")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
