"""The ledger of all claims, and the folder with their pages. Made from the committed results alone,
so they cannot drift.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from softfocus.lab.claims import claim as claims
from softfocus.lab.claims import results as outcomes
from softfocus.lab.claims import tables
from softfocus.lab.claims.claim import BASES, SCALES, Claim, Scale
from softfocus.lab.claims.earlier import changes
from softfocus.lab.claims.page import ORDER, Standing, count_of, page, standing, verdict_of, wrapped
from softfocus.lab.claims.parts import SEEDS
from softfocus.lab.claims.results import RESULTS, Results
from softfocus.lab.claims.verdict import judge
from softfocus.lab.errors import LabError, did_you_mean, first_mistake
from softfocus.lab.run_folder.disk import write_atomically

LEDGER = "README.md"
FINDINGS = "findings.toml"
"""Beside the ledger: what else the runs of a claim showed, as claim = ["sentences", ...]. It is not
in the claim, because it is about runs.
"""

MARK = " \\*"
"""Beside a verdict in the ledger whose models were trained with an earlier recipe."""


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
        "Where a claim of several statements fails or is inconclusive, brackets say how many of them hold. "
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
    kinds = [kind for kind in ORDER if any(count[kind] for count in counts.values())]
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
        wrapped(head),
        *([wrapped(" ".join([*shared, _DEPENDENT]))] if shared else []),
        *map(wrapped, again),
        tables.table(["scale", *kinds], summary),
        tables.table(["claim", "source", *SCALES], table),
        wrapped(foot),
    ]
    return "\n\n".join(parts) + "\n"


def _held(claim: Claim, verdict: Standing, results: Results | None) -> str:
    """How many of several statements hold, where some do not."""
    if verdict not in ("fails", "inconclusive") or results is None or len(claim.statements) < 2:
        return ""
    held = sum(one.verdict == "holds" for one in judge(claim, results))
    return f" ({held} of {len(claim.statements)} hold)"


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
        if (before := verdict_of(judge(claim, first))) != standings[scale]:
            changed.append(f"[{claim.title}]({claim.name}.md) ({standings[scale]}, {before} before)")
    if not more:
        return ""
    text = f"At the scale `{scale}` {count_of(len(more), 'claim')} had more than {SEEDS} seeds. "
    rest = f"With the first {SEEDS} alone {count_of(len(changed), 'verdict')} would differ: {'; '.join(changed)}. "
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
