"""Means of losses with standard errors that respect what belongs together."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


def default_edges(train_length: int, length: int) -> list[int]:
    """Bucket edges at quarters and powers of two of the training length: 0, L/4, L/2, L, 2L, 4L ... length."""
    edges = {0, train_length // 4, train_length // 2, length}
    edge = train_length
    while edge < length:
        edges.add(edge)
        edge *= 2
    return sorted(edge for edge in edges if edge <= length)


def clustered(sums: NDArray[Any], counts: NDArray[Any]) -> tuple[float, float]:
    """The mean and its standard error, from sums over clusters [C] and how many each is over [C].

    The formula is that of :class:`ClusteredMeans`; clusters that hold nothing are left out.
    """
    sums, counts = sums[counts > 0], counts[counts > 0]
    mean, clusters = float(sums.sum() / counts.sum()), len(counts)
    if clusters < 2:
        return mean, float("nan")
    spread = np.square(sums - mean * counts).sum() * clusters / (clusters - 1)
    return mean, float(np.sqrt(spread) / counts.sum())


@dataclass
class ClusteredMeans:
    """Mean loss by bucket of positions and over all, from windows that come one batch after another.

    Two windows of one document tell less than two of different ones: their losses are correlated. So the document (the
    cluster) is the unit that is taken to be drawn at random. With S_c the summed loss of cluster c, n_c its tokens, and
    the mean m = sum S_c / sum n_c::

        standard error^2 = C / (C - 1) * sum_c (S_c - m n_c)^2 / (sum_c n_c)^2

    which is the linearised variance of a ratio over C clusters (Cochran, Sampling Techniques, 1977, section 9A), and the
    ordinary standard error of the mean where every window is a cluster of its own. It is NaN for a single cluster.
    """

    edges: list[int]
    sums: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)

    def add(self, losses: NDArray[np.float64], clusters: NDArray[np.integer]) -> None:
        """Add windows: losses [W, L] in nats, clusters [W] naming what each window belongs to."""
        by_bucket = np.add.reduceat(losses, self.edges[:-1], axis=1)  # [W, buckets]
        for cluster, row in zip(clusters.tolist(), by_bucket, strict=True):
            self.sums[cluster] = self.sums.get(cluster, 0.0) + row
            self.windows[cluster] = self.windows.get(cluster, 0) + 1

    def bucket(self, index: int | None = None) -> tuple[float, float, int]:
        """(mean, standard error, tokens) of one bucket, or of all of them."""
        widths = np.diff(self.edges)
        chosen = slice(None) if index is None else slice(index, index + 1)
        sums = np.array([row[chosen].sum() for row in self.sums.values()])  # [C]
        counts = np.array(list(self.windows.values()), dtype=np.float64) * widths[chosen].sum()  # [C]
        mean = float(sums.sum() / counts.sum())
        if len(sums) < 2:
            return mean, float("nan"), int(counts.sum())
        spread = np.square(sums - mean * counts).sum() * len(sums) / (len(sums) - 1)
        return mean, float(np.sqrt(spread) / counts.sum()), int(counts.sum())
