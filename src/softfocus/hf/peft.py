"""Adapters of PEFT on models with a mechanism: they remember what they were trained on, and hold
what the heads learned.

An adapter is a change to one model. On a base that runs another attention it is a change to a
different function, and nothing in PEFT would notice. So the adapter's config says what the base
ran, and another base is refused. A process that never imports softfocus is refused by PEFT itself:
the saved task type is one that it does not know, and quotes what to do. An adapter that was trained
on Transformers' own attention says nothing. On a mechanism it loads with a warning.

What the heads learn (``softfocus_head_scale``, ``softfocus_power``) is trained, saved and loaded
with the adapter, for methods that inject layers (LoRA and its kind; not prompt learning). A model
has one set of these values: adapters on the same model share it, the last one that is loaded sets
it, and it is trained while one of them is. They stay where an adapter is disabled or unloaded, so
that the model is not its base again; a warning says so. ``hotswap_adapter`` of PEFT does not know
them and checks no base.
"""

import json
import sys
from functools import wraps
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from softfocus.hf.config import NAME, hook, layouts
from softfocus.hf.files import write_whole
from softfocus.hf.learned import PREFIX
from softfocus.layout import Layout
from softfocus.warn import warn

# Of the config of an adapter that was loaded: what its base ran. NAME is what will be saved.
_TRAINED_ON = "softfocus_trained_on"
_TASK = "softfocus: import softfocus.hf before loading this adapter"
_FILE = "adapter_config.json"
_OLDEST = "0.18"
"""The first PEFT whose ``BaseTuner`` has ``unload``."""


def install() -> None:
    """Hook PEFT, once, where it is installed. One that is too old or broken must not keep those who
    do not use it from softfocus.
    """
    if find_spec("peft") is None:
        return
    try:
        if Version(version("peft")) < Version(_OLDEST):
            raise ImportError(f"PEFT {version('peft')} is installed")
        from peft import PeftConfig, get_peft_model_state_dict
        from peft.tuners.adaption_prompt import AdaptionPromptModel
        from peft.tuners.tuners_utils import BaseTuner
    except ImportError as error:
        warn(
            f"softfocus.hf: adapters are not checked, and do not hold what the heads learn: {error}; update PEFT to "
            f"{_OLDEST} or later, or uninstall it",
            UserWarning,
        )
        return

    if hasattr(BaseTuner.inject_adapter, "_softfocus"):
        return
    from_peft_type = PeftConfig.from_peft_type.__func__

    @hook(BaseTuner, "inject_adapter")
    def inject(original: Any, self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        adapter = self.peft_config[adapter_name]
        runs = _runs(model)
        _refuse_another(adapter_name, getattr(adapter, _TRAINED_ON, None), runs)
        original(self, model, adapter_name, *args, **kwargs)
        if runs:
            setattr(adapter, NAME, runs)
            _let_learn(model, any(not one.inference_mode for one in self.peft_config.values()))

    @hook(AdaptionPromptModel, "add_adapter")
    def add_prompt(original: Any, self: Any, adapter_name: str, config: Any) -> None:
        if runs := _runs(self.model):
            raise ValueError(
                f"adapter {adapter_name!r}: an adaption prompt adds softmax attention of its own to a model that runs "
                f"{_text(runs)}, and softfocus cannot check it; take LoRA, or a model without a mechanism"
            )
        original(self, adapter_name, config)

    @hook(PeftConfig, "save_pretrained")
    def save(original: Any, self: Any, save_directory: str, **kwargs: Any) -> None:
        original(self, save_directory, **kwargs)
        if runs := getattr(self, NAME, None):
            path = Path(save_directory) / _FILE
            saved = json.loads(path.read_text(encoding="utf-8"))
            saved |= {NAME: {"base": runs, "task_type": saved["task_type"]}, "task_type": _TASK}
            write_whole(path, json.dumps(saved, indent=2, sort_keys=True))

    hook(BaseTuner, "disable_adapter_layers")(_warn_of_what_stays)
    hook(BaseTuner, "unload")(_warn_of_what_stays)
    hook(PreTrainedModel, "disable_adapters")(_warn_of_what_stays)

    @wraps(from_peft_type)
    def load(cls: Any, **kwargs: Any) -> Any:
        entry = kwargs.pop(NAME, None)
        config = from_peft_type(cls, **(kwargs | {"task_type": entry["task_type"]} if entry else kwargs))
        base = entry["base"] if entry else {}
        setattr(config, NAME, base)
        setattr(config, _TRAINED_ON, base)
        return config

    @wraps(get_peft_model_state_dict)
    def adapter_state_dict(
        model: nn.Module, state_dict: dict[str, Tensor] | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict, *args, **kwargs)
        everything = model.state_dict() if state_dict is None else state_dict
        return found | {name: value for name, value in everything.items() if PREFIX in name}

    PeftConfig.from_peft_type = classmethod(load)
    for name, module in list(sys.modules.items()):
        if (
            name.partition(".")[0] == "peft"
            and vars(module).get("get_peft_model_state_dict") is get_peft_model_state_dict
        ):
            module.get_peft_model_state_dict = adapter_state_dict  # type: ignore[attr-defined]


def renew(model: PreTrainedModel) -> None:
    """Let the adapters of a model and of those in it, if they are trained, be those of what it runs
    now: for a mechanism that is put in after them.
    """
    for part in model.modules():
        adapters = vars(part).get("peft_config")  # PEFT and Transformers leave it on the model
        if not isinstance(adapters, dict):
            continue
        trained = [adapter for adapter in adapters.values() if not adapter.inference_mode]
        for adapter in trained:
            setattr(adapter, NAME, _runs(part))
        _let_learn(part, bool(trained))


def _let_learn(model: nn.Module, trained: bool) -> None:
    for name, parameter in model.named_parameters():
        if PREFIX in name:
            parameter.requires_grad = trained


def _warn_of_what_stays(original: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Take adapters off a model, with a word about what they leave behind."""
    if any(PREFIX in name for name, _ in model.named_parameters()):
        warn(
            f"softfocus.hf: {original.__name__}() takes the adapter off, but {PREFIX}* keep what was "
            "learned with it, so this is not the base model; load the base model anew to compare with it",
            UserWarning,
        )
    return original(model, *args, **kwargs)


def _runs(model: nn.Module) -> dict[str, Any]:
    """What a base model runs, JSON types by the place of the config; empty for Transformers' own
    attention.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return {}
    return {path: layout.to_dict() for path, layout in layouts(config).items()}


def _refuse_another(name: str, trained_on: dict[str, Any] | None, runs: dict[str, Any]) -> None:
    if trained_on is None or trained_on == runs:
        return
    if not trained_on:
        warn(
            f"softfocus.hf: adapter {name!r} does not say what its base model ran, and this one runs {_text(runs)}; on "
            "another attention than it was trained on it gives wrong answers",
            UserWarning,
        )
        return
    raise ValueError(
        f"adapter {name!r} was trained on a model that runs {_text(trained_on)}; this one runs {_text(runs)}. "
        "Load the model that it was trained on, or put the same mechanism in with softfocus.hf.use() before the "
        "adapter is loaded."
    )


def _text(runs: dict[str, Any]) -> str:
    texts = {path: str(Layout.from_dict(layout)) for path, layout in runs.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return (
        ", ".join(f"{text} in {path or 'the model'}" for path, text in texts.items()) or "Transformers' own attention"
    )
