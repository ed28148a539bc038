"""Mllama: self-attention and cross-attention layers in one stack, and one cache for both. OPT and
Whisper: models that scale the query themselves.
"""

import math

import pytest
import torch
from transformers import (
    DynamicCache,
    EsmConfig,
    EsmModel,
    OPTConfig,
    OPTForCausalLM,
    TimesFmConfig,
    TimesFmModel,
    WhisperConfig,
    WhisperModel,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.mllama.modeling_mllama import MllamaForCausalLM

import softfocus.hf
from softfocus import Mechanism

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
WINDOW = {"1": "softmax", "*": {"mechanism": "softmax", "window": 64}}  # layer 1 crosses; wider than the texts


@pytest.fixture
def mllama():
    torch.manual_seed(0)
    config = MllamaTextConfig(
        vocab_size=61, num_hidden_layers=3, cross_attention_layers=[1], initializer_range=0.4, pad_token_id=0,
        bos_token_id=1, eos_token_id=60, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **SIZES,
    )  # fmt: skip
    model = MllamaForCausalLM(config).eval().double()
    for name, parameter in model.named_parameters():
        if name.endswith("gate"):  # 0 in a new model, which closes the cross-attention
            parameter.data.fill_(0.7)
    return model


def text(rows, length):
    return torch.randint(1, 60, (rows, length), generator=torch.Generator().manual_seed(1))


def test_generation_with_windows_beside_cross_attention_layers(mllama):
    softfocus.hf.use(mllama, WINDOW)
    ids = text(2, 11)
    ids[0, :3] = 0
    given = {"attention_mask": (ids != 0).long(), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want = mllama.generate(ids, use_cache=False, **given)
    assert torch.equal(mllama.generate(ids, **given), want)
    assert torch.equal(mllama.generate(ids, cache_implementation="static", **given), want)


def test_a_second_turn_with_windows_beside_cross_attention_layers(mllama):
    softfocus.hf.use(mllama, {"1": "lssar", "*": {"mechanism": "lssar", "window": 4}})
    ids, cache = text(1, 11), DynamicCache(config=mllama.config)
    with torch.no_grad():
        turns = [mllama(turn, past_key_values=cache, use_cache=True).logits for turn in ids.split([6, 5], dim=1)]
        torch.testing.assert_close(torch.cat(turns, dim=1), mllama(ids, use_cache=False).logits)


@pytest.mark.parametrize("window", [3, 64])
def test_decoding_with_an_image_in_the_cache(mllama, window):
    softfocus.hf.use(mllama, {"1": "lssar", "*": {"mechanism": "lssar", "window": window}})
    seen, ids = torch.randn(1, 5, 32, dtype=torch.float64), text(1, 11)
    cache, parts = DynamicCache(config=mllama.config), []
    with torch.no_grad():
        for number, part in enumerate(ids.split([6, 1, 1, 3], dim=1)):
            given = {"cross_attention_states": seen} if number == 0 else {}
            parts.append(mllama(part, past_key_values=cache, use_cache=True, **given).logits)
        want = mllama(ids, cross_attention_states=seen, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), want)


@pytest.mark.parametrize("length", [3, 9])
def test_cross_attention_without_a_mask_is_not_causal(mllama, length):
    seen, ids = torch.randn(1, 5, 32, dtype=torch.float64), text(1, length)
    mllama.set_attn_implementation("eager")
    with torch.no_grad():
        want = mllama(ids, cross_attention_states=seen, use_cache=False).logits
        softfocus.hf.use(mllama, "softmax")
        found = mllama(ids, cross_attention_states=seen, use_cache=False).logits
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def opt():
    sizes = {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32}
    config = OPTConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **sizes)
    return OPTForCausalLM(config), {"input_ids": text(1, 7)}


def whisper():
    sizes = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 8, "num_mel_bins": 4}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    model = WhisperModel(WhisperConfig(vocab_size=61, d_model=32, **sizes, **heads, **special))
    return model, {"input_features": torch.randn(1, 4, 16), "decoder_input_ids": text(1, 7)}


def esm():
    config = EsmConfig(
        vocab_size=33, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, position_embedding_type="rotary", pad_token_id=1,
    )  # fmt: skip
    return EsmModel(config, add_pooling_layer=False), {"input_ids": text(1, 7) % 30 + 2}


def timesfm():
    """Its factor of the query is learned, for each dimension."""
    sizes = {"patch_length": 4, "context_length": 16, "horizon_length": 8, "num_hidden_layers": 1, "head_dim": 8}
    config = TimesFmConfig(hidden_size=32, num_attention_heads=4, intermediate_size=32, **sizes)
    series = torch.randn(2, 16)
    return TimesFmModel(config), {
        "past_values": series, "past_values_padding": torch.zeros(2, 16, dtype=torch.long),
        "freq": torch.zeros(2, 1, dtype=torch.long),
    }  # fmt: skip


@pytest.mark.parametrize(("made", "calls"), [(opt, 1), (whisper, 3), (esm, 1), (timesfm, 1)])
def test_a_cosine_keeps_its_own_scale_where_the_model_scales_the_query(made, calls):
    """The model's factor of the query is not seen by a cosine."""
    model, inputs = made()
    model = softfocus.hf.use(model.eval(), Mechanism(similarity="cosine", phi="exp"))
    scales = []
    with softfocus.hf.watch(lambda call: scales.append(call.arguments["scale"])), torch.no_grad():
        model(**inputs)
    assert len(scales) == calls
    assert all(scale is None or scale == pytest.approx(8**-0.5) for scale in scales)


def test_a_factor_of_the_query_is_taken_back_by_another_scale():
    """TimesFM's holds 1/sqrt(d)."""
    model, inputs = timesfm()
    model = softfocus.hf.use(model.eval(), Mechanism(similarity="dot", scale="log(d)"))
    scales = []
    with softfocus.hf.watch(lambda call: scales.append(call.arguments["scale"])), torch.no_grad():
        model(**inputs)
    assert scales == [pytest.approx(math.log(8) * 8**0.5)]
