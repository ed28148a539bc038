"""Checkpoints: a damaged one is named and never gone on from; runs that are killed anywhere end
with the same weights.
"""

import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file
from transformers import Trainer

from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.progress import Event, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import CHECKPOINTS, MODEL, load_run
from softfocus.lab.run_folder.manifest import MANIFEST, seal
from softfocus.lab.train import checkpoints
from softfocus.lab.train.checkpoints import UNFINISHED, newest
from softfocus.lab.train.run import train

FILES = ("model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def edit(path: Path) -> None:
    text = path.read_text()
    assert '"global_step": 8' in text
    path.write_text(text.replace('"global_step": 8', '"global_step": 6'))


def no_object(path: Path) -> None:
    path.write_text("[]")


def stop_at(step: int) -> Callable[[Event], None]:
    def listener(event: Event) -> None:
        if event.kind == "step" and event.done == step:
            raise KeyboardInterrupt

    return listener


@pytest.fixture(scope="module")
def cut(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its checkpoints at steps 4 and 8."""
    folder = tmp_path_factory.mktemp("cut") / "trained"
    with pytest.raises(LabError, match="checkpoint-8, is kept"):
        train(load(tiny), folder, progress=stop_at(9))
    return folder


@pytest.fixture
def run(cut: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut, tmp_path / "trained"))


def names(run: Path) -> set[str]:
    return {path.name for path in (run / CHECKPOINTS).iterdir()}


def assert_same(run: Path, whole: Path) -> None:
    assert load_run(run).train_loss == load_run(whole).train_loss
    ours, theirs = (load_file(folder / MODEL / "model.safetensors") for folder in (run, whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_what_is_whole_is_gone_on_from(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert names(run) == {"checkpoint-4", "checkpoint-8"}
    assert newest(run, "tiny", load_run(run, complete=False).token, silent) == run / CHECKPOINTS / "checkpoint-8"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in (*FILES, MANIFEST) for damage in (remove, empty, truncate, flip_a_bit)]
    + [("trainer_state.json", edit), ("trainer_state.json", no_object), (MANIFEST, no_object)],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    name: str, damage: Callable[[Path], None], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(run / CHECKPOINTS / "checkpoint-8" / name)
    assert newest(run, "tiny", load_run(run, complete=False).token, silent) == run / CHECKPOINTS / "checkpoint-4"
    (line,) = caplog.messages
    assert "goes on from checkpoint-4: checkpoint-8 is damaged (" in line
    if (name, damage) != (MANIFEST, flip_a_bit):  # which may make another name or sum of any file's
        assert f"({name} " in line


def test_a_file_that_cannot_be_read(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = run / CHECKPOINTS / "checkpoint-8" / "optimizer.pt"
    file.unlink()
    file.symlink_to(file)  # a loop; permissions would not stop root
    assert newest(run, "tiny", load_run(run, complete=False).token, silent) == run / CHECKPOINTS / "checkpoint-4"
    assert "checkpoint-8 is damaged (optimizer.pt cannot be read: " in caplog.text


def test_without_a_whole_checkpoint_nothing_begins(tiny: Path, run: Path) -> None:
    """The run is not started again by itself: whoever has a copy of the file would lose all of
    it.
    """
    before = load_run(run, complete=False)
    flip_a_bit(run / CHECKPOINTS / "checkpoint-4" / "model.safetensors")
    remove(run / CHECKPOINTS / "checkpoint-8" / "scheduler.pt")
    says = (
        r"checkpoint-8 is damaged \(scheduler.pt is missing\), "
        r"checkpoint-4 is damaged \(model.safetensors is not .*\); put"
    )
    with pytest.raises(LabError, match=says):
        train(load(tiny), run, resume=True)
    assert names(run) == {"checkpoint-4", "checkpoint-8"}
    assert load_run(run, complete=False) == before
    assert train(load(tiny, ["train.steps=2"]), run, overwrite=True).status == "complete"


def test_the_checkpoint_before_gives_the_same_weights(
    tiny: Path, run: Path, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip_a_bit(run / CHECKPOINTS / "checkpoint-8" / "model.safetensors")
    (run / CHECKPOINTS / "checkpoint-4-mine").mkdir()
    left = run / CHECKPOINTS / UNFINISHED / "checkpoint-8" / "rng_state_1.pth"  # by a process that was killed
    left.parent.mkdir(parents=True)
    left.touch()
    with caplog.at_level(logging.WARNING):
        train(load(tiny), run, resume=True)
    assert "model.safetensors is not as it was written" in caplog.text
    assert_same(run, trained)
    assert names(run) == {"checkpoint-8", "checkpoint-10", "checkpoint-4-mine"}
    caplog.clear()
    for checkpoint in ("checkpoint-10", "checkpoint-8"):
        assert newest(run, "tiny", load_run(run, complete=False).token, silent) == run / CHECKPOINTS / checkpoint
        shutil.rmtree(run / CHECKPOINTS / checkpoint)
    assert not caplog.messages


def test_what_a_kill_kept_from_being_deleted_goes(tiny: Path, run: Path) -> None:
    """Killed after checkpoint 8 was whole, and before the one before the last was gone."""
    shutil.copytree(run / CHECKPOINTS / "checkpoint-4", run / CHECKPOINTS / "checkpoint-2")
    with pytest.raises(LabError, match="checkpoint-8, is kept"):
        train(load(tiny), run, resume=True, progress=stop_at(9))
    assert names(run) == {"checkpoint-4", "checkpoint-8"}


@pytest.mark.long
def test_what_the_run_went_back_from_is_not_kept(tiny: Path, run: Path) -> None:
    """Else it would be one of the two, and the whole one before it would go."""
    remove(run / CHECKPOINTS / "checkpoint-8" / "optimizer.pt")
    recipe = load(tiny)
    with pytest.raises(LabError, match="checkpoint-4, is kept"):
        train(recipe, run, resume=True, progress=stop_at(6))
    assert names(run) == {"checkpoint-4", "checkpoint-8"}
    with pytest.raises(LabError, match="checkpoint-8, is kept"):
        train(recipe, run, resume=True, progress=stop_at(9))
    assert names(run) == {"checkpoint-4", "checkpoint-8"}
    assert newest(run, "tiny", load_run(run, complete=False).token, silent) == run / CHECKPOINTS / "checkpoint-8"


class Attack:
    """What unpickling would run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_no_pickle_of_a_checkpoint_is_executed(name: str, tiny: Path, run: Path, tmp_path: Path) -> None:
    """By whoever can write a checksum, too."""
    checkpoint, mark = run / CHECKPOINTS / "checkpoint-8", tmp_path / "executed"
    torch.save(Attack(mark), checkpoint / name)
    (checkpoint / MANIFEST).unlink()
    seal(checkpoint, load_run(run, complete=False).token)
    if name == "training_args.bin":  # Trainer writes it, and nobody reads it
        assert train(load(tiny), run, resume=True).status == "complete"
    else:
        with pytest.raises(LabError, match=r"checkpoint-8 holds more than numbers, .*; softfocus has not written that"):
            train(load(tiny), run, resume=True)
    assert not mark.exists()


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove])
def test_a_damaged_model_is_not_measured(damage: Callable[[Path], None], trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "trained"))
    damage(run / MODEL / "model.safetensors")
    with pytest.raises(LabError, match=r"the model in .* is damaged \(model\.safetensors .*\); put .* --overwrite"):
        evaluate(run, [32], tokens=64)


def test_a_model_without_checksums_is_that_of_an_early_run_or_damaged(
    trained: Path, tmp_path: Path, early: Callable[[Path], None]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "trained"))
    remove(run / MODEL / MANIFEST)
    with pytest.raises(LabError, match=r"the model in .* is damaged \(manifest\.json is missing\); put .* --overwrite"):
        evaluate(run, [32], tokens=64)
    shutil.copy(trained / MODEL / MANIFEST, run / MODEL)
    early(run)
    assert evaluate(run, [32], tokens=64).rows
    truncate(run / MODEL / "model.safetensors")
    with pytest.raises(LabError, match=r"the model in .* cannot be loaded: "):
        evaluate(run, [32], tokens=64)


@pytest.mark.parametrize("text", ["null", "NaN", "[[[", "3", "{"])
def test_a_damaged_configuration_is_named(text: str, trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "trained"))
    (run / MODEL / "config.json").write_text(text)
    with pytest.raises(LabError, match=r"the model in .* is damaged \(config\.json has .*\); put .* --overwrite"):
        evaluate(run, [32], tokens=64)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits the size of files as Linux does")
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_killed_anywhere_a_run_ends_with_the_same_weights(kills: int, tiny: Path, tmp_path: Path) -> None:
    """At random: between any two touches of the run's files, at a step, or in the middle of writing
    a file.
    """
    seed = random.SystemRandom().randrange(10**6)
    command = [
        sys.executable,
        str(Path(__file__).with_name("kills.py")),
        str(tiny),
        str(tmp_path),
        str(kills),
        str(seed),
    ]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
    assert f"{kills} kills" in done.stdout


def test_processes_meet_before_the_unfinished_folder_is_deleted(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end Trainer lists that folder in every process, and the first one deletes it."""
    order: list[str] = []

    def noted(of: Any, name: str, word: str) -> None:
        before = getattr(of, name)

        def call(*arguments: Any, **others: Any) -> Any:
            found = before(*arguments, **others)
            order.append(word)
            return found

        monkeypatch.setattr(of, name, call)

    noted(Trainer, "train", "trained")
    noted(PartialState, "wait_for_everyone", "meet")
    noted(checkpoints, "clear", "clear")
    train(load(str(tiny)), tmp_path / "run")
    after = order[order.index("trained") :]
    assert after.index("meet") < after.index("clear")
