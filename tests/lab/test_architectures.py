"""The architectures that claims need and Transformers lacks: their formulas, and that runs keep
them.
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, softplus

import softfocus
from softfocus.hf.adapter import REPLACED
from softfocus.hf.learned import attention_modules
from softfocus.lab import model as models
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import load_measured
from softfocus.lab.run_folder.results import Evaluation
from softfocus.lab.train.records import norms, projection_weights
from softfocus.lab.train.run import train

VIT, LLAMA = ("vit-toy", "model.architecture=vit_qk_layer_norm"), ("toy-llama", "model.architecture=llama_query_scale")


def disturbed(model: Any) -> Any:
    """The model with learned values that are not those it starts with."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj.1." in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def build(name: str, *overrides: str, vocabulary: int = 257) -> Any:
    torch.manual_seed(0)
    return models.build(load(name, list(overrides)), vocabulary).eval()


@pytest.mark.parametrize("mechanism", ["softmax", "laser"])
def test_a_vit_normalises_queries_and_keys_of_each_head(mechanism: str) -> None:
    model = disturbed(build(*VIT, f"model.mechanism={mechanism}", vocabulary=10))
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    inputs: list[Tensor] = []

    def recorded(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        calls.append((query, key, value))
        return softfocus.attention(query, key, value, **arguments)

    modules: list[Any] = list(attention_modules(model))
    for module in modules:
        setattr(module, REPLACED, recorded)
        module.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append((*args, *kwargs.values())[0]), with_kwargs=True
        )
    model(torch.randn(2, 1, 32, 32))
    assert len(calls) == len(inputs) == len(modules) == 3
    for module, hidden, (query, key, value) in zip(modules, inputs, calls, strict=True):
        for found, (linear, norm) in ((query, module.q_proj), (key, module.k_proj)):
            heads = linear(hidden).unflatten(-1, (2, 32)).transpose(1, 2)
            expected = layer_norm(heads, (32,), norm.weight, norm.bias, norm.eps)
            torch.testing.assert_close(found, expected)
            assert norm.weight.numel() == 32  # shared by the heads
        torch.testing.assert_close(value, module.v_proj(hidden).unflatten(-1, (2, 32)).transpose(1, 2))


def test_scaled_queries_are_those_of_a_llama_whose_projection_has_the_factors() -> None:
    fresh = build(*LLAMA)
    llama = build("toy-llama")
    # The same random numbers make both, and a factor starts as one
    tokens = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(fresh(tokens).logits, llama(tokens).logits, rtol=0, atol=0)
    model = disturbed(fresh)
    with torch.no_grad():
        for scaled, plain in zip(model.model.layers, llama.model.layers, strict=True):
            factors = softplus(scaled.self_attn.q_proj[1].s) / torch.tensor(2.0).log()
            plain.self_attn.q_proj.weight *= factors.repeat(2)[:, None]
    assert not torch.equal(model(tokens).logits, build("toy-llama")(tokens).logits)
    torch.testing.assert_close(model(tokens).logits, llama(tokens).logits)


@pytest.mark.parametrize(("recipe", "count"), [(VIT, 12), (LLAMA, 2)], ids=["vit_qk_layer_norm", "llama_query_scale"])
def test_a_model_is_saved_and_loaded_with_what_it_learned(recipe: tuple[str, str], count: int, tmp_path: Path) -> None:
    model = disturbed(build(*recipe, "model.mechanism=laser"))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    mine, its = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert sum("_proj.1." in name for name in mine) == count
    card = (tmp_path / "README.md").read_text()
    assert f"from softfocus.lab.architectures import {type(model).__name__}" in card
    assert "Register it with the Auto classes." in card


def test_the_norms_of_gradients_are_those_of_the_projections() -> None:
    model = build(*LLAMA)
    model(torch.randint(257, (2, 20))).logits.square().sum().backward()
    found = norms(projection_weights(model))["query"]
    weights = [layer.self_attn.q_proj[0].weight.grad for layer in model.model.layers]
    torch.testing.assert_close(found, torch.cat(weights).norm())


@pytest.mark.long
@pytest.mark.parametrize("recipe", [VIT, LLAMA], ids=["vit_qk_layer_norm", "llama_query_scale"])
def test_a_new_process_evaluates_a_run(recipe: tuple[str, str], tmp_path: Path) -> None:
    """It has to know the architecture before the model's config is read."""
    steps = ["train.steps=2", "train.warmup=1", "train.checkpoint_every=2", "train.batch=4", "evaluate.tokens=512"]
    folder = tmp_path / "run"
    train(load(recipe[0], [recipe[1], "model.mechanism=laser", *steps]), folder)
    words = [sys.executable, "-m", "softfocus.lab", "evaluate", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    evaluation = load_measured(folder, Evaluation)
    assert all(math.isfinite(row.loss) for row in evaluation.rows)
