"""Who sees whom, for the kernels: which tiles to visit, what a tile shows, how many keys a row sees."""

import triton
import triton.language as tl


@triton.jit
def head_of(array, b, h):
    """Where the matrix of one head begins."""
    far = tl.full([], 0, tl.int64)  # offsets of whole heads may lie beyond 2^31
    return array.at + (far + b) * array.b + (far + h) * array.h


@triton.jit
def length_of(problem, b):
    """How many keys a sequence has."""
    length = problem.key_length
    if problem.lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(problem.lengths + b), 0), problem.key_length)
    return length


@triton.jit
def offset_of(problem, sight, b):
    """The key position of its query 0."""
    offset = sight.offset
    if problem.lengths is not None:
        offset = length_of(problem, b) - problem.query_length
    return offset


@triton.jit
def visible(sight, problem, b, h, rows, keys):
    """Whether each row sees each key, for positions of any broadcastable shapes. Keys may lie outside; what a row that does
    sees means nothing."""
    at = rows + offset_of(problem, sight, b)
    length = length_of(problem, b)
    last = tl.zeros_like(rows) + (length - 1)
    if sight.has_right:
        last = tl.minimum(last, at + sight.right)
    seen = keys <= last
    if sight.has_left:
        seen = seen & (keys >= at - sight.left)
    if sight.key_mask is not None:
        real = tl.load(head_of(sight.key_mask, b, h) + keys * sight.key_mask.d, mask=keys < length, other=0)
        seen = seen & (real != 0)
    if sight.documents is not None:
        ids = head_of(sight.documents, b, h)
        mine = tl.load(ids + at * sight.documents.d, mask=(rows < problem.query_length) & (at >= 0), other=-1)
        theirs = tl.load(ids + keys * sight.documents.d, mask=keys < length, other=-2)
        seen = seen & (mine == theirs)
    if sight.mask is not None:
        places = rows.to(tl.int64) * sight.mask.l + keys.to(tl.int64) * sight.mask.d
        inside = (rows < problem.query_length) & (keys < length)
        seen = seen & (tl.load(head_of(sight.mask, b, h) + places, mask=inside, other=0) != 0)
    return seen


@triton.jit
def count(sight, problem, b, h, rows):
    """N_i, float32."""
    if sight.counts is not None:
        places = head_of(sight.counts, b, h) + rows * sight.counts.l
        return tl.load(places, mask=rows < problem.query_length, other=0).to(tl.float32)
    at = rows + offset_of(problem, sight, b)
    low = tl.zeros_like(rows)
    high = low + length_of(problem, b)
    if sight.has_left:
        low = tl.maximum(low, at - sight.left)
    if sight.has_right:
        high = tl.minimum(high, at + sight.right + 1)
    return tl.maximum(high - low, 0).to(tl.float32)


@triton.jit
def _divide_up(x, y):
    return (x + y - 1) // y


@triton.jit
def _span(first, last, behind, ahead, HAS_BEHIND: tl.constexpr, HAS_AHEAD: tl.constexpr, length, TILE: tl.constexpr):
    """Tiles that a block meets by the window alone: (start, whole_start, whole_stop, stop).

    The block's places first to last see from ``behind`` before them to ``ahead`` after them. Whole tiles are seen
    altogether by all of them.
    """
    start, whole_start = 0, 0
    stop, whole_stop = length, length
    if HAS_BEHIND:
        start = tl.maximum(first - behind, 0)
        whole_start = tl.maximum(last - behind, 0)
    if HAS_AHEAD:
        stop = tl.minimum(last + ahead + 1, length)
        whole_stop = tl.minimum(first + ahead + 1, length)
    stop = tl.maximum(stop, 0)
    whole_stop = tl.maximum(whole_stop, 0)
    start = start // TILE
    stop = tl.maximum(_divide_up(stop, TILE), start)
    whole_start = _divide_up(whole_start, TILE)
    whole_stop = tl.maximum(whole_stop // TILE, whole_start)
    whole_start = tl.minimum(whole_start, stop)
    whole_stop = tl.minimum(whole_stop, stop)
    return start, whole_start, whole_stop, stop


@triton.jit
def key_tiles(sight, problem, blocks, b, block):
    """The tiles of keys that a block of rows meets."""
    offset = offset_of(problem, sight, b)
    first = block * blocks.rows + offset
    last = tl.minimum((block + 1) * blocks.rows, problem.query_length) - 1 + offset
    length = length_of(problem, b)
    return _span(first, last, sight.left, sight.right, sight.has_left, sight.has_right, length, blocks.keys)


@triton.jit
def row_tiles(sight, problem, blocks, block):
    """The tiles of rows that a block of keys is met by."""
    first = block * blocks.keys - sight.offset
    last = tl.minimum((block + 1) * blocks.keys, problem.key_length) - 1 - sight.offset
    return _span(
        first, last, sight.right, sight.left, sight.has_right, sight.has_left, problem.query_length, blocks.rows
    )


@triton.jit
def number(lists, span, b, h, block, CUT: tl.constexpr):
    """How many tiles there are that something cuts, or that nothing does."""
    if lists is not None:
        counts = lists.cuts if CUT else lists.wholes
        return tl.load(head_of(counts, b, h) + block * counts.l)
    start, whole_start, whole_stop, stop = span
    if CUT:
        return (whole_start - start) + (stop - whole_stop)
    return whole_stop - whole_start


@triton.jit
def tile(lists, span, b, h, block, n, CUT: tl.constexpr):
    """The n-th of them."""
    if lists is not None:
        places = lists.cut if CUT else lists.whole
        return tl.load(head_of(places, b, h) + block * places.l + n * places.d)
    start, whole_start, whole_stop, _stop = span
    if CUT:
        before = whole_start - start
        return tl.where(n < before, start + n, whole_stop + n - before)
    return whole_start + n


EMPTY, CUT, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a tile shows: nothing, something, everything."""


@triton.jit
def _meeting(problem, sight, lowest, highest, b, rows, start, stop):
    """Of the tiles from start to stop, those from the first to the last in which documents of the rows may occur.

    Packed documents stand one after another, so that these are few; in any other order they are more, never too few.
    """
    last = tl.minimum(rows, problem.query_length - 1) + sight.offset
    mine = tl.load(head_of(sight.documents, b, 0) + last * sight.documents.d)
    least, most = tl.min(mine, 0), tl.max(mine, 0)
    first, end = stop, start
    for begin in range(start, stop, MET_AT_ONCE):
        tiles = begin + tl.arange(0, MET_AT_ONCE)
        there = tiles < stop
        low = tl.load(head_of(lowest, b, 0) + tiles * lowest.d, mask=there, other=0)
        high = tl.load(head_of(highest, b, 0) + tiles * highest.d, mask=there, other=0)
        met = there & (low <= most) & (high >= least)
        first = tl.minimum(first, tl.min(tl.where(met, tiles, stop), 0))
        end = tl.maximum(end, tl.max(tl.where(met, tiles + 1, start), 0))
    return first, end


MET_AT_ONCE = tl.constexpr(256)


@triton.jit
def survey(problem, sight, lowest, highest, counts, states, blocks):
    """N_i int32 [B, H, Lq, 1], and what each tile shows, int8 [B, H, row blocks, key blocks]; the latter cleared before.

    ``lowest`` and ``highest`` [B, 1, 1, key blocks] are the document numbers in a tile of keys; None without documents.
    """
    block = tl.program_id(0)
    b, h = tl.program_id(1), tl.program_id(2)
    rows = block * blocks.rows + tl.arange(0, blocks.rows)
    start, _whole_start, _whole_stop, stop = key_tiles(sight, problem, blocks, b, block)
    if sight.documents is not None:
        start, stop = _meeting(problem, sight, lowest, highest, b, rows, start, stop)
    number_seen = tl.zeros([blocks.rows], tl.int32)
    for n in range(start, stop):
        keys = n * blocks.keys + tl.arange(0, blocks.keys)
        seen = visible(sight, problem, b, h, rows[:, None], keys[None, :])
        seen = (seen & (rows[:, None] < problem.query_length)).to(tl.int32)
        number_seen += tl.sum(seen, 1)
        total = tl.sum(tl.sum(seen, 1), 0)
        state = tl.where(total == blocks.rows * blocks.keys, WHOLE, tl.where(total > 0, CUT, EMPTY))
        tl.store(head_of(states, b, h) + block * states.l + n * states.d, state.to(tl.int8))
    tl.store(head_of(counts, b, h) + rows * counts.l, number_seen, mask=rows < problem.query_length)
