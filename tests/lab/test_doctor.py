"""The doctor: finds what is there, and says what to do about what is not."""

import json
import os
import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from rich.console import Console

import softfocus.testing
from softfocus.lab import cli
from softfocus.lab.doctor import agreement, examine, table


def test_a_sound_installation() -> None:
    found = examine()
    packages = {check.name: check for check in found.checks if check.topic == "packages"}
    assert {"torch", "transformers", "typer", "pydantic"} <= set(packages)
    assert packages["torch"].status == "ok"
    runs = {check.topic: check.name for check in found.checks if check.finding.startswith("runs: ")}
    assert set(runs) == {"backends, softmax", "backends, lssar", "backends, laser"}
    assert found.machine.cores >= 1
    assert os.uname().nodename not in found.machine.model_dump_json()
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(found))
    assert "tiled" in console.export_text()


@pytest.mark.parametrize(("backend", "switch"), [("triton", "SOFTFOCUS_TRITON"), ("cpu", "SOFTFOCUS_KERNELS")])
def test_what_is_said_of_the_kernels(monkeypatch: pytest.MonkeyPatch, backend: Any, switch: str) -> None:
    held = []

    def check(attention: object, case: object, name: str, dtype: torch.dtype, device: str) -> None:
        held.append((name, dtype, os.environ["SOFTFOCUS_TUNE"]))
        assert len(held) != 10, "off by one\nand more"

    monkeypatch.setattr(softfocus.testing, "check", check)
    assert [one.status for one in agreement(backend, "cpu")] == ["ok"]
    assert len(set(held)) == 8
    (found,) = agreement(backend, "cpu")
    assert (found.status, found.finding) == ("fail", "softmax, torch.float32: AssertionError: off by one")
    assert f"{switch}=off" in found.remedy


def test_the_cpu_kernels_agree_with_the_reference_here() -> None:
    """Nothing is replaced: small calls run."""
    query = torch.zeros(1, 1, 16, 16)
    if softfocus.explain(query, query, query).backend != "cpu":
        pytest.skip("no C++ compiler")
    checks = agreement("cpu", "cpu")
    assert [(one.topic, one.name, one.status) for one in checks] == [("kernels", "cpu", "ok")]
    assert "agree with the reference in float64, forward and backward (softmax, lssa" in checks[0].finding


def test_nothing_is_said_of_cpu_kernels_that_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTFOCUS_KERNELS", "off")
    assert agreement("cpu", "cpu") == []


def test_a_missing_and_an_old_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    true_version = metadata.version

    def version(name: str) -> str:
        if name == "datasets":
            raise metadata.PackageNotFoundError(name)
        return "4.0.0" if name == "transformers" else true_version(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--json", "-"])
    assert caught.value.code == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["datasets"]["finding"] == "not installed"
    assert checks["datasets"]["remedy"] == "in your checkout of softfocus run pip install -e '.[lab]'"
    assert "written for" in checks["transformers"]["finding"]
    assert checks["transformers"]["remedy"] == "in your checkout of softfocus run pip install -e '.[hf]'"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("/proc is where Linux refuses to write")
    monkeypatch.setenv("SOFTFOCUS_CACHE", "/proc/softfocus")
    cache = next(check for check in examine().checks if check.name == "token cache")
    assert cache.status == "fail"
    assert "SOFTFOCUS_CACHE" in cache.remedy
