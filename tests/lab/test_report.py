import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from softfocus.lab.errors import LabError
from softfocus.lab.figure import PALETTE, colours, figure1, save_figure1, spread
from softfocus.lab.finding import finding
from softfocus.lab.page import render
from softfocus.lab.points import columns, growth, labels, mechanism_name, shared_columns
from softfocus.lab.report import Entry, build, provenance, read, same_text, write
from softfocus.lab.table import loss_table


def evaluations(entries):
    return [entry.evaluation for entry in entries]


def drawn(table, width=120):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


class TestTable:
    def test_has_a_line_a_model_and_scaling_and_the_ratio_last(self, four):
        text = drawn(loss_table(list(zip(labels(evaluations(four)), evaluations(four), strict=True))))
        softmax = [line.split() for line in text.splitlines() if "Softmax" in line]
        assert softmax == [
            ["no", "scaling", "Softmax", "1.400", "1.500", "1.800", "2.200", "2.800", "2.000"],
            ["dynamic", "NTK", "Softmax", "1.400", "1.450", "1.600", "2.000", "2.380", "1.700"],
        ]
        assert "2,048" in text
        assert "16x / 1x" in text

    def test_fills(self, fabricate):
        half = fabricate("softmax", [1.0, 1.5]).evaluation
        text = drawn(loss_table([("Softmax", half), ("LSSAR", None)], planned=[1, 2, 4]))
        lines = [line.split() for line in text.splitlines()]
        assert ["no", "scaling", "Softmax", "1.000", "1.500", "…", "…"] in lines
        assert ["LSSAR", "…", "…", "…", "…"] in lines

    def test_a_final_table_does_not_promise_what_will_not_come(self, fabricate):
        text = drawn(
            loss_table([("a", fabricate("lssa", [1.0, 1.5]).evaluation), ("b", fabricate("lssar", [1.0]).evaluation)])
        )
        assert "…" not in text
        assert "–" in text

    def test_fits_eighty_columns(self, four):
        text = drawn(loss_table(list(zip(labels(evaluations(four)), evaluations(four), strict=True))), width=80)
        assert "1.700" in text
        assert max(map(len, text.splitlines())) <= 80

    def test_a_diverged_loss_is_written_as_such(self, fabricate):
        entry = fabricate("softmax", [1.0, math.nan, math.inf])
        assert {"nan", "inf"} <= set(drawn(loss_table([("Softmax", entry.evaluation)])).split())

    def test_up_to_the_training_length_the_row_without_scaling_stands_for_the_one_with_it(self, fabricate):
        entry = fabricate("softmax", [1.0, 1.5], [1.25])  # NTK from 2x on
        assert growth(entry.evaluation, 2.0, True).ratio == 1.25
        assert growth(fabricate("softmax", [1.0, 1.5], ()).evaluation, 2.0, True) is None


class TestFinding:
    def test_holds(self, four):
        found = finding(evaluations(four))
        assert found.verdict == "holds"
        assert found.sentence == (
            "At 16 times the training length (2,048 tokens) LSSAR's loss is 1.04 times its own at 1x and Softmax's 1.70 "
            "times, each under the RoPE scaling that serves it better (one seed each), so the expected shape (at most 1.15, "
            "above 1.5) holds."
        )
        assert {(r.label, r.ntk, round(r.ratio, 3)) for r in found.ratios} >= {
            ("LSSAR", False, 1.04),
            ("LSSAR", True, 1.12),
            ("Softmax", False, 2.0),
            ("Softmax", True, 1.7),
        }

    def test_the_notes_have_the_numbers_of_every_run(self, four):
        text = " ".join(build(four).notes)
        for said in (
            "Softmax 2.000 / 1.700, LSSA 2.394 / 2.113, LSSAR 1.040 / 1.120, LASER ",
            "Loss at 1x, nats per token: Softmax 1.400, LSSA 1.420, LSSAR 1.500, LASER 1.410;",
            "One training seed (1): the spread over seeds is unknown.",
        ):
            assert said in text

    @pytest.mark.parametrize(
        ("softmax", "lssar"),
        [
            ([1.0, 1, 1, 1, 1.49], [1.0, 1, 1, 1, 1.05]),  # Softmax does not grow enough
            ([1.0, 1, 1, 1, 1.90], [1.0, 1, 1, 1, 1.16]),  # LSSAR grows too much
        ],
    )
    def test_does_not_hold(self, fabricate, softmax, lssar):
        found = finding([fabricate("softmax", softmax).evaluation, fabricate("lssar", lssar).evaluation])
        assert found.verdict == "does not hold"
        assert found.sentence.endswith("so the expected shape (at most 1.15, above 1.5) does not hold.")

    def test_rounding_does_not_move_a_ratio_across_its_limit(self, fabricate):
        runs = fabricate("softmax", [1, 1, 1, 1, 1.5004]), fabricate("lssar", [1, 1, 1, 1, 1.1502])
        found = finding(evaluations(runs))
        assert found.verdict == "does not hold"
        assert "1.1502 times its own at 1x and Softmax's 1.5004 times" in found.sentence

    def test_each_is_judged_under_the_scaling_that_serves_it_better(self, fabricate):
        lssar = fabricate("lssar", [1, 1, 1, 1, 1.05]).evaluation
        rescued = fabricate("softmax", [1, 1, 1, 1, 2.0], [1, 1, 1, 1, 1.4]).evaluation
        assert finding([rescued, lssar]).verdict == "does not hold"

    @pytest.mark.parametrize("alone", ["softmax", "lssar"])
    def test_a_choice_between_scalings_that_was_not_measured_is_not_claimed(self, fabricate, alone):
        losses = {"softmax": [1, 1, 1, 1, 2.0], "lssar": [1, 1, 1, 1, 1.05]}
        runs = [fabricate(name, values, () if name == alone else None) for name, values in losses.items()]
        found = finding(evaluations(runs))
        assert found.verdict == "not judged"
        assert "the better measured scaling of RoPE" in found.sentence
        assert "serves it better" not in found.sentence
        assert "takes both scalings of every run" in found.sentence
        assert f"{mechanism_name(alone)} {losses[alone][-1]:.3f} / not measured" in " ".join(build(runs).notes)

    def test_says_when_a_number_is_close_to_its_limit(self, fabricate):
        softmax = fabricate("softmax", [1, 1, 1, 1, 2.0])
        close = fabricate("lssar", [1, 1, 1, 1, 1.14])
        assert any(re.search("two standard errors .*LSSAR", note) for note in build([softmax, close]).notes)
        sure = fabricate("lssar", [1, 1, 1, 1, 1.14], standard_error=0.001)
        assert "two standard errors" not in " ".join(build([softmax, sure]).notes)

    def test_the_worst_seed_decides(self, fabricate):
        softmax = fabricate("softmax", [1, 1, 1, 1, 2.0]).evaluation
        good, bad = (
            fabricate("lssar", [1, 1, 1, 1, last], seed=seed, name=f"run{seed}").evaluation
            for seed, last in ((1, 1.01), (2, 1.3))
        )
        found = finding([softmax, good, bad])
        assert found.verdict == "does not hold"
        assert "1.01 to 1.30 times" in found.sentence
        assert "(1 to 2 seeds each)" in found.sentence

    @pytest.mark.parametrize("missing", ["softmax", "lssar"])
    def test_without_one_of_the_two_nothing_is_judged(self, four, missing):
        found = finding([e for e in evaluations(four) if e.mechanism != missing])
        assert found.verdict == "not judged"
        assert found.sentence.endswith(f"that takes a run of {mechanism_name(missing)}.")
        assert "LSSA's " in found.sentence
        assert "LASER's" in found.sentence

    def test_a_diverged_lssar_fails_and_a_diverged_softmax_proves_nothing(self, fabricate):
        fine = [1.0, 1, 1, 1, 2.0]
        for bad in (math.nan, math.inf):
            broken = [1.0, 1, 1, 1, bad]
            found = finding([fabricate("softmax", fine).evaluation, fabricate("lssar", broken).evaluation])
            assert found.verdict == "does not hold"
            assert "LSSAR's loss diverged and Softmax's is 2.00 times its own at 1x" in found.sentence
            found = finding([fabricate("softmax", broken).evaluation, fabricate("lssar", [1.0] * 5).evaluation])
            assert found.verdict == "not judged"
            assert "LSSAR's loss is 1.00 times its own at 1x and Softmax's diverged" in found.sentence
            assert str(bad) not in re.findall(r"\w+", found.sentence)

    def test_shorter_lengths_are_reported_and_not_judged(self, fabricate):
        found = finding([fabricate("softmax", [1, 2, 3.0]).evaluation, fabricate("lssar", [1.0, 1, 1]).evaluation])
        assert found.verdict == "not judged"
        assert found.sentence.startswith("At 4 times")
        assert "3.00" in found.sentence

    def test_nothing_to_say(self, fabricate):
        assert finding([]).verdict == "not judged"
        assert "no length beyond 1x" in finding([fabricate("softmax", [1.0]).evaluation]).sentence

    def test_another_spelling_of_the_same_mechanism_counts(self, fabricate):
        found = finding(
            [fabricate("softmax", [1, 1, 1, 1, 2.0]).evaluation, fabricate("sharpened(lssa, 15)", [1.0] * 5).evaluation]
        )
        assert found.verdict == "holds"

    def test_it_is_one_short_sentence_whatever_was_found(self, fabricate):
        ends = [1.05, 1.2, 1.7, math.nan]
        names = ["softmax", "lssar", "lssa", "laser", "ssmax", "sharpened(lssa, 7)"]
        for count in range(1, len(names) + 1):
            for last in ends:
                for ntk in (None, ()):
                    runs = [fabricate(name, [1.0, 1, 1, 1, last], ntk) for name in names[:count]]
                    for chosen in (runs, runs[1:], runs[:1] + runs[2:]):
                        sentence = finding(evaluations(chosen)).sentence
                        assert len(sentence.split()) <= 60, sentence
                        assert ";" not in sentence
                        assert sentence.count(". ") == 0
                        assert sentence.endswith(".")


class TestFigure:
    def test_dollars_in_names_are_dollars(self, fabricate, tmp_path):
        entries = [fabricate("lssa", [1.0, 2.0], name=name) for name in (r"$\frac{$", "a$b$")]
        save_figure1(evaluations(entries), tmp_path / "f.png", title=r"costs $5 or $\frac{")
        assert "a$b$" in render(build(entries))

    def test_png_shows_every_run_in_its_colour(self, four, tmp_path):
        path = tmp_path / "figure1.png"
        save_figure1(evaluations(four), path, title="title")
        image = matplotlib.image.imread(path)
        height, width, _ = image.shape
        assert (height, width) == (768, 1760)
        for index in colours(evaluations(four)):
            wanted = [int(PALETTE[index][0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
            found = (abs(image[:, :, :3] - wanted).max(axis=2) < 0.01).nonzero()
            assert len(found[0]) > 500, PALETTE[index]
            for half in (found[1] < width / 2, found[1] > width / 2):  # a panel a scaling
                assert half.sum() > 200
        assert list(tmp_path.iterdir()) == [path], "no temporary file is left"

    def test_two_panels_on_one_scale_with_bands_labels_and_the_training_length(self, four):
        drawn = figure1(evaluations(four), title="A title")
        plain, ntk = drawn.axes
        assert drawn.get_suptitle() == "A title"
        assert plain.get_ylim() == ntk.get_ylim()
        for ax, name, softmax in ((plain, "no scaling", 2.80), (ntk, "dynamic NTK", 2.38)):
            assert name in ax.get_title(loc="left")
            assert (ax.get_xscale(), list(ax.get_xticks())) == ("log", [1, 2, 4, 8, 16])
            assert [label.get_text() for label in ax.get_xticklabels()][-1] == "2,048\n16×"
            *lines, training_length = ax.lines
            assert lines[0].get_ydata()[-1] == softmax
            assert list(training_length.get_xdata()) == [1, 1]
            assert {text.get_text() for text in ax.texts} == {"Softmax", "LSSA", "LSSAR", "LASER"}
            band = ax.collections[0].get_paths()[0].vertices
            assert band[:, 1].max() == pytest.approx(softmax + 0.01)

    def test_the_same_mechanism_keeps_its_colour_and_no_two_runs_share_one(self, four, fabricate):
        all_four = evaluations(four)
        assert colours(all_four[2:]) == colours(all_four)[2:]
        six = [*all_four, fabricate("ssmax", [1.0]).evaluation, fabricate("softmax", [1.0], name="again").evaluation]
        assert sorted(colours(six)) == list(range(len(PALETTE)))

    def test_labels_move_apart_and_no_further(self):
        assert spread([0.0, 1.0, 5.0], 1.0) == [0.0, 1.0, 5.0]
        assert spread([1.0, 1.0], 1.0) == [0.5, 1.5]
        placed = spread([0.0, 0.1, 0.2, 3.0], 1.0)
        assert all(b - a >= 1.0 - 1e-12 for a, b in pairwise(placed))
        assert sum(placed) == pytest.approx(3.3), "the whole does not drift"

    def test_diverged_and_single_runs_can_be_drawn(self, fabricate, tmp_path):
        entries = [
            fabricate("softmax", [math.nan] * 3, train_loss=[(1, math.nan)]),
            fabricate("lssar", [1.0, math.inf, 1.0], standard_error=math.nan, train_loss=[]),
        ]
        page = render(build(entries))
        assert "Softmax: diverged" in page
        save_figure1(evaluations(entries), tmp_path / "f.png", title="")


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
        assert len(images) == names.count("svg") == 5
        assert all(len(a["aria-label"]) > 20 for a in images)
        assert names.count("table") == names.count("caption") == 3
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
            "The expected shape holds",
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
    def test_results_json_round_trip(self, four, tmp_path):
        report = build(four, remarks=["a remark"])
        paths = write(report, tmp_path / "new" / "folder")
        assert [path.name for path in paths] == ["results.json", "figure1.png", "report.html"]
        assert sorted(path.name for path in paths[0].parent.iterdir()) == ["figure1.png", "report.html", "results.json"]
        assert read(paths[0]).model_dump_json() == report.model_dump_json()
        values = json.loads(paths[0].read_text())
        assert values["schema_version"] == 1
        assert values["finding"]["verdict"] == "holds"
        assert values["runs"][2]["evaluation"]["rows"][4]["loss"] == 1.56
        assert values["notes"][0] == "a remark"

    def test_a_diverged_loss_survives_the_round_trip_as_strict_json(self, fabricate, tmp_path):
        report = build([fabricate("softmax", [1.0, math.nan, math.inf])])
        path = write(report, tmp_path)[0]

        def refuse(constant):
            raise AssertionError(f"{constant} is not JSON")

        json.loads(path.read_text(), parse_constant=refuse)
        rows = read(path).runs[0].evaluation.rows
        assert math.isnan(rows[1].loss)
        assert rows[2].loss == math.inf

    @pytest.mark.parametrize(
        ("text", "said"), [("{", "not a report"), ('{"schema_version": 1}', "not a report"), (None, "cannot read")]
    )
    def test_reading_something_else_says_what_to_do(self, tmp_path, text, said):
        path = tmp_path / "results.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(LabError, match=f"{said}.*softfocus compare"):
            read(path)

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
        stale = four[0].model_copy(update={"evaluation": four[1].evaluation})
        assert "belongs to another training" in build([stale]).notes[-1]

    def test_notes_say_on_what_text_the_losses_were_measured(self, fabricate):
        def said(*evaluated, key="c0ffee"):
            runs = [fabricate("lssa", [1.0, 2.0], name=f"run{n}", evaluated=one) for n, one in enumerate(evaluated)]
            runs = [run.model_copy(update={"info": run.info.model_copy(update={"corpus_key": key})}) for run in runs]
            return " ".join(build(runs).notes), same_text(evaluations(runs))

        text, same = said({}, {})
        assert "Evaluated on 4,096 validation tokens: spans of 2,048, at random places in 2 documents" in text
        assert same
        for unsaid in ("different text", "cross the end", "may have been trained on"):
            assert unsaid not in text
        for other in ({"corpus_key": "other"}, {"longest": 1024}, {"tokens": 8192}):
            text, same = said({}, other)
            assert "evaluated on different text" in text
            assert not same
        assert said({"crossing": 1})[0].count("1 of the 2 spans cross the end of a document") == 1
        assert "The corpus of run0 changed" in said({}, key="before")[0]
        assert said({"corpus_key": "", "longest": 0, "documents": 0})[1] is False, "an early evaluation does not know"

    def test_the_page_says_that_the_text_is_the_same_only_where_it_is(self, text, fabricate):
        assert "on the same validation tokens" in text
        other = [fabricate("lssa", [1.0], evaluated={"corpus_key": key}) for key in "ab"]
        assert "on the same validation tokens" not in render(build(other))


def test_labels_tell_runs_of_one_mechanism_apart(fabricate):
    runs = [fabricate("lssar", [1.0], name=name).evaluation for name in ("a", "b", "b")]
    assert labels(runs) == ["LSSAR · a", "LSSAR · b", "LSSAR · b (2)"]


def test_columns_of_unequal_grids(fabricate):
    short, long = fabricate("lssa", [1.0, 2.0]), fabricate("lssar", [1.0, 1.0, 1.0], train_length=256)
    both = evaluations([short, long])
    assert columns(both) == [1, 2, 4]
    assert shared_columns(both) == [1, 2]
    assert columns(both, "tokens") == [128, 256, 512, 1024]
    assert shared_columns(both, "tokens") == [256]


def test_an_entry_reads_back(four):
    assert Entry.model_validate_json(four[0].model_dump_json()).info == four[0].info


def test_the_template_is_shipped_with_the_package():
    import softfocus.lab

    assert (Path(softfocus.lab.__file__).parent / "page.html.j2").is_file()
