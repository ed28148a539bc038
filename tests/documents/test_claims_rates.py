"""docs/claims.md on the learning rates of powers, of depths and of a fine-tuning: it shows the
committed results.
"""

import re
from itertools import product

import pytest

from softfocus.lab.claims.claim import load as load_claim
from softfocus.lab.claims.results import read as read_claim
from softfocus.lab.claims.verdict import judge
from softfocus.lab.report.points import Cell, Group, cell

from .committed import HERE, RESULTS, ROOT, by_row, claim, lost_runs, minus, of_seeds
from .tables import said, shown_loss, table, tables_of

PAGE = (ROOT / "docs/claims.md").read_text()
TEXT = " ".join(PAGE.split())
RATES = ("2e-3", "4e-3", "8e-3")
SWEPT = ("table-learning-rates", "toy-learning-rates", "depth-learning-rates")
POWERS = (1, 2, 3, 5, 7, 15, 31, 50, 100)


def rates_of(swept: dict[str, Group], own: Group | None, row: str, at: tuple[float, str] = HERE) -> list[Cell | None]:
    """A row with seed 0 at half the claim's rate, at it and at twice that; None: diverged."""
    assert own is not None
    known = of_seeds(swept | {"own": own}, {0})
    names = (f"{row}-half", "own", f"{row}-twice")
    assert all(name in known or f"{name}-s0" in lost_runs(*SWEPT) for name in names), "a missing run diverged"
    return [cell(known[name], *at) if name in known else None for name in names]


def powers(at: tuple[float, str] = HERE) -> dict[int, list[list[Cell | None]]]:
    """Of figure 2: (softmax, LSSA), a row a power."""
    swept = by_row("table-learning-rates") | by_row("toy-learning-rates")
    softmax, lssa = claim("softplus-figure-2-softmax"), claim("softplus-figure-2-lssa")
    ours = {power: "lssar" if power == 15 else f"lssar_p{power}" for power in POWERS}
    return {
        power: [
            rates_of(swept, softmax.group(f"softmax_p{power}"), f"softmax_p{power}", at),
            rates_of(swept, lssa.group(ours[power]), ours[power], at),
        ]
        for power in POWERS
    }


def depths() -> dict[int, list[list[Cell | None]]]:
    """Of laser-depths: (softmax, LASER), a row a depth. Two layers are the scale's own."""
    deep, own = by_row("depth-learning-rates"), claim("laser-depths")
    shallow = by_row("toy-learning-rates")
    for row in ("softmax", "laser"):
        deep |= {f"{row}_2_layers-{rate}": shallow[f"{row}-{rate}"] for rate in ("half", "twice")}
    return {
        layers: [
            rates_of(deep, own.group(name), name) for name in (f"softmax_{layers}_layers", f"laser_{layers}_layers")
        ]
        for layers in (1, 2, 3, 4, 6)
    }


def two_by_rates(first: str, names: tuple[str, str], rows: dict[int, list[list[Cell | None]]]) -> str:
    header = [first, *(f"{name}, {rate}" for name in names for rate in RATES)]
    return table(header, ([str(row), *map(loss_or_diverged, both[0] + both[1])] for row, both in rows.items()))


def loss_or_diverged(one: Cell | None) -> str:
    return "diverged" if one is None else f"{one.loss:.3f}"


LAYER_NORM = {
    "softmax": "softmax", "laser": "LASER", "qk_norm": "softmax with QK-norm", "qk_norm_laser": "LASER with QK-norm",
}  # fmt: skip


def layer_norm() -> dict[str, dict[str, Group]]:
    """Of laser-qk-layer-norm: rows by learning rate, three seeds."""
    own = {rate: RESULTS / "qk-layer-norm-learning-rates" / rate / "results.json" for rate in ("2e-3", "8e-3")}
    read = {rate: claim("laser-qk-layer-norm") if rate == "4e-3" else read_claim(own[rate]) for rate in RATES}
    assert [one.overrides for one in read.values()] == [
        [f"train.learning_rate={x}"] if x else [] for x in (0.002, 0, 0.008)
    ]
    return {rate: {row: one.group(f"stablelm_{row}") for row in LAYER_NORM} for rate, one in read.items()}


def layer_norm_table() -> str:
    by = layer_norm()
    return table(
        ["QK-norm by LayerNorm", *RATES],
        ([name, *(shown_loss(cell(by[rate][row], *HERE)) for rate in RATES)] for row, name in LAYER_NORM.items()),
    )


TABLES = {
    "layer_norm_rates": layer_norm_table,
    "power_rates": lambda: two_by_rates("p", ("softmax", "LSSA"), powers()),
    "depth_rates": lambda: two_by_rates("layers", ("softmax", "LASER"), depths()),
}


@pytest.mark.parametrize("mark", TABLES)
def test_the_tables_are_the_committed_ones(mark):
    assert tables_of(PAGE)[mark] == TABLES[mark](), f"docs/claims.md should show:\n{TABLES[mark]()}"


def test_what_is_said_of_powers():
    rates = powers()
    losses = {power: [[round(one.loss, 3) for one in cells] for cells in both] for power, both in rates.items()}
    assert len(losses) == 9, "none diverged"
    assert all(plain > ours for both in losses.values() for plain, ours in zip(*both, strict=True))
    best = {power: softmax.index(min(softmax)) for power, (softmax, _) in losses.items()}
    assert [power for power, at in best.items() if at == 0] == [power for power in POWERS if power >= 3]
    assert all(lssa.index(max(lssa)) == 0 for _, lssa in losses.values())
    far = powers((8.0, "dynamic NTK"))
    lowest = [min(POWERS, key=lambda power, n=n: far[power][1][n].loss) for n in range(3)]
    assert lowest == [15, 15, 50]
    assert f"it is lower with p = 50, by {far[15][1][2].loss - far[50][1][2].loss:.3f}." in TEXT


def test_what_is_said_of_depths():
    rates = {layers: [[round(one.loss, 3) for one in cells] for cells in both] for layers, both in depths().items()}
    leads = {layers: [a - b for a, b in zip(*both, strict=True)] for layers, both in rates.items()}
    assert all(lead[2] == max(lead) for lead in leads.values())
    assert min(min(lead) for lead in leads.values()) > 0
    assert f"With six layers it is {leads[6][0]:.3f} at 2e-3 and {leads[6][1]:.3f} at 4e-3." in TEXT
    best = {(layers, n): cells.index(min(cells)) for layers, both in rates.items() for n, cells in enumerate(both)}
    assert [row for row, at in best.items() if at != 1] == [(1, 1)]


@pytest.mark.parametrize("rate", RATES)
def test_the_rates_of_the_fine_tuning_are_the_committed_ones(rate):
    again = RESULTS / "classification-learning-rates" / rate / "results.json"
    found = claim("laser-classification") if rate == "4e-3" else read_claim(again)
    assert found.overrides == ([] if rate == "4e-3" else [f"train.learning_rate={float(rate)}"])
    assert {(run.row, run.info.seed) for run in found.runs} == set(product(("softmax", "laser"), range(3)))
    (judged,) = judge(load_claim("laser-classification"), found)
    said = re.fullmatch(r"laser (.*)%, softmax (.*)% right: (.*)% ± (.*)%", judged.shown.text)
    laser, softmax, apart, error = said.groups()
    row = f"| {rate} | {softmax} % | {laser} % | {apart} % ± {error} %, {judged.verdict} |"
    assert row in PAGE, row


def test_what_is_said_of_layer_norm_at_other_rates():
    by = layer_norm()
    assert all(len(group.evaluations) == 3 for rows in by.values() for group in rows.values())
    leads = [minus(by[rate], "qk_norm_laser", "qk_norm") for rate in RATES]
    lowered = [minus(by[rate], "qk_norm_laser", "laser") for rate in RATES]
    for found, text in ((leads, "LASER minus softmax, both with it: "), (lowered, "LASER with it minus LASER: ")):
        each = ", ".join(f"{said(one)} at {rate}" for one, rate in zip(found, RATES, strict=True))
        assert f"{text}{each}." in TEXT, f"{text}{each}."
