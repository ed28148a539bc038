"""Layouts: which heads of which layers of a model run which mechanism, with which window and how
much of RoPE.

A layout is a frozen description. It holds names and numbers only, so it compares, hashes, goes
through JSON, and stands in config.json. :func:`resolve` makes one from what a user writes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from math import inf
from typing import Any

from softfocus.catalog import checked_parameters, learned_parameters, name_of
from softfocus.mechanism import Mechanism, did_you_mean
from softfocus.validation import mechanism_of

REST = "*"
"""In a layout's keys: every layer that no other key chooses."""
_LARGEST = 2**31 - 1
"""Of heads, and of a window: a mask adds positions to a window, which overflows near 2^63."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Query heads of one attention layer that run one mechanism.

    Attributes:
        mechanism: a name, a combination of names or a ``Mechanism``; held as a ``Mechanism``.
        heads: how many query heads; None for all of the layer, or all that its other groups leave.
        window: how many keys a query sees, itself included (to each side, where attention is not
            causal). None: no window beyond the model's own.
        sinks: how many of the first keys a query sees beside its window, at StreamingLLM's
            positions (arXiv 2309.17453, section 3.2): from the end of the first window on, their
            distance to a query stays what it was there. Without a KV cache only.
        rope: share of the rotary embedding that is kept, its highest frequencies first; 1 is the
            model as it is, 0 is NoPE, between them p-RoPE (arXiv 2410.06205).
        rope_base: base of the rotary embedding's frequencies, Transformers' ``rope_theta``; None:
            the model's own.
        parameters: initial values of what the heads learn, by argument of
            ``softfocus.attention()``: ``head_scale``, ``power``. What the mechanism is defined with
            (SSMax's ``head_scale``) is added. Held as pairs.

    Raises:
        ValueError, TypeError: a value out of range; the message names it.
    """

    mechanism: Mechanism
    heads: int | None = None
    window: int | None = None
    sinks: int = 0
    rope: float = 1.0
    rope_base: float | None = None
    parameters: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        algebra = mechanism_of(self.mechanism)
        object.__setattr__(self, "mechanism", algebra)
        for name in ("heads", "window"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST
            ):
                raise ValueError(f"{name}: got {value!r}, expected a whole number from 1 to {_LARGEST}, or None")
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise ValueError(f"sinks: got {self.sinks!r}, expected a whole number of at least 0")
        if self.sinks and (self.window is None or self.sinks >= self.window):
            what = "sinks stand beside a window that is longer than they are"
            raise ValueError(f"sinks: got {self.sinks} with window={self.window}; {what}")
        if isinstance(self.rope, bool) or not isinstance(self.rope, int | float) or not 0 <= self.rope <= 1:
            what = "expected a share from 0 (no rotary embedding) to 1 (the model's own)"
            raise ValueError(f"rope: got {self.rope!r}, {what}")
        object.__setattr__(self, "rope", float(self.rope))
        if (base := self.rope_base) is not None:
            if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base < inf:
                raise ValueError(f"rope_base: got {base!r}, expected a number above 1, or None for the model's own")
            if self.rope == 0:
                raise ValueError(f"rope_base: got {base!r} with rope=0, which turns nothing; leave one of them out")
            object.__setattr__(self, "rope_base", float(base))
        own = checked_parameters(algebra, dict(self.parameters))
        object.__setattr__(self, "parameters", tuple(sorted({**learned_parameters(algebra), **own}.items())))

    @property
    def learned(self) -> dict[str, float]:
        """The initial values of what the heads learn, one value for all of them."""
        return dict(self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without defaults."""
        values = {name: value for name, value in asdict(self).items() if value != _DEFAULTS.get(name)}
        return values | {"mechanism": self.mechanism.to_dict(), "parameters": self.learned}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Heads":
        """The inverse of :meth:`to_dict`; ``mechanism`` may also be a name or a ``Mechanism``."""
        known = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"a group of heads has no entry {name!r}; {did_you_mean(name, known, 'they are')}")
        if "mechanism" not in values:
            raise ValueError(f"a group of heads needs a mechanism; got {dict(values)!r}")
        mechanism = values["mechanism"]
        parameters = values.get("parameters", {})
        if not isinstance(parameters, Mapping):
            raise TypeError(f"parameters: got {parameters!r}, expected initial values by name")
        if isinstance(mechanism, Mapping):
            mechanism = Mechanism.from_dict(dict(mechanism))
        return cls(**{**values, "mechanism": mechanism, "parameters": tuple(parameters.items())})

    def __str__(self) -> str:
        """ "lssar", "softmax[128]" with a window, "lssar nope" without RoPE, "lssar base 500000"
        with a base of its own.
        """
        text = name_of(self.mechanism)
        if self.window is not None:
            text += f"[{self.window}{f'+{self.sinks}' if self.sinks else ''}]"
        if self.rope < 1:
            text += " nope" if self.rope == 0 else f" rope {self.rope:g}"
        if self.rope_base is not None:
            text += f" base {self.rope_base:.10g}"
        return text


_DEFAULTS: dict[str, Any] = {"heads": None, "window": None, "sinks": 0, "rope": 1.0, "rope_base": None}

Layer = tuple[Heads, ...]
"""The groups of one attention layer's heads, in the order of the heads."""


@dataclass(frozen=True)
class Layout:
    """What every attention layer of a model runs.

    Attributes:
        kinds: the different layers that there are.
        layers: for each layer of the model its place in ``kinds``; None where all attention modules
            are alike, numbered or not.
    """

    kinds: tuple[Layer, ...]
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        alike = self.layers is None and len(self.kinds) == 1
        if not alike and not (self.layers and set(self.layers) == set(range(len(self.kinds)))):
            raise ValueError(
                f"layers: got {self.layers!r} for {len(self.kinds)} kinds of layers, expected every kind to be used"
            )
        for kind in self.kinds:
            if not kind or (len(kind) > 1 and any(group.heads is None for group in kind)):
                raise ValueError(f"kinds: got {kind!r}, expected groups that say how many heads they have")

    def __deepcopy__(self, memo: Any) -> "Layout":
        return self  # frozen: a copied model and its config go on sharing it, known by its identity

    @classmethod
    def alike(cls, heads: Heads) -> "Layout":
        """Every head of every attention module the same."""
        return cls(((heads,),))

    def layer(self, index: int | None) -> Layer:
        """The groups of heads of a layer, by its number in the model."""
        if self.layers is None:
            return self.kinds[0]
        if index is None:
            what = "it finds layers by number, and an attention module of the model has no layer_idx"
            raise ValueError(f"layout: {what}; give one mechanism for all layers")
        if not 0 <= index < len(self.layers):
            raise ValueError(f"layer {index}: the layout describes the layers 0 to {len(self.layers) - 1}")
        return self.kinds[self.layers[index]]

    def groups(self) -> Iterator[Heads]:
        """Every group of heads of every kind."""
        for kind in self.kinds:
            yield from kind

    def map(self, change: Callable[[Heads], Heads]) -> "Layout":
        """The same layout with each group of heads changed."""
        return replace(self, kinds=tuple(tuple(map(change, kind)) for kind in self.kinds))

    @property
    def rope_bases(self) -> tuple[float, ...]:
        """The different bases that groups of heads name, in the order in which they come."""
        return tuple(dict.fromkeys(group.rope_base for group in self.groups() if group.rope_base is not None))

    @property
    def mechanism(self) -> Mechanism | None:
        """The mechanism that every head runs; None where they differ."""
        found = {group.mechanism for group in self.groups()}
        return found.pop() if len(found) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        kinds = [[group.to_dict() for group in kind] for kind in self.kinds]
        return {"kinds": kinds, "layers": None if self.layers is None else list(self.layers)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Layout":
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError, TypeError: something else, with what it is.
        """
        if set(values) != {"kinds", "layers"}:
            raise ValueError(f"a layout has the entries kinds and layers; got {', '.join(map(str, values)) or 'none'}")
        kinds = tuple(tuple(Heads.from_dict(group) for group in kind) for kind in values["kinds"])
        return cls(kinds, None if values["layers"] is None else tuple(values["layers"]))

    def __str__(self) -> str:
        """ "softmax[128] / lssar": the kinds of layers in the order in which they come, their
        groups of heads with "+".
        """
        return kinds_text(self.kinds)

    def table(self) -> str:
        """One line for each kind of layers, with what its heads learn and its initial value."""
        if self.layers is None:
            return f"every layer: {kind_text(self.kinds[0], learned=True)}"
        lines = []
        for number, kind in enumerate(self.kinds):
            which = [str(layer) for layer, its in enumerate(self.layers) if its == number]
            lines.append(f"layer{'s' * (len(which) > 1)} {', '.join(which)}: {kind_text(kind, learned=True)}")
        return "\n".join(lines)


def resolve(spec: Mapping[Any, Any], config: Any) -> Layout:
    """A layout from what a user writes, for the model of a config.

    Args:
        spec: what runs (a mechanism, a dict with the fields of :class:`Heads`, or a list of such
            groups of heads), by which layers: a layer type of the config (``"full_attention"``), a
            number (``3``, ``-1``), a slice (``"0::2"``), or ``"*"`` for all that are left.
        config: of a Transformers model with one stack of layers.

    Raises:
        ValueError: a layer that is chosen twice, or not at all, or does not exist; heads that do
            not add up.
        TypeError: something that is no mechanism.
    """
    if not spec:
        raise ValueError("the layout is empty: say which layers run what, {'*': 'lssar'}")
    count = layer_count(config)
    chosen: dict[int, int] = {}
    kinds: list[Layer] = []
    for key, value in sorted(spec.items(), key=lambda item: item[0] == REST):
        rest = [layer for layer in range(count) if layer not in chosen]
        which = rest if key == REST else _layers(key, config, count)
        if not which:
            runs = f"{kind_text(groups_of(value))!r}, for the rest of them, runs nowhere"
            what = f"layout: other keys choose all {count} layers, so {runs}"
            raise ValueError(f"{what}; write '*' in place of one of the keys")
        if twice := [layer for layer in which if layer in chosen]:
            other = next(one for one in spec if one not in (key, REST) and twice[0] in _layers(one, config, count))
            raise ValueError(f"layout: {key!r} chooses layer {twice[0]}, and so does {other!r}; leave it to one")
        for layer in which:
            kind = _layer(value, key, config_of_layer(config, layer))
            if kind not in kinds:
                kinds.append(kind)
            chosen[layer] = kinds.index(kind)
    if missing := [str(layer) for layer in range(count) if layer not in chosen]:
        layers = "layer" if len(missing) == 1 else "layers"
        raise ValueError(f"layout: no key chooses {layers} {', '.join(missing)} of {count}; add '*' for the rest")
    used = list(dict.fromkeys(chosen[layer] for layer in range(count)))  # in the order of the layers
    return Layout(tuple(kinds[kind] for kind in used), tuple(used.index(chosen[layer]) for layer in range(count)))


def chooses_all(keys: Iterable[Any], config: Any) -> bool:
    """Whether these keys of a layout choose every layer, so that none is left for ``"*"``.

    Raises:
        ValueError: as :func:`resolve`.
    """
    count = layer_count(config)
    return {layer for key in keys if key != REST for layer in _layers(key, config, count)} == set(range(count))


def layer_count(config: Any) -> int:
    """How many layers the stack of a config has.

    Raises:
        ValueError: a composite config, or one that does not say.
    """
    if any(getattr(config, key, None) is not None for key in getattr(config, "sub_configs", {})):
        raise ValueError(
            f"layout: a {config.model_type} model has several stacks of layers; give use() an inner model (of Llava: "
            "model.model.language_model)"
        )
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"layout: a {config.model_type} model has no single stack of numbered layers to lay out")
    return count


def config_of_layer(config: Any, layer: int | None) -> Any:
    """The config of one layer. Where layers differ in keys of a config, Transformers refuses to
    read these keys off the whole.
    """
    apart = layer is not None and getattr(config, "is_heterogeneous", False)
    return config.per_layer_config[layer] if apart else config


def _layers(key: Any, config: Any, count: int) -> list[int]:
    types = list(getattr(config, "layer_types", None) or [])
    if key in types:
        return [layer for layer, kind in enumerate(types) if kind == key]
    text = str(key).strip()
    parts = text.split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
        if len(numbers) == 1 and numbers[0] is not None:
            return [range(count)[numbers[0]]]
        found = list(range(count)[slice(*numbers)]) if 1 < len(numbers) <= 3 else None
    except IndexError:
        raise ValueError(f"layout: there is no layer {text}; the model has {count}, from 0 to {count - 1}") from None
    except ValueError:
        found = None
    if found is None:
        near = get_close_matches(text, types, n=1, cutoff=0.8)
        known = f"its layer types ({', '.join(dict.fromkeys(types))}), " if types else ""
        none = "" if types or not text.isidentifier() else f" (a {config.model_type} model has no layer types)"
        raise ValueError(
            f"layout: {key!r} chooses no layers{none}; expected {known}a number, a slice ('0::2') or '*'"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if not found:
        raise ValueError(f"layout: {key!r} chooses none of the {count} layers")
    return found


def groups_of(value: Any) -> Layer:
    """The groups of heads that a value of a layout names: a mechanism, a dict of the fields of
    :class:`Heads`, or a list.

    Raises:
        ValueError, TypeError: something else, or a value out of range.
    """
    groups = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not groups:
        raise ValueError("an empty list names no mechanism")
    return tuple(map(_group, groups))


def _layer(value: Any, key: Any, config: Any) -> Layer:
    try:
        return _fitted(groups_of(value), config)
    except (ValueError, TypeError) as error:
        raise type(error)(f"layout: {key!r}: {error}") from None


def _group(value: Any) -> Heads:
    if isinstance(value, Heads):
        return value
    if not isinstance(value, Mapping):
        return Heads(mechanism=value)
    own = value.get("mechanism")
    if not isinstance(own, Mapping):
        return Heads.from_dict(value)
    if not own:
        raise ValueError("mechanism: got no fields; write 'softmax' if softmax is what you want")
    return Heads.from_dict({**value, "mechanism": Mechanism().replace(**own)})


def _fitted(groups: Layer, config: Any) -> Layer:
    """Groups whose heads add up to the layer's, each of whole groups of heads that share a key."""
    if len(groups) == 1 and groups[0].heads is None:
        return groups
    total, shared = config.num_attention_heads, heads_of_a_key(config)
    given = sum(group.heads or 0 for group in groups)
    if (open_ends := sum(group.heads is None for group in groups)) > 1:
        raise ValueError("heads: more than one group of heads leaves out how many it has; give `heads` to all but one")
    if given + open_ends > total or (not open_ends and given != total):
        raise ValueError(f"heads: the groups have {given} heads, the layer has {total}; a group may leave `heads` out")
    groups = tuple(group if group.heads else replace(group, heads=total - given) for group in groups)
    if odd := [group.heads for group in groups if group.heads is not None and group.heads % shared]:
        raise ValueError(f"heads: got {odd[0]}, expected a multiple of {shared}: so many query heads share a KV head")
    return groups if len(groups) > 1 else (replace(groups[0], heads=None),)


def heads_of_a_key(config: Any) -> int:
    """How many query heads of a model share a KV head."""
    total: int = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or total
    return max(1, total // keys)  # DeepSeek-V3 has a key for each head, whatever its config says


def kind_text(kind: Layer, *, learned: bool = False) -> str:
    """The groups of heads of one kind of layers, in one line; if asked, what they learn."""
    texts = []
    for group in kind:
        text = f"{group.heads}x {group}" if group.heads is not None else str(group)
        if learned and group.learned:
            starts = [f"learned {name} from {start:g}" for name, start in group.parameters]
            text += f" ({', '.join(starts)})"
        texts.append(text)
    return " + ".join(texts)


def kinds_text(kinds: Iterable[Layer]) -> str:
    """What kinds of layers run, each once, in one line."""
    return " / ".join(dict.fromkeys(map(kind_text, kinds)))
