"""Run a claim: train what is left of its rows, keep what came out, and judge it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from softfocus.lab.claims import claim as claims
from softfocus.lab.claims import earlier as earlier_runs
from softfocus.lab.claims.claim import Claim, Scale
from softfocus.lab.claims.ledger import report
from softfocus.lab.claims.page import verdict_lines
from softfocus.lab.claims.results import RESULTS, Results, Run, collect
from softfocus.lab.errors import LabError
from softfocus.lab.progress import say, telling
from softfocus.lab.recipes.data import DataTable
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.disk import write_atomically
from softfocus.lab.run_folder.files import load_run
from softfocus.lab.run_folder.results import json_text
from softfocus.lab.studies.jobs import missing_lines, plan_jobs, refuse_failed
from softfocus.lab.studies.study import train_all

PUBLISHED = "results"
"""In the folder of the runs: what `softfocus report` reads, NAME/SCALE/results.json and figure.png,
and the pages.
"""
_OVER = ("finished", "diverged")
"""Statuses of runs that are not trained again."""


def reproduce(
    name: str,
    folder: Path,
    *,
    scale: Scale = "toy",
    seeds: int = 3,
    overrides: Sequence[str] = (),
    jobs: int | None = None,
    processes: int = 1,
    earlier: Path | None = None,
    overwrite: bool = False,
    estimate_only: bool = False,
    console: Console | None = None,
) -> Results | None:
    """Run every row of a claim at a scale, and judge its statements.

    Rows that claims share have the same name, so in one folder they are trained once. Finished runs
    of further seeds, in the folder or in `earlier`, are judged, too, where every row has them.

    Args:
        name: of the claim.
        folder: gets a run folder for each row and seed, logs, and `results`.
        scale: which recipe the rows change.
        seeds: so many of each row are trained, from 0 on.
        overrides: `"data.source=texts"`: keys that all rows change.
        jobs: runs at a time; by default as many as there are cores, or one on a GPU.
        processes: of each run, a device each, under torchrun.
        earlier: holds NAME/SCALE/results.json; the runs in it are taken as they are, and not
            trained.
        overwrite: train again what is there.
        estimate_only: say what it will take and stop.
        console: where to draw; stdout by default.

    Returns:
        What came out; None for an estimate.

    Raises:
        UsageError: no such claim, one that cannot be run at this scale, or an override that makes
            no recipe or changes a key in which the rows differ.
        LabError: what memory or disk cannot hold, a run that failed (after the others have been
            judged), a folder without earlier runs of the claim, earlier runs of other recipes or
            data, or Ctrl-C.
    """
    console = console or Console()
    claim = claims.load(name)
    with telling(console, claim.title) as tell:
        tell("reading the recipes")
        plan = claims.recipes(claim, scale, range(seeds), overrides)
    there = earlier_runs.runs(claim, scale, plan, earlier) if earlier is not None else {}
    if earlier is not None:
        taken = f"{claim.title}: {len(there)} of {len(plan)} runs are taken from {earlier}"
        say(console, taken)
    found = train_all(
        claim.title,
        [recipe for recipe in plan if recipe.name not in there],
        folder,
        jobs=jobs,
        overwrite=overwrite,
        estimate_only=estimate_only,
        processes=processes,
        remedies=_remedies(claim, scale, processes),
        console=console,
    )
    if estimate_only:
        return None
    read = {job.recipe.data: load_run(job.folder, complete=False).corpus_key for job in found if job.status in _OVER}
    read |= {recipe.data: there[recipe.name].info.corpus_key for recipe in plan if recipe.name in there}
    further, of_earlier = _further(claim, scale, seeds, overrides, folder, earlier, read, console)
    if more := list(dict.fromkeys(str(recipe.train.seed) for recipe in further)):
        places = " or ".join(str(place) for place in (folder, earlier) if place is not None)
        told = f"{claim.title}: the runs of {'seeds' if more[1:] else 'seed'} {', '.join(more)} in {places}"
        say(console, f"{told} are judged, too")
    plan += further
    there |= of_earlier
    over = [job.recipe for job in found if job.status in _OVER]
    over += [recipe for recipe in further if recipe.name not in there]
    failed = [job for job in found if job.status == "failed"]
    results = collect(claim, scale, over, folder, missing_lines(failed), overrides)
    known = there | {f"{run.row}-s{run.info.seed}": run for run in results.runs}
    results = results.model_copy(update={"runs": [known[one.name] for one in plan if one.name in known]})
    place = folder / PUBLISHED / name / scale
    write_atomically(place / RESULTS, json_text(results))
    report(folder / PUBLISHED)
    for line in verdict_lines(claim, results):
        say(console, line, wrap=True)
    say(console, f"  {folder / PUBLISHED / f'{name}.md'}")
    refuse_failed(found, overwrite=overwrite)
    return results


def _further(
    claim: Claim,
    scale: Scale,
    seeds: int,
    overrides: Sequence[str],
    folder: Path,
    earlier: Path | None,
    read: dict[DataTable, str],
    console: Console,
) -> tuple[list[Recipe], dict[str, Run]]:
    """Of seeds beyond those asked for, the runs that earlier calls left, and those of earlier
    results: where all rows have finished or diverged, so that all have the same seeds. Says why a
    seed's runs cannot be taken, as where one of the earlier results is of another recipe.
    """
    names = [path.name for path in folder.glob("*-s*")]
    if earlier is not None:
        names += earlier_runs.names(claim, scale, earlier)
    named = [name.rpartition("-s") for name in names]
    numbers = {int(seed) for row, _, seed in named if row in claim.rows and seed.isdecimal()}
    found: list[Recipe] = []
    taken: dict[str, Run] = {}
    for seed in sorted(number for number in numbers if number >= seeds):
        recipes = claims.recipes(claim, scale, [seed], overrides)
        try:
            there = earlier_runs.runs(claim, scale, recipes, earlier) if earlier is not None else {}
            left = [recipe for recipe in recipes if recipe.name not in there]
            jobs = plan_jobs(folder, left, [recipe.name for recipe in left])
            over = [job for job in jobs if job.status in _OVER]
            _refuse_other_data([job.folder for job in over], [job.recipe for job in over], read)
        except LabError as error:  # of another recipe or other data, or damaged
            say(console, f"{claim.title}: the runs of seed {seed} are left out: {error}")
            continue
        if all(job.status in _OVER for job in jobs):
            found += recipes
            taken |= there
    return found, taken


def _refuse_other_data(folders: Sequence[Path], recipes: Sequence[Recipe], read: dict[DataTable, str]) -> None:
    """The runs that are judged together read the same data.

    Args:
        folders: of finished runs.
        recipes: theirs.
        read: what the others have read, by what their recipes say of it.

    Raises:
        LabError: one has read something else.
    """
    for folder, recipe in zip(folders, recipes, strict=True):
        before, others = load_run(folder, complete=False).corpus_key, read.get(recipe.data, "")
        if "" not in (before, others) and before != others:
            what = f"{folder} was trained on {before}, and the runs of the first seeds on {others}"
            raise LabError(what, "delete its folder, and train it again with more --seeds")


def _remedies(claim: Claim, scale: Scale, processes: int) -> list[str]:
    """What to change where a run does not fit into memory. The recipes are the claim's."""
    import torch

    scales = claim.scales[: claim.scales.index(scale)]
    found = [f"choose --scale {' or '.join(scales)}"] if scales else []
    more = torch.cuda.is_available() and processes < torch.cuda.device_count()
    return [*found, "take more processes a run"] if more else found
