"""The committed results, as the tests of several pages read them."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from softfocus.lab.bench.results import Benchmark
from softfocus.lab.claims.results import Results
from softfocus.lab.claims.results import read as read_claim
from softfocus.lab.evaluate.means import Estimate, Mean
from softfocus.lab.report.heads import gains, mean
from softfocus.lab.report.points import Cell, Group, cell
from softfocus.lab.report.recall_compare import RecallGroup, RecallReport, grouped
from softfocus.lab.report.results import Report, read_as
from softfocus.lab.run_folder.results import AS_TRAINED, Evaluation, HeadRow, HeadsMeasured, Setting

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
HERE, FAR, WINDOWED = (1.0, "as trained"), (16.0, "as trained"), (16.0, "window 1x")
"""Columns that most tables have: a length, and a setting."""
WINDOW = Setting(window=128)


@cache
def report(study: str) -> Report:
    return read_as(Report, RESULTS / study / "results.json")


@cache
def claim(name: str, scale: str = "toy") -> Results:
    return read_claim(RESULTS / "claims" / name / scale / "results.json")


def load_benchmark(folder: Path) -> Benchmark:
    return Benchmark.model_validate_json((folder / "results.json").read_text())


def by_label(*studies: str) -> dict[str, Group]:
    return {group.label: group for study in studies for group in report(study).groups}


def by_row(study: str) -> dict[str, Group]:
    """Groups by what their runs are called without the seed."""
    return {one.run.rpartition("-s")[0]: group for group in report(study).groups for one in group.evaluations}


def runs(*studies: str) -> dict[str, Evaluation]:
    """Evaluations by run."""
    found = [one for study in studies for one in report(study).evaluations]
    by = {one.run: one for one in found}
    assert len(by) == len(found), "each name stands for one run"
    return by


def lost_runs(*studies: str) -> set[str]:
    """The names of the runs that diverged."""
    found = (json.loads((RESULTS / study / "results.json").read_text()) for study in studies)
    return {info["name"] for results in found for info in results.get("diverged", [])}


def loss(study: str, run: str, length: int = 128, setting: Setting = AS_TRAINED) -> float:
    return runs(study)[run].row(length, setting).loss


def minus(by: dict[str, Group], ours: str, rival: str, at=HERE, rival_at=None) -> Estimate:
    """How much higher the loss of one row is than another's, paired by document and seed."""
    return cell(by[ours], *at).minus(cell(by[rival], *(rival_at or at)))


def of_seeds(by: dict[str, Group], seeds: Iterable[int]) -> dict[str, Group]:
    """The rows with these seeds alone."""
    wanted = set(seeds)
    kept = {label: tuple(one for one in group.evaluations if one.seed in wanted) for label, group in by.items()}
    return {label: replace(by[label], evaluations=some) for label, some in kept.items() if some}


def beside(by: dict[str, Group], ours: str, rival: str, at=HERE, rival_at=None) -> Estimate:
    """The difference over the seeds that both rows have."""
    seeds = {one.seed for one in by[ours].evaluations} & {one.seed for one in by[rival].evaluations}
    return minus(of_seeds({row: by[row] for row in (ours, rival)}, seeds), ours, rival, at, rival_at)


def by_seed(study: str, label: str, at: tuple[float, str]) -> dict[int, float]:
    """The losses of a group."""
    group = by_label(study)[label]
    return dict(zip((one.seed for one in group.evaluations), cell(group, *at).values, strict=True))


def encoder_rates(model: str, of: str | None = None) -> dict[str, list[Cell]]:
    """The error rates of the claim about LASER, or of those rows of another claim that it does not
    have, at half the claim's learning rate, at that rate, at twice that rate, and, where it was
    tried, at four times it.
    """
    swept, own = by_row(f"{model}-learning-rates"), claim(of or f"laser-{model}")
    rows = [row.removeprefix(f"{model}_") for row in own.rows]
    groups = {
        row: [swept[f"{row}-half"], own.group(f"{model}_{row}"), swept[f"{row}-twice"], swept.get(f"{row}-four-times")]
        for row in rows
        if of is None or row not in ("softmax", "laser")
    }
    return {row: [cell(group, 1.0, "error rate") for group in some if group] for row, some in groups.items()}


def every_layer() -> dict[str, Group]:
    """One mechanism in every layer, 10 M parameters: the claims' rows."""
    found = claim("softplus-post-hoc", "small"), claim("laser-steps", "small")
    rows = {"Softmax": "softmax", "LSSA": "lssa", "LSSAR, p = 15": "lssar", "LASER": "laser_recorded"}
    groups = {name: found[row == "laser_recorded"].group(row) for name, row in rows.items()}
    return {name: group for name, group in groups.items() if group is not None}


@cache
def recalls(study: str) -> dict[str, RecallGroup]:
    """Groups of a study of recall, by label."""
    found = read_as(RecallReport, RESULTS / study / "results.json")
    return {group.label: group for group in grouped(found.runs)}


def accuracies(group: RecallGroup, window: int | None = None) -> list[dict[tuple[int, bool], float]]:
    """For each run the share of right answers by length and by what grows: filler, or pairs. As
    trained, or with a window.
    """
    return [
        {(row.length, row.grown): row.accuracy for row in one.recall.shown if row.window == window}
        for one in group.entries
    ]


def accuracies_by_run(study: str) -> dict[str, dict[tuple[int, bool], float]]:
    """The same by run, as trained."""
    return {
        one.info.name: found
        for group in recalls(study).values()
        for one, found in zip(group.entries, accuracies(group), strict=True)
    }


def disturbed(run: str) -> tuple[float, Mean, list[tuple[HeadRow, Mean]]]:
    """The loss of a model at 16 times the length, what the windows of all heads take off, and what
    that of each head takes off, the most first.
    """
    found = read_as(HeadsMeasured, RESULTS / "heads" / f"{run}.json")
    assert found.length == 16 * found.train_length
    base, whole = (mean(found, row) for row in found.rows[:2])
    return base.value, base - whole, gains(found)


def of_pages(*names: str) -> list[str]:
    """The texts of pages, each with its white space as single spaces."""
    return [" ".join((ROOT / name).read_text().split()) for name in names]
