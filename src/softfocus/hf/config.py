"""The entry ``softfocus`` of a Transformers config, and the hooks that keep it and the attention implementation together.

The entry is the single place where a model's mechanism stands: ``{"mechanism": {...}, "learned": {"head_scale": 0.43}}``.
The adapter reads it at every call and ``save_pretrained`` writes it. While a config has the entry, its attention
implementation is "softfocus" and nothing else: ``model.set_attn_implementation``, ``from_pretrained`` and
``from_config`` all end up assigning ``config._attn_implementation_internal``, so that one assignment is guarded.
"""

from collections.abc import Iterator
from functools import wraps
from typing import Any

from transformers import PreTrainedConfig

from softfocus.mechanism import Mechanism

NAME = "softfocus"
"""Of the attention implementation, its mask function, and the entry in the config.

Transformers matches implementations by substring ("flash", "sdpa", "flex_attention", "paged|", "/"): this has none.
"""
LEARNABLE = ("head_scale", "power")
"""Arguments of ``softfocus.attention()`` that an attention module can own as parameters, one value a head."""

_INTERNAL = "_attn_implementation_internal"
_parsed: dict[tuple[tuple[str, Any], ...], Mechanism] = {}


def new_entry(mechanism: Mechanism, learned: dict[str, float]) -> dict[str, Any]:
    """The entry for a mechanism and the initial values of what it learns; JSON types only."""
    return {"mechanism": mechanism.to_dict(), "learned": dict(learned)}


def mechanism_of(config: PreTrainedConfig) -> Mechanism | None:
    """The mechanism that a config names, None where it has no entry."""
    entry = getattr(config, NAME, None)
    if entry is None:
        return None
    return _parsed.get(tuple(entry["mechanism"].items())) or _parse(entry)


def _parse(entry: dict[str, Any]) -> Mechanism:
    # Parsed when the entry is set and kept by value: torch.compile traces the look-up, but not the parsing.
    mechanism = Mechanism.from_dict(entry["mechanism"])
    _parsed[tuple(entry["mechanism"].items())] = mechanism
    return mechanism


def learned_of(config: PreTrainedConfig) -> dict[str, float]:
    """The parameters that a config asks for, and their initial values; empty where it has no entry."""
    entry = getattr(config, NAME, None)
    return {} if entry is None else entry["learned"]


def tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config and, for composite models, the configs inside it."""
    yield config
    for key in config.sub_configs:
        if isinstance(inner := getattr(config, key, None), PreTrainedConfig):
            yield from tree(inner)


def write(config: PreTrainedConfig, entry: dict[str, Any]) -> None:
    """Give one config the entry, whatever attention implementation it had before."""
    setattr(config, NAME, None)
    setattr(config, _INTERNAL, NAME)
    setattr(config, NAME, new_entry(_parse(entry), entry["learned"]))


def _get_entry(config: PreTrainedConfig) -> dict[str, Any] | None:
    return config.__dict__.get(NAME)


def _set_entry(config: PreTrainedConfig, entry: dict[str, Any] | None) -> None:
    """What ``config.softfocus = entry`` does, loading included: check it, and refuse another attention implementation."""
    if entry is None:
        config.__dict__.pop(NAME, None)
        return
    known = isinstance(entry, dict) and isinstance(entry.get("mechanism"), dict)
    if not known or not isinstance(entry.get("learned"), dict) or not set(entry["learned"]) <= set(LEARNABLE):
        raise ValueError(
            "config.softfocus: expected {'mechanism': {...}, 'learned': {...}} as softfocus.hf.use() writes it, with "
            f"learned parameters among {', '.join(LEARNABLE)}; got {entry!r}"
        )
    _parse(entry)  # an unknown field or value is the mechanism's own error
    _refuse_conflict(config.__dict__.get(_INTERNAL), entry)
    config.__dict__[_INTERNAL] = NAME
    config.__dict__[NAME] = entry


def _get_implementation(config: PreTrainedConfig) -> str | None:
    try:
        return config.__dict__[_INTERNAL]
    except KeyError:  # before the config's own __init__ has set it
        raise AttributeError(_INTERNAL) from None


def _set_implementation(config: PreTrainedConfig, asked: str | None) -> None:
    entry = config.__dict__.get(NAME)
    if entry is not None:
        _refuse_conflict(asked, entry)
        asked = NAME  # None leaves the choice to us
    config.__dict__[_INTERNAL] = asked


def _refuse_conflict(asked: str | None, entry: dict[str, Any]) -> None:
    if asked not in (None, NAME):
        raise ValueError(
            f"attn_implementation={asked!r} would run softmax in a model that was made with another mechanism "
            f"({_parse(entry)}). Leave attn_implementation out, or call "
            "softfocus.hf.use(model, 'softmax') if softmax is what you want."
        )


def _implementation_to_save(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """What ``attn_implementation`` must say in config.json, so that Transformers without softfocus refuses to load.

    A composite config whose parts are not all ours says it part by part, from the top: Transformers resets the
    implementation of the inner configs to what the outermost says.
    """
    inner = {key: getattr(config, key, None) for key in config.sub_configs}
    parts = {k: _implementation_to_save(c) for k, c in inner.items() if isinstance(c, PreTrainedConfig)}
    own = NAME if _get_entry(config) is not None else None
    if all(part == own for part in parts.values()):
        return own
    return {key: part for key, part in {"": own, **parts}.items() if part is not None}


def install() -> None:
    """Hook :class:`PreTrainedConfig`, once: two guarded attributes, and ``attn_implementation`` in what is saved.

    The attributes are properties on the base class, not a ``__setattr__``: config classes that were defined before
    this import have bound the old ``__setattr__`` (the ``@strict`` decorator does), but all of them meet a property.
    """
    if NAME in vars(PreTrainedConfig):
        return
    setattr(PreTrainedConfig, NAME, property(_get_entry, _set_entry, doc=__doc__))
    setattr(PreTrainedConfig, _INTERNAL, property(_get_implementation, _set_implementation))
    original = PreTrainedConfig.to_dict

    @wraps(original)
    def to_dict(self: PreTrainedConfig) -> dict[str, Any]:
        output = original(self)
        if (implementation := _implementation_to_save(self)) is not None:
            output["attn_implementation"] = implementation
        return output

    PreTrainedConfig.to_dict = to_dict
