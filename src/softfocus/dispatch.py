"""Which backend runs a call, and why each other one does not."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from softfocus.backends import checked, cpu, tiled, triton
from softfocus.mechanism import Mechanism
from softfocus.reference import Problem
from softfocus.switches import switched_on
from softfocus.visibility import Visibility

TRITON = "SOFTFOCUS_TRITON"
"""Set to off, "auto" leaves the Triton kernels out; set to on, it takes them also where they run in Triton's interpreter; set
to trusted, it takes them and does not hold the first call of each kind against the tiled backend."""


def _reference_supports(problem: Problem, visibility: Visibility, mechanism: Mechanism) -> str | None:
    return None


BACKENDS: dict[str, Callable[[Problem, Visibility, Mechanism], str | None]] = {
    "cpu": cpu.supports,
    "triton": triton.supports,
    "tiled": tiled.supports,
    "reference": _reference_supports,
}
"""Fastest first: ``backend="auto"`` takes the first that supports the call and need not be asked for. A function gives None, or
the sentence that says why not."""

_DESCRIPTION = {
    "cpu": "fused C++ kernels, compiled for this machine: memory O(L)",
    "tiled": "pure torch in blocks of rows: runs everywhere, memory O(L), slower than a fused kernel",
    "triton": "fused Triton kernels: memory O(L)",
    "reference": "the dense formula: memory O(L^2), differentiable twice",
}


def _unasked(name: str) -> str | None:
    """Why "auto" does not take a backend, whatever the call; or None."""
    if name == "reference":
        return "only when asked for by name"
    if name == "triton":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if not _trusted() and not switched_on(TRITON, default=not interpreted):
            why = "in Triton's interpreter " if interpreted else ""
            return f"{why}only when asked for by name, or with {TRITON}=on"
    return None


def _trusted() -> bool:
    return os.environ.get(TRITON, "").lower() == "trusted"


def operator(chosen: str, asked: str) -> str:
    """The name by which operators know a chosen backend: what "auto" takes of the Triton kernels runs checked."""
    return "checked" if chosen == "triton" and asked == "auto" and not _trusted() else chosen


def _refusal(name: str, problem: Problem, visibility: Visibility, mechanism: Mechanism) -> str | None:
    """Why "auto" does not take a backend that supports a call: what its first call has shown; or None."""
    if name != "triton" or _trusted():
        return None
    return checked.refusal(problem, visibility, mechanism)


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


def choose(problem: Problem, visibility: Visibility, mechanism: Mechanism, backend: str) -> str:
    """The backend for a call.

    Raises:
        ValueError: a backend asked for by name is unknown, or does not support the call: it never falls back. SOFTFOCUS_TRITON
            says neither on nor off.
    """
    if backend == "auto":
        unasked = [
            name for name in BACKENDS if _unasked(name)
        ]  # all of them: a misspelt switch is said on every machine
        for name, supports in BACKENDS.items():
            if name in unasked or supports(problem, visibility, mechanism) is not None:
                continue
            if _refusal(name, problem, visibility, mechanism) is None:
                return name
        raise AssertionError("the tiled backend supports every call")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    if why := BACKENDS[backend](problem, visibility, mechanism):
        raise ValueError(f"backend: {backend!r} was asked for and does not support this call: {why}")
    return backend


def account(problem: Problem, visibility: Visibility, mechanism: Mechanism, backend: str) -> Explanation:
    """Choose a backend and say why."""
    chosen = choose(problem, visibility, mechanism, backend)
    reasons = {}
    for name, supports in BACKENDS.items():
        if name == chosen:
            reasons[name] = "asked for by name" if backend != "auto" else _DESCRIPTION[name]
            if operator(chosen, backend) == "checked":
                reasons[name] += f"; {checked.seen(problem, visibility, mechanism)}"
        elif why := supports(problem, visibility, mechanism):
            reasons[name] = why
        elif backend != "auto":
            reasons[name] = f"{chosen!r} was asked for by name"
        elif unasked := _unasked(name):
            reasons[name] = f"{unasked}; {_DESCRIPTION[name]}"
        elif refusal := _refusal(name, problem, visibility, mechanism):
            reasons[name] = refusal
        else:
            reasons[name] = f"slower than {chosen!r}; {_DESCRIPTION[name]}"
    return Explanation(chosen, reasons)
