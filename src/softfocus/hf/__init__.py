"""Any mechanism in Transformers models whose attention is dispatched: GPT-NeoX, Llama, Qwen, BERT,
ViT, ... (docs/transformers.md lists those that are refused).

Importing this module registers the attention implementation "softfocus" and its mask function with
Transformers. Configs and models then read the mechanisms that :func:`use` writes into them::

    import softfocus.hf
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    model = softfocus.hf.use(GPTNeoXForCausalLM(GPTNeoXConfig()), "lssar")

Heads and layers may differ (:mod:`softfocus.layout`)::

    softfocus.hf.use(model, {"0::2": {"mechanism": "softmax", "window": 128}, "1::2": "lssar"})

T6, whose attention is factorised, is registered, too (:mod:`softfocus.hf.t6`).

What a model runs is saved in config.json, with an ``attn_implementation`` that only this import
makes known. Such a model does not come back as softmax: without the import Transformers refuses to
load it and quotes what to do, and with it every other ``attn_implementation`` is refused. A model
card says the same. What cannot be caught: ``from_pretrained(..., attn_implementation="sdpa")`` in a
process that never imports softfocus; ``from_pretrained(..., config=config)`` with a config without
a mechanism; an entry taken out of config.json by hand; engines with attention of their own (vLLM,
TGI, llama.cpp, ONNX and GGUF exports), which run softmax whatever the config says: do not serve
such a model there.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    message = "softfocus.hf needs Transformers; in your checkout of softfocus run pip install -e '.[hf]'"
    raise ModuleNotFoundError(message, name=error.name) from None

from softfocus.hf import backends as _backends
from softfocus.hf import cache as _cache
from softfocus.hf import card as _card
from softfocus.hf import classes as _classes
from softfocus.hf import config as _config
from softfocus.hf import learned as _learned
from softfocus.hf import peft as _peft
from softfocus.hf import refusals as _refusals
from softfocus.hf import sharing as _sharing
from softfocus.hf import t6 as _t6
from softfocus.hf.adapter import attention_forward
from softfocus.hf.masks import make_mask, mark
from softfocus.hf.watch import Call, watch
from softfocus.layout import Heads, Layout, layer_count, resolve
from softfocus.mechanism import Mechanism
from softfocus.warn import warn

__all__ = ["Call", "Heads", "Layout", "assign", "explain", "layout_of", "use", "watch", "window"]

_OF_HEADS = {field.name for field in fields(Heads)}
Target = TypeVar("Target", bound=PreTrainedModel | PreTrainedConfig)

AttentionInterface.register(_config.NAME, attention_forward)
AttentionMaskInterface.register(_config.NAME, make_mask)
_config.install()
_classes.install()
_card.install()
_learned.install()
_cache.install()
_peft.install()
_sharing.install()
_t6.register()


def use(target: Target, mechanism: str | Mechanism | Mapping[Any, Any] | Layout, **parameters: float) -> Target:
    """Put a mechanism into a model, or into a config from which a model will be built. Call it
    again to switch to another.

    Args:
        target: a model, changed in place, or a config. A model gets a config of its own, a copy:
            other models that were built from the same config object stay as they are. A composite
            model (vision and language, encoder and decoder) is changed throughout; give an inner
            model that has a config of its own, such as ``model.language_model``, to change that
            part alone.
        mechanism: a name of ``softfocus.mechanisms()``, a combination (``"laser(lssar)"``) or a
            ``Mechanism`` for all heads of all layers. Or a layout, for models with one stack of
            layers: what runs by layer type, number or slice of layers, each a mechanism, a dict of
            the fields of :class:`Heads`, or a list of these, one for each group of heads::

                {"sliding_attention": "softmax", "full_attention": "lssar"}
                {"0::2": {"mechanism": "softmax", "window": 128}, "*": "lssar"}
                {"*": [{"mechanism": "softmax", "window": 128, "heads": 6}, "lssar"]}

        parameters: initial values of what the attention modules learn, one value for all heads:
            ``head_scale`` multiplies the scores; ``power`` takes the place of the mechanism's
            power. What the mechanism is defined with (SSMax, QK-norm and Shen's ReLU learn a
            ``head_scale``) is added anyway, with its usual initial value. In a layout they stand
            with the heads, ``{"mechanism": "lssar", "parameters": {"power": 15}}``.

    Returns:
        The target. A model's attention modules own ``softfocus_head_scale`` and
        ``softfocus_power``, one value for each head that learns one, in the dtype of their weights:
        build the optimizer afterwards. Values learned before are reset.

    Raises:
        ValueError: an unknown mechanism or parameter value, a layout that does not fit the model,
            an architecture that computes its attention itself, a part that shares its config with
            another part, as BART's encoder with its decoder, or a mechanism that learns in a model
            whose weights are sharded (FSDP) or offloaded.
        TypeError: not a model, config, mechanism or layout, or an unknown parameter.

    Warns:
        UserWarning: some attention in the model (a pooling head, a block-sparse encoder) does not
            dispatch and keeps its softmax; or hides keys by so small a number (Swin's -100) that
            they count in N. The message names the classes. Or a LASER mechanism is put into a model
            with attention dropout, which it refuses in training. Or the model is a part of another
            one that cannot be saved with it, as T5's encoder.
    """
    layout = _layout(mechanism, parameters, _config_of(target))
    if isinstance(target, PreTrainedConfig):
        _refusals.refuse_class_without_dispatch(target)
        _put(target, layout)
        return target
    _sharing.refuse_part(target)
    modules = list(_learned.attention_modules(target))
    _refusals.refuse_without_dispatch(target, modules)
    if any(group.mechanism.laser for group in layout.groups()):
        _refusals.warn_of_dropout(target)
    if any(group.mechanism.counts_keys for group in layout.groups()):
        _refusals.warn_of_keys_that_count(target)
    if layout.layers is not None:
        _learned.refuse_other_layers(modules, layout)
    _refusals.refuse_new_parameters(_sharing.outermost(target), modules, layout)
    _sharing.separate(target)
    with _as_it_was_after_an_error(target):
        for module in modules:
            _learned.take_off(module)
        _put(target, layout)
    _sharing.warn_unsaved(target)
    return target


def layout_of(target: PreTrainedModel | PreTrainedConfig) -> Layout | None:
    """What the attention of a model or of a config's models runs; None where :func:`use` was never
    called. Of a composite model it is what :func:`use` put into the whole; a part may run another.
    """
    return _config.layout_of(_config_of(target))


def window(target: Target, keys: int, sinks: int = 0) -> Target:
    """Narrow every attention of a model, or of a config's models, to the last keys: a common way to
    run a softmax model beyond its training length.

    Heads that have a window as narrow already keep theirs: to widen or take away a window, call
    :func:`use` again. Nothing is learned anew. What :func:`use` put in is changed in place, in each
    part of a composite model; call ``use(model, "softmax")`` first where it was never called.

    Args:
        target: a model or config that :func:`use` has changed.
        keys: how many keys a query sees, itself (and the sinks) included.
        sinks: how many of them are the first of the text, at StreamingLLM's positions (arXiv
            2309.17453). For evaluation without a KV cache.

    Returns:
        The target.

    Raises:
        ValueError: no mechanism in the target or in a part of it, a window that holds no key, more
            sinks than keys, sinks beside heads that keep a window of their own, a model with an
            encoder and a decoder, or a part that shares its config with another part.
        TypeError: not a model or config, or ``keys`` is no whole number.

    Warns:
        UserWarning: every head of the model keeps its own window, so that nothing changes.
    """
    if isinstance(keys, bool) or not hasattr(keys, "__index__"):
        raise TypeError(
            f"keys: got {type(keys).__name__ if isinstance(keys, PreTrainedModel) else repr(keys)}, expected a whole "
            "number; to take a window away, call softfocus.hf.use() again"
        )
    keys = operator.index(keys)
    layouts = [layout for _, layout in _layouts(target)]
    _refusals.refuse_unchanged("window", layouts)
    _refusals.refuse_own_parts(target, len(layouts) < len(_configs(target)))

    def narrowed(group: Heads) -> Heads:
        if group.window is not None and group.window <= keys:
            if sinks and group.sinks != sinks:
                raise ValueError(
                    f"window: got keys={keys} and sinks={sinks}, but heads that run {group} keep their own "
                    f"window; ask for fewer than {group.window} keys, or write the sinks into the layout"
                )
            return group
        return replace(group, window=keys, sinks=sinks)

    for layout in layouts:  # what does not fit is said before a model gets a config of its own
        layout.map(narrowed)
    if isinstance(target, PreTrainedModel):
        _sharing.refuse_part(target)
        groups = [group for layout in layouts for group in layout.groups()]
        if all(group.window is not None and group.window < keys for group in groups):
            warn(
                f"softfocus.hf.window: every head keeps its own window of fewer than {keys} keys; to widen it, call "
                "softfocus.hf.use() again",
                UserWarning,
            )
        _sharing.separate(target)
    _write(target, [(config, layout.map(narrowed)) for config, layout in _layouts(target)])
    return target


def assign(target: PreTrainedModel | PreTrainedConfig, mechanism: str | Mechanism | Mapping[Any, Any] | Layout) -> None:
    """Write a mechanism or layout into a model or config and keep what its heads have learned: for
    windows and powers that change. It takes what :func:`use` takes, without parameters.

    All parts of a composite model get it, as by :func:`use`, also those that run their own
    attention. The same heads must learn the same as in the layout that is there. Other models that
    share the config object then refuse to run; :func:`use` gives a model a config of its own. A
    config that is given alone changes for models that are built later. Adapters that are trained
    are saved as adapters of what is assigned; a :func:`window` does not change that.

    Raises:
        ValueError: :func:`use` was never called on the target, other heads would learn something, a
            layout that does not fit the model, or a part that shares its config with another part.
        TypeError: not a model, config, mechanism or layout.
    """
    layout = _layout(mechanism, {}, _config_of(target))
    if isinstance(target, PreTrainedModel):
        _sharing.refuse_part(target)
    _refusals.refuse_unchanged("assign", _layouts(target))
    for config in _configs(target):
        _learned.refuse_other_learners(_config.layout_of(config), layout)
    _put(target, layout)


def _put(target: PreTrainedModel | PreTrainedConfig, layout: Layout) -> None:
    _write(target, [(config, layout) for config in _configs(target)])
    if isinstance(target, PreTrainedModel):
        _peft.renew(_sharing.outermost(target))


def _write(target: PreTrainedModel | PreTrainedConfig, layouts: Sequence[tuple[PreTrainedConfig, Layout]]) -> None:
    with _as_it_was_after_an_error(target):
        for config, layout in layouts:
            _config.write(config, layout)
        if isinstance(target, PreTrainedModel):
            mark(target)
            _learned.equip_all(target)


def explain(model: PreTrainedModel) -> str:
    """What each layer of a model runs, in words, and on which backend as the model is now. Print
    it.

    A backend is chosen at every call: masks, lengths and autocast may lead to another one than is
    named here. Where the parts of a composite model differ, each has a table.

    Raises:
        ValueError: :func:`use` was never called on the model or on a part of it.
        TypeError: not a model.
    """
    if isinstance(model, PreTrainedConfig):
        raise TypeError(f"model: got {type(model).__name__}, expected a model; of a config print layout_of(config)")
    if not _layouts(model):
        raise ValueError(
            f"{type(model).__name__} runs Transformers' own attention: softfocus.hf.use() was never called on it"
        )
    return _backends.tables(model)


def _config_of(target: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    if not isinstance(target, PreTrainedConfig | PreTrainedModel):
        raise TypeError(
            f"target: got {type(target).__name__}, expected a Transformers model or config; "
            + (
                "what use() adds to a model that is wrapped already is not synchronised: call it before wrapping. "
                "To assign(), window() and explain() give the model inside"
                if type(target).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
                else "of a wrapped model (compiled, PEFT) give the model inside"
            )
        )
    return target if isinstance(target, PreTrainedConfig) else target.config


def _layouts(target: PreTrainedModel | PreTrainedConfig) -> list[tuple[PreTrainedConfig, Layout]]:
    """The configs of a target that have a layout, with it."""
    found = [(config, _config.layout_of(config)) for config in _configs(target)]
    return [(config, layout) for config, layout in found if layout is not None]


def _layout(mechanism: Any, parameters: dict[str, float], config: PreTrainedConfig) -> Layout:
    if not isinstance(mechanism, Mapping | Layout):
        if misplaced := {key: value for key, value in parameters.items() if key in _OF_HEADS}:
            spec = {"*": {"mechanism": mechanism, **misplaced}}
            raise TypeError(f"nothing is learned under the name {next(iter(misplaced))!r}; write a layout: {spec}")
        return Layout.alike(Heads(mechanism=mechanism, parameters=tuple(parameters.items())))
    if parameters:
        raise TypeError(
            f"use(): {', '.join(parameters)} beside a layout; write it where the heads stand: "
            "{'mechanism': 'lssar', 'parameters': {'power': 15}}"
        )
    layout = resolve(mechanism, config) if isinstance(mechanism, Mapping) else mechanism
    if layout.layers is not None and len(layout.layers) != layer_count(config):
        raise ValueError(f"layout: it describes {len(layout.layers)} layers, the model has {layer_count(config)}")
    return layout


def _configs(target: PreTrainedModel | PreTrainedConfig) -> list[PreTrainedConfig]:
    """The config and those inside it whose models dispatch. Decoders may hold copies, so a model's
    modules are asked for theirs, too.
    """
    owners = [_config_of(target)]
    if isinstance(target, PreTrainedModel):
        owners = [m.config for m in target.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)]
    found = {id(config): config for owner in owners for config in _config.tree(owner)}
    return [config for config in found.values() if _refusals.dispatches(config)]


@contextmanager
def _as_it_was_after_an_error(target: PreTrainedModel | PreTrainedConfig) -> Iterator[None]:
    """Gives a model or config back what it ran and what its heads had learned, where a layout turns
    out not to fit while it is put in (no RoPE to change, say).
    """
    configs = [(config, _config.state(config)) for config in _configs(target)]
    modules = list(_learned.attention_modules(target)) if isinstance(target, PreTrainedModel) else []
    learned = [dict(module._parameters) for module in modules]
    try:
        yield
    except BaseException:
        for config, before in configs:
            _config.restore(config, before)
        for module, parameters in zip(modules, learned, strict=True):
            _learned.take_off(module)
            module._parameters.update(parameters)
        if isinstance(target, PreTrainedModel):
            _learned.equip_all(target)
        raise
