"""What an inspection found: the one schema, which run.py makes and table, figure and page read."""

from datetime import datetime
from pathlib import Path

from pydantic import Field

from softfocus.lab.run_folder.files import read_json
from softfocus.lab.run_folder.results import Record

VALIDATION_TEXT = "validation text"
"""The text of an inspection that was given no file."""
TOKENS = 16384
"""How many an inspection reads at each length unless others are asked for."""
RESULTS = "inspect.json"
PAGE = "inspect.html"
MEASURES_FIGURE = "measures.png"
MAPS_FIGURE = "maps.png"


class Value(Record):
    """A mean over rows."""

    mean: float
    standard_error: float = Field(description="documents are what was drawn at random; NaN where there is only one")


class Row(Record):
    """What the rows of attention are like at one length: means over the rows that were looked at.

    Of weights with signs the absolute values count. A row whose weights are all 0 has 0 everywhere
    but in `zeros` and below thresholds.
    """

    length: int
    layer: int | None = Field(description="from 0; None for the mean over all layers")
    head: int | None = Field(description="query head, from 0; None for the mean over the layer's heads")
    zeros: Value = Field(description="share of the visible weights that are exactly 0")
    above_1e_9: Value = Field(description="share of the visible weights above 1e-9 of their row's largest")
    above_1e_3: Value = Field(description="the same, above 1e-3")
    below_1e_3: Value = Field(description="share of the visible weights below 1e-3 of their row's sum")
    below_1e_7: Value = Field(description="the same, below 1e-7")
    entropy: Value = Field(description="of the row's weights, in nats")
    uniform: Value = Field(description="the entropy that uniform weights would have: log of the number of visible keys")
    distance: Value = Field(description="mean distance to what is attended to, in tokens")
    beyond: Value = Field(description="share of the weight on keys at least a training length away")


class Length(Record):
    """What was read at one length."""

    length: int
    windows: int
    documents: int = Field(description="that the windows start in")
    rows: int = Field(description="of each window, evenly spaced, the last one among them")


class Learned(Record):
    """What heads have learned for one argument of `softfocus.attention`."""

    argument: str = Field(description="'power' or 'head_scale'")
    start: float = Field(description="the initial value, that of all heads")
    values: list[float] = Field(description="the final values, in the order of the heads")


class Heads(Record):
    """Heads of a layer that run the same."""

    layer: int
    heads: list[int]
    runs: str = Field(description="the mechanism, its window, its share of RoPE")
    learned: list[Learned]


class Inspection(Record):
    """What was found in one run."""

    run: str = Field(description="the run's name")
    mechanism: str
    train_length: int
    seed: int = Field(description="the training seed")
    commit: str = Field(description="of the training")
    token: str = Field(default="", description="the run's; early results lack it")
    asked: int = Field(default=0, description="tokens that were asked for at each length; 0 in early results")
    text: str = Field(description="what was read: VALIDATION_TEXT, or the name of a file")
    heads: list[Heads]
    lengths: list[Length]
    rows: list[Row]

    @property
    def tokens(self) -> int:
        """Tokens that were asked for at each length, or, in early results, that were read."""
        return self.asked or max(one.windows * one.length for one in self.lengths)

    def row(self, length: int, layer: int | None = None, head: int | None = None) -> Row:
        """One row."""
        return next(row for row in self.rows if (row.length, row.layer, row.head) == (length, layer, head))

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers."""
        return sorted({heads.layer for heads in self.heads})

    def heads_of(self, layer: int) -> list[int]:
        """The numbers of a layer's heads."""
        return sorted(head for group in self.heads if group.layer == layer for head in group.heads)

    def runs(self, layer: int, head: int) -> str:
        """What a head runs."""
        return next(group.runs for group in self.heads if group.layer == layer and head in group.heads)


class Inspections(Record):
    """Everything that inspect.json holds; it reads back equal."""

    schema_version: int = 1
    created: datetime
    runs: list[Inspection]


def read(path: Path) -> Inspections:
    """Read an inspect.json.

    Raises:
        LabError: no such file, or not one that this version wrote.
    """
    remedy = "write it again with `softfocus inspect RUN`"
    return read_json(path, Inspections, f"cannot read {path}: No such file", remedy)
