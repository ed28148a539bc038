"""The CPU kernels' build, on a stand-in of a few lines: the cache, its accidents, and what is said
where it cannot be.

Over 400 lines: the cases share the stand-in sources and the cache fixtures.
"""

import ast
import ctypes
import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from softfocus.backends.cpu import build, compile, plan

ROOM = Path(plan.__file__).parent
STAND_IN = """
extern "C" __attribute__((visibility("default"))) long total(const long* x, long n) {
  long sum = 0;
#pragma omp parallel for reduction(+ : sum)
  for (long i = 0; i < n; ++i) sum += x[i];
  return sum;
}
"""
needs_compiler = pytest.mark.skipif(
    sys.platform == "win32" or not any(map(shutil.which, plan.COMPILERS)), reason="needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """An empty cache, the stand-in for the sources, and a module that has not tried anything
    yet.
    """
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "total.cpp").write_text(STAND_IN)
    monkeypatch.setattr(plan, "SOURCES", sources)
    monkeypatch.setattr(build, "_outcome", None)
    monkeypatch.setattr(build, "_warned", False)
    monkeypatch.setenv(plan.CACHE, str(tmp_path / "cache"))
    for name in (plan.KERNELS, plan.CXXFLAGS, "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sources():
    return plan.SOURCES


def total(kernels):
    return kernels.total((ctypes.c_long * 4)(1, 2, 3, 4), 4)


def code(then, sources, before=""):
    """A program that has the stand-in's folder for its sources."""
    return f"""
import ctypes, pathlib, sys
from softfocus.backends.cpu import build, compile, plan
plan.SOURCES = pathlib.Path({str(sources)!r})
{before}
{then}
"""


def start(program, **environment):
    pipe = subprocess.PIPE
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# What is there afterwards


@needs_compiler
def test_the_first_use_compiles_and_the_next_process_does_not(sources, capfd):
    assert build.state() is None
    assert build.why_unavailable() is None
    captured = capfd.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"softfocus: compiling the CPU kernels .*\nsoftfocus: \.\.\. done in \d+ s\n", captured.err)
    assert total(build.library()) == 10
    assert build.library() is build.library()
    planned = plan.plan()
    assert build.state().fresh
    assert names(planned.folder) == ["compile.log", "lock", "softfocus_cpu.json", "softfocus_cpu.so"]
    assert planned.library == build.state().library
    assert {"-O3", "-shared"} <= set(planned.log.read_text().split())

    build._outcome = None  # as in a new process
    assert not build.state().fresh
    assert total(build.library()) == 10
    assert capfd.readouterr().err == ""


@needs_compiler
def test_force_compiles_again(capfd):
    first = build.build()
    assert first.fresh
    assert not build.build().fresh
    assert build.build(force=True).fresh
    assert capfd.readouterr().err.count("done in") == 2
    assert "-O3" in first.flags
    assert first.compiler in (shutil.which(name) for name in plan.COMPILERS)


@pytest.mark.long
@needs_compiler
def test_the_threads_are_torchs(sources):
    """One OpenMP runtime in the process, and it is the one that set_num_threads() sets."""
    if sys.platform != "linux":
        pytest.skip("/proc/self/maps is Linux's")
    (sources / "total.cpp").write_text(
        STAND_IN + 'extern "C" int omp_get_max_threads();\n'
        'extern "C" __attribute__((visibility("default"))) int threads() { return omp_get_max_threads(); }\n'
    )
    then = """
import torch
def runtimes():
    maps = pathlib.Path("/proc/self/maps").read_text().split()
    return {word for word in maps if "/" in word and any(name in word for name in ("gomp", "libomp", "iomp"))}
before = runtimes()
def check():
    kernels = build._ready(plan.plan(), force=True)[1]
    torch.set_num_threads(3)
    assert kernels.total((ctypes.c_long * 4)(1, 2, 3, 4), 4) == 10
    assert kernels.threads() == 3, kernels.threads()
    assert len(before) == 1 and runtimes() == before, (before, runtimes())
check()
# Once more, with torch's library named, as where its symbols are not to be seen by all
load, tried = compile.load, []
def late(path):
    tried.append(path)
    if len(tried) == 1:
        raise OSError(f"{path}: undefined symbol: GOMP_parallel")
    return load(path)
compile.load = late
check()
assert len(tried) == 2
"""
    ran = subprocess.run([sys.executable, "-c", code(then, sources)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.long
@needs_compiler
def test_two_processes_at_once_compile_once(sources, tmp_path):
    """The first one is held in its compiler until the second one says that it waits."""
    gate = tmp_path / "gate"
    slow = tmp_path / "slow"
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    slow.write_text(
        f'#!/bin/sh\nif [ "$1" != --version ]; then echo x >> {gate}.runs; while [ ! -e {gate} ]; '
        f"do sleep 0.05; done; fi\n"
        f'exec {compiler} "$@"\n'
    )
    slow.chmod(0o755)
    program = code("print(build.library().total((ctypes.c_long * 4)(1, 2, 3, 4), 4))", sources)
    try:
        both = [start(program, CXX=str(slow)) for _ in range(2)]
        waiting = None
        watchdog = threading.Timer(
            100, lambda: [process.kill() for process in both]
        )  # ends readline(), if nobody waits
        watchdog.start()
        while waiting is None:  # whichever came second
            for process in both:
                line = process.stderr.readline()
                assert line, process.stderr.read()
                waiting = process if "waiting for another process" in line else waiting
        gate.touch()
        outputs = [process.communicate(timeout=60) for process in both]
    finally:
        watchdog.cancel()
        gate.touch()
    assert [out for out, _ in outputs] == ["10\n", "10\n"], outputs
    assert [process.returncode for process in both] == [0, 0]
    assert (tmp_path / "gate.runs").read_text().count("x") == 2  # one compile, one link


@pytest.mark.long
@needs_compiler
def test_a_killed_build_leaves_nothing_broken(sources, tmp_path):
    """Killed in the compiler, and killed between the two files that make a library whole."""
    hang = tmp_path / "hang"
    hang.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo a compiler; else exec sleep 5; fi\n')
    hang.chmod(0o755)
    slain = """
def killed(made, library):
    replace(made, library)
    os.kill(os.getpid(), 9)

import os
replace, build.os.replace = os.replace, killed
"""
    for before, environment in (("", {"CXX": str(hang)}), (slain, {})):
        process = start(code("build.library()", sources, before), **environment)
        while environment and not list(tmp_path.glob("cache/*/building-*/0.log")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        if environment:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert list(tmp_path.glob("cache/*/building-*"))
    assert plan.plan().library.exists()  # of the second one, without its checksum
    assert build.state() is None
    assert total(build.library()) == 10
    assert not list(plan.plan().folder.glob("building-*"))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_build_that_is_told_to_end_ends_its_compilers(sources, tmp_path, number):
    """And what they have started, as g++ starts another process for the work; the signal goes to
    the one process.
    """
    beat = tmp_path / "beat"
    slow = tmp_path / "slow"
    slow.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo a compiler; exit; fi\n'
        f"for n in $(seq 400); do echo $n >> {beat}; sleep 0.05; done &\nwait\n"
    )
    slow.chmod(0o755)
    # Under nohup, which these tests may run under, SIGHUP is ignored, and a build respects that
    usual = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n"
    process = start(usual + code("build.library()", sources), CXX=str(slow))
    while not beat.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    last = beat.read_text()
    time.sleep(0.3)
    assert beat.read_text() == last


@needs_compiler
def test_signals_are_handled_as_before_once_it_is_built(monkeypatch):
    own = []
    monkeypatch.setattr(compile, "_start", lambda *of, start=compile._start: own.append(handlers()) or start(*of))

    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]

    before = handlers()
    build.build()
    assert handlers() == before
    assert own[0] != before
    given = signal.signal(signal.SIGTERM, lambda *_: None)  # somebody's own handler stays while it is built
    try:
        theirs = signal.getsignal(signal.SIGTERM)
        build.build(force=True)
        assert own[-1][0] is theirs
    finally:
        signal.signal(signal.SIGTERM, given)


@needs_compiler
@pytest.mark.parametrize("size", [0, 100, 9000])
def test_a_library_cut_short_is_compiled_again(size, capfd):
    path = build.build().library
    whole = path.read_bytes()
    assert len(whole) > size
    path.unlink()  # not cut in place: it is loaded
    path.write_bytes(whole[:size])
    assert total(build.library()) == 10
    assert capfd.readouterr().err.count("compiling") == 2
    assert len(path.read_bytes()) > size


@needs_compiler
def test_a_library_that_does_not_load_is_compiled_again_once(monkeypatch, capfd):
    build.build()

    def fail_to_load(path):
        raise OSError(f"{path}: wrong ELF class")

    monkeypatch.setattr(build, "load", fail_to_load)
    assert total(build.library()) == 10
    assert capfd.readouterr().err.count("compiling") == 2
    monkeypatch.setattr(compile, "load", fail_to_load)
    build._outcome = None
    with pytest.raises(
        build.Unavailable, match=r"^the compiled CPU kernels do not load: wrong ELF class; name another"
    ):
        build.library()
    assert capfd.readouterr().err.count("compiling") == 1


@needs_compiler
def test_a_compiler_that_vanishes(monkeypatch):
    """It says its version, and is gone when it is to compile."""
    monkeypatch.setattr(build, "compiler", lambda: (("/no/such/compiler",), "1.0"))
    sentence("^the compiler '/no/such/compiler' does not start: No such file")


@needs_compiler
def test_what_is_compiled_needs_no_compiler_any_more(monkeypatch, capfd):
    made = build.build()
    monkeypatch.setenv("PATH", "")
    for _ in range(2):
        assert build.state().library == made.library
        assert total(build.library()) == 10
        build._outcome = None
    assert capfd.readouterr().err.count("compiling") == 1
    monkeypatch.setenv("CXX", "no-such-compiler")  # whoever asks for one means it
    sentence("'no-such-compiler' is no C.. compiler that runs; let CXX name")


@pytest.mark.long
@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_a_thread_compiles(sources):
    then = """
import os, signal
build._lock.acquire()  # as that thread would hold it
child = os.fork()
if child == 0:
    signal.alarm(100)
    os._exit(0 if build.library().total((ctypes.c_long * 4)(1, 2, 3, 4), 4) == 10 else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    ran = subprocess.run([sys.executable, "-c", code(then, sources)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# Whose it is


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def disown(path):
    if os.getuid():
        pytest.skip("only root can give away what it has made")
    os.chown(path, 12345, -1)


@needs_compiler
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_may_enter_the_cache_whatever_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        made = build.build().library
    finally:
        os.umask(before)
    for folder in (made.parent, made.parent.parent):
        assert folder.is_relative_to(tmp_path / "cache")
        assert mode(folder) == 0o700
    assert not (mode(made) | mode(plan.plan().about)) & 0o022
    build._outcome = None
    assert not build.state().fresh
    assert total(build.library()) == 10


def writable(path):
    path.chmod(0o777)


def of_the_group(path):
    path.chmod(0o770)


@needs_compiler
@pytest.mark.parametrize("change", [writable, of_the_group, disown])
@pytest.mark.parametrize("which", ["the cache", "the folder in it"])
def test_a_folder_that_others_decide_about_is_not_loaded_from(which, change, capfd):
    made = build.build().library
    folder = made.parent if which == "the folder in it" else made.parent.parent
    change(folder)
    assert build.state() is None
    why = (
        r"belongs to another user \(uid 12345\)" if change is disown else r"can be written to by others \(mode 77[70]\)"
    )
    with pytest.raises(build.Unavailable, match=f"{re.escape(str(folder))} {why}; remove it, or let"):
        build.build()
    assert total(build.library()) == 10
    stderr = capfd.readouterr().err
    assert stderr.count("compiling") == 2
    assert (
        "compiled for this process alone; remove it, or let SOFTFOCUS_KERNEL_CACHE name a folder that is yours"
        in stderr
    )
    assert build.state().library.parent.parent != made.parent.parent


@needs_compiler
@pytest.mark.parametrize("name", ["softfocus_cpu.so", "softfocus_cpu.json"])
@pytest.mark.parametrize("change", [writable, disown])
def test_a_file_that_others_decide_about_is_made_again(name, change, capfd):
    made = build.build().library
    change(made.with_name(name))
    assert build.state() is None
    assert total(build.library()) == 10
    assert capfd.readouterr().err.count("compiling") == 2
    assert not mode(made.with_name(name)) & 0o022
    assert made.with_name(name).stat().st_uid == os.getuid()


@needs_compiler
def test_a_sticky_folder_that_others_may_write_to_is_accepted(tmp_path):
    """Such as /tmp."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    build.build()
    assert not build.build().fresh


# What the folder is named after


def test_whatever_changes_the_library_changes_the_key(sources, monkeypatch):
    keys = {plan.plan().folder.name}

    def new():
        found = plan.plan().folder.name
        assert re.fullmatch("[0-9a-f]{16}", found)
        assert found not in keys
        keys.add(found)

    (sources / "total.cpp").write_text(STAND_IN + "// more\n")
    new()
    (sources / "total.h").write_text("")
    new()
    (sources / "notes.md").write_text("")
    assert plan.plan().folder.name in keys
    monkeypatch.setenv(plan.CXXFLAGS, "-fsanitize=address,undefined -g")
    new()
    assert plan.plan().flags[-2:] == plan.plan().extra == ("-fsanitize=address,undefined", "-g")
    monkeypatch.setattr(torch, "__version__", "2.99")
    new()
    monkeypatch.setenv("CXX", "another-compiler")
    new()
    monkeypatch.setattr(plan, "processor", lambda: "another")
    new()


def test_an_environment_reached_through_a_link_has_the_same_library(monkeypatch, tmp_path):
    """That of a second checkout which links the first one's .venv."""
    before, torchs = plan.plan(), Path(torch.__file__)
    (tmp_path / "linked").symlink_to(torchs.parent)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "linked" / torchs.name))
    assert plan.plan() == before
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "other" / torchs.name))
    assert plan.plan().digest != before.digest


def test_the_processor_is_known_by_its_features():
    if sys.platform != "linux":
        pytest.skip("/proc/cpuinfo is Linux's")
    found = plan.processor()
    assert "flags" in found or "Features" in found
    assert "MHz" not in found


# Where it cannot be built


def sentence(match):
    """The one sentence, said by everything, with one warning and one attempt."""
    with pytest.warns(RuntimeWarning, match="takes the slower tiled backend") as warned:
        answers = [build.why_unavailable() for _ in range(2)]
    (why,) = set(answers)
    assert len(warned) == 1
    assert why in str(warned[0].message)
    assert re.search(match, why), why
    assert "\n" not in why
    assert "; " in why
    with pytest.raises(build.Unavailable) as caught:
        build.library()
    assert str(caught.value) == why
    with pytest.raises(build.Unavailable):
        build.state()
    return why


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    sentence("^there is no C.. compiler for the CPU kernels; install one")


def test_a_compiler_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    sentence("'no-such-compiler -x' is no C.. compiler that runs; let CXX name")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_compiler_that_is_none(monkeypatch, tmp_path):
    (fake := tmp_path / "fake").write_text("#!/bin/sh\necho fake 1.0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    sentence("fake' says that all is well, and has compiled nothing; let CXX name a C.. compiler")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize("says", [True, False])
def test_a_full_disk_is_not_the_compilers_fault(says, monkeypatch, tmp_path):
    """Where there is no room, there may be none for the compiler's words either."""
    words = "fatal error: error writing to /tmp/cc.s: No space left on device" if says else ""
    fake = tmp_path / "fake"
    fake.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1.0; exit; fi\necho "{words}" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))

    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not says:
        monkeypatch.setattr(compile.tempfile, "TemporaryFile", full)
    why = sentence("^there is no room to compile the CPU kernels: .*No space left on device; free some space, or let ")
    assert "CXX" not in why


def test_no_sources(sources):
    (sources / "total.cpp").unlink()
    sentence("install softfocus again")


@needs_compiler
def test_an_error_in_the_sources(sources, capfd):
    (sources / "wrong.cpp").write_text("int fine;\nint main() { return nothing; }\n")
    why = sentence(r"^the CPU kernels do not compile: wrong\.cpp:2:\d+: error: .*nothing.*; the whole log is ")
    log = Path(re.search(r"the whole log is ([^,]+),", why)[1])
    assert "wrong.cpp" in log.read_text()
    assert "-O3" in log.read_text()
    assert names(log.parent) == ["compile.log", "lock"]
    assert capfd.readouterr().err.count("compiling") == 1


@needs_compiler
def test_a_symbol_that_nobody_has(sources):
    (sources / "more.cpp").write_text('extern "C" void GOMP_of_the_future();\nvoid more() { GOMP_of_the_future(); }\n')
    sentence("(do not load|do not compile): .*GOMP_of_the_future")


@needs_compiler
def test_a_cache_that_cannot_be_written(sources, monkeypatch, tmp_path, capfd):
    """The process compiles for itself, and leaves nothing; ahead of time there is nothing to
    gain.
    """
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(plan.CACHE, str(tmp_path / "file" / "kernels"))
    (temporary := tmp_path / "temporary").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(temporary))
        assert build.why_unavailable() is None
    assert total(build.library()) == 10
    stderr = capfd.readouterr().err
    assert f"cannot write to {tmp_path / 'file' / 'kernels'}" in stderr
    assert "for this process alone; let SOFTFOCUS_KERNEL_CACHE name a folder" in stderr
    assert names(temporary) == []
    with pytest.raises(build.Unavailable, match=r"cannot write to .*; let SOFTFOCUS_KERNEL_CACHE name"):
        build.build()
    build._outcome = None
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
        sentence("^cannot write to ")


def test_switched_off(monkeypatch):
    monkeypatch.setenv(plan.KERNELS, "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build.why_unavailable() == "SOFTFOCUS_KERNELS=off switches the CPU kernels off; unset it to have them"
    for ask in (build.library, build.build, build.state):
        with pytest.raises(build.Unavailable, match="unset it"):
            ask()


def test_a_switch_that_says_neither(monkeypatch):
    monkeypatch.setenv(plan.KERNELS, "banana")
    sentence("^SOFTFOCUS_KERNELS=banana is neither on nor off; set it to off, or unset it")
    monkeypatch.setenv(plan.KERNELS, "off")  # nothing of it is remembered
    assert "switches the CPU kernels off" in build.why_unavailable()
    assert build._outcome is None


def test_a_warning_that_is_an_error_comes_once(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="slower tiled backend"):
            build.why_unavailable()
        assert "no C++ compiler" in build.why_unavailable()


# How it is asked


@needs_compiler
def test_asking_inside_a_compiled_graph(monkeypatch):
    """The very first question may come from torch.compile(fullgraph=True)."""

    def double(x):
        return x * 2 if build.why_unavailable() is None else x

    torch.compiler.reset()
    x = torch.ones(3)
    assert torch.equal(torch.compile(double, fullgraph=True, backend="eager")(x), 2 * x)
    monkeypatch.setenv(plan.KERNELS, "off")
    torch.compiler.reset()
    assert torch.equal(torch.compile(double, fullgraph=True, backend="eager")(x), x)


@pytest.mark.long
@needs_compiler
def test_importing_compiles_nothing(sources, tmp_path):
    ran = subprocess.run([sys.executable, "-c", code("", sources)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not (tmp_path / "cache").exists()


def test_the_build_needs_python_and_torch_alone():
    """filelock is torch's own requirement; softfocus.switches reads the environment, softfocus.warn
    warns.
    """
    allowed = {*sys.stdlib_module_names, "torch", "filelock"}
    for name in ("build.py", "compile.py", "plan.py"):
        for node in ast.walk(ast.parse((ROOM / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [node.module]
            else:
                continue
            for module in found:
                assert module.partition(".")[0] in allowed or module.startswith(
                    ("softfocus.backends.cpu", "softfocus.switches", "softfocus.warn")
                ), (
                    name,
                    module,
                )


@needs_compiler
def test_a_terminal_sees_the_seconds(sources, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(compile.time, "monotonic", lambda: next(clock))
    build.build()
    stderr = capsys.readouterr().err
    assert re.search(r"\.\.\.\rsoftfocus: compiling .* \.\.\. \d+ s\r.* done in \d+ s\n$", stderr), stderr
