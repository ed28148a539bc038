"""Gradients of the queries, BLOCK_Q rows per program, and the row vectors for the other kernels.

In re-weighted rows dL/ds contains the mean of g over the whole row, which is known only after a
sweep. The kernel therefore keeps two sums over the keys, one with g and one without, and combines
them at the end.
"""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import (
    backward_rows,
    dropout,
    laser,
    loading,
    masking,
    norms,
    products,
    scoring,
    weighting,
)
from softfocus.backends.triton.kernels.pointwise import LN2, log2


@triton.jit
def query_gradients(
    inputs, algebra, masks, grad_out, outputs, row_vectors, grad_query, grad_exp_out, grad_head_scale, grad_power,
    EXACT: tl.constexpr, tiling,
):  # fmt: skip
    """Stores grad_query [B, H, Lq, D], and ``row_vectors`` for the other kernels; with LASER also
    ``grad_exp_out``, dL/d(A e^V), shaped like out.

    If ``grad_head_scale`` and ``grad_power`` are given, it also stores each row's share of the
    gradients of head_scale and power, [B, H, Lq]. EXACT computes LASER's marked rows only, the
    other variant all other rows. The other variant stores arbitrary gradients for marked rows.
    EXACT runs second and replaces them.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first: under a causal mask they take longest
    b, h = tl.program_id(1) // inputs.heads, tl.program_id(1) % inputs.heads
    q_offsets = block * tiling.BLOCK_Q + tl.arange(0, tiling.BLOCK_Q)  # [BLOCK_Q]
    d_offsets = tl.arange(0, tiling.BLOCK_D)  # [BLOCK_D]
    active = backward_rows.active_rows(outputs, inputs, algebra, b, h, q_offsets, EXACT)  # [BLOCK_Q]
    if EXACT:
        if tl.load(outputs.exact_heads + tl.program_id(1)) == 0:
            return
        if tl.max(active.to(tl.int32)) == 0:
            return
    query = loading.load_queries(inputs, b, h, q_offsets, tiling)  # [BLOCK_Q, BLOCK_D]
    # incoming_tile [BLOCK_Q, BLOCK_DV], the gradient of the weighted sum: dL/d(A V) = grad_out, or
    # LASER's dL/d(A e^V). In the EXACT variant it is grad_out and not used. delta [BLOCK_Q]
    if algebra.laser and not EXACT:
        incoming_tile, delta = backward_rows.laser_grad_exp_out(
            grad_out, outputs, inputs, b, h, q_offsets, active, tiling
        )
        row_heads = tl.zeros_like(q_offsets) + h
        mask = q_offsets < inputs.query_length
        loading.store_like_out(grad_exp_out, inputs, b, row_heads, q_offsets, mask, incoming_tile, tiling)
    else:
        incoming_tile = loading.load_like_out(grad_out, inputs, b, h, q_offsets, tiling)
        delta = backward_rows.load_delta(grad_out, outputs, inputs, algebra, b, h, q_offsets, tiling)
    delta = tl.where(active, delta, 0.0)
    count = masking.visible_count(masks, inputs, b, h, q_offsets)  # [BLOCK_Q]
    row = weighting.gradient_row(outputs.saved, inputs, algebra, count, b, h, q_offsets, delta)
    tile_row = weighting.expanded(row, KEY_AXIS=1)  # vectors [BLOCK_Q, 1], as those of exact
    if EXACT:
        exact = laser.exact_row(outputs.saved, inputs, algebra, count, b, h, q_offsets, delta)
        exact = laser.expanded(exact, KEY_AXIS=1)
    row_bias = scoring.row_bias_of(inputs, algebra, count, b)
    query_rnorm = scoring.load_query_rnorm(inputs, algebra, b, h, q_offsets)
    # [BLOCK_Q]: score_scale is c_i in natural units; product_scale is what multiplies the products:
    # c_i in the score unit, with cosine times the mantissa of 1 / |q_i|
    score_scale = scoring.score_scale(inputs, algebra, count, h)
    query, product_scale = scoring.query_operand(
        query, query_rnorm, score_scale * algebra.phi.score_unit, inputs, algebra
    )
    if not EXACT:
        _store_query_operands(query, inputs, b, h, q_offsets, tiling)
    grad_factor = row.grad_factor
    if EXACT:  # gradients_of_marked includes all factors of the row
        grad_factor = tl.full(count.shape, 1.0, tl.float32)
    tile_range = masking.key_tile_range(masks, inputs, tiling, b, block)

    # sum_j grad_phi phi' 2^-shift k and, of re-weighted rows, sum_j phi' 2^-shift k; with cosine
    # k / |k| in place of k. In EXACT phi' 2^-shift is what gradients_of_marked returns
    grad_sum = tl.zeros([tiling.BLOCK_Q, tiling.BLOCK_D], tl.float32)
    derivative_sum = tl.zeros([tiling.BLOCK_Q, tiling.BLOCK_D], tl.float32)
    grad_phi_sum = tl.zeros([tiling.BLOCK_Q], tl.float32)  # sum_j grad_phi
    grad_power_sum = tl.zeros([tiling.BLOCK_Q], tl.float32)  # sum_j A (dL/dA - delta) log2 u
    for IS_PARTIAL in tl.static_range(1, -1, -1):  # partial tiles first; any order would do
        for n in range(masking.tile_count(masks.key_tiles, tile_range, b, h, block, IS_PARTIAL)):
            k_offsets = scoring.key_offsets(masks, tile_range, b, h, block, n, IS_PARTIAL, tiling)  # [BLOCK_K]
            # key [BLOCK_K, BLOCK_D], key_rnorm [BLOCK_K]; s, visible [BLOCK_Q, BLOCK_K]
            key, key_rnorm, s, visible, _scaled_dots = scoring.scores_of_keys(
                query, inputs, algebra, masks, b, h, q_offsets, k_offsets, product_scale, row_bias, IS_PARTIAL, tiling
            )
            # All [BLOCK_Q, BLOCK_K]: grad_weights, derivative, log2_u; grad_phi, which is dL/dphi_s
            # before mean_grad is subtracted and grad_factor multiplied
            # (``weighting.weights_and_gradients``), in EXACT dL/df before mean_grad is subtracted;
            # and grad_log_numerator = A (dL/dA - delta), the gradient of the log of f or u^p
            if EXACT:
                log_weights, log_u = laser.log_weights(s, exact, inputs, algebra, h)
                weighted_grad = laser.weighted_grad_of(
                    log_weights, grad_out, outputs, inputs, b, h, q_offsets, active, k_offsets, KEY_AXIS=1
                )
                grad_log_numerator, grad_phi, derivative = laser.gradients_of_marked(
                    s, weighted_grad, exact, inputs, algebra, h
                )
                log2_u = tl.where(log_u > float("-inf"), log_u, 0.0) / LN2
            else:
                value = loading.load_value_operand(inputs, b, h, k_offsets, IS_PARTIAL, tiling)  # [BLOCK_K, BLOCK_DV]
                grad_weights = products.dot(incoming_tile, tl.trans(value), tiling)
                if inputs.seed is not None:
                    first = scoring.first_key(masks, tile_range, b, h, block, n, IS_PARTIAL, tiling)
                    # [BLOCK_Q, BLOCK_K]
                    kept = dropout.kept(inputs, b, h, q_offsets, first, tiling.BLOCK_K, KEY_AXIS=1)
                    grad_weights = tl.where(kept, grad_weights * inputs.keep_scale, 0.0)
                weights, grad_phi, derivative, u = weighting.weights_and_gradients(
                    s, grad_weights, tile_row, inputs, algebra, h
                )
                grad_log_numerator = weights * (grad_weights - tile_row.delta)
                log2_u = log2(tl.where(u > 0.0, u, 1.0), algebra.inputs_are_fp32)
            if IS_PARTIAL:
                # phi' of masked scores is 0, but grad_phi may be NaN
                grad_phi = tl.where(visible, grad_phi, 0.0)
            if inputs.unit_key_fp16 is not None:
                key = loading.load_bf16_unit_keys(inputs, b, h, k_offsets, IS_PARTIAL, tiling)  # [BLOCK_K, BLOCK_D]
            elif algebra.cosine:
                if algebra.inputs_are_fp16:
                    # grad_phi derivative / |k| may overflow float16. Each key takes its own power
                    # of two: one for all keys of the tile would flush to 0 those of ordinary norm
                    # beside a tiny one
                    key, key_rnorm = norms.scaled_operand(key, key_rnorm)
                derivative = derivative * key_rnorm[None, :]
                if IS_PARTIAL:
                    derivative = tl.where(visible, derivative, 0.0)
            if IS_PARTIAL:  # 0 times a hidden non-finite key would be NaN
                key = products.finite_or_zero(key)
            grad_sum += products.dot_grad_scores(  # [BLOCK_Q, BLOCK_D], as derivative_sum
                grad_phi * derivative,
                key,
                algebra,
                tiling,
                HAS_ROW_FACTORS=EXACT,  # in grad_phi
            )
            if algebra.reweighted:
                derivative_sum += products.dot_grad_scores(derivative, key, algebra, tiling, HAS_ROW_FACTORS=False)
                grad_phi_sum += tl.sum(grad_phi, 1)
                if grad_power is not None:
                    terms = grad_log_numerator * log2_u
                    if IS_PARTIAL:
                        terms = tl.where(visible, terms, 0.0)
                    grad_power_sum += tl.sum(terms, 1)

    # grad_scaled_query [BLOCK_Q, BLOCK_D] becomes sum_j dL/ds_ij k_j, which is dL/d(c_i q_i). With
    # cosine it is sum_j dL/ds_ij k_j / |k_j| = dL/d(c_i q_i / |q_i|)
    grad_scaled_query = grad_sum
    mean_grad = tl.zeros_like(grad_phi_sum)  # [BLOCK_Q]
    if algebra.reweighted:
        # Rows without a threshold: those that see few keys, and tied rows
        no_threshold = (count <= weighting.MAX_UNTHRESHOLDED_COUNT) | weighting.is_tied(row)
        mean_grad = tl.where(no_threshold, 0.0, grad_phi_sum / tl.maximum(count, 1.0))
        grad_scaled_query = grad_sum - mean_grad[:, None] * derivative_sum
    grad_scaled_query = grad_scaled_query * grad_factor[:, None]
    mask = q_offsets < inputs.query_length
    if EXACT:
        mask = active
    sees_a_key = mask & (count > 0.0)  # not fully masked
    # Stored before the queries are loaded again. The compiler does not move that load above a
    # store, and only from here on are there registers for it
    backward_rows.store_row_vectors(
        row_vectors, algebra, mean_grad, product_scale, row_bias, row, grad_factor / algebra.phi.score_unit, b, h,
        q_offsets, mask, active, EXACT,
    )  # fmt: skip
    # The head's first element in [B, H, Lq]. int64, because B H Lq may be 2^31 or more
    head_start = (tl.full([], 0, tl.int64) + tl.program_id(1)) * inputs.query_length
    if grad_power is not None:
        # 0 in tied rows. A row that sees a NaN is not tied, and its share is NaN
        share = tl.where(sees_a_key & (weighting.is_tied(row) == 0), grad_power_sum * LN2, 0.0)
        tl.store(grad_power + head_start + q_offsets, share, mask=mask)
    grad_query_tile = grad_scaled_query  # times c_i below; with cosine also (1 - q q^T / |q|^2) / |q|
    if algebra.cosine or grad_head_scale is not None:
        query_or_unit_query = _query_or_unit_query(query_rnorm, inputs, algebra, b, h, q_offsets, d_offsets)
        # [BLOCK_Q]: dL/dc_i, the dot product of grad_scaled_query with q, or q / |q|
        grad_dot_query = tl.sum(grad_scaled_query * query_or_unit_query.to(tl.float32), 1)
        if grad_head_scale is not None:
            share = grad_dot_query * scoring.base_scale(inputs, algebra, count)
            tl.store(grad_head_scale + head_start + q_offsets, tl.where(sees_a_key, share, 0.0), mask=mask)
        if algebra.cosine:
            grad_query_tile = (grad_scaled_query - grad_dot_query[:, None] * query_or_unit_query) * query_rnorm[:, None]
    grad_query_tile = tl.where(sees_a_key[:, None], grad_query_tile * score_scale[:, None], 0.0)
    tl.store(
        loading.head_pointer(grad_query, b, h)
        + q_offsets[:, None] * grad_query.stride_l
        + d_offsets[None, :] * grad_query.stride_d,
        grad_query_tile.to(grad_query.pointer.dtype.element_ty),
        mask=mask[:, None] & (d_offsets[None, :] < inputs.head_dim),
    )


@triton.jit
def _store_query_operands(query, inputs, b, h, q_offsets, tiling):
    """Stores the query operand [BLOCK_Q, BLOCK_D] for key_gradients, with cosine."""
    if inputs.unit_key_fp16 is not None:
        query_fp32 = query.to(tl.float32)
        loading.store_queries(inputs.unit_query_fp16, inputs, b, h, q_offsets, query_fp32, tiling)
        loading.store_queries(inputs.unit_query_bf16, inputs, b, h, q_offsets, query_fp32, tiling)
    if inputs.scaled_query is not None:
        loading.store_queries(inputs.scaled_query, inputs, b, h, q_offsets, query, tiling)


@triton.jit
def _query_or_unit_query(query_rnorm, inputs, algebra, b, h, q_offsets, d_offsets):
    """The queries [BLOCK_Q, BLOCK_D], loaded again: q / |q| with cosine, else q."""
    pointers = (
        loading.head_pointer(inputs.query, b, h)
        + q_offsets[:, None] * inputs.query.stride_l
        + d_offsets[None, :] * inputs.query.stride_d
    )
    query_bounds = (q_offsets[:, None] < inputs.query_length) & (d_offsets[None, :] < inputs.head_dim)
    query = loading.reload(pointers, query_bounds)
    if algebra.cosine:
        query, mantissa = norms.scaled_operand(query, query_rnorm)
        query = query.to(tl.float32) * mantissa[:, None]
    return query
