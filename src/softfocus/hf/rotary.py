"""The share of a model's rotary embedding that each group of heads keeps, its base, and the
positions of attention sinks.

Transformers' models compute (cos, sin) once, hand them to every attention module as
``position_embeddings``, and turn queries and keys by the modeling file's own
``apply_rotary_pos_emb``. A hook before the module's forward changes the tables: where cos is 1 and
sin is 0 nothing is turned. Tables that differ from head to head have a dimension more, which that
function does not know, so it is wrapped once for each modeling file.

Other bases need the positions, which only the model's rotary embedding gets. It makes the tables of
all bases, one after another in the batch's dimension, and the hook picks each group's own.
"""

import copy
import inspect
import sys
import threading
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from softfocus.hf.config import layer_of, layout_of
from softfocus.layout import Heads, Layer

_TABLES = "position_embeddings"
_FUNCTION = "apply_rotary_pos_emb"
_TILED = "JetMoe"
"""Its query head i has key head i modulo Hk. In all others the heads of one key are neighbours."""
_OTHERS = "_softfocus_bases"
"""The rotary embeddings of a layout's other bases, inside the model's own."""
_OF_THREADS = "_softfocus_tables"
"""The tables of a module's forward in each thread, from its hook to its attention."""


class _Form(NamedTuple):
    """How an architecture turns queries by its tables (cos, sin).

    Attributes:
        neighbours: dimensions 0 and 1, 2 and 3 turn together; else each with the one half the
            rotary dimensions on.
        half: only the first half of a table is read, one entry for each pair.
        cuts: the function takes whole heads and leaves what lies beyond the rotary dimensions as it
            is.
    """

    neighbours: bool
    half: bool
    cuts: bool


def install(module: nn.Module, layer: Layer) -> None:
    """Make an attention module turn only what its groups of heads keep of the rotary embedding, and
    with their bases.

    Raises:
        ValueError: the architecture has no rotary embedding, or one of another form.
    """
    partial = [group for group in layer if group.rope < 1]
    if not partial and not any(group.sinks for group in layer) and not _bases(module):
        return  # a hook of an earlier layout finds nothing to do
    kind, modeling = type(module).__name__, sys.modules[type(module).__module__]
    if _TABLES not in inspect.signature(module.forward).parameters or not hasattr(modeling, _FUNCTION):
        raise ValueError(
            f"rope, rope_base, sinks: {kind} takes no {_TABLES} (cos, sin), so softfocus cannot change its rotary "
            "embedding; leave them out, or take an architecture such as GPT-NeoX, Llama or Qwen3"
        )
    if any(group.rope > 0 for group in partial) or any(group.sinks for group in layer):
        module._softfocus_form = _form(module, modeling)  # type: ignore[assignment]
    function = getattr(modeling, _FUNCTION)
    if len({_turned(group) for group in layer}) > 1:
        together = "so all heads of a layer need the same share and base"
        if hasattr(module, "qk_rope_head_dim"):  # MLA, as in DeepSeek-V2 and V3
            raise ValueError(f"rope: the heads of {kind} share the rotary part of a key, {together}")
        if kind.startswith(_TILED):
            raise ValueError(f"rope, rope_base: {kind} has query heads of one key far apart, {together}")
        if not hasattr(function, "_softfocus") and not _takes_two(function):
            raise ValueError(f"rope: {kind} turns queries and keys apart, {together}")
        _wrap_function(modeling)
    if _change_tables not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_change_tables, with_kwargs=True)
    if any(group.sinks for group in layer) and _forget_tables not in module._forward_hooks.values():
        module.register_forward_hook(_forget_tables, always_call=True)


def _wrap_function(modeling: Any) -> None:
    """Make the rotary function of a modeling file take tables by head."""
    function = getattr(modeling, _FUNCTION)
    if not hasattr(function, "_softfocus"):
        setattr(modeling, _FUNCTION, _by_head(function))


def add_bases(model: nn.Module) -> None:
    """Make the rotary embeddings of a model compute tables for every base of its layout, and for no
    other.

    Raises:
        ValueError: there is none, or it takes no base from its config.
    """
    found = [
        module
        for name, module in model.named_modules()
        if "RotaryEmbedding" in type(module).__name__
        and isinstance(getattr(module, "config", None), PreTrainedConfig)
        and _OTHERS not in name
    ]
    for rotary in found:
        bases = _bases(rotary)
        if bases == tuple(other.base for other in getattr(rotary, _OTHERS, ())):
            continue  # as after a change of windows or powers
        setattr(rotary, _OTHERS, nn.ModuleList(_with_base(rotary, base) for base in bases))
        if _append_tables not in rotary._forward_hooks.values():
            rotary.register_forward_hook(_append_tables, with_kwargs=True)
    if not found and any(_bases(module) for module in model.modules() if hasattr(module, "config")):
        raise ValueError(f"rope_base: {type(model).__name__} has no rotary embedding; leave it out")


def _with_base(rotary: nn.Module, base: float) -> nn.Module:
    """The same rotary embedding with another base, which its scaling (NTK, YaRN) starts from."""
    config: Any = copy.deepcopy(rotary.config)
    parameters = getattr(config, "rope_parameters", None) or {}
    # Some architectures hold one table for each layer type, and None for layers without RoPE
    tables = [parameters] if "rope_theta" in parameters else [t for t in parameters.values() if isinstance(t, dict)]
    kind: Any = type(rotary)
    refusal = f"rope_base: {kind.__name__} does not take its base from config.rope_parameters alone; leave it out"
    own = {table.get("rope_theta") for table in tables}
    if not own or None in own or not _is_of_config_alone(rotary):
        raise ValueError(refusal)
    for table in tables:
        table["rope_theta"] = base
    other: nn.Module = kind(config)
    # Without the buffers of the bases of an earlier layout
    pairs = list(zip(rotary.buffers(recurse=False), other.buffers(recurse=False), strict=True))
    if pairs and all(a.numel() == 1 for a, _ in pairs):
        raise ValueError(f"rope_base: {kind.__name__} has one wavelength, which no base changes; leave it out")
    if own != {base} and all(not a.is_meta and torch.equal(a, b.to(a)) for a, b in pairs):
        raise ValueError(refusal)
    other.to(pairs[0][0].device)
    other.base = base  # type: ignore[assignment]
    return other


def _is_of_config_alone(rotary: Any) -> bool:
    """Whether its class makes the same from its config. Molmo2's may be told to leave the scaling
    out, and another one that is made of the config would have it.
    """
    again = type(rotary)(copy.deepcopy(rotary.config))
    numbers = [name for name in vars(rotary) if name.endswith(("rope_type", "attention_scaling"))]
    if any(getattr(rotary, name) != getattr(again, name, None) for name in numbers):
        return False
    tables = dict(again.named_buffers(recurse=False))
    for name, have in rotary.named_buffers(recurse=False):
        if name.endswith("original_inv_freq"):  # inv_freq itself follows the length in dynamic NTK
            made = tables.get(name)
            if made is None or made.shape != have.shape:
                return False
            # As far apart as rounding to 16 bits brings them, or another device
            if not have.is_meta and not torch.allclose(have.float(), made.to(have.device).float(), 2**-7, 2**-23):
                return False
    return True


def _append_tables(rotary: nn.Module, args: Any, kwargs: dict[str, Any], own: Any) -> Any:
    """(cos, sin), each [(1 + other bases) B, L, rotary dimensions]."""
    others: Any = getattr(rotary, _OTHERS)
    return (
        tuple(map(torch.cat, zip(own, *(other(*args, **kwargs) for other in others), strict=True))) if others else own
    )


def _bases(module: Any) -> tuple[float, ...]:
    layout = layout_of(module.config)
    return () if layout is None else layout.rope_bases


def _turned(group: Heads) -> tuple[float, float | None]:
    return group.rope, group.rope_base


def _change_tables(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    layer = layer_of(module) or ()
    sinks, bases = any(group.sinks for group in layer), _bases(module)
    if all(group.rope == 1 for group in layer) and not sinks and not bases:
        return None
    given = kwargs.get(_TABLES)
    plain = all(group.rope in (0, 1) and group.rope_base is None for group in layer)
    if given is None and _TABLES in kwargs and plain and not sinks:
        return None  # a layer that has no RoPE, as Beam's layers of full attention
    if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(x, Tensor) for x in given)):
        raise ValueError(
            f"{type(module).__name__} got no {_TABLES} (cos, sin) by name, which rope, rope_base and sinks need"
        )
    # By base, each (cos, sin) of [B, L, rotary dimensions]
    by_base = dict(
        zip((None, *bases), zip(*(table.chunk(1 + len(bases)) for table in given), strict=True), strict=True)
    )
    tables = _share(module, layer[0], by_base)
    if len({_turned(group) for group in layer}) > 1:
        # Not done yet where the model was unpickled in a new process
        _wrap_function(sys.modules[type(module).__module__])
        columns = zip(*(_share(module, group, by_base) for group in layer), strict=True)
        tables = tuple(  # [B, H, L, rotary dimensions]
            torch.cat([x[:, None].expand(-1, group.heads or 1, -1, -1) for x, group in zip(xs, layer, strict=True)], 1)
            for xs in columns
        )
    if sinks:
        module.__dict__.setdefault(_OF_THREADS, {})[_thread()] = tables
    return args, kwargs | {_TABLES: tables}


def _forget_tables(module: nn.Module, args: Any, out: Any) -> None:
    module.__dict__.get(_OF_THREADS, {}).pop(_thread(), None)


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _share(module: nn.Module, group: Heads, by_base: dict[float | None, tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """The tables (cos, sin) of one group of heads, [B, L, rotary dimensions]."""
    cos, sin = by_base[group.rope_base]
    kept = _kept(module, group.rope, cos)  # [rotary dimensions]
    return torch.where(kept, cos, 1.0), torch.where(kept, sin, 0.0)


def _kept(module: nn.Module, share: float, cos: Tensor) -> Tensor:
    """Which rotary dimensions stay turned, bool [rotary dimensions]: a share of those that turn,
    those of the highest frequencies, which come first.
    """
    size = cos.shape[-1]
    if share in (0.0, 1.0):
        return torch.full((size,), bool(share), device=cos.device)
    form: _Form = module._softfocus_form  # type: ignore[assignment]
    places = torch.arange(size, device=cos.device)
    # A table of which only the first half is read holds one entry for each frequency there
    frequency = places // 2 if form.neighbours and not form.half else places % (size // 2)
    return frequency < round(share * _turning_pairs(module, size // 2))


def _turning_pairs(module: nn.Module, pairs: int) -> int:
    """How many pairs of the tables turn. Proportional RoPE (Gemma 4's global layers) has tables of
    whole heads, whose last pairs have a frequency of 0.
    """
    parameters = getattr(module.config, "rope_parameters", None) or {}
    # Some architectures hold one table for each layer type, and None for layers without RoPE
    parameters = parameters.get(getattr(module, "layer_type", None), parameters) or {}
    if parameters.get("rope_type") != "proportional":
        return pairs
    return int(parameters.get("partial_rotary_factor", 1.0) * 2 * pairs // 2)  # as Transformers rounds


def _form(module: nn.Module, modeling: Any) -> _Form:
    """How the rotary functions turn that an attention module's forward names.

    Raises:
        ValueError: no known form, or functions of different forms.
    """
    named = inspect.unwrap(type(module).forward).__code__.co_names
    functions = [name for name in named if name.startswith(_FUNCTION) and hasattr(modeling, name)]
    with torch.device("cpu"), torch.no_grad():  # from_pretrained builds models on the meta device
        forms = {_form_of(getattr(modeling, name)) for name in functions}
    found = forms.pop() if len(forms) == 1 else None
    if found is None:
        raise ValueError(
            f"rope, sinks: {type(module).__name__} turns queries in a way that softfocus does not know "
            f"({', '.join(functions) or 'not by ' + _FUNCTION}); take a rope of 0 or 1, and no sinks"
        )
    return found


def _form_of(function: Any) -> _Form | None:
    """The form that turns marked queries by marked tables as a rotary function does; None where
    none does.
    """
    cos, sin = torch.arange(1.0, 9.0), torch.arange(11.0, 19.0)
    for beyond in (4, 0):
        head = torch.arange(1.0, 9.0 + beyond)
        given = head[None, None, None]
        try:
            tables = cos[None, None], sin[None, None]
            turned = function(given, given, *tables)[0] if _takes_two(function) else function(given, *tables)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            continue  # it takes no head of this size, or other arguments
        for neighbours, half in ((False, False), (True, False), (True, True)):
            form = _Form(neighbours, half, cuts=beyond > 0)
            if torch.equal(turned.flatten(), _turn(head, cos, sin, form)):
                return form
        # DeepSeek-V3 may bring neighbours a half apart first. Then it turns halves
        apart = torch.cat([head[::2], head[1::2]])
        if torch.equal(turned.flatten(), _turn(apart, cos, sin, _Form(neighbours=False, half=True, cuts=False))):
            return _Form(neighbours=False, half=False, cuts=False)
    return None


def _takes_two(function: Any) -> bool:
    """Whether a rotary function turns a query and a key; Gemma 4's turns one tensor."""
    return list(inspect.signature(function).parameters)[2:4] == ["cos", "sin"]


def _turn(x: Tensor, cos: Tensor, sin: Tensor, form: _Form) -> Tensor:
    """Heads [..., D] turned by tables [..., rotary dimensions] of a known form."""
    size = cos.shape[-1]
    if form.half:
        places = torch.arange(size, device=cos.device)
        entries = places // 2 if form.neighbours else places % (size // 2)
        cos, sin = cos[..., entries], sin[..., entries]
    turning, rest = x[..., :size], x[..., size:]
    if form.neighbours:
        quarter = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    else:
        quarter = torch.cat((-turning[..., size // 2 :], turning[..., : size // 2]), dim=-1)
    return torch.cat([turning * cos + quarter * sin, rest], dim=-1)


def _by_head(original: Any) -> Any:
    """``apply_rotary_pos_emb`` that also takes tables of every query head, [B, H, L, rotary
    dimensions].
    """

    @wraps(original)
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if cos.dim() == 3:
            return original(q, k, cos, sin, *args, **kwargs)
        if args or kwargs.get("unsqueeze_dim", 1) != 1 or kwargs.keys() - {"unsqueeze_dim"}:
            raise ValueError(
                f"rope: softfocus cannot turn single heads where the model calls {_FUNCTION} with more than q, k, cos "
                "and sin; give all heads of a layer the same share and base"
            )
        if q.shape[1] != cos.shape[1]:
            raise ValueError(
                "rope: this architecture lays queries out in another way than [batch, heads, length, head_dim]; give "
                "all heads of a layer the same share and base"
            )
        if k.shape[1] == q.shape[1]:
            return _apply_to_single_heads(original, q, k, cos, sin)
        shared = q.shape[1] // k.shape[1]
        query, _ = _apply_to_single_heads(original, q, q, cos, sin)
        key, _ = _apply_to_single_heads(original, k, k, cos[:, ::shared], sin[:, ::shared])
        return query, key

    apply_rotary_pos_emb._softfocus = True  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _apply_to_single_heads(original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The original function on every head as a sequence of one head: tables [B, H, L, n] are then
    tables [B H, L, n].
    """
    cos, sin = (table.expand(q.shape[0], -1, -1, -1).flatten(0, 1) for table in (cos, sin))
    query, key = original(q.flatten(0, 1)[:, None], k.flatten(0, 1)[:, None], cos, sin)
    return query.view(q.shape), key.view(k.shape)


def at_first_window(module: nn.Module, query: Tensor, heads: slice, window: int) -> Tensor:
    """Queries [B, H, L, D] as they would be turned at the end of the first window, where they stand
    beyond it.

    A query that was turned to its position is turned back by the difference, cos(a - b) = cos a cos
    b + sin a sin b.

    Raises:
        ValueError: there is no table, or not that of these queries from the first position on, or
            it turns an unknown part.
    """
    tables = getattr(module, _OF_THREADS, {}).get(_thread())
    if tables is None or tables[0].shape[-2] != query.shape[2]:
        raise ValueError("sinks: they need the positions of all queries, from the first on: run without a KV cache")
    form: _Form = module._softfocus_form  # type: ignore[assignment]
    if tables[0].shape[-1] != query.shape[-1] and not form.cuts:
        raise ValueError(
            f"sinks: {type(module).__name__} turns a part of each head, and softfocus cannot tell which; "
            f"leave sinks out"
        )
    cos, sin = (table[:, heads] if table.dim() == 4 else table[:, None] for table in tables)
    last = torch.arange(query.shape[2], device=query.device).clamp(max=window - 1)
    cos_last, sin_last = cos[..., last, :], sin[..., last, :]
    scale = 1 / (cos.square() + sin.square())  # YaRN's tables are not of length one
    back_cos, back_sin = (cos * cos_last + sin * sin_last) * scale, (cos * sin_last - sin * cos_last) * scale
    return _turn(query, back_cos, back_sin, form)
