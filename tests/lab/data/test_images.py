"""Images: what is drawn has its class in it and nowhere else; folders are read as they lie
there.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.images import Glyphs, _templates
from softfocus.lab.data.samples import Passes, hold_out
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.samples import evaluate_samples
from softfocus.lab.progress import silent
from softfocus.lab.recipes.data import ImagesTable
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import load_run
from softfocus.lab.train.run import train

SOME = Glyphs(ImagesTable(size=32, glyphs="0127"))


def drawn(count: int) -> list[tuple[np.ndarray[Any, Any], int]]:
    return [SOME.draw(np.random.default_rng(number)) for number in range(count)]


def test_an_image_follows_from_its_random_numbers() -> None:
    first, second, other = (SOME.draw(np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1]
    assert not np.array_equal(first[0], other[0])
    assert first[0].shape == (32, 32)
    assert np.abs(first[0]).max() <= 1


def test_classes_are_uniform_and_brightness_tells_nothing() -> None:
    found = drawn(800)
    counts = Counter(label for _, label in found)
    chi = sum((counts[label] - 200) ** 2 / 200 for label in range(4))
    assert chi < 16.3  # three degrees of freedom: one in a thousand
    # Dark on light and light on dark are equally likely, whatever the class: the mean has no sign
    for label in range(4):
        means = np.array([image.mean() for image, one in found if one == label])
        assert abs(means.mean()) < 4 * means.std() / len(means) ** 0.5


@pytest.mark.long
def test_the_nearest_template_finds_the_class() -> None:
    """A known answer without a model: correlation with every glyph, font and place beats chance by
    far.
    """
    templates = [
        (label, np.asarray(image.resize((28, 28)), float))
        for label, row in enumerate(_templates("0127"))
        for image in row
    ]
    right = 0
    for image, label in drawn(100):
        scores = []
        for name, template in templates:
            ink = template - template.mean()
            for top in range(5):
                for left in range(5):
                    part = image[top : top + 28, left : left + 28]
                    part = part - part.mean()
                    scores.append((abs(float((part * ink).sum())) / np.linalg.norm(ink) / np.linalg.norm(part), name))
        right += max(scores)[1] == label
    assert right > 50  # 25 by chance, with a standard deviation of 4.3


def test_held_out_images_are_others_than_those_of_training() -> None:
    recipe = load("vit-toy", ["train.steps=4", "train.batch=8", "train.warmup=0", "data.images.validation=16"])
    source = data.sampled(recipe, silent)
    windows, held = source.training_windows(recipe), source.held_out(recipe)
    seen = {windows[index]["pixel_values"].numpy().tobytes() for index in range(32)}
    kept = {held.sample(index)["pixel_values"].numpy().tobytes() for index in range(16)}
    assert (len(seen), len(kept), len(seen & kept)) == (32, 16, 0)
    other = load("vit-toy", ["train.seed=1", "train.steps=1", "train.warmup=0", "data.images.validation=16"])
    windows = data.sampled(other, silent).training_windows(other)
    assert not kept & {windows[index]["pixel_values"].numpy().tobytes() for index in range(64)}
    assert {
        data.sampled(other, silent).held_out(other).sample(i)["pixel_values"].numpy().tobytes() for i in range(16)
    } == kept
    assert source.key != data.sampled(load("vit-toy", ["data.images.glyphs=ab"]), silent).key


def test_every_pass_gives_each_sample_once_in_another_order() -> None:
    def passes(seed: int) -> list[int]:
        samples = Passes(lambda random, place: {"place": torch.tensor(place)}, 5, seed=seed, count=10)
        assert len(samples) == 10
        with pytest.raises(IndexError, match="sample 10 of 10"):
            samples[10]
        return [int(samples[index]["place"]) for index in range(10)]

    found = passes(0)
    assert sorted(found[:5]) == sorted(found[5:]) == list(range(5))
    assert found == passes(0)
    assert len({tuple(passes(seed)[:5]) for seed in range(8)}) > 4
    assert found[:5] != found[5:]


def test_what_is_held_out_is_a_share() -> None:
    kept, held = hold_out(20, 0.25)
    assert len(held) == 5
    assert sorted([*kept, *held]) == list(range(20))
    assert len(hold_out(3, 0.01)[1]) == 1
    for count, share in ((1, 0.05), (2, 0.9)):
        with pytest.raises(LabError, match=f"of {count} samples {count} would be held out, and none is left"):
            hold_out(count, share)


COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six images in two classes, one colour each, of several sizes and formats; and one of each
    held out.
    """
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for split, count in (("train", 3), ("val", 1)):
        for name, colour in COLOURS.items():
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (20 + 7 * number, 30), colour)
                image.save(tmp_path / split / name / f"{number}.{('png', 'bmp', 'webp')[number]}", lossless=True)
    return tmp_path


def of_folder(folder: Path, *overrides: str) -> Any:
    return load(
        "vit-toy", [f"data.source={folder / 'train'}", "train.steps=3", "train.batch=4", "train.warmup=0", *overrides]
    )


def test_a_folder_of_images(folder: Path) -> None:
    recipe = of_folder(folder, f"data.validation_source={folder / 'val'}")
    source = data.sampled(recipe, silent)
    assert source.vocab_size == 2
    windows, held = source.training_windows(recipe), source.held_out(recipe)
    assert len(held.documents) == 2
    for sample in [*(windows[index] for index in range(12)), held.sample(0), held.sample(1)]:
        assert sample["pixel_values"].shape == (3, 32, 32)
        colour = torch.tensor(list(COLOURS.values())[int(sample["labels"])])  # classes by name: blue, red
        torch.testing.assert_close(sample["pixel_values"].mean((1, 2)), colour / 127.5 - 1, atol=0.02, rtol=0)
    assert Counter(int(windows[index]["labels"]) for index in range(6)) == {0: 3, 1: 3}
    assert source.key == data.sampled(recipe, silent).key


def test_a_run_on_a_folder(folder: Path, tmp_path: Path) -> None:
    """Trained by the trainer with its reading processes, and measured."""
    recipe = of_folder(folder, f"data.validation_source={folder / 'val'}", "model.config.num_hidden_layers=1")
    assert train(recipe, tmp_path / "run").status == "complete"
    assert [row.tokens for row in evaluate_samples(tmp_path / "run").rows] == [2, 2]
    (folder / "train" / "red" / "new.png").write_bytes((folder / "train" / "red" / "0.png").read_bytes())
    with pytest.raises(LabError, match="have changed"):
        evaluate_samples(tmp_path / "run")


def test_a_share_of_a_folder_is_held_out(folder: Path) -> None:
    recipe = of_folder(folder, "data.validation_fraction=0.34")
    source = data.sampled(recipe, silent)
    assert len(source.held_out(recipe).documents) == 2
    assert Counter(int(source.training_windows(recipe)[index]["labels"]) for index in range(4)).total() == 4


def test_a_folder_is_no_pattern(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes patterns, and "train[1]" matches "train1". ~ is the home folder."""
    monkeypatch.setenv("HOME", str(folder))
    (folder / "train").rename(folder / "train[1]")
    (folder / "val").rename(folder / "train1")
    source = data.sampled(of_folder(folder, "data.source=~/train[1]", "data.validation_source=~/train1"), silent)
    assert [len(split) for split in source._splits] == [6, 2]


@pytest.mark.parametrize("held", ["train", "train/../train/red", "."])
def test_folders_that_share_files_are_refused(folder: Path, held: str) -> None:
    with pytest.raises(LabError, match="share files, which would be read twice, or trained on and held out"):
        _ = data.sampled(of_folder(folder, f"data.validation_source={folder / held}"), silent).key


def test_folders_that_are_none(folder: Path) -> None:
    with pytest.raises(LabError, match=r"there is no folder .*; name a folder, not a pattern,"):
        _ = data.sampled(of_folder(folder / "gone"), silent).key
    (folder / "empty" / "train").mkdir(parents=True)
    with pytest.raises(LabError, match="cannot be read"):
        _ = data.sampled(of_folder(folder / "empty"), silent).key
    with pytest.raises(LabError, match="fewer than two classes"):
        _ = data.sampled(of_folder(folder, f"data.source={folder / 'train' / 'red'}"), silent).key


def test_an_image_that_is_broken_is_named(folder: Path) -> None:
    (folder / "train" / "red" / "0.png").write_bytes(b"no image")
    recipe = of_folder(folder, f"data.validation_source={folder / 'val'}")
    windows = data.sampled(recipe, silent).training_windows(recipe)
    with pytest.raises(LabError, match=r"cannot be read: .*0\.png"):
        [windows[index] for index in range(6)]
    with pytest.raises(LabError, match=r"cannot be read: .*0\.png.*; delete it$"):  # by processes of the trainer
        train(recipe, folder / "run")
    assert "cannot be read" in str(load_run(folder / "run", complete=False).error)


@pytest.mark.long
def test_other_images_of_the_same_names_are_another_corpus(folder: Path) -> None:
    before = data.sampled(of_folder(folder), silent).key
    path = folder / "train" / "red" / "0.png"
    Image.new("RGB", (90, 90), (255, 9, 9)).save(path)
    assert data.sampled(of_folder(folder), silent).key != before
