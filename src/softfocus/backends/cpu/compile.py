"""The CPU kernels' sources to a loaded library: compile side by side, link, load.

The compilers, one per source, are started and ended here, not by ``concurrent.futures``: a pool
waits for its processes, but a build that fails or is told to end must end its compilers.
"""

import ctypes
import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from softfocus.backends.cpu import plan as plans

Tick = Callable[[], None]


def compile_kernels(plan: plans.Plan, compiler: Sequence[str], folder: Path) -> ctypes.CDLL:
    """Compile into a folder, as ``plan.library.name``, and load.

    Raises:
        Unavailable: the compiler or the linker refuses, or the library does not load.
    """
    plan.log.unlink(missing_ok=True)
    objects = {source: str(folder / f"{source.stem}.o") for source in sorted(plans.SOURCES.glob("*.cpp"))}
    with _progress() as tick:
        _run(
            plan,
            folder,
            [[*compiler, *plan.flags, "-c", str(x), "-o", object_file] for x, object_file in objects.items()],
            tick,
        )
        if not all(map(os.path.isfile, objects.values())):
            what = f"{shlex.join(compiler)!r} says that all is well, and has compiled nothing"
            raise plans.Unavailable(what, "let CXX name a C++ compiler, or unset it")
        return _link(plan, compiler, folder, list(objects.values()), tick)


def load(path: Path) -> ctypes.CDLL:
    """Load a library. Torch, imported with ``plan``, has loaded the OpenMP whose symbols it
    needs.
    """
    return ctypes.CDLL(str(path))


def say(line: str, end: str = "\n") -> None:
    """Writes a line to stderr."""
    with suppress(OSError, ValueError, AttributeError):  # a stderr that is closed, or none at all
        sys.stderr.write(line + end)
        sys.stderr.flush()


def _link(plan: plans.Plan, compiler: Sequence[str], folder: Path, objects: Sequence[str], tick: Tick) -> ctypes.CDLL:
    """Link without OpenMP first, so that threads come from torch's pool: a second pool would
    compete with it for cores.

    Where the symbols of torch's OpenMP are not global, the linker gets its path. The compiler's own
    is the last resort: for a torch that has none, and for clang on Linux, whose symbols the GNU
    library in torch lacks.
    """
    library = folder / plan.library.name
    found = [
        path for name in ("libgomp*", "libomp*", "libiomp5*") for path in sorted(plans.torch_libraries().glob(name))
    ]
    why = ""
    for openmp in ((), *((str(path), f"-Wl,-rpath,{path.parent}") for path in found), plans.OPENMP):
        library.unlink(missing_ok=True)  # the loader takes the same inode for the same library
        _run(plan, folder, [[*compiler, *plans.SHARED, *plan.extra, *objects, *openmp, "-o", str(library)]], tick)
        try:
            return load(library)
        except OSError as error:
            why = str(error).replace(f"{library}: ", "")
            if not re.search("symbol.*(GOMP_|omp_|kmpc_)", why):
                break
    remedy = f"name another compiler with CXX, or another folder with {plans.CACHE}"
    raise plans.Unavailable(f"the compiled CPU kernels do not load: {why}", remedy)


def _run(plan: plans.Plan, folder: Path, commands: Sequence[Sequence[str]], tick: Tick) -> None:
    """Run a few commands side by side; the first that fails ends the others."""
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    try:
        with _ended_with_this_process() as running:
            for command, log in zip(commands, logs, strict=True):
                running.append(_start(command, log))
            while None in (codes := [process.poll() for process in running]) and not any(codes):
                time.sleep(0.02)
                tick()
    finally:
        with suppress(OSError), plan.log.open("a") as whole:
            whole.writelines(log.read_text(errors="replace") for log in logs if log.exists())
    for log in (log for log, code in zip(logs, codes, strict=True) if code):
        output = log.read_text(errors="replace").splitlines()[1:]  # after the command
        if full := _disk_full(folder, output):
            remedy = (
                f"free some space, or let {plans.CACHE}, and TMPDIR for the compiler's own files, "
                "name folders with more"
            )
            raise plans.Unavailable(f"there is no room to compile the CPU kernels: {full}", remedy)
        telling = [line for line in output if re.search(r"\berror: |undefined|cannot find", line)]
        first = (telling or output[-1:] or ["the compiler does not say why"])[0].replace(f"{plans.SOURCES}{os.sep}", "")
        remedy = f"the whole log is {plan.log}, and CXX can name another compiler"
        raise plans.Unavailable(f"the CPU kernels do not compile: {first}", remedy)


def _disk_full(folder: Path, output: Sequence[str]) -> str:
    """The compiler's message that a disk is full, or, if the disk had no room for that message, the
    system's own.
    """
    for line in output:
        if re.search("No space left on device|Disk quota exceeded", line):
            return line
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return f"{place}: {error.strerror}"
    return ""


@contextmanager
def _ended_with_this_process() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that end with this block, and with this process where a signal ends it. Other
    handlers are left alone.
    """
    running: list[subprocess.Popen[bytes]] = []

    def kill() -> None:  # whole groups: g++ leaves the work to another process
        for process in running:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def end(number: int, frame: object) -> None:
        kill()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # Python lets no other thread set handlers
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if in_main_thread and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield running
    finally:
        kill()
        for process in running:
            process.wait()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        file.write(f"{shlex.join(command)}\n".encode())
        file.flush()
        env, nothing = plans.environment(), subprocess.DEVNULL
        try:
            return subprocess.Popen(command, stdin=nothing, stdout=file, stderr=file, env=env, process_group=0)
        except OSError as error:  # it ran a moment ago, when it was asked for its version
            what = f"the compiler {command[0]!r} does not start: {error.strerror or error}"
            raise plans.Unavailable(what, "let CXX name a C++ compiler") from None


@contextmanager
def _progress() -> Iterator[Tick]:
    """Report progress in two lines on stderr; on a terminal in one line that counts the seconds.
    Yields a function to call now and then.
    """
    line = "softfocus: compiling the CPU kernels for this machine (once, half a minute to some minutes) ..."
    counts = sys.stderr is not None and sys.stderr.isatty()
    started, shown = time.monotonic(), 0

    def tick() -> None:
        nonlocal shown
        if counts and (seconds := int(time.monotonic() - started)) > shown:
            shown = seconds
            say(f"\r{line} {seconds} s", end="")

    say(line, end="" if counts else "\n")
    ending = "not done"
    try:
        yield tick
        ending = f"done in {time.monotonic() - started:.0f} s"
    finally:
        say(f"\r{line} {ending}" if counts else f"softfocus: ... {ending}")
