"""What a result must name to be believed: the commit, the versions and the machine."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from softfocus._version import __version__
from softfocus.lab.run_folder.results import Machine

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "triton")

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def now() -> datetime:
    """The time in UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def commit() -> str:
    """The source tree's commit, with "+dirty" when tracked files differ from it; else the package's
    version.

    Only the tree that this package is imported from counts: an installed wheel inside somebody
    else's repository does not borrow that repository's commit.
    """
    root = Path(__file__).resolve().parents[4]
    try:
        if not (root / "src" / "softfocus").samefile(Path(__file__).resolve().parents[2]):
            return f"v{__version__}"
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return f"v{__version__}"
    return head + ("+dirty" if changed else "")


def versions() -> dict[str, str]:
    """Python, softfocus and what it computes with."""
    found = {"python": platform.python_version(), "softfocus": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(device: str) -> Machine:
    """The machine, without names of hosts, users or folders.

    Args:
        device: "cpu", or "cuda" and the like, for which the product's name is looked up.
    """
    if device.startswith("cuda"):
        import torch

        device = torch.cuda.get_device_name(device)
    return Machine(cpu=_cpu(), cores=cores(), device=device)


def cores() -> int:
    """The cores that this process may use: its affinity, and the CPU quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, min(count, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or no quota ("max")
        return count


def available_memory() -> int | None:
    """Bytes of the machine's memory that are free now; None where the system does not say, outside
    Linux.
    """
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return None


def without_folders(recipe: str) -> str:
    """A recipe for others to read: of the files and folders that it names outright, only their own
    names.
    """
    return re.sub(r'"[/~][^"]*?([^"/]*)/*"', r'"\1"', recipe)


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
