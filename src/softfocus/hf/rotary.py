"""The share of a model's rotary embedding that each group of heads keeps, and the positions of attention sinks.

Transformers' models compute (cos, sin) once, hand them to every attention module as ``position_embeddings``, and turn queries
and keys by the modeling file's own ``apply_rotary_pos_emb``. A hook before the module's forward changes the tables: where cos
is 1 and sin is 0 nothing is turned. Tables that differ from head to head have a dimension more, which that function does
not know, so it is wrapped once for each modeling file.
"""

import inspect
import sys
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from softfocus.hf.config import layer_of
from softfocus.layout import Layer

_TABLES = "position_embeddings"
_FUNCTION = "apply_rotary_pos_emb"


def install(module: nn.Module, layer: Layer) -> None:
    """Make an attention module turn only what its groups of heads keep of the rotary embedding.

    Raises:
        ValueError: the architecture has no rotary embedding, or one of another form.
    """
    partial = [group for group in layer if group.rope < 1]
    if not partial and not any(group.sinks for group in layer):
        return  # a hook of an earlier layout finds nothing to do
    kind, modeling = type(module).__name__, sys.modules[type(module).__module__]
    if _TABLES not in inspect.signature(module.forward).parameters or not hasattr(modeling, _FUNCTION):
        raise ValueError(
            f"rope, sinks: {kind} takes no {_TABLES} (cos, sin), so softfocus cannot change its rotary embedding; leave "
            "out rope and sinks, or take an architecture such as GPT-NeoX, Llama or Qwen3"
        )
    if any(group.rope > 0 for group in partial):
        module._softfocus_neighbours = _turns_neighbours(modeling)  # type: ignore[assignment]
    if len({group.rope for group in layer}) > 1 and not hasattr(getattr(modeling, _FUNCTION), "_softfocus"):
        setattr(modeling, _FUNCTION, _by_head(getattr(modeling, _FUNCTION)))
    if _change_tables not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_change_tables, with_kwargs=True)


def _change_tables(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    layer = layer_of(module) or ()
    shares = [group.rope for group in layer]
    sinks = any(group.sinks for group in layer)
    if all(share == 1 for share in shares) and not sinks:
        return None
    given = kwargs.get(_TABLES)
    if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(x, Tensor) for x in given)):
        raise ValueError(f"{type(module).__name__} got no {_TABLES} (cos, sin) by name, which rope and sinks need")
    cos, sin = given  # [B, L, rotary dimensions]
    if len(set(shares)) == 1:
        kept = _kept(module, shares[0], cos)  # [rotary dimensions]
    else:
        rows = [_kept(module, group.rope, cos).expand(group.heads or 1, -1) for group in layer]
        kept = torch.cat(rows)[:, None]  # [H, 1, rotary dimensions]
        cos, sin = cos[:, None], sin[:, None]
    tables = torch.where(kept, cos, 1.0), torch.where(kept, sin, 0.0)  # [B, (H,) L, rotary dimensions]
    if sinks:
        module._softfocus_tables = tables  # type: ignore[assignment]
    return args, kwargs | {_TABLES: tables}


def _kept(module: nn.Module, share: float, cos: Tensor) -> Tensor:
    """Which rotary dimensions stay turned, bool [rotary dimensions]: those of the highest frequencies, which come first."""
    size = cos.shape[-1]
    if share in (0.0, 1.0):
        return torch.full((size,), bool(share), device=cos.device)
    places = torch.arange(size, device=cos.device)
    frequency = places // 2 if module._softfocus_neighbours else places % (size // 2)
    return frequency < round(share * size / 2)


def _turns_neighbours(modeling: Any) -> bool:
    """Whether a modeling file's rotate_half pairs dimensions 0 and 1, 2 and 3 (else each with the one half the size on)."""
    turned = None
    if hasattr(modeling, "rotate_half"):
        turned = modeling.rotate_half(torch.arange(1.0, 5.0, device="cpu")).abs().tolist()
    if turned not in ([3.0, 4.0, 1.0, 2.0], [2.0, 1.0, 4.0, 3.0]):
        raise ValueError(
            f"rope: {modeling.__name__} pairs rotary dimensions in a way that softfocus does not know; take 0 or 1"
        )
    return bool(turned == [2.0, 1.0, 4.0, 3.0])


def _by_head(original: Any) -> Any:
    """``apply_rotary_pos_emb`` that also takes tables of every query head, [B, H, L, rotary dimensions]."""

    @wraps(original)
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if cos.dim() == 3:
            return original(q, k, cos, sin, *args, **kwargs)
        if args or kwargs or q.shape[1] != cos.shape[1]:
            raise ValueError(
                "rope: this architecture lays queries out in another way than [batch, heads, length, head_dim]"
            )
        if k.shape[1] == q.shape[1]:
            return _each_alone(original, q, k, cos, sin)
        shared = q.shape[1] // k.shape[1]
        query, _ = _each_alone(original, q, q, cos, sin)
        key, _ = _each_alone(original, k, k, cos[:, ::shared], sin[:, ::shared])
        return query, key

    apply_rotary_pos_emb._softfocus = True  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _each_alone(original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The original function on every head as a sequence of one head: tables [B, H, L, n] are then tables [B H, L, n]."""
    cos, sin = (table.expand(q.shape[0], -1, -1, -1).flatten(0, 1) for table in (cos, sin))
    query, key = original(q.flatten(0, 1)[:, None], k.flatten(0, 1)[:, None], cos, sin)
    return query.view(q.shape), key.view(k.shape)


def at_first_window(module: nn.Module, query: Tensor, heads: slice, window: int) -> Tensor:
    """Queries [B, H, L, D] as they would be turned at the end of the first window, where they stand beyond it.

    A query that was turned to its position is turned back by the difference, cos(a - b) = cos a cos b + sin a sin b.

    Raises:
        ValueError: there is no table, or it is not that of these queries from the first position on.
    """
    tables = getattr(module, "_softfocus_tables", None)
    if tables is None or tables[0].shape[-2] != query.shape[2]:
        raise ValueError("sinks: they need the positions of all queries, from the first on: run without a KV cache")
    cos, sin = (table[:, heads] if table.dim() == 4 else table[:, None] for table in tables)
    last = torch.arange(query.shape[2], device=query.device).clamp(max=window - 1)
    cos_last, sin_last = cos[..., last, :], sin[..., last, :]
    scale = 1 / (cos.square() + sin.square())  # YaRN's tables are not of length one
    back_cos, back_sin = (cos * cos_last + sin * sin_last) * scale, (cos * sin_last - sin * cos_last) * scale
    size = cos.shape[-1]
    turning, rest = query[..., :size], query[..., size:]
    rotate_half = sys.modules[type(module).__module__].rotate_half
    return torch.cat([turning * back_cos + rotate_half(turning) * back_sin, rest], dim=-1)
