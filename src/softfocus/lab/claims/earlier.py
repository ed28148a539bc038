"""Runs of an earlier results.json: whether today's recipe is the same, and the data, so that they
can be taken in place of trainings.
"""

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from softfocus.lab.claims import claim as claims
from softfocus.lab.claims import results as outcomes
from softfocus.lab.claims.claim import Claim, Scale, recipes
from softfocus.lab.claims.results import RESULTS, Results, Run
from softfocus.lab.errors import LabError
from softfocus.lab.recipes.loading import differences, flat
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.provenance import without_folders


def runs(claim: Claim, scale: Scale, plan: Sequence[Recipe], folder: Path) -> dict[str, Run]:
    """Those of a plan's runs that stand in FOLDER/CLAIM/SCALE/results.json already, by their names.
    Rows that the claim's own results lack, or have of another recipe, are looked for in those of
    claims that share them.

    Args:
        claim: whose rows they are.
        scale: of the recipes.
        plan: named "ROW-sSEED".
        folder: as `softfocus report` reads it.

    Raises:
        LabError: no such folder or results, or some that another recipe or other data gave.
    """
    there = _published(claim, scale, folder, plan)
    found, keys = {}, {}
    for recipe in plan:
        if recipe.name not in there:
            continue
        place, results, run = there[recipe.name]
        if differing := _differing(run, recipe):
            what = f"the run {recipe.name} of {place} has another recipe: {', '.join(differing)}"
            same = "".join(f" --set {shlex.quote(override)}" for override in results.overrides)
            given = f"give{same}, which these have (without names of folders), or " if same else ""
            raise LabError(what, f"{given}leave --from out, to train every run again")
        data = recipe.data.model_dump_json()
        if data not in keys:
            from softfocus.lab.data import of_recipe

            keys[data] = of_recipe.key(recipe)
        if run.info.corpus_key != keys[data]:
            what = f"the run {recipe.name} of {place} was trained on {run.info.corpus_key}, and here is {keys[data]}"
            raise LabError(f"{what}: another corpus or tokenizer", "leave --from out, to train every run again")
        found[recipe.name] = run.model_copy(update=_not_asked_for(run, recipe))
    return found


def _not_asked_for(run: Run, recipe: Recipe) -> dict[str, Any]:
    """What another claim had measured of a run, without its value."""
    more = set(run.also) - set(recipe.evaluate.also)
    return {word: field.get_default() for word, field in Run.model_fields.items() if word in more}


def names(claim: Claim, scale: Scale, folder: Path) -> list[str]:
    """Of all runs that :func:`runs` can find: "ROW-sSEED"."""
    return list(_published(claim, scale, folder))


def _published(
    claim: Claim, scale: Scale, folder: Path, plan: Sequence[Recipe] = ()
) -> dict[str, tuple[Path, Results, Run]]:
    """By "ROW-sSEED": the file, what it holds, and the run. A row is looked for until it is found
    with the seeds and the recipe of the plan, in the claim's own results first. Runs of another
    claim that only lack a measurement are not taken.
    """
    remedy = "name one that holds CLAIM/SCALE/results.json, as docs/results/claims does, or leave --from out"
    if not folder.is_dir():
        raise LabError(f"--from: there is no folder {folder}", remedy)
    found: dict[str, tuple[Path, Results, Run]] = {}
    wanted = {recipe.name: recipe for recipe in plan}
    of_row = {row: {name for name in wanted if name.rpartition("-s")[0] == row} for row in claim.rows}
    left, alike = set(claim.rows), set[str]()
    others = [claims.load(name) for name in claims.shipped() if name != claim.name]
    for one in (claim, *others):
        place = folder / one.name / scale / RESULTS
        shared = left & one.rows.keys()
        if shared and place.exists():
            results = outcomes.read(place)
            of_rows = [run for run in results.runs if run.row in shared]
            for run in of_rows:
                name = f"{run.row}-s{run.info.seed}"
                differing = _differing(run, wanted[name]) if name in wanted else []
                if one is not claim and differing and all(line.startswith("evaluate.") for line in differing):
                    continue
                same = not differing
                if name not in found or (same and name not in alike):
                    found[name] = place, results, run
                if same:
                    alike.add(name)
            left -= {run.row for run in of_rows if of_row[run.row] <= alike}
    if not found:
        what = f"{claim.name}/{scale}/{RESULTS}, and no results of a claim that shares its rows"
        raise LabError(f"--from: {folder} holds no {what}", remedy)
    return found


def changes(claim: Claim, scale: Scale, results: Results) -> list[str]:
    """In which keys of their recipes any runs of a claim differ from what would be trained today.

    Keys of the evaluation do not count: what the statements need is in the results, or they have
    no verdict. Nothing changed where the claim cannot be run at the scale any more.
    """
    if scale not in claim.scales:
        return []
    seeds = sorted({run.info.seed for run in results.runs})
    try:
        now = {recipe.name: recipe for recipe in recipes(claim, scale, seeds, results.overrides)}
    except LabError as error:  # of a key that the recipe has no longer, or that rows set now
        return [error.what]
    found: dict[str, None] = {}
    for run in results.runs:
        recipe = now.get(f"{run.row}-s{run.info.seed}")
        lines = ["the row is no longer there"] if recipe is None else _differing(run, recipe)
        found |= dict.fromkeys(line for line in lines if not line.startswith("evaluate."))
    return list(found)


def _differing(run: Run, recipe: Recipe) -> list[str]:
    """In which keys a run's recipe and today's differ, names, descriptions and folders left out. Of
    what is measured beside losses the run itself decides: it may hold more than is asked for, and
    its recipe may tell of what another claim wanted. A run that diverged has nothing to measure.
    """
    now = flat(_compared(without_folders(recipe.to_toml())))
    try:
        before = flat(_compared(run.recipe))
    except (tomllib.TOMLDecodeError, ValidationError):
        return ["it is of another version"]
    rows = run.evaluation.rows if run.evaluation else []
    held: dict[str, set[Any]] = {
        "evaluate.also": set(run.also),
        "evaluate.mechanisms": {row.setting.mechanism for row in rows},
    }
    for key, words in held.items():
        wanted = set(now.get(key) or ())
        before[key] = now.get(key) if run.evaluation is None or wanted <= words else sorted(wanted & words)
    return differences(before, now)


def _compared(text: str) -> dict[str, Any]:
    return Recipe.model_validate(tomllib.loads(text)).model_dump(exclude={"name", "description"}, exclude_none=True)
