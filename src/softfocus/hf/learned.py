"""Parameters that a mechanism owns in a model: which modules get them, when, and with which values.

They are ``softfocus_head_scale`` and ``softfocus_power``, one value for each head that learns one,
on every attention module whose layout asks for them. A model gets them while it is built, before
any weight is loaded, so they train, save and load like its own.
"""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from softfocus.catalog import LEARNABLE
from softfocus.contract import FLOATING
from softfocus.hf import rotary
from softfocus.hf.config import BUILT, hook, layer_of, layout_of, tree
from softfocus.hf.masks import mark
from softfocus.hf.source import source
from softfocus.layout import Layer, Layout, config_of_layer, kind_text

PREFIX = "softfocus_"
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_CROSS = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax\(|Softmax\(|scaled_dot_product_attention\(|multi_head_attention_forward\(")


def _dispatches(kind: Any) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in source(kind)


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that call the attention function registered under their config's attention
    implementation.

    Read off their source, as Transformers itself does to tell whether a model's attention can be
    set.
    """
    for module in model.modules():
        has_config = isinstance(getattr(module, "config", None), PreTrainedConfig)
        if has_config and not isinstance(module, PreTrainedModel) and _dispatches(type(module)):
            yield module


def keeps_softmax(model: nn.Module) -> list[str]:
    """The classes of attention in a model that compute their softmax themselves, whatever the
    config says.
    """
    kinds: set[Any] = {type(module) for module in model.modules()}
    attention = [kind for kind in kinds if re.search(r"Att(entio)?n", kind.__name__) and not _dispatches(kind)]
    return sorted(kind.__name__ for kind in attention if _SOFTMAX.search(source(kind)))


def counts_hidden_keys(model: nn.Module) -> list[str]:
    """The classes whose masks hide keys by adding -100, which ``softfocus.attention()`` adds to
    their scores, too.

    Swin's. So few below 0 may also be a position bias, so that no line tells them apart.
    """
    kinds: set[Any] = {type(module) for module in model.modules() if any(attention_modules(module))}
    return sorted(kind.__name__ for kind in kinds if re.search(r"mask\.masked_fill\([^)]*, -100\.0\)", source(kind)))


def heads(module: nn.Module) -> int:
    """How many query heads an attention module has.

    Raises:
        ValueError: neither the module nor its config says.
    """
    config = config_of_layer(module.config, getattr(module, "layer_idx", None))
    for owner, names in ((module, _HEADS), (config, ("num_attention_heads",))):
        for name in names:
            if isinstance(count := getattr(owner, name, None), int):
                return count
    raise ValueError(
        f"{type(module).__name__}: cannot tell its number of heads, so softfocus cannot add the parameters that the "
        f"mechanism learns; give the module an attribute {_HEADS[0]!r}, or use a mechanism that learns nothing"
    )


def weight_of(module: nn.Module) -> Tensor:
    """A tensor in the dtype and on the device of a module's weights. Weights of 8 or 4 bits, which
    may be buffers, count for their device alone; float32 stands for their dtype.
    """
    usual = next((weight for weight in module.parameters() if weight.dtype in FLOATING), None)
    if usual is not None:
        return usual
    held = next(chain(module.parameters(), module.buffers()), None)
    return torch.empty(0, dtype=torch.float32, device=None if held is None else held.device)


def take_off(module: nn.Module) -> None:
    """Take the parameters off an attention module, where it has them."""
    for argument in LEARNABLE:
        module._parameters.pop(PREFIX + argument, None)


def equip(module: nn.Module) -> None:
    """Give an attention module the parameters that its layout asks for, and take away those it does
    not. Keeps what fits.

    New parameters are in the device (meta included) and dtype of the module's weights, and hold
    their initial values.
    """
    layout: Any = layout_of(module.config)
    setattr(module, BUILT, layout)
    layer = layer_of(module) or ()
    for argument in LEARNABLE:
        name = PREFIX + argument
        initial = _initial(module, layer, argument)
        if initial is None:
            module._parameters.pop(name, None)
        elif (there := module._parameters.get(name)) is None or _shape(there) != initial.shape:
            weight = weight_of(module)
            # DiffLlama's first weight is made by torch.normal, on the CPU under a meta device, too
            device = initial.device if initial.is_meta else weight.device
            module.register_parameter(name, nn.Parameter(initial.to(device, weight.dtype)))
    rotary.install(module, layer)


def _shape(parameter: Tensor) -> torch.Size:
    """Of the whole parameter: between two forward passes DeepSpeed's ZeRO-3 leaves an empty one."""
    return getattr(parameter, "ds_shape", parameter.shape)


def equip_all(model: nn.Module) -> None:
    """:func:`equip` every attention module of a model, and its rotary embeddings."""
    places = {module: name for name, module in model.named_modules()}
    _refuse_layers_of_no_module(model)
    for module in attention_modules(model):
        equip(module)
        module._softfocus_crosses = _crosses(module, places[module])  # type: ignore[assignment]
    rotary.add_bases(model)


def is_causal(module: nn.Module) -> bool:
    """Whether a module attends causally by itself. One that does not say so does, but for
    cross-attention (in Transformers 5.24 that is Mllama's alone).
    """
    return bool(getattr(module, "is_causal", not getattr(module, "_softfocus_crosses", False)))


def refuse_other_layers(modules: list[nn.Module], layout: Layout) -> None:
    """A layout finds its layers by number. Layers without a module that dispatches, as a hybrid's
    linear attention, are left out.
    """
    numbers = [getattr(module, "layer_idx", None) for module in modules]
    if len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(len(layout.layers or ()))):
        kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
        if set(numbers) == {None}:
            raise ValueError(
                f"layout: the model's attention modules ({kinds}) have no layer_idx, by which a layout finds its "
                "layers; most decoders have it. Give one mechanism for all layers"
            )
        raise ValueError(
            f"layout: it needs one attention module a layer, numbered as layer_idx from 0; "
            f"the model's ({kinds}) are numbered {numbers}"
        )


def _refuse_layers_of_no_module(model: nn.Module) -> None:
    """:func:`refuse_other_layers` in what shares a config. Where a config was given a layout before
    its model was built or loaded, nothing else says it.
    """
    found: dict[int, list[nn.Module]] = {}
    for module in attention_modules(model):
        found.setdefault(id(module.config), []).append(module)
    for modules in found.values():
        layout = layout_of(modules[0].config)
        if layout is not None and layout.layers is not None:
            refuse_other_layers(modules, layout)


def _crosses(module: nn.Module, place: str) -> bool:
    """Whether an attention module takes its keys from elsewhere than its queries: by its flag, its
    class, or its name in the model (BERT's modules are the ``self`` inside).
    """
    own = place.removesuffix(".self").rpartition(".")[2]
    return bool(getattr(module, "is_cross_attention", False) or _CROSS.search(f"{own} {type(module).__name__}"))


def _initial(module: nn.Module, layer: Layer, argument: str) -> Tensor | None:
    """One value for each head that learns the argument, float32 [n]; None where no head does."""
    values = [
        torch.full((group.heads or heads(module),), group.learned[argument])
        for group in layer
        if argument in group.learned
    ]
    return torch.cat(values) if values else None


def refuse_other_learners(before: Layout | None, after: Layout) -> None:
    """Refuse a layout in which other heads learn something than in the one before: what was learned
    would move to them.
    """
    if before is None:
        return
    for number in range(len(before.layers or after.layers or (0,))):
        old, new = before.layer(number), after.layer(number)
        for argument in LEARNABLE:
            if _learners(old, argument) != _learners(new, argument):
                raise ValueError(
                    f"assign: in layer {number}, which runs {kind_text(old, learned=True)}, other heads than now would "
                    f"learn {argument} with {kind_text(new, learned=True)}; keep the heads that learn, or call "
                    "softfocus.hf.use(), which starts anew"
                )
        if (now := _replaced_powers(old)) != (then := _replaced_powers(new)):
            raise ValueError(
                f"assign: in layer {number} heads learn their power, which takes the place of the mechanism's: it was "
                f"{now} and cannot become {then}; write the one that was, or call softfocus.hf.use(), which starts anew"
            )


def _learners(layer: Layer, argument: str) -> list[bool]:
    """Which heads learn an argument: one value for each, or one for all of them."""
    learners = [argument in group.learned for group in layer for _ in range(group.heads or 1)]
    return learners if len(set(learners)) > 1 else learners[:1]


def _replaced_powers(layer: Layer) -> list[float]:
    """The mechanisms' own powers in the groups that learn one."""
    return sorted({group.mechanism.power or 0.0 for group in layer if "power" in group.learned})


def parameter_of(module: nn.Module, layer: Layer, number: int, argument: str) -> Tensor | None:
    """What a group of heads learns for an argument of ``softfocus.attention()``, [its heads]; None
    if it learns no such.

    Args:
        module: the attention module, which owns the parameters.
        layer: its groups of heads.
        number: of the group.
        argument: among :data:`softfocus.catalog.LEARNABLE`.

    Raises:
        ValueError: the layout asks for a parameter that the module has not got.
    """
    if argument not in layer[number].learned:
        return None
    parameter: Tensor | None = getattr(module, PREFIX + argument, None)
    if parameter is None:
        raise ValueError(
            f"{type(module).__name__} has no parameter {PREFIX + argument!r}, which its config.softfocus asks for. The "
            "model was built before its config was changed, or its class never calls post_init(): call "
            "softfocus.hf.use(model, ...) on the model itself"
        )
    if len(layer) == 1:
        return parameter
    start = sum(group.heads or 0 for group in layer[:number] if argument in group.learned)
    return parameter[start : start + (layer[number].heads or 0)]


def install() -> None:
    """Hook :class:`PreTrainedModel`, once: parameters are added when a model is built, and given
    their values.
    """

    @hook(PreTrainedModel, "post_init")
    def post_init(original: Any, self: PreTrainedModel) -> None:
        # The end of every model's __init__, under from_pretrained's meta device too, and before
        # weights are loaded. Inner models come here first; for the outer ones their modules are
        # equipped already.
        if any(layout_of(config) for config in tree(self.config)):
            mark(self)
            equip_all(self)
        original(self)

    @hook(PreTrainedModel, "_initialize_weights")
    def initialize_weights(original: Any, self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # A checkpoint without our parameters (one trained with softmax, say) leaves them empty; no
        # model's own _init_weights knows them. init.copy_ leaves alone what a checkpoint has
        # filled.
        fresh = not getattr(module, "_is_hf_initialized", False)
        original(self, module, *args, **kwargs)
        if fresh:
            for argument in LEARNABLE:
                if (parameter := module._parameters.get(PREFIX + argument)) is not None:
                    initial = _initial(module, layer_of(module) or (), argument)
                    assert initial is not None
                    init.copy_(parameter, initial.to(parameter.device, parameter.dtype))
