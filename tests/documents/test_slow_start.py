"""docs/slow-start.md: it shows the committed results.

Over 400 lines: one page, whose tables and sentences share their readers.
"""

import json
import statistics
import tomllib
from functools import partial
from itertools import product

import pytest

from softfocus.lab.evaluate.heads import head_name
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.points import cell
from softfocus.lab.report.results import read_as
from softfocus.lab.run_folder.results import Induction
from softfocus.lab.studies import study

from .committed import (
    FAR,
    HERE,
    RESULTS,
    ROOT,
    WINDOW,
    WINDOWED,
    by_label,
    by_row,
    by_seed,
    claim,
    disturbed,
    loss,
    minus,
    recalls,
    report,
)
from .tables import NAMES, over_seeds, rates_table, said, scale_table, shown, shown_losses, table, tables_of

PAGE = (ROOT / "docs/slow-start.md").read_text()
TEXT, SHOWN = " ".join(PAGE.split()), tables_of(PAGE)
SLOW = "layouts-slow-start"


def both_table() -> str:
    """Loss of the demo's model and recall of the small one, by what turns the keys of the global
    LSSAR layers.
    """
    losses, found = by_label(SLOW, "loss-and-recall"), recalls("recall-layouts")
    names = {
        "all": ("hybrid", "lssar"),
        "half": ("hybrid-half-rope", "lssar-half-rope"),
        "a third; in recall a quarter": ("third", "lssar-short-rope"),
        "one head all, one none": ("all-beside-none", "lssar-all-beside-none"),
        "half in layer 1, none in layer 3": ("half-below-none", None),
        "none": (None, "lssar-nope"),
    }
    rows = []
    for name, (row, label) in names.items():
        cells = shown_losses(losses[row], (HERE, FAR)) if row else ["", ""]
        points = [*found[label].points(False), *found[label].points(True)] if label else []
        far = [f"{one.value:.2f} ± {one.error:.2f}" for one in points if one.at == 1024]
        rows.append([name, *cells, *(far or ["", ""])])
    header = "RoPE in the global layers", "loss, 1x", "loss, 16x", "recall, 16x, filler", "recall, 16x, pairs"
    return table(header, rows)


def heads_table() -> str:
    """Who is disturbed by far keys: the loss at 16 times the length, and with one head or all
    narrowed.
    """
    names = {
        "lssar-s0": "LSSAR, p = 15, seed 0, which lost its line",
        "lssar-half-s0": "LSSAR, p = 15, at 1e-3, which lost its line",
        "lssar-s3": "LSSAR, p = 15",
        "lssar-twice-s0": "LSSAR, p = 15, at 4e-3",
        "hybrid-half-rope-s3": "the layout",
        "local-cosine-s3": NAMES["local-cosine"],
        "softmax-s3": "Softmax",
    }
    rows = []
    for run, name in names.items():
        base, whole, ((row, gain), *_) = disturbed(run)
        rows.append([name, f"{base:.3f}", head_name(row.layer, row.head), shown(gain), shown(whole)])
    header = "model", "loss at 16x", "the most disturbed head", "its window takes off", "that of all heads takes off"
    return table(header, rows)


def lost_line(name: str) -> tuple[dict, dict[str, float]]:
    """The analysis of a head that lost the line, and its losses at 16x by what is clipped."""
    found = json.loads((RESULTS / f"lost-line/{name}.json").read_text())
    return found, {key.removeprefix("clipped wavelengths: "): one for key, one in found["loss at 16x"].items()}


def clipped_table() -> str:
    """Whether RoPE makes the rise: losses with distances clipped, for wavelengths of one head."""
    names = {
        "why": "LSSAR, p = 15, at 1e-3, head 1 of layer 3",
        "toy-s1": "`toy`, seed 1, head 0 of layer 1",
        "toy-s2": "`toy`, seed 2, head 1 of layer 1",
    }
    rows = []
    for (run, name), length in zip(names.items(), (128, 64, 64), strict=True):
        found, losses = lost_line(run)
        assert name.endswith(f"head {found['head']} of layer {found['layer']}")
        ends = "none", f"N at most {length}", f"up to {length}", f"above {length}", "all"
        rows.append([name, *(f"{one:.3f}" for one in (found["loss at 1x"], *map(losses.__getitem__, ends)))])
    clipped = (f"16x, {which} clipped" for which in ("up to 1x", "beyond 1x", "all"))
    return table(["training and head", "1x", "16x", "16x, N at most 1x", *clipped], rows)


LOCAL = ("local-cosine", "hybrid-half-rope", "hybrid", "local-softmax", "local-nope")
ROWS = {"softmax": "Softmax"} | {row: NAMES[row] for row in LOCAL} | {"lssar": NAMES["LSSAR"]}


def swept(study: str, sweep: str, rates: dict[str, str], names: dict[str, str]) -> str:
    """Losses at 1x by learning rate: of one seed, and at the study's own rate the mean of its. The
    rates stand by the ending of a row's name; "" is the study's own.
    """
    own, other = by_row(study), by_row(sweep)
    groups = {name: [other[f"{row}-{end}"] if end else own[row] for end in rates] for row, name in names.items()}
    return rates_table(rates.values(), {name: [cell(one, *HERE).loss for one in row] for name, row in groups.items()})


RATES = {"half": "1e-3", "": "2e-3", "twice": "4e-3"}


def trials_table() -> str:
    rows = []
    for entry in report("layout-trials").runs:
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
        losses = [f"{entry.evaluation.row(128 * n).loss:.3f}" for n in (1, 2, 4, 8, 16)]
        rows.append([entry.evaluation.mechanism, "; ".join(texts).replace("%", " %"), *losses])
    return table(["layout", "power over training, and what else differs", "1x", "2x", "4x", "8x", "16x"], rows)


TABLES = {
    "slow": partial(scale_table, SLOW), "larger": partial(scale_table, "layouts-larger"),
    "bpe_tuned": partial(scale_table, "layouts-bpe-tuned"),
    "rates": partial(swept, SLOW, "learning-rates-slow-start", RATES, ROWS),
    "both": both_table, "heads": heads_table, "clipped": clipped_table, "trials": trials_table,
}  # fmt: skip


@pytest.mark.parametrize("mark", TABLES)
def test_the_tables_are_the_committed_ones(mark):
    assert SHOWN[mark] == TABLES[mark](), f"docs/slow-start.md should show:\n{TABLES[mark]()}"


def test_every_table_is_tested():
    assert SHOWN.keys() == TABLES.keys()


def test_what_the_start_costs_is_the_measured_one():
    slow, start = loss(SLOW, "softmax-s0"), loss("learning-rates", "softmax-s0")
    tuned = loss("learning-rates", "softmax-twice-s0")
    assert (
        f"loss of {slow:.3f} with init std 0.02, of {start:.3f} with init std 0.09, and of "
        f"{tuned:.3f} with init std 0.09 at twice" in TEXT
    )
    assert loss("learning-rates-slow-start", "softmax-twice-s0") > slow, "twice the rate is worse"


def test_the_price_of_the_layout_is_the_measured_one():
    by = by_label(SLOW)
    far, here = minus(by, "hybrid-half-rope", "Softmax", FAR, WINDOWED), minus(by, "hybrid-half-rope", "Softmax")
    assert far.sure
    text = f"a higher loss at 16x than Softmax with the window: {said(far)}. At 1x the LSSAR layout minus Softmax"
    assert text in TEXT
    assert f"At 1x the LSSAR layout minus Softmax is {said(here)}." in TEXT
    above = {}
    for at, rival_at in ((HERE, HERE), (FAR, WINDOWED)):
        plain, ours = by_seed(SLOW, "Softmax", rival_at), by_seed(SLOW, "hybrid-half-rope", at)
        above[at] = [seed for seed, loss in ours.items() if loss > plain[seed]]
    assert all({3, 4, 5, 6, 7} <= set(seeds) < set(range(8)) for seeds in above.values())
    for at in (HERE, FAR):
        ours = by_seed(SLOW, "hybrid-half-rope", at)
        assert statistics.mean(ours[seed] for seed in range(3, 8)) > statistics.mean(ours[seed] for seed in range(3))


def test_no_row_gains_from_far_keys():
    for title in (SLOW, "layouts-larger", "layouts-bpe-tuned"):
        for group in report(title).groups:
            assert cell(group, *WINDOWED).loss < cell(group, *FAR).loss


def test_the_layout_kept_its_line():
    for title in (SLOW, "layouts-larger", "layouts-bpe-tuned"):
        rows = [group for label, group in by_label(title).items() if label in ("hybrid", "hybrid-half-rope")]
        assert rows
        assert all(one.row(2048).loss < one.row(128).loss for group in rows for one in group.evaluations)


def test_softmax_without_rope_costs_what_was_measured():
    by = by_label(SLOW)
    found = [minus(by, "local-nope", "Softmax")]
    found += [minus(by, "local-nope", "hybrid-half-rope", at) for at in (HERE, FAR)]
    assert all(one.sure for one in found)
    assert not minus(by, "local-nope", "local-nope", FAR, HERE).sure, "it is flat"
    price, here, far = said(found[0]), *(said(-one) for one in found[1:])
    assert f"The layout without RoPE minus Softmax: {price} (1x)." in TEXT
    assert f"The LSSAR layout minus the layout without RoPE: {here} (1x) and {far} (16x, both as trained)." in TEXT


def test_eight_trainings_on_the_tiled_backend_kept_their_line():
    (group,) = report("layouts-tiled").groups
    assert len(group.evaluations) == 8
    assert max(one.row(2048).loss - one.row(128).loss for one in group.evaluations) < 0.01, "no line is lost"
    assert "{} at 1x, {} at 16x".format(*shown_losses(group, (HERE, FAR))) in TEXT


def test_the_lead_of_the_layout_in_the_larger_model_is_the_measured_one():
    by = by_label("layouts-larger")
    cosine, nope = (said(minus(by, row, "hybrid-half-rope", FAR)) for row in ("local-cosine", "local-nope"))
    text = f"the cosine layout minus the LSSAR layout is {cosine}, and the layout without RoPE minus the LSSAR layout"
    assert text in TEXT
    assert f"and the layout without RoPE minus the LSSAR layout {nope}." in TEXT
    for rival in by.keys() - {"hybrid-half-rope"}:
        seeds = zip(*(cell(by[label], *FAR).values for label in ("hybrid-half-rope", rival)), strict=True)
        assert [own < other for own, other in seeds] == [True] * 3
    assert f"At 1x LSSAR costs {said(minus(by, 'hybrid-half-rope', 'local-cosine'))} against" in TEXT
    level = minus(by, "hybrid-half-rope", "local-nope")
    assert f"Its difference from the layout without RoPE is {said(level)}." in TEXT
    assert not level.sure
    behind = minus(by, "hybrid-half-rope", "Softmax", FAR, WINDOWED)
    assert behind.sure
    text = "a higher loss at 16x than Softmax with the window: {}.** The rows have four times the parameters"
    assert text.format(said(behind)) in TEXT
    leads = [minus(by, "local-cosine", "Softmax", at) for at in (HERE, WINDOWED)]
    assert not any(one.sure for one in leads)
    text = "The cosine layout minus Softmax: {} (1x) and {} (16x), both inconclusive."
    assert text.format(*(shown(one, "+") for one in leads)) in TEXT


def test_what_repeats_far_back_is_the_measured_one():
    """The gain of windows of 16x over those of 1x, of the layout, which sees all keys."""
    found = read_as(Induction, RESULTS / "layouts-bpe/induction-hybrid-half-rope-s0.json")
    rows = {(row.length, row.window): {part.start: part.loss for part in row.by_distance} for row in found.rows}
    gain = {start: rows[128, None][start] - rows[2048, None][start] for start in rows[128, None]}
    assert f"out of sight: by {gain[256]:.3f} (256 to 511 tokens back) and {gain[512]:.3f} (512 to 1,023)." in TEXT
    assert f"It is lower by {gain[0]:.3f} on tokens that repeat nothing" in TEXT


def test_the_price_on_tokens_is_the_measured_one():
    """On BPE tokens at 4e-3."""
    by = by_label("layouts-bpe-tuned")
    here = minus(by, "hybrid-half-rope", "Softmax")
    far = minus(by, "hybrid-half-rope", "Softmax", FAR, WINDOWED)
    assert far.sure
    assert f"a higher loss than Softmax with the window: {said(far)}.**" in TEXT
    assert f"with a difference from Softmax of {shown(here, '+')}." in TEXT
    for rival in by.keys() - {"hybrid-half-rope"}:
        assert not minus(by, "hybrid-half-rope", rival).sure, "all differences at 1x are inconclusive"
        assert minus(by, "hybrid-half-rope", rival).value > 0, "the highest loss"
    low = minus(by_label("layouts-bpe"), "hybrid-half-rope", "local-cosine")
    assert f"There the LSSAR layout minus the cosine layout is {said(low)} (1x)." in TEXT
    ours = by_seed("layouts-bpe-tuned", "hybrid-half-rope", HERE)
    plain = by_seed("layouts-bpe-tuned", "Softmax", HERE)
    assert [loss > plain[seed] for seed, loss in ours.items()] == [True] * 3
    found = [minus(by, "hybrid-half-rope", rival, FAR) for rival in ("local-nope", "local-cosine")]
    found.append(minus(by, "local-nope", "local-cosine", FAR))
    assert not any(one.sure for one in found), "the three layouts do not differ significantly"
    nope, cosine, _ = (shown(one, "+") for one in found)
    text = f"The LSSAR layout minus the layout without RoPE is {nope}, and minus the cosine layout {cosine}, both"
    assert text in TEXT


def test_the_lead_of_global_cosine_softmax_is_the_measured_one():
    """The mean of all trainings' differences from Softmax of the same seed, and its standard
    error.
    """
    lead = {HERE: [], WINDOWED: []}
    for title, at in product((SLOW, "layouts-larger", "layouts-bpe-tuned"), lead):
        plain = by_seed(title, "Softmax", at)
        lead[at] += [plain[seed] - loss for seed, loss in by_seed(title, "local-cosine", at).items()]
    assert f"Over {len(lead[HERE])} trainings of the three sizes of this page" in TEXT
    assert f"its loss is lower by {over_seeds(lead[HERE])} (1x) and by {over_seeds(lead[WINDOWED])} (16x)." in TEXT
    by = by_label(SLOW)
    found = [minus(by, "local-cosine", "Softmax", at) for at in lead]
    assert not any(one.sure for one in found)
    text = "Its difference from Softmax is inconclusive: {} (1x) and {} (16x)."
    assert text.format(*(shown(one, "+") for one in found)) in TEXT
    assert min(by, key=lambda row: cell(by[row], *WINDOWED).loss) == "local-cosine"


def test_other_rates_on_bytes_are_worse():
    for title, sweep in (
        (SLOW, "learning-rates-slow-start"),
        ("loss-and-recall", "learning-rates-slow-start"),
        ("layouts-larger", "learning-rates-larger"),
    ):
        own, other = by_row(title), by_row(sweep)
        for row, group in own.items():
            for end in ("half", "twice"):
                assert cell(other[f"{row}-{end}"], *HERE).loss > cell(group, *HERE).loss
    flat, lost = (loss("learning-rates-slow-start", f"lssar-{end}-s0", 2048) for end in ("twice", "half"))
    assert f"its loss at 16x is {lost:.3f}. At 4e-3 it is {flat:.3f}." in TEXT


def test_the_rates_on_tokens_are_the_measured_ones():
    sweep = partial(loss, "learning-rates-bpe")
    low = {row: cell(by_row("layouts-bpe")[row], *HERE).loss for row in ("softmax", "local-cosine", "hybrid-half-rope")}
    best = {row: sweep(f"{row}-twice-s0") for row in low}
    low["local-nope"], best["local-nope"] = sweep("local-nope-s0"), loss("layouts-bpe-tuned", "local-nope-s0")
    high = {row: sweep(f"{row}-four-times-s0") for row in low}
    assert all(sweep(f"{row}-half-s0") > low[row] for row in low if row != "local-nope")
    assert all(best[row] < high[row] for row in low)
    gains = [low[row] - best[row] for row in low]
    assert f"lower than at 2e-3 by {min(gains):.2f} to {max(gains):.2f}, and lower than at 8e-3." in TEXT
    rates = {row: (low[row], best[row], high[row]) for row in low}
    assert "Softmax has {:.3f} at 2e-3, {:.3f} at 4e-3 and {:.3f} at 8e-3.".format(*rates["softmax"]) in TEXT
    assert "The layout without RoPE has {:.3f}, {:.3f} and {:.3f} (".format(*rates["local-nope"]) in TEXT


def test_the_dip_of_half_of_rope_is_the_measured_one():
    group = recalls("recall-layouts")["lssar-half-rope"]
    (at_four,) = (point.value for point in group.points(False) if point.at == 256)
    assert f"With half of RoPE recall dips to {at_four:.2f} at 4x" in TEXT


def test_what_shares_of_rope_cost_is_the_measured_one():
    by = by_label(SLOW, "loss-and-recall")
    found = [minus(by, "third", "hybrid-half-rope", at) for at in (HERE, FAR)]
    assert not any(one.sure for one in found)
    text = "in loss: {} (1x) and {} (16x, both as trained), both inconclusive."
    assert text.format(*(shown(one, "+") for one in found)) in TEXT
    for at in (HERE, FAR):
        assert not minus(by, "hybrid", "hybrid-half-rope", at).sure, "half of RoPE, and all of it"
        assert not minus(by, "all-beside-none", "hybrid-half-rope", at).sure
        assert minus(by, "all-beside-none", "hybrid-half-rope", at).value > 0


def test_recall_in_the_layout_of_the_demo_is_the_measured_one():
    groups = recalls("recall-demo")
    by = {label: {point.at: f"{point.value:.2f}" for point in group.points(False)} for label, group in groups.items()}
    short, single = by["half-short-head"], by["half"]
    assert f"it finds {single[64]} at 1x after 1,500 steps." in TEXT
    assert f"With a two-token window in one head of layer 0 it finds {short[64]}, and {short[256]} at 4x" in TEXT
    assert f"{short[256]} at 4x and {short[1024]} at 16x, where" in TEXT
    learned = {label: sum(entry.recall.shown[0].accuracy > 0.9 for entry in one.entries)
               for label, one in groups.items() if label not in ("half", "half-short-head")}  # fmt: skip
    assert learned == {"cosine": 3, "cosine-scale-2": 0, "lssar": 1, "softmax": 0}
    assert f"in all three seeds** ({by['cosine'][1024]} at 16x), the LSSAR layout with one of three, and" in TEXT


def test_the_head_that_lost_the_line_is_the_measured_one():
    found, losses = lost_line("why")
    for loss_with, text in (
        ("128 to 512", "With those of 128 to 512 tokens clipped the loss is {:.3f}, so"),
        ("above 512", "With those above 512 clipped it is {:.3f}."),
    ):
        assert text.format(losses[loss_with]) in TEXT
    assert 0.5 < (losses["none"] - losses["128 to 512"]) / (losses["none"] - losses["all"]) < 0.55, "half of the rise"
    rise = losses["none"] - found["loss at 1x"]
    assert losses["none"] - losses["up to 128"] > 0.9 * rise, "nearly all of the rise"
    mass = {int(start): share for start, share in found["weight by distance"].items() if int(start) >= 128}
    assert sorted(sorted(mass, key=mass.__getitem__)[-3:]) == [744, 1000, 1504], "bins of eight"
    _, whole, ((row, gain), *_) = disturbed("lssar-half-s0")
    text = f"Head {row.head} of layer {row.layer} makes {gain.value:.3f} of the {whole.value:.3f} that"
    assert text in TEXT
    _, whole, ((one, most), (two, less), *_) = disturbed("lssar-s0")
    assert (
        f"of {whole.value:.3f}, the window of head {one.head} of layer {one.layer} alone takes off {shown(most)}, and "
        f"that of head {two.head} of layer {two.layer} alone {shown(less)}." in TEXT
    )


def test_the_growth_of_n_is_not_the_cause():
    for name, length in (("why", 128), ("toy-s1", 64), ("toy-s2", 64)):
        _, losses = lost_line(name)
        assert abs(losses[f"N at most {length}"] - losses["none"]) < 0.001


def test_two_more_heads_that_lost_the_line_are_the_measured_ones():
    (first, one), (second, two) = (lost_line(f"toy-s{seed}") for seed in (1, 2))
    assert [(one["layer"], one["head"]) for one in (first, second)] == [(1, 0), (1, 1)]
    for found, losses in ((first, one), (second, two)):
        assert found["loss at 1x"] < losses["all"] < losses["none"], "clipping removes part of the rise"
    assert f"{two['up to 64']:.3f}" == f"{two['all']:.3f}"
    assert two["above 64"] > two["all"]
    assert one["above 64"] <= one["all"] < one["up to 64"]
    shares = [
        f"{sum(found['weight by distance'][at] for at in bins):.0%}".replace("%", " %")
        for found, bins in ((first, ("320", "416")), (second, ("72", "96", "176")))
    ]
    assert f"of seed 1 puts {shares[0]} of its weight on distances of 320 to 327 and 416 to 423. Head 1" in TEXT
    assert f"of seed 2 puts {shares[1]} on 72 to 79, 96 to 103 and 176 to 183." in TEXT


def test_the_other_lines_that_were_lost_are_the_measured_ones():
    lost = {run: [loss("t6", run, length) for length in (128, 2048)] for run in ("lssar4", "demo-t6-lssar", "t6k4")}
    assert "four heads of 32 the loss goes from {:.3f} to {:.3f}.".format(*lost["lssar4"]) in TEXT
    assert all(lost[name][1] - lost[name][0] > 0.5 for name in ("demo-t6-lssar", "t6k4"))
    trained = [run.evaluation for run in claim("softplus-figure-1").of("lssar") if run.evaluation]
    rises = [[one.row(length).loss for length in (64, 1024)] for one in trained]
    worst = max(rises, key=lambda rise: rise[1] - rise[0])
    assert len(rises) == 8
    assert worst[1] - worst[0] < lost["lssar4"][1] - lost["lssar4"][0], "it rises less"
    assert "in all eight seeds: at most it goes from {:.3f} to {:.3f} (".format(*worst) in TEXT


def test_the_committed_trials_are_rows_of_the_study():
    found, near = study.load("layout-trials")
    rows = {one.name: one for one in study.recipes(found, near, [0])}
    trials = report("layout-trials").runs
    assert [entry.info.name for entry in trials] == list(rows)
    for entry in trials:
        trained, row = Recipe.model_validate(tomllib.loads(entry.recipe)), rows[entry.info.name]
        assert (trained.model, trained.data, trained.train) == (row.model, row.data, row.train)


def test_the_power_under_a_window_is_the_measured_one():
    powers = [loss("layout-trials", run, 2048, WINDOW) for run in ("p3-s0", "p7-s0")]
    powers.append(loss(SLOW, "hybrid-half-rope-s0", 2048, WINDOW))
    assert "{:.3f} at 16x with a power of 3, {:.3f} with 7, {:.3f} with 31".format(*powers) in TEXT


def test_the_spread_of_seeds_is_the_measured_one():
    losses = sorted(one.row(128).loss for one in by_row(SLOW)["hybrid"].evaluations)
    assert f"(`hybrid` of [the loss](#loss): {losses[0]:.3f} to {losses[-1]:.3f} at 1x)" in TEXT
    assert f"by up to {losses[-1] - losses[0]:.2f} (`hybrid`" in TEXT


def test_the_candidates_lost():
    trained = {one.info.name.removesuffix("-s0"): one for one in report("layout-trials").runs}
    here, far = ({run: one.evaluation.row(length).loss for run, one in trained.items()} for length in (128, 2048))
    own, wide = "g-lssar31-l64-rope0.5", "g-lssar31-l64-rope1"
    others = [run for run, one in trained.items() if "lssa" in one.evaluation.mechanism and run != own]
    assert len(others) == 21
    assert all(here[run] > here[own] for run in others), "none lowered its loss at 1x"
    spread = [one.row(128).loss for one in by_row(SLOW)["hybrid"].evaluations]
    for run in ("p3", "p7", "g-lssarlearnedp-l64-rope1", "g-softmax-l64-rope0.5", "ssmax", "g-coslogn-l64-rope0.5"):
        assert far[run] - here[run] > max(spread) - min(spread), "it rises by more than seeds differ"
    assert all(far[run] < here[run] for run in (own, wide, "g-lssar15-l64-rope0.5")), "high powers keep the line"
    assert (
        "starts at 2 the loss goes from {:.3f} at 1x to {:.3f} at 16x, with one that starts at 4 from {:.3f} to "
        "{:.3f}. That of LSSAR goes from {:.3f} to {:.3f}.".format(
            *(at[run] for run in ("cosine-scale-2-half", "cosine-scale-4-half", own) for at in (here, far))
        )
        in TEXT
    )
    text = f"an eighth of the training length have {here['window-16']:.3f} at 1x, beside {here[own]:.3f}."
    assert text in TEXT
    for run in ("window-128", "one-global", "three-global", "base-500", "base-100000", "softmax-nope-head",
                "one-in-four", "laser-local"):  # fmt: skip
        assert here[run] > here[own]
        assert far[run] > far[own]
    assert here["g-lssar15-l64-rope0.5"] > here[own], "p = 31 was ahead"
    assert here["g-lssar31geo-l64-rope1"] > here[wide], "linear was ahead of geometric"
    assert min(here[run] for run in ("cosine-shape", "start-3", "g-lssar31-l64-rope0.34")) > here[own]
    for run, rival in (("g-lssar15hs-l64-rope0.5", "g-lssar15-l64-rope0.5"), ("laser", own)):
        assert max(abs(at[run] - at[rival]) for at in (here, far)) < 0.015, "it changed little"
