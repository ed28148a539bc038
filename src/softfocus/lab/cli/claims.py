"""Commands about the papers' claims: recipes, reproduce, report."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from softfocus.lab.cli.options import Json, console_beside, write_json


def recipes() -> None:
    """The shipped recipes and studies, and the papers' claims, a line each.

    Example: `softfocus recipes`
    """
    from softfocus.lab.claims import claim as claims
    from softfocus.lab.recipes import loading
    from softfocus.lab.studies import study as studies

    shipped = [(name, loading.load(name)) for name in loading.shipped()]
    compared = [(name, studies.load(name)[0]) for name in studies.shipped()]
    found = [(name, claims.load(name)) for name in claims.shipped()]
    width = 2 + max(len(name) for name, _ in (*shipped, *compared, *found))
    typer.echo("Recipes: softfocus train NAME")
    for name, recipe in shipped:
        typer.echo(f"  {name:{width}}{recipe.model.label}: {recipe.description}")
    typer.echo("Studies: softfocus study NAME")
    for name, study in compared:
        typer.echo(f"  {name:{width}}{study.title} ({len(study.rows)} rows, seeds {', '.join(map(str, study.seeds))})")
    typer.echo(f"Claims: softfocus reproduce NAME --scale {'|'.join(claims.SCALES)}")
    for name, claim in found:
        cannot_run = ": decided by tests" if claim.exact else ": not testable here"
        typer.echo(f"  {name:{width}}{claim.title} ({claim.source}){'' if claim.scales else cannot_run}")


def reproduce(
    claim: Annotated[str, typer.Argument(metavar="CLAIM", help="A name of `softfocus recipes`.")],
    scale: Annotated[
        Literal["toy", "small", "gpt2"],
        typer.Option(help="toy: minutes a run on a core; small: on one GPU; gpt2: the paper's own."),
    ] = "toy",
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Trainings of each row; under 3 there is no verdict.")
    ] = 3,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of all rows; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="Where runs go.", show_default="runs/claims-SCALE"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="as many as there are cores; 1 on a GPU")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes a run, one a GPU, under torchrun.")] = 1,
    earlier: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FOLDER", help="Take runs from its CLAIM/SCALE/results.json: docs/results/claims."
        ),
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say what it will take, and stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again what is there.")] = False,
    json: Json = None,
) -> None:
    """Run every row of a table or figure of a paper, and judge what the paper says of it.

    Says first what time and disk it will take. What is finished is kept: started again, it goes on.
    Claims that share rows share their runs, in one folder. Finished runs of further seeds, in the
    folder or in --from, are judged, too. Writes FOLDER/results: results.json, a figure, a page with
    the verdict.

    Example: `softfocus reproduce softplus-table-1 --scale toy --seeds 3`
    """
    from softfocus.lab.claims.reproduce import reproduce

    result = reproduce(
        claim,
        out or Path("runs") / f"claims-{scale}",
        scale=scale,
        seeds=seeds,
        overrides=overrides or (),
        jobs=jobs,
        processes=processes,
        earlier=earlier,
        overwrite=overwrite,
        estimate_only=estimate,
        console=console_beside(json),
    )
    if result is not None:
        write_json(json, result)


def report(
    folder: Annotated[Path, typer.Argument(help="Holds CLAIM/SCALE/results.json of `softfocus reproduce`.")] = Path(
        "docs/results/claims"
    ),
) -> None:
    """Write the page and the figures of each claim, and the ledger, from the results in a folder.

    Example: `softfocus report runs/claims-toy/results`
    """
    from softfocus.lab.claims import claim as claims
    from softfocus.lab.claims.ledger import report
    from softfocus.lab.claims.results import RESULTS
    from softfocus.lab.errors import LabError

    if folder.is_file():
        raise LabError(
            f"{folder} is a file, and report is for claims: it takes a folder with CLAIM/SCALE/results.json",
            "name that folder; `softfocus compare` reads the results.json of a comparison",
        )
    if not folder.is_dir():
        raise LabError(f"there is no folder {folder}", "name one that holds CLAIM/SCALE/results.json")
    if not any((folder / name / scale / RESULTS).exists() for name in claims.shipped() for scale in claims.SCALES):
        raise LabError(f"{folder} holds no CLAIM/SCALE/results.json", "name a folder that `softfocus reproduce` wrote")
    written = report(folder)
    typer.echo(f"{written[0]}: the ledger, and {len(written) - 1} pages beside it")
