"""Text from a run, with a KV cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from transformers import TextStreamer, set_seed

from softfocus.lab import model as models
from softfocus.lab.data import of_recipe as data
from softfocus.lab.data.tokenizer import Encoder
from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import RECIPE, load_run

_COLDEST = 1e-6  # colder, logits divided by it may not fit float32; by then the likeliest token is as good as certain


class Generation(BaseModel):
    """A text, and what its cache took at the end."""

    run: str
    mechanism: str
    text: str
    tokens: int
    """In the sequence whose keys and values the cache holds: the prompt and all new tokens but the
    last.
    """
    cache_bytes: int
    """Of the keys and values of all layers."""

    @property
    def note(self) -> str:
        """In one line."""
        a_token = self.cache_bytes / self.tokens
        return f"{self.tokens:,} tokens, {self.cache_bytes:,} bytes of keys and values: {a_token:,.0f} a token"


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
) -> Generation:
    """Continue a prompt.

    Args:
        folder: a finished run.
        prompt: at least one token.
        tokens: at most so many new ones.
        temperature: divides the logits; 0, or less than a millionth, takes the likeliest token each
            time.
        top_p: sample from the fewest tokens whose probabilities reach this.
        seed: below 2^32; the same seed gives the same text on the same machine.
        write: called with the prompt, and then with pieces of text as they come.

    Returns:
        The new text, without the prompt, and the size of the cache.

    Raises:
        UsageError: a temperature that is negative or no number.
        LabError: a run without a finished model, or of a model that does not go on with a text, a
            prompt that is empty or that the tokenizer has no tokens for, or more tokens than the
            model has positions or the device has memory.
    """
    if not temperature >= 0:
        raise UsageError(f"--temperature {temperature} is not a temperature", "give 0 or more")
    models.quiet()
    info = load_run(folder)
    data.refuse_without_text(load(folder / RECIPE))
    model = models.load(folder)
    tokenizer = models.load_tokenizer(folder)
    _check_prompt(tokenizer, prompt)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    if not length:
        raise LabError("the prompt is empty", "give at least one character with --prompt")
    models.check_positions(model.config, length + tokens - 1, "keep prompt and --tokens together within {}")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature >= _COLDEST:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    set_seed(seed)
    if write:
        write(prompt)
    with models.memory("ask for fewer --tokens"), torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=tokens,
            use_cache=True,
            return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            streamer=_Stream(tokenizer, write) if write else None,
            **sampling,
        )
    kept = [x for layer in output.cache.layers for x in (layer.keys, layer.values)]
    return Generation(
        run=info.name,
        mechanism=info.mechanism,
        text=str(tokenizer.decode(output.sequences[0, length:], skip_special_tokens=True)),
        tokens=output.sequences.shape[1] - 1,
        # What lies behind a window's keys belongs to a tensor that is freed with the next step
        cache_bytes=sum(x.numel() * x.element_size() for x in kept),
    )


def _check_prompt(tokenizer: Any, prompt: str) -> None:
    for special in tokenizer.all_special_tokens:  # an Encoder spells them out
        prompt = prompt.replace(special, " ")
    encode = Encoder(tokenizer)
    try:
        ((_, lost),) = encode([prompt])
    except LabError as error:
        raise LabError(f"of the prompt, {error.what}", "write what the model was trained on") from error
    if lost:
        raise LabError(f"the prompt has {encode.lost}: {lost}", "leave them out")
