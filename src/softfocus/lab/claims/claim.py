"""What a claim is: a TOML file with what the paper says, the runs that test it, and statements to
be judged.
"""

import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from softfocus.lab.errors import LabError, UsageError, did_you_mean, first_mistake
from softfocus.lab.recipes import loading
from softfocus.lab.recipes.data import Table
from softfocus.lab.recipes.loading import LAB, shipped_in
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.results import AS_TRAINED
from softfocus.lab.studies import study

Scale = Literal["toy", "small", "gpt2"]
SCALES: tuple[Scale, ...] = get_args(Scale)
BASES: dict[Scale, str] = {"toy": "toy", "small": "small", "gpt2": "gpt2-124m"}
"""The recipe that the rows of a claim change, at each scale, unless the claim names another."""

Share = Annotated[float, Field(ge=0, le=10)]
Multiple = Annotated[str, Field(pattern=r"^[1-9]\d*(\.\d{1,4})?x$")]
_Alone = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
"""One text is a list of itself."""
Names = Annotated[list[str], Field(min_length=1), _Alone]
Multiples = Annotated[list[Multiple], Field(min_length=1), _Alone]


class _Statement(Table):
    says: str = Field(description="what is to be judged, in one sentence")


class _OfRows(_Statement):
    row: Names


class Compared(_OfRows):
    """About each row beside each of the others."""

    than: Names = Field(description="rows; '*' for all others")


class Lower(Compared):
    """Each row has a lower loss than each of the others, by more than a share of theirs."""

    kind: Literal["lower"]
    at: Multiples = Field(default=["1x"])
    than_at: Multiple | None = Field(
        default=None, description="where the others are read; at the same length if left out"
    )
    by: Share = 0.0
    setting: str = Field(default=AS_TRAINED.name(), description="of the evaluation, as reports name it")
    than_setting: str | None = Field(default=None, description="the same if left out")


class Close(Lower):
    """Each row's loss is within a share of that of each of the others, above or below."""

    kind: Literal["close"]  # type: ignore[assignment]
    by: Share = Field(description="the share")


class Flat(_OfRows):
    """The loss of each row rises by no more than a share from the training length to another
    length.
    """

    kind: Literal["flat"]
    to: Multiple
    within: Share
    setting: str = AS_TRAINED.name()


class Trains(_OfRows):
    """No training of any row diverges."""

    kind: Literal["trains"]


class Steeper(Compared):
    """The gradients of each row have over so many times the norm of those of each of the others.

    The largest one is that after the warm-up: :attr:`softfocus.lab.claims.results.Run.settled`.
    """

    kind: Literal["steeper"]
    factor: float = Field(default=1.0, gt=0)
    of: Literal["largest", "median"] = Field(default="largest", description="which gradient of a training")
    part: Literal["all", "query", "key", "value"] = Field(
        default="all", description="of all parameters, or of a projection, which takes train.projection_norms"
    )


class Sooner(Compared):
    """Each row reaches the best validation loss of each of the others after fewer steps, or in less
    time, than they took.
    """

    kind: Literal["sooner"]
    of: Literal["steps", "time"] = "steps"
    by: float = Field(default=0.0, ge=0, lt=1, description="the share that is saved")


class Faint(_OfRows):
    """At least a share of the attention probabilities of each row is below a threshold."""

    kind: Literal["faint"]
    below: Literal["1e-3", "1e-7"]
    share: float = Field(gt=0, lt=1)
    at: Multiple = "1x"


class Attends(Compared):
    """A mean over the attention weights of each row is above that of each of the others."""

    kind: Literal["attends"]
    mean: Literal["distance", "entropy", "below_1e_3", "below_1e_7"] = Field(
        description="as softfocus.lab.inspect.results.Row has them"
    )
    than: Names = Field(default=[], description="rows; '*' for all others; none: it is above 0")
    at: Multiple = "1x"
    since: Multiple | None = Field(default=None, description="what is judged is by how much it grows from here")

    @model_validator(mode="after")
    def _says_something(self) -> "Attends":
        if not self.than and self.since is None:
            raise ValueError("a mean of attention weights is never below 0: give `than`, `since` or both")
        return self


class Classifies(Compared):
    """Fine-tuned on classification, each row has a higher accuracy than each of the others."""

    kind: Literal["classifies"]


class Finds(Compared):
    """Asked for passkeys, each row finds a larger share of them than each of the others."""

    kind: Literal["finds"]
    at: Multiples


class Answers(Compared):
    """In zero-shot tasks each row has a higher mean accuracy than each of the others."""

    kind: Literal["answers"]


class Saves(_Statement):
    """By power laws through their sizes, the rows have the loss of the largest of the others with
    fewer parameters.
    """

    kind: Literal["saves"]
    row: Annotated[list[str], Field(min_length=3)] = Field(description="one family of models in several sizes")
    than: Annotated[list[str], Field(min_length=3)] = Field(description="the other family")
    at: Multiple = "1x"
    by: float = Field(default=0.0, ge=0, lt=1, description="the share of the parameters that is saved")
    setting: str = AS_TRAINED.name()


class Exact(_Statement):
    """True or not true, by a test that trains nothing."""

    kind: Literal["proved", "disproved"]
    by: str = Field(description="the test: tests/file.py::name")


Statement = Annotated[
    Lower | Close | Flat | Trains | Steeper | Sooner | Faint | Attends | Classifies | Finds | Answers | Saves | Exact,
    Field(discriminator="kind"),
]


_Kind = TypeVar("_Kind", bound=_Statement)


class Reported(Table):
    """A table of the paper."""

    columns: list[str] = Field(min_length=1)
    rows: dict[str, list[float | str]] = Field(min_length=1)

    @model_validator(mode="after")
    def _rectangular(self) -> "Reported":
        for name, row in self.rows.items():
            if len(row) != len(self.columns):
                raise ValueError(f"paper.rows: {name!r} has {len(row)} cells for {len(self.columns)} columns")
        return self


class Claim(Table):
    """One table, figure or sentence of a paper."""

    name: str = Field(description="the file's name")
    title: str
    source: str = Field(description="paper, version, and table or figure")
    says: str = Field(description="what the paper says, in our words")
    paper: Reported | None = Field(default=None, description="its numbers")
    notes: list[str] = Field(default=[], description="what differs from the paper, or is not known of it")
    yardstick: str | None = Field(
        default=None, description="the row that all stand beside, with a window; by default the only one of softmax"
    )
    bases: dict[Scale, str] = Field(default={}, description="scale -> the recipe that the rows change, if not BASES'")
    rows: dict[str, dict[str, Any]] = Field(
        default={},
        description="name -> keys of the recipe that it changes; base = {scale -> another recipe to change}",
    )
    statements: list[Statement] = Field(default=[])
    away: dict[Scale, str] = Field(default={}, description="scale -> why this project cannot run it, though you may")
    untestable: dict[Scale, str] = Field(
        default={}, description="scale -> why it cannot be run, by this project or by you"
    )
    unjudged: dict[Scale, str] = Field(
        default={}, description="scale -> why its runs, which are shown, say nothing about the claim"
    )

    @model_validator(mode="after")
    def _whole(self) -> "Claim":
        for statement in self.statements:
            rows, others = (getattr(statement, field, []) for field in ("row", "than"))
            if "*" in (*rows, *others) and set(self.rows) <= set(rows):
                raise ValueError(f"statement {statement.says!r}: there are no other rows")
            if unknown := [name for name in (*rows, *others) if name not in (*self.rows, "*")]:
                raise ValueError(f"statement {statement.says!r}: there is no row {unknown[0]!r}")
        if self.yardstick is not None and self.yardstick not in self.rows:
            raise ValueError(f"yardstick: there is no row {self.yardstick!r}")
        for name, row in self.rows.items():
            base = row.get("base", dict.fromkeys(self.scales, ""))
            named = isinstance(base, dict) and all(isinstance(one, str) for one in base.values())
            if not named or set(base) != set(self.scales):
                scales = " and ".join(self.scales) or "none, as it cannot be run"
                raise ValueError(f"rows.{name}.base must name a recipe for each scale of the claim: {scales}")
        if not self.statements and set(self.untestable) != set(SCALES):
            raise ValueError("there is nothing to judge: give statements, or say at every scale why it is untestable")
        return self

    @property
    def scales(self) -> tuple[Scale, ...]:
        """Where its runs can be made."""
        return tuple(scale for scale in SCALES if self.rows and scale not in self.untestable)

    def base(self, scale: Scale) -> str:
        """The recipe that its rows change, unless they name another."""
        return self.bases.get(scale, BASES[scale])

    def rows_at(self, scale: Scale) -> dict[str, dict[str, Any]]:
        """Its rows, as a study has them: with the recipe of the scale where they name their own."""
        return {name: row | ({"base": row["base"][scale]} if "base" in row else {}) for name, row in self.rows.items()}

    def bases_at(self, scale: Scale) -> list[str]:
        """The recipes that its rows change."""
        return list(dict.fromkeys(row.get("base", self.base(scale)) for row in self.rows_at(scale).values()))

    @property
    def exact(self) -> bool:
        """Whether tests decide it, and no run does."""
        return bool(self.statements) and not self.rows

    def first(self, kind: type[_Kind]) -> _Kind | None:
        """The first statement of a kind."""
        return next((statement for statement in self.statements if isinstance(statement, kind)), None)


def shipped() -> list[str]:
    """The names of all claims."""
    return shipped_in("claims")


def load(name: str) -> Claim:
    """Read a claim.

    Raises:
        UsageError: no such claim.
        LabError: a file that is not a claim.
    """
    if name not in shipped():
        remedy = did_you_mean(name, shipped(), "`softfocus recipes` lists them all")
        raise UsageError(f"there is no claim {name!r}", remedy)
    return parse(name, (LAB / "claims" / f"{name}.toml").read_text(encoding="utf-8"))


def parse(name: str, text: str) -> Claim:
    """A claim from TOML.

    Raises:
        LabError: it is not one.
    """
    remedy = "a claim has title, source, says, statements, and [rows] or [untestable]"
    try:
        return Claim.model_validate({"name": name, **tomllib.loads(text)})
    except tomllib.TOMLDecodeError as error:
        raise LabError(f"claim {name} is not TOML: {error}", "correct that line") from None
    except ValidationError as error:
        raise LabError(f"claim {name}: {first_mistake(error)}", remedy) from None


def recipes(claim: Claim, scale: Scale, seeds: Sequence[int], overrides: Sequence[str] = ()) -> list[Recipe]:
    """A recipe for each row and seed: all rows of a seed before the next seed. Their names are
    "ROW-sSEED".

    Args:
        claim: whose rows they are.
        scale: of the recipe that they change.
        seeds: of each row.
        overrides: `"data.source=texts"`: keys that all rows change, as
            :func:`softfocus.lab.recipes.loading.load` takes them.

    Raises:
        UsageError: a scale at which the claim cannot be run, an override that makes no recipe, or
            one of a key in which the rows differ.
        LabError: a row that makes no recipe.
    """
    if claim.exact:
        raise UsageError(
            f"{claim.name} is decided by tests, and not by runs", f"docs/results/claims/{claim.name}.md names them"
        )
    if scale not in claim.scales:
        why = claim.untestable[scale]
        elsewhere = f"it can be run with --scale {claim.scales[0]}" if claim.scales else "its page says more"
        raise UsageError(f"{claim.name} cannot be run at the scale {scale}: {why}", elsewhere)
    common = _common(claim, scale, overrides)
    return study.recipes(
        study.Study(title=claim.title, base=claim.base(scale), common=common, rows=claim.rows_at(scale)), seeds=seeds
    )


def _common(claim: Claim, scale: Scale, overrides: Sequence[str]) -> dict[str, Any]:
    """What overrides change in all rows."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if list(loading.flat(loading.changed([override]))) != [key]:
            raise UsageError(f"--set {key}: {override!r} is a whole table", "set its keys one by one")
    changes = loading.changed(overrides)
    own = {key for row in claim.rows.values() for key in loading.flat(row)}
    for key in loading.flat(changes):
        if key == "train.seed":
            raise UsageError("--set train.seed: each row is trained with several seeds", "say how many with --seeds")
        if any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in own):
            what = f"--set {key}: rows of {claim.name} set it, and are held against each other"
            raise UsageError(what, "set a key that all rows share")
    for base in claim.bases_at(scale):
        loading.load(base, list(overrides))  # says what is wrong with a value
    return changes
