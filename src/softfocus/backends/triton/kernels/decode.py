"""A few queries and many keys. The keys are split among programs so that the whole GPU reads them.

There are up to three kernels. ``statistics`` computes the row statistics of each split. Unless rows
are re-weighted it also computes the weighted values of the split: the sum of weights times values.
``weights`` computes the weighted values of each split of re-weighted rows. It reads a value only if
its weight is above rounding (with LASER, above 0). ``combine`` adds the splits.

The queries of all heads that share a key head are the rows of one tile. A product on tensor cores
has at least sixteen rows. With fewer queries, most rows of its result are padding, and several
threads hold the same score. The kernels therefore store the dot products in a buffer, ``scores``,
and load them without padding, so that each thread has numbers of its own. The buffer [B Hk, rows,
Lk] holds in turn dot products (from ``_store_products``), scores (from ``statistics``), and weights
that are not normalised yet (from ``statistics``, or of re-weighted rows from ``weights``). The
product with the values loads the weights. Each of these accesses takes 4 bytes per score, while a
key has hundreds of bytes. Threads exchange scores through that buffer. ``tl.debug_barrier`` is the
barrier between their stores and the loads that follow.

In shapes ROWS_STORED is the number of rows, rounded up to a power of two. BLOCK_Q is ROWS_STORED,
but at least 16. For a single row it is 1 in float32, which does not use tensor cores, and in
``weights``, where few values have weight.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import forward, laser, loading, masking, norms, products, scoring, weighting
from softfocus.backends.triton.kernels.pointwise import LOG2E, row_shift

PARTS = tl.constexpr(4)
"""The number of vectors [rows] that each split stores."""
PART_MAX, PART_PHI_SUM, PART_POWER_SUM, PART_MARK = (tl.constexpr(n) for n in range(4))
"""Indices of these vectors: largest score, sum of f (``Phi.value``), sum u^p, and LASER's marks."""
SCORES_AT_ONCE = tl.constexpr(512)
"""Scores that a program turns into weights at once: four per thread of 128. With fewer scores than
threads, several threads would hold the same score. One could store its result before another has
loaded the score, since there is no barrier between the load and the store.
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
def _split_tiles(inputs, masks, b, blocks):
    """The tiles of keys of this program's split: the first, and the one after the last."""
    length, offset = loading.sequence_length(inputs, b), masking.query_offset(inputs, masks, b)
    last_query = inputs.query_length - 1
    first_key, end_key = 0, length
    if masks.has_left:
        first_key = tl.minimum(tl.maximum(offset - masks.left, 0), length)
    if masks.has_right:
        end_key = tl.maximum(tl.minimum(last_query + offset + masks.right + 1, length), first_key)
    first_tile = first_key // blocks.BLOCK_K
    tiles = (end_key + blocks.BLOCK_K - 1) // blocks.BLOCK_K - first_tile
    tiles_per_split = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    tiles_before = tl.minimum(tl.program_id(0) * tiles_per_split, tiles)  # those of earlier splits
    return first_tile + tiles_before, first_tile + tl.minimum(tiles_before + tiles_per_split, tiles)


@triton.jit
def _part_pointers(parts, INDEX: tl.constexpr, splits, split, ROWS_STORED: tl.constexpr):
    """Pointer to the vector INDEX of a split in [B Hk, splits, PARTS, ROWS_STORED]."""
    program = tl.full([], 0, tl.int64) + tl.program_id(1)
    return parts + ((program * splits + split) * PARTS + INDEX) * ROWS_STORED


@triton.jit
def _sum_pointers(sums, splits, split, ROWS_STORED: tl.constexpr, ROWS: tl.constexpr, blocks):
    """Pointers [ROWS, BLOCK_DV] to the weighted values of a split in [B Hk, splits, ROWS_STORED,
    BLOCK_DV], and which of the ROWS are stored, [ROWS, 1].
    """
    program = tl.full([], 0, tl.int64) + tl.program_id(1)
    rows = tl.arange(0, ROWS)[:, None]
    pointers = rows * blocks.BLOCK_DV + tl.arange(0, blocks.BLOCK_DV)[None, :]
    return sums + (program * splits + split) * (ROWS_STORED * blocks.BLOCK_DV) + pointers, rows < ROWS_STORED


@triton.jit
def _score_pointers(scores, inputs, k_offsets, end_key, ROWS: tl.constexpr):
    """Pointers [ROWS, keys] to scores in [B Hk, rows, Lk], and which of them exist and are before
    ``end_key``.
    """
    program = tl.full([], 0, tl.int64) + tl.program_id(1)
    row_count = inputs.group * inputs.query_length
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < row_count) & (k_offsets[None, :] < tl.minimum(end_key, inputs.key_length))
    return scores + (program * row_count + rows) * inputs.key_length + k_offsets[None, :], mask


@triton.jit
def _initial_statistics(ROWS_STORED: tl.constexpr):
    """The statistics of rows before the first tile: row_max, smallest_scaled_dot, shift, phi_sum,
    each [ROWS_STORED].
    """
    zeros = tl.zeros([ROWS_STORED], tl.float32)
    return zeros - float("inf"), zeros, zeros, zeros


@triton.jit
def _merged_statistics(algebra, parts, splits, ROWS_STORED: tl.constexpr):
    """Largest score, shift and sum of f of the rows, [ROWS_STORED], from all splits."""
    row_max, _smallest_scaled_dot, shift, phi_sum = _initial_statistics(ROWS_STORED)
    rows = tl.arange(0, ROWS_STORED)
    for split in tl.range(splits, loop_unroll_factor=LOADED_AT_ONCE):
        split_max = tl.load(_part_pointers(parts, PART_MAX, splits, split, ROWS_STORED) + rows)
        split_phi_sum = tl.load(_part_pointers(parts, PART_PHI_SUM, splits, split, ROWS_STORED) + rows)
        row_max = tl.maximum(row_max, split_max)
        if algebra.shifted:
            before = shift
            shift = row_shift(row_max, algebra)
            phi_sum = phi_sum * tl.exp2(tl.minimum(before - shift, 0.0))
            split_phi_sum = split_phi_sum * tl.exp2(tl.minimum(row_shift(split_max, algebra) - shift, 0.0))
        phi_sum += split_phi_sum
    return row_max, shift, phi_sum


@triton.jit
def statistics(inputs, algebra, masks, parts, sums, scores, ROWS_STORED: tl.constexpr, STAGES: tl.constexpr, blocks):
    """The first kernel: stores a split's PART_MAX and PART_PHI_SUM. If rows are re-weighted it also
    stores the split's scores, otherwise the weighted values and LASER's marks.
    """
    splits, split = tl.num_programs(0), tl.program_id(0)
    b, h, row_heads, q_offsets = _query_rows(inputs, ROWS_STORED)
    first_tile, stop_tile = _split_tiles(inputs, masks, b, blocks)
    _store_products(inputs, algebra, b, h, scores, first_tile, stop_tile, STAGES, blocks)
    tl.debug_barrier()
    # count, scale, row_bias and the statistics [ROWS_STORED]
    count = masking.visible_count(masks, inputs, b, row_heads, q_offsets)
    scale = scoring.score_scale(inputs, algebra, count, row_heads) * algebra.phi.score_unit
    row_bias = scoring.row_bias_of(inputs, algebra, count, b)
    if algebra.cosine:
        query_rnorm = loading.load_vector(inputs.query_rnorm, b, row_heads, q_offsets, inputs.query_length)
        scale = scale * norms.mantissa_of(query_rnorm)
    row_max, smallest_scaled_dot, shift, phi_sum = _initial_statistics(ROWS_STORED)
    phi_error = phi_sum  # 0: what additions to phi_sum have rounded off so far (``forward.two_sum``)
    end_key = stop_tile * blocks.BLOCK_K
    for first_key in range(first_tile * blocks.BLOCK_K, end_key, SCORES_AT_ONCE // ROWS_STORED):
        k_offsets = first_key + tl.arange(0, SCORES_AT_ONCE // ROWS_STORED)
        pointers, mask = _score_pointers(scores, inputs, k_offsets, end_key, ROWS_STORED)
        # s, scaled_dots [ROWS_STORED, SCORES_AT_ONCE / ROWS_STORED]
        s, _visible, scaled_dots = scoring.tile_scores(
            tl.load(pointers, mask=mask, other=0.0), inputs, algebra, masks, b, row_heads[:, None], q_offsets[:, None],
            k_offsets[None, :], scale[:, None], tl.full([1, 1], 1.0, tl.float32), row_bias[:, None], True,
        )  # fmt: skip
        s, scaled_dots = tl.where(mask, s, float("-inf")), tl.where(mask, scaled_dots, 0.0)
        _f, row_max, smallest_scaled_dot, shift, phi_sum, phi_error, _rescale = forward.online_statistics(
            s, scaled_dots, row_max, smallest_scaled_dot, shift, phi_sum, phi_error, algebra
        )
        tl.store(pointers, s, mask=mask)
    rows = tl.arange(0, ROWS_STORED)
    tl.store(_part_pointers(parts, PART_MAX, splits, split, ROWS_STORED) + rows, row_max)
    sum_pointers = _part_pointers(parts, PART_PHI_SUM, splits, split, ROWS_STORED) + rows
    phi_sum = forward.compensated(phi_sum, phi_error)
    tl.store(sum_pointers, forward.nan_if_infinite(phi_sum, row_max, smallest_scaled_dot))
    if not algebra.reweighted:
        tl.debug_barrier()
        for first_key in range(first_tile * blocks.BLOCK_K, end_key, SCORES_AT_ONCE // ROWS_STORED):
            k_offsets = first_key + tl.arange(0, SCORES_AT_ONCE // ROWS_STORED)
            pointers, mask = _score_pointers(scores, inputs, k_offsets, end_key, ROWS_STORED)
            s = tl.load(pointers, mask=mask, other=float("-inf"))  # [ROWS_STORED, SCORES_AT_ONCE / ROWS_STORED]
            tl.store(pointers, algebra.phi.value(s, shift[:, None], algebra), mask=mask)
        tl.debug_barrier()
        _sum_values(
            inputs, algebra, masks, b, h, parts, sums, scores, first_tile, stop_tile, ROWS_STORED, STAGES, blocks
        )


@triton.jit
def weights(inputs, algebra, masks, parts, sums, scores, ROWS_STORED: tl.constexpr, STAGES: tl.constexpr, blocks):
    """The second kernel, for re-weighted rows alone: stores PART_POWER_SUM, PART_MARK and the
    weighted values of a split.
    """
    splits, split = tl.num_programs(0), tl.program_id(0)
    b, h, row_heads, q_offsets = _query_rows(inputs, ROWS_STORED)
    first_tile, stop_tile = _split_tiles(inputs, masks, b, blocks)
    count = masking.visible_count(masks, inputs, b, row_heads, q_offsets)
    row_max, shift, phi_sum = _merged_statistics(algebra, parts, splits, ROWS_STORED)
    largest_phi = algebra.phi.value(row_max, shift, algebra)
    threshold, inverse_spread, tied, _peak = weighting.row_threshold(inputs, algebra, count, phi_sum, largest_phi)
    negligible = _negligible(inputs, algebra, count, tied, row_heads)
    power_sum = tl.zeros([ROWS_STORED], tl.float32)
    end_key = stop_tile * blocks.BLOCK_K
    for first_key in range(first_tile * blocks.BLOCK_K, end_key, SCORES_AT_ONCE // ROWS_STORED):
        k_offsets = first_key + tl.arange(0, SCORES_AT_ONCE // ROWS_STORED)
        pointers, mask = _score_pointers(scores, inputs, k_offsets, end_key, ROWS_STORED)
        # s, numerator [ROWS_STORED, SCORES_AT_ONCE / ROWS_STORED]
        s = tl.load(pointers, mask=mask, other=float("-inf"))
        numerator = forward.power_of_scores(
            s, shift, threshold, inverse_spread, tied, inputs, algebra, row_heads[:, None]
        )
        numerator = tl.where(numerator <= negligible[:, None], 0.0, numerator)
        power_sum += tl.sum(numerator, 1)
        tl.store(pointers, numerator, mask=mask)
    tl.store(_part_pointers(parts, PART_POWER_SUM, splits, split, ROWS_STORED) + tl.arange(0, ROWS_STORED), power_sum)
    tl.debug_barrier()
    _sum_values(inputs, algebra, masks, b, h, parts, sums, scores, first_tile, stop_tile, ROWS_STORED, STAGES, blocks)


@triton.jit
def _store_products(inputs, algebra, b, h, scores, first_tile, stop_tile, STAGES: tl.constexpr, blocks):
    """Stores the dot products of a split's tiles in ``scores``: q k, or with cosine q k / |k|,
    where the query is scaled by a power of two.

    ``statistics`` multiplies by the mantissa of 1 / |q|. If the sum of a key's squares is too large
    or too small for float32, all dot products of the split are computed again with exact norms
    (CAREFUL).
    """
    _b, _h, row_heads, q_offsets = _query_rows(inputs, blocks.BLOCK_Q)
    d_offsets = tl.arange(0, blocks.BLOCK_D)
    pointers = (
        loading.head_pointer(inputs.query, b, row_heads)[:, None]
        + q_offsets[:, None] * inputs.query.stride_l
        + d_offsets[None, :] * inputs.query.stride_d
    )
    mask = (q_offsets[:, None] < inputs.query_length) & (d_offsets[None, :] < inputs.head_dim)
    query = tl.load(pointers, mask=mask, other=0.0)  # [BLOCK_Q, BLOCK_D]
    if algebra.cosine:
        query_rnorm = loading.load_vector(inputs.query_rnorm, b, row_heads, q_offsets, inputs.query_length)
        query, _mantissa = norms.scaled_operand(query, query_rnorm)
    imprecise = tl.zeros([blocks.BLOCK_Q, blocks.BLOCK_K], tl.int32)
    for CAREFUL in tl.static_range(2 if algebra.cosine else 1):
        stop_of_sweep = stop_tile
        if CAREFUL:
            stop_of_sweep = tl.where(tl.max(tl.max(imprecise, 1), 0) > 0, stop_tile, first_tile)
            tl.debug_barrier()  # all threads must have stored the first results before one overwrites them
        for n in tl.range(first_tile, stop_of_sweep, num_stages=1 if CAREFUL else STAGES):
            k_offsets = n * blocks.BLOCK_K + tl.arange(0, blocks.BLOCK_K)
            key = loading.load_keys(inputs, b, h, k_offsets, True, blocks)  # [BLOCK_K, BLOCK_D]
            dots = products.dot(query, tl.trans(key), blocks)  # [BLOCK_Q, BLOCK_K]
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
                scores, inputs, k_offsets, stop_tile * blocks.BLOCK_K, blocks.BLOCK_Q
            )
            tl.store(score_pointers, dots, mask=score_mask)


@triton.jit
def _sum_values(
    inputs, algebra, masks, b, h, parts, sums, scores, first_tile, stop_tile, ROWS_STORED: tl.constexpr,
    STAGES: tl.constexpr, blocks
):  # fmt: skip
    """Stores the weighted values of a split (the sum of weights times values), and LASER's marks.

    If a sum is non-finite, or a value too large for LASER, the split is summed again, and every
    value is checked (CAREFUL).
    """
    splits, split = tl.num_programs(0), tl.program_id(0)
    _b, _h, row_heads, q_offsets = _query_rows(inputs, blocks.BLOCK_Q)
    dv_offsets = tl.arange(0, blocks.BLOCK_DV)
    acc = tl.zeros([blocks.BLOCK_Q, blocks.BLOCK_DV], tl.float32)
    needs_exact = tl.zeros([blocks.BLOCK_Q], tl.float32) > 0.0
    # Stays 0: every tile is treated as a partial one
    has_large_value = tl.zeros([blocks.BLOCK_K], tl.float32)
    # For a single row: weights times values, summed over the keys at the end
    product_sums = tl.zeros([blocks.BLOCK_K, blocks.BLOCK_DV], tl.float32)
    # For LASER, the largest |v| so far. The split is summed again if any |v| exceeds LARGE_VALUE.
    # Absolute values, because v = -inf gives e^v = 0 and leaves no trace in the sums
    largest_value = tl.zeros([blocks.BLOCK_K], tl.float32)
    for CAREFUL in tl.static_range(2):
        stop_of_sweep = stop_tile
        if CAREFUL:
            if blocks.BLOCK_Q == 1:
                acc = tl.sum(product_sums, 0)[None, :]
            sum_again = tl.sum(acc - acc) != 0.0  # true for NaN
            if algebra.laser:
                sum_again = sum_again | (tl.max(largest_value, 0) > laser.LARGE_VALUE)
            stop_of_sweep = tl.where(sum_again, stop_tile, first_tile)
            acc = tl.where(sum_again, 0.0, acc)
        for n in tl.range(first_tile, stop_of_sweep, num_stages=1 if CAREFUL else STAGES):
            k_offsets = n * blocks.BLOCK_K + tl.arange(0, blocks.BLOCK_K)
            pointers, mask = _score_pointers(scores, inputs, k_offsets, stop_tile * blocks.BLOCK_K, blocks.BLOCK_Q)
            numerator = tl.load(pointers, mask=mask, other=0.0)  # f or u^p, [BLOCK_Q, BLOCK_K]
            # value [BLOCK_K, BLOCK_DV]
            if algebra.reweighted:
                live = tl.max((numerator != 0.0).to(tl.int32), 0) > 0  # [BLOCK_K]: some row gives the key weight
                pointers = loading.key_pointers(inputs.value, inputs, b, h, k_offsets)[:, None]
                pointers = pointers + dv_offsets[None, :] * inputs.value.stride_d
                value = tl.load(pointers, mask=live[:, None] & (dv_offsets[None, :] < inputs.value_dim), other=0.0)
            else:
                # The values themselves: in decoding LASER's e^V is computed below
                value = loading.load_value_operand(inputs, b, h, k_offsets, True, blocks)
            if CAREFUL:
                value, acc, needs_exact, has_large_value = forward.checked_values(
                    value, acc, needs_exact, has_large_value, numerator if algebra.reweighted else None,
                    inputs, algebra, masks, b, h, row_heads, q_offsets, k_offsets, True, blocks,
                )  # fmt: skip
            elif algebra.laser:
                x = value.to(tl.float32)  # [BLOCK_K, BLOCK_DV]
                largest_value = tl.maximum(largest_value, tl.max(tl.abs(x), 1))
                value = laser.exponential_operand(tl.exp2(x * LOG2E), value.dtype)
            # acc [BLOCK_Q, BLOCK_DV], product_sums [BLOCK_K, BLOCK_DV]
            if blocks.BLOCK_Q > 1:
                acc += products.dot_weights(numerator, value, algebra, blocks)
            elif CAREFUL:
                acc += products.dot(numerator, value, blocks)
            else:
                product_sums += tl.trans(numerator) * value.to(tl.float32)
    rows = tl.arange(0, blocks.BLOCK_Q)
    pointers = _part_pointers(parts, PART_MARK, splits, split, ROWS_STORED) + rows
    tl.store(pointers, needs_exact.to(tl.float32), mask=rows < ROWS_STORED)
    pointers, mask = _sum_pointers(sums, splits, split, ROWS_STORED, blocks.BLOCK_Q, blocks)
    tl.store(pointers, acc, mask=mask)


@triton.jit
def _negligible(inputs, algebra, count, tied, row_heads):
    """The largest u^p of each row that counts as 0, [ROWS_STORED]: 2^-24 / max(p, N / p).

    2^-24 is half an ulp of 1, the largest u^p. All omitted u^p together, at most N of them, are
    then at most 2^-24 p, which is p times the rounding of u. 2^-24 / (N / p) alone bounds that sum.
    Where p > sqrt(N), the limit is 2^-24 / p instead, so as to agree with the CPU, whose limit, of
    u^(p - 1), also serves the gradients (``live_threshold``). No gradient uses the weights of this
    kernel: the backward of a re-weighted decoding call runs the ordinary forward again. LASER takes
    the logarithm of small sums and omits no weight.
    """
    negligible = tl.zeros_like(count)
    if not algebra.laser:
        power = tl.maximum(negligible + weighting.head_power(inputs, algebra, row_heads), 1.0)
        negligible = tl.where(tied, 0.0, 2.0**-24 / (power * tl.maximum(count / (power * power), 1.0)))
    return negligible


@triton.jit
def combine(inputs, algebra, masks, parts, sums, splits, outputs, ROWS_STORED: tl.constexpr, blocks):
    """Stores the forward's outputs. Sums are added in the order of the splits."""
    b, _h, row_heads, q_offsets = _query_rows(inputs, ROWS_STORED)
    count = masking.visible_count(masks, inputs, b, row_heads, q_offsets)
    row_max, shift, phi_sum = _merged_statistics(algebra, parts, splits, ROWS_STORED)
    rows = tl.arange(0, ROWS_STORED)
    power_sum = tl.zeros([ROWS_STORED], tl.float32)
    acc = tl.zeros([ROWS_STORED, blocks.BLOCK_DV], tl.float32)
    needs_exact = power_sum > 0.0
    for split in tl.range(splits, loop_unroll_factor=LOADED_AT_ONCE):
        pointers, _all = _sum_pointers(sums, splits, split, ROWS_STORED, ROWS_STORED, blocks)
        split_acc = tl.load(pointers)  # [ROWS_STORED, BLOCK_DV]
        if algebra.reweighted:
            power_sum += tl.load(_part_pointers(parts, PART_POWER_SUM, splits, split, ROWS_STORED) + rows)
        elif algebra.shifted:
            split_max = tl.load(_part_pointers(parts, PART_MAX, splits, split, ROWS_STORED) + rows)
            split_shift = row_shift(split_max, algebra)  # [ROWS_STORED]
            split_acc = split_acc * tl.exp2(tl.minimum(split_shift - shift, 0.0))[:, None]
        if algebra.laser:
            marks = tl.load(_part_pointers(parts, PART_MARK, splits, split, ROWS_STORED) + rows)  # [ROWS_STORED]
            needs_exact = needs_exact | (marks > 0.0)
        acc += split_acc
    peak = tl.zeros_like(phi_sum)
    if algebra.reweighted:
        largest_phi = algebra.phi.value(row_max, shift, algebra)
        _threshold, _inverse_spread, _tied, peak = weighting.row_threshold(inputs, algebra, count, phi_sum, largest_phi)
    # The forward's vector of full tiles with a large value, of which store_results takes the
    # maximum: any length would do. In decoding it is 0, since every tile is treated as a partial
    # one. The rows that see a large value are in needs_exact, from PART_MARK
    no_large_value = tl.zeros([16], tl.float32)
    forward.store_results(
        inputs, algebra, outputs, b, row_heads, q_offsets, count, row_max, shift, phi_sum, power_sum, peak, acc,
        needs_exact, no_large_value, blocks,
    )  # fmt: skip
