"""The forward kernels: one sweep over the keys, or two where the rows are re-weighted: statistics, then weights."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import dropout, laser
from softfocus.backends.triton.kernels import rows as of
from softfocus.backends.triton.kernels import sight as see
from softfocus.backends.triton.kernels.pointwise import LN2, log2


@triton.jit
def forward(problem, algebra, sight, made, blocks):
    """All that is ``made``, but for rows that it marks for ``laser.exact_forward``. A program: a block of rows of a head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first, where it is causal
    b, h = tl.program_id(1) // problem.heads, tl.program_id(1) % problem.heads
    rows = block * blocks.rows + tl.arange(0, blocks.rows)
    heads = tl.zeros_like(rows) + h
    query = of.queries_of(problem, b, h, rows, blocks)
    count = see.count(sight, problem, b, h, rows)
    scale = of.scale_of(problem, algebra, count, h) * algebra.phi.score_unit
    lift = of.lift_of(problem, algebra, count, b)
    query_norm = scale
    if algebra.cosine:
        query_norm = of.per_row(problem.query_norm, b, h, rows, problem.query_length)
    query, scale = of.score_operand(query, query_norm, scale, problem, algebra)
    span = see.key_tiles(sight, problem, blocks, b, block)

    top = tl.full([blocks.rows], float("-inf"), tl.float32)
    least = tl.zeros([blocks.rows], tl.float32)
    shift = tl.zeros([blocks.rows], tl.float32)
    norm = tl.zeros([blocks.rows], tl.float32)
    sharp_norm = tl.zeros([blocks.rows], tl.float32)
    # Of weights as halves hold them: where one key dominates a row the output, of which D is made, is then that key's value.
    # Other phi have a shift for it
    rounding: tl.constexpr = (
        algebra.phi.vanishes
        and algebra.terms != 9
        and algebra.normaliser == "l1"
        and not (algebra.sharp or algebra.laser)
    )
    rounded = norm
    floor, over_spread, peak = shift, shift, shift
    tied = norm > 0.0
    marked = tied
    flaws = tl.zeros([blocks.keys], tl.float32)  # of what all rows see
    for SWEEP in tl.static_range(1 if algebra.sharp else 0, -1, -1):
        if SWEEP == 0:
            mixed = tl.zeros([blocks.rows, blocks.value_dim], tl.float32)
        if algebra.sharp and SWEEP == 0:
            shift = algebra.phi.shift(top) if algebra.shifted else shift
            largest = algebra.phi.value(top, shift, algebra)
            floor, over_spread, tied, peak = of.threshold(problem, algebra, count, norm, largest)
        for WHOLE in tl.static_range(2):
            for n in range(see.number(sight.tiles, span, b, h, block, WHOLE == 0)):
                keys = of.keys_met(sight, span, b, h, block, n, WHOLE == 0, blocks)
                if SWEEP == 0:  # the values first: while there are no scores, registers are free
                    value = of.mixed_of(problem, b, h, keys, WHOLE == 0, blocks)
                    value, mixed, marked, flaws = inspected(
                        value, mixed, marked, flaws, None, problem, algebra, sight, b, h, heads, rows, keys, WHOLE == 0, blocks
                    )  # fmt: skip
                _key, _norms, s, _seen, scaled = of.tile_of_keys(
                    query, problem, algebra, sight, b, h, rows, keys, scale, lift, WHOLE == 0, blocks
                )
                if algebra.sharp and SWEEP == 0:
                    f = sharpened(s, shift, floor, over_spread, tied, problem, algebra, h)
                    sharp_norm += tl.sum(f, 1)
                else:
                    f, top, least, shift, norm, fade = online(s, scaled, top, least, shift, norm, algebra)
                    if SWEEP == 0 and algebra.shifted:
                        mixed = mixed * fade[:, None]
                    if rounding:
                        if algebra.shifted:
                            rounded = rounded * fade
                        rounded += tl.sum(f.to(value.dtype).to(tl.float32), 1)
                if SWEEP == 0:
                    if problem.seed is not None:
                        first = of.first_met(sight, span, b, h, block, n, WHOLE == 0, blocks)
                        f = tl.where(dropout.kept(problem, b, h, rows, first, blocks.keys, 1), f, 0.0)
                    mixed += of.weighted_product(f, value, algebra, blocks)
    if not rounding:
        rounded = sharp_norm if algebra.sharp else norm
    norm = tainted(norm, top, least)
    if problem.seed is not None:
        mixed = mixed * problem.growth
    finish(
        problem, algebra, made, b, heads, rows, count, top, shift, norm, sharp_norm, rounded, peak, mixed, marked, flaws, blocks
    )  # fmt: skip


@triton.jit
def online(s, scaled, top, least, shift, norm, algebra):
    """phi 2^-shift of a tile's scores; the rows' largest score, least scaled product (where they are dot products), shift and
    sum so far, and by what sums fade as the shift grows."""
    top = tl.maximum(top, tl.max(s, 1))
    if not algebra.cosine:
        least = tl.minimum(least, tl.min(scaled, 1))
    fade = norm
    if algebra.shifted:
        before = shift
        shift = algebra.phi.shift(top)
        fade = tl.exp2(tl.minimum(before - shift, 0.0))  # before is above only where nothing was there
        norm = norm * fade
    f = algebra.phi.value(s, shift[:, None], algebra)
    return f, top, least, shift, norm + tl.sum(f, 1), fade


@triton.jit
def tainted(norm, top, least):
    """The rows' sums; NaN where a product was infinite, which is no number here. Cosines hold that in the keys' norms."""
    return tl.where((top == float("inf")) | (least == float("-inf")), float("nan"), norm)


@triton.jit
def sharpened(s, shift, floor, over_spread, tied, problem, algebra, h):
    """u^p of a tile's scores; phi in tied rows."""
    f = algebra.phi.value(s, shift[:, None], algebra)
    u = of.excess(f, floor[:, None], over_spread[:, None], algebra)
    return tl.where(tied[:, None], f, of.raised(u, problem, algebra, h, 0))


@triton.jit
def inspected(
    value, mixed, marked, flaws, f, problem, algebra, sight, b, h, heads, rows, keys, CUT: tl.constexpr, blocks
):  # fmt: skip
    """A tile of values, or LASER's e^V, as the weights are multiplied with it; mixed, marked and flaws after it.

    What is not finite reaches only the rows that see it, or, where the weights ``f`` are given, those in which it weighs
    something. ``marked`` rows see a value beyond LASER's HIGH in a tile that is CUT; ``flaws`` is what all rows see.

    Args:
        heads: of the rows; h: any of them.
    """
    if CUT:
        if algebra.laser:
            flawed = laser.flaws_of(value, problem, b, h, keys)
            total = tl.max(flawed, 0)
            bad = total >= 2.0
        else:
            x = value.to(tl.float32)
            total = tl.sum(x - x)
            bad = total != total
        # Also where it is NaN. Seldom: who sees what is asked anew, and takes no registers where it is not
        if total != 0.0:
            if f is None:
                seen = see.visible(sight, problem, b, heads[:, None], rows[:, None], keys[None, :])
            else:
                seen = f != 0.0
            if algebra.laser:
                high = (flawed == 1.0) | (flawed == 3.0)
                marked = marked | (tl.max((seen & high[None, :]).to(tl.int32), 1) > 0)
            if bad:
                mixed = _spoilt(mixed, seen, problem, b, h, keys, blocks)
                value = of.finite(value)
    elif algebra.laser:
        flawed = laser.flaws_of(value, problem, b, h, keys)
        flaws = tl.maximum(flaws, tl.where((flawed == 1.0) | (flawed == 3.0), 1.0, 0.0))
    if algebra.laser and problem.flaws is None:
        value = laser.exponential(value)
    return value, mixed, marked, flaws


@triton.jit
def _spoilt(mixed, seen, problem, b, h, keys, blocks):
    """``mixed``, NaN where a row sees a value that is not finite: column by column."""
    columns = tl.arange(0, blocks.value_dim)
    for c in range(problem.value_dim):
        places = of.key_places(problem.value, problem, b, h, keys) + c * problem.value.d
        value = tl.load(places, mask=keys < see.length_of(problem, b), other=0.0).to(tl.float32)
        bad = (tl.abs(value) < float("inf")) == 0
        hit = tl.max((seen & bad[None, :]).to(tl.int32), 1) > 0
        mixed = tl.where(hit[:, None] & (columns[None, :] == c), float("nan"), mixed)
    return mixed


@triton.jit
def finish(
    problem, algebra, made, b, heads, rows, count, top, shift, norm, sharp_norm, rounded, peak, mixed, marked, flaws, blocks
):  # fmt: skip
    """What the sums come to, stored; ``heads`` are those of the rows. ``rounded`` is the sum of the weights that were
    multiplied."""
    inside = rows < problem.query_length
    columns = tl.arange(0, blocks.value_dim)
    whole = sharp_norm if algebra.sharp else norm
    if algebra.laser:
        lowest = tl.min(tl.where(columns[None, :] < problem.value_dim, mixed, float("inf")), 1)
        flawed = tl.zeros_like(whole) + tl.max(flaws, 0)
        marked = marked | (flawed > 0.0) | (lowest < laser.LOW * tl.maximum(whole, 1.0))
        marked = marked & (whole > 0.0)
        tl.store(made.marked_heads + b * problem.heads + heads, 1, mask=marked & inside)
        mean = mixed * (of.over_norm(whole, algebra) + (norm - norm))[:, None]
        mean = tl.where((whole[:, None] == 0.0) | (mean <= 0.0), 1.0, mean)
        mixed = log2(mean, algebra.terms)
        over = tl.exp2(-mixed)
        if algebra.terms == 9:
            over = 1.0 / mean
        laser.store(made.rest, b, heads, rows, inside, over, problem, blocks)
        mixed = mixed * LN2
    elif algebra.sharp or algebra.normaliser == "l1":
        if algebra.phi.vanishes:  # whose sums may be so small that there is no number over them
            rounded = tl.broadcast_to(tl.where(rounded == 0.0, 1.0, rounded)[:, None], mixed.shape)
            if algebra.terms == 9:
                mixed = tl.div_rn(mixed, rounded)
            else:
                mixed = mixed / rounded
        else:
            mixed = mixed * of.over_norm(whole, algebra)[:, None]
    else:
        mixed = mixed * (of.row_factor(problem, algebra, count, b) / algebra.phi.unit)[:, None]
    mixed = mixed + (mixed - mixed) + (norm - norm)[:, None]  # an infinity came from a value, or a product
    mixed = tl.where(count[:, None] > 0.0, mixed, 0.0)
    laser.store(made.out, b, heads, rows, inside, mixed, problem, blocks)
    if made.rest is not None and not algebra.laser:
        left = of.left_off(mixed, mixed.to(made.out.at.dtype.element_ty).to(tl.float32), algebra)
        laser.store(made.rest, b, heads, rows, inside, left, problem, blocks)
    top = tl.where(norm == norm, top, float("nan"))
    to = of.saved_row(made.saved, b, heads, rows, 0)
    log_norm = tl.where(norm == 0.0, float("-inf"), tl.log(tl.where(norm == 0.0, 1.0, norm) / algebra.phi.unit))
    log_norm = log_norm + shift * LN2
    tl.store(to, count, mask=inside)
    tl.store(to + made.saved.b, top / algebra.phi.score_unit, mask=inside)
    tl.store(to + 2 * made.saved.b, log_norm, mask=inside)
    tl.store(to + 3 * made.saved.b, peak, mask=inside)
    tl.store(to + 4 * made.saved.b, norm, mask=inside)
    tl.store(to + 5 * made.saved.b, sharp_norm, mask=inside)
    tl.store(to + 6 * made.saved.b, marked.to(tl.float32), mask=inside)
    tl.store(to + 7 * made.saved.b, top, mask=inside)
