"""Memory that one step of a training frees is kept for the next one."""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's names of them in glibc's malloc.h
_NEVER = -1


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, in place of giving it back to the system.

    By default glibc maps each block of 32 MiB or more afresh, such as the logits of 2,048 tokens
    over a vocabulary of 4,096, and the system clears its pages every time. With this, memory that
    was used once stays with the process until it ends. So the commands and their workers call it,
    and no function of the library does.

    Where the environment sets glibc's allocator (``MALLOC_...``, ``GLIBC_TUNABLES``) it is left as
    it is. Other C libraries have no such setting.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _NEVER)
