"""From a name or a TOML file to a Recipe: what it inherits, what the command line changes, and what
is wrong with it.
"""

import copy
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from softfocus.lab.errors import LabError, UsageError, did_you_mean
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import RECIPE, RUN

LAB = resources.files("softfocus.lab")
"""The folder of the lab: recipes, studies and claims lie in its packages."""


def shipped_in(package: str) -> list[str]:
    """The names of the TOML files that lie in one of the lab's packages."""
    return sorted(file.name.removesuffix(".toml") for file in (LAB / package).iterdir() if file.name.endswith(".toml"))


def shipped() -> list[str]:
    """The names of the recipes that come with softfocus."""
    return shipped_in("recipes")


def load(name_or_path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe, with what it inherits (`base = "demo"`) and what the command line changes.

    Args:
        name_or_path: a shipped name, or a TOML file.
        overrides: `"train.steps=100"`: a key and a TOML value; what is not TOML is taken as a
            string.

    Raises:
        LabError: a missing file, a key that does not exist (with the nearest one), a value out of
            range.
        UsageError: the same, where an override brought it.
    """
    values = _read(str(name_or_path), ())
    given = copy.deepcopy(values)
    for override in overrides or []:
        _override(values, override)
    return _checked(values, f"recipe {name_or_path}", given)


def derive(
    base: str, name: str, changes: dict[str, Any], near: Path | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """A recipe that changes another one, as a file with a base does.

    Args:
        base: a shipped name, or a TOML file.
        name: of the new recipe.
        changes: tables and keys.
        near: the folder in which a base that is a file is looked for first.
        overrides: as :func:`load` takes them, over the changes.

    Raises:
        LabError: as :func:`load`.
        UsageError: the same, where an override brought it.
    """
    values = merged(_read(base, (), near), changes) | {"name": name}
    given = copy.deepcopy(values)
    for override in overrides:
        _override(values, override)
    return _checked(values, name, given)


def _checked(values: dict[str, Any], where: str, given: dict[str, Any]) -> Recipe:
    """A recipe of these values, which are those given and what the command line changed."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors()
    try:
        Recipe.model_validate(given)
        before = []
    except ValidationError as error:
        before = [(mistake["loc"], mistake["type"]) for mistake in error.errors()]
    asked = [mistake for mistake in mistakes if (mistake["loc"], mistake["type"]) not in before]
    what, remedy = _explain((asked or mistakes)[0], where)
    raise UsageError(what, remedy) if asked else LabError(what, remedy)


def _read(name_or_path: str, seen: tuple[str, ...], near: Path | None = None) -> dict[str, Any]:
    path = Path(name_or_path)
    if near is not None and (near / path).suffix == ".toml":
        path = near / path
    if str(path) in seen:
        raise LabError(f"recipe {seen[0]} inherits from itself: {' -> '.join([*seen, str(path)])}", "change its base")
    file = path if path.suffix == ".toml" else LAB / "recipes" / f"{name_or_path}.toml"
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        if path.name == RECIPE and (path.parent / RUN).exists():
            raise LabError(f"the run {path.parent} has no {path.name}", "put back a copy, or train it again") from None
        if path.suffix == ".toml":
            raise LabError(
                f"there is no recipe file {path}", "check the path; `softfocus recipes` lists those that are shipped"
            ) from None
        raise LabError(f"there is no recipe {name_or_path!r}", _recipes(name_or_path)) from None
    except tomllib.TOMLDecodeError as error:
        raise LabError(f"recipe {file} is not TOML: {error}", "correct that line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"recipe {file} cannot be read: {error}", "it must be a text file in UTF-8") from None
    values.setdefault("name", path.stem if path.suffix == ".toml" else name_or_path)
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise LabError(f"recipe {file}: base = {base!r} is not a string", "name one recipe or one .toml file")
    return merged(_read(base, (*seen, str(path)), file.parent if isinstance(file, Path) else None), values)


def _recipes(name: str) -> str:
    otherwise = "`softfocus recipes` lists those that are shipped; any other is the path of a .toml file"
    # A path is no misspelt name
    return otherwise if Path(name).name != name else did_you_mean(name, shipped(), otherwise)


def merged(base: dict[str, Any], changes: dict[str, Any], table: tuple[str, ...] = ()) -> dict[str, Any]:
    """Tables and keys of ``base`` with those of ``changes`` put over them, table by table.

    A mechanism, and the heads of a layer in a layout, are replaced whole: a row that changes the
    window of a layer would otherwise keep the mechanism of ``base`` there.

    Args:
        base: tables and keys.
        changes: tables and keys.
        table: the path of the table that both are.
    """
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        whole = table == ("model", "layout") or (*table, key) == ("model", "mechanism")
        result[key] = merged(base[key], value, (*table, key)) if both and not whole else value
    return result


def changed(overrides: Sequence[str]) -> dict[str, Any]:
    """Tables and keys that overrides set, as :func:`merged` takes them.

    Raises:
        UsageError: one that is not KEY=VALUE.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        _override(values, override)
    return values


def flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Keys with dots in place of tables in tables."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In which keys of :func:`flat` two recipes differ: "train.steps was 40 and is 150"."""

    def told(key: str, values: dict[str, Any]) -> str:
        return "unset" if values.get(key) is None else repr(values[key])

    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{key} was {told(key, before)} and is {told(key, now)}" for key in keys]


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {override!r} is not KEY=VALUE", "write it like --set train.steps=100")
    try:
        found = tomllib.loads(f"value = {text}")
        if len(found) > 1:
            raise UsageError(f"--set {override!r} sets more than one key", "give --set once for each key")
        value = found["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # so that --set model.mechanism=lssar needs no quotes inside quotes
    *tables, last = _segments(key.strip())
    if tables[:2] == ["model", "layout"] and len(tables) == 3:
        _check_layer(values, tables[2], override)
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise UsageError(
                f"--set {override!r}: {table!r} is a value, not a table", "write it like --set train.steps=100"
            )
    values[last] = value


def _segments(key: str) -> list[str]:
    """The parts of a key with dots, as TOML reads it, and with parts that TOML would want in quotes
    (`model.layout.0::2.window`).
    """
    try:
        values: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return key.split(".")
    found = []
    while isinstance(values, dict) and len(values) == 1:
        ((part, values),) = values.items()
        found.append(part)
    return found or [key]  # "#x" is a comment


def _check_layer(values: dict[str, Any], layer: str, override: str) -> None:
    """Refuse to set one entry of layers that the recipe describes under another key, or as a list:
    the rest of what they run would be lost.
    """
    model = values.get("model")
    layout = model.get("layout") if isinstance(model, dict) else None
    if not isinstance(layout, dict) or not layout or isinstance(layout.get(layer), dict):
        return
    whole = f"set all that these layers run: --set 'model.layout.{layer}={{ mechanism = \"lssa\", window = 64 }}'"
    if layer in layout:
        raise UsageError(f"--set {override!r}: model.layout.{layer} is a list of groups of heads", whole)
    keys = ", ".join(map(repr, layout))
    raise UsageError(
        f"--set {override!r}: model.layout has no {layer!r}, but {keys}", f"choose one of these, or {whole}"
    )


def _explain(mistake: Any, where: str) -> tuple[str, str]:
    """One of pydantic's errors: the key, the value that came and what is allowed; and what to
    do.
    """
    path = [str(part) for part in mistake["loc"]]
    key, fields = ".".join(path), _fields(path[:-1])
    if mistake["type"] == "extra_forbidden":
        there = {".".join([*path[:-1], field]) for field in fields}
        otherwise = f"the keys here are {', '.join(fields)}"
        if len(path) == 1:
            otherwise = _in_a_table(key) or f"{otherwise}; a key of a table has a dot, as train.learning_rate"
        return f"{where} has no key {key!r}", did_you_mean(key, there, otherwise)
    if mistake["type"] == "missing":
        about = fields[path[-1]].description if path[-1] in fields else None
        return f"{where} lacks {key!r}", f"set it{f': {about}' if about else ''}"
    message = mistake["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if mistake["type"] == "value_error":
        return ": ".join(filter(None, (where, key, message))), "correct it in the recipe or with --set"
    value = "VALUE"
    if mistake["type"].startswith("bool"):
        message, value = "must be true or false", "true"
    elif mistake["type"] in ("model_type", "dict_type"):  # pydantic names an internal class
        message, value = "must be a table", "'{ KEY = VALUE }'"
    return f"{where}: {key} = {mistake['input']!r} {message}", f"set it like --set {key}={value}"


def _in_a_table(key: str) -> str:
    """A remedy for a key without its table: "did you mean 'train.steps'?", or nothing."""
    inside = {field: f"{table}.{field}" for table in Recipe.model_fields for field in _fields([table])}
    near = get_close_matches(key, inside, n=1)
    return f"did you mean {inside[near[0]]!r}?" if near else ""


def _fields(path: list[str]) -> dict[str, Any]:
    model: Any = Recipe
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return {}
        tables = [part for part in get_args(field.annotation) if hasattr(part, "model_fields")]  # of `Table | None`
        model = tables[0] if tables else field.annotation
    return dict(getattr(model, "model_fields", {}))
