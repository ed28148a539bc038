"""Means of losses and their differences, with standard errors that respect what belongs together."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import hypot, nan, sqrt
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike, NDArray


def default_edges(train_length: int, length: int) -> list[int]:
    """Bucket edges at quarters and powers of two of the training length: 0, L/4, L/2, L, 2L, 4L ... length."""
    edges = {0, train_length // 4, train_length // 2, length}
    edge = train_length
    while edge < length:
        edges.add(edge)
        edge *= 2
    return sorted(edge for edge in edges if edge <= length)


@dataclass(frozen=True)
class Mean:
    """A mean over the tokens of several documents, or a difference of such means.

    Two windows of one document tell less than two of different ones: their losses are correlated. So the document is the
    unit that is taken to be drawn at random. With S_c the summed loss of document c, n_c its tokens, and the mean
    m = sum S_c / sum n_c, each document moves the mean by its part::

        parts_c = (S_c - m n_c) / sum n_c
        standard error^2 = C / (C - 1) * sum_c parts_c^2

    which is the linearised variance of a ratio over C documents (Cochran, Sampling Techniques, 1977, section 9A), and the
    ordinary standard error of the mean where every window is a document of its own. It is NaN for a single document.
    Parts add up as the means do, so a difference of two means over the same documents has the difference of their parts:
    what a document does to both cancels.

    Attributes:
        value: the mean.
        standard_error: from the documents alone.
        parts: by document; None where only the standard error is known.
        documents: what the parts belong to; means whose documents are equal are paired.
    """

    value: float
    standard_error: float
    parts: NDArray[np.float64] | None = None
    documents: Hashable = None

    @classmethod
    def of(cls, sums: ArrayLike, counts: ArrayLike, documents: Hashable = None) -> "Mean":
        """From the summed loss and the tokens of each document."""
        s, n = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)  # [C]
        value = float(s.sum() / n.sum())
        with np.errstate(invalid="ignore"):  # an infinite loss has no error
            return cls._from_parts(value, (s - value * n) / n.sum(), documents)

    @classmethod
    def _from_parts(cls, value: float, parts: NDArray[np.float64], documents: Hashable) -> "Mean":
        count = len(parts)
        error = sqrt(count / (count - 1) * np.square(parts).sum()) if count > 1 else nan
        return cls(value, error, parts, documents)

    def __sub__(self, other: "Mean") -> "Mean":
        """The difference; unpaired means are taken to be independent, which is too wide where they share documents."""
        value = self.value - other.value
        if parts := _paired([self, other]):
            return self._from_parts(value, parts[0] - parts[1], self.documents)
        return Mean(value, hypot(self.standard_error, other.standard_error))


def average(means: Sequence[Mean]) -> Mean:
    """The mean of several means. Unpaired errors are taken to be fully correlated, which is the widest they can be."""
    value = fmean(mean.value for mean in means)
    if parts := _paired(means):
        return Mean._from_parts(value, np.mean(parts, axis=0), means[0].documents)
    return Mean(value, fmean(mean.standard_error for mean in means))


def _paired(means: Sequence[Mean]) -> list[NDArray[np.float64]]:
    """The parts of each, where all are known document by document over the same documents; else nothing."""
    parts = [mean.parts for mean in means if mean.parts is not None]
    same = len({mean.documents for mean in means}) == 1
    return parts if same and len(parts) == len(means) else []


Runs = Sequence[tuple[int, Mean]]
"""The same quantity of several trainings: (seed, what was measured)."""


@dataclass(frozen=True)
class Estimate:
    """A number about trainings, not about one model.

    Attributes:
        value: the mean over the trainings, or a difference of two.
        standard_error: from the documents and, where it is known, from the training seeds. The two are added as
            independent variances. Noise of one seed on one document is counted in both, so this is on the safe side.
        training_noise: whether the error holds all that of the seeds; with one training it is unknown.
    """

    value: float
    standard_error: float
    training_noise: bool

    @property
    def sure(self) -> bool:
        """Whether the value is more than two standard errors from zero."""
        return abs(self.value) > 2 * self.standard_error


def estimate(runs: Runs) -> Estimate:
    """The mean over trainings."""
    return _with_noise(average([mean for _, mean in runs]), _noise([mean.value for _, mean in runs]))


def difference(first: Runs, second: Runs) -> Estimate:
    """The first mean less the second, paired by document, and by seed where both have the same seeds, each once."""
    documents = average([mean for _, mean in first]) - average([mean for _, mean in second])
    a, b = ({seed: mean.value for seed, mean in runs} for runs in (first, second))
    if a.keys() == b.keys() and len(a) == len(first) == len(second):
        return _with_noise(documents, _noise([a[seed] - b[seed] for seed in a]))
    return _with_noise(documents, *(_noise([mean.value for _, mean in runs]) for runs in (first, second)))


def _noise(values: Sequence[float]) -> float | None:
    """The standard error of a mean over trainings, None for one."""
    return float(np.std(values, ddof=1)) / sqrt(len(values)) if len(values) > 1 else None


def _with_noise(documents: Mean, *noises: float | None) -> Estimate:
    known = [noise for noise in noises if noise is not None]
    return Estimate(documents.value, hypot(documents.standard_error, *known), len(known) == len(noises))


@dataclass
class ClusteredMeans:
    """Sums of losses by document and bucket of positions, from windows that come one batch after another."""

    edges: list[int]
    _sums: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    _windows: dict[int, int] = field(default_factory=dict)

    def add(self, losses: NDArray[np.float64], documents: NDArray[np.integer]) -> None:
        """Add windows: losses [W, L] in nats, documents [W] naming what each window belongs to."""
        by_bucket = np.add.reduceat(losses, self.edges[:-1], axis=1)  # [W, buckets]
        for document, row in zip(documents.tolist(), by_bucket, strict=True):
            self._sums[document] = self._sums.get(document, 0.0) + row
            self._windows[document] = self._windows.get(document, 0) + 1

    @property
    def documents(self) -> list[int]:
        """The documents met, ascending."""
        return sorted(self._sums)

    @property
    def windows(self) -> list[int]:
        """How many windows each of them has."""
        return [self._windows[document] for document in self.documents]

    def sums(self, index: int) -> list[float]:
        """The summed loss of each document in one bucket."""
        return [float(self._sums[document][index]) for document in self.documents]

    def mean(self, index: int | None = None) -> tuple[Mean, int]:
        """The mean of one bucket, or of all of them, and its tokens."""
        chosen = slice(None) if index is None else slice(index, index + 1)
        counts = np.array(self.windows) * int(np.diff(self.edges)[chosen].sum())  # [C]
        sums = [self._sums[document][chosen].sum() for document in self.documents]
        return Mean.of(sums, counts), int(counts.sum())
