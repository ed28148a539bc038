"""What a recipe says, resolved: its tables, what they may hold, and what has to fit together."""

import json
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from softfocus.lab.errors import LabError
from softfocus.lab.recipes.data import Count, DataTable, Many, Table
from softfocus.lab.recipes.lengths import parse
from softfocus.lab.run_folder.results import AS_TRAINED, WRONG, Setting, default_settings

if TYPE_CHECKING:
    from softfocus.layout import Heads


class LaserAblationTable(Table):
    """LASER changed, to show what its shift is for: :mod:`softfocus.lab.laser_ablation`."""

    values_times: float = Field(default=1.0, gt=0, le=1000, description="the values are multiplied by it")
    shifted: bool = Field(default=True, description="false for log(A e^V) as it is written, which overflows")

    @model_validator(mode="after")
    def _changes(self) -> "LaserAblationTable":
        if self.values_times == 1 and self.shifted:
            raise ValueError("it changes nothing: set values_times or shifted = false, or leave it out")
        return self


class ModelTable(Table):
    """What is trained: a model of Transformers, with a mechanism in place of its attention."""

    architecture: str = Field(description="a model_type of Transformers or of the lab: gpt_neox, llama ...")
    mechanism: str | dict[str, Any] = Field(
        description="a name of `softfocus mechanisms`, a combination of them, or a table of a Mechanism's fields"
    )
    parameters: dict[str, float] = Field(default={}, description="initial values of what the mechanism learns")
    layout: dict[str, Any] = Field(
        default={},
        description="by layer type, number, slice ('0::2') or '*' (all others): a table of window, sinks, "
        "rope, rope_base, heads, and mechanism and parameters where they are not the model's; or a list of such "
        "tables, one a group of heads",
    )
    laser_ablation: LaserAblationTable | None = Field(
        default=None, description="{ values_times = 8, shifted = false }: plain LASER without its shift, for a claim"
    )
    config: dict[str, Any] = Field(default={}, description="what the architecture's configuration takes")

    @field_validator("config")
    @classmethod
    def _plain(cls, config: dict[str, Any]) -> dict[str, Any]:
        for key, value in config.items():
            if (other := _not_json(value)) is not None:
                expected = "a string, bool, number, list or table"
                raise ValueError(f"{key}: got {other} (a {type(other).__name__}), expected {expected}")
        return config

    @field_validator("mechanism", mode="before")
    @classmethod
    def _known(cls, mechanism: Any) -> Any:
        from softfocus.layout import groups_of  # here, because it imports torch, which --help must not

        if not isinstance(mechanism, str | dict):
            raise ValueError(f"got {mechanism!r}, expected a name of `softfocus mechanisms`, or a table")
        groups_of({"mechanism": mechanism})
        return mechanism

    @model_validator(mode="after")
    def _describes_heads(self) -> "ModelTable":
        from softfocus.layout import groups_of

        for key, value in self.spec.items():
            try:
                groups_of(value)
            except (ValueError, TypeError) as error:
                raise ValueError(f"layout: {key!r}: {error}" if self.layout else str(error)) from None
        return self

    @model_validator(mode="after")
    def _is_plain_laser(self) -> "ModelTable":
        from softfocus.catalog import named
        from softfocus.layout import kind_text

        groups = [group for kind in self.groups for group in kind]
        other = next((group for group in groups if group.mechanism != named("laser") or group.learned), None)
        if self.laser_ablation is not None and other is not None:
            raise ValueError(
                f"laser_ablation: it is about plain LASER, and not about {kind_text((other,), learned=True)}; set "
                "model.mechanism='laser', or leave it out"
            )
        return self

    @property
    def spec(self) -> dict[str, Any]:
        """What `softfocus.hf.use` takes as a layout, every group of heads with its mechanism. The
        layers that no key names run the model's own; without a model it is not known whether there
        are any.
        """
        from softfocus.layout import REST

        own = {"mechanism": self.mechanism, "parameters": self.parameters}

        def whole(value: Any) -> Any:
            if isinstance(value, list):
                return [whole(group) for group in value]
            return own | value if isinstance(value, dict) and "mechanism" not in value else value

        return {key: whole(value) for key, value in ({REST: {}} | self.layout).items()}

    @property
    def groups(self) -> "list[tuple[Heads, ...]]":
        """The groups of heads of each kind of layers, as they are written."""
        from softfocus.layout import REST, groups_of

        return [groups_of(value) for _, value in sorted(self.spec.items(), key=lambda item: item[0] == REST)]

    @property
    def label(self) -> str:
        """What the model runs, for people: "lssar", or "softmax[128] / lssar" for a layout. An
        ablation is added.
        """
        from softfocus.layout import kind_text, kinds_text

        if not self.layout:
            return (self.mechanism if isinstance(self.mechanism, str) else kind_text(self.groups[0])) + self.ablation
        return kinds_text(self.groups) + self.ablation

    @property
    def ablation(self) -> str:
        """The end of a label: " (values x 8, no shift)", or nothing."""
        if (changed := self.laser_ablation) is None:
            return ""
        values = f"values x {changed.values_times:g}" if changed.values_times != 1 else ""
        return f" ({', '.join(filter(None, (values, '' if changed.shifted else 'no shift')))})"


def _not_json(value: Any) -> Any:
    """What a value of TOML holds that JSON cannot, a date or a time; None if there is nothing."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return next((found for one in inner if (found := _not_json(one)) is not None), None)
    return None if isinstance(value, str | int | float) else value


class PowerTable(Table):
    """How the power of all re-weighted heads grows to their own while the model trains."""

    start: float = Field(default=1.0, ge=1, le=100, description="the power at the first step")
    end: float | None = Field(default=None, ge=1, le=100, description="the mechanism's own power, if written: a check")
    share: float = Field(gt=0, le=1, description="the share of the steps after which the power has its end value (0.6)")
    shape: Literal["linear", "cosine", "geometric"] = "linear"

    def at(self, power: float, progress: float) -> float:
        """The power of heads whose own is given, at a share of the steps."""
        done = min(1.0, progress / self.share)
        if self.shape == "geometric":
            return self.start * (power / self.start) ** done
        return self.start + (power - self.start) * (
            done if self.shape == "linear" else (1 - math.cos(math.pi * done)) / 2
        )


class TrainTable(Table):
    """How it is trained."""

    length: int = Field(ge=2, le=1_048_576, description="tokens a window: patches of an image, frames of speech")
    batch: Count = Field(description="windows an optimiser step, over all devices and accumulated micro-batches")
    accumulate: Count = Field(default=1, description="micro-batches a step: less memory, the same result")
    steps: Count = Field(description="optimiser steps")
    optimizer: Literal["adamw", "lamb"] = Field(default="adamw", description="lamb (arXiv 1904.00962) takes an extra")
    learning_rate: float = Field(gt=0, le=1)
    decay: Literal["linear", "cosine"] = Field(default="cosine", description="the shape of the warm-down")
    warmup: int = Field(default=0, ge=0, description="steps of linear warm-up")
    warmdown: int | None = Field(default=None, ge=0, description="last steps that decay; all after warm-up if left out")
    final_learning_rate: float = Field(
        default=0.0, ge=0, le=1, description="at the end, and where the warm-up starts: as a share"
    )
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="on all but biases and norms")
    clip: float = Field(default=1.0, ge=0, description="largest gradient norm; 0 for no clipping")
    power: PowerTable | None = Field(default=None, description="{ start = 1, share = 0.6 }: the power is annealed")
    precision: Literal["float32", "bf16"] = "float32"
    seed: int = Field(default=0, ge=0, lt=2**32, description="of the initial weights and of the order of the data")
    log_every: Many = Field(default=10, description="steps")
    validations: int = Field(
        default=0, ge=0, description="so many times, evenly, the loss on evaluate.tokens held-out tokens is noted"
    )
    projection_norms: bool = Field(
        default=False, description="note the norms of the gradients of W_Q, W_K and W_V with every entry of the log"
    )
    checkpoint_every: Many = Field(default=1000, description="steps")

    @model_validator(mode="after")
    def _fit(self) -> "TrainTable":
        if self.batch % self.accumulate:
            raise ValueError(f"batch={self.batch} is not a multiple of accumulate={self.accumulate}")
        if self.warmup + (self.warmdown or 0) > self.steps:
            raise ValueError(
                f"warmup={self.warmup} + warmdown={self.warmdown or 0} is more than steps={self.steps}: "
                "lower train.warmup or train.warmdown, or raise train.steps"
            )
        return self

    @property
    def bf16(self) -> bool:
        """Whether it computes under autocast to bfloat16."""
        return self.precision == "bf16"

    @property
    def windows(self) -> int:
        """How many are read in all steps."""
        return self.steps * self.batch


class EvaluateTable(Table):
    """What `softfocus evaluate` does when it is not told otherwise."""

    lengths: str = Field(default="1x,2x,4x,8x,16x", description="'1k,2k,16k', or multiples of the training length")
    tokens: Many = Field(default=65_536, description="validation tokens a length")
    mechanisms: list[str] = Field(default=[], description="to be run in place of the trained one, beside it")
    also: list[Literal["attention", "classification", "induction", "passkeys", "tasks"]] = Field(
        default=[],
        description="what studies and claims measure, too: attention, as `softfocus inspect` does, "
        "classification, as `softfocus classify` does, induction, as `softfocus induction` does, "
        "passkeys, as `softfocus recall` does, or zero-shot tasks",
    )

    @field_validator("mechanisms")
    @classmethod
    def _known(cls, mechanisms: list[str]) -> list[str]:
        from softfocus.catalog import named

        for name in mechanisms:
            named(name)
        return mechanisms

    @field_validator("lengths", mode="before")
    @classmethod
    def _joined(cls, lengths: Any) -> Any:
        """A list is as good as its elements with commas between them."""
        return ",".join(map(str, lengths)) if isinstance(lengths, list) else lengths


class Recipe(Table):
    """A model, its data and its training, resolved: no defaults left to look up elsewhere."""

    name: str = Field(pattern=r"^\.*[\w+-][\w.+-]*$", description="the file's name, unless it says otherwise")
    description: str = ""
    model: ModelTable
    data: DataTable
    train: TrainTable
    evaluate: EvaluateTable = EvaluateTable()

    @model_validator(mode="after")
    def _heads(self) -> "Recipe":
        groups = [group for kind in self.model.groups for group in kind]
        if wide := [group.window for group in groups if group.window is not None and group.window > self.train.length]:
            raise ValueError(
                f"model.layout: a window of {wide[0]} is longer than train.length={self.train.length}; leave it out"
            )
        powers = {group.mechanism.power for group in groups if group.mechanism.power and "power" not in group.learned}
        if (schedule := self.train.power) is not None:
            if not powers:
                raise ValueError(
                    "train.power: no head re-weights with a power that is not learned; leave train.power out"
                )
            if schedule.end is not None and powers != {schedule.end}:
                ends = ", ".join(f"{power:g}" for power in sorted(powers))
                raise ValueError(
                    f"train.power.end: got {schedule.end:g}, but the heads end with {ends}; "
                    "the end is the mechanism's own power: leave it out, or write it in the mechanism"
                )
        return self

    @model_validator(mode="after")
    def _of_laser(self) -> "Recipe":
        if self.model.laser_ablation is not None and self.evaluate.mechanisms:
            raise ValueError("evaluate.mechanisms: a model with model.laser_ablation runs LASER alone; leave them out")
        return self

    @model_validator(mode="after")
    def _of_text(self) -> "Recipe":
        asked = {"train.validations": self.train.validations, "evaluate.also": self.evaluate.also}
        if self.data.kind != "text" and (given := [key for key, value in asked.items() if value]):
            raise ValueError(f"{given[0]}: a recipe of another kind than text has no text held out; leave it out")
        if self.data.kind == "task" and self.evaluate.mechanisms:
            raise ValueError("evaluate.mechanisms: a generated task is measured as trained alone; leave them out")
        return self

    @model_validator(mode="after")
    def _lengths(self) -> "Recipe":
        try:
            lengths = parse(self.evaluate.lengths, self.train.length, "evaluate.lengths")
        except LabError as error:
            raise ValueError(f"evaluate.lengths: {error}") from None
        if self.data.kind in ("text", "task"):
            return self
        if lengths != [self.train.length]:
            raise ValueError(
                f"evaluate.lengths: {self.evaluate.lengths} is for texts that are read from left to right; write '1x'"
            )
        if self.evaluate.mechanisms:
            raise ValueError("evaluate.mechanisms: they are for texts that are read from left to right; leave them out")
        return self

    @property
    def settings(self) -> tuple[Setting, ...]:
        """What is measured when nobody says otherwise."""
        if self.data.kind in ("text", "task"):
            return default_settings(self.train.length, self.evaluate.mechanisms)
        return AS_TRAINED, WRONG

    def to_toml(self) -> str:
        """TOML that :func:`softfocus.lab.recipes.loading.load` reads back to an equal recipe."""
        tables = self.model_dump(exclude_none=True)
        lines = [f"{key} = {toml_value(value)}" for key, value in tables.items() if not isinstance(value, dict)]
        for name, table in tables.items():
            if isinstance(table, dict):
                lines += ["", f"[{name}]", *(f"{_toml_key(key)} = {toml_value(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else toml_value(key)
