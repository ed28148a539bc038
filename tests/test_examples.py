"""The scripts in examples/ run, each as a user would start it, and stay short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def test_there_are_four():
    assert [script.stem for script in SCRIPTS] == ["one_call", "paged_cache", "small_gpt", "transformers_model"]


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(script, tmp_path):
    assert len(script.read_text().splitlines()) < 60
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error:.*softfocus.*", str(script)]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
    assert list(tmp_path.iterdir()) == []
    if script.stem == "small_gpt":
        losses = [float(line.rsplit(" ", 1)[1]) for line in ran.stdout.splitlines()]
        assert losses[-1] < 0.5 * losses[0]
