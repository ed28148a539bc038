"""Which masks a model gets: found out from its classes, never saved, and an error where nobody has found out."""

import copy
import pickle

import pytest
import torch
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

import softfocus.hf

NLLB = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.4, "num_experts": 2,
    "encoder_sparse_step": 0, "decoder_sparse_step": 0,
}  # fmt: skip


def nllb(config=None):
    torch.manual_seed(0)
    return NllbMoeForConditionalGeneration(config or NllbMoeConfig(**NLLB)).eval()


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, decoder_input_ids=ids).logits


def test_classes_say_which_masks_their_models_expect(build):
    assert softfocus.hf.use(nllb(), "lssar").config.softfocus.eager_masks is True
    assert build("llama", "lssar").config.softfocus.eager_masks is False
    config = softfocus.hf.use(NllbMoeConfig(**NLLB), "lssar")
    assert config.softfocus.eager_masks is None
    assert nllb(config).config.softfocus.eager_masks is True


def test_the_note_is_not_saved_and_follows_copies(tokens, tmp_path):
    model, ids = softfocus.hf.use(nllb(), "lssar"), tokens(2, 9)
    assert "eager" not in model.config.to_json_string()
    model.save_pretrained(tmp_path)
    for other in (NllbMoeForConditionalGeneration.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert torch.equal(logits(other, ids), logits(model, ids))
    assert pickle.loads(pickle.dumps(model.config)).softfocus.eager_masks is True


def test_assigning_keeps_it(tokens):
    model, ids = softfocus.hf.use(nllb(), "lssar"), tokens(2, 9)
    softfocus.hf.assign(model, softfocus.hf.Layout.alike(softfocus.hf.Heads(mechanism="lssar_p3")))
    assert torch.equal(logits(model, ids), logits(softfocus.hf.use(nllb(), "lssar_p3"), ids))


def test_a_config_changed_behind_its_models_back_is_an_error(build, tokens):
    model = build("llama")
    softfocus.hf.use(model.config, "lssar")
    with pytest.raises(
        ValueError, match=r"its mechanism was set after its model was built; call softfocus.hf.use\(model"
    ):
        model(tokens(1, 5))
    softfocus.hf.use(model, "lssar")(tokens(1, 5))


def test_a_window_is_refused_where_masks_do_not_say_who_is_where(tokens):
    model = softfocus.hf.window(softfocus.hf.use(nllb(), "lssar"), 4)
    with pytest.raises(ValueError, match="window: NllbMoeAttention belongs to a model without SDPA support"):
        logits(model, tokens(1, 9))
