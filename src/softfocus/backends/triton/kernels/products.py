"""Matrix products of tiles, each with the precision that its operands need."""

import triton
import triton.language as tl


@triton.jit
def finite_or_zero(x):
    """x, and 0 where it is NaN or infinite."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def dot(a, b, blocks):
    """The matrix product a b, summed in float32; of one row without tensor cores, which would take
    it for sixteen.
    """
    if a.shape[0] == 1:
        result = tl.sum(tl.trans(a.to(tl.float32)) * b.to(tl.float32), 0)[None, :]
    elif blocks.widen:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=blocks.precision)
    return result


@triton.jit
def dot_weights(weights, x, algebra, blocks):
    """weights x; in float32 where float16 might not hold weights, which do not sum to one."""
    if algebra.float16 and algebra.normaliser != "l1":
        result = dot(weights, x.to(tl.float32), blocks)
    else:
        result = dot(weights.to(x.dtype), x, blocks)
    return result


@triton.jit
def dot_grad_scores(grad_scores, x, algebra, blocks):
    """grad_scores x; in float32 where float16 might not hold them.

    That is without an l1 norm, and for relu's, whose phi' 2^-shift is huge in a row of tiny scores.
    """
    if algebra.float16 and (algebra.phi.has_zeros or algebra.normaliser != "l1"):
        result = dot(grad_scores, x.to(tl.float32), blocks)
    else:
        result = dot(grad_scores.to(x.dtype), x, blocks)
    return result
