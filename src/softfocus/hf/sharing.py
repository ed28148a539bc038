"""Configs that a model shares. Transformers' classes keep the config that they are given, so two
models that were built from one config object read the same entry: what :func:`softfocus.hf.use`
writes for one would run in the other.
"""

import copy
import gc
from typing import Any
from weakref import WeakSet

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from softfocus.hf.config import tree

_built: WeakSet[PreTrainedModel] = WeakSet()


def note(model: PreTrainedModel) -> None:
    """Remember a model that is being built."""
    _built.add(model)


def separate(model: PreTrainedModel) -> None:
    """Give a model, with the models around it and in it, configs of its own: copies, equal to those
    that it was built from. A config object that the caller still holds is no longer the model's.
    """
    copies: dict[int, Any] = {}  # one of each config, wherever the model has it
    for module in outermost(model).modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def outermost(model: PreTrainedModel) -> PreTrainedModel:
    """The model that holds this one and shares its config, as a causal language model holds its
    decoder; the model itself where there is none.
    """
    around = [one for one in _candidates(model) if _shares(one, model) and any(part is model for part in one.modules())]
    return max(around, key=lambda one: sum(1 for _ in one.modules()), default=model)


def _candidates(model: PreTrainedModel) -> list[PreTrainedModel]:
    """All models that may hold this one. A model that was built before this import, or copied, is
    in no list: the garbage collector knows it.
    """
    if model in _built:
        return list(_built)
    return [one for one in gc.get_objects() if issubclass(type(one), PreTrainedModel)]


def _shares(one: nn.Module, model: PreTrainedModel) -> bool:
    config = vars(one).get("config")
    return isinstance(config, PreTrainedConfig) and any(inner is model.config for inner in tree(config))
