"""The README is true: its Python runs, and the numbers it shows are those of the committed result."""

import json
import re
from pathlib import Path

import pytest

from softfocus import catalog
from softfocus.lab.report import read

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
RESULT = ROOT / "docs" / "results" / "demo"


def result_block() -> str:
    """What stands between the README's result marks, made from the committed results."""
    report = read(RESULT / "results.json")
    by_name = {evaluation.mechanism: evaluation for evaluation in report.evaluations}
    names = {"softmax": "Softmax", "lssa": "LSSA", "lssar": "LSSAR, p = 15", "laser": "LASER, on softmax"}
    rows = [
        "![Loss over evaluation length](docs/results/demo/figure1.png)",
        "",
        f"{report.finding.sentence}",
        "",
        "| validation loss, nats per byte | 1x | 2x | 4x | 8x | 16x | 16x / 1x |",
        "|---|---|---|---|---|---|---|",
    ]
    for ntk in (False, True):
        for mechanism, label in names.items():
            evaluation = by_name[mechanism]
            losses = {row.length // evaluation.train_length: row.loss for row in evaluation.rows if row.ntk == ntk}
            first = next(row.loss for row in evaluation.rows if row.length == evaluation.train_length)
            losses.setdefault(1, first)  # at the training length, NTK scaling changes nothing
            cells = [f"{losses[multiple]:.3f}" for multiple in (1, 2, 4, 8, 16)]
            scaling = "dynamic NTK" if ntk else "no scaling"
            rows.append(f"| {label}, {scaling} | {' | '.join(cells)} | {losses[16] / losses[1]:.2f} |")
    return "\n".join(rows)


def test_the_result_is_the_committed_one():
    shown = re.search(r"<!-- result:begin -->\n(.*?)\n<!-- result:end -->", README, re.DOTALL)
    assert shown is not None
    assert shown[1] == result_block(), f"the README should show:\n{result_block()}"


@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", README, re.DOTALL), ids=lambda code: code.split("\n")[0]
)
def test_its_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalog._CATALOG, "_entries", catalog._CATALOG._entries)  # what it registers is gone after it
    scope: dict = {}
    if "import torch, softfocus" not in code:
        exec("import torch, softfocus\nq, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))", scope)
    exec(code.replace("2, 8, 1024, 64", "1, 2, 32, 16"), scope)


def test_the_commands_it_names_exist():
    import typer.main

    from softfocus.lab.commands import app

    known = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"^softfocus (\w+)", README, re.MULTILINE)) <= known


def test_the_number_of_mechanisms_is_right():
    import softfocus

    assert f"the catalogue: {len(softfocus.mechanisms())} names" in README


@pytest.mark.parametrize(
    ("folder", "mechanism", "name", "directions"),
    [
        ("bench-cpu", "lssar", "LSSAR", ("forward", "backward", "decode")),
        ("bench-cpu-lssa-laser", "lssa", "LSSA", ("forward", "backward")),
        ("bench-cpu-lssa-laser", "laser", "LASER, on softmax", ("forward", "backward")),
    ],
)
def test_the_benchmark_table_is_the_committed_benchmark(folder, mechanism, name, directions):
    cells = json.loads((ROOT / "docs/results" / folder / "results.json").read_text())["cells"]
    labels = {"forward": "forward", "backward": "forward + backward", "decode": "decode, one query"}
    for what in directions:
        ratios = [
            f"{subject['ratio']['median']:.2f}"
            for cell in sorted(cells, key=lambda cell: cell["length"])
            for subject in cell["subjects"]
            if (cell["mechanism"], cell["what"], subject["name"]) == (mechanism, what, "softfocus")
            and cell["parity"] == "passed"
        ]
        assert len(ratios) >= 2
        assert f"| {name}, {labels[what]} | {' | '.join(ratios)} |" in README
