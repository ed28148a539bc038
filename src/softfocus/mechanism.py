"""The algebra of attention mechanisms: a frozen record of names and numbers, and two
combinators.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "similarity": ("dot", "cosine"),
    "scale": ("1/sqrt(d)", "log(d)", "1"),
    "length_scale": ("1", "log(N)", "log512(N)"),
    "score_bias": ("0", "-log(N)", "-log(L)"),
    "phi": ("exp", "softplus", "relu", "relu2", "relu6", "gelu", "sigmoid", "mish", "identity"),
    "normaliser": ("l1", "none", "1/N", "1/L", "1/sqrt(N/2)"),
    "post": ("none", "negate", "recentre", "recentre+l1"),
}
SIGNED_PHI = ("gelu", "mish", "identity")
"""phi whose values may be negative: their l1 norm sums absolute values."""
MAX_UNTHRESHOLDED_COUNT = 3
"""The largest N_i of a row without threshold or re-centring: the papers' "first three rows"."""
TIE_EPS = 128.0
"""A row is tied if its largest weight exceeds the mean by at most this many eps, relative to it."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One attention mechanism, as names and numbers.

    For row i with N visible keys out of L, head dimension d and head h::

        sim_ij = similarity(q_i, k_j)
        s_ij = scale(d) * length_scale(N) * head_scale[h] * sim_ij + score_bias + bias_ij
        f_ij = phi(s_ij)                            on the visible keys, 0 elsewhere
        A_ij = f_ij / sum_j |f_ij|                  normaliser "l1"
               f_ij times "1/N", "1/L", "1/sqrt(N/2)"    the other normalisers
        A_ij = relu(A_ij * N - o)^p / row sum        when power = p; o = 1, or 0 where N <= 3
        A_ij = -A_ij, or A_ij - mean_j A_ij         post; "recentre+l1" normalises once more
        out  = A V, or log(A exp(V)) column by column when laser

    Attributes:
        similarity: "dot" (q.k) or "cosine" (q.k / |q||k|).
        scale: the factor that depends on the head dimension d. ``attention(scale=)`` takes its
            place when given.
        length_scale: the factor that depends on the number N of keys that the row may see; log is
            natural.
        score_bias: "-log(N)" or "-log(L)", added to every score of the row (sigmoid attention).
        phi: the non-linearity.
        normaliser: what divides (or multiplies) a row of phi(s).
        power: the exponent p >= 1 of the re-weighting (eq. 5 of arXiv 2501.13428), None for no
            re-weighting.
        post: what table 1 of arXiv 2501.13428 does to the finished weights.
        laser: weighted log-mean-exp of the values in place of their weighted mean (arXiv
            2411.03493).

    Raises:
        ValueError: an unknown name, a power outside [1, 100], or parts that do not go together.
    """

    similarity: str = "dot"
    scale: str = "1/sqrt(d)"
    length_scale: str = "1"
    score_bias: str = "0"
    phi: str = "exp"
    normaliser: str = "l1"
    power: float | None = None
    post: str = "none"
    laser: bool = False
    code: str = field(init=False, repr=False, compare=False, default="")
    """The fields as one string: how a mechanism is handed to a custom operator, which takes no
    objects.
    """

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                usual = "exp" if value == "softmax" else str(value)  # softmax is exp with the l1 norm
                hint = get_close_matches(usual, choices, n=1)
                guess = f"; did you mean {hint[0]!r}?" if hint else ""
                raise ValueError(f"Mechanism: {name}={value!r} is not one of {', '.join(map(repr, choices))}{guess}")
        if self.power is not None:
            if isinstance(self.power, bool) or not isinstance(self.power, int | float):
                raise ValueError(
                    f"Mechanism: power={self.power!r} is not a number; expected 1 <= power <= 100, or None"
                )
            if not 1.0 <= self.power <= 100.0:
                raise ValueError(f"Mechanism: power={self.power!r} is outside [1, 100]; None leaves re-weighting out")
            object.__setattr__(self, "power", float(self.power))
            if self.normaliser != "l1" or self.phi in SIGNED_PHI:
                raise ValueError(
                    f"Mechanism: power={self.power:g} re-weights rows that sum to one, which needs normaliser='l1' "
                    f"and a non-negative phi; got normaliser={self.normaliser!r}, phi={self.phi!r}"
                )
        self._check_laser()
        object.__setattr__(self, "code", json.dumps(self.to_dict(), sort_keys=True))

    def _check_laser(self) -> None:
        if not isinstance(self.laser, bool):
            raise ValueError(f"Mechanism: laser={self.laser!r} is not True or False")
        if self.laser and (self.normaliser != "l1" or self.phi in SIGNED_PHI or self.post != "none"):
            raise ValueError(
                "Mechanism: laser takes the log of a weighted mean, which needs non-negative rows that sum to one: "
                f"normaliser='l1', a non-negative phi and post='none'; got normaliser={self.normaliser!r}, "
                f"phi={self.phi!r}, post={self.post!r}"
            )

    def replace(self, **changes: Any) -> "Mechanism":
        """A copy with some fields changed: ``lssar.replace(power=3)``. Unknown fields are a
        ValueError.
        """
        _refuse_unknown(changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as JSON types."""
        values = asdict(self)
        del values["code"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Mechanism":
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: an unknown field, a wrong value, or a missing field: with its default it
                would be another mechanism.
        """
        _refuse_unknown(values)
        if missing := [entry.name for entry in fields(cls) if entry.init and entry.name not in values]:
            raise ValueError(
                f"Mechanism: the description lacks {', '.join(missing)}; expected every field, as to_dict() writes them"
            )
        return cls(**values)

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` reads back to an equal mechanism."""
        return self.code

    @classmethod
    def from_json(cls, text: str) -> "Mechanism":
        """The inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))

    @property
    def counts_keys(self) -> bool:
        """Whether N, the number of keys that a row may see, is in the equations."""
        n_free = ("1", "0", "none", "negate", "l1", "1/L", "-log(L)")
        parts = (self.length_scale, self.score_bias, self.normaliser, self.post)
        return self.power is not None or any(part not in n_free for part in parts)

    def __str__(self) -> str:
        return f"A = {self._weights()};  out = {'log(A exp(V))' if self.laser else 'A V'}"

    def _weights(self) -> str:
        factors = [factor for factor in (self.scale, self.length_scale) if factor != "1"]
        score = " * ".join([*factors, "q.k" if self.similarity == "dot" else "cos(q,k)"])
        if self.score_bias != "0":
            score += f" - {self.score_bias[1:]}"
        if self.phi != "identity":
            weights = f"{self.phi}({score})"
        else:
            weights = score if self.score_bias == "0" or self.normaliser == "l1" else f"({score})"
        weights = {"l1": f"l1({weights})", "none": weights}.get(self.normaliser, f"{weights} * {self.normaliser}")
        if self.power is not None:
            weights = f"l1(relu({weights} * N - 1)^{self.power:g})"
        if self.post == "negate":
            return f"-{weights}"
        if self.post != "none":
            weights = f"({weights} - mean)"
            return f"l1{weights}" if self.post == "recentre+l1" else weights
        return weights


def default_scale(mechanism: Mechanism, head_dim: int) -> float:
    """The d-dependent factor of the scores.

    Raises:
        ValueError: the name has no factor here.
    """
    factors = {"1/sqrt(d)": 1.0 / math.sqrt(head_dim), "log(d)": math.log(head_dim), "1": 1.0}
    if mechanism.scale not in factors:
        raise ValueError(f"scale={mechanism.scale!r} is not among {', '.join(factors)}")
    return factors[mechanism.scale]


def sharpened(mechanism: Mechanism, power: float) -> Mechanism:
    """The re-weighting of arXiv 2501.13428, eq. 5, on top of any mechanism whose rows sum to one.

    Example: ``sharpened(named("softmax"), 3)``. The power belongs to training: a model trained with
    one power and run with another is a different model.

    Raises:
        ValueError: the mechanism is re-weighted already, its rows do not sum to one, or the power
            is outside [1, 100].
    """
    if _algebra(mechanism).power is not None:
        raise ValueError(
            f"sharpened: the mechanism is re-weighted already, with power {mechanism.power:g}, and the algebra has one "
            "power; start from the mechanism without it (lssa, not lssar), or change the power with .replace(power=...)"
        )
    if power is None:
        raise ValueError("sharpened: got power None, expected a number in [1, 100]")
    return mechanism.replace(power=power)


def laser(mechanism: Mechanism) -> Mechanism:
    """LASER (arXiv 2411.03493) over any mechanism whose rows are non-negative and sum to one: log(A
    exp(V)).

    Raises:
        ValueError: the mechanism is LASER already, or its rows may be negative or do not sum to
            one.
    """
    if _algebra(mechanism).laser:
        raise ValueError(
            "laser: the mechanism is LASER already, and the algebra takes one log(A exp(V)); leave one out"
        )
    return mechanism.replace(laser=True)


def _algebra(mechanism: Mechanism) -> Mechanism:
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            f"mechanism: got {mechanism!r}, expected a softfocus.Mechanism: "
            f"look the name up with softfocus.named(), or write "
            "the combination as a name, 'sharpened(lssa, 3)'"
        )
    return mechanism


def did_you_mean(word: object, known: Collection[str], intro: str) -> str:
    """Of an unknown word the nearest known one, or ``intro`` and all of them."""
    near = get_close_matches(str(word), known, n=1, cutoff=0.65)
    return f"did you mean {near[0]!r}?" if near else f"{intro} {', '.join(known)}"


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"Mechanism: got {values!r}, expected its fields by name, as to_dict() writes them")
    known = [entry.name for entry in fields(Mechanism) if entry.init]
    for name in values:
        if name not in known:
            raise ValueError(f"Mechanism has no field {name!r}; {did_you_mean(name, known, 'its fields are')}")
