"""What ``use()``, ``window()`` and ``assign()`` refuse in a model, and warn of."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from softfocus.hf import learned
from softfocus.hf.backends import own_attention
from softfocus.hf.config import tree
from softfocus.warn import warn


def refuse_unchanged(caller: str, layouts: Sequence[object]) -> None:
    """Refuse a target in which nothing has a layout. ``caller`` names the function in the error."""
    if not layouts:
        raise ValueError(f"{caller}: the model runs its own attention; call softfocus.hf.use(model, 'softmax') first")


def refuse_own_parts(target: PreTrainedModel | PreTrainedConfig, in_part: bool) -> None:
    """Refuse to narrow what ``use()`` has changed in part.

    Args:
        target: a model or config.
        in_part: whether a config inside it has no layout. Of a model, whose outermost config may
            have no attention of its own, the modules decide.
    """
    kinds = own_attention(target) if isinstance(target, PreTrainedModel) else []
    if kinds or (in_part and isinstance(target, PreTrainedConfig)):
        which = f" ({', '.join(kinds)})" if kinds else ""
        raise ValueError(
            f"window: a part of the model runs its own attention{which}; call softfocus.hf.use() on that part first, "
            "or window() on the part that use() has changed"
        )


def refuse_class_without_dispatch(config: PreTrainedConfig) -> None:
    """A config says nothing about dispatch, its model class does; a class that Transformers does
    not list is let pass.
    """
    if not dispatches(config):
        raise ValueError(_no_dispatch(_classes(config)[0].__name__))


def dispatches(config: PreTrainedConfig) -> bool:
    """Whether a model of a config dispatches its attention, as far as its class says. Falcon's
    would take SDPA's masks for its own if its config named softfocus.
    """
    kinds = _classes(config)
    return not kinds or any(kind._can_set_attn_implementation() for kind in kinds)


def _classes(config: PreTrainedConfig) -> Sequence[Any]:
    kinds = MODEL_MAPPING.get(type(config), ())
    return kinds if isinstance(kinds, tuple | list) else (kinds,)


def refuse_without_dispatch(model: PreTrainedModel, modules: list[nn.Module]) -> None:
    """Refuse a model without attention that dispatches; warn of attention that does not."""
    if not modules:
        raise ValueError(_no_dispatch(type(model).__name__))
    if kept := learned.keeps_softmax(model):
        warn(
            f"softfocus.hf.use: {type(model).__name__} keeps softmax in {', '.join(kept)}, which computes it by itself",
            UserWarning,
        )


def dropout_of(config: PreTrainedConfig) -> tuple[str, float] | None:
    """The key and the value of a config's dropout of attention weights; None if it has none."""
    for inner in tree(config):
        for key in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate"):
            if value := getattr(inner, key, None):
                return key, value
    return None


def warn_of_dropout(model: PreTrainedModel) -> None:
    """By the keys of configs. What a module keeps to itself is refused in training alone."""
    if found := dropout_of(model.config):
        key, value = found
        warn(
            f"softfocus.hf.use: the config has {key} = {value}, and LASER has no dropout: the model can be evaluated, "
            f"but will refuse to train. Build it with {key} = 0 to train it",
            UserWarning,
        )


def warn_of_keys_that_count(model: PreTrainedModel) -> None:
    """Warn of Swin's masks."""
    if kinds := learned.counts_hidden_keys(model):
        warn(
            f"softfocus.hf.use: {', '.join(kinds)} hides keys by adding -100 to their scores; "
            "they get next to no weight, but count in N, the number of keys that a row sees",
            UserWarning,
        )


def _no_dispatch(name: str) -> str:
    return (
        f"{name} computes its attention itself instead of dispatching through Transformers' AttentionInterface, so no "
        "mechanism can be put into it. Take an architecture that dispatches (GPT-NeoX, Llama, Qwen, Mistral, "
        "BERT, ViT), or call softfocus.attention() in a model of your own."
    )
