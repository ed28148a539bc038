"""The pages: one for each claim with its figures, and the ledger of all. Made from the committed
results alone, so they cannot drift.
"""

import html
import shlex
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from softfocus.lab.claims import claim as claims
from softfocus.lab.claims import results as outcomes
from softfocus.lab.claims import tables
from softfocus.lab.claims.claim import BASES, SCALES, Claim, Saves, Scale, Steeper
from softfocus.lab.claims.earlier import changes
from softfocus.lab.claims.parts import SEEDS, Verdict, together
from softfocus.lab.claims.results import FIGURE, POWERS, RESULTS, SHARES, SIZES, TRAINING, Results
from softfocus.lab.claims.verdict import Judged, judge
from softfocus.lab.errors import LabError, did_you_mean, first_mistake
from softfocus.lab.recipes.data import parts_of
from softfocus.lab.report.notes import short_commit
from softfocus.lab.report.points import settings
from softfocus.lab.run_folder.disk import write_atomically

LEDGER = "README.md"
FINDINGS = "findings.toml"
"""Beside the ledger: what else the runs of a claim showed, as claim = ["sentences", ...]. It is not
in the claim, because it is about runs.
"""

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

MARK = " \\*"
"""Beside a verdict in the ledger whose models were trained with an earlier recipe."""

Standing = Verdict | Literal["not testable here"]
_ORDER: tuple[Standing, ...] = ("holds", "fails", "inconclusive", "too few seeds", "not run", "not testable here")


def report(folder: Path) -> list[Path]:
    """Write a page for each claim, its figures and the ledger, from the results in a folder:
    NAME/SCALE/results.json.

    Returns:
        The ledger and the pages.

    Raises:
        LabError: results or findings that cannot be read, or a folder that cannot be written to.
    """
    from softfocus.lab.claims.figure import write_figures

    lines, written = [], []
    findings = _findings(folder / FINDINGS)
    all_found: dict[str, dict[Scale, Results]] = {}
    for name in claims.shipped():
        claim = claims.load(name)
        places = {scale: folder / name / scale / RESULTS for scale in SCALES}
        found = {scale: _placed(path, name, scale) for scale, path in places.items() if path.exists()}
        all_found[name] = found
        for scale, results in found.items():
            write_figures(claim, scale, results, folder / name / scale)
        written.append((folder / f"{name}.md", page(claim, found, findings.get(name, []))))
        lines.append((claim, {scale: standing(claim, scale, found.get(scale)) for scale in SCALES}))
    written.insert(0, (folder / LEDGER, ledger(lines, all_found)))
    for path, text in written:
        write_atomically(path, text)
    return [path for path, _ in written]


def _placed(path: Path, name: str, scale: Scale) -> Results:
    """Results that stand where those of the claim and scale belong.

    Raises:
        LabError: they cannot be read, or are others.
    """
    found = outcomes.read(path)
    if (found.claim, found.scale) != (name, scale):
        what = f"{path} holds results of {found.claim} at the scale {found.scale}"
        raise LabError(what, f"put them where they belong, {found.claim}/{found.scale}/{path.name}")
    return found


def _findings(path: Path) -> dict[str, list[str]]:
    """The findings about each claim; none without the file."""
    remedy = 'write claim = ["sentences", ...] for claims of `softfocus recipes`'
    if not path.exists():
        return {}
    try:
        found = TypeAdapter(dict[str, list[str]]).validate_python(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path} cannot be read: {error}", remedy) from None
    except ValidationError as error:
        raise LabError(f"{path}: {first_mistake(error)}", remedy) from None
    if unknown := sorted(set(found) - set(claims.shipped())):
        raise LabError(f"{path}: there is no claim {unknown[0]!r}", did_you_mean(unknown[0], claims.shipped(), remedy))
    return found


def standing(claim: Claim, scale: Scale, results: Results | None) -> Standing:
    """The verdict on a claim at one scale, or why there is none."""
    if claim.exact or (results is not None and scale not in claim.unjudged):
        return _verdict(judge(claim, results))
    return "not testable here" if _out_of_reach(claim, scale) else "not run"


def _out_of_reach(claim: Claim, scale: Scale) -> str | None:
    """Why this project cannot run a claim at a scale; None where it can."""
    return claim.untestable.get(scale) or claim.unjudged.get(scale) or claim.away.get(scale) or AWAY.get(scale)


def page(claim: Claim, found: dict[Scale, Results], findings: Sequence[str] = ()) -> str:
    """A claim: what the paper says, what was run, what came out, the verdict, and what else was
    found.
    """
    parts = [f"# {claim.title}", f"{claim.source}.", _wrapped(claim.says)]
    if claim.paper is not None:
        rows = [[name, *map(_number, row)] for name, row in claim.paper.rows.items()]
        parts.append(tables.table(["the paper's numbers", *claim.paper.columns], rows))
    parts += [_wrapped(note) for note in claim.notes]
    if claim.exact:
        judged = judge(claim, None)
        parts += [f"**Verdict: {_verdict(judged)}: exact, by test.**", _statements(judged)]
    for scale in () if claim.exact else SCALES:
        parts.append(f"## Scale `{scale}`")
        if scale in found:
            parts += _outcome(claim, scale, found[scale])
            continue
        why = _out_of_reach(claim, scale)
        absent = f"**Not run:** {ABSENT[scale]}." if scale in ABSENT else "**Not run.**"
        parts.append(_wrapped(f"**Not testable here:** {why}." if why else absent))
        if scale in claim.scales:
            parts.append(f"`{_command(claim, scale)}` runs it.")
    if not claim.exact and not found and claim.statements:
        parts += ["## What will be judged", "\n".join(f"* {statement.says}" for statement in claim.statements)]
    if findings:
        parts += ["## What else was found", *map(_wrapped, findings)]
    return "\n\n".join(parts) + "\n"


def ledger(lines: Sequence[tuple[Claim, dict[Scale, Standing]]], found: Mapping[str, dict[Scale, Results]]) -> str:
    """All claims with their verdicts, how many there are of each, and how many share trainings.

    Args:
        lines: each claim, and its verdict at each scale.
        found: the results of each claim, by its name.
    """
    exact = [claim for claim, _ in lines if claim.exact]
    counts: dict[str, Counter[Standing]] = {
        scale: Counter(standings[scale] for claim, standings in lines if not claim.exact) for scale in SCALES
    }
    outdated = {
        claim.name: [scale for scale, results in found.get(claim.name, {}).items() if changes(claim, scale, results)]
        for claim, _ in lines
    }
    counts["exact"] = Counter(standings[SCALES[0]] for claim, standings in lines if claim.exact)
    table = []
    for claim, standings in lines:
        results = found.get(claim.name, {})
        cells = [
            standings[scale]
            + MARK * (scale in outdated[claim.name])
            + _held(claim, standings[scale], results.get(scale))
            for scale in SCALES
        ]
        if claim.exact:
            cells = [f"{standings[SCALES[0]]}: exact, by test"] * len(SCALES)
        table.append([f"[{claim.title}]({claim.name}.md)", claim.source, *cells])
    head = (
        f"{len(lines)} claims, {len(exact)} of them decided by tests that train nothing. A claim holds if all its "
        "statements hold, and fails if one of them fails. A statement about losses holds or fails where the difference "
        "is significant at the 5 % level by Student's t, and is inconclusive otherwise. Where it makes several "
        "comparisons, Holm's correction decides whether one of them fails. "
        "Of a claim that does not hold, brackets say how many of its statements do. "
        f"With fewer than {SEEDS} seeds there is no verdict. "
        "A verdict at the scales `toy` and `small` is about models of that size, and not about the paper's. "
        "Noise alone decides up to one statement in twenty. Statements that share a row err together. "
        "[Negated weights](softplus-table-1.md) show how far noise goes: they are softmax under another name."
    )
    if any(outdated.values()):
        head += (
            f" Verdicts with a star ({MARK.strip()}) are of models that were trained with an earlier recipe, "
            "and not again since it changed. Their pages say in what it differs. "
            "[docs/claims.md](../../claims.md#initial-weights) says why it changed."
        )
    kinds = [kind for kind in _ORDER if any(count[kind] for count in counts.values())]
    summary = [[name, *(str(count[kind]) for kind in kinds)] for name, count in counts.items()]
    scales = ", ".join(f"`{scale}` is the recipe `{base}`" for scale, base in BASES.items())
    foot = (
        "Written by `softfocus report` from the results beside it. Scales, where a claim's page names no other "
        f"recipes: {scales}."
    )
    shared = [line for scale in SCALES if (line := _shared(scale, lines, found))]
    again = [line for scale in SCALES if (line := _looked_again(scale, lines, found))]
    parts = [
        "# The papers' claims",
        _wrapped(head),
        *([_wrapped(" ".join([*shared, _DEPENDENT]))] if shared else []),
        *map(_wrapped, again),
        tables.table(["scale", *kinds], summary),
        tables.table(["claim", "source", *SCALES], table),
        _wrapped(foot),
    ]
    return "\n\n".join(parts) + "\n"


def _held(claim: Claim, standing: Standing, results: Results | None) -> str:
    """How many of several statements hold, where some do not."""
    if standing not in ("fails", "inconclusive") or results is None or len(claim.statements) < 2:
        return ""
    judged = judge(claim, results)
    return f" ({sum(one.verdict == 'holds' for one in judged)} of {len(judged)} hold)"


_DEPENDENT = (
    "The verdicts of these are not independent. If a training of softmax came out well by chance, all claims that "
    "compare with it are affected."
)


def _looked_again(
    scale: Scale, lines: Sequence[tuple[Claim, dict[Scale, Standing]]], found: Mapping[str, dict[Scale, Results]]
) -> str:
    """Which verdicts rest on seeds that were added to the first ones; nothing where none were."""
    more, changed = [], []
    for claim, standings in lines:
        results = found.get(claim.name, {}).get(scale)
        seeds = sorted({run.info.seed for run in results.runs}) if results else []
        if results is None or len(seeds) <= SEEDS or standings[scale] == "not testable here":
            continue
        more.append(claim)
        runs = [run for run in results.runs if run.info.seed in seeds[:SEEDS]]
        first = Results(claim=claim.name, scale=scale, created=results.created, runs=runs)
        if (before := _verdict(judge(claim, first))) != standings[scale]:
            changed.append(f"[{claim.title}]({claim.name}.md) ({standings[scale]}, {before} before)")
    if not more:
        return ""
    text = f"At the scale `{scale}` {_count(len(more), 'claim')} had more than {SEEDS} seeds. "
    rest = f"With the first {SEEDS} alone {_count(len(changed), 'verdict')} would differ: {'; '.join(changed)}. "
    return text + (rest if changed else "") + "Where seeds were added after a first look, noise decides more often."


def _shared(
    scale: Scale, lines: Sequence[tuple[Claim, dict[Scale, Standing]]], found: Mapping[str, dict[Scale, Results]]
) -> str:
    """How many claims have trainings of other claims in them; nothing where none has. Of one name
    or not, with the same losses from the first step on they are the same.
    """
    judged = {claim.name for claim, standings in lines if standings[scale] != "not testable here"}
    here = {name: results[scale] for name, results in found.items() if scale in results and name in judged}
    users = Counter(one for results in here.values() for one in _trainings(results))
    sharing = {name for name, results in here.items() if any(users[one] > 1 for one in _trainings(results))}
    failing = [claim.name for claim, standings in lines if claim.name in here and standings[scale] == "fails"]
    if not sharing:
        return ""
    return (
        f"At the scale `{scale}` {len(sharing)} of the {len(here)} claims that were judged share trainings with "
        f"others, including {len(sharing & set(failing))} of the {len(failing)} that fail."
    )


def _trainings(results: Results) -> set[tuple[float, ...]]:
    """What tells trainings apart: their losses."""
    return {tuple(loss for _, loss in run.info.train_loss) for run in results.runs if run.info.train_loss}


def verdict_lines(claim: Claim, results: Results) -> list[str]:
    """The verdict for a terminal, statement by statement."""
    judged = judge(claim, results)
    why = claim.unjudged.get(results.scale)
    lines = [f"{'' if why else f'{one.verdict}: '}{one.statement.says} ({one.shown.text})" for one in judged]
    end = f"not testable here: {why}" if why else _verdict(judged)
    return [*lines, f"{claim.name} at the scale {results.scale}: {end}"]


def _outcome(claim: Claim, scale: Scale, results: Results) -> list[str]:
    judged = judge(claim, results)
    counts = Counter(one.verdict for one in judged)
    said = ", ".join(f"{counts[kind]} {kind}" for kind in _ORDER if counts[kind])  # type: ignore[index]
    parts = [f"**Verdict: {_verdict(judged)}** ({said}).", _statements(judged)]
    parts += _comparisons(judged)
    if why := claim.unjudged.get(scale):
        measured = [[one.statement.says, one.shown.text] for one in judged]
        parts = [_wrapped(f"**Not testable here:** {why}."), tables.table(["statement", "what came out"], measured)]
    if differing := changes(claim, scale, results):
        parts.append(
            _wrapped(
                "**These models were trained with an earlier recipe, and not again since it changed.** "
                f"Since then: {'; '.join(differing)}."
            )
        )
    parts += [_wrapped(_runs(claim, scale, results))] if results.runs else []
    parts += [_wrapped(line) for line in results.missing]
    if lost := [run for run in results.runs if run.diverged]:
        told = (f"* Diverged: {run.row}, seed {run.info.seed}: {run.info.error}." for run in lost)
        parts.append("\n".join(_wrapped(line, "  ") for line in told))
    groups = [group for row in results.rows if (group := results.group(row)) is not None]
    if groups:
        parts.append(_wrapped(tables.reading(results, groups)))
        parts += [tables.losses(results, groups, setting) for setting in settings(groups)]
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


def _verdict(judged: Sequence[Judged]) -> Verdict:
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
            summary = _wrapped(f"<summary>All {len(one.parts)} comparisons: {says}</summary>")
            found.append(f"<details>\n{summary}\n\n{table}\n\n</details>")
    return found


def _runs(claim: Claim, scale: Scale, results: Results) -> str:
    """What was run: recipe, size, budget, seeds, commit, versions, machine."""
    infos = [run.info for run in results.runs]
    sizes = sorted({info.parameters for info in infos})
    size = " to ".join(dict.fromkeys(f"{parameters / 1e6:.2f}" for parameters in (sizes[0], sizes[-1])))
    machines = sorted({f"{i.machine.cpu}, {i.machine.cores} cores, on {i.machine.device}" for i in infos})
    commits = sorted({short_commit(info.commit) for info in infos})
    torch = sorted({info.versions.get("torch", "?") for info in infos})
    counts = sorted({info.steps * info.tokens_per_step for info in infos})
    trained = f"{_each(f'{count / 1e6:.2f}' for count in counts)} M training {parts_of(results.runs[0].recipe)}"
    seeds = sorted({info.seed for info in infos})
    numbered = f"{'seeds' if len(seeds) > 1 else 'seed'} {_each(map(str, seeds))}"
    base = f"`{claim.base(scale)}`"
    if results.overrides:
        base += f" with {_each(f'`{override}`' for override in results.overrides)}"
    return (
        f"What was run: {len(infos)} trainings of {_count(len(results.rows), 'row')} on the recipe {base} "
        f"({size} M parameters, {trained}), {numbered}; "
        f"commit {_each(commits)}; torch {_each(torch)}; {_each(machines)}."
    )


def _command(claim: Claim, scale: Scale, results: Results | None = None) -> str:
    # --seeds N is for seeds 0 to N - 1: where some are missing here, they are trained, too
    seeds = 1 + max(run.info.seed for run in results.runs) if results and results.runs else SEEDS
    sets = "".join(f" --set {shlex.quote(override)}" for override in results.overrides) if results else ""
    return f"softfocus reproduce {claim.name} --scale {scale} --seeds {seeds}{sets}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")


def _each(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _wrapped(text: str, later: str = "") -> str:
    return textwrap.fill(text, 100, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)
