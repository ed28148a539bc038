"""Layouts in models: compared with other architectures that have the same thing, and with separate
calls.

Over 400 lines: the cases share the small models and the separate calls that they are compared with.
"""

import copy
import inspect
import json
import math
import pickle
import sys
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Exaone4Config,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StaticCache,
)
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import softfocus
import softfocus.hf
from softfocus.hf import adapter, rotary
from softfocus.hf.adapter import attention_forward
from softfocus.hf.config import SAVED

LENGTH, WINDOW, BASE = 12, 4, 50.0
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
HYBRID = {"0": {"mechanism": "softmax", "window": WINDOW}, "*": "lssar"}
HEADS = {"*": [{"mechanism": "ssmax", "heads": 2, "window": WINDOW}, {"mechanism": "lssar", "rope": 0}]}
ALONE = {"*": {"mechanism": "lssar", "window": 1}}
PARTIAL = {"0": {"mechanism": "lssar", "rope": 0.5}, "*": [{"mechanism": "lssar", "rope": 0.25, "heads": 2}, "lssar"]}

BASES = {
    "0": {"mechanism": "lssar", "rope_base": BASE},
    "*": [{"mechanism": "lssar", "rope": 0.5, "rope_base": 7, "heads": 2}, "lssar"],
}


def logits(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs).logits


def padded(tokens, side):
    """Sequences of 12 and 7 tokens in one batch, with its mask and the places of the real
    tokens.
    """
    ids, mask = torch.zeros(2, LENGTH, dtype=torch.long), torch.zeros(2, LENGTH, dtype=torch.long)
    for row, length in enumerate((LENGTH, 7)):
        at = slice(0, length) if side == "right" else slice(LENGTH - length, LENGTH)
        ids[row, at], mask[row, at] = tokens(1, length, seed=row)[0], 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}, mask.bool()


@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_a_window_is_mistrals(build, tokens, in_double, agree, mechanism, padding):
    """The same weights: Mistral makes its window in the mask, a layout in the adapter."""
    theirs = build("mistral", mechanism)
    ours = softfocus.hf.use(build("llama"), {"*": {"mechanism": mechanism, "window": WINDOW}})
    ours.load_state_dict(theirs.state_dict())
    inputs, real = (
        ({"input_ids": tokens(2, LENGTH)}, torch.ones(2, LENGTH).bool()) if padding is None else padded(tokens, padding)
    )
    want = logits(in_double(theirs), **inputs)[real]
    agree(logits(in_double(ours), **inputs)[real], want, logits(theirs, **inputs)[real])
    free = logits(softfocus.hf.use(copy.deepcopy(ours), mechanism), **inputs)[real]
    assert (free - want).abs().max() > 0.01 * want.abs().max()  # so that the window does something


def test_a_window_of_a_bidirectional_model_reaches_to_both_sides(build, tokens):
    model, ids = softfocus.hf.use(build("bert"), {"*": {"mechanism": "lssar", "window": 3}}), tokens(2, LENGTH)
    places = torch.arange(LENGTH)
    band = ((places[:, None] - places).abs() < 3)[None, None]
    want = logits(build("bert", "lssar"), ids, attention_mask=band)
    assert torch.equal(logits(model, ids), want)
    assert torch.equal(logits(model, ids, attention_mask=torch.ones(1, 1, LENGTH, LENGTH).bool()), want)


@pytest.mark.parametrize("hidden", [None, -math.inf], ids=["bool", "float"])
def test_a_mask_for_all_rows_is_one_for_each(build, tokens, hidden):
    model, ids = softfocus.hf.use(build("bert"), {"*": {"mechanism": "lssar", "window": 3}}), tokens(2, LENGTH)
    keys = (torch.arange(LENGTH) != 5).expand(2, 1, 1, LENGTH)
    mask = keys if hidden is None else torch.zeros(keys.shape).masked_fill(~keys, hidden)
    want = logits(model, ids, attention_mask=keys[:, 0, 0].long())
    assert torch.equal(logits(model, ids, attention_mask=mask), want)


@pytest.mark.parametrize(("kind", "error"), [("dynamic", ValueError), ("static", RuntimeError)])
def test_a_mask_that_is_longer_than_the_cache_is_refused(build, tokens, kind, error):
    """Of a layout without windows the shapes say so."""
    model, ids = softfocus.hf.use(build("llama"), {"*": {"mechanism": "lssar", "window": 3}}), tokens(1, 2)
    cache = StaticCache(model.config, LENGTH) if kind == "static" else DynamicCache(config=model.config)
    long = torch.ones(1, 1, 2, LENGTH + 2).tril().bool()
    with pytest.raises(error, match=r"window: got a mask .* as many keys as the cache hands over"):
        logits(model, ids, attention_mask=long, past_key_values=cache)


def test_steps_of_ended_sequences_need_one_that_goes_on(build, tokens):
    """A loop of the user's own appends zeros to the masks of sequences that have ended. Where all
    have, the mask looks like one that is too long.
    """
    layout = {"0": {"mechanism": "lssar", "window": 3}, "*": "lssar"}
    model, ids, real = softfocus.hf.use(build("llama"), layout), tokens(2, LENGTH), torch.ones(2, LENGTH).long()
    cache, separate_cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    logits(model, ids[:, :-1], attention_mask=real[:, :-1], past_key_values=cache)
    logits(model, ids[1:, :-1], past_key_values=separate_cache)
    real[0, -1] = 0
    step = logits(model, ids[:, -1:], attention_mask=real, past_key_values=copy.deepcopy(cache))
    assert torch.allclose(step[1:], logits(model, ids[1:, -1:], past_key_values=separate_cache), atol=1e-5)
    real[1, -1] = 0
    with pytest.raises(RuntimeError, match="no query sees the last key"):
        logits(model, ids[:, -1:], attention_mask=real, past_key_values=cache)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("layout", [{"*": ("lssar", 16)}, {"0": ("lssar", 4)}], ids=["all", "first"])
def test_a_chunk_of_padding_alone_says_nothing_about_positions(build, tokens, layout, cache):
    """Of a prompt that is fed in chunks, with padding on the left in every sequence."""
    rows = {layer: {"mechanism": name, "window": window} for layer, (name, window) in layout.items()}
    model, ids = softfocus.hf.use(build("llama"), {"*": "lssar"} | rows), tokens(1, LENGTH)
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **how)[:, LENGTH:]
    padded, real = F.pad(ids, (8, 0)), F.pad(torch.ones_like(ids), (8, 0))
    how |= {"prefill_chunk_size": 4, "cache_implementation": cache, "disable_compile": True}
    assert torch.equal(model.generate(padded, attention_mask=real, **how)[:, LENGTH + 8 :], want)


def test_a_mask_is_cut_to_the_kept_keys_in_compiled_code():
    cut = torch.compile(adapter._of_kept_keys, fullgraph=True, backend="aot_eager")
    mask = torch.arange(9).expand(2, 1, 1, 9) > 3
    assert torch.equal(cut(mask, 1, 4, 4), mask[..., -4:])
    with pytest.raises(RuntimeError, match="no query sees the last key"):
        cut(mask.flip(-1), 1, 4, 4)
    nothing, windowed = torch.zeros_like(mask), torch.compile(adapter._windowed, fullgraph=True, backend="aot_eager")
    assert not cut(nothing, 1, 4, 4).any()
    assert not windowed(nothing.expand(-1, -1, 4, -1), 4, 3).any()
    first = torch.arange(16) <= torch.tensor([-1, -1, 0, 1])[:, None]  # four rows that would stand at -2 to 1
    for run, error in ((adapter._windowed, ValueError), (windowed, RuntimeError)):
        with pytest.raises(error, match="window: got a mask of several queries"):
            run(first[None, None], 4, 3)


@pytest.mark.parametrize("hidden", [None, -math.inf], ids=["bool", "float"])
def test_a_mask_of_one_column_is_one_for_each_key_while_decoding(build, tokens, hidden):
    """The first layer keeps the keys of its window alone, the others keep all."""
    model = softfocus.hf.use(build("llama"), {"0": {"mechanism": "lssar", "window": 3}, "*": "lssar"})
    ids, cache = tokens(2, LENGTH), DynamicCache(config=model.config)
    logits(model, ids[:, :-1], past_key_values=cache)
    one = torch.ones(2, 1, 1, 1).bool() if hidden is None else torch.zeros(2, 1, 1, 1)
    want = logits(model, ids)[:, -1:]
    step = logits(model, ids[:, -1:], attention_mask=one, past_key_values=cache)
    assert torch.allclose(step, want, atol=1e-5)


def test_assertions_fit_into_those_of_cuda():
    """It copies messages into 256 bytes, and refuses longer ones at the call."""
    assert max(len(text.encode()) for text in (adapter.UNKNOWN_KEYS, adapter.UNKNOWN_POSITIONS)) < 255


def test_a_cache_that_has_dropped_what_a_wider_window_sees_is_refused(build, tokens):
    """Padding makes a mask. One of a layer without a window tells how many keys there were."""
    narrow, wide = ({"0": {"mechanism": "lssar", "window": keys}, "*": "lssar"} for keys in (3, 5))
    model, ids, real = softfocus.hf.use(build("llama"), narrow), tokens(2, LENGTH), torch.ones(2, LENGTH).long()
    real[1, :2] = 0
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :-1], attention_mask=real[:, :-1], past_key_values=cache)
    softfocus.hf.use(model, wide)
    with pytest.raises(
        ValueError, match=r"window: .* a window of 5 may see older ones. .* make a new one from model.config"
    ):
        logits(model, ids[:, -1:], attention_mask=real, past_key_values=cache)


@pytest.mark.parametrize("hidden", [None, -math.inf], ids=["bool", "float"])
def test_a_mask_for_all_keys_is_one_for_each(build, tokens, hidden):
    """[batch, 1, rows, 1], which attention() broadcasts."""
    model, ids = softfocus.hf.use(build("bert"), {"*": {"mechanism": "lssar", "window": 3}}), tokens(2, LENGTH)
    rows = torch.ones(2, 1, LENGTH, 1).bool()
    mask = rows if hidden is None else torch.zeros(rows.shape).masked_fill(~rows, hidden)
    assert torch.equal(logits(model, ids, attention_mask=mask), logits(model, ids))


@pytest.mark.parametrize("cached", [False, True])
def test_a_window_in_a_prefix_lm(build, tokens, cached):
    """Its prefix sees its own future: the last key that a row sees is not the row's own."""
    model, ids = softfocus.hf.use(build("llama"), {"*": {"mechanism": "lssar", "window": 3}}), tokens(1, LENGTH)
    places = torch.arange(LENGTH)
    prefix = places[:, None].ge(places) | (places < 8)
    band = prefix & ((places[:, None] - places).abs() < 3)
    want = logits(build("llama", "lssar"), ids, attention_mask=band[None, None])
    if not cached:
        assert torch.equal(logits(model, ids, attention_mask=prefix[None, None]), want)
        return
    cache = StaticCache(model.config, LENGTH + 5)
    mask = torch.nn.functional.pad(prefix, (0, 5))[None, None]
    with pytest.raises(ValueError, match="window: got a mask of several queries in a cache that shows"):
        logits(model, ids, attention_mask=mask, past_key_values=cache)


@pytest.mark.long
def test_compiled_code_refuses_padding_on_the_right_in_a_cache(build, tokens):
    model, ids = softfocus.hf.use(build("llama"), {"*": {"mechanism": "lssar", "window": 3}}), tokens(2, LENGTH)
    compiled, real = torch.compile(model, backend="eager"), torch.ones_like(ids)
    for padded, error in ((slice(0, 0), None), (slice(0, 3), None), (slice(-3, None), RuntimeError)):
        mask = real.clone()
        mask[:, padded] = 0
        given = {"attention_mask": mask, "past_key_values": StaticCache(model.config, LENGTH + 5)}
        if error:
            with pytest.raises(error, match="window: got a mask of several queries in a cache"):
                logits(compiled, ids, **given)
        else:
            want = logits(model, ids, attention_mask=mask)
            torch.testing.assert_close(logits(compiled, ids, **given)[mask.bool()], want[mask.bool()])


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 8, 6).bool()], ids=["no mask", "mask"])
def test_a_window_needs_queries_and_keys_at_the_same_positions(mask):
    module = Module(softfocus.hf.Heads(mechanism="lssar", window=3))
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 4, 6, 16)
    module.is_causal = False
    with pytest.raises(ValueError, match="window: Module is not causal and hands over 8 queries and 6 keys"):
        attention_forward(module, query, key, key, mask)


@pytest.mark.parametrize("length", [9, 6], ids=["as long", "shorter"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "bart"])
def test_cross_attention_takes_no_window(tokens, kind, length):
    """Whatever the lengths: as many keys as queries are no reason to take them for neighbours."""
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4, add_cross_attention=True))
    elif kind == "bert":
        model = BertLMHeadModel(BertConfig(**SIZES, is_decoder=True, add_cross_attention=True))
    else:
        model = BartForCausalLM(BartConfig(vocab_size=61, d_model=32, decoder_layers=1, decoder_attention_heads=4))
    model = softfocus.hf.window(softfocus.hf.use(model.eval(), "lssar"), 3)
    with pytest.raises(ValueError, match=r"window: .* is cross-attention"):
        model(tokens(1, 9), encoder_hidden_states=torch.randn(1, length, model.config.hidden_size))
    if kind == "bart":  # a decoder that is given no encoder's states has none
        model(tokens(1, 9))


def test_encoder_decoders_take_no_window(tmp_path):
    config = BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2
    )
    softfocus.hf.use(config, "lssar")
    with pytest.raises(ValueError, match="window: a bart model is an encoder and a decoder"):
        softfocus.hf.window(config, 4)
    assert str(softfocus.hf.layout_of(config)) == "lssar"
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    heads = softfocus.hf.Heads(mechanism="lssar", window=4)
    file.write_text(json.dumps(values | {"softfocus": {"layout": softfocus.hf.Layout.alike(heads).to_dict()}}))
    with pytest.raises(ValueError, match="window: a bart model is an encoder and a decoder"):
        BartConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("heads", "error"),
    [((3, 1), "heads: got 3, expected a multiple of 2"), ((2, 4), "hands over 4 query heads"), ((2,), "hands over 4")],
)
def test_heads_that_do_not_fit_a_model_are_refused(build, tokens, heads, error):
    """A Layout object, and a config.json that was changed by hand, do not go through what use()
    checks.
    """
    kind = tuple(softfocus.hf.Heads(mechanism="lssar", heads=count) for count in heads)
    model = softfocus.hf.use(build("llama"), softfocus.hf.Layout((kind,)))
    with pytest.raises(ValueError, match=error):
        logits(model, tokens(1, LENGTH))


def test_the_narrower_of_two_windows_holds(build, tokens):
    narrow, ids = {"*": {"mechanism": "lssar", "window": 3}}, tokens(1, LENGTH)
    model = softfocus.hf.use(build("mistral"), narrow)  # its own window is 4
    single = softfocus.hf.use(build("llama"), narrow)
    single.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, ids), logits(single, ids))


def smol(layers, **changes):
    """SmolLM3 with rotary embeddings in the layers given as 1."""
    torch.manual_seed(0)
    config = SmolLM3Config(
        **SIZES | {"num_hidden_layers": len(layers)}, initializer_range=0.4, num_key_value_heads=2,
        no_rope_layers=layers,
        pad_token_id=0, bos_token_id=None, eos_token_id=None, max_position_embeddings=64, **changes,
    )  # fmt: skip
    return SmolLM3ForCausalLM(config).eval()


def smol_sliding():
    """SmolLM3 with a window of 4 and rotary embeddings in layer 0, with neither in layer 1."""
    types = ["sliding_attention", "full_attention"]
    return smol([1, 0], use_sliding_window=True, sliding_window=WINDOW, layer_types=types)


def cohere_2():
    """Cohere 2 with a window of 4 and Cohere's RoPE in layer 0, with neither in layer 1."""
    torch.manual_seed(0)
    config = Cohere2Config(
        **SIZES, initializer_range=0.4, num_key_value_heads=2, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_theta": 500_000.0, "rope_type": "default"},
        pad_token_id=0, bos_token_id=None, eos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    return Cohere2ForCausalLM(config).eval()


def llama_4():
    """Llama 4 with chunks of 4 and rotary embeddings in layer 0, with neither in layer 1."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **SIZES, initializer_range=0.4, num_key_value_heads=2, head_dim=8, attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0], floor_scale=4, intermediate_size_mlp=64, moe_layers=[],
        pad_token_id=0, bos_token_id=None, eos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    return Llama4ForCausalLM(config).eval()


GLOBAL_NOPE = {
    "smollm3": (smol_sliding, "sliding_attention"),
    "cohere2": (cohere_2, "sliding_attention"),
    "llama4": (llama_4, "chunked_attention"),
}


@pytest.mark.parametrize("family", GLOBAL_NOPE)
def test_global_layers_without_rope_by_type_and_by_number(tokens, family):
    make, local = GLOBAL_NOPE[family]
    ids = tokens(2, LENGTH)
    by_type = softfocus.hf.use(make(), {local: "softmax", "full_attention": "lssar"})
    by_number = softfocus.hf.use(make(), {"0": "softmax", "-1": "lssar"})
    assert softfocus.hf.layout_of(by_type) == softfocus.hf.layout_of(by_number)
    assert str(softfocus.hf.layout_of(by_type)) == "softmax / lssar"
    assert torch.equal(logits(by_type, ids), logits(by_number, ids))
    other = logits(softfocus.hf.use(make(), {local: "lssar", "full_attention": "softmax"}), ids)
    assert not torch.equal(other, logits(by_type, ids))
    theirs = make()
    ours = softfocus.hf.use(make(), {local: "softmax", "full_attention": "softmax"})
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
def test_local_layers_and_global_ones_without_rope_are_cohere_2s(build, tokens, mechanism):
    """The same weights: Cohere 2 is Cohere with such a layout."""
    theirs = softfocus.hf.use(cohere_2(), mechanism)
    layout = {"0": {"mechanism": mechanism, "window": WINDOW}, "1": {"mechanism": mechanism, "rope": 0}}
    ours = softfocus.hf.use(build("cohere"), layout)
    ours.load_state_dict(theirs.state_dict())
    ids = tokens(2, LENGTH)
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), rtol=1e-5, atol=1e-5)
    assert (logits(softfocus.hf.use(ours, mechanism), ids) - logits(theirs, ids)).abs().max() > 0.01


@pytest.mark.parametrize("number", [0, 1], ids=["local", "global"])
@pytest.mark.parametrize("family", GLOBAL_NOPE)
def test_groups_of_local_and_global_layers_are_separate_calls(tokens, monkeypatch, family, number):
    """What each group of heads gets and returns is what it would in a layer of its kind alone."""
    make, _ = GLOBAL_NOPE[family]
    ids, calls = tokens(2, LENGTH), []

    def watched(query, key, value, **kwargs):
        out = softfocus.attention(query, key, value, **kwargs)
        calls.append((query, key, value, out))
        return out

    monkeypatch.setattr(adapter, "attention", watched)
    groups = [{"mechanism": "softmax", "window": 3, "heads": 2}, {"mechanism": "lssar", "heads": 2}]
    logits(softfocus.hf.use(make(), {str(number): groups, "*": "ssmax"}), ids)
    mixed = calls[number : number + 2]
    for place, group in enumerate(groups):
        calls.clear()
        whole_layer = {key: value for key, value in group.items() if key != "heads"}
        logits(softfocus.hf.use(make(), {str(number): whole_layer, "*": "ssmax"}), ids)
        for mine, whole in zip(mixed[place], calls[number], strict=True):
            half = whole.shape[1] // 2
            want = whole[:, half * place : half * (place + 1)]
            torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-6)


def test_layers_without_rope_are_smollm3s(tokens):
    ids = tokens(2, LENGTH)
    theirs, ours = (
        softfocus.hf.use(smol([1, 0]), "lssar"),
        softfocus.hf.use(smol([1, 1]), {"0": "lssar", "1": {"mechanism": "lssar", "rope": 0}}),
    )
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(logits(ours, ids), logits(theirs, ids))
    assert not torch.equal(logits(softfocus.hf.use(ours, "lssar"), ids), logits(theirs, ids))


ROTARY = ["llama", "gpt_neox", "cohere", "glm"]  # halves twice, neighbours, neighbours by half a table


@pytest.mark.parametrize("family", [*ROTARY, "t6"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_rope_keeps_the_highest_frequencies(build, tokens, family, share):
    ids, model = tokens(2, LENGTH), build(family, "lssar")
    rotary = model.base_model.rotary_emb
    rotary.inv_freq[round(share * len(rotary.inv_freq)) :] = 0  # a frequency of 0 turns nothing
    ours = softfocus.hf.use(build(family), {"*": {"mechanism": "lssar", "rope": share}})
    assert torch.equal(logits(ours, ids), logits(model, ids))
    assert (share == 1) == torch.equal(logits(build(family, "lssar"), ids), logits(model, ids))


def with_base(model, **scaling):
    """A config's rotary embedding with the base, in all layers."""
    tables = model.config.rope_parameters
    tables = [tables] if "rope_theta" in tables else tables.values()
    for table in tables:
        table.update(rope_theta=BASE, **scaling)
    return type(model.base_model.rotary_emb)(model.config)


def gemma_3(types=("sliding_attention", "full_attention")):
    """Gemma 3, which has a base for each layer type."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SIZES, head_dim=8, num_key_value_heads=2, sliding_window=WINDOW, layer_types=list(types),
        initializer_range=0.4, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", [*ROTARY, "t6", "gemma3"])
def test_a_base_of_rope_is_that_of_a_model_that_has_it_in_every_layer(build, tokens, family):
    ids, make = tokens(2, LENGTH), gemma_3 if family == "gemma3" else lambda: build(family)
    theirs = softfocus.hf.use(make(), "lssar")
    before = logits(theirs, ids)
    theirs.base_model.rotary_emb = with_base(theirs)
    want = logits(theirs, ids)
    ours = softfocus.hf.use(make(), {"*": {"mechanism": "lssar", "rope_base": BASE}})
    assert torch.equal(logits(ours, ids), want)
    assert not torch.equal(want, before)
    softfocus.hf.use(ours, {"0": {"mechanism": "lssar", "rope_base": BASE}, "1": "lssar"})
    assert not torch.equal(logits(ours, ids), want)
    assert torch.equal(logits(softfocus.hf.use(ours, "lssar"), ids), before)


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}])
def test_a_base_of_rope_is_scaled_as_the_models_own(build, tokens, scaling):
    """Beyond the length of training, where dynamic NTK changes the base, and back."""
    theirs, ours = build("llama", "lssar", max_position_embeddings=6), build("llama", max_position_embeddings=6)
    theirs.model.rotary_emb = with_base(theirs, **scaling)
    ours.config.rope_parameters.update(scaling)
    ours.model.rotary_emb = type(ours.model.rotary_emb)(ours.config)
    softfocus.hf.use(ours, {"*": {"mechanism": "lssar", "rope_base": BASE}})
    for length in (LENGTH, 5, LENGTH):
        ids = tokens(1, length)
        assert torch.equal(logits(ours, ids), logits(theirs, ids))


def test_rotary_embeddings_are_made_once(build):
    model = softfocus.hf.use(build("llama"), BASES)
    others = model.model.rotary_emb._softfocus_bases
    assert [other.base for other in others] == [BASE, 7]
    softfocus.hf.window(model, 5)
    assert model.model.rotary_emb._softfocus_bases is others
    assert not [name for name in model.state_dict() if "softfocus" in name]


@pytest.mark.parametrize(
    ("own", "values"),
    [([0.5, 1.0], "rope"), ([BASE, None], "rope_base"), ([7.0, BASE], "rope_base")],
    ids=["shares", "a base", "bases"],
)
@pytest.mark.parametrize("family", ROTARY)
def test_heads_of_one_layer_keep_rope_of_their_own(build, tokens, monkeypatch, family, own, values):
    """What reaches the attention, head by head, against models whose heads are all alike."""
    ids, seen = tokens(2, LENGTH), []

    def watched(query, key, value, **kwargs):
        seen.append((query, key))
        return softfocus.attention(query, key, value, **kwargs)

    monkeypatch.setattr(adapter, "attention", watched)
    groups = [{"mechanism": "lssar", "heads": 2, values: value} for value in own]
    logits(softfocus.hf.use(build(family), {"*": groups}), ids)
    mixed = seen[:2]  # the first layer's: what comes after depends on its output
    for number, value in enumerate(own):
        seen.clear()
        logits(softfocus.hf.use(build(family), {"*": {"mechanism": "lssar", values: value}}), ids)
        for mine, whole in zip(mixed[number], seen[0], strict=True):
            half = whole.shape[1] // 2
            torch.testing.assert_close(mine, whole[:, half * number : half * (number + 1)], rtol=1e-6, atol=1e-6)


class Module(torch.nn.Module):
    """A stand-in for an attention module with a layout."""

    def __init__(self, *groups, total=4):
        super().__init__()
        layout = softfocus.hf.Layout((tuple(groups),))
        self.config = type(
            "Config",
            (),
            {"softfocus": softfocus.hf.config.Entry(layout, masks="sdpa"), "num_attention_heads": total},
        )()
        self.is_causal, self._softfocus_layout = True, layout


@pytest.mark.parametrize("mask", [None, "shared", "by head"])
def test_groups_are_separate_calls(mask):
    """Values and gradients; key heads are shared, and windows and mechanisms differ."""
    torch.manual_seed(0)
    groups = [
        softfocus.hf.Heads(mechanism="softmax", window=3, heads=2),
        softfocus.hf.Heads(mechanism="lssar", heads=4),
    ]
    query = torch.randn(2, 6, 8, 16, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 3, 8, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(1, 6, 8, 8, dtype=torch.float64, requires_grad=True)
    seen = torch.ones(8, 8).tril().bool().expand(2, 1 if mask == "shared" else 6, 8, 8).clone()
    seen[1, :, :, :2] = False
    seen[..., 0, 0] = True
    out, weights = attention_forward(
        Module(*groups, total=6), query, key, value, None if mask is None else seen, position_bias=bias
    )
    assert weights is None
    parts = []
    for heads, keys, group in ((slice(0, 2), slice(0, 1), groups[0]), (slice(2, 6), slice(1, 3), groups[1])):
        places = torch.arange(8)
        near = places > places[:, None] - (group.window or 8)
        visible = torch.ones(8, 8).tril().bool() & near
        if mask is not None:
            visible = seen[:, heads if mask == "by head" else slice(None)] & near
        parts.append(
            softfocus.attention(
                query[:, heads], key[:, keys], value[:, keys], attn_mask=visible, bias=bias[:, heads],
                mechanism=group.mechanism, enable_gqa=True,
            )
        )  # fmt: skip
    want = torch.cat(parts, dim=1).transpose(1, 2)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(want)
    leaves = (query, key, value, bias)
    for mine, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_groups_take_views_of_the_modules_tensors(monkeypatch):
    seen = []
    monkeypatch.setattr(adapter, "attention", lambda *tensors, **_: seen.append(tensors) or tensors[0])
    query, key, value = torch.randn(3, 2, 4, 8, 16)
    attention_forward(Module(*(softfocus.hf.Heads(mechanism="lssar", heads=2),) * 2), query, key, value, None)
    storages = [{tensor.untyped_storage().data_ptr() for tensor in column} for column in zip(*seen, strict=True)]
    assert storages == [{tensor.untyped_storage().data_ptr()} for tensor in (query, key, value)]


@pytest.mark.parametrize("layout", [HYBRID, HEADS, BASES, ALONE], ids=["layers", "heads", "bases", "alone"])
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [5, 4, 1, 2], [9, 1, 1, 1]], ids=["tokens", "chunks", "prefill"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_cached_decoding_is_the_full_forward(build, tokens, in_double, agree, layout, sizes, kind, family):
    model, ids = softfocus.hf.use(build(family), layout), tokens(2, LENGTH)
    double = in_double(model)
    cache = DynamicCache(config=double.config) if kind == "dynamic" else StaticCache(double.config, LENGTH + 5)
    parts = [logits(double, chunk, past_key_values=cache) for chunk in ids.split(sizes, dim=1)]
    agree(torch.cat(parts, dim=1), logits(double, ids), logits(model, ids))


@pytest.mark.parametrize("layout", [HYBRID, HEADS], ids=["layers", "heads"])
@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_writes_the_same_with_every_cache(build, tokens, in_double, layout, implementation, beams):
    model = in_double(softfocus.hf.use(build("llama"), layout))
    long, short = tokens(1, 9), tokens(1, 5, seed=2)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 4, dtype=torch.long), short], dim=1)])
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": beams}
    together = model.generate(ids, attention_mask=(ids != 0).long(), cache_implementation=implementation, **how)
    for row, prompt in enumerate((long, short)):
        single = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=False, **how)
        assert torch.equal(together[row, -8:], single[0, -8:])


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        (HYBRID, [WINDOW - 1, LENGTH]),
        (HEADS, [LENGTH, LENGTH]),  # a layer keeps what its widest heads see
        (
            {"0": {"mechanism": "lssar", "window": 3}, "1": {"mechanism": "lssar", "window": 6}},
            [5, 5],
        ),  # one mask for both
        ({"*": {"mechanism": "lssar", "window": 30}}, [LENGTH, LENGTH]),
        (ALONE, [1, 1]),  # one key more than is seen: Transformers has no layer that keeps none
    ],
)
def test_a_cache_keeps_what_windows_can_still_see(build, tokens, layout, kept):
    model, ids = softfocus.hf.use(build("llama"), layout), tokens(1, LENGTH)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == kept
    assert cache.get_seq_length() == LENGTH


def qwen(layer_types):
    """Qwen 2 with sliding layers of its own, window 4."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **SIZES | {"num_hidden_layers": len(layer_types)}, initializer_range=0.4, num_key_value_heads=2, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, use_sliding_window=True, sliding_window=WINDOW, layer_types=layer_types,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def sharing():
    """Gemma 4, whose last two layers take the keys of the two before."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4}, vocab_size_per_layer_input=61, num_key_value_heads=2, head_dim=8,
        global_head_dim=8, hidden_size_per_layer_input=8, num_kv_shared_layers=2, sliding_window=32,
        layer_types=["full_attention"] * 4, initializer_range=0.4, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Gemma4ForCausalLM(config).eval()


SLIDING = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [5, 4, 1, 2], [9, 1, 1, 1]], ids=["tokens", "chunks", "prefill"])
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda: qwen(SLIDING), {"0": {"mechanism": "softmax", "window": 3}, "*": "lssar"}),
        (lambda: qwen(SLIDING), {"0": {"mechanism": "softmax", "window": 6}, "*": "lssar"}),
        (sharing, {"1": {"mechanism": "softmax", "window": 4}, "*": "softmax"}),
        (smol_sliding, {"sliding_attention": "softmax", "full_attention": "lssar"}),
        (cohere_2, {"sliding_attention": "softmax", "full_attention": "lssar"}),
        (cohere_2, HEADS),
        (llama_4, {"chunked_attention": "softmax", "full_attention": "lssar"}),
        (llama_4, {"0": "lssar", "1": [{"mechanism": "softmax", "window": 3, "heads": 2}, "lssar"]}),
    ],
    ids=["sliding 3", "sliding 6", "sharing", "smollm3", "cohere2", "cohere2 heads", "llama4", "llama4 heads"],
)
def test_caches_with_layers_of_the_models_own_kind(tokens, in_double, agree, make, layout, sizes):
    model, ids = softfocus.hf.use(make(), layout), tokens(2, LENGTH)
    double = in_double(model)
    cache = DynamicCache(config=double.config)
    parts = [logits(double, chunk, past_key_values=cache) for chunk in ids.split(sizes, dim=1)]
    agree(torch.cat(parts, dim=1), logits(double, ids), logits(model, ids))


def test_a_model_without_a_layout_keeps_its_cache(build, tokens):
    with torch.no_grad():
        cache = build("llama")(tokens(1, LENGTH), use_cache=True).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [LENGTH, LENGTH]


@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
@pytest.mark.parametrize("family", [*ROTARY, "t6"])
def test_sinks_are_streaming_llms(build, tokens, in_double, mechanism, family):
    """Of one layer, keys and values depend on their own token alone: a fresh sequence of what is
    seen is the definition.
    """
    model, ids = in_double(build(family, mechanism, num_hidden_layers=1)), tokens(2, LENGTH)
    sinks, keys = 2, 6
    want = []
    for end in range(1, LENGTH + 1):
        seen = ids[:, :end] if end <= keys else torch.cat([ids[:, :sinks], ids[:, end - (keys - sinks) : end]], dim=1)
        want.append(logits(model, seen)[:, -1])
    got = logits(softfocus.hf.window(model, keys, sinks), ids)
    # Tables of cos and sin are float32
    torch.testing.assert_close(got, torch.stack(want, dim=1), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"sinks: .* without a KV cache"):
        logits(model, ids[:, -1:], past_key_values=model(ids[:, :-1], use_cache=True).past_key_values)


def test_sinks_of_a_model_that_two_threads_run(build, tokens):
    """The second forward takes place between the first one's rotary tables and its attention."""
    ids, other = tokens(1, LENGTH), tokens(1, LENGTH, seed=2)
    model = softfocus.hf.window(build("llama", "softmax", num_hidden_layers=1), 6, 2)
    want = logits(model, ids)
    started = []

    def run_another(*_):
        if not started:
            positions = 3 * torch.arange(LENGTH)[None]
            started.append(threading.Thread(target=logits, args=(model, other), kwargs={"position_ids": positions}))
            started[0].start()
            started[0].join()

    model.model.layers[0].self_attn.q_proj.register_forward_hook(run_another)
    assert torch.equal(logits(model, ids), want)
    assert started
    assert not any(vars(layer.self_attn)["_softfocus_tables"] for layer in model.model.layers), "none is kept"


def test_unknown_rotations_are_refused(tokens):
    """MLA turns the last part of each head; DeepSeek-V4's function takes one tensor."""
    sizes = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = DeepseekV3Config(
        **SIZES, **sizes, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = softfocus.hf.use(
        AutoModelForCausalLM.from_config(config).eval(), {"*": {"mechanism": "lssar", "rope": 0.5}}
    )
    assert logits(model, tokens(1, LENGTH)).isfinite().all()
    softfocus.hf.window(model, 6, 2)
    with pytest.raises(ValueError, match="sinks: DeepseekV3Attention turns a part of each head"):
        logits(model, tokens(1, LENGTH))
    with pytest.raises(ValueError, match="rope: the heads of DeepseekV3Attention share the rotary part of a key"):
        softfocus.hf.use(AutoModelForCausalLM.from_config(config), HEADS)
    assert rotary._form_of(modeling_deepseek_v4.apply_rotary_pos_emb) is None


@pytest.mark.parametrize("bases", [{"*": 7.0}, {"0": BASE, "1": 7.0}], ids=["another", "one more"])
def test_bases_change(build, tokens, bases):
    ids, layout = tokens(1, LENGTH), {layer: {"mechanism": "lssar", "rope_base": base} for layer, base in bases.items()}
    ours = softfocus.hf.use(build("llama"), {"*": {"mechanism": "lssar", "rope_base": BASE}})
    logits(ours, ids)
    assert torch.equal(
        logits(softfocus.hf.use(ours, layout), ids), logits(softfocus.hf.use(build("llama"), layout), ids)
    )


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_shares_by_head_survive_a_process_that_has_put_no_layout_in(build, tokens, monkeypatch, family):
    """As torch.load() finds it: with hooks, and with the modeling file's own function."""
    ids, ours = tokens(1, LENGTH), softfocus.hf.use(build(family), HEADS)
    want = logits(ours, ids)
    modeling = sys.modules[type(ours).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", inspect.unwrap(modeling.apply_rotary_pos_emb))
    assert torch.equal(logits(pickle.loads(pickle.dumps(ours)), ids), want)


def test_shares_by_head_where_the_model_names_a_dimension(tokens):
    """ModernBERT says ``unsqueeze_dim=1``, the default; another layout of queries is refused."""
    torch.manual_seed(0)
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    model = ModernBertForMaskedLM(ModernBertConfig(**SIZES, **special)).eval()
    ids, without = tokens(1, LENGTH), {"mechanism": "lssar", "rope": 0}
    softfocus.hf.use(model, {"*": without})
    # Another share for the last head alone, which the output projection ignores
    for layer in model.model.layers:
        layer.attn.Wo.weight.data[:, -8:] = 0
    want = logits(model, ids)
    ours = softfocus.hf.use(model, {"*": [{**without, "heads": 3}, "lssar"]})
    torch.testing.assert_close(logits(ours, ids), want)
    function = sys.modules[type(model).__module__].apply_rotary_pos_emb
    tables = torch.ones(1, 4, LENGTH, 8)
    with pytest.raises(ValueError, match="rope: softfocus cannot turn single heads"):
        function(*tables[None].expand(2, -1, -1, -1, -1), tables, tables, unsqueeze_dim=2)


def test_a_prefix_lm_generates_with_a_window(tokens):
    """PaliGemma's decoder says that it is not causal; a new token still stands at the last key."""
    torch.manual_seed(0)
    text = {"model_type": "gemma", "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    vision = {**SIZES, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}
    model = PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            vision_config=vision, text_config={**SIZES, **text}, image_token_index=60, projection_dim=32, hidden_size=32
        )
    ).eval()
    softfocus.hf.window(softfocus.hf.use(model.model.language_model, "lssar"), WINDOW)
    ids = torch.cat([torch.full((1, 4), 60), tokens(1, LENGTH) % 60], 1)
    given = {"pixel_values": torch.randn(1, 3, 8, 8), "token_type_ids": torch.zeros_like(ids)}
    told = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **given, **told, max_new_tokens=3)
    for new in range(3):
        given["token_type_ids"] = torch.cat([torch.zeros_like(ids), torch.ones(1, new).long()], 1)
        seen = made.sequences[:, : ids.shape[1] + new]
        want = logits(model, seen, attention_mask=torch.ones_like(seen), **given)[:, -1]
        torch.testing.assert_close(made.logits[new], want)


def test_shares_of_rope_where_queries_are_turned_alone(tokens):
    ids, want = tokens(1, LENGTH), softfocus.hf.use(sharing(), "lssar")
    frequencies = want.model.rotary_emb.full_attention_inv_freq
    frequencies[round(int((frequencies != 0).sum()) / 2) :] = 0
    ours = softfocus.hf.use(sharing(), {"*": {"mechanism": "lssar", "rope": 0.5}})
    assert torch.equal(logits(ours, ids), logits(want, ids))
    with pytest.raises(ValueError, match=r"rope: .* turns queries and keys apart"):
        softfocus.hf.use(sharing(), HEADS)


def test_sinks_need_a_mask_that_is_plainly_causal(build, tokens):
    inputs, _ = padded(tokens, "left")
    with pytest.raises(ValueError, match="sinks: they are for causal attention without padding"):
        logits(softfocus.hf.window(build("llama", "lssar"), 6, 2), **inputs)


def test_sinks_are_of_one_text(build, tokens):
    """With a cache Transformers makes no mask for packed sequences: only their lengths tell."""
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    places = torch.cat([torch.arange(4), torch.arange(5)])[None]
    model = softfocus.hf.window(build("llama", "lssar"), 4, 2)
    with pytest.raises(ValueError, match=r"sinks: .* cu_seq_lens_q packs several"):
        logits(model, tokens(1, 9), position_ids=places, cu_seq_lens_q=starts, use_cache=True)


def test_window_narrows_what_is_wider(build, tokens):
    model = softfocus.hf.use(build("llama"), {"0": {"mechanism": "softmax", "window": 3}, "1": "ssmax"})
    with torch.no_grad():
        model.model.layers[1].self_attn.softfocus_head_scale.fill_(3.0)
    softfocus.hf.window(model, 5)
    assert str(softfocus.hf.layout_of(model)) == "softmax[3] / ssmax[5]"
    assert torch.equal(
        model.model.layers[1].self_attn.softfocus_head_scale, torch.full((4,), 3.0)
    )  # what was learned stays
    config = softfocus.hf.window(softfocus.hf.use(build("llama").config, "lssar"), 5)
    assert str(softfocus.hf.layout_of(config)) == "lssar[5]"
    with pytest.raises(ValueError, match="the model runs its own attention"):
        softfocus.hf.window(build("llama"), 5)
    with pytest.raises(ValueError, match=r"heads that run lssar\[5\] keep their own window; ask for fewer than 5 keys"):
        softfocus.hf.window(config, 5, sinks=2)
    assert str(softfocus.hf.layout_of(softfocus.hf.window(config, 4, sinks=2))) == "lssar[4+2]"
    assert str(softfocus.hf.layout_of(softfocus.hf.window(config, 9, sinks=2))) == "lssar[4+2]"
    assert str(softfocus.hf.layout_of(softfocus.hf.window(config, 9))) == "lssar[4+2]"
    softfocus.hf.window(softfocus.hf.window(build("llama", "lssar"), 5), 5)
    with pytest.warns(UserWarning, match="every head keeps its own window of fewer than 7 keys"):
        softfocus.hf.window(softfocus.hf.window(build("llama", "lssar"), 5), 7)
    mixed = softfocus.hf.window(build("llama", {"0": {"mechanism": "lssar", "window": 2}, "1": "lssar"}), 5)
    softfocus.hf.window(mixed, 5)
    for wrong in (None, "1x", True):
        with pytest.raises(TypeError, match=f"keys: got {wrong!r}, expected a whole number"):
            softfocus.hf.window(build("llama", "lssar"), wrong)


def test_assign_takes_what_use_takes(build):
    model, layout = build("llama", "lssar"), {"0": {"mechanism": "lssar", "window": 3}, "*": "sharpened(lssa, 3)"}
    softfocus.hf.assign(model, layout)
    assert softfocus.hf.layout_of(model) == softfocus.hf.layout_of(build("llama", layout))
    softfocus.hf.assign(model, "lssa")
    assert str(softfocus.hf.layout_of(model)) == "lssa"


def test_assign_moves_nothing_that_was_learned_to_other_heads(build):
    ssmax, lssar = {"mechanism": "ssmax", "heads": 2}, {"mechanism": "lssar", "heads": 2}
    model = build("llama", {"0": [ssmax, lssar], "1": "ssmax"}, num_key_value_heads=4)
    before, first = softfocus.hf.layout_of(model), model.model.layers[0].self_attn.softfocus_head_scale
    for layout, number in (
        ({"0": [lssar, ssmax], "1": "ssmax"}, 0),
        ({"0": [ssmax, lssar], "1": "lssar"}, 1),
        ("ssmax", 0),
    ):
        for target in (model, model.config):
            with pytest.raises(
                ValueError, match=f"assign: in layer {number}, which runs .* other heads than now would"
            ):
                softfocus.hf.assign(target, layout)
    assert softfocus.hf.layout_of(model) == before
    windowed = [{**ssmax, "heads": 1, "window": 3}, {**ssmax, "heads": 1}, lssar]
    softfocus.hf.assign(model, {"0": windowed, "1": [{**ssmax, "window": 3}, ssmax]})  # the same heads learn the same
    assert model.model.layers[0].self_attn.softfocus_head_scale is first


def test_assign_refuses_a_power_that_heads_learn(build):
    """The learned one takes its place: annealing it would do nothing."""
    model = softfocus.hf.use(build("llama"), "lssar", power=15.0)
    before = softfocus.hf.layout_of(model)

    def with_power(group):
        return replace(group, mechanism=group.mechanism.replace(power=1.0))

    for target in (model, model.config):
        with pytest.raises(ValueError, match="assign: in layer 0 heads learn their power, which takes the place"):
            softfocus.hf.assign(target, before.map(with_power))
    assert softfocus.hf.layout_of(model) == before
    softfocus.hf.assign(model, before.map(lambda group: replace(group, window=5)))
    assert softfocus.hf.layout_of(model) != before


def test_what_is_learned_outlives_an_empty_shard(build):
    """Between two forward passes DeepSpeed's ZeRO-3 leaves a parameter without elements."""
    model = softfocus.hf.use(build("llama"), "lssar", head_scale=1.0)
    attention = model.model.layers[0].self_attn
    learned = attention.softfocus_head_scale
    learned.ds_shape, learned.data = learned.shape, torch.empty(0)
    softfocus.hf.assign(model, softfocus.hf.layout_of(model))
    assert attention.softfocus_head_scale is learned


def test_layers_of_two_attention_modules_are_refused_however_a_layout_comes_in():
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=64, add_cross_attention=True)
    layout, says = {"0": "softmax", "1": "lssar"}, "layout: it needs one attention module a layer, .* numbered"
    model = GPT2LMHeadModel(copy.deepcopy(config))
    with pytest.raises(ValueError, match=says):
        softfocus.hf.use(model, layout)
    softfocus.hf.use(model, "lssar")
    with pytest.raises(ValueError, match=says):
        softfocus.hf.assign(model, layout)
    assert str(softfocus.hf.layout_of(model)) == "lssar"
    softfocus.hf.use(config, layout)
    with pytest.raises(ValueError, match=says):
        GPT2LMHeadModel(config)


@pytest.mark.parametrize("scale", ["1", "log(d)"])
def test_a_factor_of_a_mechanisms_own_replaces_that_of_the_query(scale):
    """OPT multiplies its queries by 1/sqrt(d)."""
    config = OPTConfig(
        vocab_size=61, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32
    )
    model, calls, queries = OPTForCausalLM(config).eval(), [], []
    softfocus.hf.use(model, softfocus.Mechanism(scale=scale))
    model.model.decoder.layers[0].self_attn.q_proj.register_forward_hook(lambda *given: queries.append(given[2]))
    with softfocus.hf.watch(calls.append), torch.no_grad():
        model(torch.arange(1, 13)[None])
    scores = queries[0].view(1, 12, 2, 16).transpose(1, 2) @ calls[0].key.mT * {"1": 1.0, "log(d)": math.log(16)}[scale]
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    weights = softfocus.weights(calls[0].query, calls[0].key, **calls[0].arguments)
    torch.testing.assert_close(weights, scores.masked_fill(hidden, -torch.inf).softmax(-1))


def test_parameters_belong_to_the_heads_that_learn_them(build, tokens, tmp_path):
    layout = {
        "0": [{"mechanism": "ssmax", "heads": 2}, {"mechanism": "lssar", "parameters": {"power": 9, "head_scale": 2}}],
        "1": "lssar",
    }
    model, ids = softfocus.hf.use(build("llama"), layout), tokens(2, LENGTH)
    first, second = (layer.self_attn for layer in model.model.layers)
    assert first.softfocus_head_scale.tolist() == [pytest.approx(0.43)] * 2 + [2.0, 2.0]
    assert first.softfocus_power.tolist() == [9.0, 9.0]
    assert not [name for name, _ in second.named_parameters() if "softfocus" in name]
    model(ids).logits.square().sum().backward()
    assert first.softfocus_head_scale.grad.ne(0).all()
    assert first.softfocus_power.grad.ne(0).all()
    with torch.no_grad():
        first.softfocus_head_scale.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(back, ids), logits(model, ids))
    assert softfocus.hf.layout_of(back) == softfocus.hf.layout_of(model)
    softfocus.hf.use(model, "softmax")
    assert not [name for name, _ in model.named_parameters() if "softfocus" in name]


@pytest.mark.parametrize("layout", [HYBRID, HEADS, PARTIAL, BASES], ids=["layers", "heads", "partial", "bases"])
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "glm"])
def test_round_trip(build, tokens, tmp_path, layout, family):
    model, ids = softfocus.hf.use(build(family), layout), tokens(2, LENGTH)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["attn_implementation"] == SAVED
    assert softfocus.hf.Layout.from_dict(saved["softfocus"]["layout"]) == softfocus.hf.layout_of(model)
    back = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(back, ids), logits(model, ids))
    back.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == saved
    fresh = AutoModelForCausalLM.from_config(softfocus.hf.use(build(family).config, layout)).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh, ids), logits(model, ids))
    assert torch.equal(logits(copy.deepcopy(model), ids), logits(model, ids))


@pytest.mark.long
@pytest.mark.parametrize("layout", [HYBRID, HEADS, PARTIAL, BASES], ids=["layers", "heads", "partial", "bases"])
@pytest.mark.parametrize("family", ["llama", "glm"])
def test_compiled_and_checkpointed(build, tokens, layout, family):
    torch._dynamo.reset()  # other tests' models count towards the limit of recompilations
    model, ids = softfocus.hf.use(build(family), layout), tokens(2, LENGTH)
    want = logits(model, ids)
    torch.testing.assert_close(logits(torch.compile(model, fullgraph=True, backend="eager"), ids), want)
    model.train()

    def gradient():
        model.zero_grad()
        model(ids).logits.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradient()
    model.gradient_checkpointing_enable()
    for mine, theirs in zip(gradient(), plain, strict=True):
        assert torch.equal(mine, theirs)


def test_layer_types_of_the_models_own(build, tokens):
    model, ids = build("mistral", layer_types=["sliding_attention", "full_attention"]), tokens(1, LENGTH)
    softfocus.hf.use(model, {"sliding_attention": "softmax", "full_attention": "lssar"})
    want = build("mistral", layer_types=["sliding_attention", "full_attention"])
    softfocus.hf.use(want, {"0": "softmax", "1": "lssar"})
    assert softfocus.hf.layout_of(model) == softfocus.hf.layout_of(want)
    assert torch.equal(logits(model, ids), logits(want, ids))
    softfocus.hf.use(want, {"0": "lssar", "1": "softmax"})
    assert not torch.equal(logits(model, ids), logits(want, ids))


def test_what_cannot_be_laid_out_is_refused(build):
    bart = BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2
    )
    with pytest.raises(ValueError, match="no single stack"):
        softfocus.hf.use(bart, {"*": "lssar"})
    with pytest.raises(ValueError, match=r"give use\(\) an inner model"):
        softfocus.hf.use(LlavaConfig(text_config=LlamaConfig()), {"*": "lssar"})
    with pytest.raises(TypeError, match="power beside a layout"):
        softfocus.hf.use(build("llama"), {"*": "lssar"}, power=3.0)
    with pytest.raises(ValueError, match="describes 4 layers, the model has 2"):
        softfocus.hf.use(build("llama"), softfocus.hf.Layout(((softfocus.hf.Heads(mechanism="lssar"),),), (0, 0, 0, 0)))
    model = build("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ValueError, match="one attention module a layer"):
        softfocus.hf.use(model, HYBRID)
    with pytest.raises(ValueError, match="rope, rope_base, sinks: BertSelfAttention takes no position_embeddings"):
        softfocus.hf.use(build("bert"), {"*": {"mechanism": "lssar", "rope": 0}})
    # Its tables are complex numbers
    for change in ({"rope": 0}, {"rope_base": BASE}):
        with pytest.raises(ValueError, match="rope, rope_base, sinks: Llama4TextAttention takes no position_embedding"):
            softfocus.hf.use(llama_4(), {"*": {"mechanism": "lssar"} | change})


class ToldRotaryEmbedding(LlamaRotaryEmbedding):
    """Made of more than its config, as Molmo2's; the config that it keeps does not say so."""

    def __init__(self, config, told=None):
        other = copy.deepcopy(config)
        other.rope_parameters |= told or {}
        super().__init__(other)
        self.config = config


def test_bases_of_rope_that_cannot_be_set_are_refused(build):
    based = {"mechanism": "lssar", "rope_base": BASE}
    for make in (sharing, lambda: build("t6")):
        with pytest.raises(ValueError, match="all heads of a layer need the same share and base"):
            softfocus.hf.use(make(), {"*": [based | {"heads": 2}, "lssar"]})
    model = build("llama")
    del model.config.rope_parameters["rope_theta"]
    with pytest.raises(ValueError, match=r"LlamaRotaryEmbedding does not take its base from config.rope_parameters"):
        softfocus.hf.use(model, {"*": based})

    class FixedRotaryEmbedding(type(model.model.rotary_emb)):
        def __init__(self, config):
            config.rope_parameters["rope_theta"] = 3.0
            super().__init__(config)

    model.model.rotary_emb = FixedRotaryEmbedding(model.config)
    with pytest.raises(ValueError, match=r"FixedRotaryEmbedding does not take its base from config.rope_parameters"):
        softfocus.hf.use(model, {"*": based})
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    for told in ({"rope_type": "default"}, {"factor": 2.0}, {"rope_type": "yarn"}):
        model.model.rotary_emb = ToldRotaryEmbedding(model.config, told)
        with pytest.raises(ValueError, match=r"ToldRotaryEmbedding does not take its base from config.rope_parameters"):
            softfocus.hf.use(model, {"*": based})
    model.model.rotary_emb = ToldRotaryEmbedding(model.config).bfloat16().float()  # rounded, but of its config alone
    softfocus.hf.use(model, {"*": based})
    one = LlamaConfig(**SIZES | {"hidden_size": 8})
    with pytest.raises(ValueError, match="rope_base: LlamaRotaryEmbedding has one wavelength, which no base changes"):
        softfocus.hf.use(AutoModelForCausalLM.from_config(one), {"*": based})
    model.model.rotary_emb = torch.nn.Identity()
    with pytest.raises(ValueError, match="rope_base: LlamaForCausalLM has no rotary embedding"):
        softfocus.hf.use(model, {"*": based})


def test_explain(build):
    model = softfocus.hf.use(build("llama"), HYBRID)
    query = torch.empty(1, 4, 16, 8)
    backend = softfocus.explain(query, query, query, mechanism="lssar", is_causal=True).backend
    lines = softfocus.hf.explain(model).splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        f"layer 0: softmax[4]; backend {backend}",
        f"layer 1: lssar; backend {backend}",
    ]
    assert softfocus.hf.explain(model.double()).splitlines()[1].startswith("layer 1: lssar; backend tiled (not cpu: ")
    with pytest.raises(ValueError, match="never called"):
        softfocus.hf.explain(build("llama"))


def explained(model):
    """The lines of explain() without the backends."""
    return [line.rpartition("; backend")[0] for line in softfocus.hf.explain(model).splitlines()]


@pytest.mark.parametrize(
    ("family", "local"), [("smollm3", "window 4"), ("cohere2", "window 4"), ("llama4", "chunks of 4")]
)
def test_explain_shows_the_models_own_windows_and_layers_without_rope(family, local):
    make, _ = GLOBAL_NOPE[family]
    own = f"the model's own: {local}"
    apart = softfocus.hf.use(make(), {"0": {"mechanism": "softmax", "window": 3}, "1": "lssar"})
    assert explained(apart) == [f"layer 0: softmax[3]; {own}", "layer 1: lssar; the model's own: no RoPE"]
    alike = softfocus.hf.use(make(), "lssar")
    assert explained(alike) == [f"every layer: lssar; {own} in layer 0, no RoPE in layer 1"]


def test_explain_shows_windows_of_other_families(build):
    assert explained(build("mistral", "lssar")) == ["every layer: lssar; the model's own: window 4"]
    assert explained(build("mistral", "lssar", sliding_window=None)) == ["every layer: lssar"]
    assert explained(softfocus.hf.use(qwen(SLIDING), "lssar")) == [
        "every layer: lssar; the model's own: window 4 in layer 1"
    ]
    sizes = SIZES | {"num_hidden_layers": 4}
    assert explained(softfocus.hf.use(gemma_3(), "lssar")) == [
        "every layer: lssar; the model's own: window 4 in layer 0"
    ]
    exaone = Exaone4Config(**sizes, num_key_value_heads=2, sliding_window=5, sliding_window_pattern=4)
    assert explained(softfocus.hf.use(AutoModelForCausalLM.from_config(exaone), "lssar")) == [
        "every layer: lssar; the model's own: window 5 in layers 0, 1, 2, no RoPE in layer 3"
    ]
    for plain in ("llama", "bert", "t6"):
        assert explained(build(plain, "lssar")) == ["every layer: lssar"]


def test_a_layer_type_without_tables_of_rope_has_none(build):
    """As Cohere Compass has it: a table for each layer type, None where nothing is turned."""
    model = build("llama", "lssar", layer_types=["sliding_attention", "full_attention"])
    model.config.rope_parameters = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": None}
    assert explained(model) == ["every layer: lssar; the model's own: no RoPE in layer 1"]


def test_explain_shows_what_heads_learn(build):
    groups = [{"mechanism": "ssmax", "heads": 2}, {"mechanism": "lssar", "parameters": {"power": 5, "head_scale": 2}}]
    model = softfocus.hf.use(build("llama"), {"0": groups, "1": "lssar"})
    ssmax, lssar = (
        "2x ssmax (learned head_scale from 0.43)",
        "2x lssar (learned head_scale from 2, learned power from 5)",
    )
    assert explained(model) == [f"layer 0: {ssmax} + {lssar}", "layer 1: lssar"]
    assert str(softfocus.hf.layout_of(model)) == "2x ssmax + 2x lssar / lssar"  # a label of results stays as it was


@pytest.mark.parametrize("mechanism", ["softmax", "ssmax", "sharpened(ssmax, 3)"])
@pytest.mark.parametrize("family", ["bert", "gpt_neox", "mistral"])
def test_explain_knows_every_layer(build, family, mechanism):
    assert "not known" not in softfocus.hf.explain(build(family, mechanism))
