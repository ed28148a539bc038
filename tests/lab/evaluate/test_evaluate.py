"""Evaluation: losses, their standard errors, the rotary base at each length, and what cannot be
evaluated.

Over 400 lines: the cases share the trained model.
"""

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import softfocus.hf
from softfocus.lab import model as models
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.forward import has_plain_head, token_losses
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.evaluate.means import Mean, default_edges
from softfocus.lab.evaluate.rope import scale_rope
from softfocus.lab.generate import generate
from softfocus.lab.progress import Event
from softfocus.lab.recipes import lengths
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import (
    EVALUATION,
    MODEL,
    UNFINISHED,
    load_measured,
    load_run,
    save_measured,
    save_run,
)
from softfocus.lab.run_folder.results import AS_TRAINED, Evaluation, Row, Setting, default_settings
from softfocus.lab.train.run import train

PLAIN, NTK, YARN = AS_TRAINED, Setting(rope="ntk"), Setting(rope="yarn")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns(EVALUATION)))


def test_rows_buckets_and_events(run: Path) -> None:
    events: list[Event] = []
    found = evaluate(run, [128, 32, 64], tokens=2048, batch_tokens=100, progress=events.append)
    assert default_settings(32) == (PLAIN, NTK, Setting(window=32))
    assert [(row.setting, row.length) for row in found.rows] == [
        (setting, length) for setting in default_settings(32) for length in (32, 64, 128)
    ]
    assert {row.tokens for row in found.rows} == {found.tokens} == {2048}
    assert [event.row for event in events if event.kind == "row"] == found.rows
    steps = [event.done for event in events if event.kind == "step"]
    assert steps == sorted(steps)
    assert steps[-1] == 9 * 2048
    assert load_measured(run, Evaluation) == found
    assert (found.corpus_key, found.longest, found.documents, found.crossing) == (load_run(run).corpus_key, 128, 3, 0)
    for row in found.rows:
        assert row.windows == 2048 // row.length
        assert [bucket.end for bucket in row.buckets] == default_edges(32, row.length)[1:]
        assert sum(bucket.tokens for bucket in row.buckets) == row.tokens
        mean = sum(bucket.loss * bucket.tokens for bucket in row.buckets) / row.tokens
        assert mean == pytest.approx(row.loss, rel=1e-12)
        assert 0 < row.standard_error < row.loss
        assert (len(row.documents), sum(row.windows_by_document)) == (3, row.windows)
        for bucket in row.buckets:  # what is kept by document makes the mean and its error again
            counts = [count * (bucket.end - bucket.start) for count in row.windows_by_document]
            repeated = Mean.of(bucket.sums, counts)
            got = repeated.value, repeated.standard_error
            assert got == pytest.approx((bucket.loss, bucket.standard_error), abs=1e-5)
    at_train = [found.row(32, setting) for setting in default_settings(32)]
    assert at_train[0] is not None
    assert at_train[1:] == [at_train[0].model_copy(update={"setting": s}) for s in default_settings(32)[1:]]


def test_a_model_runs_another_mechanism_in_place_of_its_own(run: Path, reseal: Callable[[Path], None]) -> None:
    """Its own by name changes nothing; another gives the loss of a model that was switched by
    hand.
    """
    own, other = Setting(mechanism="sharpened(lssa, 15)"), Setting(mechanism="lssar_p3")
    found = evaluate(run, [32, 64], settings=[PLAIN, own, other], tokens=512)
    plain, same, switched = ([row.loss for row in found.rows if row.setting == s] for s in (PLAIN, own, other))
    assert same == plain
    assert switched != plain
    config = run / MODEL / "config.json"
    by_hand, count = re.subn(r'"power": 15(\.0)?', '"power": 3.0', config.read_text())
    assert count
    config.write_text(by_hand)
    reseal(run)
    assert [row.loss for row in evaluate(run, [32, 64], settings=[PLAIN], tokens=512).rows[:2]] == switched
    with pytest.raises(LabError, match="--mechanism ssmax: what was trained, or is to run, learns head_scale"):
        evaluate(run, [32], settings=[Setting(mechanism="ssmax")], tokens=512)


def test_every_setting_reaches_the_model(run: Path) -> None:
    """Beyond the training length each computes something else; a window as long as the text hides
    nothing.
    """
    settings = [PLAIN, NTK, YARN, Setting(window=8), Setting(window=8, sinks=2), Setting(window=64)]
    found = evaluate(run, [16, 64], settings=settings, tokens=512)
    longest = [row.loss for row in found.rows if row.length == 64 and row.setting != Setting(window=64)]
    assert len(set(longest)) == 5
    assert found.row(64, Setting(window=64)).loss == found.row(64).loss
    assert found.row(16, YARN).loss == found.row(16).loss, "up to the training length nothing is scaled"
    assert found.row(16, Setting(window=8)).loss != found.row(16).loss


def test_a_window_shows_the_last_keys_alone(run: Path) -> None:
    """Of a window of 8 keys, one layer: a change of the token 8 places before is seen by no later
    position.
    """
    config = models.load_config(run)
    softfocus.hf.window(config, 8)
    model = models.load(run, config)
    one = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[0, 10] = (other[0, 10] + 1) % 256
    first, second = (token_losses(model, tokens)[0] for tokens in (one, other))
    changed = (first != second).nonzero().flatten().tolist()
    assert set(changed) <= {9, *range(10, 18)}, "9 predicts the token itself"
    assert {10, 17} <= set(changed)


def test_custom_edges_keep_the_training_length(run: Path) -> None:
    row = evaluate(run, [128], settings=[PLAIN], tokens=512, buckets=[100]).rows[0]
    assert [bucket.end for bucket in row.buckets] == [32, 100, 128]


def test_batches_do_not_change_the_result(run: Path) -> None:
    one, many = (evaluate(run, [64], settings=[PLAIN], tokens=1024, batch_tokens=size).rows[0] for size in (1, 1024))
    assert one.loss == pytest.approx(many.loss, rel=1e-6)  # float32: products of other shapes round differently


def test_an_evaluation_that_stops_does_not_look_complete(run: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "row":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(run, [32, 64], tokens=512, progress=stop)
    assert not (run / EVALUATION).exists()
    with pytest.raises(LabError, match="softfocus evaluate"):
        load_measured(run, Evaluation)


def stopped_after(run: Path, rows: int, wanted: list[int], **options: Any) -> list[Row]:
    """An evaluation that is stopped when so many rows are finished: the rows."""
    seen: list[Row] = []

    def stop(event: Event) -> None:
        seen.extend([event.row] if event.row else [])
        if len(seen) == rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(run, wanted, progress=stop, **options)
    return seen


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the windows that models read."""
    seen: list[int] = []

    def counted(model: Any, windows: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(windows.shape[1] - 1)
        return token_losses(model, windows, **options)

    monkeypatch.setattr("softfocus.lab.evaluate.forward.token_losses", counted)
    return seen


def test_an_evaluation_that_was_stopped_goes_on(run: Path, tmp_path: Path, passes: list[int]) -> None:
    whole = evaluate(Path(shutil.copytree(run, tmp_path / "whole" / "run")), [32, 64, 128], tokens=1024)
    before = len(passes)
    seen = stopped_after(run, 4, [32, 64, 128], tokens=1024)
    done = len(passes) - before
    assert seen == whole.rows[:4]
    assert not (run / EVALUATION).exists()
    assert evaluate(run, [32, 64, 128], tokens=1024) == whole
    assert len(passes) == 2 * before, "nothing was measured twice"
    assert 0 < done < before
    assert load_measured(run, Evaluation) == whole
    assert {path.name for path in run.iterdir()} == {path.name for path in (tmp_path / "whole" / "run").iterdir()}


def another_weight(run: Path) -> None:
    path = run / "model" / "model.safetensors"
    weights = load_file(path)
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (another_weight, {}),
        (lambda run: (run / UNFINISHED).write_text("{"), {}),
        (None, {"tokens": 2048}),
        (None, {"buckets": [10]}),
        (None, {"batch_tokens": 128}),
    ],
    ids=["weights", "damaged", "tokens", "buckets", "batches"],
)
def test_rows_of_another_model_or_other_options_are_not_taken_over(
    run: Path, passes: list[int], reseal: Callable[[Path], None], change: Any, options: dict[str, Any]
) -> None:
    stopped_after(run, 2, [32, 64], tokens=1024, settings=[PLAIN, YARN])
    if change:
        change(run)
        reseal(run)
    passes.clear()
    found = evaluate(run, [32, 64], **{"tokens": 1024, "settings": [PLAIN]} | options)
    assert set(passes) == {32, 64}
    assert [row.length for row in found.rows] == [32, 64]
    assert not (run / UNFINISHED).exists()


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
    """base * (L / L0)^(d / (d - 2)) at every L."""
    config = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": rotary}
    recipe = load(tiny, ["model.config.rope_parameters=" + str(config).replace(":", " =").replace("'", '"')])
    dimension = int(16 * rotary)
    for length in (2, 16, 32, 64, 128, 256, 512):
        config = scale_rope(models.build_config(recipe, 257), "ntk", 32, length)
        model = AutoModelForCausalLM.from_config(config).eval()
        model(input_ids=torch.zeros(1, length, dtype=torch.long))
        rope = next(module for module in model.modules() if hasattr(module, "inv_freq"))
        base = 5000.0 * max(1.0, length / 32) ** (dimension / (dimension - 2))
        expected = base ** -(torch.arange(0, dimension, 2, dtype=torch.float64) / dimension)
        torch.testing.assert_close(rope.inv_freq.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [16, 32, 64, 512])
def test_yarn_is_the_papers(length: int, tiny: Path) -> None:
    """A frequency that turns more often in 32 tokens stays, the slow ones are divided by L / 32,
    scores are sharpened.
    """
    whole = 'model.config.rope_parameters={rope_type = "default", rope_theta = 10000.0, partial_rotary_factor = 1.0}'
    config = models.build_config(load(tiny, [whole]), 257)
    model = AutoModelForCausalLM.from_config(scale_rope(config, "yarn", 32, length))
    rope = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    factor = max(1.0, length / 32)
    usual = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert rope.attention_scaling == pytest.approx(0.1 * math.log(factor) + 1)
    torch.testing.assert_close(rope.inv_freq[0], usual[0])
    torch.testing.assert_close(rope.inv_freq[1], usual[1] * (1 + 1 / factor) / 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(rope.inv_freq[2:], usual[2:] / factor, rtol=1e-6, atol=0)  # less than a turn


@pytest.mark.parametrize("setting", [NTK, YARN])
def test_rows_do_not_depend_on_the_other_lengths(setting: Setting, run: Path) -> None:
    together = evaluate(run, [32, 64, 128], settings=[PLAIN, setting], tokens=1024)
    row = together.row(128, setting)
    assert row is not None
    assert row.loss != together.row(128).loss
    (run / EVALUATION).unlink()
    lone = evaluate(run, [128], settings=[setting], tokens=1024).rows[0]
    assert lone.loss == row.loss


def test_rows_measured_on_the_same_text_stay(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = evaluate(run, [32, 64, 128], tokens=1024)
    assert evaluate(run, [128], settings=[PLAIN], tokens=1024) == whole
    assert load_measured(run, Evaluation) == whole
    assert evaluate(run, [32], settings=[PLAIN], tokens=1024) == whole, (
        "a shorter longest length reads the same text too"
    )
    assert not caplog.records
    other = evaluate(run, [32], tokens=512)
    assert ({row.length for row in other.rows}, other.longest) == ({32}, 32)
    assert "holds 9 losses" in caplog.text
    save_measured(run, whole.model_copy(update={"seed": 5}))
    assert len(evaluate(run, [128], tokens=1024).rows) == 3, "those of another training do not"


def test_a_device_whose_memory_is_full(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **others: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr("softfocus.lab.evaluate.forward.token_losses", full)
    with pytest.raises(LabError, match=r"memory is full: CUDA out of memory.*; lower --batch-tokens"):
        evaluate(run, [32], tokens=512)


def test_one_rotary_frequency_cannot_be_scaled(tiny: Path) -> None:
    parameters = '{rope_type = "default", rope_theta = 10000.0, partial_rotary_factor = 0.25}'
    changes = ["model.config.num_attention_heads=4", f"model.config.rope_parameters={parameters}"]
    config = models.build_config(load(tiny, changes), 257)
    assert config.hidden_size // config.num_attention_heads * 0.25 == 2
    with pytest.raises(LabError, match="two rotary dimensions have one frequency"):
        scale_rope(config, "ntk", 32, 64)


def test_ntk_needs_a_rotary_embedding_to_scale(tiny: Path, tmp_path: Path) -> None:
    overrides = ["model.architecture=gpt2", "train.steps=2"]
    recipe = tmp_path / "gpt2.toml"
    text = tiny.read_text()
    table = text[text.index("[model.config]") : text.index("[data]")]
    recipe.write_text(text.replace(table, "[model.config]\nn_embd = 32\nn_layer = 1\nn_head = 2\nn_positions = 64\n"))
    train(load(recipe, overrides), tmp_path / "run")
    assert len(evaluate(tmp_path / "run", [32, 64], settings=[PLAIN], tokens=512).rows) == 2
    events: list[Event] = []
    with pytest.raises(LabError, match="--rope trained"):
        evaluate(tmp_path / "run", [32, 64], tokens=512, progress=events.append)
    with pytest.raises(LabError, match="leave out --sinks"):
        evaluate(tmp_path / "run", [32], settings=[Setting(window=8, sinks=2)], tokens=512, progress=events.append)
    assert not events, "before anything was computed"
    with pytest.raises(LabError, match="with 64 positions cannot read 128 tokens; evaluate --lengths up to 64"):
        evaluate(tmp_path / "run", [128], settings=[PLAIN], tokens=512)
    assert len(generate(tmp_path / "run", "x" * 60, tokens=5).text) < 20
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


def test_pickled_weights_are_not_loaded(run: Path, reseal: Callable[[Path], None]) -> None:
    weights = run / "model" / "model.safetensors"
    torch.save(load_file(weights), run / "model" / "pytorch_model.bin")
    weights.unlink()
    reseal(run)
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
    [
        ("1k,2k", [1024, 2048]),
        ("4x, 1x,2x,1x", [128, 256, 512]),
        ("100", [100]),
        ("0.5x,1.5K", [64, 1536]),
        ("131072x", [2**24]),
    ],
)
def test_lengths(text: str, expected: list[int]) -> None:
    assert lengths.parse(text, 128) == expected


@pytest.mark.parametrize("text", ["131073x", "99999999999x", "9" * 400, "9" * 6000])
def test_lengths_that_no_memory_holds(text: str) -> None:
    with pytest.raises(LabError, match="is too long; let --lengths be at most 16,777,216 tokens"):
        lengths.parse(text, 128)


def test_a_multiple_is_exact() -> None:
    """As a float 1.1 times 10 is 11.000000000000002."""
    assert lengths.parse("1.1x,2.2x", 10) == [11, 22]


@pytest.mark.parametrize("text", ["", "1k,,2k", "one", "-5", "0.3x", "1", "1kx", "2m"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(LabError):
        lengths.parse(text, 128)


def test_settings_of_the_command_line() -> None:
    def names(rope: str, windows: list[str], sinks: int = 0) -> list[str]:
        return [setting.name(128) for setting in lengths.settings_of(rope, windows, sinks, 128)]

    assert lengths.settings_of("trained,ntk", ["1x"], 0, 128) == list(default_settings(128))
    assert names("yarn, trained", ["none"]) == ["YaRN", "as trained"]
    assert names("none", ["0.5x,128", "1x"], 4) == ["window 0.5x (4 sinks)", "window 1x (4 sinks)"]
    assert Setting(window=2048, sinks=4).name() == "window 2,048 (4 sinks)"
    assert [Setting(window=n).name(4096) for n in (4096, 4097, 6144)] == ["window 1x", "window 4,097", "window 1.5x"]
    assert [setting.name() for setting in lengths.settings_of("trained,ntk", ["none"], 0, 128, ["lssa"])] == [
        "as trained",
        "dynamic NTK",
        "run as lssa",
        "dynamic NTK, run as lssa",
    ]
    assert lengths.settings_of("trained,ntk", ["1x"], 0, 128, ["lssa"]) == list(default_settings(128, ["lssa"]))
    with pytest.raises(LabError, match="--mechanism: mechanism 'lsa' is not known; did you mean 'lssa'"):
        lengths.settings_of("trained", ["none"], 0, 128, ["lsa"])
    with pytest.raises(LabError, match="--mechanism lssa runs under each scaling of --rope, and --rope none leaves"):
        lengths.settings_of("none", ["1x"], 0, 128, ["lssa"])
    for arguments, said in {
        ("yarm", ("1x",), 0): "did you mean 'yarn'",
        ("trained", ("none",), 4): "--sinks 4 does not fit into --window none",
        ("trained", ("1x", "4"), 4): "--sinks 4 does not fit into --window 4",
        ("none", ("none",), 0): "leave nothing to evaluate",
        ("trained", ("wide",), 0): "write --window like",
    }.items():
        with pytest.raises(LabError, match=said):
            lengths.settings_of(*arguments, 128)


def test_lengths_name_the_option_that_they_stand_in() -> None:
    with pytest.raises(LabError, match="write --buckets like"):
        lengths.parse("one", 128, "--buckets")


def test_a_loss_from_one_document_says_that_its_error_is_unknown():
    row = Row(length=8, loss=1.25, standard_error=math.nan, tokens=8, windows=1)
    assert row.text == "1.250 (from one document: its error is unknown)"
    assert row.model_copy(update={"standard_error": 0.125}).text == "1.250 ± 0.125"
