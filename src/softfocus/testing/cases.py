"""Cases that a backend must compute correctly: shapes that are no multiples of a tile's, every kind
of mask, every learned tensor.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softfocus.mechanism import Mechanism


@dataclass(frozen=True)
class Case:
    """The shapes and options of one test case, without its numbers.

    Attributes:
        name: for test ids.
        batch, heads, key_heads, query_length, key_length, head_dim, value_dim: B, H, Hk, Lq, Lk, D,
            Dv.
        is_causal, window_size: as in ``attention()``.
        mask: share of keys that a random bool mask [1, H, Lq, Lk] hides; 0 for no mask.
        padding: "left" or "right": the second half of the batch is padded to a quarter on that
            side; "" for none.
        documents: how many documents are packed; 0 for none.
        bias: shape of an additive bias with gradient, "" for none: of letters b, h, q, k for a full
            dimension and 1.
        head_scale: a per-head scale with gradient.
        power: a per-head power with gradient, for mechanisms that re-weight.
        transposed: query, key, value are views of [B, L, H, D].
        magnitude: the standard deviation of query and key.
        outlier: a value of this size in the last key's first column of V; 0 for none.
        dropout_p: for mechanisms other than LASER; the seed is torch's own (see ``run``).
        additive: the mask is a floating one, with finfo.min where it hides.
    """

    name: str
    batch: int = 2
    heads: int = 2
    key_heads: int = 2
    query_length: int = 37
    key_length: int = 37
    head_dim: int = 16
    value_dim: int = 16
    is_causal: bool = True
    window_size: tuple[int, int] | None = None
    mask: float = 0.0
    padding: str = ""
    documents: int = 0
    bias: str = ""
    head_scale: bool = False
    power: bool = False
    transposed: bool = False
    magnitude: float = 1.0
    outlier: float = 0.0
    dropout_p: float = 0.0
    additive: bool = False

    def arguments(self, mechanism: Mechanism, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
        """Arguments of ``attention()``; every floating tensor requires grad. The numbers depend on
        the seed alone.
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def leaf(x: Tensor) -> Tensor:
            return x.to(device=device, dtype=dtype).requires_grad_()

        def heads_first(heads: int, length: int, dim: int, magnitude: float = 1.0) -> Tensor:
            x = normal(self.batch, length, heads, dim) * magnitude
            return leaf(x if self.transposed else x.transpose(1, 2).contiguous())

        query = heads_first(self.heads, self.query_length, self.head_dim, self.magnitude)
        key = heads_first(self.key_heads, self.key_length, self.head_dim, self.magnitude)
        value = heads_first(self.key_heads, self.key_length, self.value_dim)
        if self.transposed:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.outlier:
            with torch.no_grad():
                value[:, :, -1, 0] = self.outlier
        arguments: dict[str, Any] = {"query": query, "key": key, "value": value, "mechanism": mechanism}
        arguments |= {"is_causal": self.is_causal, "enable_gqa": self.heads != self.key_heads}
        if self.window_size is not None:
            arguments["window_size"] = self.window_size
        if self.mask:
            shape = (1, self.heads, self.query_length, self.key_length)
            mask = (torch.rand(shape, generator=generator) >= self.mask).to(device)
            arguments["attn_mask"] = _as_additive(mask, dtype) if self.additive else mask
        if self.padding:
            real = torch.ones(self.batch, self.key_length, dtype=torch.bool)
            quarter = self.key_length // 4
            padded = slice(0, quarter) if self.padding == "left" else slice(self.key_length - quarter, None)
            real[self.batch // 2 :, padded] = False
            arguments["key_mask"] = real.to(device)
        if self.documents:
            number = torch.arange(self.key_length) * self.documents // self.key_length
            arguments["document_ids"] = number.expand(self.batch, -1).contiguous().to(device)
        if self.bias:
            full = dict(zip("bhqk", (self.batch, self.heads, self.query_length, self.key_length), strict=True))
            arguments["bias"] = leaf(normal(*(full.get(letter, 1) for letter in self.bias)))
        if self.head_scale:
            arguments["head_scale"] = leaf(0.5 + torch.rand(self.heads, generator=generator, dtype=torch.float64))
        if self.power and mechanism.power is not None:
            arguments["power"] = leaf(torch.linspace(1.5, mechanism.power, self.heads, dtype=torch.float64))
        if self.dropout_p and not mechanism.laser:
            arguments["dropout_p"] = self.dropout_p
        return arguments


def _as_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


CASES: tuple[Case, ...] = (
    Case("causal"),
    Case("bidirectional", is_causal=False),
    Case("tiles", batch=1, query_length=150, key_length=150, head_dim=8, value_dim=8),
    Case("cache", query_length=5, key_length=70),
    Case("decode", query_length=1, key_length=67),
    Case("more queries than keys", batch=1, query_length=90, key_length=20),
    Case("one key", batch=1, query_length=1, key_length=1),
    Case("grouped", heads=6, key_heads=2, head_dim=8, value_dim=24),
    Case("window", query_length=80, key_length=80, window_size=(7, 0)),
    Case("window of both sides", is_causal=False, window_size=(5, 9), query_length=40, key_length=75),
    Case("left padding", padding="left"),
    Case("right padding", padding="right", is_causal=False),
    Case("documents", documents=5, query_length=130, key_length=130, batch=1),
    Case("mask", is_causal=False, mask=0.6),
    Case("mask and grouped", heads=4, key_heads=2, mask=0.3),
    Case("additive mask", is_causal=False, mask=0.4, additive=True, padding="right"),
    Case("all masks", batch=4, heads=4, key_heads=2, mask=0.2, padding="left", documents=3, window_size=(12, 5)),
    Case("blind rows", mask=0.97, is_causal=False, query_length=70),
    Case("bias", bias="bhqk", heads=4, key_heads=2),
    Case("broadcast bias", bias="1h1k"),
    Case("row bias", bias="b1q1", padding="left"),
    Case("learned", head_scale=True, power=True, heads=4, key_heads=2),
    Case("transposed", transposed=True, heads=3, key_heads=3, head_dim=40, value_dim=8),
    Case("large scores", magnitude=4.0),
    Case("tiny scores", magnitude=1e-2),
    Case("dropout", dropout_p=0.3, heads=4, key_heads=2, query_length=37, key_length=70, mask=0.2),
    Case("future outlier", outlier=300.0, query_length=100, key_length=100, batch=1),
)
