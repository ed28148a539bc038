"""Images and their classes: glyphs that are drawn from a seed, or a folder in ImageFolder's layout.

A sample is {"pixel_values": float32 [channels, size, size] from -1 to 1, "labels": int64 []}.
"""

import glob
import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from softfocus.lab.data.samples import HeldOut, InOrder, Inputs, Passes, WithoutTokens, folders_of, hold_out
from softfocus.lab.data.tasks import random_for
from softfocus.lab.errors import LabError
from softfocus.lab.recipes.data import ImagesTable
from softfocus.lab.recipes.recipe import Recipe

if TYPE_CHECKING:
    from PIL import Image

GRAY, COLOURED = 1, 3
"""Channels of generated images, and of those in a folder."""

_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif", "DejaVuSerif-Italic", "STIXGeneral")
_TEMPLATE = 64  # pixels a side of a glyph before it is turned and scaled
_SCRAPS = 3


@dataclass(frozen=True)
class Glyphs(WithoutTokens):
    """Images of one character each, whose class is its place in `glyphs`.

    Font, size, slant, turn, place and contrast are drawn at random. Scraps of other characters lie
    at the border, and noise over everything. The class is uniform and independent of all these.

    Args:
        table: of the recipe.
    """

    table: ImagesTable

    @property
    def key(self) -> str:
        """A digest of some images: it changes with the generator and with the fonts."""
        pixels = [self.draw(random_for("training", 0, index))[0] for index in range(8)]
        # Rounded coarsely: other processors may round differently in the last place
        digest = hashlib.sha256((np.stack(pixels) * 16).round().astype(np.int8).tobytes()).hexdigest()
        return f"glyphs-{digest[:12]}"

    @property
    def vocab_size(self) -> int:
        """A class for each character."""
        return len(self.table.glyphs)

    def training_windows(self, recipe: Recipe) -> InOrder:
        """As many as are read, no two alike."""
        train = recipe.train
        return InOrder(lambda random, _: self._sample(random), seed=train.seed, count=train.windows)

    def held_out(self, recipe: Recipe) -> HeldOut:
        """Others, the same ones for every run."""
        return HeldOut(lambda index: self._sample(random_for("evaluation", 0, index)), range(self.table.validation))

    def draw(self, random: np.random.Generator) -> tuple[NDArray[np.float32], int]:
        """An image [size, size] from -1 to 1, and its class."""
        size, templates = self.table.size, _templates(self.table.glyphs)
        label, font = int(random.integers(self.vocab_size)), int(random.integers(len(_FONTS)))
        ink = np.zeros((size, size))
        for _ in range(_SCRAPS):
            other = templates[random.integers(self.vocab_size)][random.integers(len(_FONTS))]
            angle = random.uniform(0, 2 * math.pi)
            away = 0.5 * size * np.array([math.cos(angle), math.sin(angle)])
            ink = np.maximum(ink, _placed(other, size, 0.35, random.uniform(0, 2 * math.pi), 0.0, away))
        shift = random.uniform(-0.1, 0.1, 2) * size
        scale, turn, slant = random.uniform(0.7, 1.2), random.uniform(-0.35, 0.35), random.uniform(-0.25, 0.25)
        ink = np.maximum(ink, _placed(templates[label][font], size, scale, turn, slant, shift))
        dark, light = random.uniform(-1, -0.2), random.uniform(0.2, 1)
        back, front = (dark, light) if random.random() < 0.5 else (light, dark)
        image = back + (front - back) * ink + random.normal(0, 0.1, ink.shape)
        return image.clip(-1, 1).astype(np.float32), label

    def _sample(self, random: np.random.Generator) -> Inputs:
        pixels, label = self.draw(random)
        return {"pixel_values": torch.from_numpy(pixels)[None], "labels": torch.tensor(label)}


@lru_cache
def _templates(glyphs: str) -> list[list["Image.Image"]]:
    """Each character in each font, white in the middle of a black square: [glyphs][fonts]."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), _TEMPLATE * 3 // 4) for name in _FONTS]
    found = []
    for glyph in glyphs:
        found.append([Image.new("L", (_TEMPLATE, _TEMPLATE)) for _ in fonts])
        for image, font in zip(found[-1], fonts, strict=True):
            ImageDraw.Draw(image).text((_TEMPLATE / 2, _TEMPLATE / 2), glyph, fill=255, font=font, anchor="mm")
    return found


def _placed(
    template: "Image.Image", size: int, scale: float, turn: float, slant: float, shift: NDArray[np.float64]
) -> NDArray[np.float64]:
    """A template in an image [size, size]: scaled to a share of it, turned, slanted, shifted from
    its middle by pixels.
    """
    from PIL import Image

    # From a place in the image to one in the template
    zoom = _TEMPLATE / (scale * size)
    cos, sin = zoom * math.cos(turn), zoom * math.sin(turn)
    across, down = (cos - slant * sin, sin + slant * cos), (-sin, cos)
    middle = size / 2 + shift
    start = [_TEMPLATE / 2 - row[0] * middle[0] - row[1] * middle[1] for row in (across, down)]
    data = (*across, start[0], *down, start[1])
    placed = template.transform((size, size), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)
    return np.asarray(placed) / 255


@dataclass(frozen=True)
class ImageFolder(WithoutTokens):
    """Images on disk, FOLDER/CLASS/NAME.png (or .jpg, ...), read by `datasets`.

    Training images are cropped at random (a share of 35 to 100 % of the area) and mirrored at
    random. Those held out are scaled and cropped in the middle.

    Args:
        recipe: whose data.source is a folder, and data.validation_source another one with the same
            classes. Without the latter a share of the first is held out.
    """

    recipe: Recipe

    @cached_property
    def _splits(self) -> tuple[Any, Any]:
        """(training, held out)."""
        import datasets
        from datasets.exceptions import DatasetsError

        table = self.recipe.data
        remedy = "name a folder, not a pattern, that holds a folder of images for each class"
        given = {}
        for split, folders in zip(("train", "validation"), folders_of(table), strict=True):
            for folder in folders:  # as a pattern "set[1]" would be the folder "set1"
                given[split] = str(Path(glob.escape(str(folder))) / "**")
        datasets.disable_progress_bars()
        try:
            found = datasets.load_dataset("imagefolder", data_files=given)
        except (OSError, ValueError, DatasetsError) as error:
            raise LabError(f"the images in {table.source} cannot be read: {error}", remedy) from error
        train = found["train"]
        if "label" not in train.features:
            raise LabError(f"{table.source} has images of fewer than two classes", remedy)
        if "validation" in found:
            return train, found["validation"]
        kept, held = hold_out(len(train), table.validation_fraction)
        return train.select(kept), train.select(held)

    @property
    def key(self) -> str:
        """A digest of the names of what is there, with their folders, and of the files' sizes."""
        import datasets

        digest = hashlib.sha256()
        for split in self._splits:
            for image in split.cast_column("image", datasets.Image(decode=False))["image"]:
                path = Path(image["path"])
                digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
            digest.update(b"\n")
        return f"images-{digest.hexdigest()[:12]}"

    @property
    def vocab_size(self) -> int:
        """A class for each folder."""
        return len(self._splits[0].features["label"].names)

    def training_windows(self, recipe: Recipe) -> Passes:
        """Every image once a pass."""
        train, rows = recipe.train, self._splits[0]
        return Passes(
            lambda random, place: self._sample(rows, place, random), len(rows), seed=train.seed, count=train.windows
        )

    def held_out(self, recipe: Recipe) -> HeldOut:
        """All of them."""
        rows = self._splits[1]
        return HeldOut(lambda index: self._sample(rows, index, None), range(len(rows)))

    def _sample(self, rows: Any, place: int, random: np.random.Generator | None) -> Inputs:
        from PIL import Image

        assert self.recipe.data.images is not None
        size = self.recipe.data.images.size
        try:
            row = rows[place]
            image = row["image"].convert("RGB")
        except (OSError, ValueError) as error:
            raise LabError(f"an image in {self.recipe.data.source} cannot be read: {error}", "delete it") from error
        box = _middle(image.size) if random is None else _anywhere(image.size, random)
        pixels = np.array(image.resize((size, size), Image.Resampling.BILINEAR, box=box), np.float32)
        if random is not None and random.random() < 0.5:
            pixels = pixels[:, ::-1]
        values = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)) / 127.5 - 1)
        return {"pixel_values": values, "labels": torch.tensor(row["label"])}


def _middle(shape: tuple[int, int]) -> tuple[float, float, float, float]:
    """The middle square of an image, 7/8 of its shorter side, as ImageNet's 224 of 256."""
    width, height = shape
    side = min(shape) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _anywhere(shape: tuple[int, int], random: np.random.Generator) -> tuple[float, float, float, float]:
    """A part of an image: 35 to 100 % of its area, sides from 3:4 to 4:3, as far as the image
    allows.
    """
    width, height = shape
    area, sides = random.uniform(0.35, 1) * width * height, math.exp(random.uniform(-1, 1) * math.log(4 / 3))
    across, down = min(width, math.sqrt(area * sides)), min(height, math.sqrt(area / sides))
    left, top = random.uniform(0, width - across), random.uniform(0, height - down)
    return left, top, left + across, top + down
