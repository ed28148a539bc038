"""Text from a run, with a KV cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TextStreamer, set_seed

from softfocus.lab import model as models
from softfocus.lab.errors import LabError
from softfocus.lab.results import MODEL, load_run


class _Stream(TextStreamer):
    """Hands over text as it becomes certain: bytes that are half a character wait for the rest."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def generate(
    folder: Path,
    prompt: str,
    *,
    tokens: int = 256,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    write: Callable[[str], None] | None = None,
) -> str:
    """Continue a prompt.

    Args:
        folder: a finished run.
        prompt: at least one token.
        tokens: at most so many new ones.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_p: sample from the fewest tokens whose probabilities reach this.
        seed: the same seed gives the same text on the same machine.
        write: called with pieces of text as they come.

    Returns:
        The new text, without the prompt.

    Raises:
        LabError: a run without a finished model, an empty prompt, or more tokens than the model has positions or the device
            has memory.
    """
    models.quiet()
    load_run(folder)
    model = models.load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / MODEL)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    if not length:
        raise LabError("the prompt is empty", "give at least one character with --prompt")
    models.check_positions(model.config, length + tokens - 1, "keep prompt and --tokens together within {}")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    set_seed(seed)
    with models.memory("ask for fewer --tokens"), torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=tokens,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            streamer=_Stream(tokenizer, write) if write else None,
            **sampling,
        )
    return str(tokenizer.decode(output[0, length:], skip_special_tokens=True))
