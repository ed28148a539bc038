"""Every named mechanism, its equation and the row of the paper where it stands. The one place to
add one.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from softfocus.mechanism import Mechanism, did_you_mean, laser, sharpened

SOFTPLUS_PAPER = "arXiv 2501.13428"
LASER_PAPER = "arXiv 2411.03493"
LEARNABLE = ("head_scale", "power")
"""Arguments of ``attention()`` that a model's heads can learn, one value each."""
_COMBINATORS = ("laser", "sharpened")


@dataclass(frozen=True)
class Entry:
    """A named mechanism.

    Attributes:
        name: what ``attention(mechanism=)``, recipes and config.json call it.
        mechanism: the algebra.
        source: paper, and equation or table row.
        note: what a user should know; says so where the source was not at hand.
        learned: parameters with gradient that the mechanism is defined with, as (argument of
            ``attention()``, initial value) pairs, one value a head. ``attention()`` without them
            computes with 1; ``softfocus.hf.use()`` adds them to a model.
    """

    name: str
    mechanism: Mechanism
    source: str
    note: str = ""
    learned: tuple[tuple[str, float], ...] = ()

    @property
    def equation(self) -> str:
        """The mechanism written out."""
        return str(self.mechanism)


class Catalog(Mapping[str, Entry]):
    """The named mechanisms, in the papers' order. Prints as a table."""

    def __init__(self, entries: tuple[Entry, ...]):
        self._entries = {entry.name: entry for entry in entries}
        self._lock = Lock()
        assert len(self._entries) == len(entries), "two entries of the catalogue have the same name"

    def add(self, entry: Entry) -> None:
        """Add an entry. A name keeps its mechanism, because callers cache what they derive from it.

        Raises:
            ValueError: another entry has the name.
        """
        with self._lock:
            if (known := self._entries.get(entry.name, entry)) != entry:
                raise ValueError(
                    f"name: {entry.name!r} is taken ({known.source}: {known.equation}); choose another name"
                )
            self._entries = self._entries | {entry.name: entry}  # a new dict: other threads may iterate over it

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise KeyError(_unknown(name))
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Callable[[], "Catalog"], tuple[()]]:
        """Copied or unpickled, it is the process's own."""
        return mechanisms, ()

    def __repr__(self) -> str:
        return "\n".join(f"{e.name:24} {e.source:44} {e.equation}" for e in self._entries.values())


_SOFTMAX = Mechanism()
_SIGMOID_LOG_N_L1 = Mechanism(phi="sigmoid", score_bias="-log(N)")
_LSSA = Mechanism(similarity="cosine", scale="log(d)", length_scale="log(N)", phi="softplus")
_LSSAR = sharpened(_LSSA, 15)

_CATALOG = Catalog(
    (
        # Table 1: what the finished softmax weights tolerate
        Entry("softmax", _SOFTMAX, f"{SOFTPLUS_PAPER} eq. 1, tables 1-4"),
        Entry("softmax_negated", _SOFTMAX.replace(post="negate"), f"{SOFTPLUS_PAPER} table 1, Inverse"),
        Entry(
            "softmax_recentred",
            _SOFTMAX.replace(post="recentre"),
            f"{SOFTPLUS_PAPER} table 1, Re-centered",
            "Rows with N <= 3 keep their weights (the paper's footnote 1).",
        ),
        Entry(
            "softmax_recentred_l1",
            _SOFTMAX.replace(post="recentre+l1"),
            f"{SOFTPLUS_PAPER} table 1, Re-centered & l1-norm",
            "Rows with N <= 3 keep their weights (the paper's footnote 1).",
        ),
        # Table 2: softmax taken apart. The check marks of the table were not legible at hand; read
        # from the text.
        Entry(
            "scenario_i",
            Mechanism(phi="identity", normaliser="none"),
            f"{SOFTPLUS_PAPER} table 2, scenario I",
            "Neither exp nor l1: read from the text, the table's marks were not legible at hand.",
        ),
        Entry(
            "scenario_ii",
            Mechanism(phi="exp", normaliser="none"),
            f"{SOFTPLUS_PAPER} table 2, scenario II",
            "exp without l1: scores above 88 overflow float32. Read from the text, as scenario I.",
        ),
        Entry(
            "scenario_iii",
            Mechanism(phi="identity"),
            f"{SOFTPLUS_PAPER} table 2, scenario III",
            "l1 without exp: rows divided by the sum of absolute scores. Read from the text, as scenario I.",
        ),
        Entry("scenario_iv", _SOFTMAX, f"{SOFTPLUS_PAPER} table 2, scenario IV", "Both: softmax."),
        # Table 3: phi with l1 (eq. 3)
        Entry("relu_l1", Mechanism(phi="relu"), f"{SOFTPLUS_PAPER} eq. 3, table 3, ReLU"),
        Entry("relu2_l1", Mechanism(phi="relu2"), f"{SOFTPLUS_PAPER} eq. 3, table 3, ReLU^2"),
        Entry("relu6_l1", Mechanism(phi="relu6"), f"{SOFTPLUS_PAPER} eq. 3, table 3, ReLU6"),
        Entry("gelu_l1", Mechanism(phi="gelu"), f"{SOFTPLUS_PAPER} eq. 3, table 3, GeLU", "The exact (erf) GELU."),
        Entry(
            "sigmoid_l1",
            Mechanism(phi="sigmoid"),
            f"{SOFTPLUS_PAPER} eq. 3, table 3, Sigmoid; table 4, Sigmoid (Proposed)",
        ),
        Entry("softplus_l1", Mechanism(phi="softplus"), f"{SOFTPLUS_PAPER} eq. 3, table 3, Softplus"),
        Entry("mish_l1", Mechanism(phi="mish"), f"{SOFTPLUS_PAPER} eq. 3, table 3, Mish"),
        Entry("exp_l1", Mechanism(phi="exp"), f"{SOFTPLUS_PAPER} eq. 3, table 3, e^x", "Softmax by another name."),
        # Table 4: the baselines without softmax, LSSA, and the re-weighted three
        Entry(
            "sigmoid_log_l",
            Mechanism(phi="sigmoid", score_bias="-log(L)", normaliser="none"),
            f"{SOFTPLUS_PAPER} table 4, Sigmoid (Ramapuram et al. 2024)",
            "L is the number of key positions given, so a growing KV cache changes the bias, as the definition says.",
        ),
        Entry(
            "sigmoid_log_n",
            Mechanism(phi="sigmoid", score_bias="-log(N)", normaliser="none"),
            f"{SOFTPLUS_PAPER} table 4, Sigmoid (b = -log N)",
        ),
        Entry("sigmoid_log_n_l1", _SIGMOID_LOG_N_L1, f"{SOFTPLUS_PAPER} table 4, Sigmoid (b = -log N, l1-norm)"),
        Entry(
            "relu_wortsman",
            Mechanism(phi="relu", normaliser="1/L"),
            f"{SOFTPLUS_PAPER} table 4, ReLU (Wortsman et al. 2023)",
            "relu(s) / L; L is the number of key positions given.",
        ),
        Entry(
            "relu_li", Mechanism(phi="relu"), f"{SOFTPLUS_PAPER} table 4, ReLU (Li et al. 2022)", "The same as relu_l1."
        ),
        Entry(
            "relu_shen",
            Mechanism(phi="relu", normaliser="1/sqrt(N/2)"),
            f"{SOFTPLUS_PAPER} table 4, ReLU (Shen et al. 2023)",
            "relu(s) / (gamma sqrt(n/2)), n taken as N. The paper was not at hand: gamma is learnable by one account. "
            "As relu(s)/gamma = relu(s/gamma), gamma is the inverse of head_scale.",
            learned=(("head_scale", 1.0),),
        ),
        Entry("lssa", _LSSA, f"{SOFTPLUS_PAPER} eq. 4, table 4, LSSA"),
        Entry("softmax_p3", sharpened(_SOFTMAX, 3), f"{SOFTPLUS_PAPER} eq. 5, table 4, Softmax p = 3"),
        Entry(
            "softmax_p15",
            sharpened(_SOFTMAX, 15),
            f"{SOFTPLUS_PAPER} eq. 5, table 4, Softmax p = 15",
            "The paper reports gradient explosion.",
        ),
        Entry(
            "sigmoid_log_n_l1_p3",
            sharpened(_SIGMOID_LOG_N_L1, 3),
            f"{SOFTPLUS_PAPER} eq. 5, table 4, Sigmoid (b = -log N, l1) p = 3",
        ),
        Entry(
            "sigmoid_log_n_l1_p15",
            sharpened(_SIGMOID_LOG_N_L1, 15),
            f"{SOFTPLUS_PAPER} eq. 5, table 4, Sigmoid (b = -log N, l1) p = 15",
        ),
        Entry("lssar_p3", sharpened(_LSSA, 3), f"{SOFTPLUS_PAPER} eq. 5, table 4, LSSAR p = 3"),
        Entry("lssar", _LSSAR, f"{SOFTPLUS_PAPER} eq. 5, table 4, LSSAR p = 15"),
        # LASER
        Entry("laser", laser(_SOFTMAX), LASER_PAPER, "Over softmax. Only a summary of the paper was at hand."),
        Entry("laser_lssa", laser(_LSSA), f"{LASER_PAPER} over {SOFTPLUS_PAPER} eq. 4", "A combination of our own."),
        Entry("laser_lssar", laser(_LSSAR), f"{LASER_PAPER} over {SOFTPLUS_PAPER} eq. 5", "A combination of our own."),
        # Rivals that scale the score with the length, or normalise q and k
        Entry(
            "ssmax",
            Mechanism(length_scale="log(N)"),
            "arXiv 2501.19399 (SSMax)",
            "head_scale is the paper's s, one a head. The initial value is the s of the paper's figure 1; "
            "how the paper initialises training could not be verified.",
            learned=(("head_scale", 0.43),),
        ),
        Entry(
            "log512_softmax",
            Mechanism(length_scale="log512(N)"),
            "Su 2021 (kexue.fm/archives/8823)",
            "log_512 n in place of 1: the same as softmax at n = 512.",
        ),
        Entry(
            "qknorm",
            Mechanism(similarity="cosine", scale="1"),
            "arXiv 2010.04245 (QK-norm)",
            "head_scale is the paper's g. The initial value is log2(L^2 - L) at L = 1024, as the paper is remembered; "
            "its text was not at hand.",
            learned=(("head_scale", 20.0),),
        ),
        Entry(
            "cosine_log_n",
            Mechanism(similarity="cosine", scale="log(d)", length_scale="log(N)"),
            "softfocus",
            "LSSA's scores with a plain softmax: the baseline that every claim about softplus has to beat.",
        ),
    )
)


def mechanisms() -> Catalog:
    """The catalogue: a mapping from name to :class:`Entry`, which prints as a table."""
    return _CATALOG


def register(name: str, mechanism: Mechanism, *, note: str = "", learned: Mapping[str, float] | None = None) -> Entry:
    """A name of your own for a mechanism, which then stands wherever the catalogue's names do, for
    this process.

    ``attention(mechanism=)``, combinations (``"laser(mine)"``), ``softfocus.hf.use()``, recipes and
    :func:`mechanisms` know it. Names are not given away again. A saved model or a pickle holds the
    algebra and not the name, so it comes back where nothing was registered. A run's recipe holds
    the name: for use by the command line, write the algebra as the recipe's table
    ``[model.mechanism]``.

    Args:
        name: a lower-case letter, then lower-case letters, digits and underscores.
        mechanism: the algebra. Other names may stand for the same.
        note: what a user should know.
        learned: parameters that the mechanism is defined with and their initial values,
            ``{"head_scale": 0.43}``, as :class:`Entry` has it. They belong to the algebra: an equal
            one in the catalogue must learn the same, and so must combinations of it.

    Returns:
        The new entry of the catalogue; the old one where an equal entry was registered already:
        with that name, mechanism, note and initial values.

    Raises:
        ValueError: a name that is taken or does not parse, or initial values that do not fit.
        TypeError: something that is not a Mechanism, or a parameter that no mechanism has.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in _COMBINATORS:
        raise ValueError(
            f"name: got {name!r}, expected a lower-case letter, then lower-case letters, digits and underscores; "
            f"{' and '.join(_COMBINATORS)} are combinations"
        )
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            f"mechanism: got {mechanism!r}, expected a softfocus.Mechanism: softfocus.Mechanism(phi='sigmoid'), or "
            "softfocus.named('lssa').replace(power=7)"
        )
    known = learned_parameters(mechanism)
    wanted = known | checked_parameters(mechanism, learned or {})
    entry = Entry(name, mechanism, "registered", note, tuple(wanted.items()))
    entries = [*_CATALOG.values()]
    changed = [one for one in entries if _learned(one.mechanism, [*entries, entry]) != _learned(one.mechanism, entries)]
    if changed or any(known.get(parameter, value) != value for parameter, value in wanted.items()):
        one = changed[0].name if changed else name_of(mechanism)
        raise ValueError(
            f"learned: got {wanted}, but {one!r} is the same mechanism, or builds on it, and learns "
            f"{learned_parameters(one) or 'nothing'}; hand initial values to softfocus.hf.use() instead"
        )
    _CATALOG.add(entry)
    return entry


def checked_parameters(mechanism: Mechanism, parameters: Mapping[str, Any]) -> dict[str, float]:
    """Initial values of what heads learn, by argument of ``attention()``.

    Raises:
        TypeError: a name that is not among :data:`LEARNABLE`.
        ValueError: a value out of range, or a power for a mechanism that does not re-weight.
    """
    for name, value in parameters.items():
        if name not in LEARNABLE:
            raise TypeError(f"nothing is learned under the name {name!r}; {did_you_mean(name, LEARNABLE, 'they are')}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f"{name}: got {value!r}, expected a finite number, the initial value for every head; "
                f"set the parameters softfocus_{name} of a model afterwards for one value each"
            )
    if "power" in parameters:
        if mechanism.power is None:
            raise ValueError(
                f"power: the mechanism ({mechanism}) does not re-weight; start from 'sharpened(NAME, POWER)'"
            )
        mechanism.replace(power=parameters["power"])  # outside of its range is the mechanism's own error
    return {name: float(value) for name, value in parameters.items()}


def named(text: str) -> Mechanism:
    """The mechanism that a name or a combination of names stands for.

    Args:
        text: a name of the catalogue (``"lssar"``, capitals do not matter), or combinators around
            one: ``"sharpened(softmax, 3)"``, ``"laser(lssa)"``, ``"laser(sharpened(lssa, 7.5))"``.

    Raises:
        TypeError: no text.
        ValueError: an unknown name, with the nearest one, or words that do not parse.
    """
    if not isinstance(text, str):
        raise TypeError(f"named: got {type(text).__name__}, expected a name such as 'lssar'")
    text = text.strip().lower()
    if match := re.fullmatch(r"laser\s*\((.+)\)", text):
        return laser(named(match[1]))
    if match := re.fullmatch(r"sharpened\s*\((.+),\s*(?:p\s*=\s*)?([^,()]+)\)", text):
        try:
            power = float(match[2])
        except ValueError:
            raise ValueError(f"mechanism {text!r}: the power {match[2].strip()!r} is not a number") from None
        return sharpened(named(match[1]), power)
    if text in _CATALOG:
        return _CATALOG[text].mechanism
    if re.match(rf"({'|'.join(_COMBINATORS)})\b\s*(\(|$)", text):
        raise ValueError(f"mechanism {text!r} does not parse; write 'laser(NAME)' or 'sharpened(NAME, POWER)'")
    raise ValueError(f"{_unknown(text)} Combinations: 'sharpened(NAME, POWER)', 'laser(NAME)'")


def _unknown(name: object) -> str:
    guess = did_you_mean(name, _CATALOG, "the names are")
    return f"mechanism {name!r} is not known; {guess}{'' if guess.endswith('?') else '.'}"


def name_of(mechanism: Mechanism) -> str:
    """A text that :func:`named` reads back to a mechanism; its equation where there is none.

    Example: ``name_of(named("sharpened(lssa, 15)"))`` is ``"lssar"``.
    """
    names: dict[Mechanism, str] = {}
    for entry in _CATALOG.values():
        names.setdefault(entry.mechanism, entry.name)
    if mechanism in names:
        return names[mechanism]
    base = mechanism.replace(power=None, laser=False)
    if base not in names:
        return str(mechanism)
    plain = mechanism.replace(laser=False)
    text = names.get(plain) or f"sharpened({names[base]}, {_number(mechanism.power)})"
    return f"laser({text})" if mechanism.laser else text


def _number(power: float | None) -> str:
    return f"{power:g}" if power == float(f"{power:g}") else repr(power)


def learned_parameters(mechanism: str | Mechanism) -> dict[str, float]:
    """The parameters that a mechanism is defined with, and their initial values: ``{"head_scale":
    0.43}`` for SSMax.

    A combination (``"laser(ssmax)"``) needs what its base needs; so does an equal ``Mechanism``.
    """
    return _learned(named(mechanism) if isinstance(mechanism, str) else mechanism, _CATALOG.values())


def _learned(full: Mechanism, entries: Iterable[Entry]) -> dict[str, float]:
    entries, unsharpened = list(entries), full.replace(power=None)
    found: dict[str, float] = {}
    for algebra in (unsharpened.replace(laser=False), unsharpened, full.replace(laser=False), full):
        for entry in entries:
            if entry.mechanism == algebra:
                found.update(entry.learned)
    return found
