"""Which weights dropout drops: one definition, a function of the call's seed and a weight's
position alone.

Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter
and a key into four words of 32 bits. The key is the seed. One counter serves eight keys (columns)
of a row:

    counter = (8 * (column // 64) + column % 8,  row,  batch * H + head,  0)
    number  = 16 bits of word n // 2, the lower ones where n is even, with n = column // 8 % 8

A weight is dropped if its number is below p * 2^16, rounded. The others are multiplied by
1 / (1 - p) of the rounded p, so that the expectation is exact. Philox runs seven rounds, as in
FlashAttention: the fewest that pass BigCrush.

Every backend generates the same bits, whatever its tiles and threads, and generates them again in
the backward instead of storing them. The eight columns of a counter are eight apart because a GPU
thread holds every eighth column of a tensor-core product. On a CPU a vector of eight counters then
gives 64 columns in order.
"""

import torch
from torch import Tensor

ROUNDS = 7
SPAN_KEYS = 64
"""Columns (keys) of a span, which follow one another. They share SPAN_COUNTERS counters."""
SPAN_COUNTERS = 8
"""Counters of a span, which follow one another."""
_WORD = 2**32 - 1


def threshold(p: float) -> int:
    """The kernels' ``drop_below``: a weight whose 16 random bits are below it is dropped."""
    return round(p * 2**16)


def keep_scale(p: float) -> float:
    """What multiplies a weight that is kept."""
    kept = 2**16 - threshold(p)
    return 2**16 / kept if kept else 0.0


def factors(
    seed: int | Tensor, p: float, heads: Tensor, rows: tuple[int, int], columns: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """What dropout multiplies weights with, 0 or :func:`keep_scale`.

    Args:
        seed: of the call, in [0, 2^62); a scalar tensor on the CPU, or a number.
        p: the probability that a weight is dropped.
        heads: batch * H + head, int64 of any shape [...].
        rows, columns: (first, end), end excluded.
        dtype: of the result.

    Returns:
        [..., R, K], on the device of ``heads``.
    """
    first, last = columns[0] // SPAN_KEYS, -(-columns[1] // SPAN_KEYS)
    row = torch.arange(*rows, device=heads.device)[:, None]
    column = torch.arange(first * SPAN_COUNTERS, last * SPAN_COUNTERS, device=heads.device)
    words = philox((column, row, heads[..., None, None], torch.zeros_like(row)), (seed & _WORD, seed >> 32))
    drop_below = threshold(p)
    halves = [half >= drop_below for word in words for half in (word & 0xFFFF, word >> 16)]
    kept = torch.stack(halves, -2).unflatten(-1, (-1, SPAN_COUNTERS))  # [..., R, 8, spans, SPAN_COUNTERS]
    kept = kept.transpose(-3, -2).flatten(-3)  # [..., R, columns]
    return kept[..., columns[0] - first * SPAN_KEYS : columns[1] - first * SPAN_KEYS].to(dtype).mul_(keep_scale(p))


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32 of 32-bit words in int64 tensors, which broadcast."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(ROUNDS):
        # int64 products may wrap, but their 64 bits are right. b and d keep all 64 bits; & _WORD
        # takes the lower half. The numbers are Philox's published multipliers and key increments
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = ((y >> 32) ^ b ^ k) & _WORD, y, ((x >> 32) ^ d ^ m) & _WORD, x
        k, m = k + 0x9E3779B9 & _WORD, m + 0xBB67AE85 & _WORD
    a, b, c, d = torch.broadcast_tensors(a, b & _WORD, c, d & _WORD)
    return a, b, c, d
