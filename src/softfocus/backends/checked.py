"""The Triton kernels, compared with the tiled backend at the first call of each kind.

``backend="auto"`` runs the kernels through this module, because they are compiled on the user's
machine for shapes that no test has run, and a wrong kernel must not silently give wrong numbers. A
part of the call is compared with the tiled backend in float64. Kinds that disagree or do not
compile run on the tiled backend from then on, after one warning. A kind is what chooses the
compiled kernels: the mechanism, the dtype, the sizes of a head, the sides of the window, the
optional arguments, the device and so on (``_kind``). The numbers in the tensors do not belong to
it, nor do lengths and alignment, with two exceptions: whether the keys of few queries are split and
for how many rows, and the size of a page.

``SOFTFOCUS_TRITON=trusted`` omits the check.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from softfocus.backends import tiled, triton
from softfocus.backends.triton.variants import FEW_ROWS, compiled_as, variant
from softfocus.contract import GRADIENTS, Call, optional_arguments, pack
from softfocus.mechanism import Mechanism
from softfocus.visibility import UNLIMITED
from softfocus.warn import warn

ROWS = 128
"""Queries of a part. They fill whole tiles, and they are enough for the kernels of prefill."""
MAX_KEY_ELEMENTS = 1 << 24
"""The largest number of elements in the keys of a part of few queries, which is copied in
float64.
"""
MARGIN = 8.0
"""A kernel's error may be this many times the tiled backend's error in the same dtype. One draw of
rounding errors can be lucky, and the error of a wrong kernel is far larger.
"""
ULP_LIMIT = 4.0
"""In addition, a kernel's error may be this many units in the last place of the largest number that
was summed.
"""

ROUNDING = 0.5
"""The error of a number that is rounded to the dtype, in units in the last place: to nearest."""
TINY = 1e-30
"""Keeps a division by a zero norm finite."""
MAX_KINDS = 4096  # unmeasured
"""More kinds than a process meets. Bounds the dictionary."""
Result = TypeVar("Result")

_verdicts: dict[Hashable, str | None] = {}
"""By (direction, kind): why the kernels are refused, or None if they agreed."""

# Members of contract.Backend: those of the Triton backend
ABOUT, SUPPORTED, refuses, saved_vector_count = (
    triton.ABOUT,
    triton.SUPPORTED,
    triton.refuses,
    triton.saved_vector_count,
)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """The forward of the Triton backend, or of the tiled backend if the kernels are refused.

    Raises:
        RuntimeError: a call with a cache is captured into a CUDA graph, and the kernels are
            refused. The tiled backend synchronises, which cannot be captured.
    """
    if not call.query.numel() or not _fails("forward", call):
        return triton.forward(call)
    if call.cache is None:
        out, statistics = tiled.forward(call)
        kept = statistics.new_zeros(saved_vector_count(call), *statistics.shape[1:])
        kept[: len(statistics)] = statistics
        return out, kept
    if _capturing(call.query):
        raise RuntimeError(
            "softfocus: the Triton kernels are refused for this call, and what runs instead cannot be captured"
        )
    # There is no backward, and so there are no saved vectors
    parts = [tiled.forward(_sequence(b, call))[0] for b in range(call.query.size(0))]
    return torch.cat(parts), call.query.new_empty(0)


def backward(call: Call, grad: Tensor, bias_grad: bool, out: Tensor, statistics: Tensor) -> dict[str, Tensor]:
    """The backward of the Triton backend, or of the tiled backend if the kernels are refused."""
    if _fails("forward", call) or _fails("backward", call):
        return tiled.backward(call, grad, bias_grad)
    return triton.backward(call, grad, bias_grad, out, statistics)


def runner(call: Call) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The Triton backend's runner; None until a call of this kind has agreed."""
    agreed = _verdicts.get(("forward", _kind(call)), "not compared yet") is None
    return triton.runner(call) if agreed else None


def refusal(call: Call) -> str | None:
    """Why the kernels are refused for this kind; None if they agreed or nothing has been compared
    yet.
    """
    kind = _kind(call) if _verdicts else None  # a question imports no Triton before a call has
    return _verdicts.get(("forward", kind)) or _verdicts.get(("backward", kind))


def agreement(call: Call) -> str:
    """Which directions of this kind have agreed, as text for ``explain()``."""
    kind = _kind(call) if _verdicts else None
    directions = ("forward", "backward")
    agreed = [name for name in directions if _verdicts.get((name, kind), "not compared yet") is None]
    if not agreed:
        return "the first call is compared with 'tiled'"
    return f"{' and '.join(agreed)} seen to agree with 'tiled' here, on part of a call and in tiles that suit the part"


def _fails(direction: str, call: Call) -> bool:
    """Whether a direction ("forward" or "backward") of this kind is refused. This function compares
    the first call of a kind.
    """
    kind = direction, _kind(call)
    if kind not in _verdicts:
        if _capturing(call.query) or not (call.query.numel() and call.key.numel()):
            return False  # neither a captured graph nor an empty tensor gives numbers to compare
        if direction == "backward":
            compare = _compare_backward
        else:
            compare = _compare_forward if call.cache is None else _compare_longest_sequence
        _judge(kind, call.mechanism, lambda: compare(call))
    return _verdicts.get(kind) is not None


class Comparison(NamedTuple):
    """One result, computed three times.

    Attributes:
        got: the kernels' result.
        tiled_same_dtype: the tiled backend's, in the same dtype.
        tiled_float64: the tiled backend's in float64.
        size: the largest magnitude that was summed; ULP_LIMIT eps size is allowed for its rounding.
    """

    got: Tensor
    tiled_same_dtype: Tensor
    tiled_float64: Tensor
    size: float


class _KernelError(Exception):
    """The kernels raised."""


def _run_kernels(run: Callable[[], Result]) -> Result:
    """What ``run`` returns. An error of the kernels' own is raised as a ``_KernelError``."""
    try:
        return run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the memory is short, or the device lost: not the kernels' fault
    except Exception as error:  # Triton's compilers have exceptions of their own
        raise _KernelError(
            f"they do not run here ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        ) from error


def _compare_forward(call: Call) -> Iterator[Comparison]:
    part = _part_of(call)
    tiled_same_dtype, tiled_float64 = (tiled.forward(some_call)[0] for some_call in (part, _in_double(part)))
    got = _run_kernels(lambda: triton.forward(part, triton.splits_keys(call))[0])
    yield Comparison(got, tiled_same_dtype, tiled_float64, size=_largest(tiled_float64))


def _compare_longest_sequence(call: Call) -> Iterator[Comparison]:
    """Compares the longest sequence of a cache."""
    assert call.cache is not None
    b = int(call.cache.lengths.argmax())
    one = _sequence(b, call)
    tiled_same_dtype, tiled_float64 = (tiled.forward(some_call)[0] for some_call in (one, _in_double(one)))
    got = _run_kernels(lambda: triton.forward(call)[0])
    yield Comparison(got[b : b + 1], tiled_same_dtype, tiled_float64, size=_largest(tiled_float64))


def _compare_backward(call: Call) -> Iterator[Comparison]:
    """Compares each gradient of a part.

    Values that are not finite are 0 in it: the tiled backend leaves them out of its gradients, and
    the kernels make those of the row NaN (docs/numerics.md).
    """
    part = _part_of(call)
    part = part._replace(**{x: getattr(part, x).nan_to_num(0.0, 0.0, 0.0) for x in ("query", "key", "value")})
    bias_grad = part.bias is not None
    generator = torch.Generator().manual_seed(0)
    shape = (*part.query.shape[:3], part.value.size(-1))
    grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(part.query)
    tiled_same_dtype = tiled.backward(part, grad, bias_grad)
    tiled_float64 = tiled.backward(_in_double(part), grad.double(), bias_grad)
    sizes = _sizes_of_sums(part, grad)
    split = triton.splits_keys(call)
    got = _run_kernels(lambda: triton.backward(part, grad, bias_grad, *triton.forward(part, split)))
    for name, right in tiled_float64.items():
        yield Comparison(got[name], tiled_same_dtype[name], right, size=max(_largest(right), sizes.get(name, 0.0)))


def _sizes_of_sums(part: Call, grad: Tensor) -> dict[str, float]:
    """The largest sums of absolute terms for the gradients of query, key, bias and head_scale.

    The gradients themselves may cancel to nothing, and their size then says nothing about their
    rounding. The kernels round every dL/ds by up to half a unit in the last place before they
    multiply it with keys and queries. For query and key the sums are therefore scaled so that
    ULP_LIMIT eps size is ROUNDING units in the last place (eps) of the sum.
    """
    rounding = ROUNDING / ULP_LIMIT
    double = _in_double(part)
    query, key = double.query, double.key.repeat_interleave(part.query.size(1) // part.key.size(1), 1)
    shape = (*query.shape[:3], key.size(2))
    # dL/ds of all rows is the gradient of a bias that has an element for each score
    full_bias = (query.new_zeros(()) if double.bias is None else double.bias).expand(shape).contiguous()
    terms = tiled.backward(double._replace(bias=full_bias), grad.double(), True)["bias"]
    terms = terms.abs().nan_to_num(0.0, 0.0, 0.0)
    # An upper bound of |c_i| without the head scale. A length scale is at most max(log N, 1), and
    # log 3 > 1
    scale = abs(part.scale) * math.log(max(part.visibility.key_length, 3))
    if part.mechanism.similarity == "dot":
        query_terms, key_terms = terms @ key.abs(), terms.mT @ query.abs()
        largest = scale * float(query.norm(dim=-1).max() * key.norm(dim=-1).max())  # of |s|, by Cauchy-Schwarz
    else:
        query_terms = terms.sum(-1) / query.norm(dim=-1).clamp(min=TINY)
        key_terms = terms.sum(-2) / key.norm(dim=-1).clamp(min=TINY)
        largest = scale
    # ``largest`` has no head scale: the gradient of head_scale is the sum of dL/ds times the score
    # without it. The gradients of query and key have one
    if double.head_scale is not None:
        scale *= float(double.head_scale.abs().max())
    return {
        "query": scale * _largest(query_terms) * rounding,
        "key": scale * _largest(key_terms) * rounding,
        "bias": 0.0 if part.bias is None else _largest(terms.sum_to_size(part.bias.shape)),
        "head_scale": _largest(terms.sum((0, 2, 3))) * largest,
    }


def _judge(kind: Hashable, mechanism: Mechanism, compare: Callable[[], Iterator[Comparison]]) -> None:
    """Compare and store the outcome. Warn if the kernels are wrong or do not run.

    A comparison of zeros only, or one that runs out of memory, is not stored. The next call is
    compared instead.
    """
    why, any_nonzero = None, False
    try:
        for comparison in compare():
            any_nonzero = any_nonzero or _largest(comparison.tiled_float64) > 0.0
            if why := _difference(comparison):
                break
    except _KernelError as error:
        why = str(error)
    except torch.OutOfMemoryError:
        return
    if not (any_nonzero or why):
        return
    if len(_verdicts) >= MAX_KINDS:  # kinds that agreed are compared again; refused ones stay refused
        for agreed in [compared_kind for compared_kind, verdict in _verdicts.items() if verdict is None]:
            del _verdicts[agreed]
    _verdicts[kind] = why
    if why:
        warn(
            f"softfocus: the Triton kernels are not taken for {mechanism} on this device: {why}. "
            "The tiled backend runs, which is slower. Please report this.",
            RuntimeWarning,
        )


def _difference(comparison: Comparison) -> str | None:
    """A sentence if the results differ by more than rounding explains, else None."""
    finite = comparison.tiled_float64.isfinite() & comparison.tiled_same_dtype.isfinite()
    if not finite.any():
        return None
    want = comparison.tiled_float64[finite]
    error = (comparison.got.double()[finite] - want).abs().max().item()
    limit = MARGIN * (comparison.tiled_same_dtype.double()[finite] - want).abs().max().item()
    limit += ULP_LIMIT * torch.finfo(comparison.got.dtype).eps * comparison.size
    if error <= limit:  # False where the error is NaN
        return None
    return f"they are off by {error:.3g} from the tiled backend in float64, of which rounding explains {limit:.3g}"


def _largest(x: Tensor) -> float:
    """The largest finite absolute value."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _part_of(call: Call) -> Call:
    """The part of a call that is compared: the last queries of the first key head of one sequence,
    with all keys that they may see.

    If there are few queries, the part has all heads of some sequences.
    """
    query, key, value, visibility = call.query, call.key, call.value, call.visibility
    group = query.size(1) // key.size(1)
    # More than FEW_ROWS rows of the group, so that the part of a prefill is not decoded
    batch, heads, first = 1, group, max(0, query.size(2) - max(ROWS, FEW_ROWS // group + 1))
    if group * query.size(2) <= FEW_ROWS:
        batch, heads = max(1, MAX_KEY_ELEMENTS // key[0].numel()), query.size(1)

    def part(x: Tensor) -> Tensor:
        """The part of a tensor [H], or of one that broadcasts to [B, H, Lq, Lk]."""
        if x.dim() == 1:
            return x[:heads]
        return x[:batch, :heads, first if x.size(2) > 1 else 0 :]

    keys = ("query", "key", "value")
    optional = {name: getattr(call, name) for name in GRADIENTS if name not in keys}
    template: Any = call  # mypy would check the dictionary's tensors against the type of every field
    return template._replace(
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
    tensors = {name: getattr(call, name) for name in GRADIENTS}
    return call._replace(**{name: x.double() for name, x in tensors.items() if x is not None})


def _sequence(b: int, call: Call) -> Call:
    """One sequence of a cache. Synchronises with the device."""
    assert call.cache is not None
    return call.of_sequence(b, int(call.cache.lengths[b].clamp(0, call.visibility.key_length)))


def _kind(call: Call) -> Hashable:
    """What decides which kernels run, except tiles and sizes that kernels read at run time.

    With few queries the keys may be split among programs, by kernels that are compiled for the
    number of rows, rounded up to a power of two.
    """
    query, key, visibility = call.query, call.key, call.visibility
    rows = query.size(1) // max(key.size(1), 1) * query.size(2)
    split = ((rows - 1).bit_length(),) if rows <= FEW_ROWS and triton.splits_keys(call) else ()
    layouts = tuple(x.stride(-1) == 1 for x in (query, key, call.value))
    documents = visibility.document_ids
    pages = call.cache and (key.size(2) if call.cache.page_table is not None else 0)
    bias = None if call.bias is None else (call.bias.dtype, *(size == 1 for size in call.bias.shape))
    return (
        query.device, query.dtype, query.size(-1), call.value.size(-1), compiled_as(call.mechanism), split, layouts,
        bias, variant(call), optional_arguments(pack(call)),
        visibility.left != UNLIMITED, visibility.right != UNLIMITED,
        bool(call.dropout.p), pages, documents is not None and documents.dtype,
    )  # fmt: skip


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
