"""docs/global-heads.md on one start for loss and recall: it shows the committed results."""

import math

import pytest

from softfocus.lab.evaluate.means import Estimate
from softfocus.lab.report.points import Group, cell
from softfocus.lab.report.recall_compare import RecallGroup

from .committed import FAR, HERE, ROOT, WINDOWED, accuracies, beside, by_label, by_row, by_seed, of_pages, recalls
from .tables import said, shown_loss, table, tables_of
from .test_global_heads_small import apart_at_both, cpus

PAGE = (ROOT / "docs/global-heads.md").read_text()
TEXT = " ".join(PAGE.split())
OURS = "cosine-nope"
STARTS = {"2": "0.02", "4": "0.04", "5": "0.05", "6": "0.0625"}
"""Initial weights by what rows of the studies call them."""
BUDGETS = {
    "-quarter-longer": ("2.5e-4", "3,000"),
    "-half-longer": ("5e-4", "3,000"),
    "-longer": ("1e-3", "3,000"),
    "-half": ("5e-4", "1,500"),
    "": ("1e-3", "1,500"),
}
"""Learning rate and steps by the ends of rows of `recall-starts`."""
ACROSS = {
    "1x": (64, False),
    "16x, filler": (1024, False),
    "64x, filler": (4096, False),
    "16x, pairs": (1024, True),
    "64x, pairs": (4096, True),
}
MODELS = {
    "Softmax": ("softmax", "Softmax", WINDOWED),
    "all-softmax layout": ("all-softmax", "all-softmax-nope", FAR),
    "global heads": ("global-heads", OURS, FAR),
}
"""By model: what its rows of `starts` are called, its published row, of init std 0.09, and how it
is run at 16x.
"""
ALL, HEADS = "all-softmax layout", "global heads"


def on_text() -> dict[str, dict[str, Group]]:
    """Models by initial weights."""
    found, rows = by_row("starts"), {}
    for at, start in STARTS.items():
        groups = {model: found.get(f"{row}-{at}") for model, (row, _, _) in MODELS.items()}
        rows[start] = {model: group for model, group in groups.items() if group is not None}
    published = by_label("layouts") | by_row("global-heads")
    return rows | {"0.09": {model: published[row] for model, (_, row, _) in MODELS.items()}}


def lead(start: str, far: bool, model: str = HEADS) -> Estimate:
    """A model minus the best Softmax, with init std 0.09."""
    by = {"ours": on_text()[start][model], "best": on_text()["0.09"]["Softmax"]}
    return beside(by, "ours", "best", *((MODELS[model][2], WINDOWED) if far else (HERE, HERE)))


def over_layout(ours: str, layout: str, at=HERE) -> Estimate:
    """Global heads minus the all-softmax layout, by their initial weights."""
    return beside({"ours": on_text()[ours][HEADS], "all": on_text()[layout][ALL]}, "ours", "all", at)


def losses() -> str:
    rows = []
    for start, groups in on_text().items():
        for model, group in groups.items():
            texts = [shown_loss(cell(group, *at)) for at in (HERE, MODELS[model][2])]
            best = (start, model) == ("0.09", "Softmax")
            leads = ["" if best else said(lead(start, far, model)) for far in (False, True)]
            rows.append([start, model, str(len(group.evaluations)), *texts, *leads])
    leads = "1x, minus Softmax with init std 0.09", "16x, minus the same with a window"
    columns = ["init std", "model", "seeds", "1x", "16x, as trained; Softmax with a window", *leads]
    return table(columns, rows)


def recalled(heads: str = "128") -> dict[tuple[str, str], RecallGroup]:
    """By the parts of a row's name that follow its heads: its start, and its rate and steps."""
    by = {
        one.info.name.rpartition("-s")[0]: group for group in recalls("recall-starts").values() for one in group.entries
    }
    found = {(at, end): by.get(f"{heads}-{at}{end}") for at in STARTS for end in BUDGETS}
    return {place: group for place, group in found.items() if group is not None}


def recall_table() -> str:
    rows = []
    for heads, model in (("128", HEADS), ("softmax", ALL)):
        for (at, end), group in recalled(heads).items():
            assert [one.info.seed for one in group.entries] == sorted(one.info.seed for one in group.entries)
            shares = (", ".join(f"{one[at]:.2f}" for one in accuracies(group)) for at in ACROSS.values())
            seeds = ", ".join(str(one.info.seed) for one in group.entries)
            rows.append([model, STARTS[at], *BUDGETS[end], seeds, *shares])
    return table(["model", "init std", "learning rate", "steps", "seeds", *ACROSS], rows)


def test_what_other_pages_say_of_the_default_init_std_is_in_the_tables():
    def cells(mark: str, begins: str) -> list[str]:
        line = next(line for line in tables_of(PAGE)[mark].splitlines() if line.startswith(f"| {begins} |"))
        return [one.strip() for one in line.strip("|").split("|")]

    small = cells("starts", "0.02 | global heads")[5].removeprefix("+")
    words = cells("other_sizes", "the same, with init std 0.04")[1].removeprefix("+")
    (evidence,) = of_pages("docs/evidence.md")
    text = f"by {small} (0.8 M, one seed) and {words} (1.3 M, three seeds). After 4,400 steps the difference is"
    assert text in evidence
    assert not any(name.startswith("global-heads-2-") for name in by_row("starts")), "4e-3 alone"
    losses = {model: f"{cell(on_text()['0.02'][model], *HERE).loss:.3f}" for model in (HEADS, "Softmax")}
    text = f"There its loss is {losses[HEADS]}, and that of Softmax with 0.02 is {losses['Softmax']} (1x, seed 0)."
    assert text in evidence
    text = f"they have {losses[HEADS]}, and Softmax with 0.02 has {losses['Softmax']} at that rate."
    assert text in TEXT


TABLES = {"starts": losses, "recall_starts": recall_table}


@pytest.mark.parametrize("mark", TABLES)
def test_the_tables_are_the_committed_ones(mark):
    assert tables_of(PAGE)[mark] == TABLES[mark](), f"docs/global-heads.md should show:\n{TABLES[mark]()}"


def test_one_start_serves_both():
    near, far = lead("0.0625", far=False), lead("0.0625", far=True)
    assert near.sure
    assert far.sure
    ours = {one.seed: one for one in on_text()["0.0625"][HEADS].evaluations}
    assert sorted(ours) == list(range(8))
    text = f"With init std 0.0625 global heads minus Softmax with init std 0.09: {apart_at_both(near, far)}.**"
    assert f"{text} Each of eight seeds has a lower loss than Softmax with the same seed, at both lengths." in TEXT
    (goal,) = of_pages("docs/evidence.md")
    for at, rival in ((HERE, HERE), (FAR, WINDOWED)):
        best = by_seed("layouts", "Softmax", rival)
        values = dict(zip(sorted(ours), cell(on_text()["0.0625"][HEADS], *at).values, strict=True))
        assert all(values[seed] < best[seed] for seed in ours), "in every seed"
    losses = (cell(on_text()["0.0625"][HEADS], *at).values for at in (HERE, FAR))
    assert all(last < first for first, last in zip(*losses, strict=True)), "docs/evidence.md: flat, in every seed"
    longer = accuracies(recalled()["6", "-half-longer"])
    assert len(longer) == 8
    learned = sum(one[64, False] > 0.97 for one in accuracies(recalled()["6", "-half"]))
    assert learned == 6
    assert "eight of eight do at 5e-4 in 3,000 steps, and six of eight in 1,500." in TEXT
    assert BUDGETS["-half-longer"] == ("5e-4", "3,000")
    assert all(one[64, False] > 0.97 for one in longer)
    assert "**With init std 0.0625, in 3,000 steps at 5e-4, each of eight seeds learns recall.** It finds" in TEXT
    filler = min(value for one in longer for (_, grown), value in one.items() if not grown)
    pairs = [one[1024, True] for one in longer]
    assert f"Among 16 times as many pairs it finds {min(pairs):.2f} to {max(pairs):.2f}." in TEXT
    least = f"{math.floor(1000 * filler) / 10:.1f} % of the keys"
    assert f"finds at least {least} among filler at every length, up to 64x." in TEXT
    assert {length for length, _ in longer[0]} >= {64, 4096}
    blind = [
        one[length, pairs]
        for one in accuracies(recalled()["6", "-half-longer"], window=64)
        for length in (1024, 4096)
        for pairs in (False, True)
    ]
    assert len(blind) == 32
    text = "**With a window of 64 tokens in all heads** the eight models with init std 0.0625 that were trained for"
    assert f"{text} 3,000 steps find {min(blind):.2f} to {max(blind):.2f} at 16x and 64x" in TEXT
    more = [one[4096, True] for one in longer]
    text = f"On recall they find at least {least} among filler at up to 64x, and"
    assert f"{text} {min(more):.2f} to {max(more):.2f} among 64 times as many pairs." in goal


def test_softmax_in_every_head_is_compared_from_its_better_start():
    groups = {start: rows[ALL] for start, rows in on_text().items() if ALL in rows}
    assert sorted(groups) == ["0.0625", "0.09"]
    assert all(len(group.evaluations) == 8 for group in groups.values())
    assert not beside(groups, "0.0625", "0.09", HERE).sure
    assert not beside(groups, "0.0625", "0.09", FAR).sure
    assert all(lead("0.0625", far, ALL).sure for far in (False, True))
    text = "The all-softmax layout with init std 0.0625 minus the same Softmax:"
    assert f"{text} {apart_at_both(*(lead('0.0625', far, ALL) for far in (False, True)))}." in TEXT
    share = [lead("0.0625", far, ALL).value / lead("0.0625", far).value for far in (False, True)]
    assert 0.33 < min(share) < max(share) < 0.52, "a third to a half"
    same = [over_layout("0.0625", "0.0625", at) for at in (HERE, FAR)]
    best = [over_layout("0.09", "0.0625", at) for at in (HERE, FAR)]
    assert all(one.sure for one in (*same, *best))
    text = "Global heads minus the all-softmax layout, both with init std 0.0625:"
    assert f"{text} {apart_at_both(*same)}." in TEXT
    ours, rival = on_text()["0.09"][HEADS], groups["0.0625"]
    for at in (HERE, FAR):
        assert sum(a < b for a, b in zip(cell(ours, *at).values, cell(rival, *at).values, strict=True)) == 7
    text = "Global heads with 0.09 minus the all-softmax layout with 0.0625:"
    assert f"{text} {apart_at_both(*best)}, a lower loss in seven of eight seeds." in TEXT
    (evidence,) = of_pages("docs/evidence.md")
    link = "[the all-softmax layout with 0.0625](global-heads.md#one-start-for-loss-and-recall)"
    text = (
        f"Global heads with init std 0.09 minus {link}: {apart_at_both(*best)}, a lower loss in seven of eight seeds."
    )
    assert text in evidence
    assert "lower than Softmax's in all eight seeds, and than that of the best all-softmax layout in seven." in evidence
    assert "it has a lower loss than Softmax, and a higher one than `demo-global-heads`." in TEXT


def test_the_rates_of_3000_steps_are_those_that_were_trained():
    found = {heads: recalled(heads) for heads in ("128", "softmax")}
    others = {(heads, end): found[heads]["6", end] for heads in found for end in ("-quarter-longer", "-longer")}
    assert all([one.info.seed for one in group.entries] == [0] for group in others.values())
    learned = {key for key, group in others.items() if accuracies(group)[0][64, False] > 0.97}
    assert learned == others.keys() - {("128", "-longer")}
    least = min(value for key in learned for (_, grown), value in accuracies(others[key])[0].items() if not grown)
    text = "**At 1e-3 the all-softmax layout learns recall in 3,000 steps, and global heads do not** (init std"
    text += f" {STARTS['6']}, seed 0). The all-softmax layout then finds at least"
    assert (
        f"{text} {math.floor(1000 * least) / 10:.1f} % of the keys among filler at every length. At 2.5e-4 both do."
        in TEXT
    )
    assert accuracies(others["128", "-longer"])[0][64, False] < 0.25


def test_the_machines_are_those_of_the_results():
    assert set(cpus("starts").values()) == {"AMD"}
    at_recall = cpus("recall-starts")
    assert set(at_recall.values()) == {"AMD", "Intel"}
    four = {
        f"recall-starts/{heads}-6{end}-s0" for heads in ("128", "softmax") for end in ("-longer", "-quarter-longer")
    }
    assert {run for run, cpu in at_recall.items() if cpu == "Intel"} == four
    rates = f"{BUDGETS['-quarter-longer'][0]} or {BUDGETS['-longer'][0]}"
    assert f"the four runs of `recall-starts` with 3,000 steps at {rates}. All others were" in TEXT
    published = cpus("layouts", "global-heads")
    for run, cpu in {
        "layouts/softmax": "AMD",
        f"layouts/{OURS}": "Intel",
        "global-heads/all-softmax-nope": "Intel",
    }.items():
        assert all(published[f"{run}-s{seed}"] == cpu for seed in range(8))


def test_softmax_in_every_head_finds_far_keys_from_that_start():
    group = recalled("softmax")["6", "-half-longer"]
    assert {one.info.seed for one in group.entries} <= set(range(8))
    shares = accuracies(group)
    number = {4: "four", 8: "eight"}[len(shares)]
    filler = min(value for one in shares for (_, grown), value in one.items() if not grown)
    text = f"in 3,000 steps at 5e-4, finds at least {math.floor(1000 * filler) / 10:.1f} % among filler at every"
    text += f" length, in all {number}"
    assert text in TEXT
    pairs, ours = ([one[1024, True] for one in some] for some in (shares, accuracies(recalled()["6", "-half-longer"])))
    assert min(pairs) > max(ours)
    assert filler > 0.99
    assert f"times as many pairs it finds {min(pairs):.2f} to {max(pairs):.2f}, more than global heads." in TEXT
    apart = apart_at_both(*(lead("0.0625", far, ALL) for far in (False, True)))
    (goal,) = of_pages("docs/evidence.md")
    text = f"Its loss minus that of the same Softmax: {apart} (eight seeds). On recall it finds over 99 % among filler"
    text = f"{text} ({number} seeds), and more among pairs than global heads:"
    assert f"{text} {min(pairs):.2f} to {max(pairs):.2f} among 16 times as many." in goal
    every = cell(on_text()["0.0625"][ALL], *FAR).values, cell(on_text()["0.0625"][ALL], *HERE).values
    assert all(last < first for last, first in zip(*every, strict=True)), "docs/evidence.md: flat, in every seed"


def test_what_is_said_of_other_starts_is_measured():
    far = [one[1024, False] for one in accuracies(recalled()["6", "-half"])]
    least = sorted(far)[:2]
    assert len(far) == 8
    assert far.index(least[0]) == 5
    assert least[1] > 0.92
    text = "**In 1,500 steps at 5e-4 with init std 0.0625** seven of eight trainings find over 92 % of the keys among"
    assert f"{text} filler at 16x. Seed 5 finds {least[0]:.2f}." in TEXT
    for place in (("4", "-half"), ("5", "-half"), ("4", "")):
        (one,) = accuracies(recalled()[place])
        assert one[64, False] > 0.97
        assert one[4096, False] > 0.97
    assert accuracies(recalled()["6", ""])[0][64, False] < 0.25
    for start, seeds in (("0.04", 1), ("0.05", 3)):
        assert len(on_text()[start][HEADS].evaluations) == seeds
        assert not lead(start, far=False).sure
        assert not lead(start, far=True).sure
    assert lead("0.02", far=False).value > 0
    softmax = {start: cell(groups["Softmax"], *HERE).loss for start, groups in on_text().items() if "Softmax" in groups}
    assert min(softmax, key=softmax.__getitem__) == "0.09"
    smaller, half = (by_row("starts")[f"softmax-{at}-half"] for at in ("4", "6"))
    for group, start in ((smaller, "0.04"), (half, "0.0625")):
        slower, same = (
            dict(zip((one.seed for one in each.evaluations), cell(each, *HERE).values, strict=True))
            for each in (group, on_text()[start]["Softmax"])
        )
        assert all(slower[seed] < loss for seed, loss in same.items())
    assert len(half.evaluations) == 8
    text = (
        f"At 2e-3 its loss with init std 0.0625 is {shown_loss(cell(half, *HERE))} (eight seeds), lower than at 4e-3 in"
    )
    assert text in TEXT
    both = {"half": half, "best": on_text()["0.09"]["Softmax"]}
    here, far = (beside(both, "half", "best", at) for at in (HERE, WINDOWED))
    assert not here.sure
    assert not far.sure
    text = apart_at_both(here, far, "1x", "16x, both with the window")
    assert f"does not differ significantly from Softmax with init std 0.09 at 4e-3**: {text}. Global heads" in TEXT
    both["heads"] = on_text()["0.0625"][HEADS]
    leads = beside(both, "heads", "half", HERE), beside(both, "heads", "half", FAR, WINDOWED)
    assert all(one.sure for one in leads)
    text = "Global heads with init std 0.0625 minus Softmax with init std 0.0625 at 2e-3:"
    assert f"{text} {apart_at_both(*leads)}." in TEXT
    best = by_seed("layouts", "Softmax", HERE)
    text = (
        "With init std 0.04 at 2e-3 it is {:.3f}, with init std 0.09 at 4e-3, the best of four rates, {:.3f} (seed 0)."
    )
    assert text.format(cell(smaller, *HERE).loss, best[0]) in TEXT


def test_what_is_said_of_other_rates_from_these_starts_is_measured():
    def swept(row: str, *endings: str) -> list[float]:
        return [cell(by_row("starts")[f"{row}{ending}"], *HERE).values[0] for ending in endings]

    for row in ("softmax-6", "softmax-4"):
        quarter, half, same = swept(row, "-quarter", "-half", "")
        assert half < min(quarter, same)
    found = [swept(row, "-half", "", "-twice") for row in ("global-heads-6", "all-softmax-6")]
    assert all(same < min(half, twice) for half, same, twice in found)
    text = "at 1e-3 it has {:.3f} and {:.3f}."
    assert text.format(*(swept(row, "-quarter")[0] for row in ("softmax-6", "softmax-4"))) in TEXT
    text = "they have {:.3f} and {:.3f} at 2e-3, {:.3f} and {:.3f} at 4e-3, {:.3f} and {:.3f} at 8e-3 (seed 0)."
    assert text.format(*(one for rate in zip(*found, strict=True) for one in rate)) in TEXT
