"""Induction: repeats against a search by hand, losses by distance against the model's own, stopped
and gone on with.
"""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.nn import functional as F

from softfocus.lab import cli
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.windows import EvaluationWindows
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.induction import difference, edges, induction, repeats
from softfocus.lab.progress import Event, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import INDUCTION, RECIPE, load_measured
from softfocus.lab.run_folder.results import Induction, Repeats, json_text


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns(INDUCTION)))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), st.integers(2, 5))
def test_the_latest_repeat_is_found(tokens: list[int], ngram: int) -> None:
    found = repeats(np.array(tokens), ngram)
    assert len(found) == len(tokens) - 1
    for place in range(1, len(tokens)):
        gram = tokens[max(0, place - ngram + 1) : place + 1]
        before = [end for end in range(ngram - 1, place) if tokens[end - ngram + 1 : end + 1] == gram]
        assert found[place - 1] == (place - before[-1] if before else 0)


def test_buckets_of_distances() -> None:
    assert edges(128, 1024) == [0, 1, 64, 128, 256, 512, 1025]
    assert edges(128, 128) == [0, 1, 64, 129]


def test_every_length_predicts_the_same_tokens_bucket_by_bucket(run: Path) -> None:
    found = induction(run, [32, 128], ngram=3, tokens=1024, batch_tokens=100)
    store = data.load(load(run / RECIPE), silent).store
    spans, limits = EvaluationWindows(store, [32, 128], 1024), edges(32, 128)
    model = models.load(run)
    for row in found.rows:
        by_bucket: dict[int, dict[int, list[float]]] = {}
        for start, document in zip(spans.starts, spans._document(spans.starts), strict=True):
            span = torch.from_numpy(store.validation[start : start + 129].astype(np.int64))
            distances = repeats(span.numpy(), 3)
            for first in range(0, 128, row.length):
                window = span[first : first + row.length + 1]
                with torch.inference_mode():
                    losses = F.cross_entropy(model(input_ids=window[None, :-1]).logits[0], window[1:], reduction="none")
                for distance, loss in zip(distances[first:], losses.tolist(), strict=False):
                    bucket = max(i for i, edge in enumerate(limits) if edge <= distance)
                    by_bucket.setdefault(bucket, {}).setdefault(int(document), []).append(loss)
        assert [(part.start, part.end) for part in row.by_distance] == [
            (limits[bucket], limits[bucket + 1]) for bucket in sorted(by_bucket)
        ]
        for part, bucket in zip(row.by_distance, sorted(by_bucket), strict=True):
            losses = [loss for some in by_bucket[bucket].values() for loss in some]
            assert part.tokens == len(losses)
            assert part.loss == pytest.approx(np.mean(losses), rel=1e-5)
            read = sorted({document for documents in by_bucket.values() for document in documents})
            of_document = [by_bucket[bucket].get(document, []) for document in read]
            assert part.counts == [len(some) for some in of_document]
            assert part.sums == pytest.approx([sum(some) for some in of_document], rel=1e-5, abs=1e-4)
        assert sum(part.tokens for part in row.by_distance) == found.tokens == 1024
    counts = [[(part.start, part.tokens) for part in row.by_distance] for row in found.rows]
    assert counts[0] == counts[1]
    assert len(counts[0]) > 3, "the text repeats itself near and far"
    assert load_measured(run, Induction) == found
    assert (run / INDUCTION).read_text() == json_text(found), "numbers stand on one line"


def test_what_is_measured_is_kept(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = induction(run, [32, 64], tokens=512)
    (run / INDUCTION).unlink()

    def stop(event: Event) -> None:
        if event.kind == "row":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        induction(run, [32, 64], tokens=512, progress=stop)
    assert len(load_measured(run, Induction).rows) == 1
    events: list[Event] = []
    assert induction(run, [32, 64], tokens=512, progress=events.append).model_dump_json() == whole.model_dump_json()
    assert len([event for event in events if event.kind == "row"]) == 1
    assert not caplog.messages
    assert len(induction(run, [32, 64], tokens=512, ngram=2).rows) == 2, "other n-grams are another measurement"
    (said,) = caplog.messages
    assert said.startswith(f"{run / 'induction.json'} held 2 rows that were measured otherwise")
    assert load_measured(run, Induction).ngram == 2


def test_a_window_changes_what_is_seen(run: Path) -> None:
    found = induction(run, [32, 64], tokens=512)
    narrow = induction(run, [64], window=8, tokens=512)
    assert [(row.length, row.window) for row in narrow.rows] == [(32, None), (64, None), (64, 8)]
    second = induction(run, [32, 64], window=8, tokens=512)
    assert [(row.length, row.window) for row in second.rows] == [(32, None), (64, None), (32, 8), (64, 8)]
    assert found.rows == second.rows[:2]
    assert all(second.rows[i].by_distance != second.rows[i + 2].by_distance for i in (0, 1))


def repeats_of(sums: list[float], counts: list[int]) -> Repeats:
    tokens = sum(counts)
    loss = sum(sums) / tokens
    return Repeats(start=1, end=2, loss=loss, standard_error=0.1, tokens=tokens, sums=sums, counts=counts)


def test_a_difference_is_paired_by_document() -> None:
    """Documents differ in loss by 10 and more, and in the difference by 0.5 at most. A document
    without such tokens is not counted.
    """
    counts = [4] * 12 + [0]
    before = [10.0 * index for index in range(12)] + [0.0]
    apart = [1.0, 2.0, 3.0] * 4 + [0.0]
    one = repeats_of([a + b for a, b in zip(before, apart, strict=True)], counts)
    found = difference(one, repeats_of(before, counts))
    assert found is not None
    by_document = np.array(apart[:12]) / 4
    assert found.value == pytest.approx(by_document.mean())
    assert found.standard_error == pytest.approx(by_document.std(ddof=1) / math.sqrt(12))


def test_early_results_have_no_paired_difference() -> None:
    early = Repeats(start=1, end=2, loss=1.0, standard_error=0.1, tokens=8)
    assert difference(early, early) is None
    assert difference(repeats_of([1.0, 2.0], [3, 5]), repeats_of([1.0, 2.0], [5, 3])) is None, "of other tokens"


@pytest.mark.parametrize(("sums", "counts"), [([8.0], [4, 4]), ([8.0, 0.0], [8, 1]), ([9.0, 1.0], [4, 4])])
def test_sums_that_do_not_make_the_loss_are_refused(sums: list[float], counts: list[int]) -> None:
    with pytest.raises(ValidationError, match="repeats from 1"):
        Repeats(start=1, end=2, loss=1.0, standard_error=0.1, tokens=8, sums=sums, counts=counts)


def test_the_command_shows_a_table_and_a_figure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for window in ([], ["--window", "1x"]):
        with pytest.raises(SystemExit) as left:
            cli.main(["induction", str(run), "--lengths", "1x,4x", *window, "--tokens", "512", "-q"])
        assert not left.value.code
    out = capsys.readouterr().out
    for part in load_measured(run, Induction).rows[0].by_distance:
        assert f"{part.loss:.3f}" in out
    assert "window 32" in out
    whole, narrow = (
        next(row for row in load_measured(run, Induction).rows if (row.length, row.window) == (128, window))
        for window in (None, 32)
    )
    assert "4x, as trained less window 32" in out
    for part, other in zip(whole.by_distance, narrow.by_distance, strict=True):
        apart = difference(part, other)
        assert apart is not None
        assert f"{apart.value:.3f} ± {apart.standard_error:.3f}" in out
    assert (run / "induction.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_a_task_has_no_text(tmp_path: Path) -> None:
    from softfocus.lab.train.run import train

    few = ["train.steps=1", "train.batch=2", "train.warmup=0", "train.log_every=1"]
    train(load("mqar", few), tmp_path / "run")
    with pytest.raises(LabError, match="generated task and not on text; measure it with `softfocus recall"):
        induction(tmp_path / "run", [64])
