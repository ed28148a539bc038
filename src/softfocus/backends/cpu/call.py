"""The kernels' arguments as ctypes lays them out: twins of the structures of ``csrc/problem.h``."""

import ctypes

import torch
from torch import Tensor

from softfocus.mechanism import Mechanism
from softfocus.reference import Problem
from softfocus.visibility import Visibility

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTH_SCALES = ("1", "log(N)", "log512(N)")
SCORE_BIASES = ("0", "-log(N)", "-log(L)")
PHI = ("exp", "softplus", "sigmoid", "relu", "relu2", "relu6")
"""What ``csrc/pointwise.h`` holds, in its order."""
NORMALISERS = ("l1", "none", "1/N", "1/L", "1/sqrt(N/2)")


class Array(ctypes.Structure):
    """A tensor as it lies in memory; all zero for one that is not given."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4))


class Call(ctypes.Structure):
    """``struct Problem``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "query_length", "key_length", "head_dim",
          "value_dim", "left", "right", "dtype", "cosine", "length_scale", "score_bias", "phi", "normaliser",
          "sharpened", "laser", "threads")),
        ("scale", ctypes.c_double),
        ("power", ctypes.c_double),
        *((name, Array) for name in ("query", "key", "value", "mask", "key_mask", "document_ids", "bias")),
        ("head_scale", ctypes.c_void_p),
        ("powers", ctypes.c_void_p),
    )  # fmt: skip


def array(x: Tensor | None, shape: tuple[int, ...] | None = None) -> Array:
    """A 4-D tensor as the kernels read it, broadcast to a shape."""
    if x is None:
        return Array()
    strides = x.stride()
    if shape is not None:
        strides = tuple(0 if size == 1 else stride for size, stride in zip(x.shape, strides, strict=True))
    return Array(x.data_ptr(), (ctypes.c_int64 * 4)(*strides))


def call(problem: Problem, visibility: Visibility, mechanism: Mechanism) -> tuple[Call, list[Tensor]]:
    """A call's arguments, and the tensors made for it, which must live as long as the call runs."""
    query, key, value = problem.query, problem.key, problem.value
    shape = (*query.shape[:3], key.size(2))
    bias, head_scale, power = (
        None if x is None else x.detach().float() for x in (problem.bias, problem.head_scale, problem.power)
    )
    head_scale, power = (None if x is None else x.contiguous() for x in (head_scale, power))
    documents = visibility.document_ids
    documents = None if documents is None else documents[:, None, None].long()
    key_mask = None if visibility.key_mask is None else visibility.key_mask[:, None, None]
    made = [x for x in (bias, head_scale, power, documents) if x is not None]
    arguments = Call(
        query.size(0), query.size(1), key.size(1), query.size(2), key.size(2), query.size(3), value.size(3),
        visibility.left, visibility.right,
        DTYPES.index(query.dtype),
        mechanism.similarity == "cosine",
        LENGTH_SCALES.index(mechanism.length_scale),
        SCORE_BIASES.index(mechanism.score_bias),
        PHI.index(mechanism.phi),
        NORMALISERS.index(mechanism.normaliser),
        mechanism.power is not None,
        mechanism.laser,
        torch.get_num_threads(),
        problem.scale,
        mechanism.power or 0.0,
        array(query), array(key), array(value),
        array(visibility.mask, shape), array(key_mask), array(documents), array(bias, shape),
        0 if head_scale is None else head_scale.data_ptr(),
        0 if power is None else power.data_ptr(),
    )  # fmt: skip
    return arguments, made
