"""Every architecture that dispatches its attention, tiny and random, compared with its own
eager attention.

A model is built from each config class by a generic shrinker (known size fields, recursively for
configs inside). What that does not fit stands in architectures.toml: sizes of its own, what is
refused, what cannot be built or compared and why.
"""

import copy
import dataclasses
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

import softfocus.hf
from softfocus import named
from softfocus.hf import learned

FOLDERS = Path(transformers.__file__).parent / "models"
TABLE = tomllib.loads(Path(__file__).with_name("architectures.toml").read_text())
DISPATCHING = sorted(
    {file.parent.name for file in FOLDERS.glob("*/modeling_*.py") if "ALL_ATTENTION_FUNCTIONS" in file.read_text()}
)
TOLERANCE = 2e-4  # of the largest output. Rounding moves it by 1e-6, a wrong mask by 1e-2 or more
LENGTH = 9
LEFT_OUT = {name for names in TABLE["left_out"].values() for name in names}

SIZES = [  # the first pattern that a field's name matches gives its size, where the size was larger
    (r"num_feat_extract_layers", None),
    (r"(.*_)?num_(hidden_)?layers|n_layers?|(.*_)?(encoder|decoder)_layers|num_.*_layers|layers|(.*_)?depth", 2),
    (r".*num_key_value_heads|num_kv_heads|n_kv_heads|num_experts_per_tok|moe_top_?k|moe_k|top_k_experts", 2),
    (r".*num_heads|.*num_attention_heads|n_heads?|(.*_)?attention_heads|heads", 4),
    (r"head_dim|.*_head_dim|head_size|d_kv|patch_size", 8),
    (r".*intermediate_(size|dim)|.*ffn_(dim|hidden_size)|n_inner|.*mlp_(dim|hidden_size)|d_ff|dim_feedforward", 48),
    (r".*vocab_size.*", 99),
    (r"(max|n)_positions?(_embeddings)?|max_target_positions|block_size|max_seq(uence)?_len(gth)?", 64),
    (r"(n_routed|num|num_local|moe_num|n|num_routed)_experts|sliding_window|attention_window", 4),
    (r"n_group|topk_group|(n|num|moe_num)_shared_experts|first_k_dense_replace|tubelet_size", 1),
    (r".*lora_rank|num_mel_bins|n_mels", 16),
    (r"image_size|input_size|img_size|conv_dim", 32),
    (r"num_frames|frames_per_clip", 2),
    (r"max_source_positions", 20),
    (r".*num_queries|num_query_tokens|num_latents", 6),
    (r"hidden_size|d_model|n_embd|dim|.*_hidden_size|.*hidden_dim|embedding_size|emb_dim|word_embed_proj_dim", 32),
    (
        r".*embed_dim|latent_dim|decoder_dim|.*output_dim|d_inner|proj(ector)?_dim|.*projection_(size|dim)|.*proj_dim",
        32,
    ),
    (r"initializer_range|init_std", 0.2),
    (r".*dropout.*|.*layerdrop|.*drop_prob|.*drop_rate|.*drop_path.*", 0.0),
]
UNSET = {"head_dim": 8, "vocab_size": 99, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
UNSET |= {"top_k_experts": 2, "moe_intermediate_size": 48, "prediction_length": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 1}


def shrunk(kind):
    """Keyword arguments that make a config of a class tiny. Fields that the class derives are left
    to it.
    """
    small = {}
    for field in dataclasses.fields(kind):
        name, value = field.name, field.default
        if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if name in TOKENS:
            small[name] = TOKENS[name]
        elif value is None and name in UNSET:
            small[name] = UNSET[name]
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int) and re.search(r"token_id$|token_index$|_token$", name):
            small[name] = 3 + len(small) % 25  # below the random tokens
        elif (size := _size(name)) is not None:
            if isinstance(value, list | tuple) and all(isinstance(x, int) for x in value):
                small[name] = type(value)(min(size, x) for x in value)
            elif (isinstance(value, float) and isinstance(size, float)) or (isinstance(value, int) and value > size):
                small[name] = size
    if "kv_lora_rank" in small and "num_key_value_heads" in small:  # every query head has a key of its own
        small["num_key_value_heads"] = small["num_attention_heads"]
    for name, value in vars(kind()).items():
        if isinstance(value, PreTrainedConfig):
            small[name] = shrunk(type(value)) | ({"model_type": value.model_type} if value.model_type else {})
        elif name == "rope_parameters" and value and "mrope_section" in _modeling(kind):
            small[name] = copy.deepcopy(value)
            for rope in [small[name], *small[name].values()]:  # one for all layers, or one for each type of layers
                if isinstance(rope, dict) and "rope_type" in rope:
                    rope["mrope_section"] = [2, 1, 1]
    small |= TABLE["sizes"].get(kind.__name__, {})
    return small | _layers_of_every_type(kind, small)


def _size(name):
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def _modeling(kind):
    return (
        Path(inspect.getfile(kind))
        .with_name(Path(inspect.getfile(kind)).name.replace("configuration", "modeling"))
        .read_text()
    )


def _layers_of_every_type(kind, small):
    """Enough layers that an attention layer is among them, where attention is rare."""
    wanted = set(getattr(kind(), "layer_types", None) or []) & {"full_attention"}
    for count in (2, 4, 6, 8) if "num_hidden_layers" in small and "layer_types" not in small else ():
        types = getattr(kind(**small | {"num_hidden_layers": count}), "layer_types", None) or ["attention"]
        if wanted <= set(types) and any("attention" in kind and "linear" not in kind for kind in types):
            return {"num_hidden_layers": count}
    return {}


def families(folder):
    """The config classes of a folder with their model classes, whole models first."""
    found = {}
    endings = ["ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "Model", "ForPreTraining"]
    for file in sorted((FOLDERS / folder).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{folder}.{file.stem}")
        for name, kind in vars(module).items():
            whole = inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and not name.endswith("PreTrainedModel")
            if whole and kind.__module__ == module.__name__ and inspect.isclass(kind.config_class):
                found.setdefault(kind.config_class, []).append(kind)
    order = {kind: [not kind.__name__.endswith(end) for end in endings] for kinds in found.values() for kind in kinds}
    return {config: sorted(kinds, key=order.get)[:6] for config, kinds in found.items()}


def spread(model):
    """Weights with which attention is far from uniform, and nothing starts at zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dim() > 1 and parameter.numel():
                scale = 1.0 if "embed" in name and parameter.dim() == 2 else parameter[0].numel() ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif parameter.is_floating_point() and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def ids(config, seed):
    size = number(config, "text_vocab_size", "vocab_size", default=99)
    size = size if size > 30 else 99
    return torch.randint(30, min(size, 90), (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def number(config, *names, default):
    """The first of some fields that a config, or one inside it, holds as a number or a list of
    numbers.
    """
    for place in [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]:
        for name in names:
            value = getattr(place, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def guesses(model):
    """Inputs that a model may take, by what its forward is called with. The first that eager
    attention runs on is taken.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    channels = number(config, "num_channels", "in_channels", "in_chans", default=3)
    side = number(config, "image_size", "input_size", "img_size", default=32)
    frames = number(config, "num_frames", "frames_per_clip", default=2)
    mels = number(config, "num_mel_bins", "n_mels", "feature_size", "input_dim", "input_feat_per_channel", default=16)
    patch, depth = number(config, "patch_size", default=8), number(config, "temporal_patch_size", default=1)
    text, grid = {"input_ids": ids(config, 1)}, torch.tensor([[1, 4, 4], [1, 4, 4]])
    images = [normal(2, channels, s, s) for s in dict.fromkeys((side, 32, 64))]
    images.append(normal(2, frames, channels, side, side))
    waves = [
        (2, number(config, "max_length", default=16), mels),
        (2, 1000),
        (2, 1, 1000),
        (2, 4000),
        (2, 40, mels),
        (2, mels, 40),
    ]
    features = [(2, mels, 40), (2, 40, mels), (2, mels, 80), (2, 64, mels), (2, 1, 64, mels), (2, 40, 64)]
    patches = [(32, channels * depth * patch**2), (32, channels, patch, patch), (1, 32, channels, patch, patch)]
    vision = [{"pixel_values": image} for image in images]
    vision += [
        {name: normal(*shape), size: grid}
        for name in ("hidden_states", "pixel_values")
        for size in ("grid_thw", "image_grid_thw")
        for shape in patches
    ]
    vision.append({"pixel_values": normal(1, channels, patch, 32 * patch), "target_sizes": grid[:, 1:]})
    vision += [{"pixel_values": images[0]} | text, {"pixel_values_videos": images[-1]}]
    sound = [{"input_features": normal(*shape)} for shape in features] + [
        {"input_values": normal(*shape)} for shape in waves
    ]
    width = number(config, "hidden_size", "d_model", default=32)
    hidden = [{name: normal(2, LENGTH, width)} for name in ("inputs_embeds", "hidden_states")]
    hidden.append(text | {"encoder_hidden_states": normal(2, 5, width)})
    by_kind = {"pixel_values": [vision, [text], sound], "input_features": [sound, [text], vision]}
    by_kind["input_values"] = by_kind["input_features"]
    series = 11  # seven lags and a context of four
    past = {
        "past_values": normal(2, series),
        "past_time_features": normal(2, series, 1),
        "past_observed_mask": torch.ones(2, series),
    }
    future = {"future_values": normal(2, 4), "future_time_features": normal(2, 4, 1)}
    context = {"past_values": normal(2, 128), "past_values_padding": torch.zeros(2, 128, dtype=torch.long)}
    flat = normal(2, 6, 2 + channels * patch**2)
    flat[..., :2] = torch.arange(12).view(6, 2) % 4 + 1  # rows and columns
    own = [  # what few models take
        {"flattened_patches": flat},
        text | {"bbox": torch.rand(2, LENGTH, 4, generator=torch.Generator().manual_seed(2)).sort(-1).values},
        text | {"pixel_values": images[0][:, None], "image_attention_mask": torch.ones(2, LENGTH, 1, dtype=torch.long)},
        context | {"freq": torch.zeros(2, 1, dtype=torch.long)},
        context,
        text | {"input_values": normal(2, 1, 4000)},
        {
            "past_values": normal(
                2, number(config, "context_length", default=32), number(config, "num_input_channels", default=1)
            )
        },
    ]
    for group in [*by_kind.get(model.main_input_name, [[text], vision, sound]), hidden, [past | future, past], own]:
        for guess in group:
            if "decoder_input_ids" in takes and ("input_ids" not in guess or config.is_encoder_decoder):
                guess = guess | {"decoder_input_ids": ids(config, 3)}
            if set(guess) <= set(takes):
                yield guess


def forward(model, inputs):
    """Every floating tensor that a model returns, by its place in the output."""

    def tensors(place, value):
        if isinstance(value, torch.Tensor):
            return {place: value} if value.is_floating_point() and value.numel() else {}
        pairs = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        kept = [(key, inner) for key, inner in pairs if not re.search("past|attentions", str(key))]
        return {name: tensor for key, inner in kept for name, tensor in tensors(f"{place}.{key}", inner).items()}

    torch.manual_seed(0)
    with torch.no_grad():
        return tensors("", model(**{name: value.clone() for name, value in inputs.items()}))


def tiny(config, kinds):
    """(model, eager twin, inputs, what the twin returns) for the first class that can be compared,
    else why none can.

    No reasons where nothing in the models dispatches.
    """
    reasons = []
    for kind in kinds:
        try:
            torch.manual_seed(0)
            model = kind(config(**shrunk(config))).eval()
            if not list(learned.attention_modules(model)):
                continue
            if (count := sum(p.numel() for p in model.parameters())) > 3e7:
                raise ValueError(f"{count:.0e} parameters")
            eager = copy.deepcopy(spread(model))
            eager.set_attn_implementation("eager")
        except Exception as error:  # whatever a model class makes of a tiny config
            reasons.append(f"{kind.__name__}: {type(error).__name__}: {str(error)[:200]}")
            continue
        for guess in guesses(model):
            try:
                expected = forward(eager, guess)
            except Exception as error:
                reasons.append(f"{kind.__name__}({', '.join(guess)}): {type(error).__name__}: {str(error)[:200]}")
                continue
            if expected and all(x.isfinite().all() for x in expected.values()):
                return model, eager, guess, expected
            reasons.append(f"{kind.__name__}({', '.join(guess)}): nothing returned, or not finite")
        reasons.append(f"{kind.__name__}: takes other inputs")
    return reasons


def differ(actual, expected):
    """The largest difference, each output measured by its largest value."""
    assert actual.keys() == expected.keys()
    gaps = [((actual[k] - x).abs().max() / x.abs().max().clamp(min=1e-30)).item() for k, x in expected.items()]
    return max(gaps, default=0.0)


def changed_at_the_end(model, inputs, before):
    """By how much a decoder's earlier outputs move when its last token changes, measured by the
    largest output as in ``differ``; None where it is not seen to be one.
    """
    name = next((n for n in ("decoder_input_ids", "input_ids", "inputs_embeds") if n in inputs), None)
    # A decoder of one frame's codes gives no logits for its first input
    lengths = ((2, LENGTH), (2, LENGTH - 1))
    outputs = [k for k, x in before.items() if x.shape[:2] in lengths and re.search("logits|last_hidden", k)]
    if name is None or not outputs:
        return None
    other = inputs | {name: inputs[name].clone()}
    last = other[name][:, -1]
    other[name][:, -1] = last + 1 if last.is_floating_point() else last ^ 1
    own = before[outputs[0]]
    return ((forward(model, other)[outputs[0]] - own)[:, :-1].abs().max() / own.abs().max()).item()


DEFAULT = {"bert", "clip", "deepseek_v3", "informer", "llama", "sam", "sam_hq", "t5"}
LONG = {"bigbird_pegasus", "bridgetower", "git", "nllb_moe", "pegasus_x", "whisper"}
PARAMETERS = [
    pytest.param(f, marks=[] if f in DEFAULT else [pytest.mark.long if f in LONG else pytest.mark.slow])
    for f in DISPATCHING
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("folder", PARAMETERS)
def test_it_is_its_own_eager_attention(folder, tmp_path):
    cases = {config: tiny(config, kinds) for config, kinds in families(folder).items()}
    assert any(cases.values()) or folder in TABLE["unused"], "nothing that dispatches is in any model of the folder"
    for config, found in cases.items():
        name = config.__name__
        if isinstance(found, list):
            assert not found or name in LEFT_OUT or name in (*TABLE["uninstalled"], *TABLE["by_version"]), found
        else:
            assert name not in LEFT_OUT, "it can be compared now: take it off the list in architectures.toml"
            if name in TABLE["unstable"]:
                continue
            compare(name, *found, tmp_path / name)


def real(outputs):
    """Outputs without the padded place: what comes out there is nobody's promise."""
    places = {k: x.shape[:2] == (2, LENGTH) for k, x in outputs.items()}
    return {k: x.flatten(0, 1)[:-1] if places[k] else x for k, x in outputs.items()}


def compare(name, model, eager, inputs, expected, folder):
    if name in TABLE["as_sdpa"]:
        eager, expected = copy.deepcopy(model), forward(model, inputs)
    softfocus.hf.use(model, "softmax")
    if name in TABLE["refused"]:
        with pytest.raises(ValueError, match=r"passes \w+, which .* softfocus has no such thing"):
            forward(model, inputs)
        return
    assert differ(forward(model, inputs), expected) < TOLERANCE
    takes = inspect.signature(model.forward).parameters
    if "input_ids" in inputs and "attention_mask" in takes and name not in TABLE["unpadded"]:
        padded = inputs | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
        padded["attention_mask"][1, -1] = 0
        assert differ(*(real(forward(of, padded)) for of in (model, eager))) < TOLERANCE

    softfocus.hf.use(model, "lssar")
    ours = forward(model, inputs)
    assert all(x.isfinite().all() for x in ours.values())
    assert (differ(ours, expected) > 10 * TOLERANCE) == (
        name not in TABLE["unmoved"]
    )  # else equality above says nothing
    if (eagers := changed_at_the_end(eager, inputs, expected)) is not None and eagers < 1e-5:  # it does not look ahead
        experts = any("expert" in place for place, _ in model.named_modules())  # they round otherwise when tokens move
        bound = max(1e-5, named("lssar").power * eagers) if experts else 0.0  # a power multiplies relative errors
        assert changed_at_the_end(model, inputs, ours) <= bound

    if name in TABLE["not_loaded_back"]:
        return
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).eval()
    for parameter in loaded.parameters():  # as they lie in the file, products may round otherwise
        parameter.data = parameter.data.clone()
    second = forward(loaded, inputs)
    assert ours.keys() == second.keys()
    assert all(torch.equal(second[key], x) for key, x in ours.items())


@pytest.mark.filterwarnings("ignore")
def test_parts_of_both_kinds():
    """Gemma 4's audio tower computes attention itself, on eager masks; its language model supports
    SDPA.
    """
    config = transformers.Gemma4Config
    audio = {"audio_config": shrunk(transformers.Gemma4AudioConfig)}
    model = spread(transformers.Gemma4ForConditionalGeneration(config(**shrunk(config) | audio)).eval())
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    softfocus.hf.use(model, "softmax")
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, -8:] = False
    sound = {"input_features": normal(2, 40, 128), "attention_mask": mask}
    assert differ(forward(model.model.audio_tower, sound), forward(eager.model.audio_tower, sound)) == 0
    assert [c.softfocus.masks for c in (model.config.audio_config, model.config.text_config)] == ["eager", "full"]
