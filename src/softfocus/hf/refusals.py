"""What ``use()``, ``window()`` and ``assign()`` refuse in a model, and warn of; what a call of its
attention refuses.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from softfocus.hf import learned
from softfocus.hf.backends import own_attention
from softfocus.hf.config import tree
from softfocus.layout import Layer, Layout
from softfocus.warn import warn

_REFUSED = {
    "softcap": "caps the scores before the softmax (Gemma 2)",
    "s_aux": "adds attention sinks to the softmax's denominator (GPT-OSS)",
    "sinks": "adds attention sinks to the softmax's denominator",
    "indices": "picks the keys of sparse attention",
    "block_indices": "picks the blocks of sparse attention",
    "head_mask": "scales the finished weights head by head",
    "cache": "holds the paged cache of continuous batching",
}
_SHARDS_SEQUENCES = "torch.distributed.tensor"
"""Where the function comes from that torch's ``context_parallel()`` puts in SDPA's place."""


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


def refuse_new_parameters(whole: PreTrainedModel, modules: list[nn.Module], layout: Layout) -> None:
    """Refuse a layout whose heads learn in modules to which no parameter can be added any more.

    Args:
        whole: the outermost model, which knows where its weights are.
        modules: the attention modules that would run the layout.
        layout: what they would run.
    """
    placed = any(hasattr(module, "hf_device_map") for module in whole.modules())
    for module in modules:
        names = [name for group in layout.layer(getattr(module, "layer_idx", None)) for name in group.learned]
        if not names:
            continue
        what = f"{type(module).__name__}: the mechanism learns {names[0]}, and the module's weights are"
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):  # DTensors
            raise ValueError(
                f"{what} sharded already (DTensor), so that nothing would synchronise it; call softfocus.hf.use() on "
                "the model before wrapping it in DDP or FSDP, or on the config before it is loaded"
            )
        if placed and learned.weight_of(module).is_meta:
            raise ValueError(
                f"{what} offloaded (device meta), so that it would never get a value; call softfocus.hf.use() on the "
                "config before loading: from_pretrained(..., config=config, device_map=...)"
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


def refuse_arguments(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what a call of attention asks for and softfocus does not have."""
    sdpa = F.scaled_dot_product_attention  # which others may have replaced, by anything that can be called
    if not torch.compiler.is_compiling() and str(getattr(sdpa, "__module__", "")).startswith(_SHARDS_SEQUENCES):
        raise ValueError(
            f"{type(module).__name__} runs in torch's context_parallel(), which replaces SDPA alone: softfocus would "
            "see only this process's part of the sequence. Use data parallelism, FSDP or tensor parallelism"
        )
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name}, which {what}; softfocus has no such thing and would "
                f"silently leave it out. Use an architecture without {name}."
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: softfocus never holds the whole matrix of weights, so a model cannot return it. "
            "softfocus.hf.watch() shows the query and key of each layer, and softfocus.weights() their "
            "weights, for the rows that you choose."
        )


def refuse_other_heads(module: nn.Module, layer: Layer, total: int, shared: int) -> None:
    """Refuse groups of heads that are not all query heads of a call, or that part those that share
    a KV head.
    """
    if total != sum(group.heads or total for group in layer):
        raise ValueError(
            f"{type(module).__name__} hands over {total} query heads, and its layout describes "
            f"{[g.heads for g in layer]}; a layout by heads needs all heads of a layer in one call, and "
            "tensor parallelism splits them. Use FSDP, or one mechanism for all heads of a layer"
        )
    if (names := [name for group in layer for name in group.learned]) and total != (every := learned.heads(module)):
        raise ValueError(
            f"{type(module).__name__} hands over {total} of {every} query heads, and {names[0]} is learned for all of "
            "them: tensor parallelism splits the heads of a layer. Use FSDP, or a mechanism without learned parameters"
        )
    if len(layer) > 1 and (odd := [group.heads for group in layer if (group.heads or 0) % shared]):
        raise ValueError(f"heads: got {odd[0]}, expected a multiple of {shared}: so many query heads share a KV head")


def _no_dispatch(name: str) -> str:
    return (
        f"{name} computes its attention itself instead of dispatching through Transformers' AttentionInterface, so no "
        "mechanism can be put into it. Take an architecture that dispatches (GPT-NeoX, Llama, Qwen, Mistral, "
        "BERT, ViT), or call softfocus.attention() in a model of your own."
    )
