"""docs/claims.md on the learning rates of powers, depths and a fine-tuning: it shows the committed
results.
"""

import json

from softfocus.lab.report.points import Cell, Group, cell

from .committed import HERE, RESULTS, ROOT, by_row, claim, of_seeds
from .tables import over_seeds, table

PAGE = (ROOT / "docs/claims.md").read_text()
TEXT = " ".join(PAGE.split())
RATES = ("2e-3", "4e-3", "8e-3")
POWERS = (1, 2, 3, 5, 7, 15, 31, 50, 100)


def rates_of(swept: dict[str, Group], own: Group | None, row: str) -> list[Cell | None]:
    """A row with seed 0 at half the claim's rate, at it and at twice that; None: diverged."""
    assert own is not None
    known = of_seeds(swept | {"own": own}, {0})
    groups = (known.get(name) for name in (f"{row}-half", "own", f"{row}-twice"))
    return [None if group is None else cell(group, *HERE) for group in groups]


def powers() -> dict[int, list[list[Cell | None]]]:
    """Of figure 2: (softmax, LSSA), a row a power."""
    swept = by_row("table-learning-rates") | by_row("toy-learning-rates")
    softmax, lssa = claim("softplus-figure-2-softmax"), claim("softplus-figure-2-lssa")
    ours = {power: "lssar" if power == 15 else f"lssar_p{power}" for power in POWERS}
    return {
        power: [
            rates_of(swept, softmax.group(f"softmax_p{power}"), f"softmax_p{power}"),
            rates_of(swept, lssa.group(ours[power]), ours[power]),
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


def accuracies() -> dict[str, dict[str, list[float]]]:
    """Of laser-classification: by rate and row, a number a seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for rate in RATES:
        name = "claims/laser-classification/toy" if rate == "4e-3" else f"classification-learning-rates/{rate}"
        runs = json.loads((RESULTS / name / "results.json").read_text())["runs"]
        assert {run["info"]["seed"] for run in runs} == {0, 1, 2}
        found[rate] = {
            row: [run["classification"]["accuracy"] for run in sorted(runs, key=lambda run: run["info"]["seed"])
                  if run["row"] == row]
            for row in ("softmax", "laser")
        }  # fmt: skip
    return found


def two_by_rates(first: str, names: tuple[str, str], rows: dict[int, list[list[Cell | None]]]) -> str:
    header = [first, *(f"{name}, {rate}" for name in names for rate in RATES)]
    return table(header, ([str(row), *map(_shown, both[0] + both[1])] for row, both in rows.items()))


def _shown(one: Cell | None) -> str:
    return "diverged" if one is None else f"{one.loss:.3f}"


def classification_table() -> str:
    found = accuracies()
    rows = (
        [f"`{row}`", *(over_seeds(found[rate][row], 1, 100).replace(" ±", " % ±") + " %" for rate in RATES)]
        for row in ("softmax", "laser")
    )
    return table(["share of right answers", *RATES], rows)


TABLES = {
    "power_rates": lambda: two_by_rates("p", ("softmax", "LSSA"), powers()),
    "depth_rates": lambda: two_by_rates("layers", ("softmax", "LASER"), depths()),
    "classification_rates": classification_table,
}
