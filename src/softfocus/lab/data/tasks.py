"""Generated tasks: sequences that ask, at the end, for something that stood far before.

Every answer is drawn uniformly and independently of all other tokens. So a model that cannot see
the tokens that hold an answer is right with probability `chance`, whatever else it sees and however
well it was trained.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from softfocus.lab.errors import LabError

IGNORED = -100
"""The label of a position that is not asked for: cross-entropy leaves it out."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence.

    Attributes:
        tokens: what the model reads, int64 [length].
        labels: the answer at each position that asks for one, else -100; int64 [length]. labels[i]
            is the token that follows tokens[i], as in training windows.
        distances: at each position that asks, how many tokens the answer lies behind the token that
            is to be predicted (its latest mention), else 0; int64 [length].
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    distances: NDArray[np.int64]


class Task(Protocol):
    """What training and `softfocus recall` need of a task."""

    @property
    def words(self) -> Sequence[str]:
        """The vocabulary: a word for each id."""

    @property
    def chance(self) -> float:
        """The probability of one answer, for a model that cannot see it."""

    @property
    def answers(self) -> int:
        """How many answers a sequence asks for."""

    def least(self) -> int:
        """Tokens that the shortest sequence takes."""

    def farthest(self, length: int) -> int:
        """The largest `nearest` that a sequence of this length has room for."""

    def sample(self, random: np.random.Generator, length: int, nearest: int = 0) -> Sample:
        """A sequence of exactly `length` tokens in which no answer lies nearer than `nearest`
        tokens.

        Raises:
            LabError: the length has no room for that.
        """

    def grown(self, factor: int) -> "Task | None":
        """The task with so many times more to remember, on the same vocabulary; None where it
        cannot grow.
        """


@dataclass(frozen=True)
class Mqar:
    """Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927).

    First come pairs of a key and its value, then filler with queries in it. A query is one of the
    keys; the answer is that key's value. Keys of a sequence differ, values may repeat. The answer
    does not follow its query in the sequence, so a pair is the only place that tells a value.
    Queries lie anywhere after the pairs with equal probability; the paper prefers short distances.

    Args:
        pairs: of a key and a value.
        queries: how many there are. Where they are fewer than the pairs, some keys are not asked
            for; where they are more, each key is asked for as often as the others, give or take
            one: more to learn from a sequence.
        keys: different keys that there are.
        values: different values that there are.
        filler: different filler tokens that there are.
    """

    pairs: int
    queries: int
    keys: int
    values: int
    filler: int

    @property
    def words(self) -> list[str]:
        """Keys k0, k1 ..., then values v0 ..., then filler f0 ..."""
        return [f"{kind}{i}" for kind, count in zip("kvf", self._sizes, strict=True) for i in range(count)]

    @property
    def chance(self) -> float:
        """Values are drawn uniformly."""
        return 1 / self.values

    @property
    def answers(self) -> int:
        """One a query."""
        return self.queries

    def least(self) -> int:
        """Pairs and queries without filler."""
        return 2 * self.pairs + self.queries

    def farthest(self, length: int) -> int:
        """All queries at the end."""
        return length - self.queries - 2 * (self.pairs - 1)

    def sample(self, random: np.random.Generator, length: int, nearest: int = 0) -> Sample:
        """See :class:`Task`."""
        check_room(self, length, nearest)
        keys, values, _ = np.cumsum([0, *self._sizes[:2]])
        filler = keys + self.keys + self.values
        tokens = random.integers(filler, filler + self.filler, length)
        pairs = tokens[: 2 * self.pairs].reshape(self.pairs, 2)  # a view
        pairs[:, 0] = keys + random.choice(self.keys, self.pairs, replace=False)
        pairs[:, 1] = values + random.integers(self.values, size=self.pairs)
        asked = np.resize(random.permutation(self.pairs), self.queries)  # again from the first where they are more
        first = max(2 * self.pairs, 2 * (self.pairs - 1) + nearest)
        places = first + random.choice(length - first, self.queries, replace=False)
        tokens[places] = pairs[asked, 0]
        labels, distances = np.full(length, IGNORED), np.zeros(length, np.int64)
        labels[places], distances[places] = pairs[asked, 1], places - 2 * asked
        return Sample(tokens, labels, distances)

    def grown(self, factor: int) -> "Mqar | None":
        """More pairs and queries, as far as there are keys."""
        more = replace(self, pairs=self.pairs * factor, queries=self.queries * factor)
        return more if more.pairs <= self.keys else None

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.keys, self.values, self.filler


_OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_BEFORE, _BETWEEN, _AFTER = "The pass key is", ". Remember it.", "is the pass key."
_QUESTION = "What is the pass key? The pass key is"


@cache
def _split(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+|[.?]", text))


@dataclass(frozen=True)
class Passkey:
    """Passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300): a number hidden in filler
    text, asked for at the end.

    The sentences are the paper's, every word and every digit a token. The number stands at a random
    depth, all depths with equal probability; the filler before and after it begins with its first
    sentence.

    Args:
        digits: of the number.
    """

    digits: int

    @cached_property
    def words(self) -> list[str]:
        """The digits, then the words of the sentences."""
        text = " ".join((_OPENING, _FILLER, _BEFORE, _BETWEEN, _AFTER, _QUESTION))
        return [*map(str, range(10)), *dict.fromkeys(_split(text))]

    @property
    def chance(self) -> float:
        """Digits are drawn uniformly."""
        return 1 / 10

    @property
    def answers(self) -> int:
        """Each digit; those before it are given, and tell nothing about it."""
        return self.digits

    def least(self) -> int:
        """All but filler. The last digit is predicted and not read."""
        parts = (_OPENING, _BEFORE, _BETWEEN, _AFTER, _QUESTION)
        return sum(len(self._ids(part)) for part in parts) + 3 * self.digits - 1

    def farthest(self, length: int) -> int:
        """All filler between the number and the question."""
        return self._distance(length - self.least())

    def sample(self, random: np.random.Generator, length: int, nearest: int = 0) -> Sample:
        """See :class:`Task`."""
        check_room(self, length, nearest)
        number = random.integers(10, size=self.digits)  # ids of digits are their values
        filler = length - self.least()
        after = int(random.integers(max(0, nearest - self._distance(0)), filler + 1))
        statement = [*self._ids(_BEFORE), *number, *self._ids(_BETWEEN), *number, *self._ids(_AFTER)]
        text = [*self._ids(_OPENING), *self._fill(filler - after), *statement, *self._fill(after)]
        whole = np.array([*text, *self._ids(_QUESTION), *number], np.int64)  # [length + 1]
        labels, distances = np.full(length, IGNORED), np.zeros(length, np.int64)
        labels[-self.digits :] = number
        distances[-self.digits :] = self._distance(after)
        return Sample(whole[:-1], labels, distances)

    def grown(self, factor: int) -> None:
        """There is one number."""
        return

    def _distance(self, filler: int) -> int:
        """From the second mention of a digit to the answer."""
        return self.digits + len(self._ids(_AFTER)) + filler + len(self._ids(_QUESTION))

    def _fill(self, count: int) -> NDArray[np.int64]:
        return np.resize(self._ids(_FILLER), count)

    def _ids(self, text: str) -> list[int]:
        return [self._id[word] for word in _split(text)]

    @cached_property
    def _id(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def random_for(use: Literal["training", "evaluation", "order"], seed: int, index: int) -> np.random.Generator:
    """The random numbers of one sequence, or of the order of a pass. No two uses share them."""
    return np.random.default_rng((("training", "evaluation", "order").index(use), seed, index))


def check_room(task: Task, length: int, nearest: int = 0) -> None:
    """Refuse a length that cannot hold a task's sequence.

    Raises:
        LabError: with the length that would do.
    """
    if length < task.least():
        raise LabError(
            f"{length} tokens cannot hold a sequence of this task: it takes {task.least()}",
            "raise train.length, or make the task in [data] smaller",
        )
    if nearest > task.farthest(length):
        raise LabError(
            f"in {length} tokens no answer can lie {nearest} tokens back: at most {task.farthest(length)}",
            "choose a longer sequence",
        )
