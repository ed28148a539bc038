"""A call cut into tiles: what the tiled backend's forward and backward walk over."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from softfocus import dropout
from softfocus import rows as rowwise
from softfocus.contract import GRADIENTS, Call, compute_dtype
from softfocus.rows import Rows
from softfocus.visibility import Visibility

TILE_ROWS = 64
TILE_ELEMENTS = 1 << 18
"""Scores of a tile as long as rows are short: 1 MiB of float32, a few of which live at a time in the second-level cache."""
TILE_LIMIT = 1 << 23
"""Most scores of a tile, however long the rows: 32 MiB of float32. Fewer rows, down to one, keep to it."""


def zero_gradients(call: Call, bias_grad: bool) -> dict[str, Tensor]:
    """Of a call's tensors, the bias's only if wanted; what is summed over tiles is held in the compute dtype."""
    wide = compute_dtype(call.query.dtype)
    given = {name: getattr(call, name) for name in GRADIENTS if name != "bias" or bias_grad}
    summed = ("bias", "head_scale", "power")
    return {
        name: torch.zeros(x.shape, dtype=wide if name in summed else x.dtype, device=x.device)
        for name, x in given.items()
        if x is not None
    }


@dataclass
class Tile:
    """Query rows [start, stop) against keys [low, high): visible 5-D bool or None, count 5-D, and what LASER needs."""

    start: int
    stop: int
    low: int
    high: int
    visible: Tensor | None  # [b|1, h|1, G|1, R, K]
    common: Tensor | slice | None  # keys that every row sees
    count: Tensor  # [b, h, G, R, 1]
    query: Tensor  # [b, h, G * R, D], normalised for cosine, 0 where it is not finite
    broken: Tensor | None  # [b, h, G * R, 1], which queries are not finite
    query_norm: Tensor | None
    factor: Tensor  # [b, h, G, R, 1], c_i without the head's own


def chunks(call: Call) -> Iterator["Chunk"]:
    """Batches and heads in groups that keep a tile near TILE_ELEMENTS."""
    visibility = call.visibility
    if call.query.numel() == 0 or call.key.size(2) == 0:
        return
    batch, heads = call.query.shape[:2]
    key_heads = call.key.size(1)
    groups = heads // key_heads
    count = visibility.count(call.query.device).to(compute_dtype(call.query.dtype))
    low, high = visibility.span(max(0, visibility.query_length - TILE_ROWS), visibility.query_length)
    row = max(1, groups * (high - low))
    rows = max(1, min(TILE_ROWS, visibility.query_length, TILE_LIMIT // row))
    fit = max(1, TILE_ELEMENTS // (row * rows))
    head_step = min(key_heads, fit)
    batch_step = max(1, fit // key_heads) if head_step == key_heads else 1
    for b in range(0, batch, batch_step):
        for h in range(0, key_heads, head_step):
            batches, some_heads = slice(b, min(b + batch_step, batch)), slice(h, min(h + head_step, key_heads))
            yield Chunk(call, count, batches, some_heads, rows)


class Chunk:
    """Some batches and key heads of a call, with their keys and values ready for the products."""

    def __init__(self, call: Call, count: Tensor, batches: slice, key_heads: slice, tile_rows: int):
        self.call, self.visibility, self.mechanism = call, call.visibility, call.mechanism
        self.batches, self.key_heads, self.tile_rows = batches, key_heads, tile_rows
        self.groups = call.query.size(1) // call.key.size(1)
        self.heads = slice(key_heads.start * self.groups, key_heads.stop * self.groups)
        self.dtype = compute_dtype(call.query.dtype)
        self.shape = (batches.stop - batches.start, key_heads.stop - key_heads.start, self.groups)
        self.count = self._five(count[..., None])
        # contiguous: a product would copy a [B, L, H, D] view every time
        key = call.key[batches, key_heads].to(self.dtype).contiguous()
        value = call.value[batches, key_heads].to(self.dtype).contiguous()
        # Products run on finite stand-ins: an invisible NaN times a weight of 0 would be NaN.
        self.broken_key = _broken_rows(key)
        self.broken_value = None if _all_finite(value) else ~value.isfinite()
        self.value = value if self.broken_value is None else value.masked_fill(self.broken_value, 0.0)
        self.key, self.key_norm = self._direction(_mended(key, self.broken_key))
        head_scale, power = call.head_scale, call.power
        self.head_scale = None if head_scale is None else self._per_head(head_scale)
        self.power: Tensor | float | None = call.mechanism.power if power is None else self._per_head(power)

    def tiles(self) -> Iterator[Tile]:
        """Blocks of query rows, first to last."""
        visibility = self.visibility
        for start in range(0, visibility.query_length, self.tile_rows):
            stop = min(start + self.tile_rows, visibility.query_length)
            low, high = visibility.span(start, stop)
            if low == high:  # rows that see nothing: one hidden key keeps the reductions defined
                low, high = min(low, visibility.key_length - 1), min(low, visibility.key_length - 1) + 1
            visible = visibility.block(start, stop, low, high, self.key.device)
            visible = None if visible is None else self._five(visible)
            count = self.count[..., start:stop, :]
            common: Tensor | slice | None = None
            if self.mechanism.laser:
                common = _common(visibility, start, stop, low, high, visible, count, self.shape)
            query = self.take(self.call.query, start, stop)
            broken = _broken_rows(query)
            query, norm = self._direction(_mended(query, broken))
            factor = self.call.scale * rowwise.length_scale(self.mechanism.length_scale, count)
            yield Tile(
                start, stop, low, high, visible, common, count.expand(*self.shape, -1, 1), query, broken, norm, factor
            )

    def rows(self, tile: Tile) -> Rows:
        """Scores of a tile and everything up to the weights."""
        scaled = self.unflat(tile.query) * self._full_factor(tile)
        scores = (self.flat(scaled) @ self.key[..., tile.low : tile.high, :].mT).view(
            *self.shape, -1, tile.high - tile.low
        )
        row_bias = rowwise.score_bias(self.mechanism.score_bias, tile.count, self.visibility.key_length)
        if row_bias is not None:
            scores += row_bias
        if self.call.bias is not None:
            scores += self._bias(self.call.bias, tile)
        if tile.broken is not None:
            scores.masked_fill_(self.unflat(tile.broken), torch.nan)
        if self.broken_key is not None:
            scores.masked_fill_(self.broken_key[..., tile.low : tile.high, :].mT.unsqueeze(2), torch.nan)
        return rowwise.forward(scores, tile.visible, tile.count, self.mechanism, self.power, self.visibility.key_length)

    def score_backward(self, tile: Tile, score_grad: Tensor, key_grad: Tensor, grads: dict[str, Tensor]) -> None:
        """dL/ds of a tile into the gradients of query, key, bias and head_scale."""
        query = tile.query
        if "bias" in grads:
            target = self._bias(grads["bias"], tile, keep_shape=True)
            target += score_grad.flatten(1, 2).sum_to_size(target.shape)
        flat = self.flat(score_grad)
        key_grad[..., tile.low : tile.high, :] += flat.mT @ self.flat(self.unflat(query) * self._full_factor(tile))
        plain = self.unflat(flat @ self.key[..., tile.low : tile.high, :]) * tile.factor  # without the head's factor
        if "head_scale" in grads:
            grads["head_scale"][self.heads] += (plain * self.unflat(query)).sum((0, 3, 4)).flatten()
        if self.head_scale is not None:
            plain = plain * self.head_scale
        if tile.query_norm is not None:
            plain = _direction_backward(self.flat(plain), query, tile.query_norm)
            plain = self.unflat(plain)
        self.view(grads["query"], tile.start, tile.stop).copy_(plain)

    def finish(self, key_grad: Tensor, value_grad: Tensor, grads: dict[str, Tensor]) -> None:
        """Write the gradients of this chunk's keys and values."""
        if self.key_norm is not None:
            key_grad = _direction_backward(key_grad, self.key, self.key_norm)
        grads["key"][self.batches, self.key_heads] = key_grad.to(grads["key"].dtype)
        grads["value"][self.batches, self.key_heads] = value_grad.to(grads["value"].dtype)

    def kept(self, tile: Tile, seed: int) -> Tensor | None:
        """What dropout multiplies the weights with: 0 or 1 / (1 - p)."""
        p = self.call.dropout.p
        if p == 0.0:
            return None
        batch, head = (torch.arange(x.start, x.stop, device=self.key.device) for x in (self.batches, self.heads))
        places = (batch[:, None] * self.call.query.size(1) + head).view(self.shape)
        return dropout.factors(seed, p, places, (tile.start, tile.stop), (tile.low, tile.high), self.dtype)

    def take(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Rows of a [B, H, Lq, *] tensor as [b, h, G * R, *] in the compute dtype."""
        return self.flat(self.view(x, start, stop).to(self.dtype))

    def view(self, x: Tensor, start: int, stop: int) -> Tensor:
        """A view of rows of a [B, H, Lq(, *)] tensor as [b, h, G, R(, *)]."""
        return x[self.batches, self.heads, start:stop].unflatten(1, (-1, self.groups))

    def flat(self, x: Tensor) -> Tensor:
        """[b, h, G, R, *] to [b, h, G * R, *]: the heads of a group share their keys in one product."""
        return x.reshape(x.size(0), x.size(1), -1, x.size(-1))

    def unflat(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`flat`."""
        return x.view(*self.shape, -1, x.size(-1))

    def blank(self, mixed: Tensor, rows: Rows) -> Tensor:
        """Zero where a row has no weight at all; only LASER, and NaN in rows that see nothing, need it."""
        empty = self.flat((rows.maximum == -torch.inf).expand(*self.shape, -1, 1))
        if self.mechanism.laser:
            empty = empty | (self.flat(rows.final) == 0).all(-1, keepdim=True)
        return mixed.masked_fill(empty, 0.0) if bool(empty.any()) else mixed

    def poison(self, mixed: Tensor, tile: Tile, with_value: float = torch.nan) -> Tensor:
        """NaN (or ``with_value``) where a row sees a value that is not finite."""
        if self.broken_value is None:
            return mixed
        broken = self.broken_value[..., tile.low : tile.high, :].to(self.dtype)
        if tile.visible is None:
            seen = broken.sum(-2, keepdim=True)
        else:
            full = tile.visible.expand(*self.shape, tile.stop - tile.start, tile.high - tile.low)
            seen = self.flat(full.to(self.dtype)) @ broken
        return mixed.masked_fill(seen > 0, with_value)

    def _five(self, x: Tensor) -> Tensor:
        """[B|1, H|1, R, K] to this chunk's [b|1, h|1, G|1, R, K]."""
        x = x if x.size(0) == 1 else x[self.batches]
        return x.unsqueeze(2) if x.size(1) == 1 else x[:, self.heads].unflatten(1, (-1, self.groups))

    def _per_head(self, x: Tensor) -> Tensor:
        return x[self.heads].to(self.dtype).view(1, -1, self.groups, 1, 1)

    def _full_factor(self, tile: Tile) -> Tensor:
        return tile.factor if self.head_scale is None else tile.factor * self.head_scale

    def _bias(self, bias: Tensor, tile: Tile, keep_shape: bool = False) -> Tensor:
        bias = bias if bias.size(2) == 1 else bias[:, :, tile.start : tile.stop]
        bias = bias if bias.size(3) == 1 else bias[..., tile.low : tile.high]
        if keep_shape:
            bias = bias if bias.size(0) == 1 else bias[self.batches]
            return bias if bias.size(1) == 1 else bias[:, self.heads]
        return self._five(bias).to(self.dtype)

    def _direction(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x / |x| and |x| for cosine similarity; x and None for the dot product."""
        if self.mechanism.similarity == "dot":
            return x, None
        if self.mechanism.similarity != "cosine":
            raise KeyError(self.mechanism.similarity)
        largest = x.abs().amax(-1, keepdim=True)
        zero = largest < torch.finfo(x.dtype).tiny
        scaled = x / largest.masked_fill(zero, 1.0)
        norm = scaled.square().sum(-1, keepdim=True).sqrt_()
        direction = scaled.div_(norm.masked_fill(zero, 1.0)).masked_fill_(zero, 0.0)
        # |x| itself may overflow or vanish; so then does its gradient, which a dtype could not hold either
        return direction, (norm * largest).masked_fill_(zero, torch.inf)


def _direction_backward(grad: Tensor, direction: Tensor, norm: Tensor) -> Tensor:
    """dL/d(x/|x|) to dL/dx; zero for zero vectors, whose norm is kept as inf."""
    return (grad - direction * (grad * direction).sum(-1, keepdim=True)) / norm


def _all_finite(x: Tensor) -> bool:
    """Whether x holds neither NaN nor infinity; False, at worst, for finite numbers whose sum overflows."""
    return bool(x.sum().isfinite())


def _broken_rows(x: Tensor) -> Tensor | None:
    """bool [..., 1], the rows of x with a NaN or an infinity; None if there are none."""
    return None if _all_finite(x) else ~x.isfinite().all(-1, keepdim=True)


def _mended(x: Tensor, broken: Tensor | None) -> Tensor:
    return x if broken is None else x.masked_fill(broken, 0.0)


def _common(
    visibility: Visibility,
    start: int,
    stop: int,
    low: int,
    high: int,
    visible: Tensor | None,
    count: Tensor,
    shape: tuple[int, int, int],
) -> Tensor | slice | None:
    """The keys that every row of a tile sees, rows that see nothing aside: bool [b|1, h|1, 1, K] or a slice."""
    if visible is None:
        return slice(0, high - low)
    if visibility.mask is None and visibility.key_mask is None and visibility.document_ids is None:
        first = start if visibility.right == -1 else max(start, -visibility.offset - visibility.right)
        if first >= stop:
            return None
        return slice(visibility.span(stop - 1, stop)[0] - low, visibility.span(first, first + 1)[1] - low)
    blind = (count == 0).expand(*shape[:2], *count.shape[2:])
    everyone = (visible | blind).all(3, keepdim=True).all(2, keepdim=True)  # [b, h, 1, 1, K]
    return everyone[:, :, 0]
