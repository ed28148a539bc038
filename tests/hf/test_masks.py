"""Which masks a model gets: found out from its classes, never saved, and an error where nobody has
found out.
"""

import copy
import json
import pickle

import pytest
import torch
from transformers import (
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    OlmoeConfig,
    OlmoeForCausalLM,
    StaticCache,
)

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


@pytest.mark.long
def test_classes_say_which_masks_their_models_expect(build):
    assert softfocus.hf.use(nllb(), "lssar").config.softfocus.masks == "eager"
    assert build("llama", "lssar").config.softfocus.masks == "sdpa"
    config = softfocus.hf.use(NllbMoeConfig(**NLLB), "lssar")
    assert config.softfocus.masks is None
    assert nllb(config).config.softfocus.masks == "eager"


@pytest.mark.long
def test_the_note_is_not_saved_and_follows_copies(tokens, tmp_path):
    model, ids = softfocus.hf.use(nllb(), "lssar"), tokens(2, 9)
    assert "masks" not in json.loads(model.config.to_json_string())["softfocus"]
    model.save_pretrained(tmp_path)
    for other in (NllbMoeForConditionalGeneration.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert torch.equal(logits(other, ids), logits(model, ids))
    assert pickle.loads(pickle.dumps(model.config)).softfocus.masks == "eager"


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


@pytest.mark.long
def test_a_window_is_refused_where_masks_do_not_say_who_is_where(tokens):
    config = BigBirdPegasusConfig(
        vocab_size=64, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=32,
        attention_type="original_full", is_encoder_decoder=False,
    )  # fmt: skip
    model = softfocus.hf.window(softfocus.hf.use(BigBirdPegasusForCausalLM(config), "lssar"), 4)
    with pytest.raises(ValueError, match=r"window: .* belongs to a model without SDPA support"):
        model(tokens(1, 9))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
def test_models_that_drop_queries_keep_their_places(tokens, mechanism, sharded):
    """Gemma 4 computes its last layers, which share keys, for the queries whose logits are
    wanted.
    """
    config = Gemma4TextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=8,
        num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=32,
        initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = Gemma4ForCausalLM(config).eval(), tokens(1, 9)
    if sharded:  # as by fully_shard(), which makes classes without a source
        model.model.__class__ = type("Sharded", (type(model.model),), {})
    softfocus.hf.use(model, mechanism)
    with torch.no_grad():
        whole = model(ids).logits
        kept = model(ids, logits_to_keep=3).logits
        cached = model(ids, logits_to_keep=1, past_key_values=StaticCache(config=config, max_cache_len=16)).logits
    torch.testing.assert_close(kept, whole[:, -3:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cached, whole[:, -1:], rtol=1e-4, atol=1e-4)


def test_a_window_that_the_models_eager_attention_does_not_have_is_not_run():
    """OLMoE passes its window on for FlashAttention alone: with padding there was a mask and no
    window, without padding a window.
    """
    torch.manual_seed(0)
    config = OlmoeConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, num_experts=2, num_experts_per_tok=1, initializer_range=0.4, pad_token_id=0, bos_token_id=None,
        eos_token_id=None, sliding_window=4, attn_implementation="eager",
    )  # fmt: skip
    model, ids = OlmoeForCausalLM(config).eval(), torch.randint(1, 61, (1, 9))
    with torch.no_grad():
        want = model(ids).logits
        got = softfocus.hf.use(model, "softmax")(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
