"""Studies: what rows and seeds make of a recipe, the estimate, a whole one, and what is refused.

Over 400 lines: the cases share two studies and what they make of made-up runs.
"""

import io
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from softfocus.lab import objective, progress
from softfocus.lab.cli.options import seeds_of
from softfocus.lab.errors import Interrupted, LabError, UsageError
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.evaluate.means import difference
from softfocus.lab.evaluate.recall import recall
from softfocus.lab.progress import Event, Listener
from softfocus.lab.recipes.lengths import parse
from softfocus.lab.recipes.loading import derive, load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.compare import compare
from softfocus.lab.report.recall import recall_tables
from softfocus.lab.report.recall_compare import RecallEntry, RecallReport, compare_recall, grouped
from softfocus.lab.report.recall_finding import share_of
from softfocus.lab.report.results import Report
from softfocus.lab.run_folder.disk import write_atomically
from softfocus.lab.run_folder.files import RECIPE, RUN, load_run, save_measured, save_run
from softfocus.lab.run_folder.owner import LOCK, owning
from softfocus.lab.run_folder.results import Answers, Recall, RecallRow
from softfocus.lab.studies import estimate, pool, study
from softfocus.lab.studies.demo import run_demo
from softfocus.lab.studies.jobs import TRAINING, Job, plan_jobs, refuse_other_data
from softfocus.lab.studies.screen import Screen
from softfocus.lab.studies.study import run_study, train_all
from softfocus.lab.train.run import train

TASK = """
title = "A task"
base = "mqar"
seeds = [0, 1]
[rows.short.model.config]
hidden_size = 16
intermediate_size = 16
[rows.short.data.mqar]
pairs = 2
queries = 2
keys = 16
values = 4
filler = 4
[rows.short.train]
length = 16
steps = 3
warmup = 1
batch = 4
[rows.short.evaluate]
lengths = "1x,2x"
"""


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def finish(recipe: Recipe, out: Path) -> None:
    """Do here what a worker does: a process of its own takes seconds to start."""
    train(recipe, out / recipe.name)
    evaluate(out / recipe.name, parse(recipe.evaluate.lengths, recipe.train.length))


def stop_at_row(count: int) -> Listener:
    """A listener that stops the work when so many rows are finished."""
    rows = []

    def listen(event: Event) -> None:
        rows.extend([event] if event.kind == "row" else [])
        if len(rows) == count:
            raise KeyboardInterrupt

    return listen


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A study of one row and two seeds on a generated task."""
    path = tmp_path / "task.toml"
    path.write_text(TASK)
    return path


@pytest.fixture
def two_rows(tiny: Path, tmp_path: Path) -> Path:
    """A study of two rows and two seeds on the tiny recipe."""
    path = tmp_path / "two.toml"
    path.write_text(
        f"""
        title = "Two rows"
        base = "{tiny}"
        seeds = [3, 4]
        [rows.plain]
        model.mechanism = "softmax"
        [rows.local]
        model.layout."*" = [{{ heads = 1, window = 8 }}, {{ heads = 1 }}]
        train.learning_rate = 2e-2
        """
    )
    return path


@pytest.mark.parametrize("name", study.shipped())
def test_shipped_studies_make_recipes(name: str) -> None:
    found, near = study.load(name)
    made = study.recipes(found, near)
    assert len(made) == len(found.seeds) * len(found.rows)
    assert len({recipe.name for recipe in made}) == len(made)
    of_one_seed = [recipe.model_copy(update={"name": ""}).to_toml() for recipe in study.recipes(found, near, [7])]
    assert len(set(of_one_seed)) == len(found.rows), "two rows are the same"


def test_rows_and_seeds(two_rows: Path, tiny: Path) -> None:
    found = study.recipes(*study.load(str(two_rows)))
    assert [recipe.name for recipe in found] == ["plain-s3", "local-s3", "plain-s4", "local-s4"]
    assert [recipe.train.seed for recipe in found] == [3, 3, 4, 4]
    by_hand = load(tiny, ["name=plain-s3", "model.mechanism=softmax", "train.seed=3"])
    assert found[0] == by_hand
    assert found[1].train.learning_rate == 2e-2


def test_what_is_common_to_all_rows(tmp_path: Path) -> None:
    """A row's own keys come first; the seed is the study's."""
    (tmp_path / "common.toml").write_text(
        'title = "Common"\nbase = "demo"\nseeds = [3]\n[common]\ntrain.steps = 7\ntrain.warmup = 1\n'
        "[rows.a]\ntrain.batch = 4\n[rows.b]\ntrain.steps = 5\n"
    )
    a, b = study.recipes(*study.load(str(tmp_path / "common.toml")))
    assert (a.train.steps, a.train.warmup, a.train.batch, a.train.seed) == (7, 1, 4, 3)
    assert (b.train.steps, b.train.warmup, b.train.batch, b.train.seed) == (5, 1, 16, 3)


@pytest.mark.long
def test_a_study_trains_what_is_left_and_compares_all(two_rows: Path, tmp_path: Path, workers_here: list[str]) -> None:
    out, screen = tmp_path / "out", console()
    *there, left = study.recipes(*study.load(str(two_rows)))
    for recipe in there:
        finish(recipe, out)
    before = {recipe.name: (out / recipe.name / RUN).stat().st_mtime_ns for recipe in there}
    made = run_study(str(two_rows), out, jobs=1, console=screen)
    assert isinstance(made, Report)
    assert [group.count for group in made.groups] == ["2 seeds", "2 seeds"]
    assert "Two rows: 4 runs, 1 of them left: about" in said(screen)
    assert before == {name: (out / name / RUN).stat().st_mtime_ns for name in before}
    assert [Path(path).stem for path in workers_here] == [left.name]
    assert load_run(out / left.name).status == "complete"
    assert "Losses are means over 2 trainings" in " ".join(said(screen).split())
    for name in ("results.json", "figure1.png", "report.html", "logs/plain-s3.log"):
        assert (out / name).exists()
    second = console()
    same = f"train.steps={left.train.steps}"
    run_study(str(two_rows), out, jobs=1, overrides=[same], console=second)
    assert "4 runs, none of them left" in said(second)
    assert f"All rows were trained with --set {same}." in " ".join(said(second).split())
    with pytest.raises(
        LabError, match=r"holds a run of another recipe: train\.learning_rate .*; give the same options"
    ):
        run_study(str(two_rows), out, jobs=1, overrides=["train.learning_rate=0.5"], console=console())


@pytest.mark.long
def test_a_row_that_fails_is_named_and_the_others_are_compared(two_rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(study.recipes(*study.load(str(two_rows)))[0], out)
    (out / "local-s3").write_text("in the way")
    with pytest.raises(LabError, match=r"1 of 2 models failed: local-s3: .* is a file"):
        run_study(str(two_rows), out, jobs=1, seeds=[3], console=console())
    assert (out / "results.json").exists()


@pytest.mark.long
def test_a_row_that_diverged_stands_in_the_results(two_rows: Path, tmp_path: Path, fabricate: Any) -> None:
    """It is not trained again, and the study does not fail."""
    out = tmp_path / "out"
    first, second = study.recipes(*study.load(str(two_rows)), seeds=[3])
    finish(first, out)
    finish(second, out)
    info = load_run(out / second.name)
    save_run(out / second.name, info.model_copy(update={"status": "diverged", "error": "the loss became nan"}))
    made = run_study(str(two_rows), out, jobs=1, seeds=[3], console=console())
    assert isinstance(made, Report)
    assert [entry.info.name for entry in made.runs] == [first.name]
    assert [info.name for info in made.diverged] == [second.name]
    assert f"{second.name} is missing: the loss became nan" in made.notes


def test_a_study_whose_runs_all_diverged_says_so(two_rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = study.recipes(*study.load(str(two_rows)), seeds=[3])
    for recipe in plan:
        finish(recipe, out)
        info = load_run(out / recipe.name)
        save_run(out / recipe.name, info.model_copy(update={"status": "diverged", "error": "the loss became nan"}))
    with pytest.raises(LabError, match=f"every run diverged, .*: {plan[0].name}: the loss became nan; {plan[1].name}"):
        run_study(str(two_rows), out, jobs=1, seeds=[3], console=console())


def test_two_runs_of_one_name_are_refused(tiny: Path, tmp_path: Path) -> None:
    """They would be made in one folder, and one of them would stand for both."""
    text = f'title = "Twice"\nbase = "{tiny}"\nseeds = [1, 1]\n[rows.a]\n'
    (tmp_path / "twice.toml").write_text(text)
    with pytest.raises(LabError, match=r"two runs of the name a-s1, .* list each seed once"):
        run_study(str(tmp_path / "twice.toml"), tmp_path / "out", console=console())
    (tmp_path / "tiny.toml").write_text(f'base = "{tiny}"\nmodel.mechanism = "lssa"\n')
    with pytest.raises(LabError, match=r"two runs of the name tiny, .* a name of its own"):
        run_demo(tmp_path / "out", models=[str(tiny), str(tmp_path / "tiny.toml")], console=console())
    assert not (tmp_path / "out").exists()


def test_a_row_may_be_based_on_another(tiny: Path, tmp_path: Path) -> None:
    text = f"""
title = "Rows of rows"
base = "{tiny}"
common.train.steps = 3
[rows.lssar]
model.mechanism = "lssar"
train = {{ learning_rate = 1e-3, warmup = 2 }}
[rows.faster]
base = "lssar"
train.learning_rate = 2e-3
[rows.still-faster]
base = "faster"
train = {{ learning_rate = 4e-3, steps = 5 }}
[rows.mqar]
base = "mqar"
train.warmup = 1
"""
    (tmp_path / "rows.toml").write_text(text)
    made = study.recipes(*study.load(str(tmp_path / "rows.toml")), rows=["faster", "still-faster"])
    assert [recipe.name for recipe in made] == ["faster-s0", "still-faster-s0"]
    assert {recipe.model.mechanism for recipe in made} == {"lssar"}
    found = [(recipe.train.learning_rate, recipe.train.warmup, recipe.train.steps) for recipe in made]
    assert found == [(2e-3, 2, 3), (4e-3, 2, 5)]
    task = study.recipes(*study.load(str(tmp_path / "rows.toml")), rows=["mqar"])
    assert task[0].data.kind == "task", "a row with the name of its base is based on the recipe"
    (tmp_path / "rows.toml").write_text(text.replace('model.mechanism = "lssar"', 'base = "still-faster"'))
    with pytest.raises(LabError, match="row faster is based on itself: faster -> lssar -> still-faster -> faster"):
        study.recipes(*study.load(str(tmp_path / "rows.toml")), rows=["faster"])
    (tmp_path / "rows.toml").write_text(text.replace('base = "faster"', 'base = "fastre"'))
    with pytest.raises(LabError, match=r"^row still-faster of the study: there is no row or recipe 'fastre'.*'faster'"):
        study.recipes(*study.load(str(tmp_path / "rows.toml")))
    (tmp_path / "rows.toml").write_text(text.replace("warmup = 1", "warmup = 99"))
    with pytest.raises(
        LabError, match=r"^row mqar of the study: mqar-s0: train: warmup=99 .* in the study or with --set$"
    ):
        study.recipes(*study.load(str(tmp_path / "rows.toml")))


def test_each_row_is_timed_once_whatever_its_name(two_rows: Path, tmp_path: Path, monkeypatch: Any) -> None:
    made = study.recipes(*study.load(str(two_rows)))
    timed = []

    def trial(recipe: Recipe, *_: object) -> tuple[float, int]:
        timed.append(recipe.name)
        return 1.0, 1

    monkeypatch.setattr(estimate, "_trial", trial)
    jobs = plan_jobs(tmp_path, made, [recipe.name for recipe in made])
    for job in jobs:
        job.recipe = job.recipe.model_copy(update={"name": "x"})
    heard: list[str] = []
    found = estimate.estimate(jobs, 1, tell=heard.append)
    assert found.seconds == 4 * (1 + estimate.START_SECONDS)
    assert found.bytes == 4 * (2 * 12 + 4) + 12, "two checkpoints and the model of each, and one that is written"
    assert timed == ["x", "x"]
    assert [line.split(", ", 1)[1] for line in heard] == ["1 of 2", "2 of 2, about 0:00 left"]
    assert estimate.estimate(jobs, 3).bytes == 4 * (2 * 12 + 4) + 3 * 12
    for job in jobs:
        job.trained = True
    assert estimate.estimate(jobs, 1).seconds == pytest.approx(4 * (0.1 + estimate.START_SECONDS))  # evaluations


def test_off_a_terminal_an_estimate_says_what_it_does(two_rows: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A line of what comes before, and one of each row that is timed: a row may take minutes."""
    monkeypatch.setattr(estimate, "_trial", lambda *_: (1.0, 1))
    screen = console()
    run_study(str(two_rows), tmp_path / "out", jobs=1, estimate_only=True, console=screen)
    loaded = study.load(str(two_rows))[0]
    *lines, last = [line for line in said(screen).splitlines() if line.startswith(f"{loaded.title}: ")]
    first, second = loaded.rows
    assert lines == [
        f"{loaded.title}: reading the recipes",
        f"{loaded.title}: checking whether memory holds the runs",
        f"{loaded.title}: timing a few steps of {first}, 1 of 2",
        f"{loaded.title}: timing a few steps of {second}, 2 of 2, about 0:00 left",
    ]
    assert "4 runs, 4 of them left" in last


def test_a_disk_that_is_too_small_is_refused_before_the_first_run(
    two_rows: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(estimate, "_trial", lambda *_: (1.0, 1_000_000))
    monkeypatch.setattr(pool, "work", lambda *_, **__: pytest.fail("a run was started"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(LabError, match=r"/out has 1\.0 KB free, and [\d.]+ MB are needed; free some space, or choose"):
        run_study(str(two_rows), tmp_path / "out", jobs=1, console=console())


def test_a_training_is_not_announced_for_what_is_trained_or_done(two_rows: Path, tmp_path: Path) -> None:
    made = study.recipes(*study.load(str(two_rows)))[:3]
    jobs, screen = plan_jobs(tmp_path, made, ["first", "second", "third"]), console()
    jobs[1].trained, jobs[2].status = True, "finished"
    with Screen(screen, jobs, 2):
        pass
    assert said(screen).splitlines()[:3] == [
        "Training and evaluating first.",
        "Evaluating what is trained: second.",
        "2 at a time. Stop with Ctrl-C; started again, it goes on.",
    ]


def test_a_second_start_counts_the_steps_of_checkpoints(two_rows: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The screen says from where a stopped run goes on, and the estimate leaves out what is
    done.
    """
    (recipe, *_) = study.recipes(*study.load(str(two_rows)))

    def stop(event: Event) -> None:
        if event.kind == "step" and event.done == 6:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        train(recipe, tmp_path / recipe.name, progress=stop)
    (job,) = plan_jobs(tmp_path, [recipe], ["first"])
    assert (job.status, job.trained, job.steps_done, recipe.train.steps) == ("waiting", False, 4, 10)
    monkeypatch.setattr(estimate, "_trial", lambda *_: (1.0, 1))
    seconds = estimate.START_SECONDS + 1 - TRAINING * 4 / 10
    assert estimate.estimate([job], 1).seconds == pytest.approx(seconds)
    monkeypatch.setattr(estimate, "_trial", lambda *_: (1.0, 1_000_000))
    there = sum(file.stat().st_size for file in job.folder.rglob("*") if file.is_file())
    assert 0 < there < estimate.KEPT * 1_000_000
    assert estimate.estimate([job], 1).bytes == estimate.KEPT * 1_000_000 - there + estimate.CHECKPOINT * 1_000_000
    with Screen(screen := console(), [job], 1):
        pass
    assert "first: goes on from step 4 of 10\n" in said(screen)
    (job,) = plan_jobs(tmp_path, [recipe], ["first"], overwrite=True)
    assert (job.steps_done, job.share) == (0, 0.0)
    (tmp_path / recipe.name / RUN).unlink()
    (job,) = plan_jobs(tmp_path, [recipe], ["first"])
    assert job.steps_done == 0, "without run.json the training deletes its checkpoints"


def test_an_estimate_says_that_it_tokenises(two_rows: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SOFTFOCUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(progress, "SOON", 0.0)
    screen = console()
    run_study(str(two_rows), tmp_path / "out", jobs=1, estimate_only=True, console=screen)
    assert f"{study.load(str(two_rows))[0].title}: tokenising " in said(screen)


def test_the_estimate_counts_the_fine_tuning_for_a_classification(
    two_rows: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """3 * 4096 examples of 32 tokens, after a training on 10 * 8 of them: 153.6 times as many."""
    (recipe, *_) = study.recipes(*study.load(str(two_rows)))
    assert (recipe.train.length, recipe.train.batch, recipe.train.steps) == (32, 8, 10)
    also = recipe.evaluate.model_copy(update={"also": ["classification"]})
    jobs = plan_jobs(tmp_path, [recipe.model_copy(update={"evaluate": also})], [recipe.name])
    monkeypatch.setattr(estimate, "_trial", lambda *_: (10.0, 1))
    start = estimate.START_SECONDS
    assert estimate.estimate(jobs, 1).seconds == pytest.approx(start + 10 + 9 * 153.6)
    assert estimate.estimate(jobs, 1, processes=2).seconds == pytest.approx(start + 10 + 2 * 9 * 153.6)
    assert estimate.estimate(jobs, 1).bytes == 28 + 36, "a run, and three checkpoints of the fine-tuning"
    assert "without the measuring" not in estimate.estimate(jobs, 1).text
    more = recipe.evaluate.model_copy(update={"also": ["classification", "passkeys", "attention"]})
    others = plan_jobs(tmp_path, [recipe.model_copy(update={"evaluate": more})], [recipe.name])
    told = "(minutes:seconds), without the measuring of attention, passkeys, and"
    assert told in estimate.estimate(others, 1).text
    jobs[0].trained = True
    assert estimate.estimate(jobs, 1).bytes == 36
    assert estimate.estimate(jobs, 1).seconds == pytest.approx(start + 1 + 9 * 153.6)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(59 * 60 + 7, "about 59:07 (minutes:seconds), and"), (3600 * 1234.5, "about 1,234.5 hours, and")],
)
def test_what_takes_long_is_told_in_hours(seconds: float, told: str) -> None:
    assert told in estimate.Expected(runs=1, left=1, seconds=seconds, bytes=0).text


def test_where_a_step_is_slow_one_sequence_stands_for_it(two_rows: Path, monkeypatch: Any) -> None:
    sizes, loss = [], objective.loss
    monkeypatch.setattr(objective, "loss", lambda *a: sizes.append(len(a[2]["input_ids"])) or loss(*a))
    ticks = iter(range(1000))
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: float(next(ticks)))
    recipe = study.recipes(*study.load(str(two_rows)))[0]
    steps = recipe.train.steps
    assert (recipe.train.batch, steps) == (8, 10)
    # By this clock the gradients of any step take a second, and an update takes one
    monkeypatch.setattr(estimate, "TRIAL_SECONDS", 100.0)
    assert estimate._trial(recipe, 1, 1)[0] == pytest.approx((1 + 1) * steps / TRAINING)
    assert sizes == [1, 1, 8, 8, 8]
    sizes.clear()
    monkeypatch.setattr(estimate, "TRIAL_SECONDS", 3.0)
    assert estimate._trial(recipe, 1, 1)[0] == pytest.approx((8 * 1 + 1) * steps / TRAINING)
    assert sizes == [1, 1]
    halves = recipe.model_copy(update={"train": recipe.train.model_copy(update={"accumulate": 2})})
    assert estimate._trial(halves, 1, 1)[0] == pytest.approx((2 * 4 * 1 + 1) * steps / TRAINING)


def test_the_estimate_trains_nothing(two_rows: Path, tmp_path: Path) -> None:
    screen = console()
    assert run_study(str(two_rows), tmp_path / "out", estimate_only=True, console=screen) is None
    assert re.search(r"4 runs, 4 of them left: about (\d+:\d\d \(minutes:seconds\)|[\d,.]+ hours),", said(screen))
    assert "MB on disk" in said(screen)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_study_of_a_task_goes_on_after_a_kill_and_compares_right_answers(
    task: Path, tmp_path: Path, workers_here: list[str]
) -> None:
    """One run was killed before its last row, the one with more to remember; the other is
    finished.
    """
    out, screen = tmp_path / "out", console()
    killed, finished = study.recipes(*study.load(str(task)))
    for recipe in (killed, finished):
        train(recipe, out / recipe.name)
    recall(out / finished.name, [16, 32])
    with pytest.raises(KeyboardInterrupt):
        recall(out / killed.name, [16, 32], progress=stop_at_row(2))
    before = (out / killed.name / RUN).stat().st_mtime_ns
    made = run_study(str(task), out, jobs=1, console=screen)
    assert isinstance(made, RecallReport)
    assert "2 runs, 1 of them left" in said(screen)
    assert [Path(path).stem for path in workers_here] == [killed.name]
    assert before == (out / killed.name / RUN).stat().st_mtime_ns, "it was trained again"
    keys = [[row.key for row in entry.recall.rows] for entry in made.runs]
    assert keys == [[(16, False, None, 64), (32, False, None, 64), (32, True, None, 64)]] * 2
    assert [entry.info.seed for entry in made.runs] == [0, 1]
    assert "Right answers, lengthened by more filler; chance is 0.250" in " ".join(said(screen).split())
    assert "short (2 seeds)" in said(screen)
    second = RecallReport.model_validate_json((out / "results.json").read_text())
    assert second == made
    assert (out / "figure1.png").stat().st_size > 5_000
    single = compare([out / "short-s1"], tmp_path / "alone", console=console())
    assert isinstance(single, RecallReport)
    assert any("One seed" in note for note in single.notes)


def test_rows_of_another_window_or_number_of_sequences_do_not_finish_a_run(task: Path, tmp_path: Path) -> None:
    recipe = study.recipes(*study.load(str(task)))[0]

    def status() -> str:
        return plan_jobs(tmp_path, [recipe], ["a run"])[0].status

    folder = tmp_path / recipe.name
    train(recipe, folder)
    assert status() == "waiting"
    recall(folder, [16, 32], window=8)
    recall(folder, [16, 32], sequences=2)
    assert status() == "waiting"
    recall(folder, [16, 32])
    assert status() == "finished"


def recalled(fabricate: Any, seed: int, *rows: tuple[int, int, float]) -> RecallEntry:
    """A run whose rows are given: length, sequences, share of right answers."""
    common: dict[str, Any] = {"mechanism": "softmax", "seed": seed, "train_length": 16}
    found = [
        RecallRow(
            length=length,
            grown=False,
            window=None,
            nearest=0,
            reach=None,
            chance=0.25,
            sequences=sequences,
            answers=2 * sequences,
            accuracy=accuracy,
            standard_error=0.0,
            complete=accuracy,
            complete_error=0.0,
            by_distance=[Answers(start=0, end=8, accuracy=accuracy, standard_error=0.0, answers=2 * sequences)],
        )
        for length, sequences, accuracy in rows
    ]
    entry = fabricate("softmax", [1.0], seed=seed, name=f"run-s{seed}", train_length=16)
    return RecallEntry(
        info=entry.info, recall=Recall(run=entry.info.name, task="t", rows=found, **common), recipe=entry.recipe
    )


def written(folder: Path, *entries: RecallEntry) -> list[Path]:
    """Run folders, as far as comparing reads them."""
    for entry in entries:
        save_run(folder / entry.info.name, entry.info)
        save_measured(folder / entry.info.name, entry.recall)
        write_atomically(folder / entry.info.name / RECIPE, entry.recipe)
    return [folder / entry.info.name for entry in entries]


def test_recall_over_seeds_is_a_mean_with_its_standard_deviation(fabricate: Any, tmp_path: Path) -> None:
    screen, values = console(), [0.25, 0.5, 1.0]
    runs = [recalled(fabricate, seed, (16, 8, value)) for seed, value in enumerate(values)]
    report = compare_recall(written(tmp_path, *runs), tmp_path / "out", title="Three", console=screen)
    assert f"Softmax (3 seeds)   {statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}" in said(screen)
    assert report.notes == ["Several seeds: ± is their standard deviation."]


def test_recall_says_who_finds_more_and_whether_that_is_noise(fabricate: Any, tmp_path: Path) -> None:
    """Rows with three seeds each, by learning rate: two that find all, one far below with every
    seed, one whose seeds differ too much. At 64 tokens the last one lacks a row.
    """
    shares = {1e-3: [1.0, 1.0, 1.0], 2e-3: [1.0, 1.0, 1.0], 3e-3: [0.2, 0.25, 0.3], 4e-3: [1.0, 0.1, 1.0]}
    runs = []
    for rate, row in shares.items():
        for seed, share in enumerate(row):
            one = recalled(fabricate, seed, (16, 8, 0.5), (32, 8, share), *([(64, 8, 0.5)] if rate < 4e-3 else []))
            recipe = one.recipe.replace("[train]", f"[train]\nlearning_rate = {rate}")
            info = one.info.model_copy(update={"name": f"rate-{rate}-s{seed}"})
            runs.append(one.model_copy(update={"info": info, "recipe": recipe}))
    screen = console()
    report = compare_recall(written(tmp_path, *runs), tmp_path / "out", title="Four", console=screen)
    assert report.finding is not None
    near, far, *_means = report.finding.sentence.split(". ")
    first, second, third, fourth = (group.label for group in grouped(report.runs))
    assert near == f"At 1x (16 tokens) {first}, {second}, {third} and {fourth} find most, 0.500"
    of_sequences = math.hypot(*2 * [math.sqrt(0.1 * 0.9 / 8)])  # one of ten: eight sequences are alike, and two more
    low, wide = (
        math.hypot(of_sequences, statistics.stdev(1 - share for share in shares[rate]) / 3**0.5)
        for rate in (3e-3, 4e-3)
    )
    assert far == (
        f"At 2x (32 tokens), more filler, {first} and {second} find most, 1.000; the share of {third} is smaller by "
        f"0.750 ± {low:.3f}; inconclusive: {fourth} (-0.300 ± {wide:.3f})"
    )
    assert [one.verdict for one in report.finding.differences[3:]] == ["inconclusive", "inconclusive", "smaller"]
    assert all(one.paired_by_seed and one.training_noise for one in report.finding.differences)
    assert " ".join(far.split()) in " ".join(said(screen).split())


def test_recall_compares_lengths_that_all_models_have_and_windows_that_have_them(
    fabricate: Any, tmp_path: Path
) -> None:
    """One model was also measured with a window, at 32 tokens alone. Lengths below that of the
    training are no longest ones.
    """
    first, second = (
        recalled(fabricate, 0, (8, 8, 1.0), (16, 8, 1.0), (32, 8, 0.75)),
        recalled(fabricate, 1, (8, 8, 0.5)),
    )
    rows = [row.model_copy(update={"window": 4, "accuracy": 0.25}) for row in first.recall.rows if row.length == 32]
    first = first.model_copy(update={"recall": first.recall.model_copy(update={"rows": [*first.recall.rows, *rows]})})
    second = second.model_copy(update={"recipe": second.recipe.replace("[train]", "[train]\nsteps = 7")})
    told = []
    for number, more in enumerate(([], [(16, 8, 0.5), (32, 8, 0.5)])):
        other = recalled(fabricate, 1, (8, 8, 0.5), *more).model_copy(update={"recipe": second.recipe})
        folders = written(tmp_path / str(number), first, other)
        report = compare_recall(folders, tmp_path / f"out{number}", title="Two", console=console())
        assert report.finding is not None
        told.append(report.finding)
        again = compare([tmp_path / f"out{number}" / "results.json"], tmp_path / f"again{number}", console=console())
        assert isinstance(again, RecallReport)
        assert again.finding == report.finding
    assert told[0].sentence.startswith("Nothing can be said: the models share no length.")
    assert [(one.length, one.label.endswith("window 4"), one.share) for one in told[1].differences] == [
        (16, False, 0.5),
        (32, False, 0.5),
        (32, True, 0.25),
    ]


@pytest.mark.parametrize("count", [2, 8, 64])
def test_equal_shares_are_rarely_found_different(count: int) -> None:
    """Of two models that find each answer with the same chance, in sequences of one answer."""
    numbers, found = np.random.default_rng(0), []
    for chance in (0.5, 0.9, 0.99, 1.0):
        wrong = 0
        for _ in range(400):
            sides = []
            for _ in range(2):
                right = numbers.random(count) < chance
                error = float(right.std(ddof=1)) / count**0.5
                row = RecallRow.model_construct(sequences=count, accuracy=float(right.mean()), standard_error=error)
                sides.append([(0, share_of(row))])
            wrong += difference(*sides).sure
        found.append(wrong / 400)
    assert max(found) < 0.07, found


def test_recall_of_one_training_each_does_not_know_its_noise(fabricate: Any, tmp_path: Path) -> None:
    runs = [recalled(fabricate, seed, (16, 8, share)) for seed, share in ((0, 1.0), (1, 0.5))]
    other = runs[1].model_copy(update={"recipe": runs[1].recipe.replace("[train]", "[train]\nsteps = 1")})
    report = compare_recall(written(tmp_path, runs[0], other), tmp_path / "out", title="Two", console=console())
    assert report.finding is not None
    assert report.finding.sentence.endswith("The noise of training is not known: that takes several seeds of each.")
    (apart,) = report.finding.differences
    assert (apart.difference, apart.training_noise) == (-0.5, False)


def test_an_earlier_comparison_of_recall_stands_for_its_runs(fabricate: Any, tmp_path: Path) -> None:
    """Seeds that were compared earlier, and one that came later, are one row; the files are those
    of all folders.
    """
    folders = written(tmp_path, *(recalled(fabricate, seed, (16, 8, seed / 4)) for seed in range(3)))
    whole, merged = console(), console()
    compare(folders, tmp_path / "all", console=whole)
    compare(folders[:2], tmp_path / "two", console=console())
    report = compare([tmp_path / "two" / "results.json", folders[2]], tmp_path / "out", console=merged)
    assert isinstance(report, RecallReport)
    assert [len(group.entries) for group in grouped(report.runs)] == [3]
    assert said(merged).replace("/out/", "/all/") == said(whole)
    second = compare([tmp_path / "out" / "results.json"], tmp_path / "again", console=console())
    assert second.model_copy(update={"created": report.created}) == report
    with pytest.raises(LabError, match="the run run-s0 is there twice"):
        compare([tmp_path / "two" / "results.json", folders[0]], tmp_path / "none", console=console())
    assert not (tmp_path / "none").exists()


def test_recall_of_models_of_other_texts_is_not_of_one_model(fabricate: Any) -> None:
    """Whose folders share a name, so that their recipes are the same without folders."""
    entries = [recalled(fabricate, seed, (16, 8, 0.5)) for seed in range(3)]
    other = entries[2].model_copy(update={"info": entries[2].info.model_copy(update={"corpus_key": "another"})})
    assert [len(group.entries) for group in grouped(entries)] == [3]
    assert [len(group.entries) for group in grouped([*entries[:2], other])] == [2, 1]


def test_a_text_that_changed_between_runs_is_refused(tmp_path: Path) -> None:
    """Otherwise seeds of one row would be of two texts."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one two three four\n" * 4000)
    train = {"steps": 2, "warmup": 1, "length": 16, "batch": 1}
    changes = {"data": {"source": str(text)}, "evaluate": {"tokens": 256, "lengths": "1x"}}
    plan = [derive("toy", f"run-s{seed}", changes | {"train": train | {"seed": seed}}) for seed in range(2)]
    train_all("title", plan[:1], tmp_path / "runs", jobs=1, console=console())
    (text / "b.txt").write_text("five six seven eight\n" * 4000)
    with pytest.raises(LabError, match=r"run-s0 was trained on .*, and what is left would be trained or evaluated on "):
        train_all("title", plan, tmp_path / "runs", jobs=1, console=console())
    assert not (tmp_path / "runs" / "run-s1").exists()
    jobs = plan_jobs(tmp_path / "runs", plan, ["a", "b"])
    save_run(jobs[0].folder, load_run(jobs[0].folder).model_copy(update={"corpus_key": ""}))
    refuse_other_data(jobs)  # an early run, which does not know
    shutil.rmtree(text)
    refuse_other_data([jobs[0]])  # nothing is left to train


def test_a_text_that_changed_before_an_evaluation_is_refused(tmp_path: Path) -> None:
    """Otherwise it would be evaluated on what it was trained on."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one two three four\n" * 4000)
    changes = {
        "data": {"source": str(text)},
        "train": {"steps": 2, "warmup": 1, "length": 16, "batch": 1},
        "evaluate": {"tokens": 256, "lengths": "1x"},
    }
    recipe = derive("toy", "run-s0", changes)
    train(recipe, tmp_path / "runs" / "run-s0")
    (text / "b.txt").write_text("five six seven eight\n" * 4000)
    with pytest.raises(LabError, match=r"run-s0 was trained on .*, and what is left would be trained or evaluated on "):
        train_all("title", [recipe], tmp_path / "runs", jobs=1, estimate_only=True, console=console())


def test_recall_without_rows_is_refused(fabricate: Any, tmp_path: Path) -> None:
    folders = written(tmp_path, recalled(fabricate, 0, (16, 8, 0.5)), recalled(fabricate, 1))
    with pytest.raises(
        LabError, match=r"the recall of run-s1 has no rows; measure it again with `softfocus recall RUN`"
    ):
        compare(folders, tmp_path / "none", console=console())
    assert not (tmp_path / "none").exists()


def test_right_answers_of_unequal_trainings_have_a_note(fabricate: Any, tmp_path: Path) -> None:
    one, other = recalled(fabricate, 0, (16, 8, 0.5)), recalled(fabricate, 1, (16, 8, 0.5))
    twice = {"steps_done": 2 * other.info.steps_done, "parameters": 2 * other.info.parameters}
    report = compare(
        written(tmp_path, one, other.model_copy(update={"info": other.info.model_copy(update=twice)})),
        tmp_path / "out",
        console=console(),
    )
    for what in ("training tokens", "size"):
        assert any(note.startswith(f"The runs differ in {what} (") for note in report.notes)


def test_a_task_that_diverged_is_named_and_kept(fabricate: Any, tmp_path: Path) -> None:
    (folder,) = written(tmp_path, recalled(fabricate, 0, (16, 8, 0.5)))
    info = recalled(fabricate, 1, (16, 8, 0.5)).info
    lost = info.model_copy(update={"status": "diverged", "error": "the loss became nan at step 3"})
    save_run(tmp_path / "lost", lost)
    for number, paths in enumerate([[folder, tmp_path / "lost"], [tmp_path / "out0" / "results.json"]]):
        report = compare(paths, tmp_path / f"out{number}", console=console())
        assert isinstance(report, RecallReport)
        assert report.diverged == [lost]
        assert report.notes[0] == "run-s1 is missing: the loss became nan at step 3"


def test_right_answers_are_not_compared_with_losses(fabricate: Any, tmp_path: Path) -> None:
    folder = written(tmp_path, recalled(fabricate, 0, (16, 8, 0.5)))[0]
    text = fabricate("softmax", [1.0], name="text")
    save_run(tmp_path / "text", text.info)
    save_measured(tmp_path / "text", text.evaluation)
    compare([tmp_path / "text"], tmp_path / "losses", console=console())
    for other in (tmp_path / "text", tmp_path / "losses" / "results.json"):
        with pytest.raises(LabError, match=r"run-s0 holds shares of right answers, and .* holds losses"):
            compare([folder, other], tmp_path / "none", console=console())
    with pytest.raises(LabError, match="there is no run at"):
        compare([folder, tmp_path / "nowhere"], tmp_path / "none", console=console())
    (tmp_path / "torn.json").write_text('{"runs": [{"recall"')
    with pytest.raises(LabError, match=r"torn.json is not a report"):
        compare([folder, tmp_path / "torn.json"], tmp_path / "none", console=console())


def test_a_row_measured_again_on_more_sequences_counts_once(fabricate: Any, tmp_path: Path) -> None:
    run, screen = recalled(fabricate, 0, (16, 8, 0.125), (16, 512, 0.875), (32, 512, 0.75), (32, 8, 0.25)), console()
    compare_recall(written(tmp_path, run), tmp_path / "out", title="One", console=screen)
    assert "0.875 ± 0.000" in said(screen)
    assert "0.750 ± 0.000" in said(screen)
    screen.print(recall_tables(run.recall))
    assert "0.125" not in said(screen)
    assert [row.sequences for row in run.recall.shown] == [512, 512]


def test_a_length_that_a_seed_lacks_is_left_out(fabricate: Any, tmp_path: Path) -> None:
    screen = console()
    runs = written(
        tmp_path, recalled(fabricate, 0, (16, 8, 0.5)), recalled(fabricate, 1, (16, 8, 0.75), (32, 8, 0.125))
    )
    report = compare_recall(runs, tmp_path / "out", title="Two", console=screen)
    assert "0.625 ± 0.177" in said(screen)
    assert "0.125 ± 0.000" not in said(screen)
    assert any("left out" in note for note in report.notes)
    apart = written(tmp_path, recalled(fabricate, 0, (16, 8, 0.5)), recalled(fabricate, 1, (32, 8, 0.125)))
    with pytest.raises(LabError, match="the seeds of each model share no length"):
        compare_recall(apart, tmp_path / "none", title="None", console=console())
    assert not (tmp_path / "none").exists()


def test_the_folder_of_a_run_takes_no_study(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text("{}")
    with pytest.raises(LabError, match="is the folder of a run, and not of several; choose another folder with --out"):
        plan_jobs(tmp_path, [], [])


def test_a_folder_takes_one_study_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text(TASK)
    (tmp_path / "out").mkdir()
    where = console()
    with owning(tmp_path / "out"), pytest.raises(LabError, match="out is in use by process"):
        run_study(str(tmp_path / "task.toml"), tmp_path / "out", console=where)
    assert said(where) == "A task: reading the recipes\n", "it is refused before anything is timed"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK]
    with owning(tmp_path / "out"), pytest.raises(LabError, match="out is in use by process"):  # it came in between
        pool.work(tmp_path / "out", [], workers=1, overwrite=False, console=where)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title = 1", "title: Input should be a valid string"),
        ('title = "x"', "rows: Field required"),
        ('title = "x"\n[rows]', "at least 1"),
        ('title = "x"\nrow = 1\n[rows.a]', "row: Extra inputs are not permitted"),
        ("title = ", "cannot be read"),
        (
            'title = "x"\n[rows.a]\nmodel.mechanims = "lssar"',
            "a-s0 has no key 'model.mechanims'; did you mean 'model.mechanism'",
        ),
        ('title = "x"\n[rows.a]\nbase = 3', "rows.a.base is 3, and must be the name of a recipe"),
        ('title = "x"\n[rows.a]\nname = "b"', "rows.a.name: a run has the name of its row and its seed"),
        ('title = "x"\n[rows.a]\ntrain.seed = 5', "rows.a.train.seed: every row is trained with the study's seeds"),
        ('title = "x"\n[common]\ntrain.seed = 5\n[rows.a]', "common.train.seed: every row is trained with the"),
        (
            'title = "x"\n[common]\nbase = "toy"\n[rows.a]',
            "common.base: the recipe that all rows change is the study's",
        ),
        ('title = "x"\n[rows.a]\ntrain = 3', "rows.a.train is 3, and must be a table"),
        (
            'title = "x"\n[rows.a]\nbase = "dem"',
            "row a of the study: there is no row or recipe 'dem'; did you mean 'demo'",
        ),
        (
            'title = "x"\n[rows.a]\n[rows.b]\nbase = "mqar"',
            "some rows are trained on text and some on a generated task",
        ),
    ],
)
def test_mistakes_are_said_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(LabError) as caught:
        study.recipes(*study.load(str(tmp_path / "bad.toml")))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_of_a_study_are_chosen_by_name(two_rows: Path) -> None:
    found, near = study.load(str(two_rows))
    last = list(found.rows)[-1]
    names = [recipe.name for recipe in study.recipes(found, near, [0, 3], [last])]
    assert names == [f"{last}-s0", f"{last}-s3"]
    assert study.recipes(found, near, rows=list(found.rows)) == study.recipes(found, near)


def test_a_key_may_be_set_in_all_rows(two_rows: Path) -> None:
    found, near = study.load(str(two_rows))
    now = study.recipes(found, near, [1], overrides=["train.learning_rate=0.5", "train.weight_decay=0.25"])
    assert [(one.train.learning_rate, one.train.weight_decay, one.train.seed) for one in now] == [(0.5, 0.25, 1)] * 2
    before = study.recipes(found, near, [1])
    assert [one.model.mechanism for one in now] == [one.model.mechanism for one in before]
    assert [one.name for one in now] == [one.name for one in before]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("name=a", "--set changes the name or the seed, which each run has of its own; choose seeds with --seeds"),
        ("train.seed=5", "--set changes the name or the seed"),
        ('"train".seed=5', "--set changes the name or the seed"),
        ("train.seed.x=3", "'seed' is a value, not a table"),
        ("train=3", "row plain of the study: plain-s3: train = 3"),
        ("base=small", "has no key 'base'"),
        ("train.step=3", "has no key 'train.step'; did you mean 'train.steps'"),
        ("train.steps=abc", "row plain of the study: plain-s3: train.steps = 'abc' should be a valid integer"),
        ("train.steps", "is not KEY=VALUE"),
        ("model.mechanism.power=3", "'mechanism' is a value, not a table"),
    ],
)
def test_a_key_that_cannot_be_set_in_all_rows_is_refused(override: str, says: str, two_rows: Path) -> None:
    with pytest.raises(UsageError) as caught:
        study.recipes(*study.load(str(two_rows)), overrides=[override])
    assert says in str(caught.value)


def test_rows_that_become_the_same_are_refused(two_rows: Path) -> None:
    """Reports would take them for two seeds of one row."""
    alike = ["model.layout={}", "train.learning_rate=0.5", "model.mechanism=lssa"]
    with pytest.raises(LabError, match="plain-s3 and local-s3 are the same training; leave one of the rows out with"):
        study.recipes(*study.load(str(two_rows)), overrides=alike)
    assert len(study.recipes(*study.load(str(two_rows)), rows=["plain"], overrides=alike)) == 2


def test_rows_that_differ_in_what_is_measured_alone_are_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(
        f'title = "x"\nbase = "{tiny}"\n[rows.a]\n[rows.b]\nevaluate.mechanisms = ["softmax"]\n'
    )
    with pytest.raises(LabError, match=r"b-s0 are the same training; .* one run can have all that is measured"):
        study.recipes(*study.load(str(tmp_path / "one.toml")))


def test_a_worker_that_dies_has_not_diverged_as_the_run_before_it(
    two_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--overwrite with a lower rate, as the message of a run that diverged advises."""
    out = tmp_path / "out"
    for recipe in study.recipes(*study.load(str(two_rows)), seeds=[3]):
        finish(recipe, out)
        info = load_run(out / recipe.name)
        lost = {"status": "diverged", "error": "the loss became nan", "train_loss": [(1, float("nan"))]}
        save_run(out / recipe.name, info.model_copy(update=lost))
    monkeypatch.setattr(pool.sys, "executable", shutil.which("false"))
    with pytest.raises(LabError, match=r"2 of 2 models failed: plain-s3: ended with exit code 1"):
        run_study(str(two_rows), out, jobs=1, seeds=[3], overwrite=True, console=console())


def test_an_overwrite_that_was_stopped_leaves_no_old_run(
    two_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second call would take old runs for new ones; with --overwrite it would delete the new
    ones.
    """
    out, own = tmp_path / "out", tmp_path / "out/plain-s3/notes.txt"
    for recipe in study.recipes(*study.load(str(two_rows)), seeds=[3]):
        finish(recipe, out)
    own.write_text("of the user's")
    recipe = out / "plain-s3" / RECIPE
    recipe.write_text(recipe.read_text().partition("\n")[2])  # without its token

    def stop(pool: object, waiting: list[Job]) -> None:
        assert [job.status for job in waiting] == ["waiting"] * 2
        raise KeyboardInterrupt

    monkeypatch.setattr(pool.WorkerPool, "run", stop)
    screen = console()
    with pytest.raises(Interrupted, match=r"interrupted; started again without --overwrite, the command goes on"):
        run_study(str(two_rows), out, jobs=1, seeds=[3], overwrite=True, console=screen)
    assert "Stop with Ctrl-C; started again without --overwrite, it goes on." in said(screen)
    recipes = study.recipes(*study.load(str(two_rows)), seeds=[3])
    jobs = plan_jobs(out, recipes, ["first", "second"])
    assert [(job.status, job.trained) for job in jobs] == [("waiting", False)] * 2
    train(recipes[0], out / recipes[0].name, resume=True)  # as a worker does
    assert own.read_text() == "of the user's"


def test_an_overwrite_that_is_stopped_while_it_deletes_leaves_no_old_run(
    two_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for recipe in study.recipes(*study.load(str(two_rows)), seeds=[3]):
        finish(recipe, out)
    deleted = []

    def delete(folder: Path) -> None:
        deleted.append(folder.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "clear_run", delete)
    with pytest.raises(Interrupted, match=r"started again without --overwrite, the command goes on"):
        run_study(str(two_rows), out, jobs=1, seeds=[3], overwrite=True, console=console())
    assert len(deleted) == 1
    assert not list(out.glob(f"*/{RUN}"))


def test_setting_a_key_keeps_the_rest_of_its_table(tiny: Path, tmp_path: Path) -> None:
    """As `softfocus train --set` does."""
    (tmp_path / "one.toml").write_text(
        f'title = "x"\nbase = "{tiny}"\n[rows.a.model.layout]\n"0" = {{ mechanism = "lssa", window = 8 }}\n'
    )
    found = study.load(str(tmp_path / "one.toml"))
    (recipe,) = study.recipes(*found, overrides=["model.layout.0.window=4"])
    assert recipe.model.layout["0"] == {"mechanism": "lssa", "window": 4}
    with pytest.raises(UsageError, match=r"model\.layout has no '1', but '0'"):
        study.recipes(*found, overrides=["model.layout.1.window=4"])


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--rows: there is no row 'softmac'; did you mean 'softmax'"):
        study.recipes(*study.load("layouts"), rows=["softmax", "softmac"])
    with pytest.raises(LabError, match=r"there is no study layout; did you mean 'layouts'"):
        study.load("layout")
    with pytest.raises(LabError, match=r"^layout\.toml is not there; expected a study file; check the path; `soft"):
        study.load("layout.toml")
    with pytest.raises(UsageError, match="--seeds: '1,x' is not a list"):
        seeds_of("1,x")
    with pytest.raises(UsageError, match="--jobs: 99 at a time"):
        run_study("layouts", tmp_path / "out", jobs=99, console=console())
