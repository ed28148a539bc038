"""docs/results: comparisons can be read, runs are rows of studies and claims, and the commits that
made the results are there.
"""

import ast
import importlib
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from softfocus.lab.claims import claim as claims
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.recall_compare import RecallReport, grouped
from softfocus.lab.report.results import Report, read_as
from softfocus.lab.report.table import loss_table
from softfocus.lab.studies import study

from .committed import RESULTS, ROOT, lost_runs

COMPARED = [path for path in sorted(RESULTS.rglob("results.json")) if RESULTS / "claims" not in path.parents]


DIFFERENT = "The models read different text, so a difference may be that of the texts. "


@pytest.mark.parametrize("path", COMPARED, ids=lambda path: path.parent.relative_to(RESULTS).as_posix())
def test_every_committed_comparison_can_be_read(path):
    held = json.loads(path.read_text())
    if "notes" in held and "recall" in held["runs"][0]:
        assert grouped(read_as(RecallReport, path).runs)
    elif "finding" in held:
        report = read_as(Report, path)
        lengths = {one.train_length for one in report.evaluations}
        said = report.finding.sentence.removeprefix(DIFFERENT)
        assert (said != report.finding.sentence) == (len({one.text_key for one in report.evaluations}) > 1)
        assert said.startswith("At 1x (" if len(lengths) == 1 else "At 1x ")
        assert loss_table(report.groups).row_count > 0


COMMITTED = {name for name in study.shipped() if (RESULTS / name / "results.json").exists()}


def runs_of(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / name / "results.json").read_text())["runs"]


def check_trained_as(row: Recipe, run: dict[str, Any]) -> None:
    """The same mechanisms, sizes and training."""
    trained = Recipe.model_validate(tomllib.loads(run["recipe"]))
    assert trained.model.label == row.model.label, row.name
    # The label goes on with what layers run that no key names, though there may be none
    assert row.model.label.startswith(run["info"]["mechanism"]), row.name
    assert trained.model.groups == row.model.groups, row.name
    assert trained.model.architecture == row.model.architecture, row.name
    assert trained.model.config == row.model.config, row.name
    assert trained.data == row.data, row.name
    assert trained.train == row.train, row.name


@pytest.mark.long
# The published runs of t6 have names of recipes
@pytest.mark.parametrize("name", sorted(COMMITTED - {"t6"}))
def test_what_was_trained_is_what_the_row_of_the_study_says(name):
    """Rows without a run, and runs whose row has gone, are not compared."""
    found, near = study.load(name)
    runs = runs_of(name)
    seeds = {int(one[1]) for run in runs if (one := re.search(r"-s(\d+)$", run["info"]["name"]))}
    rows = {recipe.name: recipe for recipe in study.recipes(found, near, seeds=sorted(seeds))}
    compared = 0
    for run in runs:
        if (row := rows.get(run["info"]["name"])) is not None:
            check_trained_as(row, run)
            compared += 1
    assert compared


@dataclass(frozen=True)
class Sweep:
    """Runs at several learning rates: where their rows are, and what `--set` changes of these."""

    of: tuple[str, ...]
    """Studies and claims. The first that has the row is meant."""
    rate: float | None = None
    """That of a run whose name has no ending; the row's own if left out."""
    prefix: str = ""
    """Rows' names begin with it, runs' names do not."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The only runs, where they have other names than their rows."""
    init_stds: Mapping[str, float] = field(default_factory=dict)
    """Endings of names, before that for the rate."""
    also: tuple[str, ...] = ()


TIMES = {"-quarter": 0.25, "-half": 0.5, "-twice": 2.0, "-four-times": 4.0, "-eight-times": 8.0, "-sixteen-times": 16.0}
HEADS = {"global-heads": "cosine-nope", "softmax-third": "softmax", "lssar-third": "lssar"}
TABLES = tuple(f"softplus-table-{number}" for number in (1, 2, 3, 4))
POWERS = "softplus-figure-2-softmax", "softplus-figure-2-lssa"
BPE_INIT_STDS = {"-start": 0.09, "-4": 0.04, "-6": 0.0625}
SWEPT = {
    "learning-rates": [
        Sweep(("global-heads",), 2e-3, renamed=HEADS),
        Sweep(("layouts", "global-heads", "layouts-around"), 2e-3),
    ],
    "learning-rates-bpe": [
        Sweep(("layouts-bpe", "layouts-bpe-tuned"), 2e-3),
        Sweep(("bpe",), init_stds=BPE_INIT_STDS),
    ],
    "learning-rates-larger": [Sweep(("layouts-larger",))],
    "larger-rates": [Sweep(("larger",))],
    "toy-learning-rates": [Sweep(("softplus-table-4", "laser-qk-norm"))],
    "table-learning-rates": [Sweep((*TABLES, *POWERS, "softplus-length-scale"))],
    "depth-learning-rates": [Sweep(("laser-depths",))],
    "llama-learning-rates": [Sweep(("laser-temperature", "laser-differential", "laser-query-scale"))],
    "qk-layer-norm-learning-rates/16e-3": [Sweep(("laser-qk-layer-norm",))],
    "qk-layer-norm-learning-rates/32e-3": [Sweep(("laser-qk-layer-norm",))],
    "no-shift-learning-rates/others": [Sweep(("laser-no-shift",))],
    "vit-learning-rates": [Sweep(("laser-vit-qk-norm", "laser-vit-qk-layer-norm", "softplus-vision"), prefix="vit_")],
    "bert-learning-rates": [Sweep(("laser-bert",), prefix="bert_")],
    "conformer-learning-rates": [Sweep(("laser-conformer",), prefix="conformer_")],
    # The rows of laser-lamb set their rate, which --set cannot change then
    "lamb-learning-rates": [Sweep(("laser-classification",), 2e-2, also=("train.optimizer=lamb",))],
    "bpe-longer-rates/8e-3": [Sweep(("bpe-longer",), 8e-3)],
    **{f"layouts-512-rates/{rate}": [Sweep(("layouts-512",), float(rate))] for rate in ("1e-3", "2e-3", "8e-3")},
    "recall-lssa-rates/5e-4": [Sweep(("recall-lssa",), 5e-4)],
    **{f"recall-layouts-rates/{rate}": [Sweep(("recall-layouts",), float(rate))] for rate in ("5e-4", "2e-3")},
    **{
        f"other-rates/{rate}": [Sweep(("layouts", "global-heads", "layouts-around"), float(rate))]
        for rate in ("2e-3", "8e-3", "16e-3")
    },
    **{
        f"other-rates-bpe/{rate}": [Sweep(("bpe", "layouts-bpe"), float(rate), init_stds=BPE_INIT_STDS)]
        for rate in ("2e-3", "4e-3", "8e-3", "16e-3")
    },
}
"""Results whose runs are rows of other studies or claims with the learning rate set. The first
sweep that has a run is meant.
"""


@cache
def rows_with(source: str, seed: int, overrides: tuple[str, ...] = ()) -> dict[str, Recipe]:
    """The rows of a study, or of a claim at the scale `toy`, as the commands train them."""
    if source in study.shipped():
        made = study.recipes(*study.load(source), seeds=[seed], overrides=overrides)
    else:
        made = claims.recipes(claims.load(source), "toy", [seed], overrides)
    return {recipe.name.removesuffix(f"-s{seed}"): recipe for recipe in made}


def split(name: str, endings: Iterable[str]) -> tuple[str, str]:
    """A name without its ending, and the ending."""
    ending = next((one for one in endings if name.endswith(one)), "")
    return name.removesuffix(ending), ending


def row_of(run: str, sweep: Sweep) -> Recipe | None:
    """The row with what `--set` changes, or None if the sweep has no such run."""
    whole, seed = run.rsplit("-s", 1)
    name, times = split(whole, TIMES)
    plain, start = split(name, sweep.init_stds)
    for source in sweep.of:
        rows = rows_with(source, int(seed))
        if whole in rows:  # whose own name ends so: w-rope-half
            times, name = "", whole
        for called, ending in ((name, ""), (plain, start)):
            row = sweep.renamed.get(called, "") if sweep.renamed else sweep.prefix + called
            if row in rows:
                rate = (sweep.rate or rows[row].train.learning_rate) * TIMES.get(times, 1.0)
                changes = [*sweep.also, f"train.learning_rate={rate:g}"]
                if ending:
                    changes.append(f"model.config.initializer_range={sweep.init_stds[ending]}")
                return rows_with(source, int(seed), tuple(changes))[row]
    return None


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SWEPT))
def test_what_was_trained_at_other_rates_is_a_row_with_the_rate_set(name):
    """Every run, those that diverged included, has a row."""
    assert name not in study.shipped()
    runs = {run["info"]["name"]: run for run in runs_of(name)}
    for one in (*runs, *lost_runs(name)):
        row = next(filter(None, (row_of(one, sweep) for sweep in SWEPT[name])), None)
        assert row is not None, one
        if one in runs:
            check_trained_as(row, runs[one])
    assert runs


REBASED = {"239b23e", "2ac153ab63584101cd4bb70fd1818a7948c66f75", "640aa5464c493da5e3a40dfdc916aa3b9d763463"}
"""Commits that a result names and that were not published as they were: rebased, or of a clone that
added the file of a study. The page says what became of them.
"""


def test_the_commits_that_documents_and_results_name_exist():
    words = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() != "false":
        pytest.skip("not a whole checkout of git")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    texts = [path.read_text() for path in pages] + [path.read_text() for path in RESULTS.rglob("*.md")]
    # Of a training that diverged a page names the batch
    named = {one for text in texts for one in re.findall(r"(?<!on the batch )\b([0-9a-f]{7,40})\b", text)}
    named |= {
        one for path in RESULTS.rglob("*.json") for one in re.findall(r'"commit": "([0-9a-f]+)', path.read_text())
    }
    named = {one for one in named if re.search("[a-f]", one) and re.search("[0-9]", one)} - REBASED
    asked = subprocess.run(
        ["git", "cat-file", "--batch-check"], input="\n".join(sorted(named)), cwd=ROOT, capture_output=True, text=True
    )
    assert len(named) > 20
    assert [line for line in asked.stdout.splitlines() if not line.split()[1].startswith("commit")] == []


UNCLEAN = {
    "layouts-larger/results.json",
    *(f"gpu-h100/{name}/results.json" for name in ("narrow", "flex", "decode", "decode64")),
    *(f"small-gpu/{name}/results.json" for name in ("longer", "longer-rates", "bytes", "bytes-rates")),
    *(f"gpu-h200/{name}/results.json" for name in ("wide", "wide-2")),
}
"""Results of trees with changes that no commit holds; of small-gpu, gpu-h200, and decoding in
gpu-h100, files of studies and missing pictures alone. Train them again to take them off.
"""


def test_committed_results_are_of_clean_commits() -> None:
    unclean = set()
    for path in RESULTS.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        if re.search(r'"commit": "[^"]*\+dirty"|"dirty": true', text):
            unclean.add(path.relative_to(RESULTS).as_posix())
    assert unclean == UNCLEAN


SCRIPTS = sorted(RESULTS.rglob("*.py"))


def unknown_names(text: str) -> list[str]:
    """What a script takes from softfocus, and softfocus has not."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "softfocus":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if not hasattr(module, alias.name) and not is_module(whole):
                    found.append(whole)
    return found


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_a_script_takes_names_that_exist(path):
    assert unknown_names(path.read_text()) == []


def test_a_name_that_is_gone_would_be_noticed():
    assert len(SCRIPTS) > 5
    assert unknown_names("from softfocus.lab import model, models\nfrom softfocus.lab.errors import LabErrors") == [
        "softfocus.lab.models",
        "softfocus.lab.errors.LabErrors",
    ]
