"""Two models that were built from one config object: what is written into it for one does not run
in the other.
"""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import softfocus.hf
from softfocus.hf import layout_of, learned

TOKENS = torch.arange(8)[None]


def _config() -> LlamaConfig:
    return LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize("first", [None, "softmax", "ssmax"])
def test_a_model_does_not_run_what_its_config_was_given_for_a_later_one(first: str | None, tmp_path: Path) -> None:
    config = _config()
    older = LlamaForCausalLM(config if first is None else softfocus.hf.use(config, first)).eval()
    want = older(TOKENS).logits
    newer = LlamaForCausalLM(softfocus.hf.use(config, "lssar")).eval()
    assert newer(TOKENS).logits.isfinite().all()
    says = rf"was built for {first or 'Transformers. own attention'}, and its config now says lssar: the config was"
    for run in (
        lambda: older(TOKENS),
        lambda: softfocus.hf.explain(older),
        lambda: older.save_pretrained(tmp_path),
    ):
        with pytest.raises(ValueError, match=says):
            run()
    softfocus.hf.use(older, first or "softmax")
    torch.testing.assert_close(older(TOKENS).logits, want)
    assert (str(layout_of(older)), str(layout_of(newer))) == (first or "softmax", "lssar")


def test_a_window_or_layout_for_another_model_does_not_change_one_silently() -> None:
    config = softfocus.hf.use(_config(), "lssar")
    older, newer = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    softfocus.hf.assign(newer, "lssar_p3")
    newer(TOKENS)
    with pytest.raises(ValueError, match=r"built for lssar, and its config now says lssar_p3"):
        older(TOKENS)
    LlamaForCausalLM(softfocus.hf.window(config, 4))
    for model in (older, newer):
        with pytest.raises(ValueError, match=r"its config now says lssar_p3\[4\]"):
            model(TOKENS)
        softfocus.hf.assign(model, {"*": {"mechanism": "lssar_p3", "window": 4}})
        model(TOKENS)


def test_copies_are_known_by_the_layout_that_they_share(tmp_path: Path) -> None:
    model = softfocus.hf.use(LlamaForCausalLM(_config()).eval(), {"0": "softmax", "*": "lssar"})
    want = model(TOKENS).logits
    model.save_pretrained(tmp_path)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        LlamaForCausalLM.from_pretrained(tmp_path),
        softfocus.hf.window(copy.deepcopy(model), 64),
    ):
        torch.testing.assert_close(other(TOKENS).logits, want)
        for module in learned.attention_modules(other):
            assert module._softfocus_layout is layout_of(module.config)


@pytest.mark.long
def test_a_copy_is_compiled_in_one_piece() -> None:
    model = softfocus.hf.use(LlamaForCausalLM(_config()).eval(), {"0": "softmax", "*": "lssar"})
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS).logits, model(TOKENS).logits)
