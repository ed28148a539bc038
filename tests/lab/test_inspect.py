"""Looking inside: numbers with known answers, a run's own weights, and a page that needs nothing
but itself.

Over 400 lines: one command, whose tests share their runs.
"""

import io
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers.models import BPE

import softfocus.hf
from softfocus import attention
from softfocus.lab import model as models
from softfocus.lab.claims.results import _attention
from softfocus.lab.cli import main
from softfocus.lab.data.tokenizer import word_tokenizer
from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.inspect import figure, report, run
from softfocus.lab.inspect.measure import HIDDEN, MEASURES, measures, picture
from softfocus.lab.inspect.results import Inspections, read
from softfocus.lab.inspect.run import inspect
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import MODEL, RUN
from softfocus.lab.run_folder.provenance import now
from softfocus.lab.train.run import train

LAYOUT = (
    'model.layout={ "*" = [{ mechanism = "softmax", window = 8, heads = 1 }, { mechanism = "lssar", rope = 0.0 }] }'
)


@pytest.fixture(scope="module")
def runs(trained: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs of the tiny recipe: LSSAR, softmax, and a layout of two heads."""
    folder = tmp_path_factory.mktemp("inspected")
    for name, change in (("softmax", "model.mechanism=softmax"), ("layout", LAYOUT)):
        train(load(tiny, [change]), folder / name)
    return {"lssar": trained, "softmax": folder / "softmax", "layout": folder / "layout"}


def measured(row: list[float], visible: list[bool] | None = None, place: int | None = None, length: int = 4) -> Any:
    """The measures of one row, by name."""
    weights = torch.tensor([[[row]]], dtype=torch.float64)
    seen = torch.tensor([[[visible or [True] * len(row)]]])
    places = torch.tensor([len(row) - 1 if place is None else place])
    values = measures(weights, seen, places, length)
    assert values.shape == (1, 1, 1, len(MEASURES))
    return dict(zip(MEASURES, values.flatten().tolist(), strict=True))


def test_uniform_weights() -> None:
    found = measured([0.125] * 8)
    assert found["entropy"] == pytest.approx(math.log(8))
    assert found["uniform"] == pytest.approx(math.log(8))
    assert found["distance"] == pytest.approx(3.5)  # 0 to 7
    assert found["beyond"] == pytest.approx(4 / 8)  # 4 to 7
    assert (found["zeros"], found["above_1e_9"], found["above_1e_3"]) == (0, 1, 1)


def test_one_key() -> None:
    found = measured([0, 0, 1, 0, 0, 0, 0, 0])
    assert found == {
        "zeros": 7 / 8, "above_1e_9": 1 / 8, "above_1e_3": 1 / 8, "below_1e_3": 7 / 8, "below_1e_7": 7 / 8,
        "entropy": 0, "uniform": pytest.approx(math.log(8)), "distance": 5, "beyond": 1,
    }  # fmt: skip


def test_thresholds_are_of_the_rows_largest_and_zeros_are_exact() -> None:
    found = measured([0.5, 0.4e-3, 0.6e-3, 0.4e-9, 0.6e-9, 1e-300, 0.0, 0.0])
    assert found["zeros"] == 2 / 8
    assert found["above_1e_9"] == 4 / 8
    assert found["above_1e_3"] == 2 / 8


def test_probabilities_are_shares_of_the_row() -> None:
    """Twice the weights are the same probabilities; what the row cannot see is none."""
    row = [1.0, 0.9e-3, 1.1e-3, 0.9e-7, 1.1e-7, 0.0, 0.0, 0.0]
    found = measured([2 * weight for weight in row], [True] * 6 + [False] * 2)
    assert found["below_1e_3"] == pytest.approx(4 / 6)
    assert found["below_1e_7"] == pytest.approx(2 / 6)


def test_what_a_row_cannot_see_does_not_count() -> None:
    seen = [True, True, True, True, False, False, False, False]
    found = measured([0.5, 0, 0, 0.5, 0, 0, 0, 0], seen, place=3)
    assert found["zeros"] == 2 / 4
    assert found["uniform"] == pytest.approx(math.log(4))
    assert found["entropy"] == pytest.approx(math.log(2))
    assert found["distance"] == 1.5


def test_signs_and_rows_without_weight() -> None:
    signed, plain = measured([-0.5, 0.25, 0, 1.0]), measured([0.5, 0.25, 0, 1.0])
    assert signed == plain
    nothing = measured([0.0] * 4)
    assert nothing == dict.fromkeys(MEASURES, 0) | {
        "zeros": 1, "below_1e_3": 1, "below_1e_7": 1, "uniform": pytest.approx(math.log(4)),
    }  # fmt: skip


def test_a_picture_keeps_the_highest_of_its_cells() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.25, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, -0.2, 0.1]])
    visible = torch.tensor([[True, True, True, True, False, False], [True] * 6])
    assert picture(weights, visible, 3).tolist() == [[1.0, 0.5, HIDDEN], [0.0, 0.0, 1.0]]
    assert picture(weights, visible, 100).shape == (2, 6)


def test_the_colours_tell_zero_from_small_and_from_out_of_sight() -> None:
    shares = np.array([[HIDDEN, 0.0, 1e-20, 1e-9, 1e-6, 1e-3, 1.0]], dtype=np.float32)
    pixels = figure.shade(shares)[0].tolist()
    assert pixels[1][3] == 0  # a zero is transparent
    alphas = [alpha for *_, alpha in pixels[2:]]
    assert alphas[0] == alphas[1] > 0
    assert alphas[1:] == sorted(set(alphas[1:]))
    assert alphas[-1] == 255
    assert len({tuple(pixel) for pixel in pixels[:2] + pixels[3:]}) == 6


@pytest.mark.parametrize("name", ["lssar", "softmax", "layout"])
def test_a_runs_numbers_are_those_of_its_weights(runs: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Held against the model's own attention on an identity for a value, row by row."""
    length = 96
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: {i * i % 97}.\n" for i in range(12))[: length + 1])
    found, maps = inspect(runs[name], [length], text=text, tokens=length)
    model = models.load(runs[name])
    by_head: dict[int, torch.Tensor] = {}

    def listen(call: Any) -> None:
        eye = torch.eye(length).expand(1, len(call.heads), -1, -1)
        weights = attention(call.query, call.key, eye, backend="reference", **call.arguments)
        by_head.update(zip(call.heads, weights[0], strict=True))

    with torch.inference_mode(), softfocus.hf.watch(listen):
        model(input_ids=torch.tensor([list(text.read_bytes()[:length])]), use_cache=False)
    assert found.lengths[0].rows == length
    for head, weights in by_head.items():
        window = 8 if (name, head) == ("layout", 0) else length
        rows = [weights[i, max(0, i - window + 1) : i + 1].tolist() for i in range(length)]
        entropy = [-sum(a * math.log(a) for a in row if a > 0) for row in rows]
        distance = [sum(a * (len(row) - 1 - j) for j, a in enumerate(row)) for row in rows]
        row = found.row(length, 0, head)
        assert row.zeros.mean == pytest.approx(np.mean([row.count(0.0) / len(row) for row in rows]))
        assert row.entropy.mean == pytest.approx(np.mean(entropy), rel=1e-4)
        assert row.distance.mean == pytest.approx(np.mean(distance), rel=1e-4)
        assert row.uniform.mean == pytest.approx(np.mean([math.log(len(row)) for row in rows]))
        assert math.isnan(row.zeros.standard_error)  # one document
        drawn = next(m for m in maps if m.head == head).shares
        share = weights / weights.amax(-1, keepdim=True)
        seen = drawn != HIDDEN
        assert seen.sum() == sum(map(len, rows))
        np.testing.assert_allclose(drawn[seen], share.numpy()[seen], rtol=1e-4)
    if name == "layout":
        assert [(group.heads, group.runs) for group in found.heads] == [([0], "softmax[8]"), ([1], "lssar nope")]
        assert found.row(length, 0, 0).beyond.mean == 0
    zeros = found.row(length, 0, 1).zeros.mean
    assert zeros == 0 if name == "softmax" else zeros > 0.2


def test_means_are_of_what_they_say(runs: dict[str, Path]) -> None:
    found, _ = inspect(runs["layout"], [32, 64], tokens=512)
    for length in (32, 64):
        for measure in MEASURES:
            both = [getattr(found.row(length, 0, head), measure).mean for head in (0, 1)]
            assert getattr(found.row(length, 0), measure).mean == pytest.approx(np.mean(both))
            assert getattr(found.row(length), measure) == getattr(found.row(length, 0), measure)
    assert found.row(32).beyond.mean == 0
    assert found.row(64).beyond.mean > 0
    assert found.row(64).zeros.standard_error > 0
    assert [(length.windows, length.documents, length.rows) for length in found.lengths] == [(16, 3, 32), (8, 3, 64)]


def test_batches_and_blocks_change_nothing(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, maps = inspect(runs["lssar"], [32, 64], tokens=256)
    monkeypatch.setattr("softfocus.row_weights.BLOCK_ELEMENTS", 1000)
    parts, other = inspect(runs["lssar"], [32, 64], tokens=256, batch_tokens=1)
    for a, b in zip(whole.rows, parts.rows, strict=True):
        for measure in MEASURES:
            assert getattr(a, measure).mean == pytest.approx(getattr(b, measure).mean, rel=1e-4, abs=1e-4)
    for x, y in zip(maps, other, strict=True):
        np.testing.assert_allclose(x.shares, y.shares, rtol=1e-2, atol=1e-5)


def test_long_windows_are_sampled_evenly(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ROWS", 16)
    found, maps = inspect(runs["lssar"], [64], tokens=256)
    assert found.lengths[0].rows == 16
    assert maps[0].rows.tolist() == list(range(3, 64, 4))
    assert maps[0].shares.shape == (16, 16)
    assert found.model_dump_json() == inspect(runs["lssar"], [64], tokens=256)[0].model_dump_json()


def test_only_what_is_asked_for_is_drawn(runs: dict[str, Path]) -> None:
    found, maps = inspect(runs["lssar"], [32, 64], layers=[0], heads=[1], tokens=128)
    assert [(m.layer, m.head, m.length) for m in maps] == [(0, 1, 32), (0, 1, 64)]
    assert found.heads_of(0) == [0, 1]


@pytest.fixture(scope="module")
def looked(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Inspections, Path]:
    """Everything that the command writes, for three runs."""
    folder = tmp_path_factory.mktemp("look")
    found = [inspect(runs[name], [32, 128], tokens=256) for name in ("softmax", "lssar", "layout")]
    result, paths = report.write(found, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in paths)
    return result, folder


@pytest.mark.long
def test_the_record_reads_back_equal(looked: tuple[Inspections, Path]) -> None:
    result, folder = looked
    assert read(folder / "inspect.json") == result
    (folder / "broken.json").write_text("{}")
    with pytest.raises(LabError, match="cannot be read"):
        read(folder / "broken.json")
    with pytest.raises(LabError, match="No such file"):
        read(folder / "nothing.json")


def test_runs_whose_record_is_replaced_are_named(runs: dict[str, Path], tmp_path: Path) -> None:
    found = {name: inspect(runs[name], [32], tokens=32) for name in ("softmax", "lssar")}
    report.write([found["softmax"]], tmp_path)
    found["longer"] = inspect(runs["softmax"], [64], tokens=64)
    found["text"] = found["softmax"][0].model_copy(update={"text": "other.txt"}), found["softmax"][1]
    found["training"] = found["softmax"][0].model_copy(update={"token": "another"}), found["softmax"][1]
    kept = "Choose another folder with --out to keep both"
    for name, note in (
        ("softmax", ""),
        ("lssar", f"They also held softmax. {kept}"),
        ("longer", f"They also held softmax on validation text, 32 tokens at lengths 32. {kept}"),
        ("text", f"They also held softmax on validation text, 32 tokens at lengths 32. {kept}"),
        ("training", f"They also held softmax of another training. {kept}"),
    ):
        console = Console(file=io.StringIO(), width=300)
        report.say_replaced(tmp_path, [found[name][0]], console)
        assert note in console.file.getvalue()
        assert bool(note) == bool(console.file.getvalue())


def test_runs_of_one_name_have_labels_of_their_own(runs: dict[str, Path]) -> None:
    one = inspect(runs["softmax"], [32], tokens=32)[0]
    console = Console(file=io.StringIO(), width=300)
    report.show(Inspections(created=now(), runs=[one, one]), [], console)
    shown = console.file.getvalue()
    assert "Softmax · softmax: weights" in shown
    assert "Softmax · softmax (2): weights" in shown


@pytest.mark.long
def test_a_record_of_one_document_reads_back(runs: dict[str, Path], tmp_path: Path) -> None:
    """Its standard errors are NaN, which JSON has not got."""
    text = tmp_path / "text.txt"
    text.write_text("abc " * 50)
    result, paths = report.write([inspect(runs["lssar"], [32], text=text, tokens=32)], tmp_path / "look")
    back = read(paths[0])
    assert math.isnan(back.runs[0].rows[0].zeros.standard_error)
    assert back.model_dump_json() == result.model_dump_json()
    assert back.runs[0].text == "text.txt"
    assert "NaN" not in paths[1].read_text()


@pytest.mark.long
def test_the_page_needs_nothing_but_itself(looked: tuple[Inspections, Path]) -> None:
    page = (looked[1] / "inspect.html").read_text()
    assert not re.search(r"<(script|link|iframe|object)\b|@import|url\((?!#)", page)
    sources = re.findall(r'\b(?:src|href)="([^"]*)"', page)
    assert sources
    assert all(source.startswith(("data:image/png;base64,", "#")) for source in sources)
    addresses = set(re.findall(r"\w+://[^\s\"'<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert all(len(text) > 20 for text in re.findall(r'<img [^>]*alt="([^"]*)"', page))


def test_the_page_says_what_was_found(looked: tuple[Inspections, Path]) -> None:
    result, folder = looked
    page = (folder / "inspect.html").read_text()
    assert page.count("<img ") == 3 * 2 * 2  # runs, lengths, heads
    assert "prefers-color-scheme: dark" in page
    for name in ("Softmax, 128 tokens (4x)", "LSSAR, 128 tokens (4x)", "head 0, softmax[8]", "head 1, lssar nope"):
        assert name in page
    zeros = 100 * result.runs[1].row(128).zeros.mean
    said = re.search(r"LSSAR, at 128 tokens \(4x\): ([\d.]+) ± ", page)
    assert said is not None
    assert float(said[1]) == pytest.approx(zeros, abs=0.06)
    assert "Softmax, at 128 tokens (4x): 0 % of the visible weights are exactly zero" in page
    headings = re.findall(r"<h3>(.*?) tokens", page)
    assert [heading.rsplit(" ", 1)[1] for heading in headings] == ["128"] * 3 + ["32"] * 3


def test_the_table_fits_eighty_columns(looked: tuple[Inspections, Path]) -> None:
    for one in looked[0].runs:
        console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(report.table("A name", one))
        text = console.export_text()
        assert "…" not in text
        row = one.row(128)
        assert f"{row.entropy.mean:.2f}" in text


def refused(folder: Path, **arguments: Any) -> str:
    with pytest.raises(LabError) as caught:
        inspect(folder, **{"lengths": [32], **arguments})
    return str(caught.value)


def test_what_cannot_be_inspected(runs: dict[str, Path], tmp_path: Path) -> None:
    lssar = runs["lssar"]
    for asked in ({"layers": [1]}, {"layers": [0, -1]}):
        with pytest.raises(UsageError, match=r"--layers: -?1 is out of range; the model has 1 layers, from 0 to 0"):
            inspect(lssar, [32], **asked)
    with pytest.raises(UsageError, match="--heads: 2 is out of range; the model has 2 heads"):
        inspect(lssar, [32], heads=[2])
    text = tmp_path / "text.txt"
    assert "cannot read" in refused(lssar, text=text)
    text.write_text("x" * 32)
    assert "has 32 tokens, one window of 32 takes 33; give a longer text" in refused(lssar, text=text)
    text.write_bytes(b"\xff" * 100)
    assert "it is not UTF-8 text" in refused(lssar, text=text)
    assert "one window of 1000000 takes" in refused(lssar, lengths=[1_000_000])
    assert "there is no run" in refused(tmp_path / "nowhere")
    copy = Path(shutil.copytree(lssar, tmp_path / "run"))
    (copy / RUN).write_text((copy / RUN).read_text().replace('"complete"', '"running"'))
    assert "is not finished" in refused(copy)
    shutil.copy(lssar / RUN, copy / RUN)
    shutil.rmtree(copy / MODEL)
    assert "has no model" in refused(copy)


def test_a_text_is_read_as_a_corpus_is(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens are spelt out, and nothing is lost."""
    (text := tmp_path / "text.txt").write_text("a b <|endoftext|> " * 4)
    assert bytes(run._read(text, runs["lssar"], 32).validation.tolist()) == text.read_bytes()
    text.write_text("a b c " * 20)
    monkeypatch.setattr(models, "load_tokenizer", lambda _: word_tokenizer(["a", "b"]))
    assert "cannot encode the text" in refused(runs["lssar"], text=text)
    without = word_tokenizer(["a", "b"])
    without.backend_tokenizer.model = BPE({"a": 0, "b": 1}, [])
    monkeypatch.setattr(models, "load_tokenizer", lambda _: without)
    assert "text.txt has 20 characters (or bytes) that the tokenizer has no token for" in refused(
        runs["lssar"], text=text
    )


def test_a_claim_takes_the_inspection_of_its_run(runs: dict[str, Path], tmp_path: Path) -> None:
    """A file may hold several, by --out."""
    one, own = (inspect(runs[name], [32], tokens=32)[0] for name in ("softmax", "lssar"))
    (file := tmp_path / "inspect" / "inspect.json").parent.mkdir()
    file.write_text(Inspections(created=now(), runs=[one, own]).model_dump_json())
    assert repr(_attention(tmp_path, own.token)) == repr([row for row in own.rows if row.layer is None])  # with NaN
    file.write_text(Inspections(created=now(), runs=[one]).model_dump_json())
    with pytest.raises(LabError, match=r"inspect\.json is not of this training; make it again with"):
        _attention(tmp_path, own.token)


@pytest.mark.long
def test_what_heads_have_learned_is_shown(
    runs: dict[str, Path], looked: tuple[Inspections, Path], tiny: Path, tmp_path: Path
) -> None:
    """A head with a scale of its own beside one with a power and a scale, against the model's own
    parameters.
    """
    layout = (
        'model.layout={ "*" = [{ mechanism = "ssmax", heads = 1 }, '
        '{ mechanism = "lssar", parameters = { power = 5, head_scale = 2 } }] }'
    )
    train(load(tiny, [layout]), tmp_path / "run")
    found = inspect(tmp_path / "run", [32], tokens=64)
    parameters = dict(models.load(tmp_path / "run").named_parameters())
    scales, powers = (parameters[f"gpt_neox.layers.0.attention.softfocus_{name}"] for name in ("head_scale", "power"))
    learned = [{one.argument: (one.start, one.values) for one in group.learned} for group in found[0].heads]
    assert learned == [
        {"head_scale": (0.43, [scales[0].item()])},
        {"head_scale": (2, [scales[1].item()]), "power": (5, [powers[0].item()])},
    ]
    assert powers[0] != 5
    result, paths = report.write([found, inspect(runs["softmax"], [32], tokens=64)], tmp_path / "look")
    assert read(paths[0]) == result
    shown = re.findall(r"<tr><th scope=\"row\">(\w+)</th><td>0</td>(.*?)</tr>", paths[1].read_text())
    cells = {name: re.findall(r"<td>(.*?)</td>", rest) for name, rest in shown}
    assert cells == {
        "head_scale": ["0.43, 2", f"{scales[0]:.3f}", f"{scales[1]:.3f}"],
        "power": ["5", "", f"{powers[0]:.3f}"],
    }
    assert "have learned" not in (looked[1] / "inspect.html").read_text()


def status(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.mark.long
def test_the_command(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(runs["lssar"], tmp_path / "run"))
    options = ["--lengths", "1x,4x", "--tokens", "384", "--heads", "1", "--json", "-"]
    assert status(["inspect", str(copy), *options]) == 0
    shown = capsys.readouterr()
    assert Inspections.model_validate_json(shown.out) == read(copy / "inspect" / "inspect.json")
    assert "of the visible weights are exactly zero" in " ".join(shown.err.split())
    monkeypatch.chdir(tmp_path)
    assert status(["inspect", str(copy), str(runs["softmax"]), "--lengths", "1x", "--tokens", "64", "-q"]) == 0
    found = read(tmp_path / "runs" / "inspect" / "inspect.json")
    assert [one.mechanism for one in found.runs] == ["lssar", "softmax"]
    capsys.readouterr()
    assert status(["inspect", str(copy), "--layers", "0,x"]) == 2
    assert "--layers: '0,x' is not a list of numbers; write --layers like 0,3" in capsys.readouterr().err
    assert status(["inspect", str(copy), "--layers", "7"]) == 2
    assert status(["inspect", str(tmp_path / "nowhere")]) == 1


@pytest.mark.long
def test_a_run_that_fails_takes_no_other_with_it(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, page = Path(shutil.copytree(runs["softmax"], tmp_path / "lost")), tmp_path / "page"
    shutil.rmtree(lost / MODEL)
    options = ["--lengths", "1x", "--tokens", "64", "--out", str(page), "-q"]
    assert status(["inspect", str(runs["lssar"]), str(lost), *options]) == 1
    assert str(lost) in capsys.readouterr().err
    assert [one.mechanism for one in read(page / "inspect.json").runs] == ["lssar"]
    assert status(["inspect", str(runs["softmax"]), str(lost), *options]) == 1
    assert [one.mechanism for one in read(page / "inspect.json").runs] == ["lssar"], "an earlier page stays"
    shutil.rmtree(page)

    def interrupted(folder: Path, *arguments: Any, **options: Any) -> Any:
        if folder == lost:
            raise KeyboardInterrupt
        return inspect(folder, *arguments, **options)

    monkeypatch.setattr("softfocus.lab.inspect.run.inspect", interrupted)
    assert status(["inspect", str(runs["lssar"]), str(lost), *options]) != 0
    assert [one.mechanism for one in read(page / "inspect.json").runs] == ["lssar"]
