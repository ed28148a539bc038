"""Generated tasks: sequences that ask, at the end, for something that stood far before.

Every answer is drawn uniformly and independently of all other tokens. So a model that cannot see
the tokens that hold an answer is right with probability `chance`, whatever else it sees and however
well it was trained.
"""

import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
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


class Asking(Protocol):
    """What `softfocus recall` needs of a task."""

    @property
    def nearest(self) -> int:
        """In no sequence does an answer lie nearer, in tokens."""

    @property
    def chance(self) -> float:
        """The probability of one answer, for a model that cannot see it."""

    @property
    def answers(self) -> int:
        """How many answers a sequence asks for. If there is one, it may take several tokens, all of
        which have to be right.
        """

    def least(self) -> int:
        """Tokens that the shortest sequence takes."""

    def farthest(self, length: int) -> int:
        """The largest distance that all answers of a sequence of this length can have."""

    def sample(self, random: np.random.Generator, length: int, nearest: int = 0) -> Sample:
        """A sequence of exactly `length` tokens in which no answer lies nearer than `nearest`
        tokens, nor than the task's own `nearest`.

        Raises:
            LabError: the length has no room for that.
        """

    def grown(self, factor: int) -> "Asking | None":
        """The task with so many times more to remember, on the same vocabulary; None where it
        cannot grow.
        """


class Task(Asking, Protocol):
    """What training needs, too."""

    @property
    def words(self) -> Sequence[str]:
        """The vocabulary: a word for each id."""


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
        nearest: in no sequence does an answer lie nearer, in tokens.
    """

    pairs: int
    queries: int
    keys: int
    values: int
    filler: int
    nearest: int = 0

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
        """Pairs, as much filler as the nearest answer needs, and queries."""
        return self._first(self.nearest) + self.queries

    def farthest(self, length: int) -> int:
        """All queries at the end."""
        return length - self.queries - 2 * (self.pairs - 1)

    def sample(self, random: np.random.Generator, length: int, nearest: int = 0) -> Sample:
        """See :class:`Task`."""
        check_length(self, length, nearest)
        keys, values, _ = np.cumsum([0, *self._sizes[:2]])
        filler = keys + self.keys + self.values
        tokens = random.integers(filler, filler + self.filler, length)
        pairs = tokens[: 2 * self.pairs].reshape(self.pairs, 2)  # a view
        pairs[:, 0] = keys + random.choice(self.keys, self.pairs, replace=False)
        pairs[:, 1] = values + random.integers(self.values, size=self.pairs)
        asked = np.resize(random.permutation(self.pairs), self.queries)  # again from the first where they are more
        first = self._first(max(nearest, self.nearest))
        places = first + random.choice(length - first, self.queries, replace=False)
        tokens[places] = pairs[asked, 0]
        labels, distances = np.full(length, IGNORED), np.zeros(length, np.int64)
        labels[places], distances[places] = pairs[asked, 1], places - 2 * asked
        return Sample(tokens, labels, distances)

    def grown(self, factor: int) -> "Mqar | None":
        """More pairs and queries, as far as there are keys."""
        more = replace(self, pairs=self.pairs * factor, queries=self.queries * factor)
        return more if more.pairs <= self.keys else None

    def _first(self, nearest: int) -> int:
        """The first place that a query may have."""
        return max(2 * self.pairs, 2 * (self.pairs - 1) + nearest)

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


class _HiddenNumber(Asking):
    """The sentences around a number: what both tasks of passkeys share."""

    @property
    def nearest(self) -> int:
        """As near as its sentences allow."""
        return 0

    @property
    @abstractmethod
    def _longest(self) -> Sequence[int]:
        """The ids of a number that takes the most tokens."""

    @abstractmethod
    def _number(self, random: np.random.Generator) -> Sequence[int]:
        """The ids of a number, drawn uniformly."""

    @abstractmethod
    def _ids(self, text: str) -> Sequence[int]:
        """Of a sentence."""

    def least(self) -> int:
        """All but filler."""
        return self._least(self._longest)

    def farthest(self, length: int) -> int:
        """All filler between the number and the question. A number of fewer tokens leaves room for
        more filler, and so lies no nearer.
        """
        return self._distance(self._longest, length - self.least())

    def sample(self, random: np.random.Generator, length: int, nearest: int = 0) -> Sample:
        """The number at a random depth, at least `nearest` tokens before the answer."""
        check_length(self, length, nearest)
        number = self._number(random)
        filler, size = length - self._least(number), len(number)
        after = int(random.integers(max(0, nearest - self._distance(number, 0)), filler + 1))
        mentions = [*self._ids(_BEFORE), *number, *self._ids(_BETWEEN), *number, *self._ids(_AFTER)]
        text = [*self._ids(_OPENING), *self._fill(filler - after), *mentions, *self._fill(after)]
        whole = np.array([*text, *self._ids(_QUESTION), *number], np.int64)  # [length + 1]
        labels, distances = np.full(length, IGNORED), np.zeros(length, np.int64)
        labels[-size:], distances[-size:] = number, self._distance(number, after)
        return Sample(whole[:-1], labels, distances)

    def grown(self, factor: int) -> None:
        """There is one number."""
        return

    def _least(self, number: Sequence[int]) -> int:
        """Tokens of all but filler. The last one of the answer is predicted and not read."""
        parts = (_OPENING, _BEFORE, _BETWEEN, _AFTER, _QUESTION)
        return sum(len(self._ids(part)) for part in parts) + 3 * len(number) - 1

    def _distance(self, number: Sequence[int], filler: int) -> int:
        """From the second mention of the number to the answer, with so much filler after it."""
        return len(number) + len(self._ids(_AFTER)) + filler + len(self._ids(_QUESTION))

    def _fill(self, count: int) -> NDArray[np.int64]:
        return np.resize(np.array(self._ids(_FILLER), np.int64), count)


@dataclass(frozen=True)
class Passkey(_HiddenNumber):
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

    @property
    def _longest(self) -> Sequence[int]:
        return range(self.digits)

    def _number(self, random: np.random.Generator) -> list[int]:
        digits: list[int] = random.integers(10, size=self.digits).tolist()
        return digits  # their ids are their values

    def _ids(self, text: str) -> list[int]:
        return [self._id[word] for word in _split(text)]

    @cached_property
    def _id(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


@dataclass(frozen=True)
class PasskeyInText(_HiddenNumber):
    """Passkey retrieval for a model that was trained on text: the same sentences, as its tokenizer
    writes them.

    The number is one answer, right if every token of it is the likeliest one after those before it.
    That is what greedy decoding would write.

    Args:
        encode: the ids of a text.
        digits: of the number.
    """

    encode: Callable[[str], Sequence[int]]
    digits: int = 5

    @property
    def chance(self) -> float:
        """Digits are drawn uniformly, and all have to be right."""
        return 10.0**-self.digits

    @property
    def answers(self) -> int:
        """The number."""
        return 1

    def _number(self, random: np.random.Generator) -> Sequence[int]:
        return self._ids("".join(map(str, random.integers(10, size=self.digits))))

    def _ids(self, text: str) -> Sequence[int]:
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self.encode(text if text.startswith(".") else f" {text}")
        return known

    @cached_property
    def _known(self) -> dict[str, Sequence[int]]:
        return {}

    @cached_property
    def _longest(self) -> Sequence[int]:
        """Digits that are tokens of their own, and a space that is one. Other numbers may take
        fewer.
        """
        return [*self.encode(" "), *(token for digit in "0123456789"[: self.digits] for token in self.encode(digit))]


def random_for(use: Literal["training", "evaluation", "order"], seed: int, index: int) -> np.random.Generator:
    """The random numbers of one sequence, or of the order of a pass. No two uses share them."""
    return np.random.default_rng((("training", "evaluation", "order").index(use), seed, index))


def digest(task: Asking) -> str:
    """The task's name and a digest of its first sequence: it changes with the generator."""
    sample = task.sample(random_for("training", 0, 0), 2 * task.least())
    found = hashlib.sha256(sample.tokens.tobytes() + sample.labels.tobytes()).hexdigest()
    return f"{type(task).__name__.lower()}-{found[:12]}"


def check_length(
    task: Asking,
    length: int,
    nearest: int = 0,
    remedy: str = "set train.length to {} or more, or make the task in [data] smaller",
) -> None:
    """Refuse a length that cannot hold a task's sequence.

    Args:
        task: whose sequence it is.
        length: in tokens.
        nearest: no answer lies nearer, in tokens.
        remedy: what the caller can change, with a place for the shortest length.

    Raises:
        LabError: with the length that would do.
    """
    if length < task.least():
        raise LabError(
            f"{length} tokens cannot hold a sequence of this task: it takes {task.least()}",
            remedy.format(task.least()),
        )
    if (short := nearest - task.farthest(length)) > 0:
        raise LabError(
            f"in {length} tokens no answer can lie {nearest} tokens back: at most {task.farthest(length)}",
            f"choose a sequence of {length + short} tokens or more",
        )
