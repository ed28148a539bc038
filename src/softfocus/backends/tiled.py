"""Pure torch on every device and dtype: blocks of whole rows, memory O(Lk * tile), forward and hand-written backward.

A tile is a few heads times a block of query rows times all the keys that the rows may see, so that every mechanism of the
algebra is carried and no row needs a second sweep. The backward recomputes the scores. Deterministic: no atomics, and
sums run in a fixed order for a given shape and thread count.
"""

import torch
from torch import Tensor

from softfocus import rows as rowwise
from softfocus.backends.laser import Logarithms, ShiftedExponential
from softfocus.backends.tiles import chunks, zero_gradients
from softfocus.contract import FLOATING, Call, Carries, compute_dtype
from softfocus.pointwise import POINTWISE

CARRIES = Carries(
    similarity=("dot", "cosine"), length_scale=("1", "log(N)", "log512(N)"), score_bias=("0", "-log(N)", "-log(L)"),
    phi=tuple(POINTWISE), normaliser=("l1", "none", "1/N", "1/L", "1/sqrt(N/2)"),
    post=("none", "negate", "recentre", "recentre+l1"), reweighting=True, laser=True,
    dtypes=FLOATING, devices=("any",),
    features=("bias", "head_scale", "power", "mask", "key_mask", "document_ids", "dropout"),
)  # fmt: skip
ABOUT = "pure torch in blocks of rows: runs everywhere, memory O(L), slower than a fused kernel"
refuses = prepare = rows_kept = None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and the row statistics [4, B, H, Lq]."""
    query, value, mechanism, seed = call.query, call.value, call.mechanism, call.dropout.number
    dtype = compute_dtype(query.dtype)
    out = query.new_zeros(*query.shape[:3], value.size(-1))
    statistics = query.new_zeros(4, *query.shape[:3], dtype=dtype)
    if call.visibility.key_length == 0:
        statistics[1:3] = -torch.inf
    for chunk in chunks(call):
        exponential = ShiftedExponential(chunk.value) if mechanism.laser else None
        for tile in chunk.tiles():
            rows = chunk.rows(tile)
            keep = chunk.kept(tile, seed)
            weights = rows.final if keep is None else rows.final * keep
            if exponential is None:
                mixed = chunk.flat(weights) @ chunk.value[..., tile.low : tile.high, :]
            else:
                logs = Logarithms(rows, tile.count, mechanism, chunk.power)
                mixed = exponential.mix(chunk.flat(weights), logs, tile.low, tile.high, tile.common)
            mixed = chunk.poison(chunk.blank(mixed, rows), tile)
            chunk.view(out, tile.start, tile.stop).copy_(chunk.unflat(mixed))
            for number, row_vector in enumerate((tile.count, rows.maximum, rows.log_norm, rows.peak)):
                chunk.view(statistics[number], tile.start, tile.stop).copy_(row_vector[..., 0])
    return out, statistics


def backward(call: Call, grad: Tensor, bias_grad: bool) -> dict[str, Tensor]:
    """Gradients by name. The scores are made again."""
    grads, mechanism, seed = zero_gradients(call, bias_grad), call.mechanism, call.dropout.number
    for chunk in chunks(call):
        key_grad, value_grad = torch.zeros_like(chunk.key), torch.zeros_like(chunk.value)
        exponential = ShiftedExponential(chunk.value) if mechanism.laser else None
        for tile in chunk.tiles():
            rows = chunk.rows(tile)
            keep = chunk.kept(tile, seed)
            weights = rows.final if keep is None else rows.final * keep
            keys = slice(tile.low, tile.high)
            # [b, h, G * R, Dv]; rows that see nothing, and outputs that are NaN by rule, pass nothing on
            above = chunk.poison(chunk.blank(chunk.take(grad, tile.start, tile.stop), rows), tile, with_value=0.0)
            if exponential is None:
                value_grad[..., keys, :] += chunk.flat(weights).mT @ above
                weight_grad = above @ chunk.value[..., keys, :].mT
            else:
                logs = Logarithms(rows, tile.count, mechanism, chunk.power)
                weight_grad, part, exact = exponential.mix_backward(
                    chunk.flat(weights), logs, above, tile.low, tile.high, tile.common
                )
                value_grad[..., keys, :] += part
            weight_grad = weight_grad.view(rows.scores.shape)
            if keep is not None:
                weight_grad.mul_(keep)
            score_grad, power_grad = rowwise.backward(
                rows,
                weight_grad,
                tile.visible,
                tile.count,
                mechanism,
                chunk.power,
                call.visibility.key_length,
            )
            if exponential is not None and exact is not None:
                score_grad = chunk.unflat(logs.correct(chunk.flat(score_grad), power_grad, *exact))
            chunk.score_backward(tile, score_grad, key_grad, grads)
            if power_grad is not None and "power" in grads:
                grads["power"][chunk.heads] += power_grad.sum((0, 3, 4)).flatten()
        chunk.finish(key_grad, value_grad, grads)
    return {name: x.to(getattr(call, name).dtype) for name, x in grads.items()}
