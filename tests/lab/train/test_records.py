"""What a training notes of itself: held-out losses and gradients of projections, without a change
to the training.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import softfocus.hf
from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.errors import LabError
from softfocus.lab.progress import Event, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import MODEL
from softfocus.lab.run_folder.results import RunInfo
from softfocus.lab.train.records import norms, projection_weights
from softfocus.lab.train.run import train

NOTING = ["train.validations=5", "train.projection_norms=true"]


@pytest.fixture(scope="module")
def noting(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, RunInfo, Path]:
    """The tiny recipe, and a run of it that notes everything."""
    recipe, folder = load(tiny, NOTING), tmp_path_factory.mktemp("noting") / "run"
    return recipe, train(recipe, folder), folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / MODEL / "model.safetensors")


def test_noting_changes_nothing(noting: tuple[Recipe, RunInfo, Path], trained: Path) -> None:
    _, info, folder = noting
    for name, tensor in weights(trained).items():
        assert torch.equal(weights(folder)[name], tensor), name
    assert [step for step, _ in info.validation_loss] == [2, 4, 6, 8, 10]
    assert {name: len(its) for name, its in info.projection_norms.items()} == {"query": 10, "key": 10, "value": 10}


def test_the_last_held_out_loss_is_that_of_the_saved_model(noting: tuple[Recipe, RunInfo, Path]) -> None:
    recipe, info, folder = noting
    source = data.load(recipe, silent)
    assert isinstance(source, data.Text)
    windows = source.validation_windows(recipe)
    assert windows.shape == (recipe.evaluate.tokens // recipe.train.length, recipe.train.length + 1)
    model = models.load(folder)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=one[None, :-1], use_cache=False).logits[0] for one in windows])
    mean = F.cross_entropy(logits, windows[:, 1:].flatten()).item()
    assert info.validation_loss[-1][1] == pytest.approx(mean, rel=1e-5)
    held_out = source.store.validation.tobytes()
    assert all(window[:8].numpy().astype(source.store.validation.dtype).tobytes() in held_out for window in windows)


@pytest.mark.long
def test_a_resumed_training_has_noted_the_same(noting: tuple[Recipe, RunInfo, Path], tmp_path: Path) -> None:
    recipe, whole, _ = noting

    def stop(event: Event) -> None:
        if event.kind == "step" and event.done == 6:
            raise KeyboardInterrupt

    with pytest.raises(LabError, match="checkpoint-4, is kept"):
        train(recipe, tmp_path / "run", progress=stop)
    info = train(recipe, tmp_path / "run", resume=True)
    assert info.validation_loss == whole.validation_loss
    assert info.projection_norms == whole.projection_norms
    shutil.rmtree(tmp_path / "run")


def test_micro_batches_have_the_gradient_of_the_whole(
    noting: tuple[Recipe, RunInfo, Path], tiny: Path, tmp_path: Path
) -> None:
    _, whole, _ = noting
    info = train(load(tiny, [*NOTING, "train.accumulate=2"]), tmp_path / "run")
    for name, noted in whole.projection_norms.items():
        first, second = noted[0][1], info.projection_norms[name][0][1]
        assert second == pytest.approx(first, rel=1e-3), name


@pytest.mark.parametrize("architecture", ["gpt_neox", "llama"])
def test_projections_are_told_apart(architecture: str) -> None:
    """Where all keys are zero no gradient reaches the queries, and only them."""
    torch.manual_seed(0)
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, vocab_size=20, **config))
    softfocus.hf.use(model, "softmax")
    tokens = torch.randint(20, (2, 9))

    def found() -> dict[str, float]:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return {name: float(norm) for name, norm in norms(projection_weights(model)).items()}

    assert all(norm > 0 for norm in found().values())
    assert [len(layers) for layers in projection_weights(model).values()] == [2, 2, 2]
    seen: list[float] = []
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "k_proj"):
                module.k_proj.weight.zero_()
            elif hasattr(module, "query_key_value"):
                module.query_key_value.weight.view(2, 3, 8, 16)[:, 1] = 0
                module.query_key_value.bias.zero_()
    with softfocus.hf.watch(lambda call: seen.append(call.key.abs().max().item())):
        without = found()
    assert seen == [0.0, 0.0]
    assert without["query"] == 0
    assert min(without["key"], without["value"]) > 0


def test_what_cannot_be_noted(tiny: Path, tmp_path: Path) -> None:
    overrides = ["model.architecture=gpt2", "model.config={ n_embd = 32, n_layer = 1, n_head = 2 }"]
    with pytest.raises(LabError, match="projections of the architecture 'gpt2' are not known"):
        train(load(tiny, [*overrides, "train.projection_norms=true"]), tmp_path / "run")
    for override in ("train.validations=5", "evaluate.also=['attention']"):
        with pytest.raises(LabError, match="another kind than text has no text held out"):
            load("mqar-softmax", [override])
