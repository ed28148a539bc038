"""Reports: tables, figures, pages, and the sentences about noise.

Over 400 lines: the cases share the made-up evaluations.
"""

import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from softfocus.lab.errors import LabError
from softfocus.lab.recipes.loading import load
from softfocus.lab.report.curves import Line, Panel, Point, save_curves
from softfocus.lab.report.figure import BEST, PALETTE, colours, figure1, save_png, spread, within
from softfocus.lab.report.notes import DIRTY, provenance, same_text
from softfocus.lab.report.page import render
from softfocus.lab.report.points import Group, cell, columns, growth, labels, settings, shared_columns
from softfocus.lab.report.report import build, write
from softfocus.lab.report.results import Entry, Report, load_entry, read_as
from softfocus.lab.report.table import loss_table
from softfocus.lab.run_folder.files import save_run
from softfocus.lab.run_folder.results import Row, Session, Setting, json_text


def grouped(*entries):
    """The runs as groups, those together that were trained alike but for the seed."""
    return build(entries).groups


def seeds(fabricate, mechanism, *losses, **fields):
    """A run for each list of losses at 1x, 2x ..., with seeds 0, 1 ..."""
    return [
        fabricate(mechanism, one, (), seed=seed, name=f"{mechanism}-{seed}", **fields)
        for seed, one in enumerate(losses)
    ]


def drawn(table, width=120):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


class TestGroups:
    def test_runs_that_differ_by_seed_and_name_alone_are_one_group(self, fabricate):
        lssar = seeds(fabricate, "lssar", [1.0, 1.1], [1.2, 1.5], [1.1, 1.3])
        found = grouped(lssar[0], fabricate("softmax", [1.0]), *lssar[1:])
        assert [(group.label, len(group.evaluations)) for group in found] == [("LSSAR", 3), ("Softmax", 1)]
        at = cell(found[0], 2.0, "as trained")
        assert at.values == [1.1, 1.5, 1.3]
        assert (at.loss, at.spread) == (pytest.approx(1.3), pytest.approx(0.2))
        assert found[0].title == "LSSAR (3 seeds)"

    def test_another_rate_or_text_is_another_group(self, fabricate):
        recipe = 'name = "{}"\n[train]\nseed = {}\nlearning_rate = {}\n'
        runs = [
            fabricate("lssar", [1.0], name=f"r{seed}", seed=seed, recipe=recipe.format("r", seed, rate), evaluated=text)
            for seed, rate, text in ((0, 1, {}), (1, 1, {}), (2, 3, {}), (3, 1, {"tokens": 8192}))
        ]
        assert [len(group.evaluations) for group in grouped(*runs)] == [2, 1, 1]
        assert [group.label for group in grouped(*runs)] == ["LSSAR · r0", "LSSAR · r2", "LSSAR · r3"]

    def test_what_is_measured_makes_no_other_group(self, fabricate):
        recipe = load("demo-lssar").to_toml()
        more = recipe.replace("also = []", 'also = ["attention"]').replace("seed = 0", "seed = 1")
        longer = recipe.replace('lengths = "1x,2x', 'lengths = "1x,3x').replace("seed = 0", "seed = 2")
        assert len({recipe, more, longer}) == 3
        runs = [fabricate("lssar", [1.0], recipe=text, seed=seed) for seed, text in enumerate((recipe, more, longer))]
        assert [len(group.evaluations) for group in grouped(*runs)] == [3]

    def test_other_mechanisms_that_were_run_and_how_often_it_was_logged_make_no_other_group(self, fabricate):
        recipe = load("demo-lssar").to_toml()
        run = recipe.replace("mechanisms = []", 'mechanisms = ["lssa"]').replace("seed = 0", "seed = 1")
        logged = recipe.replace("checkpoint_every = 1000", "checkpoint_every = 7").replace("seed = 0", "seed = 2")
        logged = logged.replace("log_every = 10", "log_every = 3").replace("validations = 0", "validations = 5")
        logged = logged.replace("projection_norms = false", "projection_norms = true")
        assert len({recipe, run, logged}) == 3
        assert "validations = 5" in logged
        assert "projection_norms = true" in logged
        runs = [fabricate("lssar", [1.0], recipe=text, seed=seed) for seed, text in enumerate((recipe, run, logged))]
        assert [group.title for group in grouped(*runs)] == ["LSSAR (3 seeds)"]

    def test_runs_without_a_recipe_and_a_recipe_that_is_not_toml_stand_alone(self, fabricate):
        assert len(grouped(*[fabricate("lssar", [1.0], recipe="", name=name) for name in "ab"])) == 2
        assert len(grouped(*[fabricate("lssar", [1.0], recipe=f"= {name}", name=name) for name in "ab"])) == 2

    def test_a_default_that_an_earlier_recipe_does_not_name_is_no_difference(self, fabricate):
        resolved = load("demo-lssar").to_toml()
        earlier = resolved.replace("accumulate = 1\n", "").replace("seed = 0", "seed = 1")
        assert "accumulate" not in earlier
        runs = [fabricate("lssar", [1.0], recipe=text, seed=seed) for seed, text in enumerate((resolved, earlier))]
        assert len(grouped(*runs)) == 1

    def test_runs_that_share_a_seed_weigh_as_one(self, fabricate):
        """In the mean and in its difference from another."""
        losses = (0, 1.0), (1, 2.0), (1, 4.0)
        (group,) = grouped(*[fabricate("lssar", [loss], seed=seed, recipe="a = 1") for seed, loss in losses])
        other = grouped(*[fabricate("lssar", [loss], seed=seed, recipe="a = 2") for seed, loss in losses[:2]])[0]
        ours, its = (cell(one, 1.0, "as trained") for one in (group, other))
        assert (ours.loss, its.loss) == (2.0, 1.5)
        assert ours.minus(its).value == 0.5
        assert ours.spread == pytest.approx(2**0.5)

    def test_a_length_that_one_of_the_seeds_lacks_is_not_shown(self, fabricate):
        (group,) = grouped(*seeds(fabricate, "lssar", [1.0, 1.1], [1.2]))
        assert cell(group, 1.0, "as trained") is not None
        assert cell(group, 2.0, "as trained") is None

    def test_the_same_seed_twice_is_counted_as_runs(self, fabricate):
        twice = [fabricate("lssar", [1.0], name=name) for name in "ab"]
        assert grouped(*twice)[0].count == "2 runs"

    def test_windows_count_in_training_lengths(self, fabricate):
        short, long = fabricate("lssa", [1.0], (), [1.0]), fabricate("lssar", [1.0], (), [1.0], train_length=512)
        assert settings(grouped(short, long)) == ["as trained", "window 1x"]

    def test_up_to_the_training_length_the_row_without_scaling_stands_for_the_one_with_it(self, fabricate):
        (group,) = grouped(fabricate("softmax", [1.0, 1.5], [1.25]))  # NTK from 2x on
        assert growth(group, 2.0, "dynamic NTK") == 1.25
        (group,) = grouped(fabricate("softmax", [1.0, 1.5], ()))
        assert growth(group, 2.0, "dynamic NTK") is None
        assert cell(group, 1.0, "dynamic NTK") is None

    def test_the_row_of_the_trained_mechanism_stands_for_no_other(self, fabricate):
        entry = fabricate("lssar", [1.0, 1.5], ())
        plain = entry.evaluation.rows[-1]
        other = plain.model_copy(update={"setting": Setting(mechanism="softmax"), "loss": 3.0})
        scaled = plain.model_copy(update={"setting": Setting(mechanism="softmax", rope="ntk"), "loss": 2.0})
        first = other.model_copy(update={"length": entry.evaluation.train_length, "loss": 2.5})
        entry.evaluation.rows += [other, scaled]
        (group,) = grouped(entry)
        names = [other.setting.name(256), scaled.setting.name(256)]
        assert [cell(group, 2.0, name).loss for name in names] == [3.0, 2.0]
        assert [cell(group, 1.0, name) for name in names] == [None, None]
        entry.evaluation.rows += [first]
        assert [cell(group, 1.0, name).loss for name in names] == [2.5, 2.5]


class TestGain:
    def test_is_the_loss_within_the_training_length_less_the_loss_beyond(self, fabricate):
        (group,) = grouped(fabricate("lssar", [1.0, 1.0, 1.0], gain=0.25))
        found = cell(group, 4.0, "as trained").gain
        assert found.value == pytest.approx(0.25)
        assert found.standard_error == pytest.approx(0, abs=1e-9), "both documents gain as much"
        assert cell(group, 1.0, "as trained").gain is None, "there is nothing beyond"

    def test_is_unknown_without_sums_by_document(self, fabricate):
        (group,) = grouped(fabricate("lssar", [1.0, 1.0], gain=0.25, by_document=False))
        assert cell(group, 2.0, "as trained").gain is None

    def test_over_seeds_it_has_their_error(self, fabricate):
        runs = [
            fabricate("lssar", [1.0, 1.0], seed=seed, name=f"r{seed}", gain=gain)
            for seed, gain in enumerate((0.1, 0.3))
        ]
        found = cell(grouped(*runs)[0], 2.0, "as trained").gain
        assert (found.value, found.standard_error) == (pytest.approx(0.2), pytest.approx(0.1))

    def test_gains_are_paired_by_document_and_seed(self, fabricate):
        runs = [
            fabricate(name, [1.0, 1.0], seed=seed, name=f"{name}{seed}", gain=gain)
            for name, more in (("softmax", 0.0), ("lssar", 0.05))
            for seed, gain in enumerate((0.1 + more, 0.3 + more))
        ]
        ours, theirs = (cell(group, 2.0, "as trained") for group in reversed(grouped(*runs)))
        found = ours.gain_minus(theirs)
        assert found.value == pytest.approx(0.05)
        assert found.standard_error == pytest.approx(0, abs=1e-9), "seeds differ, and both differ alike"
        assert ours.gain.standard_error > 0.05
        assert cell(grouped(*runs)[0], 1.0, "as trained").gain_minus(theirs) is None
        text = render(build(runs))
        assert "less that of Softmax" in text
        assert "<td>+0.050<small>± 0.000</small></td>" in text


class TestTable:
    def test_has_a_line_a_setting_and_model_and_the_gain_last(self, four):
        text = drawn(loss_table(grouped(*four)))
        softmax = [line.split() for line in text.splitlines() if "Softmax" in line]
        assert softmax == [
            ["as", "trained", "Softmax", "1.400", "1.500", "1.800", "2.200", "2.800", "0.000"],
            ["dynamic", "NTK", "Softmax", "1.400", "1.450", "1.600", "2.000", "2.380", "0.000"],
            ["window", "1x", "Softmax", "1.400", "1.390", "1.380", "1.370", "1.360", "0.000"],
        ]
        assert "2,048" in text

    def test_several_seeds_are_mean_spread_and_count(self, fabricate):
        lines = [
            line.split()
            for line in drawn(loss_table(grouped(*seeds(fabricate, "lssar", [1.0, 1.5], [1.2, 1.5])))).splitlines()
        ]
        assert ["as", "trained", "LSSAR", "1.100", "1.500", "0.000"] in lines
        assert ["sd", "of", "2", "seeds", "0.141", "0.000"] in lines

    def test_fills(self, fabricate):
        half = fabricate("softmax", [1.0, 1.5]).evaluation
        nothing = half.model_copy(update={"rows": []})
        text = drawn(loss_table([Group("Softmax", (half,)), Group("LSSAR", (nothing,))], planned=[1, 2, 4]))
        lines = [line.split() for line in text.splitlines()]
        assert ["as", "trained", "Softmax", "1.000", "1.500", "…", "…"] in lines
        assert ["LSSAR", "…", "…", "…", "…"] in lines
        assert ["as", "trained", "LSSAR", "…", "…"] in [
            line.split() for line in drawn(loss_table([Group("LSSAR", (nothing,))], planned=[1])).splitlines()
        ]

    def test_a_final_table_does_not_promise_what_will_not_come(self, fabricate):
        text = drawn(loss_table(grouped(fabricate("lssa", [1.0, 1.5]), fabricate("lssar", [1.0]))))
        assert "…" not in text
        assert "–" in text

    def test_fits_eighty_columns(self, four, fabricate):
        more = seeds(fabricate, "softmax", [1.0, 1.1, 1.2, 1.3, 1.4], [2.0, 2.1, 2.2, 2.3, 2.4])
        for entries in (four, [*more, four[1]]):
            text = drawn(loss_table(grouped(*entries)), width=80)
            assert "2.380" in text or "1.900" in text
            assert "…" not in text
            assert max(map(len, text.splitlines())) <= 80

    def test_a_diverged_loss_is_written_as_such(self, fabricate):
        entry = fabricate("softmax", [1.0, math.nan, math.inf])
        assert {"nan", "inf"} <= set(drawn(loss_table(grouped(entry))).split())


class TestFinding:
    def test_the_price_at_1x_and_who_is_best_at_the_longest_length(self, four):
        assert build(four).finding.sentence == (
            "At 1x (128 tokens) Softmax has a loss of 1.400; LASER is 0.010 ± 0.000 higher, "
            "LSSA is 0.020 ± 0.000 higher and "
            "LSSAR is 0.100 ± 0.000 higher. At 16x (2,048 tokens), each under its best setting, "
            "Softmax with window 1x has "
            "the lowest loss, 1.360; LSSAR as trained is 0.200 ± 0.000 higher, LASER with dynamic NTK is 1.090 ± 0.000 "
            "higher and LSSA with dynamic NTK is 1.640 ± 0.000 higher. From 1x to 16x the losses as trained change "
            "by: Softmax +1.400 ± 0.000, LSSA +1.980 ± 0.000, LSSAR +0.060 ± 0.000, LASER +1.340 ± 0.000. The noise of "
            "training is not known: that takes several seeds of each."
        )

    def test_at_1x_a_mechanism_that_is_better_than_softmax_is_said_to_be(self, fabricate):
        found = build([fabricate("softmax", [1.4]), fabricate("lssar", [1.3])]).finding
        assert found.sentence.startswith(
            "At 1x (128 tokens) Softmax has a loss of 1.400; LSSAR is 0.100 ± 0.000 lower."
        )
        assert [one.verdict for one in found.differences] == ["lower"]

    def test_the_price_at_1x_is_that_of_the_model_as_it_was_trained(self, fabricate):
        """Run with another mechanism it is another model, whatever its loss."""
        entry = fabricate("lssar", [1.5])
        (lower, *_rest) = fabricate("lssar", [1.1]).evaluation.rows
        other = lower.model_copy(update={"setting": lower.setting.model_copy(update={"mechanism": "softmax"})})
        rows = [*entry.evaluation.rows, other]
        entry = entry.model_copy(update={"evaluation": entry.evaluation.model_copy(update={"rows": rows})})
        found = build([fabricate("softmax", [1.4]), entry]).finding
        assert found.sentence.startswith(
            "At 1x (128 tokens) Softmax has a loss of 1.400; LSSAR is 0.100 ± 0.000 higher."
        )

    def test_without_softmax_all_are_held_against_the_lowest(self, fabricate):
        found = build([fabricate("lssa", [1.4]), fabricate("lssar", [1.3])]).finding
        assert found.sentence.startswith(
            "At 1x (128 tokens) LSSAR has the lowest loss, 1.300; LSSA is 0.100 ± 0.000 high"
        )

    @pytest.mark.parametrize(("second", "verdict"), [(0.02, "inconclusive"), (0.27, "inconclusive"), (0.29, "higher")])
    def test_with_two_documents_fourteen_standard_errors_decide(self, fabricate, second, verdict):
        """The documents of one run lie 0.01 from its mean, those of the other 0.03: the paired
        error is 0.02.
        """
        runs = [
            fabricate("softmax", [1.0]),
            fabricate("lssar", [1.0 + second], standard_error=0.03),
        ]
        found = build(runs).finding
        (difference,) = found.differences
        assert (difference.difference, difference.standard_error) == (pytest.approx(second), pytest.approx(0.02))
        assert difference.verdict == verdict
        assert (f"inconclusive: LSSAR ({second:+.3f} ± 0.020)." in found.sentence) == (verdict == "inconclusive")

    def test_without_sums_by_document_the_error_is_that_of_independent_means(self, fabricate):
        runs = [fabricate(name, [loss], by_document=False) for name, loss in (("softmax", 1.0), ("lssar", 1.2))]
        (difference,) = build(runs).finding.differences
        assert difference.standard_error == pytest.approx(0.01 * math.sqrt(2))
        assert "not paired" in " ".join(build(runs).notes)

    def test_on_other_text_documents_of_the_same_number_are_not_paired(self, fabricate):
        runs = [fabricate("softmax", [1.0]), fabricate("lssar", [1.2], evaluated={"longest": 1024})]
        (difference,) = build(runs).finding.differences
        assert difference.standard_error == pytest.approx(0.01 * math.sqrt(2))

    def test_documents_of_an_unknown_text_are_not_paired_and_its_runs_are_no_group(self, fabricate):
        unknown = {"corpus_key": ""}
        runs = [fabricate(name, [loss], evaluated=unknown) for name, loss in (("softmax", 1.0), ("lssar", 1.2))]
        (difference,) = build(runs).finding.differences
        assert difference.paired == "by seed alone"
        assert difference.standard_error == pytest.approx(0.01 * math.sqrt(2))
        recipe = 'name = "r"\n[train]\nseed = {}\n'
        runs = [fabricate("lssar", [1.0], seed=n, recipe=recipe.format(n), evaluated=unknown) for n in (0, 1)]
        assert [len(group.evaluations) for group in grouped(*runs)] == [1, 1]
        assert (
            cell(grouped(runs[0])[0], 1.0, "as trained").minus(cell(grouped(runs[0])[0], 1.0, "as trained")).by_document
        )

    @pytest.mark.parametrize(("vocabulary", "said"), [(4096, "Nothing can be said: the models"), (257, "The models")])
    def test_tokenizers_with_vocabularies_of_one_size_are_not_compared(self, fabricate, vocabulary, said):
        runs = [
            fabricate(name, [loss], vocabulary=vocabulary, evaluated={"corpus_key": name})
            for name, loss in (("softmax", 1.0), ("lssar", 1.2))
        ]
        report = build(runs)
        assert report.finding.sentence.startswith(f"{said} read different text")
        assert ("tokenizers may differ" in " ".join(report.notes)) == (vocabulary == 4096)
        same = [run.model_copy(update={"evaluation": runs[0].evaluation}) for run in runs]
        assert "different text" not in build(same).finding.sentence

    def test_seeds_are_paired_and_their_noise_is_in_the_error(self, fabricate):
        softmax = seeds(fabricate, "softmax", [1.0], [2.0], [3.0])
        lssar = seeds(fabricate, "lssar", [1.1], [2.3], [3.2])
        found = build([*softmax, *lssar]).finding
        (difference,) = found.differences
        assert difference.difference == pytest.approx(0.2)
        assert difference.standard_error == pytest.approx(0.1 / math.sqrt(3)), "the differences are 0.1, 0.3, 0.2"
        assert difference.training_noise
        assert found.sentence.endswith(
            " Losses are means over 3 trainings. Differences are paired by document and seed."
        )
        single = build([*softmax, lssar[0]]).finding
        assert single.sentence.endswith(
            " Losses are means over 1 to 3 trainings. The noise of training is not known: "
            "that takes several seeds of each."
        )

    def test_each_difference_says_whether_it_is_paired_by_seed(self, fabricate):
        """Of rows with four, three of these and the same four seeds."""
        softmax = seeds(fabricate, "softmax", [1.0], [1.1], [1.2], [1.1])
        fewer = seeds(fabricate, "lssa", [1.5], [1.6], [1.7])
        unsure = seeds(fabricate, "ssmax", [1.0], [1.1], [1.3])
        same = seeds(fabricate, "lssar", [2.0], [2.1], [2.2], [2.1])
        report = build([*softmax, *fewer, *unsure, *same])
        said = report.finding.sentence
        assert re.search(r"LSSA is 0.500 ± 0.\d+ higher \(paired by document alone\)", said)
        assert re.search(r"LSSAR is 1.000 ± 0.000 higher[;.]", said)
        assert re.search(r"inconclusive: ssmax \(\+0.033 ± 0.\d+, paired by document alone\)", said)
        assert said.endswith("means over 3 to 4 trainings. Other differences are paired by document and seed.")
        assert {one.label: one.paired for one in report.finding.differences} == {
            "LSSA": "by document alone", "ssmax": "by document alone", "LSSAR": "by document and seed",
        }  # fmt: skip
        shown = " ".join(" ".join(Page(render(report)).text).split())
        assert "Paired by" in shown
        assert "+1.000 ± 0.000 document and seed more than noise: higher" in shown
        assert "document alone inconclusive" in shown

    def test_a_diverged_run_comes_last_and_is_said_to_have_diverged(self, fabricate):
        for bad in (math.nan, math.inf):
            found = build([fabricate("softmax", [1.0, bad]), fabricate("lssar", [1.1, 1.1])]).finding
            assert "LSSAR as trained has the lowest loss, 1.100; Softmax as trained diverged." in found.sentence
            assert found.differences[-1].verdict == "inconclusive"
            every = build([fabricate("softmax", [bad]), fabricate("lssar", [bad])]).finding
            assert every.sentence.startswith("At 1x (128 tokens) every loss diverged.")

    def test_how_far_losses_rise_names_the_diverged_and_counts_the_rest(self, fabricate):
        runs = [fabricate(f"sharpened(lssa, {n})", [1.0, 1.0 + n / 8]) for n in range(1, 10)]
        runs.append(fabricate("softmax", [1.0, math.nan], name="lost"))
        (said,) = re.findall(r"From 1x to 2x the losses as trained change by: (.*)", build(runs).finding.sentence)
        assert said.startswith("sharpened(lssa, 1) +0.125 ± ")
        assert "; 2 more are in the report." in said
        assert "Softmax diverged" in build([runs[-1], runs[3]]).finding.sentence.rpartition("change by")[2]

    def test_a_single_run(self, fabricate):
        found = build([fabricate("lssar", [1.0, 1.5], [1.0, 1.25])]).finding
        assert found.sentence == (
            "At 1x (128 tokens) LSSAR has a loss of 1.000. At 2x (256 tokens) LSSAR with dynamic NTK has a "
            "loss of 1.250."
        )
        assert found.differences == []

    def test_nothing_to_say(self, fabricate):
        assert "there is no run" in build([]).finding.sentence
        lone = [fabricate("lssa", [1.0], train_length=128), fabricate("lssar", [1.0], train_length=192)]
        assert build(lone, axis="tokens").finding.sentence == (
            "Nothing can be said: no length is shared by all runs (in tokens: LSSA has 128; LSSAR has 192). "
            "Evaluate all at the same lengths: `softfocus evaluate RUN --lengths LIST`."
        )

    def test_many_that_share_no_length(self, fabricate):
        lone = [fabricate("lssa", [1.0], name=f"run-{n}", train_length=128 + n, recipe="") for n in range(10)]
        said = build(lone, axis="tokens").finding.sentence
        assert "LSSA · run-7 has 135; 2 more are in the report)." in said

    def test_no_threshold_is_spoken_of(self, four):
        text = render(build(four)) + " ".join(build(four).notes)
        for word in ("expected shape", "it holds", "1.15", "1.5)"):
            assert word not in text

    def test_many_runs_are_not_all_named(self, fabricate):
        names = ["softmax", "lssar", "lssa", "laser", "ssmax", "sharpened(lssa, 7)", "sharpened(lssa, 3)"]
        found = build([fabricate(name, [1.0 + index]) for index, name in enumerate(names)]).finding
        assert "; 2 more are in the report." in found.sentence
        assert len(found.differences) == 6


def looks(figure):
    """(colour, style) of the lines that have more than one place, in the first panel."""
    lines = [line for line in figure.axes[0].lines if len(set(line.get_xdata())) > 1 and line.get_linestyle() != "None"]
    return {(line.get_color(), line.get_linestyle()) for line in lines}


class TestFigure:
    def test_eight_lines_look_different(self, fabricate, tmp_path, monkeypatch):
        """In figures of losses and of shares: no two lines have both colour and style in common."""
        names = [f"sharpened(lssa, {power})" for power in range(2, 10)]
        groups = grouped(*(fabricate(name, [1.0, 1.1]) for name in names))
        assert len(looks(figure1(groups, title="Eight"))) == 8
        saved = []
        monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (saved.append(self), path.touch()))
        lines = [Line(name, [Point(1, 0.5, 0.1), Point(2, 0.4, 0.1)]) for name in names]
        save_curves([Panel("x", "y", lines)], tmp_path / "f.png", title="Eight", train_length=1)
        assert len(looks(saved[0])) == 8

    @pytest.mark.long
    def test_dollars_in_names_are_dollars(self, fabricate, tmp_path):
        entries = [fabricate("lssa", [1.0, 2.0], name=name) for name in (r"$\frac{$", "a$b$")]
        title = r"costs $5 or $\frac{ b$"
        save_png(figure1(build(entries).groups, title=title), tmp_path / "f.png")
        assert "a$b$" in render(build(entries))

    def test_a_long_title_takes_lines_within_the_figure(self, four):
        drawn = figure1(grouped(*four), title="A title of a comparison. " * 20)
        drawn.canvas.draw()
        box = drawn._suptitle.get_window_extent()
        assert drawn.get_suptitle().count("\n") > 2
        assert box.x1 < drawn.bbox.width

    @pytest.mark.long
    def test_png_shows_every_run_in_its_colour(self, four, tmp_path):
        path = tmp_path / "figure1.png"
        save_png(figure1(grouped(*four), title="title"), path)
        image = matplotlib.image.imread(path)
        height, width, _ = image.shape
        assert (height, width) == (1440, 1760)
        for index in colours(grouped(*four)):
            wanted = [int(PALETTE[index][0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
            found = (abs(image[:, :, :3] - wanted).max(axis=2) < 0.01).nonzero()
            assert len(found[0]) > 500, PALETTE[index]
            for half in (found[1] < width / 2, found[1] > width / 2):
                assert half.sum() > 200
        assert list(tmp_path.iterdir()) == [path], "no temporary file is left"

    def test_the_best_of_each_and_a_panel_a_setting(self, four):
        drawn = figure1(grouped(*four), title="A title")
        best, plain, ntk, window = drawn.axes
        assert drawn.get_suptitle() == "A title"
        assert plain.get_ylim() == ntk.get_ylim() == window.get_ylim()
        assert best.get_ylim()[1] < plain.get_ylim()[1]
        for ax, name, softmax in (
            (best, "best", 1.36),
            (plain, "as trained", 2.8),
            (ntk, "NTK", 2.38),
            (window, "1x", 1.36),
        ):
            assert name in ax.get_title(loc="left")
            assert (ax.get_xscale(), list(ax.get_xticks())) == ("log", [1, 2, 4, 8, 16])
            assert [label.get_text() for label in ax.get_xticklabels()][-1] == "2,048\n16×"
            *lines, training_length = ax.lines
            assert lines[0].get_ydata()[-1] == pytest.approx(softmax)
            assert list(training_length.get_xdata()) == [1, 1]
        assert {text.get_text() for text in plain.texts} == {"Softmax", "LSSA", "LSSAR", "LASER"}
        assert {text.get_text() for text in best.texts} == {
            "Softmax, window 1x",
            "LSSA, dynamic NTK",
            "LSSAR",
            "LASER, dynamic NTK",
        }

    def test_bands_are_errors_of_differences_from_the_lowest_line(self, fabricate):
        def heights(*entries):
            bands = figure1(grouped(*entries), title="").axes[0].collections
            return [float(band.get_paths()[0].vertices[:, 1].max()) for band in bands]

        low, high = fabricate("softmax", [1.0], ()), fabricate("lssar", [1.5], (), standard_error=0.03)
        assert heights(low, high) == pytest.approx([1.0, 1.52]), "what documents do to both cancels"
        assert heights(high) == pytest.approx([1.53]), "of the loss itself, where there is one line"

    def test_where_one_line_alone_was_measured_there_is_no_band(self, fabricate):
        longer, other = fabricate("softmax", [1.0, 1.1, 1.2], ()), fabricate("lssar", [1.5, 1.6], ())
        band, _ = figure1(grouped(longer, other), title="").axes[0].collections
        (path,) = band.get_paths()
        assert sorted(set(path.vertices[:, 0])) == [1.0, 2.0], "not at 4x"

    def test_every_seed_is_a_dot_of_its_groups_colour(self, fabricate):
        groups = grouped(*seeds(fabricate, "lssar", [1.0, 1.1], [1.2, 1.4]), fabricate("softmax", [1.0, 1.1], ()))
        (ax,) = figure1(groups, title="").axes
        dots = [one for one in ax.collections if one.get_offsets().shape[0] > 1]
        assert [sorted(map(tuple, one.get_offsets().tolist())) for one in dots] == [
            [(1, 1.0), (1, 1.2), (2, 1.1), (2, 1.4)]
        ]
        assert list(ax.lines[0].get_ydata()) == pytest.approx([1.1, 1.25]), "the line is the mean"

    def test_the_same_mechanism_keeps_its_colour_and_no_two_groups_share_one(self, four, fabricate):
        all_four = grouped(*four)
        assert colours(all_four[2:]) == colours(all_four)[2:]
        six = grouped(*four, fabricate("ssmax", [1.0]), fabricate("softmax", [1.0], recipe="", name="again"))
        assert sorted(colours(six)) == list(range(len(PALETTE)))

    def test_labels_move_apart_and_no_further(self):
        assert spread([0.0, 1.0, 5.0], 1.0) == [0.0, 1.0, 5.0]
        assert spread([1.0, 1.0], 1.0) == [0.5, 1.5]
        placed = spread([0.0, 0.1, 0.2, 3.0], 1.0)
        assert all(b - a >= 1.0 - 1e-12 for a, b in pairwise(placed))
        assert sum(placed) == pytest.approx(3.3), "the whole does not drift"

    def test_labels_stay_beside_their_panel(self, fabricate):
        """Of twenty lines that end close together at the bottom."""
        entries = [fabricate("lssar", [5.0 if n else 1.0, 1.0 + n / 100], (), name=f"row {n}") for n in range(20)]
        (ax,) = figure1(grouped(*entries), title="Twenty").axes
        ax.figure.canvas.draw()
        heights = sorted(text.xy[1] for text in ax.texts)
        low, high = ax.get_ylim()
        assert low <= heights[0]
        assert heights[-1] <= high + 1e-9
        boxes = sorted((text.get_window_extent() for text in ax.texts), key=lambda box: box.y0)
        assert all(b.y0 > a.y0 + 0.7 * a.height for a, b in pairwise(boxes))

    def test_heights_move_into_an_interval(self):
        assert within([-1.0, 0.0, 5.0], 1.0, 0.0, 4.0) == [0.0, 1.0, 4.0]
        assert within([2.0, 3.5, 5.0], 1.0, 0.0, 4.0) == [2.0, 3.0, 4.0]
        assert within([1.0, 2.0], 1.0, 0.0, 4.0) == [1.0, 2.0]

    def test_the_panels_that_are_named_stand_in_one_column(self, four):
        drawn = figure1(grouped(*four), title="", names=["as trained", BEST])
        assert [ax.get_title(loc="left") for ax in drawn.axes] == ["as trained", BEST]
        assert len({ax.get_subplotspec().colspan.start for ax in drawn.axes}) == 1

    def test_diverged_and_single_runs_can_be_drawn(self, fabricate, tmp_path):
        entries = [
            fabricate("softmax", [math.nan] * 3, train_loss=[(1, math.nan)]),
            fabricate("lssar", [1.0, math.inf, 1.0], standard_error=math.nan, train_loss=[]),
        ]
        page = render(build(entries))
        assert "Softmax: diverged" in page
        save_png(figure1(build(entries).groups, title=""), tmp_path / "f.png")


def fabricate_early(entry):
    """A run without the rows that early results could not hold."""
    rows = [row for row in entry.evaluation.rows if row.setting.window is None]
    return entry.model_copy(update={"evaluation": entry.evaluation.model_copy(update={"rows": rows})})


class Page(HTMLParser):
    VOID = frozenset(("meta", "br", "link", "img", "input", "hr"))

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.ids = [], [], [], []
        self.feed(text)
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def text(four):
    return render(build(four))


class TestPage:
    @pytest.mark.long
    def test_is_self_contained(self, text):
        page = Page(text)
        for tag, attributes in page.tags:
            assert tag not in ("script", "link", "iframe", "object", "img"), tag
            for name in ("src", "href", "xlink:href", "data", "srcset", "poster", "action"):
                value = attributes.get(name) or "#"
                assert value.startswith("#"), (tag, name, value)
        assert not re.search(r"@import|url\((?!#)", text)
        assert set(re.findall(r"\w+://[^\s\"'<]+", text)) == {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }

    def test_its_ids_are_unique_although_it_holds_several_drawings(self, text):
        used = Page(text).ids
        assert used
        assert len(used) == len(set(used))

    def test_is_accessible(self, text):
        page = Page(text)
        attributes = dict(page.tags[0:1])["html"] if page.tags[0][0] == "html" else {}
        assert attributes["lang"] == "en"
        names = [tag for tag, _ in page.tags]
        images = [a for tag, a in page.tags if a.get("role") == "img"]
        assert len(images) == names.count("svg") == 8
        assert all(len(a["aria-label"]) > 20 for a in images)
        assert names.count("table") == names.count("caption") == 5
        assert all(a.get("scope") in ("row", "col") for tag, a in page.tags if tag == "th")
        assert any(a.get("name") == "viewport" for tag, a in page.tags)

    def test_has_light_and_dark_colours_for_every_line_and_none_that_stays(self, text):
        assert "prefers-color-scheme: dark" in text
        body = text[text.index("</style>") :]
        assert not re.search(r"#[0-9a-f]{6}\b", body.split("<h2>How it was made")[0]), "every colour is a variable"
        for used in set(re.findall(r"var\((--[\w-]+)\)", text)):
            assert text.count(f"{used}: ") == 2, f"{used} is set for light and for dark"

    def test_shows_what_the_runs_hold(self, text, four):
        shown_text = " ".join(" ".join(Page(text).text).split())
        report = build(four)
        for shown in (
            report.finding.sentence,
            "more than noise: higher (noise of training unknown)",
            "Softmax, window 1x",
            "+0.200 ± 0.000",
            "2.380",
            "± 0.010",
            "demo-lssar",
            "0123456789",
            "torch 2.13.0",
            "A processor",
            "15,322",
            "3.5",
            'mechanism = "lssar"',
            "81,920",
        ):
            assert shown in shown_text, shown

    def test_escapes_what_it_shows(self, fabricate):
        entry = fabricate("softmax", [1.0, 2.0], name="<script>alert(1)</script>")
        text = render(build([entry, fabricate("softmax", [1.0, 2.0], name="b")]))
        assert "<script" not in text


class TestReport:
    @pytest.mark.long
    def test_results_json_round_trip(self, four, tmp_path):
        report = build(four, remarks=["a remark"])
        paths = write(report, tmp_path / "new" / "folder")
        assert [path.name for path in paths] == ["results.json", "figure1.png", "report.html"]
        assert sorted(path.name for path in paths[0].parent.iterdir()) == ["figure1.png", "report.html", "results.json"]
        assert read_as(Report, paths[0]).model_dump_json() == report.model_dump_json()
        values = json.loads(paths[0].read_text())
        assert values["schema_version"] == 2
        assert values["finding"]["differences"][0]["verdict"] == "higher"
        assert values["runs"][2]["evaluation"]["rows"][4]["loss"] == 1.56
        assert values["notes"][0] == "a remark"

    def test_a_diverged_loss_survives_the_round_trip_as_strict_json(self, fabricate, tmp_path):
        report = build([fabricate("softmax", [1.0, math.nan, math.inf])])
        path = write(report, tmp_path)[0]

        def refuse(constant):
            raise AssertionError(f"{constant} is not JSON")

        json.loads(path.read_text(), parse_constant=refuse)
        rows = read_as(Report, path).runs[0].evaluation.rows
        assert math.isnan(rows[1].loss)
        assert rows[2].loss == math.inf

    def test_early_results_are_read_and_judged_anew(self, four, tmp_path):
        """They know dynamic NTK alone, hold no sums by document, and another kind of finding."""
        values = json.loads(json_text(build([fabricate_early(entry) for entry in four])))
        for entry in values["runs"]:
            for row in entry["evaluation"]["rows"]:
                row["ntk"] = row.pop("setting")["rope"] == "ntk"
                del row["documents"], row["windows_by_document"]
                for bucket in row["buckets"]:
                    del bucket["sums"]
        values |= {"schema_version": 1, "finding": {"sentence": "so it holds", "verdict": "holds", "ratios": []}}
        path = tmp_path / "results.json"
        path.write_text(json.dumps(values))
        report = read_as(Report, path)
        assert report.schema_version == 2
        assert settings(report.groups) == ["as trained", "dynamic NTK"]
        assert "LSSAR as trained has the lowest loss, 1.560;" in report.finding.sentence

    def test_what_holds_numbers_alone_stands_on_one_line(self, fabricate):
        losses = [(1, math.nan), (20, 2.25)]
        report = build([fabricate("lssar", [1.0], recipe="betas = [\n 0.9,\n 0.95]\n", train_loss=losses)])
        text = json_text(report)
        assert json.loads(text) == json.loads(report.model_dump_json())
        assert '"train_loss": [[1, "NaN"], [20, 2.25]],' in text
        assert '"documents": [3, 8],' in text
        assert re.search(r'^ *{"start": 0, "end": 128, "loss": .*"sums": \[[\d.]+, [\d.]+\]}', text, re.MULTILINE)
        tricky = report.model_copy(update={"title": "{\n[\n1\n]}", "notes": ["]\n}", "{", "[,\n  1"]})
        assert json.loads(json_text(tricky)) == json.loads(tricky.model_dump_json())

    @pytest.mark.parametrize(
        ("text", "said"), [("{", "not a report"), ('{"schema_version": 1}', "not a report"), (None, "cannot read")]
    )
    def test_reading_something_else_says_what_to_do(self, tmp_path, text, said):
        path = tmp_path / "results.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(LabError, match=f"{said}.*softfocus compare"):
            read_as(Report, path)

    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (lambda row: row["windows_by_document"].pop(), "2 documents, and 1 windows_by_document"),
            (lambda row: row["documents"].append(9), "3 documents, and 2 windows_by_document"),
            (lambda row: row["buckets"][0]["sums"].pop(), "length 128: 2 documents, and 1 sums from 0"),
            (lambda row: row.update(loss=1.1), "length 128: the loss is 1.1, and its sums by document make 1"),
            (lambda row: row.update(loss="NaN"), "the loss is nan, and its sums by document make 1"),
            (lambda row: row.update(loss="Infinity"), "the loss is inf, and its sums by document make 1"),
            (lambda row: row.update(tokens=9), "the loss is 1, and its sums by document make 455.111"),
            (lambda row: row["buckets"][0].update(loss=2), "the loss from 0 is 2, and its sums by document make 1"),
        ],
    )
    def test_a_row_that_contradicts_itself_is_refused(self, fabricate, tmp_path, damage, says):
        """In a report, and in the evaluation of a run."""
        entry = fabricate("lssa", [1.0])
        values = json.loads(json_text(build([entry])))
        damage(values["runs"][0]["evaluation"]["rows"][0])
        path = tmp_path / "results.json"
        path.write_text(json.dumps(values))
        with pytest.raises(LabError, match=rf"results\.json is not a report: runs\.0\.evaluation\.rows\.0: .*{says}"):
            read_as(Report, path)
        save_run(tmp_path, entry.info)
        (tmp_path / "evaluation.json").write_text(json.dumps(values["runs"][0]["evaluation"]))
        with pytest.raises(LabError, match=rf"evaluation\.json cannot be read: rows\.0: .*{says}"):
            load_entry(tmp_path)

    def test_sums_may_be_off_by_their_last_digits(self, fabricate):
        row = fabricate("lssa", [1.0], train_length=64).evaluation.rows[0].model_dump()
        row["buckets"][0]["sums"] = [round(total / 3, 4) for total in row["buckets"][0]["sums"]]
        row["loss"] = row["buckets"][0]["loss"] = 1 / 3
        assert Row.model_validate(row)

    def test_an_evaluation_without_rows_is_refused(self, fabricate, tmp_path):
        entry = fabricate("lssa", [1.0], name="mine")
        values = json.loads(json_text(build([entry])))
        values["runs"][0]["evaluation"]["rows"] = []
        path = tmp_path / "results.json"
        path.write_text(json.dumps(values))
        with pytest.raises(
            LabError, match=r"results\.json is not a report: runs\.0: the evaluation of mine has no rows"
        ):
            read_as(Report, path)
        save_run(tmp_path, entry.info)
        (tmp_path / "evaluation.json").write_text(json.dumps(values["runs"][0]["evaluation"]))
        with pytest.raises(
            LabError, match=r"evaluation\.json has no rows; evaluate the run again with `softfocus eval"
        ):
            load_entry(tmp_path)

    def test_a_file_of_a_later_version_is_refused(self, fabricate, tmp_path):
        values = json.loads(json_text(build([fabricate("lssa", [1.0])]))) | {"schema_version": 3, "new": 1}
        path = tmp_path / "results.json"
        path.write_text(json.dumps(values))
        with pytest.raises(
            LabError, match=r"written by a newer version: schema_version is 3.* up to 2; update softfocus"
        ):
            read_as(Report, path)
        path.write_text(json.dumps(values | {"schema_version": "new"}))
        with pytest.raises(LabError, match="not a report: schema_version: Input should be a valid integer"):
            read_as(Report, path)

    def test_a_folder_that_cannot_be_made_is_a_lab_error(self, four, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(LabError, match="cannot write"):
            write(build(four), tmp_path / "file" / "folder")

    def test_provenance_names_recipes_commits_and_seeds(self, four, fabricate):
        assert (
            provenance(build(four))
            == "recipes demo-softmax, demo-lssa, demo-lssar, demo-laser · commit 0123456789 · seed 1"
        )
        assert (
            provenance(build([fabricate("lssa", [1.0], commit="v0.1", seed=3)]))
            == "recipe demo-lssa · commit v0.1 · seed 3"
        )

    def test_notes_say_in_what_runs_differ(self, four, fabricate):
        assert not any("differ" in note for note in build(four).notes)
        other = fabricate("lssa", [1.0, 2.0], train_length=64, vocabulary=512, commit="a" * 40 + "+dirty")
        text = " ".join(build([four[0], other]).notes)
        for said in (
            "vocabulary (256, 512)",
            "training length (128, 64)",
            "commit",
            "The source tree had changes",
        ):
            assert said in text
        sizes = [four[0], four[1].model_copy(update={"info": four[1].info.model_copy(update={"parameters": 1})})]
        assert any("the better one may be the larger model" in note for note in build(sizes).notes)
        stale = four[0].model_copy(update={"evaluation": four[1].evaluation})
        assert "belongs to another training" in build([stale]).notes[-1]

    def test_notes_know_what_trained_the_first_part_of_a_resumed_run(self, four):
        one, other = four[0].info, four[1].info
        machine = one.machine.model_copy(update={"cpu": "another processor"})
        before = Session(commit="b" * 40 + "+dirty", versions={}, machine=machine, started=one.started)
        resumed = four[0].model_copy(update={"info": one.model_copy(update={"sessions": [before]})})
        assert one.commit == other.commit
        report = build([resumed, four[1]])
        text = " ".join(report.notes)
        assert f"The runs differ in commit (bbbbbbbbbb+dirty and {one.commit[:10]}, {one.commit[:10]})" in text
        assert f"differ in processor (another processor and {one.machine.cpu}, {one.machine.cpu})" in text
        assert DIRTY in report.notes
        assert f"commits bbbbbbbbbb+dirty and {one.commit[:10]}" in provenance(report)

    def test_notes_say_on_what_text_the_losses_were_measured(self, fabricate):
        def said(*evaluated, key="c0ffee"):
            runs = [fabricate("lssa", [1.0, 2.0], name=f"run{n}", evaluated=one) for n, one in enumerate(evaluated)]
            runs = [run.model_copy(update={"info": run.info.model_copy(update={"corpus_key": key})}) for run in runs]
            return " ".join(build(runs).notes), same_text(build(runs).evaluations)

        text, same = said({}, {})
        assert "Evaluated on 4,096 validation tokens: spans of 2,048, at random places in 2 documents" in text
        assert same
        for unsaid in ("different text", "cross the end", "may have been trained on"):
            assert unsaid not in text
        for other in ({"corpus_key": "other"}, {"longest": 1024}, {"tokens": 8192}):
            text, same = said({}, other)
            assert "evaluated on different text" in text
            assert not same
        apart = build([fabricate("lssa", [1.0], evaluated={"corpus_key": key}) for key in "ab"])
        assert apart.finding.sentence.startswith("The models read different text, so a difference may be that of the")
        assert said({"crossing": 1})[0].count("1 of the 2 spans cross the end of a document") == 1
        assert "The corpus of run0 changed" in said({}, key="before")[0]
        assert said({"corpus_key": "", "longest": 0, "documents": 0})[1] is False, "an early evaluation does not know"

    def test_the_page_says_that_the_text_is_the_same_only_where_it_is(self, text, fabricate):
        assert "on the same validation tokens" in text
        other = [fabricate("lssa", [1.0], evaluated={"corpus_key": key}) for key in "ab"]
        assert "on the same validation tokens" not in render(build(other))


@pytest.mark.filterwarnings("error")
def test_letters_that_no_font_has_give_no_warning(fabricate, tmp_path):
    report = build([fabricate("lssar", [1.0, 1.1], name=name) for name in ("\U0001f525", "b")])
    write(report, tmp_path)
    assert "\U0001f525" in (tmp_path / "report.html").read_text()


def test_labels_tell_runs_of_one_mechanism_apart(fabricate):
    runs = [fabricate("lssar", [1.0], name=name).evaluation for name in ("a", "b", "b")]
    assert labels(runs) == ["LSSAR · a", "LSSAR · b", "LSSAR · b (2)"]


def test_a_label_of_several_seeds_names_none_of_them(fabricate):
    runs = [fabricate("lssar", [1.0], name=name).evaluation for name in ("p7-s0", "p15-s0")]
    assert labels(runs, [True, False]) == ["LSSAR · p7", "LSSAR · p15-s0"]
    recipe = 'name = "{}"\n[train]\nseed = {}\nlearning_rate = {}\n'
    found = [
        fabricate("lssar", [1.0], name=f"{row}-s{seed}", seed=seed, recipe=recipe.format(row, seed, rate))
        for row, rate in (("half", 1), ("twice", 4))
        for seed in (0, 1)
    ]
    assert [group.title for group in grouped(*found)] == ["LSSAR · half (2 seeds)", "LSSAR · twice (2 seeds)"]


def test_columns_of_unequal_grids(fabricate):
    short, long = fabricate("lssa", [1.0, 2.0]), fabricate("lssar", [1.0, 1.0, 1.0], train_length=256)
    both = grouped(short, long)
    assert columns(both) == [1, 2, 4]
    assert shared_columns(both) == [1, 2]
    assert columns(both, "tokens") == [128, 256, 512, 1024]
    assert shared_columns(both, "tokens") == [256]


def test_an_entry_reads_back(four):
    assert Entry.model_validate_json(four[0].model_dump_json()).info == four[0].info


def test_the_template_is_shipped_with_the_package():
    import softfocus.lab

    assert (Path(softfocus.lab.__file__).parent / "report/page.html.j2").is_file()
