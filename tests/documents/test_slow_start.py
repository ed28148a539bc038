"""docs/slow-start.md: it shows the committed results."""

import json
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
    accuracies,
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


def layout_recall_table() -> str:
    """Every training of the demo's layout on recall, with a previous-token head."""
    rows = []
    for label in ("cosine", "cosine-scale-2", "lssar", "softmax"):
        group = recalls("recall-demo")[label]
        name = group.entries[0].info.mechanism.split(" / ")[-1] + ", learned scale from 2" * (label == "cosine-scale-2")
        across = ((64, False), (256, False), (1024, False), (1024, True))
        rows.append([name, *(", ".join(f"{run[at]:.2f}" for run in accuracies(group)) for at in across)])
    return table(["global layers", "1x", "4x, filler", "16x, filler", "16x, pairs"], rows)


LOCAL = ("local-cosine", "hybrid-half-rope", "hybrid", "local-softmax", "local-nope")
ROWS = {"softmax": "Softmax"} | {row: NAMES[row] for row in LOCAL} | {"lssar": NAMES["LSSAR"]}
TURNED = {
    "third": "global LSSAR with a third of RoPE",
    "all-beside-none": "with all of it in one head, none in the other",
    "half-below-none": "with half of it in layer 1, none in layer 3",
}
"""The rows of `loss-and-recall`."""


def swept(study: str, sweep: str, rates: dict[str, str], names: dict[str, str]) -> str:
    """Losses at 1x by learning rate: of one seed, and at the study's own rate the mean of its. The
    rates stand by the ending of a row's name; "" is the study's own.
    """
    own, other = by_row(study), by_row(sweep)
    groups = {name: [other[f"{row}-{end}"] if end else own[row] for end in rates] for row, name in names.items()}
    return rates_table(rates.values(), {name: [cell(one, *HERE).loss for one in row] for name, row in groups.items()})


RATES = {"half": "1e-3", "": "2e-3", "twice": "4e-3"}
LARGER_ROWS = {row: ROWS[row] for row in ("softmax", "local-cosine", "hybrid-half-rope", "local-nope")}
BPE_ROWS = {row: ROWS[row] for row in ("softmax", "local-cosine", "hybrid-half-rope")}
TABLES = {
    "slow": partial(scale_table, SLOW), "larger": partial(scale_table, "layouts-larger"),
    "bpe": partial(scale_table, "layouts-bpe"), "bpe_tuned": partial(scale_table, "layouts-bpe-tuned"),
    "rates": partial(swept, SLOW, "learning-rates-slow-start", RATES, ROWS),
    "recall_rates": partial(swept, "loss-and-recall", "learning-rates-slow-start", RATES, TURNED),
    "larger_rates": partial(swept, "layouts-larger", "learning-rates-larger",
                            {"half": "5e-4", "": "1e-3", "twice": "2e-3"}, LARGER_ROWS),
    "bpe_rates": partial(swept, "layouts-bpe", "learning-rates-bpe", RATES | {"four-times": "8e-3"}, BPE_ROWS),
    "both": both_table, "layout_recall": layout_recall_table, "heads": heads_table, "trials": trials_table,
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


def test_softmax_without_rope_costs_what_was_measured():
    by = by_label(SLOW)
    found = [minus(by, "local-nope", "Softmax")]
    found += [minus(by, "local-nope", "hybrid-half-rope", at) for at in (HERE, FAR)]
    assert all(one.sure for one in found)
    assert not minus(by, "local-nope", "local-nope", FAR, HERE).sure, "it is flat"
    price, here, far = map(shown, found)
    assert f"Its loss (four seeds) is {price} above Softmax's at the training length." in TEXT
    assert f"LSSAR is {here} below it there, and {far} below it at 16 times the length." in TEXT


def test_eight_trainings_on_the_tiled_backend_kept_their_line():
    (group,) = report("layouts-tiled").groups
    assert len(group.evaluations) == 8
    assert max(one.row(2048).loss - one.row(128).loss for one in group.evaluations) < 0.01, "no line is lost"
    assert "{} at 1x, {} at 16x".format(*shown_losses(group, (HERE, FAR))) in TEXT


def test_the_lead_of_the_layout_in_the_larger_model_is_the_measured_one():
    by = by_label("layouts-larger")
    cosine, nope = (said(minus(by, row, "hybrid-half-rope", FAR))[1:] for row in ("local-cosine", "local-nope"))
    assert f"Cosine softmax is {cosine} above it there" in TEXT
    seeds = zip(*(cell(by[label], *FAR).values for label in ("hybrid-half-rope", "local-nope")), strict=True)
    shown_seeds = ", ".join(f"{other - own:.3f}" for own, other in seeds)
    assert f"in the global layers {nope} (the three seeds: {shown_seeds})" in TEXT
    assert f"At 1x LSSAR costs {said(minus(by, 'hybrid-half-rope', 'local-cosine'))[1:]}" in TEXT
    level = minus(by, "hybrid-half-rope", "local-nope")
    assert f"inconclusive there ({shown(level)})" in TEXT
    assert not level.sure
    behind = shown(minus(by, "hybrid-half-rope", "Softmax", FAR, WINDOWED))
    assert f"behind windowed softmax by {behind}." in TEXT


def test_what_repeats_far_back_is_the_measured_one():
    """The gain of windows of 16x over those of 1x, of the layout, which sees all keys."""
    found = read_as(Induction, RESULTS / "layouts-bpe/induction-hybrid-half-rope-s0.json")
    rows = {(row.length, row.window): {part.start: part.loss for part in row.by_distance} for row in found.rows}
    gain = {start: rows[128, None][start] - rows[2048, None][start] for start in rows[128, None]}
    assert f"far back is lower by {gain[256]:.3f} (256 to 511 tokens) and {gain[512]:.3f} (512 to 1,023)" in TEXT
    assert f"by {gain[0]:.3f} on tokens that repeat nothing" in TEXT


def test_the_price_on_tokens_is_the_measured_one():
    """LSSAR's layout less Softmax of the same seed, on BPE tokens at 4e-3."""
    prices = []
    for at, rival_at in ((HERE, HERE), (FAR, WINDOWED)):
        plain = by_seed("layouts-bpe-tuned", "Softmax", rival_at)
        ours = by_seed("layouts-bpe-tuned", "hybrid-half-rope", at)
        assert ours.keys() == plain.keys()
        prices.append(over_seeds([loss - plain[seed] for seed, loss in ours.items()]))
    assert f"costs {prices[0]} nats per token at the training length" in TEXT
    assert f"it is behind windowed Softmax by {prices[1]}." in TEXT
    by = by_label("layouts-bpe-tuned")
    found = [minus(by, "hybrid-half-rope", rival, FAR) for rival in ("local-nope", "local-cosine")]
    assert not any(one.sure for one in found)
    nope, cosine = (shown(one).lstrip("-") for one in found)
    assert f"differs from LSSAR by {nope}, cosine softmax with log N by {cosine}." in TEXT


def test_the_lead_of_global_cosine_softmax_is_the_measured_one():
    """The mean of all trainings' differences from Softmax of the same seed, and its standard
    error.
    """
    lead = {HERE: [], WINDOWED: []}
    for title, at in product((SLOW, "layouts-larger", "layouts-bpe-tuned"), lead):
        plain = by_seed(title, "Softmax", at)
        lead[at] += [plain[seed] - loss for seed, loss in by_seed(title, "local-cosine", at).items()]
    assert f"Over the {len(lead[HERE])} trainings of this page's three sizes" in TEXT
    assert (
        f"its loss is lower by {over_seeds(lead[HERE])} at 1x. At 16 times the length, both with the window, "
        f"it is lower by {over_seeds(lead[WINDOWED])}." in TEXT
    )


def test_the_rates_of_softmax_without_rope_on_tokens_are_the_measured_ones():
    sweep = partial(loss, "learning-rates-bpe")
    rates = sweep("local-nope-s0"), loss("layouts-bpe-tuned", "local-nope-s0"), sweep("local-nope-four-times-s0")
    assert "the loss is {:.3f} at 2e-3, {:.3f} at 4e-3 and {:.3f} at 8e-3".format(*rates) in TEXT


def test_the_dip_of_half_of_rope_is_the_measured_one():
    group = recalls("recall-layouts")["lssar-half-rope"]
    (at_four,) = (point.value for point in group.points(False) if point.at == 256)
    seeds = [found[256, False] for found in accuracies(group)]
    dip = "It dips to {:.2f} at 4 times the length ({:.2f}, {:.2f} and {:.2f} with seeds 0, 1 and 2)"
    assert dip.format(at_four, *seeds) in TEXT


def test_recall_in_the_layout_of_the_demo_is_the_measured_one():
    groups = recalls("recall-demo")
    by = {label: {point.at: f"{point.value:.2f}" for point in group.points(False)} for label, group in groups.items()}
    short, single = by["half-short-head"], by["half"]
    assert f"does not learn it within 1,500 steps ({single[64]} at 1x)" in TEXT
    assert f"With a two-token window in one head of layer 0 it learns the task ({short[64]})." in TEXT
    assert f"Accuracy falls to {short[256]} at 4x and {short[1024]} at 16x" in TEXT
    learned = {label: sum(entry.recall.shown[0].accuracy > 0.9 for entry in one.entries)
               for label, one in groups.items() if label not in ("half", "half-short-head")}  # fmt: skip
    assert learned == {"cosine": 3, "cosine-scale-2": 0, "lssar": 1, "softmax": 0}
    assert f"in all three seeds** ({by['cosine'][1024]} at 16x), LSSAR with one of three" in TEXT


def test_the_head_that_lost_the_line_is_the_measured_one():
    found = json.loads((RESULTS / "lost-line/why.json").read_text())
    losses = {key.removeprefix("clipped wavelengths: "): f"{loss:.3f}" for key, loss in found["loss at 16x"].items()}
    assert f"clipped the loss at 16 times the length is {losses['up to 128']}" in TEXT
    assert f"all of them {losses['all']}, without {losses['none']}; with those of 128 to 512, " in TEXT
    assert f"with those of 128 to 512, {losses['128 to 512']}; with those above 512, {losses['above 512']}" in TEXT
    taken = {key: found["loss at 16x"][f"clipped wavelengths: {key}"] for key in ("none", "all", "128 to 512")}
    assert 0.5 < (taken["none"] - taken["128 to 512"]) / (taken["none"] - taken["all"]) < 0.55, "half of the rise"
    assert f"held at 128, the loss is {losses['N at most 128']}" in TEXT
    mass = {int(start): share for start, share in found["weight by distance"].items() if int(start) >= 128}
    assert sorted(sorted(mass, key=mass.__getitem__)[-3:]) == [744, 1000, 1504], "bins of eight"
    _, whole, ((row, gain), *_) = disturbed("lssar-half-s0")
    assert f"head {row.head} of layer {row.layer} makes {gain.value:.3f} of the {whole.value:.3f} that" in TEXT
    _, whole, ((one, most), (two, less), *_) = disturbed("lssar-s0")
    assert (
        f"of {whole.value:.3f}, the window of head {one.head} of layer {one.layer} alone takes off {shown(most)}, and "
        f"that of head {two.head} of layer {two.layer} alone {shown(less)}." in TEXT
    )


def test_two_more_heads_that_lost_the_line_are_the_measured_ones():
    first, second = (json.loads((RESULTS / f"lost-line/toy-s{seed}.json").read_text()) for seed in (1, 2))
    assert [(one["layer"], one["head"]) for one in (first, second)] == [(1, 0), (1, 1)]
    assert f"losses at 1x are {first['loss at 1x']:.3f} and {second['loss at 1x']:.3f}." in TEXT
    one, two = (
        {key.removeprefix("clipped wavelengths: "): loss for key, loss in found["loss at 16x"].items()}
        for found in (first, second)
    )
    assert (
        f"falls from {one['none']:.3f} to {one['all']:.3f}, and from {two['none']:.3f} to {two['all']:.3f}. With N "
        f"held at 64 it is {one['N at most 64']:.3f} and {two['N at most 64']:.3f}." in TEXT
    )
    short, long, every = (
        [f"{found['none'] - found[which]:.3f}" for found in (one, two)] for which in ("up to 64", "above 64", "all")
    )
    assert short[1] == every[1]
    assert one["above 64"] <= one["all"]
    text = (
        f"length alone take off as much as all, {short[1]}, and those above it {long[1]}. With seed 1 the former take"
    )
    assert text in TEXT
    assert f"off {short[0]}, and the latter {long[0]}, as much as all." in TEXT
    shares = [
        f"{sum(found['weight by distance'][at] for at in bins):.0%}".replace("%", " %")
        for found, bins in ((first, ("320", "416")), (second, ("72", "96", "176")))
    ]
    assert f"puts {shares[0]} of its weight on distances of 320 to 327 and 416 to 423, head 1" in TEXT
    assert f"the latter puts {shares[1]} on 72 to 79, 96 to 103 and 176 to 183." in TEXT


def test_the_other_lines_that_were_lost_are_the_measured_ones():
    lost = {run: [loss("t6", run, length) for length in (128, 2048)] for run in ("lssar4", "demo-t6-lssar", "t6k4")}
    assert "four heads of 32 the loss goes from {:.3f} to {:.3f}.".format(*lost["lssar4"]) in TEXT
    assert all(lost[name][1] - lost[name][0] > 0.5 for name in ("demo-t6-lssar", "t6k4"))
    trained = [run.evaluation for run in claim("softplus-figure-1").of("lssar") if run.evaluation]
    rises = [[one.row(length).loss for length in (64, 1024)] for one in trained]
    worst = max(rises, key=lambda rise: rise[1] - rise[0])
    assert len(rises) == 8
    assert worst[1] - worst[0] < lost["lssar4"][1] - lost["lssar4"][0], "it rises less"
    assert "in all eight seeds: at most the loss goes from {:.3f} to {:.3f} (".format(*worst) in TEXT


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
    assert "{:.3f} at 16 times the length with a power of 3, {:.3f} with 7, {:.3f} with 31".format(*powers) in TEXT


def test_the_spread_of_seeds_is_the_measured_one():
    losses = sorted(one.row(128).loss for one in by_row(SLOW)["hybrid"].evaluations)
    assert f"`hybrid`: {losses[0]:.3f} to {losses[-1]:.3f} at 1x" in TEXT
