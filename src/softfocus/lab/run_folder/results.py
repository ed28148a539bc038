"""What is known of a run: how it was trained, and what was measured. The one schema, written and
read by everybody.

Over 400 lines: all of a run's files are described in one place.
"""

import math
import re
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import to_json

Status = Literal["running", "complete", "interrupted", "diverged", "failed"]

Rope = Literal["trained", "ntk", "yarn"]
"""How the rotary embedding is scaled in an evaluation."""


class Record(BaseModel):
    """What is kept as JSON."""

    # A diverged model has a loss of NaN; as a string it is valid JSON and reads back as NaN.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Machine(Record):
    """What computed a result, without names of hosts, users or folders."""

    cpu: str
    cores: int
    device: str = Field(description="where the model ran: 'cpu', or the GPU's product name")


class Session(Record):
    """An earlier part of a training that was resumed: what trained it."""

    commit: str
    versions: dict[str, str]
    machine: Machine
    started: datetime


class RunInfo(Record):
    """What trained a model: enough to tell two runs apart and to do one again. Losses are in nats
    per token.
    """

    name: str = Field(description="the run's name: the folder's")
    token: str = Field(
        default="", description="made at random when it began, and in all files of the run; early runs lack it"
    )
    recipe: str = Field(description="the recipe's name; the resolved recipe is recipe.toml beside this")
    mechanism: str = Field(description="as in the recipe: 'lssar', 'sharpened(softmax, 3)'")
    status: Status
    parameters: int
    seed: int
    commit: str = Field(description="of the source tree, '+dirty' when it was changed; or the package's version")
    versions: dict[str, str]
    machine: Machine
    started: datetime = Field(description="of the last session, which the three fields above describe")
    sessions: list[Session] = Field(default=[], description="the sessions before it, where the run was resumed")
    finished: datetime | None = None
    train_length: int = Field(description="tokens a training window")
    vocabulary: int = Field(description="size of the tokenizer's vocabulary")
    corpus_key: str = Field(default="", description="key of the token cache: which corpus, tokenizer and held-out part")
    steps: int = Field(description="optimiser steps that the recipe asks for")
    steps_done: int = 0
    tokens_per_step: int
    train_loss: list[tuple[int, float]] = Field(default=[], description="(step, mean loss since the entry before)")
    gradient_norm: list[tuple[int, float]] = Field(
        default=[], description="(step, largest norm of a gradient since the entry before, not clipped)"
    )
    validation_loss: list[tuple[int, float]] = Field(
        default=[], description="(step, loss on held-out windows of the training length), with train.validations"
    )
    projection_norms: dict[str, list[tuple[int, float]]] = Field(
        default={},
        description="query, key, value -> (step, norm of the gradient of their projections, not clipped), with "
        "train.projection_norms",
    )
    tokens_per_second: float | None = Field(default=None, description="without the first steps, which warm up caches")
    error: str | None = Field(default=None, description="what stopped a run that failed, diverged or was interrupted")

    @property
    def named(self) -> dict[str, Any]:
        """What every measurement of the run says of it."""
        return {
            "run": self.name,
            "token": self.token,
            "mechanism": self.mechanism,
            "train_length": self.train_length,
            "seed": self.seed,
        }

    @property
    def parts(self) -> "list[Session | RunInfo]":
        """What trained each part of it: a commit, versions and a machine."""
        return [*self.sessions, self]

    @property
    def final_loss(self) -> float | None:
        """The last training loss, or None before the first."""
        return self.train_loss[-1][1] if self.train_loss else None


class Setting(Record):
    """What is changed in a trained model before it is evaluated; or that not its loss is
    measured.
    """

    model_config = ConfigDict(frozen=True)

    rope: Rope = "trained"
    window: int | None = Field(
        default=None, ge=1, description="so many keys each token sees, itself included; None: all"
    )
    sinks: int = Field(default=0, ge=0, description="so many of them are the text's first (StreamingLLM)")
    mechanism: str | None = Field(
        default=None, description="what all heads run in place of what they were trained with"
    )

    wrong: bool = Field(
        default=False, description="the share of wrong predictions (hidden tokens, images, words) in place of the loss"
    )

    def name(self, train_length: int | None = None) -> str:
        """ "as trained", "dynamic NTK", "window 1x (4 sinks)"; without a training length windows
        are in tokens.
        """
        if self.wrong:
            return "error rate"
        parts = [] if self.rope == "trained" else [{"ntk": "dynamic NTK", "yarn": "YaRN"}[self.rope]]
        if self.window is not None:
            keys = f"{self.window:,}" if train_length is None else _multiple(self.window, train_length)
            parts.append(f"window {keys}" + (f" ({self.sinks} sinks)" if self.sinks else ""))
        if self.mechanism is not None:
            parts.append(f"run as {self.mechanism}")
        return ", ".join(parts) or "as trained"

    @property
    def order(self) -> tuple[int, int, str, int]:
        """The place in a report: without a window first, and with its own mechanism; losses before
        error rates.
        """
        scalings = get_args(Rope)
        place = len(scalings) if self.wrong else scalings.index(self.rope)
        return self.window or 0, self.sinks, self.mechanism or "", place


def _multiple(tokens: int, train_length: int) -> str:
    """ "1x"; in tokens where four digits of the multiple do not tell them."""
    multiple = f"{tokens / train_length:.4g}"
    return f"{multiple}x" if float(multiple) * train_length == tokens else f"{tokens:,}"


AS_TRAINED = Setting()
WRONG = Setting(wrong=True)


def default_settings(train_length: int, mechanisms: Sequence[str] = ()) -> tuple[Setting, ...]:
    """What an evaluation measures when it is not told otherwise, and what it runs beside the
    trained mechanism.
    """
    own = (AS_TRAINED, Setting(rope="ntk"), Setting(window=train_length))
    return *own, *(Setting(rope=rope, mechanism=name) for name in mechanisms for rope in ("trained", "ntk"))


_ROUNDING = 1e-3
"""How far a kept sum may be off. Sums have four digits, and a claim's results add up several."""


def _check_loss(what: str, loss: float, sums: Sequence[float], tokens: int) -> None:
    """Refuse a loss that is not the mean that its sums by document make.

    Raises:
        ValueError: it is another one.
    """
    if not sums or tokens < 1:
        return
    mean = math.fsum(sums) / tokens if all(map(math.isfinite, sums)) else math.nan
    if math.isfinite(mean) and math.isfinite(loss):
        agree = abs(mean - loss) <= _ROUNDING * len(sums) / tokens + 1e-6 * abs(loss)
    else:
        agree = math.isfinite(mean) == math.isfinite(loss)
    if not agree:
        raise ValueError(f"{what} is {loss:.6g}, and its sums by document make {mean:.6g}")


class Bucket(Record):
    """Mean loss over the positions start <= i < end of every window; position 0 is a window's first
    prediction.
    """

    start: int
    end: int
    loss: float
    standard_error: float
    tokens: int
    sums: list[float] = Field(
        default=[], description="summed loss of each of the row's documents; early results lack it"
    )


class Row(Record):
    """Loss at one length under one setting, in nats per token, over all positions of all windows.

    Of images, speech and hidden tokens a window is one prediction. The "loss" of an error rate is a
    share.
    """

    length: int
    setting: Setting = AS_TRAINED
    loss: float
    standard_error: float = Field(description="with documents as what was drawn; NaN where there is only one")
    tokens: int = Field(description="predictions that the mean is over")
    windows: int
    documents: list[int] = Field(
        default=[], description="the documents that the windows start in; early results lack it"
    )
    windows_by_document: list[int] = Field(default=[], description="how many windows start in each of them")
    buckets: list[Bucket] = []

    @model_validator(mode="after")
    def _agrees(self) -> "Row":
        """What is kept by document has to fit, and to make the loss: a damaged file would else be
        compared.
        """
        count, where = len(self.documents), f"length {self.length}"
        if len(self.windows_by_document) != count:
            raise ValueError(f"{where}: {count} documents, and {len(self.windows_by_document)} windows_by_document")
        for bucket in self.buckets:
            if bucket.sums and len(bucket.sums) != count:
                raise ValueError(f"{where}: {count} documents, and {len(bucket.sums)} sums from {bucket.start}")
            _check_loss(f"{where}: the loss from {bucket.start}", bucket.loss, bucket.sums, bucket.tokens)
        if all(bucket.sums for bucket in self.buckets):
            sums = [total for bucket in self.buckets for total in bucket.sums]
            _check_loss(f"{where}: the loss", self.loss, sums, self.tokens)
        return self

    @model_validator(mode="before")
    @classmethod
    def _early(cls, values: Any) -> Any:
        """Early results know dynamic NTK alone, as `ntk: true`."""
        if isinstance(values, dict) and "ntk" in values:
            values = dict(values)
            values["setting"] = {"rope": "ntk" if values.pop("ntk") else "trained"}
        return values

    @property
    def text(self) -> str:
        """The loss and its standard error, for a line of text."""
        if math.isnan(self.standard_error):
            return f"{self.loss:.3f} (from one document: its error is unknown)"
        return f"{self.loss:.3f} ± {self.standard_error:.3f}"


class Measurement(Record):
    """What was measured of one run."""

    run: str = Field(description="the run's name")
    token: str = Field(default="", description="the run's")
    mechanism: str
    train_length: int


class Evaluation(Measurement):
    """Loss over length of one run, on the same validation tokens at every length.

    What is measured follows from corpus_key, longest and tokens: evaluations that agree in them
    read the same text.
    """

    vocabulary: int
    tokens: int = Field(description="validation tokens that each length reads")
    seed: int = Field(description="the training seed")
    corpus_key: str = Field(default="", description="like a run's; another one than the run's where the corpus changed")
    longest: int = Field(default=0, description="tokens a span; every length cuts the same spans into its windows")
    asked: int = Field(
        default=0, description="tokens that were asked for: `tokens` are whole spans, and fewer where the text is short"
    )
    documents: int = Field(default=0, description="how many documents the spans start in")
    crossing: int = Field(default=0, description="how many of the spans cross the end of a document")
    rows: list[Row]

    @property
    def text_key(self) -> tuple[str, int, int]:
        """What decides which tokens are predicted: equal where two evaluations read the same
        text.
        """
        return self.corpus_key, self.longest, self.tokens

    def row(self, length: int, setting: Setting = AS_TRAINED) -> Row | None:
        """The row at a length, or None if it was not evaluated."""
        return next((row for row in self.rows if (row.length, row.setting) == (length, setting)), None)


class Unfinished(Record):
    """The rows that an evaluation has finished so far. It lasts until evaluation.json is
    written.
    """

    key: str = Field(description="a digest of all that decides a row besides its length and setting")
    rows: list[Row]


_SHORT = re.compile(r'\[\n(?:[^"{}]|"NaN"|"-?Infinity")*\n *\]|\{\n[^{}]*\n *\}')
"""In indented JSON: an array of numbers or of arrays of numbers, or an object that holds no
other.
"""


def json_text(result: BaseModel | Sequence[BaseModel]) -> str:
    """JSON for people and for git: indented, but what holds numbers alone stands on one line."""
    indented = to_json(result, indent=2, inf_nan_mode="strings").decode()
    # Strings of JSON hold no line breaks, so nothing within them is touched
    return _SHORT.sub(lambda found: re.sub(r"\n *", "", re.sub(r",\n *", ", ", found[0])), indented) + "\n"


class Answers(Record):
    """Answers that lie start <= distance < end tokens behind the token that is to be predicted."""

    start: int
    end: int
    accuracy: float
    standard_error: float
    answers: int


class RecallRow(Record):
    """How many answers of a generated task were right at one length: the likeliest token is the
    answer.
    """

    length: int
    grown: bool = Field(description="whether there is more to remember in longer sequences, or only more filler")
    window: int | None = Field(description="keys that every attention saw, itself included; None for all")
    nearest: int = Field(description="no answer lies nearer, in tokens")
    reach: int | None = Field(description="how many tokens back can matter under the window, through all layers")
    chance: float = Field(description="the accuracy of a model that cannot see the answers")
    sequences: int
    answers: int
    accuracy: float = Field(description="share of answers that are right")
    standard_error: float = Field(description="over sequences; 0 where all or none are right")
    complete: float = Field(description="share of sequences with all answers right")
    complete_error: float
    by_distance: list[Answers]

    @property
    def chance_text(self) -> str:
        """With three digits behind the point, or as many as it takes where those are zeros."""
        return f"{self.chance:.3f}" if self.chance >= 0.001 else f"{Decimal(f'{self.chance:.3g}'):f}"

    @property
    def blind(self) -> bool:
        """Whether no answer can be seen: accuracy is at chance by construction."""
        return self.reach is not None and self.nearest > self.reach + 1

    @property
    def place(self) -> tuple[int, bool, int | None]:
        """What is measured, on however many sequences."""
        return self.length, self.grown, self.window

    @property
    def key(self) -> tuple[int, bool, int | None, int]:
        """What decides a row's result, for one run."""
        return *self.place, self.sequences


SEQUENCES = 64
"""How many of a task are asked at each length unless others are asked for."""


class Recall(Measurement):
    """Recall over length of one run, on the same sequences for all runs of one task."""

    seed: int = Field(description="the training seed")
    task: str = Field(description="the task and a digest of what it generates")
    rows: list[RecallRow]

    @property
    def shown(self) -> list[RecallRow]:
        """The rows without those that were measured again on more of the same sequences."""
        most = {row.place: row for row in sorted(self.rows, key=lambda row: row.sequences)}
        return [row for row in self.rows if row is most[row.place]]


class Repeats(Record):
    """Mean loss over tokens whose n-gram stood start <= distance < end tokens before; distance 0 is
    for never.
    """

    start: int
    end: int
    loss: float
    standard_error: float = Field(description="over documents; NaN where there is only one")
    tokens: int
    sums: list[float] = Field(default=[], description="summed loss of each document; early results lack it")
    counts: list[int] = Field(default=[], description="these tokens in each document; early results lack it")

    @model_validator(mode="after")
    def _agrees(self) -> "Repeats":
        where = f"repeats from {self.start}"
        if len(self.sums) != len(self.counts) or (self.counts and sum(self.counts) != self.tokens):
            raise ValueError(f"{where}: sums, counts and tokens do not fit together")
        _check_loss(f"{where}: the loss", self.loss, self.sums, self.tokens)
        return self


class InductionRow(Record):
    """Loss of the same tokens at one length, in nats per token, by how far back their n-gram stood
    in the span.
    """

    length: int
    window: int | None = Field(description="keys that every attention saw, itself included; None for all")
    by_distance: list[Repeats]


NGRAM = 4
"""Tokens of a repeat, the predicted one included, unless others are asked for."""


class Induction(Measurement):
    """Loss by distance of the latest repeat, of one run. Every row and bucket has the same
    tokens.
    """

    seed: int = Field(description="the training seed")
    corpus_key: str
    ngram: int = Field(description="tokens that have to repeat, the predicted one included")
    longest: int = Field(description="tokens a span, in which repeats are looked for")
    tokens: int = Field(description="predictions that each row makes")
    documents: int
    rows: list[InductionRow]


class Classification(Measurement):
    """Accuracy of one run's model after fine-tuning: does one piece of text go on where another one
    ends?
    """

    seed: int = Field(description="the training seed, and that of the fine-tuning")
    corpus_key: str
    length: int = Field(description="tokens an example, both pieces together")
    accuracy: float = Field(description="share of right answers on held-out documents; guessing has a half")
    standard_error: float = Field(description="with documents as what was drawn")
    documents: list[int] = Field(description="of the first pieces")
    right: list[int] = Field(description="right answers of each document")
    counts: list[int] = Field(description="examples of each document")


class LabelledRow(Record):
    """Accuracy of one run's model after fine-tuning on one labelled data set."""

    data: str = Field(description="the name of its folder")
    key: str = Field(default="", description="of its files: other data of the same name differ; early rows lack it")
    fields: list[str] = Field(description="whose texts make an example")
    labels: list[str]
    examples: int = Field(description="of the training")
    held_out: int = Field(description="examples that are held out")
    cut: int = Field(description="examples of both that were longer than the training length: their last tokens stay")
    epochs: int = Field(description="passes over the training examples")
    accuracy: float = Field(description="share of right answers on the examples that are held out")
    standard_error: float
    commonest: float = Field(description="share of them that have the commonest label of the training")
    answers: list[str] = Field(description="the label that the model gave each")


class Labelled(Measurement):
    """Accuracy of one run's model after fine-tuning on labelled data sets."""

    seed: int = Field(description="the training seed, and that of the fine-tuning")
    rows: list[LabelledRow]


class HeadRow(Record):
    """Loss with one head narrowed to the last keys, in nats summed over the tokens of each
    document.
    """

    layer: int | None = Field(description="whose head; None for the model as it is (head None), or all heads (head 0)")
    head: int | None = Field(description="the first of the query heads that share its key head")
    sums: list[float] = Field(description="by document")
    windows: list[int] = Field(description="of each document")


class HeadsMeasured(Measurement):
    """Loss in long windows with single heads narrowed to the last keys, of one run. Every row has
    the same tokens.
    """

    seed: int = Field(description="the training seed")
    corpus_key: str
    length: int = Field(description="tokens a window")
    window: int = Field(description="keys that a narrowed head sees, itself included")
    tokens: int = Field(description="predictions that each row makes")
    rows: list[HeadRow]


class TaskRow(Record):
    """One task of lm-evaluation-harness."""

    task: str
    accuracy: float = Field(description="`acc` of the harness, not normalised by length")
    standard_error: float = Field(description="of the questions")
    normalised: float | None = Field(
        default=None, description="`acc_norm` of the harness, normalised by length; None where it has none"
    )
    right: list[int] = Field(description="by question, in the harness's order: 1 where `acc` has it right, else 0")


class Tasks(Record):
    """Zero-shot accuracy of one run's model in tasks of lm-evaluation-harness."""

    run: str = Field(description="the run's name")
    token: str = Field(default="", description="the run's")
    harness: str = Field(description="version of lm_eval")
    rows: list[TaskRow]
