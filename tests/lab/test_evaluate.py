"""Evaluation: losses, their standard errors, the rotary base at each length, and what cannot be evaluated."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from softfocus.lab import lengths
from softfocus.lab import model as models
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate import evaluate, has_plain_head, token_losses
from softfocus.lab.generate import generate
from softfocus.lab.means import ClusteredMeans, default_edges
from softfocus.lab.progress import Event
from softfocus.lab.recipe import load
from softfocus.lab.results import EVALUATION, Row, load_evaluation, load_run, save_evaluation, save_run
from softfocus.lab.rope import with_dynamic_ntk
from softfocus.lab.train import train


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns(EVALUATION)))


def test_rows_buckets_and_events(run: Path) -> None:
    events: list[Event] = []
    found = evaluate(run, [128, 32, 64], tokens=2048, batch_tokens=100, progress=events.append)
    assert [(row.ntk, row.length) for row in found.rows] == [(ntk, n) for ntk in (False, True) for n in (32, 64, 128)]
    assert {row.tokens for row in found.rows} == {found.tokens} == {2048}
    assert [event.row for event in events if event.kind == "row"] == found.rows
    steps = [event.done for event in events if event.kind == "step"]
    assert steps == sorted(steps)
    assert steps[-1] == 6 * 2048
    assert load_evaluation(run) == found
    assert (found.corpus_key, found.longest, found.documents, found.crossing) == (load_run(run).corpus_key, 128, 3, 0)
    for row in found.rows:
        assert row.windows == 2048 // row.length
        assert [bucket.end for bucket in row.buckets] == default_edges(32, row.length)[1:]
        assert sum(bucket.tokens for bucket in row.buckets) == row.tokens
        mean = sum(bucket.loss * bucket.tokens for bucket in row.buckets) / row.tokens
        assert mean == pytest.approx(row.loss, rel=1e-12)
        assert 0 < row.standard_error < row.loss
    at_train = [found.row(32, ntk) for ntk in (False, True)]
    assert at_train[0] is not None
    assert at_train[1] == at_train[0].model_copy(update={"ntk": True})


def test_batches_do_not_change_the_result(run: Path) -> None:
    one, many = (evaluate(run, [64], ntk=[False], tokens=1024, batch_tokens=size).rows[0] for size in (1, 1024))
    assert one.loss == pytest.approx(many.loss, rel=1e-6)  # float32: products of other shapes round differently


def test_an_evaluation_that_stops_does_not_look_complete(run: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "row":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(run, [32, 64], tokens=512, progress=stop)
    assert not (run / EVALUATION).exists()
    with pytest.raises(LabError, match="softfocus evaluate"):
        load_evaluation(run)


@pytest.mark.parametrize("logits", [1, 257 * 50, 2**24])
def test_losses_in_chunks_are_the_models_own(run: Path, logits: int) -> None:
    model = models.load(run)
    windows = torch.randint(256, (3, 41), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = model(input_ids=windows[:, :-1]).logits
    expected = F.cross_entropy(whole.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(3, 40)
    assert has_plain_head(model)
    torch.testing.assert_close(token_losses(model, windows, logits=logits), expected)
    torch.testing.assert_close(token_losses(model, windows, plain=False), expected)


def test_logits_are_never_whole(run: Path) -> None:
    model = models.load(run)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output.numel()))
    token_losses(model, torch.zeros(2, 201, dtype=torch.long), logits=257 * 64)
    assert max(seen) <= 257 * 64
    assert sum(seen) == 2 * 200 * 257


def test_a_head_that_scales_its_logits_is_noticed(tiny: Path) -> None:
    recipe = load(tiny, ["model.architecture=granite", "model.config.logits_scaling=4.0"])
    torch.manual_seed(0)
    assert not has_plain_head(models.build(recipe, 257).eval())


@pytest.mark.parametrize("rotary", [1.0, 0.5])
def test_the_rotary_base_is_the_formulas_at_every_length(rotary: float, tiny: Path) -> None:
    """base * (L / L0)^(d / (d - 2)) at every L, if lengths ascend: Transformers keeps the base of the longest seen."""
    config = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": rotary}
    recipe = load(tiny, ["model.config.rope_parameters=" + str(config).replace(":", " =").replace("'", '"')])
    built = models.build_config(recipe, 257)
    model = AutoModelForCausalLM.from_config(with_dynamic_ntk(built, 32)).eval()
    rope = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    dimension = int(16 * rotary)
    for length in (2, 16, 32, 64, 128, 256, 512):
        model(input_ids=torch.zeros(1, length, dtype=torch.long))
        base = 5000.0 * max(1.0, length / 32) ** (dimension / (dimension - 2))
        expected = base ** -(torch.arange(0, dimension, 2, dtype=torch.float64) / dimension)
        torch.testing.assert_close(rope.inv_freq.double(), expected, rtol=1e-6, atol=0)


def test_rows_do_not_depend_on_the_other_lengths(run: Path) -> None:
    together = evaluate(run, [32, 64, 128], tokens=1024)
    model = models.load(run, with_dynamic_ntk(models.load_config(run), 32))
    rope = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    assert rope.rope_type == "dynamic"
    row = together.row(128, ntk=True)
    assert row is not None
    (run / EVALUATION).unlink()
    alone = evaluate(run, [128], ntk=[True], tokens=1024).rows[0]
    assert alone.loss == row.loss


def test_rows_measured_on_the_same_text_stay(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = evaluate(run, [32, 64, 128], tokens=1024)
    assert evaluate(run, [128], ntk=[False], tokens=1024) == whole
    assert load_evaluation(run) == whole
    assert evaluate(run, [32], ntk=[False], tokens=1024) == whole, "a shorter longest length reads the same text too"
    assert not caplog.records
    other = evaluate(run, [32], tokens=512)
    assert ({row.length for row in other.rows}, other.longest) == ({32}, 32)
    assert "held 4 losses at other lengths" in caplog.text
    save_evaluation(run, whole.model_copy(update={"seed": 5}))
    assert len(evaluate(run, [128], tokens=1024).rows) == 2, "those of another training do not"


def test_a_device_whose_memory_is_full(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **others: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr("softfocus.lab.evaluate.token_losses", full)
    with pytest.raises(LabError, match=r"memory is full: CUDA out of memory.*; lower --batch-tokens"):
        evaluate(run, [32], tokens=512)


def test_ntk_needs_a_rotary_embedding_to_scale(tiny: Path, tmp_path: Path) -> None:
    overrides = ["model.architecture=gpt2", "train.steps=2"]
    recipe = tmp_path / "gpt2.toml"
    text = tiny.read_text()
    table = text[text.index("[model.config]") : text.index("[data]")]
    recipe.write_text(text.replace(table, "[model.config]\nn_embd = 32\nn_layer = 1\nn_head = 2\nn_positions = 64\n"))
    train(load(recipe, overrides), tmp_path / "run")
    assert len(evaluate(tmp_path / "run", [32, 64], ntk=[False], tokens=512).rows) == 2
    events: list[Event] = []
    with pytest.raises(LabError, match="--no-ntk"):
        evaluate(tmp_path / "run", [32, 64], tokens=512, progress=events.append)
    assert not events, "before anything was computed"
    with pytest.raises(LabError, match="with 64 positions cannot read 128 tokens; evaluate --lengths up to 64"):
        evaluate(tmp_path / "run", [128], ntk=[False], tokens=512)
    assert len(generate(tmp_path / "run", "x" * 60, tokens=5)) < 20
    with pytest.raises(LabError, match="cannot read 65 tokens; keep prompt and --tokens together within 64"):
        generate(tmp_path / "run", "x" * 60, tokens=6)


def test_what_cannot_be_evaluated(run: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="there is no run at"):
        evaluate(tmp_path / "nowhere", [32])
    with pytest.raises(LabError, match="evaluate shorter lengths"):
        evaluate(run, [32 * 2**14])
    with pytest.raises(LabError, match="does not divide the longest"):
        evaluate(run, [48, 128])
    shutil.rmtree(run / "model")
    with pytest.raises(LabError, match="has no model"):
        evaluate(run, [32])
    info = load_run(run)
    info.status, info.error = "failed", "it rained"
    save_run(run, info)
    with pytest.raises(LabError, match=r"not finished: its status is failed \(it rained\)"):
        evaluate(run, [32])
    assert not (run / EVALUATION).exists()


def test_pickled_weights_are_not_loaded(run: Path) -> None:
    weights = run / "model" / "model.safetensors"
    torch.save(load_file(weights), run / "model" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(LabError, match=r"cannot be loaded: .*safetensors"):
        evaluate(run, [32], tokens=512)


def test_a_corpus_that_changed(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("".join((tiny.parent / f"{number}.txt").read_text() for number in range(10)))
    recipe = load(tiny, [f"data.source={text}", "data.tokenizer=bpe:300", "train.steps=2"])
    train(recipe, tmp_path / "run")
    evaluate(tmp_path / "run", [32], tokens=512)
    assert not caplog.records
    os.utime(text, (1, 1))  # the same text: the same tokenizer, but nobody can be sure of what was held out
    evaluate(tmp_path / "run", [32], tokens=512)
    assert "has changed since it was trained" in caplog.text
    text.write_text(text.read_text()[::-1])
    with pytest.raises(LabError, match="not the one that its recipe now gives"):
        evaluate(tmp_path / "run", [32], tokens=512)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1k,2k", [1024, 2048]), ("4x, 1x,2x,1x", [128, 256, 512]), ("100", [100]), ("0.5x,1.5K", [64, 1536])],
)
def test_lengths(text: str, expected: list[int]) -> None:
    assert lengths.parse(text, 128) == expected


@pytest.mark.parametrize("text", ["", "1k,,2k", "one", "-5", "0.3x", "1", "1kx", "2m"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(LabError):
        lengths.parse(text, 128)


def test_lengths_name_the_option_that_they_stand_in() -> None:
    with pytest.raises(LabError, match="write --buckets like"):
        lengths.parse("one", 128, "--buckets")


def test_standard_errors() -> None:
    random: Any = np.random.default_rng(0)
    losses = random.normal(3, 1, (40, 8))
    alone = ClusteredMeans([0, 8])
    alone.add(losses, np.arange(40))
    mean, error, tokens = alone.bucket()
    assert (mean, tokens) == (pytest.approx(losses.mean()), 320)
    assert error == pytest.approx(losses.mean(1).std(ddof=1) / math.sqrt(40))

    # Four windows a document, all alike: as many windows again tell nothing more
    copies = ClusteredMeans([0, 4, 8])
    copies.add(np.repeat(losses, 4, axis=0), np.repeat(np.arange(40), 4))
    assert copies.bucket()[1] == pytest.approx(error)
    assert copies.bucket(1)[0] == pytest.approx(losses[:, 4:].mean())
    assert copies.bucket(1)[2] == 40 * 4 * 4

    # Windows of one cluster may come in several batches
    split = ClusteredMeans([0, 4, 8])
    split.add(np.repeat(losses, 4, axis=0)[:70], np.repeat(np.arange(40), 4)[:70])
    split.add(np.repeat(losses, 4, axis=0)[70:], np.repeat(np.arange(40), 4)[70:])
    assert split.bucket() == pytest.approx(copies.bucket())

    single = ClusteredMeans([0, 8])
    single.add(losses, np.zeros(40, dtype=int))
    assert math.isnan(single.bucket()[1])


def test_a_standard_error_covers_the_truth() -> None:
    """Documents of unequal size and with means of their own: two standard errors hold the true mean 95 times of 100."""
    random: Any = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        means = ClusteredMeans([0, 4])
        for document in range(30):
            own = random.normal(0, 1)
            windows = int(random.integers(1, 6))
            means.add(random.normal(own, 1, (windows, 4)), np.full(windows, document))
        mean, error, _ = means.bucket()
        hits += abs(mean) < 2 * error
    assert 0.91 < hits / 400 < 0.98


def test_default_edges() -> None:
    assert default_edges(128, 128) == [0, 32, 64, 128]
    assert default_edges(128, 2048) == [0, 32, 64, 128, 256, 512, 1024, 2048]
    assert default_edges(128, 50) == [0, 32, 50]


def test_a_loss_from_one_document_says_that_its_error_is_unknown():
    row = Row(length=8, ntk=False, loss=1.25, standard_error=math.nan, tokens=8, windows=1)
    assert row.text == "1.250 (from one document: its error is unknown)"
    assert row.model_copy(update={"standard_error": 0.125}).text == "1.250 ± 0.125"
