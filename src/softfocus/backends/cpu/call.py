"""The kernels' arguments as the structures of ``csrc/params.h``: numbers of eight bytes, one after
another.
"""

import os
import struct
from functools import lru_cache

import torch
from torch import Tensor

from softfocus import dropout
from softfocus._process import PROCESS
from softfocus.contract import Call, Supported
from softfocus.mechanism import Mechanism
from softfocus.pointwise import FUSED

SUPPORTED = Supported(
    similarity=("dot", "cosine"), length_scale=("1", "log(N)", "log512(N)"), score_bias=("0", "-log(N)", "-log(L)"),
    phi=FUSED, normaliser=("l1", "none", "1/N", "1/L", "1/sqrt(N/2)"),
    post=("none",), reweighting=True, laser=True,
    dtypes=(torch.float32, torch.bfloat16, torch.float16), devices=("cpu",),
    features=("bias", "head_scale", "power", "mask", "key_mask", "document_ids", "dropout"),
)  # fmt: skip
"""The index of a dtype here is its number in ``params.h``. ``_ENUM_VALUES`` has the numbers
of the other fields.
"""
_ENUM_VALUES = {
    "similarity": {"dot": 0, "cosine": 1},
    "length_scale": {"1": 0, "log(N)": 1, "log512(N)": 2},
    "score_bias": {"0": 0, "-log(N)": 1, "-log(L)": 2},
    "phi": {phi: number for number, phi in enumerate(FUSED)},
    "normaliser": {"l1": 0, "none": 1, "1/N": 2, "1/L": 3, "1/sqrt(N/2)": 4},
    "post": {"none": 0},
}
"""By field, in the order of ``struct Params``: the number of each value that the kernels implement.
A value that SUPPORTED declares and that is not here raises KeyError. ``Params`` has no field for
``post``: it is here for that check alone.
"""

TENSOR_VIEW = struct.Struct("5q")
"""``struct TensorView``: the data's address, and four strides in elements, 0 where broadcast."""
PARAMS = struct.Struct("20q2d" + 7 * "5q" + "2q")
"""``struct Params``."""
ABSENT = (0, 0, 0, 0, 0)


def tensor_view(x: Tensor | None) -> tuple[int, ...]:
    """A 4-D tensor as a TENSOR_VIEW; zeros for None."""
    return ABSENT if x is None else (x.data_ptr(), *x.stride())


def broadcastable_view(x: Tensor | None) -> tuple[int, ...]:
    """The same, with a stride of 0 along every dimension of size 1."""
    if x is None:
        return ABSENT
    return (x.data_ptr(), *(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)))


def threads() -> int:
    """How many to compute on: torch's number, but one in a child that was forked after softfocus
    was imported.

    A forked child has no OpenMP threads of its own. If the parent has used GNU's OpenMP, a parallel
    region in the child waits forever, torch's own ones included.
    """
    return torch.get_num_threads() if os.getpid() == PROCESS else 1


@lru_cache(maxsize=256)
def _mechanism_fields(mechanism: Mechanism) -> tuple[int, ...]:
    *fields, _post = (values[getattr(mechanism, name)] for name, values in _ENUM_VALUES.items())
    return (*fields, mechanism.power is not None, mechanism.laser)


def pack_params(call: Call) -> tuple[bytes, list[Tensor]]:
    """A call as PARAMS, and the tensors made for them, which must live while the kernel runs."""
    query, key, value, visibility, mechanism = call.query, call.key, call.value, call.visibility, call.mechanism
    temporaries: list[Tensor] = []

    def float32_kept_alive(x: Tensor | None) -> Tensor | None:
        """x in float32, kept alive in ``temporaries``. Contiguous, except a bias, whose strides the
        kernels follow.
        """
        if x is None:
            return None
        x = x.detach().float()
        temporaries.append(x if x.dim() == 4 else x.contiguous())
        return temporaries[-1]

    bias, head_scale, power = map(float32_kept_alive, (call.bias, call.head_scale, call.power))
    documents, key_mask = visibility.document_ids, visibility.key_mask
    if documents is not None:
        documents = documents[:, None, None].long()
        temporaries.append(documents)
    if key_mask is not None:
        key_mask = key_mask[:, None, None]
    batch, heads, query_length, head_dim = query.shape
    _, key_heads, key_length, value_dim = value.shape
    params = PARAMS.pack(
        batch, heads, key_heads, query_length, key_length, head_dim, value_dim,
        visibility.left, visibility.right, SUPPORTED.dtypes.index(query.dtype), *_mechanism_fields(mechanism),
        threads(),
        call.dropout.number, dropout.threshold(call.dropout.p),
        call.scale, mechanism.power or 0.0,
        *tensor_view(query), *tensor_view(key), *tensor_view(value),
        *broadcastable_view(visibility.mask), *broadcastable_view(key_mask),
        *broadcastable_view(documents), *broadcastable_view(bias),
        0 if head_scale is None else head_scale.data_ptr(),
        0 if power is None else power.data_ptr(),
    )  # fmt: skip
    return params, temporaries
