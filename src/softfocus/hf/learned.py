"""Parameters that a mechanism owns in a model: which modules get them, when, and with which values.

They are ``softfocus_head_scale`` and ``softfocus_power``, [num_heads] each, on every attention module whose config asks
for them. A model gets them while it is built, before any weight is loaded, so they train, save and load like its own.
"""

import inspect
import re
from collections.abc import Iterator
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from softfocus.hf.config import LEARNABLE, learned_of, tree

PREFIX = "softfocus_"
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_SOFTMAX = re.compile(r"softmax\(|Softmax\(|scaled_dot_product_attention\(|multi_head_attention_forward\(")


@cache
def _source(kind: Any) -> str:
    """The source of a class and its bases below ``nn.Module``; empty where there is none to read."""
    sources = []
    for base in kind.__mro__:
        if base is nn.Module:
            break
        try:
            sources.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return "\n".join(sources)


def _dispatches(kind: Any) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in _source(kind)


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that call the attention function registered under their config's attention implementation.

    Read off their source, as Transformers itself does to tell whether a model's attention can be set.
    """
    for module in model.modules():
        has_config = isinstance(getattr(module, "config", None), PreTrainedConfig)
        if has_config and not isinstance(module, PreTrainedModel) and _dispatches(type(module)):
            yield module


def keeps_softmax(model: nn.Module) -> list[str]:
    """The classes of attention in a model that compute their softmax themselves, whatever the config says."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    attention = [kind for kind in kinds if re.search(r"Att(entio)?n", kind.__name__) and not _dispatches(kind)]
    return sorted(kind.__name__ for kind in attention if _SOFTMAX.search(_source(kind)))


def heads(module: nn.Module) -> int:
    """How many query heads an attention module has.

    Raises:
        ValueError: neither the module nor its config says.
    """
    for owner, names in ((module, _HEADS), (module.config, ("num_attention_heads",))):
        for name in names:
            if isinstance(count := getattr(owner, name, None), int):
                return count
    raise ValueError(
        f"{type(module).__name__}: cannot tell its number of heads, so softfocus cannot add the parameters that the "
        f"mechanism learns; give the module an attribute {_HEADS[0]!r}, or use a mechanism that learns nothing"
    )


def equip(module: nn.Module, learned: dict[str, float]) -> None:
    """Give an attention module the parameters it is to own, and take away those it is not. Keeps what is there.

    New parameters are in the device (meta included) and dtype of the module's weights.
    """
    for argument in LEARNABLE:
        name = PREFIX + argument
        if argument not in learned:
            module._parameters.pop(name, None)
        elif name not in module._parameters:
            weight = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
            initial = torch.full((heads(module),), learned[argument], device=weight.device, dtype=weight.dtype)
            module.register_parameter(name, nn.Parameter(initial))


def parameter_of(module: nn.Module, argument: str) -> Tensor | None:
    """What an attention module owns for an argument of ``softfocus.attention()``, [num_heads]; None if it learns no such.

    Raises:
        ValueError: its config asks for a parameter that it has not got.
    """
    if argument not in learned_of(module.config):
        return None
    parameter: Tensor | None = getattr(module, PREFIX + argument, None)
    if parameter is None:
        raise ValueError(
            f"{type(module).__name__} has no parameter {PREFIX + argument!r}, which its config.softfocus asks for. The "
            "model was built before its config was changed, or its class never calls post_init(): call "
            "softfocus.hf.use(model, ...) on the model itself"
        )
    return parameter


def install() -> None:
    """Hook :class:`PreTrainedModel`, once: parameters are added when a model is built, and given their values."""
    if hasattr(PreTrainedModel.post_init, "_softfocus"):
        return
    original_post_init, original_initialize = PreTrainedModel.post_init, PreTrainedModel._initialize_weights

    @wraps(original_post_init)
    def post_init(self: PreTrainedModel) -> None:
        # The end of every model's __init__, under from_pretrained's meta device too, and before weights are loaded.
        # Inner models come here first; for the outer ones their modules are equipped already.
        if any(learned_of(config) for config in tree(self.config)):
            for module in attention_modules(self):
                equip(module, learned_of(module.config))
        original_post_init(self)

    @wraps(original_initialize)
    def _initialize_weights(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # A checkpoint without our parameters (one trained with softmax, say) leaves them empty; no model's own
        # _init_weights knows them. init.constant_ leaves alone what a checkpoint has filled.
        fresh = not getattr(module, "_is_hf_initialized", False)
        original_initialize(self, module, *args, **kwargs)
        if fresh:
            for argument in LEARNABLE:
                if (parameter := module._parameters.get(PREFIX + argument)) is not None:
                    init.constant_(parameter, learned_of(module.config)[argument])

    post_init._softfocus = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init
    PreTrainedModel._initialize_weights = _initialize_weights
