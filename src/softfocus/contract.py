"""The interface between ``attention()`` and its backends: a call, what a backend declares that it
supports, and what it returns.

This module has no maths. A new optional tensor or number is a field of :class:`Call` or
:class:`Visibility` with a default. The operators' schema and the gradients follow from it. A
backend that does not name it among its features refuses calls that give it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from softfocus.mechanism import CHOICES, Mechanism
from softfocus.visibility import Cache, Visibility


class RowStatistics(NamedTuple):
    """Statistics of each row, without gradient: [B, H, Lq], float32 or float64.

    Attributes:
        count: N_i, the number of visible keys.
        maximum: the largest visible score s_ij; -inf where a row sees nothing.
        log_norm: log sum_j |phi(s_ij)|, softmax's log-sum-exp; -inf where the sum is 0. (GELU, Mish
            and the identity may be negative.) Without the l1 norm the reference adds a positive phi
            in logarithms. Every other backend adds |phi| itself: -inf where all of them underflow,
            inf where one overflows.
        peak: max_j A_ij N_i - o, the highest weight over the row's mean before the power (o = 1, or
            0 where N <= 3); 0 without re-weighting.
    """

    count: Tensor  # type: ignore[assignment]  # tuple has a method of that name
    maximum: Tensor
    log_norm: Tensor
    peak: Tensor


class Dropout(NamedTuple):
    """Which weights are dropped.

    Attributes:
        p: the probability that a weight is dropped.
        seed: int64 scalar on the CPU, drawn after a backend has been chosen; None where p is 0.
    """

    p: float = 0.0
    seed: Tensor | None = None

    @property
    def number(self) -> int:
        """The seed as a Python number; 0 where there is none."""
        return 0 if self.seed is None else int(self.seed.item())


class Call(NamedTuple):
    """One validated call. Tensors that are fields have gradients; those inside visibility, dropout
    and cache have none.

    Attributes:
        query: [B, H, Lq, D].
        key: [B, Hk, Lk, D]; Hk divides H. With a cache the shapes of key and value are those of
            :class:`Cache`.
        value: [B, Hk, Lk, Dv].
        visibility: who sees whom.
        mechanism: phi, normaliser and so on.
        scale: the d-dependent factor of the scores.
        bias: float, broadcastable to [B, H, Lq, Lk].
        head_scale: [H], multiplies the scores.
        power: [H], replaces the mechanism's power.
        dropout: which weights are dropped.
        cache: which keys and values belong to which sequence; None where there is no cache.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visibility: Visibility
    mechanism: Mechanism
    scale: float
    bias: Tensor | None = None
    head_scale: Tensor | None = None
    power: Tensor | None = None
    dropout: Dropout = Dropout()
    cache: Cache | None = None

    def of_sequence(self, b: int, length: int) -> "Call":
        """The call for sequence ``b`` of a cache, which has ``length`` keys. Its keys and values
        are views, or copies of its pages.
        """
        assert self.cache is not None
        # Of the visibility only the window is kept: attention_with_cache() takes no mask, key mask
        # or document ids
        return self._replace(
            query=self.query[b : b + 1],
            key=self.cache.of_sequence(self.key, b, length),
            value=self.cache.of_sequence(self.value, b, length),
            visibility=Visibility(self.query.size(2), length, self.visibility.left, self.visibility.right),
            cache=None,
        )

    @property
    def sums_bias(self) -> bool:
        """Whether the bias is broadcast. Elements of its gradient are then sums of many scores'
        gradients.
        """
        scores = self.query.shape[:3].numel() * self.key.size(2)
        return self.bias is not None and self.bias.numel() < scores


# The fields of a call become arguments of an operator, and these become fields again. An example:
# Call.visibility -> leaves left, right, mask, key_mask, document_ids -> operator arguments of these
# names. So PARTS["visibility"] holds these five; they are the leaves 3 to 7, for query, key and
# value come before them. _PATHS has "visibility.left" and so on, where pack() finds them. _SLICES
# has (make, 3, 8): unpack() passes leaves 3 to 7 to make().
PARTS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "visibility": (  # unpack() adds query_length and key_length
        {name: kind for name, kind in Visibility.__annotations__.items() if name not in ("query_length", "key_length")},
        lambda *x: x,
    ),
    "mechanism": ({"code": str}, lru_cache(maxsize=256)(Mechanism.from_json)),
    "dropout": (Dropout.__annotations__, Dropout),
    "cache": (Cache.__annotations__, lambda *x: Cache(*x) if x else None),
}
"""Fields of a call that an operator cannot take as an argument. Each maps to its leaves and to the
function that makes the field from them. The lengths are not leaves: they follow from the tensors,
and every argument of an operator costs microseconds.
"""
_FIELDS = {name: PARTS.get(name, ({name: kind}, None)) for name, kind in Call.__annotations__.items()}
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", float: "float", str: "str"}

LEAVES = {name: _TYPES[kind] for leaves, _make in _FIELDS.values() for name, kind in leaves.items()}
"""The leaves of a call, which are the arguments of an operator, with their types in its schema. The
leaves of a cache come last.
"""
GRADIENTS = tuple(name for name, kind in Call.__annotations__.items() if kind in (Tensor, Tensor | None))
"""The tensors that have a gradient, in the order of an operator's results."""
_REQUIRED = ("query", "key", "value", "left", "right", "code", "scale")
"""Leaves that every backend supports. ``code`` is the mechanism, whose fields :class:`Supported`
declares one by one.
"""
_OPTIONAL = tuple(name for name in LEAVES if name not in (*_REQUIRED, *Dropout.__annotations__, *Cache.__annotations__))
_DEFAULTS = {**{entry.name: entry.default for entry in fields(Visibility)}, **Call._field_defaults}
assert (*Call._fields[:4], Call._fields[-1]) == ("query", "key", "value", "visibility", "cache"), (
    "the order of unpack()"
)
assert not (lacking := set(_OPTIONAL) - set(_DEFAULTS)), (
    f"{lacking}: a new leaf needs a default, its value where the argument is absent"
)
# The attribute path of each leaf in a Call, for attrgetter; without the cache, which may be None
_PATHS = [
    f"{name}.{x}" if make else name for name, (leaves, make) in _FIELDS.items() if name != "cache" for x in leaves
]
_take = attrgetter(*_PATHS)


def pack(call: Call) -> tuple[Any, ...]:
    """The leaves of a call."""
    # torch.compile traces an attrgetter only where it sees its construction
    take = attrgetter(*_PATHS) if torch.compiler.is_compiling() else _take
    cache = call.cache
    return take(call) if cache is None else (*take(call), cache.lengths, cache.page_table)


# The end of each field's leaves among all leaves
_ENDS = list(accumulate(len(leaves) for leaves, _make in _FIELDS.values()))
# For each field: the function that makes it from its leaves, or None; first and end of the leaves
_SLICES = [(make, end - len(leaves), end) for (leaves, make), end in zip(_FIELDS.values(), _ENDS, strict=True)]


def optional_arguments(leaves: Sequence[Any]) -> frozenset[str]:
    """The names of the optional leaves that differ from their defaults."""
    return frozenset(
        name for name, leaf in zip(LEAVES, leaves, strict=False) if name in _OPTIONAL and _differs(name, leaf)
    )


def _differs(name: str, leaf: Any) -> bool:
    default = _DEFAULTS[name]
    return leaf is not default and (isinstance(leaf, Tensor) or leaf != default)


def unpack(leaves: Sequence[Any]) -> Call:
    """The call that :func:`pack` turned into these leaves."""
    query, key, value, visibility_leaves, *remaining = [
        make(*leaves[low:end]) if make else leaves[low] for make, low, end in _SLICES
    ]
    # Only a call with a cache has all leaves; its last is the page table
    table = leaves[-1] if len(leaves) == len(LEAVES) else None
    key_length = key.size(2) * (1 if table is None else table.size(1))
    return Call(query, key, value, Visibility(query.size(2), key_length, *visibility_leaves), *remaining)


FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that attention computes in."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, weights and statistics are held for inputs of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Supported:
    """What a backend supports, field by field of :class:`Mechanism`. It refuses everything else.

    Attributes:
        similarity, length_scale, score_bias, phi, normaliser, post: values of the fields of
            ``Mechanism``. ``scale`` is missing because a backend gets the number.
        reweighting, laser: whether it re-weights rows by a power, and whether it has LASER.
        dtypes: of query, key and value.
        devices: types of devices, "any" for all of them.
        features: names of the optional leaves of a call, "dropout" and "cache". A backend without
            "cache" gets the sequences of a cache one at a time.
    """

    similarity: tuple[str, ...]
    length_scale: tuple[str, ...]
    score_bias: tuple[str, ...]
    phi: tuple[str, ...]
    normaliser: tuple[str, ...]
    post: tuple[str, ...]
    reweighting: bool
    laser: bool
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]
    features: tuple[str, ...]
    _without: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        without = tuple(name for name in (*_OPTIONAL, "dropout") if name not in self.features)
        object.__setattr__(self, "_without", without)

    def lacks(self, call: Call) -> str | None:
        """The first reason why a call is not supported, as a sentence; None if it is supported."""
        device, dtype, mechanism = call.query.device.type, call.query.dtype, call.mechanism
        if device not in self.devices and "any" not in self.devices:
            known = " or ".join("the CPU" if name == "cpu" else repr(name) for name in self.devices)
            return f"the tensors are on {device!r}, not on {known}"
        if dtype not in self.dtypes:
            *most, last = (str(known).removeprefix("torch.") for known in self.dtypes)
            return f"{dtype} is not among {', '.join(most)} and {last}"
        for name in [name for name in CHOICES if name != "scale"]:
            value, values = getattr(mechanism, name), getattr(self, name)
            if value not in values:
                return f"{name}={value!r} is not " + (f"among {', '.join(values)}" if len(values) > 1 else "supported")
        if mechanism.power is not None and not self.reweighting:
            return f"power={mechanism.power:g} is not supported"
        if mechanism.laser and not self.laser:
            return "laser=True is not supported"
        if not self._without:
            return None
        there = optional_arguments(pack(call)) | ({"dropout"} if call.dropout.p else set())
        return next((f"{name} is not supported" for name in self._without if name in there), None)


def supported_by_formulas(phi: tuple[str, ...]) -> Supported:
    """The declaration of the backends that are written in torch: all values of the algebra, every
    dtype and device, and all features but "cache".

    The values are listed, not taken from ``CHOICES``: both backends refuse a new one until it is
    added here.
    """
    return Supported(
        similarity=("dot", "cosine"), length_scale=("1", "log(N)", "log512(N)"), score_bias=("0", "-log(N)", "-log(L)"),
        phi=phi, normaliser=("l1", "none", "1/N", "1/L", "1/sqrt(N/2)"),
        post=("none", "negate", "recentre", "recentre+l1"), reweighting=True, laser=True,
        dtypes=FLOATING, devices=("any",),
        features=("bias", "head_scale", "power", "mask", "key_mask", "document_ids", "dropout"),
    )  # fmt: skip


Runner = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function that computes ``out`` from query, key and value. It belongs to one layout of calls."""


class Backend(Protocol):
    """A module of ``backends/``, or the reference. A backend sets the optional members that it does
    not have to None.
    """

    @property
    def SUPPORTED(self) -> Supported:
        """What the backend supports."""

    @property
    def ABOUT(self) -> str:
        """A short description for ``explain()``."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Returns out [B, H, Lq, Dv] and saved vectors [4 or more, B, H, Lq]. The first four are
        :class:`RowStatistics`.
        """

    @property
    def backward(self) -> Callable[..., dict[str, Tensor]] | None:
        """Takes a call, grad_out and whether the bias needs a gradient, and, if there is
        ``saved_vector_count``, what :meth:`forward` returned. Returns the gradients by name.
        """

    @property
    def saved_vector_count(self) -> Callable[[Call], int] | None:
        """Takes a call. Returns the number of saved vectors that the backward needs from the
        forward, in addition to ``out``. It includes the four of :class:`RowStatistics`.
        """

    @property
    def refuses(self) -> Callable[[Call, bool], str | None] | None:
        """Takes a call and whether it is about to run. Returns why the backend cannot run it on
        this machine or at these sizes, or None.

        It may compile or touch a disk only if the call is about to run.
        """

    @property
    def runner(self) -> Callable[[Call], Runner | None] | None:
        """Takes a call without optional tensors. Returns a :data:`Runner` for calls of its layout,
        or None if there is none yet.
        """
