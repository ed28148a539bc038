"""Norms of queries and keys for cosine similarity, and the kernel that makes them once a call."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import loading


@triton.jit
def reciprocal_norm(x):
    """1 / |x| of each row [R] of x [R, C]. NaN of one that is not finite; 0 of one whose entries
    are all below 2^-126.

    Of most of these 1 / |x| is beyond float32. The divisions are rounded, since large powers
    multiply what they lose.
    """
    largest = tl.max(tl.abs(x), 1)
    # 253: the last whose inverse is no subnormal number
    exponent = tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253)
    reciprocal_pow2 = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / the power of two in the largest
    scaled = x * reciprocal_pow2[:, None]
    total = tl.sum(scaled * scaled, 1)
    rnorm = reciprocal_pow2 * tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(total))
    rnorm = tl.where(largest < 2.0**-126, 0.0, rnorm)
    return rnorm + (total - total)  # NaN where x is not finite


@triton.jit
def fast_reciprocal_norm(x):
    """1 / |x| of each row [R] of x [R, C], 0 where all squares are 0; and whether float32 holds the
    squares.

    Of halves it is exact to 2^-22.
    """
    x_fp32 = x.to(tl.float32)
    total = tl.sum(x_fp32 * x_fp32, 1)
    if x.dtype == tl.float32:
        rnorm = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(total))
    else:
        rnorm = tl.rsqrt(total)
    # Sums of squares in between have all their digits
    return tl.where(total == 0.0, 0.0, rnorm), (total > 2.0**-100) & (total < 2.0**100)


@triton.jit
def power_of_two_in(rnorm):
    """The power of two p with |x| p in (1/2, 1], from ``rnorm`` = 1 / |x|; 0 of a zero vector."""
    bits = rnorm.to(tl.int32, bitcast=True) & 0x7F800000
    pow2 = bits.to(tl.float32, bitcast=True)
    tiny: tl.constexpr = 2.0**-126
    return tl.where((rnorm > 0.0) & (rnorm < tiny), 2.0**-128, pow2)  # of subnormal norms; see ``mantissa_of``


@triton.jit
def mantissa_of(rnorm):
    """``rnorm`` over its power of two. By its bits: a division would be approximate."""
    bits = (rnorm.to(tl.int32, bitcast=True) & 0x007FFFFF) | 0x3F800000
    mantissa = tl.where(rnorm < 2.0**-126, rnorm * 2.0**64 * 2.0**64, bits.to(tl.float32, bitcast=True))
    return tl.where(rnorm == rnorm, mantissa, rnorm)


@triton.jit
def scaled_operand(x, rnorm):
    """x [R, C] as it is multiplied, with norms in (1/2, 1], and what is left of 1 / |x| [R].

    Powers of two scale exactly. No product overflows or vanishes, and every kernel makes the same
    score of the same numbers.
    """
    return (x.to(tl.float32) * power_of_two_in(rnorm)[:, None]).to(x.dtype), mantissa_of(rnorm)


@triton.jit
def largest_power_of_two(x):
    """The power of two below the largest |x| of a vector; 1 where there is no such number."""
    bits = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) & 0x7F800000
    pow2 = bits.to(tl.float32, bitcast=True)
    return tl.where((pow2 > 0.0) & (pow2 < float("inf")), pow2, 1.0)


@triton.jit
def reciprocal_norms(
    x, rnorm, unit_fp16, unit_bf16, heads, length, width, BLOCK_ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """1 / |x| of every row to ``rnorm`` [B, H, L, 1]; where given, x / |x| to ``unit_fp16`` and
    ``unit_bf16`` [B, H, L, D].
    """
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row_offsets = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, WIDTH)
    # [BLOCK_ROWS, WIDTH]
    x_tile = loading.load_matrix(x, loading.head_pointer(x, b, h), row_offsets, columns, length, width).to(tl.float32)
    x_rnorm = reciprocal_norm(x_tile)
    tl.store(loading.head_pointer(rnorm, b, h) + row_offsets * rnorm.stride_l, x_rnorm, mask=row_offsets < length)
    if unit_fp16 is not None:
        x_tile, mantissa = scaled_operand(x_tile, x_rnorm)
        x_tile = x_tile * mantissa[:, None]
        loading.store_matrix(
            unit_fp16, loading.head_pointer(unit_fp16, b, h), row_offsets, columns, length, width, x_tile
        )
        if unit_bf16 is not None:
            loading.store_matrix(
                unit_bf16, loading.head_pointer(unit_bf16, b, h), row_offsets, columns, length, width, x_tile
            )
