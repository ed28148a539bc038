"""Which weights dropout drops: one definition, a function of the call's seed and a weight's place
alone.

Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter
and a key into four words of 32 bits. The key is the seed. One counter serves eight keys (columns)
of a row:

    counter = (8 * (column // 64) + column % 8,  row,  batch * H + head,  0)
    number  = 16 bits of word n // 2, the lower ones where n is even, with n = column // 8 % 8

A weight is dropped where its number is below p * 2^16, rounded; the others grow by 1 / (1 - p) of
the p so rounded, which leaves the expectation exact. Seven rounds, as in FlashAttention: the fewest
that pass BigCrush.

Every backend makes the same bits, whatever its tiles and threads, and makes them again in the
backward instead of keeping them. The eight columns of a counter lie eight apart because that is
where a thread of a GPU finds its columns of a product of tensor cores, and where 64 columns come
out in order when a CPU's vector holds eight counters.
"""

import torch
from torch import Tensor

ROUNDS = 7
SPAN = 64
"""Columns whose counters follow one another."""
LANES = 8
"""Counters of a span."""
_WORD = 2**32 - 1


def threshold(p: float) -> int:
    """The numbers of 16 bits below this drop their weight."""
    return round(p * 2**16)


def growth(p: float) -> float:
    """What multiplies a weight that is kept."""
    kept = 2**16 - threshold(p)
    return 2**16 / kept if kept else 0.0


def factors(
    seed: int | Tensor, p: float, heads: Tensor, rows: tuple[int, int], columns: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """What dropout multiplies weights with, 0 or :func:`growth`.

    Args:
        seed: of the call, in [0, 2^62); a scalar tensor of the CPU, or its number.
        p: the probability of being dropped.
        heads: batch * H + head, int64 of any shape [...].
        rows, columns: which, from and to.
        dtype: of the result.

    Returns:
        [..., R, K], on the device of ``heads``.
    """
    first, last = columns[0] // SPAN, -(-columns[1] // SPAN)
    row = torch.arange(*rows, device=heads.device)[:, None]
    column = torch.arange(first * LANES, last * LANES, device=heads.device)
    words = philox((column, row, heads[..., None, None], torch.zeros_like(row)), (seed & _WORD, seed >> 32))
    least = threshold(p)
    halves = [half >= least for word in words for half in (word & 0xFFFF, word >> 16)]
    kept = torch.stack(halves, -2).unflatten(-1, (-1, LANES))  # [..., R, 8, spans, LANES]
    kept = kept.transpose(-3, -2).flatten(-3)  # [..., R, columns]
    return kept[..., columns[0] - first * SPAN : columns[1] - first * SPAN].to(dtype).mul_(growth(p))


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32 of words in int64, broadcast against one another."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(ROUNDS):
        # Products of 64 bits: beyond 2^63 they are negative, and their bits still right. b and d
        # are the lower halves
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = ((y >> 32) ^ b ^ k) & _WORD, y, ((x >> 32) ^ d ^ m) & _WORD, x
        k, m = k + 0x9E3779B9 & _WORD, m + 0xBB67AE85 & _WORD
    a, b, c, d = torch.broadcast_tensors(a, b & _WORD, c, d & _WORD)
    return a, b, c, d
