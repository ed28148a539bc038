"""A pytest plugin: the Triton kernels compiled for a GPU that is not there, and run from their PTX
by ``gpu.cpp``.

``make emulated-gpu`` has the kernels' tests run so. Triton's interpreter runs the source; here runs
what the compiler made of it, on tensor cores and approximate functions that err as the PTX manual
allows. The emulator refuses what memcheck, racecheck and synccheck would: accesses beyond the
call's tensors, misaligned ones, races in shared memory and between programs, barriers that not all
threads meet, and results of asynchronous copies and products that are not waited for (they come no
sooner).

SOFTFOCUS_EMULATED_ARCH: 80 or 90 (tensor cores of Ampere or Hopper);
SOFTFOCUS_EMULATED_BACKWARDS=1: programs and warps run from the last to the first.
"""

import ctypes
import os
import struct
import sys
from pathlib import Path
from typing import Any

import gpu_library

ARCH = int(os.environ.get("SOFTFOCUS_EMULATED_ARCH", "90"))
BACKWARDS = os.environ.get("SOFTFOCUS_EMULATED_BACKWARDS") == "1"
HERE = Path(__file__).parent
SHARED_MEMORY = {80: 166_912, 90: 232_448}
"""Bytes that a program can have."""
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tensors are the CPU's, whatever else is there
os.environ["TRITON_CACHE_DIR"] = str(gpu_library.HOME / f"sm_{ARCH}")
os.environ["SOFTFOCUS_TUNE"] = "off"
os.environ.pop("TRITON_INTERPRET", None)

from triton import knobs  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime import driver  # noqa: E402

sys.path.append(str(HERE.parents[1] / "core"))
from triton_machines import Absent  # noqa: E402

FORMATS = {"fp32": "f", "i1": "?", "i8": "b", "u8": "B", "i16": "h", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}


class Emulator(Absent):
    """What Triton takes for the driver of a GPU: its utilities, launcher and target."""

    def __init__(self) -> None:
        super().__init__(ARCH)
        self.library = gpu_library.built()
        self.utils = self
        self.launcher_cls = Launcher
        self.loaded: list[tuple[ctypes.c_void_p, list[tuple[int, int]]]] = []
        self.launches = 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[ARCH]}

    def unload_module(self, module: int) -> None: ...

    def load_binary(self, name: str, ptx: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """module, function, registers, spills, most threads: the function is the number of the
        kernel in ``loaded``.
        """
        kernel, count, most = ctypes.c_void_p(), ctypes.c_int(), 256
        parameters, said = (ctypes.c_int * (2 * most))(), ctypes.create_string_buffer(4096)
        if self.library.load(ptx, ctypes.byref(kernel), parameters, most, ctypes.byref(count), said, len(said)):
            raise NotImplementedError(f"{name}: {said.value.decode()}")
        self.loaded.append((kernel, [(parameters[2 * n], parameters[2 * n + 1]) for n in range(count.value)]))
        return 1, len(self.loaded) - 1, 0, 0, 1024


class Launcher:
    """Runs a kernel on the arguments of a call."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature = list(source.signature.values())
        self.metadata = metadata

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        arguments = rest[4:]  # after metadata and hooks
        assert max(y, z) < 65536, f"no GPU has a grid of {(x, y, z)}"
        kernel, parameters = EMULATOR.loaded[function]
        values = [pair for kind, value in zip(self.signature, arguments, strict=True) for pair in _flat(kind, value)]
        assert len(values) in (len(parameters), len(parameters) - 1, len(parameters) - 2), (
            "arguments and parameters differ"
        )
        assert not self.metadata.global_scratch_size
        block, regions = bytearray(max((at + size for at, size in parameters), default=0)), dict[int, int]()
        for (kind, value), (at, size) in zip(values, parameters, strict=False):
            if kind.startswith("*"):
                storage = value.untyped_storage()
                regions[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
                value, kind = value.data_ptr(), "u64"
            packed = struct.pack("<" + FORMATS[kind], value)
            assert len(packed) <= size
            block[at : at + size] = packed.ljust(size, b"\0")
        flat = [address for region in regions.items() if region[0] for address in region]
        said = ctypes.create_string_buffer(4096)
        EMULATOR.launches += 1
        if EMULATOR.library.launch(
            kernel, (ctypes.c_uint32 * 3)(x, y, z), bytes(block), (ctypes.c_uint64 * len(flat))(*flat), len(flat) // 2,
            self.metadata.shared, self.metadata.num_warps, int(BACKWARDS), said, len(said),
        ):  # fmt: skip
            raise RuntimeError(f"{self.metadata.name}: {said.value.decode()}")


def _flat(kind: Any, value: Any) -> list[tuple[str, Any]]:
    """Types and values of what a kernel is given, without its constants."""
    if isinstance(kind, tuple):
        return [pair for k, v in zip(kind, value, strict=True) for pair in _flat(k, v)]
    return [] if kind == "constexpr" else [(kind, value)]


EMULATOR = Emulator()
driver.set_active(EMULATOR)
CUDABackend.make_cubin = lambda self, ptx, *rest: ptx.encode()  # PTX is what runs here
import softfocus.backends.triton.call  # noqa: E402, F401  (the kernels are made while Triton is not told to interpret)

knobs.runtime.interpret = False
os.environ["TRITON_INTERPRET"] = "1"  # which lets tensors of the CPU through; the knob no longer looks at it


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{EMULATOR.launches} launches on an emulated sm_{ARCH}")
