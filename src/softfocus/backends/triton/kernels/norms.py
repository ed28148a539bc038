"""Norms of queries and keys for cosine similarity, and the kernel that makes them once a call."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import loading


@triton.jit
def reciprocal_norm(x):
    """1 / |x| of each row [R] of x [R, C]. NaN of one that is not finite; 0 of one whose entries are all below 2^-126.

    Of most of these 1 / |x| is beyond float32. The divisions are rounded, since large powers multiply what they lose.
    """
    largest = tl.max(tl.abs(x), 1)
    # 253: the last whose inverse is no subnormal number
    exponent = tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253)
    over = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / the power of two in the largest
    scaled = x * over[:, None]
    total = tl.sum(scaled * scaled, 1)
    norm = over * tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(total))
    norm = tl.where(largest < 2.0**-126, 0.0, norm)
    return norm + (total - total)  # NaN where x is not finite


@triton.jit
def fast_reciprocal_norm(x):
    """1 / |x| of each row, of halves to 2^-22, 0 where all squares are 0; and whether float32 holds the squares."""
    single = x.to(tl.float32)
    total = tl.sum(single * single, 1)
    if x.dtype == tl.float32:
        norm = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(total))
    else:
        norm = tl.rsqrt(total)
    # Sums of squares in between have all their digits
    return tl.where(total == 0.0, 0.0, norm), (total > 2.0**-100) & (total < 2.0**100)


@triton.jit
def power_of_two_in(norm):
    """The power of two p with |x| p in (1/2, 1], from ``norm`` = 1 / |x|; 0 of a zero vector."""
    bits = norm.to(tl.int32, bitcast=True) & 0x7F800000
    power = bits.to(tl.float32, bitcast=True)
    tiny: tl.constexpr = 2.0**-126
    return tl.where((norm > 0.0) & (norm < tiny), 2.0**-128, power)  # of subnormal norms; see ``mantissa_of``


@triton.jit
def mantissa_of(norm):
    """``norm`` over its power of two. By its bits: a division would be approximate."""
    bits = (norm.to(tl.int32, bitcast=True) & 0x007FFFFF) | 0x3F800000
    left = tl.where(norm < 2.0**-126, norm * 2.0**64 * 2.0**64, bits.to(tl.float32, bitcast=True))
    return tl.where(norm == norm, left, norm)


@triton.jit
def scaled_operand(x, norm):
    """x [R, C] as it is multiplied, with norms in (1/2, 1], and what is left of 1 / |x| [R].

    Powers of two scale exactly. No product overflows or vanishes, and every kernel makes the same score of the same numbers.
    """
    return (x.to(tl.float32) * power_of_two_in(norm)[:, None]).to(x.dtype), mantissa_of(norm)


@triton.jit
def largest_power_of_two(x):
    """The power of two below the largest |x| of a vector; 1 where there is no such number."""
    bits = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) & 0x7F800000
    power = bits.to(tl.float32, bitcast=True)
    return tl.where((power > 0.0) & (power < float("inf")), power, 1.0)


@triton.jit
def reciprocal_norms(x, to, unit_fp16, unit_bf16, heads, length, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """1 / |x| of every row to ``to`` [B, H, L, 1]; where given, x / |x| to ``unit_fp16`` and ``unit_bf16`` [B, H, L, D]."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row_offsets = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    x_tile = loading.load_matrix(x, loading.head_pointer(x, b, h), row_offsets, columns, length, width).to(tl.float32)
    norm = reciprocal_norm(x_tile)
    tl.store(loading.head_pointer(to, b, h) + row_offsets * to.stride_l, norm, mask=row_offsets < length)
    if unit_fp16 is not None:
        x_tile, left = scaled_operand(x_tile, norm)
        x_tile = x_tile * left[:, None]
        loading.store_matrix(
            unit_fp16, loading.head_pointer(unit_fp16, b, h), row_offsets, columns, length, width, x_tile
        )
        if unit_bf16 is not None:
            loading.store_matrix(
                unit_bf16, loading.head_pointer(unit_bf16, b, h), row_offsets, columns, length, width, x_tile
            )
