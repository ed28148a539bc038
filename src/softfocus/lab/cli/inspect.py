"""The command `softfocus inspect`: its options, and reading them. What looks inside is imported
when it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from softfocus.lab.cli.options import BatchTokens, Json, Quiet, console_beside, write_json
from softfocus.lab.errors import UsageError
from softfocus.lab.inspect.results import TOKENS


def inspect(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, side by side on one page.")],
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read this text.", show_default="the validation text of each run"),
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="LIST", help="1k,16k tokens, or 1x,16x the training length.")
    ] = "1x,16x",
    layers: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Draw maps of these layers, from 0.", show_default="four, evenly spaced"),
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="LIST", help="And of these heads, from 0.", show_default="the first two")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to read at each length.")] = TOKENS,
    batch_tokens: BatchTokens = 4096,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Where the page goes.", show_default="RUN/inspect, or runs/inspect"
        ),
    ] = None,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Look inside runs: attention maps, exact zeros, entropy, and how far attention reaches, by
    layer and length.

    Writes inspect.html (one self-contained page), inspect.json, maps.png and measures.png.

    Example: `softfocus inspect runs/demo-softmax runs/demo-lssar --out runs/look`
    """
    from softfocus.lab.progress import Display
    from softfocus.lab.recipes.lengths import parse
    from softfocus.lab.run_folder.files import INSPECTION, load_run

    wanted = [parse(lengths, load_run(run).train_length) for run in runs]
    shown = {"layers": _numbers("--layers", layers), "heads": _numbers("--heads", heads)}
    from softfocus.lab.inspect.report import say_replaced, show, write
    from softfocus.lab.inspect.results import RESULTS
    from softfocus.lab.inspect.run import inspect

    folder = out or (runs[0] / INSPECTION if len(runs) == 1 else Path("runs/inspect"))
    found = []
    try:
        with Display("tokens", quiet=quiet) as display:
            for run, its in zip(runs, wanted, strict=True):
                one = inspect(
                    run, its, text=text, **shown, tokens=tokens, batch_tokens=batch_tokens, progress=display
                )  # fmt: skip
                found.append(one)
    except BaseException:  # a run that fails takes none before it with it, and no earlier page
        if found and not (folder / RESULTS).exists():
            show(*write(found, folder), console_beside(json))
        raise
    say_replaced(folder, [one for one, _ in found], console_beside(json))
    result, paths = write(found, folder)
    write_json(json, result)
    show(result, paths, console_beside(json))


def _numbers(option: str, text: str | None) -> list[int] | None:
    """ "0,3" as numbers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a list of numbers", f"write {option} like 0,3") from None
