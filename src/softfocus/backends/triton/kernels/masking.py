"""Which tiles a block visits, which keys of a tile a query sees, and how many it sees in all."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import loading

EMPTY, PARTIAL, FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How much of a tile the window, the masks and the ends of the tensors leave visible: nothing,
some, all. The closed form for a window alone (``_tile_range``) ignores rows past the end of the
block's own side, whose results are not stored. In a kernel IS_PARTIAL says which tiles a loop
visits: PARTIAL ones, or else FULL ones.
"""
TILES_AT_ONCE = tl.constexpr(256)  # unmeasured
"""Tiles whose document numbers are compared at once: two per thread of a program of 128 threads."""


@triton.jit
def query_offset(inputs, masks, b):
    """The key position of query 0 of a sequence."""
    offset = masks.offset
    if inputs.lengths is not None:
        offset = loading.sequence_length(inputs, b) - inputs.query_length
    return offset


@triton.jit
def visible(masks, inputs, b, h, q_offsets, k_offsets):
    """Whether each query sees each key: bool, of the shape to which ``q_offsets`` and ``k_offsets``
    broadcast. Rows after the last query are arbitrary.

    A tile has offsets [BLOCK_Q, 1] and [1, BLOCK_K], or [1, BLOCK_Q] and [BLOCK_K, 1].
    """
    # positions, last and query_documents are shaped like q_offsets. key_mask and key_documents are
    # shaped like k_offsets, broadcast against h if h is a vector
    positions = q_offsets + query_offset(inputs, masks, b)
    length = loading.sequence_length(inputs, b)
    last = tl.zeros_like(q_offsets) + (length - 1)
    if masks.has_right:
        last = tl.minimum(last, positions + masks.right)
    result = k_offsets <= last
    if masks.has_left:
        result = result & (k_offsets >= positions - masks.left)
    if masks.key_mask is not None:
        key_mask = tl.load(
            loading.head_pointer(masks.key_mask, b, h) + k_offsets.to(tl.int64) * masks.key_mask.stride_d,
            mask=k_offsets < length,
            other=0,
        )
        result = result & (key_mask != 0)
    if masks.document_ids is not None:
        ids_pointer = loading.head_pointer(masks.document_ids, b, h)
        query_documents = tl.load(
            ids_pointer + positions.to(tl.int64) * masks.document_ids.stride_d,
            mask=(q_offsets < inputs.query_length) & (positions >= 0),
            other=-1,
        )
        pointers = ids_pointer + k_offsets.to(tl.int64) * masks.document_ids.stride_d
        key_documents = tl.load(pointers, mask=k_offsets < length, other=-2)
        result = result & (query_documents == key_documents)
    if masks.mask is not None:
        offsets = q_offsets.to(tl.int64) * masks.mask.stride_l + k_offsets.to(tl.int64) * masks.mask.stride_d
        mask = (q_offsets < inputs.query_length) & (k_offsets < length)
        result = result & (tl.load(loading.head_pointer(masks.mask, b, h) + offsets, mask=mask, other=0) != 0)
    return result


@triton.jit
def visible_count(masks, inputs, b, h, q_offsets):
    """N_i, float32, shaped like ``q_offsets`` [BLOCK_Q]; h is a head, or the head of each row."""
    if masks.counts is not None:
        pointers = loading.head_pointer(masks.counts, b, h) + q_offsets * masks.counts.stride_l
        return tl.load(pointers, mask=q_offsets < inputs.query_length, other=0).to(tl.float32)
    # low, high [BLOCK_Q]: a row sees the keys low..high, end excluded
    positions = q_offsets + query_offset(inputs, masks, b)
    low = tl.zeros_like(q_offsets)
    high = low + loading.sequence_length(inputs, b)
    if masks.has_left:
        low = tl.maximum(low, positions - masks.left)
    if masks.has_right:
        high = tl.minimum(high, positions + masks.right + 1)
    return tl.maximum(high - low, 0).to(tl.float32)


@triton.jit
def ceil_div(x, y):
    """x / y, rounded up, for x >= 0."""
    return (x + y - 1) // y


@triton.jit
def _tile_range(
    first, last, behind, ahead, HAS_BEHIND: tl.constexpr, HAS_AHEAD: tl.constexpr, length, TILE: tl.constexpr
):
    """Tiles that a block visits where only the window masks: (start, full_start, full_stop, stop).

    Positions are on the axis of the visited tiles, 0..length, end excluded. The block has the
    positions ``first`` to ``last``. Each sees the positions from ``behind`` before its own to
    ``ahead`` after it. In a full tile every position of the block sees all of the tile. The full
    tiles are full_start..full_stop, ends excluded. The partial tiles are start..full_start and
    full_stop..stop.

    Example: a causal mask, TILE = 4, the block of queries 4 to 7. It visits the tiles 0 and 1:
    start = 0, stop = 2. Tile 0 is full: full_start = 0, full_stop = 1. For a block of keys, "sees"
    means "is seen by", and the window's sides change places (``query_tile_range``).
    """
    # Positions, ends excluded: low..high is what some position of the block sees, and
    # full_low..full_high what all of them see
    low, full_low = 0, 0
    high, full_high = length, length
    if HAS_BEHIND:
        low = tl.maximum(first - behind, 0)
        full_low = tl.maximum(last - behind, 0)
    if HAS_AHEAD:
        high = tl.minimum(last + ahead + 1, length)
        full_high = tl.minimum(first + ahead + 1, length)
    # A position before 0 would be rounded towards 0 below, not down
    high = tl.maximum(high, 0)
    full_high = tl.maximum(full_high, 0)
    # Tiles. Either range of positions may be empty, with its end before its start. The limits give
    # start <= full_start <= full_stop <= stop, so that no number of tiles is negative
    start = low // TILE
    stop = tl.maximum(ceil_div(high, TILE), start)
    full_start = ceil_div(full_low, TILE)
    full_stop = tl.maximum(full_high // TILE, full_start)
    full_start = tl.minimum(full_start, stop)
    full_stop = tl.minimum(full_stop, stop)
    return start, full_start, full_stop, stop


@triton.jit
def key_tile_range(masks, inputs, tiling, b, block):
    """The tiles of keys that a block of queries visits: see ``_tile_range``."""
    offset = query_offset(inputs, masks, b)
    first = block * tiling.BLOCK_Q + offset
    last = tl.minimum((block + 1) * tiling.BLOCK_Q, inputs.query_length) - 1 + offset
    length = loading.sequence_length(inputs, b)
    return _tile_range(first, last, masks.left, masks.right, masks.has_left, masks.has_right, length, tiling.BLOCK_K)


@triton.jit
def query_tile_range(masks, inputs, tiling, block):
    """The tiles of queries that a block of keys visits: see ``_tile_range``.

    A key at position p is seen by the queries at p - right to p + left: the window's sides change
    places. Calls with a cache, whose sequences have offsets of their own, have no backward.
    """
    first = block * tiling.BLOCK_K - masks.offset
    last = tl.minimum((block + 1) * tiling.BLOCK_K, inputs.key_length) - 1 - masks.offset
    return _tile_range(
        first, last, masks.right, masks.left, masks.has_right, masks.has_left, inputs.query_length, tiling.BLOCK_Q
    )


@triton.jit
def tile_count(lists, tile_range, b, h, block, IS_PARTIAL: tl.constexpr):
    """The number of tiles that a block visits: partial ones if IS_PARTIAL, else full ones.

    ``lists`` are the ``TileLists`` of the block's side; None where the window alone masks, and
    ``tile_range`` counts.
    """
    if lists is not None:
        counts = lists.partial_count if IS_PARTIAL else lists.full_count
        return tl.load(loading.head_pointer(counts, b, h) + block.to(tl.int64) * counts.stride_l)
    start, full_start, full_stop, stop = tile_range
    if IS_PARTIAL:
        return (full_start - start) + (stop - full_stop)
    return full_stop - full_start


@triton.jit
def tile_index(lists, tile_range, b, h, block, n, IS_PARTIAL: tl.constexpr):
    """The index of the n-th of the tiles that ``tile_count`` counts."""
    if lists is not None:
        indices = lists.partial if IS_PARTIAL else lists.full
        row_pointer = loading.head_pointer(indices, b, h) + block.to(tl.int64) * indices.stride_l
        return tl.load(row_pointer + n * indices.stride_d)
    start, full_start, full_stop, _stop = tile_range
    if IS_PARTIAL:
        before = full_start - start
        return tl.where(n < before, start + n, full_stop + n - before)
    return full_start + n


@triton.jit
def _tile_range_of_documents(inputs, masks, lowest, highest, b, q_offsets, start, stop):
    """The range of tiles, within start..stop, in which documents of these rows may occur.
    ``lowest`` and ``highest`` are as in ``survey``.

    Packed documents follow one another, so that the range is short. If they are in another order
    the range is longer, but never too short.
    """
    # positions, query_documents [BLOCK_Q]. A call with documents has no cache, so that masks.offset
    # holds for every sequence. It has at least as many keys as queries: no position is negative
    positions = tl.minimum(q_offsets, inputs.query_length - 1) + masks.offset
    ids_pointer = loading.head_pointer(masks.document_ids, b, 0)
    query_documents = tl.load(ids_pointer + positions.to(tl.int64) * masks.document_ids.stride_d)
    own_lowest, own_highest = tl.min(query_documents, 0), tl.max(query_documents, 0)
    first, end = stop, start
    for begin in range(start, stop, TILES_AT_ONCE):
        tiles = begin + tl.arange(0, TILES_AT_ONCE)  # [TILES_AT_ONCE], like mask, low, high, overlaps
        mask = tiles < stop
        low = tl.load(loading.head_pointer(lowest, b, 0) + tiles * lowest.stride_d, mask=mask, other=0)
        high = tl.load(loading.head_pointer(highest, b, 0) + tiles * highest.stride_d, mask=mask, other=0)
        overlaps = mask & (low <= own_highest) & (high >= own_lowest)
        first = tl.minimum(first, tl.min(tl.where(overlaps, tiles, stop), 0))
        end = tl.maximum(end, tl.max(tl.where(overlaps, tiles + 1, start), 0))
    return first, end


@triton.jit
def survey(inputs, masks, lowest, highest, counts, states, tiling):
    """Stores N_i in ``counts``, int32 [B, H, Lq, 1], and EMPTY, PARTIAL or FULL in ``states``, int8
    [B, H, query blocks, key blocks]. A program has a block of queries.

    The caller has set ``states`` to 0, which is EMPTY. ``lowest`` and ``highest`` [B, 1, 1, key
    blocks] are the lowest and the highest document number of each tile of keys; None without
    documents. B and H, and so b and h, are those of the masks, 1 where broadcast: a call with a
    cache has no masks, so that all sequences have one length.
    """
    block = tl.program_id(0)
    b, h = tl.program_id(1), tl.program_id(2)
    q_offsets = block * tiling.BLOCK_Q + tl.arange(0, tiling.BLOCK_Q)  # [BLOCK_Q]
    start, _full_start, _full_stop, stop = key_tile_range(masks, inputs, tiling, b, block)
    if masks.document_ids is not None:
        start, stop = _tile_range_of_documents(inputs, masks, lowest, highest, b, q_offsets, start, stop)
    count = tl.zeros([tiling.BLOCK_Q], tl.int32)
    # A head may have 2^31 tiles or more
    state_row_pointer = loading.head_pointer(states, b, h) + block.to(tl.int64) * states.stride_l
    for n in range(start, stop):
        k_offsets = n * tiling.BLOCK_K + tl.arange(0, tiling.BLOCK_K)  # [BLOCK_K]
        # tile_visible [BLOCK_Q, BLOCK_K]
        tile_visible = visible(masks, inputs, b, h, q_offsets[:, None], k_offsets[None, :])
        tile_visible = (tile_visible & (q_offsets[:, None] < inputs.query_length)).to(tl.int32)
        count += tl.sum(tile_visible, 1)
        total = tl.sum(tl.sum(tile_visible, 1), 0)
        state = tl.where(total == tiling.BLOCK_Q * tiling.BLOCK_K, FULL, tl.where(total > 0, PARTIAL, EMPTY))
        tl.store(state_row_pointer + n * states.stride_d, state.to(tl.int8))
    pointers = loading.head_pointer(counts, b, h) + q_offsets * counts.stride_l
    tl.store(pointers, count, mask=q_offsets < inputs.query_length)
