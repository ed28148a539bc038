"""How the CPU kernels are compiled here: flags, folder of the cache, compiler."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from softfocus.switches import switched_on

SOURCES = Path(__file__).with_name("csrc")
KERNELS = "SOFTFOCUS_KERNELS"
CACHE = "SOFTFOCUS_KERNEL_CACHE"
CXXFLAGS = "SOFTFOCUS_CXXFLAGS"

COMPILERS = ("c++", "g++", "clang++")
# Not -ffast-math, which assumes that there is no NaN and no infinity. -Werror=switch: a switch over
# an enumeration must have a case for each of its values
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-Werror=switch",
)  # fmt: skip
NATIVE = dict.fromkeys(("x86_64", "amd64", "i686"), "-march=native")
NATIVE |= dict.fromkeys(("aarch64", "arm64", "ppc64le"), "-mcpu=native")
# On macOS, where this has never run, the driver refuses -fopenmp and the compiler proper takes it.
# The linker has to be told that symbols may come from what the process has loaded.
_MACOS = sys.platform == "darwin"
OPENMP = ("-Xclang", "-fopenmp") if _MACOS else ("-fopenmp",)
SHARED = ("-shared", "-undefined", "dynamic_lookup") if _MACOS else ("-shared",)


class Unavailable(RuntimeError):
    """The kernels cannot run here. ``str(error)`` is one sentence, "what; remedy"."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = " ".join(what.split()), remedy
        super().__init__(self.what, remedy)

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(frozen=True)
class Plan:
    """All that determines the library, known before it is compiled.

    Attributes:
        flags: what every source is compiled with, the user's own included.
        extra: the user's own, which go to the linker too.
        digest: of what decides what the library does: sources, flags, processor, torch, and CXX if
            it is set. Not of the compiler's version: a cached library needs no compiler.
        folder: where the library lies; named after the digest.
    """

    flags: tuple[str, ...]
    extra: tuple[str, ...]
    digest: str
    folder: Path

    @property
    def library(self) -> Path:
        """The compiled kernels."""
        return self.folder / "softfocus_cpu.so"

    @property
    def about(self) -> Path:
        """The library's checksum and how it was made; written last."""
        return self.folder / "softfocus_cpu.json"

    @property
    def log(self) -> Path:
        """All that the compiler said the last time."""
        return self.folder / "compile.log"


def plan() -> Plan:
    """How the library would be compiled now. Needs no compiler.

    Raises:
        Unavailable: switched off, Windows, or no sources.
    """
    if off := switched_off():
        raise off
    if sys.platform == "win32":
        raise Unavailable("the CPU kernels are not written for Windows' compiler", "run softfocus under WSL for them")
    if not any(SOURCES.glob("*.cpp")):
        raise Unavailable(f"the CPU kernels' sources are not in {SOURCES}", "install softfocus again")
    try:
        extra = tuple(shlex.split(os.environ.get(CXXFLAGS, "")))
    except ValueError as error:
        raise Unavailable(f"{CXXFLAGS} cannot be read: {error}", "write it as a shell reads words") from None
    native = NATIVE.get(platform.machine())
    flags = (*FLAGS, *((native,) if native else ()), *OPENMP, *extra)
    asked = os.environ.get("CXX", "").strip()
    # The linker may write the path of torch's folder into the library
    parts = [asked, *flags, *SHARED, processor(), torch.__version__, str(torch_libraries())]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(SOURCES.glob("*.[ch]*")):
        text = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(text)}\0".encode() + text)
    cache = Path(os.environ.get(CACHE) or "~/.cache/softfocus/kernels")
    with suppress(RuntimeError):  # there is no home
        cache = cache.expanduser()
    return Plan(flags, extra, digest.hexdigest(), cache.absolute() / digest.hexdigest()[:16])


def compiler() -> tuple[tuple[str, ...], str]:
    """The words of the compiler's command, and the first line of what it says about itself.

    Raises:
        Unavailable: there is none, or it does not run.
    """
    asked = os.environ.get("CXX", "").strip()
    try:  # "ccache g++"
        command = shlex.split(asked) or [path for name in COMPILERS if (path := shutil.which(name))][:1]
    except ValueError:
        command = [asked]
    remedy = "install one (Debian: apt install g++; macOS: xcode-select --install) or name one with CXX"
    if not command:
        raise Unavailable("there is no C++ compiler for the CPU kernels", remedy)
    try:
        ran = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, env=environment())
        return tuple(command), ran.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError, UnicodeDecodeError):
        remedy = "let CXX name a C++ compiler, or unset it" if asked else remedy
        raise Unavailable(f"{shlex.join(command)!r} is no C++ compiler that runs", remedy) from None


def switched_off() -> Unavailable | None:
    """What to raise where the user does not want the kernels; None where they are wanted.

    Raises:
        Unavailable: the variable is neither on nor off.
    """
    setting = os.environ.get(KERNELS, "")
    try:
        on = switched_on(KERNELS, default=True)
    except ValueError as error:
        what = f"{KERNELS}={setting} is neither on nor off"
        raise Unavailable(what, "set it to off, or unset it to have the CPU kernels") from error
    return None if on else Unavailable(f"{KERNELS}={setting} switches the CPU kernels off", "unset it to have them")


def environment() -> dict[str, str]:
    """The compiler's environment. Messages are in English because ``compile.py`` searches them for
    the first error.
    """
    return {**os.environ, "LC_ALL": "C"}


def torch_libraries() -> Path:
    """The folder of torch's own libraries, its OpenMP among them; one and the same through whatever
    link an environment is reached.
    """
    return Path(torch.__file__).parent.resolve() / "lib"


def processor() -> str:
    """What -march=native looks at: the first processor's model and features."""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "cpu")
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    # arm has "CPU part" and the like
    kept = [line for line in first if line.partition(":")[0].strip() in names or line.startswith("CPU ")]
    return "\n".join([platform.machine(), *kept])
