"""Gradients of an additive bias of any broadcast shape."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import (
    backward_rows,
    dropout,
    forward,
    laser,
    loading,
    masking,
    products,
    scoring,
    weighting,
)


@triton.jit
def bias_gradients(
    inputs, algebra, masks, incoming_grad, outputs, row_vectors, grad_bias, heads, ALL_BATCH: tl.constexpr,
    ALL_HEADS: tl.constexpr, ALL_ROWS: tl.constexpr, ALL_KEYS: tl.constexpr, EXACT: tl.constexpr, tiling,
):  # fmt: skip
    """Stores grad_bias. A program has a tile of the bias, and sums in a fixed order over all
    positions that the tile is broadcast to.

    ALL_BATCH, ALL_HEADS, ALL_ROWS, ALL_KEYS: whether the bias is broadcast along this dimension.
    ``heads`` is the bias's number of heads. ``incoming_grad`` and EXACT are as in key_gradients.
    """
    key_blocks = 1
    if not ALL_KEYS:
        key_blocks = masking.ceil_div(inputs.key_length, tiling.BLOCK_K)
    # Both block indices share the grid's first dimension, since CUDA limits the others to 65535
    bias_q_block, bias_k_block = tl.program_id(0) // key_blocks, tl.program_id(0) % key_blocks
    q_range, k_range = tl.arange(0, tiling.BLOCK_Q), tl.arange(0, tiling.BLOCK_K)
    # Broadcast over rows or keys, an element is a sum of so many terms that it is kept in double:
    # by row, to be summed at the end with ALL_ROWS; by key with ALL_ROWS alone. Over sequences or
    # heads it has a compensated sum
    error = tl.zeros([tiling.BLOCK_Q, tiling.BLOCK_K], tl.float32)
    if ALL_KEYS:
        total = tl.zeros([tiling.BLOCK_Q], tl.float64)
    elif ALL_ROWS:
        total = tl.zeros([tiling.BLOCK_K], tl.float64)
    else:
        total = tl.zeros([tiling.BLOCK_Q, tiling.BLOCK_K], tl.float32)
    bias_b, bias_h = tl.program_id(1) // heads, tl.program_id(1) % heads
    first_b, stop_b = bias_b, bias_b + 1
    # x * 0 is 0 as a tensor, so that the loops' bounds have one type in all cases
    if ALL_BATCH:
        first_b, stop_b = bias_b * 0, bias_b * 0 + inputs.batch
    first_h, stop_h = bias_h, bias_h + 1
    if ALL_HEADS:
        first_h, stop_h = bias_h * 0, bias_h * 0 + inputs.heads
    first_q_block, stop_q_block = bias_q_block, bias_q_block + 1
    if ALL_ROWS:  # bias_q_block is 0
        stop_q_block = first_q_block + masking.ceil_div(inputs.query_length, tiling.BLOCK_Q)
    for b in range(first_b, stop_b):
        for h in range(first_h, stop_h):
            for q_block in range(first_q_block, stop_q_block):
                q_offsets = q_block * tiling.BLOCK_Q + q_range  # [BLOCK_Q]
                active = backward_rows.active_rows(outputs, inputs, algebra, b, h, q_offsets, EXACT)  # [BLOCK_Q]
                query = loading.load_queries(inputs, b, h, q_offsets, tiling)  # [BLOCK_Q, BLOCK_D]
                # [BLOCK_Q, BLOCK_DV]: the gradient of the weighted sum, dL/d(A V) or LASER's
                # dL/d(A e^V), not used by EXACT
                incoming_tile = loading.load_like_out(incoming_grad, inputs, b, h, q_offsets, tiling)
                # mean_grad, row_bias, the fields of row, count, scale_in_unit, query_rnorm and
                # product_scale [BLOCK_Q]; the fields of exact [BLOCK_Q, 1]. The row vector
                # PRODUCT_SCALE is not used: query_operand scales the queries here and returns the
                # same factor
                mean_grad, _product_scale, row_bias, row = backward_rows.load_row_vectors(
                    row_vectors, algebra, b, h, q_offsets, active, EXACT
                )
                count = masking.visible_count(masks, inputs, b, h, q_offsets)
                scale_in_unit = scoring.score_scale(inputs, algebra, count, h) * algebra.phi.score_unit
                if EXACT:
                    exact = laser.exact_row(outputs.saved, inputs, algebra, count, b, h, q_offsets, row.delta)
                    exact = laser.expanded(exact, KEY_AXIS=1)
                query_rnorm = scoring.load_query_rnorm(inputs, algebra, b, h, q_offsets)
                query, product_scale = scoring.query_operand(query, query_rnorm, scale_in_unit, inputs, algebra)
                start, _full_start, _full_stop, stop = masking.key_tile_range(masks, inputs, tiling, b, q_block)
                if EXACT:
                    stop = tl.where(tl.max(active.to(tl.int32)) > 0, stop, start)
                if not ALL_KEYS:  # with ALL_KEYS all tiles, else only this program's tile
                    start = tl.maximum(start, bias_k_block)
                    stop = tl.minimum(stop, bias_k_block + 1)
                # It reads no lists of tiles: under a mask it visits all tiles of the window
                for k_block in range(start, stop):
                    k_offsets = k_block * tiling.BLOCK_K + k_range  # [BLOCK_K]
                    # key [BLOCK_K, BLOCK_D], key_rnorm [BLOCK_K], value [BLOCK_K, BLOCK_DV]
                    key, key_rnorm = scoring.load_score_keys(
                        inputs, algebra, b, h, k_offsets, IS_PARTIAL=True, tiling=tiling
                    )
                    # s, visible, grad_weights, derivative and grad_phi, which is as in
                    # query_gradients: [BLOCK_Q, BLOCK_K]
                    s, visible, _scaled_dots = scoring.tile_scores(
                        products.dot(query, tl.trans(key), tiling), inputs, algebra, masks, b, h, q_offsets[:, None],
                        k_offsets[None, :], product_scale[:, None], key_rnorm[None, :], row_bias[:, None],
                        IS_PARTIAL=True,
                    )  # fmt: skip
                    if EXACT:
                        log_weights, _log_u = laser.log_weights(s, exact, inputs, algebra, h)
                        weighted_grad = laser.weighted_grad_of(
                            log_weights, incoming_grad, outputs, inputs, b, h, q_offsets, active, k_offsets, KEY_AXIS=1
                        )
                        _grad_log_numerator, grad_phi, derivative = laser.gradients_of_marked(
                            s, weighted_grad, exact, inputs, algebra, h
                        )
                    else:
                        value = loading.load_value_operand(inputs, b, h, k_offsets, IS_PARTIAL=True, tiling=tiling)
                        grad_weights = products.dot(incoming_tile, tl.trans(value), tiling)  # [BLOCK_Q, BLOCK_K]
                        if inputs.seed is not None:
                            kept = dropout.kept(  # [BLOCK_Q, BLOCK_K]
                                inputs, b, h, q_offsets, k_block * tiling.BLOCK_K, tiling.BLOCK_K, KEY_AXIS=1
                            )
                            grad_weights = tl.where(kept, grad_weights * inputs.keep_scale, 0.0)
                        _weights, grad_phi, derivative, _u = weighting.weights_and_gradients(
                            s, grad_weights, weighting.expanded(row, KEY_AXIS=1), inputs, algebra, h
                        )
                    # row.grad_factor is divided by the score unit; dL/d(bias) is not
                    grad_scores = tl.where(
                        visible & active[:, None],
                        (grad_phi - mean_grad[:, None])
                        * derivative
                        * row.grad_factor[:, None]
                        * algebra.phi.score_unit,
                        0.0,
                    )
                    if ALL_KEYS:
                        total += tl.sum(grad_scores, 1).to(tl.float64)
                    elif ALL_ROWS:
                        total += tl.sum(grad_scores, 0).to(tl.float64)
                    elif ALL_BATCH or ALL_HEADS:
                        total, error = forward.two_sum(total, error, grad_scores)
                    else:
                        total += grad_scores
    q_offsets = bias_q_block * tiling.BLOCK_Q + q_range
    k_offsets = bias_k_block * tiling.BLOCK_K + k_range
    matrix_pointer = loading.head_pointer(grad_bias, bias_b, bias_h)
    if not (ALL_ROWS or ALL_KEYS):
        q_offsets = q_offsets.to(tl.int64)  # the bias of one head may have more than 2^31 elements
    if ALL_ROWS and ALL_KEYS:
        backward_rows.store_or_add(matrix_pointer, tl.sum(total, 0).to(tl.float32), True, EXACT)
    elif ALL_ROWS:
        pointers = matrix_pointer + k_offsets * grad_bias.stride_d
        backward_rows.store_or_add(pointers, total.to(tl.float32), k_offsets < inputs.key_length, EXACT)
    elif ALL_KEYS:
        pointers = matrix_pointer + q_offsets * grad_bias.stride_l
        backward_rows.store_or_add(pointers, total.to(tl.float32), q_offsets < inputs.query_length, EXACT)
    else:
        mask = (q_offsets[:, None] < inputs.query_length) & (k_offsets[None, :] < inputs.key_length)
        pointers = matrix_pointer + q_offsets[:, None] * grad_bias.stride_l + k_offsets[None, :] * grad_bias.stride_d
        backward_rows.store_or_add(pointers, forward.compensated(total, error), mask, EXACT)
