"""Models under softfocus train: gradients, learned parameters, checkpointing, bfloat16, the
compiler, the Trainer.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import softfocus.hf


def step(model, ids):
    """One step of AdamW on the loss of ids predicting themselves; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def learned(model):
    return {name: parameter for name, parameter in model.named_parameters() if "softfocus_" in name}


@pytest.mark.parametrize(
    ("mechanism", "parameters"),
    [
        ("ssmax", {}),
        ("qknorm", {"head_scale": 5.0}),
        ("relu_shen", {}),
        ("lssar", {"power": 4.0}),
        ("sharpened(ssmax, 2)", {"power": 2.0, "head_scale": 0.5}),
    ],
)
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "bert", "t6"])
def test_learned_parameters_train(build, tokens, family, mechanism, parameters):
    model = build(family, mechanism, parameters)
    before = {name: parameter.clone() for name, parameter in learned(model).items()}
    owned = {*softfocus.catalog.learned_parameters(mechanism), *parameters}
    assert {name.split("softfocus_")[1] for name in before} == owned
    assert len(before) == len(owned) * model.config.num_hidden_layers
    for name, value in before.items():
        assert torch.equal(value, torch.full((4,), parameters.get(name.split("softfocus_")[1], value[0].item())))
    step(model, tokens(4, 9))
    for name, parameter in learned(model).items():
        assert parameter.grad.isfinite().all()
        assert (parameter != before[name]).all(), f"{name}: a head did not learn"


@pytest.mark.parametrize("mechanism", ["lssar", "laser(lssa)", "ssmax"])
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "t6"])
def test_gradient_checkpointing_changes_no_gradient(build, tokens, family, mechanism):
    plain, checkpointed, ids = build(family, mechanism), build(family, mechanism), tokens(2, 9)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = []
    checkpointed.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert step(plain, ids) == step(checkpointed, ids)
    assert len(calls) == 2  # once forward, once again for the gradient
    for (name, one), (_, other) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("mechanism", ["lssar", "laser(lssa)", "ssmax"])
def test_bfloat16(build, tokens, in_double, monkeypatch, mechanism):
    """At most twice the error of the same bfloat16 model with its attention computed in float64."""
    model, ids = build("llama", mechanism).bfloat16(), tokens(4, 16)

    def run(model):
        with torch.no_grad():
            return model(ids).logits

    def exactly(query, key, value, head_scale=None, **kwargs):
        wide = {"head_scale": None if head_scale is None else head_scale.double(), **kwargs}
        return softfocus.attention(query.double(), key.double(), value.double(), **wide).to(query.dtype)

    exact, ours = run(in_double(model)), run(model)
    assert ours.dtype == torch.bfloat16
    monkeypatch.setattr(softfocus.hf.adapter, "attention", exactly)
    assert (ours - exact).norm() <= 2 * (run(model) - exact).norm()
    monkeypatch.undo()
    step(model, ids)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_autocast(build, tokens):
    model, ids = build("llama", "lssar"), tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.long
def test_the_compiler_sees_one_graph(build, tokens):
    for mechanism in ("lssar", "ssmax"):
        model, ids = build("llama", mechanism), tokens(2, 9)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(ids).logits, model(ids).logits)


def test_the_trainer_trains_saves_and_loads(build, tokens, tmp_path):
    model = build("gpt_neox", "ssmax")
    before = {name: parameter.clone() for name, parameter in learned(model).items()}
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 9)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=0.01, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path))
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in learned(back).items():
        assert torch.equal(parameter, model.get_parameter(name))
        assert not torch.equal(parameter, before[name])
