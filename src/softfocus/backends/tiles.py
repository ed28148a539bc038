"""Divides a call into the tiles that the tiled backend computes one by one."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from softfocus import dropout
from softfocus import rows as rowwise
from softfocus.contract import Call, compute_dtype
from softfocus.rows import Rows
from softfocus.visibility import UNLIMITED

TILE_ROWS = 64
"""The most query rows of a tile. Chosen, not measured."""
TILE_ELEMENTS = 1 << 18
"""Heads and sequences are added to a tile while it has at most so many scores: 1 MiB of float32. A
few such tensors fit into the second-level cache. Chosen, not measured.
"""
MAX_TILE_ELEMENTS = 1 << 23
"""A tile of TILE_ROWS rows of one key head's group may have so many scores: 32 MiB of float32.
Where rows are longer, it has fewer of them, down to one. It limits memory. Chosen, not measured.
"""


def zero_gradients(call: Call, bias_grad: bool) -> dict[str, Tensor]:
    """Zeros for each gradient; for the bias only if its gradient is needed. The sums for
    head_scale, power and a broadcast bias are in float64 on devices that surely have it, the others
    in the compute dtype.

    The names are listed here and not taken from ``contract.GRADIENTS``. A new gradient that this
    backend does not compute is then missing, which ``ops.py`` reports as an error. With a name from
    there it would silently be zero.
    """
    dtype = compute_dtype(call.query.dtype)
    double = torch.float64 if call.query.device.type in ("cpu", "cuda", "meta") else dtype
    dtypes = {"query": call.query.dtype, "key": call.key.dtype, "value": call.value.dtype}
    dtypes |= {"head_scale": double, "power": double}
    if bias_grad:
        dtypes["bias"] = double if call.sums_bias else dtype
    tensors = {name: getattr(call, name) for name in dtypes}
    return {
        name: torch.zeros(x.shape, dtype=dtypes[name], device=x.device) for name, x in tensors.items() if x is not None
    }


@dataclass
class Tile:
    """Some query rows against all keys that they may see.

    In shapes b sequences and h key heads are those of the chunk, G query heads share a key head,
    and the tile has R query rows and K keys. [b|1] is b, or 1 where all share it.
    """

    rows: slice
    keys: slice
    visible: Tensor | None  # bool [b|1, h|1, G|1, R, K]; None if all is visible
    # The keys that every row sees, fully masked rows aside: a mask or a slice, which may hold none
    # (``_visible_to_all``). None without LASER, which alone needs it
    visible_to_all: Tensor | slice | None
    count: Tensor  # [b, h, G, R, 1]
    query: Tensor  # [b, h, G * R, D], normalised for cosine, 0 where it is not finite
    nonfinite: Tensor | None  # bool [b, h, G * R, 1], which queries are not finite
    query_norm: Tensor | None  # [b, h, G * R, 1], for cosine
    base_scale: Tensor  # [b|1, h|1, G|1, R, 1], c_i without head_scale


def chunks(call: Call) -> Iterator["Chunk"]:
    """Divides batches and key heads into chunks whose tiles have at most TILE_ELEMENTS scores. A
    tile of one key head may have up to MAX_TILE_ELEMENTS, or one row of each head of its group.
    """
    visibility = call.visibility
    if call.query.numel() == 0 or call.key.size(2) == 0:
        return
    batch, heads = call.query.shape[:2]
    key_heads = call.key.size(1)
    group = heads // key_heads  # query heads that share a key head
    count = visibility.count(call.query.device).to(compute_dtype(call.query.dtype))
    # The block of rows that sees the most keys is the last one under a causal mask, a middle one in
    # a window, the first one where only the left side of the window is bounded
    starts = range(0, visibility.query_length, TILE_ROWS)
    spans = (visibility.span(start, min(start + TILE_ROWS, visibility.query_length)) for start in starts)
    row_elements = max(1, group * max(high - low for low, high in spans))  # scores of a row of each head of a group
    tile_rows = max(1, min(TILE_ROWS, visibility.query_length, MAX_TILE_ELEMENTS // row_elements))
    heads_per_tile = max(1, TILE_ELEMENTS // (row_elements * tile_rows))  # key heads, of all sequences
    head_step = min(key_heads, heads_per_tile)
    batch_step = max(1, heads_per_tile // key_heads) if head_step == key_heads else 1
    for b in range(0, batch, batch_step):
        for h in range(0, key_heads, head_step):
            batches, some_heads = slice(b, min(b + batch_step, batch)), slice(h, min(h + head_step, key_heads))
            yield Chunk(call, count, batches, some_heads, tile_rows)


class Chunk:
    """Some sequences and key heads of a call, with their keys and values ready for the products.

    Attributes:
        key, value: [b, h, Lk, D] and [b, h, Lk, Dv] in the compute dtype, contiguous; 0 where not
            finite. Keys are unit vectors for cosine.
        key_norm: |k|, [b, h, Lk, 1], for cosine; else None.
        nonfinite_key, nonfinite_value: bool [b, h, Lk, 1] and [b, h, Lk, Dv]; None if all is
            finite.
        count: N_i, [b|1, h|1, G|1, Lq, 1].
        head_scale, power: [1, h, G, 1, 1] or None; power may be a number.
    """

    def __init__(self, call: Call, count: Tensor, batches: slice, key_heads: slice, tile_rows: int):
        self.call, self.visibility, self.mechanism = call, call.visibility, call.mechanism
        self.batches, self.key_heads, self.tile_rows = batches, key_heads, tile_rows
        self.group = call.query.size(1) // call.key.size(1)
        self.heads = slice(key_heads.start * self.group, key_heads.stop * self.group)
        self.dtype = compute_dtype(call.query.dtype)
        self.shape = (batches.stop - batches.start, key_heads.stop - key_heads.start, self.group)
        self.count = self._grouped(count[..., None])
        # contiguous: a product would copy a [B, L, H, D] view every time
        key = call.key[batches, key_heads].to(self.dtype).contiguous()
        value = call.value[batches, key_heads].to(self.dtype).contiguous()
        # Non-finite numbers are 0 in products: an invisible NaN times a weight of 0 would be NaN
        self.nonfinite_key = _nonfinite_rows(key)
        self.nonfinite_value = None if _all_finite(value) else ~value.isfinite()
        self.value = value if self.nonfinite_value is None else value.masked_fill(self.nonfinite_value, 0.0)
        self.key, self.key_norm = self._l2_normalise(_zeroed(key, self.nonfinite_key))
        head_scale, power = call.head_scale, call.power
        self.head_scale = None if head_scale is None else self._per_head(head_scale)
        self.power: Tensor | float | None = call.mechanism.power if power is None else self._per_head(power)

    def tiles(self) -> Iterator[Tile]:
        """The tiles of the chunk, from the first query rows to the last."""
        visibility = self.visibility
        for start in range(0, visibility.query_length, self.tile_rows):
            stop = min(start + self.tile_rows, visibility.query_length)
            low, high = visibility.span(start, stop)
            if low == high:  # rows that see nothing: one hidden key keeps the reductions defined
                low = min(low, visibility.key_length - 1)
                high = low + 1
            rows, keys = slice(start, stop), slice(low, high)
            visible = visibility.block(start, stop, low, high, self.key.device)
            visible = None if visible is None else self._grouped(visible)
            count = self.count[..., rows, :]
            visible_to_all = self._visible_to_all(rows, keys, visible, count) if self.mechanism.laser else None
            query = self.take(self.call.query, rows)
            nonfinite = _nonfinite_rows(query)
            query, norm = self._l2_normalise(_zeroed(query, nonfinite))
            base_scale = self.call.scale * rowwise.length_scale(self.mechanism.length_scale, count)
            count = count.expand(*self.shape, -1, 1)
            yield Tile(rows, keys, visible, visible_to_all, count, query, nonfinite, norm, base_scale)

    def weigh(self, tile: Tile) -> Rows:
        """The scores of a tile, its weights, and what is computed between them."""
        scores = self.unflat(self._scaled_query(tile) @ self.key[..., tile.keys, :].mT)
        row_bias = rowwise.score_bias(self.mechanism.score_bias, tile.count, self.visibility.key_length)
        if row_bias is not None:
            scores += row_bias
        if self.call.bias is not None:
            scores += self._bias(self.call.bias, tile)
        if tile.nonfinite is not None:
            scores.masked_fill_(self.unflat(tile.nonfinite), torch.nan)
        if self.nonfinite_key is not None:
            scores.masked_fill_(self.nonfinite_key[..., tile.keys, :].mT.unsqueeze(2), torch.nan)
        return rowwise.forward(scores, tile.visible, tile.count, self.mechanism, self.power, self.visibility.key_length)

    def score_backward(self, tile: Tile, grad_scores: Tensor, grad_key: Tensor, grads: dict[str, Tensor]) -> None:
        """Computes a tile's part of the gradients of query, key, bias and head_scale from
        ``grad_scores``, its dL/ds [b, h, G, R, K]. Adds to ``grad_key`` [b, h, Lk, D].
        """
        if "bias" in grads:
            grad_bias = self._bias(grads["bias"], tile, keep_shape=True)
            grad_bias += grad_scores.flatten(1, 2).sum_to_size(grad_bias.shape)
        flat = self.flat(grad_scores)
        grad_key[..., tile.keys, :] += flat.mT @ self._scaled_query(tile)
        grad_query = self.unflat(flat @ self.key[..., tile.keys, :]) * tile.base_scale
        if "head_scale" in grads:
            grads["head_scale"][self.heads] += (grad_query * self.unflat(tile.query)).sum((0, 3, 4)).flatten()
        if self.head_scale is not None:
            grad_query = grad_query * self.head_scale
        if tile.query_norm is not None:
            grad_query = self.unflat(_l2_normalise_backward(self.flat(grad_query), tile.query, tile.query_norm))
        self.view(grads["query"], tile.rows).copy_(grad_query)

    def finish(self, grad_key: Tensor, grad_value: Tensor, grads: dict[str, Tensor]) -> None:
        """Writes the gradients of this chunk's keys and values. ``grad_key`` [b, h, Lk, D] is what
        score_backward() added to; ``grad_value`` is [b, h, Lk, Dv].
        """
        if self.key_norm is not None:
            grad_key = _l2_normalise_backward(grad_key, self.key, self.key_norm)
        grads["key"][self.batches, self.key_heads] = grad_key.to(grads["key"].dtype)
        grads["value"][self.batches, self.key_heads] = grad_value.to(grads["value"].dtype)

    def dropout(self, tile: Tile, seed: int) -> Tensor | None:
        """The factors of dropout for the weights of a tile, 0 or 1 / (1 - p); None if p is 0."""
        p = self.call.dropout.p
        if p == 0.0:
            return None
        batch, head = (torch.arange(x.start, x.stop, device=self.key.device) for x in (self.batches, self.heads))
        heads = (batch[:, None] * self.call.query.size(1) + head).view(self.shape)
        rows, keys = ((x.start, x.stop) for x in (tile.rows, tile.keys))
        return dropout.factors(seed, p, heads, rows, keys, self.dtype)

    def take(self, x: Tensor, rows: slice) -> Tensor:
        """Rows of a [B, H, Lq, *] tensor as [b, h, G * R, *] in the compute dtype."""
        return self.flat(self.view(x, rows).to(self.dtype))

    def view(self, x: Tensor, rows: slice) -> Tensor:
        """A view of rows of a [B, H, Lq(, *)] tensor as [b, h, G, R(, *)]."""
        return x[self.batches, self.heads, rows].unflatten(1, (-1, self.group))

    def flat(self, x: Tensor) -> Tensor:
        """[b, h, G, R, *] to [b, h, G * R, *]: the heads of a group share their keys in one
        product.
        """
        return x.reshape(x.size(0), x.size(1), -1, x.size(-1))

    def unflat(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`flat`."""
        return x.view(*self.shape, -1, x.size(-1))

    def set_exceptional_rows(self, x: Tensor, weighed: Rows, tile: Tile, nonfinite: float) -> Tensor:
        """out or grad_out of a tile, [b, h, G * R, Dv], with its exceptional rows set.

        Fully masked rows, which may be NaN, become 0. Rows with a bias of -inf on every key count
        as fully masked, and so do rows of LASER whose weights are all 0. Entries that see a
        non-finite value become ``nonfinite``.
        """
        empty = self.flat((weighed.maximum == -torch.inf).expand(*self.shape, -1, 1))
        if self.mechanism.laser:
            empty = empty | (self.flat(weighed.weights) == 0).all(-1, keepdim=True)
        if bool(empty.any()):
            x = x.masked_fill(empty, 0.0)
        if self.nonfinite_value is None:
            return x
        # seen: number of non-finite values that each (row, column) sees
        value_nonfinite = self.nonfinite_value[..., tile.keys, :].to(self.dtype)
        if tile.visible is None:
            seen = value_nonfinite.sum(-2, keepdim=True)
        else:
            seen = self.flat(tile.visible.expand(weighed.scores.shape).to(self.dtype)) @ value_nonfinite
        return x.masked_fill(seen > 0, nonfinite)

    def _visible_to_all(self, rows: slice, keys: slice, visible: Tensor | None, count: Tensor) -> Tensor | slice:
        """The keys that every row of a tile sees, fully masked rows aside: bool [b, h, 1, K] or a
        slice, either of which may hold none. Where every row is fully masked: no key if only a
        window masks, all keys with other masks.
        """
        if visible is None:
            return slice(0, keys.stop - keys.start)
        visibility = self.visibility
        if visibility.mask is None and visibility.key_mask is None and visibility.document_ids is None:
            # All rows see the keys from the last row's left bound to the first row's right bound.
            # Row i is at the position i + offset. With ``right`` bounded, rows before
            # -offset - right are fully masked. At the other end no row is past the last key
            first = rows.start
            if visibility.right != UNLIMITED:
                first = max(first, -visibility.offset - visibility.right)
            if first >= rows.stop:
                return slice(0, 0)
            low, high = visibility.span(rows.stop - 1, rows.stop)[0], visibility.span(first, first + 1)[1]
            return slice(low - keys.start, high - keys.start)
        fully_masked = (count == 0).expand(*self.shape[:2], *count.shape[2:])
        seen = (visible | fully_masked).all(3, keepdim=True).all(2, keepdim=True)  # [b, h, 1, 1, K]
        return seen[:, :, 0]

    def _grouped(self, x: Tensor) -> Tensor:
        """[B|1, H|1, R, K] to this chunk's [b|1, h|1, G|1, R, K]."""
        x = x if x.size(0) == 1 else x[self.batches]
        return x.unsqueeze(2) if x.size(1) == 1 else x[:, self.heads].unflatten(1, (-1, self.group))

    def _per_head(self, x: Tensor) -> Tensor:
        """[H] to this chunk's [1, h, G, 1, 1]."""
        return x[self.heads].to(self.dtype).view(1, -1, self.group, 1, 1)

    def _scaled_query(self, tile: Tile) -> Tensor:
        """c_i q_i, [b, h, G * R, D]."""
        scale = tile.base_scale if self.head_scale is None else tile.base_scale * self.head_scale
        return self.flat(self.unflat(tile.query) * scale)

    def _bias(self, bias: Tensor, tile: Tile, keep_shape: bool = False) -> Tensor:
        """The tile's part of a [B|1, H|1, Lq|1, Lk|1] bias: [b|1, h|1, G|1, R|1, K|1] in the
        compute dtype. With ``keep_shape`` a view of it in four dimensions.
        """
        bias = bias if bias.size(2) == 1 else bias[:, :, tile.rows]
        bias = bias if bias.size(3) == 1 else bias[..., tile.keys]
        if keep_shape:
            bias = bias if bias.size(0) == 1 else bias[self.batches]
            return bias if bias.size(1) == 1 else bias[:, self.heads]
        return self._grouped(bias).to(self.dtype)

    def _l2_normalise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x / |x| and |x| for cosine similarity; x and None for the dot product."""
        if self.mechanism.similarity == "dot":
            return x, None
        if self.mechanism.similarity != "cosine":
            raise KeyError(self.mechanism.similarity)
        largest = x.abs().amax(-1, keepdim=True)
        zero = largest < torch.finfo(x.dtype).tiny
        scaled = x / largest.masked_fill(zero, 1.0)
        norm = scaled.square().sum(-1, keepdim=True).sqrt_()
        unit = scaled.div_(norm.masked_fill(zero, 1.0)).masked_fill_(zero, 0.0)
        # A vector of entries below finfo.tiny counts as zero, with gradient 0. Where |x| overflows,
        # the gradient, a subnormal number, becomes 0
        return unit, (norm * largest).masked_fill_(zero, torch.inf)


def _l2_normalise_backward(grad: Tensor, unit: Tensor, norm: Tensor) -> Tensor:
    """dL/d(x/|x|) to dL/dx; zero for zero vectors, whose norm is kept as inf."""
    return (grad - unit * (grad * unit).sum(-1, keepdim=True)) / norm


def _all_finite(x: Tensor) -> bool:
    """Whether x holds neither NaN nor infinity. If the sum of finite numbers overflows, the answer
    is False as well; the callers then test every element, and find none.
    """
    return bool(x.sum().isfinite())


def _nonfinite_rows(x: Tensor) -> Tensor | None:
    """bool [..., 1], the rows of x with a NaN or an infinity; None if there are none."""
    return None if _all_finite(x) else ~x.isfinite().all(-1, keepdim=True)


def _zeroed(x: Tensor, nonfinite: Tensor | None) -> Tensor:
    return x if nonfinite is None else x.masked_fill(nonfinite, 0.0)
