"""The masks that a model's attention is handed: SDPA's conventions, or eager attention's.

Transformers makes masks for the attention implementation of a config. For SDPA they are bool, and None stands for a plain
causal mask. Models whose class declares no SDPA support (``_supports_sdpa``) never see such masks: some add the mask to
scores, some take None for no mask. They get the masks of eager attention: float, and None for no mask.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from softfocus.hf.config import NAME, tree


def make_mask(*args: Any, config: PreTrainedConfig | None = None, **kwargs: Any) -> Tensor | None:
    """The mask function behind ``attn_implementation="softfocus"``. Transformers hands over the config of the model."""
    make = eager_mask if config is not None and expects_eager(config) else sdpa_mask
    mask: Tensor | None = make(*args, config=config, **kwargs)
    return mask


def expects_eager(config: PreTrainedConfig) -> bool:
    """Whether the models of a config expect the masks of eager attention.

    Raises:
        ValueError: no model has said so: the config got its mechanism after its model was built.
    """
    entry = getattr(config, NAME, None)
    if entry is None:
        return False
    if entry.eager_masks is None:
        raise ValueError(
            f"{type(config).__name__}: its mechanism was set after its model was built; call softfocus.hf.use(model, ...) on "
            "the model itself"
        )
    answer: bool = entry.eager_masks
    return answer


def mark(model: PreTrainedModel) -> None:
    """Note in each config of a model which masks its models expect.

    One config may serve several models. Then masks of eager attention serve them all: they say everything, None included.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    eager = {id(owner.config) for owner in models if not owner._supports_sdpa}
    for config in {id(c): c for owner in models for c in tree(owner.config)}.values():
        if (entry := getattr(config, NAME)) is not None:
            entry.eager_masks = id(config) in eager
