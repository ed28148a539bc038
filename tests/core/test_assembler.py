"""Which ptxas assembles the Triton kernels."""

import os
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from triton import knobs
from triton.backends.compiler import GPUTarget

from softfocus.backends.triton import assembler


@pytest.fixture
def ptxas(monkeypatch, tmp_path):
    """A function that has Triton take a ptxas of some release, for a GPU of some architecture."""

    def take(release, arch, backend="cuda"):
        program = tmp_path / f"ptxas-{release}"
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        program.chmod(0o755)
        monkeypatch.setitem(knobs.nvidia.__dict__, "ptxas", str(program))
        monkeypatch.setitem(knobs.runtime.__dict__, "interpret", False)
        device = SimpleNamespace(get_current_target=lambda: GPUTarget(backend, arch, 32))
        monkeypatch.setattr(assembler, "driver", SimpleNamespace(active=device))
        return str(program)

    monkeypatch.delenv(assembler.PTXAS_VARIABLE, raising=False)
    return take


def taken():
    return knobs.nvidia.ptxas.path


def test_a_wrong_ptxas_is_replaced_on_hopper_while_a_kernel_compiles(ptxas):
    before = ptxas("12.8", 90)
    with assembler.right_assembler():
        assert taken() == knobs.nvidia.ptxas_blackwell.path
        assert assembler._release() >= assembler.FIRST_RIGHT
    assert taken() == before
    assert assembler.PTXAS_VARIABLE not in os.environ


@pytest.mark.parametrize(("release", "arch"), [("12.9", 90), ("13.1", 90), ("12.8", 80), ("12.8", 100)])
def test_other_assemblers_are_kept(ptxas, release, arch):
    before = ptxas(release, arch)
    with assembler.right_assembler():
        assert taken() == before


def test_one_that_the_user_names_is_kept(ptxas, monkeypatch):
    before = ptxas("12.8", 90)
    monkeypatch.setenv(assembler.PTXAS_VARIABLE, before)
    with assembler.right_assembler():
        assert taken() == before


def test_a_triton_without_ptxas_is_not_asked_for_it(ptxas, monkeypatch):
    ptxas("12.8", "gfx942", "hip")
    monkeypatch.setattr(assembler, "_release", lambda: pytest.fail("a Triton for AMD may have none"))
    with assembler.right_assembler():
        pass


def test_two_threads_take_turns(ptxas):
    """The second saw the first one's setting, took it for the user's, and compiled with 12.8 once
    the first had ended.
    """
    before, seen, inside, ended = ptxas("12.8", 90), [], threading.Event(), threading.Event()

    def second():
        inside.wait(10)
        with assembler.right_assembler():
            seen.extend([ended.is_set(), taken()])

    thread = threading.Thread(target=second)
    thread.start()
    with assembler.right_assembler():
        inside.set()
        thread.join(0.2)
        ended.set()
    thread.join(10)
    assert seen == [True, knobs.nvidia.ptxas_blackwell.path]
    assert taken() == before
    assert assembler.PTXAS_VARIABLE not in os.environ


def test_the_key_of_tritons_cache_has_the_ptxas_that_is_taken(ptxas, monkeypatch):
    """Else a kernel that 12.8 assembled is loaded from the disk, or another library loads ours."""
    cleared = []
    version = SimpleNamespace(cache_clear=lambda: cleared.append(taken()))
    monkeypatch.setattr(assembler, "get_ptxas_version", version)
    before = ptxas("12.8", 90)
    with suppress(ZeroDivisionError), assembler.right_assembler():
        assert cleared == [knobs.nvidia.ptxas_blackwell.path]
        assert 1 / 0, "a kernel that does not compile"
    assert cleared[1:] == [before]


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
