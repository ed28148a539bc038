"""Training: against a loop written by hand in float64, resumed against uninterrupted, and what stops it."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import set_seed

from softfocus.lab import data
from softfocus.lab import model as models
from softfocus.lab.errors import LabError
from softfocus.lab.progress import Event, silent
from softfocus.lab.recipe import Recipe, load
from softfocus.lab.results import MODEL, RECIPE, RUN, load_run, save_run
from softfocus.lab.train import train
from softfocus.lab.trainer import WindowTrainer

GOLDEN = (5.520126, 5.520464, 5.254534, 4.851624, 4.537739, 4.221053, 3.994657, 3.844819, 3.756013, 3.712585)
ROUNDING = 2e-4
"""Relative. float32 and float64 differ by up to 1.4e-5 over these ten steps, as two processors may: about ten times that."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / MODEL / "model.safetensors")


def by_hand(recipe: Recipe, dtype: torch.dtype) -> list[float]:
    """The recipe's losses, from a loop that shares with the lab the model, the data and nothing else."""
    table = recipe.train
    store = data.tokens(recipe, silent)
    windows = data.training_windows(recipe, store)
    set_seed(table.seed)
    model = models.build(recipe, store.vocab_size).to(dtype)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": table.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=table.learning_rate, betas=(table.betas[0], table.betas[1]))
    losses = []
    for step in range(table.steps):
        share = (step - table.warmup) / (table.steps - table.warmup)
        factor = step / table.warmup if step < table.warmup else 0.5 * (1 + math.cos(math.pi * share))
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


def test_ten_steps_are_those_of_a_loop_by_hand(tiny: Path, trained: Path) -> None:
    """Order of data, schedule, betas, decay and clipping, all at once.

    The tolerance is computed: twice the error that the same loop makes in float32 against float64, as different orders of
    summation are free to make, and a band of 8 float32 roundings of a loss, for the first steps where that error is luck.
    """
    exact = torch.tensor(by_hand(load(tiny), torch.float64), dtype=torch.float64)
    single = torch.tensor(by_hand(load(tiny), torch.float32), dtype=torch.float64)
    ours = torch.tensor([loss for _, loss in load_run(trained).train_loss], dtype=torch.float64)
    allowed = 2 * (single - exact).abs().max() + 8 * torch.finfo(torch.float32).eps * exact
    assert torch.all((ours - exact).abs() <= allowed), (ours - exact, allowed)


def test_golden_losses(trained: Path) -> None:
    """The losses of the loop by hand, in float64, on the day that they were written down.

    A change of data, seed, model, schedule or optimiser shows in the second digit; rounding stays far below.
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
    text = (trained / RUN).read_text()
    assert os.uname().nodename not in text
    assert str(Path.home()) not in text
    assert load(trained / RECIPE) == load(tiny)
    config = json.loads((trained / MODEL / "config.json").read_text())
    assert config["max_position_embeddings"] == 32
    assert config["eos_token_id"] == 256, "generation would stop at whatever byte the architecture's default id is"
    assert not list(trained.rglob("pytorch_model*"))
    assert list((trained / "tensorboard").iterdir())


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
    assert load_run(folder, complete=False).status == "failed"
    assert not (folder / MODEL).exists()
    with pytest.raises(LabError, match="not finished"):
        load_run(folder)
    with pytest.raises(LabError, match="--resume to go on"):
        train(load(tiny), folder)
    info = train(load(tiny), folder, resume=True)
    assert info.train_loss == load_run(trained).train_loss
    for name, tensor in weights(trained).items():
        assert torch.equal(weights(folder)[name], tensor), name


def test_half_a_checkpoint_is_not_resumed_from(tiny: Path, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    with pytest.raises(LabError):
        train(load(tiny), folder, progress=stop_at(9, crash))
    (folder / "checkpoints" / "checkpoint-8" / "trainer_state.json").write_text('{"global_st')
    assert train(load(tiny), folder, resume=True).train_loss == load_run(trained).train_loss


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
    assert train(recipe, folder, overwrite=True).mechanism == "softmax"
    assert not (folder / "checkpoints" / "checkpoint-10").exists()


def test_a_loss_that_is_not_finite_stops_with_a_reason(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_loss = WindowTrainer.compute_loss

    def compute_loss(self: WindowTrainer, *arguments: Any, **others: Any) -> Any:
        loss = true_loss(self, *arguments, **others)
        return loss * math.nan if self.state.global_step >= 3 else loss

    monkeypatch.setattr(WindowTrainer, "compute_loss", compute_loss)
    with pytest.raises(LabError, match=r"became nan by step 4; lower train\.learning_rate \(0\.01\)"):
        train(load(tiny, ["train.log_every=4", "train.checkpoint_every=4"]), tmp_path / "run")
    info = load_run(tmp_path / "run", complete=False)
    assert info.status == "failed"
    assert "nan" in (info.error or "")
    assert not list((tmp_path / "run" / "checkpoints").glob("checkpoint-*")), "a diverged model was kept"


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
    ],
)
def test_what_cannot_be_trained(overrides: list[str], says: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=says):
        train(load(tiny, overrides), tmp_path / "run")
    assert not (tmp_path / "run" / RUN).exists() or load_run(tmp_path / "run", complete=False).status == "failed"


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


def test_a_full_disk_is_noticed_before_it_is_full(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(LabError, match="GB free"):
        train(load(tiny), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_damaged_run_files(trained: Path, tmp_path: Path) -> None:
    info = load_run(trained)
    save_run(tmp_path, info)
    assert load_run(tmp_path) == info
    (tmp_path / RUN).write_text((tmp_path / RUN).read_text().replace('"seed": 0', '"seed": "none"'))
    with pytest.raises(LabError, match="seed"):
        load_run(tmp_path)
    (tmp_path / RUN).write_text("{")
    with pytest.raises(LabError, match="cannot be read"):
        load_run(tmp_path)


def test_bf16_and_other_architectures(tiny: Path, tmp_path: Path) -> None:
    overrides = ["model.architecture=llama", "train.precision=bf16", "train.steps=4", "model.mechanism=ssmax"]
    overrides += ["model.config.num_key_value_heads=1", "model.parameters.head_scale=0.7", "train.decay=linear"]
    info = train(load(tiny, overrides), tmp_path / "run")
    assert info.status == "complete"
    assert any("head_scale" in name for name in weights(tmp_path / "run"))


@pytest.mark.slow
def test_two_processes_are_one(tiny: Path, trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29511"]
    command += ["-m", "softfocus.lab", "train", str(tiny), "--out", str(tmp_path / "run"), "-q"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours, alone = load_run(tmp_path / "run"), load_run(trained)
    assert [loss for _, loss in ours.train_loss] == pytest.approx([loss for _, loss in alone.train_loss], rel=ROUNDING)
