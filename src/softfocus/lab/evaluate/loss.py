"""Loss over length: how well a model trained on short windows predicts in long ones."""

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import softfocus.hf
from softfocus.catalog import learned_parameters, named
from softfocus.lab import laser_ablation
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.tokens import TokenStore
from softfocus.lab.data.windows import EvaluationWindows
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.forward import losses_of, open_run
from softfocus.lab.evaluate.means import ClusteredMeans, default_edges
from softfocus.lab.evaluate.rope import scale_rope
from softfocus.lab.progress import Event, Listener, Pace, silent
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder import provenance
from softfocus.lab.run_folder.disk import write_atomically
from softfocus.lab.run_folder.files import (
    EVALUATION,
    MODEL,
    UNFINISHED,
    load_measured,
    load_unfinished,
    measures,
    save_measured,
)
from softfocus.lab.run_folder.manifest import digest
from softfocus.lab.run_folder.results import (
    AS_TRAINED,
    Bucket,
    Evaluation,
    Row,
    RunInfo,
    Setting,
    Unfinished,
    json_text,
)

_log = logging.getLogger(__name__)


@measures
def evaluate(
    folder: Path,
    lengths: Sequence[int],
    *,
    settings: Sequence[Setting] | None = None,
    tokens: int | None = None,
    span: int | None = None,
    buckets: Sequence[int] | None = None,
    batch_tokens: int = 4096,
    progress: Listener = silent,
) -> Evaluation:
    """Mean loss of a run at several lengths and under several settings, over all positions and by
    bucket of positions.

    Every length reads the same validation tokens: spans of the longest length (of these, or of an
    earlier evaluation of this run, if these divide it and as many tokens are asked for), cut into
    windows of that length (:class:`softfocus.lab.data.windows.EvaluationWindows`). Spans lie inside
    documents as far as the documents are long enough; how many cross the end of one is kept with
    the result. The standard error takes documents, not windows, as what was drawn at random:
    windows of one document are correlated (:class:`softfocus.lab.evaluate.means.Mean` has the
    formula). Sums by document are kept, so that runs can be compared on the same documents.

    Each row is written to evaluation.unfinished.json as it is finished. An evaluation that was
    killed goes on with those, if weights, text, batches, buckets and versions are the same.

    Memory is bounded by `batch_tokens` for the model; of the logits only a part is held at once
    (:data:`softfocus.lab.evaluate.forward.LOGITS`).

    Args:
        folder: a finished run.
        lengths: tokens a window, in any order.
        settings: scaling of RoPE, attention window and sinks, another mechanism; by default as
            trained, dynamic NTK, a window of the training length, and what the recipe's
            evaluate.mechanisms adds.
        tokens: validation tokens a length; by default the recipe's.
        span: tokens a span, whatever was evaluated before.
        buckets: edges of positions; by default quarters and powers of two of the training length,
            which is always one.
        batch_tokens: tokens a forward pass, at least one window.
        progress: called with a "row" event as each row is finished, and "step" events between.

    Returns:
        What evaluation.json holds: these rows, and those that it held already if they were measured
            on the same text.

    Raises:
        LabError: a run that is not finished, a length longer than the tokens at hand, no rotary
            embedding to scale.
    """
    lengths = sorted(set(lengths))
    info, recipe, _ = open_run(folder, max(lengths), "evaluate --lengths up to {}")
    wanted = tokens or recipe.evaluate.tokens
    settings = sorted(set(settings or recipe.settings), key=lambda setting: setting.order)
    for setting in settings:  # all that can be refused is refused before the first pass
        _config(folder, setting, info.train_length, max(lengths))
    store = data.tokens(recipe, folder, info, progress)
    before = earlier(folder, info)
    windows = EvaluationWindows(store, [*lengths, span], wanted) if span else _windows(store, lengths, wanted, before)
    evaluation = Evaluation(
        **info.named,
        vocabulary=info.vocabulary,
        tokens=windows.tokens,
        corpus_key=store.folder.name,
        longest=windows.longest,
        asked=wanted,
        documents=windows.documents,
        crossing=windows.crossing,
        rows=[],
    )
    warn_of_other_text(folder, before, evaluation)
    pace = Pace(info.name, len(lengths) * len(settings) * windows.tokens, progress)
    key = _key(folder, recipe, evaluation, batch_tokens, buckets)
    finished = {(row.length, row.setting): row for row in load_unfinished(folder, key)}
    for setting in settings:
        for length in lengths:
            row = finished.get((length, setting))
            if row is None and _changes_nothing(setting, info.train_length, length):
                same = evaluation.row(length)
                row = same and same.model_copy(update={"setting": setting})
            if row is not None:
                pace.skip(windows.tokens)
            else:
                model = models.load(folder, _config(folder, setting, info.train_length, length))
                edges = _edges(buckets, info.train_length, length)
                with models.memory("lower --batch-tokens, or evaluate shorter lengths"):
                    row = _row(
                        losses_of(model, recipe), windows.batches(length, batch_tokens), edges, setting, pace.add
                    )
            evaluation.rows.append(row)
            write_atomically(folder / UNFINISHED, json_text(Unfinished(key=key, rows=evaluation.rows)))
            progress(Event(kind="row", run=info.name, row=row, done=pace.done, total=pace.total))
    if before is not None:
        _keep_others(evaluation, before)
    save_measured(folder, evaluation)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return evaluation


def _key(folder: Path, recipe: Recipe, evaluation: Evaluation, batch_tokens: int, buckets: Sequence[int] | None) -> str:
    """A digest of all that decides a row besides its length and setting."""
    files = {path.name: digest(path) for path in sorted((folder / MODEL).iterdir()) if path.is_file()}
    measured = [evaluation.model_dump(mode="json"), batch_tokens, list(buckets or ()), recipe.train.precision]
    code = [provenance.commit(), provenance.versions()]
    return hashlib.sha256(json.dumps([files, measured, code]).encode()).hexdigest()


def _config(folder: Path, setting: Setting, train_length: int, length: int) -> Any:
    """The configuration of a run's model, changed as a setting says. YaRN's depends on the
    length.
    """
    config = scale_rope(models.load_config(folder), setting.rope, train_length, length)
    if setting.sinks and not getattr(config, "rope_parameters", None):
        raise LabError(f"a {config.model_type} model has no rotary embedding, which sinks need", "leave out --sinks")
    if setting.mechanism is not None:
        _run_as(config, setting.mechanism)
        laser_ablation.check(config)
    if setting.window is not None:
        try:
            softfocus.hf.window(config, setting.window, sinks=setting.sinks)
        except ValueError as error:
            raise LabError(str(error), "leave windows out with --window none") from error
    return config


def _run_as(config: Any, name: str) -> None:
    """Every head of a configuration runs another mechanism, with the windows and the share of RoPE
    that it has.
    """
    layout = softfocus.hf.layout_of(config)
    assert layout is not None  # load_config refuses a config without one
    learned = sorted({*learned_parameters(name), *(key for group in layout.groups() for key in group.learned)})
    if learned:
        raise LabError(
            f"--mechanism {name}: what was trained, or is to run, learns {', '.join(learned)}",
            "choose a mechanism that learns nothing, and a model that has learned nothing for its heads",
        )
    softfocus.hf.assign(config, layout.map(lambda group: replace(group, mechanism=named(name))))


def _changes_nothing(setting: Setting, train_length: int, length: int) -> bool:
    """Whether a model computes the same as without the setting: a short window needs no scaling,
    and is all in sight.
    """
    scaled = setting.rope != "trained" and length > train_length
    hidden = setting.window is not None and length > setting.window
    return setting != AS_TRAINED and setting.mechanism is None and not scaled and not hidden


def earlier(folder: Path, info: RunInfo) -> Evaluation | None:
    """What evaluation.json holds of this training."""
    if not (folder / EVALUATION).exists():
        return None
    try:
        found = load_measured(folder, Evaluation)
    except LabError as error:
        _log.warning("%s: it is replaced", error.what)
        return None
    return found if (found.mechanism, found.seed) == (info.mechanism, info.seed) else None


def _windows(store: TokenStore, lengths: list[int], tokens: int, before: Evaluation | None) -> EvaluationWindows:
    """Windows on the text of an earlier evaluation, where these lengths divide its longest; else on
    their own.
    """
    if before is not None and before.longest and not any(before.longest % length for length in lengths):
        windows = EvaluationWindows(store, [*lengths, before.longest], tokens)
        if (store.folder.name, windows.longest, windows.tokens) == before.text_key:
            return windows
    return EvaluationWindows(store, lengths, tokens)


def warn_of_other_text(folder: Path, before: Evaluation | None, evaluation: Evaluation) -> None:
    """Say that the losses of an earlier evaluation will be lost, where they are of other text."""
    if before is not None and before.rows and before.text_key != evaluation.text_key:
        _log.warning(
            "%s holds %d losses; they were measured on other text, which follows from the longest length and "
            "--tokens, and will be replaced",
            folder / EVALUATION,
            len(before.rows),
        )


def _keep_others(evaluation: Evaluation, before: Evaluation) -> None:
    """Take over the rows of an earlier evaluation that were not measured again, where they can
    stand beside the new ones.
    """
    measured = {(row.length, row.setting) for row in evaluation.rows}
    others = [row for row in before.rows if (row.length, row.setting) not in measured]
    if before.text_key == evaluation.text_key:
        evaluation.rows = sorted(evaluation.rows + others, key=lambda row: (row.setting.order, row.length))


def _edges(buckets: Sequence[int] | None, train_length: int, length: int) -> list[int]:
    if buckets is None:
        return default_edges(train_length, length)
    # The training length is always an edge: what is gained from context is measured from there
    return sorted({0, length, *(edge for edge in (*buckets, train_length) if 0 < edge < length)})


def _row(
    losses_in: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    batches: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]],
    edges: list[int],
    setting: Setting,
    add: Callable[[int], None],
) -> Row:
    means = ClusteredMeans(edges)
    for batch, documents in batches:
        losses = losses_in(batch)  # [B, L]
        means.add(losses, documents)
        add(losses.size)
    buckets = []
    for index, (start, end) in enumerate(itertools.pairwise(edges)):
        mean, tokens = means.mean(index)
        buckets.append(
            Bucket(
                start=start,
                end=end,
                loss=mean.value,
                standard_error=mean.standard_error,
                tokens=tokens,
                # 1e-4 of thousands; more digits would fill the file
                sums=[round(total, 4) for total in means.sums(index)],
            )
        )
    mean, tokens = means.mean()
    return Row(
        length=edges[-1],
        setting=setting,
        loss=mean.value,
        standard_error=mean.standard_error,
        tokens=tokens,
        windows=sum(means.windows),
        documents=means.documents,
        windows_by_document=means.windows,
        buckets=buckets,
    )
