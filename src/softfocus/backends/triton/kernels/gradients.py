"""The backward kernels: gradients of the queries row block by row block, then of keys and values key block by key block.

None needs an atomic: each program owns what it writes. In re-weighted rows dL/ds holds the mean of g over the whole row,
which is known only after a sweep: the first kernel sums what it multiplies apart, and leaves it to the second. LASER's
have an EXACT variant for the rows that the forward marked, which the others leave out: it writes these rows of dL/dQ, and
adds to the rest.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import dropout, laser
from softfocus.backends.triton.kernels import rows as of
from softfocus.backends.triton.kernels import sight as see
from softfocus.backends.triton.kernels.pointwise import LN2, log2

PASSED = 9
"""Vectors of the rows that the first kernel leaves to the others: o mean(g); c_i / |q| and the lift in the scores' unit; of Row
shift, floor, spread, weigh, steep (over the unit) and inner.

As such, since along the second dimension of a tile a vector takes as many registers as a row of it.
"""


@triton.jit
def _done_here(made, problem, algebra, b, h, rows, EXACT: tl.constexpr):
    """Which rows this kernel does."""
    mine = rows < problem.query_length
    if algebra.laser:
        mark = tl.load(of.saved_row(made.saved, b, h, rows, 6), mask=mine, other=0.0)
        mine = mine & ((mark > 0.0) == EXACT)
    return mine


@triton.jit
def _above(grad, made, problem, algebra, b, h, rows, mine, blocks):
    """dL/d(A V) [R, Dv], or LASER's dL/d(A e^V); the latter 0 in rows that are not done here."""
    above = of.outputs_of(grad, problem, b, h, rows, blocks)
    if algebra.laser:
        rest = of.outputs_of(made.rest, problem, b, h, rows, blocks).to(tl.float32)  # e^-out
        known = (rest == rest) & mine[:, None]  # an output that is NaN by rule passes nothing on
        above = laser.operand(tl.where(known, above.to(tl.float32) * rest, 0.0), above)
    return above


@triton.jit
def _inner(grad, made, problem, algebra, b, h, rows, blocks):
    """D."""
    above = of.outputs_of(grad, problem, b, h, rows, blocks).to(tl.float32)
    mixed = of.outputs_of(made.out, problem, b, h, rows, blocks).to(tl.float32)
    if algebra.laser:
        return tl.sum(tl.where(mixed == mixed, above, 0.0), 1)
    if made.rest is not None:
        mixed += of.outputs_of(made.rest, problem, b, h, rows, blocks).to(tl.float32) * of.step(mixed, algebra)
    return tl.sum(above * mixed, 1)


@triton.jit
def _passed(passed, algebra, b, h, rows, mine):
    """What the first kernel left, 0 in rows that are not done here: (ground, scale, lift, Row).

    ``scale`` is in the scores' unit, over which ``steep`` is taken: the two are not multiplied, since over a tiny query their
    product may be no number.
    """
    nothing = tl.zeros(rows.shape, tl.float32)
    ground, lift, shift, floor, spread, inner = nothing, nothing, nothing, nothing, nothing, nothing
    places = of.saved_row(passed, b, h, rows, 0)
    scale = tl.load(places + passed.b, mask=mine, other=0.0)
    weigh = tl.load(places + 6 * passed.b, mask=mine, other=0.0)
    steep = tl.load(places + 7 * passed.b, mask=mine, other=0.0)
    if algebra.score_bias != "0":
        lift = tl.load(places + 2 * passed.b, mask=mine, other=0.0)
    if algebra.shifted:
        # Of rows not done here e^bias may be no number: they weigh 2^-inf, but for softplus, which cannot grow so
        none: tl.constexpr = float("inf") if algebra.phi.unit == 1.0 else 0.0
        shift = tl.load(places + 3 * passed.b, mask=mine, other=none)
    if algebra.sharp:
        ground = tl.load(places, mask=mine, other=0.0)
        floor = tl.load(places + 4 * passed.b, mask=mine, other=0.0)
        spread = tl.load(places + 5 * passed.b, mask=mine, other=0.0)
    if algebra.normaliser == "l1":
        inner = tl.load(places + 8 * passed.b, mask=mine, other=0.0)
    return ground, scale, lift, of.Row(shift, floor, spread, weigh, steep, inner)


@triton.jit
def _pass_on(passed, ground, scale, lift, row, steep, b, h, rows, inside):
    places = of.saved_row(passed, b, h, rows, 0)
    tl.store(places, ground, mask=inside)
    tl.store(places + passed.b, scale, mask=inside)
    tl.store(places + 2 * passed.b, lift, mask=inside)
    tl.store(places + 3 * passed.b, row.shift, mask=inside)
    tl.store(places + 4 * passed.b, row.floor, mask=inside)
    tl.store(places + 5 * passed.b, row.spread, mask=inside)
    tl.store(places + 6 * passed.b, row.weigh, mask=inside)
    tl.store(places + 7 * passed.b, steep, mask=inside)
    tl.store(places + 8 * passed.b, row.inner, mask=inside)


@triton.jit
def query_gradients(
    problem, algebra, sight, grad, made, passed, to, scale_grad, power_grad, EXACT: tl.constexpr, blocks
):  # fmt: skip
    """dL/dQ; to ``passed`` what the others need of the rows; where wanted, each row's share for head_scale and power."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // problem.heads, tl.program_id(1) % problem.heads
    rows = block * blocks.rows + tl.arange(0, blocks.rows)
    dims = tl.arange(0, blocks.head_dim)
    mine = _done_here(made, problem, algebra, b, h, rows, EXACT)
    if EXACT:
        if tl.load(made.marked_heads + tl.program_id(1)) == 0:
            return
        if tl.max(mine.to(tl.int32)) == 0:
            return
    query = of.queries_of(problem, b, h, rows, blocks)
    above = _above(grad, made, problem, algebra, b, h, rows, mine, blocks)
    inner = tl.where(mine, _inner(grad, made, problem, algebra, b, h, rows, blocks), 0.0)
    count = see.count(sight, problem, b, h, rows)
    row = of.row_of(made.saved, problem, algebra, count, b, h, rows, inner)
    tile_row = of.along(row, 1)
    if EXACT:
        marked = laser.along(laser.marked_row(made.saved, problem, algebra, count, b, h, rows, inner), 1)
    scale, lift = of.scale_of(problem, algebra, count, h), of.lift_of(problem, algebra, count, b)
    norm = scale
    if algebra.cosine:
        norm = of.per_row(problem.query_norm, b, h, rows, problem.query_length)
    query, rest = of.score_operand(query, norm, scale * algebra.phi.score_unit, problem, algebra)
    if problem.unit_key is not None and not EXACT:
        single, length, width = query.to(tl.float32), problem.query_length, problem.head_dim
        of.store_matrix(problem.unit_query, see.head_of(problem.unit_query, b, h), rows, dims, length, width, single)
        of.store_matrix(problem.slope_query, see.head_of(problem.slope_query, b, h), rows, dims, length, width, single)
    steep = row.steep
    if EXACT:
        steep = tl.full(scale.shape, 1.0, tl.float32)
    span = see.key_tiles(sight, problem, blocks, b, block)

    moving = tl.zeros([blocks.rows, blocks.head_dim], tl.float32)  # sum_j g slope k
    resting = tl.zeros([blocks.rows, blocks.head_dim], tl.float32)  # sum_j slope k
    total = tl.zeros([blocks.rows], tl.float32)  # sum_j g
    log_total = tl.zeros([blocks.rows], tl.float32)  # sum_j A (dL/dA - D) log u
    for WHOLE in tl.static_range(2):
        for n in range(see.number(sight.tiles, span, b, h, block, WHOLE == 0)):
            keys = of.keys_met(sight, span, b, h, block, n, WHOLE == 0, blocks)
            key, norms, s, seen, _scaled = of.tile_of_keys(
                query, problem, algebra, sight, b, h, rows, keys, rest, lift, WHOLE == 0, blocks
            )
            if EXACT:
                log_weight, log_u = laser.log_weights(s, marked, problem, algebra, h)
                terms, _none = laser.terms(
                    log_weight, tl.zeros_like(s), None, grad, made, problem, b, h, rows, mine, keys, 0, blocks
                )
                moved, g, slope = laser.slopes(s, terms, marked, problem, algebra, h)
                log_u = tl.where(log_u > float("-inf"), log_u, 0.0) / LN2
            else:
                value = of.mixed_of(problem, b, h, keys, WHOLE == 0, blocks)
                weight_grad = of.product(above, tl.trans(value), blocks)
                if problem.seed is not None:
                    first = of.first_met(sight, span, b, h, block, n, WHOLE == 0, blocks)
                    kept = dropout.kept(problem, b, h, rows, first, blocks.keys, 1)
                    weight_grad = tl.where(kept, weight_grad * problem.growth, 0.0)
                moved, g, slope, u = of.slopes(s, weight_grad, tile_row, problem, algebra, h)
                moved = moved * (weight_grad - tile_row.inner)
                log_u = log2(tl.where(u > 0.0, u, 1.0), algebra.terms)
            if WHOLE == 0:
                g = tl.where(seen, g, 0.0)  # of what is unseen the slope is 0
            power = 1.0  # what float16 might not hold is multiplied outside
            if problem.unit_key is not None:
                key = of.keys_of_slopes(problem, b, h, keys, WHOLE == 0, blocks)
            elif algebra.cosine:
                if algebra.narrow:
                    power = of.largest_power(norms)
                    norms = norms / power
                slope = slope * norms[None, :]
                if WHOLE == 0:
                    slope = tl.where(seen, slope, 0.0)
            if WHOLE == 0:
                key = of.finite(key)
            moved_keys = of.slope_product(g * slope, key, algebra, blocks)
            if algebra.narrow:
                moved_keys *= power
            moving += moved_keys
            if algebra.sharp:
                rested_keys = of.slope_product(slope, key, algebra, blocks)
                if algebra.narrow:
                    rested_keys *= power
                resting += rested_keys
                total += tl.sum(g, 1)
                if power_grad is not None:
                    moved = moved * log_u
                    if WHOLE == 0:
                        moved = tl.where(seen, moved, 0.0)
                    log_total += tl.sum(moved, 1)

    ground = tl.zeros_like(total)
    if algebra.sharp:
        free = (count <= of.FREE_ROWS) | (row.spread < 0.0)
        ground = tl.where(free, 0.0, total / tl.maximum(count, 1.0))
        moving = moving - ground[:, None] * resting
    moving = moving * steep[:, None]
    inside = rows < problem.query_length
    if EXACT:
        inside = mine
    there = inside & (count > 0.0)
    in_unit = (
        scale * algebra.phi.score_unit
    )  # as the forward multiplied it: another order would round the scores otherwise
    if algebra.cosine:
        in_unit = in_unit * norm
    # Stored before the queries are read again: a load does not move above a store, and there are registers for it only now
    _pass_on(passed, ground, in_unit, lift, row, steep / algebra.phi.score_unit, b, h, rows, inside)
    if power_grad is not None:
        share = tl.where(there & (row.spread > 0.0), log_total * LN2, 0.0)
        tl.store(power_grad + tl.program_id(1) * problem.query_length + rows, share, mask=inside)
    if algebra.cosine or scale_grad is not None:
        places = see.head_of(problem.query, b, h) + rows[:, None] * problem.query.l + dims[None, :] * problem.query.d
        unit = of.again(places, (rows[:, None] < problem.query_length) & (dims[None, :] < problem.head_dim))
        if algebra.cosine:
            unit, left = of.resting(unit, norm)
            unit = unit.to(tl.float32) * left[:, None]
        along = tl.sum(moving * unit.to(tl.float32), 1)
        if scale_grad is not None:
            along_scale = along * of.length_scale_of(problem, algebra, count)
            to_scale = scale_grad + tl.program_id(1) * problem.query_length + rows
            tl.store(to_scale, tl.where(there, along_scale, 0.0), mask=inside)
        if algebra.cosine:
            moving = (moving - along[:, None] * unit) * norm[:, None]
    moving = tl.where(there[:, None], moving * scale[:, None], 0.0)
    tl.store(
        see.head_of(to, b, h) + rows[:, None] * to.l + dims[None, :] * to.d,
        moving.to(to.at.dtype.element_ty),
        mask=inside[:, None] & (dims[None, :] < problem.head_dim),
    )


@triton.jit
def _put(places, x, mask, ADD: tl.constexpr):
    """Store, or add to what is there."""
    if ADD:
        x += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, x.to(places.dtype.element_ty), mask=mask)


@triton.jit
def key_gradients(
    problem, algebra, sight, grad, made, passed, key_to, value_to, EXACT: tl.constexpr, blocks
):  # fmt: skip
    """dL/dK and dL/dV: a program has a block of keys of a head of keys, and sums over the heads of queries that share it."""
    block = tl.program_id(0)
    key_heads = problem.heads // problem.group
    b, key_head = tl.program_id(1) // key_heads, tl.program_id(1) % key_heads
    if EXACT:
        heads_marked = 0
        for n_head in range(problem.group):
            heads_marked += tl.load(made.marked_heads + b * problem.heads + key_head * problem.group + n_head)
        if heads_marked == 0:
            return
    keys = block * blocks.keys + tl.arange(0, blocks.keys)
    dims, columns = tl.arange(0, blocks.head_dim), tl.arange(0, blocks.value_dim)
    key, norms = of.keys_of(problem, algebra, b, key_head * problem.group, keys, True, blocks)
    value = of.mixed_of(problem, b, key_head * problem.group, keys, True, blocks)
    rest = norms
    if algebra.cosine and problem.unit_key is None:
        key, rest = of.resting(key, norms)
    span = see.row_tiles(sight, problem, blocks, block)
    key_sum = tl.zeros([blocks.keys, blocks.head_dim], tl.float32)
    value_sum = tl.zeros([blocks.keys, blocks.value_dim], tl.float32)
    for n_head in range(problem.group):
        h = key_head * problem.group + n_head
        for WHOLE in tl.static_range(2):
            for n in range(see.number(sight.tiles_of_keys, span, b, h, block, WHOLE == 0)):
                start = see.tile(sight.tiles_of_keys, span, b, h, block, n, WHOLE == 0) * blocks.rows
                rows = start + tl.arange(0, blocks.rows)
                mine = _done_here(made, problem, algebra, b, h, rows, EXACT)
                query, moved_query = of.queries_met(problem, b, h, rows, blocks)
                above = _above(grad, made, problem, algebra, b, h, rows, mine, blocks)
                ground, scale, lift, row = _passed(passed, algebra, b, h, rows, mine)
                s, seen, _scaled = of.scores(
                    of.product(key, tl.trans(query), blocks), problem, algebra, sight, b, h,
                    rows[None, :], keys[:, None], scale[None, :], rest[:, None], lift[None, :], WHOLE == 0,
                )  # fmt: skip
                if EXACT:
                    count = see.count(sight, problem, b, h, rows)
                    marked = laser.along(
                        laser.marked_row(made.saved, problem, algebra, count, b, h, rows, row.inner), 0
                    )
                    log_weight, _log_u = laser.log_weights(s, marked, problem, algebra, h)
                    log_weight = tl.where(seen, log_weight, float("-inf"))
                    terms, value_sum = laser.terms(
                        log_weight, tl.zeros_like(s), value_sum, grad, made, problem, b, h, rows, mine, keys, 1, blocks
                    )
                    weight, g, slope = laser.slopes(s, terms, marked, problem, algebra, h)
                else:
                    weight_grad = of.product(value, tl.trans(above), blocks)
                    if problem.seed is not None:
                        kept = dropout.kept(problem, b, h, rows, block * blocks.keys, blocks.keys, 0)
                        weight_grad = tl.where(kept, weight_grad * problem.growth, 0.0)
                    weight, g, slope, _u = of.slopes(s, weight_grad, of.along(row, 0), problem, algebra, h)
                    if problem.seed is not None:
                        weight = tl.where(kept, weight * problem.growth, 0.0)
                if algebra.sharp:
                    g = g - ground[None, :]
                steep = row.steep
                if problem.unit_key is not None:  # whose queries hold it
                    scale = tl.full(scale.shape, 1.0, tl.float32)
                if algebra.narrow:  # what float16 might not hold is multiplied outside
                    of_steep, of_scale = of.largest_power(steep), of.largest_power(scale)
                    steep, scale = steep / of_steep, scale / of_scale
                g = (g * steep[None, :]) * slope * scale[None, :]
                if WHOLE == 0:
                    weight, g = tl.where(seen, weight, 0.0), tl.where(seen, g, 0.0)
                    moved_query = of.finite(moved_query)
                    above = tl.where(row.weigh[:, None] == 0.0, 0.0, above)
                if not EXACT:
                    value_sum += of.weighted_product(weight, above, algebra, blocks)
                moved_queries = of.slope_product(g, moved_query, algebra, blocks)
                if algebra.narrow:
                    moved_queries = moved_queries * of_steep * of_scale
                key_sum += moved_queries
    inside = keys < problem.key_length
    key_inside = inside[:, None] & (dims[None, :] < problem.head_dim)
    value_inside = inside[:, None] & (columns[None, :] < problem.value_dim)
    if algebra.laser and not EXACT:
        places = (
            of.key_places(problem.mixed, problem, b, key_head * problem.group, keys)[:, None]
            + columns * problem.mixed.d
        )
        value_sum = value_sum * of.again(places, value_inside).to(tl.float32)
    _put(
        see.head_of(value_to, b, key_head) + keys[:, None] * value_to.l + columns[None, :] * value_to.d,
        value_sum,
        value_inside,
        EXACT,
    )
    if algebra.cosine:  # after the store, as with the queries
        places = of.key_places(problem.key, problem, b, key_head * problem.group, keys)[:, None] + dims * problem.key.d
        # A key that is no number has gradient 0 where nobody sees it; where somebody does, its sum is NaN already
        norms = tl.where(norms == norms, norms, 0.0)
        key, rest = of.resting(of.finite(of.again(places, key_inside)), norms)
        unit = key.to(tl.float32) * rest[:, None]
        key_sum = (key_sum - tl.sum(key_sum * unit, 1)[:, None] * unit) * norms[:, None]
    _put(
        see.head_of(key_to, b, key_head) + keys[:, None] * key_to.l + dims[None, :] * key_to.d,
        key_sum,
        key_inside,
        EXACT,
    )


@triton.jit
def bias_gradients(
    problem, algebra, sight, grad, made, passed, to, heads, ALL_BATCH: tl.constexpr, ALL_HEADS: tl.constexpr,
    ALL_ROWS: tl.constexpr, ALL_KEYS: tl.constexpr, EXACT: tl.constexpr, blocks,
):  # fmt: skip
    """dL/d bias: a program has a tile of what the bias holds, and sums over all that it is broadcast to, in a fixed order."""
    rows_of, keys_of = tl.arange(0, blocks.rows), tl.arange(0, blocks.keys)
    total = tl.zeros([blocks.rows, blocks.keys], tl.float32)
    own_b, own_h = tl.program_id(2) // heads, tl.program_id(2) % heads
    first_b, last_b = own_b, own_b + 1
    if ALL_BATCH:
        first_b, last_b = own_b * 0, own_b * 0 + problem.batch
    first_h, last_h = own_h, own_h + 1
    if ALL_HEADS:
        first_h, last_h = own_h * 0, own_h * 0 + problem.heads
    first_row, last_row = tl.program_id(0), tl.program_id(0) + 1
    if ALL_ROWS:
        last_row = first_row + (problem.query_length + blocks.rows - 1) // blocks.rows
    for b in range(first_b, last_b):
        for h in range(first_h, last_h):
            for row_block in range(first_row, last_row):
                rows = row_block * blocks.rows + rows_of
                mine = _done_here(made, problem, algebra, b, h, rows, EXACT)
                query = of.queries_of(problem, b, h, rows, blocks)
                above = _above(grad, made, problem, algebra, b, h, rows, mine, blocks)
                ground, _scale, lift, row = _passed(passed, algebra, b, h, rows, mine)
                count = see.count(sight, problem, b, h, rows)
                scale = of.scale_of(problem, algebra, count, h) * algebra.phi.score_unit
                norm = scale
                if EXACT:
                    marked = laser.along(
                        laser.marked_row(made.saved, problem, algebra, count, b, h, rows, row.inner), 1
                    )
                if algebra.cosine:
                    norm = of.per_row(problem.query_norm, b, h, rows, problem.query_length)
                query, rest = of.score_operand(query, norm, scale, problem, algebra)
                start, _whole_start, _whole_stop, stop = see.key_tiles(sight, problem, blocks, b, row_block)
                if EXACT:
                    stop = tl.where(tl.max(mine.to(tl.int32)) > 0, stop, start)
                if not ALL_KEYS:
                    start = tl.maximum(start, tl.program_id(1))
                    stop = tl.minimum(stop, tl.program_id(1) + 1)
                for key_block in range(start, stop):
                    keys = key_block * blocks.keys + keys_of
                    key, norms = of.keys_of(problem, algebra, b, h, keys, True, blocks)
                    s, seen, _scaled = of.scores(
                        of.product(query, tl.trans(key), blocks), problem, algebra, sight, b, h,
                        rows[:, None], keys[None, :], rest[:, None], norms[None, :], lift[:, None], True,
                    )  # fmt: skip
                    if EXACT:
                        log_weight, _log_u = laser.log_weights(s, marked, problem, algebra, h)
                        terms, _none = laser.terms(
                            log_weight, tl.zeros_like(s), None, grad, made, problem, b, h, rows, mine, keys, 0, blocks
                        )
                        _weight, g, slope = laser.slopes(s, terms, marked, problem, algebra, h)
                    else:
                        value = of.mixed_of(problem, b, h, keys, True, blocks)
                        weight_grad = of.product(above, tl.trans(value), blocks)
                        if problem.seed is not None:
                            kept = dropout.kept(problem, b, h, rows, key_block * blocks.keys, blocks.keys, 1)
                            weight_grad = tl.where(kept, weight_grad * problem.growth, 0.0)
                        _weight, g, slope, _u = of.slopes(s, weight_grad, of.along(row, 1), problem, algebra, h)
                    total += tl.where(
                        seen & mine[:, None],
                        (g - ground[:, None]) * slope * row.steep[:, None] * algebra.phi.score_unit,
                        0.0,
                    )
    rows = tl.program_id(0) * blocks.rows + rows_of
    keys = tl.program_id(1) * blocks.keys + keys_of
    start = see.head_of(to, own_b, own_h)
    if not (ALL_ROWS or ALL_KEYS):
        rows = rows.to(tl.int64)  # one head's bias may hold more than 2^31 numbers
    if ALL_ROWS and ALL_KEYS:
        _put(start, tl.sum(tl.sum(total, 1), 0), True, EXACT)
    elif ALL_ROWS:
        _put(start + keys * to.d, tl.sum(total, 0), keys < problem.key_length, EXACT)
    elif ALL_KEYS:
        _put(start + rows * to.l, tl.sum(total, 1), rows < problem.query_length, EXACT)
    else:
        inside = (rows[:, None] < problem.query_length) & (keys[None, :] < problem.key_length)
        _put(start + rows[:, None] * to.l + keys[None, :] * to.d, total, inside, EXACT)
