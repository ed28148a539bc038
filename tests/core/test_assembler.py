"""Which ptxas assembles the Triton kernels."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from triton import knobs
from triton.backends.compiler import GPUTarget

from softfocus.backends.triton import assembler


@pytest.fixture
def ptxas(monkeypatch, tmp_path):
    """A function that has Triton take a ptxas of some release, for a GPU of some architecture."""

    def take(release, arch):
        program = tmp_path / f"ptxas-{release}"
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        program.chmod(0o755)
        monkeypatch.setitem(knobs.nvidia.__dict__, "ptxas", str(program))
        monkeypatch.setitem(knobs.runtime.__dict__, "interpret", False)
        device = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", arch, 32))
        monkeypatch.setattr(assembler, "driver", SimpleNamespace(active=device))
        return str(program)

    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    return take


def test_a_wrong_ptxas_is_replaced_on_hopper_while_a_kernel_compiles(ptxas):
    before = ptxas("12.8", 90)
    with assembler.right_assembler():
        assert knobs.nvidia.ptxas.path == knobs.nvidia.ptxas_blackwell.path
        release = tuple(map(int, knobs.nvidia.ptxas.version.split(".")))
        assert release >= assembler.FIRST_RIGHT
    assert knobs.nvidia.ptxas.path == before


@pytest.mark.parametrize(("release", "arch"), [("12.9", 90), ("13.1", 90), ("12.8", 80), ("12.8", 100)])
def test_other_assemblers_are_kept(ptxas, release, arch):
    before = ptxas(release, arch)
    with assembler.right_assembler():
        assert knobs.nvidia.ptxas.path == before


def test_one_that_the_user_names_is_kept(ptxas, monkeypatch):
    before = ptxas("12.8", 90)
    monkeypatch.setenv("TRITON_PTXAS_PATH", before)
    with assembler.right_assembler():
        assert knobs.nvidia.ptxas.path == before


def test_kernels_compile_inside(monkeypatch):
    from softfocus.backends.triton import call

    inside, ran = [], []

    @contextmanager
    def watched():
        inside.append(True)
        yield
        inside.pop()

    class Kernel:
        def __getitem__(self, grid):
            assert inside
            return lambda: {grid: lambda: ran.append(len(inside))}

    monkeypatch.setattr(call, "right_assembler", watched)
    launcher = call.Launcher.__new__(call.Launcher)
    launcher._compiled = {}
    kernel = Kernel()
    for _ in range(3):
        launcher._launch(kernel, None, (1, 1, 1))
    assert ran == [0, 0], "the first launch compiles, inside; the others run what it returned"
