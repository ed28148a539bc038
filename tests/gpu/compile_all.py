"""Compile every tile of the kernels that the other items run, many at a time: the compilers' time
is the device's otherwise.

A line for each kind of call. Nothing is timed. What is compiled lies in Triton's cache.
"""

import contextlib
import itertools
import os
import time
import traceback
from typing import Any

import torch
from lines import arguments, each_alone, writer

NAMES = ("lssar", "lssa", "laser", "softmax")
SIZES = {"causal": (2, 1024, 16), "decode": (1, 16384, 16), "training": (2, 1024, 12)}
"""Batch, length and heads. Triton compiles anew for an integer of 1 or a multiple of 16: these
agree with the cells that are measured, and with GPT-2.
"""
KINDS = [
    *itertools.product((*NAMES, "laser(lssa)"), (64,), ("training",)),
    *((name, head_dim, what) for what, head_dim, name in itertools.product(("causal", "decode"), (64, 128), NAMES)),
]


def compiled(name: str, head_dim: int, what: str, dry: bool) -> dict[str, Any]:
    """Run a kind of call once in each tile."""
    from triton.runtime.errors import OutOfResources, PTXASError

    from softfocus import attention
    from softfocus.backends.triton import tuning

    def every(key: Any, device: Any, tiles: Any, run: Any) -> Any:
        ran = []
        for tile in tiles:
            with contextlib.suppress(OutOfResources, PTXASError):  # as where tiles are measured
                run(tile)
                ran.append(tile)
        return ran[0]

    if what == "training":
        os.environ["SOFTFOCUS_TUNE"] = "off"
    elif not dry:
        tuning.fastest = every
    began, said = time.perf_counter(), ""
    try:
        device, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
        batch, length, heads = (1, 16, 1) if dry else SIZES[what]
        shape = (batch, length, heads, head_dim) if what == "training" else (batch, heads, length, head_dim)
        leaves = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
        if what == "training":
            leaves = [x.transpose(1, 2) for x in leaves]
        if what == "decode":
            attention(leaves[0][:, :, -1:], *leaves[1:], mechanism=name, backend="triton")
        else:
            leaves = [x.requires_grad_() for x in leaves]
            for window in (None, (63, 0)) if what == "training" else (None,):
                out = attention(*leaves, is_causal=True, window_size=window, mechanism=name, backend="triton")
                torch.autograd.grad(out, leaves, torch.ones_like(out))
        if not dry:
            torch.cuda.synchronize()
    except Exception:
        said = traceback.format_exc()[-600:]
    seconds = round(time.perf_counter() - began, 1)
    return {"mechanism": name, "head_dim": head_dim, "what": what, "seconds": seconds, "said": said}


def main() -> int:
    given = arguments(__doc__)
    write = writer(given.out)
    kinds = [("lssar", 16, "causal")] if given.dry_run else KINDS
    wrong = 0
    for line in each_alone(compiled, [(*kind, given.dry_run) for kind in kinds]):
        wrong += bool(line["said"])
        write(**line)
    return wrong


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
