"""Which heads do far keys disturb: the loss in long windows when one head alone keeps to the last
keys.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import softfocus.hf
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.windows import EvaluationWindows
from softfocus.lab.evaluate.forward import losses_of, open_run
from softfocus.lab.evaluate.means import ClusteredMeans
from softfocus.lab.progress import Event, Listener, silent
from softfocus.lab.run_folder.files import measures, save_measured, with_rows_so_far
from softfocus.lab.run_folder.results import HeadRow, HeadsMeasured
from softfocus.layout import Heads, Layer, Layout, heads_of_a_key


@measures
def heads(
    folder: Path,
    length: int,
    *,
    window: int | None = None,
    tokens: int | None = None,
    batch_tokens: int = 4096,
    progress: Listener = silent,
) -> HeadsMeasured:
    """Mean loss of a run in windows of one length: as it is, with all heads narrowed, and with each
    head narrowed alone.

    A narrowed head sees the last keys only. Where that lowers the loss, far keys disturb the head.
    Query heads that share a KV head are narrowed together. Nothing is trained. Every row reads the
    same validation tokens.

    Each row is written to heads.json as it is finished. Rows that are there already are kept, if
    they were measured on the same text.

    Args:
        folder: a finished run of a recipe with text.
        length: tokens a window, longer than `window`.
        window: keys that a narrowed head sees, itself included; by default the training length. A
            head with a narrower window of its own keeps that, and is not measured.
        tokens: validation tokens a row; by default the recipe's.
        batch_tokens: tokens a forward pass, at least one window.
        progress: called with a "row" event as each row is finished, and "step" events between.

    Returns:
        What heads.json holds.

    Raises:
        LabError: a run that is not finished, one that was trained on a task, or a length that does
            not fit the text.
    """
    info, recipe, config = open_run(folder, length, "heads --length {}")
    window = window or info.train_length
    store = data.tokens(recipe, folder, info, progress)
    spans = EvaluationWindows(store, [length], tokens or recipe.evaluate.tokens)
    found = with_rows_so_far(
        folder,
        HeadsMeasured(
            **info.named,
            corpus_key=store.folder.name,
            length=length,
            window=window,
            tokens=spans.tokens,
            rows=[],
        ),
    )
    trained = softfocus.hf.layout_of(config)
    assert trained is not None  # every model of the lab has been given a mechanism
    there = {(row.layer, row.head) for row in found.rows}
    layouts = narrowings(trained, config, window)
    plan = [(layer, head, layout) for layer, head, layout in layouts if (layer, head) not in there]
    if not plan:
        return found
    model = models.load(folder, config)
    losses_in = losses_of(model, recipe)
    done, total = 0, spans.tokens * len(plan)
    for layer, head, layout in plan:
        softfocus.hf.assign(model, layout)
        means = ClusteredMeans([0, length])
        with models.memory("lower --batch-tokens, or measure a shorter length"):
            for batch, documents in spans.batches(length, batch_tokens):
                losses = losses_in(batch)
                means.add(losses, documents)
                done += losses.size
                progress(Event(kind="step", run=info.name, done=done, total=total))
        sums = [round(value, 4) for value in means.sums(0)]
        found.rows.append(HeadRow(layer=layer, head=head, sums=sums, windows=means.windows))
        save_measured(folder, found)
        message = f"{head_name(layer, head)}: {means.mean()[0].value:.3f}"
        progress(Event(kind="row", run=info.name, message=message, done=done, total=total))
    return found


def head_name(layer: int | None, head: int | None) -> str:
    """What is narrowed, for people."""
    if layer is None:
        return "none" if head is None else "all"
    return f"layer {layer}, head {head}"


def narrowings(layout: Layout, config: Any, keys: int) -> Iterator[tuple[int | None, int | None, Layout]]:
    """The layout as it is, (None, None); with every head narrowed, (None, 0); and each head alone,
    (layer, head).

    Heads that share a KV head go together, under the number of the first.
    """
    layers = [layout.layer(layer) for layer in range(config.num_hidden_layers)]
    total, shared = config.num_attention_heads, heads_of_a_key(config)
    yield None, None, layout
    yield None, 0, layout.map(lambda group: _narrow(group, keys))
    for layer, groups in enumerate(layers):
        single = [replace(group, heads=shared) for group in groups for _ in range((group.heads or total) // shared)]
        for place, group in enumerate(single):
            if _narrow(group, keys) != group:
                changed = (*single[:place], _narrow(group, keys), *single[place + 1 :])
                changed = changed if len(changed) > 1 else (replace(changed[0], heads=None),)
                yield layer, place * shared, _of_layers([*layers[:layer], changed, *layers[layer + 1 :]])


def _narrow(group: Heads, keys: int) -> Heads:
    return group if group.window is not None and group.window <= keys else replace(group, window=keys, sinks=0)


def _of_layers(layers: list[Layer]) -> Layout:
    kinds = list(dict.fromkeys(layers))
    return Layout(tuple(kinds), tuple(kinds.index(layer) for layer in layers))
