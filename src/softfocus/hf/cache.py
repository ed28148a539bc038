"""Keys and values that a layer's window has left behind are not kept while a model generates."""

from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from softfocus.hf.config import hook, layout_of
from softfocus.layout import Layer, Layout

_SLICING = {"doge"}
"""Types of model whose attention takes as many columns of its mask as there are keys, from the
first on. A cache that has dropped keys needs the last columns, so their caches keep every key.
"""


def install() -> None:
    """Hook :class:`DynamicCache`, once: a cache made for a config keeps, in layers with a window,
    the window's keys only.
    """

    @hook(DynamicCache, "__init__")
    def init(
        original: Any, self: DynamicCache, ddp_cache_data: Any = None, config: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        original(self, ddp_cache_data, config, *args, **kwargs)
        if ddp_cache_data is None and isinstance(config, PreTrainedConfig):
            text = config.get_text_config(decoder=True)
            # Mllama's cache holds cross-attention layers, too. They would be the only ones that
            # keep everything, and masks would have as many columns as the image has keys
            crosses = bool(getattr(text, "cross_attention_layers", None))
            if (layout := layout_of(text)) is not None and text.model_type not in _SLICING and not crosses:
                _trim(self, layout)


def _trim(cache: DynamicCache, layout: Layout) -> None:
    """Put sliding layers in place of those that keep everything, where the layout lets them forget.

    Transformers sizes a model's masks by the first layer that keeps everything, or else by layer 0.
    So where no such layer would be left all have to keep as many keys. A model with sliding layers
    of its own sizes masks by these, too, and layers that share keys may need more than the one that
    makes them: such caches are left alone. A layer that is to keep no key but the query's own would
    keep all of them, and masks would be made for none: it keeps one more.
    """
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return
    reach = [_reach(layout.layer(number)) for number in range(len(cache.layers))]
    if None not in reach:
        reach = [max(width for width in reach if width is not None)] * len(reach)
    for number, width in enumerate(reach):
        if width is not None:
            cache.layers[number] = DynamicSlidingWindowLayer(sliding_window=max(width, 2))


def _reach(layer: Layer) -> int | None:
    """How many keys the widest group of a layer's heads sees; None for all."""
    windows = [group.window for group in layer]
    return None if None in windows or any(group.sinks for group in layer) else max(w for w in windows if w is not None)
