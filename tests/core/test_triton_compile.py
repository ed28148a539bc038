"""The Triton kernels compile without a GPU, and keep what they work on in
registers, all or most of it.

All of them take half an hour: marked slow (``pytest -m slow tests/core/test_triton_compile.py``).
What every run compiles is one mechanism, for one architecture, and one with everything that may be
given. Another Triton's: PYTHONPATH.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).parent / "triton_machines.py"
ARCHITECTURES = (80, 90, 100)
SKELETONS = ("softmax", "lssa", "lssar", "laser", "laser_lssar", "sigmoid_log_n")
RARE = ("exact_forward", "query_gradients exact", "key_gradients exact")
"""LASER's rows of huge values hardly ever occur: these may spill."""
SPILLED = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 160
"""Bytes a thread at most: the default tiles are chosen with the newest Triton."""
SPILLED_ON_HOPPER = 480
"""There the default tiles are those that a GPU measured as fastest. Those of decoding spill none.
"""
SPILLED_IN_DECODING = 32
"""With a query on tensor cores a few registers are spilled, on GPUs that we did not have."""


@cache
def compiled(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def cases():
    for arch in ARCHITECTURES:
        for mechanism in SKELETONS:
            marks = [] if (arch, mechanism) == (90, "lssa") else [pytest.mark.slow]
            yield pytest.param(arch, mechanism, marks=marks)


EXPECTED = {
    4096: {"forward", "query_gradients", "key_gradients"},
    1: {"statistics", "combine"},
    0: {"statistics", "combine"},  # against a cache in pages
}
"""What calls of so many queries compile; each process compiles them all."""


@pytest.mark.long
@pytest.mark.parametrize(("arch", "mechanism"), cases())
def test_every_kernel_compiles_and_spills_little(arch, mechanism):
    for head_dim in (64,) if (mechanism, arch) == ("lssa", 90) else (64, 128):
        every = compiled(arch, mechanism, head_dim, *EXPECTED, "--loops-of", "forward")
        for queries, expected in EXPECTED.items():
            most = SPILLED_ON_HOPPER if arch == 90 else SPILLED
            if queries <= 1:
                most = max(SPILLED, 0 if arch == 90 else SPILLED_IN_DECODING)
            kernels = [kernel for kernel in every if kernel["queries"] == queries]
            assert expected <= {kernel["kernel"] for kernel in kernels}
            spilled = [kernel for kernel in kernels if kernel["stack"] > most and kernel["kernel"] not in RARE]
            assert not spilled, (arch, mechanism, head_dim, spilled)


@pytest.mark.long
def test_the_inner_loop_stays_short():
    """What an attention kernel does beside its products decides how fast it is
    (docs/performance-gpu.md): LSSA's forward takes 12 instructions a score in tiles that nothing
    cuts; it once took 75.
    """
    (forward,) = (
        kernel
        for kernel in compiled(90, "lssa", 64, *EXPECTED, "--loops-of", "forward")
        if kernel["kernel"] == "forward"
    )
    assert 8 < forward["loops"][-1] < 14


@pytest.mark.long
@pytest.mark.parametrize(
    "mechanism", ["lssar", *(pytest.param(name, marks=pytest.mark.slow) for name in SKELETONS if name != "lssar")]
)
def test_with_everything_given(mechanism):
    kernels = compiled(90, mechanism, 64, 4096, 1, "--given", "--loops-of")
    for queries in (4096, 1):
        assert "survey" in {kernel["kernel"] for kernel in kernels if kernel["queries"] == queries}
