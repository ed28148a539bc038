"""What the tuner measures for the cells of the goals and what it chooses, and what each compiled
kernel takes of a device.

A line for each kind of call: milliseconds of each tile and the chosen one (which `softfocus bench`
then finds), registers of a thread and registers that it spills.
"""

import itertools
from typing import Any

import torch
from lines import arguments, writer

from softfocus import attention
from softfocus.backends.triton import tuning
from softfocus.backends.triton.call import Launcher

NAMES = ("lssar", "lssa", "laser", "softmax")
TOKENS, HEADS = 32768, 16
"""Those of `softfocus bench` on a GPU: the tuner tells calls apart by their sizes."""

times: dict[str, dict[str, float]] = {}
chosen: dict[str, str] = {}
kernels: dict[str, tuple[int, int]] = {}


def _watch() -> None:
    """From now on times, choices and kernels are noted."""
    measure, choose, launch = tuning._time, tuning.fastest, Launcher._launch
    noted: dict[str, float] = {}

    def _time(run: Any) -> float:
        tile = run.args[0]
        noted[str(tile)] = took = measure(run)
        return took

    def fastest(key: Any, *rest: Any) -> tuning.TileShape:
        noted.clear()
        tile = choose(key, *rest)
        times[key[0]], chosen[key[0]] = dict(noted), str(tile)
        return tile

    def _launch(self: Any, kernel: Any, variant: Any, *rest: Any, **options: Any) -> None:
        launch(self, kernel, variant, *rest, **options)
        if compiled := self._compiled.get((kernel, variant)):
            parts = variant if isinstance(variant, tuple) and not isinstance(variant, tuning.TileShape) else (variant,)
            named = [
                str(part) for part in parts if isinstance(part, tuning.TileShape | bool)
            ]  # not the layouts of gradients
            kernels[" ".join([kernel.__name__, *named])] = compiled.n_regs, compiled.n_spills

    tuning._time, tuning.fastest, Launcher._launch = _time, fastest, _launch  # type: ignore[method-assign]


def main() -> int:
    given = arguments(__doc__)
    write = writer(given.out)
    device, dtype = ("cpu", torch.float32) if given.dry_run else ("cuda", torch.bfloat16)
    tokens, heads = (16, 1) if given.dry_run else (TOKENS, HEADS)
    cells = itertools.product(("backward", "decode"), (4096, 16384), (64, 128), NAMES)
    wrong = 0
    _watch()
    for what, length, head_dim, name in [("backward", 16, 16, "lssar")] if given.dry_run else cells:
        for table in (times, chosen, kernels):
            table.clear()
        said = ""
        try:
            batch = 1 if what == "decode" else tokens // length
            leaves = [torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3)]
            if what == "decode":
                attention(leaves[0][:, :, -1:], *leaves[1:], mechanism=name, backend="triton")
            else:
                leaves = [x.requires_grad_() for x in leaves]
                out = attention(*leaves, is_causal=True, mechanism=name, backend="triton")
                torch.autograd.grad(out, leaves, torch.ones_like(out))
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            wrong += 1
        write(
            mechanism=name, what=what, length=length, head_dim=head_dim,
            milliseconds=times, chosen=chosen, registers_and_spills=kernels, said=said,
        )  # fmt: skip
    return wrong


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
