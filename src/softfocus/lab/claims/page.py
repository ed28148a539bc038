"""The page of a claim, made from its results alone."""

import html
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from softfocus.lab.claims import tables
from softfocus.lab.claims.claim import SCALES, Claim, Saves, Scale, Steeper
from softfocus.lab.claims.earlier import changes
from softfocus.lab.claims.parts import SEEDS, Verdict, together
from softfocus.lab.claims.results import FIGURE, POWERS, SHARES, SIZES, TRAINING, Results
from softfocus.lab.claims.verdict import Judged, judge
from softfocus.lab.recipes.data import parts_of
from softfocus.lab.report.notes import short_commit
from softfocus.lab.report.points import settings

AWAY: dict[Scale, str] = {
    "gpt2": "124 M parameters on 9.9 billion tokens, for which the paper had eight A100, "
    "are out of reach of this project",
}
"""A scale that needs more than the project has. A claim with committed results has a verdict there
all the same.
"""

ABSENT: dict[Scale, str] = {
    "small": "it takes a GPU",
}
"""Why a claim was not run at a scale."""

Standing = Verdict | Literal["not testable here"]
ORDER: tuple[Standing, ...] = ("holds", "fails", "inconclusive", "too few seeds", "not run", "not testable here")


def standing(claim: Claim, scale: Scale, results: Results | None) -> Standing:
    """The verdict on a claim at one scale, or why there is none."""
    if claim.exact or (results is not None and scale not in claim.unjudged):
        return verdict_of(judge(claim, results))
    return "not testable here" if _out_of_reach(claim, scale) else "not run"


def _out_of_reach(claim: Claim, scale: Scale) -> str | None:
    """Why this project cannot run a claim at a scale; None where it can."""
    return claim.untestable.get(scale) or claim.unjudged.get(scale) or claim.away.get(scale) or AWAY.get(scale)


def page(claim: Claim, found: dict[Scale, Results], findings: Sequence[str] = ()) -> str:
    """A claim: what the paper says, what was run, what came out, the verdict, and what else was
    found.
    """
    parts = [f"# {claim.title}", f"{claim.source}.", wrapped(claim.says)]
    if claim.paper is not None:
        rows = [[name, *map(_number, row)] for name, row in claim.paper.rows.items()]
        parts.append(tables.table(["the paper's numbers", *claim.paper.columns], rows))
    parts += [wrapped(note) for note in claim.notes]
    if claim.exact:
        judged = judge(claim, None)
        parts += [f"**Verdict: {verdict_of(judged)}: exact, by test.**", _statements(judged)]
    for scale in () if claim.exact else SCALES:
        parts.append(f"## Scale `{scale}`")
        if scale in found:
            parts += _outcome(claim, scale, found[scale])
            continue
        why = _out_of_reach(claim, scale)
        absent = f"**Not run:** {ABSENT[scale]}." if scale in ABSENT else "**Not run.**"
        parts.append(wrapped(f"**Not testable here:** {why}." if why else absent))
        if scale in claim.scales:
            parts.append(f"`{_command(claim, scale)}` runs it.")
    if not claim.exact and not found and claim.statements:
        parts += ["## What will be judged", "\n".join(f"* {statement.says}" for statement in claim.statements)]
    if findings:
        parts += ["## What else was found", *map(wrapped, findings)]
    return "\n\n".join(parts) + "\n"


def verdict_lines(claim: Claim, results: Results) -> list[str]:
    """The verdict for a terminal, statement by statement."""
    judged = judge(claim, results)
    why = claim.unjudged.get(results.scale)
    lines = [f"{'' if why else f'{one.verdict}: '}{one.statement.says} ({one.shown.text})" for one in judged]
    end = f"not testable here: {why}" if why else verdict_of(judged)
    return [*lines, f"{claim.name} at the scale {results.scale}: {end}"]


def _outcome(claim: Claim, scale: Scale, results: Results) -> list[str]:
    judged = judge(claim, results)
    counts = Counter(one.verdict for one in judged)
    said = ", ".join(f"{counts[kind]} {kind}" for kind in ORDER if counts[kind])  # type: ignore[index]
    parts = [f"**Verdict: {verdict_of(judged)}** ({said}).", _statements(judged)]
    parts += _comparisons(judged)
    if why := claim.unjudged.get(scale):
        measured = [[one.statement.says, one.shown.text] for one in judged]
        parts = [wrapped(f"**Not testable here:** {why}."), tables.table(["statement", "what came out"], measured)]
    if differing := changes(claim, scale, results):
        parts.append(
            wrapped(
                "**These models were trained with an earlier recipe, and not again since it changed.** "
                f"Since then: {'; '.join(differing)}."
            )
        )
    parts += [wrapped(_runs(claim, scale, results))] if results.runs else []
    parts += [wrapped(line) for line in results.missing]
    if lost := [run for run in results.runs if run.diverged]:
        told = (f"* Diverged: {run.row}, seed {run.info.seed}: {run.info.error}." for run in lost)
        parts.append("\n".join(wrapped(line, "  ") for line in told))
    groups = [group for row in results.rows if (group := results.group(row)) is not None]
    if groups:
        parts.append(wrapped(tables.reading(claim, results, groups)))
        parts += [tables.losses(claim, results, groups, setting) for setting in settings(groups)]
    if claim.first(Steeper) is not None:
        parts.append(tables.gradients(results))
    if any(run.shares for run in results.runs):
        parts += [tables.shares(results), f"![Shares]({claim.name}/{scale}/{SHARES})"]
    if results.by_power:
        parts.append(f"![Loss and gradient norm over the power]({claim.name}/{scale}/{POWERS})")
    if any(run.curves for run in results.runs):
        parts.append(f"![Over training]({claim.name}/{scale}/{TRAINING})")
    if (by_size := claim.first(Saves)) is not None and (table := tables.sizes(results, by_size)):
        parts += [table, f"![Loss over size]({claim.name}/{scale}/{SIZES})"]
    if groups:
        what = "Loss and error rate" if tables.sampled(groups) else "Loss over length"
        parts.append(f"![{what}]({claim.name}/{scale}/{FIGURE})")
    return [*parts, f"To repeat it: `{_command(claim, scale, results)}`."]


def verdict_of(judged: Sequence[Judged]) -> Verdict:
    """On all statements together."""
    return together([one.verdict for one in judged])


def _statements(judged: Sequence[Judged]) -> str:
    """A line a statement, with the comparison that decided it."""
    lines = []
    for one in judged:
        agreeing = sum(part.verdict == one.verdict for part in one.parts)
        shares = f"{agreeing} of {len(one.parts)} comparisons {'says' if agreeing == 1 else 'say'} {one.verdict}"
        against = "" if agreeing == len(one.parts) else "; this one speaks most against the statement"
        of = f" ({shares}{against})"
        several = len(one.parts) > 1 and one.verdict in ("holds", "fails", "inconclusive")
        lines.append([one.verdict, one.statement.says, one.shown.text + (of if several else "")])
    return tables.table(["verdict", "statement", "what came out"], lines)


def _comparisons(judged: Sequence[Judged]) -> list[str]:
    """All comparisons of the statements that make several: one table for each, folded away."""
    found = []
    for one in judged:
        if len(one.parts) > 1:
            table = tables.table(["verdict", "comparison"], [[part.verdict, part.text] for part in one.parts])
            says = html.escape(one.statement.says, quote=False)
            summary = wrapped(f"<summary>All {len(one.parts)} comparisons: {says}</summary>")
            found.append(f"<details>\n{summary}\n\n{table}\n\n</details>")
    return found


def _runs(claim: Claim, scale: Scale, results: Results) -> str:
    """What was run: recipe, size, budget, seeds, commit, versions, machine."""
    infos = [run.info for run in results.runs]
    sizes = sorted({info.parameters for info in infos})
    size = " to ".join(dict.fromkeys(f"{parameters / 1e6:.2f}" for parameters in (sizes[0], sizes[-1])))
    trained_by = [part for info in infos for part in info.parts]
    machines = sorted({f"{p.machine.cpu}, {p.machine.cores} cores, on {p.machine.device}" for p in trained_by})
    commits = sorted({short_commit(part.commit) for part in trained_by})
    torch = sorted({part.versions.get("torch", "?") for part in trained_by})
    counts = sorted({info.steps * info.tokens_per_step for info in infos})
    trained = f"{_each(f'{count / 1e6:.2f}' for count in counts)} M training {parts_of(results.runs[0].recipe)}"
    seeds = sorted({info.seed for info in infos})
    numbered = f"{'seeds' if len(seeds) > 1 else 'seed'} {_each(map(str, seeds))}"
    names = [f"`{base}`" for base in claim.bases_at(scale)]
    base = f"recipe{'s' if names[1:] else ''} {_each(names)}"
    if results.overrides:
        base += f" with {_each(f'`{override}`' for override in results.overrides)}"
    return (
        f"What was run: {len(infos)} trainings of {count_of(len(results.rows), 'row')} on the {base} "
        f"({size} M parameters, {trained}), {numbered}; "
        f"commit {_each(commits)}; torch {_each(torch)}; {_each(machines)}."
    )


def _command(claim: Claim, scale: Scale, results: Results | None = None) -> str:
    # --seeds N is for seeds 0 to N - 1: where some are missing here, they are trained, too
    seeds = 1 + max(run.info.seed for run in results.runs) if results and results.runs else SEEDS
    sets = "".join(f" --set {shlex.quote(override)}" for override in results.overrides) if results else ""
    return f"softfocus reproduce {claim.name} --scale {scale} --seeds {seeds}{sets}"


def count_of(number: int, what: str) -> str:
    """ "1 claim", "2 claims"."""
    return f"{number} {what}" + ("s" if number > 1 else "")


def _each(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def wrapped(text: str, later: str = "") -> str:
    """A paragraph in lines of 100 columns, the later ones with an indent."""
    return textwrap.fill(text, 100, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)
