"""The [data] table of a recipe: what a model learns from, and the kind of thing that it learns."""

import tomllib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1, le=2**31)]  # so that steps times batch are an index
Many = Annotated[int, Field(ge=1, le=2**63 - 1)]  # of what is not held in memory, or "never"
Words = Annotated[int, Field(ge=1, le=2**20)]  # which are all held in memory

Kind = Literal["text", "task", "masked", "images", "speech"]
"""What a model learns: to go on with a text, a generated task, hidden tokens of a text, classes of
images, speech.
"""

TRAINED_ON: dict[Kind, str] = {
    "text": "text",
    "task": "a generated task",
    "masked": "hidden tokens of a text",
    "images": "images",
    "speech": "speech",
}
"""What it is trained on, for people."""

_PARTS = {"images": "patches", "speech": "frames"}
"""What windows are counted in where that is not tokens, for people: files say tokens of all."""


class Table(BaseModel):
    """A table of a recipe."""

    # strict: `steps = "600"` and `steps = true` are mistakes, not numbers
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MqarTable(Table):
    """Multi-query associative recall: :class:`softfocus.lab.data.tasks.Mqar`."""

    pairs: Count = Field(default=8, description="of a key and a value, at the start of a sequence")
    queries: Count = Field(default=8, description="how many keys are asked for, each equally often")
    keys: Words = Field(default=512, description="different keys that there are")
    values: Words = Field(default=64, description="different values that there are")
    filler: Words = Field(default=64, description="different filler tokens that there are")
    nearest: int = Field(default=0, ge=0, le=2**31, description="no answer lies nearer, in tokens")

    @model_validator(mode="after")
    def _fit(self) -> "MqarTable":
        if self.pairs > self.keys:
            raise ValueError(f"pairs={self.pairs} is more than keys={self.keys}: lower pairs, or raise keys")
        return self


class PasskeyTable(Table):
    """Passkey retrieval: :class:`softfocus.lab.data.tasks.Passkey`."""

    digits: Count = Field(default=5, description="of the number that is hidden")


class ImagesTable(Table):
    """Images and their classes: :mod:`softfocus.lab.data.images`. Generated, unless data.source
    names a folder.
    """

    size: Count = Field(default=32, description="pixels a side")
    glyphs: str = Field(default="0123456789", min_length=2, description="of generated images: a class each")
    validation: Count = Field(default=1024, description="how many generated images are held out")

    @field_validator("glyphs")
    @classmethod
    def _differ(cls, glyphs: str) -> str:
        if len(set(glyphs)) < len(glyphs):
            raise ValueError(f"glyphs={glyphs!r} has a character twice: a class each")
        return glyphs


class SpeechTable(Table):
    """Speech and what was said: :mod:`softfocus.lab.data.speech`. Synthesised, unless data.source
    names a folder.
    """

    seconds: float = Field(default=2.0, ge=1, le=120, description="of the longest utterance")
    rate: int = Field(default=16000, ge=4000, le=48000, description="samples a second")
    validation: Count = Field(default=512, description="how many synthesised utterances are held out")


class DataTable(Table):
    """What it is trained on: text, which has a source, images, speech, or one generated task."""

    source: str | None = Field(
        default=None, description="'stdlib', a file or folder, FineWeb .bin shards, or 'hub:NAME' of a datasets hub"
    )
    mqar: MqarTable | None = Field(default=None, description="a generated task: multi-query associative recall")
    passkey: PasskeyTable | None = Field(default=None, description="a generated task: passkey retrieval")
    masked: float | None = Field(
        default=None, gt=0, lt=1, description="the share of a text's tokens to be hidden and predicted, as BERT's"
    )
    images: ImagesTable | None = Field(default=None, description="classes of images; the source is a folder of them")
    speech: SpeechTable | None = Field(
        default=None, description="what was said; the source is a folder of LibriSpeech, or a pattern"
    )
    text_field: str = Field(default="text", description="the field of JSONL, parquet and hub records")
    tokenizer: str = Field(default="bytes", description="'bytes', 'bpe:VOCABULARY', a tokenizer folder, or 'hub:NAME'")
    validation_source: str | None = Field(default=None, description="what to evaluate on, like source")
    validation_fraction: float = Field(default=0.05, gt=0, lt=1, description="of the documents, held out for that")
    max_documents: Many | None = Field(default=None, description="read no more than so many documents")

    @model_validator(mode="after")
    def _one(self) -> "DataTable":
        kinds = ("source", "mqar", "passkey", "images", "speech")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1 and given not in (["source", "images"], ["source", "speech"]):
            what = f"{' and '.join(given)} exclude one another" if given else "there is nothing to train on"
            raise ValueError(f"{what}: give one of {', '.join(kinds)}")
        if self.masked is not None and given != ["source"]:
            raise ValueError("masked: tokens of a text are hidden, and there is no text; leave it out")
        if self.max_documents is not None and given != ["source"]:
            raise ValueError("max_documents: documents are counted in texts, and there is no text; leave it out")
        if self.validation_source is not None and self.source is None:
            raise ValueError("validation_source: what is generated has its own held-out part; leave it out")
        return self

    @property
    def kind(self) -> Kind:
        """What a model learns from it."""
        if self.images is not None or self.speech is not None:
            return "images" if self.images is not None else "speech"
        if self.source is None:
            return "task"
        return "text" if self.masked is None else "masked"

    @property
    def parts(self) -> str:
        """What its windows are counted in, for people: "tokens", "patches", "frames"."""
        return _PARTS.get(self.kind, "tokens")


def hidden_in(recipe: str) -> str:
    """The share of hidden tokens in a resolved recipe, from its TOML; "none" where none are."""
    try:
        return f"{tomllib.loads(recipe)['data']['masked']:g}"
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError):
        return "none"


def parts_of(recipe: str) -> str:
    """The parts of a resolved recipe's data, from its TOML; "tokens" where that cannot be told."""
    try:
        data = tomllib.loads(recipe)["data"]
    except (tomllib.TOMLDecodeError, KeyError):  # of early runs
        return "tokens"
    return next((parts for table, parts in _PARTS.items() if table in data), "tokens")
