"""docs/claims.md, and a note of a claim: they show the committed results."""

import math
import re
import statistics
import tomllib

import pytest

from softfocus.lab.report.points import Cell, cell

from .committed import FAR, HERE, RESULTS, ROOT, by_row, claim, encoder_rates, loss, minus, of_pages, of_seeds
from .tables import shown, shown_loss, table, tables_of
from .test_claims_best_rates import TABLES as BEST_RATES
from .test_claims_notes import runs_of
from .test_claims_rates import TABLES as RATES
from .test_claims_rates import given, laser_rates, loss_or_diverged, rates_of, toy_rates
from .test_claims_reasons import TABLES as REASONS

PAGE = (ROOT / "docs/claims.md").read_text()
TEXT, SHOWN = " ".join(PAGE.split()), tables_of(PAGE)


def toy_table() -> str:
    assert all(len(one.rows) == 3 for cells in toy_rates().values() for one in cells)
    rows = ([f"`{row}`", *map(shown_loss, cells)] for row, cells in toy_rates().items())
    return table(["row", "2e-3", "4e-3", "8e-3"], rows)


def table_rates() -> dict[str, list[Cell | None]]:
    """The other rows of the softplus paper's tables, with seed 0: at half the claims' learning
    rate, at it, and at twice that; None where the training diverged.
    """
    swept = by_row("table-learning-rates")
    published = [claim(f"softplus-table-{number}") for number in (1, 2, 3, 4)]
    found = {}
    for row in dict.fromkeys(name.rpartition("-")[0] for name in swept):
        own = next((group for results in published if (group := results.group(row)) is not None), None)
        if own is not None:
            found[row] = rates_of(swept, own, row)
    return found


def rates_of_tables() -> str:
    rows = ([f"`{row}`", *map(loss_or_diverged, cells)] for row, cells in table_rates().items())
    return table(["row", "2e-3", "4e-3", "8e-3"], rows)


def rates_of_laser() -> str:
    rows = ([f"`{row}`", *map(shown_loss, cells)] for row, cells in laser_rates().items())
    return table(["row", "2e-3", "4e-3", "8e-3"], rows)


def encoder_table() -> str:
    rows = []
    for model, name in ENCODERS.items():
        found = encoder_rates(model)
        for other in VIT if model == "vit" else ():
            found |= encoder_rates(model, other)
        for row, cells in found.items():
            rates = [f"{one.loss:.1%}" + (f" ± {one.spread:.1%}" if one.values[1:] else " (seed 0)") for one in cells]
            rows.append([f"{name}, {ENCODER_ROWS[row]}", *rates, *[""] * (4 - len(rates))])
    return table(["error rate", "1e-3", "2e-3", "4e-3", "8e-3"], rows).replace("%", " %")


ENCODERS = {"vit": "ViT", "bert": "BERT", "conformer": "Conformer"}
ENCODER_ROWS = {
    "softmax": "softmax", "laser": "LASER", "qk_norm": "softmax and QK-norm", "qk_norm_laser": "LASER and QK-norm",
    "qk_layer_norm": "softmax and LayerNorm of queries and keys",
    "qk_layer_norm_laser": "LASER and LayerNorm of queries and keys", "scenario_i": "without softmax",
}  # fmt: skip
VIT = "laser-vit-qk-norm", "laser-vit-qk-layer-norm", "softplus-vision"
TABLES = {
    "toy_rates": toy_table, "table_rates": rates_of_tables, "encoder_rates": encoder_table,
    "laser_rates": rates_of_laser,
}  # fmt: skip


@pytest.mark.parametrize("mark", TABLES)
def test_the_learning_rates_of_the_claims_are_the_committed_ones(mark):
    assert SHOWN[mark] == TABLES[mark](), f"docs/claims.md should show:\n{TABLES[mark]()}"


def test_every_table_is_tested():
    assert SHOWN.keys() == TABLES.keys() | RATES.keys() | REASONS.keys() | BEST_RATES.keys()


def test_what_the_start_costs_is_the_measured_one():
    rows = ("softmax", "softmax-4", "softmax-8", "lssa", "lssa-4", "lssar", "lssar-4", "lssar-8")
    said = (
        "softmax's is {:.3f} at 2e-3, {:.3f} at 4e-3 and {:.3f} at 8e-3. LSSA's is {:.3f} at 2e-3 and {:.3f} at 4e-3. "
        "LSSAR's is {:.3f}, {:.3f} and {:.3f}"
    )
    assert said.format(*(loss("toy-start", f"{row}-s0", 64) for row in rows)) in TEXT


def test_the_encoders_have_the_initial_weights_that_are_said():
    starts = []
    for model in ENCODERS:
        runs = runs_of(f"laser-{model}")
        (start,) = {tomllib.loads(run["recipe"])["model"]["config"]["initializer_range"] for run in runs}
        starts.append(start)
    vit, bert, conformer = starts
    assert f"They have init stds of their own: {vit}, {bert} and {conformer}." in TEXT


def test_what_other_rates_cost_at_the_scale_toy_is_the_measured_one():
    rows = {row: [round(one.loss, 3) for one in cells] for row, cells in toy_rates().items()}
    assert [row for row, (half, same, twice) in rows.items() if same > min(half, twice)] == ["lssar"]
    softmax, lssa, laser = (rows[row][2] - rows[row][1] for row in ("softmax", "lssa", "laser"))
    assert (
        f"**At 8e-3** the loss is higher than at 4e-3 by {softmax:.3f} for softmax, by {lssa:.3f} for LSSA and by "
        f"{laser:.3f} for LASER. LSSAR's is lower by {rows['lssar'][1] - rows['lssar'][2]:.3f}, less than its seeds "
        "differ." in TEXT
    )
    cells = toy_rates()
    apart = [ours.minus(plain) for plain, ours in zip(cells["softmax"], cells["laser"], strict=True)]
    assert [one.sure for one in apart] == [True, False, True]
    each = map(given, apart, ("2e-3", "4e-3", "8e-3"))
    assert "**LASER minus softmax**: {}, {} and {}.".format(*each) in TEXT


def test_what_is_said_of_the_rates_of_tables_is_measured():
    rates = {row: [one and round(one.loss, 3) for one in cells] for row, cells in table_rates().items()}
    assert [(row, cells.index(None)) for row, cells in rates.items() if None in cells] == [("scenario_ii", 2)]
    known = {row: [loss or math.inf for loss in cells] for row, cells in rates.items()}
    best = {row: min(range(3), key=cells.__getitem__) for row, cells in known.items()}
    same, twice = sum(at == 1 for at in best.values()), [row for row, at in best.items() if at == 2]
    assert (len(twice), [row for row, at in best.items() if at == 0]) == (7, ["softmax_p3", "softmax_p15"])
    gain = max(known[row][1] - known[row][2] for row in twice)
    halved = [known[row][1] - known[row][0] for row in ("softmax_p3", "softmax_p15")]
    assert (
        f"Twice the rate is better for seven rows, by at most {gain:.3f}. Half is better for `softmax_p3` by "
        f"{halved[0]:.3f} and for `softmax_p15` by {halved[1]:.3f}." in TEXT
    )
    assert f"4e-3 is the best of three rates for {same} of these {len(rates)} rows." in TEXT
    plain, normed = known["softmax_recentred"], known["softmax_recentred_l1"]
    assert all(with_l1 > without for with_l1, without in zip(normed, plain, strict=True))
    own = claim("softplus-table-4").group("softmax")
    swept = by_row("toy-learning-rates")
    softmax = of_seeds({"half": swept["softmax-half"], "own": own, "twice": swept["softmax-twice"]}, {0})
    lowest = min(cell(group, *HERE).loss for group in softmax.values())
    higher = [known["scenario_i"][n] / cell(group, *HERE).loss - 1 for n, group in enumerate(softmax.values())]
    page = " ".join((RESULTS / "claims/softplus-table-2.md").read_text().split())
    assert f"higher than softmax's by {100 * min(higher):.0f} to {100 * max(higher):.0f} % at each" in page
    activations = {row: min(known[row]) for row in known if row.endswith("_l1") and row.count("_") == 1}
    assert len(activations) == 7
    assert sorted([*activations.values(), lowest]).index(activations["relu2_l1"]) == 1
    assert min(known["softmax_p3"]) > lowest


def test_what_laser_gains_at_the_best_rates_is_the_measured_one():
    for model, name in ENCODERS.items():
        rates = encoder_rates(model)
        softmax, laser = (min(cells, key=lambda one: one.loss) for cells in rates.values())
        found = laser.minus(softmax)
        points = f"{100 * found.value:+.1f} ± {100 * found.standard_error:.1f}"
        assert f"* **{name}**: {points}{'' if found.sure else ' (inconclusive)'}." in TEXT
        page = " ".join((RESULTS / f"claims/laser-{model}.md").read_text().split())
        at_best = {
            "vit": f"LASER's error rate is lower by {-100 * found.value:.1f} ± {100 * found.standard_error:.1f} ",
            "bert": f"the difference in the error rate is {points} percentage points"
            + ("" if found.sure else ", inconclusive:"),
            "conformer": "LASER is behind on average at each, inconclusive at each.",
        }
        assert at_best[model] in page
        leads = [plain.loss - ours.loss for plain, ours in zip(rates["softmax"], rates["laser"], strict=True)]
        if model == "conformer":
            assert max(leads) < 0
            assert not any(b.minus(a).sure for a, b in zip(rates["softmax"], rates["laser"], strict=True))
            lost = [f"{100 * max(cells[at].values):.1f} %" for at in (0, 2) for cells in rates.values()]
            assert "{} and {} at half the rate (seed 2 of both rows), and {} and {} at twice.".format(*lost) in TEXT
            assert all(cells[0].values.index(max(cells[0].values)) == 2 for cells in rates.values())
        else:
            assert 0 < leads[0] < leads[1] < leads[2], "the lead grows with the rate"
            assert all(cells[3].loss > cells[2].loss for cells in rates.values()), "worse at 8e-3"
            assert f"the ViT's lead is {100 * leads[3]:.1f} points" in TEXT or model == "bert"
        assert (softmax, laser) == (rates["softmax"][1], rates["laser"][1 if model == "conformer" else 2])


def test_what_qk_norm_gains_at_the_best_rates_is_the_measured_one():
    def best(cells):
        return min(cells, key=lambda one: one.loss)

    normed, plain = encoder_rates("vit", VIT[0]), encoder_rates("vit")
    assert all(
        ours.loss < softmax.loss for ours, softmax in zip(normed["qk_norm_laser"], normed["qk_norm"], strict=True)
    )
    assert all(
        with_it.loss > without.loss
        for with_it, without in zip(normed["qk_norm_laser"][:3], plain["laser"][:3], strict=True)
    )
    ours = best(normed["qk_norm_laser"])
    found = [ours.minus(rival) for rival in (best(normed["qk_norm"]), best(plain["laser"]))]
    points = [
        f"{100 * one.value:+.1f} ± {100 * one.standard_error:.1f}" + ("" if one.sure else " (inconclusive)")
        for one in found
    ]
    assert f"* **ViT, both [with QK-norm](results/claims/laser-vit-qk-norm.md)**: {points[0]}." in TEXT
    assert f"Each at its best rate, LASER with QK-norm minus LASER: {points[1]}." in TEXT


def test_what_layer_norm_and_a_vit_without_softmax_have_at_the_best_rates_is_the_measured_one():
    def best(of, row):
        return min(encoder_rates("vit", of)[row], key=lambda one: one.loss)

    def apart(one, other):
        found = one.minus(other)
        return f"{100 * found.value:+.1f} ± {100 * found.standard_error:.1f}" + (
            "" if found.sure else " (inconclusive)"
        )

    softmax, laser = best(None, "softmax"), best(None, "laser")
    normed, normed_laser = best(VIT[1], "qk_layer_norm"), best(VIT[1], "qk_layer_norm_laser")
    bare = best(VIT[2], "scenario_i")
    assert all(len(one.values) >= 3 for one in (softmax, laser, normed, normed_laser, bare))
    (beyond,) = by_row("vit-learning-rates")["qk_layer_norm_laser-eight-times"].evaluations
    error = next(row.loss for row in beyond.rows if row.setting.wrong)
    assert f"At 16e-3 it has {100 * error:.1f} % (seed 0)." in TEXT
    assert error > normed_laser.values[0]
    link = "(results/claims/laser-vit-qk-layer-norm.md)**:"
    assert f"{link} {apart(normed_laser, normed)}. Each at its best rate, LASER with LayerNorm minus LASER:" in TEXT
    assert f"LASER with LayerNorm minus LASER: {apart(normed_laser, laser)}. The same of softmax:" in TEXT
    assert f"The same of softmax: {apart(normed, softmax)}." in TEXT
    assert f"(results/claims/softplus-vision.md)** minus ViT with softmax: {apart(bare, softmax)}. So" in TEXT


PLAIN = ["softplus-post-hoc", "softplus-without-ntk"]


def trainings(name: str) -> list[list]:
    """The losses of a claim's trainings at the scale small."""
    return [run.info.train_loss for run in claim(name, "small").runs]


def test_what_is_said_of_the_scale_small():
    claims_of_small = sorted(path.parents[1].name for path in (RESULTS / "claims").glob("*/small/results.json"))
    assert claims_of_small == ["laser-gradients", "laser-steps", "softplus-figure-1", *PLAIN]
    assert trainings("softplus-post-hoc") == trainings("softplus-without-ntk"), "they share their trainings"
    plain = [cell(claim("softplus-without-ntk", "small").group(row), *FAR).values for row in ("softmax", "lssa")]
    assert all(lssa > softmax for softmax, lssa in zip(*plain, strict=True))
    found = claim("softplus-figure-1", "small")
    by = {row: found.group(row) for row in found.rows}
    assert minus(by, "lssar", "lssar", (16.0, "dynamic NTK"), HERE).value < 0
    below = {n: minus(by, "lssar", "softmax", (float(n), "dynamic NTK")) for n in (2, 4, 8, 16)}
    assert {n: found.sure for n, found in below.items()} == {2: True, 4: False, 8: True, 16: True}
    assert all(one.value < 0 for one in below.values())
    said = f"LSSAR has a lower loss than softmax at 2x, 8x and 16x.** LSSAR minus softmax: {given(below[4], '4x')}."
    assert said in TEXT
    plain = claim("softplus-without-ntk", "small").group("lssar")
    assert cell(plain, *FAR).loss < cell(plain, *HERE).loss, "as trained, too"
    toy = claim("softplus-figure-1").group("lssar")
    assert all(cell(toy, 16.0, name).loss > cell(toy, *HERE).loss for name in ("as trained", "dynamic NTK"))
    assert "LSSAR's loss is lower at 16x than at 1x. At the scale `toy` it is higher." in TEXT
    recorded = claim("laser-steps", "small")
    groups = {row: recorded.group(f"{row}_recorded") for row in ("laser", "softmax")}
    losses = [cell(group, *HERE).values for group in groups.values()]
    assert all(laser < softmax for laser, softmax in zip(*losses, strict=True))
    assert f"than softmax at 1x in all three seeds**: {given(minus(groups, 'laser', 'softmax'))}." in TEXT
    ledger = (RESULTS / "claims/README.md").read_text()
    holds, fails, inconclusive, *_others = re.search(r"^\| small \| (.*) \|$", ledger, re.MULTILINE)[1].split(" | ")
    number = ("none", "one", "two", "three", "four", "five").__getitem__
    counts = (number(int(one)) for one in (holds, fails, inconclusive))
    said = "Of {} claims that were judged with 10 M parameters, {} holds, {} fails and {} are inconclusive."
    assert said.format(number(len(claims_of_small)), *counts) in TEXT
    judged = {part: _ratio(part) for part in ("query", "key", "value")}
    least, most = (f"{100 * (1 - ratio):.0f}" for ratio in (max(judged.values()), min(judged.values())))
    assert f"the medians are {least} to {most} % smaller" in TEXT


def test_the_two_losses_of_softmax_at_the_scale_small_are_the_measured_ones():
    found = claim("laser-steps", "small")
    at_end = statistics.mean(run.info.validation_loss[-1][1] for run in found.of("softmax_recorded"))
    table_loss = cell(found.group("softmax_recorded"), *HERE).loss
    note = " ".join((RESULTS / "claims/laser-steps.md").read_text().split())
    assert f"At the scale `small` softmax has {at_end:.2f} at its end and {table_loss:.2f} in the table" in note


def _ratio(part: str) -> float:
    """The median gradient of LASER's projections, as a share of softmax's: the mean of the seeds'
    logarithms.
    """
    found = claim("laser-gradients", "small")
    norms = {
        row: [math.log(statistics.median(norm for _, norm in run.info.projection_norms[part])) for run in found.of(row)]
        for row in found.rows
    }
    return math.exp(statistics.mean(norms["laser_recorded"]) - statistics.mean(norms["softmax_recorded"]))


def test_laser_is_below_its_rival_at_each_rate():
    rates = laser_rates()
    assert len(rates) == 11
    pairs = {"qk_norm_laser": "qk_norm", "qwen3_laser": "qwen3_softmax", "differential_laser": "differential"}
    pairs |= {"llama_laser": "llama_softmax", "llama_scaled_laser": "llama_scaled_softmax"}
    leads = {
        ours: [one.minus(rival) for one, rival in zip(rates[ours], rates[theirs], strict=True)]
        for ours, theirs in pairs.items()
    }
    assert max(lead.value for found in leads.values() for lead in found) < 0
    said = "has a lower mean loss than softmax at each rate in each of four more claims, by {:.3f} or more."
    assert said.format(-max(lead.value for found in leads.values() for lead in found)) in TEXT
    leads["temperatures"] = [
        one.minus(plain) for one, plain in zip(rates["qwen3_laser"], rates["llama_laser"], strict=True)
    ]
    for row, said in {
        "qwen3_laser": "LASER minus softmax, both with temperatures",
        "differential_laser": "LASER minus softmax, both with Differential attention",
        "temperatures": "LASER with temperatures and their normalisation minus LASER",
    }.items():
        first, second, third = map(given, leads[row], ("2e-3", "4e-3", "8e-3"))
        assert f"* **{said}**: {first}, {second} and {third}." in " ".join(PAGE.split())
    assert all(found.sure for found in leads["differential_laser"] + leads["temperatures"])
    (evidence,) = of_pages("docs/evidence.md")
    assert "significantly with two layers and with Differential attention, and for seed 0 with QK-norm." in evidence
    seeds = {row: [len(one.rows) for one in cells] for row, cells in rates.items()}
    assert seeds == {
        **{row: [1, 1, 1] for row in ("qk_norm", "qk_norm_laser")},
        **{row: [1, 3, 1] for row in ("llama_scaled_softmax", "llama_scaled_laser")},
        **{
            row: [3, 6, 3]
            for row in ("llama_softmax", "llama_laser", "llama_qk_norm_laser", "qwen3_softmax", "qwen3_laser")
        },
        **{row: [3, 3, 3] for row in ("differential", "differential_laser")},
    }
    said = (
        "The rows of `laser-qk-norm` have seed 0, the others three seeds, but for two. Those of `laser-temperature` "
        "have six at 4e-3, and `llama_scaled_softmax` and `llama_scaled_laser` have one at the other rates."
    )
    assert said in TEXT


def test_most_of_what_temperatures_change_is_their_normalisation():
    """Of LASER, each row at its best rate."""
    swept, own = by_row("llama-learning-rates"), claim("laser-temperature")
    rates = {row: laser_rates()[row] for row in ("llama_laser", "llama_qk_norm_laser", "qwen3_laser")}
    losses = {row: [one.loss for one in cells] for row, cells in rates.items()}
    best = {row: found.index(min(found)) for row, found in losses.items()}
    assert best == {"llama_laser": 1, "llama_qk_norm_laser": 2, "qwen3_laser": 2}
    by = {row: swept[f"{row}-twice"] for row in ("llama_qk_norm_laser", "qwen3_laser")}
    by |= of_seeds({"llama_laser": own.group("llama_laser")}, {0, 1, 2})
    normed, both = minus(by, "llama_qk_norm_laser", "llama_laser"), minus(by, "qwen3_laser", "llama_laser")
    apart = minus(by, "llama_qk_norm_laser", "qwen3_laser")
    assert normed.sure
    assert both.sure
    assert apart.sure
    assert both.value < 2 * apart.value * -1, "most of it"
    assert f"LASER with QK-norm minus LASER**: {shown(normed, '+')}." in TEXT
    assert f"LASER with temperatures and their normalisation minus LASER: {shown(both, '+')}." in TEXT
    alone = claim("laser-query-scale")
    rows = {row: alone.group(row) for row in alone.rows}
    changed = minus(rows, "llama_scaled_laser", "llama_laser")
    assert not changed.sure
    assert f"change LASER's loss by {shown(changed, '+')} at 4e-3, inconclusive." in TEXT
    other = minus(rows, "llama_scaled_softmax", "llama_softmax")
    assert not other.sure
    page = " ".join((RESULTS / "claims/laser-query-scale.md").read_text().split())
    assert f"the loss of LASER by {shown(changed, '+')}, that of softmax by {shown(other, '+')}." in page


def test_what_qk_norm_does_to_laser_depends_on_the_rate():
    plain = rates_of(by_row("toy-learning-rates"), claim("laser-qk-norm").group("laser"), "laser")
    lower = [one.loss - both.loss for one, both in zip(plain, laser_rates()["qk_norm_laser"], strict=True)]
    losses = plain[2].loss, laser_rates()["qk_norm_laser"][2].loss
    assert "lowers LASER's loss at 8e-3, from {:.3f} to {:.3f}.".format(*losses) in TEXT
    assert f"At 4e-3 it lowers it by {lower[1]:.3f}, and at 2e-3 it raises it by {-lower[0]:.3f}." in TEXT
    page = " ".join((RESULTS / "claims/laser-qk-norm.md").read_text().split())
    assert f"QK-norm lowers LASER's loss at twice the rate, by {lower[2]:.3f}." in page
    assert max(abs(lower[0]), abs(lower[1])) < 0.01, "nearly equal"
