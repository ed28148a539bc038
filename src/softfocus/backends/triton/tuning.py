"""The choice of the kernels' tile shapes: the fastest of a few, measured once per device for calls
that share a ``measurement_key``, and stored on disk.
"""

import hashlib
import json
from collections.abc import Callable, Hashable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import CacheManager, get_cache_manager
from triton.runtime.errors import OutOfResources, PTXASError

from softfocus.backends.triton.variants import compiled_as
from softfocus.contract import Call, optional_arguments, pack
from softfocus.switches import switched_on
from softfocus.visibility import UNLIMITED


class TileShape(NamedTuple):
    """Rows and keys of a tile, and Triton's options: warps of a program, stages of the pipeline,
    and the most registers of a thread, where 0 leaves the number to the compiler.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Triton's options, by its names."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers and not torch.version.hip:  # AMD's compiler has no such option
            options["maxnreg"] = self.registers
        return options


def _shapes(*shapes: tuple[int, ...], stages: int = 3) -> tuple[TileShape, ...]:
    """Tile shapes from (rows, keys, warps) or (rows, keys, warps, registers).

    With two stages the load of a tile starts at the end of the tile before it, and the program
    waits for it at once. With three stages the load overlaps the work on the tile before it.
    """
    return tuple(TileShape(rows, keys, warps, stages, *registers) for rows, keys, warps, *registers in shapes)


TILES = {
    ("forward", "hdim64"): _shapes((128, 64, 8, 128), (128, 64, 4), (64, 128, 4)),
    ("forward", "hdim128"): _shapes((128, 64, 8), (128, 32, 8, 128), (64, 64, 4)),
    ("query_gradients", "hdim64"): _shapes((128, 64, 4), (128, 64, 8, 128), (64, 64, 4)),
    ("query_gradients", "hdim64, softplus"): _shapes((128, 64, 8, 128), (128, 32, 4), (128, 64, 4)),
    ("query_gradients", "hdim64, compute-intensive"): _shapes((64, 32, 4), (64, 64, 4), (128, 64, 8)),
    ("query_gradients", "hdim128"): _shapes((128, 64, 8), (64, 32, 4), (128, 32, 8, 128)),
    ("query_gradients", "hdim128, compute-intensive"): _shapes((128, 32, 8), (128, 64, 8)),
    ("key_gradients", "hdim64"): _shapes((32, 64, 4, 168), (32, 64, 4), (64, 64, 4), (64, 128, 8)),
    ("key_gradients", "hdim128"): _shapes((32, 128, 8), (16, 128, 8), (64, 128, 8)),
    ("bias_gradients", "hdim64"): _shapes((64, 32, 8)),
    ("decode", "hdim64"): _shapes((16, 128, 4)),
    ("decode", "hdim128"): _shapes((16, 64, 4)),
}
"""The tile shapes to choose from, by kernel and name. A name gives the width, and may add a phi or
"compute-intensive"; "LASER" (in TILES_BEFORE_HOPPER) is for LASER without re-weighting, in 16-bit
dtypes and of at most 128 dimensions. ``candidates`` takes the most specific one.
"hdim64" is for heads of at most 64 dimensions, and for all heads where a kernel has no "hdim128".
"compute-intensive" kernels compute more per score (``candidates``).

The first shape is taken where nothing is measured. This table is for Hopper. Wherever its first
shapes were measured, all in bfloat16, they take at most 1.1 times the time of the fastest
(docs/results/gpu-h100, gpu-h200). Some spill registers. The two shapes (32, 64, 4) of
key_gradients, with and without a limit of registers, were compared on the H200 only. bias_gradients
was not measured. In this table a warp has at least 16 rows in the forward and in query_gradients,
and 16 keys in key_gradients: with fewer, several warps would do the same work. Decoding ignores the
rows of its shape: only LASER's exact_forward, which runs after it, has them.

With at most 128 registers per thread, two programs of eight warps fit on a multiprocessor, so that
one computes while the other waits, and with at most 168 three programs of four warps.
"""
TILES_HDIM256 = {
    "forward": _shapes((64, 32, 8), (128, 32, 8)),
    "query_gradients": _shapes((64, 16, 8), (64, 32, 8)),
    "key_gradients": _shapes((16, 64, 8), (32, 64, 8)),
}
"""For heads of more than 128 dimensions."""
TILES_BEFORE_HOPPER = {
    ("forward", "hdim64"): _shapes((64, 32, 4), (128, 64, 8), (64, 64, 4)),
    ("forward", "hdim128"): _shapes((128, 32, 8), (128, 64, 8), (64, 64, 4)),
    ("forward", "hdim128, softplus"): _shapes((128, 16, 8), (128, 32, 8), (128, 64, 8)),
    ("forward", "hdim128, compute-intensive"): _shapes((128, 16, 8), (128, 32, 8), (64, 32, 8)),
    ("query_gradients", "hdim64"): _shapes((64, 32, 4), (128, 64, 8), (64, 64, 4)),
    ("query_gradients", "hdim64, softplus"): _shapes((128, 16, 8), (64, 32, 4), (128, 64, 8)),
    ("query_gradients", "hdim64, compute-intensive"): _shapes((32, 32, 4), (64, 32, 4), (128, 32, 8)),
    ("query_gradients", "hdim128"): _shapes((128, 16, 8), (128, 32, 8), (64, 32, 8)),
    ("query_gradients", "hdim128, softplus"): _shapes((64, 32, 8), (128, 16, 8), (128, 32, 8)),
    ("query_gradients", "hdim128, compute-intensive"): _shapes((32, 16, 8), (128, 16, 8), (64, 32, 8)),
    ("key_gradients", "hdim64"): _shapes((16, 128, 8), (32, 128, 8), (32, 64, 4)),
    ("key_gradients", "hdim64, compute-intensive"): _shapes((16, 32, 8), (16, 128, 8), (32, 128, 8)),
    ("key_gradients", "LASER"): _shapes((16, 32, 8), (16, 64, 4), (32, 128, 8)),
    ("key_gradients", "hdim128"): _shapes((16, 64, 8), (16, 64, 4), (16, 128, 8)),
    ("key_gradients", "hdim128, compute-intensive"): _shapes((16, 32, 4), (16, 128, 8), (16, 64, 8)),
    ("bias_gradients", "hdim64"): _shapes((32, 32, 8)),
    ("decode", "hdim64"): _shapes((16, 64, 4), stages=4),
    ("decode", "hdim128"): _shapes((16, 32, 4), stages=4),
}
"""For GPUs before Hopper, on which the operands of products take registers, too. Not measured: the
first shape of each spills no registers, in decoding at most 32 bytes (test_triton_compile.py).
"""
TILES_SINCE_BLACKWELL = {
    ("forward", "hdim64"): _shapes((128, 32, 8), (128, 64, 8), (64, 64, 4)),
    ("forward", "hdim128"): _shapes((64, 32, 8), (128, 32, 8), (128, 64, 8)),
    ("query_gradients", "hdim64"): _shapes((128, 64, 8), (128, 64, 8, 128), (64, 64, 4), (128, 64, 4)),
    ("query_gradients", "hdim64, softplus"): _shapes((64, 64, 4), (128, 32, 8), (128, 64, 8)),
    ("query_gradients", "hdim64, compute-intensive"): _shapes((128, 32, 8), (128, 64, 8), (64, 32, 4)),
    ("query_gradients", "hdim128"): _shapes((128, 32, 8), (128, 64, 8), (64, 32, 4), (128, 32, 8, 128)),
    ("query_gradients", "hdim128, softplus"): _shapes((64, 32, 8), (128, 16, 8), (128, 32, 8)),
    ("query_gradients", "hdim128, compute-intensive"): _shapes((64, 32, 8), (128, 32, 8), (128, 64, 8)),
    ("key_gradients", "hdim64"): _shapes((32, 128, 8), (64, 128, 8), (32, 64, 4), (32, 128, 8, 128)),
    ("key_gradients", "hdim64, compute-intensive"): _shapes((16, 128, 8), (32, 128, 8), (64, 128, 8)),
    ("key_gradients", "hdim128"): _shapes((16, 128, 8), (32, 128, 8), (64, 128, 8)),
    ("key_gradients", "hdim128, compute-intensive"): _shapes((16, 64, 8), (32, 128, 8), (16, 128, 8)),
    ("bias_gradients", "hdim64"): TILES["bias_gradients", "hdim64"],
    ("decode", "hdim64"): _shapes((16, 64, 4), stages=4),
    ("decode", "hdim128"): _shapes((16, 32, 4), stages=4),
}
"""For GPUs from Blackwell on. Chosen by what compiles without spills, or in decoding with at most
32 bytes (test_triton_compile.py). Nothing was measured.
"""
TILES_FP32 = {
    "hdim64": _shapes((32, 32, 8), (64, 32, 8), stages=2),
    "hdim128": _shapes((32, 16, 8), (32, 32, 8), stages=2),
    "hdim256": _shapes((16, 16, 8), (32, 16, 8), stages=2),
}
"""For float32, in every kernel but decode. Without tensor cores a thread holds the operands of its
products in registers, and larger tiles spill thousands of bytes. Two stages are enough, because
products take so long that waiting for loads hardly matters.
"""
SMALLER = (TileShape(32, 32, 4, 2), TileShape(32, 16, 4, 1), TileShape(16, 16, 4, 1))
"""Tile shapes for devices whose shared memory is too small for all others, as with float32 and 128
dimensions on consumers' GPUs.
"""
TUNE = "SOFTFOCUS_TUNE"
"""Environment switch. With "off" nothing is measured: each kernel takes its first tile shape."""
INTERPRETED = TileShape(32, 32, 1, 1)
"""The tile shape in Triton's interpreter, small so that short tests have several tiles."""


def candidates(kernel: str, call: Call) -> tuple[TileShape, ...]:
    """The tile shapes to choose from for a kernel of a call, on the current device."""
    mechanism = call.mechanism
    widest = max(call.query.size(-1), call.value.size(-1))
    if call.query.dtype == torch.float32 and kernel != "decode":
        return TILES_FP32["hdim256" if widest > 128 else "hdim128" if widest > 64 else "hdim64"]
    if widest > 128 and kernel in TILES_HDIM256:
        return TILES_HDIM256[kernel]
    arch = driver.active.get_current_target().arch
    arch = arch if isinstance(arch, int) else 90  # a string on GPUs that are not NVIDIA's
    table = TILES_BEFORE_HOPPER if arch < 90 else TILES_SINCE_BLACKWELL if arch >= 100 else TILES
    width = "hdim128" if widest > 64 else "hdim64"
    reweighted, laser = mechanism.power is not None, mechanism.laser
    # Not derived from counted work: chosen by what spilled registers, before a GPU was measured
    compute_intensive = {
        "forward": reweighted or mechanism.phi == "sigmoid",
        "query_gradients": reweighted,
        "key_gradients": (reweighted or mechanism.phi != "exp") if width == "hdim128" else (reweighted and laser),
    }.get(kernel, False)
    # The names of the table that apply to the call, the most specific first
    names = [f"{width}, {mechanism.phi}", width, "hdim64"]
    if compute_intensive:
        names = [f"{width}, compute-intensive", *names]
    if laser and not reweighted:
        names = ["LASER", *names]
    return next(table[kernel, name] for name in names if (kernel, name) in table)


def first_shape(kernel: str, call: Call) -> TileShape:
    """The tile shape of a kernel where nothing is measured."""
    return INTERPRETED if knobs.runtime.interpret else candidates(kernel, call)[0]


def measurement_key(kernel: str, call: Call) -> tuple[Hashable, ...]:
    """The key under which a measurement is stored: calls that share it share the fastest tile
    shape. B H, Lq, Lk and H / Hk are rounded up to powers of two; D and Dv are not.
    """
    query, key, visibility = call.query, call.key, call.visibility
    sizes = (query.size(0) * query.size(1), query.size(2), key.size(2), query.size(1) // key.size(1))
    return (
        kernel, compiled_as(call.mechanism).code, str(query.dtype), query.size(3), call.value.size(3),
        *map(next_power_of_two, sizes),
        visibility.left != UNLIMITED, visibility.right != UNLIMITED, call.dropout.p > 0,
        *sorted(optional_arguments(pack(call))),
    )  # fmt: skip


def next_power_of_two(x: int) -> int:
    """The smallest power of two that is at least x. Triton's own function takes microseconds on the
    host.
    """
    return 1 << max(x - 1, 0).bit_length()


@cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


_RECORD = "tile.json"
_known: dict[tuple[Hashable, ...], TileShape] = {}


def fastest(
    key: tuple[Hashable, ...],
    device: torch.device,
    candidates: tuple[TileShape, ...],
    run: Callable[[TileShape], Any],
) -> TileShape:
    """The tile shape with which ``run`` takes the least time, for calls that share ``key`` (see
    ``measurement_key``).

    It is measured at the first of these calls, which waits for the device and for compilers.
    Later processes find it in Triton's own cache, by device, Triton's version and the kernels'
    source. A call that is captured into a CUDA graph before the measurement takes the first of
    ``candidates``. So does every call with ``SOFTFOCUS_TUNE=off`` or torch's deterministic
    algorithms: two machines may measure different shapes, and the shape changes the last bits of a
    result.

    Raises:
        ValueError: SOFTFOCUS_TUNE is neither on nor off.
    """
    if not switched_on(TUNE, default=True) or torch.are_deterministic_algorithms_enabled():
        return candidates[0]
    key = (_name(device), *key)
    if key not in _known:
        code = hashlib.sha256(json.dumps([triton.__version__, _source(), key]).encode()).hexdigest()
        store, known = get_cache_manager(code), (*candidates, *SMALLER)
        tile = _kept(store, known)
        if tile is None:
            capturing = torch.cuda.is_current_stream_capturing()
            tile = None if capturing else _measured(candidates, run) or _measured(SMALLER, run)
            if tile is None:
                return candidates[0]
            if other := _kept(store, known):  # of a process that was sooner
                tile = other
            else:
                store.put(json.dumps(tile), _RECORD, binary=False)
        _known[key] = tile
    return _known[key]


def where_it_fits(tile: TileShape, run: Callable[[TileShape], None]) -> TileShape:
    """Run with a tile shape, or a smaller one that fits in shared memory. Return the shape."""
    tiles = (tile, *SMALLER)
    for tile in tiles:
        try:
            run(tile)
        except OutOfResources:
            if tile == tiles[-1]:
                raise
        else:
            return tile
    raise AssertionError("unreachable")


def _measured(candidates: tuple[TileShape, ...], run: Callable[[TileShape], Any]) -> TileShape | None:
    """The fastest of the shapes that fit; None if none does."""
    times = {}
    for tile in candidates:
        try:
            times[tile] = _time(partial(run, tile))
        except (OutOfResources, PTXASError, torch.OutOfMemoryError):  # OutOfMemoryError: measuring takes memory, too
            continue
    return min(times, key=times.__getitem__) if times else None


def _time(run: Callable[[], Any]) -> float:
    """The median time of ``run`` in milliseconds."""
    took: float = triton.testing.do_bench(run, warmup=20, rep=80, return_mode="median")  # warmup, rep: ms
    return took


def _kept(store: CacheManager, known: tuple[TileShape, ...]) -> TileShape | None:
    """The tile shape that a process has measured; None where there is none, or no known one."""
    found = store.get_file(_RECORD)
    try:
        tile = None if found is None else TileShape(*json.loads(Path(found).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return tile if tile in known else None


@cache
def _source() -> str:
    """A digest of the source on which the kernels and the choice between tiles depend."""
    folder = Path(__file__).parent
    files = sorted([*folder.glob("*.py"), *folder.glob("kernels/*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
