"""The README is true: its Python runs, and the numbers it shows are those of the committed
result.

Over 400 lines: each block of README and of the documents has its function and its test.
"""

import json
import os
import re
import statistics
import subprocess
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from softfocus import catalog
from softfocus.lab.claims.results import read as read_claim
from softfocus.lab.evaluate.heads import name as heads_name
from softfocus.lab.inspect.results import read as read_inspections
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.heads import gains, mean
from softfocus.lab.report.points import best, cell, column_name, columns, settings
from softfocus.lab.report.recall_compare import RecallReport
from softfocus.lab.report.results import read, read_as
from softfocus.lab.report.table import loss_table
from softfocus.lab.run_folder.results import AS_TRAINED, HeadsMeasured, Induction, Recall, Setting
from softfocus.lab.studies import study

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
RESULT = ROOT / "docs" / "results" / "layouts"
SLOW = ROOT / "docs" / "results" / "layouts-slow-start"
NAMES = {
    "lssa-hybrid": "local LSSA layers, global LSSAR, p = 31, half of RoPE",
    "lssa-local": "local LSSA layers, global LSSA",
    "hybrid-half-rope": "local softmax layers, global LSSAR, p = 31, half of RoPE",
    "LSSAR": "LSSAR, p = 15, in every layer",
    "LSSA": "LSSA in every layer",
    "softplus_l1": "softplus in place of the exponential, in every layer",
    "LASER": "LASER in every layer",
    "hybrid": "the same with all of RoPE",
    "local-cosine": "local softmax layers, global cosine softmax with log N",
    "local-softmax": "local softmax layers, global softmax",
    "local-nope": "local softmax layers, global softmax without RoPE",
    "cosine-local": "local cosine softmax layers, global cosine softmax, with log N",
}
IN_README = ("Softmax", "lssa-hybrid", "lssa-local", "softplus_l1", "LSSAR", "local-nope")
"""Rows of the table; docs/layouts.md has all."""


def result_block() -> str:
    """What stands between the README's result marks, made from the committed results.

    All models as they were trained; Softmax also as a user would run it beyond its training length.
    """
    report = read(RESULT / "results.json")
    longer = {"window 1x": "window of the training length at evaluation"}
    across = columns(report.groups)
    lines = [
        [
            "validation loss, nats per byte; mean ± standard deviation over seeds",
            "seeds",
            *map(column_name, across),
            "16x, window",
        ]
    ]
    lines.append(["---"] * len(lines[0]))
    by = {group.label: group for group in report.groups}
    for group in (by[label] for label in IN_README):
        for setting in settings(report.groups):
            if setting != "as trained" and group.label != "Softmax":
                continue
            cells = [cell(group, column, setting) for column in across]
            label = f"{NAMES.get(group.label, group.label)}, {longer.get(setting, setting)}"
            seeds = str(len(group.evaluations))
            if setting == "as trained":
                cells.append(cell(group, across[-1], "window 1x"))
            values = [f"{one.loss:.3f} ± {one.spread:.3f}" for one in cells]
            lines.append([label, seeds, *values, *[""] * (len(across) + 1 - len(values))])
    table = [f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines]
    figure = "![Loss over evaluation length](docs/results/layouts/figure1.png)"
    return "\n".join([figure, "", *table, "", *lead(report)])


def lead(report) -> list[str]:
    """What a reader should know of the result, a line for each comparison."""
    by = {group.label: group for group in report.groups}
    ours, without = by["lssa-hybrid"], by["lssa-local"]
    softmax, windowed = cell(by["Softmax"], 1.0, "as trained"), cell(by["Softmax"], 16.0, "window 1x")
    flat = cell(ours, 16.0, "as trained")
    lowest = min((best(group, 16.0) for group in report.groups), key=lambda one: one.loss)
    there = "At 16 times the training length"
    name = NAMES.get(lowest.group.label, lowest.group.label)
    setting = lowest.setting.replace("window 1x", "with the window")
    lines = [
        f"* Local LSSA layers and global LSSAR ones against Softmax, at the training length: "
        f"{said(cell(ours, 1.0, 'as trained').minus(softmax))}.",
        f"* {there}, as trained, against Softmax with the window: {said(flat.minus(windowed))}.",
        f"* {there}, both with the window: {said(cell(ours, 16.0, 'window 1x').minus(windowed))}.",
        f"* Local LSSA layers and global LSSA ones against Softmax, at the training length: "
        f"{said(cell(without, 1.0, 'as trained').minus(softmax))}; {there[0].lower()}{there[1:]}, both with the "
        f"window: {said(cell(without, 16.0, 'window 1x').minus(windowed))}.",
        f"* Of these layers, both local and global LSSA, against softmax in the same layout: "
        f"{said(cell(without, 1.0, 'as trained').minus(cell(by['local-softmax'], 1.0, 'as trained')))}; "
        f"{there[0].lower()}{there[1:]}, both with the window: "
        f"{said(cell(without, 16.0, 'window 1x').minus(cell(by['local-softmax'], 16.0, 'window 1x')))}.",
        f"* {there} the lowest loss, windows included, is {lowest.loss:.3f}: {name}, {setting}.",
    ]
    wrapped = [
        textwrap.wrap(long.replace(" ±", "~±").replace("± ", "±~"), 100, subsequent_indent="  ") for long in lines
    ]
    return [line.replace("~", " ") for long in wrapped for line in long]


def said(found) -> str:
    text = f"{found.value:+.3f} ± {found.standard_error:.3f}"
    return text if found.sure else f"{text}, inconclusive"


def both_table() -> str:
    """Loss of the demo's model and recall of the small one, by what turns the keys of the global
    LSSAR layers.
    """
    losses = {
        group.label: group
        for name in ("layouts-slow-start", "loss-and-recall")
        for group in read(ROOT / "docs/results" / name / "results.json").groups
    }
    report = read_as(RecallReport, ROOT / "docs/results/recall-layouts/results.json")
    recalls = {group.label: group for group in report.groups}
    rows = {
        "all": ("hybrid", "lssar"),
        "half": ("hybrid-half-rope", "lssar-half-rope"),
        "a third; in recall a quarter": ("third", "lssar-short-rope"),
        "one head all, one none": ("all-beside-none", "lssar-all-beside-none"),
        "half in layer 1, none in layer 3": ("half-below-none", None),
        "none": (None, "lssar-nope"),
    }
    lines = [
        "| RoPE in the global layers | loss, 1x | loss, 16x | recall, 16x, filler | recall, 16x, pairs |",
        "|---|---|---|---|---|",
    ]
    for said_of, (loss, recall) in rows.items():
        cells = ["", ""]
        if loss:
            cells = [
                f"{one.loss:.3f} ± {one.spread:.3f}"
                for one in (cell(losses[loss], n, "as trained") for n in (1.0, 16.0))
            ]
        found = ["", ""]
        if recall:
            far = [next(one for one in recalls[recall].points(grown) if one.at == 1024) for grown in (False, True)]
            found = [f"{one.value:.2f} ± {one.error:.2f}" for one in far]
        lines.append(f"| {said_of} | {' | '.join([*cells, *found])} |")
    return "\n".join(lines)


LAYOUTS = "\n".join((ROOT / "docs" / name).read_text() for name in ("layouts.md", "slow-start.md"))


def heads_table() -> str:
    """Who is disturbed by far keys: the loss at 16 times the length, and with one head or all
    narrowed.
    """
    rows = {
        "lssar-s0": "LSSAR, p = 15, seed 0, which lost its line",
        "lssar-half-s0": "LSSAR, p = 15, at 1e-3, which lost its line",
        "lssar-s3": "LSSAR, p = 15",
        "lssar-twice-s0": "LSSAR, p = 15, at 4e-3",
        "hybrid-half-rope-s3": "the layout",
        "local-cosine-s3": "local softmax layers, global cosine softmax with log N",
        "softmax-s3": "Softmax",
    }
    lines = [
        "| model | loss at 16x | the most disturbed head | its window takes off | that of all heads takes off |",
        "|---|---|---|---|---|",
    ]
    for run, said in rows.items():
        found = read_as(HeadsMeasured, ROOT / "docs/results/heads" / f"{run}.json")
        base, whole = (mean(found, row) for row in found.rows[:2])
        row, gain = gains(found)[0]
        name = heads_name(row.layer, row.head)
        cells = [f"{x.value:.3f} ± {x.standard_error:.3f}" for x in (gain, base - whole)]
        lines.append(f"| {said} | {base.value:.3f} | {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def trials_table() -> str:
    """The table of docs/layouts.md that stands between its marks, from the committed trials."""
    report = read(ROOT / "docs/results/layout-trials/results.json")
    lines = [
        "| layout | power over training, and what else differs | 1x | 2x | 4x | 8x | 16x |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in report.runs:
        recipe = tomllib.loads(entry.recipe)
        schedule, learned = recipe["train"].get("power"), dict(recipe["model"].get("parameters", {}))
        for kind in recipe["model"].get("layout", {}).values():
            for group in kind if isinstance(kind, list) else [kind]:
                learned |= group.get("parameters", {})
        texts = []
        if schedule:
            texts.append(f"{schedule['shape']} from {schedule['start']:g} in {schedule['share']:.0%} of the steps")
        texts += [f"learned {name}, from {value:g}" for name, value in learned.items()]
        base = recipe["model"]["config"]["rope_parameters"]["rope_theta"]
        texts += [f"RoPE's base {base:g}"] if base != 10_000 else []
        texts += ["three global layers"] if set(recipe["model"].get("layout", {})) == {"0", "*"} else []
        losses = {row.length // 128: row.loss for row in entry.evaluation.rows if row.setting == AS_TRAINED}
        cells = [
            entry.evaluation.mechanism,
            "; ".join(texts).replace("%", " %"),
            *(f"{losses[n]:.3f}" for n in (1, 2, 4, 8, 16)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


COLUMNS = {"1x": (1.0, "as trained"), "16x, as trained": (16.0, "as trained"), "16x, window": (16.0, "window 1x")}
"""Length and setting of the columns that most tables have."""
PAIRS = {
    "1x": (COLUMNS["1x"], COLUMNS["1x"]),
    "16x, as trained, minus Softmax with the window": (COLUMNS["16x, as trained"], COLUMNS["16x, window"]),
    "16x, both with the window": (COLUMNS["16x, window"], COLUMNS["16x, window"]),
}
"""What is held against what of Softmax."""
BOTH_ALIKE = ("1x", "16x, window")
"""The columns in which any two models are held against each other."""


def shown_losses(group, columns=COLUMNS) -> list[str]:
    """Means of a group of runs, and their spread if there are several."""
    several = len(group.evaluations) > 1
    cells = (cell(group, *one) for one in columns.values())
    return [f"{one.loss:.3f}" + (f" ± {one.spread:.3f}" if several else "") for one in cells]


def scale_table(study: str) -> str:
    """Losses of a study at 1x and 16x, as trained and with the window, by layout."""
    groups = read(ROOT / "docs/results" / study / "results.json").groups
    lines = ["| layout | seeds | 1x | 16x, as trained | 16x, window |", "|---|---|---|---|---|"]
    for group in sorted(groups, key=lambda group: cell(group, *COLUMNS["1x"]).loss):
        cells = [group.evaluations[0].mechanism, str(len(group.evaluations)), *shown_losses(group)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def minus_softmax(by, names) -> list[str]:
    """A table of the rows in ``names`` less Softmax, paired by document and seed."""
    lines = [f"| minus Softmax | {' | '.join(PAIRS)} |", "|---|" + "---|" * len(PAIRS)]
    for label, name in names.items():
        found = (cell(by[label], *ours).minus(cell(by["Softmax"], *other)) for ours, other in PAIRS.values())
        lines.append(f"| {name} | {' | '.join(map(said, found))} |")
    return lines


def test_what_is_said_of_laser_is_what_the_claims_found():
    text = " ".join(README.split())

    def page(claim: str) -> str:
        return (ROOT / f"docs/results/claims/laser-{claim}.md").read_text()

    for claim, rows, seeds in (
        ("vit", ("vit_softmax", "vit_laser"), "six"),
        ("bert", ("bert_softmax", "bert_laser"), "three"),
    ):
        assert "**Verdict: holds** (2 holds)" in page(claim)
        found = [re.search(rf"{row} 1x, error rate ([\d.]+)", page(claim)) for row in rows]
        before, after = (f"{100 * float(one[1]):.1f} %" for one in found if one)
        assert f"from {before} to {after} ({seeds} seeds)" in text
    smaller = (ROOT / "docs/results/claims/softplus-table-3.md").read_text()
    found = re.search(r"\| holds \| Softplus has a lower loss than the exponential \| .*: -(\S+ ± \S+) \|", smaller)
    assert found
    assert f"it is below by {found[1]} (six seeds)" in text
    claims = (ROOT / "docs/claims.md").read_text()
    best_of_rates = re.search(r"ViT, softmax \|.*?\| (\S+ %) .*\n.*ViT, LASER .*\| (\S+ %) ±", claims)
    assert best_of_rates
    assert f"the ViT's is {best_of_rates[2]} against {best_of_rates[1]}, and the BERT's difference is" in text
    lowered = [
        re.search(rf"\| holds \| {says} .*: -(\S+ ± \S+) \|", page(claim))
        for claim, says in (
            ("differential", "LASER lowers the loss of differential attention"),
            ("qk-norm", "With QK-norm, LASER has a lower loss than standard attention"),
        )
    ]
    differential, qk_norm = (found[1] for found in lowered if found)
    assert f"attention by {differential}, of one with QK-norm by {qk_norm} (three seeds each)" in text
    for layers in (2, 3, 4, 6):
        assert re.search(rf"\| inconclusive \| With {layers} layers LASER has a lower loss .*: -\S+ ± ", page("depths"))
    one_layer = re.search(r"\| holds \| With 1 layer LASER has a lower loss .*: -(\S+ ± \S+) \|", page("depths"))
    assert one_layer
    assert f"with one layer by {one_layer[1]}" in text
    for claim in ("steps", "lamb", "conformer", "classification"):
        assert "**Verdict: inconclusive**" in page(claim)
    assert re.search(r"right: \+[\d.]+%", page("classification")), "ahead"
    assert re.search(r"mistakes fewer words .*: \+[\d.]+ ±", page("conformer")), "behind"


def larger_table() -> str:
    return scale_table("layouts-larger")


def test_the_lead_of_the_layout_in_the_larger_model_is_the_measured_one():
    groups = {group.label: group for group in read(ROOT / "docs/results/layouts-larger/results.json").groups}
    text = " ".join(LAYOUTS.split())

    def against(rival: str, at: float) -> str:
        found = cell(groups[rival], at, "as trained").minus(cell(groups["hybrid-half-rope"], at, "as trained"))
        return f"{abs(found.value):.3f} ± {found.standard_error:.3f}{'' if found.sure else ', inconclusive'}"

    assert f"Cosine softmax is {against('local-cosine', 16.0)} above it there" in text
    ours, nope = (cell(groups[label], 16.0, "as trained").values for label in ("hybrid-half-rope", "local-nope"))
    seeds = ", ".join(f"{other - own:.3f}" for own, other in zip(ours, nope, strict=True))
    assert f"in the global layers {against('local-nope', 16.0)} (the three seeds: {seeds})" in text
    assert f"At 1x LSSAR costs {against('local-cosine', 1.0)}" in text
    found = cell(groups["hybrid-half-rope"], 1.0, "as trained").minus(cell(groups["local-nope"], 1.0, "as trained"))
    assert f"inconclusive there ({found.value:.3f} ± {found.standard_error:.3f})" in text
    assert not found.sure
    window = cell(groups["hybrid-half-rope"], 16.0, "as trained").minus(cell(groups["Softmax"], 16.0, "window 1x"))
    assert f"behind windowed softmax by {window.value:.3f} ± {window.standard_error:.3f}." in text


def bpe_table() -> str:
    return scale_table("layouts-bpe")


def test_the_lead_of_global_cosine_softmax_is_the_measured_one():
    """The mean of all trainings' differences from Softmax of the same seed, and its standard
    error.
    """
    lead = {"1x": [], "16x": []}
    for title in ("layouts-slow-start", "layouts-larger", "layouts-bpe-tuned"):
        groups = {
            group.evaluations[0].mechanism: group
            for group in read(ROOT / "docs/results" / title / "results.json").groups
        }
        for at, place in (("1x", (1.0, "as trained")), ("16x", (16.0, "window 1x"))):
            ours, plain = (
                {one.seed: loss for one, loss in zip(group.evaluations, cell(group, *place).values, strict=True)}
                for group in (groups["softmax[64] / cosine_log_n"], groups["softmax"])
            )
            lead[at] += [plain[seed] - loss for seed, loss in ours.items()]
    said = {at: f"{statistics.mean(x):.3f} ± {statistics.stdev(x) / len(x) ** 0.5:.3f}" for at, x in lead.items()}
    text = " ".join(LAYOUTS.split())
    assert f"Over the {len(lead['1x'])} trainings of this page's three sizes" in text
    assert (
        f"its loss is lower by {said['1x']} at 1x. At 16 times the length, both with the window, "
        f"it is lower by {said['16x']}." in text
    )


def test_softmax_without_rope_costs_what_was_measured():
    by = {group.label: group for group in read(SLOW / "results.json").groups}

    def loss(name, column):
        return cell(by[name], column, "as trained")

    found = [loss("local-nope", 1.0).minus(loss("Softmax", 1.0))]
    found += [loss("local-nope", column).minus(loss("hybrid-half-rope", column)) for column in (1.0, 16.0)]
    assert all(one.sure for one in found)
    assert not loss("local-nope", 16.0).minus(loss("local-nope", 1.0)).sure, "it is flat"
    price, here, far = (f"{one.value:.3f} ± {one.standard_error:.3f}" for one in found)
    page = " ".join(LAYOUTS.split())
    assert f"Its loss (four seeds) is {price} above Softmax's at the training length." in page
    assert f"LSSAR is {here} below it there, and {far} below it at 16 times the length." in page


def test_the_rates_of_softmax_without_rope_on_tokens_are_the_measured_ones():
    def loss(study, run):
        groups = read(ROOT / "docs/results" / study / "results.json").groups
        (found,) = (one for group in groups for one in group.evaluations if one.run == run)
        return f"{next(row.loss for row in found.rows if row.length == 128):.3f}"

    sweep = "learning-rates-bpe"
    low, high = loss(sweep, "local-nope-s0"), loss(sweep, "local-nope-four-times-s0")
    said = f"the loss is {low} at 2e-3, {loss('layouts-bpe-tuned', 'local-nope-s0')} at 4e-3 and {high} at 8e-3"
    assert said in " ".join(LAYOUTS.split())


def test_the_price_on_tokens_is_the_measured_one():
    """LSSAR's layout less Softmax of the same seed, on tokens of the BPE at 4e-3."""
    report = read(ROOT / "docs/results/layouts-bpe-tuned/results.json")
    groups = {group.evaluations[0].mechanism: group for group in report.groups}
    said = []
    for setting, at in (("as trained", 1.0), ("window 1x", 16.0)):
        ours = cell(groups["softmax[64] / sharpened(lssa, 31) rope 0.5"], at, "as trained").values
        plain = cell(groups["softmax"], at, setting).values
        more = [loss - other for loss, other in zip(ours, plain, strict=True)]
        said.append(f"{statistics.mean(more):.3f} ± {statistics.stdev(more) / len(more) ** 0.5:.3f}")
    text = " ".join(LAYOUTS.split())
    assert f"costs {said[0]} nats per token at the training length" in text
    assert f"it is behind windowed Softmax by {said[1]}." in text
    ours = cell(groups["softmax[64] / sharpened(lssa, 31) rope 0.5"], 16.0, "as trained")
    rivals = [cell(groups[f"softmax[64] / {name}"], 16.0, "as trained") for name in ("softmax nope", "cosine_log_n")]
    found = [ours.minus(rival) for rival in rivals]
    assert not any(one.sure for one in found)
    nope, cosine = (f"{abs(one.value):.3f} ± {one.standard_error:.3f}" for one in found)
    assert f"differs from LSSAR by {nope}, cosine softmax with log N by {cosine}." in text


def test_what_repeats_far_back_is_the_measured_one():
    """The gain of windows of 16x over those of 1x, of the layout, which sees all keys."""
    found = read_as(Induction, ROOT / "docs/results/layouts-bpe/induction-hybrid-half-rope-s0.json")
    rows = {(row.length, row.window): {part.start: part.loss for part in row.by_distance} for row in found.rows}
    gain = {start: rows[128, None][start] - rows[2048, None][start] for start in rows[128, None]}
    text = " ".join(LAYOUTS.split())
    assert f"far back is lower by {gain[256]:.3f} (256 to 511 tokens) and {gain[512]:.3f} (512 to 1,023)" in text
    assert f"by {gain[0]:.3f} on tokens that repeat nothing" in text


def recall_table() -> str:
    """The table of recall of docs/layouts.md, from the committed study."""
    report = read_as(RecallReport, ROOT / "docs/results/recall-layouts/results.json")
    lines = [
        "| second layer | 1x | 4x, filler | 16x, filler | 64x, filler | 4x, pairs | 16x, pairs | 64x, pairs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in report.groups:
        found = {(point.at // 64, grown): point for grown in (False, True) for point in group.points(grown)}
        cells = []
        for key in ((1, False), (4, False), (16, False), (64, False), (4, True), (16, True), (64, True)):
            spread = f" ± {found[key].error:.2f}" if len(group.entries) > 1 else ""
            cells.append(f"{found[key].value:.2f}{spread}")
        lines.append(f"| {group.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


PASSKEY = {
    "Softmax": "softmax", "window": "softmax, evaluated with a window of 128", "cosine_log_n": "cosine softmax, log N",
    "LSSAR": "LSSAR, p = 15", "softmax-nope": "softmax, window of 16; then softmax without RoPE",
    "lssar-nope": "softmax, window of 16; then LSSAR without RoPE",
}  # fmt: skip


def test_recall_in_the_layout_with_lssa_is_the_measured_one():
    groups = read_as(RecallReport, ROOT / "docs/results/recall-lssa/results.json").groups
    (entries,) = (group.entries for group in groups if len(group.entries) == 3)
    far = [f"{row.accuracy:.2f}" for one in entries for row in one.recall.shown if (row.length, row.grown) == (1024, 0)]
    assert [one.info.name for one in entries] == [f"lssa-hybrid-head-s{seed}" for seed in range(3)]
    assert "filler seeds 0, 1 and 2 find {}, {} and {}.".format(*far) in " ".join(LAYOUTS.split())
    text = "in two trainings of three: it finds {:.0f} and {:.0f} %".format(*(100 * float(far[i]) for i in (0, 2)))
    assert text in " ".join(README.split())


def test_who_blurs_is_the_measured_one():
    text = " ".join(LAYOUTS.split())

    def share(run, length, grown=False):
        found = read_as(Recall, ROOT / "docs/results/recall-far" / f"{run}-s0.json")
        (row,) = (one for one in found.rows if (one.length, one.grown, one.sequences) == (length, grown, 16))
        return f"{row.accuracy:.2f}"

    far = [{share(run, 64 * n) for run in ("softmax", "ssmax")} for n in (64, 256)]
    assert far == [{"1.00"}, {"0.99"}]
    assert "find 1.00 of the keys at 64 times the length among filler and 0.99 at 256 times" in text
    assert f"they find {share('softmax', 4096, True)} and {share('ssmax', 4096, True)}." in text
    assert share("cosine", 64) == "0.21"
    assert all(float(share(run, 64)) < 0.25 for run in ("cosine", "lssar", "lssar15"))


def passkey_table() -> str:
    """The table of passkeys of docs/layouts.md: every seed."""
    report = read_as(RecallReport, ROOT / "docs/results/passkey/results.json")
    lines = ["| the two layers | 1x | 2x | 4x | 8x | 16x |", "|---|---|---|---|---|---|"]
    for group in report.groups:
        runs = [{row.length // 128: row.accuracy for row in entry.recall.shown} for entry in group.entries]
        assert len(runs) == 3
        cells = [", ".join(f"{run[times]:.2f}" for run in runs) for times in (1, 2, 4, 8, 16)]
        lines.append(f"| {PASSKEY[group.label]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def layout_recall_table() -> str:
    """Every training of the demo's layout on recall, with a head of two tokens."""
    report = read_as(RecallReport, ROOT / "docs/results/recall-demo/results.json")
    columns = ((64, False), (256, False), (1024, False), (1024, True))
    lines = ["| global layers | 1x | 4x, filler | 16x, filler | 16x, pairs |", "|---|---|---|---|---|"]
    for label in ("cosine", "cosine-scale-2", "lssar", "softmax"):
        (group,) = (one for one in report.groups if one.label == label)
        runs = [{(row.length, row.grown): row.accuracy for row in one.recall.shown} for one in group.entries]
        cells = [", ".join(f"{run[at]:.2f}" for run in runs) for at in columns]
        name = group.entries[0].info.mechanism.split(" / ")[-1] + ", learned scale from 2" * (label == "cosine-scale-2")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


TURNED = {
    "third": "global LSSAR with a third of RoPE",
    "all-beside-none": "with all of it in one head, none in the other",
    "half-below-none": "with half of it in layer 1, none in layer 3",
}
"""The rows of `loss-and-recall`."""


def rates_table(study: str, sweep: str, rates: dict[str, str], rows: Sequence[str]) -> str:
    """Losses at 1x by learning rate: of one seed, and at the study's own rate the mean of its.

    Args:
        study, sweep: folders of results.
        rates: the learning rates by the ending of a row's name; "" is the study's own.
        rows: names in the sweep.
    """
    own = {
        evaluation.run.rpartition("-s")[0]: cell(group, 1.0, "as trained").loss
        for group in read(ROOT / "docs/results" / study / "results.json").groups
        for evaluation in group.evaluations
    }
    swept = {
        evaluation.run.rpartition("-s")[0]: cell(group, 1.0, "as trained").loss
        for group in read(ROOT / "docs/results" / sweep / "results.json").groups
        for evaluation in group.evaluations
    }
    lines = [f"| loss at 1x | {' | '.join(rates.values())} |", "|---" * (len(rates) + 1) + "|"]
    for row in rows:
        losses = [swept[f"{row}-{ending}"] if ending else own[row] for ending in rates]
        label = {"softmax": "Softmax", "lssar": "LSSAR", **TURNED}.get(row, row)
        lines.append(f"| {NAMES.get(label, label)} | {' | '.join(f'{loss:.3f}' for loss in losses)} |")
    return "\n".join(lines)


def demo_rates() -> str:
    rows = ("softmax", "local-cosine", "hybrid-half-rope", "hybrid", "local-softmax", "local-nope", "lssar")
    return rates_table(
        "layouts-slow-start", "learning-rates-slow-start", {"half": "1e-3", "": "2e-3", "twice": "4e-3"}, rows
    )


def recall_rates() -> str:
    rows = ("third", "all-beside-none", "half-below-none")
    return rates_table(
        "loss-and-recall", "learning-rates-slow-start", {"half": "1e-3", "": "2e-3", "twice": "4e-3"}, rows
    )


def larger_rates() -> str:
    rates = {"half": "5e-4", "": "1e-3", "twice": "2e-3"}
    rows = ("softmax", "local-cosine", "hybrid-half-rope", "local-nope")
    return rates_table("layouts-larger", "learning-rates-larger", rates, rows)


def bpe_rates() -> str:
    rates = {"half": "1e-3", "": "2e-3", "twice": "4e-3", "four-times": "8e-3"}
    return rates_table("layouts-bpe", "learning-rates-bpe", rates, ("softmax", "local-cosine", "hybrid-half-rope"))


def bpe_tuned_table() -> str:
    return scale_table("layouts-bpe-tuned")


def sinks_table() -> str:
    """Softmax by what is done to it at evaluation."""
    (group,) = read(ROOT / "docs/results/rope-and-sinks/results.json").groups
    lines = ["| Softmax | 1x | 2x | 4x | 8x | 16x |", "|---|---|---|---|---|---|"]
    for setting in ("as trained", "dynamic NTK", "YaRN", "window 1x", "window 1x (4 sinks)"):
        cells = [cell(group, float(2**n), setting) for n in range(5)]
        lines.append(f"| {setting} | {' | '.join(f'{one.loss:.3f} ± {one.spread:.3f}' for one in cells)} |")
    return "\n".join(lines)


def test_what_yarn_and_sinks_change_is_the_measured_one():
    (group,) = read(ROOT / "docs/results/rope-and-sinks/results.json").groups
    at = {
        name: [cell(group, float(2**n), name).loss for n in range(5)]
        for name in ("as trained", "dynamic NTK", "YaRN", "window 1x", "window 1x (4 sinks)")
    }
    assert at["dynamic NTK"][1] < at["YaRN"][1]
    assert all(yarn < ntk for yarn, ntk in zip(at["YaRN"][2:], at["dynamic NTK"][2:], strict=True))
    for name in ("as trained", "dynamic NTK", "YaRN"):
        assert at[name] == sorted(at[name]), name
    assert at["window 1x"] == sorted(at["window 1x"], reverse=True)
    moved = [abs(a - b) for a, b in zip(at["window 1x"], at["window 1x (4 sinks)"], strict=True)]
    assert max(moved) < 0.001
    assert "Four sinks beside the window change the loss by less than 0.001" in " ".join(LAYOUTS.split())


def test_the_numbers_in_lambs_note_are_the_measured_ones():
    def losses(groups) -> list[str]:
        return [f"{cell(group, 1.0, 'as trained').loss:.3f}" for group in groups]

    claims = ROOT / "docs/results/claims"
    note = " ".join((claims / "laser-lamb.md").read_text().split())
    swept = {group.evaluations[0].run.rpartition("-s")[0]: group for group in read(
        ROOT / "docs/results/lamb-learning-rates/results.json"
    ).groups}  # fmt: skip
    ours = read_claim(claims / "laser-lamb/toy/results.json")
    rows = [ours.group("softmax_lamb"), ours.group("laser_lamb")]
    half, twice = ([swept[f"{row}-{rate}"] for row in ("softmax", "laser")] for rate in ("half", "twice"))
    assert "{} and {} at 1e-2, {} and {} at 4e-2".format(*losses([*half, *twice])) in note
    assert all(best < min(a, b) for best, a, b in zip(losses(rows), losses(half), losses(twice), strict=True))
    adam = read_claim(claims / "laser-classification/toy/results.json")
    softmax, laser = adam.group("softmax"), adam.group("laser")
    lead = cell(laser, 1.0, "as trained").minus(cell(softmax, 1.0, "as trained"))
    said = "softmax has {} with AdamW and LASER {}, a difference of ".format(*losses([softmax, laser]))
    assert f"{said}{lead.value:+.3f} ± {lead.standard_error:.3f}." in note


def differences_table() -> str:
    """Each row of README's table less Softmax, paired by document and seed."""
    by = {group.label: group for group in read(RESULT / "results.json").groups}
    return "\n".join(minus_softmax(by, {label: NAMES[label] for label in NAMES if label in by and label != "Softmax"}))


def minus_rivals(by, names, rivals) -> list[str]:
    """A table of the rows in ``names`` less each of ``rivals``, paired by document and seed."""
    lines = ["| | 1x | 16x, both with the window |", "|---|---|---|"]
    for ours, name in names.items():
        for label, rival in rivals.items():
            found = [said(cell(by[ours], *COLUMNS[at]).minus(cell(by[label], *COLUMNS[at]))) for at in BOTH_ALIKE]
            lines.append(f"| {name}, minus {rival} | {' | '.join(found)} |")
    return lines


def same_layout() -> str:
    """LSSA in the local layers less rivals in the same layout."""
    by = {group.label: group for group in read(RESULT / "results.json").groups}
    ours, rivals = ("lssa-local", "lssa-hybrid"), ("local-softmax", "cosine-local")
    return "\n".join(minus_rivals(by, {row: NAMES[row] for row in ours}, {row: NAMES[row] for row in rivals}))


def first_seed(study: str) -> dict[str, str]:
    """The loss of seed 0 at 1x, by row."""
    runs = read(ROOT / "docs/results" / study / "results.json").evaluations
    return {one.run.removesuffix("-s0"): f"{one.row(128).loss:.3f}" for one in runs if one.seed == 0}


def swept_rates(rates: Sequence[str], rows: dict[str, Sequence[str]]) -> str:
    """Losses of seed 0 at 1x, by row and learning rate."""
    lines = [f"| loss at 1x | {' | '.join(rates)} |", "|---" * (len(rates) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def new_rates() -> str:
    swept, own, rows = first_seed("learning-rates"), first_seed("layouts"), {}
    for row in ("softmax", "lssa-hybrid", "lssa-local", "local-cosine", "hybrid-half-rope", "local-nope", "lssar"):
        label = {"softmax": "Softmax", "lssar": "LSSAR"}.get(row, row)
        half, same, twice = (swept.get(f"{row}{ending}", "") for ending in ("-half", "", "-four-times"))
        rows[NAMES.get(label, label)] = [half, same, own[row], twice]
    return swept_rates(("1e-3", "2e-3", "4e-3", "8e-3"), rows)


def larger_new_rates() -> str:
    swept, own = first_seed("larger-rates"), first_seed("larger")
    names = {"softmax": "Softmax", "lssa-local": "`demo-lssa-local`", "lssa-hybrid": "`demo-hybrid`"}
    rows = {name: [swept[f"{row}-half"], own[row], swept[f"{row}-twice"]] for row, name in names.items()}
    return swept_rates(("1e-3", "2e-3", "4e-3"), rows)


def slow_table() -> str:
    return scale_table("layouts-slow-start")


def beside_softmax(*folders: str) -> str:
    """Softmax and the layouts with LSSA at another scale, and their differences."""
    by = {
        group.label: group for name in folders for group in read(ROOT / "docs/results" / name / "results.json").groups
    }
    layouts = {"lssa-local": "`demo-lssa-local`", "lssa-hybrid": "`demo-hybrid`"}
    rival = {"local-softmax": "softmax in the same layout"}
    lines = [f"| | seeds | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for label, name in ({"Softmax": "Softmax"} | rival | layouts).items():
        lines.append(f"| {' | '.join([name, str(len(by[label].evaluations)), *shown_losses(by[label])])} |")
    return "\n".join([*lines, "", *minus_softmax(by, rival | layouts), "", *minus_rivals(by, layouts, rival)])


def bpe_lssa() -> str:
    return beside_softmax("layouts-bpe-tuned", "bpe")


def larger_lssa() -> str:
    return beside_softmax("larger")


def lssa_tiled() -> str:
    """`demo-hybrid` on two roundings, beside Softmax."""
    groups = {
        name: {group.label: group for group in read(ROOT / "docs/results" / folder / "results.json").groups}
        for name, folder in (("CPU kernels", "layouts"), ("tiled backend", "layouts-lssa-tiled"))
    }
    columns = {"1x": COLUMNS["1x"], "4x": (4.0, "as trained")} | COLUMNS
    lines = [f"| `demo-hybrid`, eight seeds | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    lines += [f"| {name} | {' | '.join(shown_losses(by['lssa-hybrid'], columns))} |" for name, by in groups.items()]
    found = {name: by["lssa-hybrid"] for name, by in groups.items()} | {"Softmax": groups["CPU kernels"]["Softmax"]}
    return "\n".join([*lines, "", *minus_softmax(found, {name: name for name in groups})])


def lssa_recall() -> str:
    """Loss on text and recall of the layouts with LSSA: seed 0, recipes that differ in the data and
    in what half the training length is.
    """
    rows = {
        "lssa-hybrid": "`demo-hybrid`",
        "lssa-hybrid-head": "`demo-hybrid` that recalls",
        "lssa-local-head": "the same with LSSA in the global layers",
    }
    losses = {
        one.run: one
        for name in ("layouts", "layout-candidates")
        for one in read(ROOT / "docs/results" / name / "results.json").evaluations
    }
    recalls = {
        entry.info.name: {(row.length, row.grown): row.accuracy for row in entry.recall.shown}
        for group in read_as(RecallReport, ROOT / "docs/results/recall-lssa/results.json").groups
        for entry in group.entries
    }
    lines = [
        "| seed 0 | loss, 1x | loss, 16x | loss, 16x, window | recall, 1x | 16x, filler | 16x, pairs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, label in rows.items():
        one, found = losses[f"{row}-s0"], recalls[f"{row}-s0"]
        loss = [one.row(128).loss, one.row(2048).loss, one.row(2048, Setting(window=128)).loss]
        right = [found[at] for at in ((64, False), (1024, False), (1024, True))]
        cells = [*(f"{x:.3f}" for x in loss), *(f"{x:.2f}" for x in right)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_single_numbers_about_lssa_are_the_measured_ones():
    def loss(folder, run, length=128, setting=AS_TRAINED):
        (found,) = (one for one in read(ROOT / "docs/results" / folder / "results.json").evaluations if one.run == run)
        return found.row(length, setting).loss

    text, readme = " ".join(LAYOUTS.split()), " ".join(README.split())
    claims = " ".join((ROOT / "docs/claims.md").read_text().split())
    window = Setting(window=128)
    softmax = loss("layouts", "softmax-s0"), loss("layouts", "softmax-s0", 2048, window)
    assert f"loss below Softmax's ({softmax[0]:.3f} with this seed)" in text
    assert f"above windowed Softmax's {softmax[1]:.3f}." in text
    more = [
        loss("learning-rates", f"{row}-four-times-s0") - loss("layouts", f"{row}-s0")
        for row in ("softmax", "lssa-local", "lssa-hybrid")
    ]
    more.append(loss("layout-candidates", "lssa-8-s0") - loss("layouts", "lssa-s0"))
    assert (
        "At 8e-3 the loss of Softmax is higher by {:.3f} than at 4e-3, that of LSSA in a layout by {:.3f}, that of "
        "`demo-hybrid` by {:.3f}, that of LSSA in every layer by {:.3f}.".format(*more)
    ) in text
    for ending, folder in (("", "learning-rates"), ("", "layouts"), ("-four-times", "learning-rates")):
        plain = loss(folder, f"softmax{ending}-s0")
        assert max(loss(folder, f"{row}{ending}-s0") for row in ("lssa-local", "lssa-hybrid")) < plain
    for row in ("softmax", "lssa-local", "lssa-hybrid"):
        own = loss("layouts", f"{row}-s0")
        assert own < min(loss("learning-rates", f"{row}{ending}-s0") for ending in ("", "-four-times")), row
    rise = loss("layouts", "lssa-hybrid-s1", 2048) - loss("layouts", "lssa-hybrid-s1", 1024)
    assert f"with seed 1 by {rise:.3f}" in text

    for seed in range(5):
        for at in ((128, AS_TRAINED), (2048, window)):
            assert loss("larger", f"lssa-local-s{seed}", *at) < loss("larger", f"softmax-s{seed}", *at)
    assert all(loss("larger", f"lssa-hybrid-s{seed}") < loss("larger", f"softmax-s{seed}") for seed in range(5))
    by = {
        group.label: cell(group, 1.0, "as trained") for group in read(ROOT / "docs/results/larger/results.json").groups
    }
    lead = by["Softmax"].minus(by["lssa-local"])
    assert lead.sure
    by_how_much = f"{lead.value:.3f} ± {lead.standard_error:.3f}"
    assert f"LSSA in a layout is below Softmax with each of five seeds, by {by_how_much}, and" in readme
    layout, same = by["lssa-local"].minus(by["local-softmax"]), by["local-softmax"].minus(by["Softmax"])
    assert layout.sure
    assert not same.sure
    assert not any(by["lssa-hybrid"].minus(by[label]).sure for label in ("Softmax", "local-softmax"))
    found = f"{-layout.value:.3f} ± {layout.standard_error:.3f}"
    assert f"below softmax in the same layout by {found}." in readme
    assert f"by {found} at 1x. What the layout gives" in text
    assert f"What the layout gives alone, {said(same)[:14]}, is inconclusive." in text
    first = loss("larger", "softmax-s0") - loss("larger", "lssa-local-s0")
    assert f"LSSA's lead was {first:.3f} at 1x, with five seeds it is {lead.value:.3f}." in text
    by = {
        group.label: cell(group, 1.0, "as trained")
        for folder in ("layouts-bpe-tuned", "bpe")
        for group in read(ROOT / "docs/results" / folder / "results.json").groups
    }
    assert not any(by["lssa-local"].minus(by[label]).sure for label in ("Softmax", "local-softmax"))
    behind = by["lssa-hybrid"].minus(by["local-softmax"])
    assert behind.sure
    assert f"LSSAR behind it by {behind.value:.3f} ± {behind.standard_error:.3f}" in readme
    plain = loss("layouts-bpe-tuned", "softmax-s0")
    rates = [loss("learning-rates-bpe", "lssa-local-half-s0"), loss("bpe", "lssa-local-s0")]
    rates.append(loss("learning-rates-bpe", "lssa-local-twice-s0"))
    assert "is {:.3f} at 2e-3, {:.3f} at 4e-3 and {:.3f} at 8e-3".format(*rates) in text
    start = f"Softmax has [{loss('bpe-demo-start', 'softmax-s0'):.3f}](results/bpe-demo-start/results.json)"
    assert f"{start} in place of {plain:.3f} here" in text

    demo = loss("demo-slow-start", "demo-lssa"), loss("demo-slow-start", "demo-softmax")
    assert "LSSA was behind Softmax, {:.3f} against {:.3f}".format(*demo) in readme
    toy = {row: loss("toy-start", f"{row}-s0", 64) for row in ("softmax", "softmax-4", "softmax-8", "lssa", "lssa-4")}
    toy |= {row: loss("toy-start", f"{row}-s0", 64) for row in ("lssar", "lssar-4", "lssar-8")}
    shown = {row: f"{value:.3f}" for row, value in toy.items()}
    assert f"is {shown['softmax']} at 2e-3, {shown['softmax-4']} at 4e-3 and {shown['softmax-8']} at 8e-3" in claims
    assert f"LSSA's is {shown['lssa']} at 2e-3 and {shown['lssa-4']} at 4e-3" in claims
    assert f"LSSAR's is {shown['lssar']}, {shown['lssar-4']} and {shown['lssar-8']}" in claims


def layouts_table() -> str:
    return scale_table("layouts")


TABLES = {
    "layouts": layouts_table, "same_layout": same_layout, "bpe_lssa": bpe_lssa, "lssa_recall": lssa_recall,
    "larger_lssa": larger_lssa, "larger_new_rates": larger_new_rates, "lssa_tiled": lssa_tiled, "slow": slow_table,
    "differences": differences_table, "new_rates": new_rates,
    "trials": trials_table, "recall": recall_table, "both": both_table, "heads": heads_table, "larger": larger_table,
    "bpe": bpe_table, "layout_recall": layout_recall_table, "rates": demo_rates, "larger_rates": larger_rates,
    "bpe_rates": bpe_rates, "bpe_tuned": bpe_tuned_table, "recall_rates": recall_rates,
    "sinks": sinks_table, "passkey": passkey_table,
}  # fmt: skip


@pytest.mark.parametrize("mark", TABLES)
def test_the_tables_of_layouts_are_the_committed_ones(mark):
    shown = re.search(rf"<!-- {mark}:begin -->\n(.*?)\n?<!-- {mark}:end -->", LAYOUTS, re.DOTALL)
    assert shown is not None
    assert shown[1] == TABLES[mark](), f"docs/layouts.md should show:\n{TABLES[mark]()}"


def test_the_head_that_lost_the_line_is_the_measured_one():
    text = " ".join(LAYOUTS.split())
    found = json.loads((ROOT / "docs/results/lost-line/why.json").read_text())
    losses = {key.removeprefix("clipped wavelengths: "): f"{loss:.3f}" for key, loss in found["loss at 16x"].items()}
    assert f"clipped the loss at 16 times the length is {losses['up to 128']}" in text
    assert f"all of them {losses['all']}, without {losses['none']}; with those above 512, {losses['above 512']}" in text
    assert f"held at 128, the loss is {losses['N at most 128']}" in text
    mass = {int(start): share for start, share in found["weight by distance"].items() if int(start) >= 128}
    assert sorted(sorted(mass, key=mass.__getitem__)[-3:]) == [744, 1000, 1504], "bins of eight"
    heads = read_as(HeadsMeasured, ROOT / "docs/results/heads/lssar-half-s0.json")
    base, whole = (mean(heads, row) for row in heads.rows[:2])
    row, gain = gains(heads)[0]
    said = f"head {row.head} of layer {row.layer} makes {gain.value:.3f} of the {(base - whole).value:.3f} that"
    assert said in text
    heads = read_as(HeadsMeasured, ROOT / "docs/results/heads/lssar-s0.json")
    base, whole = (mean(heads, row) for row in heads.rows[:2])
    (one, most), (two, less) = gains(heads)[:2]
    assert (
        f"of {(base - whole).value:.3f}, the window of head {one.head} of layer {one.layer} alone takes off "
        f"{most.value:.3f} ± {most.standard_error:.3f}, and that of head {two.head} of layer {two.layer} alone "
        f"{less.value:.3f} ± {less.standard_error:.3f}." in text
    )


def test_what_the_start_costs_is_the_measured_one():
    def loss(folder, run):
        (found,) = (one for one in read(ROOT / "docs/results" / folder / "results.json").evaluations if one.run == run)
        return found.row(128).loss

    slow, start = loss("layouts-slow-start", "softmax-s0"), loss("learning-rates", "softmax-s0")
    tuned, cosine = loss("learning-rates", "softmax-twice-s0"), loss("learning-rates", "local-cosine-s0")
    text = " ".join(LAYOUTS.split())
    assert f"loss of {slow:.3f} from 0.02, of {start:.3f} from 0.09, and of {tuned:.3f} from 0.09 at twice" in text
    assert f"At 2e-3 it is ahead of Softmax by {start - cosine:.3f} (seed 0)." in text
    assert loss("learning-rates", "local-cosine-twice-s0") > tuned


def test_what_is_said_of_the_layouts_holds_for_every_seed():
    by = {group.label: group for group in read(RESULT / "results.json").groups}
    text, readme = " ".join(LAYOUTS.split()), " ".join(README.split())

    def losses(label, at):
        return {one.seed: one.row(128 * at).loss for one in by[label].evaluations}

    def windowed(label, at=16):
        window = Setting(window=128)
        return {one.seed: one.row(128 * at, window).loss for one in by[label].evaluations}

    softmax = cell(by["Softmax"], 1.0, "as trained"), cell(by["Softmax"], 16.0, "window 1x")
    assert len(losses("lssa-local", 1)) == len(losses("lssa-hybrid", 1)) == len(losses("Softmax", 1)) == 8
    assert all(loss < losses("Softmax", 1)[seed] for seed, loss in losses("lssa-local", 1).items())
    assert all(loss < windowed("Softmax")[seed] for seed, loss in windowed("lssa-local").items())
    for at in ((1.0, "as trained"), (16.0, "window 1x")):
        assert not cell(by["lssa-local"], *at).minus(cell(by["softplus_l1"], *at)).sure
    laser = cell(by["LASER"], 1.0, "as trained").minus(softmax[0])
    assert not laser.sure
    assert not cell(by["LASER"], 16.0, "window 1x").minus(softmax[1]).sure
    assert (
        f"below Softmax by {-laser.value:.3f} ± {laser.standard_error:.3f} at the training length (four seeds, inc"
        in readme
    )
    for label in by.keys() - {"lssa-local", "softplus_l1"}:
        here = cell(by["lssa-local"], 1.0, "as trained").minus(cell(by[label], 1.0, "as trained"))
        assert here.sure is (label != "LASER"), label
        far = cell(by["lssa-local"], 16.0, "window 1x").minus(cell(by[label], 16.0, "window 1x"))
        assert far.sure is (label != "LSSA"), label
    for label in ("lssa-local", "lssa-hybrid"):
        assert cell(by[label], 1.0, "as trained").minus(softmax[0]).sure
        assert cell(by[label], 16.0, "window 1x").minus(softmax[1]).sure
    for label in ("local-softmax", "cosine-local", "hybrid-half-rope"):  # level with Softmax
        assert not cell(by[label], 1.0, "as trained").minus(softmax[0]).sure
    ours = losses("lssa-hybrid", 16)
    assert all(far < losses("lssa-hybrid", 1)[seed] for seed, far in ours.items()), "falls from 1x to 16x"
    for rival in by.keys() - {"lssa-hybrid"}:
        assert all(ours[seed] < loss for seed, loss in losses(rival, 16).items() if seed in ours), rival
    for label in by:
        assert all(loss < losses(label, 16)[seed] for seed, loss in windowed(label).items()), "no gain from far keys"
        if label not in ("lssa-hybrid", "hybrid-half-rope", "LSSAR"):
            assert all(loss > losses(label, 1)[seed] for seed, loss in losses(label, 16).items()), f"{label} rises"
    assert cell(by["lssa-hybrid"], 16.0, "as trained").minus(softmax[1]).sure
    rise = cell(by["LSSAR"], 16.0, "as trained").minus(cell(by["LSSAR"], 1.0, "as trained"))
    price = cell(by["LSSAR"], 1.0, "as trained").minus(softmax[0])
    assert f"costs {said(price)} at the training length." in text
    assert f"From there to 16 times the length the loss changes by {said(rise)}." in text
    most = max(losses("LSSAR", 16)[seed] - loss for seed, loss in losses("LSSAR", 1).items())
    assert f"Seed 0 rises by {most:.3f}." in text
    assert losses("LSSAR", 16)[0] - losses("LSSAR", 1)[0] == most
    found = cell(by["softplus_l1"], 1.0, "as trained").minus(softmax[0])
    assert found.sure
    assert f"is below Softmax by {-found.value:.3f} ± {found.standard_error:.3f} at the training length" in readme
    gain = cell(by["LSSA"], 1.0, "as trained").minus(cell(by["lssa-local"], 1.0, "as trained"))
    assert f"LSSA's loss by {gain.value:.3f} ± {gain.standard_error:.3f} at the training length" in text
    later = {
        name: replace(by[name], evaluations=by[name].evaluations[1:])
        for name in ("Softmax", "lssa-local", "lssa-hybrid")
    }
    assert not any(one.seed == 0 for group in later.values() for one in group.evaluations)
    leads = []
    for label in ("lssa-local", "lssa-hybrid"):
        for at, setting in ((1.0, "as trained"), (16.0, "window 1x")):
            found = cell(later["Softmax"], at, setting).minus(cell(later[label], at, setting))
            assert found.sure
            leads.append(f"{found.value:.3f} ± {found.standard_error:.3f}")
    found = cell(later["Softmax"], 16.0, "window 1x").minus(cell(later["lssa-hybrid"], 16.0, "as trained"))
    assert not found.sure
    leads.append(f"{found.value:.3f} ± {found.standard_error:.3f}")
    assert (
        "is below Softmax by {} at the training length, and by {} at 16 times the length, both with the window. The "
        "layout with LSSAR is below by {} and {}. As trained at 16 times the length it is below Softmax with the "
        "window by {}, which is then inconclusive.".format(*leads)
        in text
    )
    best_of_all = min((best(group, 16.0) for group in by.values()), key=lambda one: one.loss)
    assert (best_of_all.group.label, best_of_all.setting) == ("lssa-local", "window 1x")
    for label in ("local-nope", "LSSAR"):
        assert 0.02 < cell(by[label], 1.0, "as trained").minus(softmax[0]).value < 0.1


def test_the_other_lines_that_were_lost_are_the_measured_ones():
    text = " ".join(LAYOUTS.split())
    t6 = {one.run: one for one in read(ROOT / "docs/results/t6/results.json").evaluations}
    lost = {name: [t6[name].row(n).loss for n in (128, 2048)] for name in ("lssar4", "demo-t6-lssar", "t6k4")}
    assert "four heads of 32 the loss goes from {:.3f} to {:.3f}.".format(*lost["lssar4"]) in text
    assert all(lost[name][1] - lost[name][0] > 0.5 for name in ("demo-t6-lssar", "t6k4"))
    claim = read_claim(ROOT / "docs/results/claims/softplus-figure-1/toy/results.json")
    rises = [[run.evaluation.row(n).loss for n in (64, 1024)] for run in claim.of("lssar") if run.evaluation]
    worst = max(rises, key=lambda rise: rise[1] - rise[0])
    assert len(rises) == 8
    assert "with eight seeds: at most the loss goes from {:.3f} to {:.3f} (".format(*worst) in text


def test_recall_in_the_layout_of_the_demo_is_the_measured_one():
    groups = read_as(RecallReport, ROOT / "docs/results/recall-demo/results.json").groups
    by = {group.label: {point.at: f"{point.value:.2f}" for point in group.points(False)} for group in groups}
    short, single = by["half-short-head"], by["half"]
    text = " ".join(LAYOUTS.split())
    assert f"does not learn it within 1,500 steps ({single[64]} at 1x)" in text
    assert f"With a two-token window in one head of layer 0 it learns the task ({short[64]})." in text
    assert f"Accuracy falls to {short[256]} at 4x and {short[1024]} at 16x" in text
    learned = {group.label: sum(entry.recall.shown[0].accuracy > 0.9 for entry in group.entries) for group in groups}
    del learned["half"], learned["half-short-head"]
    assert learned == {"cosine": 3, "cosine-scale-2": 0, "lssar": 1, "softmax": 0}
    assert f"with each of three seeds** ({by['cosine'][1024]} at 16x), LSSAR with one of three" in text


def test_what_is_said_of_recall_holds_for_every_seed():
    groups = read_as(RecallReport, ROOT / "docs/results/recall-layouts/results.json").groups
    runs = {g.label: [{(r.length, r.grown): r.accuracy for r in e.recall.shown} for e in g.entries] for g in groups}
    assert all(len(seeds) == 3 for seeds in runs.values())
    layouts = " ".join(LAYOUTS.split())

    def mean_of(label: str, length: int, grown: bool = False) -> float:
        return statistics.mean(seed[length, grown] for seed in runs[label])

    learned = {label: all(seed[64, False] > 0.99 for seed in seeds) for label, seeds in runs.items()}
    short = [label for label in runs if label.endswith("-short-rope")]
    assert {label for label in short if not learned[label]} == {"lssa-short-rope", "lssar-3-short-rope"}
    for label in [label for label in short if learned[label]] + ["lssar-nope"]:
        assert all(seed[64 * n, False] > 0.99 for seed in runs[label] for n in (1, 4, 16, 64)), label
    softmax = [seed[4096, True] for seed in runs["softmax-short-rope"]]
    others = {
        "cosine-short-rope": "cosine softmax", "ssmax-short-rope": "SSMax", "lssar-short-rope": "LSSAR with p = 31",
        "laser-short-rope": "LASER", "lssar-7-short-rope": "LSSAR with p = 7",
    }  # fmt: skip
    assert set(others) == {label for label in short if learned[label]} - {"softmax-short-rope"}
    assert all(seed[4096, True] > below for label in others for seed, below in zip(runs[label], softmax, strict=True))
    said = ", ".join(f"{name} finds {mean_of(label, 4096, True):.2f}" for label, name in others.items())
    assert "It finds {:.2f}, {:.2f} and {:.2f}, with its three seeds.".format(*softmax) in layouts
    assert f"above it with each seed: {said}." in layouts
    plateau = {f"{seed[64, False]:.2f}" for seed in runs["lssa-short-rope"]}
    assert f"({min(plateau)} to {max(plateau)} at 1x)" in layouts
    (of_three,) = (seed for seed in runs["lssar-3-short-rope"] if seed[64, False] > 0.99)
    assert f"That one finds {of_three[4096, True]:.2f} among 64 times as many pairs" in layouts
    without = [seed[64, False] > 0.99 for seed in runs["softmax-nope"]]
    assert f"Softmax without RoPE found them with {['zero', 'one', 'two'][sum(without)]}" in layouts
    assert all(seed[4096, False] > 0.99 for seed, ok in zip(runs["softmax-nope"], without, strict=True) if ok)
    text = " ".join(README.split())
    assert (
        f"LSSAR with all of RoPE finds {100 * mean_of('lssar', 1024):.0f} % of the keys at 16 times the length" in text
    )
    far = [f"{100 * mean_of(f'{label}-short-rope', 4096, True):.0f} %" for label in ("softmax", "cosine", "lssar")]
    assert "softmax finds {}, cosine softmax with log N {}, LSSAR {}.".format(*far) in text


def test_the_dip_of_half_of_rope_is_the_measured_one():
    groups = read_as(RecallReport, ROOT / "docs/results/recall-layouts/results.json").groups
    half = {group.label: group for group in groups}["lssar-half-rope"]
    at_four = {point.at: point.value for point in half.points(False)}[256]
    seeds = [row.accuracy for one in half.entries for row in one.recall.shown if (row.length, row.grown) == (256, 0)]
    said = "It dips to {:.2f} at 4 times the length ({:.2f}, {:.2f} and {:.2f} with seeds 0, 1 and 2)"
    assert said.format(at_four, *seeds) in " ".join(LAYOUTS.split())


def test_eight_trainings_on_the_tiled_backend_kept_their_line():
    (group,) = read(ROOT / "docs/results/layouts-tiled/results.json").groups
    first, last = (cell(group, at, "as trained") for at in (1.0, 16.0))
    assert len(group.evaluations) == 8
    assert max(one.row(2048).loss - one.row(128).loss for one in group.evaluations) < 0.01, "no line is lost"
    said = f"{first.loss:.3f} ± {first.spread:.3f} at 1x, {last.loss:.3f} ± {last.spread:.3f} at 16x"
    assert said in " ".join(LAYOUTS.split())


def test_one_training_of_demo_hybrid_rises_on_the_tiled_backend():
    (group,) = read(ROOT / "docs/results/layouts-lssa-tiled/results.json").groups
    rises = {one.seed: one.row(2048).loss - one.row(128).loss for one in group.evaluations}
    assert len(rises) == 8
    assert [seed for seed, rise in rises.items() if rise > 0] == [1]
    one = group.evaluations[1]
    shown = (one.row(128).loss, one.row(512).loss, one.row(2048).loss, one.row(2048, Setting(window=128)).loss)
    said = "the loss goes from {:.3f} at 1x to {:.3f} at 4x and {:.3f} at 16x. With its window it is {:.3f} there."
    assert one.seed == 1
    cpu = next(group for group in read(RESULT / "results.json").groups if group.label == "lssa-hybrid").evaluations
    assert max(cpu, key=lambda one: one.row(2048).loss - one.row(128).loss).seed == 1
    text = " ".join(LAYOUTS.split())
    assert said.format(*shown) in text
    heads = read_as(HeadsMeasured, ROOT / "docs/results/heads/lssa-hybrid-tiled-s1.json")
    base, whole = (mean(heads, row) for row in heads.rows[:2])
    row, gain = gains(heads)[0]
    said = "the window of head {} of layer {} takes off {:.3f} of the {:.3f} that the windows of all heads take off"
    assert said.format(row.head, row.layer, gain.value, (base - whole).value) in text


def test_the_heads_that_disturb_lssar_are_the_measured_ones():
    heads = read_as(HeadsMeasured, ROOT / "docs/results/heads/lssar-better-start-s0.json")
    base, whole = (mean(heads, row) for row in heads.rows[:2])
    (first, most), (second, more) = gains(heads)[:2]
    said = (
        f"Of the {(base - whole).value:.3f} that the windows of all its heads take off at 16 times the length, two "
        f"heads make most: the window of head {first.head} of layer {first.layer} takes off {most.value:.3f}, that of "
        f"head {second.head} of layer {second.layer} takes off {more.value:.3f}"
    )
    assert heads.length == 16 * heads.train_length
    assert said in " ".join(LAYOUTS.split())


def test_the_committed_trials_are_rows_of_the_study():
    found, near = study.load("layout-trials")
    rows = {one.name: one for one in study.recipes(found, near, [0])}
    trials = read(ROOT / "docs/results/layout-trials/results.json").runs
    assert [entry.info.name for entry in trials] == list(rows)
    for entry in trials:
        trained, row = Recipe.model_validate(tomllib.loads(entry.recipe)), rows[entry.info.name]
        assert (trained.model, trained.data, trained.train) == (row.model, row.data, row.train)


def test_the_power_under_a_window_is_the_measured_one():
    runs = {one.info.name: one.evaluation for one in read(ROOT / "docs/results/layout-trials/results.json").runs}
    runs |= {one.info.name: one.evaluation for one in read(SLOW / "results.json").runs}
    losses = []
    for run in ("p3-s0", "p7-s0", "hybrid-half-rope-s0"):
        (loss,) = (
            r.loss for r in runs[run].rows if r.length == 2048 and r.setting.window == 128 and not r.setting.sinks
        )
        losses.append(f"{loss:.3f}")
    said = f"{losses[0]} at 16 times the length with a power of 3, {losses[1]} with 7, {losses[2]} with 31"
    assert said in " ".join(LAYOUTS.split())


def test_the_spread_of_seeds_is_the_measured_one():
    runs = read(SLOW / "results.json").evaluations
    losses = sorted(one.row(128).loss for one in runs if one.run.startswith("hybrid-s"))
    assert f"`hybrid`: {losses[0]:.3f} to {losses[-1]:.3f} at 1x" in " ".join(LAYOUTS.split())


def test_the_size_of_caches_is_the_measured_one():
    folder = ROOT / "docs" / "results" / "layout-cache"
    hybrid, softmax = (json.loads((folder / f"{name}.json").read_text()) for name in ("hybrid", "softmax"))
    sizes = [f"{one['cache_bytes'] / one['tokens']:,.0f}" for one in (hybrid, softmax)]
    text = (
        f"At {hybrid['tokens']:,} tokens the cache of `demo-hybrid` takes {sizes[0]} bytes a token, "
        f"Softmax's {sizes[1]}"
    )
    assert hybrid["tokens"] == softmax["tokens"]
    assert text in " ".join(LAYOUTS.split())


def test_the_size_of_t6s_cache_is_the_measured_one():
    results = ROOT / "docs" / "results"
    t6, softmax = (
        json.loads((results / name).read_text()) for name in ("t6-cache/t6.json", "layout-cache/softmax.json")
    )
    sizes = [f"{one['cache_bytes'] / one['tokens']:,.0f} bytes a token" for one in (t6, softmax)]
    guide = " ".join((ROOT / "docs" / "transformers.md").read_text().split())
    assert f"takes {sizes[0]} ([results](results/t6-cache))" in guide
    assert f"demo's Softmax (2 heads of 64) takes {sizes[1].split()[0]}." in guide


def test_what_folding_lengths_into_factors_saves_is_the_measured():
    lines = json.loads((ROOT / "docs" / "results" / "t6-fold" / "results.json").read_text())["lines"]
    attention, step = (sorted(line[what][1] for line in lines) for what in ("attention", "step"))
    guide = " ".join((ROOT / "docs" / "transformers.md").read_text().split())
    assert f"Attention itself then takes {attention[0]:.2f} to {attention[-1]:.2f} of its time" in guide
    assert f"takes {step[0]:.2f} to {step[-1]:.2f} of its time" in guide


def test_the_losses_of_t6_are_the_measured_ones():
    report = read(ROOT / "docs" / "results" / "t6" / "results.json")
    t6, lssar, full_rank, gpt_neox = (
        {one.run: one.row(128).loss for one in report.evaluations}[run]
        for run in ("demo-t6", "demo-t6-lssar", "t6k4", "lssar4")
    )
    guide = " ".join((ROOT / "docs" / "transformers.md").read_text().split())
    assert (
        f"`demo-t6` {t6:.3f}, `demo-t6-lssar` {lssar:.3f}, and {full_rank:.3f} with `q_rank=4` and `k_rank=4`" in guide
    )
    assert f"and as many heads of that size has {gpt_neox:.3f} (" in guide
    assert f"T6 costs {lssar - t6:.2f} at" in " ".join((ROOT / "docs" / "limitations.md").read_text().split())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "results").glob("*/results.json")), ids=lambda p: p.parent.name
)
def test_every_committed_comparison_can_be_read(path):
    if "finding" in json.loads(path.read_text()):
        report = read(path)
        assert report.finding.sentence.startswith("At 1x (")
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

    from softfocus.lab.cli.app import app

    known = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"^softfocus (\w+)", README, re.MULTILINE)) <= known


def test_the_numbers_of_the_maps_are_the_committed_ones():
    softmax, lssar, layout = (
        one.row(2048) for one in read_inspections(ROOT / "docs/results/inspect/inspect.json").runs
    )
    said = " ".join(README.split())
    for text in (
        f"{lssar.zeros.mean:.1%} of LSSAR's visible weights are exactly zero, "
        f"and {softmax.zeros.mean:.1%} of Softmax's",
        f"of a row is {lssar.entropy.mean:.2f} nats, against {softmax.entropy.mean:.2f}",
        f"{lssar.beyond.mean:.1%} lies a training length away or farther, against {softmax.beyond.mean:.1%}",
        f"In the layout it is {layout.beyond.mean:.1%}",
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


def test_make_runs_this_tree_and_keeps_other_paths():
    makefile = (ROOT / "Makefile").read_text()
    shown = "include Makefile\nshown:\n\t@echo $$PYTHONPATH\n"
    environment = {**os.environ, "PYTHONPATH": "/one:/two"}
    words = ["make", "--no-print-directory", "-f", "-", "shown"]
    ran = subprocess.run(words, input=shown, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"{ROOT / 'src'}:/one:/two"
    assert all("$$PYTHONPATH" in line for line in makefile.splitlines() if re.search(r"\sPYTHONPATH=", line))


def test_what_contributors_and_workflows_are_told_to_run_is_there():
    files = [ROOT / "CONTRIBUTING.md", ROOT / ".github/workflows/ci.yml"]
    told = {target for file in files for target in re.findall(r"(?:^|run: )make ([a-z-]+)", file.read_text(), re.M)}
    there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"setup", "lint", "test", "wheel", "docs"} <= told <= there
