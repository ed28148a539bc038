"""What is measured: a cell is one mechanism, at one length, in one direction; and the tensors that
its subjects share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from softfocus.catalog import named
from softfocus.mechanism import Mechanism

What = Literal["forward", "backward", "decode"]
WHATS: tuple[What, ...] = get_args(What)
TITLES: dict[What, str] = {
    "forward": "forward",
    "backward": "forward and backward",
    "decode": "decode: one query against L keys",
}

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [B, H, Lq, D], key [B, H, L, D], value [B, H, L, D] -> out [B, H, Lq, D]."""


@dataclass(frozen=True)
class Cell:
    """One mechanism x what x length; picklable and JSON-able, so that it can cross to a process of
    its own.

    Attributes:
        mechanism: a name or a combination.
        what: "forward" and "backward" (which is forward and backward) are causal, Lq = L; "decode"
            is one query that sees all L keys, as with a KV cache.
        length: L, in tokens.
        batch, heads, head_dim: B, H, D.
        dtype: "float32", "bfloat16" or "float16".
        device: "cpu" or "cuda".
        seed: of the inputs.
    """

    mechanism: str
    what: What
    length: int
    batch: int = 1
    heads: int = 4
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    @property
    def algebra(self) -> Mechanism:
        """What the mechanism's name stands for."""
        return named(self.mechanism)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return getattr(torch, self.dtype)

    @property
    def causal(self) -> bool:
        """Whether a query sees no later key. A single query at the end of its keys sees them
        all.
        """
        return self.what != "decode"

    @property
    def queries(self) -> int:
        """Lq."""
        return self.length if self.causal else 1

    @property
    def operations(self) -> float:
        """Floating-point operations of the matrix products that an attention kernel needs, whatever
        the mechanism.

        Two products forward, five backward, over the pairs that see one another.
        """
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length
        products = 7 if self.what == "backward" else 2
        return 2.0 * products * self.head_dim * pairs * self.batch * self.heads

    @property
    def label(self) -> str:
        """The cell in a line of text."""
        return f"{self.mechanism} {self.what} at {self.length:,}"


class Inputs(NamedTuple):
    """The tensors of a cell: every subject reads the same ones."""

    query: Tensor  # [B, H, Lq, D]
    key: Tensor  # [B, H, L, D]
    value: Tensor  # [B, H, L, D]
    grad_out: Tensor  # [B, H, Lq, D]


def make(cell: Cell) -> Inputs:
    """Normal numbers that depend on the seed alone, not on dtype or device. They require grad where
    the cell goes backward.
    """
    generator = torch.Generator().manual_seed(cell.seed)

    def normal(length: int) -> Tensor:
        shape = (cell.batch, cell.heads, length, cell.head_dim)
        return torch.randn(shape, generator=generator).to(device=cell.device, dtype=cell.torch_dtype)

    query, key, value, grad_out = (normal(n) for n in (cell.queries, cell.length, cell.length, cell.queries))
    if cell.what == "backward":
        for leaf in (query, key, value):
            leaf.requires_grad_()
    return Inputs(query, key, value, grad_out)


def call(function: Function, cell: Cell, inputs: Inputs) -> Callable[[], object]:
    """What is timed: one call, and in a backward cell the gradients of query, key and value."""
    query, key, value, grad_out = inputs

    def forward() -> object:
        with torch.no_grad():
            return function(query, key, value)

    def backward() -> object:
        return torch.autograd.grad(function(query, key, value), (query, key, value), grad_out)

    return backward if cell.what == "backward" else forward
