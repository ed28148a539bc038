"""The catalogue of mechanisms, for people: the command `softfocus mechanisms`."""

from typing import Any

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from softfocus.catalog import learned_parameters, mechanisms, named
from softfocus.lab.errors import UsageError


class Description(BaseModel):
    """A mechanism as the command shows it."""

    name: str
    equation: str
    source: str
    note: str
    learned: dict[str, float]
    algebra: dict[str, Any]


def everything() -> list[Description]:
    """Every entry of the catalogue, in its order."""
    return [details(name) for name in mechanisms()]


def details(name: str) -> Description:
    """One mechanism, or a combination of them.

    Raises:
        UsageError: an unknown name, with the nearest one.
    """
    try:
        mechanism = named(name)
    except ValueError as error:
        raise UsageError(str(error).rstrip("."), "`softfocus mechanisms` lists them all") from None
    entry = mechanisms().get(name)
    return Description(
        name=name,
        equation=str(mechanism),
        source=entry.source if entry else "a combination",
        note=entry.note if entry else "",
        learned=learned_parameters(mechanism),
        algebra=mechanism.to_dict(),
    )


def table(found: list[Description], *, detailed: bool = False) -> Table:
    """A line a mechanism, or when detailed a line a fact."""
    if detailed:
        grid = Table.grid(padding=(0, 2))
        for one in found:
            facts = {
                "name": one.name,
                "equation": one.equation,
                "source": one.source,
                "note": one.note,
                "learned": ", ".join(f"{key}, at first {value:g}" for key, value in one.learned.items()),
                **{key: str(value) for key, value in one.algebra.items()},
            }
            for key, value in facts.items():
                if value:
                    grid.add_row(Text(key, style="bold"), Text(value))
        return grid
    lines = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "equation", "source"):
        lines.add_column(heading, overflow="fold")
    for one in found:
        lines.add_row(Text(one.name), Text(one.equation), Text(one.source))
    return lines
