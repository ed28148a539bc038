"""The demo: its screen and its scheduling in-process, and the whole with real training of tiny
models in real workers.
"""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from softfocus.lab.errors import Interrupted, LabError
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.progress import Event
from softfocus.lab.recipes.lengths import parse
from softfocus.lab.recipes.loading import load
from softfocus.lab.report.results import Report, read_as
from softfocus.lab.run_folder import provenance
from softfocus.lab.run_folder.files import EVALUATION, RUN, load_run
from softfocus.lab.run_folder.results import AS_TRAINED, Bucket, Row, RunInfo, Setting, default_settings
from softfocus.lab.studies import demo, estimate, pool
from softfocus.lab.studies.demo import FAST, MODELS, run_demo
from softfocus.lab.studies.jobs import TRAINING, Job, empty_evaluation
from softfocus.lab.studies.screen import Screen, clock, seconds_left
from softfocus.lab.studies.worker import from_line, to_line
from softfocus.lab.train.run import train

NTK = Setting(rope="ntk")


def plain_console():
    return Console(file=io.StringIO(), width=200)


def said(console):
    return console.file.getvalue()


def make_job(name="demo-lssar", **fields):
    recipe = load(name)
    evaluation = empty_evaluation(recipe)
    return Job(
        label=recipe.model.mechanism,
        recipe=recipe,
        folder=Path("run"),
        log=Path("log"),
        lengths=[128, 256],
        evaluation=evaluation,
        **fields,
    )


class TestLines:
    def test_an_event_crosses_whole(self):
        bucket = Bucket(start=0, end=128, loss=2.0, standard_error=0.1, tokens=7, sums=[1.5, 12.5])
        by_document = {"documents": [3, 8], "windows_by_document": [1, 1], "buckets": [bucket]}
        row = Row(length=128, setting=NTK, loss=2.0, standard_error=0.5, tokens=7, windows=2, **by_document)
        for event in (
            Event(kind="step", run="a", done=3, total=9, loss=2.5, tokens_per_second=100.0),
            Event(kind="row", run="a", done=1, total=2, row=row),
        ):
            line = to_line("evaluate", event)
            assert "\n" not in line
            assert from_line(line) == ("evaluate", event)

    def test_a_diverged_loss_crosses_too(self):
        row = Row(length=128, setting=NTK, loss=math.nan, standard_error=math.inf, tokens=9, windows=2)
        _, event = from_line(to_line("evaluate", Event(kind="row", run="a", row=row)))
        assert math.isnan(event.row.loss)
        assert event.row.standard_error == math.inf

    def test_an_error_is_its_message(self):
        assert from_line(json.dumps({"error": "what; remedy"})) == "what; remedy"


class TestEstimate:
    def test_a_resumed_run_is_paced_by_this_session(self):
        job = make_job(status="training")
        job.take(Event(kind="step", run="", done=300, total=600), now=100.0)
        assert job.pace is None, "one point is no pace"
        job.take(Event(kind="step", run="", done=450, total=600), now=130.0)
        assert job.share == pytest.approx(0.75 * TRAINING)
        assert job.pace == pytest.approx(30.0 / (0.25 * TRAINING))

    def test_evaluation_follows_training(self):
        job = make_job(status="training")
        job.take(Event(kind="step", run="", done=600, total=600), now=0.0)
        job.status = "evaluating"
        job.take(Event(kind="step", run="", done=5, total=10), now=1.0)
        assert job.share == pytest.approx((1 + TRAINING) / 2)

    def test_overall_counts_those_that_wait(self):
        jobs = [make_job(status="training") for _ in range(4)]
        assert seconds_left(jobs, 2) is None
        for job in jobs[:2]:
            job._began, job._now, job.share = (0.0, 0.0), 50.0, 0.5  # 100 s a model, 50 s left
        for job in jobs[2:]:
            job.status = "waiting"
        assert seconds_left(jobs, 2) == pytest.approx(150.0)
        assert seconds_left(jobs, 4) == pytest.approx(100.0), "no model is faster than itself"
        for job in jobs[1:]:
            job.status = "finished"
        assert seconds_left(jobs, 2) == pytest.approx(50.0)
        jobs[0].status = "failed"
        assert seconds_left(jobs, 2) == 0.0

    def test_clock(self):
        assert [clock(s) for s in (0.4, 61, 3600)] == ["0:00", "1:01", "60:00"]


class TestScreen:
    ROW = Row(length=2048, setting=NTK, loss=1.25, standard_error=0.5, tokens=9, windows=2)

    def test_plain_lines_in_a_log(self, monkeypatch):
        job, console = make_job(status="training"), plain_console()
        with Screen(console, [job], 1) as screen:
            job.take(Event(kind="step", run="", done=60, total=600, loss=2.5, tokens_per_second=1234.0), now=1.0)
            screen.update()
            screen.update()  # too soon for another line
            screen.row(job, self.ROW)
            job.status, job.error = "failed", "what; remedy"
            screen.ended(job)
        lines = said(console).splitlines()
        assert sum("loss 2.500  1,234 tokens/s" in line for line in lines) == 1
        assert "lssar: 16x (2,048 tokens), dynamic NTK: 1.250 ± 0.500" in lines
        assert "lssar: failed: what; remedy (log: log)" in lines
        assert "\x1b" not in said(console)

    @pytest.mark.parametrize(("name", "parts"), [("conformer-toy", "frames"), ("vit-toy", "patches")])
    def test_frames_and_patches_are_no_tokens(self, name, parts):
        job, console = make_job(name, status="training"), plain_console()
        length = job.recipe.train.length
        job.take(Event(kind="step", run="", done=60, total=600, loss=2.5, tokens_per_second=1234.0), now=1.0)
        assert job.facts == f"loss 2.500  1,234 {parts}/s"
        Screen(console, [job], 1).row(job, self.ROW.model_copy(update={"length": length, "setting": AS_TRAINED}))
        assert said(console) == f"softmax: 1x ({length} {parts}), as trained: 1.250 ± 0.500\n"

    def test_bars_and_the_filling_table_on_a_terminal(self):
        job = make_job(status="training")
        console = Console(file=io.StringIO(), force_terminal=True, width=100, height=50)
        with Screen(console, [job], 1) as screen:
            job.take(Event(kind="step", run="", done=60, total=600, loss=2.5), now=1.0)
            job.take(Event(kind="step", run="", done=120, total=600, loss=2.5), now=2.0)
            job.evaluation.rows.append(self.ROW.model_copy(update={"length": 256}))
            screen._live.refresh()
        for shown in ("loss 2.500", "1.250", "…", "━", "left"):
            assert shown in said(console), shown


def interrupted(*arguments):
    raise KeyboardInterrupt


def planned_by(monkeypatch, folder, **how):
    """The jobs of a demo that is interrupted before it begins."""
    planned = []
    monkeypatch.setattr(pool, "Screen", lambda console, jobs, count, again: planned.extend(jobs) or nullcontext())
    monkeypatch.setattr(pool, "WorkerPool", interrupted)
    monkeypatch.setattr(estimate, "_trial", lambda *_: (1.0, 1))
    with pytest.raises(Interrupted):
        run_demo(folder, console=plain_console(), **how)
    return planned


class TestPlanning:
    def test_models_are_recipes_mechanisms_or_combinations(self, tmp_path, monkeypatch):
        jobs = planned_by(monkeypatch, tmp_path, models=["demo-lssa", "lssar", "cosine_log_n", "sharpened(lssa, 7)"])
        assert [job.recipe.model.mechanism for job in jobs] == ["lssa", "lssar", "cosine_log_n", "sharpened(lssa, 7)"]
        assert [job.folder.name for job in jobs] == [
            "demo-lssa",
            "demo-lssar",
            "demo-cosine_log_n",
            "demo-sharpened-lssa-7",
        ]
        assert len({job.label for job in jobs}) == 4

    def test_an_unknown_model_says_what_was_meant(self, tmp_path):
        with pytest.raises(LabError, match="did you mean 'lssar'"):
            run_demo(tmp_path, models=["lsssar"], console=plain_console())
        assert list(tmp_path.iterdir()) == []

    def test_fast_is_tiny_and_changes_no_mechanism(self):
        for name in MODELS:
            tiny, full = load(name, list(FAST)), load(name)
            assert tiny.model.mechanism == full.model.mechanism
            assert tiny.train.steps * tiny.train.batch * tiny.train.length < 4096

    @pytest.mark.parametrize(("seed", "trained"), [(None, 0), (3, 3)])
    def test_a_seed_is_the_trainings(self, seed, trained, tmp_path, monkeypatch):
        planned = planned_by(monkeypatch, tmp_path, seed=seed)
        assert [job.recipe.train.seed for job in planned] == [trained] * len(MODELS)

    def test_cores_are_at_most_those_of_this_process(self):
        assert 1 <= provenance.cores() <= len(os.sched_getaffinity(0))

    def test_cores_are_at_most_the_quota_of_a_container(self, tmp_path, monkeypatch):
        monkeypatch.setattr(provenance, "QUOTA", tmp_path / "cpu.max")
        allowed = len(os.sched_getaffinity(0))
        for quota, expected in (("max 100000", allowed), ("100000 100000", 1), ("10000 100000", 1)):
            (tmp_path / "cpu.max").write_text(quota + "\n")
            assert provenance.cores() == expected
            assert provenance.machine("cpu").cores == expected


@dataclass
class Whole:
    """A tiny demo in which one worker was killed and one failed, and the same one started again.
    Two of its five models were finished before and the one that failed in between: a process of its
    own takes seconds to start.
    """

    folder: Path
    error: LabError
    first: Report
    killed: RunInfo
    report: Report
    said: tuple[str, str]
    written: dict[str, int]
    resumed_at: int


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "fast"
    folder.mkdir()
    in_the_way = folder / "demo-global-heads"
    in_the_way.write_text("a file where a run is to be")
    consoles = plain_console(), plain_console()
    steps: list[tuple[str, int]] = []

    class Watched(Job):
        def take(self, event, now):
            if event.kind == "step" and self.status == "training":
                steps.append((event.run, event.done))
            super().take(event, now)

    with pytest.MonkeyPatch.context() as patch:
        # Long enough that the kill comes between the first checkpoint and the last step
        patch.setattr(demo, "FAST", (*FAST, "train.steps=60", "train.checkpoint_every=10"))
        patch.setattr("softfocus.lab.studies.jobs.Job", Watched)
        for name in ("demo-lssar", "demo-hybrid"):
            finish(load(name, list(demo.FAST)), folder / name)
        checkpoints = folder / "demo-lssa" / "checkpoints"
        killer = threading.Thread(target=kill_worker, args=("demo-lssa", checkpoints), daemon=True)
        killer.start()
        with pytest.raises(LabError) as raised:
            run_demo(folder, fast=True, workers=2, console=consoles[0])
        first, killed = read_as(Report, folder / "results.json"), load_run(folder / "demo-lssa", complete=False)
        written = {
            name: (folder / name / RUN).stat().st_mtime_ns for name in ("demo-softmax", "demo-lssar", "demo-hybrid")
        }
        in_the_way.unlink()
        finish(load("demo-global-heads", list(demo.FAST)), in_the_way)
        steps.clear()
        report = run_demo(folder, fast=True, workers=2, console=consoles[1])
        resumed_at = min(done for run, done in steps if run == "demo-lssa")
        yield Whole(folder, raised.value, first, killed, report, tuple(map(said, consoles)), written, resumed_at)


def finish(recipe, folder):
    """Do here what a worker does."""
    train(recipe, folder)
    evaluate(folder, parse(recipe.evaluate.lengths, recipe.train.length), settings=recipe.settings)


def kill_worker(run, checkpoints):
    """Kill the worker of a run, without a word, as soon as it has a checkpoint."""
    # Its last file ends with a brace: it is there before all of it is written
    while not any(p.read_text().rstrip().endswith("}") for p in checkpoints.glob("checkpoint-*/trainer_state.json")):
        time.sleep(0.02)
    for process in children():
        if any(part.endswith(f"/{run}") for part in Path(f"/proc/{process}/cmdline").read_text().split("\0")):
            os.kill(process, signal.SIGKILL)


def children():
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return [int(number) for number in text.split()]


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the worker to kill in /proc")


@needs_proc
@pytest.mark.long
class TestWhole:
    def test_everything_is_there(self, whole):
        assert [entry.info.name for entry in whole.report.runs] == list(MODELS)
        for entry in whole.report.runs:
            assert (entry.info.status, entry.info.steps_done) == ("complete", 60)
            assert {(row.length, row.setting) for row in entry.evaluation.rows} == {
                (length, setting) for length in (64, 128, 256) for setting in default_settings(64)
            }
            assert 2 < entry.evaluation.rows[0].loss < 5.55, "below ln 257: it has begun to learn"
            assert (whole.folder / entry.info.name / "model" / "model.safetensors").is_file()
        assert len({entry.evaluation.rows[0].loss for entry in whole.report.runs}) == len(MODELS), "different models"
        assert read_as(Report, whole.folder / "results.json").finding == whole.report.finding
        assert (whole.folder / "figure1.png").stat().st_size > 10_000
        assert whole.report.finding.sentence in unescape((whole.folder / "report.html").read_text())

    def test_it_ends_by_saying_what_was_found_and_where_it_lies(self, whole):
        lines = whole.said[1].splitlines()
        assert [line.strip() for line in lines[-3:]] == [
            f"{whole.folder}/{name}" for name in ("results.json", "figure1.png", "report.html")
        ]
        assert whole.report.finding.sentence in " ".join(whole.said[1].split())
        assert "numbers mean nothing" in whole.said[1]

    def test_failures_are_named_with_their_logs_and_the_others_go_on(self, whole):
        message = str(whole.error)
        assert message.startswith("2 of 5 models failed: LSSA: killed by signal 9")
        assert re.search(r"demo-global-heads: \S+demo-global-heads is a file", message)
        for name in ("demo-lssa", "demo-global-heads"):
            assert f"(log: {whole.folder}/logs/{name}.log)" in message
        assert "\n" not in message
        assert message.endswith("; started again, the command goes on with those")
        assert [entry.info.name for entry in whole.first.runs] == ["demo-softmax", "demo-lssar", "demo-hybrid"]
        assert sum("is missing" in note for note in whole.first.notes) == 2
        assert "is a file" in whole.said[0]
        assert whole.report.notes[1:] == [note for note in whole.report.notes[1:] if "is missing" not in note]

    def test_a_killed_run_does_not_look_complete_and_goes_on_from_its_checkpoint(self, whole):
        assert (whole.killed.status, whole.killed.error) == ("interrupted", "its process is gone")
        assert whole.resumed_at > 10

    def test_it_says_first_what_is_left_and_what_that_takes(self, whole):
        for said, left in zip(whole.said, (3, 1), strict=True):
            takes = r"about \d+:\d\d \(minutes:seconds\), and [\d.]+ [KM]B on disk"
            assert re.search(rf"^softfocus demo: 5 runs, {left} of them left: {takes}$", said, re.MULTILINE), said

    def test_what_was_finished_is_kept(self, whole):
        assert whole.said[0].count("already done") == 2
        assert whole.said[1].count("already done") == 4
        for name, when in whole.written.items():
            assert (whole.folder / name / RUN).stat().st_mtime_ns == when

    def test_started_once_more_it_only_reports(self, whole):
        console = plain_console()
        began = {name: (whole.folder / name / EVALUATION).stat().st_mtime_ns for name in MODELS}
        run_demo(whole.folder, fast=True, console=console)
        assert said(console).count("already done") == len(MODELS)
        assert began == {name: (whole.folder / name / EVALUATION).stat().st_mtime_ns for name in MODELS}

    def test_runs_of_another_recipe_are_not_mixed_in(self, whole):
        what = r"demo-softmax holds a run of another recipe: data.max_documents was 40 and is unset, .*"
        with pytest.raises(LabError, match=rf"{what}; .*--overwrite"):
            run_demo(whole.folder, console=plain_console())

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
    def test_a_signal_stops_the_workers_and_keeps_their_work(self, tmp_path, number):
        folder, recipe = tmp_path / "demo", tmp_path / "long.toml"
        recipe.write_text(load("demo-lssa", [*FAST, "train.steps=100000", "name=long"]).to_toml())

        def interrupt():
            while not list((folder / "long" / "checkpoints").glob("checkpoint-*")):
                time.sleep(0.02)
            os.kill(os.getpid(), number)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            with pytest.raises(LabError, match="interrupted; started again, the command goes on"):
                run_demo(folder, models=[str(recipe)], console=plain_console())
        finally:
            signal.signal(signal.SIGINT, before)
        assert children() == []
        left = load_run(folder / "long", complete=False)
        assert left.status == "interrupted"
        assert "interrupted at step" in left.error


def test_a_worker_whose_parent_is_gone_asks_itself_to_stop():
    code = """
import time
from softfocus.lab.studies import worker
out = worker._own_stdout()
print("what a library prints", flush=True)  # goes to the log, not between the lines of JSON
while True:
    worker._say(out, "{}")
    time.sleep(0.01)
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert worker.stdout.readline() == b"{}\n"
        worker.stdout.close()
        assert worker.wait(20) == -signal.SIGTERM
        assert worker.stderr.read() == b"what a library prints\n"
    finally:
        worker.kill()
