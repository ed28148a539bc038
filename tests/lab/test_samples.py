"""Runs that are measured sample by sample: what is trained, what is measured, resuming, and what is
refused.
"""

import io
import itertools
import math
import multiprocessing.context
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.nn import functional as F

import softfocus.hf
from softfocus.lab import cli, objective
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.samples import hide
from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.evaluate.samples import evaluate_samples
from softfocus.lab.generate import generate
from softfocus.lab.progress import Event, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.compare import compare
from softfocus.lab.report.points import best, cell, singles
from softfocus.lab.report.results import Report
from softfocus.lab.run_folder.files import MODEL, load_run
from softfocus.lab.run_folder.results import AS_TRAINED, WRONG
from softfocus.lab.studies.estimate import _trial
from softfocus.lab.studies.jobs import plan_jobs
from softfocus.lab.train import trainer
from softfocus.lab.train.run import train

FEW = ["train.steps=4", "train.batch=4", "train.warmup=1", "train.log_every=1", "train.checkpoint_every=2"]
TINY = {
    "vit-toy": ["model.config.num_hidden_layers=1", "data.images.validation=24"],
    "bert-toy": [
        "model.config.num_hidden_layers=1",
        "train.length=32",
        "evaluate.tokens=1024",
        "data.validation_fraction=0.4",
    ],
    "conformer-toy": ["model.config.num_hidden_layers=1", "data.speech.validation=12"],
}
"""A recipe of each kind, and what makes it small."""

KINDS = pytest.mark.parametrize("name", TINY)


@pytest.fixture(scope="module", autouse=True)
def _corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Text for BERT, of a dozen documents, in a cache of its own."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for number in range(12):
        (folder / "text" / f"{number}.txt").write_text(" ".join(str(number * step) for step in range(400)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTFOCUS_CACHE", str(folder / "cache"))
        patch.setitem(TINY, "bert-toy", [*TINY["bert-toy"], f"data.source={folder / 'text'}"])
        yield


def tiny_recipe(name: str, *overrides: str) -> Recipe:
    return load(name, [*FEW, *TINY[name], *overrides])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run of each recipe with LASER, made when it is asked for."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str) -> Path:
        place: Path = folder / name
        if not place.exists():
            train(tiny_recipe(name, "model.mechanism=laser"), place)
        return place

    return run


@KINDS
def test_it_trains_and_its_loss_is_that_of_guessing_at_first(name: str, runs: Any) -> None:
    info = load_run(runs(name))
    assert (info.status, info.steps_done, info.mechanism) == ("complete", 4, "laser")
    assert len(info.train_loss) == len(info.gradient_norm) == 4
    assert all(
        np.isfinite(loss) and norm > 0 for (_, loss), (_, norm) in zip(info.train_loss, info.gradient_norm, strict=True)
    )
    model = models.load(runs(name), kind=load(runs(name) / "recipe.toml").data.kind)
    assert softfocus.hf.layout_of(model) == softfocus.hf.layout_of(models.load_config(runs(name)))
    assert model.config._attn_implementation == "softfocus"


@KINDS
def test_the_mechanism_is_what_runs(name: str) -> None:
    """Softmax through softfocus is Transformers' own attention, and LASER is not."""
    recipe = tiny_recipe(name)
    source = data.sampled(recipe, silent)
    ours = models.build(recipe, source.vocab_size).eval()
    config = models.build_config(recipe, source.vocab_size)
    theirs = type(ours)._from_config(config, attn_implementation="eager").eval()
    theirs.load_state_dict(ours.state_dict())
    sample = source.held_out(recipe).sample(0)
    inputs = {key: value[None] for key, value in sample.items() if key != "labels"}
    with torch.inference_mode():
        eager, softmax = theirs(**inputs).logits, ours(**inputs).logits
        laser = softfocus.hf.use(ours, "laser")(**inputs).logits
    torch.testing.assert_close(softmax, eager, atol=1e-5, rtol=1e-5)
    assert (laser - softmax).abs().max() > 1e-4


@pytest.mark.long
@KINDS
def test_resumed_is_uninterrupted(name: str, runs: Any, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "step" and event.done == 3:
            raise RuntimeError("killed")

    folder = tmp_path / name
    recipe = tiny_recipe(name, "model.mechanism=laser")
    with pytest.raises(RuntimeError, match="killed"):
        train(recipe, folder, progress=stop)
    info = train(recipe, folder, resume=True)
    assert info.train_loss == load_run(runs(name)).train_loss
    ours, whole = (load_file(run / MODEL / "model.safetensors") for run in (folder, runs(name)))
    assert ours.keys() == whole.keys()
    assert all(torch.equal(ours[key], whole[key]) for key in ours)


@pytest.mark.long
@pytest.mark.parametrize("name", ["vit-toy", "conformer-toy"])
def test_samples_made_by_other_processes_are_the_same(
    name: str, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a GPU they are made meanwhile."""
    recipe = tiny_recipe(name, "model.mechanism=laser")
    assert trainer._readers(recipe) == 0
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        assert trainer._readers(recipe) >= 1
        assert trainer._readers(tiny_recipe("bert-toy")) == 0
    monkeypatch.setattr(trainer, "_readers", lambda recipe: 2)
    info = train(recipe, tmp_path / name)
    assert info.train_loss == load_run(runs(name)).train_loss


def test_asking_for_readers_leaves_the_start_method_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    usual = multiprocessing.get_all_start_methods()[0]
    assert (trainer._readers(load("vit-toy")) > 0) == (usual == "fork")
    assert multiprocessing.get_start_method(allow_none=True) is None


@KINDS
def test_measuring_twice_gives_the_same_whatever_the_batch(name: str, runs: Any) -> None:
    first = evaluate_samples(runs(name))
    second = evaluate_samples(runs(name), batch_tokens=1)
    assert [row.setting for row in first.rows] == [AS_TRAINED, WRONG]
    for one, other in zip(first.rows, second.rows, strict=True):
        assert one.documents == other.documents
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.windows_by_document == other.windows_by_document
    group = singles([first])[0]
    for row in first.rows:
        there = cell(group, 1.0, row.setting.name())
        assert there is not None
        assert there.loss == row.loss
        # The sums by document, from which differences are paired, give the same mean and error
        assert there.losses[0][1].value == pytest.approx(row.loss, abs=1e-4)
        assert there.losses[0][1].standard_error == pytest.approx(row.standard_error, abs=1e-4)
    found = best(group, 1.0)
    assert found is not None
    assert found.setting == AS_TRAINED.name()  # a share is no loss, and never the best one


def test_images_by_hand(runs: Any) -> None:
    recipe = load(runs("vit-toy") / "recipe.toml")
    held = data.sampled(recipe, silent).held_out(recipe)
    model = models.load(runs("vit-toy"), kind="images")
    samples = [held.sample(number) for number in held.documents]
    with torch.inference_mode():
        logits = torch.cat([model(pixel_values=sample["pixel_values"][None]).logits for sample in samples])
    labels = torch.stack([sample["labels"] for sample in samples])
    losses = F.cross_entropy(logits, labels, reduction="none")
    found = evaluate_samples(runs("vit-toy"))
    loss, wrong = found.rows
    assert loss.loss == pytest.approx(losses.mean().item(), rel=1e-5)
    assert loss.standard_error == pytest.approx(losses.std().item() / 24**0.5, rel=1e-4)
    assert wrong.loss == (logits.argmax(1) != labels).double().mean().item()


def test_hidden_tokens_by_hand(runs: Any) -> None:
    """Means over the hidden tokens of all windows, and errors from documents as what was drawn."""
    run = runs("bert-toy")
    recipe = load(run / "recipe.toml")
    held = data.sampled(recipe, silent).held_out(recipe)
    model = models.load(run, kind="masked")
    by_document: dict[int, list[float]] = {}
    wrong = []
    for number, document in enumerate(held.documents):
        sample = held.sample(number)
        with torch.inference_mode():
            logits = model(input_ids=sample["input_ids"][None]).logits[0].double()
        for place in torch.nonzero(sample["labels"] != -100).flatten().tolist():
            target = int(sample["labels"][place])
            by_document.setdefault(document, []).append(-logits[place].log_softmax(-1)[target].item())
            wrong.append(int(logits[place].argmax()) != target)
    loss, error = evaluate_samples(run).rows
    every = [one for losses in by_document.values() for one in losses]
    assert loss.loss == pytest.approx(np.mean(every), rel=1e-5)
    assert loss.tokens == len(every) == 5 * len(held.documents)  # 15 % of 32
    assert loss.windows_by_document == [len(by_document[document]) for document in sorted(by_document)]
    count, longest = len(by_document), max(map(len, by_document.values()))
    assert longest > len(every) / 10, "one document has much of the tokens: the jackknife's error"
    without = [(sum(every) - sum(some)) / (len(every) - len(some)) for some in by_document.values()]
    expected = np.sqrt((count - 1) / count * np.square(np.array(without) - np.mean(every)).sum())
    assert loss.standard_error == pytest.approx(expected, rel=1e-4)
    assert error.loss == pytest.approx(np.mean(wrong))


def test_speech_by_hand(runs: Any) -> None:
    """CTC's loss as a sum over all alignments, of a model whose logits are given; and words as the
    edit distance of strings.
    """

    class Fixed(torch.nn.Module):
        """Says what it is told, one frame for each sample."""

        config = SimpleNamespace(conv_kernel=[1], conv_stride=[1])

        def forward(self, input_values: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return SimpleNamespace(logits=logits)

    torch.manual_seed(0)
    logits = torch.randn(2, 4, 3)
    inputs = {
        "input_values": torch.zeros(2, 4),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "labels": torch.tensor([[2, 1, 2, -100], [2, -100, -100, -100]]),
    }
    expected = []
    for row, frames, text in ((0, 4, [2, 1, 2]), (1, 3, [2])):
        total = 0.0
        for path in itertools.product(range(3), repeat=frames):
            heard = [id for id, _ in itertools.groupby(path) if id != 0]
            if heard == text:
                total += math.exp(sum(logits[row, t].log_softmax(-1)[id].item() for t, id in enumerate(path)))
        expected.append(-math.log(total))
    found = objective.scores("speech", Fixed(), inputs)
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.predictions.tolist() == [3, 1]
    assert found.answers.tolist() == [2, 1]  # words: "2", "2" and "2"; 1 is the space
    mean = (expected[0] / 3 + expected[1]) / 2
    assert objective.loss("speech", Fixed(), inputs).item() == pytest.approx(mean, rel=1e-5)
    # The answers of frames 2 2 0 2 | 1: "22" against "2 2"
    logits = F.one_hot(torch.tensor([[2, 2, 0, 2], [2, 2, 2, 1]]), 3).float()
    assert objective.scores("speech", Fixed(), inputs).wrong.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("abc", "abc", 0), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_edits_are_levenshteins(one: str, other: str, count: int) -> None:
    assert objective.edit_distance(one, other) == objective.edit_distance(other, one) == count


def test_hiding_tokens() -> None:
    tokens = np.arange(200, dtype=np.int64) % 10
    random = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    for _ in range(200):
        sample = hide(tokens, 0.15, 10, random)
        seen, labels = sample["input_ids"].numpy(), sample["labels"].numpy()
        hidden = labels != -100
        assert hidden.sum() == 30
        assert (labels[hidden] == tokens[hidden]).all()
        assert (seen[~hidden] == tokens[~hidden]).all()
        counts["mask"] += int((seen[hidden] == 10).sum())
        counts["same"] += int((seen[hidden] == tokens[hidden]).sum())
    # 80 % masks; 10 % as they are and a tenth of the 10 % that are any token: 6000 draws
    assert abs(counts["mask"] / 6000 - 0.8) < 0.02
    assert abs(counts["same"] / 6000 - 0.11) < 0.016


@KINDS
def test_the_estimate_times_it(name: str) -> None:
    seconds, parameters = _trial(tiny_recipe(name), threads=1, processes=1)
    assert seconds > 0
    assert parameters > 1e4


@KINDS
def test_commands_for_texts_refuse_it(name: str, runs: Any) -> None:
    for command in (lambda: evaluate(runs(name), [32]), lambda: generate(runs(name), "a")):
        with pytest.raises(LabError, match=r"(is|was) trained on") as caught:
            command()
        assert "softfocus evaluate" in str(caught.value)


def test_options_for_texts_are_refused(runs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--lengths", "1x,2x"), ("--rope", "yarn")):
        with pytest.raises(SystemExit) as caught:
            cli.main(["evaluate", str(runs("vit-toy")), option, value])
        assert caught.value.code == 2
        assert f"{option} is for runs that go on with a text" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main(["evaluate", str(runs("vit-toy")), "--quiet"])
    assert not caught.value.code
    assert "share of wrong ones" in " ".join(capsys.readouterr().out.split())


@KINDS
def test_a_run_that_is_measured_is_finished(name: str, runs: Any) -> None:
    """So that a study or a claim that is started again goes on with the others."""
    recipe = tiny_recipe(name, "model.mechanism=laser", f"name={name}")
    (runs(name) / "evaluation.json").unlink(missing_ok=True)
    assert plan_jobs(runs(name).parent, [recipe], ["it"])[0].status == "waiting"
    evaluate_samples(runs(name))
    assert plan_jobs(runs(name).parent, [recipe], ["it"])[0].status == "finished"


def test_runs_are_compared(runs: Any, tmp_path: Path) -> None:
    evaluate_samples(runs("vit-toy"))
    report = compare([runs("vit-toy")], tmp_path, console=Console(file=io.StringIO()))
    assert isinstance(report, Report)
    page = (tmp_path / "report.html").read_text()
    assert "Training patches" in page
    assert "Patches per second" in page


@KINDS
def test_it_is_measured_at_its_training_length_alone(name: str) -> None:
    with pytest.raises(UsageError, match="write '1x'"):
        tiny_recipe(name, "evaluate.lengths=1x,2x")
    with pytest.raises(UsageError, match=r"evaluate\.mechanisms"):
        tiny_recipe(name, 'evaluate.mechanisms=["lssa"]')


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("vit-toy", ["train.length=65"], "set train.length=64"),
        ("conformer-toy", ["train.length=99"], "set train.length=98"),
        ("bert-toy", ["model.architecture=vit", "model.config={}"], "a masked language model"),
        ("vit-toy", ["model.architecture=gpt_neox", "model.config={}"], "a classifier of images"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(name: str, overrides: list[str], says: str) -> None:
    recipe = load(name, overrides)
    with pytest.raises(LabError, match=says):
        models.build(recipe, 10)


def test_that_models_predict_other_shares_of_a_text_is_said(tmp_path: Path) -> None:
    """They predict other tokens, and read other ones."""
    for share in (0.2, 0.6):
        train(tiny_recipe("bert-toy", f"data.masked={share}"), tmp_path / str(share))
        evaluate_samples(tmp_path / str(share))
    report = compare([tmp_path / "0.2", tmp_path / "0.6"], tmp_path / "both", console=Console(file=io.StringIO()))
    (note,) = [note for note in report.notes if "share of hidden tokens" in note]
    assert "0.2" in note
    assert "0.6" in note
    assert "their losses do not compare" in note
    assert [note for note in report.notes if note.startswith("Measured on ")]
    assert not any("cut into windows" in note for note in report.notes)


def test_losses_of_other_text_are_not_replaced_without_a_word(
    runs: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(runs("bert-toy"), tmp_path / "bert-toy")
    evaluate_samples(run)
    assert not caplog.messages
    evaluate_samples(run, tokens=256)
    assert "they were measured on other text" in caplog.messages[-1]
