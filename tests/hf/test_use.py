"""use(): what it takes, what it refuses and in which words, and switching from one mechanism to
another.
"""

import copy
import inspect
import json
import pickle
import subprocess
import sys
import warnings
from weakref import WeakSet

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LongT5Config,
    LongT5ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    SwinConfig,
    SwinModel,
    T5Config,
    T5ForConditionalGeneration,
)

import softfocus
import softfocus.hf
from softfocus.hf import card, layout_of, learned, sharing
from softfocus.hf import config as entries

TINY_FALCON = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 61}


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def test_both_interfaces_are_registered_under_a_name_transformers_does_not_parse():
    assert "softfocus" in AttentionInterface().valid_keys()
    assert "softfocus" in AttentionMaskInterface().valid_keys()
    for name in ("softfocus", entries.SAVED):
        assert not [part for part in ("flash", "sdpa", "flex_attention", "/", "paged|") if part in name]


@pytest.mark.long
def test_without_transformers_the_import_says_what_to_install():
    code = "import sys; sys.modules['transformers'] = None; import softfocus.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "ModuleNotFoundError: softfocus.hf needs Transformers; in your checkout of softfocus run pip install -e '.[hf]'"
        in done.stderr
    )


def test_hooks_are_installed_once():
    hooked = [
        (PreTrainedModel, "post_init"),
        (PreTrainedModel, "_initialize_weights"),
        (PreTrainedModel, "_upload_modified_files"),
        (PreTrainedConfig, "save_pretrained"),
        (PreTrainedConfig, "to_dict"),
    ]
    before = [getattr(owner, name) for owner, name in hooked]
    for module in (entries, learned, card):
        module.install()
    assert [getattr(owner, name) for owner, name in hooked] == before
    assert inspect.unwrap(before[0]).__module__ == "transformers.modeling_utils"


@pytest.mark.parametrize("mechanism", ["lssar", "laser(lssar)", softfocus.Mechanism(phi="relu")])
def test_it_takes_and_returns_models_and_configs(build, mechanism):
    want = softfocus.catalog.named(mechanism) if isinstance(mechanism, str) else mechanism
    for target in (build("llama"), build("llama").config):
        assert softfocus.hf.use(target, mechanism) is target
        assert layout_of(getattr(target, "config", target)).mechanism == want


def test_other_models_are_left_alone(build, tokens):
    bystander, ids = build("llama"), tokens(1, 6)
    before = logits(bystander, ids)
    softfocus.hf.use(build("llama"), "ssmax")
    assert bystander.config._attn_implementation == "sdpa"
    assert "softfocus" not in bystander.config.to_json_string()
    assert torch.equal(logits(bystander, ids), before)
    bystander.set_attn_implementation("eager")
    assert bystander.config._attn_implementation == "eager"


def test_calling_it_again_switches(build, tokens):
    model, ids = build("llama", "ssmax"), tokens(1, 9)
    with torch.no_grad():
        model.model.layers[0].self_attn.softfocus_head_scale.fill_(3.0)
    softfocus.hf.use(model, "lssar", power=2.0)
    names = [name for name, _ in model.named_parameters() if "softfocus_" in name]
    assert names == [f"model.layers.{i}.self_attn.softfocus_power" for i in range(2)]
    assert torch.equal(logits(model, ids), logits(build("llama", "sharpened(lssa, 2)"), ids))
    softfocus.hf.use(model, "ssmax")
    assert torch.equal(logits(model, ids), logits(build("llama", "ssmax"), ids))  # back to initial values
    softfocus.hf.use(model, "qknorm")
    assert torch.equal(model.model.layers[0].self_attn.softfocus_head_scale, torch.full((4,), 20.0))
    softfocus.hf.use(model, "softmax")
    assert not [name for name, _ in model.named_parameters() if "softfocus_" in name]


@pytest.mark.parametrize("before", [None, "ssmax"])
def test_an_error_leaves_the_model_as_it_was(tokens, before):
    """GPT-2 has no rotary embedding, which shows only while its modules are equipped."""
    torch.manual_seed(0)
    model, ids = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4)).eval(), tokens(1, 9)
    if before is not None:
        softfocus.hf.use(model, before)
        with torch.no_grad():
            model.transformer.h[0].attn.softfocus_head_scale.fill_(3.0)
    want, config = logits(model, ids), model.config.to_dict()
    for change in (
        lambda: softfocus.hf.use(model, {"*": {"mechanism": "lssar", "rope": 0}}),
        lambda: softfocus.hf.use(model, {"*": {"mechanism": "ssmax", "rope_base": 100}}),
        lambda: softfocus.hf.window(model, 4, sinks=1),
    )[: 2 if before is None else 3]:
        with pytest.raises(ValueError, match="rope, rope_base, sinks: GPT2Attention takes no position_embeddings"):
            change()
        assert torch.equal(logits(model, ids), want)
        assert model.config.to_dict() == config


def test_initialising_again_keeps_what_was_learned(build):
    """Transformers does so for every outer model; its own parameters are flagged by then, and so
    are ours.
    """
    model = build("llama", "ssmax")
    scale = model.model.layers[0].self_attn.softfocus_head_scale
    with torch.no_grad():
        scale.fill_(3.0)
    model.init_weights()
    assert torch.equal(scale, torch.full((4,), 3.0))


def test_parameters_follow_the_weights(build):
    model = softfocus.hf.use(build("llama").bfloat16().to("meta"), "ssmax")
    scale = model.model.layers[0].self_attn.softfocus_head_scale
    assert (scale.dtype, scale.device.type, scale.shape) == (torch.bfloat16, "meta", (4,))


@pytest.mark.long
def test_encoder_and_decoder(tokens):
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 4}
    config = BartConfig(d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=61, init_std=0.4, **sizes)
    plain = BartForConditionalGeneration(config).eval()
    model, ids = softfocus.hf.use(copy.deepcopy(plain), "ssmax"), tokens(1, 9)
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("softfocus_head_scale")]
    assert sorted(shapes) == [(2,), (4,), (4,)]  # the encoder's, the decoder's own and its cross-attention
    softfocus.hf.use(model, "softmax")
    torch.testing.assert_close(logits(model, ids), logits(plain, ids), rtol=1e-4, atol=1e-4)


def test_a_part_that_shares_its_config_is_refused(tokens):
    """BART's encoder and decoder read one config object: the decoder would run the same."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = BartForConditionalGeneration(
        BartConfig(d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=61, **sizes)
    ).eval()
    ids = tokens(1, 5)
    before = logits(bart, ids)
    message = "BartEncoder shares its config with BartDecoder, so that part alone cannot be changed; give BartModel, wh"
    with pytest.raises(ValueError, match=message):
        softfocus.hf.use(bart.model.encoder, "lssar")
    with pytest.raises(ValueError, match="BartDecoder shares its config with BartEncoder"):
        softfocus.hf.use(bart.model.decoder, "ssmax")
    assert layout_of(bart) is None
    assert torch.equal(logits(bart, ids), before)
    softfocus.hf.use(bart.model, "lssar")  # all of the attention that there is
    for change in (softfocus.hf.assign, softfocus.hf.window):
        with pytest.raises(ValueError, match=message):
            change(bart.model.encoder, "softmax" if change is softfocus.hf.assign else 3)
    assert str(layout_of(bart.model.decoder)) == "lssar"


@pytest.mark.parametrize(
    "of", [lambda: FalconConfig(**TINY_FALCON), lambda: FalconForCausalLM(FalconConfig(**TINY_FALCON))]
)
def test_architectures_with_attention_of_their_own_are_refused(of):
    target = of()
    config = getattr(target, "config", target)
    before = config.to_dict()
    with pytest.raises(
        ValueError, match=r"Falcon\w+ computes its attention itself.*Take an architecture that dispatches"
    ):
        softfocus.hf.use(target, "lssar")
    assert config.to_dict() == before


def test_attention_that_stays_softmax_is_named():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 61}
    model = LongT5ForConditionalGeneration(LongT5Config(**sizes))
    with pytest.warns(
        UserWarning, match="LongT5ForConditionalGeneration keeps softmax in LongT5LocalAttention"
    ) as seen:
        softfocus.hf.use(model, "lssar")
    assert seen[0].filename == __file__  # it points at the caller


def test_hidden_keys_that_count_are_said():
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
    model, seen = SwinModel(config).eval(), []
    with pytest.warns(UserWarning, match=r"SwinLayer hides keys by adding -100 .* count in N"):
        softfocus.hf.use(model, "lssar")
    with softfocus.hf.watch(seen.append), torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert min(call.arguments["attn_mask"].min().item() for call in seen) == -100.0  # what the warning is about
    with warnings.catch_warnings(action="error"):
        softfocus.hf.use(model, "softmax")  # N is not in it


def test_a_model_of_ones_own_without_post_init(build, tokens):
    class Bare(type(build("llama"))):
        def post_init(self):
            pass

    config = softfocus.hf.use(build("llama").config, "ssmax")
    model = Bare(config)
    for layer in model.model.layers:
        del layer.self_attn.softfocus_head_scale  # as if the inner model had not called it either
    with pytest.raises(ValueError, match=r"no parameter 'softfocus_head_scale'.*softfocus.hf.use\(model"):
        model(tokens(1, 4))
    assert logits(softfocus.hf.use(model, "ssmax"), tokens(1, 4)).isfinite().all()


@pytest.mark.parametrize(
    ("mechanism", "parameters", "error", "message"),
    [
        ("lsar", {}, ValueError, "did you mean 'lssar'"),
        (3, {}, TypeError, "mechanism: got int"),
        ("lssar", {"head_scales": 1.0}, TypeError, "'head_scales'; did you mean 'head_scale'"),
        (
            "lssar",
            {"window": 64},
            TypeError,
            r"name 'window'; write a layout: {'\*': {'mechanism': 'lssar', 'window': 64}}",
        ),
        ("lssar", {"temperature": 1.0}, TypeError, "they are head_scale, power"),
        ("lssar", {"head_scale": "1"}, ValueError, "head_scale: got '1', expected a finite number"),
        ("lssar", {"head_scale": float("nan")}, ValueError, "finite"),
        ("lssar", {"head_scale": True}, ValueError, "finite"),
        ("lssar", {"power": 0.5}, ValueError, r"outside \[1, 100\]"),
        ("lssa", {"power": 3.0}, ValueError, "does not re-weight; start from 'sharpened"),
    ],
)
def test_wrong_arguments(build, mechanism, parameters, error, message):
    config = build("llama").config
    with pytest.raises(error, match=message):
        softfocus.hf.use(config, mechanism, **parameters)
    assert config.softfocus is None
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize("target", [nn.Linear(2, 2), "gpt2", AutoModel])
def test_wrong_targets(target):
    with pytest.raises(TypeError, match="expected a Transformers model or config"):
        softfocus.hf.use(target, "lssar")


def test_laser_in_a_model_with_attention_dropout_is_warned_of() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.attention_dropout = 0.1
    with pytest.warns(UserWarning, match=r"attention_dropout = 0\.1, and LASER has no dropout"):
        model = softfocus.hf.use(LlamaForCausalLM(config), "laser(lssar)")
    tokens = torch.arange(8)[None]
    assert model.eval()(tokens).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"dropout_p: got 0\.1 with a LASER mechanism"):
        model.train()(tokens)
    config = T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.warns(UserWarning, match=r"dropout_rate = 0\.1, and LASER has no dropout"):
        softfocus.hf.use(T5ForConditionalGeneration(config), "laser")


def _two_llamas() -> tuple[LlamaForCausalLM, LlamaForCausalLM, LlamaConfig]:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval(), config


def _runs(model: LlamaForCausalLM) -> str:
    return str(softfocus.hf.layout_of(model))


def test_models_that_were_built_from_one_config_run_what_each_was_given() -> None:
    one, two, config = _two_llamas()
    tokens = torch.arange(8)[None]
    before = two(tokens).logits
    softfocus.hf.use(one, "ssmax")
    assert softfocus.hf.layout_of(two) is None
    assert torch.equal(two(tokens).logits, before)
    softfocus.hf.window(softfocus.hf.use(two, "softmax"), 3)
    assert (_runs(one), _runs(two)) == ("ssmax", "softmax[3]")
    one(tokens).logits.sum().backward()
    assert all(layer.self_attn.softfocus_head_scale.grad is not None for layer in one.model.layers)
    assert softfocus.hf.layout_of(LlamaForCausalLM(config)) is None, "built later, from the same object"


@pytest.mark.parametrize("known", [True, False], ids=["noted", "built before the import"])
def test_an_inner_model_keeps_sharing_its_config_with_the_model_around_it(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = _two_llamas()
    if not known:
        monkeypatch.setattr(sharing, "_built", WeakSet())
    softfocus.hf.use(one.model, "lssar")
    assert _runs(one) == _runs(one.model) == "lssar"
    assert one.config is one.model.config is one.model.layers[0].self_attn.config
    assert softfocus.hf.layout_of(two) is None


def test_a_copied_model_gets_a_config_of_its_own() -> None:
    one, _, _ = _two_llamas()
    softfocus.hf.use(one, "lssa")
    softfocus.hf.use(copy.deepcopy(one), "lssar")
    assert _runs(one) == "lssa"


def test_the_entry_cannot_be_changed_in_place() -> None:
    config = softfocus.hf.use(_two_llamas()[2], "lssar")
    for change in (
        lambda entry: entry.clear(),
        lambda entry: entry.update(mechanism={}),
        lambda entry: entry["mechanism"].__setitem__("power", 3.0),
        lambda entry: entry["mechanism"].pop("power"),
    ):
        with pytest.raises(TypeError, match=r"config\.softfocus: it cannot be changed in place; call softfocus\.hf"):
            change(config.softfocus)
    layered = softfocus.hf.use(_two_llamas()[2], {"0": {"mechanism": "softmax", "window": 8}, "*": "lssar"})
    for change in (
        lambda layout: layout["kinds"][0][0].__setitem__("window", 4),
        lambda layout: layout["kinds"].append([]),
        lambda layout: layout["layers"].sort(),
    ):
        with pytest.raises(TypeError, match=r"config\.softfocus: it cannot be changed in place"):
            change(layered.softfocus["layout"])
    assert json.loads(json.dumps(layered.softfocus)) == copy.deepcopy(layered).softfocus
    values = json.loads(json.dumps(config.softfocus))
    config.softfocus = values  # another entry is welcome
    assert config.softfocus == values
    assert copy.deepcopy(config).softfocus == pickle.loads(pickle.dumps(config)).softfocus == values
