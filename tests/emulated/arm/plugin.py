"""A pytest plugin: the CPU kernels as another processor's program, under an emulator, inside this
processor's torch.

``make neon`` has the tests of the kernels run so on 64-bit ARM, for which nobody here has a
machine. Each call writes the memory that it may touch into a file, ``call.cpp`` runs it, and the
memory is read back.
"""

import ctypes
import gc
import os
import shlex
import struct
import subprocess
import tempfile
from typing import Any

import torch

from softfocus.backends.cpu import build

PROGRAM = shlex.split(os.environ["SOFTFOCUS_EMULATED"])
SMALLEST_POINTER = 1 << 16  # no number in a call's structure is larger that is not one


class Call:
    """softfocus_forward or softfocus_backward, elsewhere."""

    argtypes = ()  # set: nothing is to be told to ctypes

    def __init__(self, backward: bool) -> None:
        self.backward = backward

    def __call__(self, *arguments: Any) -> int:
        alive, used = _storages(), set[int]()

        def at(pointer: int) -> int | None:
            for address, size in alive.items():
                if address <= pointer < address + size:
                    used.add(address)
                    return address
            return None

        parts = []
        for argument in arguments:
            if isinstance(argument, bytes):
                words = struct.unpack(f"{len(argument) // 8}q", argument)
                pointers = [n for n, x in enumerate(words) if x > SMALLEST_POINTER and at(x) is not None]
                parts.append(_words(len(words), *words, len(pointers), *pointers))
            else:
                assert not argument or at(argument) is not None, "memory of no living tensor"
                parts.append(_words(-1, argument or 0))
        regions = [(address, alive[address]) for address in sorted(used)]
        head = _words(self.backward, len(regions), len(arguments), *(x for region in regions for x in region))
        with tempfile.NamedTemporaryFile() as file:
            file.write(head + b"".join(parts))
            start = file.tell()
            file.writelines(ctypes.string_at(*region) for region in regions)
            file.flush()
            code = subprocess.run([*PROGRAM, file.name]).returncode
            assert code in (0, 1), f"{PROGRAM} ended with {code}"
            file.seek(start)
            for address, size in regions:
                ctypes.memmove(address, file.read(size), size)
        return code


def _words(*numbers: int) -> bytes:
    return struct.pack(f"{len(numbers)}q", *numbers)


def _storages() -> dict[int, int]:
    """Address and bytes of the memory of every tensor that lives."""
    found: dict[int, int] = {}
    for x in gc.get_objects():
        if issubclass(type(x), torch.Tensor) and x.layout == torch.strided and x.device.type == "cpu":
            storage = x.untyped_storage()
            found[storage.data_ptr()] = max(found.get(storage.data_ptr(), 1), storage.nbytes())
    found.pop(0, None)
    return found


class Library:
    """What loading the compiled kernels gives."""

    softfocus_forward = Call(backward=False)
    softfocus_backward = Call(backward=True)


def pytest_configure() -> None:
    """From now on there is this library."""
    made = build.Built(build.plan().library, "", "", "", 0.0, fresh=False)
    build._outcome = (made, Library)  # type: ignore[assignment]
