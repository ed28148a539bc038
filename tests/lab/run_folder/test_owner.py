"""Run folders: one owner at a time, and files that belong together."""

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.generate import generate
from softfocus.lab.inspect.run import inspect
from softfocus.lab.progress import Event
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder import files, owner
from softfocus.lab.run_folder.files import (
    CHECKPOINTS,
    EVALUATION,
    MODEL,
    RECIPE,
    RUN,
    load_measured,
    load_run,
    save_measured,
    save_run,
)
from softfocus.lab.run_folder.owner import LOCK, OWNER, Displaced, Owner, holder, owning
from softfocus.lab.run_folder.results import Evaluation
from softfocus.lab.studies import worker
from softfocus.lab.train.run import train

HOLD = """
import sys, pathlib
from softfocus.lab.run_folder.owner import owning
with owning(pathlib.Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        yield process
    finally:
        process.kill()
        process.wait()


def at(step: int, do: Callable[[], object]) -> Callable[[Event], None]:
    """A listener that does something once a step is done."""

    def listener(event: Event) -> None:
        if event.kind == "step" and event.done == step:
            do()

    return listener


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def running(folder: Path) -> None:
    save_run(folder, load_run(folder).model_copy(update={"status": "running"}))


def test_a_second_owner_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        with pytest.raises(LabError) as caught, owning(tmp_path):
            pass
        assert f"in use by process {process.pid} on {socket.gethostname()}, since {datetime.now(UTC):%Y-}" in str(
            caught.value
        )
        process.communicate()  # it ends, and cleans up
    assert not (tmp_path / OWNER).exists()
    with owning(tmp_path) as ours:
        assert ours.process == os.getpid()


def test_a_killed_owner_owns_nothing(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / OWNER).exists()
        with owning(tmp_path) as ours:
            ours.check(tmp_path)


def test_a_stopped_owner_owns_its_folder(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(LabError, match=f"process {process.pid} "), owning(tmp_path):
            pass


def test_what_killed_writers_left_is_cleaned_up(run: Path) -> None:
    (run / f".{RUN}.k3x9.partial").write_text("{")
    (run / ".model.partial").mkdir()
    (run / ".model.partial" / "model.safetensors").write_bytes(b"half")
    (run / "notes.txt").write_text("mine")
    evaluate(run, [32], tokens=256)
    assert {path.name for path in run.iterdir()} - {path.name for path in run.glob("[!.]*")} == {LOCK}
    assert (run / "notes.txt").exists()


@pytest.mark.long
def test_a_folder_in_use_is_neither_trained_nor_measured(tiny: Path, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with another(run) as process:
        for attempt in (
            lambda: train(load(tiny), run, resume=True),
            lambda: train(load(tiny), run, overwrite=True),
            lambda: evaluate(run, [32]),
        ):
            with pytest.raises(LabError, match=f"in use by process {process.pid} on .*; wait until that is done"):
                attempt()
        assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("measure", [lambda run: evaluate(run, [32]), lambda run: inspect(run, [32]), generate])
def test_a_run_that_is_being_trained_is_not_to_be_resumed(measure: Callable[..., object], run: Path) -> None:
    running(run)
    arguments = ["x"] if measure is generate else []
    with another(run) as process:
        with pytest.raises(LabError, match=f"being trained by process {process.pid} on .*; wait") as caught:
            measure(run, *arguments)
        assert "--resume" not in str(caught.value)
        assert load_run(run, complete=False).status == "running"
    with pytest.raises(LabError, match=r"status is interrupted \(its process is gone\); finish it with .* --resume"):
        measure(run, *arguments)


def test_a_run_whose_process_was_killed_is_interrupted(tiny: Path, run: Path) -> None:
    """As by SIGKILL, or by NCCL, which asks nobody: run.json says "running" for ever."""
    running(run)
    with another(run) as process:
        process.kill()
        process.wait()
        there = load_run(run, complete=False)
        assert (there.status, there.error) == ("interrupted", "its process is gone")
        with pytest.raises(LabError, match=r"status: interrupted: its process is gone\); add --resume to go on"):
            train(load(tiny), run)
    assert '"status": "running"' in (run / RUN).read_text(), "whoever reads a folder does not write there"


def test_a_run_that_finishes_while_it_is_looked_at_is_complete(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = load_run(run)
    running(run)
    monkeypatch.setattr(files, "holder", lambda folder: save_run(folder, info))
    assert load_run(run).status == "complete"


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_where_nothing_can_be_locked_the_process_is_looked_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """As in a folder of another user. Of another machine's process only the record is known."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (run / LOCK).touch()

    def closed(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(owner, "FileLock", closed)
    for process, there in ((os.getpid(), True), (gone.pid, host == "elsewhere")):
        record = Owner(host=host, process=process, since=datetime.now(UTC))
        (run / OWNER).write_text(record.model_dump_json())
        assert holder(run) == (str(record) if there else None)


def someone_else(folder: Path) -> None:
    other = Owner(host="elsewhere", process=7, since=datetime.now(UTC))
    (folder / OWNER).write_text(other.model_dump_json())


def test_a_trainer_that_wakes_up_leaves_a_run_that_another_finished(tiny: Path, trained: Path, tmp_path: Path) -> None:
    """As where a file system's locks are not seen by other machines: the other one came in while
    this one was stopped.
    """
    folder = tmp_path / "run"

    def finish() -> None:
        shutil.rmtree(folder)
        shutil.copytree(trained, folder)
        someone_else(folder)

    with pytest.raises(Displaced, match="belongs to another process now: process 7 on elsewhere"):
        train(load(tiny), folder, progress=at(5, finish))
    for path in trained.rglob("*"):
        if path.is_file():
            assert (folder / path.relative_to(trained)).read_bytes() == path.read_bytes(), path
    assert (folder / OWNER).exists(), "the other one's"
    assert not (folder / CHECKPOINTS / "checkpoint-4").exists()


def test_a_trainer_whose_folder_was_deleted_does_not_make_half_a_run(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Displaced, match="was deleted"):
        train(load(tiny), folder, progress=at(5, lambda: shutil.rmtree(folder)))
    assert not folder.exists()


@pytest.mark.long
def test_files_of_two_trainings_are_not_taken_for_one(tiny: Path, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train(load(tiny, ["train.seed=3"]), other)
    evaluate(run, [32], tokens=256)
    evaluate(other, [32], tokens=256)
    for name in (RECIPE, MODEL):
        mixed = Path(shutil.copytree(run, tmp_path / name))
        if name == MODEL:
            shutil.rmtree(mixed / name)
            shutil.copytree(other / name, mixed / name)
        else:
            shutil.copy(other / name, mixed / name)
        for attempt in (
            load_run,
            lambda folder: train(load(tiny), folder, resume=True),
            lambda run: evaluate(run, [32]),
        ):
            with pytest.raises(LabError, match=f"parts of two trainings: its {name} is not .*--overwrite"):
                attempt(mixed)
        assert train(load(tiny), mixed, overwrite=True).status == "complete"
    shutil.copy(other / EVALUATION, run / EVALUATION)
    with pytest.raises(LabError, match=r"is of another training than run\.json"):
        load_measured(run, Evaluation)


def test_measurements_of_another_training_are_replaced_with_a_word(
    tiny: Path, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = evaluate(run, [32], tokens=256)
    (run / EVALUATION).write_text((run / EVALUATION).read_text().replace(found.token, "another"))
    second = evaluate(run, [64], tokens=256)
    assert {row.length for row in second.rows} == {64}
    assert "is of another training than run.json beside it: it is replaced" in caplog.text
    with pytest.raises(LabError, match="was trained again while it was measured"):
        save_measured(run, found.model_copy(update={"token": "before"}))


def test_runs_from_before_there_were_tokens_are_read(run: Path, early: Callable[[Path], None]) -> None:
    early(run)
    evaluate(run, [32], tokens=256)
    assert load_measured(run, Evaluation).rows


def test_a_worker_waits_for_one_whose_parent_is_gone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with another(run) as process:
        monkeypatch.setattr(worker, "_own_stdout", io.StringIO)
        monkeypatch.setattr(worker, "_work", lambda *_: process.wait(5))  # an error while that one lives
        monkeypatch.setattr(owner._log, "warning", lambda *_: process.kill())  # says that it waits
        assert worker.main(["tiny", str(run)]) == 0


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.long
def test_a_checkpoint_of_another_training_is_not_resumed(tiny: Path, trained: Path, tmp_path: Path) -> None:
    """As a trainer leaves it that writes in the moment after it was displaced."""
    folder, other = tmp_path / "run", tmp_path / "other"
    for path, seed in ((folder, 0), (other, 3)):
        with pytest.raises(LabError, match="is kept"):
            train(load(tiny, [f"train.seed={seed}"]), path, progress=at(9 if seed else 5, interrupt))
    shutil.copytree(other / CHECKPOINTS / "checkpoint-8", folder / CHECKPOINTS / "checkpoint-8")
    assert train(load(tiny), folder, resume=True).train_loss == load_run(trained).train_loss


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_is_an_interruption(
    number: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softfocus.lab.train.run.make_trainer", lambda *_: os.kill(os.getpid(), number))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(LabError, match=r"training was interrupted; go on with .* --resume"):
            train(load(tiny), tmp_path / "run")
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert load_run(tmp_path / "run", complete=False).status == "interrupted"


@pytest.mark.long
def test_the_end_of_the_terminal_keeps_a_checkpoint(tiny: Path, trained: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(LabError, match="at step 7; its checkpoint is kept"):
            train(load(tiny), tmp_path / "run", progress=at(6, lambda: os.kill(os.getpid(), signal.SIGHUP)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert train(load(tiny), tmp_path / "run", resume=True).train_loss == load_run(trained).train_loss


def test_nohup_is_respected(tiny: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        info = train(load(tiny), tmp_path / "run", progress=at(6, lambda: os.kill(os.getpid(), signal.SIGHUP)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert info.status == "complete"
