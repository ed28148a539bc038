"""What a report says beside its numbers: where they come from, how to read them, and what limits
them.
"""

from collections.abc import Callable, Iterable, Sequence

from softfocus.lab.recipes.data import hidden_in
from softfocus.lab.report.points import Axis, Group, best, column_name, shared_columns, tokenizers_may_differ
from softfocus.lab.report.results import Entry, Report, grouped
from softfocus.lab.run_folder.results import WRONG, Evaluation, RunInfo


def provenance(report: Report) -> str:
    """Recipes, commits and seeds in one line: what a figure that is passed around must say about
    itself.
    """
    infos = [entry.info for entry in report.runs]
    return " · ".join(
        _several(one, many, [str(read_out(info)) for info in infos])
        for one, many, read_out in (
            ("recipe", "recipes", lambda info: info.recipe),
            ("commit", "commits", _commits),
            ("seed", "seeds", lambda info: info.seed),
        )
    )


def short_commit(commit: str) -> str:
    """A commit's first 10 digits, with its "+dirty"; anything else as it is."""
    digits, plus, dirty = commit.partition("+")
    return (digits[:10] if len(digits) == 40 else digits) + plus + dirty


def notes(entries: Sequence[Entry], axis: Axis = "multiple") -> list[str]:
    """In what the runs differ although a comparison takes it to be equal, and what else limits what
    they show.
    """
    found = _statistics(grouped(entries), axis)
    for what, read_out, consequence in _COMMON:
        found += _differ(what, [read_out(entry) for entry in entries], consequence)
    found += training_notes([entry.info for entry in entries])
    found += _text_notes(entries)
    if any(is_dirty(entry.info) for entry in entries):
        found.append(DIRTY)
    for entry in entries:
        if entry.evaluation.seed != entry.info.seed or entry.evaluation.mechanism != entry.info.mechanism:
            found.append(f"{entry.info.name}: its evaluation belongs to another training; evaluate it again.")
    return found


def _statistics(found: Sequence[Group], axis: Axis) -> list[str]:
    """How to read the numbers."""
    shared = shared_columns(found, axis)
    if not shared:
        return []
    ends = [there for group in found if (there := best(group, shared[-1], axis)) is not None]
    lines = [
        "±: one standard error, from the documents and, where there are several seeds, from those. "
        "Differences are paired by document, and by seed where both models have the same seeds. "
        "One within two standard errors is inconclusive. "
        "It takes more of them where there are few seeds or documents: up to 14 with two, 4.5 with three, 3.3 with "
        "four (Student's t)."
    ]
    if any(there.gain for there in ends):
        lines.append(
            f"Gain: in windows of {column_name(shared[-1], axis)}, the loss at the positions of the first training "
            "length less the loss at all later positions of the same windows. Later text may be harder or easier for "
            "every model, so hold gains against each other."
        )
    if len(found) > 1 and not all(row.documents for there in ends for row in there.rows):
        lines.append(
            "Some results hold no losses by document: their differences are not paired, "
            "and their standard errors too wide."
        )
    return lines


_COMMON: tuple[tuple[str, Callable[[Entry], str], str], ...] = (
    (
        "vocabulary",
        lambda e: f"{e.evaluation.vocabulary:,}",
        "nats per token are not comparable, ratios to 1x only with care.",
    ),
    (
        "training length",
        lambda e: f"{e.evaluation.train_length:,}",
        "the same multiple is not the same number of tokens.",
    ),
    (
        "share of hidden tokens",
        lambda e: hidden_in(e.recipe),
        "they predict other tokens of the same text, and their losses do not compare.",
    ),
)

_TRAINING: tuple[tuple[str, Callable[[RunInfo], str], str], ...] = (
    ("commit", lambda info: _commits(info), "it was not the same code that trained them."),
    (
        "processor",
        lambda info: _each(part.machine.cpu for part in info.parts),
        "processors round differently, and trainings diverge by that.",
    ),
    (
        "training tokens",
        lambda info: f"{info.steps_done * info.tokens_per_step:,}",
        "the better one may have had more training.",
    ),
    ("size", lambda info: f"{info.parameters / 1e6:.2f} M parameters", "the better one may be the larger model."),
)

DIRTY = "The source tree had changes that the commit does not hold (+dirty)."


def is_dirty(info: RunInfo) -> bool:
    """Whether a part of a run was trained by code that no commit holds."""
    return any(part.commit.endswith("+dirty") for part in info.parts)


def training_notes(infos: Sequence[RunInfo]) -> list[str]:
    """In what trainings differ although a comparison takes it to be equal."""
    return [
        note
        for what, read_out, consequence in _TRAINING
        for note in _differ(what, [read_out(info) for info in infos], consequence)
    ]


def _differ(what: str, values: Sequence[str], consequence: str) -> list[str]:
    """A note, if not all values are the same."""
    kinds = list(dict.fromkeys(values))
    return [f"The runs differ in {what} ({', '.join(kinds)}): {consequence}"] if len(kinds) > 1 else []


def _commits(info: RunInfo) -> str:
    return _each(short_commit(part.commit) for part in info.parts)


def _each(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


def same_text(evaluations: Sequence[Evaluation]) -> bool:
    """Whether all are known to have read the same validation text, so that losses differ by model
    and length alone.
    """
    return len({evaluation.text_key for evaluation in evaluations}) == 1 and all(e.corpus_key for e in evaluations)


def _text_notes(entries: Sequence[Entry]) -> list[str]:
    """What the losses were measured on."""
    found = []
    texts = {entry.evaluation.text_key: entry.evaluation for entry in entries}
    for one in texts.values():
        if wrong := next((row for row in one.rows if row.setting == WRONG), None):
            found.append(
                f"Measured{_of(one, entries)} on {wrong.tokens:,} predictions in {one.documents:,} held-out documents, "
                "images or utterances."
            )
        elif one.documents:
            found.append(
                f"Evaluated on {one.tokens:,} validation tokens{_of(one, entries)}: spans of {one.longest:,}, "
                f"at random places in {one.documents:,} documents, cut into windows of each length."
            )
        if one.crossing:
            found.append(
                f"{one.crossing} of the {one.tokens // one.longest} spans{_of(one, entries)} cross the end of "
                "a document: there, a long context is partly another text."
            )
    if len(texts) > 1:
        found.append("The runs were evaluated on different text: their losses are means over different tokens.")
    if tokenizers_may_differ(entry.evaluation for entry in entries):
        found.append("Their tokenizers may differ: nats per token are not comparable, ratios to 1x only with care.")
    changed = [
        entry.info.name
        for entry in entries
        if "" not in (entry.info.corpus_key, entry.evaluation.corpus_key)
        and entry.info.corpus_key != entry.evaluation.corpus_key
    ]
    if changed:
        found.append(
            f"The corpus of {', '.join(changed)} changed (or moved, or was copied) after training: "
            "what it was evaluated on may have been trained on."
        )
    return found


def _of(one: Evaluation, entries: Sequence[Entry]) -> str:
    names = [entry.info.name for entry in entries if entry.evaluation.text_key == one.text_key]
    return f" ({', '.join(names)})" if len(names) < len(entries) else ""


def _several(one: str, many: str, values: Sequence[str]) -> str:
    values = list(dict.fromkeys(values))
    shown = ", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else "")
    return f"{one if len(values) == 1 else many} {shown}"
