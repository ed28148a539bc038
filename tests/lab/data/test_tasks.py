"""Generated tasks: what a sequence holds, where the answers lie, and that nothing within a window's
reach tells them.
"""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.tasks import IGNORED, Asking, Mqar, Passkey, PasskeyInText, Sample, Task, random_for
from softfocus.lab.data.tokenizer import Encoder, load_tokenizer
from softfocus.lab.data.windows import TaskWindows
from softfocus.lab.errors import LabError
from softfocus.lab.progress import silent
from softfocus.lab.recipes.loading import load


def sample(task: Asking, length: int, nearest: int = 0, index: int = 0) -> Sample:
    return task.sample(random_for("evaluation", 0, index), length, nearest)


@st.composite
def mqars(draw: st.DrawFn) -> tuple[Mqar, int, int]:
    """A task, a length that holds it, and a distance that this length has room for."""
    pairs = draw(st.integers(1, 6))
    task = Mqar(
        pairs,
        draw(st.integers(1, 2 * pairs)),
        keys=draw(st.integers(pairs, 9)),
        values=draw(st.integers(1, 5)),
        filler=draw(st.integers(1, 3)),
        nearest=draw(st.integers(0, 20)),
    )
    length = draw(st.integers(task.least(), 80))
    return task, length, draw(st.integers(0, task.farthest(length)))


@settings(deadline=None, max_examples=200)
@given(mqars(), st.integers(0, 1000))
def test_mqar_asks_for_what_stands_once(drawn: tuple[Mqar, int, int], index: int) -> None:
    task, length, nearest = drawn
    found = sample(task, length, nearest, index)
    words = np.array(task.words)[found.tokens]
    assert len(words) == len(found.labels) == len(found.distances) == length
    kinds = "".join(word[0] for word in words)
    assert kinds[: 2 * task.pairs] == "kv" * task.pairs
    assert Counter(kinds[2 * task.pairs :])["k"] == task.queries
    assert Counter(kinds[2 * task.pairs :])["f"] == length - 2 * task.pairs - task.queries
    pairs = dict(zip(words[: 2 * task.pairs : 2], words[1 : 2 * task.pairs : 2], strict=True))
    assert len(pairs) == task.pairs, "keys differ"
    asked = np.flatnonzero(found.labels != IGNORED)
    assert [kinds[place] for place in asked] == ["k"] * task.queries
    times = Counter(words[asked]).values()
    assert max(times) - (min(times) if len(times) == task.pairs else 0) <= 1, "each key is asked for equally often"
    for place in asked:
        assert task.words[found.labels[place]] == pairs[words[place]]
        distance = int(found.distances[place])
        assert words[place - distance] == words[place]
        assert distance >= max(nearest, task.nearest)
    assert not found.distances[found.labels == IGNORED].any()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 1000), st.data())
def test_passkey_asks_for_the_number(digits: int, more: int, index: int, draw: st.DataObject) -> None:
    task = Passkey(digits)
    length = task.least() + more
    nearest = draw.draw(st.integers(0, task.farthest(length)))
    found = sample(task, length, nearest, index)
    words = [task.words[token] for token in found.tokens]
    number = [task.words[label] for label in found.labels if label != IGNORED]
    assert len(words) == length
    assert len(number) == digits
    text = " ".join([*words, number[-1]])
    key = " ".join(number)
    assert text.startswith("There is an important info hidden")
    assert text.endswith(f"What is the pass key ? The pass key is {key}")
    assert text.count(f"The pass key is {key} . Remember it . {key} is the pass key .") == 1
    assert sum(word.isdigit() for word in words) == 3 * digits - 1, "no other digits"
    whole = [*words, number[-1]]
    for place in np.flatnonzero(found.labels != IGNORED):
        distance = int(found.distances[place])
        assert distance >= nearest
        answer = whole[place + 1]
        mentions = [i for i in range(place + 1 - digits + 1) if whole[i : i + digits] == number]
        offset = place + 1 - (length + 1 - digits)
        assert answer == whole[place + 1 - distance]
        assert place + 1 - distance == mentions[-1 if len(mentions) == 2 else 1] + offset, "the second mention"


TEXT = "There is an important info: the pass key is 10, 22, 345, 678 and 9012. Remember it. " * 9
TOKENIZERS = {spec: load_tokenizer(spec, [TEXT]) for spec in ("bytes", "bpe:300")}


def in_text(spec: str, digits: int = 5) -> PasskeyInText:
    encode = Encoder(TOKENIZERS[spec])
    return PasskeyInText(lambda text: [token for found, _ in encode([text]) for token in found], digits)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(TOKENIZERS)), st.integers(1, 6), st.integers(0, 300), st.integers(0, 99), st.data())
def test_a_text_model_is_asked_for_the_number(
    spec: str, digits: int, more: int, index: int, draw: st.DataObject
) -> None:
    task, tokenizer = in_text(spec, digits), TOKENIZERS[spec]
    length = task.least() + more
    nearest = draw.draw(st.integers(0, task.farthest(length)))
    found = sample(task, length, nearest, index)
    assert len(found.tokens) == len(found.labels) == len(found.distances) == length
    answer = found.labels[found.labels != IGNORED]
    key = tokenizer.decode(answer)
    assert len(key) == digits + 1
    assert key[1:].isdigit()
    whole = [*found.tokens.tolist(), int(answer[-1])]
    text = tokenizer.decode(whole)
    assert text.startswith(" There is an important info hidden inside a lot of irrelevant text. Find it")
    assert text.endswith(f"What is the pass key? The pass key is{key}")
    assert text.count(f" The pass key is{key}. Remember it.{key} is the pass key.") == 1
    size = len(answer)
    for place in np.flatnonzero(found.labels != IGNORED):
        assert place >= length - size
        distance = int(found.distances[place])
        assert distance >= nearest
        assert whole[place + 1 - distance] == found.labels[place]
    mention = length + 1 - size - distance
    assert whole[mention : mention + size] == answer.tolist(), "the second mention"


def test_numbers_take_more_and_fewer_tokens() -> None:
    task = in_text("bpe:300", 2)
    sizes = {int((sample(task, 200, index=index).labels != IGNORED).sum()) for index in range(60)}
    assert len(sizes) > 1, "else the test above has no number of fewer tokens than the longest"
    assert (task.chance, task.answers, task.grown(4)) == (0.01, 1, None)


BLIND = [Mqar(2, 2, keys=2, values=2, filler=1), Passkey(1), Passkey(2)]


def best_guess(task: Task, reach: int, nearest: int, count: int = 4000) -> tuple[float, float]:
    """How often the best guess from the last `reach` + 1 tokens is right, and the standard error.

    The guess is learned by counting, on half of the sequences, and judged on the other half.
    """
    cases: list[list[tuple[bytes, int]]] = []
    length = next(n for n in itertools.count(task.least()) if task.farthest(n) >= nearest) + 2
    for index in range(count):
        found = sample(task, length, nearest, index)
        places = np.flatnonzero(found.labels != IGNORED)
        seen = [found.tokens[max(0, place - reach) : place + 1].tobytes() for place in places]
        cases.append(list(zip(seen, found.labels[places].tolist(), strict=True)))
    table: dict[bytes, Counter[int]] = {}
    for seen, answer in (case for some in cases[::2] for case in some):
        table.setdefault(seen, Counter())[answer] += 1
    right = [
        np.mean([bool(seen in table) and table[seen].most_common(1)[0][0] == answer for seen, answer in some])
        for some in cases[1::2]
    ]
    return float(np.mean(right)), float(np.std(right, ddof=1) / len(right) ** 0.5)


@pytest.mark.long
@pytest.mark.parametrize("task", BLIND, ids=repr)
def test_a_window_is_at_chance_where_every_answer_lies_beyond_its_reach(task: Task) -> None:
    reach = 25
    accuracy, error = best_guess(task, reach, nearest=reach + 2)
    assert accuracy <= task.chance + 4 * error
    farther, _ = best_guess(task, reach + 90, nearest=reach + 2)
    assert farther > task.chance + 8 * error, "the same guess finds answers that it can see"


def test_a_task_grows_on_its_own_vocabulary() -> None:
    task = Mqar(4, 3, keys=16, values=8, filler=4)
    grown = task.grown(4)
    assert grown is not None
    assert (grown.pairs, grown.queries) == (16, 12)
    assert grown.words == task.words
    assert task.grown(5) is None, "there are 16 keys"
    assert Passkey(5).grown(2) is None


@pytest.mark.parametrize(
    "task",
    [
        Mqar(4, 3, keys=16, values=8, filler=4),
        Mqar(4, 3, keys=16, values=8, filler=4, nearest=20),
        Passkey(2),
        in_text("bytes"),
    ],
    ids=lambda task: f"{type(task).__name__}-{task.nearest}",
)
def test_lengths_without_room_are_refused(task: Asking) -> None:
    least = task.least()
    assert sample(task, least, task.farthest(least)).tokens.shape == (least,)
    with pytest.raises(LabError, match=f"takes {least}"):
        sample(task, least - 1)
    with pytest.raises(LabError, match=f"at most {task.farthest(400)}"):
        sample(task, 400, task.farthest(400) + 1)


@pytest.mark.parametrize("task", [Mqar(4, 3, keys=16, values=8, filler=4), Passkey(2)], ids=repr)
def test_training_sequences_follow_from_seed_and_index(task: Task) -> None:
    length = task.least() + 10
    windows = TaskWindows(task, length, seed=3, count=5)
    assert len(windows) == 5
    second, other = TaskWindows(task, length, seed=3, count=9), TaskWindows(task, length, seed=4, count=5)
    for index in (4, 0, 2):  # in any order
        torch.testing.assert_close(windows[index], second[index])
        assert not torch.equal(windows[index]["input_ids"], other[index]["input_ids"])
        assert not np.array_equal(windows[index]["input_ids"].numpy(), sample(task, length, index=index).tokens)
    assert not torch.equal(windows[0]["input_ids"], windows[1]["input_ids"])
    with pytest.raises(IndexError):
        windows[5]
    with pytest.raises(LabError, match=rf"set train\.length to {task.least()} or more"):
        TaskWindows(task, task.least() - 1, seed=0, count=1)


@pytest.mark.parametrize("name", ["mqar", "passkey"])
def test_a_task_has_a_tokenizer_and_a_key(name: str, tmp_path: Path) -> None:
    source = data.load(load(name), silent)
    source.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = source.training_windows(load(name))[0]["input_ids"].tolist()
    assert len(tokenizer) == source.vocab_size
    assert tokenizer.eos_token_id == source.end_of_document not in tokens
    assert tokenizer(tokenizer.decode(tokens)).input_ids == tokens
    assert source.key == data.load(load(name, ["train.seed=7"]), silent).key
    other = {"mqar": "data.mqar.values=63", "passkey": "data.passkey.digits=4"}[name]
    assert source.key != data.load(load(name, [other]), silent).key
