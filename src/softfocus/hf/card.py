"""The model card (README.md) that is saved beside a model, and pushed with it: what its attention
runs, how to load it, what cannot serve it.
"""

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel

from softfocus.hf import t6
from softfocus.hf.config import hook, layouts
from softfocus.hf.files import write_whole

_SEAL = re.compile(r"<!-- Written by softfocus, which replaces this card while it is unchanged: ([0-9a-f]{64}) -->\n\Z")
_FOLDER = "path/to/this/folder"
_BLANK = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
    "automatically generated."
)
"""What Transformers writes into a card where the hub has none."""


def install() -> None:
    """Hook :meth:`PreTrainedConfig.save_pretrained`, once, which ``save_pretrained`` of a model
    calls; and a model's upload, before which Transformers puts the hub's card or a blank one in
    place of ours.
    """

    @hook(PreTrainedConfig, "save_pretrained")
    def save_pretrained(
        original: Any, self: PreTrainedConfig, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        result = original(self, save_directory, *args, **kwargs)
        if getattr(self, "architectures", None) and layouts(self):  # a config that was saved with a model
            _write(Path(save_directory) / "README.md", card(self))
        return result

    @hook(PreTrainedModel, "_upload_modified_files")
    def upload(original: Any, self: PreTrainedModel, working_dir: str, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        if layouts(self.config) and (Path(working_dir) / "config.json").exists():  # an adapter alone comes without
            _write(Path(working_dir) / "README.md", card(self.config, repo_id))
        return original(self, working_dir, repo_id, *args, **kwargs)


def card(config: PreTrainedConfig, place: str = _FOLDER) -> str:
    """The text of the card of a config's model, Markdown. ``place`` is where it is loaded from."""
    found = layouts(config)
    parts = {name or "model": layout.table() for name, layout in found.items()}
    if len(set(parts.values())) == 1 and "" in found:
        runs = parts["model"]
    else:
        runs = "\n".join(f"{name}:\n{table}" for name, table in parts.items())
    kind = config.architectures[0]
    imported = _import_of(kind, config)
    return f"""---
library_name: transformers
tags:
- softfocus
---

# {kind} with softfocus

What its attention runs:

```
{runs}
```

## Load

softfocus has to be imported before the model is loaded. Without it Transformers refuses to load the model.

```python
import softfocus.hf
{imported}

model = {kind}.from_pretrained("{place}")
```

{_programs(kind, place)}

## What cannot serve it

vLLM, TGI, llama.cpp and exports to ONNX or GGUF compute softmax attention of their own, whatever config.json says.
There the model gives wrong answers without an error. Do not serve it there.
"""


def _import_of(kind: str, config: PreTrainedConfig) -> str:
    """The line that imports a class of models."""
    if hasattr(transformers, kind):
        return f"from transformers import {kind}"
    if hasattr(t6, kind):
        return f"from softfocus.hf.t6 import {kind}"
    home = type(config).__module__
    if home != "__main__" and hasattr(sys.modules[home], kind):
        return f"from {home} import {kind}"
    return f"from your_code import {kind}  # not a class of Transformers"


def _programs(kind: str, place: str) -> str:
    """How programs load a model that name no class of models."""
    if hasattr(transformers, kind) or hasattr(t6, kind):
        return (
            "Programs that load models through Transformers can be run with that import:\n"
            f"`python -m softfocus.hf lm_eval --model hf --model_args pretrained={place} --tasks ...`."
        )
    return "Programs that load models through Transformers do not know this class. Register it with the Auto classes."


def _write(path: Path, text: str) -> None:
    """Never in place of a card that somebody else wrote or changed."""
    try:
        there = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        there = ""
    except UnicodeDecodeError:
        return
    if there and not _is_unchanged(there) and not _is_blank(there):
        return
    if there:
        text = _with_tags_of(there, text)
    sealed = f"{text}<!-- Written by softfocus, which replaces this card while it is unchanged: {_digest(text)} -->\n"
    write_whole(path, sealed)


def _is_unchanged(there: str) -> bool:
    seal = _SEAL.search(there)
    return seal is not None and _digest(there[: seal.start()]) == seal[1]


def _is_blank(there: str) -> bool:
    """Transformers' card, in which nobody wrote anything."""
    if _BLANK not in there:
        return False
    blank = ModelCard.from_template(ModelCardData(), model_description=_BLANK)
    return bool(ModelCard(there).text.strip() == blank.text.strip())


def _with_tags_of(there: str, text: str) -> str:
    """A card with the tags that ``push_to_hub`` was given for the one that it replaces."""
    ours = ModelCard(text)
    tags = ours.data["tags"]
    tags += [tag for tag in ModelCard(there).data.get("tags") or () if tag not in tags]
    return str(ours)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
