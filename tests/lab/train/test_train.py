"""Training: against a loop written by hand in float64, resumed against uninterrupted, and what
stops it.

Over 400 lines: the cases share the tiny recipe and its uninterrupted run.
"""

import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.nn import functional as F
from transformers import set_seed

import softfocus.hf
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.progress import Event, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.page import minutes
from softfocus.lab.run_folder import provenance
from softfocus.lab.run_folder.files import (
    CHECKPOINTS,
    EVALUATION,
    INDUCTION,
    INSPECTION,
    MODEL,
    RECALL,
    RECIPE,
    RUN,
    TENSORBOARD,
    UNFINISHED,
    load_run,
    save_run,
)
from softfocus.lab.run_folder.owner import LOCK
from softfocus.lab.train.checkpoints import newest
from softfocus.lab.train.memory import least_memory
from softfocus.lab.train.run import _save_model, train
from softfocus.lab.train.trainer import WindowTrainer

GOLDEN = (5.520126, 5.520464, 5.254534, 4.851624, 4.537739, 4.221053, 3.994657, 3.844819, 3.756013, 3.712585)
ROUNDING = 2e-4
"""Relative. float32 and float64 differ by up to 1.4e-5 over these ten steps, as two processors may:
about ten times that.
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / MODEL / "model.safetensors")


def by_hand(recipe: Recipe, dtype: torch.dtype) -> list[float]:
    """The recipe's losses, from a loop that shares with the lab the model, the data and nothing
    else.
    """
    table = recipe.train
    source = data.load(recipe, silent)
    windows = source.training_windows(recipe)
    set_seed(table.seed)
    model = models.build(recipe, source.vocab_size).to(dtype)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": table.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=table.learning_rate, betas=(table.betas[0], table.betas[1]))
    losses = []
    for step in range(table.steps):
        warmdown = table.steps - table.warmup if table.warmdown is None else table.warmdown
        share = max(0.0, (step - (table.steps - warmdown)) / warmdown)
        shape = 1 - share if table.decay == "linear" else 0.5 * (1 + math.cos(math.pi * share))
        end = table.final_learning_rate
        factor = end + (1 - end) * (step / table.warmup if step < table.warmup else shape)
        for group in optimiser.param_groups:
            group["lr"] = table.learning_rate * factor
        batch = [windows[index] for index in range(step * table.batch, (step + 1) * table.batch)]
        inputs, labels = (torch.stack([window[name] for window in batch]) for name in ("input_ids", "labels"))
        loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), table.clip)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


LINEAR = ["train.decay=linear", "train.warmdown=5", "train.final_learning_rate=0.2"]


@pytest.mark.parametrize("overrides", [[], LINEAR], ids=["cosine", "linear"])
def test_ten_steps_are_those_of_a_loop_by_hand(overrides: list[str], tiny: Path, trained: Path, tmp_path: Path) -> None:
    """Order of data, schedule, betas, decay and clipping, all at once.

    The tolerance is computed: twice the error that the same loop makes in float32 against float64,
    as different orders of summation are free to make, and a band of 8 float32 roundings of a loss,
    for the first steps where that error is luck.
    """
    recipe = load(tiny, overrides)
    exact = torch.tensor(by_hand(recipe, torch.float64), dtype=torch.float64)
    single = torch.tensor(by_hand(recipe, torch.float32), dtype=torch.float64)
    info = train(recipe, tmp_path / "run") if overrides else load_run(trained)
    ours = torch.tensor([loss for _, loss in info.train_loss], dtype=torch.float64)
    allowed = 2 * (single - exact).abs().max() + 8 * torch.finfo(torch.float32).eps * exact
    assert torch.all((ours - exact).abs() <= allowed), (ours - exact, allowed)


def test_golden_losses(trained: Path) -> None:
    """The losses of the loop by hand, in float64, on the day that they were written down.

    A change of data, seed, model, schedule or optimiser shows in the second digit; rounding stays
    far below.
    """
    assert [loss for _, loss in load_run(trained).train_loss] == pytest.approx(GOLDEN, rel=ROUNDING)


def test_the_run_folder_says_what_made_it(tiny: Path, trained: Path) -> None:
    info = load_run(trained)
    assert (info.status, info.mechanism, info.recipe, info.name) == ("complete", "lssar", "tiny", "trained")
    assert (info.steps_done, info.steps, info.train_length, info.tokens_per_step) == (10, 10, 32, 256)
    assert info.tokens_per_second is not None
    assert info.tokens_per_second > 0
    assert info.parameters == sum(tensor.numel() for tensor in weights(trained).values())
    assert {"python", "torch", "transformers", "softfocus"} <= set(info.versions)
    assert load(trained / RECIPE) == load(tiny)
    config = json.loads((trained / MODEL / "config.json").read_text())
    assert config["max_position_embeddings"] == 32
    assert config["eos_token_id"] == 256, "generation would stop at whatever byte the architecture's default id is"
    assert not list(trained.rglob("pytorch_model*"))


def test_the_run_folder_does_not_say_where_it_was_made(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host's name in any file or file name; no folder of the machine in what is passed around:
    run.json and model.
    """
    host, folder = "a-telling-host-name", tmp_path / "run"
    for module, name in ((socket, "gethostname"), (socket, "getfqdn"), (platform, "node")):
        monkeypatch.setattr(module, name, lambda *_: host)
    train(load(tiny, ["train.steps=2", "train.checkpoint_every=1"]), folder)
    evaluate(folder, [32], tokens=256)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"run.json", "evaluation.json", "model", "checkpoints", "tensorboard"} <= {
        path.relative_to(folder).parts[0] for path in files
    }
    for path in files:
        assert host not in str(path)
        assert host.encode() not in path.read_bytes(), path
        if "checkpoints" not in path.parts and path.name != RECIPE:  # where the corpus lies is part of a recipe
            assert str(tmp_path).encode() not in path.read_bytes(), path
            assert str(tiny.parent).encode() not in path.read_bytes(), path


def test_tensorboard_reads_the_curves(trained: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(trained / "tensorboard")).Reload()
    losses = [(scalar.step, scalar.value) for scalar in curves.Scalars("train/loss")]
    assert losses == [(step, pytest.approx(loss)) for step, loss in load_run(trained).train_loss]
    assert {"train/learning_rate", "train/grad_norm"} <= set(curves.Tags()["scalars"])


def test_the_curves_are_closed_however_a_training_ends(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[Any] = []

    def writer(stream: Any) -> RecordWriter:
        streams.append(stream)
        return RecordWriter(stream)

    monkeypatch.setattr("softfocus.lab.train.trainer.RecordWriter", writer)
    with pytest.raises(LabError, match="interrupted"):
        train(load(tiny), tmp_path / "run", progress=stop_at(2, crash))
    assert [stream.closed for stream in streams] == [True]
    train(load(tiny, ["train.steps=2"]), tmp_path / "run", overwrite=True)
    assert [stream.closed for stream in streams] == [True, True]


def test_accumulation_and_seeds(tiny: Path, trained: Path, tmp_path: Path) -> None:
    whole = [loss for _, loss in load_run(trained).train_loss]
    parts = train(load(tiny, ["train.accumulate=4"]), tmp_path / "parts")
    assert [loss for _, loss in parts.train_loss] == pytest.approx(whole, rel=ROUNDING)
    other = train(load(tiny, ["train.seed=1", "train.steps=2"]), tmp_path / "other")
    assert abs(other.train_loss[0][1] - whole[0]) > 1e-3


def stop_at(step: int, how: Callable[[], None]) -> Callable[[Event], None]:
    def listener(event: Event) -> None:
        if event.kind == "step" and event.done == step:
            how()

    return listener


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def crash() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("how", "says"), [(ctrl_c, "at step 7"), (crash, "checkpoint-4, is kept")])
def test_resumed_is_uninterrupted(
    how: Callable[[], None], says: str, tiny: Path, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "trained"
    with pytest.raises(LabError, match=says) as caught:
        train(load(tiny), folder, progress=stop_at(6, how))
    assert "--resume" in str(caught.value)
    assert load_run(folder, complete=False).status == "interrupted"
    assert not (folder / MODEL).exists()
    with pytest.raises(LabError, match="not finished"):
        load_run(folder)
    with pytest.raises(LabError, match="--resume to go on"):
        train(load(tiny), folder)
    info = train(load(tiny), folder, resume=True)
    assert info.train_loss == load_run(trained).train_loss
    for name, tensor in weights(trained).items():
        assert torch.equal(weights(folder)[name], tensor), name


ANNEALED = [
    "model.layout={ '0' = [{ heads = 1, mechanism = 'softmax', window = 8 }, { heads = 1 }] }",
    "model.config.num_hidden_layers=2",
    "train.power={ start = 2, share = 0.5 }",
]


@pytest.mark.long
def test_the_power_is_annealed_and_resuming_is_exact(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    powers: list[float | None] = []
    true_loss = WindowTrainer.compute_loss

    def compute_loss(self: WindowTrainer, model: Any, *arguments: Any, **others: Any) -> Any:
        layout = softfocus.hf.layout_of(model)
        assert layout is not None
        assert layout.layers == (0, 1)
        powers.append(layout.layer(0)[1].mechanism.power)
        assert layout.layer(0)[0].mechanism.power is None
        return true_loss(self, model, *arguments, **others)

    monkeypatch.setattr(WindowTrainer, "compute_loss", compute_loss)
    recipe = load(tiny, ANNEALED)
    whole = train(recipe, tmp_path / "whole")
    want = [pytest.approx(2 + 13 * min(1, step / 5)) for step in range(10)]
    assert powers == want
    assert whole.mechanism == "1x softmax[8] + 1x lssar / lssar"
    powers.clear()
    with pytest.raises(LabError, match="checkpoint-4, is kept"):
        train(recipe, tmp_path / "parts", progress=stop_at(6, crash))
    parts = train(recipe, tmp_path / "parts", resume=True)
    assert powers == want[:6] + want[4:]
    assert parts.train_loss == whole.train_loss
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "parts")[name], tensor), name
    layout = softfocus.hf.layout_of(models.load_config(tmp_path / "whole"))
    assert layout is not None
    assert layout.layer(1)[0].mechanism == softfocus.named("lssar")  # saved with its own power
    found = evaluate(tmp_path / "whole", [32, 64])
    assert all(math.isfinite(row.loss) for row in found.rows)


def test_what_is_left_of_a_run_without_run_json_is_not_resumed(
    tiny: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The remedy for a damaged run.json is to delete it and train again."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / EVALUATION).write_text("{}")
    (folder / RUN).unlink()
    recipe = load(tiny, ["model.mechanism=softmax"])
    with pytest.raises(LabError, match="it had no checkpoint yet"):
        train(recipe, folder, progress=stop_at(2, crash))
    assert caplog.messages == [
        f"{folder} has no run.json: its model and checkpoints, of a run of which nothing is known, are deleted"
    ]
    assert not (folder / EVALUATION).exists()
    resumed = train(recipe, folder, resume=True)
    assert resumed.train_loss == train(recipe, tmp_path / "alone").train_loss


def test_a_run_is_not_resumed_on_another_corpus(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("".join((tiny.parent / f"{number}.txt").read_text() for number in range(10)))
    recipe, folder = load(tiny, [f"data.source={text}"]), tmp_path / "run"
    with pytest.raises(LabError, match="interrupted"):
        train(recipe, folder, progress=stop_at(5, crash))
    before = os.stat(text)
    os.utime(text, (1, 1))
    with pytest.raises(LabError, match=r"the corpus of .*run has changed .*; put it back .* --overwrite"):
        train(recipe, folder, resume=True)
    assert load_run(folder, complete=False).status == "interrupted"
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert train(recipe, folder, resume=True).status == "complete"


def test_a_resumed_run_says_what_trained_it_before(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provenance, "commit", lambda: "first")
    with pytest.raises(LabError):
        train(load(tiny), tmp_path / "run", progress=stop_at(6, ctrl_c))
    began = load_run(tmp_path / "run", complete=False)
    monkeypatch.setattr(provenance, "commit", lambda: "second")
    info = train(load(tiny), tmp_path / "run", resume=True)
    assert info.commit == "second"
    (before,) = info.sessions
    assert (before.commit, before.started, before.machine) == ("first", began.started, began.machine)
    assert "goes on with other commit than its last session had" in caplog.text
    assert minutes(info) == "–", "when the first session ended is not known"
    assert load_run(tmp_path / "run").sessions == info.sessions


def test_the_speed_of_a_resumed_run_is_that_of_all_its_steps(tiny: Path, tmp_path: Path) -> None:
    """20 steps at 1,000 tokens per second and 20 at 4,000 take as long as 40 at 1,600."""
    steps, half = ["train.steps=40"], stop_at(20, ctrl_c)
    with pytest.raises(LabError):
        train(load(tiny, steps), tmp_path / "run", progress=half)
    info = load_run(tmp_path / "run", complete=False)
    half_way = info.steps_done
    assert half_way in (20, 21), "the signal may come during the next step"
    info.tokens_per_second = 1000.0
    save_run(tmp_path / "run", info)
    heard: list[Event] = []
    whole = train(load(tiny, steps), tmp_path / "run", resume=True, progress=heard.append)
    now = [event.tokens_per_second for event in heard if event.tokens_per_second][-1]
    assert whole.tokens_per_second == pytest.approx(40 / (half_way / 1000 + (40 - half_way) / now))


def test_the_speed_is_kept_where_a_resumed_run_has_too_few_steps_left(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError):
        train(load(tiny), tmp_path / "run", progress=stop_at(8, ctrl_c))
    began = load_run(tmp_path / "run", complete=False)
    assert began.tokens_per_second
    assert train(load(tiny), tmp_path / "run", resume=True).tokens_per_second == began.tokens_per_second


def test_validation_losses_of_a_run_are_of_one_text(tiny: Path, tmp_path: Path) -> None:
    changes = ["train.validations=5"]
    with pytest.raises(LabError):
        train(load(tiny, changes), tmp_path / "run", progress=stop_at(6, ctrl_c))
    with pytest.raises(LabError, match=r"measures its validation loss on evaluate\.tokens = \d+, not 64"):
        train(load(tiny, [*changes, "evaluate.tokens=64"]), tmp_path / "run", resume=True)
    assert train(load(tiny, changes), tmp_path / "run", resume=True).status == "complete"


def test_resuming_what_is_complete_or_another_recipe(tiny: Path, trained: Path) -> None:
    assert train(load(tiny), trained, resume=True) == load_run(trained)
    with pytest.raises(LabError, match=r"train\.learning_rate = 0\.01, not 0\.02"):
        train(load(tiny, ["train.learning_rate=0.02"]), trained, resume=True)


def test_a_complete_run_is_not_overwritten_unless_told(tiny: Path, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    with pytest.raises(LabError, match="--overwrite"):
        train(load(tiny), folder)
    recipe = load(tiny, ["model.mechanism=softmax", "train.steps=2"])
    for measured in (
        EVALUATION,
        UNFINISHED,
        RECALL,
        "recall.png",
        INDUCTION,
        "induction.png",
        f"{INSPECTION}/maps.png",
    ):
        (folder / measured).parent.mkdir(exist_ok=True)
        (folder / measured).write_text("of the run that was there")
    (folder / "notes.txt").write_text("a user's own")
    there = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(LabError, match="nowhere"):
        train(load(tiny, [f"data.source={tmp_path / 'nowhere'}"]), folder, overwrite=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == there
    assert train(recipe, folder, overwrite=True).mechanism == "softmax"
    train(recipe, tmp_path / "new")
    left = {path.name for path in folder.iterdir()} - {path.name for path in (tmp_path / "new").iterdir()}
    assert left == {"notes.txt"}
    assert not (folder / "checkpoints" / "checkpoint-10").exists()


def batch_of(recipe: Recipe, step: int) -> str:
    """The fingerprint of a step's batch, from the tokens that a loop by hand would read."""
    windows = data.load(recipe, silent).training_windows(recipe)
    read = [windows[index] for index in range((step - 1) * recipe.train.batch, step * recipe.train.batch)]
    content = b"".join(bytes(window[name].numpy()) for window in read for name in ("input_ids", "labels"))
    return hashlib.sha256(content).hexdigest()[:12]


@pytest.mark.parametrize(
    ("factor", "overrides", "says"),
    [
        (math.nan, ["train.log_every=4"], "the loss became nan"),
        (math.nan, ["train.log_every=4", "train.accumulate=2"], "the loss became nan"),
        (50.0, ["train.clip=0.5"], r"the loss exploded, to [\d.]+"),
    ],
    ids=["nan", "accumulated", "exploded"],
)
def test_a_diverged_training_stops_and_says_where(
    factor: float, overrides: list[str], says: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of an interval of logging, naming the step at which it began."""
    recipe, folder = load(tiny, [*overrides, "train.checkpoint_every=2"]), tmp_path / "run"
    true_loss = WindowTrainer.compute_loss

    def compute_loss(self: WindowTrainer, *arguments: Any, **others: Any) -> Any:
        loss = true_loss(self, *arguments, **others)
        return loss * factor if self.state.global_step >= 2 else loss

    monkeypatch.setattr(WindowTrainer, "compute_loss", compute_loss)
    says += rf".* at step 3, on the batch {batch_of(recipe, 3)}; its last good checkpoint is checkpoint-2; "
    with pytest.raises(LabError, match=says + r"lower train\.learning_rate \(0\.01\)"):
        train(recipe, folder)
    info = load_run(folder, complete=False)
    assert info.status == "diverged"
    assert "at step 3" in (info.error or "")
    with pytest.raises(LabError, match=r"its status is diverged \(training .*\); train another recipe"):
        load_run(folder)
    assert [path.name for path in (folder / CHECKPOINTS).iterdir()] == ["checkpoint-2"], "a diverged model was kept"


def test_a_gradient_that_is_not_finite(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is still a number when the weights are none: a checkpoint of that step must not be
    kept.
    """
    true_loss = WindowTrainer.compute_loss

    def compute_loss(self: WindowTrainer, model: Any, *arguments: Any, **others: Any) -> Any:
        loss = true_loss(self, model, *arguments, **others)
        if self.state.global_step < 3:
            return loss
        parameter = next(model.parameters())
        return loss + torch.sqrt(parameter.flatten()[:1] * 0).sum()  # 0, and its slope is infinite

    monkeypatch.setattr(WindowTrainer, "compute_loss", compute_loss)
    with pytest.raises(
        LabError, match=r"the gradient became nan at step 4, on the batch .*; it had no checkpoint yet;"
    ):
        train(load(tiny, ["train.checkpoint_every=4"]), tmp_path / "run")
    assert not list((tmp_path / "run" / CHECKPOINTS).iterdir())


def test_a_high_loss_at_the_start_is_no_explosion(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_loss = WindowTrainer.compute_loss
    monkeypatch.setattr(WindowTrainer, "compute_loss", lambda *given, **others: 50 * true_loss(*given, **others))
    recipe = load(tiny, ["train.checkpoint_every=4"])
    assert train(recipe, tmp_path / "run").status == "complete"
    with pytest.raises(LabError, match="interrupted"):
        train(recipe, tmp_path / "again", progress=stop_at(6, crash))
    assert train(recipe, tmp_path / "again", resume=True).status == "complete"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.source=/no/such/corpus"], "no file or folder /no/such/corpus"),
        (["model.architecture=gpt_nox"], "did you mean 'gpt_neox'"),
        (["model.config.hiden_size=3"], "did you mean 'model.config.hidden_size'"),
        (["model.config.vocab_size=10"], "less than the tokenizer's 257"),
        (["model.architecture=t5", "model.config={}"], "causal language model"),
        (["train.length=100000"], "training tokens"),
        (["model.parameters.gamma=1"], "gamma"),
        (["model.config.num_attention_heads=3"], "refused by GPTNeoXConfig: The hidden size .*num_attention_heads = 3"),
        (
            [
                "model.config.hidden_size=34",
                "model.config.rope_parameters={rope_type='default', rope_theta=1e4, partial_rotary_factor=1.0}",
            ],
            r"heads of 17 dimensions .*; RoPE turns pairs",
        ),
        (["model.config.num_hidden_layers=0"], "num_hidden_layers=0 is below 1; set model.config.num_hidden_layers to"),
        (["model.config.hidden_size=0"], "hidden_size=0 is below 1"),
        (["model.config.num_attention_heads=0"], "num_attention_heads=0 is below 1"),
        (["model.architecture=gpt2", "model.config={n_embd=0}"], "n_embd=0 is below 1; set model.config.n_embd to 1"),
        (["model.config.hidden_act=nonsense"], "gpt_neox' does not make a causal language model: KeyError 'nonsense'"),
        (['model.layout.full_attention="lssar"'], r"'full_attention' chooses no layers \(a gpt_neox model has no la"),
        (
            ["model.architecture=llama", "model.config={hidden_size=32, num_attention_heads=4, num_key_value_heads=3}"],
            "num_key_value_heads=3 does not divide num_attention_heads=4",
        ),
        (
            ["model.architecture=gpt2", "model.config={n_embd=32, n_layer=1, n_head=2, n_positions=16}"],
            "gpt2 model with 16 positions cannot read 32 tokens; raise model.config.n_positions, or lower train.length",
        ),
    ],
)
def test_what_cannot_be_trained(overrides: list[str], says: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=says):
        train(load(tiny, overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_weights_in_pieces_are_refused(name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(LabError, match=f"under {name} is not supported.*; use torchrun"):
        train(load(tiny), tmp_path / "run")


def test_a_device_whose_memory_is_full(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **others: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(WindowTrainer, "compute_loss", full)
    with pytest.raises(LabError, match=r"memory is full: CUDA out of memory.*; raise train\.accumulate \(1\)"):
        train(load(tiny), tmp_path / "run")


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """To write more than so many bytes into a file fails, as on a full disk."""
    resource = pytest.importorskip("resource", reason="limits the size of files as Linux does")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [40_000, 120_000], ids=["safetensors", "torch"])
def test_a_disk_that_fills_up(
    size: int, tiny: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are written by safetensors, the twice as large optimiser by torch: neither raises an
    OSError.
    """
    folder = tmp_path / "trained"
    with pytest.raises(LabError, match=r"cannot write to .*; free some space; then --resume"), files_up_to(size):
        train(load(tiny), folder)
    info = load_run(folder, complete=False)
    assert info.status == "failed"
    assert str(tmp_path) not in (info.error or "")
    assert not list((folder / CHECKPOINTS).iterdir()), "half a checkpoint takes up space"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))  # room is needed at the start alone
    assert train(load(tiny), folder, resume=True).train_loss == load_run(trained).train_loss


@pytest.mark.parametrize("size", [800, 5_000, 40_000], ids=["config", "tokenizer", "weights"])
def test_a_disk_that_fills_up_while_the_model_is_saved(
    size: int, tiny: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trained"

    def save(*arguments: Any) -> None:
        with files_up_to(size):
            _save_model(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("softfocus.lab.train.run._save_model", save)
        with pytest.raises(LabError, match=r"cannot write to .*; free some space; then --resume"):
            train(load(tiny), folder)
    assert load_run(folder, complete=False).status == "failed"
    assert {path.name for path in folder.iterdir()} == {LOCK, RUN, RECIPE, CHECKPOINTS, TENSORBOARD}
    assert train(load(tiny), folder, resume=True).train_loss == load_run(trained).train_loss
    for name, tensor in weights(trained).items():
        assert torch.equal(weights(folder)[name], tensor), name


def test_what_is_no_full_disk_is_not_called_one(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(LabError, match="interrupted"):
        train(load(tiny), folder, progress=stop_at(5, crash))
    shutil.rmtree(folder / TENSORBOARD)
    (folder / TENSORBOARD).touch()
    with pytest.raises(LabError, match=r"cannot read or write .*/tensorboard: File exists; put that right"):
        train(load(tiny), folder, resume=True)
    (folder / TENSORBOARD).unlink()
    assert train(load(tiny), folder, resume=True).status == "complete"


def test_folders_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="is a file"):
        train(load(tiny), tmp_path / "file")
    with pytest.raises(LabError, match="cannot make the folder"):
        train(load(tiny), tmp_path / "file" / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(LabError, match="not empty and holds no run"):
        train(load(tiny), tmp_path / "full", overwrite=True)


def test_a_recipe_of_somebodys_own_is_not_deleted(tiny: Path, trained: Path, tmp_path: Path) -> None:
    """Nor what lies beside it: a folder with a run is known by its run.json, or by the first line
    of its recipe.toml and its lock.
    """
    mine = tmp_path / "mine"
    (mine / "inspect").mkdir(parents=True)
    (mine / "recipe.toml").write_text(f'# by hand\nbase = "{tiny}"\n')
    (mine / "inspect" / "notes.txt").write_text("mine")
    copied = (trained / "recipe.toml").read_text()  # its first line is the token
    for text in ((mine / "recipe.toml").read_text(), copied):
        (mine / "recipe.toml").write_text(text)
        for overwrite in (False, True):
            with pytest.raises(LabError, match="not empty and holds no run"):
                train(load(mine / "recipe.toml"), mine, overwrite=overwrite)
        assert (mine / "recipe.toml").read_text() == text
    assert (mine / "inspect" / "notes.txt").exists()


def test_a_full_disk_is_noticed_before_it_is_full(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(
        LabError, match=r"/run has 1\.0 KB free, and training needs [\d.]+ [KM]B for its checkpoints; free some space"
    ):
        train(load(tiny), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_deleted_only_where_the_disk_has_room_for_another(
    tiny: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves counts as room."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    there = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    freed = sum(len(content) for path, content in there.items() if {"model", "checkpoints"} & set(path.parts))
    needed = 40 * load_run(folder).parameters - freed
    assert needed > 0
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(LabError, match="free some space"):
        train(load(tiny), folder, overwrite=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == there
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    assert train(load(tiny, ["train.steps=2"]), folder, overwrite=True).status == "complete"


def test_damaged_run_files(trained: Path, tmp_path: Path) -> None:
    info = load_run(trained)
    save_run(tmp_path, info)
    assert load_run(tmp_path) == info
    (tmp_path / RUN).write_text((tmp_path / RUN).read_text().replace('"seed": 0', '"seed": "none"'))
    with pytest.raises(LabError, match="seed"):
        load_run(tmp_path)
    for text in (b"{", b"\xff"):
        (tmp_path / RUN).write_bytes(text)
        with pytest.raises(LabError, match=r"cannot be read.*; put back a copy, or train again with .* --overwrite"):
            load_run(tmp_path)
    with pytest.raises(LabError, match=r"the run .* has no recipe\.toml; put back a copy, or train it again"):
        load(tmp_path / "recipe.toml")


def test_a_vocabulary_of_nothing_is_left_to_the_tokenizer(tiny: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert least_memory(load(tiny, ["data.tokenizer=bpe:0"])).size > 0
    assert not [warning for warning in recwarn if "zero-element" in str(warning.message)]


def test_bf16_and_other_architectures(tiny: Path, tmp_path: Path) -> None:
    overrides = ["model.architecture=llama", "train.precision=bf16", "train.steps=4", "model.mechanism=ssmax"]
    overrides += ["model.config.num_key_value_heads=1", "model.parameters.head_scale=0.7", "train.decay=linear"]
    info = train(load(tiny, overrides), tmp_path / "run")
    assert info.status == "complete"
    assert any("head_scale" in name for name in weights(tmp_path / "run"))


@pytest.mark.long
def test_two_processes_are_one(tiny: Path, trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "softfocus.lab", "train", str(tiny), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Now: softfocus evaluate") == 1, "one of them speaks"
    told = re.findall(r"(\d+) of 10 steps", done.stderr)
    assert told
    assert len(told) == len(set(told))
    ours, lone = load_run(tmp_path / "run"), load_run(trained)
    assert [loss for _, loss in ours.train_loss] == pytest.approx([loss for _, loss in lone.train_loss], rel=ROUNDING)


def node(rank: int, port: int, arguments: list[str], patience: int, log: Path) -> subprocess.Popen[bytes]:
    """One of two processes of a training, each as on a machine of its own: nobody ends one when the
    other is gone.
    """
    code = (
        "import sys, datetime; from softfocus.lab import cli; from softfocus.lab.train import processes; "
        f"processes.PATIENCE = datetime.timedelta(seconds={patience}); cli.main(sys.argv[1:])"
    )
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    environment = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"} | {key: str(place[key]) for key in place}
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, "-c", code, *arguments], env=os.environ | environment, stderr=file)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "patience"),
    [(signal.SIGKILL, 600), pytest.param(signal.SIGSTOP, 60, marks=pytest.mark.slow)],  # that waits for so many seconds
    ids=["killed", "silent"],
)
def test_a_process_that_is_gone_ends_the_others(how: signal.Signals, patience: int, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["train", str(tiny), "--set", "train.steps=1000000", "--out", str(folder)]
    first, second = (node(rank, port, arguments, patience, tmp_path / f"{rank}.log") for rank in (0, 1))
    try:
        while not (folder / CHECKPOINTS / "checkpoint-4").exists() and first.poll() is None:
            time.sleep(0.05)
        second.send_signal(how)
        first.wait()
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    said = (tmp_path / "0.log").read_text()
    assert first.returncode == 1, said
    assert "another process of this training is gone, or said nothing for" in said
    assert "--resume" in said
    assert "Traceback" not in said
    assert load_run(folder, complete=False).status == "failed"
    assert newest(folder, "tiny", load_run(folder, complete=False).token, silent) is not None


@pytest.mark.parametrize("value", ["2", "-0.5", "nan"])
def test_dropout_out_of_range_is_refused_before_the_folder_is_there(value, tmp_path):
    recipe = load("demo-lssar", [f"model.config.attention_dropout={value}"])
    with pytest.raises(LabError, match=r"config\.attention_dropout=.* is not a share from 0 to 1; set model\.config"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_laser_with_dropout_is_refused_before_the_folder_is_there(tmp_path):
    recipe = load("demo-laser", ["model.config.attention_dropout=0.1"])
    with pytest.raises(LabError, match=r"config\.attention_dropout=0\.1, and LASER has no dropout; set"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
