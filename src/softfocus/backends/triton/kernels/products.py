"""Matrix products of tiles, each with the precision that its operands need."""

import triton
import triton.language as tl


@triton.jit
def finite_or_zero(x):
    """x of any shape, 0 where it is NaN or infinite."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def dot(a, b, blocks):
    """The matrix product a b, summed in float32: [M, K] times [K, N] is [M, N].

    A product of one row does not use tensor cores, which would pad it to sixteen rows.
    """
    if a.shape[0] == 1:
        # [K, 1] times [K, N], summed over K: [1, N]
        result = tl.sum(tl.trans(a.to(tl.float32)) * b.to(tl.float32), 0)[None, :]
    elif blocks.widen:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=blocks.precision)
    return result


@triton.jit
def dot_weights(weights, x, algebra, blocks):
    """The product of weights and x: values or e^V in the forward, grad_out in key_gradients.

    It is [BLOCK_Q, BLOCK_K] times [BLOCK_K, BLOCK_DV], or in key_gradients [BLOCK_K, BLOCK_Q] times
    [BLOCK_Q, BLOCK_DV]. Weights without an l1 norm do not sum to one and may overflow float16, so
    that a float16 call then multiplies in float32.
    """
    if algebra.inputs_are_fp16 and algebra.normaliser != "l1":
        result = dot(weights, x.to(tl.float32), blocks)
    else:
        result = dot(weights.to(x.dtype), x, blocks)
    return result


@triton.jit
def dot_grad_scores(grad_scores, x, algebra, blocks):
    """The product of the gradient of the scores and x: keys, or queries in key_gradients.

    It is [BLOCK_Q, BLOCK_K] times [BLOCK_K, BLOCK_D], or in key_gradients [BLOCK_K, BLOCK_Q] times
    [BLOCK_Q, BLOCK_D]. A float16 call multiplies in float32 where float16 might overflow: without
    an l1 norm, and for the relu family, whose phi' 2^-shift is huge in a row of tiny scores.
    """
    if algebra.inputs_are_fp16 and (algebra.phi.has_zeros or algebra.normaliser != "l1"):
        result = dot(grad_scores, x.to(tl.float32), blocks)
    else:
        result = dot(grad_scores.to(x.dtype), x, blocks)
    return result
