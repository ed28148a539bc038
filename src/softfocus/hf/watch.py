"""A look at every call of attention that a model makes, while it makes it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Call(NamedTuple):
    """One call of ``softfocus.attention()``: a group of heads of an attention module that run the
    same.

    Attributes:
        module: the attention module.
        heads: the numbers of these heads among the module's.
        query: [B, H, Lq, D], of these heads, after the rotary embedding.
        key: [B, Hk, Lk, D].
        arguments: by name, what ``softfocus.weights()`` takes beside them.
    """

    module: nn.Module
    heads: range
    query: Tensor
    key: Tensor
    arguments: dict[str, Any]


listeners: list[Callable[[Call], None]] = []


@contextmanager
def watch(listener: Callable[[Call], None]) -> Iterator[None]:
    """While this is entered, every call of attention in every model is shown to a listener before
    it is computed.

    Example::

        def show(call):
            print(softfocus.weights(call.query, call.key, **call.arguments))

        with softfocus.hf.watch(show):
            model(input_ids)

    Raises:
        TypeError: a listener that cannot be called.
    """
    if not callable(listener):
        raise TypeError(f"listener: got {listener!r}, expected a function of one softfocus.hf.Call; hand one over")
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
