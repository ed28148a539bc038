"""Fine-tuning on text classification: pairs are what they say, a task that can be learned is, and a
run stays as it is.
"""

import errno
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer

import softfocus
import softfocus.hf
from softfocus.lab.data import of_recipe as data
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate import classify as room
from softfocus.lab.evaluate.classify import Pairs, classify
from softfocus.lab.progress import Listener, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder import disk, provenance
from softfocus.lab.run_folder.files import load_measured, save_measured
from softfocus.lab.run_folder.results import Classification, Induction, Recall
from softfocus.lab.studies import worker
from softfocus.lab.studies.jobs import plan_jobs
from softfocus.lab.train import checkpoints
from softfocus.lab.train.run import train


def pairs(count: int = 3000, seed: int = 0) -> tuple[Pairs, np.ndarray]:
    """Of documents of 12, 40, 9 and 30 tokens, in which every token is its own place."""
    starts = np.array([0, 12, 52, 61])
    return Pairs(np.arange(91), starts, 10, count, np.random.default_rng(seed)), starts


def test_pairs_follow_one_another_or_are_of_two_documents() -> None:
    found, starts = pairs()
    of = np.searchsorted(starts, found.inputs, side="right") - 1  # the document of every token
    first, second = found.inputs[:, :5], found.inputs[:, 5:]
    assert (np.diff(first) == 1).all()
    assert (np.diff(second) == 1).all()
    assert (of[:, :5] == found.documents[:, None]).all()
    follows = found.labels == 1
    assert (second[follows, 0] == first[follows, -1] + 1).all()
    assert (of[follows, 5:] == found.documents[follows, None]).all()
    assert (of[~follows, 5] == of[~follows, 9]).all()
    assert (of[~follows, 5] != found.documents[~follows]).all()
    assert set(found.documents.tolist()) == {0, 1, 3}  # the third has no room
    edges = {0, 11, 12, 51, 52, 60, 61, 90}  # where documents begin and end, and the mark of the end may stand
    assert not edges & set(found.inputs.flatten().tolist())
    assert {1, 10, 13, 50, 62, 89} <= set(found.inputs.flatten().tolist())  # all else is used
    assert 1350 < follows.sum() < 1650


def test_the_seed_decides_the_pairs() -> None:
    (one, _), (same, _), (other, _) = pairs(), pairs(), pairs(seed=1)
    assert (one.inputs == same.inputs).all()
    assert (one.labels == same.labels).all()
    assert (one.inputs != other.inputs).any()


def test_two_documents_are_needed() -> None:
    with pytest.raises(LabError, match="1 documents have the 10 tokens"):
        Pairs(np.arange(30), np.array([0, 5]), 10, 4, np.random.default_rng(0))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TRAINING": 64, "EPOCHS": 1, "TEST": 64}.items():
        monkeypatch.setattr(room, name, value)


@pytest.mark.long
def test_the_run_stays_and_the_mechanism_is_its_own(
    trained: Path, tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trained"
    shutil.copytree(trained, folder)
    before = {path: path.read_bytes() for path in (folder / "model").iterdir()}
    layouts = []
    true = room._classifier

    def classifier(*arguments: object, **options: object) -> object:
        model = true(*arguments, **options)  # type: ignore[arg-type]
        layouts.append(softfocus.hf.layout_of(model))
        return model

    monkeypatch.setattr(room, "_classifier", classifier)
    found = classify(folder)
    assert layouts[0].layer(0)[0].mechanism == softfocus.named("lssar")
    assert {path: path.read_bytes() for path in (folder / "model").iterdir()} == before
    assert load_measured(folder, Classification) == found
    assert sum(found.counts) == 64
    assert found.accuracy == pytest.approx(sum(found.right) / 64)
    store = data.load(load(folder / "recipe.toml"), silent).store
    assert set(found.documents) <= set(range(len(store.validation_documents)))
    assert classify(folder) == found  # the same head, order and examples


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        ["model.config.hidden_dropout=0.1"],
        # Its file has other names than the model: experts
        ["model.architecture=mixtral", "model.config.num_key_value_heads=2", "model.config.num_local_experts=2"],
    ],
    ids=["dropout", "mixtral"],
)
def test_a_fine_tuning_that_was_stopped_goes_on_to_the_same_result(
    tiny: Path,
    tmp_path: Path,
    short: None,
    monkeypatch: pytest.MonkeyPatch,
    config: list[str],
    stopped_at: Callable[..., int],
) -> None:
    """Inside an epoch: twelve steps, three an epoch, and a checkpoint after every second one."""
    folder = tmp_path / "run"
    train(load(tiny, config), folder)
    monkeypatch.setattr(room, "TRAINING", 96)
    monkeypatch.setattr(room, "EPOCHS", 4)
    weights: list[dict[str, torch.Tensor]] = []
    true = Trainer.predict

    def predict(trainer: Trainer, *arguments: object) -> object:
        weights.append({name: x.clone() for name, x in trainer.model.state_dict().items()})
        return true(trainer, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "predict", predict)
    whole = classify(folder)
    (folder / "classification.json").unlink()

    def tuned(listen: Listener) -> object:
        return classify(folder, progress=listen)

    assert stopped_at(9, tuned) == 1
    assert not (folder / "classification.json").exists()
    assert stopped_at(0, tuned) == 9
    assert load_measured(folder, Classification) == whole
    first, second = weights
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (folder / "classify.unfinished").exists()


@pytest.mark.long
def test_a_fine_tuning_goes_on_from_what_is_whole_and_its_own(
    trained: Path, tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    stopped_at: Callable[..., int],
) -> None:  # fmt: skip
    folder = tmp_path / "trained"
    shutil.copytree(trained, folder)
    monkeypatch.setattr(room, "EPOCHS", 10)  # of two steps

    def tuned(listen: Listener) -> object:
        return classify(folder, progress=listen)

    def kept() -> list[Path]:
        return sorted((folder / "classify.unfinished").rglob("checkpoint-*"))

    assert stopped_at(9, tuned) == 1
    _, newer = kept()  # checkpoint-6 and checkpoint-8
    (newer / "trainer_state.json").write_text("")
    assert stopped_at(9, tuned) == 7
    assert "checkpoint-8 is damaged" in caplog.text
    for checkpoint in kept():
        (checkpoint / "trainer_state.json").unlink()
    assert stopped_at(5, tuned) == 1
    assert "the fine-tuning starts again" in caplog.text
    monkeypatch.setattr(room, "TRAINING", 62)
    assert stopped_at(5, tuned) == 1, "other examples"
    monkeypatch.setattr(room, "TRAINING", 64)
    assert stopped_at(5, tuned) == 1, "other examples have been learned since"
    with monkeypatch.context() as other:
        other.setattr(provenance, "commit", lambda: "another")
        assert stopped_at(5, tuned) == 1, "another version"
    assert stopped_at(5, tuned) == 1
    (folder / "classify.unfinished" / "a file").touch()
    assert stopped_at(0, tuned) == 5
    assert not (folder / "classify.unfinished").exists()


@pytest.mark.long
def test_a_fine_tuning_needs_room_for_the_checkpoints_that_are_not_there(
    trained: Path, tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch, stopped_at: Callable[..., int]
) -> None:
    """36 bytes a parameter; one that goes on has two checkpoints of 12 already."""
    folder = tmp_path / "trained"
    shutil.copytree(trained, folder)
    monkeypatch.setattr(room, "EPOCHS", 10)  # of two steps
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    size = sum(parameter.numel() for parameter in model.parameters())

    def tuned(listen: Listener) -> object:
        return classify(folder, progress=listen)

    free = SimpleNamespace(free=35 * size)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: free)
    with pytest.raises(LabError, match=r"fine-tuning needs .* for its checkpoints; free some space, or make"):
        classify(folder)
    free.free = 37 * size
    assert stopped_at(9, tuned) == 1
    free.free = 13 * size
    assert stopped_at(0, tuned) == 9


@pytest.mark.long
def test_a_disk_that_fills_in_a_fine_tuning_is_named(
    trained: Path, tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trained"
    shutil.copytree(trained, folder)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "keep", full)
    with pytest.raises(LabError, match=r"cannot write .*: No space left on device; free some space, or make"):
        classify(folder)


@pytest.mark.long
def test_a_task_that_can_be_learned_is_learned(
    tmp_path: Path, tiny: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of one letter each: the second piece follows where its letter is that of the
    first.
    """
    for split in ("training", "held-out"):
        (tmp_path / split).mkdir()
        for letter in "abcd":
            (tmp_path / split / f"{letter}.txt").write_text(letter * 400)
    sources = [f"data.source={tmp_path}/training", f"data.validation_source={tmp_path}/held-out"]
    others = ["train.length=4", "train.steps=40", "train.checkpoint_every=100", "evaluate.lengths=1x"]
    recipe = load(tiny, [*sources, *others])
    train(recipe, tmp_path / "run")
    monkeypatch.setattr(room, "TRAINING", 1024)
    monkeypatch.setattr(room, "EPOCHS", 6)
    monkeypatch.setattr(room, "RATE", 1.0)
    assert classify(tmp_path / "run").accuracy > 0.9


@pytest.mark.long
def test_a_study_measures_what_its_recipe_asks_for(tiny: Path, tmp_path: Path, short: None) -> None:
    recipe = load(
        tiny, ["evaluate.also=['attention', 'classification', 'induction', 'passkeys']", "evaluate.lengths='256,512'"]
    )
    (file := tmp_path / "one.toml").write_text(recipe.model_copy(update={"name": "one"}).to_toml())
    train(load(file), tmp_path / "one")
    (job,) = plan_jobs(tmp_path, [load(file)], ["one"])
    assert job.status == "waiting"
    worker._work(str(file), tmp_path / "one", io.StringIO())
    (job,) = plan_jobs(tmp_path, [load(file)], ["one"])
    assert job.status == "finished"
    for name in ("classification.json", "inspect/inspect.json", "induction.json", "recall.json"):
        (tmp_path / "one" / name).rename(tmp_path / "away")
        (job,) = plan_jobs(tmp_path, [load(file)], ["one"])
        assert job.status == "waiting", name
        (tmp_path / "away").rename(tmp_path / "one" / name)
    for kind in (Recall, Induction):
        found = load_measured(tmp_path / "one", kind)
        assert [row.length for row in found.rows] == [256, 512]
        save_measured(tmp_path / "one", found.model_copy(update={"rows": found.rows[:1]}))
        (job,) = plan_jobs(tmp_path, [load(file)], ["one"])
        assert job.status == "waiting", "a length is missing"
        save_measured(tmp_path / "one", found)


def test_a_damaged_model_is_not_fine_tuned(trained: Path, tmp_path: Path, early: Callable[[Path], None]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    weights = folder / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(LabError, match=r"is damaged \(.*model\.safetensors"):
        classify(folder)
    early(folder)  # without checksums
    weights.write_bytes(whole[:-1])
    with pytest.raises(LabError, match=r"cannot be loaded: .*; train it again with"):
        classify(folder)


def test_what_cannot_be_classified(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(LabError, match="there is no run"):
        classify(tmp_path / "gone")
    overrides = [
        "model.architecture=t6",
        "model.config={ hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, head_dim = 16 }",
        "train.steps=1",
        "train.warmup=0",
    ]
    train(load(tiny, overrides), tmp_path / "t6")
    with pytest.raises(LabError, match="makes no classifier of the model"):
        classify(tmp_path / "t6")
