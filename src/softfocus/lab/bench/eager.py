"""The formulas as people write them by hand in PyTorch: dense [L, L] weights. What a user has
without any kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from softfocus.lab.bench.cells import Cell, Function
from softfocus.mechanism import MAX_UNTHRESHOLDED_COUNT, Mechanism, default_scale
from softfocus.reference import base_scale

COPIES = {"forward": 5, "backward": 10, "decode": 5}
"""How many tensors of the weights' size are alive at once, at most: an upper estimate, to refuse
before memory ends.
"""


def refuses(mechanism: Mechanism) -> str | None:
    """Why there is no hand-written formula for a mechanism, or None."""
    if mechanism.phi not in ("exp", "softplus") or mechanism.normaliser != "l1":
        return "written by hand only for softmax and softplus with l1, sharpened or not, with or without LASER"
    if mechanism.post != "none" or mechanism.score_bias != "0":
        return "written by hand only without a score bias and without what table 1 does to finished weights"
    return None


def needs(cell: Cell) -> int:
    """Bytes that the dense weights take, with their copies."""
    weights = cell.batch * cell.heads * cell.queries * cell.length * cell.torch_dtype.itemsize
    return COPIES[cell.what] * weights


def build(cell: Cell) -> Function:
    """The formula for a cell. Its mask and its N_i are made here, once, as in a model: they are not
    part of the time.
    """
    mechanism = cell.algebra
    visible = torch.ones(cell.queries, cell.length, dtype=torch.bool, device=cell.device)  # [Lq, L]
    if cell.causal:
        visible = visible.tril()
    count = visible.sum(-1, keepdim=True).to(cell.torch_dtype)  # [Lq, 1], N_i
    factor = base_scale(mechanism, default_scale(mechanism, cell.head_dim), count)
    threshold = (count > MAX_UNTHRESHOLDED_COUNT).to(count)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if mechanism.similarity == "cosine":
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        scores = factor * (query @ key.mT)  # [B, H, Lq, L]
        if mechanism.phi == "exp":
            weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
        else:
            f = F.softplus(scores).masked_fill(~visible, 0.0)
            weights = f / f.sum(-1, keepdim=True)
        if mechanism.power is not None:
            u = torch.relu(weights * count - threshold)
            r = (u / u.amax(-1, keepdim=True)) ** mechanism.power
            weights = r / r.sum(-1, keepdim=True)
        if not mechanism.laser:
            return weights @ value
        top = value.detach().amax(-2, keepdim=True)
        return (weights @ (value - top).exp()).log() + top

    return attention
