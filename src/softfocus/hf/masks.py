"""The masks that a model's attention is handed: SDPA's conventions, or eager attention's.

Transformers makes masks for the attention implementation of a config. For SDPA they are bool, and
None stands for a plain causal mask. Models whose class declares no SDPA support
(``_supports_sdpa``) never see such masks: some add the mask to scores, some take None for no mask.
They get the masks of eager attention: float, and None for no mask.

Some classes keep an exception for ``_attn_implementation == "sdpa"`` and None: Gemma 4 drops
queries early, so that None would no longer mean what it says. They get SDPA's masks in full, never
None for a causal one.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from softfocus.hf.config import NAME, tree
from softfocus.hf.source import source

SDPA, FULL, EAGER = "sdpa", "full", "eager"


def make_mask(*args: Any, config: PreTrainedConfig | None = None, **kwargs: Any) -> Tensor | None:
    """The mask function behind ``attn_implementation="softfocus"``. Transformers hands over the
    config of the model.
    """
    expected = SDPA if config is None else expected_by(config)
    if expected == FULL:
        kwargs["allow_is_causal_skip"] = False
    make = eager_mask if expected == EAGER else sdpa_mask
    mask: Tensor | None = make(*args, config=config, **kwargs)
    return mask


def expected_by(config: PreTrainedConfig) -> str:
    """Which masks the models of a config expect: :data:`SDPA`, :data:`FULL` or :data:`EAGER`.

    Raises:
        ValueError: no model has said so: the config got its mechanism after its model was built.
    """
    entry = getattr(config, NAME, None)
    if entry is None:
        return SDPA
    if entry.masks is None:
        raise ValueError(
            f"{type(config).__name__}: its mechanism was set after its model was built; "
            "call softfocus.hf.use(model, ...) on the model itself; assign and window keep what it has learned"
        )
    expected: str = entry.masks
    return expected


def mark(model: PreTrainedModel) -> None:
    """Note in each config of a model which masks its models expect.

    One config may serve several models. Then masks of eager attention serve them all: they say
    everything, None included.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    eager = {id(owner.config) for owner in models if not owner._supports_sdpa}
    kinds: list[tuple[int, Any]] = [(id(owner.config), type(owner)) for owner in models]
    full = {config for config, kind in kinds if _has_an_exception(kind)}
    for config in {id(c): c for owner in models for c in tree(owner.config)}.values():
        if (entry := getattr(config, NAME)) is not None:
            entry.masks = EAGER if id(config) in eager else FULL if id(config) in full else SDPA


def _has_an_exception(kind: Any) -> bool:
    """Of a subclass, or a class that FSDP has made, its bases say so."""
    return '_attn_implementation == "sdpa"' in source(kind)
