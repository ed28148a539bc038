"""Adapters of PEFT belong to the mechanism that they were trained on, and hold what the heads
learned.
"""

import json
import subprocess
import sys
import warnings

import pytest
import torch
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

import softfocus.hf

peft = pytest.importorskip("peft")


def lora():
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


def learned(model):
    return {name: p for name, p in model.named_parameters() if "softfocus_" in name}


def train_a_step(model, ids):
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()(ids, labels=ids).loss.backward()
    torch.optim.SGD(parameters, lr=0.1).step()


@pytest.mark.parametrize("mechanism", ["lssar", "ssmax"])
def test_an_adapter_comes_back_on_its_own_base(build, tokens, tmp_path, mechanism):
    ids = tokens(2, 9)
    model = peft.get_peft_model(build("llama", mechanism), lora())
    train_a_step(model, ids)
    model.save_pretrained(tmp_path)
    base = build("llama", mechanism)
    before = logits(base, ids)
    back = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(logits(back, ids), logits(model, ids))
    assert not torch.equal(logits(back, ids), before)
    assert back.peft_config["default"].task_type == "CAUSAL_LM"
    assert not any(p.requires_grad for p in back.parameters())


def test_learned_parameters_are_trained_saved_and_loaded(build, tokens, tmp_path):
    model = peft.get_peft_model(build("llama", "ssmax"), lora())
    assert [p.requires_grad for p in learned(model).values()] == [True, True]
    train_a_step(model, tokens(2, 9))
    trained = {name: p.detach().clone() for name, p in learned(model).items()}
    assert all((p != 0.43).any() for p in trained.values())
    model.save_pretrained(tmp_path)
    back = peft.PeftModel.from_pretrained(build("llama", "ssmax"), tmp_path, is_trainable=True)
    for name, parameter in learned(back).items():
        assert torch.equal(parameter, trained[name])
        assert parameter.requires_grad


@pytest.mark.parametrize("found", ["0.17.1", None])
def test_an_older_or_broken_peft_gives_a_warning(monkeypatch, found):
    if found:
        monkeypatch.setattr("softfocus.hf.peft.version", lambda name: found)
    else:
        monkeypatch.setitem(sys.modules, "peft.tuners.tuners_utils", None)
    with pytest.warns(UserWarning, match=r"adapters are not checked.*; update PEFT to 0\.18 or later") as caught:
        softfocus.hf._peft.install()
    assert len(caught) == 1
    assert found is None or f": PEFT {found} is installed;" in str(caught[0].message)


def disabled(model):
    with model.disable_adapter():
        pass


@pytest.mark.parametrize("take_off", [disabled, lambda model: model.unload()], ids=["disable", "unload"])
def test_what_the_heads_learned_stays_with_a_warning(build, tokens, take_off):
    """As where the base model is the reference of preference training."""
    model = peft.get_peft_model(build("llama", "ssmax"), lora())
    train_a_step(model, tokens(2, 9))
    with pytest.warns(UserWarning, match=r"softfocus_\* keep what was learned with it, so this is not the base model"):
        take_off(model)
    with warnings.catch_warnings(action="error", category=UserWarning):
        take_off(peft.get_peft_model(build("llama", "lssar"), lora()))  # it learns nothing in its heads


def test_transformers_own_adapters(build, tokens, tmp_path):
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"Transformers itself refuses this PEFT: {error}")
    ids, model = tokens(2, 9), build("llama", "ssmax")
    model.add_adapter(lora())
    train_a_step(model, ids)
    model.save_pretrained(tmp_path)
    back = build("llama", "ssmax")
    back.load_adapter(str(tmp_path))
    assert torch.equal(logits(back, ids), logits(model, ids))
    with pytest.warns(UserWarning, match=r"disable_adapters\(\) takes the adapter off"):
        back.disable_adapters()
    with pytest.raises(ValueError, match="was trained on a model that runs ssmax"):
        build("llama").load_adapter(str(tmp_path))


@pytest.mark.parametrize(
    ("base", "runs"),
    [(None, "Transformers' own attention"), ("softmax", "softmax"), ("lssar_p3", "lssar_p3")],
)
def test_another_base_is_refused(build, tmp_path, base, runs):
    peft.get_peft_model(build("llama", "lssar"), lora()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"'default' was trained on a model that runs lssar; this one runs {runs}"):
        peft.PeftModel.from_pretrained(build("llama", base), tmp_path)


def test_an_adaption_prompt_is_refused(build, tokens, tmp_path):
    """It injects attention, but not through BaseTuner: nothing would check its base."""
    config = {"task_type": "CAUSAL_LM", "adapter_len": 4, "adapter_layers": 2}
    model = peft.get_peft_model(build("llama"), peft.AdaptionPromptConfig(**config))
    assert logits(model, tokens(1, 5)).isfinite().all()
    model.save_pretrained(tmp_path)
    refusal = r"^adapter 'default': an adaption prompt adds softmax attention .* that runs lssar, .*; take LoRA"
    with pytest.raises(ValueError, match=refusal):
        peft.get_peft_model(build("llama", "lssar"), peft.AdaptionPromptConfig(**config))
    with pytest.raises(ValueError, match=refusal):
        peft.PeftModel.from_pretrained(build("llama", "lssar"), tmp_path)


def test_adapters_of_other_models_are_left_alone(build, tokens, tmp_path):
    model = peft.get_peft_model(build("llama"), lora())
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["task_type"] == "CAUSAL_LM"
    assert "softfocus" not in saved
    with warnings.catch_warnings(action="error", category=UserWarning):
        back = peft.PeftModel.from_pretrained(build("llama"), tmp_path)
        peft.get_peft_model(build("llama", "lssar"), lora())  # it is trained here: nothing to warn of
    assert torch.equal(logits(back, tokens(1, 5)), logits(model, tokens(1, 5)))
    with pytest.warns(UserWarning, match="'default' does not say what its base model ran, and this one runs lssar"):
        peft.PeftModel.from_pretrained(build("llama", "lssar"), tmp_path)


@pytest.mark.long
def test_without_softfocus_the_adapter_is_refused(build, tmp_path):
    peft.get_peft_model(build("llama", "lssar"), lora()).save_pretrained(tmp_path)
    code = f"from peft import PeftConfig; PeftConfig.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "import softfocus.hf before loading this adapter" in done.stderr
    assert peft.PeftConfig.from_pretrained(str(tmp_path)).task_type == "CAUSAL_LM"  # and here it is not


@pytest.mark.parametrize("before", [None, "softmax", "lssa"])
def test_an_adapter_is_that_of_the_mechanism_put_in_after_it(build, tokens, tmp_path, before):
    """As use() tells a user of a wrapped model to do."""
    model = peft.get_peft_model(build("llama", before), lora())
    softfocus.hf.use(model.get_base_model(), "lssar")
    model.save_pretrained(tmp_path)
    back = peft.PeftModel.from_pretrained(build("llama", "lssar"), tmp_path)
    assert torch.equal(logits(back, tokens(2, 9)), logits(model, tokens(2, 9)))
    with pytest.raises(ValueError, match="was trained on a model that runs lssar"):
        peft.PeftModel.from_pretrained(build("llama", before or "softmax"), tmp_path)


def test_a_frozen_adapter_beside_a_trained_one_freezes_nothing_that_is_learned(build, tokens, tmp_path):
    """As the reference adapter of preference training."""
    model = peft.get_peft_model(build("llama", "ssmax"), lora(), adapter_name="policy")
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path / "policy", "reference", is_trainable=False)
    model.set_adapter("policy")
    before = {name: p.detach().clone() for name, p in learned(model).items()}
    train_a_step(model, tokens(2, 9))
    assert all((p != before[name]).any() for name, p in learned(model).items())


def test_a_config_of_an_adapter_serves_models_of_several_mechanisms(build, tokens):
    config = lora()
    for mechanism in ("lssar", "ssmax"):
        assert logits(peft.get_peft_model(build("llama", mechanism), config), tokens(2, 9)).isfinite().all()


def test_adapters_on_an_inner_model_follow_too(build, tmp_path):
    outer = build("gpt_neox", None)
    inner = peft.get_peft_model(outer.gpt_neox, peft.LoraConfig(target_modules=["query_key_value"], r=4))
    softfocus.hf.use(outer, "lssar")
    inner.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was trained on a model that runs lssar"):
        peft.PeftModel.from_pretrained(build("gpt_neox", "lssa").gpt_neox, tmp_path)
    peft.PeftModel.from_pretrained(build("gpt_neox", "lssar").gpt_neox, tmp_path)


def test_an_adapter_that_is_not_trained_stays_that_of_its_base(build, tmp_path):
    """A loaded one, whatever runs it; and any under a window, which is for evaluation."""
    model = peft.get_peft_model(build("llama", "lssar"), lora())
    softfocus.hf.window(model.get_base_model(), 4)
    model.save_pretrained(tmp_path / "windowed")
    loaded = peft.PeftModel.from_pretrained(build("llama", "lssar"), tmp_path / "windowed")
    softfocus.hf.use(loaded.get_base_model(), "ssmax")
    assert not any(p.requires_grad for p in learned(loaded).values())
    loaded.save_pretrained(tmp_path / "again")
    peft.PeftModel.from_pretrained(build("llama", "lssar"), tmp_path / "again")
