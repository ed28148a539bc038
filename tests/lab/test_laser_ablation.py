"""The recipe's key `model.laser_ablation`: LASER with larger values, and without its shift, is the
formula; it stays with a run; and only plain LASER has it.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import softfocus
from softfocus.functional import validated_call
from softfocus.hf.adapter import REPLACED
from softfocus.hf.learned import attention_modules
from softfocus.lab import model as models
from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.evaluate import classify as room
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.generate import generate
from softfocus.lab.laser_ablation import ChangedLaser, as_written
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import load_run
from softfocus.lab.run_folder.results import Setting
from softfocus.lab.train.run import train
from softfocus.lab.train.trainer import Diverged

LASER, TIMES, BARE = (
    "model.mechanism=laser",
    "model.laser_ablation.values_times={}",
    "model.laser_ablation.shifted=false",
)
FEW = ["train.steps=4", "train.checkpoint_every=2", "evaluate.tokens=512"]


def tensors(heads: int = 2, keys: int = 2, length: int = 12) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, length, 8), (2, keys, length, 8), (2, keys, length, 8))
    return tuple(torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)


def result(attend: Any, inputs: tuple[Tensor, ...], **arguments: Any) -> list[Tensor]:
    """The output and the gradients of a loss."""
    out = attend(*inputs, mechanism="laser", **arguments)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


VISIBLE: list[dict[str, Any]] = [
    {"is_causal": True},
    {},
    {"is_causal": True, "window_size": (3, 0)},
    {"attn_mask": torch.ones(12, 12, dtype=torch.bool).tril(-2).logical_or(torch.eye(12).bool())},
    {"is_causal": True, "document_ids": torch.arange(12).div(5, rounding_mode="floor").expand(2, -1)},
    {"is_causal": True, "bias": torch.linspace(-1, 1, 12).expand(1, 1, 1, 12), "scale": 0.3},
]


@pytest.mark.parametrize("times", [1.0, 3.0])
@pytest.mark.parametrize("arguments", VISIBLE, ids=lambda arguments: "-".join(arguments) or "all")
def test_as_written_is_laser_where_nothing_overflows(arguments: dict[str, Any], times: float) -> None:
    """Values and gradients; and of the values that are multiplied."""
    inputs = tensors()
    bare = result(ChangedLaser(times, shifted=False), inputs, **arguments)
    for other in (
        ChangedLaser(times, shifted=True),
        lambda q, k, v, **rest: softfocus.attention(q, k, times * v, **rest),
    ):
        for ours, theirs in zip(bare, result(other, inputs, **arguments), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_as_written_is_the_formula() -> None:
    query, key, value = tensors()
    hidden = torch.ones(12, 12).triu(1).bool()
    weights = (query @ key.mT / math.sqrt(8)).masked_fill(hidden, -math.inf).softmax(-1)
    ours = as_written(validated_call(query, key, value, is_causal=True, mechanism="laser"))
    torch.testing.assert_close(ours, (weights @ value.exp()).log())


def test_key_heads_may_be_shared() -> None:
    inputs = tensors(heads=4)
    both = [result(ChangedLaser(1.0, shifted), inputs, is_causal=True, enable_gqa=True) for shifted in (True, False)]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("largest", "finite"), [(88.6, True), (88.8, False)])
def test_the_shift_is_what_keeps_large_values_finite(largest: float, finite: bool) -> None:
    """With a factor, it is the product that counts. Only rows that see the value have a finite
    weight of it; the products spoil all rows.
    """
    query, key, value = tensors()
    with torch.no_grad():
        value[0, 0, 5, 3] = largest / 4
    out, *gradients = result(ChangedLaser(4.0, shifted=True), (query, key, value), is_causal=True)
    assert all(x.isfinite().all() for x in (out, *gradients))
    out, *gradients = result(ChangedLaser(4.0, shifted=False), (query, key, value), is_causal=True)
    assert out.isfinite().all() == finite
    assert out[0, 0, :5, 3].isnan().all() != finite, "0 times infinity"
    assert out[0, 0, 5:, 3].isinf().all() != finite
    assert finite or any(x.isnan().any() for x in gradients)


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ([TIMES.format(8)], "laser (values x 8)"),
        ([BARE], "laser (no shift)"),
        ([TIMES.format(0.5), BARE], "laser (values x 0.5, no shift)"),
        ([BARE, "model.layout.0.window=8"], "laser[8] / laser (no shift)"),
        ([BARE, "model.layout={ ':' = { window = 8 } }"], "laser[8] (no shift)"),
    ],
)
def test_a_label_says_what_is_changed(changes: list[str], label: str, tiny: Path) -> None:
    recipe = load(tiny, [LASER, "model.config.num_hidden_layers=2", *changes])
    model = models.build(recipe, 257)
    assert models.label(recipe, model.config) == label
    put = [getattr(module, REPLACED) for module in attention_modules(model)]
    entry = recipe.model.laser_ablation
    assert entry is not None
    assert put == [ChangedLaser(entry.values_times, entry.shifted)] * 2


def test_a_recipe_without_it_is_as_before(tiny: Path) -> None:
    recipe = load(tiny, [LASER])
    assert "laser_ablation" not in recipe.to_toml()
    model = models.build(recipe, 257)
    assert not any(hasattr(module, REPLACED) for module in attention_modules(model))
    assert "laser_ablation" not in model.config.to_dict()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.mechanism=lssa", BARE], "laser_ablation: it is about plain LASER, and not about lssa;"),
        (["model.mechanism=laser(lssar)", BARE], "and not about laser_lssar; set model.mechanism='laser'"),
        ([LASER, BARE, "model.parameters.head_scale=1.0"], "and not about laser (learned head_scale from 1);"),
        ([LASER, BARE, 'model.layout.0={ mechanism = "softmax" }'], "and not about softmax;"),
        ([LASER, "model.laser_ablation={}"], "model.laser_ablation: it changes nothing: set values_times or shifted"),
        ([LASER, TIMES.format(-1)], "values_times = -1 should be greater than 0;"),
        ([LASER, TIMES.format(2000)], "values_times = 2000 should be less than or equal to 1000;"),
        ([LASER, "model.laser_ablation.shift=false"], "did you mean 'model.laser_ablation.shifted'?"),
        ([LASER, "model.laser_ablation.shifted='no'"], "shifted = 'no' must be true or false;"),
        ([LASER, "model.laser_ablation=false"], "laser_ablation = False must be a table; set it like --set"),
        ([LASER, BARE, "evaluate.mechanisms=['softmax']"], "a model with model.laser_ablation runs LASER alone;"),
    ],
)
def test_what_it_is_not_about_is_refused(changes: list[str], words: str, tiny: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(tiny, changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two times two steps."""
    folder = tmp_path_factory.mktemp("ablation") / "run"
    train(load(tiny, [LASER, TIMES.format(4), BARE, *FEW]), folder)
    return folder


def test_a_run_is_loaded_as_it_was_trained(run: Path, tiny: Path) -> None:
    """Its loss is that of its weights under the formula, and not that of plain LASER."""
    assert load_run(run).mechanism == "laser (values x 4, no shift)"
    model, ids = models.load(run), torch.arange(32)[None]
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
        others = []
        for times, shifted in ((4.0, True), (1.0, True)):
            for module in attention_modules(model):
                setattr(module, REPLACED, ChangedLaser(times, shifted))
            others.append(model(input_ids=ids).logits)
    torch.testing.assert_close(logits, others[0], rtol=1e-4, atol=1e-4)
    assert (logits - others[1]).abs().max() > 1e-2
    plain = load(tiny, [LASER, *FEW])
    assert models.build(plain, 257).state_dict().keys() == model.state_dict().keys()


def test_a_run_is_evaluated_at_every_length_and_setting(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, folder := tmp_path / "run")
    found = evaluate(folder, [32, 64])
    assert found.mechanism == "laser (values x 4, no shift)"
    assert {row.length for row in found.rows} == {32, 64}
    assert any(row.setting.window for row in found.rows)
    assert all(math.isfinite(row.loss) for row in found.rows)
    with pytest.raises(LabError, match="about plain LASER, and not about softmax; leave --mechanism out"):
        evaluate(folder, [32], settings=[Setting(mechanism="softmax")])


def test_a_run_writes_and_classifies_with_it(run: Path) -> None:
    assert generate(run, "line 7", tokens=3, temperature=0).text
    model = room._classifier(run, 256, 2)
    assert [getattr(module, REPLACED) for module in attention_modules(model)] == [ChangedLaser(4.0, shifted=False)]


def test_t6_decodes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys and values, not with factors."""
    monkeypatch.setattr("softfocus.hf.t6.factored.MIN_NUMBERS", 0)
    torch.manual_seed(0)
    model = models.build(load("demo-t6", [LASER, TIMES.format(4), BARE]), 257).eval()
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        for parameter in model.parameters():  # what attention is projected by starts at zero
            parameter.add_(0.1 * torch.randn_like(parameter))
        whole = model(input_ids=ids, use_cache=False).logits[:, -1]
        cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
        step = model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    torch.testing.assert_close(step, whole, rtol=1e-4, atol=1e-4)


def test_a_resumed_run_is_the_uninterrupted_one(
    run: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from softfocus.lab.progress import Event

    def stop(event: Event) -> None:
        if event.kind == "step" and event.done == 3:
            raise RuntimeError("killed")

    recipe = load(tiny, [LASER, TIMES.format(4), BARE, *FEW])
    with pytest.raises(RuntimeError, match="killed"):
        train(recipe, tmp_path / "run", progress=stop)
    info = train(recipe, tmp_path / "run", resume=True)
    assert info.train_loss == load_run(run).train_loss


def test_values_too_large_end_a_training_without_the_shift(tiny: Path, tmp_path: Path) -> None:
    recipe = [LASER, TIMES.format(1000), *FEW]
    assert train(load(tiny, recipe), tmp_path / "shifted").status == "complete"
    with pytest.raises(Diverged, match="became nan at step 1,"):
        train(load(tiny, [*recipe, BARE]), tmp_path / "bare")
    assert load_run(tmp_path / "bare", complete=False).status == "diverged"


@pytest.mark.parametrize("mechanism", ["softmax", "lssar", "laser(lssa)"])
def test_another_mechanism_is_refused_where_it_is_computed(mechanism):
    """As after `use()`, which does not know of the ablation."""
    model = models.build(load("toy", [LASER, BARE]), 257)
    softfocus.hf.use(model, mechanism)
    with pytest.raises(ValueError, match=r"^mechanism: this model was made with model\.laser_ablation, which is abo"):
        model(torch.zeros(1, 8, dtype=torch.long))


def test_autocast_rounds_the_products_of_neither_form():
    inputs = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bare, shifted_out = (
            ChangedLaser(1.0, shifted)(*inputs, mechanism="laser", is_causal=True) for shifted in (False, True)
        )
    assert bare.dtype == shifted_out.dtype
    assert (bare.double() - shifted_out.double()).abs().max() <= 2 * torch.finfo(
        bare.dtype
    ).eps * shifted_out.abs().max()
