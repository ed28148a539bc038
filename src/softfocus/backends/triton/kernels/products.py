"""Matrix products of tiles, each with the precision that its operands need."""

import torch
import triton
import triton.language as tl
from triton import knobs


@triton.jit
def finite_or_zero(x):
    """x of any shape, 0 where it is NaN or infinite."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


if knobs.runtime.interpret or torch.version.hip:

    @triton.jit
    def _rounded_to_tf32(x):
        """x, rounded to the nearest tf32 number, ties away from zero."""
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)
else:

    @triton.jit
    def _rounded_to_tf32(x):
        """x, rounded to the nearest tf32 number, ties away from zero."""
        bits = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_operand_dtype(x, dtype, IN_TF32: tl.constexpr):
    """x of any shape as an operand of products: in ``dtype``, or with IN_TF32 rounded to tf32 and
    stored as float32. tf32 has as many bits of significand as float16.

    Tensor cores ignore the 13 low bits of a float32 operand of a tf32 product. Without the rounding
    they would truncate it towards zero.
    """
    if IN_TF32:
        x = _rounded_to_tf32(x.to(tl.float32))
    else:
        x = x.to(dtype)
    return x


@triton.jit
def dot(a, b, tiling):
    """The matrix product a b, summed in float32: [M, K] times [K, N] is [M, N]. Operands are as
    ``to_operand_dtype`` returns them, or float32 copies of 16-bit operands.

    A product of one row does not use tensor cores, which would pad it to sixteen rows.
    """
    if a.shape[0] == 1:
        # [K, 1] times [K, N], summed over K: [1, N]
        result = tl.sum(tl.trans(a.to(tl.float32)) * b.to(tl.float32), 0)[None, :]
    elif tiling.widen:  # in Triton's interpreter (``inputs.tiling_of``)
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=tiling.precision)
    return result


@triton.jit
def dot_weights(numerator, x, algebra, tiling):
    """The product of the numerators f or u^p and x, values or e^V, in the forward. In key_gradients
    that of the weights A and the gradient of the weighted sum.

    It is [BLOCK_Q, BLOCK_K] times [BLOCK_K, BLOCK_DV], or in key_gradients [BLOCK_K, BLOCK_Q] times
    [BLOCK_Q, BLOCK_DV]. A float16 call multiplies in tf32 in two cases:

    * The normaliser is not l1. Only rows with an l1 norm have a shift (``Algebra.shifted``).
      Without one f may overflow or underflow float16, and so may A.
    * LASER, whose x is e^V or dL/d(A e^V).

    Any other float16 call overflows where f of softplus exceeds 65504, without re-weighting or in a
    tied row (docs/numerics.md).
    """
    IN_TF32: tl.constexpr = algebra.inputs_are_fp16 and (algebra.laser or algebra.normaliser != "l1")
    numerator = to_operand_dtype(numerator, x.dtype, IN_TF32)
    if IN_TF32:
        x = x.to(tl.float32)
    return dot(numerator, x, tiling)


@triton.jit
def dot_grad_scores(grad_scores, x, algebra, tiling, HAS_ROW_FACTORS: tl.constexpr):
    """The product of dL/ds, as the caller scales it, and x: keys, or queries in key_gradients.

    It is [BLOCK_Q, BLOCK_K] times [BLOCK_K, BLOCK_D], or in key_gradients [BLOCK_K, BLOCK_Q] times
    [BLOCK_Q, BLOCK_D]. What grad_scores includes:

    * query_gradients: grad_phi phi' 2^-shift without ``grad_factor``; EXACT's grad_phi includes it.
      Re-weighted rows have a second product, of phi' 2^-shift alone. With cosine both include
      1 / |k|, in float16 only its mantissa (below 2). With unit vectors x includes 1 / |k|.
    * key_gradients: the whole ``grad_factor`` and ``operand_scale``, in float16 only if rows are
      re-weighted. Otherwise float16 divides each of the two by a power of two, to below 2
      (``key_gradients._float16_safe_factors``).

    A float16 call multiplies in tf32 in three cases:

    * The normaliser is not l1.
    * phi has zeros (the relu family): phi' 2^-shift is huge in a row of tiny scores.
    * Rows are re-weighted, and grad_scores includes their grad_factor (HAS_ROW_FACTORS): it is up
      to 1 / TIE_TOLERANCE = 2^16 times larger in a row of nearly equal scores than in others.

    In any other float16 call float16 overflows, with softplus and sigmoid, where
    |dL/dA - delta| phi' exceeds 65504 (docs/numerics.md).
    """
    IN_TF32: tl.constexpr = algebra.inputs_are_fp16 and (
        algebra.phi.has_zeros or algebra.normaliser != "l1" or (algebra.reweighted and HAS_ROW_FACTORS)
    )
    grad_scores = to_operand_dtype(grad_scores, x.dtype, IN_TF32)
    if IN_TF32:
        x = x.to(tl.float32)
    return dot(grad_scores, x, tiling)
