"""Speech and what was said: syllables that are synthesised from a seed, or a folder in
LibriSpeech's layout.

A sample is {"input_values": float32 [samples], "attention_mask": int64 [samples], "labels": int64
[frames]}. All are padded to the longest utterance, with labels of -100: a model's convolutions see
padding, so it must not depend on the batch.
"""

import hashlib
import logging
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from softfocus.lab.data.samples import HeldOut, InOrder, Inputs, Passes, WithoutTokens, folders_of, hold_out
from softfocus.lab.data.tasks import IGNORED, random_for
from softfocus.lab.errors import LabError
from softfocus.lab.progress import Listener, preparing
from softfocus.lab.recipes.data import SpeechTable
from softfocus.lab.recipes.recipe import Recipe

BLANK, SPACE = 0, 1
"""The ids of nothing, which CTC puts between repeated characters, and of what parts words."""

ENGLISH = " 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""What LibriSpeech's transcripts are written in."""

_CONSONANTS = {
    "b": (250, 700, 0.1),
    "d": (1500, 1000, 0.1),
    "g": (800, 1400, 0.1),
    "k": (1200, 700, 0.8),
    "m": (250, 250, 0.0),
    "s": (1700, 1700, 1.0),
    "t": (1600, 1300, 0.6),
}
"""Hertz at its start and at its end, and how much of it is noise."""

_VOWELS = {"a": (750, 1250), "e": (480, 1600), "i": (290, 1750), "o": (500, 900), "u": (320, 650)}
"""Hertz of the two formants."""

_FIRST, _SECOND = "".join(_CONSONANTS), "".join(_VOWELS)

SYLLABLES = " " + "".join(sorted(_FIRST + _SECOND))
"""What synthesised speech is written in."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Syllables(WithoutTokens):
    """Words of one or two syllables, each a consonant and a vowel, spoken by a voice of its own in
    every utterance.

    A consonant is a short sweep with more or less noise; a vowel is harmonics of the voice's pitch
    under two formants. The voice shifts all formants by one factor, so that a vowel is told best by
    hearing others of the same voice. Pitch, tempo, gaps and the noise over everything are drawn at
    random, and so are all syllables, uniformly.

    Args:
        table: of the recipe.
    """

    table: SpeechTable

    characters = SYLLABLES
    vocab_size = len(characters) + 1  # CTC's blank

    @property
    def key(self) -> str:
        """A digest of some utterances: it changes with the generator."""
        digest = hashlib.sha256()
        for index in range(4):
            sound, text = self.speak(random_for("training", 0, index))
            # Rounded coarsely: other processors may round differently in the last place
            digest.update((sound * 16).round().astype(np.int8).tobytes() + text.encode())
        return f"syllables-{digest.hexdigest()[:12]}"

    def training_windows(self, recipe: Recipe) -> InOrder:
        """As many as are read, no two alike."""
        train = recipe.train
        return InOrder(lambda random, _: self._sample(random, train.length), seed=train.seed, count=train.windows)

    def held_out(self, recipe: Recipe) -> HeldOut:
        """Others, the same ones for every run."""
        length = recipe.train.length
        return HeldOut(
            lambda index: self._sample(random_for("evaluation", 0, index), length), range(self.table.validation)
        )

    def speak(self, random: np.random.Generator) -> tuple[NDArray[np.float64], str]:
        """An utterance, of mean 0 and variance 1, and what is said. It ends before 60 to 100 % of
        the longest.
        """
        rate = self.table.rate
        pitch, tract, tempo = random.uniform(90, 220), random.uniform(0.85, 1.1), random.uniform(0.8, 1.2)
        room = random.uniform(0.6, 1) * self.table.seconds * rate
        sounds: list[NDArray[np.float64]] = []
        words: list[str] = []
        while True:
            parts, word = [np.zeros(round(random.uniform(0.06, 0.12) * tempo * rate))], ""
            for _ in range(random.integers(1, 3)):
                consonant, vowel = (kinds[random.integers(len(kinds))] for kinds in (_FIRST, _SECOND))
                first, second = (round(random.uniform(*span) * tempo * rate) for span in ((0.05, 0.07), (0.08, 0.13)))
                parts.append(_soft(_consonant(random, first, rate, tract, *_CONSONANTS[consonant]), rate))
                parts.append(_soft(_vowel(random, second, rate, pitch, tract, *_VOWELS[vowel]), rate))
                word += consonant + vowel
            if words and sum(map(len, sounds + parts)) > room:
                break
            sounds += parts
            words.append(word)
        sound = np.concatenate(sounds)
        sound = sound + random.normal(0, random.uniform(0.05, 0.35), len(sound))
        return (sound - sound.mean()) / sound.std(), " ".join(words)

    def _sample(self, random: np.random.Generator, frames: int) -> Inputs:
        sound, text = self.speak(random)
        return padded(sound, encode(text, self.characters), self.table, frames)


def _soft(sound: NDArray[np.float64], rate: int) -> NDArray[np.float64]:
    """Without clicks: it grows and fades within five milliseconds."""
    place = np.arange(len(sound))
    return sound * np.minimum(1, np.minimum(place, place[::-1]) / (0.005 * rate))


def _consonant(
    random: np.random.Generator, size: int, rate: int, tract: float, start: float, end: float, noise: float
) -> NDArray[np.float64]:
    """A sweep that dies away."""
    time = np.arange(size) / rate
    hertz = tract * (start + (end - start) * np.arange(size) / size)
    phase = 2 * math.pi * (np.cumsum(hertz) / rate + noise * np.cumsum(random.normal(0, 0.12, size)))
    sweep: NDArray[np.float64] = 0.7 * np.cos(phase) * np.exp(-12 * time)
    return sweep


def _vowel(
    random: np.random.Generator, size: int, rate: int, pitch: float, tract: float, *formants: float
) -> NDArray[np.float64]:
    """Harmonics under formants."""
    hertz = np.arange(pitch, 0.48 * rate, pitch)
    strength = sum(np.exp(-(((hertz - tract * formant) / 110) ** 2)) for formant in formants) + 0.02
    phases = random.uniform(0, 2 * math.pi, len(hertz))
    waves = np.sin(2 * math.pi * np.outer(np.arange(size) / rate, hertz) + phases)
    vowel: NDArray[np.float64] = waves @ strength / math.sqrt(len(hertz))
    return vowel


@dataclass(frozen=True)
class LibriSpeech(WithoutTokens):
    """Utterances on disk: files NAME.flac (or .wav), and beside them *.trans.txt with lines "NAME
    TEXT".

    What is longer than the recipe's seconds is left out, with a warning. So is what has no text, or
    a text of more characters than its sound has frames: CTC has no finite loss for it.

    Args:
        recipe: whose data.source is a folder, such as LibriSpeech/train-clean-100, or a pattern of
            several, and data.validation_source others. Without the latter a share of the first is
            held out.
        listener: told how far the reading of lengths is.
    """

    recipe: Recipe
    listener: Listener

    characters = ENGLISH
    vocab_size = len(characters) + 1  # CTC's blank

    @property
    def _table(self) -> SpeechTable:
        assert self.recipe.data.speech is not None
        return self.recipe.data.speech

    @cached_property
    def _splits(self) -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
        """(training, held out)."""
        table = self.recipe.data
        found, held_out = ([one for folder in folders for one in self._read(folder)] for folders in folders_of(table))
        if held_out:
            return found, held_out
        kept, held = hold_out(len(found), table.validation_fraction)
        return [found[place] for place in kept], [found[place] for place in held]

    @property
    def key(self) -> str:
        """A digest of what is there: names, sizes and texts."""
        lines = [f"{path.name} {path.stat().st_size} {text}" for split in self._splits for path, text in split]
        return f"speech-{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:12]}"

    def training_windows(self, recipe: Recipe) -> Passes:
        """Every utterance once a pass."""
        train, there = recipe.train, self._splits[0]
        return Passes(lambda _, place: self._sample(*there[place]), len(there), seed=train.seed, count=train.windows)

    def held_out(self, recipe: Recipe) -> HeldOut:
        """All of them."""
        there = self._splits[1]
        return HeldOut(lambda index: self._sample(*there[index]), range(len(there)))

    def _sample(self, path: Path, text: str) -> Inputs:
        try:
            sound, _ = _soundfile().read(path, dtype="float32", always_2d=True)
        except RuntimeError as error:  # what its header says was right
            raise LabError(f"{path} cannot be read: {error}", "replace it, or delete its line") from error
        sound = sound.mean(1)
        sound = (sound - sound.mean()) / max(float(sound.std()), 1e-5)
        return padded(sound, encode(text, self.characters), self._table, self.recipe.train.length)

    def _read(self, folder: Path) -> list[tuple[Path, str]]:
        """Every utterance of a folder that is not too long, in the order of their names."""
        remedy = "name a folder in LibriSpeech's layout"
        lists = sorted(folder.rglob("*.trans.txt"))
        if not lists:
            raise LabError(f"{folder} has no *.trans.txt", remedy)
        try:
            texts = [(file, file.read_text(encoding="utf-8")) for file in lists]
        except (OSError, UnicodeDecodeError) as error:
            raise LabError(f"a transcript in {folder} cannot be read: {error}", "write it in UTF-8") from error
        lines = [(file, line) for file, text in texts for line in text.splitlines() if line.strip()]
        found, longer, fuller, seconds = [], 0, 0, self._table.seconds
        for number, (file, line) in enumerate(lines):
            path, text, samples = self._utterance(file, line)
            if samples > seconds * self._table.rate:
                longer += 1
            elif not 0 < _least_frames(text) <= self._frames(samples):
                fuller += 1
            else:
                found.append((path, text))
            if number % 1000 == 0:
                self.listener(preparing(self.recipe.name, f"reading lengths in {folder.name}", number / len(lines)))
        if longer:
            what = f"are longer than {seconds:g} seconds and left out"
            _log.warning("%s: %d of %d utterances %s", folder, longer, len(lines), what)
        if fuller:
            what = "have no text, or more than their sound has frames for, and are left out"
            _log.warning("%s: %d of %d utterances %s", folder, fuller, len(lines), what)
        if not found and not fuller:
            raise LabError(f"all utterances in {folder} are too long", "raise data.speech.seconds")
        if not found:
            raise LabError(f"no utterance in {folder} has a text that fits its sound", "correct the transcripts")
        return found

    def _utterance(self, file: Path, line: str) -> tuple[Path, str, int]:
        """The sound, the text, and how many samples, of a line of a list."""
        name, _, text = line.partition(" ")
        if odd := set(text) - set(self.characters):
            what = f"{file}: {name} has the character {min(odd)!r}"
            raise LabError(what, f"write transcripts in{self.characters}")
        path = next((path for end in ("flac", "wav") if (path := file.parent / f"{name}.{end}").exists()), None)
        if path is None:
            raise LabError(f"{file} names {name}, and there is no {name}.flac beside it", "put it there")
        try:
            about = _soundfile().info(path)
        except RuntimeError as error:
            raise LabError(f"{path} cannot be read: {error}", "replace it, or delete its line") from error
        if about.samplerate != self._table.rate:
            what = f"{path} has {about.samplerate} samples a second, not {self._table.rate}"
            raise LabError(what, "set data.speech.rate, or convert it")
        return path, text, about.frames

    def _frames(self, samples: int) -> float:
        """How many frames a model makes of so many samples, or up to two fewer: its convolutions
        are its own.
        """
        return self.recipe.train.length * samples / (self._table.seconds * self._table.rate) - 2


def encode(text: str, characters: str) -> NDArray[np.int64]:
    """The ids of a text."""
    return np.array([1 + characters.index(character) for character in text], np.int64)


def _least_frames(text: str) -> int:
    """Without so many CTC's loss is infinite: one a character, and a blank between equal ones."""
    return len(text) + sum(one == other for one, other in pairwise(text))


def padded(sound: NDArray[np.floating], ids: NDArray[np.int64], table: SpeechTable, frames: int) -> Inputs:
    """A sample of the longest utterance's size."""
    size = round(table.seconds * table.rate)
    values, mask = np.zeros(size, np.float32), np.zeros(size, np.int64)
    values[: len(sound)], mask[: len(sound)] = sound, 1
    labels = np.full(frames, IGNORED)
    labels[: len(ids)] = ids
    return {
        "input_values": torch.from_numpy(values),
        "attention_mask": torch.from_numpy(mask),
        "labels": torch.from_numpy(labels),
    }


def _soundfile():  # type: ignore[no-untyped-def]
    try:
        import soundfile
    except (ImportError, OSError) as error:
        remedy = "in your checkout of softfocus run pip install -e '.[speech]'"
        raise LabError(f"files of speech need soundfile: {error}", remedy) from error
    return soundfile
