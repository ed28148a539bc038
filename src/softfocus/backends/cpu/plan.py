"""How the CPU kernels are compiled here: which flags, which folder of the cache, and with which compiler."""

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
# Not -ffast-math: it takes for granted that there is no NaN and no infinity, and here both have a meaning
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)
NATIVE = dict.fromkeys(("x86_64", "amd64", "i686"), "-march=native")
NATIVE |= dict.fromkeys(("aarch64", "arm64", "ppc64le"), "-mcpu=native")
# Written for macOS, never run there. Apple's driver refuses -fopenmp, its compiler proper takes it; its linker has to be
# told that symbols may come from what the process has loaded
_MACOS = sys.platform == "darwin"
OPENMP = ("-Xclang", "-fopenmp") if _MACOS else ("-fopenmp",)
SHARED = ("-shared", "-undefined", "dynamic_lookup") if _MACOS else ("-shared",)


class Unavailable(RuntimeError):
    """The kernels cannot run here. ``str(error)`` is one sentence, "what; remedy"."""

    def __init__(self, what: str, remedy: str) -> None:
        what = " ".join(what.split())
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(frozen=True)
class Plan:
    """What the library would be. It takes no compiler to find one that is there already.

    Attributes:
        flags: what every source is compiled with, the user's own included.
        extra: the user's own, which go to the linker too.
        digest: of the flags, the sources, the processor, torch's version and folder, and the compiler if the user named one.
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
    """How the library would be compiled here and now. Compiles nothing.

    Raises:
        Unavailable: switched off, Windows, or no sources.
    """
    if off := switched_off():
        raise off
    if sys.platform == "win32":
        raise Unavailable("the CPU kernels are not written for Windows' compiler", "run softfocus under WSL for them")
    if not sources("*.cpp"):
        raise Unavailable(f"the CPU kernels' sources are not in {SOURCES}", "install softfocus again")
    try:
        extra = tuple(shlex.split(os.environ.get(CXXFLAGS, "")))
    except ValueError as error:
        raise Unavailable(f"{CXXFLAGS} cannot be read: {error}", "write it as a shell reads words") from None
    native = NATIVE.get(platform.machine())
    flags = (*FLAGS, *((native,) if native else ()), *OPENMP, *extra)
    # The library may name torch's folder: see compile.py
    asked = os.environ.get("CXX", "").strip()
    parts = [asked, *flags, *SHARED, _processor(), torch.__version__, str(torch_libraries())]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sources("*.cpp", "*.h"):
        text = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(text)}\0".encode() + text)
    return Plan(flags, extra, digest.hexdigest(), _cache() / digest.hexdigest()[:16])


def compiler() -> tuple[tuple[str, ...], str]:
    """The compiler's command, in words, and the first line of what it says about itself.

    Raises:
        Unavailable: there is none, or it does not run.
    """
    command = next(([found] for name in COMPILERS if (found := shutil.which(name))), [])
    remedy = "install one (Debian: apt install g++; macOS: xcode-select --install) or name one with CXX"
    if asked := os.environ.get("CXX", "").strip():
        remedy = "let CXX name a C++ compiler, or unset it"
        command = [asked]
        with suppress(ValueError):
            command = shlex.split(asked)  # "ccache g++"
    if not command:
        raise Unavailable("there is no C++ compiler for the CPU kernels", remedy)
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, env=environment())
        return tuple(command), said.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError, UnicodeDecodeError):
        raise Unavailable(f"{shlex.join(command)!r} is no C++ compiler that runs", remedy) from None


def switched_off() -> Unavailable | None:
    """Set where the user does not want the kernels.

    Raises:
        Unavailable: nobody knows what the user wants.
    """
    said = os.environ.get(KERNELS, "")
    try:
        if switched_on(KERNELS, default=True):
            return None
    except ValueError as error:
        what = f"{KERNELS}={said} is neither on nor off"
        raise Unavailable(what, "set it to off, or unset it to have the CPU kernels") from error
    return Unavailable(f"{KERNELS}={said} switches the CPU kernels off", "unset it to have them")


def sources(*patterns: str) -> list[Path]:
    """The sources that match, in order."""
    return sorted(path for pattern in patterns for path in SOURCES.glob(pattern))


def environment() -> dict[str, str]:
    """What the compiler runs in: English, in which its first error is looked for."""
    return {**os.environ, "LC_ALL": "C"}


def torch_libraries() -> Path:
    """The folder of torch's own libraries, its OpenMP among them."""
    return Path(torch.__file__).with_name("lib")


def _processor() -> str:
    """What -march=native looks at: the first processor's model and features."""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "cpu")
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    # arm has "CPU part" and the like
    kept = [line for line in first if line.partition(":")[0].strip() in names or line.startswith("CPU ")]
    return "\n".join([platform.machine(), *kept])


def _cache() -> Path:
    folder = Path(os.environ.get(CACHE) or "~/.cache/softfocus/kernels")
    with suppress(RuntimeError):  # there is no home
        folder = folder.expanduser()
    return folder.absolute()
