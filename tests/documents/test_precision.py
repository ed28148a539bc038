"""docs/precision.md: it shows the committed results."""

import json
import re

from .committed import RESULTS, ROOT
from .tables import over_seeds


def precision_tables() -> list[list[list[str]]]:
    """Cells of the tables of docs/precision.md without their labels, from the committed results."""
    results = json.loads((RESULTS / "precision/results.json").read_text())
    lines = {(x["place"], x["mechanism"], x["scores"]): x for x in results["places"] if x["length"] == 1024}
    mechanisms = list(dict.fromkeys(mechanism for _, mechanism, _ in lines))
    errors = {key: f"{100 * line['query.grad'][0]:.2f}" for key, line in lines.items()}
    scores, places = ("random", "peaked"), []
    for place in (
        "query and key",
        "unit query and key",
        "scores",
        "weights",
        "value",
        "gradient of the output",
        "parameters",
    ):
        keys = ([(place, name, one) for one in scores if (place, name, one) in errors] for name in mechanisms)
        places.append([" / ".join(errors[key] for key in found) for found in keys])
    models = [
        [
            over_seeds([x["errors"][precision]["all"] for x in results["models"] if x["mechanism"] == name], 2, 100)
            for name in mechanisms
        ]
        for precision in (
            "autocast",
            "autocast, their projection in float32",
            "autocast, attention modules in float32",
            "parameters in bfloat16",
            "parameters rounded, float64",
        )
    ]
    loss = {(x["mechanism"], x["precision"], x["seed"]): x["loss"] for x in results["trainings"]}
    seeds = sorted({seed for _, _, seed in loss})
    trainings = [
        [
            over_seeds([loss[name, precision, seed] - loss[name, "float32", seed] for seed in seeds], 3)
            for name in ("softmax", "lssar, p = 15")
        ]
        for precision in ("autocast", "autocast, attention modules in float32", "parameters in bfloat16")
    ]
    return [places, models, trainings]


def test_the_tables_of_precision_are_the_committed_ones():
    page = (ROOT / "docs/precision.md").read_text().replace("| 0 ", "| 0.00 / 0.00 ").replace(", inconclusive", "")
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    shown = [[[cell.strip() for cell in row.split("|")[2:-1]] for row in table.splitlines()] for table in tables]
    assert shown == precision_tables()


def test_what_rounding_after_the_norm_costs_is_the_committed_one():
    results = json.loads((RESULTS / "precision/results.json").read_text())
    errors = {(x["place"], x["mechanism"], x["scores"], x["length"]): x["query.grad"][0] for x in results["places"]}
    shares = [
        error / errors["query and key", name, *where]
        for (place, name, *where), error in errors.items()
        if place == "unit query and key" and name.startswith("lssar")
    ]
    assert len(shares) == 24
    text = " ".join((ROOT / "docs/precision.md").read_text().split())
    assert f"queries {min(shares):.2f} to {max(shares):.2f} times as large" in text
