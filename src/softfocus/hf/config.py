"""The entry ``softfocus`` of a Transformers config, and the hooks that keep it and the attention
implementation together.

The entry is the single place where it stands what a model's attention runs: ``{"mechanism": {...},
"learned": {"head_scale": 0.43}}`` where all heads of all layers run the same, else ``{"layout":
{...}}`` (:class:`softfocus.layout.Layout`). The adapter reads it at every call and
``save_pretrained`` writes it. While a config has the entry, its attention implementation is
"softfocus" and nothing else: ``model.set_attn_implementation``, ``from_pretrained`` and
``from_config`` all end up assigning ``config._attn_implementation_internal``, so that one
assignment is guarded.
"""

import copy
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from transformers import PreTrainedConfig

from softfocus.catalog import LEARNABLE
from softfocus.layout import Heads, Layer, Layout
from softfocus.mechanism import Mechanism

NAME = "softfocus"
"""Of the attention implementation, its mask function, and the entry in the config.

Transformers matches implementations by substring ("flash", "sdpa", "flex_attention", "paged|",
"/"): this has none.
"""
SAVED = "softfocus: import softfocus.hf before loading this model"
"""What config.json says in place of the name. Transformers quotes it when it refuses to load a
model without softfocus.
"""
_INTERNAL = "_attn_implementation_internal"
BUILT = "_softfocus_layout"
"""The attribute of an attention module with the layout that it was built or changed for. Models
keep the config that they are given, so another may write a layout into it that this one never got.
"""


def _frozen(value: Any) -> Any:
    """Of JSON types, with dicts and lists that refuse changes."""
    if isinstance(value, dict):
        return _FrozenDict(value)
    return _FrozenList(map(_frozen, value)) if isinstance(value, list) else value


def _refuse_change(self: Any, *args: Any, **kwargs: Any) -> None:
    raise TypeError(
        "config.softfocus: it cannot be changed in place; call softfocus.hf.use() with another mechanism, or "
        "softfocus.hf.assign() with another layout, which keeps what was learned"
    )


class _FrozenList(list[Any]):
    """A list that refuses changes. Copies are lists."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_change  # type: ignore[assignment]
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse_change

    def __deepcopy__(self, memo: Any) -> list[Any]:
        return copy.deepcopy(list(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class _FrozenDict(dict[str, Any]):
    """A dict that refuses changes, and so does all that is in it. Copies are dicts."""

    __setitem__ = __delitem__ = __ior__ = _refuse_change  # type: ignore[assignment]
    clear = popitem = setdefault = update = _refuse_change  # type: ignore[assignment]

    def __init__(self, values: dict[str, Any]):
        super().__init__({key: _frozen(value) for key, value in values.items()})

    def pop(self, key: str, *default: Any) -> Any:
        """Of a key that is not there: Transformers pops some from all that it saves."""
        return super().pop(key, *default) if key not in self else _refuse_change(self)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Entry(_FrozenDict):
    """The entry as JSON types, with the layout that it was parsed into once: torch.compile traces
    no parsing. Changes in place are refused, because nothing would read them.

    Attributes:
        layout: what the attention of the config's models runs.
        masks: which masks these models expect, a name of :mod:`softfocus.hf.masks`. A model says so
            when it is built or changed; None until then. Never saved.
    """

    def __init__(self, layout: Layout, masks: str | None = None):
        super().__init__(_to_json(layout))
        self.layout = layout
        self.masks = masks

    def __deepcopy__(self, memo: Any) -> "Entry":
        return Entry(self.layout, self.masks)

    def __reduce__(self) -> tuple[Any, ...]:
        return Entry, (self.layout, self.masks)


def _to_json(layout: Layout) -> dict[str, Any]:
    first = layout.kinds[0][0]
    if layout == Layout.alike(Heads(mechanism=first.mechanism, parameters=first.parameters)):
        return {"mechanism": first.mechanism.to_dict(), "learned": first.learned}
    return {"layout": layout.to_dict()}


def _parse(entry: Any) -> Layout:
    """The layout of an entry, as :func:`_to_json` writes it.

    Raises:
        ValueError: something else; an unknown field or value is the mechanism's or the layout's own
            error.
    """
    if isinstance(entry, dict) and isinstance(entry.get("layout"), dict) and len(entry) == 1:
        try:
            return Layout.from_dict(entry["layout"])
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"config.softfocus: the layout is not as softfocus.hf.use() writes it: {error}") from error
    known = isinstance(entry, dict) and isinstance(entry.get("mechanism"), dict)
    if not known or not isinstance(entry.get("learned"), dict) or not set(entry["learned"]) <= set(LEARNABLE):
        raise ValueError(
            "config.softfocus: expected {'mechanism': {...}, 'learned': {...}} or {'layout': {...}} "
            f"as softfocus.hf.use() writes it, with learned parameters among {', '.join(LEARNABLE)}; got {entry!r}"
        )
    mechanism = Mechanism.from_dict(entry["mechanism"])
    return Layout.alike(Heads(mechanism=mechanism, parameters=tuple(entry["learned"].items())))


def layout_of(config: PreTrainedConfig) -> Layout | None:
    """What a config says that the model's attention runs, None where it has no entry."""
    entry = getattr(config, NAME, None)
    return None if entry is None else entry.layout


def layouts(config: PreTrainedConfig) -> dict[str, Layout]:
    """What a config and those inside it run, by their place in it: "" is the outermost,
    "text_config" one inside.
    """
    return {path: layout for path, inner in _places(config) if (layout := layout_of(inner)) is not None}


def layer_of(module: Any) -> Layer | None:
    """The groups of heads of an attention module, None where its config has no entry.

    Raises:
        ValueError: the config has another layout than the module was built or changed for.
    """
    layout = layout_of(module.config)
    if layout is None:
        return None
    built = getattr(module, BUILT, None)
    if built is not layout and built != layout:  # every forward asks: copies share the object
        runs = built or "Transformers' own attention"
        raise ValueError(
            f"{type(module).__name__} was built for {runs}, and its config now says {layout}: the config was changed "
            "after the model was built, as for another model that shares it. Give each model a config of its own, "
            "copy.deepcopy(config), or call softfocus.hf.use(model, ...) on the model itself; assign and window keep "
            "what it has learned"
        )
    return layout.layer(getattr(module, "layer_idx", None))


def tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config and, for composite models, the configs inside it."""
    return (inner for _, inner in _places(config))


def _places(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """The configs of :func:`tree` with their places."""
    yield path, config
    for key in config.sub_configs:
        if isinstance(inner := getattr(config, key, None), PreTrainedConfig):
            yield from _places(inner, f"{path}.{key}".removeprefix("."))


def write(config: PreTrainedConfig, layout: Layout) -> None:
    """Give one config the entry of a layout, whatever attention implementation it had before."""
    _refuse_window(config, layout)
    if config.output_attentions:  # Transformers asks only where it is set later, or saved
        raise ValueError(
            "output_attentions: the config asks for attention weights, and softfocus never holds the whole matrix; "
            "set config.output_attentions = False"
        )
    config.__dict__.pop(NAME, None)
    setattr(config, _INTERNAL, NAME)
    setattr(config, NAME, Entry(layout))


def state(config: PreTrainedConfig) -> dict[str, Any]:
    """What :func:`write` changes in one config, for :func:`restore`."""
    return {key: config.__dict__[key] for key in (NAME, _INTERNAL) if key in config.__dict__}


def restore(config: PreTrainedConfig, before: dict[str, Any]) -> None:
    """Give one config back what :func:`state` found in it."""
    for key in (NAME, _INTERNAL):
        config.__dict__.pop(key, None)
    config.__dict__.update(before)


def _get_entry(config: PreTrainedConfig) -> Entry | None:
    return config.__dict__.get(NAME)


def _set_entry(config: PreTrainedConfig, entry: dict[str, Any] | None) -> None:
    """What ``config.softfocus = entry`` does, loading included: check it, and refuse another
    attention implementation.
    """
    if entry is None:
        if config.__dict__.get(_INTERNAL) == NAME:  # as in a config.json that was edited; the first forward would fail
            raise ValueError(
                "config.softfocus: expected a mechanism or a layout, since attn_implementation is "
                "'softfocus'; got None. Call softfocus.hf.use(model, 'softmax') if softmax is what you want."
            )
        return
    # A new one: two configs that share an entry would share what their models say of masks
    parsed = Entry(entry.layout, entry.masks) if isinstance(entry, Entry) else Entry(_parse(entry))
    _refuse_conflict(config.__dict__.get(_INTERNAL), parsed)
    _refuse_window(config, parsed.layout)
    config.__dict__[_INTERNAL] = NAME
    config.__dict__[NAME] = parsed


def _get_implementation(config: PreTrainedConfig) -> str | None:
    try:
        return config.__dict__[_INTERNAL]
    except KeyError:  # before the config's own __init__ has set it
        raise AttributeError(_INTERNAL) from None


def _set_implementation(config: PreTrainedConfig, asked: str | None) -> None:
    asked = NAME if asked == SAVED else asked
    entry = config.__dict__.get(NAME)
    if entry is not None:
        _refuse_conflict(asked, entry)
        asked = NAME  # None leaves the choice to us
    config.__dict__[_INTERNAL] = asked


def _refuse_conflict(asked: str | None, entry: Entry) -> None:
    if asked not in (None, NAME):
        raise ValueError(
            f"attn_implementation={asked!r} would run softmax in a model that was made with another mechanism "
            f"({entry.layout.mechanism or entry.layout}). Leave attn_implementation out, or call "
            "softfocus.hf.use(model, 'softmax') if softmax is what you want."
        )


def _refuse_window(config: PreTrainedConfig, layout: Layout) -> None:
    if getattr(config, "is_encoder_decoder", False) and any(group.window is not None for group in layout.groups()):
        raise ValueError(
            f"window: a {config.model_type} model is an encoder and a decoder, "
            "whose cross-attention a window would cut to the wrong keys; leave the window out"
        )


def _implementation_to_save(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """What ``attn_implementation`` must say in config.json, so that Transformers without softfocus
    refuses to load.

    A composite config whose parts are not all ours says it part by part, from the top: Transformers
    resets the implementation of the inner configs to what the outermost says.
    """
    inner = {key: getattr(config, key, None) for key in config.sub_configs}
    parts = {k: _implementation_to_save(c) for k, c in inner.items() if isinstance(c, PreTrainedConfig)}
    own = SAVED if _get_entry(config) is not None else None
    if all(part == own for part in parts.values()):
        return own
    return {key: part for key, part in {"": own, **parts}.items() if part is not None}


def hook(owner: type, name: str) -> Callable[[Callable[..., Any]], None]:
    """Decorates what takes the place of a method of Transformers or PEFT, once per process. Its
    first argument is the method as it was.
    """

    def put(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        if hasattr(original, "_softfocus"):
            return

        @wraps(original)
        def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(original, self, *args, **kwargs)

        hooked._softfocus = True  # type: ignore[attr-defined]
        setattr(owner, name, hooked)

    return put


def install() -> None:
    """Hook :class:`PreTrainedConfig`, once: two guarded attributes, and ``attn_implementation`` in
    what is saved.

    The attributes are properties on the base class, not a ``__setattr__``: config classes that were
    defined before this import have bound the old ``__setattr__`` (the ``@strict`` decorator does),
    but all of them meet a property.
    """
    if NAME in vars(PreTrainedConfig):
        return
    setattr(PreTrainedConfig, NAME, property(_get_entry, _set_entry, doc=__doc__))
    setattr(PreTrainedConfig, _INTERNAL, property(_get_implementation, _set_implementation))

    @hook(PreTrainedConfig, "to_dict")
    def to_dict(original: Any, self: PreTrainedConfig) -> Any:
        output = original(self)
        if (implementation := _implementation_to_save(self)) is not None:
            output["attn_implementation"] = implementation
        return output
