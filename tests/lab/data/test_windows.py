from pathlib import Path

import numpy as np
import pytest
import torch

from softfocus.lab.data.tokens import TokenStore
from softfocus.lab.data.windows import EvaluationWindows, TrainingWindows
from softfocus.lab.errors import LabError


def store(train: int = 100, documents: tuple[int, ...] = (50,)) -> TokenStore:
    """Every token is its own place, so that a window says where it comes from."""
    starts = np.cumsum((0, *documents[:-1]))
    return TokenStore(
        Path("nowhere"), np.arange(train), np.arange(sum(documents)), np.zeros(1, np.int64), starts, vocab_size=10**6
    )


def test_a_training_window():
    windows = TrainingWindows(store(100), 8)
    item = windows[3]
    assert {name: (value.shape, value.dtype) for name, value in item.items()} == {
        "input_ids": ((8,), torch.int64),
        "labels": ((8,), torch.int64),
    }
    assert torch.equal(item["labels"], item["input_ids"] + 1), "labels are the tokens that follow"
    assert torch.equal(item["input_ids"].diff(), torch.ones(7, dtype=torch.int64))


@pytest.mark.parametrize(("tokens", "length"), [(100, 8), (1000, 7), (17, 8), (9, 8), (16, 8), (64, 1)])
def test_a_pass_predicts_every_token_once_but_for_the_ends(tokens, length):
    windows = TrainingWindows(store(tokens), length)
    predicted = np.concatenate([windows[index]["labels"].numpy() for index in range(windows.per_pass)])
    assert len(set(predicted)) == len(predicted) == windows.per_pass * length
    assert predicted.min() >= 1
    assert predicted.max() < tokens
    assert tokens - 1 - len(predicted) < 2 * length - 1
    assert predicted.max() - predicted.min() == len(predicted) - 1


@pytest.mark.parametrize(("tokens", "length"), [(29, 10), (100, 8), (17, 8), (9, 8)])
def test_passes_leave_no_token_out_for_good(tokens, length):
    """Documents that are shorter than a window, wherever they stand, are trained on: windows run
    across their ends.
    """
    windows = TrainingWindows(store(tokens), length, count=2000)
    assert {int(label) for item in windows for label in item["labels"]} == set(range(1, tokens))


def test_the_index_and_the_seed_decide():
    first, second, other = (TrainingWindows(store(500), 8, seed=seed, count=300) for seed in (0, 0, 1))
    order = [int(first[index]["input_ids"][0]) for index in range(300)]
    assert [int(second[index]["input_ids"][0]) for index in reversed(range(300))][::-1] == order, "in any order"
    assert [int(other[index]["input_ids"][0]) for index in range(300)] != order
    one, two = order[: first.per_pass], order[first.per_pass : 2 * first.per_pass]
    assert one != sorted(one)
    assert one != two
    offsets = {start % 8 for start in order}
    assert len(offsets) > 2, "passes cut in different places"


def test_the_number_of_training_windows():
    assert len(TrainingWindows(store(100), 8)) == 11
    assert len(TrainingWindows(store(100), 8, count=5)) == 5
    with pytest.raises(IndexError):
        TrainingWindows(store(100), 8, count=5)[5]
    assert len(list(TrainingWindows(store(100), 8, count=5))) == 5
    with pytest.raises(LabError, match="the corpus has 8 training tokens, one window of 8 takes 9; choose a shorter"):
        TrainingWindows(store(8), 8)


def test_a_loader_with_workers_gives_the_same_windows():
    windows = TrainingWindows(store(200), 8, count=12)
    batches = list(torch.utils.data.DataLoader(windows, batch_size=4, num_workers=1))
    assert torch.equal(
        torch.cat([batch["labels"] for batch in batches]), torch.stack([item["labels"] for item in windows])
    )


DOCUMENTS = (40, 5, 70, 33, 32, 100)


def predictions(windows: EvaluationWindows, length: int, batch_tokens: int = 64) -> np.ndarray:
    return np.concatenate([tokens[:, 1:].ravel() for tokens, _ in windows.batches(length, batch_tokens)])


@pytest.mark.parametrize("documents", [DOCUMENTS, (300,), (10,) * 30, (3, 33, 3, 3, 3, 60, 60)])
@pytest.mark.parametrize("tokens", [32, 96, 10_000])
def test_every_length_predicts_the_same_tokens_once(documents, tokens):
    windows = EvaluationWindows(store(documents=documents), [4, 8, 32], tokens)
    longest = predictions(windows, 32)
    assert len(set(longest)) == len(longest) == windows.tokens <= max(tokens, 32)
    assert windows.tokens == 32 * len(windows.starts)
    for length in (4, 8):
        assert np.array_equal(predictions(windows, length), longest)


def test_windows_have_one_token_more_than_predictions_and_run_on():
    windows = EvaluationWindows(store(documents=DOCUMENTS), [8, 32], 128)
    for tokens, documents in windows.batches(8, 32):
        assert tokens.shape == (4, 9)
        assert tokens.dtype == np.int64
        assert documents.shape == (4,)
        assert (np.diff(tokens) == 1).all()


def test_spans_stay_inside_documents_and_come_from_all_of_them():
    windows = EvaluationWindows(store(documents=DOCUMENTS), [32], 10**6)
    starts = np.cumsum((0, *DOCUMENTS))
    inside = windows.starts[: len(windows.starts) - windows.crossing]
    document = np.searchsorted(starts, inside, "right") - 1
    assert document.tolist() == [0, 2, 3, 5, 2, 5, 5], "one of each that is long enough, another of each ..."
    assert windows.documents == 4
    assert (inside + 32 < starts[document + 1]).all()
    assert EvaluationWindows(store(documents=DOCUMENTS), [32], 3 * 32).starts.tolist() == inside[:3].tolist()
    found = np.concatenate([documents for _, documents in windows.batches(32, 32)])
    assert found[: len(document)].tolist() == document.tolist()


def test_a_position_in_the_window_is_not_one_in_the_file():
    """Files begin with licences and imports: spans lie anywhere in their documents, and the seed
    says where.
    """
    documents = (10 * 32,) * 200
    starts = np.cumsum((0, *documents[:-1]))
    places = EvaluationWindows(store(documents=documents), [8, 32], 200 * 32).starts - starts
    assert abs(places.mean() - 144) < 30, "the mean of 0 to 288, but for chance: three standard errors are 18"
    assert len(np.unique(places)) > 100
    second, other = (EvaluationWindows(store(documents=documents), [8, 32], 999, seed=seed).starts for seed in (0, 1))
    assert second.tolist() == (places + starts)[: len(second)].tolist()
    assert second.tolist() != other.tolist()


def test_spans_that_cross_are_a_last_resort_and_said_to_be(caplog):
    enough = EvaluationWindows(store(documents=DOCUMENTS), [32], 7 * 32)
    assert (enough.crossing, caplog.text) == (0, "")
    more = EvaluationWindows(store(documents=DOCUMENTS), [32], 8 * 32)
    assert more.starts[:7].tolist() == enough.starts.tolist()
    assert more.crossing == 1
    assert "1 of 8 windows of 32 tokens cross the end of a document: too few of the 6 documents" in caplog.text
    short = EvaluationWindows(store(documents=(10,) * 30), [32], 10**6)
    assert short.starts.tolist() == list(range(0, 288, 32))
    assert short.crossing == 9


def test_what_the_batch_holds_does_not_change_what_is_read():
    windows = EvaluationWindows(store(documents=DOCUMENTS), [8, 32], 200)
    for length in (8, 32):
        assert np.array_equal(predictions(windows, length, 1), predictions(windows, length, 1000))
    assert [len(tokens) for tokens, _ in windows.batches(32, 1)] == [1] * 6


def test_too_long_and_uneven_lengths():
    assert EvaluationWindows(store(documents=(33,)), [32], 1).tokens == 32
    with pytest.raises(LabError, match="there are 32 validation tokens, one window of 32 takes 33; evaluate shorter"):
        EvaluationWindows(store(documents=(32,)), [8, 32], 100)
    with pytest.raises(LabError, match="the length 12 does not divide the longest, 32"):
        EvaluationWindows(store(documents=(100,)), [8, 12, 32], 100)
