"""The command line as a user meets it: help, tables, JSON, exit codes and one-line errors.

Over 400 lines: the commands share a way to be called and a finished run.
"""

import io
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from softfocus.lab import cli
from softfocus.lab.claims.claim import shipped as claims
from softfocus.lab.cli.train import train
from softfocus.lab.errors import LabError
from softfocus.lab.progress import Display, Event
from softfocus.lab.recipes.loading import shipped
from softfocus.lab.run_folder.files import load_measured, load_run
from softfocus.lab.run_folder.results import Evaluation, Recall, RunInfo
from softfocus.lab.studies.study import shipped as studies

COMMANDS = (
    "demo",
    "train",
    "evaluate",
    "recall",
    "induction",
    "classify",
    "compare",
    "generate",
    "mechanisms",
    "recipes",
    "reproduce",
    "report",
    "build",
    "doctor",
)
HEAVY = ("torch", "transformers", "numpy", "datasets", "matplotlib")


def imported(arguments: list[str], then: str = "") -> list[str]:
    """Which heavy packages a command has imported by its end, in a process of its own."""
    code = f"""
import sys
from softfocus.lab.cli import main
try:
    main({arguments!r})
except SystemExit as exit:
    assert not exit.code, exit.code
{then}
print("IMPORTED", *[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.rpartition("IMPORTED")[2].split()


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run a command in this process: (exit code, stdout, stderr)."""
    capsys.readouterr()
    code = 0
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as exit:
        if isinstance(exit.code, str):  # what Python prints on stderr, leaving with 1
            return 1, capsys.readouterr().out, exit.code
        code = exit.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err.removesuffix("\n")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["--version"], ["doctor", "--help"], ["build", "--help"]]
)
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    assert imported(arguments) == []


@pytest.mark.long
def test_the_test_above_can_fail() -> None:
    assert "torch" in imported(["--help"], then="import torch")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert f"Example: softfocus {command}" in " ".join(out.split())


def test_train_evaluate_generate_compare(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The way from a recipe to a report, as a user goes it."""
    for name in ("softmax", "lssar"):
        run = tmp_path / f"run [{name}]"  # which is no markup
        changes = ["--set", f"model.mechanism={name}", "-s", "train.steps=4"]
        code, out, err = call(capsys, "train", tiny, "--out", run, *changes, "--json", "-")
        assert code == 0, err
        assert RunInfo.model_validate_json(out).mechanism == name
        assert f"softfocus evaluate {run}" in err.splitlines()[-1]
        code, out, err = call(capsys, "evaluate", run, "--lengths", "1x,2x", "--tokens", 512, "--json", run / "e.json")
        assert code == 0, err
        assert f"run [{name}]: length      32 as trained" in err
        assert "1x" in out
        assert "2x" in out
        assert len(Evaluation.model_validate_json((run / "e.json").read_text()).rows) == 6
    code, out, err = call(capsys, "generate", run, "--prompt", "line ", "-n", "8", "--temperature", "0")
    assert (code, out[:5]) == (0, "line ")
    assert len(out) > 6
    code, out, err = call(capsys, "compare", *tmp_path.glob("run *"), "--out", tmp_path / "both")
    assert code == 0, err
    assert "Softmax" in out
    assert (tmp_path / "both" / "report.html").is_file()


def test_json_on_stdout_is_json_alone(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(
        capsys, "evaluate", trained, "--tokens", "256", "--rope", "yarn", "--window", "none", "--json", "-"
    )
    assert code == 0
    assert {row["setting"]["rope"] for row in json.loads(out)["rows"]} == {"yarn"}
    code, out, _ = call(capsys, "mechanisms", "--json", "-")
    assert "lssar" in {entry["name"] for entry in json.loads(out)}
    code, out, _ = call(capsys, "mechanisms", "laser(ssmax)", "--json", "-")
    assert json.loads(out)["learned"] == {"head_scale": 0.43}


def test_mechanisms_of_the_recipe_need_a_scaling(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "evaluation.json").unlink(missing_ok=True)  # of other tests
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace("mechanisms = []", 'mechanisms = ["lssa"]'))
    for rope, settings in (("none", {"window 1x"}), ("trained", {"as trained", "run as lssa", "window 1x"})):
        options = ["--tokens", "256", "--lengths", "2x", "--rope", rope, "--json", run / f"{rope}.json"]
        code, _, err = call(capsys, "evaluate", run, *options)
        assert code == 0, err
        found = Evaluation.model_validate_json((run / f"{rope}.json").read_text())
        assert {row.setting.name(32) for row in found.rows} == settings


@pytest.mark.parametrize(
    ("arguments", "folder", "seed"),
    [
        ([], "runs/demo", None),
        (["--seed", "0"], "runs/demo-0", 0),
        (["--seed", "2", "--out", "here"], "here", 2),
        (["--fast"], "runs/demo-fast", None),
        (["--fast", "--seed", "1"], "runs/demo-fast-1", 1),
        (["--fast", "--out", "here"], "here", None),
    ],
)
def test_demos_of_several_seeds_and_trials_lie_side_by_side(
    arguments: list[str],
    folder: str,
    seed: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[str, int | None]] = []
    monkeypatch.setattr("softfocus.lab.studies.demo.run_demo", lambda out, seed, **_: asked.append((str(out), seed)))
    assert call(capsys, "demo", *arguments)[0] == 0
    assert asked == [(folder, seed)]


def test_mechanisms(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "mechanisms")
    assert code == 0
    assert "eq. 5, table 4, LSSAR p = 15" in out
    code, out, _ = call(capsys, "mechanisms", "sharpened(lssa, 7)")
    assert code == 0
    assert "^7" in out


FAILURES: list[tuple[list[str], str]] = [
    (["train", "demo-lsar"], "did you mean 'demo-lssar'"),
    (["train", "missing.toml"], "no recipe file missing.toml"),
    (["train", "BROKEN"], "train.batch = 0 should be greater than or equal to 1"),
    (["train", "BROKEN", "--set", "train.length=64"], "train.batch = 0 should be greater than or equal to 1"),
    (["train", "demo", "--set", "data.source=/no/corpus", "--out", "OUT"], "/no/corpus"),
    (["train", "demo", "--out", "/proc/none", "-q"], "cannot make the folder /proc/none"),
    (["evaluate", "no-run"], "there is no run at no-run"),
    (["evaluate", "TRAINED", "--lengths", "64k"], "evaluate shorter lengths"),
    (["demo", "--fast", "--out", "FILE"], "file: Not a directory; choose another folder with --out"),
    (["demo", "--fast", "--out", "/proc/none"], "cannot write /proc/none"),
    (["compare", "no-run"], "there is no run at no-run"),
    (["report", "no-folder"], "there is no folder no-folder; name one that holds CLAIM/SCALE/results.json"),
    (["report", "FILE"], "report is for claims: it takes a folder with CLAIM/SCALE/results.json; name that folder"),
    (["report", "TRAINED"], "holds no CLAIM/SCALE/results.json; name a folder that `softfocus reproduce` wrote"),
    (["generate", "no-run"], "there is no run at no-run"),
    (["mechanisms", "--json", "/proc/none/x.json"], "name a folder that can be written to"),
]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A recipe that is wrong whatever the command line says."""
    (tmp_path / "broken.toml").write_text('base = "demo"\ntrain.batch = 0\n')
    return tmp_path / "broken.toml"


WRONG_USE: list[tuple[list[str], str]] = [
    (["mechanisms", "softmx"], "did you mean 'softmax'"),
    (["demo", "--model", "softmx"], "--model: mechanism 'softmx' is not known; did you mean 'softmax'"),
    (["evaluate", "TRAINED", "--lengths", "1"], "'1' is 1 tokens; give a whole number of tokens, at least 2"),
    (["evaluate", "TRAINED", "--lengths", "long"], "'long' is not a length; write --lengths like"),
    (["evaluate", "TRAINED", "--lengths", "9" * 100], "is too long; let --lengths be at most"),
    (["evaluate", "TRAINED", "--lengths", "1." + "0" * 99 + "1x"], "is not a length; write --lengths like"),
    (["evaluate", "TRAINED", "--window", "wide"], "'wide' is not a length; write --window like"),
    (["evaluate", "TRAINED", "--rope", "yarm"], "--rope: 'yarm' is not a scaling of RoPE; did you mean 'yarn'?"),
    (["evaluate", "TRAINED", "--window", "4", "--sinks", "4"], "--sinks 4 does not fit into --window 4"),
    (
        ["evaluate", "TRAINED", "--lengths", "1x,2x", "--window", "64x"],
        "hides nothing at the longest length, 64 tokens; name a smaller window",
    ),
    (
        ["induction", "TRAINED", "--lengths", "1x,2x", "--window", "64x"],
        "hides nothing at the longest length, 64 tokens; name a smaller window",
    ),
    (["evaluate", "TRAINED", "--buckets", "long"], "'long' is not a length; write --buckets like"),
    (
        ["train", "demo", "--set", "train.steps"],
        "--set 'train.steps' is not KEY=VALUE; write it like --set train.steps=100",
    ),
    (["train", "demo", "--set", "train.step=3"], "did you mean 'train.steps'?"),
    (["train", "demo", "--set", "train.batch=0"], "train.batch = 0 should be greater than or equal to 1"),
    (["train", "demo", "--set", "train.warmup=100000"], "train: warmup=100000 + warmdown="),
    (["train", "demo", "--set", "model.mechanism=lsar"], "did you mean 'lssar'"),
    (["train", "BROKEN", "--set", "train.steps=0"], "train.steps = 0 should be greater than or equal to 1"),
    (["study", "layouts", "--seeds", "0,4294967296"], "'0,4294967296' is not a list of whole numbers below 2^32"),
    (["study", "layouts", "--seeds", "1" * 5000], "is not a list of whole numbers below 2^32"),
    (["reproduce", "softplus-figure-1", "--set", "train.step=3"], "did you mean 'train.steps'?"),
    (
        ["reproduce", "softplus-figure-1", "--set", "model.mechanism=laser"],
        "--set model.mechanism: rows of softplus-figure-1 set it, and are held against each other; set a key",
    ),
    (["reproduce", "softplus-tabel-1"], "there is no claim 'softplus-tabel-1'; did you mean 'softplus-table-1'?"),
    (
        ["reproduce", "softplus-zero-shot"],
        "cannot be run at the scale toy: a byte model of this size answers by chance",
    ),
    (["evaluate", "TRAINED", "--mechanism", "lsa"], "--mechanism: mechanism 'lsa' is not known; did you mean 'lssa'"),
    (["evaluate", "l\udce4ufe"], r"'l\udce4ufe' is not UTF-8; rename the file or folder"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG_USE, ids=[" ".join(row[0]) for row in WRONG_USE])
def test_an_option_that_cannot_be_read_is_wrong_use_and_exit_code_2(
    arguments: list[str], says: str, trained: Path, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named: dict[str, Any] = {"TRAINED": trained, "BROKEN": broken}
    code, _, err = call(capsys, *(named.get(word, word) for word in arguments))
    assert code == 2
    assert err.startswith("softfocus: ")
    assert says in err
    assert "\n" not in err


@pytest.mark.parametrize(("command", "option"), [("recall", "--sequences"), ("generate", "--tokens")])
def test_a_count_that_would_run_for_ever_is_refused(
    command: str, option: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, command, str(trained), option, "9" * 20)
    assert code == 2
    assert f"Invalid value for '{option}'" in err


@pytest.mark.long
def test_recall_leaves_out_lengths_of_its_own_that_hold_no_sequence(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lengths that the user names are refused."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    code, out, err = call(capsys, "recall", str(run), "--sequences", "2", "--quiet")
    assert code == 0, err
    measured = sorted({row.length for row in load_measured(run, Recall).rows})
    assert measured
    assert measured[0] > load_run(run).train_length
    assert f"{load_run(run).train_length}" in out + err
    assert "cannot hold a sequence of this task" in out + err
    code, _, err = call(capsys, "recall", str(run), "--lengths", "1x")
    assert code == 1
    assert "cannot hold a sequence of this task" in err


@pytest.mark.parametrize(("arguments", "says"), FAILURES, ids=[" ".join(row[0]) for row in FAILURES])
def test_failures_are_one_line_and_exit_code_1(
    arguments: list[str], says: str, trained: Path, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    named: dict[str, Any] = {"TRAINED": trained, "BROKEN": broken, "OUT": tmp_path / "run", "FILE": tmp_path / "file"}
    code, _, err = call(capsys, *(named.get(word, word) for word in arguments))
    assert code == 1
    assert says in err
    assert err.startswith("softfocus: ")
    assert "\n" not in err
    assert "Traceback" not in err


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("softfocus.lab.catalogue.everything", interrupted)
    assert call(capsys, "mechanisms") == (1, "", "softfocus: interrupted; run the command again")


@pytest.mark.parametrize("place", ["softfocus.lab.cli._widen_output", "softfocus.lab.cli.app._Commands.make_context"])
def test_ctrl_c_before_a_command_runs_is_the_same_line(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    assert call(capsys, "mechanisms") == (1, "", "softfocus: interrupted; run the command again")


def test_a_stop_does_not_hide_what_had_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun sends SIGTERM to the others when one process is gone, while they are about to say
    so.
    """

    def failing() -> None:
        try:
            raise LabError("another process is gone", "go on with --resume")
        finally:
            raise KeyboardInterrupt

    monkeypatch.setattr("softfocus.lab.catalogue.everything", failing)
    assert call(capsys, "mechanisms") == (1, "", "softfocus: another process is gone; go on with --resume")


def test_recipes_studies_and_claims_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "recipes")
    assert code == 0
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert listed == [*shipped(), *studies(), *claims()]


def test_train_names_every_shipped_recipe() -> None:
    listed = " ".join((train.__doc__ or "").split("in brackets: ")[1].split(". Ctrl-C")[0].split())
    named = []
    for family in listed.split("; "):
        base, _, endings = family.removesuffix(")").partition("(")
        named += [base, *(base + ending for ending in endings.split(", ") if ending)]
    assert sorted(named) == shipped()


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "demo", "--stesp", "3"],
        ["train", "demo", "--resume", "--overwrite"],
        ["generate", "no-run", "--seed", str(2**64)],
        ["demo", "--seed", str(2**32)],
    ],
)
def test_wrong_use_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, *arguments)[0] == 2


def test_errors_of_the_real_command(tmp_path: Path) -> None:
    """Once in a process of its own: what main() returns is what the shell sees."""
    command = [sys.executable, "-m", "softfocus.lab", "evaluate", "no-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without room")


@FULL
@pytest.mark.parametrize("arguments", [["mechanisms"], ["mechanisms", "--json", "-"], ["--version"]], ids=" ".join)
def test_a_stdout_without_room_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "softfocus.lab", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    said = "softfocus: cannot write to stdout: No space left on device; let it go where there is room\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert call(capsys, "mechanisms", "lssar", "--json", pipe)[0] == 0
    assert json.loads(os.read(reader, 1 << 16))["name"] == "lssar"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@FULL
def test_a_log_without_room_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(Path("/dev/full").open("wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        with Display("steps") as display:
            display(Event(kind="step", run="run", done=1, total=2))
        with pytest.raises(OSError, match="No space left"):
            display.console.print("it is full indeed")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "named", "says"),
    [
        ("base = 'demo'\n", "läufe", r"'l\udcc3\udca4ufe' has letters that this locale does not know; set LC_ALL"),
        ("base = 'demo'\ndata.source = 'ä'\n", "run", r"'\xe4' has letters that this locale does not know; set LC_ALL"),
    ],
)
def test_names_that_the_locale_cannot_spell(text: str, named: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "softfocus.lab", "train", "recipe.toml", "--out", named]
    done = subprocess.run(command, env=os.environ | ASCII, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("softfocus: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_results_are_utf8_in_every_locale(trained: Path, tmp_path: Path) -> None:
    """The tables' letters and the files', where the locale has neither."""
    run, out = str(shutil.copytree(trained, tmp_path / "run")), tmp_path / "out"
    commands = [["evaluate", run, "--tokens", "512"], ["compare", run, "--out", str(out), "--title", "1x"]]
    code = f"""
from softfocus.lab.cli import main
for arguments in {commands!r}:
    try:
        main(arguments)
    except SystemExit as exit:
        assert not exit.code, exit.code
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | ASCII, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "±" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["typer", "pydantic", "rich"])
def test_without_the_lab_extra_the_command_says_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from softfocus.lab.cli import main; main(['mechanisms'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install -e '.[lab]'" in done.stderr
    assert "Traceback" not in done.stderr
