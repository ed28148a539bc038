"""One module a backend; none imports another, and nothing outside ``dispatch`` and ``ops`` reaches in.

A backend module has ``supports(call) -> str | None`` (None, or the sentence that says why not), ``forward`` and
``backward`` with the arguments of ``softfocus.ops``.
"""

from dataclasses import dataclass

import torch

from softfocus.mechanism import Mechanism


@dataclass(frozen=True)
class Call:
    """What a backend is told of a call before it says whether it supports it."""

    mechanism: Mechanism
    device: str
    dtype: torch.dtype
    batch: int
    heads: int
    key_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
