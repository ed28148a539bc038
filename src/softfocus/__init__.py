"""Softplus attention that stays in focus: one call shaped like PyTorch's own, for LSSA, LSSAR,
LASER and their baselines.

Names are resolved on first use, so importing the package loads nothing, and using it needs torch
alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from softfocus import _process as _process  # in the parent, whatever a forked child uses first
from softfocus._version import __version__

if TYPE_CHECKING:
    from softfocus.cache import attention_with_cache
    from softfocus.catalog import mechanisms, named, register
    from softfocus.functional import RowStatistics, attention, explain
    from softfocus.mechanism import Mechanism, laser, sharpened
    from softfocus.row_weights import weights
    from softfocus.visibility import document_ids_from_lengths

__all__ = [
    "Mechanism",
    "RowStatistics",
    "__version__",
    "attention",
    "attention_with_cache",
    "document_ids_from_lengths",
    "explain",
    "laser",
    "mechanisms",
    "named",
    "register",
    "sharpened",
    "weights",
]

# No submodule may bear one of these names: importing it would put the module in the function's
# place.
_HOME = {
    "Mechanism": "softfocus.mechanism",
    "laser": "softfocus.mechanism",
    "sharpened": "softfocus.mechanism",
    "mechanisms": "softfocus.catalog",
    "named": "softfocus.catalog",
    "register": "softfocus.catalog",
    "attention": "softfocus.functional",
    "attention_with_cache": "softfocus.cache",
    "RowStatistics": "softfocus.functional",
    "explain": "softfocus.functional",
    "weights": "softfocus.row_weights",
    "document_ids_from_lengths": "softfocus.visibility",
}


_SUBMODULES = ("hf", "nn", "testing")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"softfocus.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'softfocus' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # found once
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
