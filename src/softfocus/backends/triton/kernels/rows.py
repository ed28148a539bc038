"""What belongs to a row of scores, and what the algebra makes of a tile of them: the one body of every kernel."""

from typing import NamedTuple

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import pointwise
from softfocus.backends.triton.kernels import sight as see

FREE_ROWS = tl.constexpr(3)
LARGE_POWER = tl.constexpr(12.0)
TIED = tl.constexpr(128.0 * 2.0**-23)
"""``softfocus.reference``'s FREE_ROWS; from which p on u^(p - 1) < 2^-22 where u^p < 2^-24; the tie_tolerance of float32."""


@triton.jit
def matrix(array, start, rows, columns, length, width):
    """[R, C] of a head's matrix that begins at ``start``; 0 beyond its ends."""
    places = rows[:, None] * array.l + columns[None, :] * array.d
    return tl.load(start + places, mask=(rows[:, None] < length) & (columns[None, :] < width), other=0.0)


@triton.jit
def store_matrix(array, start, rows, columns, length, width, x):
    """Store float32 [R, C] there, in the array's dtype."""
    places = start + rows[:, None] * array.l + columns[None, :] * array.d
    inside = (rows[:, None] < length) & (columns[None, :] < width)
    tl.store(places, x.to(array.at.dtype.element_ty), mask=inside)


@triton.jit
def finite(x):
    """x, 0 where it is NaN or infinite."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def product(a, b, blocks):
    """a b, summed in float32. Of one row, which tensor cores would take for sixteen, without them."""
    if a.shape[0] == 1:
        result = tl.sum(tl.trans(a.to(tl.float32)) * b.to(tl.float32), 0)[None, :]
    elif blocks.widen:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=blocks.precision)
    return result


@triton.jit
def weighted_product(f, x, algebra, blocks):
    """The same of weights, which float16 need not hold where nothing makes them sum to one."""
    if algebra.narrow and algebra.normaliser != "l1":
        result = product(f, x.to(tl.float32), blocks)
    else:
        result = product(f.to(x.dtype), x, blocks)
    return result


@triton.jit
def slope_product(g, x, algebra, blocks):
    """The same of dL/ds, which float16 need not hold there either, nor where scores may be tiny."""
    if algebra.narrow and (algebra.phi.vanishes or algebra.normaliser != "l1"):
        result = product(g, x.to(tl.float32), blocks)
    else:
        result = product(g.to(x.dtype), x, blocks)
    return result


@triton.jit
def per_row(array, b, h, rows, length):
    """A value of each row, float32 [R]."""
    return tl.load(see.head_of(array, b, h) + rows * array.l, mask=rows < length, other=0.0).to(tl.float32)


@triton.jit
def saved_row(saved, b, h, rows, N: tl.constexpr):
    """Where the n-th of the saved vectors [n, B, H, Lq] has a head's rows."""
    far = tl.full([], 0, tl.int64)
    return saved.at + (far + N) * saved.b + (far + b) * saved.h + (far + h) * saved.l + rows


@triton.jit
def length_scale_of(problem, algebra, count):
    """c_i but for the head's own factor."""
    scale = tl.zeros_like(count) + problem.scale
    log_n = tl.log(tl.maximum(count, 1.0))
    if algebra.length_scale == "log(N)":
        scale = scale * log_n
    elif algebra.length_scale == "log512(N)":
        scale = scale * (log_n / 6.238324625039508)
    else:
        tl.static_assert(algebra.length_scale == "1")
    return scale


@triton.jit
def scale_of(problem, algebra, count, h):
    """c_i, with the head's own factor."""
    scale = length_scale_of(problem, algebra, count)
    if problem.head_scale is not None:
        scale = scale * tl.load(problem.head_scale + h)
    return scale


@triton.jit
def lift_of(problem, algebra, count, b):
    """What is added to a whole row of scores, in their unit."""
    lift = tl.zeros_like(count)
    if algebra.score_bias == "-log(N)":
        lift = -tl.log(tl.maximum(count, 1.0))
    elif algebra.score_bias == "-log(L)":
        lift = lift - tl.log(tl.zeros_like(count) + see.length_of(problem, b))
    else:
        tl.static_assert(algebra.score_bias == "0")
    return lift * algebra.phi.score_unit


@triton.jit
def row_factor(problem, algebra, count, b):
    """What multiplies phi(s) where the normaliser does not depend on it."""
    factor = tl.full(count.shape, 1.0, tl.float32)
    if algebra.normaliser == "1/N":
        factor = 1.0 / tl.maximum(count, 1.0)
    elif algebra.normaliser == "1/sqrt(N/2)":
        factor = 1.0 / tl.sqrt(tl.maximum(count, 1.0) / 2.0)
    elif algebra.normaliser == "1/L":
        factor = factor / (tl.zeros_like(factor) + see.length_of(problem, b))
    else:
        tl.static_assert(algebra.normaliser == "none")
    return factor


@triton.jit
def largest_power(x):
    """The power of two below the largest |x| of a vector; 1 where there is no such number."""
    bits = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) & 0x7F800000
    power = bits.to(tl.float32, bitcast=True)
    return tl.where((power > 0.0) & (power < float("inf")), power, 1.0)


@triton.jit
def power_of_two(norm):
    """The power of two p with |x| p in (1/2, 1], from ``norm`` = 1 / |x|; 0 for a zero vector."""
    bits = norm.to(tl.int32, bitcast=True) & 0x7F800000
    power = bits.to(tl.float32, bitcast=True)
    tiny: tl.constexpr = 2.0**-126
    return tl.where((norm > 0.0) & (norm < tiny), 2.0**-128, power)


@triton.jit
def resting(x, norm):
    """The operand that a block keeps, and what is left of 1 / |x|: scaled by powers of two, exactly, to norms in (1/2, 1], so
    that no product overflows or vanishes whatever the norms are, and every kernel makes the same score of the same numbers."""
    return (x.to(tl.float32) * power_of_two(norm)[:, None]).to(x.dtype), left_of_norm(norm)


@triton.jit
def left_of_norm(norm):
    """``norm`` over its power of two: not by a division, since those are approximate."""
    bits = (norm.to(tl.int32, bitcast=True) & 0x007FFFFF) | 0x3F800000
    left = tl.where(norm < 2.0**-126, norm * 2.0**64 * 2.0**64, bits.to(tl.float32, bitcast=True))
    return tl.where(norm == norm, left, norm)


@triton.jit
def queries_of(problem, b, h, rows, blocks):
    """A tile's queries [R, D]."""
    dims = tl.arange(0, blocks.head_dim)
    start = see.head_of(problem.query, b, h)
    return matrix(problem.query, start, rows, dims, problem.query_length, problem.head_dim)


@triton.jit
def score_operand(query, norm, scale, problem, algebra):
    """What a block of rows multiplies keys with, and what is left to multiply the products with.

    Unit operands hold the whole scale: their products are the scores.
    """
    if algebra.cosine:
        query, left = resting(query, norm)
        scale = scale * left
    if problem.unit_key is not None:
        query = (query.to(tl.float32) * scale[:, None]).to(tl.float16)
    return query, scale


@triton.jit
def queries_met(problem, b, h, rows, blocks):
    """For a block of keys: queries [R, D] as scores are made of them, and as dL/ds is multiplied with them."""
    if problem.unit_key is None:
        query = queries_of(problem, b, h, rows, blocks)
        moved = query
    else:
        dims, length, width = tl.arange(0, blocks.head_dim), problem.query_length, problem.head_dim
        query = matrix(problem.unit_query, see.head_of(problem.unit_query, b, h), rows, dims, length, width)
        moved = matrix(problem.slope_query, see.head_of(problem.slope_query, b, h), rows, dims, length, width)
    return query, moved


@triton.jit
def again(places, inside):
    """A tile that was read before a loop and is not wanted in it. The cache is named so that the compiler does not see the same
    load twice and keep the first's registers through the loop."""
    return tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def outputs_of(array, problem, b, h, rows, blocks):
    """A tile [R, Dv] of something shaped like the output."""
    columns = tl.arange(0, blocks.value_dim)
    return matrix(array, see.head_of(array, b, h), rows, columns, problem.query_length, problem.value_dim)


@triton.jit
def step(rounded, algebra):
    """A 127th of the distance between numbers of a half's dtype about one, which float32 holds here; 0 where that is tiny or
    there is none. What out has lost in rounding is kept in eight bits, in such steps: D is made of out, and in a row that one
    key dominates little is left of dL/dA - D."""
    bits = rounded.to(tl.int32, bitcast=True) & 0x7F800000
    power = bits.to(tl.float32, bitcast=True)
    part: tl.constexpr = (2.0**-10 if algebra.narrow else 2.0**-7) / 127.0
    return tl.where((power > 2.0**-100) & (power < float("inf")), power * part, 0.0)


@triton.jit
def left_off(x, rounded, algebra):
    """x - rounded in steps, whole and at most 127."""
    unit = step(rounded, algebra)
    left = (x - rounded) / tl.where(unit > 0.0, unit, 1.0)
    left = tl.where((unit > 0.0) & (tl.abs(left) <= 127.0), left, 0.0)
    return left + tl.where(left < 0.0, -0.5, 0.5)  # cut off when it is stored


@triton.jit
def key_places(array, problem, b, h, keys):
    """Where the keys or values [K] of a head of queries lie."""
    if problem.pages is None:
        places = see.head_of(array, b, h // problem.group) + keys * array.l
    else:
        number = keys // problem.page_size
        table = see.head_of(problem.pages, b, 0) + number * problem.pages.d
        page = tl.load(table, mask=keys < see.length_of(problem, b), other=0)
        places = see.head_of(array, page, h // problem.group) + (keys - number * problem.page_size) * array.l
    return places


@triton.jit
def _keys_or_values(array, problem, b, h, keys, width, COLUMNS: tl.constexpr, CUT: tl.constexpr, blocks):
    """[K, D] or [K, Dv]; 0 beyond the ends, which are looked for only where they can be met."""
    columns = tl.arange(0, COLUMNS)
    places = key_places(array, problem, b, h, keys)[:, None] + columns[None, :] * array.d
    if CUT:
        tile = tl.load(places, mask=(keys[:, None] < see.length_of(problem, b)) & (columns[None, :] < width), other=0.0)
    elif blocks.whole:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=tl.broadcast_to(columns[None, :] < width, places.shape), other=0.0)
    return tile


@triton.jit
def keys_of(problem, algebra, b, h, keys, CUT: tl.constexpr, blocks):
    """A tile's keys [K, D] for scores, and 1 / |k| with cosine; all of them are there unless it is CUT."""
    norm = keys.to(tl.float32)
    if problem.unit_key is not None:
        key = _keys_or_values(problem.unit_key, problem, b, h, keys, problem.head_dim, blocks.head_dim, CUT, blocks)
    else:
        key = keys_alone(problem, b, h, keys, CUT, blocks)
    if algebra.cosine:
        if problem.key_norm is None:
            norm = reciprocal_norm(key.to(tl.float32))
        else:
            norm = per_row(problem.key_norm, b, h // problem.group, keys, problem.key_length)
    return key, norm


@triton.jit
def keys_alone(problem, b, h, keys, CUT: tl.constexpr, blocks):
    """A tile's keys [K, D]."""
    return _keys_or_values(problem.key, problem, b, h, keys, problem.head_dim, blocks.head_dim, CUT, blocks)


@triton.jit
def keys_of_slopes(problem, b, h, keys, CUT: tl.constexpr, blocks):
    """A tile's keys [K, D] as dL/ds is multiplied with them, of unit length."""
    return _keys_or_values(problem.slope_key, problem, b, h, keys, problem.head_dim, blocks.head_dim, CUT, blocks)


@triton.jit
def reciprocal_norm(x):
    """1 / |x| of each row for any norm that float32 holds: 0 for a zero vector, NaN where x is not finite. Rounded divisions,
    since large powers multiply what is lost."""
    largest = tl.max(tl.abs(x), 1)
    exponent = tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253)
    over = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # of the power of two in the largest
    scaled = x * over[:, None]
    total = tl.sum(scaled * scaled, 1)
    norm = over * tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(total))
    norm = tl.where(largest < 2.0**-126, 0.0, norm)
    return norm + (total - total)  # NaN where x is not finite


@triton.jit
def plain_reciprocal_norm(x):
    """The same of rows whose squares float32 holds, and which are such; of halves to 2^-22. 0 where all squares are 0."""
    single = x.to(tl.float32)
    total = tl.sum(single * single, 1)
    if x.dtype == tl.float32:
        norm = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(total))
    else:
        norm = tl.rsqrt(total)
    return tl.where(total == 0.0, 0.0, norm), (total > 2.0**-100) & (total < 2.0**100)


@triton.jit
def mixed_of(problem, b, h, keys, CUT: tl.constexpr, blocks):
    """A tile's values, or LASER's e^V, [K, Dv]."""
    return _keys_or_values(problem.mixed, problem, b, h, keys, problem.value_dim, blocks.value_dim, CUT, blocks)


@triton.jit
def scores(dots, problem, algebra, sight, b, h, rows, keys, scale, norm, lift, CUT: tl.constexpr):
    """A tile of s in its unit from its products, and who is seen; -inf where nobody is. And the scaled products, 0 there.

    Args:
        rows, keys: positions, shaped so that they broadcast to the tile, in either order.
        scale, lift: of the rows, in the unit; norm: of the keys, or of both: what the products have to be multiplied with.
    """
    s = dots
    if problem.unit_key is None:
        s = pointwise.times(s, scale, algebra)
        if algebra.cosine:
            s = pointwise.times(s, norm, algebra)
    scaled = s
    if algebra.score_bias != "0":
        s = s + lift
    if problem.bias is not None:
        places = rows.to(tl.int64) * problem.bias.l + keys.to(tl.int64) * problem.bias.d
        inside = (rows < problem.query_length) & (keys < problem.key_length)
        bias = tl.load(see.head_of(problem.bias, b, h) + places, mask=inside, other=0.0).to(tl.float32)
        s += pointwise.times(bias, algebra.phi.score_unit, algebra)
    seen = tl.full(s.shape, True, tl.int1)
    if CUT:
        seen = see.visible(sight, problem, b, h, rows, keys)
        s = tl.where(seen, s, float("-inf"))
        scaled = tl.where(seen, scaled, 0.0)
    return s, seen, scaled


@triton.jit
def keys_met(sight, span, b, h, block, n, CUT: tl.constexpr, blocks):
    """Positions of the n-th tile of keys that a block of rows meets, of those that something cuts or of the others."""
    return first_met(sight, span, b, h, block, n, CUT, blocks) + tl.arange(0, blocks.keys)


@triton.jit
def first_met(sight, span, b, h, block, n, CUT: tl.constexpr, blocks):
    """The first of them."""
    return see.tile(sight.tiles, span, b, h, block, n, CUT) * blocks.keys


@triton.jit
def tile_of_keys(query, problem, algebra, sight, b, h, rows, keys, scale, lift, CUT: tl.constexpr, blocks):
    """Keys, 1 / |k|, and what ``scores`` gives. ``scale`` and ``lift`` are the rows'."""
    key, norms = keys_of(problem, algebra, b, h, keys, CUT, blocks)
    s, seen, scaled = scores(
        product(query, tl.trans(key), blocks), problem, algebra, sight, b, h,
        rows[:, None], keys[None, :], scale[:, None], norms[None, :], lift[:, None], CUT,
    )  # fmt: skip
    return key, norms, s, seen, scaled


@triton.jit
def power_of(problem, algebra, h):
    """p of a head."""
    if problem.power is None:
        power = algebra.power
    else:
        power = tl.load(problem.power + h)
    return power


@triton.jit
def raised(u, problem, algebra, h, LESS: tl.constexpr):
    """u^(p - LESS), 0 where u is 0; LESS is 0 or 1."""
    if problem.power is None and algebra.power > LESS:
        result = pointwise.whole_power(u, algebra.power - LESS)
    elif problem.power is None:
        result = tl.where(u == 0.0, 0.0, 1.0)
    else:
        result = tl.where(u == 0.0, 0.0, pointwise.any_power(u, tl.load(problem.power + h) - LESS, algebra.terms))
    return result


@triton.jit
def threshold(problem, algebra, count, norm, top):
    """Eq. 5 of arXiv 2501.13428 for rows whose phi sum up to ``norm`` and are ``top`` at most: (floor, 1 / spread, tied, peak).

    u = (phi - floor) / spread; a tied row keeps its phi.
    """
    safe = tl.where(norm == 0.0, 1.0, norm)
    free = tl.where(count > FREE_ROWS, 1.0, 0.0)
    floor = free * norm / tl.maximum(count, 1.0)
    peak = tl.maximum(top * count / safe - free, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tied = peak <= TIED
    return floor, 1.0 / tl.where(tied, 1.0, top - floor), tied, peak


@triton.jit
def excess(f, floor, over_spread, algebra):
    """u, which is at most 1; for halves in one instruction, though what it rounds is larger than the difference."""
    if algebra.terms == 9:
        u = tl.maximum((f - floor) * over_spread, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        u = pointwise.saturated(f, over_spread, floor * -over_spread)
    return u


class Row(NamedTuple):
    """What the backward knows of its rows: vectors, shaped so that they broadcast to a tile.

        A = weigh * phi              dL/dphi = steep * (dL/dA - inner)
        A = weigh * u^p              dL/dphi = steep * (dL/dA - inner) * u^(p - 1)      u = (phi - floor) * spread

    where phi is in its unit to the left, and itself to the right.

    Attributes:
        shift: of phi, as the forward left it; the log of the whole sum where it is folded.
        floor, spread: of re-weighted rows; one that keeps its l1 weights, u = phi / top and p = 1, has a negative spread.
        weigh, steep: the former 0 where the row sees nothing; the latter where one key has all the weight, whatever its score:
            rounding must not give it a gradient.
        inner: D_i = sum_j A_ij dL/dA_ij, where the weights sum to one.
    """

    shift: tl.tensor
    floor: tl.tensor
    spread: tl.tensor
    weigh: tl.tensor
    steep: tl.tensor
    inner: tl.tensor


@triton.jit
def left_of(saved, problem, algebra, b, h, rows):
    """What the forward left of the rows: shift, largest phi, sum phi, sum u^p."""
    inside = rows < problem.query_length
    top = tl.load(saved_row(saved, b, h, rows, 7), mask=inside, other=0.0)
    norm = tl.load(saved_row(saved, b, h, rows, 4), mask=inside, other=1.0)
    sharp_norm = tl.load(saved_row(saved, b, h, rows, 5), mask=inside, other=1.0)
    shift = tl.zeros_like(top)
    if algebra.shifted:
        shift = algebra.phi.shift(top)
    return shift, algebra.phi.value(top, shift, algebra), norm, sharp_norm


@triton.jit
def row_of(saved, problem, algebra, count, b, h, rows, inner):
    """From what the forward left of the rows; ``inner`` is D."""
    shift, largest, norm, sharp_norm = left_of(saved, problem, algebra, b, h, rows)
    floor = tl.zeros_like(shift)
    spread = floor - 1.0
    if algebra.sharp:
        floor, over_spread, tied, _peak = threshold(problem, algebra, count, norm, largest)
        heaviest = raised(excess(largest, floor, over_spread, algebra), problem, algebra, h, 0)
        # What weighs less than the rounding of the heaviest may still have a gradient, u^(p - 1), where p is small
        negligible = (tl.zeros_like(norm) + power_of(problem, algebra, h)) >= LARGE_POWER
        alone = (count == 1.0) | ((sharp_norm == heaviest) & (tied == 0) & negligible)
        over, over_sharp = over_norm(norm, algebra), over_norm(sharp_norm, algebra)
        highest = tl.where(largest > 0.0, largest, 1.0)
        floor, spread = tl.where(tied, 0.0, floor), tl.where(tied, -1.0 / highest, over_spread)
        weigh = tl.where(tied, over * highest, over_sharp)
        steep = tl.where(tied, over, power_of(problem, algebra, h) * over_sharp * over_spread)
        steep = tl.where(alone, 0.0, steep)
    elif algebra.normaliser == "l1":
        weigh = over_norm(norm, algebra)
        if algebra.folded:
            shift = shift - tl.log2(weigh)
            weigh = tl.full(weigh.shape, 1.0, tl.float32)
        steep = tl.where((count == 1.0) | (norm == largest), 0.0, weigh)
    else:
        # Of a row that saw an infinity the sum is NaN
        weigh = row_factor(problem, algebra, count, b) / algebra.phi.unit + (norm - norm)
        steep = weigh
        inner = tl.zeros_like(weigh)
    weigh = tl.where(count > 0.0, weigh, 0.0)
    return Row(shift, floor, spread, weigh, steep * algebra.phi.unit, inner)


@triton.jit
def over_norm(norm, algebra):
    """1 / norm; 1 where there is none. In float32 rounded: in a row that one key dominates D is to be that key's dL/dA."""
    norm = tl.where(norm == 0.0, 1.0, norm)
    if algebra.terms == 9:
        result = tl.div_rn(tl.full(norm.shape, 1.0, tl.float32), norm)
    else:
        result = 1.0 / norm
    return result


@triton.jit
def along(row, AXIS: tl.constexpr):
    """The vectors along one axis of a tile."""
    return Row(
        tl.expand_dims(row.shift, AXIS), tl.expand_dims(row.floor, AXIS), tl.expand_dims(row.spread, AXIS),
        tl.expand_dims(row.weigh, AXIS), tl.expand_dims(row.steep, AXIS), tl.expand_dims(row.inner, AXIS),
    )  # fmt: skip


@triton.jit
def slopes(s, grad, row, problem, algebra, h):
    """Of a tile and dL/dA: A, g and the slope of phi, so that dL/ds = steep * (g - ground of the row) * slope; and u.

    The ground is o mean(g) in re-weighted rows, 0 in others. What all keys of a row have in common, steep, is left to the sums.
    """
    f = algebra.phi.value(s, row.shift, algebra)
    slope = algebra.phi.slope(s, row.shift, algebra)
    u = f
    g = grad
    if algebra.normaliser == "l1":
        g = grad - row.inner
    if algebra.sharp:
        u = excess(f, row.floor, tl.abs(row.spread), algebra)
        less = tl.where(row.spread < 0.0, 1.0, raised(u, problem, algebra, h, 1))
        g = g * less
        f = less * u
    if not algebra.folded:
        f = f * row.weigh
    return f, g, slope, u
