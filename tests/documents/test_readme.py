"""README.md: its Python runs, its commands exist, it shows the committed results."""

import json
import re
import textwrap
from dataclasses import replace

import pytest

from softfocus import catalog
from softfocus.lab.inspect.results import read as read_inspections
from softfocus.lab.report.points import best, cell, column_name, columns, settings

from .committed import (
    FAR,
    HERE,
    RESULTS,
    ROOT,
    WINDOWED,
    accuracies,
    by_label,
    by_seed,
    encoder_rates,
    loss,
    minus,
    recalls,
)
from .tables import NAMES, said, shown, shown_loss, table, tables_of

README = (ROOT / "README.md").read_text()
TEXT = " ".join(README.split())
SHOWN = ("Softmax", "laser-lssa-local", "lssa-local", "lssa-hybrid", "softplus_l1", "LASER", "LSSAR", "local-nope")
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
    return "\n".join(["![Loss over evaluation length](docs/results/layouts/figure1.png)", "", shown_rows, "", *lead()])


def lead() -> list[str]:
    """What a reader should know of the result, a line for each comparison."""
    by = by_label("layouts")
    lowest = min((best(group, 16.0) for group in by.values()), key=lambda one: one.loss)
    there = "t 16 times the training length"
    name = NAMES.get(lowest.group.label, lowest.group.label)
    setting = lowest.setting.replace("window 1x", "with the window")

    def both(ours: str, rival: str) -> str:
        here, far = (said(minus(by, ours, rival, at)) for at in (HERE, WINDOWED))
        return f"at the training length: {here}; a{there}, both with the window: {far}."

    lines = [
        f"* LASER over LSSA, every other layer local, against Softmax, {both('laser-lssa-local', 'Softmax')}",
        f"* The same against LSSA in that layout, without LASER, {both('laser-lssa-local', 'lssa-local')}",
        f"* LSSA in that layout against Softmax, {both('lssa-local', 'Softmax')}",
        f"* The same against softmax in that layout, {both('lssa-local', 'local-softmax')}",
        f"* Local LSSA layers and global LSSAR ones against Softmax, {both('lssa-hybrid', 'Softmax')}",
        f"* Of the same, as trained, a{there}, against Softmax with the window: "
        f"{said(minus(by, 'lssa-hybrid', 'Softmax', FAR, WINDOWED))}.",
        f"* A{there} the lowest loss, windows included, is {lowest.loss:.3f}: {name}, {setting}.",
    ]
    wrapped = [textwrap.wrap(long.replace(" ± ", "~±~"), 100, subsequent_indent="  ") for long in lines]
    return [line.replace("~", " ") for long in wrapped for line in long]


def test_the_result_is_the_committed_one():
    assert tables_of(README) == {"result": result_block()}, f"the README should show:\n{result_block()}"


def test_the_leads_of_single_models_are_the_measured_ones():
    by = by_label("layouts")
    laser, softplus = minus(by, "Softmax", "LASER"), minus(by, "Softmax", "softplus_l1")
    assert not laser.sure
    assert f"below Softmax by {shown(laser)} at the training length (four seeds, inconclusive)" in TEXT
    assert softplus.sure
    assert f"takes {shown(softplus)} off at the training length, and [in a model of 0.3 M" in TEXT
    softmax, ours = (by_seed("layouts", label, HERE) for label in ("Softmax", "laser-lssa-local"))
    leads = [softmax[seed] - loss for seed, loss in ours.items()]
    assert len(leads) == 8
    lssa = by_seed("layouts", "lssa-local", HERE)
    assert all(loss < lssa[seed] for seed, loss in ours.items())
    assert f"with the same seed, by {min(leads):.3f} to {max(leads):.3f} at the training length, and" in TEXT
    for label, seeds in (("lssa-local", 8), ("softplus-local", 4)):
        alone = by_seed("layouts", label, HERE)
        assert len(alone) == seeds
        assert all(loss < softmax[seed] for seed, loss in alone.items())
    assert not minus(by, "local-softmax", "Softmax").sure
    local, over_lssa = minus(by, "Softmax", "laser-local"), minus(by, "lssa-local", "laser-lssa-local")
    assert local.sure
    assert over_lssa.sure
    assert f"with every other layer local by {shown(local)}, and over LSSA it takes off {shown(over_lssa)} more" in TEXT
    demo = loss("demo-slow-start", "demo-lssa"), loss("demo-slow-start", "demo-softmax")
    assert "LSSA was behind Softmax, {:.3f} against {:.3f}".format(*demo) in TEXT


def test_what_the_first_table_says_of_a_window_is_measured():
    softmax = by_label("layouts")["Softmax"]
    windowed, plain = (cell(softmax, *at).loss for at in (WINDOWED, FAR))
    assert f"its loss at 16 times the length is {windowed:.3f}, not {plain:.3f}." in TEXT


def test_no_lead_at_512_tokens_is_as_measured():
    settings = {
        "small-gpu/one-pass": "{} (32K tokens a step, less than one pass over the text, three seeds)",
        "small-gpu": "{} (the same, 4.5 passes, two seeds)",
        "small-gpu/quarter": "{} (8K tokens a step, three seeds)",
        "layouts-512": "{} (three seeds). All four are inconclusive.",
    }
    for study, text in settings.items():
        by = by_label(study)
        found = minus(by, "laser-lssa-local", "Softmax", HERE)
        assert not found.sure
        assert text.format(said(found).split(",")[0]) in TEXT
        pairs = zip(*(cell(by[row], *HERE).values for row in ("laser-lssa-local", "Softmax")), strict=True)
        above = [ours > softmax for ours, softmax in pairs]
        assert len(above) == (2 if study == "small-gpu" else 3)
        assert all(above) == (study != "small-gpu/one-pass")
    lssa = minus(by_label("small-gpu"), "lssa-local", "Softmax", HERE)
    assert lssa.sure
    assert f"LSSA in the layout is above it by {shown(lssa)} (4.5 passes, two seeds)." in TEXT


def test_the_leads_in_a_larger_model_and_on_tokens_are_the_measured_ones():
    by = by_label("larger")
    lead, layout = minus(by, "Softmax", "lssa-local"), minus(by, "local-softmax", "lssa-local")
    assert lead.sure
    assert layout.sure
    assert f"LSSA in a layout is below Softmax with each of five seeds, by {shown(lead)} nats per byte, and" in TEXT
    assert f"below softmax in the same layout by {shown(layout)}." in TEXT
    assert not minus(by, "laser-lssa-local", "lssa-local").sure
    assert len(by["laser-lssa-local"].evaluations) == 3
    by = by_label("layouts-bpe-tuned", "bpe")
    assert not minus(by, "lssa-local", "Softmax").sure
    shared = {label: replace(one, evaluations=[run for run in one.evaluations if run.seed < 3])
              for label, one in by.items()}  # fmt: skip
    behind = minus(shared, "lssa-hybrid", "local-softmax")
    assert behind.sure
    assert f"is behind softmax in the same layout by {shown(behind)}, on the three seeds that both have." in TEXT
    below = minus(by, "Softmax", "laser-lssa-local")
    assert below.sure
    assert f"LASER over LSSA is below Softmax by {shown(below)} (six seeds)" in TEXT


def test_what_is_said_of_recall_is_the_measured_one():
    points = {
        (label, point.at, grown): f"{100 * point.value:.0f} %"
        for label, group in recalls("recall-layouts").items()
        for grown in (False, True)
        for point in group.points(grown)
    }
    assert f"LSSAR with all of RoPE finds {points['lssar', 1024, False]} of the keys at 16 times the length" in TEXT
    far = [points[f"{label}-short-rope", 4096, True] for label in ("softmax", "cosine", "lssar")]
    assert "softmax finds {}, cosine softmax with log N {}, LSSAR {}.".format(*far) in TEXT
    (group,) = (group for group in recalls("recall-lssa").values() if len(group.entries) == 3)
    assert [one.info.name for one in group.entries] == [f"lssa-hybrid-head-s{seed}" for seed in range(3)]
    far = [100 * found[1024, False] for found in accuracies(group)]
    assert f"in two trainings of three: it finds {far[0]:.0f} and {far[2]:.0f} %" in TEXT


def test_what_is_said_of_laser_is_what_the_claims_found():
    def page(claim: str) -> str:
        return (RESULTS / f"claims/{claim}.md").read_text()

    def lead(claim: str, says: str) -> str:
        (found,) = re.findall(rf"\| holds \| {says} .*: -(\S+ ± \S+) \|", page(claim))
        return found

    for claim, seeds in (("vit", "six"), ("bert", "three")):
        assert "**Verdict: holds** (2 holds)" in page(f"laser-{claim}")
        found = [re.search(rf"{claim}_{row} 1x, error rate ([\d.]+)", page(f"laser-{claim}"))[1]
                 for row in ("softmax", "laser")]  # fmt: skip
        assert "from {:.1f} % to {:.1f} % ({} seeds)".format(*(100 * float(rate) for rate in found), seeds) in TEXT
    smaller = lead("softplus-table-3", "Softplus has a lower loss than the exponential")
    assert f"parameters](docs/results/claims/softplus-table-3.md) {smaller} (six seeds)" in TEXT
    laser, softmax = (min(one.loss for one in encoder_rates("vit")[row]) for row in ("laser", "softmax"))
    rates = f"the ViT's is {laser:.1%} against {softmax:.1%}, and the BERT's difference is".replace("%", " %")
    assert rates in TEXT
    differential = lead("laser-differential", "LASER lowers the loss of differential attention")
    qk_norm = lead("laser-qk-norm", "With QK-norm, LASER has a lower loss than standard attention")
    assert f"attention by {differential}, of one with QK-norm by {qk_norm} (three seeds each)" in TEXT
    depths = page("laser-depths")
    assert "seeds 0, 1, 2, 3, 4, 5;" in depths
    leads = [lead("laser-depths", f"With {n} layer{'s' * (n > 1)} LASER has a lower loss") for n in (1, 2, 3, 4, 6)]
    values = [one.split()[0] for one in leads]
    middle = sorted(values[1:4], key=float)
    assert float(values[0]) > float(middle[-1]) > float(middle[0]) > float(values[-1])
    said = (
        f"with one layer by {leads[0]}, with two to four by {middle[0]} to {middle[-1]}, with six by {leads[-1]} (six"
    )
    assert said in TEXT
    for claim in ("conformer", "classification"):
        assert "**Verdict: inconclusive**" in page(f"laser-{claim}")
    for claim in ("steps", "lamb", "temperature"):
        assert "**Verdict: holds**" in page(f"laser-{claim}")
        assert "seeds 0, 1, 2, 3, 4, 5;" in page(f"laser-{claim}")
    share = re.search(r"fewer steps \| .*that loss is reached after ([\d.]+)% of the steps", page("laser-steps"))[1]
    assert f"softmax's best loss after {float(share):.0f} % of the steps" in TEXT
    assert f"with LAMB its loss is lower by {lead('laser-lamb', 'With LAMB, LASER has a lower loss')}" in TEXT
    assert re.search(r"right: \+[\d.]+%", page("laser-classification")), "ahead"
    assert re.search(r"mistakes fewer words .*: \+[\d.]+ ±", page("laser-conformer")), "behind"


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
    assert set(re.findall(r"^softfocus (\w+)", README, re.MULTILINE)) <= known


def test_the_numbers_of_the_maps_are_the_committed_ones():
    softmax, lssar, layout = (one.row(2048) for one in read_inspections(RESULTS / "inspect/inspect.json").runs)
    for text in (
        f"{lssar.zeros.mean:.1%} of LSSAR's visible weights are exactly zero, "
        f"and {softmax.zeros.mean:.1%} of Softmax's",
        f"of a row is {lssar.entropy.mean:.2f} nats, against {softmax.entropy.mean:.2f}",
        f"{lssar.beyond.mean:.1%} lies a training length away or farther, against {softmax.beyond.mean:.1%}",
        f"In the layout it is {layout.beyond.mean:.1%}",
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


def test_the_benchmarks_in_bfloat16_are_the_committed_ones():
    labels = {"forward": "forward", "backward": "forward + backward", "decode": "decode, one query"}
    for folder, machine in (("bench-cpu-bfloat16", "with AMX"), ("bench-cpu-bfloat16-ice-lake", "without AMX")):
        cells = json.loads((RESULTS / folder / "results.json").read_text())["cells"]
        for what, label in labels.items():
            ratios = [
                f"{subject['ratio']['median']:.2f}"
                for cell in sorted(cells, key=lambda cell: cell["length"])
                for subject in cell["subjects"]
                if (cell["what"], cell["parity"], subject["name"]) == (what, "passed", "softfocus")
            ]
            assert f"| {machine}, {label} | {' | '.join(ratios)} |" in README
