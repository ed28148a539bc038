"""What the backends' tests share: poisoned memory, the number of threads, and the kernels where there is a compiler."""

import shutil
import sys
from functools import partial

import pytest
import torch

from softfocus.backends.cpu import plan
from softfocus.testing import check


def pytest_runtest_setup(item):
    """Without a compiler the kernels are not tested. One that is there must do: its errors are failures."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if item.get_closest_marker("kernels") or parameters.get("backend") == "cpu":
        if off := plan.switched_off():
            pytest.skip(str(off))
        if sys.platform == "win32" or not any(map(shutil.which, plan.COMPILERS)):
            pytest.skip("needs a C++ compiler")


@pytest.fixture
def poisoned_memory():
    """torch.empty comes filled with NaN, so that what is never written fails."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads():
    """``threads(n)`` sets torch's number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def holds():
    """``check`` with a yardstick over several draws, for problems of a few ill-conditioned rows."""
    return partial(check, draws=8)
