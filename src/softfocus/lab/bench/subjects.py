"""Who is measured: the one registry. A subject says what it computes, whether it can, and builds
the function to call.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from softfocus.dispatch import choose
from softfocus.functional import attention, validated_call
from softfocus.lab.bench import eager, flex, timing
from softfocus.lab.bench.cells import Cell, Function, call, make
from softfocus.lab.run_folder.provenance import available_memory

YARDSTICK = "sdpa"
"""Every ratio is to this subject."""


@dataclass(frozen=True)
class Subject:
    """One way to compute a cell.

    Attributes:
        name: in tables, results and figures.
        computes: for people.
        refuses: None, or a sentence that says why it cannot compute a cell.
        build: the function of (query, key, value) to call; what is done here is not timed.
        ours: compared with the float64 reference before it is timed.
        backend: which of softfocus's backends runs a cell, or which of torch's kernels; "" where
            there is nothing to choose.
        cell: the cell whose inputs it gets and whose function it builds, of one that is measured.
        compiles: its first call at a length compiles; that, too, is not what is measured.
    """

    name: str
    computes: str
    refuses: Callable[[Cell], str | None]
    build: Callable[[Cell], Function]
    ours: bool = False
    backend: Callable[[Cell], str] = lambda cell: ""
    cell: Callable[[Cell], Cell] = lambda cell: cell
    compiles: bool = False


def _never(cell: Cell) -> str | None:
    return None


def _sdpa(cell: Cell) -> Function:
    """On a GPU torch is told to take only the fastest of its kernels, for the whole process: nobody
    else here asks SDPA.
    """
    if chosen := _fastest_sdpa(cell):
        _only(chosen)
    return partial(F.scaled_dot_product_attention, is_causal=cell.causal)


SDPA = ("flash", "cudnn", "mem_efficient")
"""torch's fused kernels, by their names in torch.backends.cuda."""


def _only(chosen: str) -> None:
    for name in (*SDPA, "math"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == chosen)


def _fastest_sdpa(cell: Cell) -> str:
    """Which of torch's kernels takes the least time for a cell on a GPU, whatever the mechanism; ""
    elsewhere, where torch chooses.
    """
    return _fastest_of_shape(replace(cell, mechanism="softmax")) if cell.device == "cuda" else ""


@lru_cache(maxsize=64)
def _fastest_of_shape(cell: Cell) -> str:
    times = {}
    ready = call(partial(F.scaled_dot_product_attention, is_causal=cell.causal), cell, make(cell))
    for name in SDPA:
        _only(name)
        try:
            for _ in range(3):
                ready()
            times[name] = timing.spread([timing.clock_of(cell.device)(ready) for _ in range(10)]).median
        except RuntimeError:  # not for such a call, or not in this build of torch
            continue
    return min(times, key=times.__getitem__) if times else "math"


def _softfocus(cell: Cell, backend: str = "auto") -> Function:
    return partial(attention, is_causal=cell.causal, mechanism=cell.algebra, backend=backend)


def _backend(cell: Cell, backend: str = "auto") -> str:
    """The one that runs a cell, asked with tensors of its shape that hold nothing.

    Raises:
        ValueError: the backend asked for by name does not.
    """

    def empty(length: int) -> Tensor:
        shape = (cell.batch, cell.heads, length, cell.head_dim)
        backward = cell.what == "backward"
        return torch.empty(shape, dtype=cell.torch_dtype, device=cell.device, requires_grad=backward)

    tensors = (empty(cell.queries), empty(cell.length), empty(cell.length))
    return choose(validated_call(*tensors, is_causal=cell.causal, mechanism=cell.algebra), backend)


def _tiled_refuses(cell: Cell) -> str | None:
    return "what softfocus itself takes here: measured under that name" if _backend(cell) == "tiled" else None


def _triton_refuses(cell: Cell) -> str | None:
    if cell.device != "cuda":
        return "the Triton kernels run on a GPU"
    if _backend(cell) == "triton":
        return "what softfocus itself takes here: measured under that name"
    try:
        _backend(cell, "triton")
    except ValueError as error:
        return str(error)
    return None


def _float32_refuses(cell: Cell) -> str | None:
    return "the inputs are float32: measured as softfocus" if cell.dtype == "float32" else None


def _eager_refuses(cell: Cell) -> str | None:
    if why := eager.refuses(cell.algebra):
        return why
    needed, limit = eager.needs(cell), free_memory(cell.device) // 2
    if needed > limit:
        gigabytes = 2**30
        return (
            f"its dense [L, L] weights would take {needed / gigabytes:.1f} GiB; the limit is half of the free memory, "
            f"{limit / gigabytes:.1f} GiB"
        )
    return None


def free_memory(device: str) -> int:
    """Bytes of memory that are free now."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    free = available_memory()
    return 8 * 2**30 if free is None else free  # unknown: a modest machine


SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject(
            "sdpa",
            "softmax, the fastest of torch's own fused kernels, whatever the mechanism of the cell: the yardstick",
            _never,
            _sdpa,
            backend=_fastest_sdpa,
        ),
        Subject(
            "softfocus",
            "the mechanism by softfocus.attention, on the backend that it takes by itself",
            _never,
            _softfocus,
            ours=True,
            backend=_backend,
        ),
        Subject(
            "float32",
            "as softfocus, of the same inputs in float32: what a smaller dtype gains or costs",
            _float32_refuses,
            _softfocus,
            ours=True,
            backend=_backend,
            cell=partial(replace, dtype="float32"),
        ),
        Subject(
            "triton",
            "the mechanism by softfocus.attention on the Triton kernels",
            _triton_refuses,
            partial(_softfocus, backend="triton"),
            ours=True,
            backend=lambda cell: "triton",
        ),
        Subject(
            "tiled",
            "the mechanism by softfocus.attention on pure torch",
            _tiled_refuses,
            partial(_softfocus, backend="tiled"),
            ours=True,
            backend=lambda cell: "tiled",
        ),
        Subject("eager", "the mechanism's formula by hand in PyTorch, dense", _eager_refuses, eager.build),
        Subject("flex", "the mechanism by torch's compiled FlexAttention", flex.refuses, flex.build, compiles=True),
    )
}
