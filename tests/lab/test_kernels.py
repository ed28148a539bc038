"""`softfocus build`, and what the doctor says about the kernels, on a stand-in of two lines for
their sources.
"""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest

from softfocus.backends.cpu import build, plan
from softfocus.lab import cli
from softfocus.lab.doctor import _backends, _compilers, _kernels


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has not tried anything yet."""
    (sources := tmp_path / "csrc").mkdir()
    (sources / "two.cpp").write_text('extern "C" __attribute__((visibility("default"))) int two() { return 2; }\n')
    monkeypatch.setattr(plan, "SOURCES", sources)
    monkeypatch.setattr(build, "_outcome", None)
    monkeypatch.setattr(build, "_warned", False)
    monkeypatch.setenv(plan.CACHE, str(tmp_path / "cache"))
    for name in (plan.KERNELS, plan.CXXFLAGS, "CXX"):
        monkeypatch.delenv(name, raising=False)
    if not any(map(shutil.which, plan.COMPILERS)):
        pytest.skip("needs a C++ compiler")
    return sources


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["build", *arguments])
    return int(caught.value.code or 0), *capsys.readouterr()


def test_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys)
    library = plan.plan().library
    assert code == 0
    assert re.match(rf"{re.escape(str(library))}: compiled in \d+ s\n", out)
    assert "-O3" in out
    assert plan.compiler()[1] in out
    assert "compiling" in err
    code, out, err = command(capsys)
    assert (code, err) == (0, "")
    assert f"{library}: compiled before; --force does it again\n" in out
    code, out, err = command(capsys, "--force", "--json", "-")
    assert code == 0
    assert "compiling" in err
    found = json.loads(out)
    assert found["fresh"]
    assert found["library"] == str(library)
    assert "-O3" in found["flags"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("CXX", "no-such-compiler", "is no C++ compiler that runs; let CXX name a C++ compiler, or unset it"),
        ("SOFTFOCUS_KERNELS", "off", "switches the CPU kernels off; unset it"),
        ("SOFTFOCUS_KERNEL_CACHE", "FILE", "Not a directory; let SOFTFOCUS_KERNEL_CACHE name a folder"),
        ("SOFTFOCUS_CXXFLAGS", "-fno-such-thing", "the whole log is "),
        ("SOFTFOCUS_CXXFLAGS", "'", "SOFTFOCUS_CXXFLAGS cannot be read: No closing quotation"),
    ],
)
def test_a_build_that_cannot_be(
    name: str,
    value: str,
    says: str,
    stand_in: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, str(stand_in / "two.cpp") if value == "FILE" else value)
    code, out, err = command(capsys)
    assert (code, out) == (1, "")
    *_, last = err.splitlines()
    assert last.startswith("softfocus: ")
    assert says in last


def doctor() -> dict[str, tuple[str, str, str]]:
    return {check.name: (check.status, check.finding, check.remedy) for check in _kernels()}


def test_the_doctor_says_how_the_kernels_stand(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor()
    assert found["compiler"][0] == "ok"
    assert plan.compiler()[1] in found["compiler"][1]
    assert found["cpu"][0] == "note"
    assert "not compiled yet" in found["cpu"][1]
    assert not (tmp_path / "cache").exists()  # asking compiles nothing

    build.library()
    status, said, remedy = doctor()["cpu"]
    assert (status, remedy) == ("ok", "")
    assert said.startswith(f"{plan.plan().library}, compiled in ")

    monkeypatch.setattr(build, "_outcome", None)
    monkeypatch.setenv(plan.CACHE, str(stand_in / "two.cpp"))
    build.library()
    status, said, remedy = doctor()["cpu"]
    assert status == "note"
    assert "every process compiles them for itself" in said
    assert remedy == "let SOFTFOCUS_KERNEL_CACHE name another folder"

    monkeypatch.setattr(build, "_outcome", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor() == {
        "cpu": ("note", "'no-such-compiler' is no C++ compiler that runs", "let CXX name a C++ compiler, or unset it")
    }


def test_the_doctor_says_it_in_its_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (why,) = {check.finding for check in _backends("cpu") if check.name == "cpu"}
    assert "no C++ compiler" in why


def test_the_doctor_where_the_compiler_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    build.build()
    monkeypatch.setenv("PATH", "")
    assert {name: status for name, (status, *_) in doctor().items()} == {"compiler": "ok", "cpu": "ok"}
    assert doctor()["compiler"][1].startswith("they were compiled with ")
    (gone,) = (check for check in _compilers() if check.name == "C++")
    assert "torch.compile cannot compile for the CPU; everything else runs without" in gone.finding
