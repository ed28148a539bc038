"""docs/claims.md on verdicts with each row at its best learning rate: they are those of the
committed results.
"""

import json
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

import pytest

from softfocus.lab.claims.claim import load as load_claim
from softfocus.lab.claims.claim import shipped
from softfocus.lab.claims.page import standing
from softfocus.lab.claims.parts import together
from softfocus.lab.claims.results import Results, Run
from softfocus.lab.claims.results import read as read_claim
from softfocus.lab.claims.verdict import Judged, judge
from softfocus.lab.report.results import Report, read_as

from .committed import RESULTS, ROOT, by_row, claim, lost_runs, minus
from .tables import shown, table, tables_of
from .test_claims_rates import PREFIXES
from .test_results import TIMES, split

PAGE = (ROOT / "docs/claims.md").read_text()
TEXT = " ".join(PAGE.split())
SAME = {f"{row}_{ending}": row for row in ("softmax", "laser") for ending in ("recorded", "2_layers")}
"""Rows that train the model of another row."""
Rates = dict[float, dict[int, Run]]
"""By learning rate and seed."""


def rate_of(run: Run) -> float:
    return tomllib.loads(run.recipe)["train"]["learning_rate"]


def swept_runs() -> Iterator[Run]:
    """What was trained at other rates than the claims'."""
    for folder in sorted(RESULTS.glob("*-learning-rates")):
        kind = folder.name.removesuffix("-learning-rates")
        for path in sorted(folder.rglob("results.json")):
            if "claim" in json.loads(path.read_text()):
                yield from read_claim(path).runs
                continue
            found = read_as(Report, path)
            held = [(one.info, one.recipe, one.evaluation) for one in found.runs]
            for info, recipe, evaluation in held:
                row, _ = split(info.name.rpartition("-s")[0], TIMES)
                row = PREFIXES.get(kind, "") + row + ("_lamb" if kind == "lamb" else "")
                yield Run(row=row, info=info, recipe=recipe, evaluation=evaluation)


@cache
def swept() -> dict[str, Rates]:
    """The same, by row: the first of each seed. A training that diverged has no recipe in a
    comparison, and is left out.
    """
    found: dict[str, Rates] = defaultdict(lambda: defaultdict(dict))
    for run in swept_runs():
        found[run.row][rate_of(run)].setdefault(run.info.seed, run)
    return found


class Best(NamedTuple):
    """A claim at the scale toy, with each row at its own rate, and at its best one."""

    own: list[Judged]
    best: list[Judged]
    moved: dict[str, int]
    """Rows with another best rate, and with how many seeds."""
    single: list[str]
    """Rows that were trained at one rate."""


def loss(runs: dict[int, Run], seeds: set[int]) -> float:
    """The mean loss at the training length; infinite where a training diverged."""
    return fmean(
        runs[seed].evaluation.rows[0].loss if runs[seed].evaluation else float("inf")  # type: ignore[union-attr]
        for seed in seeds
    )


def at_rates(row: str, own: dict[int, Run]) -> Rates:
    """A claim's own runs of a row, and those at other rates."""
    rates: Rates = {rate_of(next(iter(own.values()))): own}
    for rate, some in swept().get(SAME.get(row, row), {}).items():
        rates.setdefault(rate, {seed: run.model_copy(update={"row": row}) for seed, run in some.items()})
    return rates


def lowest(rates: Rates) -> float:
    """The rate with the lowest mean loss, over the seeds that all rates have."""
    seeds = set.intersection(*(set(some) for some in rates.values()))
    return min(rates, key=lambda rate: loss(rates[rate], seeds))


@cache
def best_of(name: str) -> Best:
    own, runs, moved, single = claim(name), [], {}, []
    for row in own.rows:
        first = own.of(row)
        rates = at_rates(row, {run.info.seed: run for run in first})
        best = lowest(rates)
        if best != rate_of(first[0]):
            moved[row] = len(rates[best])
        elif len(rates) == 1:
            single.append(row)
        runs += rates[best].values()
    known = load_claim(name)
    others = Results(claim=name, scale="toy", created=own.created, runs=runs)
    return Best(judge(known, own), judge(known, others), moved, single)


def judged_at_toy() -> list[str]:
    """The claims with a verdict from trainings."""
    paths = ((name, RESULTS / "claims" / name / "toy/results.json") for name in shipped())
    there = [name for name, path in paths if path.exists()]
    return [name for name in there if standing(load_claim(name), "toy", claim(name)) != "not testable here"]


def counted(judged: Sequence[Judged]) -> str:
    counts = Counter(one.verdict for one in judged)
    return ", ".join(f"{counts[kind]} {kind}" for kind in ORDER if counts[kind])


ENCODERS = re.compile("vit_|bert_|conformer_")
ORDER = "holds", "fails", "inconclusive", "too few seeds"


def best_rates_table() -> str:
    rows = []
    for name in judged_at_toy():
        found = best_of(name)
        moved = ", ".join(f"`{row}`" for row in found.moved)
        rows.append([f"`{name}`", counted(found.own), counted(found.best), moved])
    columns = "statements at the claim's rate", "each row at its best rate", "rows with another best rate"
    return table(["claim", *columns], rows)


EDGES = (1e-3, 16e-3, 32e-3, 64e-3)


def edge_rows() -> dict[str, Rates]:
    """Rows of decoders that were trained beyond the claims' three rates, with AdamW."""
    rates = {row: found for row, found in swept().items() if not (ENCODERS.match(row) or row.endswith("_lamb"))}
    return {row: rates[row] for row in all_rows() if row in rates and set(EDGES) & set(rates[row])}


@cache
def all_rows() -> dict[str, dict[int, Run]]:
    """The claims' own runs of each row, in the claims' order."""
    found: dict[str, dict[int, Run]] = {}
    for name in judged_at_toy():
        for row in claim(name).rows:
            found.setdefault(row, {run.info.seed: run for run in claim(name).of(row)})
    return found


def best_rate(row: str) -> float:
    """Of a row's claim with the first runs."""
    return lowest(at_rates(row, all_rows()[row]))


def at_an_edge() -> set[str]:
    """Rows of decoders whose best rate of the claim's, half and twice it is the lowest or the
    highest.
    """
    found = set()
    for row, own in all_rows().items():
        if ENCODERS.match(row) or row.endswith("_lamb"):
            continue
        rates = {4e-3: own, **{rate: some for rate, some in swept().get(row, {}).items() if rate not in EDGES}}
        seeds = set.intersection(*(set(some) for some in rates.values()))
        losses = {rate: loss(some, seeds) for rate, some in rates.items()}
        if len(rates) == 3 and min(losses.values()) < losses[4e-3]:
            found.add(row)
    return found


def edges() -> dict[str, dict[float, float]]:
    """The losses of seed 0 by learning rate, as the table has them."""
    rates = {row: {4e-3: all_rows()[row], **found} for row, found in edge_rows().items()}
    return {row: {rate: round(loss(runs, {0}), 3) for rate, runs in found.items()} for row, found in rates.items()}


def edges_table() -> str:
    names = {rate * 1e-3: f"{rate}e-3" for rate in (1, 2, 4, 8, 16, 32, 64)}
    rows = (
        [f"`{row}`", *(f"{losses[rate]:.3f}" if rate in losses else "" for rate in names)]
        for row, losses in edges().items()
    )
    return table(["row", *names.values()], rows)


def verdict(judged: Sequence[Judged]) -> str:
    return together([one.verdict for one in judged])


def test_what_is_said_of_verdicts_at_the_best_rates():
    found = {name: best_of(name) for name in judged_at_toy()}
    decided = {name: both for name, both in found.items() if verdict(both.own) in ("holds", "fails")}
    moved = {name: verdict(both.best) for name, both in decided.items() if verdict(both.best) != verdict(both.own)}
    kept = len(decided) - len(moved)
    assert f"**Of {len(decided)} verdicts that are decided at the claims' rates {kept} are the same" in TEXT
    assert moved == {"laser-bert": "inconclusive"}
    newly = {name for name, both in found.items() if name not in decided and verdict(both.best) in ("holds", "fails")}
    assert newly == {"laser-qk-norm"}
    assert not any(both.single for both in found.values()), "rows with one rate"
    rates = {row: at_rates(row, own) for row, own in all_rows().items()}
    twice = {row for row, some in rates.items() if len(some) == 2} - {"scenario_ii"}
    assert "scenario_ii-twice-s0" in lost_runs("table-learning-rates"), "its third rate: it diverged"
    assert twice == {f"laser{shift}_x{times}" for shift in ("", "_no_shift") for times in (8, 32)}
    assert all(set(rates[row]) == {2e-3, 4e-3} for row in twice), "two rates alone"
    assert all(len(some[lowest(some)]) >= 3 for some in rates.values()), "three seeds at the best rate"
    holding = {name for name, both in found.items() if verdict(both.own) == "holds"}
    known = {"laser-bert", "laser-vit", "laser-lamb", "laser-temperature", "laser-differential"}
    assert holding == known | {"laser-steps", "laser-no-shift", "softplus-vision", "laser-attenuation"}
    assert best_rate("softmax") == 4e-3, "of laser-attenuation, at the claim's rate"
    untrained = {name for name in shipped() if (one := load_claim(name)).statements and one.rows and name not in found}
    untrained = {name for name in untrained if standing(load_claim(name), "toy", None) == "not run"}
    assert f"**Not trained yet** are {' and '.join(f'`{name}`' for name in sorted(untrained))}." in TEXT
    for name in known | {"laser-steps"}:
        rows = {row for one in load_claim(name).statements for row in (*one.row, *one.than)}  # type: ignore[union-attr]
        swept_rows = [swept()[SAME.get(row, row)] for row in rows]
        others = [some for found in swept_rows for rate, some in found.items() if rate not in EDGES]
        assert all({0, 1, 2} <= set(some) for some in others), name


def test_what_is_said_of_larger_values_without_the_shift():
    bare, shifted = (at_rates(row, all_rows()[row]) for row in ("laser_no_shift_x8", "laser_x8"))
    assert all(run.diverged for run in bare[4e-3].values())
    losses = {f"{loss(rates[2e-3], {0}):.3f}" for rates in (bare, shifted)}
    (both,) = losses
    assert f"At 2e-3 its loss is that with the shift, {both} (seed 0)." in TEXT
    assert lowest(shifted) == 4e-3
    best = best_of("laser-no-shift").best
    assert [one.verdict for one in best] == ["holds"] * 4, "each at its best rate"


def test_what_is_said_of_statements_at_the_best_rates():
    def of(name: str, says: str) -> list[Judged]:
        (place,) = (n for n, one in enumerate(best_of(name).own) if says in one.statement.says)
        return [judged[place] for judged in (best_of(name).own, best_of(name).best)]

    for name, says, at_best in (
        ("softplus-table-4", "LSSAR with p = 15 stays nearly flat to 8x", "holds"),
        ("softplus-figure-2-softmax", "rises sharply at 2x", "fails"),
    ):
        assert [one.verdict for one in of(name, says)] == ["inconclusive", at_best]
    gradients = of("softplus-figure-2-softmax", "gradient is over ten times")
    assert {one.verdict for one in gradients} == {"inconclusive"}
    own, best = (re.search(r"has ([\d.]+) times the norm", one.shown.text)[1] for one in gradients)  # type: ignore[index]
    assert f"has {own} times the norm of that of LSSA with p = 15 at 4e-3, and {best} times at the best rates" in TEXT


def test_what_is_said_of_rates_beyond_the_three():
    rows = edges()
    assert set(rows) == at_an_edge()
    known = {row: {rate: one for rate, one in losses.items() if rate not in EDGES} for row, losses in rows.items()}
    for row, losses in known.items():
        best = min(losses, key=lambda rate: losses[rate])
        assert best in (2e-3, 8e-3), f"{row}: no rate beyond is called for"
        assert (1e-3 if best == 2e-3 else 16e-3) in rows[row]
    gains = {
        row: min(known[row].values()) - min(losses[rate] for rate in EDGES if rate in losses)
        for row, losses in rows.items()
    }
    better = {row: gain for row, gain in gains.items() if gain > 0}
    assert better.keys() == {"qk_norm_laser", "llama_qk_norm_laser"}
    text = f"**Of {len(rows)} rows whose best of three rates is the lowest or the highest, two have a lower loss beyond"
    gained = "by {:.3f} and, in a Llama, by {:.3f} with seed 0".format(*(better[row] for row in sorted(better)[::-1]))
    assert f"{text} it: LASER with QK-norm, {gained}. Over three seeds" in TEXT
    for losses in rows.values():
        assert max(losses) > min(losses, key=lambda rate: losses[rate]) > min(losses), "no row is best at an edge"
    swept_groups = by_row("toy-learning-rates")
    apart = minus(swept_groups, "qk_norm_laser-four-times", "qk_norm_laser-twice")
    assert not apart.sure
    assert f"Its loss at 16e-3 minus that at 8e-3 is {shown(apart, '+')}, inconclusive." in TEXT
    llamas = by_row("llama-learning-rates")
    llama = minus(llamas, "llama_qk_norm_laser-eight-times", "llama_qk_norm_laser-twice")
    assert not llama.sure
    assert f"Its loss at 32e-3 minus that at 8e-3 is {shown(llama, '+')}, inconclusive." in TEXT
    lost = lost_runs(*(f"{kind}-learning-rates" for kind in ("table", "toy", "depth", "llama")))
    beyond = ("-quarter", "-four-times", "-eight-times", "-sixteen-times")
    assert not any(name.rpartition("-s")[0].endswith(beyond) for name in lost), "none diverged"
    encoders = [row for row in all_rows() if ENCODERS.match(row)]
    assert not any(best_rate(row) in (min(swept()[row]), max(swept()[row])) for row in encoders)
    assert "**Of encoders** no row is best at its lowest or its highest rate." in TEXT
    assert [set(swept()["qk_norm_laser"][rate]) for rate in (8e-3, 16e-3)] == [{0, 1, 2}] * 2
    assert best_rate("qk_norm_laser") == 16e-3
    assert best_of("laser-qk-norm").moved == {"qk_norm_laser": 3}
    assert best_rate("llama_qk_norm_laser") == 32e-3
    assert set(swept()["llama_qk_norm_laser"][32e-3]) == {0, 1, 2}


TABLES = {"best_rates": best_rates_table, "edges": edges_table}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_the_committed_one(name):
    assert tables_of(PAGE)[name] == TABLES[name](), f"docs/claims.md should show:\n{TABLES[name]()}"
