"""The Triton kernels, compared with the tiled backend at the first call of each kind.

``backend="auto"`` runs them through here, because no GPU of ours has run them, and a wrong kernel
must not silently give wrong numbers. A part of the call is compared with the tiled backend in
float64. Kinds that disagree or do not compile run on the tiled backend from then on, after one
warning. A kind is a mechanism, a dtype, the sizes of a head and the arguments that are given;
lengths and values do not belong to it. ``SOFTFOCUS_TRITON=trusted`` leaves the check out.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from softfocus.backends import tiled, triton
from softfocus.backends.triton import FEW_ROWS
from softfocus.contract import GRADIENTS, Call, given, pack
from softfocus.mechanism import Mechanism
from softfocus.visibility import UNLIMITED
from softfocus.warn import warn

ROWS = 128
"""Queries of a part: enough for whole tiles, and for the kernels of prefill."""
MOST_KEYS = 1 << 24
"""Most numbers in the keys of a part of few queries, which is copied in float64."""
MARGIN = 8.0
"""A kernel's error may be so many times the tiled backend's in the same dtype. One draw of rounding
errors can be lucky, and a wrong kernel is wrong by far more.
"""
BAND = 4.0
"""On top, so many units in the last place of the largest number that was summed."""

TINY = 1e-30
MOST_KINDS = 4096
Result = TypeVar("Result")

_refused: dict[Hashable, str | None] = {}
"""Why the kernels are refused, by (direction, kind); None where they agreed."""

ABOUT, CARRIES, refuses, rows_kept = triton.ABOUT, triton.CARRIES, triton.refuses, triton.rows_kept


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """The Triton backend's, or the tiled backend's where the kernels are refused.

    Raises:
        RuntimeError: a call with a cache is captured into a CUDA graph, and the kernels are
            refused. The tiled backend waits for the device, which cannot be captured.
    """
    if not call.query.numel() or not _fails("forward", call):
        return triton.forward(call)
    if call.cache is None:
        out, statistics = tiled.forward(call)
    elif _capturing(call.query):
        raise RuntimeError(
            "softfocus: the Triton kernels are refused for this call, and what runs instead cannot be captured"
        )
    else:
        parts = [tiled.forward(_sequence(b, call)) for b in range(call.query.size(0))]
        out, statistics = (torch.cat(some, dim) for some, dim in zip(zip(*parts, strict=True), (0, 1), strict=True))
    rows = statistics.new_zeros(rows_kept(call), *statistics.shape[1:])
    rows[: len(statistics)] = statistics
    return out, rows


def backward(call: Call, grad: Tensor, bias_grad: bool, out: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """The Triton backend's, or the tiled backend's where the kernels are refused."""
    if _fails("forward", call) or _fails("backward", call):
        return tiled.backward(call, grad, bias_grad)
    return triton.backward(call, grad, bias_grad, out, rows)


def prepare(call: Call) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The Triton backend's, once the kind has agreed."""
    right = _refused.get(("forward", _kind(call)), "not seen yet") is None
    return triton.prepare(call) if right else None


def refusal(call: Call) -> str | None:
    """Why the kernels are refused for this kind; None where they agreed or nothing has been
    compared yet.
    """
    kind = _kind(call)
    return _refused.get(("forward", kind)) or _refused.get(("backward", kind))


def seen(call: Call) -> str:
    """What is known of this kind, as text for ``explain()``."""
    kind = _kind(call)
    ways = [way for way in ("forward", "backward") if _refused.get((way, kind), "not seen yet") is None]
    if not ways:
        return "the first call is held against 'tiled'"
    return f"{' and '.join(ways)} seen to agree with 'tiled' here, on part of a call and in tiles that suit the part"


def _fails(way: str, call: Call) -> bool:
    """Whether a direction ("forward" or "backward") of this kind is refused. The first call of a
    kind is compared here.
    """
    kind = way, _kind(call)
    if kind not in _refused:
        if _capturing(call.query) or not (call.query.numel() and call.key.numel()):
            return False  # neither a captured graph nor an empty tensor gives numbers to compare
        looks = _backwards if way == "backward" else _forwards if call.cache is None else _longest
        _judge(kind, call.mechanism, lambda: looks(call))
    return _refused.get(kind) is not None


Compared = tuple[Tensor, Tensor, Tensor, float]
"""Results of the kernels, of the tiled backend in the same dtype and in float64; and the size of
what was summed.
"""


class _KernelError(Exception):
    """The kernels raised."""


def _of_kernels(run: Callable[[], Result]) -> Result:
    try:
        return run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the memory is short, or the device lost: not the kernels' fault
    except Exception as error:  # Triton's compilers have exceptions of their own
        raise _KernelError(
            f"they do not run here ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        ) from error


def _forwards(call: Call) -> Iterator[Compared]:
    part = _part_of(call)
    same, exact = (tiled.forward(numbers)[0] for numbers in (part, _in_double(part)))
    yield _of_kernels(lambda: triton.forward(part)[0]), same, exact, _largest(exact)


def _longest(call: Call) -> Iterator[Compared]:
    """Compares the longest sequence of a cache."""
    assert call.cache is not None
    b = int(call.cache.lengths.argmax())
    one = _sequence(b, call)
    same, exact = (tiled.forward(numbers)[0] for numbers in (one, _in_double(one)))
    got = _of_kernels(lambda: triton.forward(call)[0])
    yield got[b : b + 1], same, exact, _largest(exact)


def _backwards(call: Call) -> Iterator[Compared]:
    part = _part_of(call)
    bias_grad = part.bias is not None
    generator = torch.Generator().manual_seed(0)
    shape = (*part.query.shape[:3], part.value.size(-1))
    grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(part.query)
    same = tiled.backward(part, grad, bias_grad)
    exact = tiled.backward(_in_double(part), grad.double(), bias_grad)
    sizes = _sizes_of_sums(part, grad)
    got = _of_kernels(lambda: triton.backward(part, grad, bias_grad, *triton.forward(part)))
    for name in exact:
        yield got[name], same[name], exact[name], max(_largest(exact[name]), sizes.get(name, 0.0))


def _sizes_of_sums(part: Call, grad: Tensor) -> dict[str, float]:
    """The sums of absolute terms for the gradients of query, key, bias and head_scale.

    These sums may cancel to nothing, so that their own size says nothing of their rounding. Query
    and key take an eighth: with BAND that is half a unit in the last place of every dL/ds, which
    the kernels round.
    """
    double = _in_double(part)
    query, key = double.query, double.key.repeat_interleave(part.query.size(1) // part.key.size(1), 1)
    shape = (*query.shape[:3], key.size(2))
    each = (query.new_zeros(()) if double.bias is None else double.bias).expand(shape).contiguous()
    terms = tiled.backward(double._replace(bias=each), grad.double(), True)["bias"]
    terms = terms.abs().nan_to_num(0.0, 0.0, 0.0)
    scale = abs(part.scale) * math.log(max(part.visibility.key_length, 3))
    if part.mechanism.similarity == "dot":
        of_query, of_key = terms @ key.abs(), terms.mT @ query.abs()
        largest = scale * float(query.norm(dim=-1).max() * key.norm(dim=-1).max())  # of |s|, by Cauchy and Schwarz
    else:
        of_query = terms.sum(-1) / query.norm(dim=-1).clamp(min=TINY)
        of_key = terms.sum(-2) / key.norm(dim=-1).clamp(min=TINY)
        largest = scale
    if double.head_scale is not None:
        scale *= float(double.head_scale.abs().max())
    return {
        "query": scale * _largest(of_query) / 8,
        "key": scale * _largest(of_key) / 8,
        "bias": 0.0 if part.bias is None else _largest(terms.sum_to_size(part.bias.shape)),
        "head_scale": _largest(terms.sum((0, 2, 3))) * largest,
    }


def _judge(kind: Hashable, mechanism: Mechanism, compared: Callable[[], Iterator[Compared]]) -> None:
    """Compare and remember the outcome. Warn where the kernels are wrong or do not run.

    A comparison that shows nothing (all zeros) or runs out of memory is not remembered. The next
    call is compared instead.
    """
    why, shown = None, False
    try:
        for got, same, exact, size in compared():
            shown = shown or _largest(exact) > 0.0
            if why := _difference(got, same, exact, size):
                break
    except _KernelError as error:
        why = str(error)
    except torch.OutOfMemoryError:
        return
    if not (shown or why):
        return
    if len(_refused) >= MOST_KINDS:  # kinds that agreed are compared again; refused ones stay refused
        for right in [kind for kind, refusal in _refused.items() if refusal is None]:
            del _refused[right]
    _refused[kind] = why
    if why:
        warn(
            f"softfocus: the Triton kernels are not taken for {mechanism} on this device: {why}. "
            "The tiled backend runs, which is slower. Please report this.",
            RuntimeWarning,
        )


def _difference(got: Tensor, same: Tensor, exact: Tensor, size: float) -> str | None:
    """A sentence where the numbers differ by more than rounding explains; None where they do
    not.
    """
    there = exact.isfinite() & same.isfinite()
    if not there.any():
        return None
    want = exact[there]
    error = (got.double()[there] - want).abs().max().item()
    most = MARGIN * (same.double()[there] - want).abs().max().item()
    most += BAND * torch.finfo(got.dtype).eps * size
    if error <= most:  # not so where it is NaN
        return None
    return f"they are off by {error:.3g} from the tiled backend in float64, of which rounding explains {most:.3g}"


def _largest(x: Tensor) -> float:
    """The largest finite absolute value."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _part_of(call: Call) -> Call:
    """The last queries of the heads of one sequence that share a key head, with all keys that they
    may see.

    If there are few queries: those of all heads of some sequences.
    """
    query, key, value, visibility = call.query, call.key, call.value, call.visibility
    group = query.size(1) // key.size(1)
    batch, heads, first = 1, group, max(0, query.size(2) - max(ROWS, FEW_ROWS // group + 1))
    if group * query.size(2) <= FEW_ROWS:
        batch, heads = max(1, MOST_KEYS // key[0].numel()), query.size(1)

    def part(x: Tensor) -> Tensor:
        """Of a tensor [H], or of one that broadcasts to [B, H, Lq, Lk]."""
        if x.dim() == 1:
            return x[:heads]
        return x[:batch, :heads, first if x.size(2) > 1 else 0 :]

    keys = ("query", "key", "value")
    optional = {name: getattr(call, name) for name in GRADIENTS if name not in keys}
    like: Any = call
    return like._replace(
        query=query[:batch, :heads, first:],
        key=key[:batch, : heads // group],
        value=value[:batch, : heads // group],
        visibility=replace(
            visibility,
            query_length=query.size(2) - first,
            mask=None if visibility.mask is None else part(visibility.mask),
            key_mask=None if visibility.key_mask is None else visibility.key_mask[:batch],
            document_ids=None if visibility.document_ids is None else visibility.document_ids[:batch],
        ),
        **{name: part(x) for name, x in optional.items() if x is not None},
    )


def _in_double(call: Call) -> Call:
    like: Any = call
    tensors = {name: getattr(call, name) for name in GRADIENTS}
    return like._replace(**{name: x.double() for name, x in tensors.items() if x is not None})


def _sequence(b: int, call: Call) -> Call:
    """One sequence of a cache. Waits for the device."""
    assert call.cache is not None
    return call.of_sequence(b, int(call.cache.lengths[b].clamp(0, call.visibility.key_length)))


def _kind(call: Call) -> Hashable:
    """What decides which kernels run, except tiles and sizes that kernels read when they run.

    With few queries the keys may be split among programs, which depends on the numbers of keys and
    heads.
    """
    query, key, visibility = call.query, call.key, call.visibility
    few = query.size(1) // max(key.size(1), 1) * query.size(2) <= FEW_ROWS
    group = few and (key.size(2).bit_length(), (key.size(0) * key.size(1)).bit_length())
    bias = None if call.bias is None else (call.bias.dtype, *(size == 1 for size in call.bias.shape))
    return (
        query.device, query.dtype, query.size(-1), call.value.size(-1), triton.compiled_as(call.mechanism), group, bias,
        triton.variant(call), given(pack(call)), visibility.left != UNLIMITED, visibility.right != UNLIMITED,
        bool(call.dropout.p), call.cache and call.cache.page_table is None,
    )  # fmt: skip


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
