"""One call of each skeleton of the kernels, forward and backward, in each dtype, against the
float64 reference.

A line each: whether it holds, the first call's seconds (which compiles), and what was wrong.
"""

import itertools
import os
import time
from functools import partial
from typing import Any

import torch
from lines import arguments, each_alone, writer

from softfocus import attention
from softfocus.testing import Case, check

NAMES = ("lssar", "softmax", "lssa", "laser", "laser(lssar)", "cosine_log_n", "sharpened(softmax, 3)", "sigmoid_log_n")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
CASES = (
    Case("causal", batch=1, query_length=200, key_length=200, head_dim=64, value_dim=64),
    Case("decode", batch=1, query_length=1, key_length=1030, heads=8, head_dim=64, value_dim=64),
    Case("wide", batch=1, query_length=150, key_length=150, head_dim=128, value_dim=128),
)
TINY = (Case("causal", batch=1, query_length=20, key_length=20),)


def held(case: Case, dtype: torch.dtype, name: str, device: str) -> dict[str, Any]:
    """Check a call."""
    os.environ["SOFTFOCUS_TUNE"] = "off"
    began, said = time.perf_counter(), ""
    try:
        check(partial(attention, backend="triton"), case, name, dtype, device=device)
    except Exception as error:  # of whatever kind: it is what is looked for
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    seconds = round(time.perf_counter() - began, 2)
    kind = {"case": case.name, "dtype": str(dtype).removeprefix("torch."), "mechanism": name}
    return {**kind, "holds": not said, "seconds": seconds, "said": said}


def main() -> int:
    given = arguments(__doc__)
    write = writer(given.out)
    device = "cpu" if given.dry_run else "cuda"
    names, dtypes, cases = (NAMES[:2], DTYPES[1:2], TINY) if given.dry_run else (NAMES, DTYPES, CASES)
    wrong = 0
    for line in each_alone(held, [(*kind, device) for kind in itertools.product(cases, dtypes, names)]):
        wrong += bool(line["said"])
        write(**line)
    return wrong


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
