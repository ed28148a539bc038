"""docs/recall.md shows the committed results."""

import pytest

from softfocus.lab.report.recall_compare import RecallGroup
from softfocus.lab.report.results import read_as
from softfocus.lab.run_folder.results import Recall

from .committed import RESULTS, ROOT, WINDOW, accuracies, accuracies_by_run, loss, of_pages, recalls, runs
from .tables import table, tables_of

PAGE = (ROOT / "docs/recall.md").read_text()
TEXT, SHOWN = " ".join(PAGE.split()), tables_of(PAGE)


def recall_table() -> str:
    across = ((1, False), (4, False), (16, False), (64, False), (4, True), (16, True), (64, True))
    rows = []
    for group in recalls("recall-layouts").values():
        found = {(point.at // 64, grown): point for grown in (False, True) for point in group.points(grown)}
        spread = {at: f" ± {found[at].error:.2f}" if len(group.entries) > 1 else "" for at in across}
        rows.append([group.title, *(f"{found[at].value:.2f}{spread[at]}" for at in across)])
    header = ["second layer", *(f"{n}x, {'pairs' if grown else 'filler'}" if n > 1 else "1x" for n, grown in across)]
    return table(header, rows)


def at_rates() -> dict[str, dict[str, RecallGroup]]:
    """The rows that were trained at 5e-4, too, by label; each at the learning rates that it has."""
    read = {"1e-3": recalls("recall-layouts")} | {
        rate: recalls(f"recall-layouts-rates/{rate}") for rate in ("5e-4", "2e-3")
    }
    assert read["2e-3"].keys() <= read["5e-4"].keys()
    return {label: {rate: groups[label] for rate, groups in read.items() if label in groups} for label in read["5e-4"]}


def recall_rates() -> str:
    """The rows that were trained at 5e-4, too."""
    across, rows = ((1, False), (16, False), (64, False), (64, True)), []
    for label, groups in at_rates().items():
        for rate in ("5e-4", "1e-3", "2e-3"):
            if rate in groups:
                seeds = accuracies(groups[rate])
                shares = (", ".join(f"{seed[64 * n, grown]:.2f}" for seed in seeds) for n, grown in across)
                rows.append([f"{label} at {rate}", *shares])
    return table(["second layer", "1x", "16x, filler", "64x, filler", "64x, pairs"], rows)


def lssa_recall() -> str:
    """Loss on text and recall of the layouts with LSSA: seed 0, recipes that differ in the data and
    in what half the training length is.
    """
    names = {
        "lssa-hybrid": "`demo-hybrid`",
        "lssa-hybrid-head": "`demo-hybrid` that recalls",
        "lssa-local-head": "the same with LSSA in the global layers",
    }
    trained = runs("layouts", "layout-candidates")
    by = [accuracies_by_run(name) for name in LSSA_RATES.values()]
    rows = []
    for row, name in names.items():
        one = trained[f"{row}-s0"]
        loss = one.row(128).loss, one.row(2048).loss, one.row(2048, WINDOW).loss
        right = [at_rate[f"{row}-s0"][at] for at_rate in by for at in ((64, False), (1024, False), (1024, True))]
        rows.append([name, *(f"{x:.3f}" for x in loss), *(f"{x:.2f}" for x in right)])
    across = [f"recall {at}, {rate}" for rate in ("5e-4", "1e-3") for at in ("1x", "16x, filler", "16x, pairs")]
    return table(["seed 0", "loss, 1x", "loss, 16x", "loss, 16x, window", *across], rows)


LSSA_RATES = {"5e-4": "recall-lssa-rates/5e-4", "1e-3": "recall-lssa"}


def passkey_table() -> str:
    """Every seed."""
    names = {
        "Softmax": "softmax", "window": "softmax, evaluated with a window of 128",
        "cosine_log_n": "cosine softmax, log N", "ssmax": "SSMax", "LASER": "LASER",
        "sharpened(lssa, 3)": "LSSAR, p = 3", "sharpened(lssa, 7)": "LSSAR, p = 7", "LSSAR": "LSSAR, p = 15",
        "LSSA": "LSSA",
        "softmax-nope": "softmax, window of 16; then softmax without RoPE",
        "lssa-nope": "softmax, window of 16; then LSSA without RoPE",
        "lssar-nope": "softmax, window of 16; then LSSAR without RoPE",
        "softmax-local": "softmax, window of 16; then softmax",
        "softmax-nope-alone": "softmax; then softmax without RoPE",
        "global-heads": "heads as in `demo-global-heads`",
        "global-heads-half": "the same at 5e-4",
        "hybrid": "LSSA, window of 64; then LSSAR, p = 31, half of RoPE, as in `demo-hybrid`",
    }  # fmt: skip
    groups, times, rows = recalls("passkey"), (1, 2, 4, 16, 64), []
    assert groups.keys() == names.keys()
    for label, name in names.items():
        assert len(groups[label].entries) == 3
        seeds = (", ".join(f"{run[128 * n, False]:.2f}" for run in accuracies(groups[label])) for n in times)
        rows.append([name, *seeds])
    return table(["the two layers", *(f"{n}x" for n in times)], rows)


LEARNED = 0.97
"""The share of right answers at 1x beyond which a training has learned its task."""
TABLES = {"recall": recall_table, "recall_rates": recall_rates, "lssa_recall": lssa_recall, "passkey": passkey_table}


@pytest.mark.parametrize("mark", TABLES)
def test_the_tables_are_the_committed_ones(mark):
    assert SHOWN[mark] == TABLES[mark](), f"docs/recall.md should show:\n{TABLES[mark]()}"


def test_every_table_is_tested():
    assert SHOWN.keys() == TABLES.keys()


def test_what_is_said_of_recall_holds_for_every_seed():
    by = {label: accuracies(group) for label, group in recalls("recall-layouts").items()}
    assert all(len(seeds) == 3 for seeds in by.values())
    learned = {label: all(seed[64, False] > LEARNED for seed in seeds) for label, seeds in by.items()}
    assert f"A training has learned the task where over {100 * LEARNED:.0f} % of its answers are right at 1x" in TEXT
    (heads,) = of_pages("docs/global-heads.md")
    assert f"and over {LEARNED} at 1x where a training has learned the task" in heads
    short = [label for label in by if label.endswith("-short-rope")]
    assert {label for label in short if not learned[label]} == {"lssa-short-rope", "lssar-3-short-rope"}
    for label in [label for label in short if learned[label]] + ["lssar-nope"]:
        assert all(seed[64 * n, False] > 0.99 for seed in by[label] for n in (1, 4, 16, 64)), label
    every = [seed for label in short for seed in by[label] if seed[64, False] > LEARNED]
    assert len(every) > 3 * sum(learned[label] for label in short), "of LSSAR with p = 3, too"
    assert min(seed[4096, False] for seed in every) > 0.99
    assert min(seed[1024, False] for seed in every) > 0.99
    assert "every training that learned the task finds over 99 % of the keys at 16x among filler." in TEXT
    softmax = [seed[4096, True] for seed in by["softmax-short-rope"]]
    others = {
        "cosine-short-rope", "ssmax-short-rope", "lssar-short-rope", "laser-short-rope", "lssar-7-short-rope",
        "lssar-15-short-rope",
    }  # fmt: skip
    assert others == {label for label in short if learned[label]} - {"softmax-short-rope"}
    far = {label: [seed[4096, True] for seed in by[label]] for label in others}
    assert all(loss > below for seeds in far.values() for loss, below in zip(seeds, softmax, strict=True))
    assert "With short wavelengths its three seeds find {:.2f}, {:.2f} and {:.2f}.".format(*softmax) in TEXT
    assert "that learned the task in all three seeds find more in every seed." in TEXT
    plateau = {f"{seed[64, False]:.2f}" for seed in by["lssa-short-rope"]}
    assert f"({min(plateau)} to {max(plateau)} at 1x)" in TEXT
    assert sum(seed[64, False] > 0.99 for seed in by["lssar-3-short-rope"]) == 1
    assert "and LSSAR with p = 3 learned it with one seed of three." in TEXT
    without = [seed[64, False] > 0.99 for seed in by["softmax-nope"]]
    assert f"Softmax without RoPE found them with {['zero', 'one', 'two'][sum(without)]}" in TEXT
    assert all(seed[4096, False] > 0.99 for seed, ok in zip(by["softmax-nope"], without, strict=True) if ok)
    apart = [seed[1024, False] for seed in by["softmax-none-beside-lssar-all"] if seed[64, False] > 0.99]
    assert "Two of three seeds learned the task, and find {:.2f} and {:.2f} at 16x among".format(*apart) in TEXT
    half = {label: accuracies(group) for label, group in recalls("recall-layouts-rates/5e-4").items()}
    one, both = (
        sorted(seed[1024, False] for seed in half[label])
        for label in ("softmax-none-beside-lssar-all", "lssar-all-beside-none")
    )
    assert f"At 5e-4 all three did, and find {one[0]:.2f} to {one[-1]:.2f}." in TEXT
    assert f"With LSSAR in both heads the three seeds find {both[0]:.2f} to {both[-1]:.2f} there." in TEXT


def test_what_is_said_of_recall_at_other_rates_holds_for_every_seed():
    by = {label: {rate: accuracies(group) for rate, group in groups.items()} for label, groups in at_rates().items()}
    pairs = {
        label: {rate: [seed[4096, True] for seed in seeds] for rate, seeds in rates.items()}
        for label, rates in by.items()
    }
    short = [label for label in by if label.endswith(("-short-rope", "-nope"))]
    assert by.keys() == recalls("recall-layouts").keys() - {"window"}
    assert (len(by), len(short)) == (16, 11)
    half = {label: rates["5e-4"] for label, rates in by.items()}
    assert all(len(seeds) == 3 and seed[64, False] > LEARNED for seeds in half.values() for seed in seeds)
    assert "**At 5e-4 each of sixteen rows learned the task with each seed. LSSA learned it at no other rate.**" in TEXT
    assert all(seed[1024, False] > 0.99 for label in short for seed in half[label])
    tried = {"lssa-short-rope", "lssar-3-short-rope", "softmax-short-rope"}
    assert {label for label, rates in by.items() if "2e-3" in rates} == tried
    assert "too, and three of them at 2e-3" in TEXT
    assert all(seed[64, False] < 0.25 for label in tried for seed in by[label]["2e-3"])
    assert "**At 2e-3 none of the three rows learns the task.**" in TEXT

    lssa = by["lssa-short-rope"]
    assert all(seed[64, False] < 0.25 for rate in ("1e-3", "2e-3") for seed in lssa[rate])
    assert all(seed[4096, False] == 1 for seed in lssa["5e-4"])
    ours, cosine = sorted(pairs["lssa-short-rope"]["5e-4"]), sorted(pairs["cosine-short-rope"]["1e-3"])
    assert f"and {ours[0]:.4f} to {ours[-1]:.4f} of them among 64 times as many pairs." in TEXT
    assert f"finds {cosine[0]:.4f} to {cosine[-1]:.4f} at 1e-3: this difference may be noise." in TEXT
    softmax = {rate: sorted(shares) for rate, shares in pairs["softmax-short-rope"].items()}
    assert max(shares[-1] for shares in softmax.values()) < ours[0]
    assert "Every training of LSSA at 5e-4 finds more than every training of softmax." in TEXT
    best = max(softmax.values(), key=sum)
    shares = (f"{100 * share:.1f}" for share in (ours[0], ours[-1], best[0], best[-1]))
    said = "LSSA finds {} to {} % of the keys, softmax {} to {} %, each at the best of three learning rates."
    assert said.format(*shares) in TEXT

    fewer = {f"{name}-short-rope" for name in ("softmax", "ssmax", "laser")}
    more = {f"lssar{power}-short-rope" for power in ("", "-7", "-15")} | {"lssar-nope"}
    for label in fewer | more:
        both = zip(pairs[label]["5e-4"], pairs[label]["1e-3"], strict=True)
        assert all((a > b) == (label in more) for a, b in both), label
    lost = {label for label in short if min(seed[4096, False] for seed in half[label]) < 0.995}
    assert lost == {"lssar-3-short-rope"}
    low, seven, fifteen, most = (sorted(pairs[f"lssar{power}-short-rope"]["5e-4"]) for power in ("-3", "-7", "-15", ""))
    said = f"LSSAR finds {low[0]:.2f} to {low[-1]:.2f} with p = 3, {seven[0]:.3f} to {seven[-1]:.3f} with p = 7,"
    assert f"{said} {fifteen[0]:.3f} with p = 15 and {most[0]:.3f} to {most[-1]:.3f} with p = 31." in TEXT
    assert f"{fifteen[0]:.3f}" == f"{fifteen[-1]:.3f}"
    assert max(low + seven + fifteen + most) < min(ours)
    filler, many = (sorted(seed[at] for seed in half["lssar-half-rope"]) for at in ((1024, False), (4096, True)))
    text = f"it finds {filler[0]:.2f} to {filler[-1]:.2f} at 16x among filler, and {many[0]:.2f} to {many[-1]:.2f}"
    assert f"{text} among 64 times as many pairs." in TEXT

    readme, evidence = of_pages("README.md", "docs/evidence.md")
    edges = f"{100 * best[0]:.0f} to {100 * best[-1]:.0f} %"
    others = "`cosine_log_n`, SSMax, LASER, LSSA and LSSAR (p of 7 or more) over 98 %, each at its best rate"
    assert f"With short wavelengths, among 64 times as many pairs, softmax recalled {edges}; {others}" in readme
    high = {
        name: max(min(shares) for shares in pairs[f"{name}-short-rope"].values())
        for name in ("cosine", "ssmax", "laser", "lssa", "lssar-7", "lssar-15", "lssar")
    }
    assert min(high.values()) > 0.98
    assert f"softmax finds {edges[:-2].replace(' to', ' to')} %, LSSA and cosine softmax over 99.5 %" in evidence
    assert min(high["cosine"], high["lssa"]) > 0.995


def test_what_is_said_of_passkeys_holds_for_every_seed():
    groups = recalls("passkey")
    by = {label: accuracies(group) for label, group in groups.items()}
    whole = {
        (label, row.length // 128): [entry.recall.shown[place].complete for entry in group.entries]
        for label, group in groups.items()
        for place, row in enumerate(group.entries[0].recall.shown)
    }
    for label in ("softmax-nope", "lssa-nope", "lssar-nope", "global-heads-half"):
        assert all(share == 1 for seed in by[label] for share in seed.values()), label
    heads = [seed[8192, False] for seed in by["global-heads"]]
    assert "they find {:.2f}, {:.2f} and {:.2f} of the digits at 64x.".format(*heads) in TEXT
    evidence = " ".join((ROOT / "docs/evidence.md").read_text().split())
    assert "trained at 5e-4, find every number at 64x (three seeds)" in evidence
    for label in by.keys() - {"softmax-nope", "lssa-nope", "lssar-nope", "global-heads", "global-heads-half", "hybrid"}:
        assert whole[label, 64] == [0, 0, 0], label
        assert all(seed[8192, False] < 0.2 for seed in by[label]), "near chance"
    digits = "{:.2f}, {:.2f} and {:.2f}".format(*(seed[8192, False] for seed in by["hybrid"]))
    numbers = f"{min(whole['hybrid', 64]):.2f} to {max(whole['hybrid', 64]):.2f}"
    assert f"At 64x they find {digits} of the digits, and the whole number in {numbers} of the sequences." in TEXT
    for n in (2, 4):
        local, plain = ([seed[128 * n, False] for seed in by[label]] for label in ("softmax-local", "Softmax"))
        assert all(ours > rival for ours, rival in zip(local, plain, strict=True))
    assert all(seed[8192, False] < 0.12 for seed in by["softmax-local"]), "at chance"
    assert all(whole["softmax-nope-alone", n] == [0, 0, 0] for n in (2, 4, 8, 16, 32, 64))
    assert by["window"][0][128, False] == by["Softmax"][0][128, False], "the same model"
    assert [seed[128, False] > LEARNED for seed in by["softmax-nope-alone"]].count(False) == 1, "did not learn it"
    near = [seed[256, False] for seed in by["window"]]
    assert f"the model finds {min(near):.2f} to {max(near):.2f} of the digits." in TEXT


def test_who_blurs_is_the_measured_one():
    def share(run, length, grown=False):
        found = read_as(Recall, RESULTS / "recall-far" / f"{run}-s0.json")
        (row,) = (one for one in found.rows if (one.length, one.grown, one.sequences) == (length, grown, 16))
        return f"{row.accuracy:.2f}"

    far = [{share(run, 64 * n) for run in ("softmax", "ssmax")} for n in (64, 256)]
    assert far == [{"1.00"}, {"0.99"}]
    assert "find 1.00 of the keys at 64x among filler and 0.99 at 256x." in TEXT
    assert f"they find {share('softmax', 4096, True)} and {share('ssmax', 4096, True)}." in TEXT
    assert share("cosine", 64) == "0.21"
    assert all(float(share(run, 64)) < 0.25 for run in ("cosine", "lssar", "lssar15"))


def test_what_is_said_of_loss_and_recall_in_one_model_is_the_measured_one():
    by = {rate: accuracies_by_run(name) for rate, name in LSSA_RATES.items()}
    heads = {rate: [found[f"lssa-hybrid-head-s{seed}"] for seed in range(3)] for rate, found in by.items()}
    assert all(len(found) == 5 for found in by.values()), "the others have seed 0"
    half, whole = ([found[1024, False] for found in heads[rate]] for rate in LSSA_RATES)
    pairs = [found[1024, True] for found in heads["5e-4"]]
    assert all(found == 1 for found in half)
    assert "At 5e-4 each of three seeds finds every key at 16x among filler, and at least" in TEXT
    assert f"{min(pairs):.3f} of them among 16 times as many pairs." in TEXT
    assert "At 1e-3 seeds 0, 1 and 2 find {:.2f}, {:.2f} and {:.2f} among filler.".format(*whole) in TEXT
    local = [found["lssa-local-head-s0"][64, False] for found in by.values()]
    assert local[0] > LEARNED
    assert local[1] < 0.25
    counts = [sum(found[64, False] > LEARNED for found in some) for some in heads.values()]
    assert dict(zip(heads, counts, strict=True)) == {"5e-4": 3, "1e-3": 2}
    assert "At 5e-4 each of three trainings learned the recall task, at 1e-3 two of three." in TEXT
    assert "This model learned the task at 5e-4, but not at 1e-3." in TEXT
    assert all(found["lssa-hybrid-s0"][64, False] < 0.25 for found in by.values())
    assert f"loss lower than Softmax's ({loss('layouts', 'softmax-s0'):.3f} with this seed)" in TEXT
    windowed = loss("layouts", "softmax-s0", 2048, WINDOW)
    assert f"it is higher than that of Softmax with the window, {windowed:.3f}." in TEXT
    assert runs("layout-candidates")["lssa-hybrid-head-s0"].row(2048).loss > windowed
