"""Studies: a table of runs, each row with several seeds, trained a few at a time and compared."""

import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator
from rich.console import Console

from softfocus.lab.errors import LabError, UsageError, did_you_mean, first_mistake
from softfocus.lab.progress import say, telling
from softfocus.lab.recipes.data import TRAINED_ON, Table
from softfocus.lab.recipes.loading import LAB, derive, merged, shipped_in
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.report.compare import Comparison, compare
from softfocus.lab.report.points import without_seed
from softfocus.lab.run_folder.disk import check_room, size_text, writing
from softfocus.lab.run_folder.owner import refuse_in_use
from softfocus.lab.run_folder.provenance import cores
from softfocus.lab.studies import pool
from softfocus.lab.studies.estimate import estimate
from softfocus.lab.studies.jobs import LOGS, Job, missing_lines, plan_jobs, refuse_failed, refuse_other_data
from softfocus.lab.train.memory import SMALLER, check_memory, check_processes


class Study(Table):
    """A TOML file: what the rows have in common, and in what they differ."""

    title: str
    base: str = Field(default="demo", description="the recipe that every row changes that names no base of its own")
    seeds: list[int] = Field(default=[0], min_length=1)
    common: dict[str, Any] = Field(default={}, description="keys of the recipe that every row changes")
    rows: dict[str, dict[str, Any]] = Field(
        min_length=1, description="name -> keys that it changes of the recipe, or of the row, that is its base"
    )

    @model_validator(mode="after")
    def _nothing_is_dropped(self) -> Self:
        """What the name and the seed of a run, or the base's tables, would silently replace."""
        tables = {"common": self.common} | {f"rows.{name}": row for name, row in self.rows.items()}
        for where, keys in tables.items():
            if where == "common" and "base" in keys:
                raise ValueError("common.base: the recipe that all rows change is the study's own base")
            train = keys.get("train")
            if not isinstance(keys.get("base", ""), str):
                raise ValueError(f"{where}.base is {keys['base']!r}, and must be the name of a recipe or row")
            if "name" in keys:
                raise ValueError(f"{where}.name: a run has the name of its row and its seed")
            if isinstance(train, dict) and "seed" in train:
                raise ValueError(f"{where}.train.seed: every row is trained with the study's seeds")
            for table in ("model", "data", "train", "evaluate"):
                if table in keys and not isinstance(keys[table], dict):
                    raise ValueError(f"{where}.{table} is {keys[table]!r}, and must be a table")
        return self


def shipped() -> list[str]:
    """The names of the studies that come with softfocus."""
    return shipped_in("studies")


def load(name_or_path: str) -> tuple[Study, Path | None]:
    """Read a study, and the folder in which its bases are looked for first.

    Raises:
        LabError: no such file, or one that is not a study.
    """
    path = Path(name_or_path)
    file = path if path.suffix == ".toml" else LAB / "studies" / f"{name_or_path}.toml"
    known = "`softfocus recipes` lists those that are shipped; any other is the path of a .toml file"
    try:
        return Study.model_validate(tomllib.loads(file.read_text(encoding="utf-8"))), (
            path.parent if path.suffix == ".toml" else None
        )
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        if path.suffix == ".toml":
            remedy = "check the path; `softfocus recipes` lists the studies that are shipped"
            what = "is a folder, no study file" if path.is_dir() else "is not there; expected a study file"
            raise LabError(f"{path} {what}", remedy) from None
        raise LabError(f"there is no study {name_or_path}", did_you_mean(name_or_path, shipped(), known)) from None
    except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
        raise LabError(f"study {name_or_path} cannot be read: {error}", "it must be TOML in UTF-8") from None
    except ValidationError as error:
        raise LabError(
            f"study {name_or_path}: {first_mistake(error)}",
            "a study has title, base, seeds, [common] and [rows.NAME] tables, which hold keys of recipes",
        ) from None


def recipes(
    study: Study,
    near: Path | None = None,
    seeds: Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
) -> list[Recipe]:
    """A recipe for each row and seed: all rows of a seed before the next seed.

    Raises:
        UsageError: a row that the study has not, or an override that cannot be read or that changes
            a name or a seed.
        LabError: a row that makes no recipe, or two rows that are the same training.
    """
    if unknown := [name for name in rows or () if name not in study.rows]:
        known = f"the study's rows are {', '.join(study.rows)}"
        raise UsageError(f"--rows: there is no row {unknown[0]!r}", did_you_mean(unknown[0], study.rows, known))
    found: list[Recipe] = []
    for seed in seeds or study.seeds:
        of_seed: dict[object, Recipe] = {}
        for name in study.rows:
            if rows is not None and name not in rows:
                continue
            base, own = _base_and_changes(study, name)
            changes = merged(merged(study.common, own), {"train": {"seed": seed}})
            try:
                recipe = derive(base, f"{name}-s{seed}", changes, near, overrides)
            except LabError as error:
                remedy = error.remedy.replace("correct it in the recipe", "correct it in the study")
                raise type(error)(f"row {name} of the study: {error.what}", remedy) from None
            if (recipe.name, recipe.train.seed) != (f"{name}-s{seed}", seed):
                what = "--set changes the name or the seed, which each run has of its own"
                raise UsageError(what, "choose seeds with --seeds")
            # Reports would take such runs for further seeds of one row
            if other := of_seed.get(key := without_seed(recipe.to_toml())):
                what = f"{other.name} and {recipe.name} are the same training"
                remedy = "leave one of the rows out with --rows, or change how they train"
                raise LabError(what, f"{remedy}; one run can have all that is measured (evaluate.*)")
            of_seed[key] = recipe
        found += of_seed.values()
    if len(kinds := {recipe.data.kind for recipe in found}) > 1:
        what = " and some on ".join(TRAINED_ON[kind] for kind in sorted(kinds, reverse=True))
        raise LabError(f"some rows are trained on {what}", "make a study of each")
    return found


def _base_and_changes(study: Study, name: str, seen: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """The recipe that a row changes, and the keys that it changes, those of a row that it is based
    on included.

    Raises:
        LabError: a row is based on itself, through others.
    """
    if name in seen:
        loop = " -> ".join([*seen[seen.index(name) :], name])
        raise LabError(f"row {name} is based on itself: {loop}", "change the base of one of them")
    row = dict(study.rows[name])
    if "base" not in row:
        return study.base, row
    if (own := row.pop("base")) == name or own not in study.rows:
        known = [*study.rows, *shipped_in("recipes")]
        if own not in known and not own.endswith(".toml"):
            remedy = did_you_mean(own, known, "a base is a row, a shipped recipe or a .toml file")
            raise LabError(f"row {name} of the study: there is no row or recipe {own!r}", remedy)
        return own, row
    base, changes = _base_and_changes(study, own, (*seen, name))
    return base, merged(changes, row)


def run_study(
    name_or_path: str,
    folder: Path,
    *,
    seeds: Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    jobs: int | None = None,
    overwrite: bool = False,
    estimate_only: bool = False,
    console: Console | None = None,
) -> Comparison | None:
    """Train and measure every run of a study, and compare them. What is finished is kept, and a
    killed run goes on.

    Args:
        name_or_path: a shipped study, or a TOML file.
        folder: gets a run folder for each row and seed, logs, and the comparison.
        seeds: take these, not the study's.
        rows: of the study's rows these alone.
        overrides: `"train.learning_rate=2e-3"`: keys that all rows change.
        jobs: runs at a time, which share the cores; as many as there are cores by default.
        overwrite: train again what is there.
        estimate_only: say what it will take and stop.
        console: where to draw; stdout by default.

    Returns:
        The comparison of all that finished; None for an estimate.

    Raises:
        UsageError: as :func:`recipes`.
        LabError: a study that cannot be read, a row that makes no recipe, a run that failed (after
            the comparison of the others has been written), runs that all diverged, or Ctrl-C.
    """
    console = console or Console()
    study, near = load(name_or_path)
    with telling(console, study.title) as tell:
        tell("reading the recipes")
        plan = recipes(study, near, seeds, rows, overrides)
    found = train_all(
        study.title, plan, folder, jobs=jobs, overwrite=overwrite, estimate_only=estimate_only, console=console
    )
    if estimate_only:
        return None
    result = None
    if any(job.status == "finished" for job in found):
        over = [job.folder for job in found if job.status in ("finished", "diverged")]
        remarks = [*missing_lines(found), *(f"All rows were trained with --set {one}." for one in overrides)]
        result = compare(over, folder, title=study.title, remarks=remarks, console=console)
    refuse_failed(found, overwrite=overwrite)
    if result is None:
        lost = "; ".join(f"{job.label}: {job.error}" for job in found)
        raise LabError(f"every run diverged, so that there is nothing to compare: {lost}", "look into their logs")
    return result


def train_all(
    title: str,
    plan: Sequence[Recipe],
    folder: Path,
    *,
    jobs: int | None,
    console: Console,
    labels: Sequence[str] | None = None,
    overwrite: bool = False,
    estimate_only: bool = False,
    processes: int = 1,
    remedies: Sequence[str] = (SMALLER,),
) -> list[Job]:
    """Say what runs will take, then train and measure those that are not finished.

    Args:
        title: what they are together.
        plan: their recipes, each with a name of its own.
        folder: gets a run folder of each name.
        jobs: runs at a time; by default as many as there are cores, or one on a GPU.
        console: where to draw.
        labels: what the screen calls them; their names by default.
        overwrite: train again what is there.
        estimate_only: say what it will take and stop.
        processes: of each run, a device each, under torchrun.
        remedies: what the caller can change where a run does not fit into memory.

    Returns:
        A job for each recipe.

    Raises:
        LabError: data that cannot be found, what memory or disk cannot hold, tasks without lm_eval,
            a folder with another run in it or in use by another process, or a signal to stop. A run
            that fails raises nothing here.
        UsageError: more jobs than cores or, but for an estimate, more processes than GPUs.
    """
    if jobs is not None and jobs > cores():
        raise UsageError(f"--jobs: {jobs} at a time on {cores()} cores", "each run needs a core of its own")
    if not estimate_only:
        check_processes(processes)
        refuse_in_use(folder)
    found = plan_jobs(folder, plan, labels or [recipe.name for recipe in plan], overwrite=overwrite)
    left = [job for job in found if job.status == "waiting"]
    # They share the cores. As many threads for the last run as for the others: sums round alike
    workers = jobs or _default_jobs()
    with telling(console, title) as tell:
        if left and len(left) < len(found):
            tell("looking whether the data is as before")
        refuse_other_data(found)
        copied = _copied(left)
        if left:
            tell("checking whether memory holds the runs")
        training = [job for job in left if not job.trained or "classification" in job.recipe.evaluate.also]
        check_memory([job.recipe for job in training], workers, processes, remedies)
        if any("tasks" in job.recipe.evaluate.also for job in left):
            from softfocus.lab.evaluate import tasks

            tasks.require()
        if copied:
            where = f"{size_text(copied)} of shards are copied into the token cache first"
            say(console, f"{title}: {where}", wrap=True)
        for (row, replaced), count in Counter((job.row, job.replaced) for job in left if job.replaced).items():
            runs = f" ({count} runs)" if count > 1 else ""
            say(console, f"{row}{runs}: {replaced}, and will be replaced", wrap=True)
        # A layout may be another one than its writer thinks
        kinds = {job.row: job.recipe.model for job in left}
        for row, model in kinds.items():
            if model.layout:
                say(console, f"{row}: {model.label}", wrap=True)
        expected = estimate(found, workers, processes, tell)
    say(console, f"{title}: {expected.text}", wrap=True)
    if not estimate_only:
        with writing(folder, pool.ELSEWHERE):
            (folder / LOGS).mkdir(parents=True, exist_ok=True)
        check_room(folder, expected.bytes, "{} are needed", "free some space, or choose another disk with --out")
        pool.work(folder, found, workers=workers, overwrite=overwrite, console=console, processes=processes)
    return found


def _default_jobs() -> int:
    """Runs at a time, unless it is said: one on a GPU, else as many as there are cores."""
    import torch

    return 1 if torch.cuda.is_available() else cores()


def _copied(jobs: Sequence[Job]) -> int:
    """Bytes of shards that the token cache does not have yet. Its disk has room for all of them.

    Raises:
        LabError: it has not, or data that cannot be found.
    """
    from softfocus.lab.data import of_recipe, tokens

    needed = of_recipe.to_copy(job.recipe for job in jobs)
    tokens.check_room(tokens.default_cache(), needed)
    return needed
