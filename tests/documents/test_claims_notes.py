"""The notes on the pages of claims, docs/results/claims: their numbers are those of the committed
results.
"""

import json
import re
import statistics

from softfocus.lab.claims import claim as claims
from softfocus.lab.claims.verdict import judge
from softfocus.lab.report.points import cell

from .committed import FAR, HERE, RESULTS, WINDOWED, by_row, claim, minus, of_pages
from .tables import shown


def test_the_numbers_in_the_shifts_note_are_the_measured_ones():
    words = note("laser-no-shift", "With values as they are")
    by = {(run["row"], run["info"]["seed"]): run["info"] for run in runs_of("laser-no-shift")}
    assert len(by) == 18
    pairs = [(by["laser", seed], by["laser_no_shift", seed]) for seed in range(3)]
    apart = max(abs(ours["train_loss"][-1][1] - bare["train_loss"][-1][1]) for ours, bare in pairs)
    assert "the last training losses with and without the shift differ by less than 1e-6" in words
    assert apart < 1e-6
    steps = []
    for seed in range(3):
        steps.append(re.search(r"the gradient became nan at step (\d+),", by["laser_no_shift_x8", seed]["error"])[1])
        assert "the loss became nan at step 1," in by["laser_no_shift_x32", seed]["error"]
    assert "is NaN at the steps {}, {} and {}.".format(*steps) in words


def test_the_numbers_in_lambs_note_are_the_measured_ones():
    note = " ".join((RESULTS / "claims/laser-lamb.md").read_text().split())
    swept, own = by_row("lamb-learning-rates"), claim("laser-lamb")
    half, twice = ([swept[f"{row}-{rate}"] for row in ("softmax", "laser")] for rate in ("half", "twice"))
    half, same, twice = (
        [cell(group, *HERE).loss for group in groups]
        for groups in (half, [own.group("softmax_lamb"), own.group("laser_lamb")], twice)
    )
    assert "{:.3f} and {:.3f} at 1e-2, {:.3f} and {:.3f} at 4e-2".format(*half, *twice) in note
    assert all(best < min(a, b) for best, a, b in zip(same, half, twice, strict=True))
    by = {row: own.group(row) for row in own.rows}
    adam, lamb = minus(by, "laser", "softmax"), minus(by, "laser_lamb", "softmax_lamb")
    assert f"LASER minus softmax is {shown(adam, '+')} with AdamW, and {shown(lamb, '+')} with LAMB." in note
    changes = [minus(by, f"{row}_lamb", row) for row in ("softmax", "laser")]
    assert not any(one.sure for one in changes)
    softmax, laser = (shown(one, "+") for one in changes)
    assert f"LAMB changes the loss of softmax by {softmax} and that of LASER by {laser}, both inconclusive." in note


def note(claim: str, begins: str) -> str:
    """The paragraph of a claim's page that begins so, on one line."""
    paragraphs = (" ".join(one.split()) for one in (RESULTS / f"claims/{claim}.md").read_text().split("\n\n"))
    (found,) = (one for one in paragraphs if one.startswith(begins))
    return found


def runs_of(claim: str) -> list[dict]:
    return json.loads((RESULTS / f"claims/{claim}/toy/results.json").read_text())["runs"]


def test_the_two_losses_of_a_note_are_the_measured_ones():
    runs = [one for one in runs_of("laser-steps") if one["row"] == "softmax_recorded"]
    end = statistics.mean(one["info"]["validation_loss"][-1][1] for one in runs)
    table_has = cell(claim("laser-steps").group("softmax_recorded"), *HERE).loss
    said = note("laser-steps", "At the scale `toy` softmax")
    assert f"softmax has {end:.2f} at its end, and the table has {table_has:.2f}" in said


def test_the_power_of_a_note_is_the_measured_one():
    """The error is that of the difference over the seeds."""
    accuracies: dict[str, list[float]] = {"softmax": [], "laser": []}
    for one in runs_of("laser-classification"):
        accuracies[one["row"]].append(one["classification"]["accuracy"])
    apart = [laser - softmax for softmax, laser in zip(*accuracies.values(), strict=True)]
    error = statistics.stdev(apart) / len(apart) ** 0.5
    said = note("laser-classification", "At the scale `toy`")
    assert f"softmax in {statistics.mean(accuracies['softmax']):.0%}".replace("%", " %") in said
    assert f"the error of the difference is {error:.0%}".replace("%", " %") in said


def test_the_control_of_the_temperatures_is_the_measured_one():
    found = claim("laser-temperature")
    by = {row: found.group(row) for row in found.rows}
    normalised, more = (
        minus(by, *pair) for pair in (("llama_laser", "llama_qk_norm_laser"), ("llama_qk_norm_laser", "qwen3_laser"))
    )
    assert (normalised.sure, more.sure) == (False, True)
    said = note("laser-temperature", "At the scale `toy` the loss of `llama_qk_norm_laser`")
    assert f"at the training length is {shown(normalised)} below LASER's, inconclusive, and" in said
    assert f"{shown(more)} above that of LASER with temperatures." in said


def test_what_is_found_of_t6_and_of_layer_norm_is_measured():
    by = {row: claim("softplus-t6").group(f"t6_{row}") for row in ("softmax", "lssar")}
    here, far = minus(by, "lssar", "softmax"), minus(by, "lssar", "softmax", FAR, WINDOWED)
    assert here.sure
    assert far.sure
    page, other = of_pages("docs/results/claims/softplus-t6.md", "docs/results/claims/laser-qk-layer-norm.md")
    assert f"by {shown(here).lstrip('+')}. At 16x, as trained" in page
    assert f"training length, by {shown(far).lstrip('+')}." in page
    groups = {row: claim("laser-qk-layer-norm").group(f"stablelm_{row}") for row in ("qk_norm", "softmax")}
    rises = [cell(group, times, "as trained").loss for group in groups.values() for times in (1.0, 4.0)]
    assert "from {:.3f} to {:.3f} with softmax, and from {:.3f} to {:.3f} without QK-norm.".format(*rises) in other
    rows = ("qk_norm_laser", "qk_norm", "laser", "softmax")
    losses = [[cell(claim("laser-qk-layer-norm").group(f"stablelm_{row}"), *at).loss for row in rows]
              for at in (HERE, WINDOWED)]  # fmt: skip
    assert losses == [sorted(some) for some in losses], "the same order"


def test_what_is_found_of_the_parts_of_softmax_and_of_post_hoc_powers_is_measured():
    parts = claim("softplus-table-2")
    alone = {row: cell(parts.group(row), *HERE).loss for row in ("scenario_iii", "scenario_ii")}
    text = note("softplus-table-2", "At the scale `toy` the l1 norm alone")
    assert "{:.3f} against {:.3f}, inconclusive".format(*alone.values()) in text
    by = {row: parts.group(row) for row in parts.rows}
    apart = minus(by, "scenario_iii", "scenario_ii")
    assert apart.value < 0
    assert not apart.sure
    powers = claim("softplus-post-hoc")
    run = cell(powers.group("softmax"), 8.0, "dynamic NTK, run as softmax_p3")
    trained = cell(powers.group("softmax_p3"), 8.0, "dynamic NTK")
    found = run.minus(trained)
    assert not found.sure
    text = note("softplus-post-hoc", "At the scale `toy` softmax run with p = 3")
    assert f"{run.loss:.3f} against {trained.loss:.3f} ({shown(found, '+')}, inconclusive)" in text
    lssa = cell(powers.group("lssa"), 8.0, "dynamic NTK, run as lssar_p3")
    apart = lssa.minus(cell(powers.group("lssar_p3"), 8.0, "dynamic NTK"))
    assert not apart.sure
    assert f"has a higher one, by {shown(apart)} (inconclusive)." in text


def test_what_is_found_of_log_n_of_vision_and_of_t6_is_measured():
    lengths = (1.0, 2.0, 4.0, 8.0, 16.0)
    found = claim("softplus-length-scale")
    by = {row: found.group(row) for row in found.rows}
    apart = {
        (row, length, setting): minus(by, row, f"{row}_constant", (length, setting))
        for row in ("lssa", "lssar")
        for length in lengths
        for setting in ("as trained", "dynamic NTK")
    }
    assert not any(one.sure for one in apart.values())
    assert all(apart[row, length, "as trained"].value > 0 for row in ("lssa", "lssar") for length in (8.0, 16.0))
    assert max(abs(one.value) for one in apart.values()) < 0.1, "about the same"
    (guide,) = of_pages("docs/claims.md")
    assert "differ by less than 0.1 at each length, as trained and with NTK, all inconclusive." in guide
    by |= {row: by_row("toy-longer")[f"{row}-scale"] for row in ("lssa", "lssar")}
    both = {
        (row, length, setting): minus(by, row, f"{row}_constant", (length, setting)) for row, length, setting in apart
    }
    assert not any(one.sure for one in both.values())
    lssa, lssar = (shown(both[row, 16.0, "dynamic NTK"], "+") for row in ("lssa", "lssar"))
    text = f"minus the number alone: {lssa} (LSSA, 16x with NTK) and {lssar} (LSSAR), inconclusive at each length."
    assert text in guide
    vision, decoder = claim("softplus-vision"), claim("softplus-table-2")
    rises = [
        cell(one.group(without), *HERE).loss / cell(one.group(row), *HERE).loss - 1
        for one, without, row in ((vision, "vit_scenario_i", "vit_softmax"), (decoder, "scenario_i", "softmax"))
    ]
    said = note("softplus-vision", "At the scale `toy` the loss without softmax")
    assert "is {:.0%} higher in a ViT, and {:.0%} higher in the".format(*rises).replace("%", " %") in said
    t6 = claim("t6-loss")
    rows = {row: t6.group(row) for row in t6.rows}
    differences = {length: minus(rows, "t6_softmax", "llama_softmax", (length, "as trained")) for length in lengths}
    assert [length for length, one in differences.items() if one.sure] == [4.0, 8.0]
    assert min(one.value for length, one in differences.items() if length > 1) > 0
    said = note("t6-loss", "At the scale `toy` the mean loss of T6")
    here = differences[1.0]
    assert f"is lower by {-here.value:.3f} ± {here.standard_error:.3f} at the training length" in said
    assert f"by {shown(differences[4.0])} at 4x." in said
    swept = by_row("llama-learning-rates")
    llama = {rate: cell(swept[f"llama_softmax-{rate}"], *HERE).loss for rate in ("half", "twice")}
    assert cell(rows["llama_softmax"], *HERE).loss < min(llama.values()), "T6's rates are tested with its own claim"


def test_the_first_three_seeds_of_the_vit_are_the_measured_ones():
    found = claim("laser-vit")
    first = found.model_copy(update={"runs": [run for run in found.runs if run.info.seed < 3]})
    _, losses = judge(claims.load("laser-vit"), first)
    words = note("laser-vit", "At the scale `toy` three seeds")
    assert losses.verdict == "inconclusive"
    assert f"(losses: {losses.shown.text.rpartition(': ')[2]})" in words
