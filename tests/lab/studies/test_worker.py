"""What a worker of a study does with a run that an earlier call has trained."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.induction import induction
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.evaluate.samples import evaluate_samples
from softfocus.lab.inspect.report import write
from softfocus.lab.inspect.run import inspect
from softfocus.lab.progress import Event
from softfocus.lab.recipes.lengths import parse
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import INSPECTION, MODEL, RUN, load_measured, load_run, save_measured
from softfocus.lab.run_folder.results import Evaluation
from softfocus.lab.studies import pool, worker
from softfocus.lab.studies.jobs import plan_jobs
from softfocus.lab.studies.study import train_all


@pytest.mark.long
@pytest.mark.parametrize("masked", [False, True])
def test_a_run_is_measured_again_on_other_text(tiny: Path, tmp_path: Path, masked: bool) -> None:
    """evaluate.tokens of the study's file decides, not of the run that is there."""
    changes = ["name=a"]
    if masked:
        changes += ["model.architecture=modernbert", "data.masked=0.2", "evaluate.lengths=1x"]

    def call(tokens: int) -> Recipe:
        recipe = load(tiny, [*changes, f"evaluate.tokens={tokens}"])
        (tmp_path / "a.toml").write_text(recipe.to_toml())
        worker._work(str(tmp_path / "a.toml"), tmp_path / "a", io.StringIO())
        assert load_measured(tmp_path / "a", Evaluation).tokens == tokens
        (job,) = plan_jobs(tmp_path, [recipe], ["a"])
        assert job.status == "finished"
        return recipe

    first = call(1024)
    if masked:
        evaluate_samples(tmp_path / "a", tokens=512)
        (job,) = plan_jobs(tmp_path, [first], ["a"])
        assert job.status == "waiting"
        call(1024)
    before = (tmp_path / "a" / RUN).read_bytes()
    call(2048)
    assert (tmp_path / "a" / RUN).read_bytes() == before, "it is not trained again"
    assert load_run(tmp_path / "a").status == "complete", "all its files have its token"
    if not masked:  # evaluated by hand since: evaluation.json decides, not the run's recipe
        evaluate(tmp_path / "a", parse(first.evaluate.lengths, first.train.length), tokens=1024)
        (job,) = plan_jobs(tmp_path, [first], ["a"])
        assert (job.status, job.replaced) == ("finished", "")
        evaluate(tmp_path / "a", parse(first.evaluate.lengths, first.train.length), tokens=2048)
    assert not plan_jobs(tmp_path, [first], ["a"], overwrite=True)[0].trained, "--overwrite trains it again"
    (job,) = plan_jobs(tmp_path, [first], ["a"])
    assert (job.status, job.trained) == ("waiting", True)
    longest = max(job.lengths)
    told = f"of other text (2,048 tokens, at up to {longest:,} each; asked for are 1,024, at up to {longest:,})"
    assert job.replaced == f"its {len(load_measured(tmp_path / 'a', Evaluation).rows)} losses are {told}"
    screen = Console(file=io.StringIO(), width=100)
    train_all("Again", [first], tmp_path, jobs=1, estimate_only=True, console=screen)
    assert f"a: {job.replaced}, and will be replaced" in " ".join(screen.file.getvalue().split())


@pytest.mark.parametrize("text", ["", "null", "[[[", "{", "[]", "{}"])
def test_a_run_whose_configuration_is_damaged_is_not_finished(
    text: str, tiny: Path, trained: Path, tmp_path: Path
) -> None:
    recipe, run = load(tiny, ["name=trained"]), shutil.copytree(trained, tmp_path / "trained")
    info = load_run(run)
    save_measured(run, Evaluation(**info.named, vocabulary=info.vocabulary, tokens=64, rows=[]))
    (run / MODEL / "config.json").write_text(text)
    with pytest.raises(LabError, match=r"model is damaged \(config\.json cannot be read\); put the file back .* train"):
        worker.possible_settings(recipe, run)
    (job,) = plan_jobs(tmp_path, [recipe], ["a"])
    assert job.status == "waiting"


@pytest.mark.parametrize(
    ("change", "scaled"),
    [
        ({}, {"trained", "ntk"}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, {"trained"}),
        ({"hidden_size": 16, "num_attention_heads": 2, "head_dim": 2}, {"trained"}),
        ({"rope_parameters": {}}, {"trained"}),
        ({"hidden_size": None, "d_model": 16, "head_dim": 16}, {"trained", "ntk"}),
    ],
    ids=["plain", "linear", "two dimensions", "none", "other names"],
)
def test_scalings_that_a_model_cannot_have_are_left_out(
    change: dict[str, Any], scaled: set[str], tiny: Path, trained: Path, tmp_path: Path
) -> None:
    """Else the run could never be evaluated: the scalings of a study are not the row's choice."""
    recipe, run = load(tiny, ["name=trained"]), shutil.copytree(trained, tmp_path / "trained")
    path = run / MODEL / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert {setting.rope for setting in worker.possible_settings(recipe, run)} == scaled


def work(recipe: Recipe, folder: Path) -> None:
    (folder / f"{recipe.name}.toml").write_text(recipe.to_toml())
    worker._work(str(folder / f"{recipe.name}.toml"), folder / recipe.name, io.StringIO())


@pytest.mark.long
def test_runs_of_a_study_read_the_same_text_whatever_was_evaluated_by_hand(tiny: Path, tmp_path: Path) -> None:
    recipes = [load(tiny, [f"name={name}", f"train.seed={seed}"]) for seed, name in enumerate("ab")]
    for recipe in recipes:
        work(recipe, tmp_path)
    longest = load_measured(tmp_path / "a", Evaluation).longest
    for options in ({"lengths": [16, 2 * longest]}, {"lengths": [32, longest], "tokens": 2 * longest}):
        evaluate(tmp_path / "a", **options)
        waiting, finished = plan_jobs(tmp_path, recipes, ["a", "b"])
        assert (waiting.status, finished.status) == ("waiting", "finished")
        work(recipes[0], tmp_path)
        assert [job.status for job in plan_jobs(tmp_path, recipes, ["a", "b"])] == ["finished", "finished"]
        assert len({load_measured(tmp_path / name, Evaluation).text_key for name in "ab"}) == 1


def test_a_model_without_rope_is_measured_without_its_scalings(tiny: Path, tmp_path: Path) -> None:
    config = "{n_embd = 16, n_layer = 1, n_head = 2, n_positions = 256}"
    text = load(tiny, ["name=a"]).to_toml()
    start, end = text.index("config = "), text.index("\n", text.index("config = "))
    (tmp_path / "gpt2.toml").write_text(
        (text[:start] + f"config = {config}" + text[end:]).replace('"gpt_neox"', '"gpt2"')
    )
    recipe = load(str(tmp_path / "gpt2.toml"))
    work(recipe, tmp_path)
    (job,) = plan_jobs(tmp_path, [recipe], ["a"])
    assert job.status == "finished"
    assert {row.setting.rope for row in load_measured(tmp_path / "a", Evaluation).rows} == {"trained"}


@pytest.mark.long
def test_attention_that_was_measured_on_another_text_is_measured_again(tiny: Path, tmp_path: Path) -> None:
    recipe = load(tiny, ["name=a", "evaluate.also=['attention']"])
    work(recipe, tmp_path)
    (job,) = plan_jobs(tmp_path, [recipe], ["a"])
    assert job.status == "finished"
    (tmp_path / "other.txt").write_text("another text, and not a short one. " * 40)
    write([inspect(tmp_path / "a", [16], text=tmp_path / "other.txt")], tmp_path / "a" / INSPECTION)
    (job,) = plan_jobs(tmp_path, [recipe], ["a"])
    assert job.status == "waiting"
    lengths = [recipe.train.length, max(job.lengths)]
    write([inspect(tmp_path / "a", lengths, tokens=max(lengths))], tmp_path / "a" / INSPECTION)
    assert plan_jobs(tmp_path, [recipe], ["a"])[0].status == "waiting", "of fewer tokens than a study asks for"
    write([inspect(tmp_path / "a", lengths)], tmp_path / "a" / INSPECTION)
    assert plan_jobs(tmp_path, [recipe], ["a"])[0].status == "finished"
    (tmp_path / "a" / INSPECTION / "inspect.json").write_text("{}")  # of another version
    (job,) = plan_jobs(tmp_path, [recipe], ["a"])
    assert job.status == "waiting"
    shutil.rmtree(tmp_path / "a" / MODEL)
    (job,) = plan_jobs(tmp_path, [recipe], ["a"])
    assert job.status == "waiting"


def test_half_a_line_of_a_worker_that_was_killed_is_no_message() -> None:
    whole = worker.to_line("train", Event(kind="step", run="a", done=1, total=2))
    one = pool.WorkerPool.__new__(pool.WorkerPool)
    assert one._hear(SimpleNamespace(), whole[: len(whole) // 2]) is False


@pytest.mark.long
def test_induction_that_was_measured_otherwise_is_measured_again(tiny: Path, tmp_path: Path) -> None:
    recipe = load(tiny, ["name=a", "evaluate.also=['induction']"])
    work(recipe, tmp_path)
    (job,) = plan_jobs(tmp_path, [recipe], ["a"])
    assert job.status == "finished"
    for options in ({"ngram": 2}, {"tokens": max(job.lengths)}):
        induction(tmp_path / "a", job.lengths, **options)
        assert plan_jobs(tmp_path, [recipe], ["a"])[0].status == "waiting"
        work(recipe, tmp_path)
        assert plan_jobs(tmp_path, [recipe], ["a"])[0].status == "finished"
