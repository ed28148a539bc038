"""Any mechanism in any Transformers architecture that dispatches its attention: GPT-NeoX, Llama, Qwen, BERT, ViT, ...

Importing this module registers the attention implementation "softfocus" and its mask function with Transformers, and
teaches configs and models about the mechanisms that :func:`use` writes into them::

    import softfocus.hf
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    model = softfocus.hf.use(GPTNeoXForCausalLM(GPTNeoXConfig()), "lssar")

The mechanism is saved in config.json with ``"attn_implementation": "softfocus"``. Such a model does not come back as
softmax: without this import Transformers refuses to load it, and with it every other ``attn_implementation`` is refused.
What cannot be caught: ``from_pretrained(..., attn_implementation="sdpa")`` in a process that never imports softfocus;
an entry taken out of config.json by hand; engines with attention of their own (vLLM, TGI, llama.cpp, ONNX and GGUF
exports), which run softmax whatever the config says: do not serve such a model there.
"""

import math
from difflib import get_close_matches
from typing import Any, TypeVar
from warnings import warn

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
    from transformers.masking_utils import sdpa_mask
    from transformers.models.auto.modeling_auto import MODEL_MAPPING
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    message = "softfocus.hf needs Transformers; pip install 'softfocus[hf]', or in a checkout pip install -e '.[hf]'"
    raise ModuleNotFoundError(message, name=error.name) from None

from softfocus.catalog import learned_parameters
from softfocus.hf import config as _config
from softfocus.hf import learned as _learned
from softfocus.hf.adapter import attention_forward
from softfocus.mechanism import Mechanism
from softfocus.validation import mechanism_of

__all__ = ["use"]

Target = TypeVar("Target", bound=PreTrainedModel | PreTrainedConfig)

AttentionInterface.register(_config.NAME, attention_forward)
AttentionMaskInterface.register(_config.NAME, sdpa_mask)
_config.install()
_learned.install()


def use(target: Target, mechanism: str | Mechanism, **parameters: float) -> Target:
    """Put a mechanism into a model, or into a config from which a model will be built. Again to switch to another.

    Args:
        target: a model, changed in place, or a config. A composite model (vision and language, encoder and decoder) is
            changed throughout; give an inner model, such as ``model.language_model``, to change that part alone.
        mechanism: a name of ``softfocus.mechanisms()``, a combination (``"laser(lssar)"``) or a ``Mechanism``.
        parameters: initial values of what the attention modules learn, one value for all heads: ``head_scale``
            multiplies the scores; ``power`` takes the place of the mechanism's power. What the mechanism is defined with
            (SSMax, QK-norm and Shen's ReLU learn a ``head_scale``) is added anyway, with its usual initial value.

    Returns:
        The target. A model's attention modules own ``softfocus_head_scale`` and ``softfocus_power``, [num_heads] in the
        dtype of their weights, where they learn them: build the optimizer afterwards. Values learned before are reset.

    Raises:
        ValueError: an unknown mechanism or parameter value, or an architecture that computes its attention itself.
        TypeError: not a model, config or mechanism, or an unknown parameter.

    Warns:
        UserWarning: some attention in the model (a pooling head, a block-sparse encoder) does not dispatch and keeps its
            softmax; the message names the classes.
    """
    algebra = mechanism_of(mechanism)
    entry = _config.new_entry(algebra, {**learned_parameters(algebra), **_check_parameters(algebra, parameters)})
    if isinstance(target, PreTrainedConfig):
        _refuse_class_without_dispatch(target)
        for config in _config.tree(target):
            _config.write(config, entry)
    elif isinstance(target, PreTrainedModel):
        modules = list(_learned.attention_modules(target))
        _refuse_without_dispatch(target, modules)
        for module in modules:
            _learned.equip(module, {})
            _learned.equip(module, entry["learned"])
        # Decoders may hold copies of the config, so the modules' own are written as well as the model's.
        owners = [m.config for m in target.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)]
        for config in {id(c): c for owner in owners for c in _config.tree(owner)}.values():
            _config.write(config, entry)
    else:
        raise TypeError(
            f"target: got {type(target).__name__}, expected a Transformers model or config; "
            "of a wrapped model (compiled, PEFT, DDP) give the model inside"
        )
    return target


def _check_parameters(mechanism: Mechanism, parameters: dict[str, Any]) -> dict[str, float]:
    for name, value in parameters.items():
        if name not in _config.LEARNABLE:
            near = get_close_matches(name, _config.LEARNABLE, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"they are {', '.join(_config.LEARNABLE)}"
            raise TypeError(f"use(): nothing is learned under the name {name!r}; {hint}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f"{name}: got {value!r}, expected a finite number, the initial value for every head; set the parameters "
                f"{_learned.PREFIX + name} afterwards for one value each"
            )
    if "power" in parameters:
        if mechanism.power is None:
            raise ValueError(
                f"power: the mechanism ({mechanism}) does not re-weight; start from 'sharpened(NAME, POWER)'"
            )
        mechanism.replace(power=parameters["power"])  # outside of its range is the mechanism's own error
    return {name: float(value) for name, value in parameters.items()}


def _refuse_class_without_dispatch(config: PreTrainedConfig) -> None:
    """A config says nothing about dispatch, its model class does; a class that Transformers does not list is let pass."""
    kinds = MODEL_MAPPING.get(type(config), ())
    kinds = kinds if isinstance(kinds, tuple | list) else (kinds,)
    if kinds and not any(kind._can_set_attn_implementation() for kind in kinds):
        raise ValueError(_no_dispatch(kinds[0].__name__))


def _refuse_without_dispatch(model: PreTrainedModel, modules: list[torch.nn.Module]) -> None:
    if not modules:
        raise ValueError(_no_dispatch(type(model).__name__))
    if kept := _learned.keeps_softmax(model):
        warn(
            f"softfocus.hf.use: {type(model).__name__} keeps softmax in {', '.join(kept)}, which computes it by itself",
            stacklevel=3,
        )


def _no_dispatch(name: str) -> str:
    return (
        f"{name} computes its attention itself instead of dispatching through Transformers' AttentionInterface, so no "
        "mechanism can be put into it. Take an architecture that dispatches (GPT-NeoX, Llama, Qwen, Mistral, BERT, ViT), "
        "or call softfocus.attention() in a model of your own."
    )
