"""Chooses the ptxas that assembles the kernels for Hopper.

ptxas 12.8, which Triton 3.6 takes there, makes wrong machine code of some of them: on an H200 it
gave wrong gradients, and probably a kernel that did not end and an illegal access. The same PTX was
right with ptxas 12.9, which the same Triton ships for Blackwell, and with 13.0
(docs/performance-gpu.md). Triton itself takes 12.9 for Hopper since 3.7.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime import driver

HOPPER = 90
FIRST_RIGHT = (12, 9)
"""The first release of ptxas whose kernels were right on an H200."""
PTXAS_VARIABLE = "TRITON_PTXAS_PATH"
"""Names a ptxas. Setting ``knobs.nvidia.ptxas`` also sets this variable."""

_compiling = threading.Lock()
if hasattr(os, "register_at_fork"):  # another thread may hold it when a child is forked
    os.register_at_fork(after_in_child=lambda: globals().update(_compiling=threading.Lock()))


@contextmanager
def right_assembler() -> Iterator[None]:
    """Kernels that are compiled inside are assembled by a ptxas of at least FIRST_RIGHT on Hopper.

    One thread at a time. Kernels of other libraries that compile meanwhile are assembled by it,
    too. A ptxas that TRITON_PTXAS_PATH names is kept.
    """
    if knobs.runtime.interpret or not _is_hopper():
        yield
        return
    with _compiling:
        if os.environ.get(PTXAS_VARIABLE) or _release() >= FIRST_RIGHT:
            yield
            return
        try:
            with knobs.nvidia.scope():
                knobs.nvidia.ptxas = knobs.nvidia.ptxas_blackwell.path
                # The version is in the key of Triton's cache, but it is asked for once per process
                get_ptxas_version.cache_clear()
                yield
        finally:
            get_ptxas_version.cache_clear()


def _is_hopper() -> bool:
    target = driver.active.get_current_target()
    return bool((target.backend, target.arch) == ("cuda", HOPPER))


def _release() -> tuple[int, ...]:
    return tuple(map(int, knobs.nvidia.ptxas.version.split(".")))
