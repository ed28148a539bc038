"""What table, figure, page and finding read from evaluations: groups of runs, columns, and what
stands where.
"""

import contextlib
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from pydantic import ValidationError

from softfocus.lab.evaluate.means import Estimate, Mean, difference, estimate, grouped_by_seed
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.results import AS_TRAINED, WRONG, Evaluation, Row

_BYTES = 258
"""Ids of bytes, with the end of a document and a mask."""

Axis = Literal["multiple", "tokens"]
"""What lengths are counted in: multiples of each run's own training length, or tokens."""

_NAMES = {"softmax": "Softmax", "lssa": "LSSA", "lssar": "LSSAR", "laser": "LASER"}


@dataclass(frozen=True)
class Group:
    """Runs of one model with different seeds; most often one."""

    label: str
    evaluations: tuple[Evaluation, ...]

    @property
    def first(self) -> Evaluation:
        """The first run, for what all of them share."""
        return self.evaluations[0]

    @property
    def title(self) -> str:
        """The label, with the number of runs where there are several."""
        return self.label if len(self.evaluations) == 1 else f"{self.label} ({self.count})"

    @property
    def count(self) -> str:
        """ "4 seeds"; "4 runs" where two of them share a seed."""
        return count_text([evaluation.seed for evaluation in self.evaluations])


def of_seeds(found: Iterable[tuple[int, float]]) -> list[float]:
    """The mean of each seed's values, given (seed, value) of each run."""
    return [float(np.mean(values)) for values in grouped_by_seed(found).values()]


@dataclass(frozen=True)
class Cell:
    """The losses of a group at one length under one setting."""

    group: Group
    setting: str
    rows: tuple[Row, ...]
    """One a run, in the group's order."""

    @cached_property
    def losses(self) -> list[tuple[int, Mean]]:
        """(seed, mean loss) of each run."""
        pairs = zip(self.group.evaluations, self.rows, strict=True)
        return [(e.seed, _mean(e, row) or Mean(row.loss, row.standard_error)) for e, row in pairs]

    @property
    def values(self) -> list[float]:
        """The loss of each run."""
        return [row.loss for row in self.rows]

    @property
    def loss(self) -> float:
        """The mean over the seeds; not finite where a run diverged."""
        return float(np.mean(self._of_seeds))

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds, NaN for one."""
        return float(np.std(self._of_seeds, ddof=1)) if len(self._of_seeds) > 1 else math.nan

    @cached_property
    def _of_seeds(self) -> list[float]:
        """The loss of each seed: the mean of its runs, where several share it."""
        return of_seeds(zip((one.seed for one in self.group.evaluations), self.values, strict=True))

    @property
    def standard_error(self) -> float:
        """Of the loss: from the documents and, with several runs, from the seeds."""
        return estimate(self.losses).standard_error

    def minus(self, other: "Cell", times: float = 1.0) -> Estimate:
        """How much higher this loss is than so many times another's, with the standard error of the
        difference.
        """
        return difference(self.losses, [(seed, mean * times) for seed, mean in other.losses])

    @property
    def gain(self) -> Estimate | None:
        """The gain from context: how much lower the loss is beyond the first training length of the
        windows than in it.

        The same documents make both means, so they are paired. None where sums by document are
        missing, or where the windows are no longer than the training length.
        """
        return estimate(self._gains) if self._gains else None

    def gain_minus(self, other: "Cell") -> Estimate | None:
        """How much larger this gain is than another's, paired as losses are; None where one is."""
        return difference(self._gains, other._gains) if self._gains and other._gains else None

    @cached_property
    def _gains(self) -> list[tuple[int, Mean]] | None:
        """(seed, gain) of each run."""
        gains = [(e.seed, _gain(e, row)) for e, row in zip(self.group.evaluations, self.rows, strict=True)]
        known = [(seed, gain) for seed, gain in gains if gain is not None]
        return known if len(known) == len(gains) else None


def _mean(evaluation: Evaluation, row: Row, start: int = 0, end: int | None = None) -> Mean | None:
    """The mean loss over the positions start <= i < end of a row's windows; None where it is not
    known by document.
    """
    buckets = [b for b in row.buckets if b.start >= start and b.end <= (end or row.length)]
    if not row.documents or not buckets:
        return None
    sums = np.sum([bucket.sums for bucket in buckets], axis=0)
    counts = np.array(row.windows_by_document) * sum(bucket.end - bucket.start for bucket in buckets)
    # An unknown text is like no other
    text = evaluation.text_key if evaluation.corpus_key else id(evaluation)
    return Mean.of(sums, counts, (text, tuple(row.documents)))


def _gain(evaluation: Evaluation, row: Row) -> Mean | None:
    length = evaluation.train_length
    first, later = _mean(evaluation, row, end=length), _mean(evaluation, row, start=length)
    return None if first is None or later is None else first - later


def groups(evaluations: Sequence[Evaluation], recipes: Sequence[str]) -> list[Group]:
    """Runs that were trained alike but for the seed and evaluated on the same text, put together.

    Args:
        evaluations: of the runs.
        recipes: their resolved recipes, as TOML; a run whose recipe ("") or text is not known is a
            group of its own.
    """
    kinds: dict[object, list[Evaluation]] = {}
    for index, (evaluation, recipe) in enumerate(zip(evaluations, recipes, strict=True)):
        known = recipe and evaluation.corpus_key
        kinds.setdefault((without_seed(recipe), evaluation.text_key) if known else index, []).append(evaluation)
    names = labels([members[0] for members in kinds.values()], [len(members) > 1 for members in kinds.values()])
    return [Group(name, tuple(members)) for name, members in zip(names, kinds.values(), strict=True)]


def tokenizers_may_differ(evaluations: Iterable[Evaluation]) -> bool:
    """Whether vocabularies of one size may hold other tokens. A result does not tell its tokenizer,
    but runs on one corpus have the same, and a vocabulary no larger than that of bytes has bytes.
    """
    found = list(evaluations)
    return len({one.corpus_key for one in found}) > 1 and any(one.vocabulary > _BYTES for one in found)


def singles(evaluations: Sequence[Evaluation]) -> list[Group]:
    """Each run as a group of its own."""
    return groups(evaluations, [""] * len(evaluations))


def count_text(seeds: Sequence[int]) -> str:
    """ "4 seeds"; "4 runs" where two of them share a seed; "1 seed"."""
    if len(seeds) == 1:
        return "1 seed"
    return f"{len(seeds)} {'runs' if len(set(seeds)) < len(seeds) else 'seeds'}"


def without_seed(text: str) -> object:
    """What has to agree: not the name, the description, the seed, what is recorded of the training,
    how often it is kept, or what is measured of it and at which lengths. A recipe of an earlier
    version has the defaults that it does not name.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # edited by hand: like nothing but a copy of itself
        return text
    with contextlib.suppress(ValidationError):  # a recipe of another version, with keys that this one does not have
        values = Recipe.model_validate(values).model_dump()
    for said in ("name", "description"):
        values.pop(said, None)
    recorded = "log_every", "validations", "projection_norms", "checkpoint_every"
    said_of = {"train": ("seed", *recorded), "evaluate": ("also", "lengths", "mechanisms")}
    for table, keys in said_of.items():
        for key in keys if isinstance(values.get(table), dict) else ():
            values[table].pop(key, None)
    return json.dumps(values, sort_keys=True)


def settings(found: Iterable[Group]) -> list[str]:
    """The names of all settings under which at least one run was evaluated, in a report's order."""
    order: dict[str, tuple[float, int, str, int]] = {}
    for evaluation in (evaluation for group in found for evaluation in group.evaluations):
        for setting in {row.setting for row in evaluation.rows}:
            window, sinks, mechanism, rope = setting.order
            order[setting.name(evaluation.train_length)] = (window / evaluation.train_length, sinks, mechanism, rope)
    return sorted(order, key=lambda name: order[name]) or [AS_TRAINED.name()]


def position(evaluation: Evaluation, row: Row, axis: Axis) -> float:
    """Where a row stands on the axis."""
    return float(row.length) if axis == "tokens" else round(row.length / evaluation.train_length, 4)


def columns(found: Iterable[Group], axis: Axis = "multiple") -> list[float]:
    """Every place on the axis where at least one run was evaluated, ascending."""
    return sorted({position(e, row, axis) for group in found for e in group.evaluations for row in e.rows})


def shared_columns(found: Sequence[Group], axis: Axis = "multiple") -> list[float]:
    """The places on the axis where every group has a loss under at least one setting, ascending."""
    return [column for column in columns(found, axis) if all(best(group, column, axis) is not None for group in found)]


def cell(group: Group, column: float, setting: str, axis: Axis = "multiple") -> Cell | None:
    """What stands at a place on the axis under a setting, if every run of the group was evaluated
    there.
    """
    rows = [_row(evaluation, column, setting, axis) for evaluation in group.evaluations]
    found = tuple(row for row in rows if row is not None)
    return Cell(group, setting, found) if len(found) == len(rows) else None


def _row(evaluation: Evaluation, column: float, setting: str, axis: Axis) -> Row | None:
    """Up to the training length a scaling of RoPE changes nothing, so the row of the same setting
    without it stands for a missing one.
    """
    there = {row.setting: row for row in evaluation.rows if position(evaluation, row, axis) == column}
    for one, row in there.items():
        if one.name(evaluation.train_length) == setting:
            return row
    known = {row.setting for row in evaluation.rows if row.setting.name(evaluation.train_length) == setting}
    for one in known:
        if one.rope != AS_TRAINED.rope and one.window is None and not one.wrong:
            plain = there.get(one.model_copy(update={"rope": AS_TRAINED.rope}))
            if plain is not None and plain.length <= evaluation.train_length:
                return plain
    return None


def predicts(groups: Iterable[Group]) -> bool:
    """Whether images, words or hidden tokens are predicted, and not the next token."""
    return any(row.setting == WRONG for group in groups for one in group.evaluations for row in one.rows)


def unit(groups: Iterable[Group]) -> str:
    """What losses are in."""
    return "nats per prediction" if predicts(groups) else "nats per token"


def best(group: Group, column: float, axis: Axis = "multiple") -> Cell | None:
    """The losses of a group at a place on the axis with its best setting; a diverged loss comes
    last.
    """
    names = [name for name in settings([group]) if name != WRONG.name()]
    found = [there for name in names if (there := cell(group, column, name, axis)) is not None]
    return min(found, key=lambda one: one.loss if math.isfinite(one.loss) else math.inf, default=None)


def best_setting(group: Group, found: Sequence[Group], axis: Axis) -> str:
    """A group's best setting at the longest length that all groups share, or at its own longest."""
    at = (shared_columns(found, axis) or columns([group], axis))[-1]
    there = best(group, at, axis)
    return there.setting if there else AS_TRAINED.name()


def growth(group: Group, column: float, setting: str, axis: Axis = "multiple") -> float | None:
    """The loss at a place on the axis over the group's own at 1x, or None if not evaluated."""
    first, last = cell(group, 1.0, setting), cell(group, column, setting, axis)
    if first is None or last is None:
        return None
    return last.loss / first.loss if first.loss else math.nan


def column_name(column: float, axis: Axis = "multiple") -> str:
    """ "16x", or "2,048" when lengths are counted in tokens."""
    return f"{column:,.0f}" if axis == "tokens" else f"{column:g}x"


def tokens_at(found: Iterable[Group], column: float, axis: Axis) -> int | None:
    """The tokens of a column that counts multiples, or None where the groups do not agree on
    them.
    """
    lengths = {round(column * group.first.train_length) for group in found}
    return lengths.pop() if axis == "multiple" and len(lengths) == 1 else None


def mechanism_name(mechanism: str) -> str:
    """A mechanism as the papers spell it."""
    return _NAMES.get(mechanism.strip(), mechanism)


class _Labelled(Protocol):
    """What was measured of a run."""

    mechanism: str
    run: str


def labels(evaluations: Sequence[_Labelled], several: Sequence[bool] = ()) -> list[str]:
    """A name for each run: its mechanism's, with the run's where two share a mechanism, numbered
    where those agree.

    A layout is long to say, so such a run has its own name, without the seed.

    Args:
        evaluations: of the runs, or of one run of each group.
        several: whether a group has several seeds, so that the run's name is without its seed.
    """
    mechanisms = Counter(evaluation.mechanism for evaluation in evaluations)
    names = []
    for e, many in zip(evaluations, several or [False] * len(evaluations), strict=True):
        layout = any(mark in e.mechanism for mark in "[/+")
        run = re.sub(r"-s\d+$", "", e.run) if layout or many else e.run
        own = mechanism_name(e.mechanism) + (f" · {run}" if mechanisms[e.mechanism] > 1 else "")
        names.append(run if layout else own)
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return unique


def listed(texts: Sequence[str]) -> str:
    """ "a, b and c"."""
    return ", ".join([*texts[:-2], " and ".join(texts[-2:])])


def loss_text(loss: float) -> str:
    """A loss for people: a diverged one is said to be so, never printed as a number."""
    return f"{loss:.3f}" if math.isfinite(loss) else "diverged"
