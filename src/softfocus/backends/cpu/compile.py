"""The CPU kernels' sources to a loaded library: compile side by side, link, try to load."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    with _progress() as tick:
        objects = _objects(plan, compiler, folder, tick)
        return _link(plan, compiler, folder, objects, tick)


def load(path: Path) -> ctypes.CDLL:
    """Load a library whose OpenMP symbols are undefined: torch, imported with ``plan``, has loaded its own for all to see."""
    return ctypes.CDLL(str(path))


def say(line: str, end: str = "\n") -> None:
    """To whoever waits, on stderr."""
    with suppress(OSError, ValueError, AttributeError):  # a stderr that is closed, or none at all
        sys.stderr.write(line + end)
        sys.stderr.flush()


def _objects(plan: plans.Plan, compiler: Sequence[str], folder: Path, tick: Tick) -> list[Path]:
    sources = plans.sources("*.cpp")
    objects = [folder / f"{path.stem}.o" for path in sources]
    commands = [
        [*compiler, *plan.flags, "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    _run(plan, folder, commands, tick)
    if not all(made.is_file() for made in objects):
        what = f"{shlex.join(compiler)!r} says that all is well, and has compiled nothing"
        raise plans.Unavailable(what, "let CXX name a C++ compiler, or unset it")
    return objects


def _link(plan: plans.Plan, compiler: Sequence[str], folder: Path, objects: Sequence[Path], tick: Tick) -> ctypes.CDLL:
    """Without OpenMP at first: threads are to come from the pool that torch runs on; another one would fight it for cores.

    Where torch's is not visible to all, it is named. The compiler's own comes last: for a torch that has none, and for clang
    on Linux, whose symbols GNU's library in torch does not have.
    """
    made = folder / plan.library.name
    named = [(str(path), f"-Wl,-rpath,{path.parent}") for path in _openmp_libraries()]
    why = ""
    for openmp in ((), *named, plans.OPENMP):
        made.unlink(missing_ok=True)  # a new file each time: the loader takes the same inode for the same library
        command = [*compiler, *plans.SHARED, *plan.extra, *map(str, objects), *openmp, "-o", str(made)]
        _run(plan, folder, [command], tick)
        try:
            return load(made)
        except OSError as error:
            why = str(error).replace(f"{made}: ", "")
            if not re.search("symbol.*(GOMP_|omp_|kmpc_)", why):
                break
    remedy = f"name another compiler with CXX, or another folder with {plans.CACHE}"
    raise plans.Unavailable(f"the compiled CPU kernels do not load: {why}", remedy)


def _openmp_libraries() -> list[Path]:
    folder = plans.torch_libraries()
    return [path for name in ("libgomp*", "libomp*", "libiomp5*") for path in sorted(folder.glob(name))]


def _run(plan: plans.Plan, folder: Path, commands: Sequence[Sequence[str]], tick: Tick) -> None:
    """Run commands, as many at a time as there are cores; the first that fails ends them all."""
    waiting = list(enumerate(commands))
    logs = [folder / f"{number}.log" for number, _ in waiting]
    running: dict[int, subprocess.Popen[bytes]] = {}
    failed: int | None = None
    try:
        with _ended_by_signals(running):
            while failed is None and (waiting or running):
                while waiting and len(running) < (os.cpu_count() or 1):
                    number, command = waiting.pop(0)
                    running[number] = _start(command, logs[number])
                time.sleep(0.02)
                tick()
                for number in [number for number, process in running.items() if process.poll() is not None]:
                    if running.pop(number).returncode:
                        failed = number
    finally:
        for process in running.values():
            _kill(process)
            process.wait()
        with suppress(OSError), plan.log.open("a") as whole:
            whole.writelines(log.read_text(errors="replace") for log in logs if log.exists())
    if failed is not None:
        said = logs[failed].read_text(errors="replace").splitlines()[1:]
        telling = [line for line in said if re.search(r"\berror: |undefined|cannot find", line)]
        first = (telling or said[-1:] or ["the compiler does not say why"])[0].replace(f"{plans.SOURCES}{os.sep}", "")
        if full := _full(folder, said):
            remedy = f"free some space, or let {plans.CACHE}, and TMPDIR for the compiler's own files, name folders with more"
            raise plans.Unavailable(f"there is no room to compile the CPU kernels: {full}", remedy)
        remedy = f"the whole log is {plan.log}, and CXX can name another compiler"
        raise plans.Unavailable(f"the CPU kernels do not compile: {first}", remedy)


def _full(folder: Path, said: Sequence[str]) -> str:
    """What says that a disk is full: the compiler, or, if its words found no room either, the disk itself."""
    for line in said:
        if re.search("No space left on device|Disk quota exceeded", line):
            return line
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(_SOME_ROOM))
                file.flush()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return f"{place}: {error.strerror}"
    return ""


_SOME_ROOM = 1 << 16


@contextmanager
def _ended_by_signals(running: Mapping[int, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Compilers end with this process where a signal ends it at once, without unwinding. Other handlers are left alone."""
    here = threading.current_thread() is threading.main_thread()  # Python lets no other thread set handlers
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(n) is signal.SIG_DFL]

    def end(number: int, frame: object) -> None:
        for process in list(running.values()):
            _kill(process)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """A compiler and those that it has started: g++ leaves the work to another process."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        file.write(f"{shlex.join(command)}\n".encode())
        file.flush()
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=plans.environment(),
                process_group=0,  # _kill
            )
        except OSError as error:  # it ran a moment ago, when it was asked for its version
            what = f"the compiler {command[0]!r} does not start: {error.strerror or error}"
            raise plans.Unavailable(what, "let CXX name a C++ compiler") from None


@contextmanager
def _progress() -> Iterator[Tick]:
    """Two lines on stderr; on a terminal the first one counts the seconds. Yields what to call now and then."""
    line = "softfocus: compiling the CPU kernels for this machine (once, half a minute or more) ..."
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
