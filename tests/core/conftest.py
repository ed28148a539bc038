"""What the backends' tests share: poisoned memory, the number of threads, and the kernels where
there is a compiler.
"""

import os
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from softfocus.backends.cpu import plan
from softfocus.testing import check


def pytest_runtest_setup(item):
    """Without a compiler the kernels are not tested. One that is there must do: its errors are
    failures.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if item.get_closest_marker("kernels") or parameters.get("backend") == "cpu":
        if off := plan.switched_off():
            pytest.skip(str(off))
        if sys.platform == "win32" or not any(map(shutil.which, plan.COMPILERS)):
            pytest.skip("needs a C++ compiler")


def pytest_runtest_teardown(item):
    """After an illegal access a process can no longer use the GPU, and all later tests would fail.
    Under pytest-xdist the process ends, its test counts as crashed, and a new process goes on, as
    often as xdist allows.
    """
    if torch.cuda.is_initialized() and hasattr(item.config, "workerinput"):
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{item.nodeid}: {error}: this process ends", file=sys.__stderr__, flush=True)
            os._exit(1)


@pytest.fixture(scope="session", autouse=True)
def triton_interpreted_faster():
    """Two thirds of the time of Triton's interpreter go away. It patches triton.language again at
    each call of a function by a kernel; what the launch patched stays until the launch ends. It
    checks each sum of integers for overflow; problems of tests are too small for one.
    """
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    patch, languages_of = interpreter._patch_lang, {}

    def patch_once(fn):
        languages = languages_of.get(fn.__module__)
        if languages is None:
            languages = [one for one in (language, language.core) if any(x is one for x in fn.__globals__.values())]
            languages_of[fn.__module__] = languages
        unpatched = any(language.core.is_builtin(one.load) for one in languages)
        return patch(fn) if unpatched else interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", patch_once)
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patches.setattr(interpreter.interpreter_builder, "options", options)
        yield


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
    """``check`` with tolerances over several draws, for cases of a few ill-conditioned rows."""
    return partial(check, draws=8)
