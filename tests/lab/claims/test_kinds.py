"""Kinds of statements with an estimator of their own, on made-up runs whose answer is known."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softfocus.lab.claims import figure, page
from softfocus.lab.claims.claim import Claim, Saves, parse
from softfocus.lab.claims.power_law import PowerLaw, families, saved
from softfocus.lab.claims.results import Results, Run
from softfocus.lab.claims.verdict import judge

SIZES = (100_000, 200_000, 400_000, 800_000)


def claim(rows: list[str], text: str) -> Claim:
    """A claim of these rows and one statement."""
    tables = "\n".join(f'{row} = {{ model.mechanism = "softmax" }}' for row in rows)
    head = 'title = "t"\nsource = "s"\nsays = "p"\n'
    return parse("made-up", f'{head}[rows]\n{tables}\n[[statements]]\nsays = "it"\n{text}')


@pytest.fixture
def a_run(fabricate: Any) -> Any:
    """A finished training of a row, with what is to be changed in its run.json."""

    def make(row: str, seed: int, loss: float = 1.0, **info: Any) -> Run:
        mechanism = row.partition("_")[0]
        entry = fabricate(mechanism, [loss], seed=seed, name=f"{row}-s{seed}", standard_error=0.0)
        return Run(
            row=row,
            info=entry.info.model_copy(update=info),
            recipe=entry.recipe,
            evaluation=None if info.get("status") == "diverged" else entry.evaluation,
        )

    return make


def results(runs: list[Run]) -> Results:
    return Results(claim="made-up", scale="toy", created=runs[0].info.started, runs=runs)


def verdict(made: Claim, runs: list[Run]) -> str:
    return judge(made, results(runs))[0].verdict


# saves


def rows_of(name: str) -> list[str]:
    return [f"{name}_{size}" for size in SIZES]


def saves(by: float = 0.0) -> Claim:
    ours, others = (str(rows_of(name)).replace("'", '"') for name in ("laser", "softmax"))
    text = f'kind = "saves"\nrow = {ours}\nthan = {others}\nby = {by}'
    return claim([*rows_of("laser"), *rows_of("softmax")], text)


@pytest.fixture
def by_size(a_run: Any) -> Any:
    """Trainings whose losses are power laws; ours need the given share of the parameters in each seed."""

    def make(*shares: float, slope: float = -0.1) -> list[Run]:
        runs = []
        for seed, share in enumerate(shares):
            for size in SIZES:
                noise = 1 + 0.05 * seed  # of a seed, which both families share
                loss = noise * 5 * size**slope
                runs.append(a_run(f"softmax_{size}", seed, loss, parameters=size))
                runs.append(a_run(f"laser_{size}", seed, loss * share**-slope, parameters=size))
        return runs

    return make


def test_a_power_law_is_found_again() -> None:
    law = PowerLaw.through(SIZES, [5 * size**-0.1 for size in SIZES])
    assert law.slope == pytest.approx(-0.1)
    assert math.exp(law.intercept) == pytest.approx(5)
    assert law.log_loss(1000) == pytest.approx(math.log(5 * 1000**-0.1))
    assert law.log_parameters(law.log_loss(12345)) == pytest.approx(math.log(12345))
    assert math.isnan(PowerLaw(0.0, 0.1).log_parameters(1.0))


@pytest.mark.parametrize(
    ("shares", "by", "expected"),
    [
        ((0.80, 0.82, 0.81), 0.0, "holds"),
        ((0.80, 0.82, 0.81), 0.1, "holds"),
        ((0.80, 0.82, 0.81), 0.3, "fails"),
        ((1.20, 1.22, 1.21), 0.0, "fails"),
        ((0.80, 1.20, 1.00), 0.0, "inconclusive"),
        ((0.80, 0.82), 0.0, "too few seeds"),
    ],
)
def test_saved_parameters_are_judged_over_seeds(by_size: Any, shares: Any, by: float, expected: str) -> None:
    assert verdict(saves(by), by_size(*shares)) == expected


def test_the_share_that_is_saved_is_exact(by_size: Any) -> None:
    """Log of the shares: their mean, and their standard error over three seeds."""
    shares = (0.7, 0.8, 0.9)
    both = families(results(by_size(*shares)), saves().statements[0])  # type: ignore[arg-type]
    assert both is not None
    found = saved(*both)
    assert found is not None
    assert found.value == pytest.approx(np.mean(np.log(shares)))
    assert found.standard_error == pytest.approx(np.std(np.log(shares), ddof=1) / math.sqrt(3))
    assert both[0].misfit == pytest.approx(0, abs=1e-9)
    assert both[0].exponent.value == pytest.approx(-0.1)
    middle, low, high = both[1].band(SIZES[1])
    seeds = np.log([(1 + 0.05 * seed) * 5 * SIZES[1] ** -0.1 for seed in range(3)])
    assert math.log(middle) == pytest.approx(np.mean(seeds))
    t = 4.526_55  # of two degrees of freedom, 95.45 % inside
    assert math.log(high / low) == pytest.approx(2 * t * np.std(seeds, ddof=1) / math.sqrt(3), rel=1e-4)


def test_no_power_law_no_verdict(by_size: Any, a_run: Any) -> None:
    assert verdict(saves(), by_size(0.8, 0.8, 0.8, slope=0.1)) == "inconclusive"  # larger is worse
    runs = by_size(0.8, 0.8, 0.8)
    lost = [a_run(run.row, 1, status="diverged") if run is runs[9] else run for run in runs]
    assert verdict(saves(), lost) == "inconclusive"
    judged = judge(saves(), None)[0]
    assert (judged.verdict, judged.shown.text) == ("not run", f"laser_{SIZES[0]} was not run")


def test_a_page_has_the_power_laws_and_their_figure(by_size: Any, tmp_path: Path) -> None:
    made, found = saves(), results(by_size(0.8, 0.8, 0.8))
    text = page.page(made, {"toy": found})
    assert "| laser | 4 | 0.10 M to 0.80 M | -0.1000 ± 0.0000 | 0.00% |" in text
    assert "-20.0% parameters" in text
    assert "![Loss over size](made-up/toy/sizes.png)" in text
    both = families(found, made.first(Saves))  # type: ignore[arg-type]
    assert both is not None
    figure.save_sizes(both, tmp_path / "sizes.png", title="t")
    assert (tmp_path / "sizes.png").stat().st_size > 5_000
