"""From a recipe to a Transformers model with a mechanism, and from a run folder back to it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import softfocus.hf
from softfocus.lab import architectures, laser_ablation
from softfocus.lab.data import tokenizer
from softfocus.lab.data.images import COLOURED, GRAY
from softfocus.lab.data.speech import BLANK
from softfocus.lab.errors import LabError, did_you_mean, first_line
from softfocus.lab.recipes.data import TRAINED_ON, Kind
from softfocus.lab.recipes.loading import load as load_recipe
from softfocus.lab.recipes.recipe import ModelTable, Recipe
from softfocus.lab.run_folder.files import MODEL, RECIPE, load_run, to_train_again
from softfocus.lab.run_folder.manifest import MANIFEST, damage
from softfocus.layout import REST, Layout, chooses_all, kinds_text, resolve

if TYPE_CHECKING:
    from torch import Tensor

_LANGUAGE = ("AutoModelForCausalLM", "a causal language model", "gpt_neox or llama")
_CLASSES: dict[Kind, tuple[str, str, str]] = {
    "text": _LANGUAGE,
    "task": _LANGUAGE,
    "masked": ("AutoModelForMaskedLM", "a masked language model", "bert or modernbert"),
    "images": ("AutoModelForImageClassification", "a classifier of images", "vit or deit"),
    "speech": ("AutoModelForCTC", "a recogniser of speech", "wav2vec2-conformer or wav2vec2"),
}
"""Transformers' class for what a model learns, the name of such models, and examples."""


def build(recipe: Recipe, vocabulary: int, end: int | None = None) -> Any:
    """A freshly initialised model, of the class that fits what it is to learn.

    Weights come from torch's global generator: seed it first.

    Args:
        recipe: what to build.
        vocabulary: size of the tokenizer's vocabulary, or how many classes there are.
        end: the id that ends a document, where generation stops.

    Raises:
        LabError: an architecture or a configuration key that Transformers does not know, a
            vocabulary that is too small.
    """
    config = build_config(recipe, vocabulary, end)
    _, what, examples = _CLASSES[recipe.data.kind]
    try:
        model = _auto(recipe.data.kind).from_config(config)
    except Exception as error:  # a model's class meets a value that its config let pass, with errors of any kind
        why = f"{type(error).__name__} {first_line(error)}" if isinstance(error, KeyError) else first_line(error)
        raise LabError(
            f"architecture {recipe.model.architecture!r} does not make {what}: {why}",
            f"choose another model.architecture, such as {examples}, or correct [model.config]",
        ) from error
    return _use(model, recipe)


def check(recipe: Recipe) -> None:
    """Refuse what can be refused before the data is there: an architecture, keys, heads or a layout
    that do not fit, dropout that is no share, LASER with dropout.

    Raises:
        LabError: as :func:`build`.
    """
    config = build_config(recipe, recipe.model.config.get("vocab_size", 2))
    laser = any(group.mechanism.laser for group in _layout(recipe, config).groups())
    if found := softfocus.hf.refusals.dropout_of(config):
        key, value = found
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise LabError(f"model.config.{key}={value} is not a share from 0 to 1", f"set model.config.{key}=0.1")
        if laser:
            raise LabError(f"model.config.{key}={value}, and LASER has no dropout", f"set model.config.{key} to 0")


def _auto(kind: Kind) -> Any:
    import transformers

    return getattr(transformers, _CLASSES[kind][0])


def build_config(recipe: Recipe, vocabulary: int, end: int | None = None) -> Any:
    """The Transformers configuration of a recipe, without a mechanism yet."""
    from transformers import CONFIG_MAPPING

    architectures.register()
    architecture = recipe.model.architecture
    if architecture not in CONFIG_MAPPING:
        guess = did_you_mean(architecture, CONFIG_MAPPING.keys(), "it is a model_type such as gpt_neox or llama")
        raise LabError(f"model.architecture {architecture!r} is not one of Transformers'", guess)
    cls = CONFIG_MAPPING[architecture]
    known = cls().to_dict()
    for key in recipe.model.config:
        # Transformers silently keeps keys that it does not know: a typo would train another model
        if key not in known:
            raise _no_key(architecture, key, known, f"see {cls.__name__} of Transformers")
    _check_sizes(recipe, cls.attribute_map)
    values = _of_data(recipe, vocabulary, end) | recipe.model.config
    if values.get("vocab_size", vocabulary) < vocabulary:
        raise LabError(
            f"model.config.vocab_size={values['vocab_size']} is less than the tokenizer's {vocabulary}",
            "raise it, or leave it out",
        )
    positions = cls.attribute_map.get("max_position_embeddings", "max_position_embeddings")  # GPT-2: n_positions
    if positions in known:
        # Dynamic NTK scales by the ratio to this length, so it has to be the length that was
        # trained
        values.setdefault(positions, recipe.train.length)
    try:
        config = cls(**values)
    except Exception as error:  # each configuration checks itself with errors of its own kind
        why = " ".join(str(error).split()).rpartition("Error: ")[2].rstrip("!")  # after the name of its validator
        given = ", ".join(f"{key} = {value}" for key, value in recipe.model.config.items() if type(value) is int)
        raise LabError(
            f"[model.config] is refused by {cls.__name__}: {why}",
            f"correct it in the recipe or with --set model.config.KEY=VALUE; there are {given}",
        ) from error
    check_positions(config, recipe.train.length, f"raise model.config.{positions}, or lower train.length to {{}}")
    _check_length(config, recipe)
    _check_heads(config)
    return config


def _no_key(architecture: str, key: str, known: Mapping[str, Any], see: str) -> LabError:
    """Often a key of the architecture that a recipe was written for, before --set or a table over
    its base changed model.architecture.
    """
    from transformers import CONFIG_MAPPING

    what = f"architecture {architecture!r} has no key 'model.config.{key}'"
    for other in ("gpt_neox", "llama", "stablelm", "t6", "bert", "vit", "wav2vec2-conformer"):
        if key in CONFIG_MAPPING[other]().to_dict():
            remedy = "of a recipe for another architecture, write one without `base`, with its own [model.config]"
            return LabError(f"{what}; it is one of {other!r}", f"leave it out ({see}); if it is {remedy}")
    return LabError(what, did_you_mean(key, known, see, "model.config."))


def _of_data(recipe: Recipe, vocabulary: int, end: int | None) -> dict[str, Any]:
    """What a configuration takes from the data."""
    images = recipe.data.images
    if images is not None:
        channels = GRAY if recipe.data.source is None else COLOURED
        return {"num_labels": vocabulary, "image_size": images.size, "num_channels": channels}
    if recipe.data.speech is not None:
        return {"vocab_size": vocabulary, "pad_token_id": BLANK, "bos_token_id": None, "eos_token_id": None}
    # The architecture's own special ids mean other tokens in our vocabulary, or none
    return {"vocab_size": vocabulary, "bos_token_id": end, "eos_token_id": end, "pad_token_id": None}


def _check_sizes(recipe: Recipe, names: Mapping[str, str]) -> None:
    """Refuse sizes below 1, by the names that the architecture gives them."""
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "patch_size"):
        key = names.get(name, name)
        value = recipe.model.config.get(key)
        if type(value) is int and value < 1:
            raise LabError(f"model.config.{key}={value} is below 1", f"set model.config.{key} to 1 or more")


def _check_heads(config: Any) -> None:
    """Refuse heads that do not divide: most architectures find out in the first step, some in a
    shape that does not fit.
    """
    heads, shared = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    width = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int):
        return
    if isinstance(shared, int) and (shared < 1 or heads % shared):
        raise LabError(
            f"model.config.num_key_value_heads={shared} does not divide num_attention_heads={heads}",
            "each key head is shared by a whole number of query heads",
        )
    if getattr(config, "head_dim", None) is None and width % heads:
        raise LabError(
            f"model.config.num_attention_heads={heads} does not divide hidden_size={width}",
            "every head has the same whole number of dimensions",
        )
    each, rope = getattr(config, "head_dim", None) or width // heads, getattr(config, "rope_parameters", None) or {}
    turned = int(each * (rope.get("partial_rotary_factor") or 1))
    if "rope_type" in rope and turned + turned % 2 > each:
        raise LabError(
            f"model.config has heads of {each} dimensions (hidden_size={width}, num_attention_heads={heads})",
            "RoPE turns pairs, so choose an even number",
        )


def _check_length(config: Any, recipe: Recipe) -> None:
    """Refuse a length that is not what the model makes of a sample: speeds and estimates would be
    wrong.
    """
    speech, patch = recipe.data.speech, getattr(config, "patch_size", None)
    if recipe.data.images is not None and isinstance(patch, int):
        needed = (config.image_size // patch) ** 2
        what = f"an image of {config.image_size} x {config.image_size} pixels is {needed} patches of {patch} x {patch}"
    elif speech is not None and hasattr(config, "conv_stride"):
        needed = frames(config, round(speech.seconds * speech.rate))
        what = f"{speech.seconds:g} seconds of {speech.rate} samples are {needed} frames of this model"
    else:
        return
    if needed != recipe.train.length:
        raise LabError(f"train.length={recipe.train.length}, and {what}", f"set train.length={needed}")


Samples = TypeVar("Samples", int, "Tensor")


def frames(config: Any, samples: Samples) -> Samples:
    """How many frames the convolutions of a speech model make of so many samples."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples


def check_positions(config: Any, tokens: int, remedy: str) -> None:
    """Refuse more tokens than a model has embeddings of positions; rotary ones have no end.

    Args:
        config: of the model.
        tokens: what it is to read.
        remedy: what to do, with {} for the number of positions that there are.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and tokens > limit and not getattr(config, "rope_parameters", None):
        raise LabError(
            f"a {config.model_type} model with {limit} positions cannot read {tokens} tokens", remedy.format(limit)
        )


@contextmanager
def memory(remedy: str) -> Iterator[None]:
    """While this is entered, a device whose memory is full is a LabError."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LabError(f"the device's memory is full: {first_line(error)}", remedy) from error


def load(folder: Path, config: Any = None, kind: Kind = "text") -> Any:
    """The trained model of a run folder, in evaluation mode, on the best device.

    Args:
        folder: a finished run.
        config: a changed configuration to load it with; by default its own.
        kind: what the caller takes it to have learned; "text" stands for a generated task, too.

    Raises:
        LabError: it is not as training saved it, cannot be loaded, or has learned something else.
    """
    import torch
    from safetensors import SafetensorError

    learned = load_recipe(folder / RECIPE).data.kind
    if _CLASSES[learned] != _CLASSES[kind]:
        raise LabError(
            f"{folder} was trained on {TRAINED_ON[learned]}, and this is for models that go on with a text",
            f"measure it with `softfocus evaluate {folder}`",
        )
    refuse_damage(folder)
    try:
        model = _auto(kind).from_pretrained(folder / MODEL, config=config or load_config(folder), use_safetensors=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise not_loaded(folder, error) from error
    return laser_ablation.apply(model).to("cuda" if torch.cuda.is_available() else "cpu").eval()


def not_loaded(folder: Path, error: Exception) -> LabError:
    """What to say of a run whose model a library cannot load."""
    what = f"the model in {folder / MODEL} cannot be loaded: {first_line(error).rstrip('.')}"
    return LabError(what, _retrain_remedy(folder))


def refuse_damage(folder: Path) -> None:
    """Refuse a model that is not as training saved it. Early runs have no token or checksums."""
    sealed = load_run(folder, complete=False).token or (folder / MODEL / MANIFEST).exists()
    if sealed and (folder / MODEL).is_dir() and (why := damage(folder / MODEL)) is not None:
        raise LabError(
            f"the model in {folder / MODEL} is damaged ({why})",
            f"put the file back as it was, or {_retrain_remedy(folder)}",
        )


def load_config(folder: Path) -> Any:
    """The configuration of a run's model, with its mechanism."""
    from transformers import AutoConfig

    architectures.register()
    if not (folder / MODEL / "config.json").is_file():
        raise LabError(f"the run {folder} has no model", _retrain_remedy(folder))
    try:
        config = AutoConfig.from_pretrained(folder / MODEL)
    except Exception as error:  # what is not an object of JSON gives errors of any kind
        refuse_damage(folder)
        raise not_loaded(folder, error) from error
    if softfocus.hf.layout_of(config) is None:
        raise LabError(
            f"{folder / MODEL / 'config.json'} has no entry 'softfocus', the mechanism", _retrain_remedy(folder)
        )
    return config


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a run.

    Raises:
        LabError: it cannot be loaded, or has ids that the model does not know.
    """
    found = tokenizer.load_saved(folder / MODEL, _retrain_remedy(folder))
    size, known = tokenizer.vocabulary(found), load_config(folder).vocab_size
    if size > known:
        raise LabError(
            f"the tokenizer in {folder / MODEL} has {size} ids, its model knows {known}: it is another one's",
            _retrain_remedy(folder),
        )
    return found


def quiet() -> None:
    """Keep Transformers' own progress bars and notices off the terminal: the lab says what matters
    in its own words.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def label(recipe: Recipe, config: Any) -> str:
    """What the model of a recipe runs, for people; without the recipe's own mechanism where the
    layout leaves no layer to it.
    """
    table = recipe.model
    return kinds_text(table.groups[:-1]) + table.ablation if _lays_out_all(table, config) else table.label


def _lays_out_all(table: ModelTable, config: Any) -> bool:
    return bool(table.layout) and REST not in table.layout and chooses_all(table.layout, config)


def _layout(recipe: Recipe, config: Any) -> Layout:
    table = recipe.model
    if not table.layout:
        return Layout.alike(table.groups[0][0])  # all attention is alike, numbered layers or not
    try:
        spec = table.spec
        if _lays_out_all(table, config):
            del spec[REST]
        layout = resolve(spec, config)
    except (TypeError, ValueError) as error:
        raise LabError(
            f"[model.layout] does not fit {table.architecture!r}: {first_line(error).removeprefix('layout: ')}",
            "correct it in the recipe or with --set, or choose another model.architecture",
        ) from error
    written = [value for key, value in ({REST: {}} | table.layout).items() if key in spec]
    if table.parameters and not any(map(_takes_parameters, written)):
        raise LabError(
            "model.parameters apply to no head: every group of heads in [model.layout] has its own",
            "write them in the group that is to learn them, or leave them out",
        )
    if recipe.train.power is not None and not any(
        group.mechanism.power and "power" not in group.learned for group in layout.groups()
    ):
        raise LabError(
            f"train.power applies to no head: [model.layout] leaves no layer to {table.mechanism!r}, and no group of "
            "heads re-weights with a power that is not learned",
            "leave train.power out, or correct the layout",
        )
    return layout


def _takes_parameters(value: Any) -> bool:
    """Whether some group of heads in a layout's value learns the model's own parameters."""
    if isinstance(value, list):
        return any(map(_takes_parameters, value))
    return isinstance(value, dict) and not {"mechanism", "parameters"} & value.keys()


def _use(model: Any, recipe: Recipe) -> Any:
    table = recipe.model
    layout = _layout(recipe, model.config)
    try:
        softfocus.hf.use(model, layout)
    except (TypeError, ValueError) as error:
        raise LabError(
            f"{table.label} does not fit {table.architecture!r}: {first_line(error)}",
            "choose another model.architecture, or correct model.mechanism, model.layout and model.parameters",
        ) from error
    if table.laser_ablation is not None:
        model.config.laser_ablation = table.laser_ablation.model_dump()
    return laser_ablation.apply(model)


def _retrain_remedy(folder: Path) -> str:
    return f"train it again with {to_train_again(folder)}"
