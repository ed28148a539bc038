"""What a training needs at least is what it takes, and is asked for before it starts."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from softfocus.lab import model as models
from softfocus.lab import objective
from softfocus.lab.claims import claim as claims
from softfocus.lab.claims.claim import recipes
from softfocus.lab.errors import LabError
from softfocus.lab.recipes import loading
from softfocus.lab.train import memory
from softfocus.lab.train.run import train


def test_the_least_memory_of_the_papers_model() -> None:
    """Each of 124 M parameters has 16 bytes, since gradients of earlier micro-batches stay, and a
    copy in bfloat16. Processes share the rest: of each logit its log-probability and two gradients
    of 4 bytes, and activations.
    """
    recipe = recipes(claims.load("softplus-figure-1"), "gpt2", [0])[0]
    state, logits = 18 * 124e6, 12 * 32 * 1024 * 50304
    whole, shared = memory.least_memory(recipe).size, memory.least_memory(recipe, 8).size
    assert 8e9 < whole - state - logits < 16e9
    assert shared - state == pytest.approx((whole - state) / 8, rel=0.02)


def test_the_step_of_the_optimizer_can_need_the_most(tiny: Path) -> None:
    small = loading.load(tiny, ["train.batch=1", "train.length=2", "evaluate.lengths=1x"])
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in models.build(small, 256).parameters())
    assert memory.least_memory(small).size == 16 * parameters


LONG = ("train.length=512", "train.batch=2", "evaluate.lengths=1x")
SINKS = 'model.layout={"0" = { mechanism = "softmax", window = 64, sinks = 4 }}'


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("toy", LONG),
        ("toy", (*LONG, "model.mechanism=lssar", "train.precision=bf16")),
        ("toy", (*LONG, SINKS)),
        ("toy-llama", (*LONG, "model.mechanism=laser")),
        ("demo-global-heads", LONG),
        ("demo-t6-lssar", LONG),
        ("bert-toy", ("model.mechanism=laser", "train.batch=4")),
        ("bert-toy", ("train.precision=bf16", "train.batch=4")),
        ("vit-toy", ("model.mechanism=laser", "train.batch=4")),
        ("conformer-toy", ("train.batch=2",)),
    ],
    ids=str,
)
def test_what_autograd_saves_is_counted(name: str, changes: tuple[str, ...]) -> None:
    """As much as a model saves that computes."""
    recipe = loading.load(name, list(changes))
    rows = recipe.train.batch
    model = models.build(recipe, 256).eval()  # without dropout
    sizes: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        held.append(storage := tensor.untyped_storage())
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    held: list[torch.UntypedStorage] = []  # so that no other storage takes its address
    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.bf16)
    with bf16, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        logits = objective.logits(recipe.data.kind, model, memory._inputs(model, recipe, rows))
        logits.log_softmax(-1)
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved = sum(size for address, size in sizes.items() if address not in own) + 8 * logits.numel()
    with torch.device("meta"):
        empty = models.build(recipe, 256)
    assert memory._saved(empty, recipe, rows) == pytest.approx(saved, rel=0.005)


def test_a_model_that_asks_for_values_is_told_without_its_activations(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "logits", lambda kind, model, inputs: inputs["input_ids"].sum().item())
    monkeypatch.setattr(memory, "_free_memory", lambda: ("this machine", 100))
    with pytest.raises(LabError, match=r"of memory \(activations are not counted\), and this machine has"):
        train(loading.load(tiny), tmp_path / "out")


def test_rows_of_the_same_shapes_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[str] = []
    monkeypatch.setattr(
        memory,
        "least_memory",
        lambda recipe, processes: counts.append(recipe.name) or memory.Least(1, with_activations=True),
    )
    mechanisms = recipes(claims.load("softplus-table-4"), "toy", [0, 1, 2])
    memory.check_memory(mechanisms, 2)
    assert len(counts) == 1
    longer = [loading.load("toy"), loading.load("toy", ["train.length=32"]), loading.load("toy", ["train.batch=8"])]
    memory.check_memory(longer, 2)
    assert len(counts) == 4


@pytest.mark.parametrize(("at_a_time", "needed"), [(1, None), (2, None), (3, "the 3 largest runs need at least 102")])
def test_a_large_run_beside_small_ones_is_not_counted_for_each(
    monkeypatch: pytest.MonkeyPatch, at_a_time: int, needed: str | None
) -> None:
    """100 bytes and three runs of 1, where 101 are free."""
    sizes = {"large": 100, "small": 1}
    monkeypatch.setattr(memory, "least_memory", lambda recipe, _: memory.Least(sizes[recipe.name], True))
    monkeypatch.setattr(memory, "_free_memory", lambda: ("this machine", 101))
    runs = [loading.load("toy", ["name=small"])] * 3 + [loading.load("toy", ["name=large", "train.length=32"])]
    with pytest.raises(LabError, match=needed) if needed else nullcontext():
        memory.check_memory(runs, at_a_time)
