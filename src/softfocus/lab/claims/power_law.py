"""Loss against the number of parameters: power laws, and how many parameters one family of models
saves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression

from softfocus.lab.claims.claim import Saves
from softfocus.lab.claims.results import Results
from softfocus.lab.evaluate.means import Estimate, Mean, estimate
from softfocus.lab.report.points import cell


@dataclass(frozen=True)
class PowerLaw:
    """The line of least squares through logarithms: log loss = intercept + slope * log
    parameters.
    """

    intercept: float
    slope: float

    @classmethod
    def through(cls, parameters: Sequence[float], losses: Sequence[float]) -> "PowerLaw":
        """Of at least two sizes that differ."""
        # Not numpy's fit: it rounds as the machine's LAPACK does, and a figure must not
        slope, intercept = linear_regression([*map(math.log, parameters)], [*map(math.log, losses)])
        return cls(intercept, slope)

    def log_loss(self, parameters: float) -> float:
        """Natural logarithm of the loss at a size."""
        return self.intercept + self.slope * math.log(parameters)

    def log_parameters(self, log_loss: float) -> float:
        """Natural logarithm of the size that has a loss; NaN where the loss does not fall with the
        size.
        """
        return (log_loss - self.intercept) / self.slope if self.slope < 0 else math.nan


@dataclass(frozen=True)
class Family:
    """Models of several sizes, each trained with the same seeds.

    Attributes:
        label: the mechanism.
        parameters: of each size, ascending.
        losses: of each seed, in the order of the sizes.
    """

    label: str
    parameters: tuple[int, ...]
    losses: dict[int, tuple[float, ...]]

    @property
    def laws(self) -> dict[int, PowerLaw]:
        """One for each seed."""
        return {seed: PowerLaw.through(self.parameters, losses) for seed, losses in self.losses.items()}

    @property
    def exponent(self) -> Estimate:
        """The power of the number of parameters, over trainings."""
        return estimate([(seed, Mean(law.slope, 0.0)) for seed, law in self.laws.items()])

    @property
    def misfit(self) -> float:
        """How far a size's mean loss lies from the curve, at most, as a share of the loss."""
        means = [fmean(map(math.log, losses)) for losses in zip(*self.losses.values(), strict=True)]
        law = PowerLaw.through(self.parameters, [*map(math.exp, means)])
        return max(abs(math.expm1(mean - law.log_loss(n))) for n, mean in zip(self.parameters, means, strict=True))

    def gap(self, others: "Family", by: float) -> float:
        """How far our curve, at the largest of the others' sizes less a share `by` of it, lies from
        the loss that their curve has at that size, as a share of that loss: the mean over seeds.
        """
        largest = others.parameters[-1]
        mine, theirs = self.laws, others.laws
        apart = [
            mine[seed].log_loss((1 - by) * largest) - theirs[seed].log_loss(largest) for seed in mine.keys() & theirs
        ]
        return abs(math.expm1(fmean(apart)))

    def band(self, parameters: float) -> tuple[float, float, float]:
        """The curve's loss at a size, and the lower and upper end of its 95 % confidence band, over
        trainings.
        """
        found = estimate([(seed, Mean(law.log_loss(parameters), 0.0)) for seed, law in self.laws.items()])
        low, middle, high = (math.exp(found.value + side * found.margin) for side in (-1, 0, 1))
        return middle, low, high


def families(results: Results, statement: Saves) -> tuple[Family, Family] | None:
    """The rows of a statement and the others; None where a loss is missing or not finite."""
    found = [_family(results, rows, statement) for rows in (statement.row, statement.than)]
    ours, others = found
    return None if ours is None or others is None else (ours, others)


def _family(results: Results, rows: Sequence[str], statement: Saves) -> Family | None:
    """The sizes of some rows, with the seeds that all of them have."""
    sizes = []
    for row in rows:
        runs, group = results.of(row), results.group(row)
        there = cell(group, float(statement.at.removesuffix("x")), statement.setting) if group else None
        if there is None or any(run.diverged for run in runs) or not all(map(math.isfinite, there.values)):
            return None
        seeds = [evaluation.seed for evaluation in there.group.evaluations]
        sizes.append((runs[0].info.parameters, dict(zip(seeds, there.values, strict=True))))
    sizes.sort(key=lambda size: size[0])
    shared = sorted(set.intersection(*(set(losses) for _, losses in sizes)))
    return Family(
        results.of(rows[0])[0].info.mechanism,
        tuple(parameters for parameters, _ in sizes),
        {seed: tuple(losses[seed] for _, losses in sizes) for seed in shared},
    )


def saved(ours: Family, others: Family) -> Estimate | None:
    """Log of how many times the parameters of the largest of the others we need for the loss that
    their curve has there.

    Each seed has its two curves and one answer, so the error is that over trainings. None where a
    curve does not fall.
    """
    largest = others.parameters[-1]
    mine, theirs = ours.laws, others.laws
    ratios = [
        (seed, mine[seed].log_parameters(theirs[seed].log_loss(largest)) - math.log(largest))
        for seed in sorted(mine.keys() & theirs.keys())
    ]
    if not ratios or any(math.isnan(ratio) for _, ratio in ratios):
        return None
    return estimate([(seed, Mean(ratio, 0.0)) for seed, ratio in ratios])
