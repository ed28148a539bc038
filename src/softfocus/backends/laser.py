"""LASER's log(A exp(V)) for a block of rows: a matrix product, exact where a product cannot be, and exactly causal."""

from collections.abc import Iterator

import torch
from torch import Tensor

CLAMP = 80.0  # e^80 is finite in float32, and so is its product with a weight of 0
HIGH = 60.0  # above shift + 60, a value that a row sees is summed exactly
LOW = 1e-30  # so is a sum below this: the row's weights lie on values far below the shift
REACH = 30.0  # the shift is moved when the maximum has moved this far
ENTRY_ELEMENTS = 1 << 20  # keys times entries summed exactly at once


class ShiftedExponential:
    """exp(V - M) for the values of some heads, with a column shift M that no unseen value can touch.

    M is the column maximum over the keys that *every* row of a block sees, so that a change in a row's future leaves the
    row bit-equal; it moves only when that maximum has moved by more than REACH, so that exp(V - M) is seldom recomputed.
    The exponent is clamped at CLAMP: an unseen value weighs exactly 0, whatever it is.
    Entries (row, column) that see a value above M + HIGH, or whose sum comes out below LOW, are recomputed by a
    log-sum-exp over the row's keys. Ordinary values never take that path.
    """

    def __init__(self, value: Tensor):
        self.value = value  # [b, h, Lk, Dv], finite
        self.shift = value.new_zeros(*value.shape[:2], 1, value.size(-1))
        self.exponential: Tensor | None = None
        self.high = False

    def mix(self, weights: Tensor, low: int, high: int, common: Tensor | slice | None) -> Tensor:
        """log(A exp(V)) for A [b, h, R, K] over keys [low, high): [b, h, R, Dv]. Rows without weight give -inf or NaN."""
        total, exact = self._sum(weights, low, high, common)
        out = total.log().add_(self.shift)
        for index, log_terms in self._exact(weights, exact, low, high):
            out[index] = torch.logsumexp(log_terms, -1)
        return out

    def mix_backward(
        self, weights: Tensor, grad: Tensor, low: int, high: int, common: Tensor | slice | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of :meth:`mix`.

        Returns:
            dL/dA [b, h, R, K] of the entries that are products; A * dL/dA of those that are summed exactly, or None where
            there are none (dL/dA itself may be too large for the dtype there); the part of dL/dV [b, h, K, Dv] that these
            rows give.
        """
        total, exact = self._sum(weights, low, high, common)
        # dL/d(A exp(V - M)). A row that sees a NaN has NaN weights where it sees, and those alone must carry it on.
        share = (grad / total).masked_fill_(exact | (grad == 0) | total.isnan(), 0.0)
        assert self.exponential is not None
        exponential = self.exponential[..., low:high, :]
        # A weight of 0 has no slope behind it in any mechanism, and exp(V - out) there may be anything.
        weight_grad = (share @ exponential.mT).masked_fill_(weights == 0, 0.0)
        value_grad = (weights.mT @ share).mul_(exponential)
        scaled = exact_grad = None
        for (b, h, row, column), log_terms in self._exact(weights, exact, low, high):
            part = log_terms.softmax(-1) * grad[b, h, row, column, None]  # [n, K]
            if scaled is None or exact_grad is None:
                scaled, exact_grad = torch.zeros_like(weights), torch.zeros_like(value_grad.mT.contiguous())
            _add_at(scaled, (b, h, row), part)
            _add_at(exact_grad, (b, h, column), part)
        if exact_grad is not None:
            value_grad += exact_grad.mT
        return weight_grad, scaled, value_grad

    def _sum(self, weights: Tensor, low: int, high: int, common: Tensor | slice | None) -> tuple[Tensor, Tensor]:
        """A exp(V - M), and which of its entries must be summed exactly."""
        self._move(low, high, common)
        assert self.exponential is not None
        total = weights @ self.exponential[..., low:high, :]
        exact = total < LOW
        if self.high:
            above = (self.value[..., low:high, :] > self.shift + HIGH).to(weights.dtype)
            exact |= (weights != 0).to(weights.dtype) @ above > 0
        return total, exact & (weights != 0).any(-1, keepdim=True) if bool(exact.any()) else exact

    def _move(self, low: int, high: int, common: Tensor | slice | None) -> None:
        seen = self.value[..., low:high, :]
        if isinstance(common, slice):
            seen = seen[..., common, :]
        elif common is not None:
            seen = seen.masked_fill(~common.mT, -torch.inf)
        far = None
        if common is not None and seen.size(-2):
            maximum = seen.amax(-2, keepdim=True)
            far = (maximum - self.shift).abs().gt(REACH) & maximum.isfinite()
        if far is not None and bool(far.any()):
            self.shift = torch.where(far, maximum, self.shift)
            self.exponential = None
        if self.exponential is None:
            self.exponential = (self.value - self.shift).clamp_(max=CLAMP).exp_()
            self.high = bool((self.value > self.shift + HIGH).any())

    def _exact(
        self, weights: Tensor, exact: Tensor, low: int, high: int
    ) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """For entries to be summed exactly, in pieces: their index (b, h, row, column) and log A + V, [n, K]."""
        if not bool(exact.any()):
            return
        log_weights, value = weights.log(), self.value[..., low:high, :].mT
        for piece in exact.nonzero().split(max(1, ENTRY_ELEMENTS // max(1, high - low))):
            b, h, row, column = piece.unbind(-1)
            yield (b, h, row, column), log_weights[b, h, row] + value[b, h, column]


def _add_at(target: Tensor, index: tuple[Tensor, Tensor, Tensor], rows: Tensor) -> None:
    """target[index] += rows for [b, h, m, K] and [n, K], where an index may stand more than once: in a fixed order.

    ``index_put_(accumulate=True)`` and ``index_add_`` sum in whatever order the threads arrive.
    """
    flat = (index[0] * target.size(1) + index[1]) * target.size(2) + index[2]
    order = flat.argsort(stable=True)
    places, lengths = flat[order].unique_consecutive(return_counts=True)
    target.view(-1, target.size(-1))[places] += torch.segment_reduce(rows[order], "sum", lengths=lengths, axis=0)
