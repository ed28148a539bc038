"""Softplus attention that stays in focus: one call shaped like PyTorch's own, for LSSA, LSSAR, LASER and their rivals.

Names are resolved on first use, so importing the package loads nothing, and using it needs torch alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from softfocus._version import __version__

if TYPE_CHECKING:
    from softfocus.catalog import mechanism, mechanisms
    from softfocus.dispatch import explain
    from softfocus.functional import RowStatistics, attention
    from softfocus.mechanism import Mechanism, laser, sharpened

__all__ = [
    "Mechanism",
    "RowStatistics",
    "__version__",
    "attention",
    "explain",
    "laser",
    "mechanism",
    "mechanisms",
    "sharpened",
]

_HOME = {
    "Mechanism": "softfocus.algebra",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'softfocus' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
