"""Gradients of the keys and values, BLOCK_K keys of a key head per program. Tiles are transposed:
[BLOCK_K, BLOCK_Q].
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


@triton.jit
def key_gradients(
    inputs, algebra, masks, incoming_grad, outputs, row_vectors, grad_key, grad_value, EXACT: tl.constexpr, tiling
):  # fmt: skip
    """Stores grad_key [B, Hk, Lk, D] and grad_value [B, Hk, Lk, Dv], summed over the query heads
    that share the key head.

    With LASER ``incoming_grad`` is dL/d(A e^V), except in the EXACT variant, where it is grad_out.
    EXACT computes the share of LASER's marked rows and adds it to what the other variant stored for
    all other rows.
    """
    block = tl.program_id(0)
    key_heads = inputs.heads // inputs.group
    b, key_head = tl.program_id(1) // key_heads, tl.program_id(1) % key_heads
    first_head = key_head * inputs.group  # loads of keys and values take a query head
    if EXACT:
        exact_head_count = 0
        for head_of_group in range(inputs.group):
            exact_head_count += tl.load(outputs.exact_heads + b * inputs.heads + first_head + head_of_group)
        if exact_head_count == 0:
            return
    k_offsets = block * tiling.BLOCK_K + tl.arange(0, tiling.BLOCK_K)  # [BLOCK_K]
    d_offsets, dv_offsets = tl.arange(0, tiling.BLOCK_D), tl.arange(0, tiling.BLOCK_DV)
    # key [BLOCK_K, BLOCK_D], key_rnorm [BLOCK_K], value [BLOCK_K, BLOCK_DV]
    key, key_rnorm = scoring.load_score_keys(inputs, algebra, b, first_head, k_offsets, IS_PARTIAL=True, tiling=tiling)
    value = loading.load_value_operand(inputs, b, first_head, k_offsets, IS_PARTIAL=True, tiling=tiling)
    # key_scale [BLOCK_K]: with cosine the mantissa of 1 / |k|; not used without cosine or with
    # unit vectors
    key_scale = key_rnorm
    if algebra.cosine and inputs.unit_key_fp16 is None:
        key, key_scale = norms.scaled_operand(key, key_rnorm)
    tile_range = masking.query_tile_range(masks, inputs, tiling, block)
    # sum_i dL/ds_ij c_i q_i, with cosine sum_i dL/ds_ij c_i q_i / |q_i|
    key_sum = tl.zeros([tiling.BLOCK_K, tiling.BLOCK_D], tl.float32)
    # sum_i A_ij incoming_tile_i, in EXACT sum_i ``laser._term``, which is dL/dV
    value_sum = tl.zeros([tiling.BLOCK_K, tiling.BLOCK_DV], tl.float32)
    for head_of_group in range(inputs.group):
        h = first_head + head_of_group
        for IS_PARTIAL in tl.static_range(1, -1, -1):  # partial tiles first; any order would do
            for n in range(masking.tile_count(masks.query_tiles, tile_range, b, h, block, IS_PARTIAL)):
                start = masking.tile_index(masks.query_tiles, tile_range, b, h, block, n, IS_PARTIAL) * tiling.BLOCK_Q
                q_offsets = start + tl.arange(0, tiling.BLOCK_Q)  # [BLOCK_Q]
                # Only EXACT loads the marks. In the other variant incoming_tile of marked rows is
                # 0, and so are their row vectors except PRODUCT_SCALE, ROW_BIAS and SHIFT: these
                # rows add nothing (``store_row_vectors``)
                active = q_offsets < inputs.query_length
                if EXACT:
                    active = backward_rows.active_rows(outputs, inputs, algebra, b, h, q_offsets, EXACT)
                # query, grad_operand [BLOCK_Q, BLOCK_D]; incoming_tile [BLOCK_Q, BLOCK_DV], the
                # gradient of the weighted sum: dL/d(A V), or LASER's dL/d(A e^V), not used by
                # EXACT; mean_grad, product_scale, row_bias and the fields of row [BLOCK_Q]
                query, grad_operand = loading.load_query_operands(inputs, b, h, q_offsets, tiling)
                incoming_tile = loading.load_like_out(incoming_grad, inputs, b, h, q_offsets, tiling)
                mean_grad, product_scale, row_bias, row = backward_rows.load_row_vectors(
                    row_vectors, algebra, b, h, q_offsets, active, EXACT
                )
                # s, visible, weights, grad_weights, grad_phi, derivative [BLOCK_K, BLOCK_Q];
                # grad_phi is as in query_gradients, until mean_grad is subtracted below
                s, visible, _scaled_dots = scoring.tile_scores(
                    products.dot(key, tl.trans(query), tiling), inputs, algebra, masks, b, h,
                    q_offsets[None, :], k_offsets[:, None], product_scale[None, :], key_scale[:, None],
                    row_bias[None, :], IS_PARTIAL,
                )  # fmt: skip
                if EXACT:
                    count = masking.visible_count(masks, inputs, b, h, q_offsets)  # [BLOCK_Q]
                    exact = laser.exact_row(outputs.saved, inputs, algebra, count, b, h, q_offsets, row.delta)
                    exact = laser.expanded(exact, KEY_AXIS=0)  # fields [1, BLOCK_Q]
                    log_weights, _log_u = laser.log_weights(s, exact, inputs, algebra, h)
                    # Scores of rows that are not active are meaningless, but exact_row loads their
                    # real statistics. Such weights are removed. included [BLOCK_K, BLOCK_Q]
                    included = visible & active[None, :]
                    log_weights = tl.where(included, log_weights, float("-inf"))
                    weighted_grad, value_sum = laser.weighted_grad_and_value_sum(
                        log_weights, value_sum, incoming_grad, outputs, inputs, b, h, q_offsets, active, k_offsets,
                        tiling,
                    )  # fmt: skip
                    _grad_log_numerator, grad_phi, derivative = laser.gradients_of_marked(
                        s, weighted_grad, exact, inputs, algebra, h
                    )
                else:
                    grad_weights = products.dot(value, tl.trans(incoming_tile), tiling)
                    if inputs.seed is not None:  # kept [BLOCK_K, BLOCK_Q]
                        kept = dropout.kept(inputs, b, h, q_offsets, block * tiling.BLOCK_K, tiling.BLOCK_K, KEY_AXIS=0)
                        grad_weights = tl.where(kept, grad_weights * inputs.keep_scale, 0.0)
                    weights, grad_phi, derivative, _u = weighting.weights_and_gradients(
                        s, grad_weights, weighting.expanded(row, KEY_AXIS=0), inputs, algebra, h
                    )
                    if inputs.seed is not None:
                        weights = tl.where(kept, weights * inputs.keep_scale, 0.0)
                if algebra.reweighted:
                    grad_phi = grad_phi - mean_grad[None, :]
                # Both [BLOCK_Q], factors of grad_products
                grad_factor, operand_scale = row.grad_factor, product_scale
                if inputs.unit_key_fp16 is not None:  # grad_operand includes product_scale
                    operand_scale = tl.full(product_scale.shape, 1.0, tl.float32)
                if algebra.inputs_are_fp16 and not algebra.reweighted:
                    # Re-weighted rows are multiplied in tf32 (dot_grad_scores), which needs no such
                    # factors. Some others are, too; there the factors change nothing
                    grad_factor, operand_scale, factor_pow2, scale_pow2 = _float16_safe_factors(
                        grad_factor, operand_scale
                    )
                # [BLOCK_K, BLOCK_Q]: dL/ds c_i, with cosine times the mantissa of 1 / |q_i|: the
                # score unit in product_scale cancels with grad_factor's. With unit vectors
                # grad_operand has these factors
                grad_products = (grad_phi * grad_factor[None, :]) * derivative * operand_scale[None, :]
                if EXACT:
                    grad_products = tl.where(included, grad_products, 0.0)
                # In a partial tile 0 times a non-finite query, or grad_out of a fully masked row,
                # would be NaN: both factors of a product become 0
                if IS_PARTIAL:
                    grad_products = tl.where(visible, grad_products, 0.0)
                    grad_operand = products.finite_or_zero(grad_operand)
                    if not EXACT:
                        weights = tl.where(visible, weights, 0.0)
                        incoming_tile = tl.where(row.weight_factor[:, None] == 0.0, 0.0, incoming_tile)
                if not EXACT:
                    value_sum += products.dot_weights(weights, incoming_tile, algebra, tiling)
                tile_sum = products.dot_grad_scores(  # [BLOCK_K, BLOCK_D]
                    grad_products, grad_operand, algebra, tiling, HAS_ROW_FACTORS=True
                )
                if algebra.inputs_are_fp16 and not algebra.reweighted:
                    tile_sum = tile_sum * factor_pow2 * scale_pow2
                key_sum += tile_sum
    # mask [BLOCK_K], key_bounds [BLOCK_K, BLOCK_D], value_bounds [BLOCK_K, BLOCK_DV]
    mask = k_offsets < inputs.key_length
    key_bounds = mask[:, None] & (d_offsets[None, :] < inputs.head_dim)
    value_bounds = mask[:, None] & (dv_offsets[None, :] < inputs.value_dim)
    if algebra.laser and not EXACT:  # dL/dV = e^V dL/d(e^V)
        pointers = loading.key_pointers(inputs.value_operand, inputs, b, first_head, k_offsets)[:, None]
        pointers = pointers + dv_offsets * inputs.value_operand.stride_d
        value_sum = value_sum * loading.reload(pointers, value_bounds).to(tl.float32)
    backward_rows.store_or_add(
        loading.head_pointer(grad_value, b, key_head)
        + k_offsets[:, None] * grad_value.stride_l
        + dv_offsets[None, :] * grad_value.stride_d,
        value_sum,
        value_bounds,
        EXACT,
    )
    if algebra.cosine:  # the key is loaded again after the store, as in query_gradients
        key_sum = _through_key_norm(key_sum, key_rnorm, inputs, b, first_head, k_offsets, d_offsets, key_bounds)
    backward_rows.store_or_add(
        loading.head_pointer(grad_key, b, key_head)
        + k_offsets[:, None] * grad_key.stride_l
        + d_offsets[None, :] * grad_key.stride_d,
        key_sum,
        key_bounds,
        EXACT,
    )


@triton.jit
def _float16_safe_factors(grad_factor, operand_scale):
    """Both factors [BLOCK_Q] of grad_products, each divided by a power of two, and both powers.

    With the whole factors grad_products might overflow float16. The powers multiply the product.
    Each is that of the tile's largest factor. Rows whose factors are far below the largest may lose
    digits: numbers below 2^-14 are subnormal in float16.
    """
    factor_pow2 = norms.largest_power_of_two(grad_factor)
    scale_pow2 = norms.largest_power_of_two(operand_scale)
    return grad_factor / factor_pow2, operand_scale / scale_pow2, factor_pow2, scale_pow2


@triton.jit
def _through_key_norm(grad_unit_key, key_rnorm, inputs, b, first_head, k_offsets, d_offsets, key_bounds):
    """dL/dk [BLOCK_K, BLOCK_D] from dL/d(k / |k|): the part along k is removed."""
    pointers = loading.key_pointers(inputs.key, inputs, b, first_head, k_offsets)[:, None]
    pointers = pointers + d_offsets * inputs.key.stride_d
    # A non-finite key that no row sees has the gradient 0. If a row sees it, its sum is already NaN
    key_rnorm = tl.where(key_rnorm == key_rnorm, key_rnorm, 0.0)
    key, key_scale = norms.scaled_operand(products.finite_or_zero(loading.reload(pointers, key_bounds)), key_rnorm)
    unit_key = key.to(tl.float32) * key_scale[:, None]  # [BLOCK_K, BLOCK_D]
    return (grad_unit_key - tl.sum(grad_unit_key * unit_key, 1)[:, None] * unit_key) * key_rnorm[:, None]
