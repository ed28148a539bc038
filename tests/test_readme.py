"""The README is true: its Python runs, and the numbers it shows are those of the committed result."""

import json
import re
from pathlib import Path

import pytest

from softfocus import catalog
from softfocus.lab.inspect.results import read as read_inspections
from softfocus.lab.points import cell, column_name, columns, growth, settings
from softfocus.lab.report import read
from softfocus.lab.table import loss_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
RESULT = ROOT / "docs" / "results" / "demo"


def result_block() -> str:
    """What stands between the README's result marks, made from the committed results."""
    report = read(RESULT / "results.json")
    names = {"lssar": "LSSAR, p = 15", "laser": "LASER, on softmax"}
    longer = {"window 1x": "window of the training length"}
    across, counts = columns(report.groups), sorted({len(group.evaluations) for group in report.groups})
    seeds = f"; mean ± standard deviation of {counts[0]} seeds" if counts != [1] else ""
    assert len(counts) == 1, "every model with as many seeds"
    head = [f"validation loss, nats per byte{seeds}", *map(column_name, across), f"{column_name(across[-1])} / 1x"]
    lines = [head, ["---"] * len(head)]
    for setting in settings(report.groups):
        for group in report.groups:
            cells = [cell(group, column, setting) for column in across]
            if any(one is None for one in cells):
                continue
            texts = [f"{one.loss:.3f}" + (f" ± {one.spread:.3f}" if seeds else "") for one in cells]
            label = f"{names.get(group.first.mechanism, group.label)}, {longer.get(setting, setting)}"
            lines.append([label, *texts, f"{growth(group, across[-1], setting):.2f}"])
    table = [f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines]
    figure = "![Loss over evaluation length](docs/results/demo/figure1.png)"
    return "\n".join([figure, "", report.finding.sentence, "", *table])


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "results").glob("*/results.json")), ids=lambda p: p.parent.name
)
def test_every_committed_comparison_can_be_read(path):
    if "finding" in json.loads(path.read_text()):
        report = read(path)
        assert report.finding.sentence.startswith("At 1x (128 tokens)")
        assert loss_table(report.groups).row_count > 0


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


def test_the_numbers_of_the_maps_are_the_committed_ones():
    softmax, lssar = (one.row(2048) for one in read_inspections(ROOT / "docs/results/inspect/inspect.json").runs)
    said = " ".join(README.split())
    for text in (
        f"{lssar.zeros.mean:.1%} of LSSAR's visible weights are exactly zero, and {softmax.zeros.mean:.1%} of Softmax's",
        f"of a row is {lssar.entropy.mean:.2f} nats, against {softmax.entropy.mean:.2f}",
        f"{lssar.beyond.mean:.1%} lies a training length away or farther, against {softmax.beyond.mean:.1%}",
    ):
        assert text.replace("%", " %") in said


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
