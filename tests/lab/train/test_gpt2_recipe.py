"""A recipe of the scale gpt2 from shards to losses, and a claim from shards to its page: what a
machine with several GPUs does, on the CPU and with a tiny model.
"""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from softfocus.lab.claims import claim as claims
from softfocus.lab.claims.reproduce import PUBLISHED, reproduce
from softfocus.lab.claims.results import RESULTS
from softfocus.lab.claims.results import read as read_results
from softfocus.lab.data import tokenizer as tokenizers
from softfocus.lab.recipes import loading
from softfocus.lab.run_folder.files import load_measured, load_run
from softfocus.lab.run_folder.results import Evaluation

TINY = (
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2",
    "model.config.intermediate_size=64",
    "model.config.vocab_size=512",
    "train.length=32",
    "train.batch=8",
    "train.accumulate=2",
    "train.steps=3",
    "train.warmup=1",
    "train.warmdown=1",
    "train.log_every=1",
    "evaluate.lengths=1x,2x,4x,8x,16x",
    "evaluate.tokens=2048",
)
"""What is not the recipe's own. Architecture, optimiser, bfloat16 and the kind of data are."""


def tiny(folder: Path, shard: Any) -> list[str]:
    """What to change in a recipe of the scale gpt2: its sizes, and shards and a tokenizer that are
    made here.
    """
    shards = folder / "fineweb10B"
    shards.mkdir()
    shard(shards / "fineweb_val_000000.bin", 20_000, 0, end=256)
    for number in (1, 2):
        shard(shards / f"fineweb_train_00000{number}.bin", 5_000, number, end=256)
    tokenizers.save(tokenizers.load_tokenizer("bytes"), folder / "tokenizer")
    return [*TINY, f"data.source={shards}", f"data.tokenizer={folder / 'tokenizer'}"]


@pytest.mark.long
def test_a_claim_at_the_scale_gpt2_runs_from_shards_to_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers_here: list[str], shard: Any
) -> None:
    name, out, screen = "softplus-figure-1", tmp_path / "out", Console(file=io.StringIO(), width=250)
    base = tmp_path / "tiny-gpt2.toml"
    base.write_text(loading.load("gpt2-124m", [*tiny(tmp_path, shard), "train.steps=2"]).to_toml())
    monkeypatch.setitem(claims.BASES, "gpt2", str(base))
    monkeypatch.setattr(claims, "shipped", lambda: [name])  # the pages of the others are not written
    monkeypatch.setenv("SOFTFOCUS_CACHE", str(tmp_path / "cache"))
    made = reproduce(name, out, scale="gpt2", seeds=1, jobs=1, console=screen)
    assert made is not None
    assert [Path(path).stem for path in workers_here] == ["softmax-s0", "lssar-s0"]
    assert isinstance(screen.file, io.StringIO)
    told = screen.file.getvalue()
    assert "KB of shards are copied into the token cache first" in told
    assert "2 runs, 2 of them left: about " in told
    assert f"{name} at the scale gpt2: too few seeds" in told
    found = read_results(out / PUBLISHED / name / "gpt2" / RESULTS)
    assert found == made
    for run in found.runs:
        assert (run.info.status, run.info.steps_done, run.info.vocabulary) == ("complete", 2, 257)
        assert run.info.corpus_key
        assert run.evaluation is not None
        rows = [row for row in run.evaluation.rows if row.setting.rope == "ntk"]
        assert {row.length for row in run.evaluation.rows} == {32, 64, 128, 256, 512}
        assert rows
        assert all(5 < row.loss < 7 for row in run.evaluation.rows)
    page = (out / PUBLISHED / f"{name}.md").read_text()
    assert "| lssar | 1 seed |" in page
    assert f"{name} --scale gpt2 --seeds 1`." in page
    assert (out / PUBLISHED / name / "gpt2" / "figure.png").stat().st_size > 5_000


@pytest.mark.slow
def test_a_gpt2_recipe_runs_from_shards_to_losses(tmp_path: Path, shard: Any) -> None:
    changes = tiny(tmp_path, shard)
    recipe = loading.load("gpt2-124m-lssar", changes)
    assert (recipe.train.precision, recipe.model.architecture) == ("bf16", "gpt_neox")
    run = tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SOFTFOCUS_CACHE": str(tmp_path / "cache")}

    def call(*command: str) -> None:
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    sets = [word for change in changes for word in ("--set", change)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    call(*launcher, "-m", "softfocus.lab", "train", "gpt2-124m-lssar", "--out", str(run), *sets)
    info = load_run(run)
    assert (info.status, info.steps_done, info.mechanism, info.vocabulary) == ("complete", 3, "lssar", 257)
    assert info.tokens_per_step == 8 * 32
    assert [step for step, _ in info.train_loss] == [1, 2, 3]
    call("-m", "softfocus.lab", "evaluate", str(run))
    rows = load_measured(run, Evaluation).rows
    assert {row.length for row in rows} == {32, 64, 128, 256, 512}
    assert all(5 < row.loss < 7 for row in rows), "of 512 ids that were never told apart: log 512 is 6.2"
