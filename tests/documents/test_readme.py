"""README.md: its Python runs, its commands exist, it shows the committed results."""

import json
import re
import runpy
import textwrap
from statistics import fmean, stdev

import pytest

from softfocus import catalog
from softfocus.lab.inspect.results import read as read_inspections
from softfocus.lab.report.figure import source_of
from softfocus.lab.report.points import best, cell, column_name, columns, settings

from .committed import (
    FAR,
    HERE,
    RESULTS,
    ROOT,
    WINDOWED,
    beside,
    by_label,
    encoder_rates,
    every_layer,
    minus,
    of_pages,
)
from .tables import NAMES, said, shown, shown_loss, table, tables_of
from .test_global_heads_small import apart, apart_at_both, sizes

README = (ROOT / "README.md").read_text()
TEXT = " ".join(README.split())
(EVIDENCE,) = of_pages("docs/evidence.md")
SHOWN = (
    "Softmax", "softmax-pair-head", "cosine-nope", "laser-lssa-local", "lssa-local", "lssa-hybrid", "softplus_l1",
    "LASER", "LSSAR", "local-nope",
)  # fmt: skip
"""Rows of the table; docs/layouts.md has all."""


def result_block() -> str:
    """What stands between the README's result marks, made from the committed results.

    All models as they were trained; Softmax also as a user would run it beyond its training length.
    """
    by = by_label("layouts")
    longer = {"window 1x": "window of the training length at evaluation"}
    across = columns(by.values())
    what = "validation loss, nats per byte; mean ± standard deviation over seeds"
    rows = []
    for label in SHOWN:
        for setting in settings(by.values()) if label == "Softmax" else ["as trained"]:
            losses = [cell(by[label], column, setting) for column in across]
            losses += [cell(by[label], *WINDOWED)] if setting == "as trained" else []
            name = f"{NAMES.get(label, label)}, {longer.get(setting, setting)}"
            empty = [""] * (len(across) + 1 - len(losses))
            rows.append([name, str(len(by[label].evaluations)), *map(shown_loss, losses), *empty])
    shown_rows = table([what, "seeds", *map(column_name, across), "16x, window"], rows)
    return "\n".join(["![Loss over evaluation length](docs/results/layouts/readme.png)", "", shown_rows, "", *lead()])


def lead() -> list[str]:
    """What the paper's proposal costs, and what is best, a line for each."""
    by = by_label("layouts")
    lowest = min((best(group, 16.0) for group in by.values()), key=lambda one: one.loss)
    name = NAMES.get(lowest.group.label, lowest.group.label)
    setting = lowest.setting.replace("window 1x", "with the window")
    lines = [
        f"* LSSAR in every layer against Softmax: {said(minus(by, 'LSSAR', 'Softmax'))} at the training length; at 16 "
        f"times it {said(minus(by, 'LSSAR', 'Softmax', FAR, WINDOWED))}, as trained, against Softmax with the window.",
        f"* At 16 times the training length the lowest loss, windows included, is {lowest.loss:.3f}: "
        f"{name}, {setting}.",
    ]
    wrapped = [textwrap.wrap(long.replace(" ± ", "~±~"), 100, subsequent_indent="  ") for long in lines]
    return [line.replace("~", " ") for long in wrapped for line in long]


def test_the_result_is_the_committed_one():
    made = {"sizes": sizes(), "result": result_block()}
    assert tables_of(README) == made, "\n\n".join(["the README should show:", *made.values()])


def test_the_figure_is_drawn_from_the_committed_results():
    """From the rows of the table."""
    script = runpy.run_path(str(RESULTS / "layouts/draw.py"))
    assert source_of(RESULTS / "layouts/readme.png") == script["source"](), "run docs/results/layouts/draw.py"
    assert tuple(script["ROWS"]) == SHOWN


def test_what_the_first_table_says_is_measured():
    by = by_label("layouts")
    windowed, plain = (shown_loss(cell(by["Softmax"], *at)) for at in (WINDOWED, FAR))
    assert f"its loss at 16 times the length is {windowed}, not {plain} (nats per byte; 0.8 M" in TEXT
    assert len(by["Softmax"].evaluations) == 8
    assert all(minus(by, label, "cosine-nope").value > 0 for label in by.keys() - {"cosine-nope"})
    rates = [encoder_rates("vit")[row][1] for row in ("laser", "softmax")]
    laser, softmax = (f"{100 * fmean(one.values):.1f} ± {100 * stdev(one.values):.1f} %" for one in rates)
    assert [len(one.values) for one in rates] == [6, 6]
    assert f"its error rate is {laser}, not {softmax} (0.11 M parameters; six seeds, three of them" in TEXT
    assert "Three more were then trained." in " ".join((RESULTS / "claims/laser-vit.md").read_text().split())


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

    from softfocus.lab.cli.app import app

    known = set(typer.main.get_command(app).commands)
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE))
    named = set(re.findall(r"^softfocus (\w+)", blocks, re.MULTILINE))
    assert named
    assert named <= known


def test_the_numbers_of_the_maps_are_the_committed_ones():
    softmax, lssar, layout = (one.row(2048) for one in read_inspections(RESULTS / "inspect/inspect.json").runs)
    for text in (
        f"{lssar.zeros.mean:.1%} of LSSAR's visible weights are exactly zero, "
        f"and {softmax.zeros.mean:.1%} of Softmax's",
        f"of a row is {lssar.entropy.mean:.2f} nats, against {softmax.entropy.mean:.2f}",
        f"{lssar.beyond.mean:.1%} is on keys at least one training length away, against {softmax.beyond.mean:.1%}",
        f"In `demo-hybrid` it is {layout.beyond.mean:.1%}",
    ):
        assert text.replace("%", " %") in TEXT


@pytest.mark.parametrize(
    ("folder", "mechanism", "name", "directions"),
    [
        ("bench-cpu", "lssar", "LSSAR", ("forward", "backward", "decode")),
        ("bench-cpu-lssa-laser", "lssa", "LSSA", ("forward", "backward")),
        ("bench-cpu-lssa-laser", "laser", "LASER, on softmax", ("forward", "backward")),
        ("bench-cpu-lssa-laser", "laser(lssa)", "LASER over LSSA", ("forward", "backward")),
    ],
)
def test_the_benchmark_table_is_the_committed_benchmark(folder, mechanism, name, directions):
    cells = json.loads((RESULTS / folder / "results.json").read_text())["cells"]
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


def shares(folder: str, mechanism: str = "lssar") -> dict[tuple[str, int], float]:
    """Time as a share of SDPA's, by direction and length, of the cells that passed parity."""
    cells = json.loads((RESULTS / folder / "results.json").read_text())["cells"]
    return {
        (cell["what"], cell["length"]): subject["ratio"]["median"]
        for cell in cells
        for subject in cell["subjects"]
        if (cell["mechanism"], cell["parity"], subject["name"]) == (mechanism, "passed", "softfocus")
    }


def test_the_shares_it_sums_up_are_the_committed_ones():
    single = shares("bench-cpu")
    worst = single.pop(("decode", 1024))
    least, most = min(single.values()), max(single.values())
    assert f"LSSAR takes {least:.2f} to {most:.2f} of the time of torch's own flash softmax (SDPA), but" in TEXT
    assert f"but {worst:.2f} in decoding 1K keys" in TEXT
    forward = [share for (what, _length), share in shares("bench-cpu-bfloat16").items() if what == "forward"]
    assert f"In bfloat16 it takes {min(forward):.2f} to {max(forward):.2f} forward [where the processor" in TEXT
    assert max(shares("bench-cpu-bfloat16-ice-lake").values()) < 1, "less than SDPA where it has not"


def test_the_verdicts_it_counts_are_the_ledgers():
    page = (RESULTS / "claims/README.md").read_text()
    holds, fails, inconclusive, *_others = re.search(r"^\| toy \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
    judged = sum(map(int, (holds, fails, inconclusive)))
    assert f"{judged} claims that were judged on tiny models, {holds} hold, {fails} fail and {inconclusive}" in TEXT
    of_toy = [line.split(" | ") for line in page.splitlines() if line.startswith("| [")]
    failed = [source for _claim, source, toy, *_others in of_toy if re.match(r"fails( \(|$)", toy)]
    assert len(failed) == int(fails)
    assert all("2501.13428" in source for source in failed), "the eight are about the first paper"
    assert sum(source.startswith("Our question") for source in failed) == 1, "one tests a hypothesis of ours"
    assert int(fails) == 8
    assert (
        f"Of {judged} claims that were judged on tiny models, {holds} hold, {fails} fail and {inconclusive}" in EVIDENCE
    )


def test_the_claims_at_the_scale_small_are_the_ledgers():
    page = (RESULTS / "claims/README.md").read_text()
    holds, fails, inconclusive, *_others = re.search(r"^\| small \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
    assert (holds, fails, inconclusive) == ("0", "1", "4")
    assert "Five of the 30 were judged with 10 M parameters, too: one fails, and four are inconclusive." in EVIDENCE
    assert "With the first 3 alone 6 verdicts would differ" in " ".join(page.split())
    assert (
        "Six of the verdicts on tiny models rest on seeds that were added after three had been inconclusive."
        in EVIDENCE
    )


def test_lssar_in_every_layer_is_the_measured_one():
    by = every_layer()
    losses = [
        cell(by[name], *at).loss for name, at in (("LSSAR, p = 15", FAR), ("Softmax", FAR), ("Softmax", WINDOWED))
    ]
    said = "LSSAR has {:.3f} nats per token there, Softmax {:.3f}, and {:.3f} with the window."
    assert said.format(*losses) in EVIDENCE
    demo = minus(by_label("layouts"), "LSSAR", "Softmax")
    assert f"**With 0.8 M parameters:** {apart(demo)}." in EVIDENCE
    demo = shown(demo)
    assert f"It costs {demo} nats per byte at the training length with 0.8 M parameters (" in TEXT


def test_the_lead_over_a_better_trained_softmax_is_the_measured_one():
    by = by_label("small-gpu/longer") | {"best": by_label("small-gpu/one-pass")["Softmax"]}
    near, far = (beside(by, "global-heads", "best", *pair) for pair in ((HERE, HERE), (FAR, WINDOWED)))
    assert (near.sure, far.sure) == (False, True)
    text = "Global heads, trained in batches of 8K tokens, minus this Softmax:"
    assert f"{text} {apart_at_both(near, far)}." in EVIDENCE
