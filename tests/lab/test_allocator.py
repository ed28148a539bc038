"""softfocus.lab.allocator: freed memory is kept, unless the environment says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

MAPPED = """
import ctypes, sys, torch
from softfocus.lab.allocator import keep_freed_memory

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

glibc = ctypes.CDLL(None)
glibc.mallinfo2.restype = Mallinfo
if sys.argv[1] == "command":
    from typer.testing import CliRunner
    from softfocus.lab.cli.app import app
    assert CliRunner().invoke(app, [sys.argv[2], "--help"]).exit_code == 0
else:
    keep_freed_memory()
before = glibc.mallinfo2().hblkhd
held = torch.ones(16 << 20)
print(glibc.mallinfo2().hblkhd - before)
"""
"""The bytes that glibc maps from the system for a block of 64 MiB."""


def mapped(*words: str, **environment: str) -> int:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", MAPPED, *words]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
@pytest.mark.parametrize(
    ("words", "environment", "kept"),
    [
        (("call",), {}, True),
        (("call",), {"MALLOC_ARENA_MAX": "8"}, False),
        (("call",), {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}, False),
        (("command", "train"), {}, True),
        (("command", "bench"), {}, False),
    ],
)
def test_freed_memory_is_kept_by_commands_unless_the_environment_sets_the_allocator(words, environment, kept):
    assert (mapped(*words, **environment) < 64 << 20) == kept
