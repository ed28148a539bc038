"""Commands about several runs: demo, compare, study."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from softfocus.lab.cli.options import SEEDS, Json, console_beside, seeds_of, write_json


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Where runs and report go.",
            show_default="runs/demo; with --fast runs/demo-fast; with --seed N -N is added",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", metavar="NAME", help="Train these instead: mechanisms or recipes; may be repeated."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=SEEDS - 1, help="Of the training.", show_default="the recipe's: 0")
    ] = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", help="A minute, in runs/demo-fast, to see that everything works; the numbers mean nothing."
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again what is there.")] = False,
    json: Json = None,
) -> None:
    """Train Softmax, LSSA, LSSAR and two layouts of local and global layers side by side.

    Shows what each costs at the training length and who is best at 16x.

    Some 12 minutes on two CPU cores. Writes results.json, figure1.png and report.html. What is
    finished is kept: started again after a failure or Ctrl-C, it goes on.

    Several seeds: run it with --seed 0, 1, 2, 3, and then `softfocus compare runs/demo-?/demo-*`

    Example: `softfocus demo --model softmax --model "sharpened(lssa, 7)" --out runs/two`
    """
    from softfocus.lab.studies.demo import default_folder, run_demo

    folder = out or default_folder(seed, fast=fast)
    write_json(
        json, run_demo(folder, models=model, seed=seed, fast=fast, overwrite=overwrite, console=console_beside(json))
    )


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Evaluated run folders, or results.json of earlier comparisons."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the report goes.")] = Path(
        "runs/compare"
    ),
    axis: Annotated[
        Literal["multiple", "tokens"],
        typer.Option(help="Count lengths in multiples of the training length, or in tokens."),
    ] = "multiple",
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The report's heading.", show_default="Loss over length")
    ] = None,
    json: Json = None,
) -> None:
    """Who is better where, by how much, and whether that is more than noise: one table, one figure,
    one report.

    Runs of one recipe with different seeds are grouped, and shown as mean and spread.

    Example: `softfocus compare runs/demo-softmax runs/demo-lssar --out runs/two`
    """
    from softfocus.lab.report.compare import compare

    write_json(json, compare(runs, out, axis=axis, title=title, console=console_beside(json)))


def study(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study of `softfocus recipes`, or a .toml file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Where runs go.", show_default="runs/STUDY")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="LIST", help="0,1,2: train each row with these; the study's if left out.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="LIST", help="softmax,lssa: train these rows; all if left out.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of all rows; may be repeated."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="as many as there are cores")
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say what it will take, and stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again what is there.")] = False,
    json: Json = None,
) -> None:
    """Train and measure a table of runs, several seeds each, and compare them.

    A study is a TOML file: title, base (a recipe), seeds, and a table [rows.NAME] of changed keys
    for each row. What is finished is kept: started again after a failure or Ctrl-C, it goes on.

    Example: `softfocus study layouts --seeds 0,1,2 --jobs 2`
    """
    from softfocus.lab.studies.study import run_study

    wanted = None if seeds is None else seeds_of(seeds)
    folder = out or Path("runs") / Path(study).stem
    result = run_study(
        study,
        folder,
        seeds=wanted,
        rows=None if rows is None else [name.strip() for name in rows.split(",")],
        overrides=overrides or (),
        jobs=jobs,
        overwrite=overwrite,
        estimate_only=estimate,
        console=console_beside(json),
    )
    if result is not None:
        write_json(json, result)
