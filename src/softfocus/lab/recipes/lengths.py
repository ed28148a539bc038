"""Lengths and settings as people write them: "1k,2k,16k", or "1x,2x,16x" of the training length."""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import cast, get_args

from softfocus.catalog import named
from softfocus.lab.errors import UsageError, did_you_mean
from softfocus.lab.run_folder.results import Rope, Setting

LONGEST = 2**24
"""Of all lengths, in tokens: 16 times the longest training length that a recipe may have. A longer
one is most often a slip, and would fill the memory before it fails.
"""


def parse(text: str, train_length: int, option: str = "--lengths") -> list[int]:
    """The lengths in ascending order, each once. k is 1024.

    Args:
        text: what was written.
        train_length: what "x" stands for.
        option: where it was written, for the error.

    Raises:
        UsageError: something that is not a length, less than 2 tokens, or more than
            :data:`LONGEST`.
    """
    found = set()
    for part in text.split(","):
        # Decimal rounds to 28 digits, and overflows with a million of them
        match = re.fullmatch(r"\s*(\d+(?:\.\d{1,12})?)\s*([kKx]?)\s*", part)
        if not match:
            raise UsageError(f"{part.strip()[:30]!r} is not a length", f"write {option} like 1k,2k,16k or 1x,2x,16x")
        # Decimal: as floats 1.1 times 10 is no whole number
        length = Decimal(match[1].lstrip("0")[:30] or "0") * {"": 1, "k": 1024, "K": 1024, "x": train_length}[match[2]]
        if length > LONGEST:
            raise UsageError(f"{part.strip()[:20]!r} is too long", f"let {option} be at most {LONGEST:,} tokens")
        if length != int(length) or length < 2:
            raise UsageError(
                f"{part.strip()!r} is {length:g} tokens", f"give a whole number of tokens, at least 2, for {option}"
            )
        found.add(int(length))
    return sorted(found)


def settings_of(
    rope: str, windows: Sequence[str], sinks: int, train_length: int, mechanisms: Sequence[str] = ()
) -> list[Setting]:
    """The settings of an evaluation: each scaling of RoPE without a window, each window with RoPE
    as trained.

    Args:
        rope: scalings, with commas between them, or "none".
        windows: lists of lengths, or "none".
        sinks: keys of each window that are the first of the text.
        train_length: what "x" stands for.
        mechanisms: to be run in place of the trained one, under each scaling.

    Raises:
        UsageError: an unknown scaling or mechanism, something that is not a length, sinks without a
            window, a mechanism without a scaling, or nothing at all.
    """
    scalings = [] if rope.strip() == "none" else [part.strip() for part in rope.split(",")]
    for name in scalings:
        if name not in get_args(Rope):
            known = f"they are {', '.join(get_args(Rope))}, or none"
            raise UsageError(f"--rope: {name!r} is not a scaling of RoPE", did_you_mean(name, get_args(Rope), known))
    keys = [size for text in windows if text.strip() != "none" for size in parse(text, train_length, "--window")]
    if sinks >= min(keys, default=1) and sinks:
        raise UsageError(
            f"--sinks {sinks} does not fit into --window {min(keys) if keys else 'none'}",
            f"name a longer window, such as --window {max(train_length, 2 * sinks)}, or fewer sinks",
        )
    found = [Setting(rope=cast(Rope, name)) for name in scalings] + [Setting(window=size, sinks=sinks) for size in keys]
    if not found:
        raise UsageError("--rope none and --window none leave nothing to evaluate", "name a scaling or a window")
    if mechanisms and not scalings:
        raise UsageError(
            f"--mechanism {mechanisms[0]} runs under each scaling of --rope, and --rope none leaves none",
            "name a scaling, such as --rope trained",
        )
    for name in mechanisms:
        try:
            named(name)
        except ValueError as error:
            raise UsageError(
                f"--mechanism: {str(error).rstrip('.')}", "`softfocus mechanisms` lists them all"
            ) from None
        found += [Setting(rope=cast(Rope, scaling), mechanism=name) for scaling in scalings]
    return list(dict.fromkeys(found))
