"""Loads and stores: strided arrays, vectors of rows, keys and values in pages."""

import triton
import triton.language as tl

COUNT, MAXIMUM, LOG_NORM, PEAK, F_SUM, POWER_SUM, MARK, MAXIMUM_IN_UNIT = (tl.constexpr(n) for n in range(8))
"""Indices of the vectors that the forward saves in ``Outputs.saved``: first ``RowStatistics``, then
what the backward needs. MARK is not 0 in LASER's marked rows. MAXIMUM_IN_UNIT is the maximum
in the score unit. It is saved because MAXIMUM times the unit would be rounded, and the shift of the
backward would differ from that of the forward.
"""


@triton.jit
def head_pointer(array, b, h):
    """Pointer to the matrix [L, D] of one head, or pointers shaped like h or b."""
    zero = tl.full([], 0, tl.int64)  # offsets of whole heads may exceed 2^31
    return array.pointer + (zero + b) * array.stride_b + (zero + h) * array.stride_h


@triton.jit
def sequence_length(inputs, b):
    """How many keys a sequence has."""
    length = inputs.key_length
    if inputs.lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(inputs.lengths + b), 0), inputs.key_length)
    return length


@triton.jit
def load_matrix(array, matrix_pointer, row_offsets, column_offsets, length, width):
    """Load the rows ``row_offsets`` [R] and the columns ``column_offsets`` [C] of a head's matrix
    [length, width]: [R, C], 0 beyond the matrix. ``matrix_pointer`` points to it
    (``head_pointer``), and ``array`` has its strides.
    """
    offsets = row_offsets[:, None] * array.stride_l + column_offsets[None, :] * array.stride_d
    mask = (row_offsets[:, None] < length) & (column_offsets[None, :] < width)
    return tl.load(matrix_pointer + offsets, mask=mask, other=0.0)


@triton.jit
def store_matrix(array, matrix_pointer, row_offsets, column_offsets, length, width, x):
    """Store x [R, C] in the array's dtype at the elements that ``load_matrix`` loads."""
    pointers = matrix_pointer + row_offsets[:, None] * array.stride_l + column_offsets[None, :] * array.stride_d
    mask = (row_offsets[:, None] < length) & (column_offsets[None, :] < width)
    tl.store(pointers, x.to(array.pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_column(array, b, h, row_offsets, length):
    """The rows ``row_offsets`` [R] of an array [B, H, L, 1]: float32 [R], 0 beyond ``length``."""
    return tl.load(head_pointer(array, b, h) + row_offsets * array.stride_l, mask=row_offsets < length, other=0.0).to(
        tl.float32
    )


@triton.jit
def row_pointers(vectors, b, h, q_offsets, INDEX: tl.constexpr):
    """Pointers [R] to the rows ``q_offsets`` of the vector INDEX of a RowArray [n, B, H, Lq]: the
    saved vectors, or the row vectors.
    """
    zero = tl.full([], 0, tl.int64)
    return (
        vectors.pointer
        + (zero + INDEX) * vectors.stride_n
        + (zero + b) * vectors.stride_b
        + (zero + h) * vectors.stride_h
        + q_offsets
    )


@triton.jit
def load_vector(vectors, b, h, q_offsets, INDEX: tl.constexpr, mask, OTHER: tl.constexpr):
    """The rows ``q_offsets`` [R] of the vector INDEX (``row_pointers``); OTHER where ``mask`` is
    false.
    """
    return tl.load(row_pointers(vectors, b, h, q_offsets, INDEX), mask=mask, other=OTHER)


@triton.jit
def store_vector(vectors, b, h, q_offsets, INDEX: tl.constexpr, x, mask):
    """Store x [R] in the rows ``q_offsets`` of the vector INDEX (``row_pointers``)."""
    tl.store(row_pointers(vectors, b, h, q_offsets, INDEX), x, mask=mask)


@triton.jit
def reload(pointers, mask):
    """Load again a tile that was loaded before a loop and is not needed inside it.

    The cache modifier differs from that of the first load. Otherwise the compiler would merge both
    loads and keep the tile in registers through the loop.
    """
    return tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _load_like_queries(array, inputs, b, h, q_offsets, tiling):
    """A tile [BLOCK_Q, BLOCK_D] of an array shaped like the queries."""
    d_offsets = tl.arange(0, tiling.BLOCK_D)
    matrix_pointer = head_pointer(array, b, h)
    return load_matrix(array, matrix_pointer, q_offsets, d_offsets, inputs.query_length, inputs.head_dim)


@triton.jit
def load_queries(inputs, b, h, q_offsets, tiling):
    """Queries [BLOCK_Q, BLOCK_D]."""
    return _load_like_queries(inputs.query, inputs, b, h, q_offsets, tiling)


@triton.jit
def store_queries(array, inputs, b, h, q_offsets, x, tiling):
    """Store x [BLOCK_Q, BLOCK_D] to an array shaped like the queries."""
    d_offsets = tl.arange(0, tiling.BLOCK_D)
    store_matrix(array, head_pointer(array, b, h), q_offsets, d_offsets, inputs.query_length, inputs.head_dim, x)


@triton.jit
def load_query_operands(inputs, b, h, q_offsets, tiling):
    """Two tiles [BLOCK_Q, BLOCK_D]: the queries for products with keys, and the queries for
    products with the gradient of the scores. They differ where scores are products of unit vectors.
    With cosine query_gradients has stored them.
    """
    if inputs.unit_key_fp16 is None:
        if inputs.scaled_query is None:
            query = load_queries(inputs, b, h, q_offsets, tiling)
        else:
            query = _load_like_queries(inputs.scaled_query, inputs, b, h, q_offsets, tiling)
        grad_operand = query
    else:
        query = _load_like_queries(inputs.unit_query_fp16, inputs, b, h, q_offsets, tiling)
        grad_operand = _load_like_queries(inputs.unit_query_bf16, inputs, b, h, q_offsets, tiling)
    return query, grad_operand


@triton.jit
def load_like_out(array, inputs, b, h, q_offsets, tiling):
    """A tile [BLOCK_Q, BLOCK_DV] of an array shaped like the output."""
    dv_offsets = tl.arange(0, tiling.BLOCK_DV)
    return load_matrix(array, head_pointer(array, b, h), q_offsets, dv_offsets, inputs.query_length, inputs.value_dim)


@triton.jit
def key_pointers(array, inputs, b, h, k_offsets):
    """Pointers [BLOCK_K] to rows of keys or values, of the key head of the QUERY head h; in their
    pages if there is a page table.
    """
    if inputs.page_table is None:
        pointers = head_pointer(array, b, h // inputs.group) + k_offsets * array.stride_l
    else:
        page_index = k_offsets // inputs.page_size
        page_pointers = head_pointer(inputs.page_table, b, 0) + page_index.to(tl.int64) * inputs.page_table.stride_d
        page = tl.load(page_pointers, mask=k_offsets < sequence_length(inputs, b), other=0)
        pointers = (
            head_pointer(array, page, h // inputs.group) + (k_offsets - page_index * inputs.page_size) * array.stride_l
        )
    return pointers


@triton.jit
def load_tile(array, inputs, b, h, k_offsets, width, COLUMNS: tl.constexpr, IS_PARTIAL: tl.constexpr, tiling):
    """Keys [BLOCK_K, BLOCK_D] or values [BLOCK_K, BLOCK_DV]; 0 beyond the last key and the last
    column. h is a QUERY head (``key_pointers``). Only a partial tile can reach beyond the last key.
    Callers that do not know pass IS_PARTIAL = True.
    """
    column_offsets = tl.arange(0, COLUMNS)
    pointers = key_pointers(array, inputs, b, h, k_offsets)[:, None] + column_offsets[None, :] * array.stride_d
    if IS_PARTIAL:
        mask = (k_offsets[:, None] < sequence_length(inputs, b)) & (column_offsets[None, :] < width)
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif tiling.dims_fill_tile:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=tl.broadcast_to(column_offsets[None, :] < width, pointers.shape), other=0.0)
    return tile


@triton.jit
def load_keys(inputs, b, h, k_offsets, IS_PARTIAL: tl.constexpr, tiling):
    """Keys [BLOCK_K, BLOCK_D]."""
    return load_tile(inputs.key, inputs, b, h, k_offsets, inputs.head_dim, tiling.BLOCK_D, IS_PARTIAL, tiling)


@triton.jit
def load_bf16_unit_keys(inputs, b, h, k_offsets, IS_PARTIAL: tl.constexpr, tiling):
    """Unit vectors k / |k| [BLOCK_K, BLOCK_D], for products with the gradient of the scores."""
    return load_tile(inputs.unit_key_bf16, inputs, b, h, k_offsets, inputs.head_dim, tiling.BLOCK_D, IS_PARTIAL, tiling)


@triton.jit
def load_value_operand(inputs, b, h, k_offsets, IS_PARTIAL: tl.constexpr, tiling):
    """A tile of ``Inputs.value_operand`` [BLOCK_K, BLOCK_DV]: values, or LASER's e^V."""
    return load_tile(
        inputs.value_operand, inputs, b, h, k_offsets, inputs.value_dim, tiling.BLOCK_DV, IS_PARTIAL, tiling
    )


@triton.jit
def store_like_out(array, inputs, b, row_heads, q_offsets, mask, x, tiling):
    """Store x [BLOCK_Q, BLOCK_DV] to an array shaped like the output.

    ``row_heads`` [BLOCK_Q] are the query heads of the rows, and ``mask`` [BLOCK_Q] says which rows
    are stored.
    """
    dv_offsets = tl.arange(0, tiling.BLOCK_DV)
    pointers = (
        head_pointer(array, b, row_heads)[:, None]
        + q_offsets[:, None] * array.stride_l
        + dv_offsets[None, :] * array.stride_d
    )
    mask = mask[:, None] & (dv_offsets[None, :] < inputs.value_dim)
    tl.store(pointers, x.to(array.pointer.dtype.element_ty), mask=mask)
