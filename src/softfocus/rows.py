"""The maths of a :class:`Mechanism` on blocks of whole rows of scores, with hand-written
derivatives.

Scores are [..., R, K] and hold every key that the rows may see, so that no reduction needs a second
sweep. Row vectors are [..., R, 1]. Derivations stand where they are used.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from softfocus.mechanism import MAX_UNTHRESHOLDED_COUNT, SIGNED_PHI, TIE_EPS, Mechanism
from softfocus.pointwise import POINTWISE

SQUARING_LIMIT = 32
_EXP_TAIL = -20.0
_EXP_TAIL_DOUBLE = -36.0
"""Below these softplus and sigmoid equal e^s: _EXP_TAIL within 3e-9 for float32, _EXP_TAIL_DOUBLE
within rounding for float64.
"""


@dataclass
class Rows:
    """A block of rows after the forward maths, with what the backward needs.

    Attributes:
        weights_before_post: A before ``post``, [..., R, K]; 0 on invisible keys.
        weights: A, after ``post``; the same tensor where there is none.
        scores: s, [..., R, K]; -inf on invisible keys.
        f: phi(s) times a factor of the row that cancels in A: 1, except for exp with the l1 norm
            and in the exponential tail.
        norm: l1 norm of f, [..., R, 1]; 1 where it is 0.
        exp_tail: bool [..., R, 1], rows in the exponential tail, whose f is e^(s - maximum). None
            if there are none, and for exp, whose f is that in every row with the l1 norm.
        u: relu(f - threshold) / spread, [..., R, K]; None without re-weighting.
        spread: largest f - threshold, [..., R, 1]; 1 in tied rows.
        power_sum: sum u^p, [..., R, 1]; 1 in tied rows (the CPU kernels: the norm times a power of
            two).
        tied: bool [..., R, 1], rows that keep their l1 weights; None if there are none.
        maximum, log_norm, peak: as in RowStatistics, [..., R, 1].
    """

    weights_before_post: Tensor
    weights: Tensor
    scores: Tensor
    f: Tensor
    norm: Tensor
    exp_tail: Tensor | None
    maximum: Tensor
    log_norm: Tensor
    peak: Tensor
    u: Tensor | None = None
    spread: Tensor | None = None
    power_sum: Tensor | None = None
    tied: Tensor | None = None


def length_scale(name: str, count: Tensor) -> Tensor:
    """The factor of a row's scores that depends on N_i."""
    log_n = count.clamp(min=1.0).log()
    return {"1": torch.ones_like(log_n), "log(N)": log_n, "log512(N)": log_n / math.log(512)}[name]


def score_bias(name: str, count: Tensor, length: int) -> Tensor | float | None:
    """What is added to a row's scores; None for nothing."""
    if name == "-log(N)":
        return count.clamp(min=1.0).log().neg_()
    return {"0": None, "-log(L)": -math.log(max(length, 1))}[name]


def _row_factor(name: str, count: Tensor, length: int) -> Tensor | float:
    """What multiplies a row's phi(s) where the normaliser does not depend on them."""
    if name in ("1/N", "1/sqrt(N/2)"):
        count = count.clamp(min=1.0)
        return count.reciprocal() if name == "1/N" else (count / 2.0).rsqrt()
    return {"1/L": 1.0 / max(length, 1)}[name]


def forward(
    scores: Tensor,
    visible: Tensor | None,
    count: Tensor,
    mechanism: Mechanism,
    power: Tensor | float | None,
    length: int,
) -> Rows:
    """Scores to weights.

    Args:
        scores: [..., R, K]; overwritten on invisible keys.
        visible: bool, broadcastable to the scores; None if all is visible.
        count: floating N_i, broadcastable to [..., R, 1].
        mechanism: which phi, normaliser and so on.
        power: number, or tensor broadcastable to [..., 1, 1]; None for no re-weighting.
        length: L, the number of key positions of the whole problem.
    """
    if visible is not None:
        scores.masked_fill_(~visible, -math.inf)
    maximum = scores.amax(-1, keepdim=True)
    f, exp_tail, shift = _phi(scores, maximum, mechanism)
    # A positive phi is 0 at -inf. Other phi may be NaN there (gelu, mish), or not 0 (identity)
    if visible is not None and not POINTWISE[mechanism.phi].positive:
        f.masked_fill_(~visible, 0.0)
    norm = (f.abs() if mechanism.phi in SIGNED_PHI else f).sum(-1, keepdim=True)
    log_norm = norm.log() + shift
    empty = norm == 0
    # A sum that overflows would make all weights 0
    norm = norm.masked_fill(empty, 1.0).masked_fill_(norm == math.inf, math.nan)
    # The weights are set below; without a normaliser and ``post`` they stay f
    rows = Rows(
        weights_before_post=f, weights=f, scores=scores, f=f, norm=norm, exp_tail=exp_tail, maximum=maximum,
        log_norm=log_norm, peak=torch.zeros_like(norm),
    )  # fmt: skip
    if power is not None:
        _reweight(rows, count, power)
    elif mechanism.normaliser == "l1":
        rows.weights_before_post = f / norm
    elif mechanism.normaliser != "none":
        rows.weights_before_post = f * _row_factor(mechanism.normaliser, count, length)
    rows.weights = rows.weights_before_post
    if mechanism.post == "negate":
        rows.weights = -rows.weights_before_post
    elif mechanism.post in ("recentre", "recentre+l1"):
        rows.weights = _recentre(rows.weights_before_post, visible, count, mechanism)
    elif mechanism.post != "none":
        raise KeyError(mechanism.post)
    if visible is not None and not bool(norm.isfinite().all()):
        rows.weights = rows.weights.masked_fill(~visible, 0.0)  # a NaN row is NaN on its visible keys alone
    return rows


def backward(
    rows: Rows,
    grad_weights: Tensor,
    visible: Tensor | None,
    count: Tensor,
    mechanism: Mechanism,
    power: Tensor | float | None,
    length: int,
) -> tuple[Tensor, Tensor | None]:
    """dL/dA to dL/ds, and dL/dp row by row where ``power`` is a tensor.

    Args:
        rows: what :func:`forward` returned.
        grad_weights: dL/dA, [..., R, K]; overwritten.
        visible, count, mechanism, power, length: as in :func:`forward`.

    Returns:
        dL/ds [..., R, K], 0 on invisible keys; and [..., R, 1] or None.
    """
    if mechanism.post == "negate":
        grad_weights.neg_()
    elif mechanism.post != "none":
        grad_weights = _recentre_backward(rows, grad_weights, visible, count, mechanism)
    grad_f, grad_power = grad_weights, None  # dL/df, which overwrites dL/dA
    if power is not None:
        grad_f, grad_power = _reweight_backward(rows, grad_weights, visible, count, power)
    elif mechanism.normaliser == "l1":
        signed = mechanism.phi in SIGNED_PHI
        grad_f = _l1_backward(rows.f, rows.weights_before_post, rows.norm, grad_weights, visible, signed)
        # A row whose weights are all 0 passes no gradient. phi' of a signed phi is not 0 there
        if signed:
            grad_f.masked_fill_(rows.log_norm == -math.inf, 0.0)
    elif mechanism.normaliser != "none":
        grad_f.mul_(_row_factor(mechanism.normaliser, count, length))
    grad_scores = grad_f.mul_(_phi_derivative(rows, mechanism))
    if visible is not None:
        grad_scores.masked_fill_(~visible, 0.0)
    return grad_scores, grad_power


def _phi(scores: Tensor, maximum: Tensor, mechanism: Mechanism) -> tuple[Tensor, Tensor | None, Tensor | float]:
    """``f``, phi(s) e^-shift, and ``exp_tail`` of :class:`Rows`; and the shift, [..., R, 1] or 0.

    With the l1 norm every row of exp is e^(s - maximum): the shift is the maximum, and exp_tail is
    None. Another phi that is positive everywhere has such rows where exp_tail marks them. The shift
    is 0 in all other rows.
    """
    if mechanism.normaliser == "l1" and POINTWISE[mechanism.phi].positive:
        shift = maximum.masked_fill(maximum == -math.inf, 0.0)
        if mechanism.phi == "exp":
            return (scores - shift).exp_(), None, shift
        # A whole row in the exponential tail would underflow; e^(s - maximum) has the same ratios
        exp_tail = maximum < (_EXP_TAIL if scores.dtype == torch.float32 else _EXP_TAIL_DOUBLE)
        if exp_tail.any():
            f = torch.where(exp_tail, (scores - shift).exp_(), POINTWISE[mechanism.phi].value(scores))
            return f, exp_tail, torch.where(exp_tail, shift, 0.0)
    return POINTWISE[mechanism.phi].value(scores), None, 0.0


def _phi_derivative(rows: Rows, mechanism: Mechanism) -> Tensor:
    """phi'(s), [..., R, K]; times the factor of the row that f has."""
    if mechanism.phi == "exp":
        return rows.f
    derivative = POINTWISE[mechanism.phi].derivative(rows.scores)
    return derivative if rows.exp_tail is None else torch.where(rows.exp_tail, rows.f, derivative)


def _delta(weights: Tensor, grad: Tensor, visible: Tensor | None) -> Tensor:
    """D = sum_j A_j dA_j. Where that is not finite, ``grad`` is first set to 0 on invisible keys: 0
    * inf would be NaN.
    """
    delta = (grad * weights).sum(-1, keepdim=True)
    if visible is not None and not bool(delta.isfinite().all()):
        grad.masked_fill_(~visible, 0.0)
        delta = (grad * weights).sum(-1, keepdim=True)
    return delta


def _l1_backward(
    f: Tensor, weights: Tensor, norm: Tensor, grad: Tensor, visible: Tensor | None, signed: bool
) -> Tensor:
    """A = f / sum|f|: df = (dA - sign(f) sum_j dA_j A_j) / sum|f|. Overwrites grad.

    Where phi is not ``signed``, an f of 0 has phi' = 0 or is invisible, and its sign does not
    matter.
    """
    delta = _delta(weights, grad, visible)
    return grad.sub_(f.sign().mul_(delta) if signed else delta).div_(norm)


def _power(u: Tensor, power: Tensor | float) -> Tensor:
    """u^p for u in [0, 1]; small integers by repeated squaring, which costs a tenth of a general
    power.

    Each squaring doubles the relative error, which is at most p ulp; at p = 31 it was five
    (docs/performance.md). The rounding of u itself causes about p ulp. Above SQUARING_LIMIT the
    general power is used.
    """
    if isinstance(power, Tensor):
        return (u**power).masked_fill_(u == 0, 0.0)  # a learned power may be 0, and 0^0 is 1
    if power != int(power) or power > SQUARING_LIMIT:
        return u**power
    exponent, square, result = int(power), u, None
    while True:
        if exponent & 1:
            result = square.clone() if result is None else result.mul_(square)
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        square = square * square


def _reweight(rows: Rows, count: Tensor, power: Tensor | float) -> None:
    """Eq. 5: u = relu(f - threshold) / spread, A = u^p / sum u^p. Any factor of the row cancels."""
    f, norm = rows.f, rows.norm
    threshold_on = (count > MAX_UNTHRESHOLDED_COUNT).to(f.dtype)
    mean = norm / count.clamp(min=1.0)
    threshold = threshold_on * mean
    largest = f.amax(-1, keepdim=True)
    rows.peak = (largest / mean - threshold_on).clamp_(min=0.0)  # largest * count may overflow
    tied = rows.peak <= TIE_EPS * torch.finfo(f.dtype).eps
    rows.spread = (largest - threshold).masked_fill_(tied, 1.0)
    rows.u = (f - threshold).clamp_(min=0.0).div_(rows.spread)
    weights = _power(rows.u, power)
    rows.power_sum = weights.sum(-1, keepdim=True).masked_fill_(tied, 1.0)
    rows.weights_before_post = weights.div_(rows.power_sum)
    if bool(tied.any()):
        rows.tied = tied
        rows.weights_before_post = torch.where(tied, f / norm, rows.weights_before_post)


def _reweight_backward(
    rows: Rows, grad: Tensor, visible: Tensor | None, count: Tensor, power: Tensor | float
) -> tuple[Tensor, Tensor | None]:
    """dL/df and dL/dp. Overwrites grad.

    g = dL/du = p u^(p-1) (dA - D) / sum u^p with D = sum_j A dA. df = (g - o mean(g)) / spread on
    every visible key, since the threshold is o, ``threshold_on``, times the row's mean.
    """
    assert rows.u is not None
    assert rows.spread is not None
    assert rows.power_sum is not None
    grad.sub_(_delta(rows.weights_before_post, grad, visible))
    if rows.tied is not None:
        tied_grad = grad / rows.norm
    grad.mul_(rows.weights_before_post)
    grad_power = None
    if isinstance(power, Tensor):
        grad_power = torch.where(rows.u > 0, rows.u, 1.0).log_().mul_(grad).sum(-1, keepdim=True)
        if rows.tied is not None:
            grad_power = grad_power.masked_fill_(rows.tied, 0.0)
    # u^(p-1) / sum u^p is A / u; where u is 0, so is A
    grad.div_(rows.u.clamp(min=torch.finfo(grad.dtype).tiny)).mul_(power)
    threshold_on = (count > MAX_UNTHRESHOLDED_COUNT).to(grad.dtype)
    grad.sub_(threshold_on * grad.sum(-1, keepdim=True) / count.clamp(min=1.0)).div_(rows.spread)
    if rows.tied is not None:
        grad = torch.where(rows.tied, tied_grad, grad)
    return grad, grad_power


def _recentre(weights: Tensor, visible: Tensor | None, count: Tensor, mechanism: Mechanism) -> Tensor:
    """A after ``post``: A - mean(A) on visible keys, and over its l1 norm for recentre+l1. Rows
    that see at most MAX_UNTHRESHOLDED_COUNT keys keep A.
    """
    centred, norm, tied = _centred(weights, visible, count)
    if mechanism.post == "recentre+l1":
        centred = torch.where(tied, 0.0, centred / norm)
    return torch.where(count <= MAX_UNTHRESHOLDED_COUNT, weights, centred)


def _centred(weights: Tensor, visible: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A - mean(A), its l1 norm, and the rows whose norm is mere rounding; the norm is 1 there."""
    centred = weights - weights.sum(-1, keepdim=True) / count.clamp(min=1.0)
    if visible is not None:
        centred.masked_fill_(~visible, 0.0)
    norm = centred.abs().sum(-1, keepdim=True)
    tied = norm <= TIE_EPS * torch.finfo(weights.dtype).eps
    return centred, norm.masked_fill(tied, 1.0), tied


def _recentre_backward(rows: Rows, grad: Tensor, visible: Tensor | None, count: Tensor, mechanism: Mechanism) -> Tensor:
    """dL/d(A after ``post``) to dL/dA; sets ``grad`` to 0 on invisible keys."""
    if visible is not None:
        grad.masked_fill_(~visible, 0.0)
    centred, norm, tied = _centred(rows.weights_before_post, visible, count)
    grad_centred = grad
    if mechanism.post == "recentre+l1":
        grad_centred = _l1_backward(centred, centred / norm, norm, grad.clone(), visible, signed=True)
        grad_centred = torch.where(tied, 0.0, grad_centred)
    seen = grad_centred if visible is None else grad_centred.masked_fill(~visible, 0.0)
    mean = seen.sum(-1, keepdim=True) / count.clamp(min=1.0)
    return torch.where(count <= MAX_UNTHRESHOLDED_COUNT, grad, grad_centred - mean)
