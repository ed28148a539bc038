"""Which backend runs each layer of a model: ``softfocus.explain()`` on tensors like those that the
layer will hand over.
"""

import re
from itertools import takewhile
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from softfocus.functional import explain
from softfocus.hf.config import layer_of, layout_of
from softfocus.hf.learned import attention_modules, heads, is_causal, weight_of
from softfocus.hf.own import own
from softfocus.hf.source import source
from softfocus.layout import Heads, Layout, config_of_layer

_LENGTH = 128
_DROPOUT = re.compile(r"\bdropout=(?=[^\n]*self\.training)(?:0\.0 if not self\.training else )?self\.([\w.]+)")
_FUSED = {"cpu": "cpu", "cuda": "triton"}


def tables(model: PreTrainedModel) -> str:
    """What the model runs: the table of its layout, or one for each part where the parts differ."""
    places = {module: name for name, module in model.named_modules()}
    parts: dict[Layout | None, list[nn.Module]] = {}
    for module in attention_modules(model):
        parts.setdefault(layout_of(module.config), []).append(module)
    found = [
        (
            ", ".join(dict.fromkeys(_stack(places[module]) for module in modules)),
            "Transformers' own attention" if layout is None else _table(modules, layout),
        )
        for layout, modules in parts.items()
    ]
    if not found:
        return "no attention that dispatches"
    return found[0][1] if len(found) == 1 else "\n".join(f"{where}:\n{table}" for where, table in found)


def _stack(place: str) -> str:
    """Where the stack of layers of a module is: "model.language_model.layers"."""
    return ".".join(takewhile(lambda step: not step.isdigit(), place.split(".")))


def own_attention(model: PreTrainedModel) -> list[str]:
    """The classes of attention modules that dispatch, and run what Transformers chooses."""
    return sorted({type(module).__name__ for module in attention_modules(model) if layout_of(module.config) is None})


def _table(modules: list[nn.Module], layout: Layout) -> str:
    """The layout's table, with what the model itself does in each kind of layers, and the backend
    behind it.
    """
    layers = [(module, layer_of(module)) for module in modules]
    lines = []
    for line, kind in zip(layout.table().splitlines(), layout.kinds, strict=True):
        alike = [module for module, layer in layers if layer == kind]
        found = {_backend(module, group): None for module in alike for group in kind}
        runs = f"backend {' + '.join(found)}" if found else "no attention that dispatches"
        lines.append(f"{line}{_own(alike)}; {runs}")
    return "\n".join(lines)


def _own(modules: list[nn.Module]) -> str:
    """What the model's own code does in layers of one kind, by number where they differ."""
    where: dict[str, list[str]] = {}
    for module in modules:
        for text in own(module):
            where.setdefault(text, []).append(str(getattr(module, "layer_idx", "?")))
    texts = [
        text if len(layers) == len(modules) else f"{text} in layer{'s' * (len(layers) > 1)} {', '.join(layers)}"
        for text, layers in where.items()
    ]
    return f"; the model's own: {', '.join(texts)}" if texts else ""


def _backend(module: nn.Module, group: Heads) -> str:
    """The backend of one group of heads, as the module is now: its device, dtype, and dropout while
    it trains. "none", with the reason, where attention() refuses them.
    """
    weight = weight_of(module)
    size = _head_size(module)
    if size is None:
        return "not known (the module does not say how large a head is)"
    query = torch.empty(1, group.heads or heads(module), _LENGTH, size, dtype=weight.dtype, device=weight.device)
    query.requires_grad_(module.training)
    causal = is_causal(module)
    learned = {name: query.new_ones(query.shape[1]) for name in group.learned}
    window = None if group.window is None else (group.window - 1, 0 if causal else group.window - 1)
    try:
        found = explain(
            *(query, query, query),
            mechanism=group.mechanism,
            is_causal=causal,
            window_size=window,
            dropout_p=_dropout(module) if module.training else 0.0,
            head_scale=learned.get("head_scale"),
            power=learned.get("power"),
        )
    except ValueError as error:  # LASER refuses dropout, which only training has
        return f"none ({error})"
    fused = _FUSED.get(query.device.type, found.backend)
    return found.backend if found.backend == fused else f"{found.backend} (not {fused}: {found.reasons[fused]})"


def _dropout(module: nn.Module) -> float:
    """The probability that a module in training passes on, by the attribute that its source names:
    ``attention_dropout``, or ``attn_dropout.p`` in GPT-2.
    """
    kind: Any = type(module)
    found = _DROPOUT.search(source(kind))
    value = attrgetter(found[1])(module) if found else getattr(module, "attention_dropout", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def _head_size(module: nn.Module) -> int | None:
    config = config_of_layer(module.config, getattr(module, "layer_idx", None))
    for owner in (module, config):
        for name in ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim"):
            if isinstance(size := getattr(owner, name, None), int):
                return size
    width = getattr(config, "hidden_size", None)
    return width // heads(module) if isinstance(width, int) else None
