"""A few queries against many keys, which are split among programs so that a whole GPU reads them.

Up to three kernels: ``statistics`` of each split, with its weighted values unless rows are re-weighted; then re-weighted rows'
``weights`` of each split, where only values that weigh more than rounding are read (with LASER, something); and what the splits
``combine`` to.

The queries of all heads that share a head of keys are the FEW rows of one problem. Tensor cores take them for sixteen, and a
tile of products is held by all threads many times over, so what is done to a score is not done there: products go to memory
(``scores``, 4 bytes beside the hundreds of a key), where as many threads as there are scores make weights of them, and come
back to meet the values. One query is multiplied without tensor cores.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import forward, laser
from softfocus.backends.triton.kernels import rows as of
from softfocus.backends.triton.kernels import sight as see
from softfocus.backends.triton.kernels.pointwise import LOG2E

PARTS = tl.constexpr(4)
"""Vectors of the rows that each split leaves: largest score, sum phi 2^-shift, sum u^p, and LASER's marks."""
AT_ONCE = tl.constexpr(512)
"""Scores that a program makes weights of at once."""


@triton.jit
def _rows(problem, ROWS: tl.constexpr):
    """Positions of the rows, and their heads; a row too many has the position query_length."""
    key_heads = problem.heads // problem.group
    b, key_head = tl.program_id(1) // key_heads, tl.program_id(1) % key_heads
    places = tl.arange(0, ROWS)
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
def _part(parts, N: tl.constexpr, splits, split, FEW: tl.constexpr):
    """Where the n-th vector of a split begins in [B Hk, splits, PARTS, FEW]."""
    far = tl.full([], 0, tl.int64) + tl.program_id(1)
    return parts + ((far * splits + split) * PARTS + N) * FEW


@triton.jit
def _sums(sums, splits, split, FEW: tl.constexpr, ROWS: tl.constexpr, blocks):
    """Where the weighted values of a split lie in [B Hk, splits, FEW, Dv in a whole block], and which of the ROWS are there."""
    far = tl.full([], 0, tl.int64) + tl.program_id(1)
    rows = tl.arange(0, ROWS)[:, None]
    places = rows * blocks.value_dim + tl.arange(0, blocks.value_dim)[None, :]
    return sums + (far * splits + split) * (FEW * blocks.value_dim) + places, rows < FEW


@triton.jit
def _scores(scores, problem, keys, end, ROWS: tl.constexpr):
    """Where the scores with some keys lie in [B Hk, the rows that there are, Lk], and which of them do, before ``end``."""
    far = tl.full([], 0, tl.int64) + tl.program_id(1)
    number = problem.group * problem.query_length
    rows = tl.arange(0, ROWS)[:, None]
    there = (rows < number) & (keys[None, :] < tl.minimum(end, problem.key_length))
    return scores + (far * number + rows) * problem.key_length + keys[None, :], there


@triton.jit
def _nothing(FEW: tl.constexpr):
    """The sums before anything is seen: top, least, shift, norm."""
    zeros = tl.zeros([FEW], tl.float32)
    return zeros - float("inf"), zeros, zeros, zeros


@triton.jit
def _whole_rows(algebra, parts, splits, FEW: tl.constexpr):
    """Largest score, shift and norm of whole rows."""
    top, _least, shift, norm = _nothing(FEW)
    few = tl.arange(0, FEW)
    for split in range(splits):
        top_there = tl.load(_part(parts, 0, splits, split, FEW) + few)
        norm_there = tl.load(_part(parts, 1, splits, split, FEW) + few)
        top = tl.maximum(top, top_there)
        if algebra.shifted:
            before = shift
            shift = algebra.phi.shift(top)
            norm = norm * tl.exp2(tl.minimum(before - shift, 0.0))
            norm_there = norm_there * tl.exp2(tl.minimum(algebra.phi.shift(top_there) - shift, 0.0))
        norm += norm_there
    return top, shift, norm


@triton.jit
def statistics(problem, algebra, sight, parts, sums, scores, FEW: tl.constexpr, STAGES: tl.constexpr, blocks):
    """The first two vectors of a split; its scores, of re-weighted rows, or of others its sums."""
    splits, split = tl.num_programs(0), tl.program_id(0)
    b, h, heads, rows = _rows(problem, FEW)
    first, last = _span(problem, sight, b, blocks)
    _multiply(problem, algebra, b, h, scores, first, last, STAGES, blocks)
    tl.debug_barrier()
    count = see.count(sight, problem, b, heads, rows)
    scale = of.scale_of(problem, algebra, count, heads) * algebra.phi.score_unit
    lift = of.lift_of(problem, algebra, count, b)
    if algebra.cosine:
        norms = of.per_row(problem.query_norm, b, heads, rows, problem.query_length)
        scale = scale * of.left_of_norm(norms)
    top, least, shift, norm = _nothing(FEW)
    end = last * blocks.keys
    for start in range(first * blocks.keys, end, AT_ONCE // FEW):
        keys = start + tl.arange(0, AT_ONCE // FEW)
        places, there = _scores(scores, problem, keys, end, FEW)
        s, _seen, scaled = of.scores(
            tl.load(places, mask=there, other=0.0), problem, algebra, sight, b, heads[:, None], rows[:, None],
            keys[None, :], scale[:, None], tl.full([1, 1], 1.0, tl.float32), lift[:, None], True,
        )  # fmt: skip
        s, scaled = tl.where(there, s, float("-inf")), tl.where(there, scaled, 0.0)
        _f, top, least, shift, norm, _fade = forward.online(s, scaled, top, least, shift, norm, algebra)
        tl.store(places, s, mask=there)
    few = tl.arange(0, FEW)
    tl.store(_part(parts, 0, splits, split, FEW) + few, top)
    tl.store(_part(parts, 1, splits, split, FEW) + few, forward.tainted(norm, top, least))
    if not algebra.sharp:
        tl.debug_barrier()
        for start in range(first * blocks.keys, end, AT_ONCE // FEW):
            keys = start + tl.arange(0, AT_ONCE // FEW)
            places, there = _scores(scores, problem, keys, end, FEW)
            s = tl.load(places, mask=there, other=float("-inf"))
            tl.store(places, algebra.phi.value(s, shift[:, None], algebra), mask=there)
        tl.debug_barrier()
        _mix(problem, algebra, sight, b, h, parts, sums, scores, first, last, FEW, STAGES, blocks)


@triton.jit
def weights(problem, algebra, sight, parts, sums, scores, FEW: tl.constexpr, STAGES: tl.constexpr, blocks):
    """The last two vectors of a split and its sums, where rows are re-weighted."""
    splits, split = tl.num_programs(0), tl.program_id(0)
    b, h, heads, rows = _rows(problem, FEW)
    first, last = _span(problem, sight, b, blocks)
    count = see.count(sight, problem, b, heads, rows)
    top, shift, norm = _whole_rows(algebra, parts, splits, FEW)
    largest = algebra.phi.value(top, shift, algebra)
    floor, over_spread, tied, _peak = of.threshold(problem, algebra, count, norm, largest)
    negligible = _negligible(problem, algebra, count, tied, heads)
    sharp_norm = tl.zeros([FEW], tl.float32)
    end = last * blocks.keys
    for start in range(first * blocks.keys, end, AT_ONCE // FEW):
        keys = start + tl.arange(0, AT_ONCE // FEW)
        places, there = _scores(scores, problem, keys, end, FEW)
        s = tl.load(places, mask=there, other=float("-inf"))
        f = forward.sharpened(s, shift, floor, over_spread, tied, problem, algebra, heads[:, None])
        f = tl.where(f <= negligible[:, None], 0.0, f)
        sharp_norm += tl.sum(f, 1)
        tl.store(places, f, mask=there)
    tl.store(_part(parts, 2, splits, split, FEW) + tl.arange(0, FEW), sharp_norm)
    tl.debug_barrier()
    _mix(problem, algebra, sight, b, h, parts, sums, scores, first, last, FEW, STAGES, blocks)


@triton.jit
def _multiply(problem, algebra, b, h, scores, first, last, STAGES: tl.constexpr, blocks):
    """Scores of a split's tiles but for what is the rows': q k, or with cosine q k / |k|, of a query scaled by a power of two.
    Where the squares of some key are too large or too small to be summed, all are multiplied again with care."""
    _b, _h, heads, rows = _rows(problem, blocks.rows)
    dims = tl.arange(0, blocks.head_dim)
    places = (
        see.head_of(problem.query, b, heads)[:, None]
        + rows[:, None] * problem.query.l
        + dims[None, :] * problem.query.d
    )
    inside = (rows[:, None] < problem.query_length) & (dims[None, :] < problem.head_dim)
    query = tl.load(places, mask=inside, other=0.0)
    if algebra.cosine:
        query, _left = of.resting(query, of.per_row(problem.query_norm, b, heads, rows, problem.query_length))
    odd = tl.zeros([blocks.rows, blocks.keys], tl.int32)
    for CAREFUL in tl.static_range(2 if algebra.cosine else 1):
        end = last
        if CAREFUL:
            end = tl.where(tl.max(tl.max(odd, 1), 0) > 0, last, first)
            tl.debug_barrier()  # what the threads have stored they store again, perhaps not each its own
        for n in tl.range(first, end, num_stages=1 if CAREFUL else STAGES):
            keys = n * blocks.keys + tl.arange(0, blocks.keys)
            key = of.keys_alone(problem, b, h, keys, True, blocks)
            dots = of.product(query, tl.trans(key), blocks)
            if algebra.cosine:
                if CAREFUL:
                    norms = of.reciprocal_norm(key.to(tl.float32))
                else:
                    norms, plain = of.plain_reciprocal_norm(key)
                    # Zero vectors are plain, though their squares look like those of tiny ones: all products with them are 0
                    odd = odd | ((plain == 0)[None, :] & ((norms != 0.0)[None, :] | (dots != 0.0))).to(tl.int32)
                dots = dots * norms[None, :]
            to, there = _scores(scores, problem, keys, last * blocks.keys, blocks.rows)
            tl.store(to, dots, mask=there)


@triton.jit
def _mix(
    problem, algebra, sight, b, h, parts, sums, scores, first, last, FEW: tl.constexpr, STAGES: tl.constexpr, blocks
):  # fmt: skip
    """The sums of a split, and LASER's marks. Only where a sum is no number, or a value beyond what LASER takes as it is, the
    split is mixed again with a look at every value."""
    splits, split = tl.num_programs(0), tl.program_id(0)
    _b, _h, heads, rows = _rows(problem, blocks.rows)
    columns = tl.arange(0, blocks.value_dim)
    mixed = tl.zeros([blocks.rows, blocks.value_dim], tl.float32)
    marked = tl.zeros([blocks.rows], tl.float32) > 0.0
    flaws = tl.zeros([blocks.keys], tl.float32)
    products = tl.zeros([blocks.keys, blocks.value_dim], tl.float32)  # of one row, added up over the keys at the end
    largest = tl.zeros([blocks.keys], tl.float32)
    for CAREFUL in tl.static_range(2):
        end = last
        if CAREFUL:
            if blocks.rows == 1:
                mixed = tl.sum(products, 0)[None, :]
            bad = tl.sum(mixed - mixed) != 0.0
            if algebra.laser:
                bad = bad | (tl.max(largest, 0) > laser.HIGH)
            end = tl.where(bad, last, first)
            mixed = tl.where(bad, 0.0, mixed)
        for n in tl.range(first, end, num_stages=1 if CAREFUL else STAGES):
            keys = n * blocks.keys + tl.arange(0, blocks.keys)
            kept, there = _scores(scores, problem, keys, last * blocks.keys, blocks.rows)
            f = tl.load(kept, mask=there, other=0.0)
            if algebra.sharp:
                live = tl.max((f != 0.0).to(tl.int32), 0) > 0
                at = of.key_places(problem.value, problem, b, h, keys)[:, None] + columns[None, :] * problem.value.d
                value = tl.load(at, mask=live[:, None] & (columns[None, :] < problem.value_dim), other=0.0)
            else:
                value = of.mixed_of(problem, b, h, keys, True, blocks)
            if CAREFUL:
                value, mixed, marked, flaws = forward.inspected(
                    value, mixed, marked, flaws, f if algebra.sharp else None,
                    problem, algebra, sight, b, h, heads, rows, keys, True, blocks,
                )  # fmt: skip
            elif algebra.laser:
                x = value.to(tl.float32)
                largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
                value = laser.operand(tl.exp2(x * LOG2E), value)
            if CAREFUL or blocks.rows > 1:
                mixed += of.weighted_product(f, value, algebra, blocks)
            else:
                products += tl.trans(f) * value.to(tl.float32)
    row = tl.arange(0, blocks.rows)
    tl.store(_part(parts, 3, splits, split, FEW) + row, marked.to(tl.float32), mask=row < FEW)
    to, wanted = _sums(sums, splits, split, FEW, blocks.rows, blocks)
    tl.store(to, mixed, mask=wanted)


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
def combine(problem, algebra, sight, parts, sums, splits, made, FEW: tl.constexpr, blocks):
    """What the forward makes, from the splits in their order."""
    b, _h, heads, rows = _rows(problem, FEW)
    count = see.count(sight, problem, b, heads, rows)
    top, shift, norm = _whole_rows(algebra, parts, splits, FEW)
    few = tl.arange(0, FEW)
    sharp_norm = tl.zeros([FEW], tl.float32)
    mixed = tl.zeros([FEW, blocks.value_dim], tl.float32)
    marked = sharp_norm > 0.0
    for split in range(splits):
        places, _all = _sums(sums, splits, split, FEW, FEW, blocks)
        there = tl.load(places)
        if algebra.sharp:
            sharp_norm += tl.load(_part(parts, 2, splits, split, FEW) + few)
        elif algebra.shifted:
            shift_there = algebra.phi.shift(tl.load(_part(parts, 0, splits, split, FEW) + few))
            there = there * tl.exp2(tl.minimum(shift_there - shift, 0.0))[:, None]
        if algebra.laser:
            marked = marked | (tl.load(_part(parts, 3, splits, split, FEW) + few) > 0.0)
        mixed += there
    peak = tl.zeros_like(norm)
    if algebra.sharp:
        largest = algebra.phi.value(top, shift, algebra)
        _floor, _over_spread, _tied, peak = of.threshold(problem, algebra, count, norm, largest)
    whole = sharp_norm if algebra.sharp else norm
    forward.finish(
        problem, algebra, made, b, heads, rows, count, top, shift, norm, sharp_norm, whole, peak, mixed, marked,
        tl.zeros([16], tl.float32), blocks,
    )  # fmt: skip
