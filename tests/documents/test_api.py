"""docs/api.md: it lists the public names with their arguments and first sentences, and all
mechanisms.
"""

import inspect
import re
from collections.abc import Callable

import pytest

import softfocus
import softfocus.hf
import softfocus.hf.t6
import softfocus.nn
import softfocus.testing

from .committed import ROOT
from .tables import table, tables_of

PAGE = (ROOT / "docs/api.md").read_text()
MODULES = {
    "softfocus": softfocus, "softfocus_hf": softfocus.hf, "softfocus_nn": softfocus.nn,
    "softfocus_testing": softfocus.testing,
}  # fmt: skip


def called(name: str, value: Callable[..., object]) -> str:
    """The name with its arguments and defaults, without types."""
    signature = inspect.signature(value)
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=parameters, return_annotation=signature.empty)}"


def first_sentence(value: object) -> str:
    """Of a docstring, without Sphinx's marks."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    found = re.match(r".*?(?<!eq)[.:](?=\s|$)", text)
    return (found[0] if found else text).rstrip(":").rstrip(".")


def names_of(module: str) -> str:
    own = MODULES[module]
    rows = []
    for name in own.__all__:
        value = getattr(own, name)
        if name.startswith("__") or not callable(value):
            continue
        rows.append([f"`{called(name, value)}`", first_sentence(value)])
    return table(["name", "what it is"], rows)


def mechanisms() -> str:
    rows = []
    for name, entry in softfocus.mechanisms().items():
        learned = ", ".join(f"`{argument}`, from {start:g}" for argument, start in entry.learned)
        rows.append([f"`{name}`", f"`{entry.equation}`", entry.source, learned, entry.note])
    return table(["name", "equation", "source", "learned by each head", "note"], rows)


TABLES = {name: (lambda name=name: names_of(name)) for name in MODULES} | {"mechanisms": mechanisms}


def test_every_public_name_is_on_the_page():
    for module in (*MODULES.values(), softfocus.hf.t6):
        assert not [name for name in set(module.__all__) - {"__version__"} if f"`{name}" not in PAGE]


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_what_the_code_says(name):
    assert tables_of(PAGE)[name] == TABLES[name](), f"docs/api.md should show:\n{TABLES[name]()}"
