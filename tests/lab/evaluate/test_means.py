"""The estimators, on made-up data whose answers are known in another way."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from softfocus.lab.evaluate.means import (
    ClusteredMeans,
    Estimate,
    Mean,
    average,
    default_edges,
    difference,
    estimate,
    t_outside,
    t_quantile,
)


def ordinary(values: Any) -> float:
    """The standard error of a mean of independent values."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def by_document(losses: Any, documents: str = "text") -> Mean:
    """A mean over documents of one size: losses [documents, tokens]."""
    return Mean.of(losses.sum(1), np.full(len(losses), losses.shape[1]), documents)


def random(seed: int) -> Any:
    return np.random.default_rng(seed)


def test_default_edges() -> None:
    assert default_edges(128, 128) == [0, 32, 64, 128]
    assert default_edges(128, 2048) == [0, 32, 64, 128, 256, 512, 1024, 2048]
    assert default_edges(128, 50) == [0, 32, 50]


class TestOneMean:
    def test_where_every_window_is_a_document_the_error_is_the_ordinary_one(self) -> None:
        losses = random(0).normal(3, 1, (40, 8))
        means = ClusteredMeans([0, 8])
        means.add(losses, np.arange(40))
        mean, tokens = means.mean()
        assert (mean.value, tokens) == (pytest.approx(losses.mean()), 320)
        assert mean.standard_error == pytest.approx(ordinary(losses.mean(1)))

    def test_groups_count_alike(self) -> None:
        first, second = random(0).normal(3, 1, 400), random(1).normal(5, 2, 100)
        assert Mean.of_groups([first]).standard_error == pytest.approx(ordinary(first))
        both = Mean.of_groups([first, second])
        assert both.value == pytest.approx((first.mean() + second.mean()) / 2)
        error = math.hypot(ordinary(first), ordinary(second)) / 2
        assert both.standard_error == pytest.approx(error, rel=0.01), "up to the smaller group's n - 1"

    def test_as_many_windows_again_that_are_alike_tell_nothing_more(self) -> None:
        losses = random(0).normal(3, 1, (40, 8))
        copies = ClusteredMeans([0, 4, 8])
        copies.add(np.repeat(losses, 4, axis=0), np.repeat(np.arange(40), 4))
        assert copies.mean()[0].standard_error == pytest.approx(ordinary(losses.mean(1)))
        second, tokens = copies.mean(1)
        assert second.value == pytest.approx(losses[:, 4:].mean())
        assert tokens == 40 * 4 * 4
        assert copies.sums(1) == pytest.approx(4 * losses[:, 4:].sum(1))

    def test_windows_of_a_document_may_come_in_several_batches_and_documents_in_any_order(self) -> None:
        losses, documents = random(0).normal(3, 1, (40, 8)), random(1).integers(0, 9, 40)
        whole, split = ClusteredMeans([0, 4, 8]), ClusteredMeans([0, 4, 8])
        whole.add(losses, documents)
        split.add(losses[25:], documents[25:])
        split.add(losses[:25], documents[:25])
        assert split.documents == whole.documents == sorted(set(documents.tolist()))
        assert split.windows == whole.windows == np.bincount(documents)[whole.documents].tolist()
        assert split.sums(0) == pytest.approx(whole.sums(0))
        assert split.mean()[0].standard_error == pytest.approx(whole.mean()[0].standard_error)

    def test_one_document_has_no_error(self) -> None:
        assert math.isnan(Mean.of([3.0], [2]).standard_error)

    def test_two_standard_errors_cover_the_truth(self) -> None:
        """Documents of unequal size and with means of their own: 95 times of 100."""
        rng, hits = random(1), 0
        for _ in range(400):
            sizes = rng.integers(1, 6, 30)
            sums = [rng.normal(rng.normal(0, 1), 1, 4 * size).sum() for size in sizes]
            mean = Mean.of(sums, 4 * sizes)
            hits += abs(mean.value) < 2 * mean.standard_error
        assert 0.91 < hits / 400 < 0.98

    @pytest.mark.parametrize(
        "sizes", [(60, *[1] * 9), (23, *[1] * 9), (30, 30, *[1] * 8), (10, *[1] * 20), (1000, *[100] * 3), (8, 1, 1)]
    )
    def test_a_document_with_much_of_the_tokens_does_not_hide_its_own_noise(self, sizes: tuple[int, ...]) -> None:
        """Noise lies outside of the room that it is given in 4.55 of 100 cases. It was up to 86."""
        rng, outside = random(1), 0
        for _ in range(500):
            sums = rng.normal(0, 1, len(sizes)) * sizes
            outside += estimate([(0, Mean.of(sums, sizes, "text"))]).sure
        assert outside / 500 < 0.07

    def test_with_a_large_document_a_paired_difference_has_the_error_of_the_jackknife(self) -> None:
        sizes = np.array([30, *[1] * 9])
        losses = random(1).normal(3, 1, (2, 10))
        first, second = (Mean.of(one * sizes, sizes, "text") for one in losses)
        apart = losses[0] - losses[1]
        without = [np.average(np.delete(apart, c), weights=np.delete(sizes, c)) for c in range(10)]
        expected = math.sqrt(9 / 10 * np.square(without - np.average(apart, weights=sizes)).sum())
        assert (first - second).standard_error == pytest.approx(expected)
        assert (first - second).freedom == average([first, second]).freedom == first.freedom == 1

    def test_few_documents_of_equal_size_have_the_ordinary_error(self) -> None:
        losses = random(1).normal(3, 1, (3, 8))
        mean = by_document(losses)
        assert (mean.standard_error, mean.freedom) == (pytest.approx(ordinary(losses.mean(1))), pytest.approx(2))


class TestPairing:
    def test_a_difference_says_by_what_it_is_paired(self) -> None:
        one, other = (by_document(losses) for losses in random(2).normal(3, 1, (2, 20, 5)))
        paired, apart = difference([(0, one)], [(0, other)]), difference([(0, one)], [(1, Mean(1.0, 0.1))])
        assert (paired.by_document, paired.by_seed, apart.by_document, apart.by_seed) == (True, True, False, False)

    def test_over_the_same_documents_the_error_is_that_of_the_differences(self) -> None:
        first, second = random(2).normal(3, 1, (2, 20, 5))
        found = by_document(first) - by_document(second)
        assert found.value == pytest.approx((first - second).mean())
        assert found.standard_error == pytest.approx(ordinary((first - second).mean(1)))

    def test_what_documents_do_to_both_cancels_and_two_errors_cover_the_truth(self) -> None:
        """Losses of documents correlate at 0.99: the paired error is a tenth of the other, and
        still honest.
        """
        rng, hits, ratios = random(3), 0, []
        for _ in range(400):
            sizes, hard = rng.integers(1, 9, 30), rng.normal(0, 1, 30)
            # Of variance 2, of which 1.98 is shared: the correlation is 0.99
            sums = [(1.4 * hard + rng.normal(0, 0.14, 30)) * sizes for _ in range(2)]
            paired = Mean.of(sums[0], sizes, "text") - Mean.of(sums[1], sizes, "text")
            unpaired = Mean.of(sums[0], sizes, "text") - Mean.of(sums[1], sizes, "another text")
            assert paired.value == unpaired.value
            hits += abs(paired.value) < 2 * paired.standard_error
            ratios.append(paired.standard_error / unpaired.standard_error)
        assert 0.91 < hits / 400 < 0.98
        assert np.mean(ratios) == pytest.approx(math.sqrt(1 - 0.99), rel=0.1)

    def test_a_multiple_has_a_multiple_of_the_error(self) -> None:
        first, second = random(2).normal(3, 1, (2, 20, 5))
        found = by_document(first) - by_document(second) * 1.5
        assert found.value == pytest.approx((first - 1.5 * second).mean())
        assert found.standard_error == pytest.approx(ordinary((first - 1.5 * second).mean(1)))
        unpaired = Mean(3.0, 0.3) - Mean(1.0, 0.2) * -2.0
        assert (unpaired.value, unpaired.standard_error) == (5.0, pytest.approx(0.5))

    def test_unpaired_means_are_taken_to_be_independent(self) -> None:
        found = Mean(3.0, 0.3) - Mean(1.0, 0.4)
        assert (found.value, found.standard_error) == (2.0, pytest.approx(0.5))

    def test_means_whose_documents_are_not_known_are_not_paired(self) -> None:
        first, second = (Mean.of(losses, np.ones(20)) for losses in random(8).normal(3, 1, (2, 20)))
        expected = math.hypot(first.standard_error, second.standard_error)
        assert (first - second).standard_error == pytest.approx(expected)
        assert (first - first).standard_error > 0

    def test_a_gain_within_the_same_documents_is_paired_although_the_tokens_are_others(self) -> None:
        """Early positions are few, later ones many; documents of equal size, so the closed form is
        that of differences.
        """
        rng = random(4)
        early, later = rng.normal(3, 1, (25, 2)), rng.normal(2, 1, (25, 30))
        found = by_document(early) - by_document(later)
        assert found.standard_error == pytest.approx(ordinary(early.mean(1) - later.mean(1)))

    def test_the_average_of_the_same_mean_is_that_mean(self) -> None:
        one = by_document(random(5).normal(3, 1, (10, 4)))
        assert average([one, one, one]).standard_error == pytest.approx(one.standard_error)
        assert average([Mean(1.0, 0.2), Mean(2.0, 0.4)]).standard_error == pytest.approx(0.3), "the widest it can be"

    def test_the_average_of_paired_means_is_the_mean_of_the_averages(self) -> None:
        losses = random(6).normal(3, 1, (4, 10, 5))
        found = average([by_document(one) for one in losses])
        assert found.value == pytest.approx(losses.mean())
        assert found.standard_error == pytest.approx(by_document(losses.mean(0)).standard_error)


class TestStudentsT:
    @pytest.mark.parametrize(
        ("freedom", "table"),
        [(3, 3.1824463053), (4, 2.7764451052), (10, 2.2281388520), (30, 2.0422724563), (120, 1.9799304051)],
    )
    def test_the_tables_value(self, freedom: int, table: float) -> None:
        assert t_quantile(freedom, 0.95) == pytest.approx(table, abs=1e-6)

    @pytest.mark.parametrize("inside", [0.5, 0.9, 0.95, math.erf(math.sqrt(2)), 0.99])
    def test_one_two_and_infinitely_many_degrees_in_closed_form(self, inside: float) -> None:
        assert t_quantile(1, inside) == pytest.approx(math.tan(math.pi / 2 * inside), rel=1e-9)
        assert t_quantile(2, inside) == pytest.approx(inside * math.sqrt(2 / (1 - inside**2)), rel=1e-9)
        assert math.erf(t_quantile(math.inf, inside) / math.sqrt(2)) == pytest.approx(inside, rel=1e-9)
        for freedom in (1e4, 1e6, 1e7):  # the first term of the expansion in 1 / freedom
            z = t_quantile(math.inf, inside)
            assert t_quantile(freedom, inside) == pytest.approx(z + (z**3 + z) / 4 / freedom, abs=1e-6)

    def test_what_lies_between_whole_degrees(self) -> None:
        """Against the formula's own integral, summed in small steps."""
        freedom, end = 4.7, t_quantile(4.7)
        steps = np.linspace(-end, end, 20_001)
        density = (1 + steps**2 / freedom) ** (-(freedom + 1) / 2)
        density *= math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
        assert np.trapezoid(density, steps) == pytest.approx(math.erf(math.sqrt(2)), abs=1e-7)

    @pytest.mark.parametrize("freedom", [1, 2, 4.7, 30, 31, 1e3, 1e6, math.inf])
    def test_what_lies_outside_is_the_rest(self, freedom: float) -> None:
        for inside in (0.5, 0.9, 0.99):
            assert t_outside(t_quantile(freedom, inside), freedom) == pytest.approx(1 - inside, abs=1e-6)
        assert t_outside(0.0, freedom) == pytest.approx(1, abs=1e-9)

    @pytest.mark.parametrize("errors", [0.5, 3.0, 20.0, 1e3])
    def test_far_outside_in_closed_form(self, errors: float) -> None:
        assert t_outside(errors, 1) == pytest.approx(1 - 2 / math.pi * math.atan(errors), abs=1e-9)
        assert t_outside(errors, 2) == pytest.approx(1 - errors / math.sqrt(2 + errors**2), abs=1e-9)
        for freedom in (1e5, 1e8):
            assert t_outside(errors, freedom) == pytest.approx(math.erfc(errors / math.sqrt(2)), abs=1e-5)


class TestSeeds:
    def exact(self, *values: float) -> list[tuple[int, Mean]]:
        """Trainings whose documents have no error."""
        return [(seed, Mean(value, 0.0)) for seed, value in enumerate(values)]

    def test_the_error_of_a_mean_is_that_over_the_trainings(self) -> None:
        values = [1.0, 1.3, 1.1, 1.2]
        found = estimate(self.exact(*values))
        assert (found.value, found.standard_error) == (pytest.approx(1.15), pytest.approx(ordinary(values)))
        assert found.training_noise

    def test_the_same_seeds_are_paired(self) -> None:
        first, second = [1.0, 2.0, 3.0], [0.5, 1.7, 2.4]
        found = difference(self.exact(*first), self.exact(*second))
        assert found.standard_error == pytest.approx(ordinary(np.subtract(first, second)))
        assert found.by_seed
        turned = difference(self.exact(*first), self.exact(*second)[::-1])
        assert turned.standard_error == pytest.approx(found.standard_error), "whatever their order"

    def test_other_seeds_are_not(self) -> None:
        first, second = [1.0, 2.0, 3.0], [0.5, 1.7, 2.4]
        found = difference(self.exact(*first), [(5 + seed, mean) for seed, mean in self.exact(*second)])
        assert found.standard_error == pytest.approx(math.hypot(ordinary(first), ordinary(second)))
        assert not found.by_seed

    def test_runs_that_share_a_seed_count_as_one(self) -> None:
        """A copy of a run tells nothing about the noise of training."""
        runs, other = self.exact(1.0, 1.3, 1.1), self.exact(0.5, 1.2, 1.0)
        assert estimate([*runs, *runs]) == estimate(runs)
        assert not estimate([runs[0], runs[0]]).training_noise
        assert estimate([*runs, (2, Mean(1.5, 0.0))]).value == pytest.approx((1.0 + 1.3 + (1.1 + 1.5) / 2) / 3)
        assert difference([*runs, *runs], [*other, *other]) == difference(runs, other)

    @pytest.mark.parametrize(("correlation", "better"), [(0.2, "all"), (0.8, "common")])
    def test_all_trainings_or_the_seeds_that_both_have(self, correlation: float, better: str) -> None:
        """Eight seeds against four of these: which difference is nearer the truth, 0, depends on
        how far the losses of one seed correlate. The error that is given covers it either way.
        """
        rng, errors, sure = random(12), np.empty((4000, 2)), 0
        for row in errors:
            first, second = rng.multivariate_normal([1, 1], 4e-4 * np.array([[1, correlation], [correlation, 1]]), 8).T
            found = difference(self.exact(*first), self.exact(*second[:4]))
            row[:] = found.value, (first - second)[:4].mean()
            sure += found.sure
        every, common = errors.std(0)
        assert ("all" if every < common else "common") == better
        assert sure / 4000 < 0.06

    def test_both_sources_add_up(self) -> None:
        documents, values = 0.3, [1.0, 1.8]
        found = estimate([(seed, Mean(value, documents)) for seed, value in enumerate(values)])
        assert found.standard_error == pytest.approx(math.hypot(documents, ordinary(values)))

    @pytest.mark.parametrize("counts", [(1, 1), (1, 3), (3, 1)])
    def test_with_one_training_its_noise_is_unknown(self, counts: tuple[int, int]) -> None:
        runs = [self.exact(*([1.0, 1.1, 1.2][:count])) for count in counts]
        assert not difference(runs[0], runs[1]).training_noise
        assert not estimate(self.exact(1.0)).training_noise

    def test_more_than_two_errors_is_sure(self) -> None:
        documents = 0.1
        for value, sure in ((0.21, True), (-0.21, True), (0.19, False), (math.nan, False)):
            assert difference([(0, Mean(value, documents))], [(0, Mean(0.0, 0.0))]).sure is sure

    @pytest.mark.parametrize("count", [2, 3, 4])
    @pytest.mark.parametrize("paired", [True, False])
    def test_few_seeds_without_a_true_difference_are_rarely_sure(self, count: int, paired: bool) -> None:
        """As rarely as two standard errors of a normal distribution, 4.6 of 100, whatever the
        number of seeds.
        """
        rng, wrong = random(9), 0
        for values in rng.normal(1, 0.02, (4000, 2, count)):
            first, second = self.exact(*values[0]), self.exact(*values[1])
            wrong += difference(first, second if paired else [(seed + 10, mean) for seed, mean in second]).sure
        assert wrong / 4000 < 0.06  # four standard errors of the count above 4.6
        assert not paired or wrong / 4000 > 0.032

    @pytest.mark.parametrize(
        ("sides", "most"),
        [
            ([(2, 1.0)], 0.073),
            ([(3, 1.0)], 0.05),
            ([(4, 1.0)], 0.05),
            ([(2, 4.0), (8, 1.0)], 0.073),
            ([(3, 3.0), (8, 1.0)], 0.05),
            ([(3, 1.0), (3, 1.0)], 0.05),
        ],
    )
    @pytest.mark.parametrize("more", [0.5, 1, 3, 10])
    def test_seeds_that_agree_by_luck_are_rarely_sure(
        self, sides: list[tuple[int, float]], most: float, more: float
    ) -> None:
        """In 100 comparisons without a true difference, of 60 documents, and of seeds whose error
        is so much more than that of the documents: what docs/lab.md says.

        Args:
            sides: seeds, and how they vary beside the other side's; one side where they are paired.
        """
        rng, wrong, draws = random(12), 0, 8000
        total = math.hypot(*(spread for _, spread in sides))
        truths = [(59, 1.0), *((seeds - 1, more * spread / total) for seeds, spread in sides)]
        for _ in range(draws):
            errors = [(truth * math.sqrt(rng.chisquare(freedom) / freedom), freedom) for freedom, truth in truths]
            wrong += Estimate(rng.normal(0, math.hypot(1.0, more)), tuple(errors), True).sure
        room = 3 * math.sqrt(most / draws)
        assert wrong / draws < most + room
        assert wrong / draws > 0.01

    def test_the_same_effect_in_every_seed_is_sure(self) -> None:
        noise = random(10).normal(0, 0.01, 3)
        assert difference(self.exact(*(1 + noise)), self.exact(1.2, 1.21, 1.19)).sure

    def test_degrees_of_freedom(self) -> None:
        """Those of documents and seeds, each; unpaired, of the seeds of both sides."""
        values, many = [1.0, 1.3, 1.1], by_document(random(11).normal(3, 1, (40, 4)))
        assert estimate(self.exact(*values)).errors == (
            (0.0, math.inf),
            (pytest.approx(np.std(values, ddof=1) / math.sqrt(3)), 2),
        )
        assert estimate([(0, many)]).errors == ((many.standard_error, 39),)
        other = [(seed + 5, Mean(value, 0.0)) for seed, value in enumerate(values)]
        assert [freedom for _, freedom in difference(self.exact(*values), other).errors] == [math.inf, 2, 2]
        assert estimate([(0, Mean(1.0, 0.1))]).errors == ((0.1, math.inf),)

    def test_noise_of_two_kinds_lies_outside_by_the_share_of_each(self) -> None:
        """One degree of freedom: 1 - 2 atan(t) / pi is outside; two: 1 - t / sqrt(2 + t^2)."""
        found = Estimate(1.0, ((0.3, 1), (0.4, 2)), True)
        assert found.standard_error == pytest.approx(0.5)
        t = 3.0
        one, two = 1 - 2 / math.pi * math.atan(t), 1 - t / math.sqrt(2 + t**2)
        assert found.outside(1.5) == pytest.approx(0.36 * one + 0.64 * two, abs=1e-9)
        assert found.outside(found.margin) == pytest.approx(1 - math.erf(math.sqrt(2)), abs=1e-9)
        assert not found.sure
        assert replace(found, value=1.01 * found.margin).sure
        assert (-replace(found, value=1.01 * found.margin)).sure

    def test_the_margin_is_that_of_student_where_there_is_one_noise(self) -> None:
        assert Estimate(0.0, ((0.0, math.inf), (0.2, 2)), True).margin == pytest.approx(0.2 * t_quantile(2))
        assert Estimate(0.0, ((0.2, math.inf),), False).margin == pytest.approx(0.4)
        assert Estimate(0.0, ((0.0, math.inf),), False).margin == 0
        assert math.isnan(Estimate(0.0, ((math.nan, math.inf), (0.2, 2)), True).margin)

    @pytest.mark.parametrize("errors", [((0.1, 2),), ((0.1, 39), (0.2, 2)), ((0.0, math.inf),)])
    def test_a_value_that_is_not_a_number_is_not_sure(self, errors: tuple[tuple[float, float], ...]) -> None:
        assert not Estimate(math.nan, errors, True).sure

    def test_two_standard_errors_cover_the_truth_whatever_the_noise_is_due_to(self) -> None:
        """Six seeds and twenty documents, crossed, both noisy: trained again on other seeds and
        documents, 95 of 100.
        """
        rng, hits, documents_alone = random(7), 0, 0
        for _ in range(400):
            hard, seeds = rng.normal(0, 1.0, 20), rng.normal(0, 0.05, (2, 6))
            paired_effect = rng.normal(0, 0.2, 20)  # what the second mechanism does on each document
            runs: list[list[tuple[int, Mean]]] = []
            for kind in range(2):
                losses = hard + kind * paired_effect + seeds[kind][:, None] + rng.normal(0, 0.02, (6, 20))
                runs.append([(seed, by_document(one[:, None])) for seed, one in enumerate(losses)])
            found = difference(*runs)
            hits += abs(found.value) < 2 * found.standard_error
            single = average([mean for _, mean in runs[0]]) - average([mean for _, mean in runs[1]])
            documents_alone += abs(found.value) < 2 * single.standard_error
        assert 0.92 < hits / 400 < 0.985
        assert documents_alone < hits, "the documents alone claim too much"


def test_documents_without_tokens_leave_one_document():
    """Of which no standard error can be had."""
    found = Mean.of([5.0, 0.0, 0.0], [10.0, 0.0, 0.0])
    assert found.value == 0.5
    assert math.isnan(found.standard_error)
