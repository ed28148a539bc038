"""docs/global-heads.md: what it says of 9 to 10 M parameters."""

import json
from statistics import fmean
from typing import Any

from softfocus.lab.report.points import cell
from softfocus.lab.run_folder.results import AS_TRAINED, Setting

from .committed import FAR, HERE, RESULTS, ROOT, WINDOWED, beside, by_label, by_seed, minus, runs
from .tables import COLUMNS, said, shown, shown_losses, table

TEXT = " ".join((ROOT / "docs/global-heads.md").read_text().split())
SMALL = {  # of 10 M parameters
    "Softmax": "Softmax in every layer",
    "laser-lssa-local": "LASER over LSSA, every other layer local",
    "global-heads": "**global heads without RoPE, the others local**",
}
TEXTS = {"small-gpu/bytes": "bytes", "small-gpu/longer": "BPE"}


def small() -> str:
    """Losses with 10 M parameters, and their differences from Softmax's, of the same seeds."""
    rows = []
    for study, text in TEXTS.items():
        by = by_label(study)
        for label, name in SMALL.items():
            if label in by:
                pairs = () if label == "Softmax" else ((HERE, HERE), (FAR, WINDOWED))
                leads = [said(beside(by, label, "Softmax", *pair)) for pair in pairs] or ["", ""]
                rows.append([text, name, str(len(by[label].evaluations)), *shown_losses(by[label]), *leads])
    against = "1x, minus Softmax", "16x, as trained, minus Softmax with the window"
    return table(["", "", "seeds", *COLUMNS, *against], rows)


def small_rates() -> str:
    """Seed 0 at three rates: the loss at the training length, and at 16 times it."""
    own, swept = runs("small-gpu/bytes"), runs("small-gpu/bytes-rates")
    rows = []
    for row, name in SMALL.items():
        label = "softmax" if row == "Softmax" else row
        if f"{label}-s0" in own:
            three = swept[f"{label}-1e3-s0"], own[f"{label}-s0"], swept[f"{label}-4e3-s0"]
            far = ("16x, window", Setting(window=512)) if row == "Softmax" else ("16x, as trained", AS_TRAINED)
            for length, (how, at) in ((512, ("1x", AS_TRAINED)), (8192, far)):
                rows.append([name, how, *(f"{one.row(length, at).loss:.3f}" for one in three)])
    return table(["bytes, seed 0", "", "1e-3", "2e-3", "4e-3"], rows)


def positions() -> str:
    """Losses at 16 times the length by position, of 10 M parameters: means over seeds."""
    rows, across = [], []
    for study, text in TEXTS.items():
        by = by_label(study)
        for label, at in (("Softmax", WINDOWED), ("global-heads", WINDOWED), ("global-heads", FAR)):
            buckets = list(zip(*(row.buckets for row in cell(by[label], *at).rows), strict=True))
            across = [f"{some[0].start:,} to {some[0].end - 1:,}" for some in buckets]
            name = "Softmax" if label == "Softmax" else "global heads"
            how = "as trained" if at == FAR else "window"
            rows.append([text, f"{name}, {how}", *(f"{fmean(one.loss for one in some):.3f}" for some in buckets)])
    return table(["", "by position of the token", *across], rows)


def test_what_is_said_of_ten_million_parameters_holds_for_every_seed():
    by = by_label("small-gpu/bytes")
    ours, softmax = "global-heads", "Softmax"
    for at, rival_at, text in (
        (HERE, HERE, "at the training length by {}, and"),
        (FAR, WINDOWED, "as trained, below Softmax with a window by {}."),
    ):
        lead = minus(by, ours, softmax, at, rival_at)
        mine, its = by_seed("small-gpu/bytes", ours, at), by_seed("small-gpu/bytes", softmax, rival_at)
        assert len(mine) == 3
        assert lead.sure
        assert all(loss < its[seed] for seed, loss in mine.items())
        assert text.format(shown(lead).removeprefix("-")) in TEXT
    bpe = by_label("small-gpu/longer")
    for at, rival_at in ((HERE, HERE), (FAR, WINDOWED)):
        mine = by_seed("small-gpu/longer", ours, at)[0]
        for rival in (softmax, "laser-lssa-local"):
            assert mine < min(by_seed("small-gpu/longer", rival, rival_at).values())
    own = [minus(one, ours, ours, FAR, WINDOWED) for one in (by, bpe)]
    assert all(one.sure and one.value < 0 for one in own)
    assert "by {} nats per byte, and by {} per token of".format(*(shown(one).removeprefix("-") for one in own)) in TEXT
    mine, windowed = (by_seed("small-gpu/bytes", ours, at) for at in (FAR, WINDOWED))
    assert all(loss < windowed[seed] for seed, loss in mine.items())


def test_far_keys_help_with_the_positions_and_in_nearly_all_documents():
    lower = []
    for study in TEXTS:
        group = by_label(study)["global-heads"]
        far, windowed = (cell(group, *at) for at in (FAR, WINDOWED))
        by_position = [
            [fmean(one.loss for one in some) for some in zip(*(row.buckets for row in found.rows), strict=True)]
            for found in (far, windowed)
        ]
        beyond = [ours - its for ours, its in zip(*by_position, strict=True)][3:]
        assert beyond[:3] == sorted(beyond[:3], reverse=True)
        assert max(beyond) < 0
        for ours, its in zip(far.rows, windowed.rows, strict=True):
            sums = [[sum(some) for some in zip(*(one.sums for one in row.buckets), strict=True)] for row in (ours, its)]
            lower.append((sum(one < other for one, other in zip(*sums, strict=True)), len(sums[0])))
    assert min(lower[:3]) == (30, 32)
    assert lower[3:] == [(32, 32)]
    assert "at least 30 of 32 documents with each of three seeds on bytes, and in 32 of 32 on" in TEXT


def of_pages(*names: str) -> list[str]:
    return [" ".join((ROOT / name).read_text().split()) for name in names]


def test_the_headlines_of_ten_million_parameters_are_the_measured_ones():
    by = by_label("small-gpu/bytes")
    evidence, layouts, first = of_pages("docs/evidence.md", "docs/layouts.md", "README.md")
    near, far, own = (
        shown(minus(by, "global-heads", rival, *pair)).removeprefix("-")
        for rival, pair in (
            ("Softmax", (HERE, HERE)), ("Softmax", (FAR, WINDOWED)), ("global-heads", (FAR, WINDOWED)),
        )
    )  # fmt: skip
    assert f"below Softmax by {near} nats per byte" in evidence
    assert f"below Softmax with a window by {far}, and below themselves with a window by {own}," in evidence
    row = f"{near[:5]} below Softmax, and at 16 times the length, without a window, {far[:5]} below Softmax with one"
    assert row in first
    assert f"the loss is {own} below itself with a window (three seeds)" in first
    both = {"ours": by_label("small-gpu/longer")["global-heads"], "best": by_label("small-gpu/one-pass")["Softmax"]}
    leads = [shown(beside(both, "ours", "best", *pair)).removeprefix("-") for pair in ((HERE, HERE), (FAR, WINDOWED))]
    assert f"by {leads[0]} at the training length, and at 16 times it, as trained, below it with a window" in TEXT
    assert f"with a window by {leads[1]}." in TEXT
    assert "by {} nats per token, and at 16 times the length below that with a window by {}.".format(*leads) in evidence
    best = (fmean(cell(both["best"], *at).values) for at in (HERE, WINDOWED))
    assert "That is {:.3f}, and {:.3f} at 16 times the length with a window.".format(*best) in TEXT
    laser, softmax = (fmean(by_seed("small-gpu/longer", row, HERE).values()) for row in ("laser-lssa-local", "Softmax"))
    one_pass = [fmean(by_seed("small-gpu/one-pass", row, HERE).values()) for row in ("laser-lssa-local", "Softmax")]
    assert f"{laser:.3f}" == f"{one_pass[0]:.3f}"
    assert (
        f"has the same loss, {laser:.3f}, and Softmax a higher one, {softmax:.3f} in place of {one_pass[1]:.3f}"
        in layouts
    )


def test_what_is_said_of_speed_is_measured():
    found = json.loads((RESULTS / "small-gpu/bytes/results.json").read_text())["runs"]
    rates = {
        row: fmean(run["info"]["tokens_per_second"] for run in found if run["info"]["name"].startswith(row))
        for row in ("global-heads", "softmax")
    }
    assert f"trained at {rates['global-heads'] / rates['softmax']:.2f} of Softmax's tokens per second" in TEXT
    log = " ".join((ROOT / "docs/performance.md").read_text().split())
    assert "Of Softmax's step: `demo-global-heads` 1.10," in log
    assert "its step takes [1.10 times](performance.md#training) as long" in TEXT


def test_what_is_said_of_laser_with_ten_million_parameters_is_measured():
    by, rows = by_label("small-gpu/longer"), ("laser-lssa-local", "Softmax")
    assert minus(by, *rows).sure
    laser, softmax = (by_seed("small-gpu/longer", row, HERE) for row in rows)
    assert len(laser) == 3
    assert all(loss < softmax[seed] for seed, loss in laser.items())
    before = [fmean(by_seed("small-gpu/one-pass", row, HERE).values()) for row in rows]
    assert "in steps of 32K tokens: {:.3f} and {:.3f}.".format(*before) in TEXT
    keys = {
        run["info"]["corpus_key"]
        for study in ("longer", "one-pass")
        for run in json.loads((RESULTS / "small-gpu" / study / "results.json").read_text())["runs"]
    }
    assert len(keys) == 1, "the same text"


def test_the_lead_at_the_best_rates_is_the_measured_one():
    own, swept = runs("small-gpu/bytes"), runs("small-gpu/bytes-rates")
    best, window = (own["global-heads-s0"], swept["softmax-1e3-s0"]), Setting(window=512)
    for row, length, at in (("global-heads", 512, AS_TRAINED), ("softmax", 512, AS_TRAINED)):
        three = [swept[f"{row}-1e3-s0"], own[f"{row}-s0"], swept[f"{row}-4e3-s0"]]
        assert min(three, key=lambda one: one.row(length, at).loss) in best
    near = best[1].row(512).loss - best[0].row(512).loss
    far = best[1].row(8192, window).loss - best[0].row(8192).loss
    assert f"the lead is {near:.3f} there, and {far:.3f} at 16 times it" in TEXT


LARGER = {
    "Softmax": "Softmax in every layer",
    "local-softmax": "softmax, every other layer local",
    "laser-lssa-local": "LASER over LSSA, every other layer local",
    "global-heads": "**global heads without RoPE, the others local**",
}


def larger() -> dict[str, Any]:
    (ours,) = by_label("larger-global-heads").values()
    return by_label("larger") | {"global-heads": ours}


def larger_heads() -> str:
    """Losses with 3.2 M parameters, and what they are above or below Softmax of the same seeds."""
    by, rows = larger(), []
    for label, name in LARGER.items():
        leads = ["", ""]
        if label != "Softmax":
            leads = [said(beside(by, label, "Softmax", *pair)) for pair in ((HERE, HERE), (FAR, WINDOWED))]
        rows.append([name, str(len(by[label].evaluations)), *shown_losses(by[label]), *leads])
    against = "1x, minus Softmax", "16x, as trained, minus Softmax with the window"
    return table(["3.2 M parameters, bytes", "seeds", *COLUMNS, *against], rows)


def test_what_is_said_of_the_larger_model_holds_for_every_seed():
    by = larger()
    rivals = [cell(by["Softmax"], *at).values for at in (HERE, WINDOWED)]
    ours = [cell(by["global-heads"], *at).values for at in (HERE, FAR)]
    assert [one.seed for one in by["global-heads"].evaluations] == [0, 1, 2]
    for mine, its in zip(ours, rivals, strict=True):
        assert all(loss < other for loss, other in zip(mine, its, strict=False))
    for pair, small in (((HERE, HERE), (HERE, HERE)), ((FAR, WINDOWED), (FAR, WINDOWED))):
        lead = beside(by, "global-heads", "Softmax", *pair)
        assert lead.sure
        assert lead.value < minus(by_label("layouts"), "cosine-nope", "Softmax", *small).value
    near, far = (shown(beside(by, "global-heads", "Softmax", *pair)) for pair in ((HERE, HERE), (FAR, WINDOWED)))
    first, evidence = of_pages("README.md", "docs/evidence.md")
    assert f"are below Softmax by {near.removeprefix('-')}** (three seeds)" in evidence
    assert f"as trained, below Softmax with a window by {far.removeprefix('-')}." in evidence
    assert f"(docs/global-heads.md#a-larger-model): {near[1:6]} below, three seeds." in first
    own = minus(by, "global-heads", "global-heads", FAR, WINDOWED)
    assert f"as trained it is {said(own).removeprefix('-')} below itself" in TEXT
    again, before = runs("larger-intel"), runs("larger")
    apart = max(abs(one.row(128).loss - before[name].row(128).loss) for name, one in again.items())
    assert f"and differ by at most {apart:.3f}." in TEXT


TABLES = {"larger_heads": larger_heads, "positions": positions, "small": small, "small_rates": small_rates}
