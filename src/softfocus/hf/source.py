"""The source of Transformers' classes, which says what no attribute does."""

import inspect
from functools import cache
from typing import Any

from torch import nn


@cache
def source(kind: Any) -> str:
    """The source of a class and its bases below ``nn.Module``; empty where there is none to
    read.
    """
    sources = []
    for base in kind.__mro__:
        if base is nn.Module:
            break
        try:
            sources.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return "\n".join(sources)
