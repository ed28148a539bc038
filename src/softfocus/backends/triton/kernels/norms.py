"""Norms of queries and keys for cosine similarity, and the kernel that computes them per call."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import loading


@triton.jit
def reciprocal_norm(x):
    """1 / |x| [R] of the rows of x [R, C]. NaN for a row with a non-finite entry; 0 for a row whose
    entries are all below 2^-126.

    Such a row counts as a zero vector, because 1 / |x| may overflow float32.
    Division and square root are correctly rounded, since u^p multiplies relative errors by p.
    """
    largest = tl.max(tl.abs(x), 1)  # [R], as exponent, reciprocal_pow2, total
    # 1 over the largest power of two <= largest, but at least 2^-126: 253 is the largest biased
    # exponent whose reciprocal is normal. Of a subnormal largest it is 2^127, and rnorm becomes 0
    exponent = tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253)
    reciprocal_pow2 = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = x * reciprocal_pow2[:, None]
    total = tl.sum(scaled * scaled, 1)
    rnorm = reciprocal_pow2 * tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(total))
    rnorm = tl.where(largest < 2.0**-126, 0.0, rnorm)
    return rnorm + (total - total)  # NaN where x is not finite


@triton.jit
def fast_reciprocal_norm(x):
    """1 / |x| [R] of the rows of x [R, C], 0 where the sum of squares is 0; and whether that sum
    has full precision, bool [R].

    For 16-bit dtypes the relative error is 2^-22.
    """
    x_fp32 = x.to(tl.float32)  # [R, C]; total [R]
    total = tl.sum(x_fp32 * x_fp32, 1)
    if x.dtype == tl.float32:
        rnorm = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(total))
    else:
        rnorm = tl.rsqrt(total)
    # Between these bounds the sum is far from overflow, and the squares that count in it from
    # underflow
    return tl.where(total == 0.0, 0.0, rnorm), (total > 2.0**-100) & (total < 2.0**100)


@triton.jit
def power_of_two_of(rnorm):
    """pow2 with |x| pow2 in (1/2, 1], from ``rnorm`` = 1 / |x|; 0 for a zero vector.

    The exponent bits of a subnormal ``rnorm``, of an |x| above 2^126, are 0. pow2 is then set to
    2^-128: |x| pow2 is at least 1/4, and may be above 1.
    """
    bits = rnorm.to(tl.int32, bitcast=True) & 0x7F800000
    pow2 = bits.to(tl.float32, bitcast=True)
    tiny: tl.constexpr = 2.0**-126
    return tl.where((rnorm > 0.0) & (rnorm < tiny), 2.0**-128, pow2)


@triton.jit
def mantissa_of(rnorm):
    """``rnorm`` over ``power_of_two_of(rnorm)``, in [1, 2) unless ``rnorm`` is 0 or subnormal. It
    is taken from the bits, since a division would be approximate.
    """
    bits = (rnorm.to(tl.int32, bitcast=True) & 0x007FFFFF) | 0x3F800000
    # rnorm 2^64 2^64: times 2^128, which is not a float32 itself
    mantissa = tl.where(rnorm < 2.0**-126, rnorm * 2.0**64 * 2.0**64, bits.to(tl.float32, bitcast=True))
    return tl.where(rnorm == rnorm, mantissa, rnorm)


@triton.jit
def scaled_operand(x, rnorm):
    """x [R, C] scaled by powers of two to norms in (1/2, 1], and the rest of 1 / |x|, its mantissa
    [R].

    For the scores all kernels but key_gradients scale the query alone. |q.k| is then at most |k|,
    and overflows only if |k| >= 2^128 (docs/numerics.md). key_gradients loads scaled queries and
    scales its keys, too. In float16 query_gradients scales keys for the product with the gradient.

    Powers of two scale exactly, so that all kernels compute the same score. Exception: float16
    rounds entries that become subnormal.
    """
    return (x.to(tl.float32) * power_of_two_of(rnorm)[:, None]).to(x.dtype), mantissa_of(rnorm)


@triton.jit
def largest_power_of_two(x):
    """The largest power of two that is at most max |x| of a vector x [R]; 1 if max |x| is 0,
    subnormal or not finite.
    """
    bits = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) & 0x7F800000
    pow2 = bits.to(tl.float32, bitcast=True)
    return tl.where((pow2 > 0.0) & (pow2 < float("inf")), pow2, 1.0)


@triton.jit
def reciprocal_norms(
    x, rnorm, unit_fp16, unit_bf16, heads, length, width, BLOCK_ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Store 1 / |x| of every row of x [B, H, L, D] in ``rnorm`` [B, H, L, 1] and, where given,
    x / |x| in ``unit_fp16`` and ``unit_bf16`` [B, H, L, D].
    """
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row_offsets = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column_offsets = tl.arange(0, WIDTH)
    # x_tile [BLOCK_ROWS, WIDTH], x_rnorm [BLOCK_ROWS]
    x_tile = loading.load_matrix(x, loading.head_pointer(x, b, h), row_offsets, column_offsets, length, width).to(
        tl.float32
    )
    x_rnorm = reciprocal_norm(x_tile)
    tl.store(loading.head_pointer(rnorm, b, h) + row_offsets * rnorm.stride_l, x_rnorm, mask=row_offsets < length)
    if unit_fp16 is not None:
        x_tile, mantissa = scaled_operand(x_tile, x_rnorm)
        x_tile = x_tile * mantissa[:, None]
        loading.store_matrix(
            unit_fp16, loading.head_pointer(unit_fp16, b, h), row_offsets, column_offsets, length, width, x_tile
        )
        if unit_bf16 is not None:
            loading.store_matrix(
                unit_bf16, loading.head_pointer(unit_bf16, b, h), row_offsets, column_offsets, length, width, x_tile
            )
