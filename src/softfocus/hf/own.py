"""What a model's own code does to a layer beside the layout: its window, and layers without RoPE.

Read off the config, the attention module and its source, for people. Where a model decides in
another place, nothing is found.
"""

import re
from typing import Any

from torch import nn

from softfocus.hf.source import source
from softfocus.layout import config_of_layer

_WHOLE = 'sliding_window=getattr(self.config, "sliding_window"'  # Mistral: every layer, whatever its type
_CONDITION = re.compile(
    r"\bif ([^\n]+?):[^\n]*\n(?:\s+cos, sin = [^\n]+\n)?\s+query_states, key_states = apply_rotary\w*\("
)
_TERM = re.compile(r"self\.(\w+)( is None| is not None)?")


def own(module: nn.Module) -> list[str]:
    """The window of an attention module and "no RoPE", in words, where it has them."""
    found = [_window(module), "no RoPE" if _without_rope(module) else None]
    return [text for text in found if text is not None]


def _window(module: nn.Module) -> str | None:
    config: Any = config_of_layer(module.config, getattr(module, "layer_idx", None))
    kind, whole = _type(module), getattr(config, "sliding_window", None)
    size = getattr(module, "sliding_window", None)
    if _WHOLE in _code(module):
        size = whole
    elif kind == "chunked_attention":
        return f"chunks of {config.attention_chunk_size}"
    elif kind == "full_attention":
        size = None
    elif kind == "sliding_attention":
        size = size or whole
    return None if size is None else f"window {size}"


def _without_rope(module: nn.Module) -> bool:
    config: Any = module.config
    tables = getattr(config, "rope_parameters", None)
    if isinstance(tables, dict) and tables.get(_type(module), tables) is None:
        return True
    condition = _CONDITION.search(_code(module))
    terms = [_TERM.fullmatch(term) for term in condition[1].split(" or ")] if condition else []
    return bool(terms) and all(term is not None and not _holds(module, term) for term in terms)


def _holds(module: nn.Module, term: re.Match[str]) -> bool:
    value = getattr(module, term[1], None)
    return {None: bool(value), " is None": value is None, " is not None": value is not None}[term[2]]


def _type(module: nn.Module) -> str | None:
    """The layer type of the module's layer, None where the config has no such."""
    config: Any = module.config
    types, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return types[number] if types and isinstance(number, int) and number < len(types) else None


def _code(module: nn.Module) -> str:
    kind: Any = type(module)
    return source(kind)
