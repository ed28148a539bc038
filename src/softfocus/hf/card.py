"""The model card (README.md) that is saved beside a model: what its attention runs, how to load it,
what cannot serve it.
"""

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig

from softfocus.hf import t6
from softfocus.hf.config import hook, layouts
from softfocus.hf.files import write_whole

_SEAL = re.compile(r"<!-- Written by softfocus, which replaces this card while it is unchanged: ([0-9a-f]{64}) -->\n\Z")


def install() -> None:
    """Hook :meth:`PreTrainedConfig.save_pretrained`, once. ``save_pretrained`` of a model calls it,
    before any upload.
    """

    @hook(PreTrainedConfig, "save_pretrained")
    def save_pretrained(
        original: Any, self: PreTrainedConfig, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        result = original(self, save_directory, *args, **kwargs)
        if getattr(self, "architectures", None) and layouts(self):  # a config that was saved with a model
            _write(Path(save_directory) / "README.md", card(self))
        return result


def card(config: PreTrainedConfig) -> str:
    """The text of the card of a config's model, Markdown."""
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

model = {kind}.from_pretrained("path/to/this/folder")
```

{_programs(kind)}

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


def _programs(kind: str) -> str:
    """How programs load a model that name no class of models."""
    if hasattr(transformers, kind) or hasattr(t6, kind):
        return (
            "Programs that load models through Transformers can be run with that import:\n"
            "`python -m softfocus.hf lm_eval --model hf --model_args pretrained=path/to/this/folder --tasks ...`."
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
    seal = _SEAL.search(there)
    if there and (seal is None or _digest(there[: seal.start()]) != seal[1]):
        return
    sealed = f"{text}<!-- Written by softfocus, which replaces this card while it is unchanged: {_digest(text)} -->\n"
    write_whole(path, sealed)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
