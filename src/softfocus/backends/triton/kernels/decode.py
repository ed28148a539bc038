"""A few queries against many keys, which are split among programs so that a whole GPU reads them.

Up to three kernels: ``statistics`` of each split, with its weighted values unless rows are re-weighted; then re-weighted rows'
``weights`` of each split, where only values that weigh more than rounding are read; and what the splits ``combine`` to. The
queries of all heads that share a head of keys are the rows of one tile.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import forward
from softfocus.backends.triton.kernels import rows as of
from softfocus.backends.triton.kernels import sight as see

PARTS = tl.constexpr(4)
"""Vectors of the rows that each split leaves: largest score, sum phi 2^-shift, sum u^p, and LASER's marks."""


@triton.jit
def _rows(problem, blocks):
    """Positions of the tile's rows, and their heads; a row too many has the position query_length."""
    key_heads = problem.heads // problem.group
    b, key_head = tl.program_id(1) // key_heads, tl.program_id(1) % key_heads
    places = tl.arange(0, blocks.rows)
    there = places < problem.group * problem.query_length
    rows = tl.where(there, places % problem.query_length, problem.query_length)
    heads = key_head * problem.group + tl.where(there, places // problem.query_length, 0)
    return b, key_head * problem.group, heads, rows


@triton.jit
def _span(problem, sight, b, blocks):
    """The tiles of this program's split."""
    length, offset = see.length_of(problem, b), see.offset_of(problem, sight, b)
    last = problem.query_length - 1
    start, stop = 0, length
    if sight.has_left:
        start = tl.minimum(tl.maximum(offset - sight.left, 0), length)
    if sight.has_right:
        stop = tl.maximum(tl.minimum(last + offset + sight.right + 1, length), start)
    first = start // blocks.keys
    number = (stop + blocks.keys - 1) // blocks.keys - first
    each = (number + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.minimum(tl.program_id(0) * each, number)
    return first + begin, first + tl.minimum(begin + each, number)


@triton.jit
def _part(parts, N: tl.constexpr, splits, split, blocks):
    """Where the n-th vector of a split lies in [B Hk, splits, PARTS, R]."""
    far = tl.full([], 0, tl.int64) + tl.program_id(1)
    return parts + ((far * splits + split) * PARTS + N) * blocks.rows + tl.arange(0, blocks.rows)


@triton.jit
def _sums(sums, splits, split, blocks):
    """Where the weighted values of a split lie in [B Hk, splits, R, Dv in a whole block]."""
    far = tl.full([], 0, tl.int64) + tl.program_id(1)
    places = tl.arange(0, blocks.rows)[:, None] * blocks.value_dim + tl.arange(0, blocks.value_dim)[None, :]
    return sums + (far * splits + split) * (blocks.rows * blocks.value_dim) + places


@triton.jit
def _scores(scores, problem, keys, blocks):
    """Where the scores with some keys lie in [B Hk, the rows that there are, Lk], and which of them do."""
    far = tl.full([], 0, tl.int64) + tl.program_id(1)
    number = problem.group * problem.query_length
    rows = tl.arange(0, blocks.rows)[:, None]
    there = (rows < number) & (keys[None, :] < problem.key_length)
    return scores + (far * number + rows) * problem.key_length + keys[None, :], there


@triton.jit
def _nothing(blocks):
    """The sums before anything is seen: top, shift, norm, sharp_norm, mixed, marked, flaws."""
    zeros = tl.zeros([blocks.rows], tl.float32)
    mixed = tl.zeros([blocks.rows, blocks.value_dim], tl.float32)
    return zeros - float("inf"), zeros, zeros, zeros, mixed, zeros > 0.0, tl.zeros([blocks.keys], tl.float32)


@triton.jit
def _whole_rows(algebra, parts, splits, blocks):
    """Largest score, shift and norm of whole rows."""
    top, shift, norm, _sharp_norm, _mixed, _marked, _flaws = _nothing(blocks)
    for split in range(splits):
        top_there, norm_there = (
            tl.load(_part(parts, 0, splits, split, blocks)),
            tl.load(_part(parts, 1, splits, split, blocks)),
        )
        top = tl.maximum(top, top_there)
        if algebra.shifted:
            before = shift
            shift = algebra.phi.shift(top)
            norm = norm * tl.exp2(tl.minimum(before - shift, 0.0))
            norm_there = norm_there * tl.exp2(tl.minimum(algebra.phi.shift(top_there) - shift, 0.0))
        norm += norm_there
    return top, shift, norm


@triton.jit
def statistics(problem, algebra, sight, parts, sums, scores, blocks):
    """The first two vectors of a split and its sums; or, of re-weighted rows, the two and the scores."""
    splits, split = tl.num_programs(0), tl.program_id(0)
    b, h, heads, rows = _rows(problem, blocks)
    dims = tl.arange(0, blocks.head_dim)
    places = (
        see.head_of(problem.query, b, heads)[:, None]
        + rows[:, None] * problem.query.l
        + dims[None, :] * problem.query.d
    )
    inside = (rows[:, None] < problem.query_length) & (dims[None, :] < problem.head_dim)
    query = tl.load(places, mask=inside, other=0.0)
    count = see.count(sight, problem, b, heads, rows)
    scale = of.scale_of(problem, algebra, count, heads) * algebra.phi.score_unit
    lift = of.lift_of(problem, algebra, count, b)
    if algebra.cosine:
        query, left = of.resting(query, of.per_row(problem.query_norm, b, heads, rows, problem.query_length))
        scale = scale * left
    top, shift, norm, least, mixed, marked, flaws = _nothing(blocks)
    first, last = _span(problem, sight, b, blocks)
    for n in range(first, last):
        keys = n * blocks.keys + tl.arange(0, blocks.keys)
        key, norms = of.keys_of(problem, algebra, b, h, keys, True, blocks)
        s, _seen, scaled = of.scores(
            of.product(query, tl.trans(key), blocks), problem, algebra, sight, b, heads[:, None],
            rows[:, None], keys[None, :], scale[:, None], norms[None, :], lift[:, None], True,
        )  # fmt: skip
        f, top, least, shift, norm, fade = forward.online(s, scaled, top, least, shift, norm, algebra)
        if algebra.sharp:
            to, there = _scores(scores, problem, keys, blocks)
            tl.store(to, s, mask=there)
        else:
            if algebra.shifted:
                mixed = mixed * fade[:, None]
            value = of.mixed_of(problem, b, h, keys, True, blocks)
            value, mixed, marked, flaws = forward.inspected(
                value, mixed, marked, flaws, None, problem, algebra, sight, b, h, heads, rows, keys, True, blocks
            )
            f = of.factored(f, problem, algebra, count, b)
            mixed += of.product(f.to(value.dtype), value, blocks)
    tl.store(_part(parts, 0, splits, split, blocks), top)
    tl.store(_part(parts, 1, splits, split, blocks), forward.tainted(norm, top, least))
    if not algebra.sharp:
        tl.store(_part(parts, 3, splits, split, blocks), marked.to(tl.float32))
        tl.store(_sums(sums, splits, split, blocks), mixed)


@triton.jit
def weights(problem, algebra, sight, parts, sums, scores, blocks):
    """The last two vectors of a split and its sums, where rows are re-weighted."""
    splits, split = tl.num_programs(0), tl.program_id(0)
    b, h, heads, rows = _rows(problem, blocks)
    columns = tl.arange(0, blocks.value_dim)
    count = see.count(sight, problem, b, heads, rows)
    top, shift, norm = _whole_rows(algebra, parts, splits, blocks)
    largest = algebra.phi.value(top, shift, algebra)
    floor, over_spread, tied, _peak = of.threshold(problem, algebra, count, norm, largest)
    negligible = _negligible(problem, algebra, count, tied, heads)
    _top, _shift, _norm, sharp_norm, mixed, marked, flaws = _nothing(blocks)
    first, last = _span(problem, sight, b, blocks)
    for n in range(first, last):
        keys = n * blocks.keys + tl.arange(0, blocks.keys)
        kept, there = _scores(scores, problem, keys, blocks)
        s = tl.load(kept, mask=there, other=float("-inf"))
        f = forward.sharpened(s, shift, floor, over_spread, tied, problem, algebra, heads[:, None])
        f = tl.where(f <= negligible[:, None], 0.0, f)
        sharp_norm += tl.sum(f, 1)
        live = tl.max((f != 0.0).to(tl.int32), 0) > 0
        places = of.key_places(problem.value, problem, b, h, keys)[:, None] + columns[None, :] * problem.value.d
        value = tl.load(places, mask=live[:, None] & (columns[None, :] < problem.value_dim), other=0.0)
        value, mixed, marked, flaws = forward.inspected(
            value, mixed, marked, flaws, f, problem, algebra, sight, b, h, heads, rows, keys, True, blocks
        )
        mixed += of.product(f.to(value.dtype), value, blocks)
    tl.store(_part(parts, 2, splits, split, blocks), sharp_norm)
    tl.store(_part(parts, 3, splits, split, blocks), marked.to(tl.float32))
    tl.store(_sums(sums, splits, split, blocks), mixed)


@triton.jit
def _negligible(problem, algebra, count, tied, heads):
    """What a weight u^p counts as 0 up to: half of float32's rounding of the largest over p; and all together in long rows no
    more than what the rounding of u makes of u^p. LASER takes the logarithm of what is small."""
    negligible = tl.zeros_like(count)
    if not algebra.laser:
        power = tl.maximum(negligible + of.power_of(problem, algebra, heads), 1.0)
        negligible = tl.where(tied, 0.0, 2.0**-24 / (power * tl.maximum(count / (power * power), 1.0)))
    return negligible


@triton.jit
def combine(problem, algebra, sight, parts, sums, splits, made, blocks):
    """What the forward makes, from the splits in their order."""
    b, _h, heads, rows = _rows(problem, blocks)
    count = see.count(sight, problem, b, heads, rows)
    top, shift, norm = _whole_rows(algebra, parts, splits, blocks)
    _top, _shift, _norm, sharp_norm, mixed, marked, flaws = _nothing(blocks)
    for split in range(splits):
        there = tl.load(_sums(sums, splits, split, blocks))
        if algebra.sharp:
            sharp_norm += tl.load(_part(parts, 2, splits, split, blocks))
        elif algebra.shifted:
            shift_there = algebra.phi.shift(tl.load(_part(parts, 0, splits, split, blocks)))
            there = there * tl.exp2(tl.minimum(shift_there - shift, 0.0))[:, None]
        if algebra.laser:
            marked = marked | (tl.load(_part(parts, 3, splits, split, blocks)) > 0.0)
        mixed += there
    peak = tl.zeros_like(norm)
    if algebra.sharp:
        largest = algebra.phi.value(top, shift, algebra)
        _floor, _over_spread, _tied, peak = of.threshold(problem, algebra, count, norm, largest)
    whole = sharp_norm if algebra.sharp else norm
    forward.finish(
        problem, algebra, made, b, heads, rows, count, top, shift, norm, sharp_norm, whole, peak, mixed, marked, flaws, blocks
    )  # fmt: skip
