"""The forward kernel: one sweep over the keys, or two where the rows are re-weighted: statistics, then weights."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import rows as of
from softfocus.backends.triton.kernels import sight as see

SAVED = 6
"""Row vectors that the forward leaves behind: the four of RowStatistics, sum phi(s) e^-shift, sum u^p."""


@triton.jit
def forward(problem, algebra, sight, out, saved, blocks):
    """out [B, H, Lq, Dv], and SAVED vectors [SAVED, B, H, Lq] in float32. A program: a block of rows of a head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first, where it is causal
    b, h = tl.program_id(1) // problem.heads, tl.program_id(1) % problem.heads
    rows = block * blocks.rows + tl.arange(0, blocks.rows)
    columns = tl.arange(0, blocks.value_dim)
    query = of.queries_of(problem, b, h, rows, blocks)
    count = see.count(sight, problem, b, h, rows)
    scale, lift = of.scale_of(problem, algebra, count, h), of.lift_of(problem, algebra, count)
    if algebra.cosine:
        query, rest = of.resting(query, of.per_row(problem.query_norm, b, h, rows, problem.query_length))
        scale = scale * rest
    span = see.key_tiles(sight, problem, blocks, block)

    top = tl.full([blocks.rows], float("-inf"), tl.float32)
    shift = tl.zeros([blocks.rows], tl.float32)
    norm = tl.zeros([blocks.rows], tl.float32)
    sharp_norm = tl.zeros([blocks.rows], tl.float32)
    floor, over_spread, peak = shift, shift, shift
    tied = norm > 0.0
    mixed = tl.zeros([blocks.rows, blocks.value_dim], tl.float32)
    for SWEEP in tl.static_range(1 if algebra.sharp else 0, -1, -1):
        if algebra.sharp and SWEEP == 0:
            shift = algebra.phi.shift(top) if algebra.shifted else shift
            largest = algebra.phi.value(top, shift, algebra.shifted)
            floor, over_spread, tied, peak = of.threshold(problem, algebra, count, norm, largest)
        for WHOLE in tl.static_range(2):
            for n in range(see.number(sight.tiles, span, b, h, block, WHOLE == 0)):
                start = see.tile(sight.tiles, span, b, h, block, n, WHOLE == 0) * blocks.keys
                keys = start + tl.arange(0, blocks.keys)
                key, norms = of.keys_of(problem, algebra, b, h, keys, blocks)
                s, seen = of.scores(
                    of.product(query, tl.trans(key), blocks), problem, algebra, sight, b, h,
                    rows[:, None], keys[None, :], scale[:, None], norms[None, :], lift[:, None], WHOLE == 0,
                )  # fmt: skip
                if algebra.sharp and SWEEP == 0:
                    f = algebra.phi.value(s, shift[:, None], algebra.shifted)
                    u = of.excess(f, floor[:, None], over_spread[:, None])
                    f = tl.where(tied[:, None], f, of.raised(u, problem, algebra, h, 0))
                    sharp_norm += tl.sum(f, 1)
                else:
                    top = tl.maximum(top, tl.max(s, 1))
                    if algebra.shifted:
                        before = shift
                        shift = algebra.phi.shift(top)
                        fade = tl.exp(tl.minimum(before - shift, 0.0))  # before is above only where nothing was there
                        norm = norm * fade
                        mixed = mixed * fade[:, None]
                    f = algebra.phi.value(s, shift[:, None], algebra.shifted)
                    norm += tl.sum(f, 1)
                if SWEEP == 0:
                    value = of.values_of(problem, b, h, keys, blocks)
                    if WHOLE == 0:
                        bad = (tl.abs(value.to(tl.float32)) < float("inf")) == 0
                        if tl.max(bad.to(tl.int32)) > 0:
                            seen_bad = tl.dot(seen.to(tl.float16), bad.to(tl.float16))
                            mixed = tl.where(seen_bad > 0.0, float("nan"), mixed)
                        value = of.finite(value)
                    mixed += of.product(f.to(value.dtype), value, blocks)

    whole = sharp_norm if algebra.sharp else norm
    if algebra.sharp or algebra.normaliser == "l1":
        mixed = mixed / tl.where(whole == 0.0, 1.0, whole)[:, None]
    else:
        mixed = mixed * of.row_factor(problem, algebra, count)[:, None]
    mixed = mixed + (mixed - mixed)  # an infinity came from a value
    mixed = tl.where(count[:, None] > 0.0, mixed, 0.0)
    inside = rows < problem.query_length
    places = rows[:, None] * out.l + columns[None, :] * out.d
    tl.store(
        see.head_of(out, b, h) + places,
        mixed.to(out.at.dtype.element_ty),
        mask=inside[:, None] & (columns[None, :] < problem.value_dim),
    )
    top = tl.where(norm == norm, top, float("nan"))
    to = of.saved_row(saved, b, h, rows, 0)
    log_norm = tl.where(norm == 0.0, float("-inf"), tl.log(tl.where(norm == 0.0, 1.0, norm))) + shift
    tl.store(to, count, mask=inside)
    tl.store(to + saved.b, top, mask=inside)
    tl.store(to + 2 * saved.b, log_norm, mask=inside)
    tl.store(to + 3 * saved.b, peak, mask=inside)
    tl.store(to + 4 * saved.b, norm, mask=inside)
    tl.store(to + 5 * saved.b, sharp_norm, mask=inside)
