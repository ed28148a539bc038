"""Configs that a model shares. Transformers' classes keep the config that they are given, so two
models that were built from one config object read the same entry: what :func:`softfocus.hf.use`
writes for one would run in the other.

Parts of a model may also have a config that is not in the model's config, as T5's encoder and
decoder have copies of it. What is written there would not be saved.
"""

import copy
import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from softfocus.hf.config import hook, layer_of, layout_of, tree
from softfocus.hf.learned import attention_modules
from softfocus.warn import warn

_built: WeakSet[PreTrainedModel] = WeakSet()


def install() -> None:
    """Hook :meth:`PreTrainedModel.save_pretrained`, once: a model is saved only if it would load as
    what it runs.
    """

    @hook(PreTrainedModel, "save_pretrained")
    def save_pretrained(original: Any, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        for module in attention_modules(self):
            layer_of(module)  # refuses a config that was changed behind the model's back
        _refuse_unsaved(self)
        return original(self, *args, **kwargs)


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


def refuse_part(model: PreTrainedModel) -> None:
    """Refuse to change a part of a model whose config other parts read, too, as BART's encoder."""
    if (whole := outermost(model)) is model:
        return
    written = {id(config) for one in model.modules() if _has_config(one) for config in tree(one.config)}
    own = set(model.modules())
    for module in attention_modules(whole):
        if module not in own and id(module.config) in written:
            models = [one for one in whole.modules() if isinstance(one, PreTrainedModel) and module in one.modules()]
            other = next((one for one in models if model not in one.modules()), module)
            both = [one for one in models if model in one.modules()][-1]  # the innermost
            raise ValueError(
                f"{type(model).__name__} shares its config with {type(other).__name__}, so that part alone cannot be "
                f"changed; give {type(both).__name__}, which holds both"
            )


def warn_unsaved(model: PreTrainedModel) -> None:
    """Warn if another model holds this one and would not save its config, as T5 its encoder's."""
    for one in _candidates(model):
        if one is not model and not _shares(one, model) and any(part is model for part in one.modules()):
            warn(
                f"softfocus.hf.use: {type(model).__name__} is inside {type(one).__name__}, whose config does not hold "
                "its own: the whole cannot be saved while they differ. To save it, call use() on the whole model",
                UserWarning,
            )
            return


def _has_config(module: nn.Module) -> bool:
    return isinstance(vars(module).get("config"), PreTrainedConfig)


def _candidates(model: PreTrainedModel) -> list[PreTrainedModel]:
    """All models that may hold this one. A model that was built before this import, or copied, is
    in no list: the garbage collector knows it, and is asked once.
    """
    if model not in _built:
        _built.update(one for one in gc.get_objects() if issubclass(type(one), PreTrainedModel))
    return list(_built)


def _shares(one: nn.Module, model: PreTrainedModel) -> bool:
    config = vars(one).get("config")
    return isinstance(config, PreTrainedConfig) and any(inner is model.config for inner in _saved_with(config))


def _refuse_unsaved(model: PreTrainedModel) -> None:
    """Refuse attention that runs something else than the model's config would be saved with.

    A part may have a config that is not in the model's config: a copy of it, or that of a part that
    was put in. from_pretrained() builds such a part from the config of the model around it, or from
    the configs of the part's class in that config.
    """
    saved = {id(config) for config in _saved_with(model.config)}
    part_of: dict[nn.Module, PreTrainedModel] = {}
    config_around: dict[nn.Module, PreTrainedConfig] = {}
    for part in model.modules():  # from the outside in
        if isinstance(part, PreTrainedModel):
            for module in attention_modules(part):
                part_of[module] = part
                if id(part.config) in saved:
                    config_around[module] = part.config
    for module, around in config_around.items():
        own: Any = module.config
        if id(own) in saved:
            continue
        for config in [one for one in _saved_with(around) if type(one) is type(own)] or [around]:
            if layout_of(config) != layout_of(own):
                raise ValueError(
                    f"save_pretrained: {type(part_of[module]).__name__} inside {type(model).__name__} runs "
                    f"{_text(own)}, but the config that would be saved says {_text(config)}; call softfocus.hf.use() "
                    "on the whole model, or softfocus.hf.assign(), which keeps what was learned"
                )


def _saved_with(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config and all that it holds, also outside of its sub_configs."""
    yield config
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            yield from _saved_with(inner)


def _text(config: PreTrainedConfig) -> str:
    return "Transformers' own attention" if (layout := layout_of(config)) is None else str(layout)
