"""Speech: what is synthesised says its text, and only that; folders are read as LibriSpeech lays
them out.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.speech import _CONSONANTS, _VOWELS, SYLLABLES, Syllables, _consonant, _vowel, encode
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.samples import evaluate_samples
from softfocus.lab.progress import silent
from softfocus.lab.recipes.data import SpeechTable
from softfocus.lab.recipes.loading import load
from softfocus.lab.train.run import train

TABLE = SpeechTable(seconds=2.0, rate=4000)
SOME = Syllables(TABLE)


def test_an_utterance_follows_from_its_random_numbers() -> None:
    first, second, other = (SOME.speak(np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1]
    assert first[1] != other[1]


def test_utterances_are_words_of_syllables_that_fit() -> None:
    letters: Counter[str] = Counter()
    for seed in range(200):
        sound, text = SOME.speak(np.random.default_rng(seed))
        assert len(sound) <= 8000
        assert abs(sound.mean()) < 1e-9
        assert sound.std() == pytest.approx(1)
        for word in text.split(" "):
            assert len(word) in (2, 4)
            assert all(word[place] in _CONSONANTS and word[place + 1] in _VOWELS for place in range(0, len(word), 2))
            letters.update(word)
        # A character takes at least two frames of 20 milliseconds, or CTC could not align it
        assert len(text) * 160 <= len(sound)
    vowels = sum(letters[vowel] for vowel in _VOWELS)
    for vowel in _VOWELS:  # uniform: four standard deviations
        assert abs(letters[vowel] - vowels / 5) < 4 * (vowels * 0.2 * 0.8) ** 0.5


def spectrum(sound: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.fft.rfftfreq(len(sound), 1 / 4000), np.abs(np.fft.rfft(sound)) ** 2


@pytest.mark.parametrize("vowel", _VOWELS)
def test_a_vowel_is_loud_at_its_formants(vowel: str) -> None:
    """And nowhere else: within 250 hertz of the two, of a voice of 100 hertz, lies nearly all of
    its power.
    """
    sound = _vowel(np.random.default_rng(0), 4000, 4000, 100.0, 1.0, *_VOWELS[vowel])
    hertz, power = spectrum(sound)
    near = np.min([abs(hertz - formant) for formant in _VOWELS[vowel]], axis=0) < 250
    assert power[near].sum() > 0.95 * power.sum()
    for formant in _VOWELS[vowel]:
        assert power[abs(hertz - formant) < 100].sum() > 0.1 * power.sum()


@pytest.mark.parametrize("consonant", _CONSONANTS)
def test_a_consonant_sweeps_from_its_start_to_its_end(consonant: str) -> None:
    start, end, noise = _CONSONANTS[consonant]
    sound = _consonant(np.random.default_rng(0), 400, 4000, 1.0, start, end, noise)
    for part, expected in ((sound[:100], start + (end - start) / 8), (sound[-100:], end - (end - start) / 8)):
        hertz, power = spectrum(part)
        assert abs((hertz * power).sum() / power.sum() - expected) < 120 + 250 * noise, consonant


def test_samples_are_padded_to_one_size() -> None:
    recipe = load("conformer-toy", ["train.steps=4", "train.batch=4", "train.warmup=0", "data.speech.validation=8"])
    source = data.sampled(recipe, silent)
    windows, held = source.training_windows(recipe), source.held_out(recipe)
    seen = []
    for sample in [*(windows[index] for index in range(16)), *map(held.sample, held.documents)]:
        values, mask, labels = (sample[name] for name in ("input_values", "attention_mask", "labels"))
        assert (values.shape, mask.shape, labels.shape) == ((8000,), (8000,), (98,))
        length = int(mask.sum())
        assert (mask[:length] == 1).all()
        assert (values[length:] == 0).all()
        text = labels[labels != -100]
        assert 1 <= int(text.min()) <= int(text.max()) < source.vocab_size
        seen.append(values.numpy().tobytes())
    assert len(set(seen)) == 24  # none is held out and trained on


def test_ids_of_a_text() -> None:
    assert encode("a b", " ab").tolist() == [2, 1, 3]
    assert len(set(SYLLABLES)) == len(SYLLABLES) == 13


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two speakers in LibriSpeech's layout, and one that is held out; one utterance is too long."""
    soundfile = pytest.importorskip("soundfile")
    random = np.random.default_rng(0)
    for split, speaker, end, texts in (
        ("train", "19", "flac", ["HELLO THERE", "IT'S ME", "LONG"]),
        ("train", "26", "wav", ["GOOD DAY"]),
        ("dev", "84", "flac", ["WHO"]),
    ):
        place = tmp_path / split / speaker / "198"
        place.mkdir(parents=True)
        lines = []
        for number, text in enumerate(texts):
            name = f"{speaker}-198-{number:04}"
            size = 40000 if text == "LONG" else 16500 + 500 * number
            soundfile.write(place / f"{name}.{end}", random.normal(0, 0.1, size), 16000)
            lines.append(f"{name} {text}\n")
        (place / f"{speaker}-198.trans.txt").write_text("".join(lines))
    return tmp_path


def of_folder(folder: Path, *overrides: str) -> Any:
    return load(
        "conformer-librispeech",
        [
            f"data.source={folder / 'train'}",
            f"data.validation_source={folder / 'dev'}",
            "data.speech.seconds=2.0",
            "train.length=99",
            "train.steps=3",
            "train.batch=2",
            "train.accumulate=1",
            "train.warmup=0",
            *overrides,
        ],
    )


def test_a_folder_of_speech(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = of_folder(folder)
    source = data.sampled(recipe, silent)
    assert source.vocab_size == 29
    windows, held = source.training_windows(recipe), source.held_out(recipe)
    assert "1 of 4 utterances are longer than 2 seconds and left out" in caplog.text
    characters = "_ 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"

    def text(sample: Any) -> str:
        return "".join(characters[id] for id in sample["labels"].tolist() if id != -100)

    found = [windows[index] for index in range(6)]
    assert sorted(map(text, found[:3])) == sorted(map(text, found[3:])) == ["GOOD DAY", "HELLO THERE", "IT'S ME"]
    for sample in found:
        length = int(sample["attention_mask"].sum())
        assert length == (17000 if text(sample) == "IT'S ME" else 16500)
        assert float(sample["input_values"][:length].std()) == pytest.approx(1, abs=1e-3)
    assert [text(held.sample(number)) for number in held.documents] == ["WHO"]
    assert source.key == data.sampled(recipe, silent).key


def test_texts_without_a_finite_loss_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CTC takes a frame a character, and one more between equal ones: there are 50 in a second."""
    file = folder / "train" / "19" / "198" / "19-198.trans.txt"
    fits, full = "AB" * 23, "A" * 26
    file.write_text(f"19-198-0000 {fits}\n19-198-0001\n19-198-0001 \n19-198-0001 {full}\n")
    windows = data.sampled(recipe := of_folder(folder), silent).training_windows(recipe)
    assert "3 of 5 utterances have no text, or more than their sound has frames for" in caplog.text
    assert sorted(int((windows[index]["labels"] != -100).sum()) for index in range(2)) == [8, len(fits)]
    file.write_text("19-198-0001\n")
    with pytest.raises(LabError, match=r"no utterance in .* has a text that fits its sound"):
        _ = data.sampled(of_folder(folder, f"data.source={folder / 'train' / '19'}"), silent).key


@pytest.mark.long
def test_a_run_on_a_folder(folder: Path, tmp_path: Path) -> None:
    """Trained by the trainer with its reading processes, and measured."""
    small = ["hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=16"]
    convolutions = ["conv_dim=[8,8,8,8,8,8,8]", "num_conv_pos_embeddings=4", "num_conv_pos_embedding_groups=4"]
    recipe = of_folder(folder, "train.precision=float32", *(f"model.config.{one}" for one in small + convolutions))
    assert train(recipe, tmp_path / "run").status == "complete"
    loss, error = evaluate_samples(tmp_path / "run").rows
    assert (loss.tokens, error.tokens) == (3, 1)  # "WHO": three characters, a word


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("84-198-0000 who\n", "has the character 'h'"),
        ("84-198-0007 WHO\n", "there is no 84-198-0007.flac beside it"),
    ],
)
def test_folders_that_are_wrong(folder: Path, text: str, says: str) -> None:
    (folder / "dev" / "84" / "198" / "84-198.trans.txt").write_text(text)
    with pytest.raises(LabError, match=says):
        _ = data.sampled(of_folder(folder), silent).key


@pytest.mark.parametrize("key", ["data.source", "data.validation_source"])
def test_folders_that_are_missing(folder: Path, tmp_path: Path, key: str) -> None:
    with pytest.raises(
        LabError,
        match=f"there is no folder {tmp_path / 'gone'}; name a folder in LibriSpeech's layout, or a",
    ):
        _ = data.sampled(of_folder(folder, f"{key}={tmp_path / 'gone'}"), silent).key
    (tmp_path / "gone").mkdir()
    with pytest.raises(LabError, match=r"gone has no \*\.trans\.txt; name a folder"):
        _ = data.sampled(of_folder(folder, f"{key}={tmp_path / 'gone'}"), silent).key


def test_files_that_are_broken_are_named(folder: Path) -> None:
    place = folder / "train" / "19" / "198"
    sound = place / "19-198-0000.flac"
    sound.write_bytes(sound.read_bytes()[:2000])  # the header is whole
    windows = data.sampled(recipe := of_folder(folder), silent).training_windows(recipe)
    with pytest.raises(LabError, match=r"19-198-0000\.flac cannot be read"):
        [windows[index] for index in range(3)]
    (place / "19-198.trans.txt").write_bytes(b"19-198-0000 CAF\xc9\n")
    with pytest.raises(LabError, match=r"a transcript in .* cannot be read: .*; write it in UTF-8"):
        _ = data.sampled(of_folder(folder), silent).key


def test_a_folder_at_home_and_folders_that_share_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    recipe = of_folder(folder, "data.source=~/train", "data.validation_source=~/dev")
    assert data.sampled(recipe, silent).key == data.sampled(of_folder(folder), silent).key
    for source in (folder, folder / "*"):
        with pytest.raises(LabError, match="share files, which would be read twice, or trained on and held out"):
            _ = data.sampled(of_folder(folder, f"data.source={source}"), silent).key


def test_a_pattern_reads_all_folders_that_fit(folder: Path) -> None:
    """As LibriSpeech has its training sets beside each other."""
    whole = data.sampled(of_folder(folder), silent)
    parts = data.sampled(of_folder(folder, f"data.source={folder / 'train' / '*'}"), silent)
    assert parts.key == whole.key
    (folder / "train" / "a file").write_text("")
    assert data.sampled(of_folder(folder, f"data.source={folder / 'train' / '*'}"), silent).key == whole.key
    with pytest.raises(LabError, match=r"no folder fits the pattern .*/none-\*; name a folder"):
        _ = data.sampled(of_folder(folder, f"data.source={folder / 'none-*'}"), silent).key


def test_folders_that_are_none(folder: Path) -> None:
    with pytest.raises(LabError, match="has 16000 samples a second, not 8000"):
        _ = data.sampled(of_folder(folder, "data.speech.rate=8000"), silent).key
    with pytest.raises(LabError, match=r"all utterances in .* are too long"):
        _ = data.sampled(
            of_folder(folder, "data.speech.seconds=1.0", f"data.source={folder / 'train' / '19'}"), silent
        ).key
    (folder / "dev" / "84" / "198" / "84-198-0000.flac").write_bytes(b"no sound")
    with pytest.raises(LabError, match="cannot be read"):
        _ = data.sampled(of_folder(folder), silent).key
