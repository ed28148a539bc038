"""LASER's log(A exp(V)) for a tile: a product, and a log-sum-exp where a product cannot be exact.
Exactly causal: a later value changes no bit of a row.

In shapes R counts the rows of all query heads of a group, G * R of ``Tile``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from softfocus.mechanism import MAX_UNTHRESHOLDED_COUNT, Mechanism
from softfocus.pointwise import POINTWISE
from softfocus.rows import Rows

# A product loses weights that are too small for float32. docs/kernels-cpu.md derives the two limits
# from that.
LARGE_VALUE = 30.0  # values above shift + LARGE_VALUE are large: an entry with weight on one takes the exact sum
SMALL_SUM = 1e-12  # smaller sums take the exact sum: the weights lie on values far below the shift
# The shift moves when the maximum is farther from it. Chosen, not measured: e^-20 and e^20 are far
# from underflow and overflow
SHIFT_TOLERANCE = 20.0
MAX_EXPONENT = 80.0  # exponents are clamped here: e^80 is finite in float32, and 0 times it is 0
# The largest [n, K] of rows or entries whose logarithms are computed at once: 8 MiB of float64.
# Chosen, not measured
ENTRY_ELEMENTS = 1 << 20

RowIndex = tuple[Tensor, Tensor, Tensor]
"""Batch, head and row of some rows, each [n]: an index into [b, h, R, ...]."""


class LogWeights:
    """Log-space weights of a tile's rows in float64, and dL/ds from A dL/dA. Neither A nor dL/dA
    need be in the range of a float.

    Attributes:
        scores: [b, h, R, K], -inf on invisible keys.
        count: [b, h, R, 1].
        u, tied: as in ``Rows``, as [b, h, R, K] and [b, h, R, 1].
        power: a number, [b, h, R, 1], or None for no re-weighting.
    """

    def __init__(self, rows: Rows, count: Tensor, mechanism: Mechanism, power: Tensor | float | None):
        def flat(x: Tensor) -> Tensor:
            return x.expand(*rows.scores.shape[:4], x.size(-1)).flatten(2, 3)

        self.scores, self.count = flat(rows.scores), flat(count)
        self.u = None if rows.u is None else flat(rows.u)
        self.tied = flat(torch.zeros_like(rows.norm, dtype=torch.bool) if rows.tied is None else rows.tied)
        self.power = flat(power) if isinstance(power, Tensor) else power
        self.phi = POINTWISE[mechanism.phi]
        # mps has no float64
        self.double = torch.float32 if rows.scores.device.type == "mps" else torch.float64

    def live(self) -> Tensor:
        """bool [b, h, R, K], the keys whose weight may be above 0, however small."""
        # LASER refuses a phi with negative values: one with zeros is 0 for s <= 0
        live = self.scores > (-torch.inf if self.phi.positive else 0.0)
        if self.u is not None:
            live &= (self.u > 0) | (self.count <= MAX_UNTHRESHOLDED_COUNT) | self.tied
        return live

    def weights(self, index: RowIndex) -> Tensor:
        """log A of some rows, [n, K]."""
        return self._logs(index)[2]

    def correct(self, grad_scores: Tensor, grad_power: Tensor | None, index: RowIndex, weighted_grad: Tensor) -> Tensor:
        """dL/ds [b, h, R, K], with that of the rows at ``index`` computed from ``weighted_grad``,
        A dL/dA [n, K]. Both dL/ds and dL/dp [b, h, G, R / G, 1] are overwritten in these rows.
        """
        grad_power_rows = None if grad_power is None else grad_power.view(*grad_power.shape[:2], -1, 1)
        for some in _pieces(len(weighted_grad), weighted_grad.size(-1)):
            here = index[0][some], index[1][some], index[2][some]
            grad_s, grad_p = self._gradients(here, weighted_grad[some])
            grad_scores[here] = grad_s.to(grad_scores.dtype)
            if grad_power_rows is not None and grad_p is not None:
                grad_power_rows[here] = grad_p.to(grad_power_rows.dtype)
        return grad_scores

    def _gradients(self, index: RowIndex, weighted_grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """From A dL/dA [n, K] of some rows: dL/ds [n, K], and dL/dp [n, 1] where there is a power.

        Let A = r / sum r, with r = phi or r = u^p, and D = sum_j A_j dL/dA_j. Then dL/d log r is
        A dL/dA - A D. It sums to 0 over a row. So does dL/d log u, which is p times as large. A
        constant of the row in log u, such as log spread, therefore changes no gradient.

        dL/ds = phi' dL/df = (phi'/phi) f dL/df. In rows without a threshold log u is log f plus a
        constant, so that f dL/df is dL/d log u. In the others dL/df = g - mean(g), with
        g = dL/d log u / (f - mean(f)). In units of sum f, f is the l1 weight and mean(f) is 1/N.
        """
        log_l1, log_u, log_a = self._logs(index)
        grad_log_r = weighted_grad - log_a.exp() * weighted_grad.sum(-1, keepdim=True)
        assert self.phi.log_derivative is not None
        log_derivative = self.phi.log_derivative(self.scores[index].to(self.double)).masked_fill(
            log_l1 == -torch.inf, 0.0
        )
        if self.power is None:
            return log_derivative * grad_log_r, None
        unthresholded, tied = self.count[index] <= MAX_UNTHRESHOLDED_COUNT, self.tied[index]
        grad_power = torch.where(log_u > -torch.inf, grad_log_r * log_u, 0.0).sum(-1, keepdim=True)
        grad_power = grad_power.masked_fill(tied, 0.0)
        grad_log_u = torch.where(tied, grad_log_r, self._power(index) * grad_log_r)  # p is 1 in tied rows
        weights, mean = log_l1.exp(), 1.0 / self.count[index].to(self.double)  # f / sum f, and their mean 1 / N
        g = torch.where(weights > mean, grad_log_u / (weights - mean), 0.0)
        thresholded = weights * (g - mean * g.sum(-1, keepdim=True))  # f dL/df
        return log_derivative * torch.where(unthresholded | tied, grad_log_u, thresholded), grad_power

    def _logs(self, index: RowIndex) -> tuple[Tensor, Tensor, Tensor]:
        """Logarithms [n, K] for some rows: of phi(s) / sum phi(s), of u up to a factor per row, and
        of A.
        """
        assert self.phi.log is not None
        log_f = self.phi.log(self.scores[index].to(self.double))
        log_l1 = log_f - log_f.logsumexp(-1, keepdim=True)
        if self.power is None:
            return log_l1, log_l1, log_l1
        count = self.count[index].to(self.double)
        # log of (f - threshold) / sum f. The threshold is 0 in rows of few keys
        log_above_threshold = torch.where(
            count > MAX_UNTHRESHOLDED_COUNT, (log_l1.exp() - 1.0 / count).clamp(min=0.0).log(), log_l1
        )
        log_u = log_above_threshold - log_above_threshold.amax(-1, keepdim=True)
        log_r = (self._power(index) * log_u).masked_fill(log_above_threshold == -torch.inf, -torch.inf)
        log_a = log_r - log_r.logsumexp(-1, keepdim=True)
        return log_l1, log_u, torch.where(self.tied[index], log_l1, log_a)

    def _power(self, index: RowIndex) -> Tensor | float:
        assert self.power is not None
        return self.power[index].to(self.double) if isinstance(self.power, Tensor) else self.power


class ShiftedExponential:
    """exp(V - M) for the values of some heads, with a shift M for each column that no value in a
    row's future can change.

    M starts at 0. A tile moves it to the column's maximum over the keys that *every* row of the
    tile sees, if that is farther from it than SHIFT_TOLERANCE. So a change in a row's future leaves
    the row bit-equal, and exp(V - M) is seldom computed again. The exponent is clamped at
    MAX_EXPONENT, so that an unseen value contributes exactly 0. An entry (row, column) that gives
    weight to a value above M + LARGE_VALUE, or whose sum is below SMALL_SUM, is the log-sum-exp of
    log A + V in place of the product. Ordinary values need none.
    """

    def __init__(self, value: Tensor):
        self.value = value  # [b, h, Lk, Dv], finite
        self.shift = value.new_zeros(*value.shape[:2], 1, value.size(-1))
        self.exp_values: Tensor | None = None
        self.has_large_values = False

    def log_weighted_exp(
        self, weights: Tensor, logs: LogWeights, keys: slice, visible_to_all: Tensor | slice | None
    ) -> Tensor:
        """log(A exp(V)) for A [b, h, R, K] over some keys: [b, h, R, Dv]. Rows without weight give
        -inf or NaN.
        """
        total, exact = self._sum(weights, logs, keys, visible_to_all)
        out = total.log().add_(self.shift)
        for index, column, terms in self._exact(logs, exact, keys):
            out[*index, column] = torch.logsumexp(terms, -1).to(out.dtype)
        return out

    def log_weighted_exp_backward(
        self, weights: Tensor, logs: LogWeights, grad: Tensor, keys: slice, visible_to_all: Tensor | slice | None
    ) -> tuple[Tensor, Tensor, tuple[RowIndex, Tensor] | None]:
        """Gradients of :meth:`log_weighted_exp`.

        Returns:
            dL/dA [b, h, R, K], right in rows without an exact entry; dL/dV [b, h, K, Dv]; and of
            rows with exact entries their index and A dL/dA [n, K] in float64, or None where there
            are no such rows.
        """
        total, exact = self._sum(weights, logs, keys, visible_to_all)
        # dL/d(A exp(V - M)), 0 where the sum is NaN: a row with a NaN score has NaN weights on its
        # visible keys, which make the gradients of these keys NaN. Those of hidden keys stay finite
        grad_total = (grad / total).masked_fill_(exact | (grad == 0) | total.isnan(), 0.0)
        assert self.exp_values is not None
        exp_values = self.exp_values[..., keys, :]
        # A key of weight 0 may have any value: its dL/dA, a sum of dO exp(V - out), may overflow
        grad_weights = (grad_total @ exp_values.mT).masked_fill_(weights == 0, 0.0)
        grad_value = (weights.mT @ grad_total).mul_(exp_values)
        if not bool(exact.any()):
            return grad_weights, grad_value, None
        has_exact = exact.any(-1)  # [b, h, R]
        batch_i, head_i, row_i = has_exact.nonzero().unbind(-1)
        index = batch_i, head_i, row_i
        number = has_exact.flatten().cumsum(0).view(has_exact.shape) - 1  # [b, h, R], the place of a row in ``index``
        weighted_grad = grad_weights[index].to(logs.double)  # [n, K]
        for some in _pieces(len(row_i), weights.size(-1)):
            weighted_grad[some] *= logs.weights((batch_i[some], head_i[some], row_i[some])).exp()
        exact_grad = torch.zeros_like(grad_value.mT, dtype=logs.double, memory_format=torch.contiguous_format)
        columns = exact_grad.view(-1, weights.size(-1))  # [b * h * Dv, K]
        for (b, h, row), column, terms in self._exact(logs, exact, keys):
            part = terms.softmax(-1) * grad[b, h, row, column, None]  # [n, K]
            _add_at(weighted_grad, number[b, h, row], part)
            _add_at(columns, (b * grad_value.size(1) + h) * grad_value.size(-1) + column, part)
        return grad_weights, grad_value.add_(exact_grad.mT.to(grad_value.dtype)), (index, weighted_grad)

    def _sum(
        self, weights: Tensor, logs: LogWeights, keys: slice, visible_to_all: Tensor | slice | None
    ) -> tuple[Tensor, Tensor]:
        """A exp(V - M) [b, h, R, Dv], and which of its entries must be summed in logarithms."""
        self._move(keys, visible_to_all)
        assert self.exp_values is not None
        total = weights @ self.exp_values[..., keys, :]
        exact = total < SMALL_SUM
        if self.has_large_values:
            above = (self.value[..., keys, :] > self.shift + LARGE_VALUE).to(weights.dtype)
            exact |= logs.live().to(weights.dtype) @ above > 0
        if not bool(exact.any()):
            return total, exact
        return total, exact & (weights != 0).any(-1, keepdim=True) & ~total.isnan()

    def _move(self, keys: slice, visible_to_all: Tensor | slice | None) -> None:
        """Moves M in the columns whose maximum is more than SHIFT_TOLERANCE from it. Computes
        exp(V - M) if M is new.
        """
        seen = self.value[..., keys, :]
        if isinstance(visible_to_all, slice):
            seen = seen[..., visible_to_all, :]
        elif visible_to_all is not None:
            seen = seen.masked_fill(~visible_to_all.mT, -torch.inf)
        far = None
        if visible_to_all is not None and seen.size(-2):
            maximum = seen.amax(-2, keepdim=True)
            far = (maximum - self.shift).abs().gt(SHIFT_TOLERANCE) & maximum.isfinite()
        if far is not None and bool(far.any()):
            self.shift = torch.where(far, maximum, self.shift)
            self.exp_values = None
        if self.exp_values is None:
            self.exp_values = (self.value - self.shift).clamp_(max=MAX_EXPONENT).exp_()
            self.has_large_values = bool((self.value > self.shift + LARGE_VALUE).any())

    def _exact(self, logs: LogWeights, exact: Tensor, keys: slice) -> Iterator[tuple[RowIndex, Tensor, Tensor]]:
        """Row index, column and log A + V [n, K] of the exact entries, in pieces."""
        value = self.value[..., keys, :].mT
        entries = exact.nonzero()
        for some in _pieces(len(entries), value.size(-1)):
            piece = entries[some]
            rows, inverse = piece[:, :3].unique_consecutive(dim=0, return_inverse=True)
            b, h, row, column = piece.unbind(-1)
            log_weights = logs.weights(rows.unbind(-1))
            yield (b, h, row), column, log_weights[inverse] + value[b, h, column]


def _pieces(rows: int, keys: int) -> Iterator[slice]:
    """Slices of so many rows, each of at most ENTRY_ELEMENTS numbers or of one row."""
    step = max(1, ENTRY_ELEMENTS // max(1, keys))
    return (slice(start, start + step) for start in range(0, rows, step))


def _add_at(target: Tensor, indices: Tensor, rows: Tensor) -> None:
    """target[indices] += rows for [m, K], [n] and [n, K], in a fixed order. An index may occur more
    than once.

    ``index_put_(accumulate=True)`` and ``index_add_`` sum in the order in which threads arrive.
    """
    order = indices.argsort(stable=True)
    there, lengths = indices[order].unique_consecutive(return_counts=True)
    target[there] += torch.segment_reduce(rows[order], "sum", lengths=lengths, axis=0)
