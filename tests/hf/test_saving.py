"""A model saved with a mechanism comes back with it, or not at all."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPVisionConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import softfocus
import softfocus.hf
from softfocus import catalog
from softfocus.hf import layout_of
from softfocus.hf.config import SAVED

MECHANISMS = ["softmax", "lssar", "sharpened(lssa, 3)", "laser(lssar)", "ssmax", "qknorm", "relu_shen"]


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


def shake(model):
    """Learned parameters away from their initial values, a different value everywhere."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "softfocus_" in name:
                parameter.mul_(1 + torch.rand(parameter.shape))
    return model


@pytest.fixture
def llava():
    """``llava()``: a tiny composite model, vision and language."""
    text = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=61,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=60)
    return lambda: LlavaForConditionalGeneration(copy.deepcopy(config))


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "bert", "t6"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_round_trip(build, tokens, tmp_path, family, mechanism):
    model, ids = shake(build(family, mechanism)), tokens(2, 9)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["attn_implementation"] == SAVED
    assert softfocus.Mechanism.from_dict(saved["softfocus"]["mechanism"]) == softfocus.catalog.named(mechanism)
    back = type(model).from_pretrained(tmp_path)
    assert layout_of(back.config).mechanism == softfocus.catalog.named(mechanism)
    assert torch.equal(logits(back, ids), logits(model, ids))
    back.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == saved


def test_learned_parameters_are_saved_and_loaded(build, tokens, tmp_path):
    model = shake(build("llama", "ssmax"))
    model.save_pretrained(tmp_path)
    back, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    names = [name for name, _ in back.named_parameters() if "softfocus_head_scale" in name]
    assert len(names) == back.config.num_hidden_layers
    for name in names:
        assert torch.equal(back.get_parameter(name), model.get_parameter(name))


def test_a_softmax_checkpoint_gets_initial_values(build, tmp_path):
    """To train on with SSMax from a softmax model: its weights, and SSMax's own first values."""
    plain = build("llama")
    plain.save_pretrained(tmp_path)
    config = softfocus.hf.use(AutoConfig.from_pretrained(tmp_path), "ssmax")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert {name.rsplit(".", 1)[-1] for name in report["missing_keys"]} == {"softfocus_head_scale"}
    assert torch.equal(model.get_parameter("lm_head.weight"), plain.get_parameter("lm_head.weight"))
    for layer in model.model.layers:
        assert torch.equal(layer.self_attn.softfocus_head_scale, torch.full((4,), 0.43))


def test_the_config_alone_is_enough(build, tokens):
    config = softfocus.hf.use(build("llama").config, "sharpened(ssmax, 3)", power=2.5)
    for copied in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)), LlamaConfig(**config.to_dict())):
        assert copied._attn_implementation == "softfocus"
        assert copied.softfocus == config.softfocus
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copied)
        layer = model.model.layers[1].self_attn
        assert torch.equal(layer.softfocus_head_scale, torch.full((4,), 0.43))
        assert torch.equal(layer.softfocus_power, torch.full((4,), 2.5))
        assert logits(model, tokens(1, 5)).isfinite().all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
def test_another_implementation_is_refused(build, tokens, tmp_path, implementation):
    model, ids = build("llama", "lssar"), tokens(1, 6)
    model.save_pretrained(tmp_path)
    before, refused = logits(model, ids), f"attn_implementation='{implementation}' would run softmax"
    with pytest.raises(ValueError, match=refused):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
    with pytest.raises(ValueError, match=refused):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=model.config, attn_implementation=implementation)
    with pytest.raises(ValueError, match=refused):
        AutoConfig.from_pretrained(tmp_path, attn_implementation=implementation)
    with pytest.raises(ValueError, match=refused):
        AutoModelForCausalLM.from_config(model.config, attn_implementation=implementation)
    with pytest.raises(ValueError, match=refused):
        model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=r"would run softmax|PyTorch"):
        model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == "softfocus"
    assert torch.equal(logits(model, ids), before)
    for same in ("softfocus", SAVED, None):  # None asks for nothing in particular
        back = AutoModelForCausalLM.from_pretrained(tmp_path, config=model.config, attn_implementation=same)
        assert torch.equal(logits(back, ids), before)


def test_a_damaged_entry_is_refused(build, tmp_path):
    build("llama", "lssar").save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    lssar = whole["softfocus"]["mechanism"]

    def layout(*groups):
        return {"layout": {"kinds": [list(groups)], "layers": [0, 0]}}

    for entry, message in (
        ({}, r"expected \{'mechanism'"),
        ("lssar", r"expected \{'mechanism'"),
        ({"mechanism": lssar}, r"expected \{'mechanism'"),
        ({"mechanism": lssar, "learned": {"gamma": 1.0}}, "learned parameters among"),
        ({"mechanism": {**lssar, "phi": "softpuls"}, "learned": {}}, "did you mean 'softplus'"),
        ({"mechanism": {"teperature": 1}, "learned": {}}, "no field 'teperature'"),
        ({"mechanism": {}, "learned": {}}, "lacks similarity, scale, .*, laser; expected every field"),
        ({"mechanism": {"power": 15}, "learned": {}}, "lacks similarity, .*, post, laser; expected every field"),
        (layout({"mechanism": {}, "parameters": {}}), "lacks similarity, .*, laser; expected every field"),
        (layout({"parameters": {}}), "needs a mechanism"),
        (layout(), "groups that say how many heads"),
        ({"layout": {"kinds": [[{"mechanism": lssar}]]}}, "a layout has the entries kinds and layers"),
        ({"layout": {}}, "a layout has the entries kinds and layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**whole, "softfocus": entry}))
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_implementation_without_an_entry_is_refused(build, tokens):
    model = build("llama")
    model.set_attn_implementation("softfocus")
    with pytest.raises(ValueError, match="without a mechanism"):
        model(tokens(1, 4))


def test_part_of_a_composite_model(llava, tokens, tmp_path):
    model, ids = llava(), tokens(1, 6) % 60
    softmax = logits(model, ids)
    shake(softfocus.hf.use(model.model.language_model, "ssmax"))
    assert not torch.equal(logits(model, ids), softmax)
    assert model.config.vision_config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == {"text_config": SAVED}
    back = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(logits(back, ids), logits(model, ids))
    assert back.config.vision_config.softfocus is None
    with pytest.raises(ValueError, match="would run softmax"):
        LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="sdpa")


def test_the_whole_of_a_composite_model(llava, tokens, tmp_path):
    model, ids = shake(softfocus.hf.use(llava(), "qknorm")), tokens(1, 6) % 60
    assert sum("softfocus_head_scale" in name for name, _ in model.named_parameters()) == 2  # a layer on either side
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == SAVED
    back = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter)
    assert torch.equal(logits(back, ids), logits(model, ids))


WITHOUT_SOFTFOCUS = """
import json, pathlib, sys
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration
def load(kind, folder):
    try:
        return kind.from_pretrained(folder).config._attn_implementation
    except ValueError as error:
        return str(error)
llama, llava = sys.argv[1:]
print(json.dumps({"llama": load(AutoModelForCausalLM, llama), "llava": load(LlavaForConditionalGeneration, llava)}))
path = pathlib.Path(llama, "config.json")
config = json.loads(path.read_text())
del config["attn_implementation"]
path.write_text(json.dumps(config))
print(json.dumps({"llama": load(AutoModelForCausalLM, llama)}))
assert not [name for name in sys.modules if name.startswith("softfocus")]
"""


@pytest.mark.long
def test_without_softfocus_nothing_loads(build, llava, tmp_path):
    build("llama", "lssar").save_pretrained(tmp_path / "llama")
    composite = llava()
    softfocus.hf.use(composite.model.language_model, "lssar")
    composite.save_pretrained(tmp_path / "llava")
    folders = [str(tmp_path / "llama"), str(tmp_path / "llava")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SOFTFOCUS, *folders], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    as_saved, tampered = map(json.loads, done.stdout.splitlines())
    for answer in as_saved.values():
        assert 'Specified `attn_implementation="softfocus: import softfocus.hf before loading' in answer
    assert tampered["llama"] == "sdpa"  # what the line in config.json prevents: the answers above could be otherwise
    assert (
        LlamaForCausalLM.from_pretrained(folders[0]).config._attn_implementation == "softfocus"
    )  # not with the import


def test_a_registered_name_is_not_needed_to_load(build, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog._CATALOG, "_entries", catalog._CATALOG._entries)
    mine = softfocus.named("lssar").replace(phi="sigmoid", power=4)
    softfocus.register("mine", mine, learned={"head_scale": 0.5})
    model, ids = shake(build("llama", "mine")), tokens(2, 9)
    model.save_pretrained(tmp_path)
    assert "mine" not in (tmp_path / "config.json").read_text()
    monkeypatch.undo()
    assert "mine" not in softfocus.mechanisms()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert layout_of(loaded).mechanism == mine
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (None, "expected a mechanism or a layout, since attn_implementation is 'softfocus'; got None"),
        ({"layout": {"kinds": [], "layers": [[]]}}, "the layout is not as softfocus.hf.use.. writes it: unhashable"),
        ({"layout": {"kinds": None, "layers": None}}, "the layout is not as softfocus.hf.use.. writes it: 'NoneType'"),
    ],
)
def test_a_damaged_entry_is_refused_when_it_is_loaded(build, tmp_path, entry, says):
    softfocus.hf.use(build("llama"), "lssar").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "softfocus": entry}))
    with pytest.raises(ValueError, match=says):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_mechanism_is_not_taken_away_by_none(build):
    config = softfocus.hf.use(build("llama"), "lssar").config
    with pytest.raises(ValueError, match="got None"):
        config.softfocus = None
    assert layout_of(config).mechanism == softfocus.named("lssar")


BERT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}


def test_a_part_with_a_copy_of_the_config_is_not_saved_as_softmax(tmp_path):
    """T5 copies its config for its encoder and decoder, and config.json is that of the whole."""
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.warns(UserWarning, match="T5Stack is inside T5ForConditionalGeneration, .* cannot be saved"):
        softfocus.hf.use(t5.encoder, "ssmax")
    message = "T5Stack inside T5ForConditionalGeneration runs ssmax, but the config that would be saved says Transform"
    with pytest.raises(ValueError, match=message):
        t5.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    with torch.no_grad():
        learned = t5.encoder.block[0].layer[0].SelfAttention.softfocus_head_scale.fill_(3.0)
    softfocus.hf.assign(t5, "ssmax")
    t5.save_pretrained(tmp_path)
    back = T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert layout_of(back.encoder) == layout_of(back.decoder) == layout_of(t5)
    assert torch.equal(back.encoder.block[0].layer[0].SelfAttention.softfocus_head_scale, learned)


def test_a_part_that_was_put_in_is_not_saved_as_what_it_is_not(tmp_path):
    def backbone():
        return BertModel(BertConfig(**BERT))

    whole = BertForSequenceClassification(BertConfig(**BERT))
    whole.bert = softfocus.hf.use(backbone(), "lssar")
    with pytest.raises(ValueError, match=r"BertModel inside .* runs lssar, but the config .* says Transformers' own"):
        whole.save_pretrained(tmp_path)
    softfocus.hf.use(whole, "lssar").save_pretrained(tmp_path)
    assert str(layout_of(BertForSequenceClassification.from_pretrained(tmp_path).bert)) == "lssar"
    whole.bert = backbone()
    with pytest.raises(ValueError, match=r"runs Transformers' own attention, but the config .* says lssar"):
        whole.save_pretrained(tmp_path)
    whole.bert = softfocus.hf.use(backbone(), "lssar")  # as the whole's config says
    whole.save_pretrained(tmp_path)


def test_a_part_that_has_a_config_in_the_wholes(tmp_path):
    decoder = BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**BERT), decoder))
    softfocus.hf.use(model.encoder, "lssar")
    model.save_pretrained(tmp_path)
    back = EncoderDecoderModel.from_pretrained(tmp_path)
    assert (str(layout_of(back.encoder)), layout_of(back.decoder)) == ("lssar", None)
    model.encoder = BertModel(BertConfig(**BERT))
    with pytest.raises(ValueError, match="BertModel inside EncoderDecoderModel runs Transformers' own attention, but"):
        model.save_pretrained(tmp_path)
