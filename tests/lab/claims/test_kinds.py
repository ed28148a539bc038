"""Kinds of statements with an estimator of their own, on made-up runs whose answer is known.

Over 400 lines: the cases share the made-up runs.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softfocus.lab.claims import figure, page, tables
from softfocus.lab.claims.claim import Claim, Saves, parse
from softfocus.lab.claims.parts import Part, corrected, decide
from softfocus.lab.claims.power_law import PowerLaw, families, saved
from softfocus.lab.claims.results import Results, Run
from softfocus.lab.claims.verdict import judge
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.means import Estimate, Mean, estimate
from softfocus.lab.inspect.results import Row as Attention
from softfocus.lab.inspect.results import Value
from softfocus.lab.report.figure import save_png
from softfocus.lab.run_folder.results import Classification, RecallRow, TaskRow, Tasks

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


# One comparison


@pytest.mark.parametrize("value", [0.1, -0.1, math.nan])
@pytest.mark.parametrize("error", [0.001, math.nan])
def test_what_is_not_a_number_decides_nothing(value: float, error: float) -> None:
    known = not math.isnan(value + error)
    part = decide(Estimate(value, ((error, 2),), True), 0.0, "")
    assert part.verdict == (("holds" if value < 0 else "fails") if known else "inconclusive")
    assert math.isnan(part.p_value) is not known


def test_one_document_decides_nothing() -> None:
    """Its standard error is not known."""
    runs = [(seed, Mean.of([2.0 + seed / 100], [1])) for seed in range(3)]
    assert decide(estimate(runs), 1.0, "").verdict == "inconclusive"
    assert decide(estimate(runs), 3.0, "").verdict == "inconclusive"


# Several comparisons


@pytest.mark.parametrize(
    ("p_values", "failing"),
    [
        ([0.04], 1),  # one comparison: two standard errors
        ([0.04, 1.0], 0),  # 0.04 * 2 > 0.0455
        ([0.02, 1.0], 1),
        ([0.01, 0.02, 0.04], 3),  # 0.03, 0.04, 0.04
        ([0.04, 0.01, 0.03], 1),  # 0.03, then 0.06: the rest is not looked at
        ([0.001, *[1.0] * 41], 1),
        ([0.0011, *[1.0] * 41], 0),  # of 42 the surest takes 0.0455 / 42 = 0.00108
    ],
)
def test_holms_correction_of_what_fails(p_values: list[float], failing: int) -> None:
    parts = [Part("fails" if p < 0.0455 else "holds", "", -1.5, p) for p in p_values]
    found = corrected(parts)
    verdicts = [part.verdict for part in found]
    surest = sorted(range(len(p_values)), key=p_values.__getitem__)[:failing]
    assert [number for number, verdict in enumerate(verdicts) if verdict == "fails"] == sorted(surest)
    assert verdicts.count("holds") == sum(p >= 0.0455 for p in p_values)
    lost = f" (fails alone, but not as one of {len(p_values)})"
    assert [part.text for part in found] == [lost if verdict == "inconclusive" else "" for verdict in verdicts]


def test_what_is_certain_takes_no_correction() -> None:
    """A row that diverged fails without a p-value, and the others are corrected for their own
    number.
    """
    parts = [Part("fails", "diverged"), Part("fails", "", -1.1, 0.02), Part("holds", "", 2.0, 1.0)]
    assert [part.verdict for part in corrected(parts)] == ["fails", "fails", "holds"]
    assert [part.verdict for part in corrected([*parts, *[Part("not run", "")] * 9])][:2] == ["fails", "inconclusive"]


def test_one_of_many_that_is_barely_higher_is_inconclusive(a_run: Any) -> None:
    """Differences of +1, +2 and +3: 3.46 standard errors, 7.4 % outside with two degrees of
    freedom. +9, +10 and +11: 17.3, 0.33 %.
    """
    for ours, count, expected in ((1, 1, "inconclusive"), (9, 1, "fails"), (9, 13, "fails"), (9, 14, "inconclusive")):
        others = [f"b{number}" for number in range(count)]
        names = str(others).replace("'", '"')
        runs = [a_run("a", seed, 100.0 + ours + seed) for seed in range(3)]
        runs += [a_run(name, seed, 100.0 if name == "b0" else 200.0) for name in others for seed in range(3)]
        made = claim(["a", *others], f'kind = "lower"\nrow = "a"\nthan = {names}')
        assert verdict(made, runs) == expected, (ours, count)


# Trainings that diverged

BETTER = 'row = "a"\nthan = "b"'
MEASURES: dict[str, tuple[str, dict[str, Any]]] = {
    "lower": (BETTER, {}),
    "sooner": (BETTER, {}),
    "classifies": (BETTER, {"classification": None}),
    "finds": (f'{BETTER}\nat = "1x"', {"passkeys": []}),
    "answers": (BETTER, {"tasks": None}),
}
"""Kinds that say which row is better: the rest of a statement, and what a run lacks that was not
measured.
"""


@pytest.fixture
def measured(a_run: Any) -> Any:
    """A row's three trainings with all that statements read; these seeds of them diverged."""

    def make(row: str, gone: tuple[int, ...] = ()) -> list[Run]:
        runs = []
        for seed in range(3):
            if seed in gone:
                runs.append(a_run(row, seed, status="diverged"))
                continue
            run = a_run(row, seed, validation_loss=[(50, 3.0), (100, 2.0)])
            zero = Value(mean=0.0, standard_error=0.0)
            names = (
                "zeros",
                "above_1e_9",
                "above_1e_3",
                "entropy",
                "uniform",
                "distance",
                "beyond",
                "below_1e_3",
                "below_1e_7",
            )
            answered = TaskRow(task="sciq", accuracy=0.5, standard_error=0.1, right=[0, 1])
            found = Classification(
                run=row, mechanism=row, train_length=run.info.train_length, seed=seed, corpus_key="k", length=64,
                accuracy=0.5, standard_error=0.1, documents=[1, 2], right=[1, 1], counts=[2, 2],
            )  # fmt: skip
            measures = {
                "classification": found,
                "passkeys": [recalled(run.info.train_length, 32)],
                "tasks": Tasks(run=row, harness="0", rows=[answered]),
                "attention": [Attention(length=128, layer=None, head=None, **dict.fromkeys(names, zero))],
            }
            runs.append(run.model_copy(update=measures))
        return runs

    return make


def test_shares_stand_in_a_table_with_their_spread(measured: Any) -> None:
    runs = measured("laser") + measured("softmax", gone=[2])
    (first, *_rest) = runs
    assert first.shares == {
        "right after fine-tuning": 0.5,
        "passkeys found at 1x": 0.5,
        "right in sciq": 0.5,
        "below 1e-3 at 1x": 0.0,
        "below 1e-7 at 1x": 0.0,
    }
    better = first.classification.model_copy(update={"accuracy": 0.7})
    runs[0] = first.model_copy(update={"classification": better})
    head, _, *lines = tables.shares(results(runs)).splitlines()
    assert head.startswith("| mean ± standard deviation over seeds | trained | right after fine-tuning | ")
    assert [line.split(" | ")[:3] for line in lines] == [
        ["| laser", "3 seeds", f"{np.mean([0.7, 0.5, 0.5]):.1%} ± {np.std([0.7, 0.5, 0.5], ddof=1):.1%}"],
        ["| softmax", "3 seeds, 1 diverged", "50.0% ± 0.0%"],
    ]


@pytest.mark.parametrize("kind", MEASURES)
def test_a_row_that_diverged_is_the_worse_one_in_every_kind(measured: Any, kind: str) -> None:
    rest, missing = MEASURES[kind]
    made, every = claim(["a", "b"], f'kind = "{kind}"\n{rest}'), (0, 1, 2)
    for gone, other, expected in (
        (every, (), "fails"), ((), every, "holds"), (every, every, "inconclusive"), ((1,), (), "inconclusive"),
        ((), (1,), "inconclusive"), (every, (1,), "inconclusive"),
    ):  # fmt: skip
        judged = judge(made, results(measured("a", gone) + measured("b", other)))[0]
        assert judged.verdict == expected, (gone, other)
        assert "diverged" in judged.shown.text
    if missing:
        first, *others = measured("b")
        lacking = [first.model_copy(update=missing), *others]
        judged = judge(made, results(measured("a", every) + lacking))[0]
        assert judged.verdict == "not run"
        assert judged.shown.text.startswith("b was not ")


def test_a_row_that_diverged_has_no_faint_probabilities(measured: Any) -> None:
    made = claim(["a"], 'kind = "faint"\nrow = "a"\nshare = 0.5\nbelow = "1e-3"')
    for gone, expected in (((), "fails"), ((0, 1, 2), "fails"), ((1,), "inconclusive")):
        judged = judge(made, results(measured("a", gone)))[0]
        assert judged.verdict == expected
        told = f"{len(gone)} of 3 trainings of a diverged" if gone else "a 1x: 0.0% ± 0.0% below 1e-3"
        assert judged.shown.text == told


def test_a_family_that_diverged_saves_nothing(by_size: Any, a_run: Any) -> None:
    """With some of its trainings there is no law, and no verdict."""
    runs = by_size(0.8, 0.8, 0.8)

    def without(start: str) -> str:
        return verdict(
            saves(),
            [a_run(r.row, r.info.seed, status="diverged") if r.row.startswith(start) else r for r in runs],
        )

    assert [without(start) for start in ("laser", "softmax", "", f"laser_{SIZES[0]}")] == [
        "fails", "holds", "inconclusive", "inconclusive"
    ]  # fmt: skip


# saves


def rows_of(name: str) -> list[str]:
    return [f"{name}_{size}" for size in SIZES]


def saves(by: float = 0.0) -> Claim:
    ours, others = (str(rows_of(name)).replace("'", '"') for name in ("laser", "softmax"))
    text = f'kind = "saves"\nrow = {ours}\nthan = {others}\nby = {by}'
    return claim([*rows_of("laser"), *rows_of("softmax")], text)


@pytest.fixture
def by_size(a_run: Any) -> Any:
    """Trainings whose losses are power laws; ours need the given share of the parameters in each
    seed.
    """

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


@pytest.mark.parametrize(("bend", "expected"), [(0.01, "holds"), (0.05, "inconclusive")])
def test_curves_that_miss_more_than_their_gap_decide_nothing(by_size: Any, bend: float, expected: str) -> None:
    """20 % fewer parameters are a gap of 2.2 % in the loss. Of losses that are higher and lower in
    turn by 1 % the curve misses nearly as much.
    """
    runs = by_size(0.80, 0.80, 0.80)
    for run in runs:
        sign = 1 if SIZES.index(run.info.parameters) in (0, 3) else -1
        row = run.evaluation.rows[0]
        run.evaluation.rows[:] = [row.model_copy(update={"loss": row.loss * (1 + sign * bend), "buckets": []})]
    made = saves()
    both = families(results(runs), made.statements[0])  # type: ignore[arg-type]
    assert both is not None
    assert both[0].misfit == pytest.approx(bend, rel=0.06)
    assert both[0].gap(both[1], 0.0) == pytest.approx(1 - 0.8**0.1, rel=1e-6)
    assert both[0].gap(both[1], 0.2) == pytest.approx(0, abs=1e-9)
    judged = judge(made, results(runs))[0]
    assert judged.verdict == expected
    assert "a gap of 2.21% between the curves" in judged.shown.text


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
    save_png(figure.draw_sizes(both, title="t"), tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").stat().st_size > 5_000


# sooner


def sooner(text: str = "") -> Claim:
    return claim(["laser", "softmax"], f'kind = "sooner"\nrow = "laser"\nthan = "softmax"\n{text}')


@pytest.fixture
def curves(a_run: Any) -> Any:
    """Standard attention has 2.0 at its end, after 100 steps; ours has it at the given steps, or
    never.
    """

    def make(*steps: float, speed: float = 1.0) -> list[Run]:
        runs = []
        for seed, step in enumerate(steps):
            runs.append(a_run("softmax", seed, validation_loss=[(50, 3.0), (100, 2.0)], tokens_per_second=1000.0))
            # a line that falls by 1 in 50 steps and has 2.0 at the step
            ours = [(at, 2.0 + (step - at) / 50) for at in (40, 100)]
            runs.append(a_run("laser", seed, validation_loss=ours, tokens_per_second=1000.0 * speed))
        return runs

    return make


@pytest.mark.parametrize(
    ("steps", "text", "expected"),
    [
        ((90, 91, 92), "", "holds"),
        ((90, 91, 92), "by = 0.05", "holds"),
        ((90, 91, 92), "by = 0.2", "fails"),
        ((70, 99, 92), "", "inconclusive"),
        ((110, 112, 114), "", "fails"),  # never within the budget
        ((110, 130, 190), "", "inconclusive"),  # neither, and by how far it is from it is all noise
        ((90, 91, 130), "", "inconclusive"),
        ((90, 91, 92, 90, 91, 92, 90, 102), "", "holds"),  # never in one of eight, by little
        ((110, 112, 114, 110, 112, 114, 110, 98), "", "fails"),  # ever in one of eight, by little
        ((90, 91), "", "too few seeds"),
    ],
)
def test_sooner_takes_the_share_of_steps(curves: Any, steps: Any, text: str, expected: str) -> None:
    assert verdict(sooner(text), curves(*steps)) == expected


def test_a_time_before_the_first_validation_has_no_loss(curves: Any) -> None:
    """The first one's stood for it: a loss that is reached later."""
    (part,) = judge(sooner("by = 0.7"), results(curves(30, 31, 32)))[0].parts
    assert (part.verdict, part.text) == ("not run", "laser has no validation loss as early as that")


def test_the_share_of_steps_and_of_time(curves: Any) -> None:
    steps = (80, 85, 90)
    (part,) = judge(sooner(), results(curves(*steps)))[0].parts
    # The line falls by 0.02 a step: 0.4, 0.3 and 0.2 below at the end
    assert "loss of laser after as many steps, less the best of softmax: -0.300 ± 0.058" in part.text
    assert "(median: that loss is reached after 85.0% of the steps)" in part.text
    (part,) = judge(sooner("by = 0.1"), results(curves(90, 130, 80)))[0].parts
    assert "loss of laser after 90% of the steps, less" in part.text
    assert "reached after 90.0% of the steps; in 1 of 3 trainings never)" in part.text
    (part,) = judge(sooner(), results(curves(110, 130, 80)))[0].parts
    assert "(median: that loss is never reached)" in part.text
    slow = curves(*steps, speed=0.5)
    assert verdict(sooner('of = "time"'), slow) == "fails"
    assert verdict(sooner('of = "time"'), curves(*steps, speed=2.0)) == "holds"
    (part,) = judge(sooner('of = "time"'), results(slow))[0].parts
    assert "loss of laser after as much time, less" in part.text
    assert verdict(sooner(), slow) == "holds"


@pytest.mark.parametrize("row", ["laser", "softmax"])
def test_sooner_in_time_needs_speeds(curves: Any, row: str) -> None:
    """Of all trainings. Without one there are steps still."""
    runs = curves(90, 91, 92)
    next(run for run in runs if run.row == row).info.tokens_per_second = None
    judged = judge(sooner('of = "time"'), results(runs))[0]
    assert (judged.verdict, judged.shown.text) == ("not run", f"{row} has no speed")
    assert verdict(sooner(), runs) == "holds"


def test_sooner_needs_curves_and_trainings(curves: Any, a_run: Any) -> None:
    assert verdict(sooner(), [a_run(row, seed) for row in ("laser", "softmax") for seed in range(3)]) == "not run"
    fine = curves(90, 90, 90)
    gone = [a_run(run.row, run.info.seed, status="diverged") if run.row == "laser" else run for run in fine]
    assert verdict(sooner(), gone) == "fails"


# steeper, of projections


def test_projections_have_gradients_of_their_own(a_run: Any) -> None:
    def made(value: float, query: float, seed: int, row: str) -> Run:
        return a_run(row, seed, projection_norms={"query": [(10, query)], "value": [(10, value)]})

    runs = [made(1.0, 3.0, seed, "laser") for seed in range(3)] + [made(2.0, 1.0, seed, "softmax") for seed in range(3)]

    def of(part: str) -> str:
        text = f'kind = "steeper"\nrow = "laser"\nthan = "softmax"\nof = "median"\npart = "{part}"'
        return verdict(claim(["laser", "softmax"], text), runs)

    assert [of(part) for part in ("query", "value", "key", "all")] == ["holds", "fails", "not run", "not run"]


# faint


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((0.85, 0.86, 0.87), "holds"), ((0.7, 0.71, 0.72), "fails"), ((0.7, 0.8, 0.9), "inconclusive")],
)
def test_small_probabilities(a_run: Any, shares: Any, expected: str) -> None:
    zero = Value(mean=0.0, standard_error=0.0)
    names = ("zeros", "above_1e_9", "above_1e_3", "entropy", "uniform", "distance", "beyond", "below_1e_7")
    runs = []
    for seed, share in enumerate(shares):
        row = Attention(
            length=128,
            layer=None,
            head=None,
            below_1e_3=Value(mean=share, standard_error=0.001),
            **dict.fromkeys(names, zero),
        )
        runs.append(a_run("softmax", seed).model_copy(update={"attention": [row]}))
    text = 'kind = "faint"\nrow = "softmax"\nshare = 0.8\nbelow = '
    assert verdict(claim(["softmax"], text + '"1e-3"'), runs) == expected
    assert verdict(claim(["softmax"], text + '"1e-7"'), runs) == "fails"
    assert verdict(claim(["softmax"], text + '"1e-3"\nat = "2x"'), runs) == "not run"


# attends


@pytest.fixture
def attending(a_run: Any) -> Any:
    """Three inspected trainings of a row, from their entropies at 1x and 16x."""

    def make(row: str, *entropies: tuple[float, float] | None) -> list[Run]:
        zero = Value(mean=0.0, standard_error=0.0)
        names = ("zeros", "above_1e_9", "above_1e_3", "below_1e_3", "below_1e_7", "uniform", "beyond")
        runs = []
        for seed, pair in enumerate(entropies):
            if pair is None:
                runs.append(a_run(row, seed, status="diverged"))
                continue
            shown = [
                Attention(
                    length=length,
                    layer=None,
                    head=None,
                    entropy=Value(mean=entropy, standard_error=0.003),
                    distance=Value(mean=10 * entropy, standard_error=0.004),
                    **dict.fromkeys(names, zero),
                )
                for length, entropy in zip((128, 2048), pair, strict=True)
            ]
            runs.append(a_run(row, seed).model_copy(update={"attention": shown}))
        return runs

    return make


def test_a_mean_of_the_attention_is_above_that_of_another(attending: Any) -> None:
    low, high = attending("a", (1.0, 2.0), (1.1, 2.0), (1.2, 2.2)), attending("b", (1.5, 2.0), (1.6, 2.2), (1.8, 2.1))
    text = 'kind = "attends"\nmean = "distance"\nrow = "b"\nthan = "a"'
    judged = judge(claim(["a", "b"], text), results(low + high))[0]
    assert judged.verdict == "holds"
    # Differences 5, 5 and 6 by seed: a spread of 1 / sqrt(3) over sqrt(3). All seeds read the same
    # documents, so the error of these does not shrink
    error = np.hypot(1 / 3, np.sqrt(2) * 0.004)
    assert judged.shown.text == f"mean distance in tokens at 1x: b 16.33, a 11.00: +5.33 ± {error:.2f}"
    turned = claim(["a", "b"], text.replace('row = "b"', 'row = "a"').replace('than = "a"', 'than = "b"'))
    assert verdict(turned, low + high) == "fails"
    assert verdict(claim(["a", "b"], text + '\nat = "16x"'), low + high) == "inconclusive"
    assert verdict(claim(["a", "b"], text + '\nat = "2x"'), low + high) == "not run"
    assert verdict(claim(["a", "b"], text + '\nsince = "2x"'), low + high) == "not run"
    assert verdict(claim(["a", "b"], text), low[:2] + high) == "too few seeds"


def test_a_mean_of_the_attention_grows(attending: Any) -> None:
    slow, fast = attending("a", (1.0, 1.5), (1.1, 1.7), (1.2, 1.7)), attending("b", (1.0, 3.0), (1.0, 3.1), (0.9, 3.0))
    text = 'kind = "attends"\nmean = "entropy"\nat = "16x"\nsince = "1x"\n'
    made = claim(["a", "b"], text + 'row = "b"\nthan = "a"')
    judged = judge(made, results(slow + fast))[0]
    assert judged.verdict == "holds"
    assert judged.shown.text.startswith("entropy in nats from 1x to 16x: b +2.067, a +0.533: +1.533 ± 0.0")
    alone = judge(claim(["a"], text + 'row = "a"'), results(slow))[0]
    assert alone.verdict == "holds"
    # Growths of 0.5, 0.6 and 0.5: their spread, and the errors of both lengths
    error = np.hypot(np.std([0.5, 0.6, 0.5], ddof=1) / np.sqrt(3), 0.003 * np.sqrt(2))
    assert alone.shown.text == f"entropy in nats from 1x to 16x: a +0.533 ± {error:.3f}"
    shrinks = attending("a", (1.5, 1.0), (1.7, 1.1), (1.7, 1.2))
    assert verdict(claim(["a"], text + 'row = "a"'), shrinks) == "fails"


def test_weights_of_a_training_that_diverged_decide_nothing(attending: Any) -> None:
    runs = attending("a", (1.0, 1.5), None, (1.2, 1.7)) + attending("b", (1.0, 3.0), (1.0, 3.1), (0.9, 3.0))
    judged = judge(claim(["a", "b"], 'kind = "attends"\nmean = "entropy"\nrow = "b"\nthan = "a"'), results(runs))[0]
    assert judged.verdict == "inconclusive"
    assert judged.shown.text == "0 of 3 trainings of b diverged, 1 of 3 of a"


def test_a_mean_that_is_never_negative_needs_something_to_be_above() -> None:
    with pytest.raises(LabError, match="never below 0: give `than`, `since` or both"):
        claim(["a"], 'kind = "attends"\nmean = "entropy"\nrow = "a"')


def test_a_page_shows_what_was_noted_over_training(curves: Any, tmp_path: Path) -> None:
    made, runs = sooner(), curves(90, 90, 90)
    for run in runs:
        run.info.gradient_norm = [(50, 4.0), (100, 2.0)]
        run.info.projection_norms = {"query": [(50, 0.25), (100, 0.75)]}
    found = results(runs)
    assert "![Over training](made-up/toy/training.png)" in page.page(made, {"toy": found})
    steeper = claim(["laser", "softmax"], 'kind = "steeper"\nrow = "laser"\nthan = "softmax"\npart = "query"')
    assert "| softmax | 4 | 3 | 0.5 |" in page.page(steeper, {"toy": found})
    drawn = figure.draw_training(found, title="t")
    assert [panel.get_title("left") for panel in drawn.axes] == ["validation loss", "gradient of the query projections"]
    assert [len(panel.lines) for panel in drawn.axes] == [6, 6]
    save_png(drawn, tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 5_000


def powers(a_run: Any, *powers: float | None) -> Results:
    """Three trainings of each power; their loss and gradient norm grow with it."""
    runs = []
    for power, seed in product(powers, range(3)):
        row, size = f"lssa_{power}", float(power or 0) + seed
        noted = {"mechanism": f"sharpened(lssa, {power})" if power else "lssa", "gradient_norm": [(1000, 1.0 + size)]}
        runs.append(a_run(row, seed, 1.0 + size, **noted))
    return results(runs)


def test_loss_and_gradient_over_the_power(a_run: Any, tmp_path: Path) -> None:
    found = powers(a_run, 31, 1, None, 3, 15)
    assert found.by_power == [(power, f"lssa_{power}") for power in (None, 1, 3, 15, 31)]
    drawn = figure.draw_powers(found, title="t")
    assert [tick.get_text() for tick in drawn.axes[-1].get_xticklabels()] == ["none", "1", "3", "15", "31"]
    assert [panel.get_title("left") for panel in drawn.axes] == [
        "validation loss (nats per token), as trained",
        "validation loss (nats per token), dynamic NTK",
        "gradient norm, before clipping",
    ]
    (means, _, _) = drawn.axes[0].containers[0]
    assert means.get_ydata().tolist() == pytest.approx([2.0, 3.0, 5.0, 17.0, 33.0])
    largest = [line for line in drawn.axes[-1].lines if line.get_label() == "largest after the warm-up"]
    assert largest[0].get_ydata().tolist() == pytest.approx([2.0, 3.0, 5.0, 17.0, 33.0])
    save_png(drawn, tmp_path / "powers.png")
    assert (tmp_path / "powers.png").stat().st_size > 5_000
    made = claim(found.rows, 'kind = "trains"\nrow = "lssa_1"')
    assert "over the power](made-up/toy/powers.png)" in page.page(made, {"toy": found})


def test_a_power_that_diverged_leaves_a_gap(a_run: Any) -> None:
    found = powers(a_run, None, 1, 3, 15, 31)
    kept = [run for run in found.runs if run.row != "lssa_31"]
    lost = [a_run("lssa_31", seed, mechanism="sharpened(lssa, 31)", status="diverged") for seed in range(3)]
    drawn = figure.draw_powers(results(kept + lost), title="t")
    (means, _, _) = drawn.axes[0].containers[0]
    assert np.isfinite(np.asarray(means.get_ydata(), dtype=float)).tolist() == [True, True, True, True, False]


def test_few_powers_have_no_figure_of_their_own(a_run: Any) -> None:
    found = powers(a_run, None, 1, 3, 15)
    assert found.by_power == []
    assert "over the power" not in page.page(claim(found.rows, 'kind = "trains"\nrow = "lssa_1"'), {"toy": found})


# finds


def recalled(length: int, right: int, of: int = 64) -> RecallRow:
    share = right / of
    return RecallRow(
        length=length, grown=False, window=None, nearest=1, reach=None, chance=1e-5, sequences=of, answers=of,
        accuracy=share, standard_error=(share * (1 - share) / of) ** 0.5, complete=share, complete_error=0.0,
        by_distance=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(60, 20), (62, 22), (58, 18)], "holds"),
        ([(20, 60), (22, 62), (18, 58)], "fails"),
        ([(33, 32), (30, 34), (35, 31)], "inconclusive"),
        ([(0, 0), (0, 0), (0, 0)], "inconclusive"),  # nobody found any: nobody found more
        ([(64, 64), (64, 64), (64, 64)], "inconclusive"),
        ([(64, 0), (64, 0), (64, 0)], "holds"),
    ],
)
def test_shares_of_passkeys(a_run: Any, found: Any, expected: str) -> None:
    runs = []
    for seed, both in enumerate(found):
        for row, right in zip(("lssar", "softmax"), both, strict=True):
            # At the training length all is found; only beyond it is asked about
            run = a_run(row, seed)
            length = run.info.train_length
            found_keys = [recalled(length, 64), *(recalled(far * length // 2, right) for far in (3, 8))]
            runs.append(run.model_copy(update={"passkeys": found_keys}))
    text = claim(["lssar", "softmax"], 'kind = "finds"\nrow = "lssar"\nthan = "softmax"\nat = ["4x"]')
    assert verdict(text, runs) == expected
    nearer = claim(["lssar", "softmax"], 'kind = "finds"\nrow = "lssar"\nthan = "softmax"\nat = "1.5x"')
    assert verdict(nearer, runs) == expected
    share = np.mean([first for first, _ in found]) / 64
    assert f"4x: lssar {share:.1%}, softmax" in judge(text, results(runs))[0].shown.text
    assert verdict(text, [*runs[:5], a_run("softmax", 2)]) == "not run"
    elsewhere = claim(["lssar", "softmax"], 'kind = "finds"\nrow = "lssar"\nthan = "softmax"\nat = "8x"')
    assert verdict(elsewhere, runs) == "not run", "nobody was asked at 8x"


# classifies


@pytest.mark.parametrize(
    ("better", "expected"),
    [((6, 7, 8), "holds"), ((-6, -7, -8), "fails"), ((-6, 0, 8), "inconclusive")],
)
def test_accuracies_are_paired_by_document_and_seed(a_run: Any, better: Any, expected: str) -> None:
    """Documents differ far more than the two models do, in the same way."""

    def made(row: str, seed: int, more: int) -> Run:
        right = [40 + more, 80 + more, 60 + more]
        found = Classification(
            run=row,
            mechanism=row,
            train_length=64,
            seed=seed,
            corpus_key="k",
            length=64,
            accuracy=sum(right) / 300,
            standard_error=0.1,
            documents=[1, 2, 3],
            right=right,
            counts=[100] * 3,
        )
        return a_run(row, seed).model_copy(update={"classification": found})

    runs = [made("softmax", seed, 0) for seed in range(3)] + [made("laser", s, more) for s, more in enumerate(better)]
    text = claim(["laser", "softmax"], 'kind = "classifies"\nrow = "laser"\nthan = "softmax"')
    assert verdict(text, runs) == expected
    assert f"{(60 + np.mean(better)) / 100:.1%}, softmax 60.0% right" in judge(text, results(runs))[0].shown.text
    assert verdict(text, [*runs[:5], a_run("laser", 2)]) == "not run"


# answers


@pytest.mark.parametrize(
    ("better", "expected"),
    [((10, 12, 14), "holds"), ((-10, -12, -14), "fails"), ((-10, 0, 16), "inconclusive")],
)
def test_accuracies_of_tasks_are_paired_by_question_and_seed(a_run: Any, better: Any, expected: str) -> None:
    """Tasks count alike. Each has questions that both models answer, and others that neither does:
    unpaired they would give an error of 4.1 points.
    """

    def made(row: str, seed: int, more: int, harness: str = "0") -> Run:
        answered = {"arc_easy": (100 + more, 200), "sciq": (30, 100)}
        rows = [
            TaskRow(task=task, accuracy=n / of, standard_error=0.1, right=[1] * n + [0] * (of - n))
            for task, (n, of) in answered.items()
        ]
        return a_run(row, seed).model_copy(update={"tasks": Tasks(run=row, harness=harness, rows=rows)})

    runs = [made("softmax", seed, 0) for seed in range(3)] + [made("laser", s, more) for s, more in enumerate(better)]
    text = claim(["laser", "softmax"], 'kind = "answers"\nrow = "laser"\nthan = "softmax"')
    judged = judge(text, results(runs))[0]
    assert judged.verdict == expected
    gained = np.mean([[(at < 100 + more) - (at < 100) for at in range(200)] for more in better], axis=0)
    questions = math.sqrt(300 / 299 * np.square((gained - gained.mean()) / 400).sum())
    seeds = np.std(better, ddof=1) / 400 / math.sqrt(3)
    assert f"laser {0.4 + np.mean(better) / 400:.1%}, softmax 40.0% right" in judged.shown.text
    assert judged.shown.text.endswith(f"± {math.hypot(questions, seeds):.1%}")
    assert verdict(text, [*runs[:5], a_run("laser", 2)]) == "not run"
    other = [made("laser", seed, more, "1") for seed, more in enumerate(better)]
    assert verdict(text, [*runs[:3], *other]) == "inconclusive", "other questions, for all that is known"
