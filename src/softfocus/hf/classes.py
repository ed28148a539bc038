"""Modeling files that look up the class of an attention by the name of the attention
implementation.

SAM, GIT and others have such tables, with entries "eager" and "sdpa" only. The classes in them
compute their softmax themselves and keep it (:func:`softfocus.hf.use` says so). Without an entry of
our name the model could not be built.
"""

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from softfocus.hf.config import NAME, hook, layout_of, tree
from softfocus.hf.sharing import note


def install() -> None:
    """Hook :class:`PreTrainedModel`, once: before a model with a mechanism builds its layers, the
    tables know our name. Every model is noted (:mod:`softfocus.hf.sharing`).
    """

    @hook(PreTrainedModel, "__init__")
    def init(original: Any, self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        note(self)
        if any(layout_of(inner) for inner in tree(config)):
            _complete_tables(type(self))


def _complete_tables(model: type[PreTrainedModel]) -> None:
    """Enter our name where the class of attention is that which the model would have taken by
    default.
    """
    default = "sdpa" if model._supports_sdpa else "eager"
    for module in {kind.__module__ for kind in model.__mro__}:
        for table in vars(sys.modules[module]).values():
            if isinstance(table, dict) and default in table and NAME not in table and _holds_classes(table):
                table[NAME] = table[default]


def _holds_classes(table: dict[Any, Any]) -> bool:
    return all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in table.values())
