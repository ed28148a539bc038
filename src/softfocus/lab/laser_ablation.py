"""LASER changed, to show what its shift is for: with values of another size, and as log(A e^V) is
written.

A model's config says so in its entry ``laser_ablation``, which config.json keeps. The lab applies
it wherever it makes or loads a model. Transformers alone does not read it.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

import softfocus.hf
from softfocus.catalog import named
from softfocus.contract import Call, compute_dtype
from softfocus.functional import attention, validated_call
from softfocus.hf.adapter import REPLACED
from softfocus.hf.learned import attention_modules
from softfocus.lab.errors import LabError
from softfocus.layout import kind_text
from softfocus.ops import without_autocast

KEY = "laser_ablation"
"""The entry of a config, and the key of a recipe's [model]."""

Model = TypeVar("Model", bound=Any)


@dataclass(frozen=True)
class ChangedLaser:
    """Stands in place of ``softfocus.attention()`` in a model's attention modules.

    Attributes:
        values_times: what the values are multiplied by, before attention.
        shifted: whether softfocus computes LASER; else :func:`as_written` does.
    """

    values_times: float
    shifted: bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        """out [B, H, Lq, Dv] for query [B, H, Lq, D], key [B, Hk, Lk, D] and value [B, Hk, Lk, Dv].
        Further arguments are those of ``softfocus.attention()``.

        Raises:
            ValueError: another mechanism than plain LASER, as after ``softfocus.hf.use()``.
        """
        mechanism = arguments["mechanism"]
        learned = [name for name in ("head_scale", "power") if arguments.get(name) is not None]
        if learned or (named(mechanism) if isinstance(mechanism, str) else mechanism) != named("laser"):
            raise ValueError(
                f"mechanism: this model was made with model.{KEY}, which is about plain LASER; it got {mechanism}"
                f"{' with a learned ' + learned[0] if learned else ''}. Make the model again from a recipe without it"
            )
        value = value * self.values_times
        if self.shifted:
            return attention(query, key, value, **arguments)
        call = validated_call(query, key, value, **arguments)
        with without_autocast(query):  # as softfocus's own calls do
            return as_written(call)


def as_written(call: Call) -> Tensor:
    """log(A e^V) with A = softmax(Q K^T / sqrt(d)), in dense products of torch: [B, H, Lq, Dv].

    Nothing is subtracted from the values, so e^V is infinite in float32 where one is above 88.7. A
    hidden key has the weight 0, which products multiply by what its value gives, forward and
    backward: 0 times infinity is NaN. A row that sees no key is NaN. Its token is a key of the next
    layer, where it makes all rows NaN. So a batch with padding on the left is lost.
    """
    query, shared = call.query, call.query.size(1) // call.key.size(1)
    dtype = compute_dtype(query.dtype)
    key, value = (x.to(dtype).repeat_interleave(shared, dim=1) for x in (call.key, call.value))
    scores = call.scale * (query.to(dtype) @ key.mT)
    if call.bias is not None:
        scores = scores + call.bias
    visible = call.visibility.of_rows(torch.arange(query.size(2), device=query.device))
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return (weights @ value.exp()).log().to(query.dtype)


def check(config: Any) -> None:
    """Refuse what is not about plain LASER.

    Raises:
        LabError: the config has the entry, and some heads run another mechanism.
    """
    layout = softfocus.hf.layout_of(config)
    if getattr(config, KEY, None) is None or layout is None:
        return
    if others := tuple(group for group in layout.groups() if group.mechanism != named("laser") or group.learned):
        what = kind_text(others[:1], learned=True)
        raise LabError(
            f"this model was trained with model.{KEY}, which is about plain LASER, and not about {what}",
            "leave --mechanism out",
        )


def apply(model: Model) -> Model:
    """The model, whose attention does what the entry of its config says; unchanged where there is
    none.

    Raises:
        LabError: as :func:`check`.
    """
    check(model.config)
    if (entry := getattr(model.config, KEY, None)) is not None:
        for module in attention_modules(model):
            setattr(module, REPLACED, ChangedLaser(**entry))
    return model
