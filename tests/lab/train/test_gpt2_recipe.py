"""A recipe of the scale gpt2, from shards to losses: what a machine with several GPUs does, on the
CPU and with a tiny model.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
    "evaluate.lengths=1x,2x,16x",
    "evaluate.tokens=2048",
)
"""What is not the recipe's own. Architecture, optimiser, bfloat16 and the kind of data are."""


def shard(path: Path, tokens: int, seed: int) -> None:
    """Made-up tokens as FineWeb's shards hold them: documents that start with the end of one."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    ids = np.random.default_rng(seed).integers(97, 123, tokens).astype("<u2")
    ids[::700] = 256
    path.write_bytes(header.tobytes() + ids.tobytes())


@pytest.mark.slow
def test_a_gpt2_recipe_runs_from_shards_to_losses(tmp_path: Path) -> None:
    shards = tmp_path / "fineweb10B"
    shards.mkdir()
    shard(shards / "fineweb_val_000000.bin", 20_000, 0)
    for number in (1, 2):
        shard(shards / f"fineweb_train_00000{number}.bin", 5_000, number)
    tokenizers.save(tokenizers.load_tokenizer("bytes"), tmp_path / "tokenizer")
    changes = [*TINY, f"data.source={shards}", f"data.tokenizer={tmp_path / 'tokenizer'}"]
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
    assert {row.length for row in rows} == {32, 64, 512}
    assert all(5 < row.loss < 7 for row in rows), "of 512 ids that were never told apart: log 512 is 6.2"
