"""Lengths as people write them: "1k,2k,16k", or "1x,2x,16x" of the training length."""

import re

from softfocus.lab.errors import UsageError


def parse(text: str, train_length: int, option: str = "--lengths") -> list[int]:
    """The lengths in ascending order, each once. k is 1024.

    Args:
        text: what was written.
        train_length: what "x" stands for.
        option: where it was written, for the error.

    Raises:
        UsageError: something that is not a length, or less than 2 tokens.
    """
    found = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKx]?)\s*", part)
        if not match:
            raise UsageError(f"{part.strip()!r} is not a length", f"write {option} like 1k,2k,16k or 1x,2x,16x")
        length = float(match[1]) * {"": 1, "k": 1024, "K": 1024, "x": train_length}[match[2]]
        if length != int(length) or length < 2:
            raise UsageError(
                f"{option}: {part.strip()!r} is {length:g} tokens", "give a whole number of tokens, at least 2"
            )
        found.add(int(length))
    return sorted(found)
