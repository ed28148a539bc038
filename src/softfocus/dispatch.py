"""Chooses the backend that runs a call, and explains why each other one does not."""

import os
from dataclasses import dataclass

import torch

from softfocus import reference
from softfocus.backends import checked, cpu, tiled, triton
from softfocus.contract import Backend, Call
from softfocus.switches import switched_on

TRITON = "SOFTFOCUS_TRITON"
"""How "auto" uses the Triton kernels. off: never. on: also in Triton's interpreter. trusted:
without comparing the first call of each kind with the tiled backend.
"""

BACKENDS: dict[str, Backend] = {"cpu": cpu, "triton": triton, "tiled": tiled, "reference": reference}
"""The backends, fastest first. ``backend="auto"`` takes the first that supports the call, except
those that run only if requested by name.
"""


def _why_not_auto(name: str) -> str | None:
    """Why "auto" never chooses a backend, whatever the call; None if it may choose it."""
    if name == "reference":
        return "only when asked for by name"
    if name == "triton":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if not _trusted() and not switched_on(TRITON, not interpreted, "trusted"):
            why = "in Triton's interpreter " if interpreted else ""
            return f"{why}only when asked for by name, or with {TRITON}=on"
    return None


def _trusted() -> bool:
    return os.environ.get(TRITON, "").lower() == "trusted"


def module_for(chosen: str, requested: str) -> str:
    """The module that runs a chosen backend. It is ``checked`` for the Triton kernels if "auto"
    chose them.
    """
    return "checked" if chosen == "triton" and requested == "auto" and not _trusted() else chosen


def supports(name: str, call: Call, to_run: bool = False) -> bool:
    """Whether a backend supports a call; see :func:`why_unsupported`."""
    return why_unsupported(name, call, to_run) is None


def why_unsupported(name: str, call: Call, to_run: bool = False) -> str | None:
    """The reason why a backend does not support a call; None if it supports it.

    It compiles nothing and touches no disk, unless the call is about to run.
    """
    backend = BACKENDS[name]
    return backend.SUPPORTED.lacks(call) or (backend.refuses(call, to_run) if backend.refuses else None)


def _refusal(name: str, call: Call) -> str | None:
    """Why the comparison with the tiled backend has refused a backend that supports the call; None
    if it has not. A graph that is traced holds the operator, which asks when it runs.
    """
    asked = name == "triton" and not _trusted() and not torch.compiler.is_compiling()
    return checked.refusal(call) if asked else None


_NAMES = f"'auto' or one of {', '.join(map(repr, BACKENDS))}"


@dataclass(frozen=True)
class Explanation:
    """Which backend a call runs on.

    Attributes:
        backend: the name of the chosen backend.
        reasons: for every backend, fastest first, why it was or was not chosen.
    """

    backend: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        return "\n".join(
            f"{'->' if name == self.backend else '  '} {name}: {why}" for name, why in self.reasons.items()
        )


def choose(call: Call, backend: str, to_run: bool = True) -> str:
    """The backend for a call. Backends may be compiled only if the call is about to run.

    Raises:
        TypeError: the backend is no name.
        ValueError: a backend requested by name is unknown, or does not support the call. There is
            no fallback. Or SOFTFOCUS_TRITON has an unknown value.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend: got {type(backend).__name__}, expected {_NAMES}")
    if backend == "auto":
        # For every backend, so that a misspelt switch is an error on every machine
        never = [name for name in BACKENDS if _why_not_auto(name)]
        for name in BACKENDS:
            if name not in never and supports(name, call, to_run) and not _refusal(name, call):
                return name
        raise ValueError(f"no backend supports this call; of 'tiled': {why_unsupported('tiled', call)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected {_NAMES}")
    if why := why_unsupported(backend, call, to_run):
        raise ValueError(f"backend: {backend!r} was asked for and does not support this call: {why}")
    return backend


def account(call: Call, backend: str) -> Explanation:
    """Choose a backend and give the reasons. It compiles nothing: that a backend does not compile
    is known only after a call has tried.
    """
    chosen = choose(call, backend, to_run=False)
    reasons = {}
    for name in BACKENDS:
        if name == chosen:
            reasons[name] = "asked for by name" if backend != "auto" else BACKENDS[name].ABOUT
            if module_for(chosen, backend) == "checked":
                reasons[name] += f"; {checked.agreement(call)}"
        elif why := why_unsupported(name, call):
            reasons[name] = why
        elif backend != "auto":
            reasons[name] = f"{chosen!r} was asked for by name"
        elif why := _why_not_auto(name):
            reasons[name] = f"{why}; {BACKENDS[name].ABOUT}"
        elif refusal := _refusal(name, call):
            reasons[name] = refusal
        else:
            reasons[name] = f"slower than {chosen!r}; {BACKENDS[name].ABOUT}"
    return Explanation(chosen, reasons)
