import io
import itertools
import math
import re
import statistics
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from softfocus.lab.errors import LabError
from softfocus.lab.report.compare import compare
from softfocus.lab.report.points import cell
from softfocus.lab.report.report import build
from softfocus.lab.report.results import RESULTS, Report, grouped, read_as, refuse_twice
from softfocus.lab.run_folder.files import EVALUATION, RECIPE, RUN, save_measured, save_run
from softfocus.lab.run_folder.results import json_text

ROOT = Path(__file__).resolve().parents[3]


def save(entry, folder: Path) -> Path:
    save_run(folder, entry.info)
    save_measured(folder, entry.evaluation)
    (folder / RECIPE).write_text(entry.recipe)
    return folder


@pytest.fixture
def quiet():
    return Console(file=io.StringIO(), width=100)


def said(console: Console) -> str:
    return console.file.getvalue()


@pytest.mark.long
def test_any_runs_in_one_report(four, tmp_path, quiet):
    folders = [save(entry, tmp_path / entry.info.name) for entry in four]
    report = compare(folders, tmp_path / "out", console=quiet, title="A title")
    assert [entry.info.name for entry in report.runs] == [entry.info.name for entry in four]
    assert report.runs[2].recipe == four[2].recipe
    assert read_as(Report, tmp_path / "out" / "results.json").finding == report.finding
    assert report.finding.sentence in " ".join(said(quiet).split())
    assert "2.380" in said(quiet)
    assert f"{tmp_path}/out/report.html" in said(quiet)
    assert "A title" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "figure1.png").stat().st_size > 10_000


@pytest.mark.long
def test_unequal_grids_meet_where_they_can(fabricate, tmp_path, quiet):
    a = save(fabricate("softmax", [1.0, 1.1, 1.2, 1.6, 3.0]), tmp_path / "a")
    b = save(fabricate("lssar", [2.0, 2.1, 2.2], train_length=512), tmp_path / "b")
    report = compare([a, b], tmp_path / "out", console=quiet)
    assert report.finding.sentence.startswith("At 1x Softmax has a loss of 1.000; LSSAR is 1.000 ")
    assert "At 4x, each under its best setting, Softmax as trained has" in report.finding.sentence, (
        "the longest they share"
    )
    assert "training length (128, 512)" in " ".join(report.notes)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "16×" in page, "what only one run has is drawn too"


def test_lengths_can_be_counted_in_tokens(fabricate, tmp_path, quiet):
    a = save(fabricate("softmax", [1.0, 1.1, 1.2]), tmp_path / "a")
    b = save(fabricate("lssar", [2.0, 2.1], train_length=256), tmp_path / "b")
    compare([a, b], tmp_path / "out", axis="tokens", console=quiet)
    head = next(line.split() for line in said(quiet).splitlines() if "setting" in line)
    assert head == ["setting", "model", "128", "256", "512", "gain"]
    assert read_as(Report, tmp_path / "out" / "results.json").axis == "tokens"


def test_seeds_are_put_together(fabricate, tmp_path, quiet):
    runs = [
        fabricate(name, [loss + seed / 100], (), seed=seed, name=f"{name}-{seed}")
        for seed in range(3)
        for name, loss in (("softmax", 1.0), ("lssar", 1.2))
    ]
    report = compare([save(run, tmp_path / run.info.name) for run in runs], tmp_path / "out", console=quiet)
    assert report.finding.sentence == (
        "At 1x (128 tokens) Softmax has a loss of 1.010; LSSAR is 0.200 ± 0.000 higher. "
        "Losses are means over 3 trainings. Differences are paired by document and seed."
    )
    assert said(quiet).count("3 seeds") == 2
    assert read_as(Report, tmp_path / "out" / "results.json").finding == report.finding
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("sd 0.010") == 2
    assert all(f"lssar-{seed}" in page for seed in range(3)), "the table of runs names each"


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is missing"),
        (b"name = ", "cannot be read: "),
        (b"\xff", "cannot be read: "),
        (b'name = "a"\n[model]\nmechanism = "lssar"\n', r"is cut off: it has no \[data\]"),
    ],
)
def test_a_damaged_recipe_is_refused_unless_the_run_is_an_early_one(fabricate, tmp_path, quiet, text, says):
    for token in ("", "abc"):
        entry = fabricate("lssar", [1.0])
        info = entry.info.model_copy(update={"token": token})
        evaluation = entry.evaluation.model_copy(update={"token": token})
        run = save(entry.model_copy(update={"info": info, "evaluation": evaluation}), tmp_path / f"run{token}")
        (run / RECIPE).unlink()
        if text is not None:
            (run / RECIPE).write_bytes((f"# Resolved. Of the run {token}\n" if token else "").encode() + text)
    assert compare([tmp_path / "run"], tmp_path / "out", console=quiet).runs
    with pytest.raises(LabError, match=rf"recipe\.toml {says}.*; put back a copy, or train the run again"):
        compare([tmp_path / "runabc"], tmp_path / "out", console=quiet)


@pytest.mark.long
def test_a_run_that_diverged_is_named_and_kept(fabricate, tmp_path, quiet):
    """Its row would else be missing without a reason, in a merged comparison, too."""
    a = save(fabricate("softmax", [1.0]), tmp_path / "a")
    info = fabricate("lssar", [1.0], name="lssar-s1").info
    lost = info.model_copy(update={"status": "diverged", "error": "the loss became nan at step 3"})
    save_run(tmp_path / "b", lost)
    says = "lssar-s1 is missing: the loss became nan at step 3"
    for number, paths in enumerate([[a, tmp_path / "b"], [tmp_path / "out0" / "results.json"]]):
        report = compare(paths, tmp_path / f"out{number}", console=quiet)
        assert report.diverged == [lost]
        assert len(report.runs) == 1
        assert says in report.notes
        assert says in " ".join(said(quiet).split())
        assert read_as(Report, tmp_path / f"out{number}" / "results.json").diverged == [lost]
    with pytest.raises(LabError, match="the run lssar-s1 is there twice"):
        compare([tmp_path / "b", tmp_path / "out0" / "results.json"], tmp_path / "none", console=quiet)
    with pytest.raises(LabError, match="its status is diverged"):
        compare([tmp_path / "b"], tmp_path / "none", console=quiet)


@pytest.mark.long
def test_vocabularies_are_not_compared(fabricate, tmp_path, quiet):
    a = save(fabricate("softmax", [1.0]), tmp_path / "a")
    b = save(fabricate("lssar", [2.0], vocabulary=512), tmp_path / "b")
    assert "different vocabularies" in compare([a, b], tmp_path / "out", console=quiet).finding.sentence


@pytest.mark.parametrize(
    ("broken", "what", "remedy"),
    [
        ("nowhere", "there is no run at", "softfocus train"),
        ("empty", "is not a run folder", "softfocus train"),
        ("unfinished", "its status is interrupted (its process is gone)", "--resume"),
        ("unevaluated", "has no evaluation.json", "softfocus evaluate"),
        ("garbled", "cannot be read", "softfocus evaluate"),
    ],
)
def test_a_folder_that_is_not_a_finished_run_is_named_with_the_remedy(four, tmp_path, quiet, broken, what, remedy):
    good, bad = save(four[0], tmp_path / "good"), tmp_path / broken
    if broken == "empty":
        bad.mkdir()
    elif broken != "nowhere":
        save(four[1], bad)
    if broken == "unfinished":
        save_run(bad, four[1].info.model_copy(update={"status": "running"}))
    elif broken == "unevaluated":
        (bad / EVALUATION).unlink()
    elif broken == "garbled":
        (bad / EVALUATION).write_text((bad / EVALUATION).read_text()[:-20])
    with pytest.raises(LabError) as raised:
        compare([good, bad], tmp_path / "out", console=quiet)
    message = str(raised.value)
    assert str(bad) in message
    assert what in message
    assert remedy in message
    assert "\n" not in message
    assert not (tmp_path / "out").exists(), "nothing half-made is left"


@pytest.mark.long
def test_an_evaluation_of_another_training_is_pointed_out(four, tmp_path, quiet):
    folder = save(four[0], tmp_path / "a")
    save_run(folder, four[0].info.model_copy(update={"seed": 7}))
    assert "belongs to another training" in compare([folder], tmp_path / "out", console=quiet).notes[-1]


@pytest.mark.long
def test_a_report_names_no_folders_of_the_machine(four, tmp_path, quiet):
    folder = save(four[0], tmp_path / "a")
    paths = 'source = "/home/ann/my texts/*.txt"\ntokenizer = "~/tokenizers/one/"\nvalidation_source = "hub:a/b"\n'
    (folder / RECIPE).write_text(paths)
    assert compare([folder], tmp_path / "out", console=quiet).runs[0].recipe == (
        'source = "*.txt"\ntokenizer = "one"\nvalidation_source = "hub:a/b"\n'
    )


@pytest.mark.long
def test_runs_that_a_report_no_longer_shows_are_named(fabricate, tmp_path):
    one, two, three = (
        save(fabricate(name, [1.0], name=name), tmp_path / name) for name in ("softmax", "lssa", "lssar")
    )
    out, quiet = tmp_path / "out", Console(file=io.StringIO(), width=400)
    compare([one, two], out, console=quiet)
    assert "is replaced" not in said(quiet)
    compare([one, two], out, console=quiet)
    compare([one, two, three], out, console=quiet)
    assert "is replaced" not in said(quiet), "the same runs, and more"
    compare([two], out, console=quiet)
    told = " ".join(said(quiet).split())
    assert f"{out / RESULTS} is replaced. It also held softmax, lssar; `softfocus compare RUN...`" in told
    same = save(fabricate("softmax", [1.0], name="lssa"), tmp_path / "same")
    compare([same], out, console=quiet)
    assert "It also held lssa (lssa); " in " ".join(said(quiet).split()), "another mechanism under this name"
    told = " ".join(said(quiet).split()).count("is replaced")
    (out / RESULTS).write_text("[1]")
    compare([two], out, console=quiet)
    assert " ".join(said(quiet).split()).count("is replaced") == told, "no report stood there"


def test_a_run_that_is_named_without_its_folder_is_found(fabricate, tmp_path, monkeypatch, quiet):
    monkeypatch.chdir(tmp_path)
    save(fabricate("softmax", [1.0]), Path("runs/mine"))
    with pytest.raises(LabError, match="there is no run at mine") as caught:
        compare([Path("mine")], tmp_path / "out", console=quiet)
    assert caught.value.remedy == f"name {Path('runs/mine')}, which is one"


def test_no_run_or_one_twice(four, tmp_path, quiet):
    with pytest.raises(LabError, match="nothing to compare"):
        compare([], tmp_path / "out", console=quiet)
    folder = save(four[0], tmp_path / "a")
    with pytest.raises(LabError, match="named twice"):
        compare([folder, tmp_path / "b" / ".." / "a"], tmp_path / "out", console=quiet)
    assert (folder / RUN).exists()


def test_two_folders_of_one_run_are_named(four, tmp_path, quiet):
    folders = [save(four[0], tmp_path / name) for name in ("a", "copy")]
    with pytest.raises(LabError) as caught:
        compare(folders, tmp_path / "out", console=quiet)
    says = f"the run {four[0].info.name} is there twice: {folders[0]} and {folders[1]} hold the same run"
    assert caught.value.what == says
    assert caught.value.remedy == "leave one of them out"
    results = tmp_path / "results.json"
    results.write_text(json_text(build([four[0]])))
    with pytest.raises(LabError, match=r"is there twice: in .*copy and in .*results\.json; name its folder or"):
        compare([folders[1], results], tmp_path / "out", console=quiet)
    results.write_text(json_text(build([four[0], four[0]])))
    with pytest.raises(LabError, match=r"is there twice in .*results\.json; write it again"):
        compare([results], tmp_path / "out", console=quiet)


def test_a_copy_that_was_resumed_is_the_same_run(four):
    """It ended at another time, but its training is the other's."""
    first, other = (four[0].info.model_copy(update={"token": token}) for token in ("0123", "4567"))
    copy = first.model_copy(update={"finished": first.finished + timedelta(hours=1)})
    refuse_twice([(Path("a"), first), (Path("b"), other)])
    with pytest.raises(LabError, match="is there twice"):
        refuse_twice([(Path("a"), first), (Path("copy"), copy)])


def test_a_run_that_diverged_with_a_nan_is_found_twice(four, tmp_path, quiet):
    lost = four[0].info.model_copy(update={"status": "diverged", "train_loss": [(10, math.nan)], "error": "NaN"})
    folders = [save(four[0].model_copy(update={"info": lost}), tmp_path / name) for name in ("a", "copy")]
    with pytest.raises(LabError, match="is there twice"):
        compare([save(four[1], tmp_path / "b"), *folders], tmp_path / "out", console=quiet)


def test_a_report_without_a_run_is_refused(four, tmp_path, quiet):
    results = tmp_path / "results.json"
    results.write_text(json_text(build([])))
    with pytest.raises(LabError, match=r"results\.json has no run; leave it out, or write it again"):
        compare([save(four[0], tmp_path / "a"), results], tmp_path / "out", console=quiet)


@pytest.mark.long
def test_an_earlier_comparison_stands_for_its_runs(four, tmp_path, quiet):
    folders = [save(entry, tmp_path / entry.info.name) for entry in four]
    compare(folders[:3], tmp_path / "three", console=quiet)
    report = compare([tmp_path / "three" / "results.json", folders[3]], tmp_path / "out", console=quiet)
    assert report.runs == compare(folders, tmp_path / "all", console=quiet).runs
    with pytest.raises(LabError, match=r"cannot read .*none\.json"):
        compare([tmp_path / "none.json", folders[3]], tmp_path / "out", console=quiet)


@pytest.mark.parametrize("column", [1.0, 16.0])
def test_losses_of_one_seed_correlate_as_little_as_the_guide_says(column):
    """The reason why rows with other seeds are not paired on those that both have."""
    cells = [
        cell(group, column, "as trained")
        for group in grouped(read_as(Report, ROOT / "docs/results/layouts-slow-start/results.json").runs)
    ]
    losses = [{seed: mean.value for seed, mean in one.losses} for one in cells if one is not None]
    found = []
    for first, second in itertools.combinations(losses, 2):
        common = sorted(first.keys() & second.keys())
        if len(common) >= 4:
            found.append(statistics.correlation(*([one[seed] for seed in common] for one in (first, second))))
    said = re.search(
        r"median correlation, as trained, is (\S+) at 1x and 16x", " ".join((ROOT / "docs/lab.md").read_text().split())
    )
    assert f"{statistics.median(found):.1f}" == said[1]
