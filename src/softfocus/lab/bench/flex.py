"""FlexAttention as its users write these mechanisms: a score_mod, compiled. LSSAR takes two calls,
LASER exp and log. On a GPU the forward of a score_mod gets smaller tiles than the default.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softfocus.lab.bench import eager
from softfocus.lab.bench.cells import Cell, Function
from softfocus.mechanism import MAX_UNTHRESHOLDED_COUNT, default_scale
from softfocus.reference import base_scale

NO_LSE = (
    "re-weighting takes a second call that reads the first one's log-sum-exp, "
    "which FlexAttention does not return on a CPU"
)
NO_BACKWARD = "FlexAttention has no backward on a CPU"
SMALL_TILES = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_warps": 4}
"""For halves and heads of at most 64 dimensions. FlexAttention's default there, on Hopper, is 128 x
128 in four warps: 128 scores per thread. On an H200 it took 11 times as long in LSSAR's second call
(docs/results/gpu-h200/flex.json). Other dtypes and sizes were not measured and keep the default.
"""


def refuses(cell: Cell) -> str | None:
    """Why FlexAttention cannot compute a cell, or None."""
    if cell.device == "cpu" and cell.what == "backward":
        return NO_BACKWARD
    if cell.device == "cpu" and cell.algebra.power is not None:
        return NO_LSE
    return eager.refuses(cell.algebra)


def kernel_options(cell: Cell) -> dict[str, int] | None:
    """The options of FlexAttention's kernels for a score_mod; None for its defaults."""
    measured = cell.device == "cuda" and cell.dtype != "float32" and cell.head_dim <= 64
    return SMALL_TILES if measured else None


def build(cell: Cell, compiled: bool = True) -> Function:
    """FlexAttention for a cell; it compiles when it is first called.

    Args:
        cell: one that is not refused.
        compiled: False runs torch's own dense stand-in, to look at the formula without waiting for
            a compiler.
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    mechanism = cell.algebra
    flex: Callable[..., Any] = flex_attention
    if compiled:
        # A process that went through many cells would meet dynamo's limit of recompilations, and
        # then run uncompiled
        torch.compiler.reset()
        flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if cell.causal:
        mask = create_block_mask(_causal, None, None, cell.length, cell.length, device=cell.device)
    power = mechanism.power or 1.0
    plain = mechanism.phi == "exp" and mechanism.length_scale == "1"
    scale = default_scale(mechanism, cell.head_dim)
    counts = torch.arange(1, cell.length + 1, device=cell.device) if cell.causal else torch.tensor([cell.length])
    count = counts.to(device=cell.device, dtype=torch.float32)  # [Lq], N_i
    factor = base_scale(mechanism, scale, count)  # [Lq], c_i
    threshold = (count > MAX_UNTHRESHOLDED_COUNT).float()

    def log_phi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = factor[i] * score
        return score if mechanism.phi == "exp" else torch.log(F.softplus(score))

    options = kernel_options(cell) if compiled else None
    if not plain:
        first = partial(flex, score_mod=log_phi, block_mask=mask, scale=1.0, kernel_options=options)
    else:
        first = partial(flex, block_mask=mask, scale=scale)

    def sharpened(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _, statistics = first(query, key, value, return_aux=AuxRequest(lse=True))
        log_norm = statistics.lse  # [B, H, Lq]

        def log_u_to_p(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            log_f = scale * score if plain else log_phi(score, b, h, i, j)
            u = torch.exp(log_f - log_norm[b, h, i]) * count[i] - threshold[i]
            return torch.where(u > 0, power * torch.log(torch.where(u > 0, u, 1.0)), -torch.inf)

        return flex(query, key, value, score_mod=log_u_to_p, block_mask=mask, scale=1.0, kernel_options=options)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if mechanism.similarity == "cosine":
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        mix = first if mechanism.power is None else sharpened
        if not mechanism.laser:
            return mix(query, key, value)
        top = value.detach().amax(-2, keepdim=True)
        return mix(query, key, (value - top).exp()).log() + top

    return attention


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j
