"""Looking inside a run: its model reads text, and every call of attention is measured as it is
made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import softfocus.hf
from softfocus.hf import Call
from softfocus.hf.config import layer_of
from softfocus.hf.learned import attention_modules, parameter_of
from softfocus.hf.learned import heads as heads_of
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.tokenizer import Encoder
from softfocus.lab.data.tokens import TokenStore
from softfocus.lab.data.windows import EvaluationWindows
from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.evaluate.forward import open_run
from softfocus.lab.evaluate.means import ClusteredMeans
from softfocus.lab.inspect.measure import MEASURES, measures, picture
from softfocus.lab.inspect.results import TOKENS, VALIDATION_TEXT, Heads, Inspection, Learned, Length, Row, Value
from softfocus.lab.progress import Listener, Pace, silent
from softfocus.lab.run_folder.results import RunInfo
from softfocus.row_weights import blocks

ROWS = 192
"""Most rows of a window that are looked at, and the most cells of a map along a side."""
LAYERS, HEADS = 4, 2
"""How many layers, and heads of each, have their maps drawn unless others are asked for."""


@dataclass(frozen=True, eq=False)
class Map:
    """A picture of one head's weights in the first window of a length.

    Attributes:
        layer, head, length: of what.
        rows: int64 [R], the positions of its rows in the window.
        shares: float32 [R, cells], as :func:`softfocus.lab.inspect.measure.picture` makes them.
    """

    layer: int
    head: int
    length: int
    rows: NDArray[np.int64]
    shares: NDArray[np.float32]


def inspect(
    folder: Path,
    lengths: Sequence[int],
    *,
    text: Path | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    tokens: int = TOKENS,
    batch_tokens: int = 4096,
    progress: Listener = silent,
) -> tuple[Inspection, list[Map]]:
    """Measure the attention of a run, and draw some of it.

    All layers and heads are measured, at every length on the same text. Of a window longer than
    :data:`ROWS` so many rows are looked at, evenly spaced; the weights of a row are always whole.
    Memory is bounded by `batch_tokens` for the model and by
    :data:`softfocus.row_weights.BLOCK_ELEMENTS` for the weights.

    Args:
        folder: a finished run.
        lengths: tokens a window; each divides the longest.
        text: a file to read; by default the validation text of the run's corpus.
        layers: whose maps are drawn, from 0; by default up to four, evenly spaced.
        heads: whose maps are drawn in these layers, from 0; by default the first two.
        tokens: how many are read at each length.
        batch_tokens: tokens a forward pass, at least one window.
        progress: called with "step" events.

    Raises:
        LabError: a run that is not finished, a text that cannot be read, is too short or holds what
            the run's tokenizer has no token for, more tokens than the model has positions or the
            device has memory.
        UsageError: a layer or head that the model has not got.
    """
    lengths = sorted(set(lengths))
    info, recipe, config = open_run(folder, max(lengths), "inspect --lengths up to {}")
    store = data.tokens(recipe, folder, info, progress) if text is None else _read(text, folder, max(lengths))
    windows = EvaluationWindows(store, lengths, tokens)
    model = models.load(folder, config)
    look = _Look(model, info, layers, heads)
    pace = Pace(info.name, len(lengths) * windows.tokens, progress)
    for length in lengths:
        look.begin(length)
        for batch, documents in windows.batches(length, batch_tokens):
            inputs = torch.from_numpy(batch[:, :-1]).to(model.device)
            with (
                models.memory("lower --batch-tokens, or inspect shorter lengths"),
                torch.inference_mode(),
                torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=recipe.train.bf16),
                softfocus.hf.watch(look),
            ):
                model.base_model(input_ids=inputs, use_cache=False)
            look.end_of_batch(documents)
            pace.add(inputs.numel())
    found = Inspection(
        run=info.name,
        mechanism=info.mechanism,
        train_length=info.train_length,
        seed=info.seed,
        commit=info.commit,
        token=info.token,
        asked=tokens,
        text=VALIDATION_TEXT if text is None else text.name,
        heads=look.heads,
        lengths=[look.about(length) for length in lengths],
        rows=[row for length in lengths for row in look.rows(length)],
    )
    return found, look.maps


class _Look:
    """Listens to a model's calls of attention and keeps what they measure."""

    def __init__(self, model: Any, info: RunInfo, layers: Sequence[int] | None, heads: Sequence[int] | None) -> None:
        modules = list(attention_modules(model))
        self._numbers = {module: number for number, module in enumerate(modules)}
        self.heads = [heads for number, module in enumerate(modules) for heads in _groups(number, module)]
        """What runs where."""
        self._keys = sorted((group.layer, head) for group in self.heads for head in group.heads)
        self._layers = _asked("layers", layers, len(modules), _spread(len(modules)))
        least = min(heads_of(modules[layer]) for layer in self._layers)
        self._heads = _asked("heads", heads, least, range(min(HEADS, least)))
        self._train_length = info.train_length
        self._values: dict[int, list[NDArray[np.float64]]] = {}
        self._documents: dict[int, list[NDArray[np.int64]]] = {}
        self._batch: dict[tuple[int, int], NDArray[np.float64]] = {}
        self.maps: list[Map] = []

    def begin(self, length: int) -> None:
        """The batches that follow are windows of this length."""
        self._length = length
        self._values[length], self._documents[length] = [], []
        count = min(ROWS, length)
        self._rows = torch.arange(1, count + 1) * length // count - 1

    def __call__(self, call: Call) -> None:
        """One group of heads of one layer."""
        layer = self._numbers[call.module]
        draws = not self._values[self._length] and layer in self._layers
        shown = [head for head in call.heads if draws and head in self._heads]
        pictures: dict[int, list[torch.Tensor]] = {head: [] for head in shown}
        sums = torch.zeros(
            len(call.query), len(call.heads), len(MEASURES), dtype=torch.float64, device=call.query.device
        )
        for block in blocks(call.query, call.key, rows=self._rows, **call.arguments):
            found = measures(block.weights, block.visible, block.rows, self._train_length)
            sums += found.double().sum(2)  # [B, H, measures]
            for head in shown:
                index = 0, head - call.heads.start
                pictures[head].append(picture(block.weights[index], block.visible[index], ROWS))
        means = (sums / len(self._rows)).cpu().numpy()
        for number, head in enumerate(call.heads):
            self._batch[layer, head] = means[:, number]
        for head in shown:
            shares = torch.cat(pictures[head]).float().cpu().numpy()
            self.maps.append(Map(layer, head, self._length, self._rows.numpy(), shares))

    def end_of_batch(self, documents: NDArray[np.int64]) -> None:
        """The documents that the batch's windows start in, [B]."""
        values = np.stack([self._batch[key] for key in self._keys], axis=1)  # [B, heads, measures]
        self._values[self._length].append(values)
        self._documents[self._length].append(documents)
        self._batch.clear()

    def about(self, length: int) -> Length:
        """What was read at a length."""
        documents = np.concatenate(self._documents[length])
        rows = min(ROWS, length)
        return Length(length=length, windows=len(documents), documents=len(np.unique(documents)), rows=rows)

    def rows(self, length: int) -> list[Row]:
        """All, then layer by layer: the layer's mean, and its heads."""
        values, documents = np.concatenate(self._values[length]), np.concatenate(self._documents[length])
        layers = dict.fromkeys(layer for layer, _ in self._keys)
        of_layer = {layer: [n for n, key in enumerate(self._keys) if key[0] == layer] for layer in layers}
        means = {layer: values[:, chosen].mean(1) for layer, chosen in of_layer.items()}  # [windows, measures]
        rows = [_row(length, None, None, np.mean(list(means.values()), axis=0), documents)]
        for layer, chosen in of_layer.items():
            rows.append(_row(length, layer, None, means[layer], documents))
            rows += [_row(length, layer, self._keys[n][1], values[:, n], documents) for n in chosen]
        return rows


def _row(
    length: int, layer: int | None, head: int | None, values: NDArray[np.float64], documents: NDArray[np.int64]
) -> Row:
    """Of [windows, measures]."""
    found = {}
    for name, column in zip(MEASURES, values.T, strict=True):
        means = ClusteredMeans([0, 1])
        means.add(column[:, None], documents)
        mean, _ = means.mean()
        found[name] = Value(mean=mean.value, standard_error=mean.standard_error)
    return Row(length=length, layer=layer, head=head, **found)


def _asked(option: str, wanted: Sequence[int] | None, count: int, usual: Sequence[int]) -> list[int]:
    if wanted is None:
        return list(usual)
    if odd := [number for number in wanted if not 0 <= number < count]:
        raise UsageError(
            f"--{option}: {odd[0]} is out of range", f"the model has {count} {option}, from 0 to {count - 1}"
        )
    return sorted(set(wanted))


def _spread(count: int) -> list[int]:
    """The first layer, the last one, and others evenly between them."""
    shown = min(LAYERS, count)
    return [n * (count - 1) // max(1, shown - 1) for n in range(shown)]


def _groups(layer: int, module: nn.Module) -> Iterator[Heads]:
    """What the heads of an attention module run and have learned."""
    start = 0
    groups = layer_of(module) or ()
    for number, group in enumerate(groups):
        count = group.heads or heads_of(module)
        found = {name: parameter_of(module, groups, number, name) for name in group.learned}
        learned = [
            Learned(argument=name, start=group.learned[name], values=values.tolist())
            for name, values in found.items()
            if values is not None
        ]
        yield Heads(layer=layer, heads=list(range(start, start + count)), runs=str(group), learned=learned)
        start += count


def _read(text: Path, folder: Path, longest: int) -> TokenStore:
    """A file as the only document of a validation set."""
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise LabError(f"cannot read {text}: {why}", "name a text file with --text") from None
    tokenizer = models.load_tokenizer(folder)
    encode = Encoder(tokenizer)
    ((found, lost),) = encode([content])
    if lost:
        raise LabError(f"{text} has {lost:,} {encode.lost} (that of {folder})", "give another text with --text")
    ids = np.array(found, dtype=np.int64)
    if len(ids) <= longest:
        raise LabError(
            f"{text} has {len(ids):,} tokens, one window of {longest:,} takes {longest + 1:,}",
            "give a longer text, or shorter --lengths",
        )
    nothing, start = np.array([], dtype=np.int64), np.array([0])
    return TokenStore(text, nothing, ids, nothing, start, len(tokenizer))
