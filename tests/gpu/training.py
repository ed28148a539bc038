"""Training tokens per second of GPT-2 (124 M parameters, 1,024 tokens) with each mechanism, in
turn.

A line for each round and a last one with medians: ratios are to torch's own softmax in the same
round. Optimiser: fused AdamW in float32, the model under bfloat16 autocast. --compile: the model is
compiled.
"""

import statistics
import time
from typing import Any

import torch
from lines import arguments, writer
from transformers import GPT2Config, GPT2LMHeadModel

import softfocus.hf

MODELS = {
    "sdpa": None,
    "softmax": "softmax",
    "softmax, every other layer local": {"0::2": {"mechanism": "softmax", "window": 64}, "*": "softmax"},
    "lssar": "lssar",
    "lssa": "lssa",
    "laser": "laser",
    "laser(lssa), every other layer local": {"0::2": {"mechanism": "laser(lssa)", "window": 64}, "*": "laser(lssa)"},
}
ROUNDS, STEPS = 5, 4


class Trainee:
    """A model and what it takes to train it."""

    def __init__(self, mechanism: Any, dry: bool, compiled: bool) -> None:
        self.device = "cpu" if dry else "cuda"
        sizes = {"n_layer": 1, "n_head": 1, "n_embd": 16, "vocab_size": 64, "n_positions": 32} if dry else {}
        settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(attn_implementation="sdpa", **settings, **sizes)
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).to(self.device)
        if mechanism is not None:
            softfocus.hf.use(model, mechanism)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=not dry)
        self.model = torch.compile(model) if compiled else model
        shape = (1, 32) if dry else (16, 1024)
        self.tokens = torch.randint(config.vocab_size, shape, device=self.device)

    def step(self) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            loss: torch.Tensor = self.model(self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def seconds(self, steps: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> int:
    given = arguments(__doc__, "--compile")
    write = writer(given.out)
    trainees: dict[str, Trainee] = {}
    for name, mechanism in list(MODELS.items())[: 2 if given.dry_run else None]:
        began, said = time.perf_counter(), ""
        try:
            trainee = Trainee(mechanism, given.dry_run, given.compile)
            losses = [float(trainee.step()) for _ in range(2 if given.dry_run else 5)]
            trainees[name] = trainee
        except Exception as error:
            said, losses = f"{type(error).__name__}: {str(error)[:400]}", []
        write(model=name, first_steps=round(time.perf_counter() - began, 1), losses=losses, said=said)
    rates: dict[str, list[float]] = {name: [] for name in trainees}
    for number in range(1 if given.dry_run else ROUNDS):
        for name, trainee in trainees.items():
            rates[name].append(STEPS * trainee.tokens.numel() / trainee.seconds(STEPS))
        write(round=number, tokens_per_second={name: round(rate[-1]) for name, rate in rates.items()})
    of_sdpa = {
        name: round(statistics.median(mine / its for mine, its in zip(rate, rates["sdpa"], strict=True)), 3)
        for name, rate in rates.items()
        if "sdpa" in rates
    }
    memory = 0 if given.dry_run else torch.cuda.max_memory_allocated()
    write(speed_as_share_of_sdpa=of_sdpa, peak_memory=memory)
    return len(MODELS) - len(trainees) if not given.dry_run else 0


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
