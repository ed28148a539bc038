"""Chooses the ptxas that assembles the kernels for Hopper.

ptxas 12.8, which Triton 3.6 takes there, makes wrong machine code of them: on an H200 gradients
were wrong, a kernel did not end, and one accessed memory that was not its own. The same PTX was
right with ptxas 12.9, which the same Triton brings for Blackwell, and with 13.0
(docs/performance-gpu.md). Triton itself takes 12.9 for Hopper since 3.7.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from triton import knobs
from triton.runtime import driver

HOPPER = 90
FIRST_RIGHT = (12, 9)
"""The first release of ptxas whose kernels were right on an H200."""


@contextmanager
def right_assembler() -> Iterator[None]:
    """Kernels that are compiled inside have a ptxas of at least FIRST_RIGHT on Hopper. So have
    those that other threads compile meanwhile.
    """
    if not _is_to_be_replaced():
        yield
        return
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = knobs.nvidia.ptxas_blackwell.path
        yield


def _is_to_be_replaced() -> bool:
    """Whether Triton would take a wrong ptxas. One that TRITON_PTXAS_PATH names is kept."""
    if knobs.runtime.interpret or os.environ.get("TRITON_PTXAS_PATH"):
        return False
    target = driver.active.get_current_target()
    release = tuple(map(int, knobs.nvidia.ptxas.version.split(".")))
    return (target.backend, target.arch) == ("cuda", HOPPER) and release < FIRST_RIGHT
