"""``use()``, ``assign()``, ``window()`` and ``explain()`` in parts of models, in models that run
their own attention, and around wrapped models.
"""

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    DistilBertConfig,
    DistilBertModel,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaModel,
    OPTConfig,
    OPTForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

import softfocus.hf
from softfocus.hf.t6 import T6Config, T6ForCausalLM
from softfocus.layout import resolve

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT = {
    "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 61,
    "word_embed_proj_dim": 32,
}  # fmt: skip


def llava():
    config = LlavaConfig(
        text_config=LlamaConfig(**SIZES, vocab_size=61),
        vision_config=CLIPVisionConfig(**SIZES, image_size=8, patch_size=4),
    )
    return LlavaForConditionalGeneration(config)


def hybrid_config():
    """Three layers of linear attention, and one that dispatches."""
    sizes = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61}
    linear = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    return Qwen3NextConfig(
        **sizes, **linear, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0, pad_token_id=None
    )


def test_a_window_keeps_what_each_part_runs_and_learned():
    model = softfocus.hf.use(llava(), "softmax")
    softfocus.hf.use(model.model.language_model, "ssmax")
    with torch.no_grad():
        scale = model.model.language_model.layers[0].self_attn.softfocus_head_scale.fill_(3.0)
    softfocus.hf.window(model, 8)
    assert str(softfocus.hf.layout_of(model.model.language_model)) == "ssmax[8]"
    assert str(softfocus.hf.layout_of(model.model.vision_tower)) == "softmax[8]"
    assert model.model.language_model.layers[0].self_attn.softfocus_head_scale is scale


def test_explain_has_a_table_for_each_part():
    model = softfocus.hf.use(llava(), "softmax")
    assert softfocus.hf.explain(model) == "every layer: softmax; backend cpu"
    softfocus.hf.use(model.model.language_model, "lssar")
    vision, text = "model.vision_tower.encoder.layers:", "model.language_model.layers:"
    told = [vision, "every layer: softmax; backend cpu", text, "every layer: lssar; backend cpu"]
    assert softfocus.hf.explain(model).splitlines() == told
    part = llava()
    softfocus.hf.use(part.model.language_model, "lssar")
    assert softfocus.hf.explain(part).splitlines() == [vision, "Transformers' own attention", *told[2:]]


def test_what_use_has_not_changed_is_not_narrowed_in_part():
    model = llava()
    softfocus.hf.use(model.model.language_model, "lssar")
    with pytest.raises(ValueError, match=r"^window: a part of the model runs its own attention \(CLIPAttention\)"):
        softfocus.hf.window(model, 8)
    softfocus.hf.window(model.model.language_model, 8)
    assert str(softfocus.hf.layout_of(model.model.language_model)) == "lssar[8]"


def test_a_model_in_the_place_of_keys_is_not_printed(build):
    with pytest.raises(TypeError, match=r"^keys: got LlamaForCausalLM, expected a whole number"):
        softfocus.hf.window(8, build("llama"))


def test_a_config_is_not_narrowed_in_part():
    config = llava().config
    softfocus.hf.use(config.text_config, "lssar")
    with pytest.raises(ValueError, match=r"^window: a part of the model runs its own attention; call"):
        softfocus.hf.window(config, 8)


@pytest.mark.filterwarnings("ignore:softfocus.hf.use. LlavaModel keeps softmax")
@pytest.mark.parametrize("built", [False, True])
def test_a_part_that_does_not_dispatch_keeps_its_masks(built):
    """Falcon computes its attention itself, with the causal mask that its config asks for."""
    text = FalconConfig(**SIZES, vocab_size=61, initializer_range=0.3)
    config = LlavaConfig(text_config=text, vision_config=CLIPVisionConfig(**SIZES, image_size=8, patch_size=4))
    if built:
        model = LlavaModel(softfocus.hf.use(config, "softmax"))
    else:
        model = softfocus.hf.use(LlavaModel(config), "softmax")
    softfocus.hf.assign(model, "softmax")
    tokens = torch.randint(3, 61, (1, 12))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 61
    with torch.no_grad():
        falcon = model.language_model.eval()
        one, other = (falcon(given).last_hidden_state[:, :-1] for given in (tokens, changed))
    torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:softfocus.hf.use. LlamaModel is inside")
def test_tables_of_parts_stand_beside_each_other():
    model = softfocus.hf.use(llava(), "softmax")
    softfocus.hf.use(model.model.language_model, "lssar")
    model.second = LlamaModel(LlamaConfig(**SIZES, vocab_size=61))
    softfocus.hf.use(model.second, "lssar")
    assert softfocus.hf.explain(model).splitlines()[2] == "model.language_model.layers, second.layers:"


def test_assign_refuses_what_use_refuses():
    falcon = FalconForCausalLM(FalconConfig(**SIZES, vocab_size=61))
    for target in (falcon, falcon.config, LlamaConfig(**SIZES)):
        with pytest.raises(ValueError, match=r"^assign: the model runs its own attention; call softfocus\.hf\.use"):
            softfocus.hf.assign(target, "softmax")
    assert falcon.config._attn_implementation != "softfocus"


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_wrapped_model_is_refused_by_all(build, wrap):
    wrapped = wrap(softfocus.hf.use(build("llama"), "lssar"))
    for call in (
        lambda: softfocus.hf.use(wrapped, "lssa"),
        lambda: softfocus.hf.assign(wrapped, "lssa"),
        lambda: softfocus.hf.window(wrapped, 4),
        lambda: softfocus.hf.layout_of(wrapped),
        lambda: softfocus.hf.explain(wrapped),
    ):
        with pytest.raises(TypeError, match=r"^target: got .*, expected a Transformers model .* the model inside$"):
            call()
    with pytest.raises(TypeError, match=r"^model: got LlamaConfig, expected a model"):
        softfocus.hf.explain(LlamaConfig(**SIZES))


def test_a_hybrid_is_laid_out_alike_from_its_config_and_as_a_model():
    layout = {"full_attention": "lssar", "*": {"mechanism": "softmax", "window": 4}}
    built = Qwen3NextForCausalLM(softfocus.hf.use(hybrid_config(), layout))
    changed = softfocus.hf.use(Qwen3NextForCausalLM(hybrid_config()), layout)
    assert softfocus.hf.layout_of(built) == softfocus.hf.layout_of(changed)
    told = ["layers 0, 1, 2: softmax[4]; no attention that dispatches", "layer 3: lssar; backend cpu"]
    for model in (built, changed):
        assert softfocus.hf.explain(model).splitlines() == told


def test_layers_whose_configs_differ():
    """Transformers refuses to read a key that differs off the whole config."""
    config = LlamaConfig(**SIZES, per_layer_config={0: {"num_key_value_heads": 4}, 1: {"num_key_value_heads": 2}})
    halves = [{"mechanism": "softmax", "heads": 2}, "lssar"]
    assert str(resolve({"*": halves}, config)) == "2x softmax + 2x lssar"
    one = [{"mechanism": "softmax", "heads": 1}, "lssar"]
    assert str(resolve({"0": one, "1": "lssar"}, config)) == "1x softmax + 3x lssar / lssar"
    with pytest.raises(ValueError, match=r"heads: got 1, expected a multiple of 2"):
        resolve({"*": one}, config)


def test_modules_without_a_number_cannot_be_laid_out():
    layout = {"*": {"mechanism": "softmax", "window": 3}}
    config = DistilBertConfig(dim=32, hidden_dim=32, n_layers=2, n_heads=4, vocab_size=61)
    says = r"^layout: .* \(DistilBertSelfAttention\) have no layer_idx"
    with pytest.raises(ValueError, match=says):
        softfocus.hf.use(DistilBertModel(config), layout)
    with pytest.raises(ValueError, match=says):
        DistilBertModel(softfocus.hf.use(config, layout))


def test_heads_learn_in_float32_beside_weights_of_eight_bits(build):
    model = build("llama")
    for name, weight in model.named_parameters():
        if "_proj" in name:
            weight.requires_grad_(False).data = weight.data.to(torch.float8_e4m3fn)
    softfocus.hf.use(model, "ssmax")
    assert model.model.layers[0].self_attn.softfocus_head_scale.dtype == torch.float32
    assert "learned head_scale from 0.43" in softfocus.hf.explain(model)


@pytest.mark.filterwarnings("ignore:softfocus.hf.use. the config has")
@pytest.mark.parametrize(
    "build",
    [
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=61)),
        lambda: BertModel(BertConfig(**SIZES, vocab_size=61)),
        lambda: DistilBertModel(DistilBertConfig(dim=32, hidden_dim=32, n_layers=2, n_heads=4, vocab_size=61)),
        lambda: T5EncoderModel(T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=61)),
        lambda: OPTForCausalLM(OPTConfig(**OPT, attention_dropout=0.1)),
        lambda: CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=8, patch_size=4, attention_dropout=0.1)),
        lambda: ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=4, attention_probs_dropout_prob=0.1)),
        lambda: T6ForCausalLM(T6Config(**SIZES, head_dim=8, vocab_size=61, attention_dropout=0.1)),
    ],
    ids=["gpt2", "bert", "distilbert", "t5", "opt", "clip", "vit", "t6"],
)
def test_explain_sees_the_dropout_of_a_model_in_training(build):
    """Which every architecture keeps under a name of its own."""
    model = softfocus.hf.use(build(), "laser")
    assert softfocus.hf.explain(model.eval()).endswith("backend cpu")
    told = softfocus.hf.explain(model.train())
    assert "backend none (dropout_p: got 0.1 with a LASER mechanism" in told
    ids, image = torch.ones(1, 4, dtype=torch.long), torch.ones(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"^dropout_p: got 0\.1 with a LASER mechanism"):
        model(image if model.main_input_name == "pixel_values" else ids)


def test_the_card_of_t6_imports_it_from_softfocus(build, tmp_path):
    model = build("t6")
    softfocus.hf.use(model, "lssar").save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    (line,) = [line for line in card.splitlines() if line.endswith("import T6ForCausalLM")]
    exec(line, {})
