"""softfocus.lab.allocator: freed memory is used again, unless the environment says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from softfocus.lab.allocator import keep_freed_memory
keep_freed_memory()
for _ in range(20):
    torch.ones(16 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(16 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Ten times 64 MiB, freed each time. The allocator finds its places in the first twenty."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
@pytest.mark.parametrize(("variable", "kept"), [(None, True), ("MALLOC_ARENA_MAX", False), ("GLIBC_TUNABLES", False)])
def test_freed_memory_is_kept_unless_the_environment_sets_the_allocator(variable, kept):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    value = {"MALLOC_ARENA_MAX": "8", "GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}.get(variable or "", "")
    environment = clean | ({variable: value} if variable else {})
    done = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    pages = 10 * (64 << 20) // os.sysconf("SC_PAGESIZE")
    assert (int(done.stdout) < pages // 100) == kept, f"{done.stdout.strip()} page faults, {pages} pages"
