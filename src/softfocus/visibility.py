"""What each query row may see, in one place: the number N_i of visible keys is counted here and
nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

import torch
from torch import Tensor

UNLIMITED = -1
"""In a window: no bound on that side (FlashAttention's convention)."""

_COUNT_ELEMENTS = 1 << 20
"""Most booleans in memory at once while counting (1 MiB), unless one row has more."""


@dataclass(frozen=True, eq=False)
class Visibility:
    """The keys that each query may see: the intersection of all that is given.

    Queries are at the end of the keys: query i is at key position ``i + key_length - query_length``
    (bottom-right aligned, as a KV cache needs; the same as top-left if both lengths are equal).

    Attributes:
        query_length, key_length: Lq and Lk.
        left: how many keys to the left of its own position a query sees; -1 for all.
        right: the same to the right; 0 is causal.
        mask: bool, broadcastable to [B, H, Lq, Lk]; True where the key may be seen.
        key_mask: bool [B, Lk]; True where the key is real, False where it is padding.
        document_ids: integer [B, Lk]; a query sees the keys of its own document only. The queries'
            documents are those of the last Lq keys.
    """

    query_length: int
    key_length: int
    left: int = UNLIMITED
    right: int = UNLIMITED
    mask: Tensor | None = None
    key_mask: Tensor | None = None
    document_ids: Tensor | None = None

    @property
    def offset(self) -> int:
        """The key position of query 0; negative where there are more queries than keys."""
        return self.key_length - self.query_length

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The half-open range of keys outside of which no query in [start, stop) sees anything, by
        the window alone.
        """
        low = 0 if self.left == UNLIMITED else max(0, start + self.offset - self.left)
        high = self.key_length if self.right == UNLIMITED else min(self.key_length, stop + self.offset + self.right)
        high = max(high, 0)
        return min(low, high), high

    def block(self, start: int, stop: int, low: int, high: int, device: torch.device) -> Tensor | None:
        """Who sees whom among queries [start, stop) and keys [low, high).

        Returns:
            bool, broadcastable to [B, H, stop - start, high - low]; None where every query sees
            every key.
        """
        parts = []
        rows = torch.arange(start + self.offset, stop + self.offset, device=device)[:, None]
        columns = torch.arange(low, high, device=device)
        if self.left != UNLIMITED and low < stop - 1 + self.offset - self.left:
            parts.append((columns >= rows - self.left)[None, None])
        if self.right != UNLIMITED and high > start + self.offset + self.right + 1:
            parts.append((columns <= rows + self.right)[None, None])
        parts += self._masks(slice(start, stop), slice(low, high))
        return reduce(and_, parts) if parts else None

    def of_rows(self, rows: Tensor) -> Tensor:
        """Which keys some queries see: bool, broadcastable to [B, H, R, Lk]. The queries' numbers
        are int64 [R].
        """
        positions = (rows + self.offset)[:, None]
        columns = torch.arange(self.key_length, device=rows.device)
        parts = [torch.ones(1, 1, rows.size(0), self.key_length, dtype=torch.bool, device=rows.device)]
        if self.left != UNLIMITED:
            parts.append(columns >= positions - self.left)
        if self.right != UNLIMITED:
            parts.append(columns <= positions + self.right)
        return reduce(and_, parts + self._masks(rows, slice(0, self.key_length)))

    def _masks(self, rows: slice | Tensor, keys: slice) -> list[Tensor]:
        """Who sees whom by padding, documents and mask, for some queries and keys."""
        parts = []
        if self.key_mask is not None:
            parts.append(self.key_mask[:, None, None, keys])
        if self.document_ids is not None:
            row_documents = self.document_ids[:, self.offset :][:, rows]
            parts.append((row_documents[:, :, None] == self.document_ids[:, None, keys])[:, None])
        if self.mask is not None:
            mask = self.mask if self.mask.size(-2) == 1 else self.mask[..., rows, :]
            parts.append(mask if mask.size(-1) == 1 else mask[..., keys])
        return parts

    def count(self, device: torch.device) -> Tensor:
        """N_i, the number of keys that each query may see: int64, broadcastable to [B, H, Lq]."""
        if self.mask is not None or self.document_ids is not None:
            return self._count_by_blocks(device)
        rows = torch.arange(self.query_length, device=device) + self.offset
        zero, end = torch.zeros_like(rows), torch.full_like(rows, self.key_length)
        low = zero if self.left == UNLIMITED else (rows - self.left).clamp(0, self.key_length)
        high = end if self.right == UNLIMITED else (rows + self.right + 1).clamp(0, self.key_length)
        if self.key_mask is None:
            return (high - low).clamp(min=0)[None, None]
        before = torch.nn.functional.pad(self.key_mask.long().cumsum(-1), (1, 0))  # [B, Lk + 1]
        return (before[:, high] - before[:, low]).clamp(min=0)[:, None]

    def _count_by_blocks(self, device: torch.device) -> Tensor:
        counts = []
        batches = max(part.size(0) for part in (self.mask, self.key_mask, self.document_ids) if part is not None)
        matrices = batches * (1 if self.mask is None else self.mask.size(1))
        step = max(1, _COUNT_ELEMENTS // max(1, matrices * self.key_length))
        for start in range(0, self.query_length, step):
            stop = min(start + step, self.query_length)
            low, high = self.span(start, stop)
            visible = self.block(start, stop, low, high, device)
            assert visible is not None
            # A mask of size 1 along queries or keys holds for all of them
            visible = visible.expand(*visible.shape[:2], stop - start, high - low)
            counts.append(visible.sum(-1))
        if not counts:
            return torch.zeros(1, 1, 0, dtype=torch.int64, device=device)
        return torch.cat(counts, dim=-1)


@dataclass(frozen=True, eq=False)
class Cache:
    """Which keys and values of a cache belong to which sequence. A sequence's queries are its last
    tokens.

    Attributes:
        lengths: integers [B].
        page_table: integers [B, n] into pages [pages, Hk, page size, D]; None where the cache is
            [B, Hk, capacity, D].
    """

    lengths: Tensor
    page_table: Tensor | None

    def of_sequence(self, x: Tensor, b: int, length: int) -> Tensor:
        """The keys or values of sequence b, [1, Hk, length, D]: a view, or a copy of its pages."""
        if self.page_table is None:
            return x[b : b + 1, :, :length]
        pages = self.page_table[b, : -(-length // x.size(2))]
        return x.transpose(0, 1)[:, pages].flatten(1, 2)[None, :, :length]


def document_ids_from_lengths(lengths: Tensor | Sequence[int], total: int | None = None) -> Tensor:
    """Document numbers for documents packed one after another: ``attention(document_ids=)`` for a
    batch of one.

    Args:
        lengths: integers [n], a list or a tensor: how many tokens each document has. For
            FlashAttention's ``cu_seqlens`` pass ``cu_seqlens.diff()``.
        total: their sum, where it is known (it must be, to be traced by torch.compile); tokens
            beyond the last document make one of their own.

    Returns:
        int64 [1, total].

    Raises:
        ValueError: lengths of another shape, that are no integers, or below 0; a total that is no
            integer, or below their sum. Values are seen on the CPU only, and not while
            torch.compile traces.

    Example: ``document_ids_from_lengths([3, 2])`` is ``[[0, 0, 0, 1, 1]]``.
    """
    if total is not None and (isinstance(total, bool) or not isinstance(total, int | torch.SymInt)):
        raise ValueError(f"total: got {total!r}, expected the number of tokens")
    try:
        if not isinstance(lengths, Tensor):  # as_tensor would move one to torch's default device
            lengths = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"lengths: got {lengths!r}, expected integers [documents]: {error}") from None
    if lengths.dim() != 1:
        raise ValueError(f"lengths: got shape {list(lengths.shape)}, expected [documents]: one number for each")
    if lengths.numel() and (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool):
        raise ValueError(f"lengths: got {lengths.dtype}, expected integers: how many tokens each document has")
    lengths = lengths.long()
    # On a GPU the answer would have to be waited for
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool((lengths < 0).any()):
            raise ValueError(f"lengths: got {int(lengths.min())}, expected no length below 0")
        if total is not None and total < (known := int(lengths.sum())):
            raise ValueError(f"total: got {total}, expected at least {known}: the documents have so many tokens")
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if total is None and ends.numel() else total or 0
    return torch.bucketize(torch.arange(total, device=lengths.device), ends, right=True)[None]
