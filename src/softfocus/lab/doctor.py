"""What is installed, which backends run here and why others do not, and what to do about it."""

import importlib.util
import itertools
import os
import shlex
import shutil
import sysconfig
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal
from unittest import mock

from packaging.requirements import Requirement
from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from softfocus._version import __version__
from softfocus.lab.errors import first_line
from softfocus.lab.run_folder import provenance
from softfocus.lab.run_folder.results import Machine

Status = Literal["ok", "note", "fail"]


class Check(BaseModel):
    """One thing that was looked at."""

    topic: str
    name: str
    status: Status
    finding: str
    remedy: str = ""


class Findings(BaseModel):
    """All of them."""

    softfocus: str
    machine: Machine
    checks: list[Check]


def examine() -> Findings:
    """Look at everything. Needs the lab extra; a missing or unsuitable package is a finding, not an
    error.
    """
    checks = _packages()
    device = "cpu"
    if importlib.util.find_spec("torch"):
        found, device = _device()
        checks += [*found, *_backends(device), *_kernels()]  # in this order: the backends may compile the kernels
        checks += agreement("cpu", "cpu")
        if device == "cuda" and importlib.util.find_spec("triton"):
            checks += agreement("triton", device)
    checks += [*_compilers(), *_disk(), *_corpus()]
    return Findings(softfocus=__version__, machine=provenance.machine(device), checks=checks)


def table(findings: Findings) -> Table:
    """A line a check, with what to do where something is to be done."""
    lines = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        lines.add_column(overflow="fold")
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    topic = None
    for check in findings.checks:
        finding = check.finding + (f"\n-> {check.remedy}" if check.remedy else "")
        heading = check.topic if check.topic != topic else ""
        lines.add_row(
            Text(heading, style="bold"),
            Text(check.status, style=colours[check.status]),
            Text(check.name),
            Text(finding),
        )
        topic = check.topic
    return lines


def _packages() -> list[Check]:
    """Every package that softfocus asks for, against the versions that it asks for."""
    found = [Check(topic="packages", name="softfocus", status="ok", finding=f"{__version__} ({provenance.commit()})")]
    seen = {"softfocus"}
    try:
        required = metadata.requires("softfocus") or []
    except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        finding = "runs from a source tree, not installed: what it requires cannot be compared with what is there"
        return [*found, Check(topic="packages", name="", status="note", finding=finding, remedy="pip install -e .")]
    for line in required:
        wanted = Requirement(line)
        extras = [
            extra for extra in ("", "hf", "lab") if wanted.marker is None or wanted.marker.evaluate({"extra": extra})
        ]
        if not extras or wanted.name in seen:
            continue
        seen.add(wanted.name)
        extra = f"[{extras[0]}]" if extras[0] else ""
        install = f"in your checkout of softfocus run pip install -e '.{extra}'"
        status: Status = "fail"
        try:
            finding = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            finding = "not installed"
        else:
            if wanted.specifier.contains(finding, prereleases=True):
                status, install = "ok", ""
            else:
                finding += f", and softfocus is written for {wanted.specifier}"
        found.append(Check(topic="packages", name=wanted.name, status=status, finding=finding, remedy=install))
    return found


def _device() -> tuple[list[Check], str]:
    import torch

    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        many = f" x {torch.cuda.device_count()}" if torch.cuda.device_count() > 1 else ""
        finding = f"{torch.cuda.get_device_name(0)}{many}, {memory:.0f} GiB"
        return [Check(topic="device", name="cuda", status="ok", finding=finding)], "cuda"
    threads = f"{torch.get_num_threads()} threads on {provenance.cores()} cores"
    checks = [Check(topic="device", name="cpu", status="ok", finding=threads)]
    why, remedy = "torch sees no CUDA device", "if there is one, see what nvidia-smi says"
    if torch.version.cuda is None:
        why, remedy = (
            "this build of torch is without CUDA",
            "for a GPU, install torch from https://pytorch.org/get-started",
        )
    return [*checks, Check(topic="device", name="cuda", status="note", finding=why, remedy=remedy)], "cpu"


def _backends(device: str) -> list[Check]:
    import torch

    from softfocus.dispatch import account, choose
    from softfocus.functional import validated_call

    found = []
    for mechanism in ("softmax", "lssar", "laser"):
        tensors = [torch.randn(1, 2, 64, 64, device=device) for _ in range(3)]
        with warnings.catch_warnings():  # what a warning would say stands in the table
            warnings.simplefilter("ignore")
            call = validated_call(tensors[0], tensors[1], tensors[2], mechanism=mechanism)
            choose(call, "auto")  # finds out whether the CPU kernels compile; a question alone does not
            explanation = account(call, "auto")
        for name, why in explanation.reasons.items():
            runs = name == explanation.backend
            status: Status = "ok" if runs else "note"
            finding = f"{'runs' if runs else 'not taken'}: {why}"
            found.append(Check(topic=f"backends, {mechanism}", name=name, status=status, finding=finding))
    return found


def _kernels() -> list[Check]:
    from softfocus.backends.cpu.build import Unavailable, state
    from softfocus.backends.cpu.plan import CACHE, compiler, plan

    try:
        planned, built = plan(), state()
    except Unavailable as error:
        return [Check(topic="kernels", name="cpu", status="note", finding=error.what, remedy=error.remedy)]
    if built is None:
        words, version = compiler()
        made_by = f"{shlex.join(words)}: {version}"
    else:
        made_by = f"they were compiled with {built.compiler}: {built.version}"
    status: Status = "note"
    if built is None:
        finding = f"not compiled yet: the first call on the CPU does it, into {planned.folder}"
        remedy = "softfocus build does it now"
    elif built.library.exists():
        status, finding, remedy = "ok", f"{built.library}, compiled in {built.seconds:.0f} s", ""
    else:
        finding = f"{planned.folder.parent} cannot be written to: every process compiles them for itself"
        remedy = f"let {CACHE} name another folder"
    return [
        Check(topic="kernels", name="compiler", status="ok", finding=made_by),
        Check(topic="kernels", name="cpu", status=status, finding=finding, remedy=remedy),
    ]


def agreement(backend: Literal["cpu", "triton"], device: str) -> list[Check]:
    """Whether the kernels of a backend agree with the float64 reference on this device, forward and
    backward, within what rounding explains. Triton's are compiled first, which takes a minute once.
    Nothing where the CPU kernels do not run: why has a line of its own.
    """
    import torch

    from softfocus import attention, explain
    from softfocus.testing import CASES, check

    switch = {"cpu": "SOFTFOCUS_KERNELS", "triton": "SOFTFOCUS_TRITON"}[backend]
    query = torch.zeros(1, 1, 16, 16, device=device)
    explanation = explain(query, query, query)
    if backend == "cpu" and explanation.backend != "cpu":
        return []
    if device == "cuda" and explanation.backend != "triton":
        return [Check(topic="kernels", name=backend, status="note", finding=explanation.reasons[backend])]
    case = next(case for case in CASES if case.name == "causal")
    names, dtypes = ("softmax", "lssa", "lssar", "laser"), (torch.bfloat16, torch.float32)
    try:
        with mock.patch.dict(os.environ, {"SOFTFOCUS_TUNE": "off"}):
            for name, dtype in itertools.product(names, dtypes):
                check(partial(attention, backend=backend), case, name, dtype, device=device)
    except Exception as error:  # compilers and drivers have exceptions of their own
        finding = f"{name}, {dtype}: {type(error).__name__}: {first_line(error)}"
        remedy = f"{switch}=off runs the tiled backend in their place; please report this"
        return [Check(topic="kernels", name=backend, status="fail", finding=finding, remedy=remedy)]
    tiles = ", in their default tiles" if backend == "triton" else ""
    finding = (
        f"agree with the reference in float64, forward and backward{tiles} ({', '.join(names)}; bfloat16, float32)"
    )
    return [Check(topic="kernels", name=backend, status="ok", finding=finding)]


def _compilers() -> list[Check]:
    words = os.environ.get("CXX", "").split()[:1] or ("c++", "g++", "clang++", "cl")  # CXX may be "ccache g++"
    compiler = next(filter(shutil.which, words), None)
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    if compiler and headers:
        cpp = Check(topic="compilers", name="C++", status="ok", finding=compiler)
    else:
        missing = "no C++ compiler" if not compiler else "no Python.h"
        cpp = Check(
            topic="compilers",
            name="C++",
            status="note",
            finding=f"{missing}: torch.compile cannot compile for the CPU; everything else runs without",
            remedy="for it, install a C++ compiler and Python's headers (Debian: apt install g++ python3-dev)",
        )
    status: Status = "note"
    finding = "not installed; torch.compile and the kernels need it on a GPU"
    if importlib.util.find_spec("triton") is not None:
        # Asked of the module: builds go by other names where packages are counted
        status, finding = "ok", importlib.import_module("triton").__version__
    return [cpp, Check(topic="compilers", name="triton", status=status, finding=finding)]


def _disk() -> list[Check]:
    from softfocus.lab.data.tokens import CACHE, default_cache
    from softfocus.lab.run_folder.disk import size_text

    found = []
    for name, folder in (("token cache", default_cache()), ("runs", Path("runs").resolve())):
        there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
        free = shutil.disk_usage(there).free
        writable = os.access(there, os.W_OK)
        finding = f"{folder}: {size_text(free)} free" if writable else f"{folder} cannot be written to"
        ok = writable and free > 1e9
        remedy = "" if ok else f"choose another folder (--out for runs, {CACHE} for the cache) or free some space"
        status: Status = "ok" if ok else "fail"
        found.append(Check(topic="disk", name=name, status=status, finding=finding, remedy=remedy))
    return found


def _corpus() -> list[Check]:
    from softfocus.lab.data.corpus import Corpus
    from softfocus.lab.data.listing import STDLIB
    from softfocus.lab.errors import LabError

    try:
        files = Corpus(STDLIB).files
    except LabError as error:
        return [Check(topic="corpus", name=STDLIB, status="note", finding=error.what, remedy=error.remedy)]
    size = sum(path.stat().st_size for path in files) / 1e6
    return [Check(topic="corpus", name=STDLIB, status="ok", finding=f"{len(files)} sources, {size:.1f} MB")]
