"""The Triton kernels as they are compiled for a GPU, on an emulated one; and that the emulator
refuses what a GPU gets wrong.

Some of their tests, each on one of two architectures; ``make emulated-gpu`` has all of them run on
both.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++"))), reason="needs a C++ compiler")
HERE = Path(__file__).parent
PLUGIN = HERE.parent / "emulated" / "gpu"
SOME = (  # `make emulated-gpu` runs all
    "test_parity[causal-lssa-bfloat16]",
    "test_parity_of_keys_split_among_programs[decode-lssar-bfloat16]",
    "test_laser_of_a_key_at_the_threshold",  # on a CPU it can fail only here: a fused multiply-add
)


def on_the_emulator(*arguments, **environment):
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(filter(None, [str(PLUGIN), known.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=900, cwd=HERE.parents[1],
        env={**known, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.long
@pytest.mark.parametrize(("arch", "backwards"), [pytest.param(80, "", marks=pytest.mark.slow), (90, "1")])
def test_parity_of_what_is_compiled(arch, backwards):
    tests = [f"{HERE / 'test_triton.py'}::{name}" for name in SOME]
    output = on_the_emulator(
        "-m", "pytest", "-p", "plugin", "-q", *tests,
        SOFTFOCUS_EMULATED_ARCH=str(arch), SOFTFOCUS_EMULATED_BACKWARDS=backwards,
    )  # fmt: skip
    assert f"{len(SOME)} passed" in output
    assert f"launches on an emulated sm_{arch}" in output


ORDERS = """
import plugin, hashlib, torch
from softfocus import attention
query, key, value, grad_out = (torch.randn(2, 2, 70, 16, generator=torch.Generator().manual_seed(n)) for n in range(4))
leaves = [x.bfloat16().requires_grad_() for x in (query, key, value)]
for backwards in (False, True):
    plugin.BACKWARDS = backwards
    out = attention(*leaves, is_causal=True, mechanism="lssa", backend="triton")
    results = (out, *torch.autograd.grad(out, leaves, grad_out.bfloat16()))
    print(*[hashlib.sha256(x.detach().float().numpy().tobytes()).hexdigest() for x in results])
"""


@pytest.mark.long
def test_the_order_of_programs_and_warps_changes_not_a_bit():
    """In the kernels that the test above has compiled."""
    forwards, backwards = map(str.split, on_the_emulator("-c", ORDERS).splitlines())
    assert forwards == backwards
    assert len(set(forwards)) == 4


ACROSS = "mul.wide.u32 %rd3, %r5, 1; add.s64 %rd3, %rd2, %rd3;"  # the place of a thread of the other warp
# Each: instructions of a program of 64 threads, and what is wrong with them.
FAULTS = [
    ("st.global.b32 [%rd1], %r1;", None),
    ("add.s64 %rd3, %rd2, 256; st.global.b32 [%rd3], %r1;", "4 beyond a tensor of 256"),
    ("add.s64 %rd3, %rd2, -4; ld.global.b32 %r2, [%rd3];", "4 before a tensor"),
    ("add.s64 %rd3, %rd1, 2; ld.global.b32 %r2, [%rd3];", "not aligned"),
    ("mov.u32 %r3, %ctaid.x; st.global.b32 [%rd2], %r3;", "two blocks of the grid write"),
    ("st.global.b32 [%rd2], %r9;", None),
    ("st.shared.b32 [%r4], %r1; ld.shared.b32 %r2, [%r5];", "race in shared memory"),
    ("st.shared.b32 [%r4], %r1; bar.sync 0; ld.shared.b32 %r2, [%r5];", None),
    ("ld.shared.b32 %r2, [%r5]; st.shared.b32 [%r4], %r1;", "race in shared memory"),
    ("st.shared.b32 [%r4], %r1; bar.warp.sync -1; ld.shared.b32 %r2, [%r5];", "race in shared memory"),
    (f"{ACROSS} st.global.b32 [%rd1], %r1; ld.global.b32 %r2, [%rd3];", "race in global memory"),
    (f"{ACROSS} ld.global.b32 %r2, [%rd3]; st.global.b32 [%rd1], %r1;", "race in global memory"),
    (f"{ACROSS} st.global.b32 [%rd1], %r1; bar.sync 0; ld.global.b32 %r2, [%rd3];", None),
    ("@%p3 ld.global.b32 %r2, [%rd2]; @!%p3 st.global.b32 [%rd2], %r9;", "writes what another block of the grid reads"),
    ("@!%p3 ld.global.b32 %r2, [%rd2]; @%p3 st.global.b32 [%rd2], %r9;", "reads what another block of the grid writes"),
    ("add.s64 %rd3, %rd2, 2; cp.async.ca.shared.global [%r4], [%rd3], 4, 4;", "not aligned"),
    ("st.shared.b32 [%r4+65536], %r1;", "shared memory: 4 bytes at"),
    ("@%p1 bra $DONE; bar.sync 0; $DONE:", "a barrier that not all threads of a warp meet"),
    ("@%p2 bra $DONE; bar.sync 0; $DONE:", "some warps wait at a barrier"),
    ("cp.async.ca.shared.global [%r4], [%rd1], 4, 4; cp.async.commit_group;", "before what it had asked for"),
    ("st.global.b16x9 [%rd1], %r1;", "not emulated: st.global.b16x9"),
    ("frobnicate.b32 %r1, %r2;", "not emulated"),
    ("add.rz.f32 %r1, %r2, %r3;", "not emulated"),
]
PROGRAM = """
.version 8.0
.target sm_80
.visible .entry one(
	.param .u64 .ptr .global .align 1 one_param_0
)
.reqntid 64
{
	ld.param.b64 %rd2, [one_param_0];
	mov.u32 %r1, %tid.x;
	mov.u32 %r9, 7;
	mul.wide.u32 %rd4, %r1, 4;
	add.s64 %rd1, %rd2, %rd4;
	shl.b32 %r4, %r1, 2;
	xor.b32 %r5, %r4, 128;
	setp.lt.u32 %p1, %r1, 5;
	setp.lt.u32 %p2, %r1, 32;
	mov.u32 %r8, %ctaid.x;
	setp.eq.u32 %p3, %r8, 0;
	FAULT
	ret;
}
"""


@pytest.fixture(scope="module")
def emulator():
    """Not by the plugin: here Triton is told to interpret."""
    spec = importlib.util.spec_from_file_location("gpu_library", PLUGIN / "gpu_library.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.built()


@pytest.mark.parametrize(("instructions", "wrong"), FAULTS, ids=lambda x: str(x)[:40])
def test_faults_are_refused(emulator, instructions, wrong):
    kernel, error, memory = ctypes.c_void_p(), ctypes.create_string_buffer(4096), torch.zeros(64, dtype=torch.int32)
    text = PROGRAM.replace("FAULT", instructions.replace("; ", ";\n")).encode()
    parameters, count, address = (ctypes.c_int * 8)(), ctypes.c_int(), memory.data_ptr()
    failed = emulator.load(text, ctypes.byref(kernel), parameters, 4, ctypes.byref(count), error, len(error))
    if not failed:
        regions = (ctypes.c_uint64 * 2)(address, address + 256)
        failed = emulator.launch(
            kernel,
            (ctypes.c_uint32 * 3)(2, 1, 1),
            address.to_bytes(8, "little"),
            regions,
            1,
            1024,
            2,
            0,
            error,
            len(error),
        )
    assert (error.value.decode() if failed else None) == wrong or wrong in error.value.decode()
