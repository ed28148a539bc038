"""Fine-tuning on labelled examples: files in SuperGLUE's layout, and a task that can be learned."""

import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from softfocus.lab.cli import app
from softfocus.lab.data import labelled
from softfocus.lab.data.tokenizer import load_tokenizer
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate import classify as room
from softfocus.lab.evaluate.classify import classify_labelled
from softfocus.lab.progress import Listener, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import load_measured
from softfocus.lab.run_folder.results import Labelled, LabelledRow
from softfocus.lab.train.run import train

LINE = {"premise": "It rains.", "hypothesis": "It is wet.", "label": "entailment", "idx": 0}
OTHER = {"premise": "It is dry.", "hypothesis": "It rains.", "label": "contradiction", "idx": 1}


def written(folder: Path, train: list[Any], held_out: list[Any], name: str = "val.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in (("train.jsonl", train), (name, held_out)):
        texts = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
        (folder / file).write_text("\n".join(texts) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["val.jsonl", "validation.jsonl"])
def test_the_files_of_a_task_are_read(tmp_path: Path, name: str) -> None:
    found = labelled.read(written(tmp_path / "RTE", [LINE, OTHER, LINE], [OTHER], name), load_tokenizer("bytes"), 64)
    assert (found.name, found.fields) == ("RTE", ("premise", "hypothesis"))
    assert found.labels == ("contradiction", "entailment")
    assert found.training.labels.tolist() == [1, 0, 1]
    assert found.held_out.labels.tolist() == [0]
    assert bytes(found.held_out.inputs[0]).decode() == "It is dry.\nIt rains."
    assert found.cut == 0


def test_fields_are_chosen_and_the_last_tokens_of_a_long_example_stay(tmp_path: Path) -> None:
    folder = written(tmp_path, [LINE, OTHER], [LINE])
    found = labelled.read(folder, load_tokenizer("bytes"), 12, ["hypothesis", "premise"])
    assert bytes(found.training.inputs[0]).decode() == "et.\nIt rains."[-12:]
    assert found.cut == 3


def test_the_label_is_no_field(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="--fields: 'label' is the answer"):
        labelled.read(written(tmp_path, [LINE, OTHER], [LINE]), load_tokenizer("bytes"), 64, ["premise", "label"])


def test_labels_of_any_kind_have_names(tmp_path: Path) -> None:
    """BoolQ's and WiC's are bools, COPA's are numbers."""
    for values, names in (((True, False), ("false", "true")), ((0, 1), ("0", "1"))):
        lines = [{"passage": "a\u2028b", "label": value} for value in values]
        found = labelled.read(written(tmp_path, lines, lines), load_tokenizer("bytes"), 64)
        assert found.labels == names
        assert bytes(found.training.inputs[0]).decode() == "a\u2028b"


def test_a_byte_order_mark_and_half_a_character_are_read(tmp_path: Path) -> None:
    lines = ['{"a": "x\\ud800y", "label": "\\ud800"}', '{"a": "z", "label": "b"}']
    folder = written(tmp_path, ["\ufeff" + lines[0], lines[1]], lines)
    found = labelled.read(folder, load_tokenizer("bytes"), 64)
    assert found.labels == ("?", "b")
    assert bytes(found.training.inputs[0]).decode() == "x?y"


def test_a_batch_is_padded_on_the_right() -> None:
    batch = labelled.padded([{"input_ids": [5, 6], "labels": 1}, {"input_ids": [7, 8, 9], "labels": 0}], end=3)
    assert batch["input_ids"].tolist() == [[5, 6, 3], [7, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("train", "held_out", "says"),
    [
        (["{"], [LINE], r"train\.jsonl, line 1 is not JSON"),
        (["[1]"], [LINE], r"train\.jsonl, line 1 is not a JSON object"),
        (
            [LINE, OTHER, "", {"premise": "a", "label": "entailment"}],
            [LINE],
            r"line 4: the field 'hypothesis' holds no text",
        ),
        ([LINE, {**OTHER, "label": None}], [LINE], r"line 2: the field 'label' is None"),
        ([LINE, {**OTHER, "label": 0.5}], [LINE], r"line 2: the field 'label' is 0.5"),
        ([LINE, LINE], [LINE], r"train\.jsonl: every label is 'entailment'"),
        (
            [LINE, OTHER],
            [LINE, {**LINE, "label": "new"}],
            r"val\.jsonl, line 2: no line of train\.jsonl has the label 'new'",
        ),
        ([{"label": "a"}, {"label": "b"}], [LINE], r"train\.jsonl, line 1: no field holds text"),
        (
            [{"a": "", "label": "a"}, {"a": "b", "label": "b"}],
            [{"a": "c", "label": "a"}],
            "line 1: there is no text in a",
        ),
        ([], [LINE], r"train\.jsonl has no line"),
        (['{"a": ' + "1" * 5000 + "}"], [LINE], r"train\.jsonl, line 1 is not JSON"),
        (["[" * 100_000], [LINE], r"train\.jsonl, line 1 is not JSON"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, train: list[Any], held_out: list[Any], says: str) -> None:
    with pytest.raises(LabError, match=says):
        labelled.read(written(tmp_path, train, held_out), load_tokenizer("bytes"), 64)


def test_a_folder_without_the_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="there is no folder"):
        labelled.read(tmp_path / "gone", load_tokenizer("bytes"), 64)
    with pytest.raises(LabError, match=r"there is no train\.jsonl in .*; --data takes a folder with"):
        labelled.read(tmp_path, load_tokenizer("bytes"), 64)
    (tmp_path / "train.jsonl").write_bytes(b"\xff\n")
    (tmp_path / "val.jsonl").write_text(json.dumps(LINE))
    with pytest.raises(LabError, match=r"train\.jsonl, line 1 is not JSON"):
        labelled.read(tmp_path, load_tokenizer("bytes"), 64)


def letters(seed: int, count: int) -> list[dict[str, Any]]:
    """The label is the last letter of the second text; the lengths vary, so that batches are
    padded.
    """
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        label = draw.choice("abc")
        lines.append({"one": "x" * draw.randint(1, 5), "two": "y" * draw.randint(0, 3) + label, "label": label})
    return lines


@pytest.mark.long
def test_labels_that_can_be_learned_are_learned(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RATE", 1.0)
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    before = {path: path.read_bytes() for path in (folder / "model").iterdir()}
    data = written(tmp_path / "letters", letters(0, 512), letters(1, 100))
    row = classify_labelled(folder, data, epochs=6)
    assert (row.data, row.labels, row.examples, row.held_out, row.epochs) == ("letters", ["a", "b", "c"], 512, 100, 6)
    truth = [line["label"] for line in letters(1, 100)]
    right = [given == wanted for given, wanted in zip(row.answers, truth, strict=True)]
    assert row.accuracy == pytest.approx(sum(right) / 100)
    assert row.accuracy > 0.9
    assert row.commonest < 0.5
    assert {path: path.read_bytes() for path in (folder / "model").iterdir()} == before
    second = classify_labelled(
        folder, written(tmp_path / "more", letters(2, 40), letters(3, 8)), fields=["two"], epochs=1
    )
    assert load_measured(folder, Labelled).rows == [row, second]
    again = classify_labelled(folder, data, epochs=1)
    assert load_measured(folder, Labelled).rows == [second, again], "a data set has one row"


@pytest.mark.long
def test_a_fine_tuning_on_labelled_examples_goes_on(
    trained: Path, tmp_path: Path, stopped_at: Callable[..., int]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    data = written(tmp_path / "letters", letters(0, 90), letters(1, 40))

    def tuned(listen: Listener, fields: Sequence[str] = ("one", "two")) -> object:
        return classify_labelled(folder, data, fields=fields, epochs=4, progress=listen)

    whole = tuned(silent)
    assert stopped_at(9, tuned) == 1
    assert stopped_at(9, partial(tuned, fields=("two", "one"))) == 1, "other fields"
    assert stopped_at(9, tuned) == 1
    assert stopped_at(0, tuned) == 9
    assert load_measured(folder, Labelled).rows == [whole]
    assert not (folder / "classify.unfinished").exists()


@pytest.mark.long
def test_data_sets_of_one_name_have_a_row_each(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows from before there was a key are told apart by their numbers."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    first = classify_labelled(folder, written(tmp_path / "a" / "RTE", [LINE, OTHER], [LINE, OTHER]), epochs=1)
    assert not caplog.messages
    second = classify_labelled(folder, written(tmp_path / "b" / "RTE", [LINE, OTHER], [OTHER, OTHER]), epochs=1)
    assert (first.data, second.data) == ("RTE", "RTE")
    assert load_measured(folder, Labelled).rows == [first, second]
    assert caplog.messages == [f"{folder / 'labelled.json'} holds a row of other files named RTE, too"]
    (tmp_path / "b").rename(tmp_path / "moved")
    again = classify_labelled(folder, tmp_path / "moved" / "RTE", epochs=2)
    assert load_measured(folder, Labelled).rows == [first, again]

    file = folder / "labelled.json"
    early = json.loads(file.read_text())
    early["rows"] = [{key: value for key, value in early["rows"][0].items() if key != "key"}]
    file.write_text(json.dumps(early))
    longer = classify_labelled(folder, written(tmp_path / "c" / "RTE", [LINE, OTHER, OTHER], [LINE, OTHER]), epochs=1)
    assert [row.key for row in load_measured(folder, Labelled).rows] == ["", longer.key]
    same = classify_labelled(folder, tmp_path / "a" / "RTE", epochs=1)
    assert load_measured(folder, Labelled).rows == [longer, same]


def test_a_damaged_file_of_results_is_refused_before_anything_is_trained(trained: Path, tmp_path: Path) -> None:
    """Its rows would be lost."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "labelled.json").write_text('{"rows": [')
    with pytest.raises(LabError, match=r"labelled\.json"):
        classify_labelled(folder, written(tmp_path / "data", [LINE, OTHER], [LINE]))
    assert (folder / "labelled.json").read_text() == '{"rows": ['


def test_sinks_are_refused_before_anything_is_trained(tiny: Path, tmp_path: Path) -> None:
    """They take no padding, and batches are padded."""
    train(load(tiny, ["model.layout={ '*' = { window = 16, sinks = 2 } }", "train.steps=4"]), tmp_path / "run")
    with pytest.raises(LabError, match="has sinks, which take no padding; classify a run without sinks"):
        classify_labelled(tmp_path / "run", written(tmp_path / "data", [LINE, OTHER], [LINE]))


def test_padding_changes_no_answer(trained: Path) -> None:
    """The head reads the last token that is no padding, and no token sees padding."""
    torch.manual_seed(0)
    model = room._classifier(trained, 256, labels=3).eval()
    long, short = [97, 98, 99, 100, 101, 102], [97, 98]
    batch = labelled.padded([{"input_ids": short, "labels": 0}, {"input_ids": long, "labels": 0}], end=256)
    both = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    alone = model(torch.tensor([short])).logits
    torch.testing.assert_close(both[:1], alone, rtol=1e-4, atol=1e-5)


def test_options_of_labelled_examples_need_them(trained: Path) -> None:
    for options in (["--fields", "a"], ["--epochs", "2"]):
        result = CliRunner().invoke(app.app, ["classify", str(trained), *options])
        assert result.exit_code != 0
        assert re.search(r"is of labelled examples, and there is no --data", str(result.exception) + result.output)


def test_names_of_data_sets_are_no_emoji(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = LabelledRow(
        data="a:key:[b]", fields=["text"], labels=["no", "yes"], examples=2, held_out=2, cut=0, epochs=1, accuracy=0.5,
        standard_error=0.4, commonest=0.5, answers=["yes", "no"]
    )  # fmt: skip
    monkeypatch.setattr(room, "classify_labelled", lambda *_, **__: row)
    result = CliRunner().invoke(app.app, ["classify", str(trained), "--data", str(trained)])
    assert "a:key:[b]: 50.0% ± 40.0% of 2 held-out examples are right" in result.output
