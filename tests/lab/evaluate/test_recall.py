"""Recall over length: against a count by hand, under a window that hides every answer, stopped and
gone on with.
"""

import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import softfocus.hf
from softfocus.lab import cli
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.tasks import IGNORED, random_for
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.recall import edges, reach, recall
from softfocus.lab.generate import generate
from softfocus.lab.progress import Event
from softfocus.lab.recipes.loading import load, shipped
from softfocus.lab.report.recall import recall_tables
from softfocus.lab.run_folder.files import MODEL, RECALL, load_measured, load_run
from softfocus.lab.run_folder.results import Recall, json_text
from softfocus.lab.train.run import train

T = 32
TINY = {
    "mqar": [
        "data.mqar.pairs=2",
        "data.mqar.queries=2",
        "data.mqar.keys=8",
        "data.mqar.values=4",
        "data.mqar.filler=3",
    ],
    "passkey": ["data.passkey.digits=1", "train.length=64"],
}
SMALL = ["model.config.hidden_size=32", "model.config.intermediate_size=32", "train.batch=8", "train.steps=10"]
SMALL += ["train.warmup=0", "train.log_every=1", "train.checkpoint_every=4"]


def tiny_task(name: str) -> list[str]:
    return [f"train.length={T}", *SMALL, *TINY[name]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each task. Shared: copy it before changing anything in it."""
    folder = tmp_path_factory.mktemp("tasks")
    for name in TINY:
        train(load(name, tiny_task(name)), folder / name)
    return {name: folder / name for name in TINY}


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs["mqar"], tmp_path / "run"))


@pytest.mark.long
def test_a_model_of_a_task_does_not_go_on_with_a_text(run: Path) -> None:
    written: list[str] = []
    with pytest.raises(LabError, match="on a generated task and not on text; measure it with `softfocus recall RUN`"):
        generate(run, "hi", write=written.append)
    assert not written


def stop_at(count: int, kind: str) -> Any:
    """A listener that stops the work at the so-manieth event of a kind."""
    seen = []

    def listen(event: Event) -> None:
        seen.extend([event] if event.kind == kind else [])
        if len(seen) == count:
            raise KeyboardInterrupt

    return listen


@pytest.mark.long
def test_no_answer_lies_nearer_than_the_recipe_says(tmp_path: Path) -> None:
    train(load("mqar", [*tiny_task("mqar"), "data.mqar.nearest=20"]), tmp_path / "run")
    found = recall(tmp_path / "run", [T, 2 * T], sequences=8)
    assert {(row.length, row.nearest) for row in found.rows} == {(T, 20), (2 * T, 32)}
    near = [part.start for row in found.rows if row.length == T for part in row.by_distance]
    assert min(near) == 16, "the bucket that 20 lies in"


@pytest.mark.long
def test_a_row_is_what_a_loop_by_hand_counts(run: Path) -> None:
    found = recall(run, [T, 4 * T], sequences=12, batch_tokens=300)
    assert [(row.grown, row.length, row.nearest) for row in found.rows] == [
        (False, T, 0),
        (False, 4 * T, 2 * T),
        (True, 4 * T, 2 * T),
    ]
    model, task = models.load(run), data.task_of(load(run / "recipe.toml"))
    assert task is not None
    for row in found.rows:
        grown = task.grown(4) if row.grown else task
        assert grown is not None
        shares, complete, near = [], [], []
        for index in range(12):
            sample = grown.sample(random_for("evaluation", 0, index), row.length, row.nearest)
            with torch.inference_mode():
                guess = model(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0].argmax(-1).numpy()
            asked = sample.labels != IGNORED
            right = guess[asked] == sample.labels[asked]
            shares.append(right.mean())
            complete.append(right.all())
            near.append((sample.distances[asked] < row.length * 3 // 4).sum())
        assert row.accuracy == pytest.approx(np.mean(shares))
        assert row.standard_error == pytest.approx(np.std(shares, ddof=1) / 12**0.5), "as many answers in each sequence"
        assert row.complete == pytest.approx(np.mean(complete))
        assert (row.sequences, row.answers, row.chance) == (12, 12 * grown.answers, 0.25)
        assert sum(part.answers for part in row.by_distance) == row.answers
        assert sum(part.answers for part in row.by_distance if part.end <= row.length * 3 // 4) == sum(near)
        mean = sum(part.accuracy * part.answers for part in row.by_distance) / row.answers
        assert mean == pytest.approx(row.accuracy)
    assert load_measured(run, Recall) == found
    assert (run / RECALL).read_text() == json_text(found), "numbers stand on one line"


def test_the_passkey_run_has_one_way_to_grow(runs: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs["passkey"], tmp_path / "run"))
    found = recall(run, [64, 128], sequences=4)
    assert [(row.grown, row.length) for row in found.rows] == [(False, 64), (False, 128)]
    assert {row.chance for row in found.rows} == {0.1}
    assert found.task == load_run(run).corpus_key


def test_there_is_more_to_remember_at_whole_multiples_alone(run: Path) -> None:
    """A row of "more to remember" at 1.5 times the length would hold no more."""
    found = recall(run, [T, 3 * T // 2, 2 * T], sequences=4)
    assert [row.length for row in found.rows if row.grown] == [2 * T]
    assert [row.length for row in found.rows if not row.grown] == [T, 3 * T // 2, 2 * T]


def test_what_is_measured_is_kept(run: Path) -> None:
    whole = recall(run, [T, 2 * T, 4 * T], sequences=4)
    (run / RECALL).unlink()
    with pytest.raises(KeyboardInterrupt):
        recall(run, [T, 2 * T, 4 * T], sequences=4, progress=stop_at(3, "row"))
    kept = load_measured(run, Recall).rows
    assert len(kept) == 3
    events: list[Event] = []
    second = recall(run, [T, 2 * T, 4 * T], sequences=4, progress=events.append)
    assert second.model_dump_json() == whole.model_dump_json()  # the error of a single answer is NaN
    assert len([event for event in events if event.kind == "row"]) == len(whole.rows) - 3
    kept = recall(run, [T], sequences=4)
    assert kept.model_dump_json() == whole.model_dump_json(), "nothing is left to measure, and nothing is lost"
    other = load_measured(run, Recall).model_copy(update={"seed": 7})
    (run / RECALL).write_text(other.model_dump_json())
    assert len(recall(run, [T], sequences=4).rows) == 1, "rows of another training are not taken over"


@pytest.mark.long
def test_training_on_a_task_resumes_exactly(runs: dict[str, Path], tmp_path: Path) -> None:
    recipe = load("mqar", tiny_task("mqar"))
    with pytest.raises(LabError, match="interrupted"):
        train(recipe, tmp_path / "run", progress=stop_at(6, "step"))
    info = train(recipe, tmp_path / "run", resume=True)
    assert info.train_loss == load_run(runs["mqar"]).train_loss
    weights = [(folder / MODEL / "model.safetensors").read_bytes() for folder in (runs["mqar"], tmp_path / "run")]
    assert weights[0] == weights[1]


def test_training_again_forgets_what_was_measured(run: Path) -> None:
    recall(run, [T], sequences=2)
    train(load("mqar", tiny_task("mqar")), run, overwrite=True)
    assert not (run / RECALL).exists()


def test_a_window_that_hides_every_answer_leaves_nothing_of_it(run: Path) -> None:
    """The model, too: other answers do not change a bit of what it says where they are asked
    for.
    """
    window, length = 8, 64
    found = recall(run, [T, length], window=window, sequences=4)
    assert [(row.grown, row.reach, row.blind) for row in found.rows] == [
        (False, 1 + 7, False),
        (False, 1 + 7, True),
        (True, 1 + 7, True),
    ]
    config = models.load_config(run)
    softfocus.hf.window(config, window)
    model, task = models.load(run, config), data.task_of(load(run / "recipe.toml"))
    assert task is not None
    row = found.rows[1]
    for index in range(4):
        sample = task.sample(random_for("evaluation", 0, index), length, row.nearest)
        asked = torch.from_numpy(sample.labels != IGNORED)
        tokens = torch.from_numpy(sample.tokens)
        values = [i for i, token in enumerate(tokens.tolist()) if task.words[token].startswith("v")]
        others = tokens.clone()
        others[values] = torch.tensor([task.words.index(f"v{3 - int(task.words[tokens[i]][1:])}") for i in values])
        assert not torch.equal(tokens, others)
        with torch.inference_mode():
            before, after = (model(input_ids=some[None]).logits[0] for some in (tokens, others))
        assert torch.equal(before[asked], after[asked])
        assert not torch.equal(before, after), "where they can be seen they change what it says"


def test_how_far_windows_reach() -> None:
    from transformers import GPTNeoXConfig

    def of(layout: Any) -> int | None:
        config = GPTNeoXConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=2)
        return reach(softfocus.hf.use(config, layout))

    local, other = {"mechanism": "softmax", "window": 8}, {"mechanism": "lssar", "window": 3, "heads": 1}
    assert of("lssar") is None
    assert of({"*": local}) == 21
    assert of({"0": local, "*": "lssar"}) is None
    assert of({"0": [other, {**local, "heads": 1}], "*": {"mechanism": "softmax", "window": 3}}) == 7 + 2 + 2
    assert of({"*": {**local, "sinks": 2}}) is None, "the first tokens are always seen"


def test_buckets_of_distances_cover_a_length() -> None:
    assert edges(64, 64) == [0, 16, 24, 32, 48, 65]
    assert edges(64, 256)[-3:] == [128, 192, 257]
    assert edges(3, 8) == [0, 1, 2, 3, 4, 6, 9]


class Reader(torch.nn.Module):
    """In place of a language model of bytes: it knows the sentence before a number, and finds the
    number again by looking for what came before it. Some digits it gets wrong.
    """

    device = torch.device("cpu")
    wrong = ""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, 257)
        for row, tokens in enumerate(input_ids.tolist()):
            text = bytes(tokens).decode()
            mention = text.index("key is ") + len("key is ")
            number = text[mention : mention + 5]
            for place in range(len(text) - 6, len(text)):  # the space and five digits are to be predicted
                after = place - (len(text) - 6)
                digit = f" {number}"[after]
                logits[row, place, ord("x" if digit in self.wrong and digit != " " else digit)] = 1
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("wrong", ["", "7", "0123456789"])
def test_a_text_model_is_asked_for_passkeys(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    reader = Reader()
    reader.wrong = wrong
    monkeypatch.setattr(models, "load", lambda *_: reader)
    monkeypatch.setattr("softfocus.lab.evaluate.recall.has_plain_head", lambda _: False)
    events: list[Event] = []
    found = recall(run, [400], sequences=40, progress=events.append)
    (row,) = found.rows
    numbers = ["".join(map(str, random_for("evaluation", 0, n).integers(10, size=5))) for n in range(40)]
    right = sum(not set(wrong) & set(number) for number in numbers)
    assert (row.answers, row.chance, row.grown, row.nearest) == (40, 1e-5, False, 200)
    assert row.accuracy == row.complete == pytest.approx(right / 40)
    assert wrong != "7" or 0 < right < 40
    assert all(part.start >= 192 for part in row.by_distance), "the number stands at least half the sequence back"
    assert " of 40 answers right (chance is 0.00001), all of them in " in events[-1].message
    screen = Console(file=io.StringIO(), width=100)
    screen.print(recall_tables(found))
    assert "Right answers; chance is 0.00001 " in screen.file.getvalue()
    assert "Sequences per entry: 40 of each length" in screen.file.getvalue()
    fewer = row.model_copy(update={"length": 800, "sequences": 1234})
    screen.print(recall_tables(found.model_copy(update={"rows": [row, fewer]})))
    assert "Sequences per entry: 40 of 400 tokens, 1,234 of 800 tokens" in screen.file.getvalue()
    other = row.model_copy(update={"grown": True, "sequences": 200})
    screen.print(recall_tables(found.model_copy(update={"rows": [row, other]})))
    assert "Sequences per entry: 40 to 200 of each length" in screen.file.getvalue()


def test_what_cannot_be_measured(trained: Path, run: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="32 tokens cannot hold a sequence of this task: it takes 249") as caught:
        recall(trained, [32])
    assert caught.value.remedy == "measure 249 tokens or more, with --lengths"
    assert recall(trained, [249], sequences=1).rows
    train(
        load(tiny, ["data.masked=0.15", "model.architecture=bert", "train.steps=2", "evaluate.lengths=1x"]),
        tmp_path / "bert",
    )
    with pytest.raises(LabError, match="trained on hidden tokens of a text, and this is for models that go on"):
        recall(tmp_path / "bert", [32])
    with pytest.raises(LabError, match="5 tokens cannot hold a sequence of this task: it takes 6"):
        recall(run, [5, T])
    assert not (run / RECALL).exists()


def test_the_command_shows_tables_and_a_figure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["recall", str(run), "--lengths", "1x,4x", "--window", "8,16", "--sequences", "3", "-q"])
    assert not left.value.code
    out = capsys.readouterr().out
    found = load_measured(run, Recall)
    assert {row.window for row in found.rows} == {8, 16}
    for row in found.rows:
        assert f"{row.accuracy:.3f} ± {row.standard_error:.3f}{'*' if row.blind else ''}" in out
    assert "chance is 0.250" in out
    assert (run / "recall.png").read_bytes().startswith(b"\x89PNG")


TRAINABLE = [name for name in shipped() if name.startswith(("mqar", "passkey"))]


@pytest.mark.long
@pytest.mark.parametrize("name", [*TRAINABLE, pytest.param("repeats", marks=pytest.mark.slow)])  # that tokenises first
def test_every_recipe_of_a_task_trains(name: str, tmp_path: Path) -> None:
    few = ["train.steps=2", "train.batch=2", "train.warmup=0", "train.log_every=1"]
    info = train(load(name, few), tmp_path / "run")
    assert info.status == "complete"
    assert len(info.train_loss) == 2
