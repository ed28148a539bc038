"""The demo: train and evaluate five small models side by side, show the table as it fills, and
write the report.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from softfocus.catalog import named
from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.recipes.loading import load, shipped
from softfocus.lab.report.points import labels
from softfocus.lab.report.report import build, show, write
from softfocus.lab.report.results import Report, load_entry, lost_lines
from softfocus.lab.run_folder.files import load_run
from softfocus.lab.studies.jobs import empty_evaluation, missing_lines, refuse_failed
from softfocus.lab.studies.study import train_all

MODELS = ("demo-softmax", "demo-lssa", "demo-lssar", "demo-hybrid", "demo-global-heads")
FOLDER = Path("runs/demo")

FAST = (
    "train.steps=8",
    "train.warmup=2",
    "train.batch=4",
    "train.length=64",
    "train.checkpoint_every=4",
    "train.log_every=2",
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=3",
    "model.config.intermediate_size=64",
    "evaluate.lengths=1x,2x,4x",
    "evaluate.tokens=2048",
    "data.max_documents=40",
)
"""What makes a recipe tiny: enough to see every part work, far too little to learn anything."""


def default_folder(seed: int | None = None, *, fast: bool = False) -> Path:
    """Where a demo goes that is not told where: trials and seeds have folders of their own."""
    name = FOLDER.name + ("-fast" if fast else "") + ("" if seed is None else f"-{seed}")
    return FOLDER.with_name(name)


def run_demo(
    folder: Path | None = None,
    *,
    models: Sequence[str] | None = None,
    seed: int | None = None,
    fast: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    console: Console | None = None,
) -> Report:
    """Train and evaluate models side by side, then print and write the report.

    It first says what that will take. Each model has a process of its own. What is finished is
    kept: started again after a failure, a kill or Ctrl-C, the demo goes on from the checkpoints.

    Args:
        folder: gets a run folder for each model, logs, results.json, figure1.png and report.html;
            that of :func:`default_folder` if not given.
        models: shipped recipes ("demo-lssar"), mechanisms ("lssar", "sharpened(lssa, 3)") to put
            into the demo's recipe, or recipe files; the five of the headline figure by default.
        seed: of the training; the recipes' own by default. A folder holds the runs of one seed.
        fast: tiny models and a few steps.
        overwrite: train again what is already there.
        workers: models at a time; as many as there are cores by default.
        console: where to draw; stdout by default.

    Returns:
        The report.

    Raises:
        LabError: an unknown model, runs of other recipes in the folder, a folder in which another
            demo or study works, what memory or disk cannot hold, a model that failed (after the
            report on the others has been written), or Ctrl-C.
    """
    console = console or Console()
    folder = folder or default_folder(seed, fast=fast)
    overrides = (*(FAST if fast else ()), *(() if seed is None else (f"train.seed={seed}",)))
    names = list(dict.fromkeys(_source(name) for name in models or MODELS))
    recipes = [load(name, [*changes, *overrides]) for name, changes in names]
    jobs = train_all(
        "softfocus demo",
        recipes,
        folder,
        jobs=workers,
        labels=labels([empty_evaluation(recipe) for recipe in recipes]),
        overwrite=overwrite,
        console=console,
    )
    remarks = missing_lines(jobs)
    if fast:
        remarks.insert(0, "A fast trial of tiny models: every part works, and the numbers mean nothing.")
    diverged = [load_run(job.folder, complete=False) for job in jobs if job.status == "diverged"]
    if entries := [load_entry(job.folder) for job in jobs if job.status == "finished"]:
        report = build(entries, title="softfocus demo: loss over length", remarks=remarks, diverged=diverged)
        show(report, write(report, folder), console)
    refuse_failed(jobs, overwrite=overwrite)
    if not entries:
        raise LabError("every model diverged: " + "; ".join(lost_lines(diverged)), "look into their logs")
    return report


def _source(name: str) -> tuple[str, tuple[str, ...]]:
    """Where a model's recipe comes from: what to load, and what to override in it.

    Raises:
        UsageError: neither a recipe nor a mechanism.
    """
    if name in shipped() or name.endswith(".toml"):
        return name, ()
    if f"demo-{name}" in shipped():
        return f"demo-{name}", ()
    try:
        named(name)
    except ValueError as error:
        raise UsageError(
            f"--model: {str(error).rstrip('.')}", "or give a shipped recipe, or the path of a .toml file"
        ) from None
    slug = "-".join(re.findall(r"[\w.]+", name))
    return "demo", (f"name=demo-{slug}", f"model.mechanism={name}")
