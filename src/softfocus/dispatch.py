"""Which backend runs a call, and why each other one does not."""

from dataclasses import dataclass
from importlib import import_module

import torch

from softfocus.mechanism import Mechanism

BACKENDS: tuple[str, ...] = ("tiled", "reference")
"""Fastest first: ``backend="auto"`` takes the first that supports the call."""


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


@dataclass(frozen=True)
class Explanation:
    """Which backend a call runs on.

    Attributes:
        backend: the chosen one.
        reasons: for every backend, fastest first, why it was or was not taken.
    """

    backend: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        return "\n".join(
            f"{'->' if name == self.backend else '  '} {name}: {why}" for name, why in self.reasons.items()
        )


def _supports(backend: str, call: Call) -> str | None:
    if backend == "reference":
        return None
    answer: str | None = import_module(f"softfocus.backends.{backend}").supports(call)
    return answer


def choose(call: Call, backend: str) -> str:
    """The backend for a call.

    Raises:
        ValueError: a backend asked for by name is unknown, or does not support the call: it never falls back.
    """
    if backend == "auto":
        # The reference, last of all, would be the dense formula: never chosen in silence, as tiled takes every call.
        return next(name for name in BACKENDS if _supports(name, call) is None)
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    if why := _supports(backend, call):
        raise ValueError(f"backend: {backend!r} was asked for and does not support this call: {why}")
    return backend


def account(call: Call, backend: str) -> Explanation:
    """Choose a backend and say why."""
    chosen = choose(call, backend)
    reasons = {}
    for name in BACKENDS:
        if name == chosen:
            reasons[name] = "asked for by name" if backend != "auto" else _DESCRIPTION[name]
        elif why := _supports(name, call):
            reasons[name] = why
        elif backend != "auto":
            reasons[name] = f"{chosen!r} was asked for by name"
        else:
            reasons[name] = f"slower than {chosen!r}; {_DESCRIPTION[name]}"
    return Explanation(chosen, reasons)


_DESCRIPTION = {
    "tiled": "pure torch in blocks of rows: runs everywhere, memory O(L), slower than a fused kernel would be",
    "reference": "the dense formula: memory O(L^2), differentiable twice; runs when asked for by name",
}
