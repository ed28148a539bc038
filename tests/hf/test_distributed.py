"""Models under softfocus on two processes: data parallelism, FSDP and tensor parallelism."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = {
    "fixed": "lssar",
    "laser": "laser(lssa)",
    "learned": "ssmax",
    "layout": {
        "0": {"mechanism": "softmax", "window": 8},
        "*": [{"heads": 2, "mechanism": "lssar"}, {"mechanism": "ssmax"}],
    },
}
LIMIT = 1e-12  # float64; sums of two processes are added in another order


@pytest.fixture(scope="module")
def found(build, tmp_path_factory):
    """By model and way: the largest relative difference from the gradients of one process, or the
    error.
    """
    folder = tmp_path_factory.mktemp("models")
    for name, mechanism in MODELS.items():
        build("llama", mechanism).save_pretrained(folder / name)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = Path(__file__).with_name("distributed_worker.py")
    done = subprocess.run([*launcher, worker, folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_gradients_of_two_processes_are_those_of_one(found):
    shared = {name: value for name, value in found.items() if name.endswith(("ddp", "fsdp"))}
    assert len(shared) == 2 * len(MODELS)
    assert all(value < LIMIT for value in shared.values()), shared


@pytest.mark.long
def test_tensor_parallelism_splits_heads_that_are_alike(found):
    assert found["fixed tp"] < LIMIT
    assert found["laser tp"] < LIMIT


@pytest.mark.long
def test_tensor_parallelism_is_refused_where_heads_differ(found):
    assert "hands over 2 of 4 query heads, and head_scale is learned for all of them" in found["learned tp"]
    assert "a layout by heads needs all heads of a layer in one call" in found["layout tp"]


@pytest.mark.long
def test_context_parallelism_is_refused(found):
    """Each process would attend to its own part of the sequence."""
    for model in MODELS:
        assert "runs in torch's context_parallel()" in found[f"{model} context"]
