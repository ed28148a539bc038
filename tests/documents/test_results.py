"""docs/results: comparisons can be read, and the commits that made the results are there."""

import json
import re
import subprocess
import tomllib

import pytest

from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.results import Report, read_as
from softfocus.lab.report.table import loss_table
from softfocus.lab.studies import study

from .committed import RESULTS, ROOT

COMPARED = [path for path in sorted(RESULTS.rglob("results.json")) if RESULTS / "claims" not in path.parents]


DIFFERENT = "The models read different text, so a difference may be that of the texts. "


@pytest.mark.parametrize("path", COMPARED, ids=lambda path: path.parent.relative_to(RESULTS).as_posix())
def test_every_committed_comparison_can_be_read(path):
    if "finding" in json.loads(path.read_text()):
        report = read_as(Report, path)
        lengths = {one.train_length for one in report.evaluations}
        said = report.finding.sentence.removeprefix(DIFFERENT)
        assert (said != report.finding.sentence) == (len({one.text_key for one in report.evaluations}) > 1)
        assert said.startswith("At 1x (" if len(lengths) == 1 else "At 1x ")
        assert loss_table(report.groups).row_count > 0


COMMITTED = {name for name in study.shipped() if (RESULTS / name / "results.json").exists()}


@pytest.mark.long
# The published runs of t6 have names of recipes
@pytest.mark.parametrize("name", sorted(COMMITTED - {"t6"}))
def test_what_was_trained_is_what_the_row_of_the_study_says(name):
    """Under the name of a row: the same mechanisms, sizes and training. Rows without a run, and
    runs whose row has gone, are not compared.
    """
    found, near = study.load(name)
    runs = json.loads((RESULTS / name / "results.json").read_text())["runs"]
    seeds = {int(one[1]) for run in runs if (one := re.search(r"-s(\d+)$", run["info"]["name"]))}
    rows = {recipe.name: recipe for recipe in study.recipes(found, near, seeds=sorted(seeds))}
    compared = 0
    for run in runs:
        if (row := rows.get(run["info"]["name"])) is None:
            continue
        compared += 1
        trained = Recipe.model_validate(tomllib.loads(run["recipe"]))
        assert trained.model.label == row.model.label, row.name
        # The label goes on with what layers run that no key names, though there may be none
        assert row.model.label.startswith(run["info"]["mechanism"]), row.name
        assert trained.model.groups == row.model.groups, row.name
        assert trained.model.architecture == row.model.architecture, row.name
        assert trained.model.config == row.model.config, row.name
        assert trained.data == row.data, row.name
        assert trained.train == row.train, row.name
    assert compared


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
