"""The maths, once: dense, exact in float64, differentiable twice. Every backend is tested against
it.

Memory is O(Lq * Lk), and O(Lq * Lk * Dv) for LASER. Everything is computed in float64 for float64
inputs, in float32 otherwise. A visible NaN or infinity makes a row NaN. One that a row cannot see
affects neither its values nor its gradients.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from softfocus import dropout
from softfocus.contract import Call, RowStatistics, compute_dtype, supported_by_formulas
from softfocus.mechanism import MAX_UNTHRESHOLDED_COUNT, TIE_EPS, Mechanism
from softfocus.pointwise import POINTWISE

SUPPORTED = supported_by_formulas(phi=tuple(POINTWISE))
ABOUT = "the dense formula: memory O(L^2), differentiable twice"
refuses = runner = backward = saved_vector_count = None  # torch differentiates the formula


def base_scale(mechanism: Mechanism, scale: float, count: Tensor) -> Tensor:
    """c_i without the head's own factor: scale(d) * length_scale(N_i). Shaped like ``count``, which
    is floating.
    """
    log_n = count.clamp(min=1.0).log()
    factors = {"1": torch.ones_like(log_n), "log(N)": log_n, "log512(N)": log_n / math.log(512)}
    return scale * factors[mechanism.length_scale]


def score_bias(mechanism: Mechanism, count: Tensor, key_length: int) -> Tensor | float:
    """What is added to every score of a row: sigmoid attention's term."""
    log_n = count.clamp(min=1.0).log()
    log_l = count.new_ones(()).mul(max(key_length, 1)).log()  # math.log would fix the length of a trace
    terms: dict[str, Tensor | float] = {"0": 0.0, "-log(N)": -log_n, "-log(L)": -log_l}
    return terms[mechanism.score_bias]


def row_factor(mechanism: Mechanism, count: Tensor, key_length: int) -> Tensor | float:
    """What multiplies phi(s) where the normaliser does not depend on phi(s)."""
    n = count.clamp(min=1.0)
    factors: dict[str, Tensor | float]
    factors = {"none": 1.0, "1/N": 1.0 / n, "1/L": 1.0 / max(key_length, 1), "1/sqrt(N/2)": (n / 2.0).rsqrt()}
    return factors[mechanism.normaliser]


def unit(x: Tensor) -> Tensor:
    """x / |x| along the last dimension, for any norm that the dtype holds. Zero vectors stay zero,
    with gradient zero.
    """
    largest = x.detach().abs().amax(-1, keepdim=True)
    zero = largest < torch.finfo(x.dtype).tiny
    y = x / torch.where(zero, 1.0, largest)  # squares of y neither overflow nor vanish, and the factor cancels
    norm = torch.where(zero, 1.0, y.square().sum(-1, keepdim=True)).sqrt()
    return torch.where(zero, 0.0, y / norm)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Attention by the definition of :class:`Mechanism`: out [B, H, Lq, Dv] and the row statistics
    [4, B, H, Lq].
    """
    query, visibility = call.query, call.visibility
    visible = visibility.block(0, query.size(2), 0, visibility.key_length, query.device)
    visible = torch.ones((), dtype=torch.bool, device=query.device) if visible is None else visible
    visible = visible.expand(*query.shape[:3], visibility.key_length)
    dtype = compute_dtype(query.dtype)
    rows = weights_of(call, visible)
    value = call.value.to(dtype).repeat_interleave(query.size(1) // call.key.size(1), dim=1)
    sees_nonfinite = visible.to(dtype) @ (~value.isfinite()).to(dtype) > 0  # [B, H, Lq, Dv]
    value = torch.where(value.isfinite(), value, 0.0)
    if rows.log_weights is None:
        weights = rows.weights
        if call.dropout.seed is not None:
            batch, heads, query_length, key_length = weights.shape
            head_index = torch.arange(batch * heads, device=weights.device).view(batch, heads)
            weights = weights * dropout.factors(
                call.dropout.seed, call.dropout.p, head_index, (0, query_length), (0, key_length), dtype
            )
        out = weights @ value
    else:
        out = _log_weighted_exp(rows.log_weights, value, visible)
    # A fully masked row passes no gradient on, not even where grad_out is NaN
    fully_masked = ~visible.any(-1, keepdim=True)
    out = torch.where(sees_nonfinite, math.nan, torch.where(fully_masked, 0.0, out))
    return out.to(query.dtype), torch.stack(rows.statistics)


class Weights(NamedTuple):
    """Attention weights, and what comes with them.

    Attributes:
        weights: A, [B, H, Lq, Lk], 0 on invisible keys; NaN on the visible ones of a row with a NaN
            score.
        log_weights: log A for LASER, which takes no log of A itself; None otherwise.
        statistics: of the rows.
    """

    weights: Tensor
    log_weights: Tensor | None
    statistics: RowStatistics


def weights_of(call: Call, visible: Tensor) -> Weights:
    """The weights A of a call whose queries see the ``visible`` keys, bool [B, H, Lq, Lk]. The
    value is not read.
    """
    dtype, mechanism = compute_dtype(call.query.dtype), call.mechanism
    query = call.query.to(dtype)
    key = call.key.to(dtype).repeat_interleave(query.size(1) // call.key.size(1), dim=1)
    count = visible.sum(-1, keepdim=True).to(dtype)  # [B, H, Lq, 1], N_i

    scores = _scores(call, query, key, visible, count)  # [B, H, Lq, Lk]
    weights, log_weights, log_norm = _normalised(torch.where(visible, scores, 0.0), visible, count, mechanism)
    peak = torch.zeros_like(count)
    power = mechanism.power if call.power is None else call.power.to(dtype)[:, None, None]
    if power is not None:
        weights, log_weights, peak = reweight(weights, count, power, log_weights)
    weights = _post(weights, visible, count, mechanism)
    weights = torch.where(visible, weights, 0.0)  # also in rows that are NaN

    maximum = scores.masked_fill(~visible, -math.inf)
    maximum = maximum.amax(-1) if scores.size(-1) else maximum.new_full(maximum.shape[:-1], -math.inf)
    statistics = RowStatistics(
        *(x.detach().expand(maximum.shape) for x in (count[..., 0], maximum, log_norm[..., 0], peak[..., 0]))
    )
    return Weights(weights, log_weights, statistics)


def _scores(call: Call, query: Tensor, key: Tensor, visible: Tensor, count: Tensor) -> Tensor:
    """s = c_i * sim(q_i, k_j) + row bias + b_ij, NaN where q_i or k_j is not finite."""
    # Autograd would multiply a hidden NaN by 0, which is NaN. The products therefore take finite
    # numbers. Those of a hidden key may overflow
    nonfinite = ~(query.isfinite().all(-1)[..., :, None] & key.isfinite().all(-1)[..., None, :])
    query, key = (torch.where(x.isfinite(), x, 0.0) for x in (query, key))
    normalise = {"dot": lambda x: x, "cosine": unit}[call.mechanism.similarity]
    query, key = normalise(query), normalise(key)
    factor = base_scale(call.mechanism, call.scale, count)
    if call.head_scale is not None:
        factor = factor * call.head_scale.to(query.dtype)[:, None, None]
    products = torch.where(visible, query @ key.mT, 0.0)
    scores = factor * products + score_bias(call.mechanism, count, key.size(-2))
    if call.bias is not None:
        scores = scores + call.bias.to(query.dtype)
    return torch.where(nonfinite, math.nan, scores)


def _normalised(
    scores: Tensor, visible: Tensor, count: Tensor, mechanism: Mechanism
) -> tuple[Tensor, Tensor | None, Tensor]:
    """A = phi(s) over the normaliser, 0 on invisible keys; log A for LASER; and log ||phi(s)||_1,
    [..., 1].

    A weight of e^-110 is 0 in float32, but a value 200 above the others brings it back: LASER takes
    no log of A itself.
    """
    phi = POINTWISE[mechanism.phi]
    if phi.positive:
        assert phi.log is not None
        log_f = torch.where(visible, phi.log(scores), -math.inf)
        log_norm = torch.logsumexp(torch.where(count > 0, log_f, 0.0), -1, keepdim=True)
        log_norm = torch.where(count > 0, log_norm, -math.inf)
        if mechanism.normaliser == "l1":
            # log_softmax subtracts the maximum first. log f - log_norm would not do: where |log f|
            # is huge, rounding swallows the log N in log_norm
            log_weights = torch.log_softmax(torch.where(count > 0, log_f, 0.0), -1)
            log_weights = torch.where(visible, log_weights, -math.inf)
            weights = log_weights.exp()
            return weights, log_weights if mechanism.laser else None, log_norm
    f = torch.where(visible, phi.value(scores), 0.0)
    norm = f.abs().sum(-1, keepdim=True)
    if not phi.positive:
        log_norm = norm.log()
    if mechanism.normaliser == "l1":
        empty = norm == 0
        # A sum that overflows would make all weights 0
        norm = torch.where(empty, 1.0, torch.where(norm == math.inf, math.nan, norm))
        weights = torch.where(empty, 0.0, f / norm)
        if not mechanism.laser:
            return weights, None, log_norm
        assert phi.log is not None
        log_f = torch.where(visible & ~empty, phi.log(scores), -math.inf)
        return weights, log_f - norm.log(), log_norm
    return f * row_factor(mechanism, count, scores.size(-1)), None, log_norm


def reweight(
    weights: Tensor, count: Tensor, power: Tensor | float, log_weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Eq. 5 of arXiv 2501.13428: relu(A N - o)^p over its row sum; its log, if log A is given; the
    peak, [..., 1].

    The power is taken of u / max(u): the maximum cancels in the row sum, and u^p cannot overflow. A
    tied row keeps its weights, since the equation would divide 0 by 0.
    """
    threshold_on = (count > MAX_UNTHRESHOLDED_COUNT).to(weights.dtype)  # o: 1, or 0 where N_i <= 3
    u = torch.relu(weights * count - threshold_on)
    peak = u.detach().amax(-1, keepdim=True) if u.size(-1) else u.new_zeros(count.shape)
    tied = peak <= TIE_EPS * torch.finfo(weights.dtype).eps
    u = u / torch.where(tied, 1.0, peak)
    zero = u == 0
    # In autograd 0^p has a second derivative of NaN in p, and for p < 1 an infinite derivative in u
    base = torch.where(zero, 1.0, u)
    r = torch.where(zero, 0.0, base**power)
    power_sum = torch.where(tied, 1.0, r.sum(-1, keepdim=True))
    if log_weights is not None:
        # Where o is 0, log u is log A plus a constant of the row, and u may underflow
        highest = log_weights.detach().amax(-1, keepdim=True) if u.size(-1) else u.new_zeros(count.shape)
        highest = highest.clamp(min=torch.finfo(u.dtype).min)
        log_u = torch.where(threshold_on > 0, base.log(), log_weights - highest)
        zero = torch.where(threshold_on > 0, zero, log_weights == -math.inf)
        log_r = torch.where(zero, -math.inf, power * torch.where(zero, 0.0, log_u) - power_sum.log())
        log_weights = torch.where(tied, log_weights, log_r)
    return torch.where(tied, weights, r / power_sum), log_weights, peak


def _post(weights: Tensor, visible: Tensor, count: Tensor, mechanism: Mechanism) -> Tensor:
    """Table 1 of arXiv 2501.13428."""
    mean = weights.sum(-1, keepdim=True) / count.clamp(min=1.0)
    centred = torch.where(visible, weights - mean, 0.0)
    norm = centred.abs().sum(-1, keepdim=True)
    # Where all weights are equal only rounding is left, which l1 would enlarge
    tied = norm <= TIE_EPS * torch.finfo(weights.dtype).eps
    rescaled = torch.where(tied, 0.0, centred / torch.where(tied, 1.0, norm))
    first_rows = count <= MAX_UNTHRESHOLDED_COUNT
    return {
        "none": weights,
        "negate": -weights,
        "recentre": torch.where(first_rows, weights, centred),
        "recentre+l1": torch.where(first_rows, weights, rescaled),
    }[mechanism.post]


def _log_weighted_exp(log_weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """LASER's log(A exp(V)) of arXiv 2411.03493, column by column; 0 for rows whose weights are all
    0.
    """
    empty = ~(visible & (log_weights != -math.inf)).any(-1, keepdim=True)  # [B, H, Lq, 1]
    log_weights = torch.where(empty, 0.0, log_weights)
    terms = log_weights[..., :, :, None] + value[..., None, :, :]  # [B, H, Lq, Lk, Dv]
    terms = torch.where((visible | empty)[..., None], terms, -math.inf)
    return torch.where(empty, 0.0, torch.logsumexp(terms, dim=-2))
