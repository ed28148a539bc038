"""Claims: what is shipped parses, builds and trains; each kind of statement judges runs whose
verdict is known.

Over 400 lines: the cases share the made-up runs.
"""

import io
import json
import math
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.data import default_collate

from softfocus.lab import model as models
from softfocus.lab import objective
from softfocus.lab.claims import claim as claims
from softfocus.lab.claims import earlier as earlier_runs
from softfocus.lab.claims import figure, ledger, page
from softfocus.lab.claims.claim import SCALES, Claim, parse, recipes
from softfocus.lab.claims.parts import together
from softfocus.lab.claims.reproduce import PUBLISHED, reproduce
from softfocus.lab.claims.results import Results, Run
from softfocus.lab.claims.results import read as read_results
from softfocus.lab.claims.verdict import judge
from softfocus.lab.data import of_recipe as data
from softfocus.lab.errors import Diverged, LabError, UsageError
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.evaluate.tasks import TASKS, answer
from softfocus.lab.progress import silent
from softfocus.lab.recipes import loading
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.figure import save_png, source_of
from softfocus.lab.run_folder.disk import size_text
from softfocus.lab.run_folder.files import load_run, save_run
from softfocus.lab.run_folder.results import WRONG, Bucket, Setting, default_settings, json_text
from softfocus.lab.studies import study
from softfocus.lab.train import memory
from softfocus.lab.train.run import train
from softfocus.lab.train.trainer import WindowTrainer

ROOT = Path(__file__).resolve().parents[3]
PUBLIC = ROOT / "docs" / "results" / "claims"


def distinct(scale: Any) -> list[Recipe]:
    """Every row of every claim at a scale, each once."""
    rows = {
        recipe.name: recipe
        for name in claims.shipped()
        if scale in claims.load(name).scales
        for recipe in recipes(claims.load(name), scale, [0])
    }
    return list(rows.values())


def rows_of_studies(others: Sequence[Recipe]) -> list[Recipe]:
    """Every row of every shipped study whose model is not that of another row or recipe."""
    seen = {(recipe.data.kind, recipe.model.model_dump_json()) for recipe in others}
    found = []
    for name in study.shipped():
        for recipe in study.recipes(*study.load(name), seeds=[0]):
            key = recipe.data.kind, recipe.model.model_dump_json()
            found += [] if key in seen else [recipe]
            seen.add(key)
    return found


# What is shipped


def test_every_claim_parses_and_says_what_is_to_be_judged() -> None:
    found = [claims.load(name) for name in claims.shipped()]
    assert len(found) >= 10
    assert len({claim.title for claim in found}) == len(found)
    for claim in found:
        assert claim.says.strip()
        assert claim.statements or claim.untestable


def test_rows_of_one_name_are_the_same_in_every_claim() -> None:
    """Claims share their runs, so a name stands for one model, and a model has one name."""
    seen: dict[str, Any] = {}
    for name in claims.shipped():
        claim = claims.load(name)
        for row, changes in claim.rows.items():
            own = changes.get("base", claim.bases)
            trained = {key: value for key, value in changes.items() if key not in ("evaluate", "base")} | {"bases": own}
            assert seen.setdefault(row, trained) == trained, f"{row} in {name}"
    assert len({str(sorted(row.items())) for row in seen.values()}) == len(seen)


@pytest.mark.long
@pytest.mark.parametrize("scale", SCALES)
def test_every_row_builds_at_every_scale(scale: Any) -> None:
    """On no device: the paper's own models, too."""
    sizes = {"toy": 0.3e6, "small": 10.4e6, "gpt2": 124e6}
    for recipe in distinct(scale):
        with torch.device("meta"):
            model = models.build(recipe, recipe.model.config.get("vocab_size") or 257)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # Layers differ in size on purpose
        if recipe.data.kind == "text" and not recipe.name.endswith("_layers-s0"):
            assert parameters == pytest.approx(sizes[scale], rel=0.2), recipe.name


@pytest.mark.long
@pytest.mark.parametrize("part", ["small", "one layer of the large", pytest.param("large", marks=pytest.mark.slow)])
def test_every_row_and_recipe_trains_two_steps(part: str) -> None:
    """Every row at the scale `toy`, every shipped recipe that test_recall.py does not train, and
    every row of a study with another model. Those with over 20 million parameters are recipes, or
    rows of a study for GPUs, which train as its rows of fewer parameters do.
    """
    large = part != "small"
    recipes_of_all = [loading.load(name) for name in loading.shipped()]
    shipped = [recipe for recipe in recipes_of_all if recipe.data.kind != "task"]
    rows = [] if large else distinct("toy")
    rows_for_gpus = study.recipes(*study.load("global-heads-medium"), seeds=[0])
    trained = []
    for recipe in [*rows, *shipped, *([] if large else rows_of_studies([*rows, *recipes_of_all]))]:
        torch.manual_seed(0)
        with torch.device("meta"):
            size = sum(
                x.numel() for x in models.build(recipe, recipe.model.config.get("vocab_size") or 257).parameters()
            )
        if (size > 20e6) is not large:
            assert large or recipe in shipped or recipe in rows_for_gpus, recipe.name
            continue
        if part == "one layer of the large":
            shorter = ["data.speech.seconds=2.0", "train.length=99"] if recipe.data.speech else []
            recipe = loading.load(recipe.name, ["model.config.num_hidden_layers=1", *shorter])
        kind = recipe.data.kind
        if kind in ("text", "task", "masked"):
            vocabulary, tokens = 257, torch.randint(257, (2, 17))
            batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        else:
            # Of folders that are not here: generated samples of their size
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": None})})
            source = data.sampled(recipe, silent)
            vocabulary, windows = source.vocab_size, source.training_windows(recipe)
            batch = default_collate([windows[0], windows[1]])
        model = models.build(recipe, vocabulary)
        adamw = recipe.train.optimizer == "adamw"  # LAMB's rates are too large for AdamW
        rate = recipe.train.learning_rate if adamw else 2e-3
        # Without a warm-up; fused, which is the same in half the time
        optimiser = torch.optim.AdamW(model.parameters(), lr=rate / 20 if large else rate, fused=True)
        losses = []
        for _ in range(2):
            loss = objective.loss(kind, model, batch)
            losses.append(loss.item())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        with torch.no_grad():
            losses.append(objective.loss(kind, model, batch).item())
        lost = recipe.name == "laser_no_shift_x32-s0"  # its values are too large from the start
        assert math.isnan(losses[0]) if lost else losses[-1] < losses[0], recipe.name
        trained.append(recipe.name)
    assert ("gpt2-124m-lssar" in trained) is large
    assert ("base-100000-s0" in trained) is not large  # of the study layout-trials


def test_tests_that_claims_cite_exist() -> None:
    found = [claims.load(name) for name in claims.shipped()]
    cited = [s.by for claim in found for s in claim.statements if s.kind in ("proved", "disproved")]
    notes = [note for claim in found for note in claim.notes] + [(PUBLIC / ledger.FINDINGS).read_text()]
    cited += [one for note in notes for one in re.findall(r"tests/[\w/]+\.py::\w+", note)]
    for reference in cited:
        file, _, name = reference.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), reference


@pytest.mark.long
def test_the_published_pages_and_figures_are_those_of_the_published_results(tmp_path: Path) -> None:
    """Byte for byte: `softfocus report` writes them."""
    drawn = {path.relative_to(PUBLIC) for path in PUBLIC.rglob("*.png")}
    for file in (
        Path(ledger.FINDINGS),
        *drawn,
        *(path.relative_to(PUBLIC) for path in PUBLIC.glob("*/*/results.json")),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((PUBLIC / file).read_bytes())
    written = {path.name: path.read_bytes() for path in ledger.report(tmp_path)}
    published = {path.name: path.read_bytes() for path in PUBLIC.glob("*.md")}
    assert sorted(written) == sorted(published)
    assert written == published, "run `softfocus report`"
    shown = {Path(one) for text in published.values() for one in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text.decode())}
    assert shown == drawn
    for file in drawn:
        assert (tmp_path / file).read_bytes() == (PUBLIC / file).read_bytes(), f"{file}: run `softfocus report`"


def test_findings_about_the_published_runs_stand_on_their_pages_alone(tmp_path: Path) -> None:
    """Pages of other runs have no statement about ours, and no link into our documents."""
    ledger.report(tmp_path)
    for path in tmp_path.glob("*.md"):
        assert "](../.." not in path.read_text(), path.name
        assert "What else was found" not in path.read_text(), path.name
    (tmp_path / ledger.FINDINGS).write_text('laser-bert = ["One thing.", "Another."]')
    ledger.report(tmp_path)
    assert (tmp_path / "laser-bert.md").read_text().endswith("## What else was found\n\nOne thing.\n\nAnother.\n")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('laser-brt = ["One thing."]', "there is no claim 'laser-brt'"),
        ('laser-bert = "One thing."', "laser-bert: Input should be a valid list"),
        ("laser-bert", "cannot be read: "),
    ],
)
def test_findings_that_cannot_be_read(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / ledger.FINDINGS).write_text(text)
    with pytest.raises(LabError, match=re.escape(what)) as caught:
        ledger.report(tmp_path)
    assert "softfocus recipes" in caught.value.remedy or "'laser-bert'" in caught.value.remedy


def test_findings_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / ledger.FINDINGS).write_bytes(b"\xff")
    with pytest.raises(LabError, match="cannot be read"):
        ledger.report(tmp_path)
    (tmp_path / ledger.FINDINGS).unlink()
    (tmp_path / ledger.FINDINGS).mkdir()
    with pytest.raises(LabError, match="cannot be read"):
        ledger.report(tmp_path)


def test_results_in_the_place_of_others_are_refused(tmp_path: Path) -> None:
    for name, scale, says in (("laser-bert", "toy", "of laser-vit at the scale toy"), ("laser-vit", "small", "toy")):
        results = tmp_path / name / scale / "results.json"
        results.parent.mkdir(parents=True)
        results.write_bytes((PUBLIC / "laser-vit/toy/results.json").read_bytes())
        with pytest.raises(LabError, match=says):
            ledger.report(tmp_path)
        results.unlink()


def test_a_run_that_stands_twice_in_results_is_refused(tmp_path: Path) -> None:
    found = json.loads((PUBLIC / "laser-vit/toy/results.json").read_text())
    found["runs"].append(found["runs"][0])
    results = tmp_path / "laser-vit" / "toy" / "results.json"
    results.parent.mkdir(parents=True)
    results.write_text(json.dumps(found))
    with pytest.raises(LabError, match="is there twice"):
        ledger.report(tmp_path)


@pytest.mark.long
def test_a_figure_is_drawn_where_its_results_have_changed(tmp_path: Path, monkeypatch: Any) -> None:
    results = tmp_path / "laser-vit" / "toy" / "results.json"
    results.parent.mkdir(parents=True)
    results.write_bytes((PUBLIC / "laser-vit/toy/results.json").read_bytes())
    drawn: list[Path] = []
    monkeypatch.setattr(figure, "save_png", lambda one, path, **how: (drawn.append(path), save_png(one, path, **how)))
    ledger.report(tmp_path)
    assert drawn == [results.with_name("figure.png")]
    ledger.report(tmp_path)
    assert len(drawn) == 1
    for change in (lambda: drawn[0].write_bytes(b"no image"), drawn[0].unlink, lambda: _shift_a_loss(results)):
        change()
        ledger.report(tmp_path)
        assert source_of(drawn[0])
    assert len(drawn) == 4


def _shift_a_loss(results: Path) -> None:
    found = json.loads(results.read_text())
    row = found["runs"][0]["evaluation"]["rows"][0]
    row["loss"] += 0.1
    (bucket,) = row["buckets"]
    bucket["loss"] += 0.1
    bucket["sums"][0] += 0.1 * row["tokens"]  # which make the loss
    results.write_text(json.dumps(found))


# Verdicts on runs that are made up


def statement(text: str) -> Claim:
    """A claim of three rows and one statement."""
    return parse(
        "made-up",
        f"""
        title = "t"
        source = "s"
        says = "p"
        [rows]
        a = {{ model.mechanism = "softmax" }}
        b = {{ model.mechanism = "lssa" }}
        c = {{ model.mechanism = "lssar" }}
        [[statements]]
        says = "it"
        {text}
        """,
    )


Losses = Sequence[Sequence[float] | str]


@pytest.fixture
def made(fabricate: Any) -> Any:
    """Results of rows: for each seed the losses at 1x, 2x, 4x, or "diverged"."""

    def make(**rows: Losses) -> Results:
        runs = []
        for row, trainings in rows.items():
            for seed, losses in enumerate(trainings):
                gone = losses == "diverged"
                entry = fabricate(row, [1.0] if gone else losses, seed=seed, name=f"{row}-s{seed}", standard_error=0.0)
                info = entry.info
                if gone:
                    info = info.model_copy(update={"status": "diverged", "error": "the loss became nan at step 7"})
                runs.append(Run(row=row, info=info, recipe=entry.recipe, evaluation=None if gone else entry.evaluation))
        return Results(claim="made-up", scale="toy", created=runs[0].info.started, runs=runs)

    return make


def verdict(text: str, results: Results | None) -> str:
    return judge(statement(text), results)[0].verdict


LOWER = 'kind = "lower"\nrow = "a"\nthan = "b"'
WIDE = [[1.0, 2.0], [1.01, 2.1], [0.99, 1.9]]
"""Three trainings with a standard error of 0.0058 at 1x and 0.058 at 2x, and a t of 4.53: 0.026 and
0.26.
"""


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([1.03, 1.05, 1.04], "holds"),  # paired: +0.03, +0.04, +0.05; 0.04 - 0.026 > 0
        ([0.97, 0.97, 0.94], "fails"),
        ([1.02, 1.01, 1.00], "inconclusive"),
        ([1.03, 1.04, 1.02], "holds"),  # +0.03 each: noise that both share cancels
    ],
)
def test_lower_takes_two_standard_errors_for_few_seeds(made: Any, others: list[float], expected: str) -> None:
    results = made(a=WIDE, b=[[loss, 2.0] for loss in others])
    assert verdict(LOWER, results) == expected


def test_lower_by_a_share_and_at_two_lengths(made: Any) -> None:
    results = made(a=[[1.0, 1.0]] * 3, b=[[1.5, 1.1]] * 3)
    assert verdict(LOWER + "\nby = 0.3", results) == "holds"
    assert verdict(LOWER + "\nby = 0.4", results) == "fails"
    assert verdict(LOWER + '\nby = 0.3\nat = ["1x", "2x"]', results) == "fails"
    assert verdict(LOWER + '\nat = "2x"\nthan_at = "1x"', results) == "holds"
    assert verdict(LOWER + '\nat = "4x"', results) == "not run"
    assert verdict(LOWER + '\nsetting = "window 1x"', results) == "not run"
    judged = judge(statement(LOWER + "\nby = 0.3"), results)[0]
    assert (
        judged.shown.text == "a 1x 1.000, b 1x 1.500: -0.500 ± 0.000; minus 0.7 times the second loss: -0.050 ± 0.000"
    )


@pytest.mark.parametrize(("other", "share", "found"), [(0.99, "1.02", "-0.010"), (1.01, "0.98", "+0.010")])
def test_close_shows_the_nearer_line(made: Any, other: float, share: str, found: str) -> None:
    close = statement('kind = "close"\nrow = "a"\nthan = "b"\nby = 0.02')
    judged = judge(close, made(a=[[1.0]] * 3, b=[[other]] * 3))[0]
    assert judged.shown.text.endswith(f"; minus {share} times the second loss: {found} ± 0.000")


def test_flat_shows_its_line(made: Any) -> None:
    judged = judge(statement('kind = "flat"\nrow = "a"\nto = "2x"\nwithin = 0.04'), made(a=[[1.0, 1.03]] * 3))[0]
    assert judged.shown.text.endswith(": +0.030 ± 0.000; minus 1.04 times the second loss: -0.010 ± 0.000")


def test_lower_than_all_others(made: Any) -> None:
    text = 'kind = "lower"\nrow = "a"\nthan = "*"'
    assert verdict(text, made(a=[[1.0]] * 3, b=[[1.5]] * 3, c=[[2.0]] * 3)) == "holds"
    judged = judge(statement(text), made(a=[[1.0]] * 3, b=[[1.5]] * 3, c=[[0.5]] * 3))[0]
    assert judged.verdict == "fails"
    assert judged.shown.text.startswith("a 1x 1.000, c 1x 0.500: +0.500")


@pytest.mark.parametrize(
    ("others", "expected"),
    [([1.001] * 3, "holds"), ([1.1] * 3, "fails"), ([0.9] * 3, "fails"), ([1.03, 1.0, 0.97], "inconclusive")],
)
def test_close_is_a_test_of_equivalence(made: Any, others: list[float], expected: str) -> None:
    text = 'kind = "close"\nrow = "a"\nthan = "b"\nby = 0.01'
    assert verdict(text, made(a=[[1.0]] * 3, b=[[loss] for loss in others])) == expected


@pytest.mark.parametrize(
    ("at_length", "expected"),
    [([1.02] * 3, "holds"), ([0.5] * 3, "holds"), ([1.2] * 3, "fails"), ([1.1, 1.0, 1.04], "inconclusive")],
)
def test_flat_allows_a_share(made: Any, at_length: list[float], expected: str) -> None:
    text = 'kind = "flat"\nrow = "a"\nto = "2x"\nwithin = 0.05'
    assert verdict(text, made(a=[[1.0, loss] for loss in at_length])) == expected


@pytest.mark.parametrize(
    ("text", "ours", "expected"),
    [
        (LOWER + "\nby = 0.3", [0.6, 0.9, 1.2], "holds"),  # 60 % each: -0.15 ± 0.03 below 70 %
        (LOWER + "\nby = 0.3", [0.5, 1.0, 1.5], "inconclusive"),  # -0.5 each, and 30 % are 0.3 to 0.6
        ('kind = "close"\nrow = "a"\nthan = "b"\nby = 0.01', [1.0145, 1.5145, 2.0145], "inconclusive"),
        ('kind = "flat"\nrow = "c"\nto = "2x"\nwithin = 0.05', [1.07, 1.57, 2.07], "inconclusive"),
    ],
)
def test_a_share_of_a_measured_loss_has_its_error(made: Any, text: str, ours: list[float], expected: str) -> None:
    """Three trainings that differ much: so does a share of their losses."""
    others = [1.0, 1.5, 2.0]
    both = [[first, last] for first, last in zip(others, ours, strict=True)]
    results = made(a=[[loss] for loss in ours], b=[[loss] for loss in others], c=both)
    assert verdict(text, results) == expected


def test_two_seeds_are_too_few(made: Any) -> None:
    assert verdict(LOWER, made(a=[[1.0]] * 3, b=[[2.0]] * 2)) == "too few seeds"
    assert verdict('kind = "trains"\nrow = "a"', made(a=[[1.0]] * 2)) == "too few seeds"
    assert verdict(LOWER, made(a=[[1.0]] * 3)) == "not run"
    assert verdict(LOWER, None) == "not run"


def test_what_diverged_is_not_averaged(made: Any) -> None:
    fine, gone = [[1.0]] * 3, ["diverged"] * 3
    assert verdict(LOWER, made(a=fine, b=gone)) == "holds"
    assert verdict(LOWER, made(a=gone, b=fine)) == "fails"
    assert verdict(LOWER, made(a=gone, b=gone)) == "inconclusive"
    assert verdict(LOWER, made(a=fine, b=[[2.0], [2.0], "diverged"])) == "inconclusive"
    assert verdict(LOWER, made(a=[[1.0, math.nan]] * 3, b=[[2.0, 2.0]] * 3)) == "holds"
    assert verdict(LOWER + '\nat = "2x"', made(a=[[1.0, math.nan]] * 3, b=[[2.0, 2.0]] * 3)) == "fails"
    close = 'kind = "close"\nrow = "a"\nthan = "b"\nby = 0.5'
    assert verdict(close, made(a=fine, b=gone)) == verdict(close, made(a=gone, b=fine)) == "fails"
    assert verdict(close, made(a=gone, b=gone)) == "inconclusive"
    flat = 'kind = "flat"\nrow = "a"\nto = "2x"\nwithin = 0.5'
    assert verdict(flat, made(a=gone)) == verdict(flat, made(a=[[1.0, math.inf]] * 3)) == "fails"
    assert verdict(flat, made(a=[[1.0, 1.0], [1.0, 1.0], "diverged"])) == "inconclusive"


def test_trains(made: Any) -> None:
    text = 'kind = "trains"\nrow = "a"'
    assert verdict(text, made(a=[[1.0]] * 3)) == "holds"
    assert verdict(text, made(a=[[1.0], [1.0], "diverged"])) == "fails"


@pytest.mark.parametrize(
    ("norms", "expected"),
    [([30.0, 30.0, 30.0], "holds"), ([5.0, 5.0, 5.0], "fails"), ([2.0, 50.0, 10.0], "inconclusive")],
)
def test_steeper_compares_the_largest_gradients(made: Any, norms: list[float], expected: str) -> None:
    results = made(a=[[1.0]] * 3, b=[[1.0]] * 3)
    for run in results.runs:
        largest = norms[run.info.seed] if run.row == "a" else 1.0
        run.info.gradient_norm = [(10, 0.5), (20, largest), (30, 0.25)]
    text = 'kind = "steeper"\nrow = "a"\nthan = "b"\nfactor = 10.0'
    assert verdict(text, results) == expected
    assert verdict(text + '\nof = "median"', results) == "fails"  # 0.5 on both sides
    for run in results.of("a"):
        run.info.gradient_norm[1] = (20, math.inf)
    assert verdict(text, results) == "holds"
    for run in results.of("b"):
        run.info.gradient_norm = []
    assert verdict(text, results) == "not run"


def test_the_largest_gradient_is_that_after_the_warm_up(made: Any) -> None:
    """An entry has the largest one since the entry before it, so with a warm-up of 30 steps that of
    step 70 is the first of steps past 60.
    """
    results = made(a=[[1.0]] * 3, b=[[1.0]] * 3)
    for number, run in enumerate(results.runs):
        late = 30.0 if run.row == "a" else 1.0
        run.info.gradient_norm = [(60, 900.0), (70, late), (80, 1.0)]
        results.runs[number] = run.model_copy(update={"recipe": "[train]\nwarmup = 30\nlog_every = 10\n"})
    assert {run.settled for run in results.runs} == {70}
    text = 'kind = "steeper"\nrow = "a"\nthan = "b"\nfactor = '
    assert (verdict(text + "29.9", results), verdict(text + "30.1", results)) == ("holds", "fails")
    assert verdict('kind = "steeper"\nrow = "b"\nthan = "a"\nfactor = 0.03', results) == "holds"
    shown = page.page(statement(text + "10.0"), {"toy": results})
    assert "| a | 30 | 30 |" in shown
    assert "| b | 1 | 1 |" in shown
    for run in results.runs:
        run.info.gradient_norm = [(60, 900.0)]
    assert verdict(text + "10.0", results) == "not run"
    assert verdict(text + '1.0\nof = "median"', results) == "inconclusive"


def test_what_tests_decide_needs_no_run() -> None:
    claim = parse("x", 'title="t"\nsource="s"\nsays="p"\n[[statements]]\nsays="it"\nkind="proved"\nby="tests/x.py::y"')
    assert claim.exact
    assert page.standing(claim, "toy", None) == "holds"
    assert "holds: exact, by test" in page.page(claim, {})
    against = claim.model_copy(update={"statements": parse("x", _DISPROVED).statements})
    assert page.standing(against, "gpt2", None) == "fails"


_DISPROVED = 'title="t"\nsource="s"\nsays="p"\n[[statements]]\nsays="it"\nkind="disproved"\nby="tests/x.py::y"'


def test_one_verdict_of_many() -> None:
    assert together(["holds", "holds"]) == "holds"
    assert together(["holds", "inconclusive"]) == "inconclusive"
    assert together(["inconclusive", "too few seeds", "fails"]) == "fails"


# The pages


def test_a_page_says_what_was_run_and_what_came_out(made: Any) -> None:
    claim = statement(LOWER + '\nat = "2x"')
    results = made(a=[[1.0, 1.0]] * 3, b=[[2.0, 3.0], [2.0, 3.2], [2.0, 3.1]], c=[[1.5, 1.5], "diverged", [1.5, 1.5]])
    text = page.page(claim, {"toy": results})
    for said in (
        "**Verdict: holds** (1 holds).",
        "| holds | it | a 2x 1.000, b 2x 3.100: -2.100 ± 0.058 |",
        "9 trainings of 3 rows on the recipe `toy`",
        "seeds 0, 1, 2; commit 0123456789",
        "| b | 3 seeds | 2.000 ± 0.000 | 3.100 ± 0.100 |",
        "| c | 3 seeds, 1 diverged | 1.500 ± 0.000 |",
        "* Diverged: c, seed 1: the loss became nan at step 7.",
        "## Scale `gpt2`\n\n**Not testable here:** 124 M",
        "## Scale `small`\n\n**Not run:** it takes a GPU",
        "To repeat it: `softfocus reproduce made-up --scale toy --seeds 3`.",
    ):
        assert " ".join(said.split()) in " ".join(text.split()), said


def test_the_ledger_names_verdicts_that_rest_on_added_seeds(made: Any) -> None:
    """Three seeds that differ in sign decide nothing; three more that agree do."""
    claims = [statement(LOWER).model_copy(update={"name": name}) for name in ("decided-later", "decided-at-once")]
    wide, clear = [[2.25], [1.98], [2.05]], [[3.0], [3.01], [2.99]]
    found = {
        claim.name: {"toy": made(a=[[1.0]] * 6, b=[[first[0] - 1.0] for first in three] + [[1.5], [1.5], [1.5]])}
        for claim, three in zip(claims, (wide, clear), strict=True)
    }
    lines = [
        (claim, dict.fromkeys(("toy", "small", "gpt2"), page.standing(claim, "toy", found[claim.name]["toy"])))
        for claim in claims
    ]
    assert [standings["toy"] for _, standings in lines] == ["holds", "holds"]
    text = " ".join(ledger.ledger(lines, found).split())  # type: ignore[arg-type]
    assert "At the scale `toy` 2 claims had more than 3 seeds." in text
    assert "With the first 3 alone 1 verdict would differ: [t](decided-later.md) (holds, inconclusive before)." in text


def test_a_page_of_runs_that_all_failed(made: Any) -> None:
    lost = made(a=[[1.0]]).model_copy(update={"runs": [], "missing": ["a-s0 is missing: killed by signal 9"]})
    text = page.page(statement(LOWER), {"toy": lost})
    for said in ("**Verdict: not run** (1 not run).", "a-s0 is missing: killed by signal 9", "--scale toy --seeds 3`"):
        assert said in text


def test_a_page_says_how_many_comparisons_agree(made: Any) -> None:
    text = 'kind = "lower"\nrow = "a"\nthan = ["b", "c"]'
    one = page.page(statement(text), {"toy": made(a=[[1.0]] * 3, b=[[2.0]] * 3, c=[[0.5]] * 3)})
    assert "(1 of 2 comparisons says fails; this one speaks most against the statement)" in one
    both = page.page(statement(text), {"toy": made(a=[[1.0]] * 3, b=[[2.0]] * 3, c=[[2.5]] * 3)})
    assert "(2 of 2 comparisons say holds) |" in both


@pytest.mark.parametrize(("ratio", "shown"), [(1.0, "1.00"), (0.998, "1.00"), (0.0712, "0.0712"), (1234.0, "1.23e+03")])
def test_ratios_have_their_digits(made: Any, ratio: float, shown: str) -> None:
    results = made(a=[[1.0]] * 3, b=[[1.0]] * 3)
    for run in results.runs:
        run.info.gradient_norm = [(10, ratio if run.row == "a" else 1.0)]
    judged = judge(statement('kind = "steeper"\nrow = "a"\nthan = "b"'), results)[0]
    assert f"of a has {shown} times the norm" in judged.shown.text


def test_numbers_without_a_verdict(made: Any) -> None:
    """Runs that say nothing about a claim are shown all the same."""
    claim = statement(LOWER).model_copy(update={"unjudged": {"toy": "it is too small"}})
    results = made(a=[[1.0]] * 3, b=[[2.0]] * 3)
    text = page.page(claim, {"toy": results})
    assert page.standing(claim, "toy", results) == page.standing(claim, "toy", None) == "not testable here"
    assert "**Not testable here:** it is too small.\n\n| statement | what came out |" in text
    assert "| it | a 1x 1.000, b 1x 2.000: -1.000 ± 0.000 |" in text
    assert "Verdict" not in text
    assert page.verdict_lines(claim, results) == [
        "it (a 1x 1.000, b 1x 2.000: -1.000 ± 0.000)",
        "made-up at the scale toy: not testable here: it is too small",
    ]
    assert "toy" in claim.scales


def test_the_ledger_counts(made: Any) -> None:
    claim = statement(LOWER)
    exact = parse("x", _DISPROVED)
    lines = [(one, {scale: page.standing(one, scale, None) for scale in SCALES}) for one in (claim, exact)]
    text = ledger.ledger(lines, {})
    assert "2 claims, 1 of them decided by tests" in " ".join(text.split())
    assert "| scale | fails | not run | not testable here |" in text
    assert "| toy | 0 | 1 | 0 |" in text
    assert "| small | 0 | 1 | 0 |" in text
    assert "| gpt2 | 0 | 0 | 1 |" in text
    assert "| exact | 1 | 0 | 0 |" in text


def test_the_ledger_says_how_many_statements_hold_of_a_claim_that_fails(made: Any) -> None:
    claim, found = (
        statement(f'{LOWER}\n[[statements]]\nsays = "not"\nkind = "lower"\nrow = "b"\nthan = "a"'),
        made(a=[[1.0]] * 3, b=[[2.0], [2.01], [1.99]]),
    )
    for number, kind in ((2, "fails"), (1, "holds")):
        some = claim.model_copy(update={"statements": claim.statements[:number]})
        lines = [(some, dict.fromkeys(SCALES, page.standing(some, "toy", found)))]
        held = " (1 of 2 hold)" if number == 2 else ""
        text = ledger.ledger(lines, {some.name: {"toy": found}})  # type: ignore[arg-type]
        assert f"| {kind} \\*{held} | {kind} | {kind} |" in text, "made-up runs are of an earlier recipe"


def test_the_ledger_says_how_many_claims_share_trainings(made: Any) -> None:
    """Of three claims two have the same softmax, under another name, and one of these two fails."""
    names = ("first", "second", "third")
    claim = statement(LOWER)
    lines = [
        (claim.model_copy(update={"name": name}), dict.fromkeys(SCALES, verdict))
        for name, verdict in zip(names, ("fails", "holds", "fails"), strict=True)
    ]
    found = {name: {"toy": made(a=[[1.0]] * 3, b=[[2.0]] * 3)} for name in names}
    for number, results in enumerate(one["toy"] for one in found.values()):
        for index, run in enumerate(results.runs):
            run.info.train_loss = [(10, 100.0 * number + index)]
    found["second"]["toy"].runs[4].info.train_loss = [(10, 1.0)]
    text = " ".join(ledger.ledger(lines, found).split())  # type: ignore[arg-type]
    assert "At the scale `toy` 2 of the 3 claims that were judged share trainings with others" in text
    assert "others, including 1 of the 2 that fail. The verdicts of these are not independent." in text
    assert "share trainings" not in ledger.ledger(lines, {})  # type: ignore[arg-type]


def run_softmax(results: Results, *rows: str) -> None:
    """Make rows those of softmax, evaluated with a window, too."""
    for row in rows:
        for run in results.of(row):
            run.info.mechanism = "softmax"
            if run.evaluation is None:
                continue
            run.evaluation.mechanism = "softmax"
            window = run.evaluation.rows[1].model_copy(update={"setting": Setting(window=run.info.train_length)})
            run.evaluation.rows.append(window)


def test_the_column_beside_the_window_needs_a_softmax(made: Any) -> None:
    losses = [[1.0, 2.0]] * 3
    results = made(t6_softmax=losses, b=[[1.0, 2.5]] * 3)
    assert "beside the window" not in page.page(statement(LOWER), {"toy": results})
    assert "The last column" not in page.page(statement(LOWER), {"toy": results})
    run_softmax(results, "t6_softmax")  # its name does not matter
    text = page.page(statement(LOWER), {"toy": results})
    assert "difference from t6_softmax with window 1x at 2x" in " ".join(text.split())
    assert "| as trained | trained | 1x | 2x | beside the window |" in text
    assert "| b | 3 seeds | 1.000 ± 0.000 | 2.500 ± 0.000 | +0.500 ± 0.000 |" in text
    assert "| t6_softmax | 3 seeds | 1.000 ± 0.000 | 2.000 ± 0.000 | +0.000 ± 0.000 |" in text, "as trained"
    run_softmax(results, "b")
    text = page.page(statement(LOWER), {"toy": results})
    assert "beside the window" not in text, "no one knows which of two softmax models is meant"
    results = made(a=losses, b=["diverged"] * 3)
    run_softmax(results, "a", "b")
    text = page.page(statement(LOWER), {"toy": results})
    assert "beside the window" not in text, "one of them has no loss"


def test_results_read_back_equal(made: Any, tmp_path: Path) -> None:
    results = made(a=[[1.0, math.nan], [1.0, 2.0], "diverged"])
    (tmp_path / "results.json").write_text(json_text(results))
    second = read_results(tmp_path / "results.json")
    assert json_text(second) == json_text(results)
    with pytest.raises(LabError, match="there is no"):
        read_results(tmp_path / "gone.json")


def test_a_row_may_change_a_recipe_of_its_own(made: Any) -> None:
    text = CLAIM.replace("b = {", 'b = { base = { toy = "toy-t6", small = "small-t6", gpt2 = "gpt2-124m-t6" },')
    claim = parse("x", text)
    found = claims.recipes(claim, "toy", [0, 1], ["train.steps=50"])
    assert [(one.name, one.model.architecture, one.train.steps) for one in found] == [
        (f"{row}-s{seed}", architecture, 50)
        for seed in (0, 1)
        for row, architecture in (("a", "gpt_neox"), ("b", "t6"))
    ]
    shown = page.page(claim, {"toy": made(a=[[1.0]] * 3, b=[[2.0]] * 3)})
    assert "on the recipes `toy`, `toy-t6` (" in " ".join(shown.split())


def test_a_page_of_what_is_measured_sample_by_sample(made: Any, tmp_path: Path) -> None:
    """Loss and error rate stand in tables of their own, and a statement may be about either."""
    text = LOWER + '\nsetting = "error rate"'
    results = made(a=[[1.0]] * 3, b=[[2.0]] * 3)
    for run in results.runs:
        row = run.evaluation.rows[0]
        share = 0.5 if run.row == "a" else 0.25
        bucket = Bucket(start=0, end=1, loss=share, standard_error=0.1, tokens=8, sums=[4 * share, 4 * share])
        error = row.model_copy(
            update={"setting": WRONG, "loss": share, "windows_by_document": [4, 4], "buckets": [bucket]}
        )
        run.evaluation.rows = [row, error]
    assert verdict(text, results) == "fails"
    assert verdict(LOWER, results) == "holds"
    claim = statement(text).model_copy(update={"bases": {"toy": "vit-toy"}, "away": {"gpt2": "ImageNet is far"}})
    shown = " ".join(page.page(claim, {"toy": results}).split())
    for said in (
        "| fails | it | a 1x, error rate 0.500, b 1x, error rate 0.250: +0.250 ± 0.000 |",
        "on the recipe `vit-toy`",
        "| error rate | trained | mean | | --- | --- | --- | | a | 3 seeds | 0.500 ± 0.000 |",
        "| as trained | trained | mean | | --- | --- | --- | | a | 3 seeds | 1.000 ± 0.000 |",
        "**Not testable here:** ImageNet is far.",
    ):
        assert said in shown
    assert page.standing(claim, "gpt2", None) == "not testable here"
    groups = [group for row in results.rows if (group := results.group(row)) is not None]
    save_png(figure.draw(groups, None, title="t"), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


# Running one


CLAIM = """
title = "Two rows"
source = "a paper, table 1"
says = "b is lower than a."
[rows]
a = { model.mechanism = "softmax", evaluate.mechanisms = ["lssa"] }
b = { model.mechanism = "lssar" }
[[statements]]
says = "b is lower than a"
kind = "lower"
row = "b"
than = "a"
[[statements]]
says = "a run as LSSA is higher"
kind = "lower"
row = "a"
than = "a"
than_setting = "dynamic NTK, run as lssa"
at = "2x"
"""


@pytest.fixture
def two(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Claim:
    """A claim of two rows on the tiny recipe, in place of all that is shipped."""
    claim = parse("two", CLAIM)
    monkeypatch.setitem(claims.BASES, "toy", str(tiny))
    monkeypatch.setattr(claims, "shipped", lambda: ["two"])
    monkeypatch.setattr(claims, "load", lambda name: claim)
    return claim


def console() -> Console:
    return Console(file=io.StringIO(), width=250)


def said(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def finish(recipe: Recipe, folder: Path) -> None:
    """Do here what a worker does: a process of its own takes seconds to start."""
    train(recipe, folder / recipe.name)
    length = recipe.train.length
    settings = default_settings(length, recipe.evaluate.mechanisms)
    evaluate(folder / recipe.name, [length, 2 * length, 4 * length], settings=settings)


@pytest.mark.long
def test_reproduce_runs_what_is_left_and_judges_all(
    two: Claim, tmp_path: Path, monkeypatch: Any, workers_here: list[str]
) -> None:
    out, screen = tmp_path / "out", console()
    *there, left = recipes(two, "toy", range(3))
    for recipe in there[:-1]:
        finish(recipe, out)
    diverging = there[-1]
    with monkeypatch.context() as patch:
        patch.setattr(WindowTrainer, "compute_loss", _not_a_number)
        with pytest.raises(Diverged):
            train(diverging, out / diverging.name)
    assert load_run(out / diverging.name, complete=False).status == "diverged"
    made = reproduce("two", out, jobs=1, console=screen)
    assert made is not None
    assert "Two rows: 6 runs, 1 of them left: about" in said(screen)
    assert f"{diverging.name}: has diverged already" in said(screen)
    assert [Path(path).stem for path in workers_here] == [left.name]
    assert [len(made.of(row)) for row in ("a", "b")] == [3, 3]
    assert [run.diverged for run in made.of("a")] == [False, False, True]
    assert load_run(out / left.name).status == "complete"
    assert all(run.info.gradient_norm for run in made.of("b"))
    assert "two at the scale toy: inconclusive" in said(screen)
    assert "a 1x diverged in 1 of 3 trainings" in said(screen)
    place = out / PUBLISHED / "two" / "toy"
    assert json_text(read_results(place / "results.json")) == json_text(made)
    assert (place / "figure.png").stat().st_size > 5_000
    text = (out / PUBLISHED / "two.md").read_text()
    assert "the loss became nan at step 1" in text
    assert "| dynamic NTK, run as lssa | trained |" in text
    assert str(tmp_path) not in text + (place / "results.json").read_text()
    before = (out / PUBLISHED / "two.md").read_bytes()
    ledger.report(out / PUBLISHED)
    assert before == (out / PUBLISHED / "two.md").read_bytes()


@pytest.mark.long
def test_finished_runs_of_further_seeds_are_judged(two: Claim, tmp_path: Path) -> None:
    """Of seeds that all rows have: results.json is written anew, and loses none of them."""
    for recipe in recipes(two, "toy", range(2)):
        finish(recipe, tmp_path)
    for row in ("a", "b"):
        # Of another recipe than that of seed 3
        shutil.copytree(tmp_path / f"{row}-s1", tmp_path / f"{row}-s3")
    (tmp_path / "a-s4").mkdir()
    (tmp_path / "a-slow").mkdir()

    def judged() -> tuple[Results | None, str]:
        screen = console()
        return reproduce("two", tmp_path, seeds=1, console=screen), said(screen)

    both = reproduce("two", tmp_path, seeds=2, console=console())
    again, told = judged()
    assert both is not None
    assert again is not None
    assert again.runs == both.runs
    assert [(run.row, run.info.seed) for run in again.runs] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert f"Two rows: the runs of seed 1 in {tmp_path} are judged, too" in told
    assert "seeds 0, 1" in (tmp_path / PUBLISHED / "two.md").read_text()
    info = load_run(tmp_path / "b-s1")
    save_run(tmp_path / "b-s1", info.model_copy(update={"corpus_key": "another"}))
    alone, told = judged()
    assert alone is not None
    assert [run.info.seed for run in alone.runs] == [0, 0]
    assert "the runs of seed 1 are left out" in told
    assert "b-s1 was trained on another, and the runs of the first seeds on " in " ".join(told.split())
    for name in ("a-s0", "b-s0", "a-s1"):  # the data has changed since, for all of them alike
        save_run(tmp_path / name, load_run(tmp_path / name).model_copy(update={"corpus_key": "another"}))
    alike, told = judged()
    assert alike is not None
    assert [run.info.seed for run in alike.runs] == [0, 0, 1, 1]
    for name in ("a-s0", "b-s0", "a-s1"):
        save_run(tmp_path / name, load_run(tmp_path / name).model_copy(update={"corpus_key": info.corpus_key}))
    save_run(tmp_path / "b-s1", info)
    (tmp_path / "b-s1" / "evaluation.json").unlink()
    alone, told = judged()
    assert alone is not None
    assert [(run.row, run.info.seed) for run in alone.runs] == [("a", 0), ("b", 0)]
    assert "judged, too" not in told


@pytest.mark.long
def test_published_runs_hold_what_their_claims_ask_for() -> None:
    """Whatever their recipes say: another claim may have trained them, or wanted more."""
    compared = 0
    for path in sorted(PUBLIC.glob("*/*/results.json")):
        claim, results = claims.load(path.parent.parent.name), read_results(path)
        seeds = sorted({run.info.seed for run in results.runs})
        now = {recipe.name: recipe for recipe in recipes(claim, path.parent.name, seeds, results.overrides)}
        for run in results.runs:
            if wanted := now.get(f"{run.row}-s{run.info.seed}"):
                compared += 1
                differing = earlier_runs._differing(run, wanted)
                assert not [line for line in differing if line.startswith(("evaluate.also", "evaluate.mech"))], path
                if run.also and wanted.evaluate.also:
                    nothing = {"attention": [], "induction": [], "passkeys": [], "classification": None, "tasks": None}
                    without = run.model_copy(update=nothing)
                    assert "evaluate.also" in " ".join(earlier_runs._differing(without, wanted))
    assert compared > 100


@pytest.mark.long
def test_earlier_runs_are_not_trained_again(two: Claim, tmp_path: Path, monkeypatch: Any) -> None:
    first, second, screen = tmp_path / "first", tmp_path / "second", console()
    for recipe in recipes(two, "toy", [0]):
        finish(recipe, first)
    before = reproduce("two", first, seeds=1, console=console())
    assert before is not None
    for recipe in recipes(two, "toy", [1]):
        finish(recipe, second)
    made = reproduce("two", second, seeds=2, earlier=first / PUBLISHED, console=screen)
    assert made is not None
    assert "2 of 4 runs are taken from" in said(screen)
    assert "Two rows: 2 runs, none of them left" in said(screen)
    assert [(run.row, run.info.seed) for run in made.runs] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert json_text(before.runs[0]) == json_text(made.runs[0])
    assert not (second / "a-s0").exists()
    with monkeypatch.context() as patch:
        patch.setattr(data, "load", lambda *_: pytest.fail("the corpus was tokenised"))
        patch.setenv("SOFTFOCUS_CACHE", str(tmp_path / "cache"))
        both = reproduce("two", tmp_path / "third", seeds=2, earlier=second / PUBLISHED, console=console())
    assert both is not None
    assert both.runs == made.runs
    assert not (tmp_path / "cache").exists(), "only the key is needed"
    screen = console()
    further = reproduce("two", tmp_path / "fourth", seeds=1, earlier=second / PUBLISHED, console=screen)
    assert further is not None
    assert further.runs == made.runs
    assert f"the runs of seed 1 in {tmp_path / 'fourth'} or {second / PUBLISHED} are judged, too" in said(screen)

    with monkeypatch.context() as patch:
        patch.setattr(data, "key", lambda _: "another")
        with pytest.raises(LabError, match=r"run a-s0 of .* was trained on \w+, and here is another"):
            reproduce("two", second, seeds=3, earlier=first / PUBLISHED, console=console())
    two.rows["b"]["train"] = {"steps": 11}
    with pytest.raises(LabError, match=r"run b-s0 of .* has another recipe: train\.steps was 10 and is 11; leave"):
        reproduce("two", second, seeds=3, earlier=first / PUBLISHED, console=console())


@pytest.mark.long
def test_rows_that_claims_share_are_taken_from_either(two: Claim, tmp_path: Path, monkeypatch: Any) -> None:
    """From the claim's own results first, and a row as a whole from one of them."""
    for recipe in recipes(two, "toy", [0]):
        finish(recipe, tmp_path / "first")
    before = reproduce("two", tmp_path / "first", seeds=1, console=console())
    assert before is not None
    known = {"two": two, "other": parse("other", CLAIM.replace("b = {", "c = {").replace('"b"', '"c"'))}
    monkeypatch.setattr(claims, "shipped", lambda: list(known))
    monkeypatch.setattr(claims, "load", known.__getitem__)
    found = earlier_runs.runs(
        known["other"], "toy", recipes(known["other"], "toy", [0]), tmp_path / "first" / PUBLISHED
    )
    assert {name: json_text(run) for name, run in found.items()} == {"a-s0": json_text(before.runs[0])}
    assert earlier_runs.names(known["other"], "toy", tmp_path / "first" / PUBLISHED) == ["a-s0"]
    # One that lacks a measurement is not taken, and not refused: it is trained
    inspected = (
        CLAIM.replace("b = {", "c = {").replace('"b"', '"c"').replace("a = {", 'a = { evaluate.also = ["attention"],')
    )
    wanted = parse("inspected", inspected)
    with pytest.raises(
        LabError, match=r"holds no inspected/toy/results\.json, and no results of a claim that shares its"
    ):
        earlier_runs.runs(wanted, "toy", recipes(wanted, "toy", [0]), tmp_path / "first" / PUBLISHED)
    inspected = inspected.replace('c = { model.mechanism = "lssar"', 'b = { model.mechanism = "lssar"').replace(
        '"c"', '"b"'
    )
    both = parse("inspected", inspected)
    found = earlier_runs.runs(both, "toy", recipes(both, "toy", [0]), tmp_path / "first" / PUBLISHED)
    assert found.keys() == {"b-s0"}
    # One of the same name and another recipe is passed over, if there is one of the same recipe
    rate = f"learning_rate = {tomllib.loads(before.runs[0].recipe)['train']['learning_rate']}"
    changed = [
        run.model_copy(update={"recipe": run.recipe.replace(rate, "learning_rate = 0.5")}) for run in before.runs
    ]
    place = tmp_path / "first" / PUBLISHED / "zero" / "toy"
    place.mkdir(parents=True)
    (place / "results.json").write_text(json_text(before.model_copy(update={"runs": changed})))
    known = {"zero": parse("zero", CLAIM)} | known
    monkeypatch.setattr(claims, "shipped", lambda: list(known))
    monkeypatch.setattr(claims, "load", known.__getitem__)
    plan = recipes(known["other"], "toy", [0])
    found = earlier_runs.runs(known["other"], "toy", plan, tmp_path / "first" / PUBLISHED)
    assert {name: json_text(run) for name, run in found.items()} == {"a-s0": json_text(before.runs[0])}
    shutil.rmtree(tmp_path / "first" / PUBLISHED / "two")
    with pytest.raises(LabError, match=r"run a-s0 of .* has another recipe: train\.learning_rate was 0\.5 and is"):
        earlier_runs.runs(known["other"], "toy", plan, tmp_path / "first" / PUBLISHED)


def test_a_folder_without_earlier_runs_is_named(two: Claim, tmp_path: Path) -> None:
    """By the option, with what it takes."""
    takes = r"; name one that holds CLAIM/SCALE/results\.json, as docs/results/claims does, or leave --from out$"
    with pytest.raises(LabError, match=f"^--from: there is no folder {tmp_path / 'nope'}{takes}"):
        reproduce("two", tmp_path / "out", earlier=tmp_path / "nope", console=console())
    nothing = r"holds no two/toy/results\.json, and no results of a claim that shares its rows"
    with pytest.raises(LabError, match=rf"^--from: {tmp_path} {nothing}{takes}"):
        reproduce("two", tmp_path / "out", earlier=tmp_path, console=console())


@pytest.mark.long
def test_keys_are_changed_in_all_rows(two: Claim, tmp_path: Path) -> None:
    """The pages say which, and today's recipes are read with the same ones."""
    text = tmp_path / "texts here"
    shutil.copytree(Path(loading.load(claims.BASES["toy"]).data.source or "").parent, text)
    changes = [f"data.source={text}", "train.steps=7"]
    for recipe in recipes(two, "toy", [0], changes):
        assert (recipe.data.source, recipe.train.steps) == (str(text), 7)
        finish(recipe, tmp_path / "out")
    made = reproduce("two", tmp_path / "out", seeds=1, overrides=changes, console=console())
    assert made is not None
    assert made.overrides == ['data.source="texts here"', "train.steps=7"]
    shown = " ".join((tmp_path / "out" / PUBLISHED / "two.md").read_text().split())
    assert 'with `data.source="texts here"`, `train.steps=7` (' in shown
    assert "--seeds 1 --set 'data.source=\"texts here\"' --set train.steps=7`." in shown
    assert "earlier recipe" not in shown
    differs = r"has another recipe: data\.source was 'texts here' .* train\.steps was 7 .*; give --set 'data.source="
    with pytest.raises(LabError, match=differs):
        reproduce("two", tmp_path / "more", seeds=1, earlier=tmp_path / "out" / PUBLISHED, console=console())
    again = reproduce(
        "two", tmp_path / "more", seeds=1, overrides=changes, earlier=tmp_path / "out" / PUBLISHED, console=console()
    )
    assert again is not None
    assert again.runs == made.runs


@pytest.mark.long
def test_results_whose_changed_keys_are_gone_are_of_an_earlier_recipe(two: Claim, tmp_path: Path) -> None:
    for recipe in recipes(two, "toy", [0]):
        finish(recipe, tmp_path)
    results = reproduce("two", tmp_path, seeds=1, console=console())
    assert results is not None
    results.overrides = ["train.bacth=3"]
    shown = " ".join(page.page(two, {"toy": results}).split())
    assert "earlier recipe, and not again since it changed.** Since then: recipe" in shown
    assert "has no key 'train.bacth'" in shown


@pytest.mark.long
def test_earlier_runs_may_have_measured_more(two: Claim, tmp_path: Path) -> None:
    for recipe in recipes(two, "toy", [0]):
        finish(recipe, tmp_path / "out")
    before = reproduce("two", tmp_path / "out", seeds=1, console=console())
    assert before is not None
    for row in two.rows.values():
        row.get("evaluate", {}).pop("mechanisms", None)
    earlier = tmp_path / "out" / PUBLISHED
    after = reproduce("two", tmp_path / "more", seeds=1, earlier=earlier, console=console())
    assert after is not None
    assert after.runs == before.runs
    two.rows["b"]["evaluate"] = {"mechanisms": ["lssar"]}
    with pytest.raises(LabError, match=r"run b-s0 of .* has another recipe: evaluate\.mechanisms was"):
        reproduce("two", tmp_path / "more", seeds=1, earlier=earlier, console=console())


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("model.mechanism=laser", "--set model.mechanism: rows of two set it"),
        ("model=3", "--set model: rows of two set it"),
        ("train.seed=3", "--set train.seed: each row is trained with several seeds; say how many with --seeds"),
        ("train.step=3", "did you mean 'train.steps'"),
        ("train.steps", "is not KEY=VALUE"),
        ("model.config={}", "--set model.config: 'model.config={}' is a whole table"),
        ("model.config={hidden_size=64}", "--set model.config: 'model.config={hidden_size=64}' is a whole table"),
    ],
)
def test_keys_that_all_rows_cannot_share_are_refused(two: Claim, override: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        recipes(two, "toy", [0], [override])
    assert what in str(caught.value)


@pytest.mark.long
def test_pages_say_which_results_are_of_an_earlier_recipe(two: Claim, tmp_path: Path) -> None:
    for recipe in recipes(two, "toy", [0]):
        finish(recipe, tmp_path)
    results = reproduce("two", tmp_path, seeds=1, console=console())
    assert results is not None

    def told() -> tuple[str, str]:
        found: dict[str, dict[Any, Results]] = {"two": {"toy": results}}
        shown = ledger.ledger([(two, dict.fromkeys(SCALES, "holds"))], found)  # type: ignore[arg-type]
        return " ".join(page.page(two, {"toy": results}).split()), shown

    shown, listed = told()
    assert "earlier recipe" not in shown + listed
    assert "| holds | holds | holds |" in listed
    two.rows["b"]["evaluate"] = {"tokens": 64}  # not of the training
    assert told() == (shown, listed)
    two.rows["b"]["train"] = {"steps": 11}
    shown, listed = told()
    assert "earlier recipe, and not again since it changed.** Since then: " in shown
    assert "train.steps was 10 and is 11." in shown
    assert "| holds \\* | holds | holds |" in listed
    assert "with an earlier recipe" in listed
    del two.rows["b"]
    assert "the row is no longer there" in told()[0]


@pytest.mark.long
def test_zero_shot_tasks_are_measured_where_the_harness_is(two: Claim, tmp_path: Path, monkeypatch: Any) -> None:
    """With a fake lm_eval, in the processes of the workers, too: all but its own part is ours."""
    for row in two.rows.values():
        row["evaluate"] = {**row.get("evaluate", {}), "also": ["tasks"]}
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("softfocus.lab.evaluate.tasks.find_spec", lambda name: None)
        with pytest.raises(
            LabError,
            match=r"takes lm_eval, which is not installed; in your checkout of softfocus run pip install",
        ):
            reproduce("two", out, seeds=1, console=console())
        assert not out.exists()
    fake = tmp_path / "fake" / "lm_eval"
    (fake / "models").mkdir(parents=True)
    (fake / "models" / "__init__.py").write_text("")
    (fake / "models" / "huggingface.py").write_text(_HFLM)
    (fake / "__init__.py").write_text(_HARNESS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(fake.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(fake.parent))
    first, second = recipes(two, "toy", [0])
    finish(first, out)
    finish(second, out)
    answer(out / first.name)
    made = reproduce("two", out, seeds=1, jobs=1, console=console())
    assert made is not None
    rows = [run.tasks.rows for run in made.runs if run.tasks is not None]
    assert [[row.task for row in one] for one in rows] == [["arc_easy", "hellaswag", "piqa", "sciq"]] * 2
    assert rows[0][0].accuracy == rows[1][0].accuracy == 0.25
    assert rows[0][3].standard_error == 0.04
    assert {tuple(row.right) for row in rows[0]} == {(0, 1, 0, 0)}
    assert [row.normalised for row in rows[0]] == [None, None, 0.5, None]
    (fake / "__init__.py").write_text("def simple_evaluate(**_): raise OSError('no network')")
    _forget_lm_eval()
    with pytest.raises(LabError, match=r"lm_eval cannot measure arc_easy, .*: no network; check the network"):
        answer(out / first.name)
    _forget_lm_eval()


def _forget_lm_eval() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        del sys.modules[name]


@pytest.mark.long
def test_zero_shot_tasks_with_the_harness_itself(two: Claim, tmp_path: Path, questions: None) -> None:
    """Its own tasks, metrics and model; only the questions are made up, as there is no hub here."""
    recipe = recipes(two, "toy", [0])[0]
    folder = tmp_path / recipe.name
    train(recipe, folder)
    found = answer(folder)
    assert [row.task for row in found.rows] == list(TASKS)
    for row in found.rows:
        assert len(row.right) == 4
        assert row.accuracy == sum(row.right) / 4
        assert row.standard_error > 0 or row.accuracy in (0, 1)
    assert found.harness != "unknown"
    assert answer(folder).rows == found.rows


_HFLM = """
class HFLM:
    def __init__(self, pretrained, tokenizer, batch_size, max_length, mixed_precision_dtype, softmax_dtype):
        assert not pretrained.training and max_length == 32
        ids = tokenizer("a question", return_tensors="pt").input_ids
        assert pretrained(input_ids=ids.to(pretrained.device)).logits.isfinite().all()
"""

_HARNESS = """
def simple_evaluate(model, tasks, num_fewshot, log_samples):
    assert type(model).__name__ == "HFLM" and num_fewshot == 0 and log_samples
    results = {task: {"acc,none": 0.25, "acc_stderr,none": 0.01 * n} for n, task in enumerate(tasks, 1)}
    results["piqa"]["acc_norm,none"] = 0.5
    samples = [{"doc_id": at, "acc": 1.0 if at == 1 else 0.0} for at in (2, 0, 1, 3)]
    return {"results": results, "samples": {task: samples for task in tasks}}
"""


@pytest.mark.slow
def test_runs_of_two_processes_are_measured_once(two: Claim, tmp_path: Path) -> None:
    """What a machine with several GPUs does, on the CPU."""
    made = reproduce("two", tmp_path / "out", seeds=1, jobs=1, processes=2, console=console())
    assert made is not None
    assert [run.info.status for run in made.runs] == ["complete"] * 2
    assert all(run.evaluation is not None and len(run.evaluation.rows) >= 9 for run in made.runs)
    assert page.standing(two, "toy", made) == "too few seeds"


def _not_a_number(self: WindowTrainer, model: Any, inputs: dict[str, torch.Tensor], **_: Any) -> torch.Tensor:
    return model(input_ids=inputs["input_ids"]).logits.mean() * math.nan


@pytest.mark.parametrize(
    ("jobs", "processes", "needed", "remedy"),
    [
        (1, 1, "of memory", ""),
        (2, 1, "of memory in each of 2 at a time", "take fewer runs at a time or "),
        (1, 3, "of memory in each of 3 processes", "take fewer processes a run or "),
        (
            2, 3, "of memory in each of 3 processes of each of 2 at a time",
            "take fewer runs at a time, take fewer processes a run or ",
        ),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_before_anything_starts(
    two: Claim, tmp_path: Path, monkeypatch: Any, jobs: int, processes: int, needed: str, remedy: str
) -> None:
    """Processes on CPUs share the memory. The remedy names what `reproduce` can change: this is the
    smallest scale.
    """
    monkeypatch.setattr(study, "cores", lambda: 2)
    each = max(memory.least_memory(recipe, processes).size for recipe in recipes(two, "toy", [0]))

    def free(amount: int) -> None:
        monkeypatch.setattr(memory, "_free_memory", lambda: ("this machine", amount))

    free(each * jobs * processes - 1)
    with pytest.raises(LabError) as refused:
        reproduce("two", tmp_path / "out", jobs=jobs, processes=processes, console=console())
    assert f"needs at least {size_text(each)} {needed}, and this machine has" in str(refused.value)
    assert str(refused.value).endswith(f"B free; {remedy}use a machine with more memory")
    assert not (tmp_path / "out").exists()
    free(each * jobs * processes)
    reproduce("two", tmp_path / "out", jobs=jobs, processes=processes, estimate_only=True, console=console())


def test_a_smaller_scale_is_named_where_there_is_one(two: Claim, tmp_path: Path, monkeypatch: Any) -> None:
    """On GPUs more processes have fewer logits each."""
    monkeypatch.setitem(claims.BASES, "gpt2", claims.BASES["toy"])
    monkeypatch.setattr(memory, "_free_memory", lambda: ("the GPU", 1000))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    smaller = r"; choose --scale toy or small, "
    for processes, remedy in ((2, r"take more processes a run or use a GPU"), (8, None)):
        end = smaller + remedy if remedy else r"; choose --scale toy or small or use a GPU"
        with pytest.raises(LabError, match=f"{end} with more memory$"):
            reproduce("two", tmp_path / "out", scale="gpt2", processes=processes, console=console())
    two.untestable["small"] = "no"
    with pytest.raises(LabError, match=r"; choose --scale toy or use a GPU with more memory$"):
        reproduce("two", tmp_path / "out", scale="gpt2", processes=8, console=console())


def test_more_processes_than_gpus_are_refused(two: Claim, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UsageError, match="--processes: got 8, expected at most 4; each process needs a GPU of its own"):
        reproduce("two", tmp_path / "out", processes=8, console=console())
    assert not (tmp_path / "out").exists()


def test_a_training_that_cannot_fit_is_refused_before_its_corpus(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "_free_memory", lambda: ("this machine", 100_000))
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the corpus was read"))
    with pytest.raises(
        LabError,
        match=r"tiny needs at least .*[KM]B of memory, and this .*B free; "
        "choose a smaller model, raise train.accumulate or use a machine with more memory$",
    ):
        train(loading.load(tiny), tmp_path / "out")
    assert not (tmp_path / "out" / "run.json").exists()


@pytest.mark.parametrize("size", ["", "8k", "-5", "9" * 20])
def test_a_size_that_is_none_is_told_as_the_tokenizer_tells_it(tiny: Path, tmp_path: Path, size: str) -> None:
    """Memory is checked before the tokenizer is made, and takes the size from its name."""
    with pytest.raises(LabError, match="has no vocabulary size from 257 to 1048576"):
        train(loading.load(tiny, [f"data.tokenizer=bpe:{size}"]), tmp_path / "out")


def test_what_torch_keeps_of_the_gpu_is_free(monkeypatch: Any) -> None:
    """Driver: 1,000 bytes free. Torch: 700 taken, 300 of them in use."""
    for name, value in (
        ("is_available", True), ("mem_get_info", (1000, 2000)), ("memory_reserved", 700), ("memory_allocated", 300)
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert memory._free_memory() == ("the GPU", 1400)


def test_shards_that_are_copied_are_counted(two: Claim, tmp_path: Path, monkeypatch: Any) -> None:
    """Before anything is timed or written. Once they are in the cache they are not counted."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in ("val_0", "train_0", "train_1"):
        head = np.zeros(256, "<i4")
        head[:3] = 20240520, 1, 2000
        ids = np.arange(2000, dtype="<u2") % 250
        (shards / f"{name}.bin").write_bytes(head.tobytes() + ids.tobytes())
    for row in two.rows.values():
        row["data"] = {"source": str(shards)}
    monkeypatch.setenv("SOFTFOCUS_CACHE", str(tmp_path / "cache"))
    assert data.to_copy(recipes(two, "toy", [0])) == 3 * (1024 + 4000), "once for both rows"
    screen = console()
    reproduce("two", tmp_path / "out", seeds=1, estimate_only=True, console=screen)
    assert "Two rows: 15.1 KB of shards are copied into the token cache first" in said(screen)
    assert data.to_copy(recipes(two, "toy", [0])) == 0
    again = console()
    reproduce("two", tmp_path / "out", seeds=1, estimate_only=True, console=again)
    assert "shards" not in said(again)
    monkeypatch.setenv("SOFTFOCUS_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    with pytest.raises(LabError, match=r"elsewhere has 10\.0 KB free, and 15\.1 KB of shards are copied there"):
        reproduce("two", tmp_path / "out", seeds=1, console=console())
    with pytest.raises(LabError, match="of shards are copied there"):
        train(recipes(two, "toy", [0])[0], tmp_path / "run")
    assert not (tmp_path / "elsewhere" / "out").exists()
    monkeypatch.setenv("SOFTFOCUS_CACHE", str(tmp_path / "third"))
    # Each of two sources would fit, and both do not
    shutil.copytree(shards, tmp_path / "more")
    two.rows["b"]["data"] = {"source": str(tmp_path / "more")}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20_000))
    with pytest.raises(LabError, match="of shards are copied there"):
        reproduce("two", tmp_path / "out", seeds=1, estimate_only=True, console=console())
    assert not (tmp_path / "third").exists()


def test_where_fineweb_is_missing_the_error_fetches_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    command = "hf download kjj0/fineweb10B-gpt2 --repo-type dataset --local-dir fineweb10B"
    assert command in (ROOT / "docs" / "claims.md").read_text()
    with pytest.raises(LabError, match=f"there is no file or folder fineweb10B; fetch its 20 GB with `{command}`"):
        data.load(recipes(claims.load("softplus-figure-1"), "gpt2", [0])[0], silent)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title = ", "claim x is not TOML"),
        ('title = "t"', "claim x: source: Field required"),
        (CLAIM.replace('row = "b"', 'row = "d"'), "there is no row 'd'"),
        (CLAIM.replace('kind = "lower"', 'kind = "lowest"'), "statements.0: Input tag 'lowest'"),
        (CLAIM.replace('than = "a"\n[[', 'than = "a"\nat = "far"\n[['), "should match pattern"),
        (CLAIM.split("[[")[0], "there is nothing to judge"),
        (CLAIM.replace("b = {", 'b = { base = "toy-t6",'), "rows.b.base must name a recipe for each scale"),
        (CLAIM.replace("b = {", 'b = { base = { toy = "toy-t6" },'), "of the claim: toy and small and gpt2"),
        (CLAIM.replace("b = {", "b = { base = { toy = 1, small = 2, gpt2 = 3 },"), "of the claim: toy and small and"),
        (CLAIM + '[paper]\ncolumns = ["1x"]\nrows = { a = [1.0, 2.0] }', "'a' has 2 cells for 1 columns"),
    ],
)
def test_mistakes_in_a_claim_are_one_line(text: str, says: str) -> None:
    with pytest.raises(LabError) as caught:
        parse("x", text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_or_cannot_be_run() -> None:
    with pytest.raises(UsageError, match="there is no claim 'softplus-table-11'; did you mean 'softplus-table-1'"):
        claims.load("softplus-table-11")
    with pytest.raises(UsageError, match="softplus-zero-shot cannot be run at the scale small: a model of 10 M"):
        recipes(claims.load("softplus-zero-shot"), "small", [0])
