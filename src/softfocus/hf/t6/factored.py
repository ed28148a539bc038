"""Attention of one query to the factors of its keys and values: no key and no value is computed.

The score of head i and token j needs R_K numbers of A_K, and the products of B_K with the query::

    q_i . K_ij = 1/R_K sum_r a_r,ij (b_r,j . q_i)

For cosine similarity row i of A_K is divided by the length of its key. The weights w are those that
the mechanism makes of these scores. The output is the same sum in another order, too::

    out_i = sum_j w_ij V_ij = 1/R_V sum_j sum_r (w_ij a_r,ij) b_r,j

Of each token this reads (R_K + R_V)(h + d) numbers. Keys and values are 2 h d numbers, which would
be written and read once more.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from softfocus.contract import compute_dtype
from softfocus.functional import attention
from softfocus.hf.watch import listeners
from softfocus.mechanism import Mechanism, default_scale
from softfocus.reference import unit
from softfocus.row_weights import weights

MIN_NUMBERS, MAX_RANK = 1 << 22, 2
"""Of all keys, B h L d, and of the products of keys and of values. With these it was measured to be
faster (docs/results/t6-decode). With fewer keys the many operations on small tensors take longer
than they save, with more products those on R h L numbers.
"""


def combine(a: Tensor, b: Tensor) -> Tensor:
    """1/R A^T B of each token, [B, h, L, d], from factors A [B, L, R, h] and B [B, L, R, d]."""
    rank = a.shape[2]
    return ((a / rank).transpose(-1, -2) @ b).transpose(1, 2)


def suits(query: Tensor, k_a: Tensor, v_a: Tensor, v_b: Tensor) -> bool:
    """Whether a call of attention is one that :class:`Factored` is right and fast for.

    Args:
        query: [B, h, Lq, d].
        k_a: A [B, L, R, h] of the keys.
        v_a: A [B, L, R, h] of the values.
        v_b: B [B, L, R, d] of the values. A NaN of a masked token would reach the output.
    """
    if torch.compiler.is_compiling():  # before any length is compared, which would fix it
        return False
    batch, heads, query_length, size = query.shape
    length, rank = k_a.shape[1], max(k_a.shape[2], v_a.shape[2])
    return (
        query_length == 1 < length  # sinks double the dimensions of a first token's key
        and batch * heads * length * size >= MIN_NUMBERS
        and rank <= MAX_RANK < heads
        and query.device.type == "cpu"  # it was not measured on others
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not listeners  # they are shown keys
        and bool(v_a.isfinite().all() & v_b.isfinite().all())
    )


class Factored(NamedTuple):
    """Stands in place of :func:`softfocus.attention` where keys and values are given by their rows
    of A, [B, h, L, R].

    Attributes:
        k_b: B [B, L, R, d] of the keys.
        v_b: B [B, L, R, d] of the values.
    """

    k_b: Tensor
    v_b: Tensor

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mechanism: Mechanism,
        scale: float | None,
        dropout_p: float,
        **arguments: Any,
    ) -> Tensor:
        """Attention of one query, without dropout.

        Args:
            query: [B, h, 1, d].
            key: rows of A of the keys, [B, h, L, R].
            value: rows of A of the values, [B, h, L, R].
            mechanism, scale, dropout_p, arguments: as in ``softfocus.attention``.

        Returns:
            [B, h, 1, d], of the query's dtype.

        Raises:
            ValueError: dropout.
        """
        if dropout_p:
            raise ValueError(f"dropout_p: got {dropout_p}, expected 0; the weights of factors are not dropped")
        if mechanism.laser:  # its exp(V) is not linear in the factors
            key, value = (combine(a.permute(0, 2, 3, 1), b) for a, b in ((key, self.k_b), (value, self.v_b)))
            return attention(query, key, value, mechanism=mechanism, scale=scale, **arguments)
        dtype = compute_dtype(query.dtype)
        row, a, b = (x.to(dtype) for x in (query[:, :, 0], key, self.k_b))
        scale = default_scale(mechanism, query.shape[-1]) if scale is None else scale
        if mechanism.similarity == "cosine":
            row, mechanism = unit(row), mechanism.replace(similarity="dot")
            a, b = of_unit_keys(a, b)
        rank, value_rank = key.shape[-1], value.shape[-1]
        products = (b.flatten(1, 2) @ row.mT).unflatten(1, (-1, rank)).permute(0, 3, 1, 2)  # [B, h, L, R]
        ones = row.new_ones(()).expand(*query.shape[:3], rank)
        w = weights(ones, a * products / rank, mechanism=mechanism, scale=scale, **arguments)  # [B, h, 1, L]
        mixed = (w.mT * value / value_rank).flatten(2)  # [B, h, L R]
        return (mixed @ self.v_b.to(dtype).flatten(1, 2)).unsqueeze(2).to(query.dtype)


def of_unit_keys(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the keys 1/R A^T B, each divided by its length; a key of zeros stays zero.

    The length is that of R coordinates in an orthogonal basis of the rows of B (Gram-Schmidt). So
    it is as exact as that of the key itself: a_i^T (B B^T) a_i would lose twice the digits where
    products cancel. Where 1/R A^T B under- or overflows, as with entries of 1e-30 or 1e38 in
    float32, its direction is still found; the key itself is zero or infinite.

    Args:
        a: rows of A, [B, h, L, R].
        b: B, [B, L, R, d].

    Returns:
        A and B, shaped like the arguments.
    """
    # Neither the squares of large entries overflow nor those of small ones vanish
    a, b = (_of_size_1(x, dims) for x, dims in ((a, (-1,)), (b, (-2, -1))))
    rank, tiny = a.shape[-1], torch.finfo(a.dtype).tiny
    basis: list[Tensor] = []
    coordinates = [torch.zeros_like(a[..., 0])] * rank  # of A^T B, [B, h, L]
    for r in range(rank):
        rest = b[:, :, r]  # [B, L, d]
        for s, direction in enumerate(basis):
            along = (rest * direction).sum(-1, keepdim=True)
            rest = rest - along * direction
            coordinates[s] = coordinates[s] + a[..., r] * along[:, None, :, 0]
        norm = (rest * rest).sum(-1, keepdim=True).sqrt()
        basis.append(rest / norm.clamp(min=tiny))
        coordinates[r] = coordinates[r] + a[..., r] * norm[:, None, :, 0]
    length = torch.stack([x * x for x in coordinates]).sum(0).sqrt() / rank
    return torch.where(length > 0, 1 / length, 0.0)[..., None] * a, b


def _of_size_1(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    largest = x.abs().amax(dims, keepdim=True)
    return x / torch.where(largest > 0, largest, 1.0)
