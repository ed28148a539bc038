"""The command `softfocus bench`: its options, and reading them. What measures is imported when it
runs.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softfocus.lab.cli.options import Json, console_beside, write_json
from softfocus.lab.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from softfocus.lab.bench.cells import What


QUICK: dict[str, Any] = {"lengths": "256", "mechanisms": "lssar", "seconds": 0.5}
FULL: dict[str, Any] = {"lengths": "1k, 4k, 16k", "mechanisms": "lssar, lssa, softmax, laser", "seconds": 20.0}
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"lengths": FULL["lengths"], "dtype": "float32", "heads": 4, "tokens": None},
    "cuda": {"lengths": "1k, 2k, 4k, 8k, 16k, 32k", "dtype": "bfloat16", "heads": 16, "tokens": "32k"},
}
"""What else is measured, unless it is said: a GPU is busy with no less."""


def _by_device(name: str) -> str:
    return "; ".join(f"{shape[name] or 'none'} on {device}" for device, shape in SHAPES.items())


def bench(
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where everything runs.")] = "cpu",
    lengths: Annotated[
        str | None, typer.Option(metavar="LIST", help="1k,4k,16k tokens.", show_default=_by_device("lengths"))
    ] = None,
    mechanisms: Annotated[
        str | None, typer.Option(metavar="LIST", help="Names or combinations.", show_default=FULL["mechanisms"])
    ] = None,
    what: Annotated[
        str, typer.Option(metavar="LIST", help="backward is forward and backward; decode is one query.")
    ] = "forward, backward, decode",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of query, key and value.", show_default=_by_device("dtype")),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, metavar="B", help="Sequences.", show_default="1")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="B*L",
            help="Batch times length, at every length; decoding keeps its batch.",
            show_default=_by_device("tokens"),
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, metavar="H", help="Heads.", show_default=_by_device("heads"))
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, metavar="D", help="Dimension of a head.")] = 64,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads on the CPU.", show_default="torch's own choice")
    ] = None,
    subjects: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Who is measured, beside sdpa: softfocus, tiled, flex ...", show_default="all"
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Timing budget of a cell.", show_default=str(FULL["seconds"]))
    ] = None,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Also peak memory, a process each.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            show_default="runs/bench-DEVICE, or runs/bench-DEVICE-quick",
            help="For results.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute, to see that everything works; the numbers mean nothing.")
    ] = False,
    json: Json = None,
) -> None:
    """Time attention backends beside torch's own softmax, FlexAttention and the formulas by hand;
    measure their memory.

    In each cell (mechanism, direction, length) all take turns in one process, and every ratio is to
    the time of F.scaled_dot_product_attention in the same round. What softfocus computes is held
    against the float64 reference first: where that fails there is no ratio, and the exit code is 1.
    Writes results.json and figure.png.

    Example: `softfocus bench --device cpu --lengths 1k,4k --mechanisms "lssar,sharpened(softmax,
    3)"`
    """
    default = {**SHAPES[device], **(QUICK if quick else {**FULL, "lengths": SHAPES[device]["lengths"]})}
    if batch is not None and tokens is not None:
        raise UsageError("--batch and --tokens exclude each other", "the batch follows from --tokens and the length")
    wanted = _lengths(lengths or default["lengths"])
    together = (tokens or default["tokens"]) if batch is None else None
    whats = _whats(what)
    names = tuple(_split(mechanisms or default["mechanisms"]))
    if not names:
        raise UsageError("--mechanisms names none", "write it like --mechanisms lssar,softmax")
    from softfocus.lab.bench.run import Plan, run, verdict  # imports torch: a typo above is answered before

    plan = Plan(
        device=device,
        mechanisms=names,
        lengths=tuple(wanted),
        whats=whats,
        dtype=dtype or default["dtype"],
        batch=batch or 1,
        tokens=_one(together) if together else None,
        heads=heads or default["heads"],
        head_dim=head_dim,
        threads=threads,
        subjects=None if subjects is None else tuple(_split(subjects)),
        seconds=default["seconds"] if seconds is None else seconds,
        memory=memory,
    )
    folder = out or Path("runs") / (f"bench-{device}-quick" if quick else f"bench-{device}")
    found = run(plan, folder, console_beside(json))
    write_json(json, found)
    verdict(found, folder)


def _one(text: str) -> int:
    if "," in text:
        raise UsageError(f"--tokens takes one number, not {text!r}", "write --tokens like 32k")
    return _lengths(text, "--tokens")[0]


def _lengths(text: str, option: str = "--lengths") -> list[int]:
    from softfocus.lab.recipes.lengths import parse

    for part in text.split(","):
        if not re.fullmatch(r"\s*\d+(\.\d+)?\s*[kK]?\s*", part):  # no "2x": there is no training length here
            example = "32k" if option == "--tokens" else "1k,4k,16k"
            raise UsageError(f"{part.strip()!r} is not a length", f"write {option} like {example}")
    return parse(text, 1, option)


def _whats(text: str) -> "tuple[What, ...]":
    known: tuple[What, ...] = ("forward", "backward", "decode")
    for part in (words := _split(text)):
        if part not in known:
            remedy = did_you_mean(part, known, f"choose from {', '.join(known)}")
            raise UsageError(f"--what: {part!r} is not known", remedy)
    if not words:
        raise UsageError("--what names nothing", f"choose from {', '.join(known)}")
    return tuple(one for one in known if one in words)


def _split(text: str) -> list[str]:
    """The parts between the commas that stand outside parentheses, each once."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))
