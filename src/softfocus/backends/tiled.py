"""Pure torch on every device and dtype: tiles of whole rows, with a hand-written backward.

A tile is some query rows of a few heads against all keys that they may see. So every
:class:`Mechanism` is supported, and no row needs a second sweep. The backward computes the scores
again. Deterministic: nothing is atomic, and sums run in a fixed order for a given shape and number
of threads.
"""

import torch
from torch import Tensor

from softfocus import rows as rowwise
from softfocus.backends.laser import LogWeights, ShiftedExponential
from softfocus.backends.tiles import chunks, zero_gradients
from softfocus.contract import Call, compute_dtype, supported_by_formulas
from softfocus.pointwise import POINTWISE

SUPPORTED = supported_by_formulas(phi=tuple(POINTWISE))
ABOUT = "pure torch in tiles of whole rows: runs everywhere, memory O(L), slower than a fused kernel"
# Members of contract.Backend that this backend does not need
refuses = runner = saved_vector_count = None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and the row statistics [4, B, H, Lq]."""
    query, value, mechanism, seed = call.query, call.value, call.mechanism, call.dropout.number
    dtype = compute_dtype(query.dtype)
    out = query.new_zeros(*query.shape[:3], value.size(-1))
    statistics = query.new_zeros(4, *query.shape[:3], dtype=dtype)
    if call.visibility.key_length == 0:
        statistics[1:3] = -torch.inf  # maximum and log_norm of rows that see no key
    for chunk in chunks(call):
        exponential = ShiftedExponential(chunk.value) if mechanism.laser else None
        for tile in chunk.tiles():
            weighed = chunk.weigh(tile)
            dropout = chunk.dropout(tile, seed)
            weights = chunk.flat(weighed.weights if dropout is None else weighed.weights * dropout)
            if exponential is None:
                tile_out = weights @ chunk.value[..., tile.keys, :]
            else:
                logs = LogWeights(weighed, tile.count, mechanism, chunk.power)
                tile_out = exponential.log_weighted_exp(weights, logs, tile.keys, tile.visible_to_all)
            tile_out = chunk.set_exceptional_rows(tile_out, weighed, tile, nonfinite=torch.nan)
            chunk.view(out, tile.rows).copy_(chunk.unflat(tile_out))
            for number, statistic in enumerate((tile.count, weighed.maximum, weighed.log_norm, weighed.peak)):
                chunk.view(statistics[number], tile.rows).copy_(statistic[..., 0])
    return out, statistics


def backward(call: Call, grad: Tensor, bias_grad: bool) -> dict[str, Tensor]:
    """Gradients by name."""
    grads, mechanism, seed = zero_gradients(call, bias_grad), call.mechanism, call.dropout.number
    for chunk in chunks(call):
        grad_key, grad_value = torch.zeros_like(chunk.key), torch.zeros_like(chunk.value)
        exponential = ShiftedExponential(chunk.value) if mechanism.laser else None
        for tile in chunk.tiles():
            weighed = chunk.weigh(tile)
            dropout = chunk.dropout(tile, seed)
            weights = chunk.flat(weighed.weights if dropout is None else weighed.weights * dropout)
            # Outputs that are 0 or NaN by convention pass no gradient
            grad_out = chunk.set_exceptional_rows(chunk.take(grad, tile.rows), weighed, tile, nonfinite=0.0)
            if exponential is None:
                grad_value[..., tile.keys, :] += weights.mT @ grad_out
                grad_weights = grad_out @ chunk.value[..., tile.keys, :].mT
            else:
                logs = LogWeights(weighed, tile.count, mechanism, chunk.power)
                grad_weights, part, exact_rows = exponential.log_weighted_exp_backward(
                    weights, logs, grad_out, tile.keys, tile.visible_to_all
                )
                grad_value[..., tile.keys, :] += part
            grad_weights = grad_weights.view(weighed.scores.shape)
            if dropout is not None:
                grad_weights.mul_(dropout)
            grad_scores, grad_power = rowwise.backward(
                weighed, grad_weights, tile.visible, tile.count, mechanism, chunk.power, call.visibility.key_length
            )
            if exponential is not None and exact_rows is not None:
                # Overwrites grad_power in these rows, too
                grad_scores = chunk.unflat(logs.correct(chunk.flat(grad_scores), grad_power, *exact_rows))
            chunk.score_backward(tile, grad_scores, grad_key, grads)
            if grad_power is not None and "power" in grads:
                grads["power"][chunk.heads] += grad_power.sum((0, 3, 4)).flatten()
        chunk.finish(grad_key, grad_value, grads)
    return {name: x.to(getattr(call, name).dtype) for name, x in grads.items()}
