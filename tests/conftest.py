"""Options and markers of the whole suite."""

import atexit
import gc
import os

# Before OpenMP reads it, which is when torch is imported. A thread that waits by spinning keeps a
# core from the tests that run beside it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, which reads it once
    os.environ.setdefault("TRITON_INTERPRET", "1")


LONGEST = (
    "test_demo.py", "test_triton_compile.py", "test_emulated_gpu.py", "test_train.py", "test_study.py",
    "test_claims.py", "test_owner.py", "test_examples.py",
)  # fmt: skip
"""Files of few tests that take long. They run first: begun last, one of them would keep one worker
busy while the others wait.
"""


@pytest.fixture(autouse=True)
def same_random_numbers():
    """A test draws the same numbers whatever ran before it. Of 400 draws one may exceed a tolerance
    that is itself computed from draws.
    """
    # Not torch.manual_seed where there is no GPU: it formats a traceback for each kind of device
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Importing and collecting make 700,000 objects, all of which stay. Python's garbage collector
    would go through them some twenty times meanwhile, and later at the end of each training.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or libraries report what is left when the process ends
        gc.enable()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_addoption(parser):
    group = parser.getgroup("softfocus")
    group.addoption("--fuzz-cases", type=int, default=200, help="how many random cases tests/core/test_fuzz.py draws")
    group.addoption("--fuzz-first", type=int, default=0, help="the seed of the first of them")
    group.addoption("--fuzz-backend", default="cpu", help="the backend that it compares with the reference")
    group.addoption("--fuzz-only", type=int, help="the seed of the only case to draw: what a failure names")


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels: needs the compiled CPU kernels; skipped where there is no compiler")
