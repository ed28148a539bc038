"""Shards of tokens, as FineWeb comes for GPT-2 (`kjj0/fineweb10B-gpt2`): a header of 256 int32,
then uint16.

The header holds 20240520, the version 1, and how many tokens follow; the other 253 numbers are
zeros.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softfocus.lab.errors import LabError

SUFFIX = ".bin"
MAGIC = 20240520
VERSION = 1
VALIDATION_TOKENS = 10_485_760
"""How much of a shard validates, in the runs that others published."""

_HEADER = 256 * 4  # bytes


def read_shard(path: Path) -> NDArray[np.uint16]:
    """The tokens of a shard, memory-mapped: [tokens].

    Raises:
        LabError: the file is no such shard, or holds fewer or more tokens than its header says.
    """
    remedy = "download the shard anew, or leave it out"
    try:
        header = np.fromfile(path, "<i4", 256)
        size = path.stat().st_size
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}", remedy) from error
    if len(header) < 256 or header[0] != MAGIC:
        found = f"it has {size} bytes, fewer than a header's {_HEADER}"
        if len(header) == 256:
            found = f"it starts with {header[0]}, not {MAGIC}"
        raise LabError(f"{path} is not a shard of tokens: {found}", "leave it out, or name the other files with a glob")
    if header[1] != VERSION:
        raise LabError(f"{path} is a shard of version {header[1]}, not {VERSION}", "get shards of version 1")
    count = int(header[2])
    if count < 1 or size != _HEADER + 2 * count:
        held = f"{(size - _HEADER) / 2:.1f}".removesuffix(".0")
        raise LabError(f"{path} holds {held} tokens, its header says {count}", remedy)
    return np.memmap(path, "<u2", "r", offset=_HEADER, shape=(count,))


def split_shards(shards: list[Path]) -> tuple[list[Path], list[Path]]:
    """(training, validation): what has "val" in its name validates, or else the first shard. One
    shard alone trains.
    """
    if len(shards) < 2:
        return shards, []
    named = [shard for shard in shards if "val" in shard.stem]
    validation = named if 0 < len(named) < len(shards) else shards[:1]
    return [shard for shard in shards if shard not in validation], validation
