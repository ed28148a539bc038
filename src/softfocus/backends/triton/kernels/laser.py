"""LASER: log(A e^V), column by column (arXiv 2411.03493).

Values within HIGH are exponentiated as they are, so that nothing that a row cannot see touches it, and the kernels multiply
e^V in place of V. A row that sees a higher value, or whose sum comes out so small that a weight too small for a float might
count, is marked; ``exact`` kernels do marked rows again in logarithms, with a running maximum for each row and column.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import rows as of
from softfocus.backends.triton.kernels import sight as see
from softfocus.backends.triton.kernels.pointwise import LOG2E

HIGH = tl.constexpr(30.0)
LOW = tl.constexpr(1e-12)
ALONE = tl.constexpr(2.0)
"""The mark of a row of which one key has all the weight; 1 of others."""


@triton.jit
def operand(x, like):
    """x as the products take it beside data like ``like``: float16 could not hold it."""
    if like.dtype == tl.bfloat16:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def exponential(value):
    """e^V; of what is higher than HIGH, some number, and NaN of what is not finite."""
    x = value.to(tl.float32)
    x = tl.minimum(x + (x - x), HIGH, propagate_nan=tl.PropagateNan.ALL)
    return operand(tl.exp2(x * LOG2E), value)


@triton.jit
def flaws_of(value, problem, b, h, keys):
    """Of the keys of a tile: ``flawed``."""
    if problem.flaws is not None:
        flaws = of.per_row(problem.flaws, b, h // problem.group, keys, problem.key_length)
    else:
        flaws = flawed(value.to(tl.float32))
    return flaws


@triton.jit
def flawed(x):
    """Of each row of values: 1 where one is beyond HIGH, and 2 more where one is not finite."""
    bad = tl.max(((tl.abs(x) < float("inf")) == 0).to(tl.int32), 1)
    high = tl.max((of.finite(x) > HIGH).to(tl.int32), 1)
    return (high + 2 * bad).to(tl.float32)


@triton.jit
def exponentials(
    value, to, flaws, heads, length, width, FINITE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """e^V, and ``flaws_of`` its keys. FINITE, for the backward: 1 in place of what is NaN; there are no flaws then."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    x = of.matrix(value, see.head_of(value, b, h), rows, columns, length, width)
    if FINITE:
        x = of.finite(x)
    else:
        tl.store(see.head_of(flaws, b, h) + rows * flaws.l, flawed(x.to(tl.float32)), mask=rows < length)
    places = see.head_of(to, b, h) + rows[:, None] * to.l + columns[None, :] * to.d
    tl.store(places, exponential(x), mask=(rows[:, None] < length) & (columns[None, :] < width))


class Marked(NamedTuple):
    """What the exact kernels know of their rows: vectors, shaped so that they broadcast to a tile.

    Attributes:
        shift, norm: of phi: sum_j phi(s_ij) 2^-shift, in its unit.
        floor, over_spread, tied: of re-weighted rows, as ``threshold`` gives them; sharp_norm: sum u^p.
        inner: D_i = sum_j A_ij dL/dA_ij.
        alone: whether one key has all the weight, whatever its score: the backward's.
    """

    shift: tl.tensor
    norm: tl.tensor
    floor: tl.tensor
    over_spread: tl.tensor
    tied: tl.tensor
    sharp_norm: tl.tensor
    inner: tl.tensor
    alone: tl.tensor


@triton.jit
def marked_row(saved, problem, algebra, count, b, h, rows, inner):
    """From what the forward left of the rows; ``inner`` is D."""
    shift, largest, norm, sharp_norm = of.left_of(saved, problem, algebra, b, h, rows)
    norm = tl.where(norm == 0.0, 1.0, norm)
    sharp_norm = tl.where(sharp_norm == 0.0, 1.0, sharp_norm)
    floor, over_spread, tied, _peak = of.threshold(problem, algebra, count, norm, largest)
    mark = tl.load(of.saved_row(saved, b, h, rows, 6), mask=rows < problem.query_length, other=0.0)
    alone = mark == ALONE
    return Marked(shift, norm, floor, over_spread, tied, sharp_norm, inner, alone)


@triton.jit
def along(row, AXIS: tl.constexpr):
    """The vectors along one axis of a tile."""
    return Marked(
        tl.expand_dims(row.shift, AXIS), tl.expand_dims(row.norm, AXIS), tl.expand_dims(row.floor, AXIS),
        tl.expand_dims(row.over_spread, AXIS), tl.expand_dims(row.tied, AXIS), tl.expand_dims(row.sharp_norm, AXIS),
        tl.expand_dims(row.inner, AXIS), tl.expand_dims(row.alone, AXIS),
    )  # fmt: skip


@triton.jit
def log_weights(s, row, problem, algebra, h):
    """log A and log u of a tile, -inf where they are 0; not by way of A and u, which may be too small for a float."""
    f = algebra.phi.value(s, row.shift, algebra)
    log_f = algebra.phi.log(s, row.shift, f)
    result = log_f - tl.log(row.norm)
    log_u = result
    if algebra.sharp:
        u = of.excess(f, row.floor, row.over_spread, algebra)
        log_u = tl.where(u > 0.0, tl.log(tl.where(u > 0.0, u, 1.0)), float("-inf"))
        log_u = tl.where(row.floor == 0.0, log_f + tl.log(row.over_spread), log_u)
        sharp = of.power_of(problem, algebra, h) * log_u - tl.log(row.sharp_norm)
        result = tl.where(row.tied, result, sharp)
    return result, log_u


@triton.jit
def slopes(s, total, row, problem, algebra, h):
    """Of a tile and A dL/dA, which is a number where A is too small for one and dL/dA too large: what ``rows.slopes`` gives,
    but A dL/dA - A D in place of A."""
    f = algebra.phi.value(s, row.shift, algebra)
    slope = algebra.phi.slope(s, row.shift, algebra) * algebra.phi.unit
    weight = f / row.norm
    loose = f
    power = 1.0
    small = 2.0**-100
    if algebra.phi.vanishes:  # without a floor; with one u is 0, or large beside the rounding of phi
        small = tl.where(row.floor == 0.0, 2.0**-60, 0.0)
    if algebra.sharp:
        u = of.excess(f, row.floor, row.over_spread, algebra)
        weight = tl.where(row.tied, weight, of.raised(u, problem, algebra, h, 0) / row.sharp_norm)
        loose = tl.where(row.tied, f, tl.maximum(f - row.floor, 0.0))
        power = tl.where(row.tied, 1.0, of.power_of(problem, algebra, h))
    rest = tl.where(row.alone, 0.0, total - weight * row.inner)
    gone = loose <= small
    g = rest * power / tl.where(gone, 1.0, loose)
    slope = tl.where(gone & (rest != 0.0), algebra.phi.rate(s), slope)
    return rest, g, slope


@triton.jit
def terms(log_weight, total, key_sum, grad, made, problem, b, h, rows, mine, keys, ROWS: tl.constexpr, blocks):
    """sum_c A dL/dA of a tile: dL/dO e^(log A + v - out), added to ``total``; summed over the rows instead, dL/dV.

    Args:
        total: [R, K], or [K, R].
        key_sum: [K, Dv], or None.
        mine: which rows count.
        ROWS: the axis of the rows in the tile, 0 or 1.
    """
    columns = tl.arange(0, blocks.value_dim)
    for c in range(problem.value_dim):
        above = _column(grad, b, h, rows, mine, c)
        mixed = _column(made.out, b, h, rows, mine, c)
        more = _column(made.rest, b, h, rows, mine, c)
        above = tl.where(mixed == mixed, above, 0.0)  # what is NaN by rule passes nothing on
        value = of.finite(_column(problem.value, b, h // problem.group, keys, keys < problem.key_length, c))
        # Of large numbers the difference is exact, the sum is not
        apart = tl.expand_dims(value, ROWS) - tl.expand_dims(tl.where(mixed == mixed, mixed, 0.0), 1 - ROWS)
        exponent = log_weight + (apart - tl.expand_dims(tl.where(mixed == mixed, more, 0.0), 1 - ROWS))
        term = tl.expand_dims(above, 1 - ROWS) * tl.exp(tl.minimum(exponent, 80.0))
        total += term
        if key_sum is not None:
            key_sum += tl.where(columns[None, :] == c, tl.sum(term, ROWS)[:, None], 0.0)
    second = total  # Triton 3.6 returns no None
    if key_sum is not None:
        second = key_sum
    return total, second


@triton.jit
def _column(array, b, h, rows, mine, c):
    """A column of a head's matrix, float32 [R]; 0 in rows that do not count."""
    return tl.load(see.head_of(array, b, h) + rows * array.l + c * array.d, mask=mine, other=0.0).to(tl.float32)


@triton.jit
def store(to, b, heads, rows, mine, result, problem, blocks):
    """A tile [R, Dv] to something like the output."""
    columns = tl.arange(0, blocks.value_dim)
    places = see.head_of(to, b, heads)[:, None] + rows[:, None] * to.l + columns[None, :] * to.d
    inside = mine[:, None] & (columns[None, :] < problem.value_dim)
    tl.store(places, result.to(to.at.dtype.element_ty), mask=inside)


@triton.jit
def exact_forward(problem, algebra, sight, made, blocks):
    """out of the marked rows."""
    if tl.load(made.marked_heads + tl.program_id(1)) == 0:
        return
    block = tl.program_id(0)
    b, h = tl.program_id(1) // problem.heads, tl.program_id(1) % problem.heads
    rows = block * blocks.rows + tl.arange(0, blocks.rows)
    columns = tl.arange(0, blocks.value_dim)
    marked = tl.load(of.saved_row(made.saved, b, h, rows, 6), mask=rows < problem.query_length, other=0.0) > 0.0
    if tl.max(marked.to(tl.int32)) == 0:
        return
    query = of.queries_of(problem, b, h, rows, blocks)
    count = see.count(sight, problem, b, h, rows)
    row = along(marked_row(made.saved, problem, algebra, count, b, h, rows, tl.zeros_like(count)), 1)
    scale = of.scale_of(problem, algebra, count, h) * algebra.phi.score_unit
    lift = of.lift_of(problem, algebra, count, b)
    query_norm = scale
    if algebra.cosine:
        query_norm = of.per_row(problem.query_norm, b, h, rows, problem.query_length)
    query, scale = of.score_operand(query, query_norm, scale, problem, algebra)
    span = see.key_tiles(sight, problem, blocks, b, block)
    top = tl.full([blocks.rows, blocks.value_dim], float("-inf"), tl.float32)
    total = tl.zeros([blocks.rows, blocks.value_dim], tl.float32)
    alive = tl.zeros([blocks.rows], tl.float32)
    for WHOLE in tl.static_range(2):
        for n in range(see.number(sight.tiles, span, b, h, block, WHOLE == 0)):
            keys = of.keys_met(sight, span, b, h, block, n, WHOLE == 0, blocks)
            _key, _norms, s, seen, _scaled = of.tile_of_keys(
                query, problem, algebra, sight, b, h, rows, keys, scale, lift, WHOLE == 0, blocks
            )
            log_weight, _log_u = log_weights(s, row, problem, algebra, h)
            log_weight = tl.where(seen, log_weight, float("-inf"))
            alive += tl.sum(tl.where(log_weight > float("-inf"), 1.0, 0.0), 1)
            for c in range(problem.value_dim):
                places = of.key_places(problem.value, problem, b, h, keys) + c * problem.value.d
                value = tl.load(places, mask=keys < see.length_of(problem, b), other=0.0).to(tl.float32)
                taint = tl.sum(tl.where(seen, (value - value)[None, :], 0.0), 1)  # NaN where it sees what is not finite
                value = of.finite(value)[None, :]
                at = columns[None, :] == c
                before = tl.max(tl.where(at, top, float("-inf")), 1)
                now = tl.maximum(before, tl.max(log_weight + value, 1))
                base = tl.where(now == float("-inf"), 0.0, now)
                fade = tl.exp(before - base)
                more = tl.sum(tl.exp(log_weight + (value - base[:, None])), 1) + taint
                total = tl.where(at, total * fade[:, None] + more[:, None], total)
                top = tl.where(at, now[:, None], top)
    tl.store(of.saved_row(made.saved, b, h, rows, 6), tl.where(alive == 1.0, ALONE, 1.0), mask=marked)
    heads, more = tl.zeros_like(rows) + h, tl.log(total)
    rounded = (top + more).to(made.out.at.dtype.element_ty)
    store(made.out, b, heads, rows, marked, rounded, problem, blocks)
    store(made.rest, b, heads, rows, marked, (top - rounded.to(tl.float32)) + more, problem, blocks)
