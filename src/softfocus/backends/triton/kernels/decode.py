"""A few queries and many keys. The keys are split among programs so that the whole GPU reads them.

There are up to three kernels. ``statistics`` computes the row statistics of each split. Unless rows
are re-weighted it also computes the weighted values of the split, numerators times values.
``weights`` computes the weighted values of each split of re-weighted rows. It reads a value only if
its weight is above rounding (with LASER, above 0). ``combine`` adds the splits.

The queries of all heads that share a key head are the rows of one tile. With fewer than sixteen
rows, the result of a product on tensor cores is mostly padding, and several threads hold the same
element. The dot products therefore go through a buffer in global memory, ``scores`` [B Hk,
row_count, Lk], and are loaded again in a layout without padding. The buffer holds in turn q k (from
``_store_products``), s (from ``statistics``), and unnormalised weights (f from ``statistics``, or
u^p from ``weights``), which the product with the values loads. An access takes 4 bytes per score,
while a key has hundreds of bytes. ``tl.debug_barrier`` is the barrier between the threads' stores
and the loads that follow.

row_count is (H / Hk) · Lq. ROWS_STORED is row_count, rounded up to a power of two. Helpers take
ROWS, which is ROWS_STORED or BLOCK_Q. BLOCK_Q is ROWS_STORED, but at least 16. For a single row
BLOCK_Q is 1 in float32, without tensor cores, and in ``weights``, where few values have weight.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import forward, laser, loading, masking, norms, products, scoring, weighting
from softfocus.backends.triton.kernels.pointwise import LOG2E, row_shift

STATS = tl.constexpr(4)
"""The number of vectors [ROWS_STORED] that each split stores."""
STAT_MAX, STAT_F_SUM, STAT_POWER_SUM, STAT_MARK = (tl.constexpr(n) for n in range(4))
"""Indices of these vectors: largest score, sum of f (``Phi.f``), sum u^p, and LASER's marks."""
SCORES_AT_ONCE = tl.constexpr(512)
"""Scores that a program turns into numerators at once: four per thread of 128. It must be at least
the number of threads. Otherwise several threads hold the same score, and one may store its result
over a score that another has not loaded: no barrier lies between the load and the store.
"""
LOADED_AT_ONCE = tl.constexpr(8)
"""Splits whose results are loaded before the first is used. One at a time would wait for memory as
often as there are splits.
"""


@triton.jit
def _query_rows(inputs, ROWS: tl.constexpr):
    """The program's b, a query head of its key head, and the query head [ROWS] and query offset
    [ROWS] of each row. Padding rows have the offset query_length.
    """
    key_heads = inputs.heads // inputs.group
    b, key_head = tl.program_id(1) // key_heads, tl.program_id(1) % key_heads
    rows = tl.arange(0, ROWS)
    mask = rows < inputs.group * inputs.query_length
    q_offsets = tl.where(mask, rows % inputs.query_length, inputs.query_length)
    row_heads = key_head * inputs.group + tl.where(mask, rows // inputs.query_length, 0)
    return b, key_head * inputs.group, row_heads, q_offsets


@triton.jit
def _split_tiles(inputs, masks, b, tiling):
    """The tiles of keys of this program's split: the first, and the one after the last."""
    length, offset = loading.sequence_length(inputs, b), masking.query_offset(inputs, masks, b)
    last_query = inputs.query_length - 1
    first_key, end_key = 0, length
    if masks.has_left:
        first_key = tl.minimum(tl.maximum(offset - masks.left, 0), length)
    if masks.has_right:
        end_key = tl.maximum(tl.minimum(last_query + offset + masks.right + 1, length), first_key)
    first_tile = first_key // tiling.BLOCK_K
    tiles = masking.ceil_div(end_key, tiling.BLOCK_K) - first_tile
    tiles_per_split = masking.ceil_div(tiles, tl.num_programs(0))
    tiles_before = tl.minimum(tl.program_id(0) * tiles_per_split, tiles)  # those of earlier splits
    return first_tile + tiles_before, first_tile + tl.minimum(tiles_before + tiles_per_split, tiles)


@triton.jit
def _stat_pointer(split_stats, INDEX: tl.constexpr, splits, split, ROWS_STORED: tl.constexpr):
    """Pointer to the vector INDEX of a split in [B Hk, splits, STATS, ROWS_STORED]."""
    key_head_index = tl.full([], 0, tl.int64) + tl.program_id(1)  # of all B Hk
    return split_stats + ((key_head_index * splits + split) * STATS + INDEX) * ROWS_STORED


@triton.jit
def _acc_pointers(split_accs, splits, split, ROWS_STORED: tl.constexpr, ROWS: tl.constexpr, tiling):
    """Pointers [ROWS, BLOCK_DV] to the weighted values of a split in [B Hk, splits, ROWS_STORED,
    BLOCK_DV], and which of the ROWS are stored, [ROWS, 1].
    """
    key_head_index = tl.full([], 0, tl.int64) + tl.program_id(1)  # of all B Hk
    rows = tl.arange(0, ROWS)[:, None]
    offsets = rows * tiling.BLOCK_DV + tl.arange(0, tiling.BLOCK_DV)[None, :]
    split_offset = (key_head_index * splits + split) * (ROWS_STORED * tiling.BLOCK_DV)
    return split_accs + split_offset + offsets, rows < ROWS_STORED


@triton.jit
def _score_pointers(scores, inputs, k_offsets, end_key, ROWS: tl.constexpr):
    """Pointers [ROWS, keys] to scores in [B Hk, row_count, Lk], and which of them exist and are
    before ``end_key``.
    """
    key_head_index = tl.full([], 0, tl.int64) + tl.program_id(1)  # of all B Hk
    row_count = inputs.group * inputs.query_length
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < row_count) & (k_offsets[None, :] < tl.minimum(end_key, inputs.key_length))
    return scores + (key_head_index * row_count + rows) * inputs.key_length + k_offsets[None, :], mask


@triton.jit
def _initial_statistics(ROWS_STORED: tl.constexpr):
    """row_max, smallest_scaled_dot, shift, f_sum before the first tile, each [ROWS_STORED]."""
    zeros = tl.zeros([ROWS_STORED], tl.float32)
    return zeros - float("inf"), zeros, zeros, zeros


@triton.jit
def _merged_statistics(algebra, split_stats, splits, ROWS_STORED: tl.constexpr):
    """Largest score, shift and sum of f of the rows, [ROWS_STORED], from all splits.

    Unlike those of tiles, the sums of splits are added without TwoSum: ``call._programs`` makes
    some 300 splits on the largest NVIDIA GPUs, and for fewer than 512 splits 2^-25 times their
    number is below TIE_TOLERANCE (``forward.two_sum``).
    """
    row_max, _smallest_scaled_dot, shift, f_sum = _initial_statistics(ROWS_STORED)
    rows = tl.arange(0, ROWS_STORED)
    for split in tl.range(splits, loop_unroll_factor=LOADED_AT_ONCE):
        split_max = tl.load(_stat_pointer(split_stats, STAT_MAX, splits, split, ROWS_STORED) + rows)
        split_f_sum = tl.load(_stat_pointer(split_stats, STAT_F_SUM, splits, split, ROWS_STORED) + rows)
        row_max = tl.maximum(row_max, split_max)
        if algebra.shifted:
            before = shift
            shift = row_shift(row_max, algebra)
            f_sum = f_sum * tl.exp2(tl.minimum(before - shift, 0.0))
            split_f_sum = split_f_sum * tl.exp2(tl.minimum(row_shift(split_max, algebra) - shift, 0.0))
        f_sum += split_f_sum
    return row_max, shift, f_sum


@triton.jit
def statistics(
    inputs, algebra, masks, split_stats, split_accs, scores, ROWS_STORED: tl.constexpr, STAGES: tl.constexpr, tiling
):
    """The first kernel: stores a split's STAT_MAX and STAT_F_SUM. If rows are re-weighted it also
    stores the split's scores, otherwise the weighted values and LASER's marks.
    """
    splits, split = tl.num_programs(0), tl.program_id(0)
    b, h, row_heads, q_offsets = _query_rows(inputs, ROWS_STORED)
    first_tile, stop_tile = _split_tiles(inputs, masks, b, tiling)
    _store_products(inputs, algebra, b, h, scores, first_tile, stop_tile, STAGES, tiling)
    tl.debug_barrier()
    # All vectors up to the loop are [ROWS_STORED]
    count = masking.visible_count(masks, inputs, b, row_heads, q_offsets)
    product_scale = scoring.score_scale(inputs, algebra, count, row_heads) * algebra.phi.score_unit
    row_bias = scoring.row_bias_of(inputs, algebra, count, b)
    if algebra.cosine:
        query_rnorm = loading.load_column(inputs.query_rnorm, b, row_heads, q_offsets, inputs.query_length)
        product_scale = product_scale * norms.mantissa_of(query_rnorm)
    row_max, smallest_scaled_dot, shift, f_sum = _initial_statistics(ROWS_STORED)
    f_sum_error = f_sum  # 0: what additions to f_sum have rounded off so far (``forward.two_sum``)
    end_key = stop_tile * tiling.BLOCK_K
    for first_key in range(first_tile * tiling.BLOCK_K, end_key, SCORES_AT_ONCE // ROWS_STORED):
        k_offsets = first_key + tl.arange(0, SCORES_AT_ONCE // ROWS_STORED)
        pointers, mask = _score_pointers(scores, inputs, k_offsets, end_key, ROWS_STORED)
        # pointers, mask, dots, s, scaled_dots [ROWS_STORED, SCORES_AT_ONCE / ROWS_STORED]
        dots = tl.load(pointers, mask=mask, other=0.0)
        key_rnorm = tl.full([1, 1], 1.0, tl.float32)  # the dot products include 1 / |k|
        s, _visible, scaled_dots = scoring.tile_scores(
            dots, inputs, algebra, masks, b, row_heads[:, None], q_offsets[:, None], k_offsets[None, :],
            product_scale[:, None], key_rnorm, row_bias[:, None], IS_PARTIAL=True,
        )  # fmt: skip
        s, scaled_dots = tl.where(mask, s, float("-inf")), tl.where(mask, scaled_dots, 0.0)
        _f, row_max, smallest_scaled_dot, shift, f_sum, f_sum_error, _rescale = forward.online_statistics(
            s, scaled_dots, row_max, smallest_scaled_dot, shift, f_sum, f_sum_error, algebra
        )
        tl.store(pointers, s, mask=mask)
    rows = tl.arange(0, ROWS_STORED)
    tl.store(_stat_pointer(split_stats, STAT_MAX, splits, split, ROWS_STORED) + rows, row_max)
    f_sum_pointers = _stat_pointer(split_stats, STAT_F_SUM, splits, split, ROWS_STORED) + rows
    f_sum = forward.compensated(f_sum, f_sum_error)
    tl.store(f_sum_pointers, forward.nan_if_infinite(f_sum, row_max, smallest_scaled_dot))
    if not algebra.reweighted:
        tl.debug_barrier()
        for first_key in range(first_tile * tiling.BLOCK_K, end_key, SCORES_AT_ONCE // ROWS_STORED):
            k_offsets = first_key + tl.arange(0, SCORES_AT_ONCE // ROWS_STORED)
            pointers, mask = _score_pointers(scores, inputs, k_offsets, end_key, ROWS_STORED)
            s = tl.load(pointers, mask=mask, other=float("-inf"))  # [ROWS_STORED, SCORES_AT_ONCE / ROWS_STORED]
            tl.store(pointers, algebra.phi.f(s, shift[:, None], algebra), mask=mask)
        tl.debug_barrier()
        _sum_values(
            inputs, algebra, masks, b, h, split_stats, split_accs, scores, first_tile, stop_tile, ROWS_STORED, STAGES,
            tiling,
        )  # fmt: skip


@triton.jit
def weights(
    inputs, algebra, masks, split_stats, split_accs, scores, ROWS_STORED: tl.constexpr, STAGES: tl.constexpr, tiling
):
    """The second kernel, for re-weighted rows alone. It replaces scores by the numerators u^p;
    ``combine`` divides by their sum. It stores STAT_POWER_SUM, STAT_MARK and the weighted values.
    """
    splits, split = tl.num_programs(0), tl.program_id(0)
    b, h, row_heads, q_offsets = _query_rows(inputs, ROWS_STORED)
    first_tile, stop_tile = _split_tiles(inputs, masks, b, tiling)
    # row_heads, q_offsets, and all vectors from count to power_sum [ROWS_STORED]
    count = masking.visible_count(masks, inputs, b, row_heads, q_offsets)
    row_max, shift, f_sum = _merged_statistics(algebra, split_stats, splits, ROWS_STORED)
    largest_f = algebra.phi.f(row_max, shift, algebra)
    threshold, inverse_spread, tied, _peak = weighting.row_threshold(algebra, count, f_sum, largest_f)
    negligible = _negligible(inputs, algebra, count, tied, row_heads)
    power_sum = tl.zeros([ROWS_STORED], tl.float32)
    end_key = stop_tile * tiling.BLOCK_K
    for first_key in range(first_tile * tiling.BLOCK_K, end_key, SCORES_AT_ONCE // ROWS_STORED):
        k_offsets = first_key + tl.arange(0, SCORES_AT_ONCE // ROWS_STORED)
        pointers, mask = _score_pointers(scores, inputs, k_offsets, end_key, ROWS_STORED)
        # pointers, mask, s, numerator [ROWS_STORED, SCORES_AT_ONCE / ROWS_STORED]
        s = tl.load(pointers, mask=mask, other=float("-inf"))
        numerator = forward.power_of_scores(
            s, shift, threshold, inverse_spread, tied, inputs, algebra, row_heads[:, None]
        )
        numerator = tl.where(numerator <= negligible[:, None], 0.0, numerator)
        power_sum += tl.sum(numerator, 1)
        tl.store(pointers, numerator, mask=mask)
    rows = tl.arange(0, ROWS_STORED)
    tl.store(_stat_pointer(split_stats, STAT_POWER_SUM, splits, split, ROWS_STORED) + rows, power_sum)
    tl.debug_barrier()
    _sum_values(
        inputs, algebra, masks, b, h, split_stats, split_accs, scores, first_tile, stop_tile, ROWS_STORED, STAGES,
        tiling,
    )  # fmt: skip


@triton.jit
def _store_products(inputs, algebra, b, h, scores, first_tile, stop_tile, STAGES: tl.constexpr, tiling):
    """Stores the dot products of a split's tiles in ``scores``: q k, or with cosine q k / |k|,
    where the query is scaled by a power of two.

    ``statistics`` multiplies by the mantissa of 1 / |q|. If the sum of a key's squares is too large
    or too small for float32, all dot products of the split are computed again with exact norms
    (CAREFUL).
    """
    # row_heads, q_offsets, query_rnorm [BLOCK_Q]; pointers, mask, query [BLOCK_Q, BLOCK_D]
    _b, _h, row_heads, q_offsets = _query_rows(inputs, tiling.BLOCK_Q)
    d_offsets = tl.arange(0, tiling.BLOCK_D)
    pointers = (
        loading.head_pointer(inputs.query, b, row_heads)[:, None]
        + q_offsets[:, None] * inputs.query.stride_l
        + d_offsets[None, :] * inputs.query.stride_d
    )
    mask = (q_offsets[:, None] < inputs.query_length) & (d_offsets[None, :] < inputs.head_dim)
    query = tl.load(pointers, mask=mask, other=0.0)
    if algebra.cosine:
        query_rnorm = loading.load_column(inputs.query_rnorm, b, row_heads, q_offsets, inputs.query_length)
        query, _mantissa = norms.scaled_operand(query, query_rnorm)
    imprecise = tl.zeros([tiling.BLOCK_Q, tiling.BLOCK_K], tl.int32)
    for CAREFUL in tl.static_range(2 if algebra.cosine else 1):
        stop_of_sweep = stop_tile
        if CAREFUL:  # between the sweeps; this code always runs
            # If the fast sweep was enough, stop_of_sweep is first_tile, and the loop is empty
            stop_of_sweep = tl.where(tl.max(tl.max(imprecise, 1), 0) > 0, stop_tile, first_tile)
            tl.debug_barrier()  # all threads must have stored the first results before one overwrites them
        for n in tl.range(first_tile, stop_of_sweep, num_stages=1 if CAREFUL else STAGES):
            # k_offsets, key_rnorm, precise [BLOCK_K]; key [BLOCK_K, BLOCK_D]; dots, not_zero,
            # score_pointers, score_mask [BLOCK_Q, BLOCK_K]
            k_offsets = n * tiling.BLOCK_K + tl.arange(0, tiling.BLOCK_K)
            key = loading.load_keys(inputs, b, h, k_offsets, IS_PARTIAL=True, tiling=tiling)
            dots = products.dot(query, tl.trans(key), tiling)
            if algebra.cosine:
                if CAREFUL:
                    key_rnorm = norms.reciprocal_norm(key.to(tl.float32))
                else:
                    key_rnorm, precise = norms.fast_reciprocal_norm(key)
                    # If the sum of squares is 0, the key is either a zero vector (all dots 0:
                    # precise) or its squares underflowed (some dot not 0: imprecise)
                    not_zero = (key_rnorm != 0.0)[None, :] | (dots != 0.0)
                    imprecise = imprecise | ((precise == 0)[None, :] & not_zero).to(tl.int32)
                dots = dots * key_rnorm[None, :]
            score_pointers, score_mask = _score_pointers(
                scores, inputs, k_offsets, stop_tile * tiling.BLOCK_K, tiling.BLOCK_Q
            )
            tl.store(score_pointers, dots, mask=score_mask)


@triton.jit
def _sum_values(
    inputs, algebra, masks, b, h, split_stats, split_accs, scores, first_tile, stop_tile, ROWS_STORED: tl.constexpr,
    STAGES: tl.constexpr, tiling
):  # fmt: skip
    """Stores a split's weighted values, the sum of numerators times values, and LASER's marks.

    If a sum is non-finite, or a value too large for LASER, the split is summed again, and every
    value is checked (CAREFUL).
    """
    splits, split = tl.num_programs(0), tl.program_id(0)
    _b, _h, row_heads, q_offsets = _query_rows(inputs, tiling.BLOCK_Q)  # row_heads, q_offsets [BLOCK_Q]
    dv_offsets = tl.arange(0, tiling.BLOCK_DV)
    acc = tl.zeros([tiling.BLOCK_Q, tiling.BLOCK_DV], tl.float32)
    needs_exact = tl.zeros([tiling.BLOCK_Q], tl.float32) > 0.0
    # It stays 0: only full tiles set it, and every tile counts as partial here
    has_large_value = tl.zeros([tiling.BLOCK_K], tl.float32)
    # For a single row: numerators times values, summed over the keys at the end
    product_sums = tl.zeros([tiling.BLOCK_K, tiling.BLOCK_DV], tl.float32)
    # For LASER, the largest |v| so far. The split is summed again if any |v| exceeds LARGE_VALUE.
    # Absolute values, because v = -inf gives e^v = 0 and leaves no trace in the sums
    largest_value = tl.zeros([tiling.BLOCK_K], tl.float32)
    for CAREFUL in tl.static_range(2):
        stop_of_sweep = stop_tile
        if CAREFUL:  # between the sweeps; this code always runs, as in ``_store_products``
            if tiling.BLOCK_Q == 1:
                acc = tl.sum(product_sums, 0)[None, :]
            recompute_acc = tl.sum(acc - acc) != 0.0  # true for NaN
            if algebra.laser:
                recompute_acc = recompute_acc | (tl.max(largest_value, 0) > laser.LARGE_VALUE)
            stop_of_sweep = tl.where(recompute_acc, stop_tile, first_tile)
            acc = tl.where(recompute_acc, 0.0, acc)
        for n in tl.range(first_tile, stop_of_sweep, num_stages=1 if CAREFUL else STAGES):
            # k_offsets, live [BLOCK_K]; pointers, mask, numerator [BLOCK_Q, BLOCK_K];
            # value_pointers, value [BLOCK_K, BLOCK_DV]
            k_offsets = n * tiling.BLOCK_K + tl.arange(0, tiling.BLOCK_K)
            pointers, mask = _score_pointers(scores, inputs, k_offsets, stop_tile * tiling.BLOCK_K, tiling.BLOCK_Q)
            numerator = tl.load(pointers, mask=mask, other=0.0)  # f or u^p
            if algebra.reweighted:
                live = tl.max((numerator != 0.0).to(tl.int32), 0) > 0  # some row gives the key weight
                value_pointers = loading.key_pointers(inputs.value, inputs, b, h, k_offsets)[:, None]
                value_pointers = value_pointers + dv_offsets[None, :] * inputs.value.stride_d
                value_mask = live[:, None] & (dv_offsets[None, :] < inputs.value_dim)
                value = tl.load(value_pointers, mask=value_mask, other=0.0)
            else:
                # The values themselves: in decoding LASER's e^V is computed below
                value = loading.load_value_operand(inputs, b, h, k_offsets, IS_PARTIAL=True, tiling=tiling)
            if CAREFUL:
                value, acc, needs_exact, has_large_value = forward.value_operand_and_checks(
                    value, acc, needs_exact, has_large_value, inputs, algebra, masks, b, h, row_heads, q_offsets,
                    k_offsets, IS_PARTIAL=True, tiling=tiling, numerator=numerator if algebra.reweighted else None,
                )  # fmt: skip
            elif algebra.laser:
                x = value.to(tl.float32)
                largest_value = tl.maximum(largest_value, tl.max(tl.abs(x), 1))
                value = laser.exponential_operand(tl.exp2(x * LOG2E), value.dtype)
            # acc [BLOCK_Q, BLOCK_DV], product_sums [BLOCK_K, BLOCK_DV]
            if tiling.BLOCK_Q > 1:
                acc += products.dot_weights(numerator, value, algebra, tiling)
            elif CAREFUL:  # a single row is multiplied in float32; its numerators are not rounded
                acc += products.dot(numerator, value, tiling)
            else:
                product_sums += tl.trans(numerator) * value.to(tl.float32)
    rows = tl.arange(0, tiling.BLOCK_Q)
    pointers = _stat_pointer(split_stats, STAT_MARK, splits, split, ROWS_STORED) + rows
    tl.store(pointers, needs_exact.to(tl.float32), mask=rows < ROWS_STORED)
    pointers, mask = _acc_pointers(split_accs, splits, split, ROWS_STORED, tiling.BLOCK_Q, tiling)
    tl.store(pointers, acc, mask=mask)


@triton.jit
def _negligible(inputs, algebra, count, tied, row_heads):
    """The largest u^p of each row that counts as 0, [ROWS_STORED]: 2^-24 / max(p, N / p), p >= 1.

    The omitted u^p, at most N, add up to at most 2^-24 p. Rounding the largest u, which is 1, by
    half an ulp causes the same error in its u^p. The p in the maximum matters only for p > sqrt(N).
    The CPU has the same limit for u^(p - 1) (``live_threshold``), so that p u^(p - 1), a factor of
    gradients, is at most 2^-24. LASER takes the logarithm of small sums and omits no weight. A tied
    row keeps all its weights, too: its numerator is f, not u^p.
    """
    negligible = tl.zeros_like(count)
    if not algebra.laser:
        power = tl.maximum(negligible + weighting.head_power(inputs, algebra, row_heads), 1.0)
        negligible = tl.where(tied, 0.0, 2.0**-24 / (power * tl.maximum(count / (power * power), 1.0)))
    return negligible


@triton.jit
def combine(inputs, algebra, masks, split_stats, split_accs, splits, outputs, ROWS_STORED: tl.constexpr, tiling):
    """Stores the forward's outputs. Sums are added in the order of the splits."""
    # All vectors of this kernel are [ROWS_STORED]
    b, _h, row_heads, q_offsets = _query_rows(inputs, ROWS_STORED)
    count = masking.visible_count(masks, inputs, b, row_heads, q_offsets)
    row_max, shift, f_sum = _merged_statistics(algebra, split_stats, splits, ROWS_STORED)
    rows = tl.arange(0, ROWS_STORED)
    power_sum = tl.zeros([ROWS_STORED], tl.float32)
    acc = tl.zeros([ROWS_STORED, tiling.BLOCK_DV], tl.float32)
    needs_exact = power_sum > 0.0
    for split in tl.range(splits, loop_unroll_factor=LOADED_AT_ONCE):
        pointers, _all = _acc_pointers(split_accs, splits, split, ROWS_STORED, ROWS_STORED, tiling)
        split_acc = tl.load(pointers)  # [ROWS_STORED, BLOCK_DV]
        if algebra.reweighted:
            power_sum += tl.load(_stat_pointer(split_stats, STAT_POWER_SUM, splits, split, ROWS_STORED) + rows)
        elif algebra.shifted:
            split_max = tl.load(_stat_pointer(split_stats, STAT_MAX, splits, split, ROWS_STORED) + rows)
            split_shift = row_shift(split_max, algebra)
            split_acc = split_acc * tl.exp2(tl.minimum(split_shift - shift, 0.0))[:, None]
        if algebra.laser:
            marks = tl.load(_stat_pointer(split_stats, STAT_MARK, splits, split, ROWS_STORED) + rows)
            needs_exact = needs_exact | (marks > 0.0)
        acc += split_acc
    peak = tl.zeros_like(f_sum)
    if algebra.reweighted:
        largest_f = algebra.phi.f(row_max, shift, algebra)
        _threshold, _inverse_spread, _tied, peak = weighting.row_threshold(algebra, count, f_sum, largest_f)
    # The forward's has_large_value, of any length. It is 0: every tile counts as partial here
    no_large_value = tl.zeros([16], tl.float32)
    forward.store_results(
        inputs, algebra, outputs, b, row_heads, q_offsets, count, row_max, shift, f_sum, power_sum, peak, acc,
        needs_exact, no_large_value, tiling,
    )  # fmt: skip
