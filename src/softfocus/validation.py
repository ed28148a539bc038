"""Every argument error of ``attention()``, in the caller's words: the argument, what came, what was
expected, what to do.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from softfocus.catalog import named
from softfocus.contract import FLOATING
from softfocus.mechanism import Mechanism
from softfocus.warn import warn


def _looked_up(name: str) -> Mechanism:
    return named(name)


# As torch.compiler.assume_constant_result does, without importing the whole compiler, and Triton
# with it. torch.compile cannot trace the parser, and looks a name up once.
_looked_up._dynamo_marked_constant = True  # type: ignore[attr-defined]

_PAGES = "[pages, heads, page size, head_dim]"


def _shape(x: Tensor) -> str:
    return f"[{', '.join(str(n) for n in x.shape)}]"


def mechanism_of(mechanism: str | Mechanism) -> Mechanism:
    """A name or combination looked up, a Mechanism as it is."""
    if isinstance(mechanism, Mechanism):
        return mechanism
    if isinstance(mechanism, str):
        return _looked_up(mechanism)
    raise TypeError(
        f"mechanism: got {type(mechanism).__name__}, expected a name such as 'lssar' or a softfocus.Mechanism"
    )


def check_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    enable_gqa: bool,
    names: tuple[str, str] = ("key", "value"),
    paged: bool = False,
) -> None:
    """Shapes, dtypes and devices of query [B, H, Lq, D], key [B, Hk, Lk, D] and value [B, Hk, Lk,
    Dv].

    Args:
        names: what the caller calls key and value.
        paged: they lie in pages [pages, Hk, page size, D].
    """
    check_flag("enable_gqa", enable_gqa)
    key_name, value_name = names
    for name, x in (("query", query), (key_name, key), (value_name, value)):
        check_class(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name}: got shape {_shape(x)}, expected four dimensions "
                f"{_PAGES if paged and x is not query else '[batch, heads, length, head_dim]'}; "
                f"unsqueeze what is missing"
            )
        if x.dtype not in FLOATING:
            raise TypeError(f"{name}: got dtype {x.dtype}, expected one of {', '.join(map(str, FLOATING))}")
    for name, x in ((key_name, key), (value_name, value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, expected the query's {query.dtype}")
        if x.device != query.device:
            raise ValueError(f"{name}: is on {x.device}, expected the query's device {query.device}")
        if not paged and x.size(0) != query.size(0):
            pages = "; if these are pages, pass page_table" if name == "key_cache" else ""
            raise ValueError(
                f"{name}: got batch {x.size(0)} in {_shape(x)}, expected the query's {query.size(0)}{pages}"
            )
    if key.size(-1) != query.size(-1) or query.size(-1) == 0:
        raise ValueError(f"{key_name}: got head_dim {key.size(-1)}, expected the query's {query.size(-1)}, at least 1")
    if value.shape[:3] != key.shape[:3]:
        same = "pages, heads and page size" if paged else "batch, heads and length"
        raise ValueError(f"{value_name}: got {_shape(value)}, expected the {same} of {key_name} {_shape(key)}")
    if value.size(-1) == 0:
        raise ValueError(f"{value_name}: got head_dim 0, expected at least 1")
    heads, key_heads = query.size(1), key.size(1)
    if not heads:
        raise ValueError(f"query: got 0 heads in {_shape(query)}, expected at least 1")
    divides = key_heads > 0 and heads % key_heads == 0
    if heads != key_heads and not enable_gqa and (divides or not paged):
        raise ValueError(
            f"{key_name}: got {key_heads} heads where query has {heads}; pass enable_gqa=True for "
            f"grouped-query attention"
        )
    if not divides:
        layout = f" in {_shape(key)}; expected {_PAGES}: other libraries keep [pages, page size, heads, head_dim]"
        raise ValueError(
            f"query: got {heads} heads, expected a multiple of the {key_name}'s {key_heads}{layout if paged else ''}"
        )


_TRACERS = ("torch._subclasses.", "torch.distributed._functional_collectives")
"""Modules of the tensors that torch.compile and torch.export trace with, and of those that wait for
a collective.
"""
_INSTEAD = {
    "DTensor": "pass its .to_local() (or .full_tensor()): softfocus does not know how heads and lengths are sharded",
    "NestedTensor": "pad it and pass key_mask, or pack it and pass document_ids",
    "CausalBias": "only the attn_mask of softfocus.attention may be one",
}


def check_class(name: str, x: object) -> None:
    """A plain, dense tensor. A subclass may mean something else by its memory, and torch would not
    object.
    """
    kind = type(x)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {kind.__name__}, expected a torch.Tensor")
    if kind in (Tensor, torch.nn.Parameter):
        if x.is_nested:
            raise TypeError(f"{name}: got a nested tensor, expected a dense one; {_INSTEAD['NestedTensor']}")
    elif not kind.__module__.startswith(_TRACERS):
        instead = _INSTEAD.get(kind.__name__, "pass .as_subclass(torch.Tensor) if its memory holds its numbers")
        raise TypeError(
            f"{name}: got a {kind.__module__}.{kind.__qualname__}, expected a plain torch.Tensor; {instead}"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}, expected torch.strided; call .to_dense() first")


def causal_bias(attn_mask: object, query: Tensor, key: Tensor) -> str | None:
    """UPPER_LEFT or LOWER_RIGHT for PyTorch's ``CausalBias``, whose memory is never written; None
    for anything else.

    The class is known by its name: importing it imports torch's compiler.
    """
    kind = type(attn_mask)
    if (kind.__module__, kind.__name__) != ("torch.nn.attention.bias", "CausalBias"):
        return None
    lengths = (attn_mask.seq_len_q, attn_mask.seq_len_kv)  # type: ignore[attr-defined]
    if lengths != (query.size(2), key.size(2)):
        raise ValueError(
            f"attn_mask: got a CausalBias of {list(lengths)}, expected [query length, key length] = "
            f"{[query.size(2), key.size(2)]}"
        )
    return str(attn_mask.variant.name)  # type: ignore[attr-defined]


def check_tensor(name: str, x: object, device: torch.device) -> None:
    """A plain, dense tensor on the query's device."""
    check_class(name, x)
    assert isinstance(x, Tensor)
    if x.device != device:
        raise ValueError(f"{name}: is on {x.device}, expected the query's device {device}")


_warned_of_scale = False


def scale_of(scale: object, mechanism: Mechanism, head_dim: int) -> float:
    """A finite number; a warning, once, where it is softmax's 1/sqrt(d) in place of a mechanism's
    log(d) or 1.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(
            f"scale: got {type(scale).__name__}, expected a Python number; what is learned goes into head_scale"
        )
    if not -1e38 < scale < 1e38:  # NaN too; a comparison that torch.compile can trace
        raise ValueError(f"scale: got {scale}, expected a finite number")
    global _warned_of_scale
    of_softmax = abs(scale * math.sqrt(head_dim) - 1.0) < 1e-6
    if of_softmax and mechanism.scale != "1/sqrt(d)" and head_dim > 1 and not _warned_of_scale:
        _warned_of_scale = True  # first: where warnings are errors, the next line does not return
        warn(
            f"softfocus: scale is 1/sqrt(d), softmax's factor, and takes the place of {mechanism.scale}, "
            "with which this mechanism is defined; leave scale out",
            UserWarning,
        )
    return float(scale)


def check_broadcast(name: str, x: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask or bias as a 4-D tensor that broadcasts to [B, H, Lq, Lk]."""
    target = (query.size(0), query.size(1), query.size(2), key.size(2))
    check_tensor(name, x, query.device)
    if 2 <= x.dim() <= 4:
        full = x[(None,) * (4 - x.dim())]
        # Not `have in (1, want)`: torch.compile answers that without comparing a symbolic size
        if all(have == 1 or have == want for have, want in zip(full.shape, target, strict=True)):
            return full
    padding = name == "attn_mask" and x.shape == (key.size(0), key.size(2))
    raise ValueError(
        f"{name}: got shape {_shape(x)}, expected one that broadcasts to [batch, heads, query length, key length] = "
        f"{list(target)}{'; a mask of padding [batch, key length] is key_mask' if padding else ''}"
    )


def check_keys(name: str, x: Tensor, key: Tensor) -> None:
    """A tensor with one entry a key: [B, Lk]."""
    check_tensor(name, x, key.device)
    if x.shape != (key.size(0), key.size(2)):
        one_for_all = x.shape == (1, key.size(2))
        remedy = f"; if it holds for the whole batch, pass {name}.expand({key.size(0)}, -1)" if one_for_all else ""
        raise ValueError(
            f"{name}: got shape {_shape(x)}, expected [batch, key length] = [{key.size(0)}, {key.size(2)}]{remedy}"
        )


def check_key_mask(key_mask: Tensor, key: Tensor) -> None:
    """bool [B, Lk], True where the key is real."""
    check_keys("key_mask", key_mask, key)
    if key_mask.dtype != torch.bool:
        raise TypeError(
            f"key_mask: got dtype {key_mask.dtype}, expected torch.bool, True where the key is real; if 1 marks a real "
            "key, as in a tokenizer's attention_mask, pass key_mask.bool()"
        )


def _holds_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def document_ids_of(document_ids: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """integer [B, Lk], with no more queries than keys; in a dtype that torch can compare."""
    check_keys("document_ids", document_ids, key)
    if not _holds_integers(document_ids):
        raise TypeError(f"document_ids: got dtype {document_ids.dtype}, expected integers")
    if query.size(2) > key.size(2):
        raise ValueError(
            f"document_ids: got {query.size(2)} queries for {key.size(2)} keys; the queries are taken to be the last "
            "keys, of which there must be enough"
        )
    return document_ids.long() if document_ids.dtype in (torch.uint16, torch.uint32, torch.uint64) else document_ids


def check_per_head(name: str, x: Tensor, query: Tensor) -> None:
    """Floating [H]."""
    if isinstance(x, Tensor):
        check_class(name, x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = f"dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"{name}: got {got}, expected a floating-point tensor [heads]; a constant belongs into the mechanism"
        )
    if x.shape != (query.size(1),):
        raise ValueError(f"{name}: got shape {_shape(x)}, expected [heads] = [{query.size(1)}]")
    check_tensor(name, x, query.device)


def check_learned(head_scale: Tensor | None, power: Tensor | None, query: Tensor, mechanism: Mechanism) -> None:
    """The tensors with one number a head; a power for mechanisms that re-weight."""
    if head_scale is not None:
        check_per_head("head_scale", head_scale, query)
    if power is not None:
        check_per_head("power", power, query)
        if mechanism.power is None:
            raise ValueError(
                "power: given, but the mechanism does not re-weight; wrap it in softfocus.sharpened() first"
            )


def check_cache(query: Tensor, key_cache: Tensor, lengths: Tensor, page_table: Tensor | None) -> None:
    """Integers [B] and [B, n]."""
    integers = [("lengths", lengths, "[batch]")]
    if page_table is not None:
        integers.append(("page_table", page_table, "[batch, pages of a sequence]"))
    for name, x, shape in integers:
        check_tensor(name, x, query.device)
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: got dtype {x.dtype}, expected torch.int32 or torch.int64")
        if x.dim() != shape.count(",") + 1 or x.size(0) != query.size(0):
            raise ValueError(f"{name}: got shape {_shape(x)}, expected {shape} with batch {query.size(0)}")
    if page_table is not None and key_cache.size(2) == 0:
        raise ValueError(f"key_cache: got {_shape(key_cache)}, expected pages of at least one token")


def check_cache_values(key_cache: Tensor, lengths: Tensor, page_table: Tensor | None) -> list[int]:
    """The lengths as numbers. They and the pages within them must point into the cache. Waits for
    the device.
    """
    size, numbers = key_cache.size(2), lengths.tolist()
    capacity = size if page_table is None else size * page_table.size(1)
    for b, length in enumerate(numbers):
        if not 0 <= length <= capacity:
            room = (
                "the tokens that key_cache holds" if page_table is None else f"page_table {_shape(page_table)} x {size}"
            )
            raise ValueError(f"lengths[{b}]: got {length}, expected 0 to {capacity}, {room}")
    if page_table is None:
        return numbers
    pages = key_cache.size(0)
    for b, (length, table) in enumerate(zip(numbers, page_table.tolist(), strict=True)):
        for j, page in enumerate(table[: -(-length // size)]):
            if not 0 <= page < pages:
                raise ValueError(f"page_table[{b}, {j}]: got page {page}, expected one of the {pages} of key_cache")
    return numbers


def window_of(window_size: tuple[int, int] | None, is_causal: bool) -> tuple[int, int]:
    """(left, right), -1 for no bound, with causality folded in."""
    check_flag("is_causal", is_causal)
    left, right = -1, -1
    if window_size is not None:
        if not (
            isinstance(window_size, tuple | list)
            and len(window_size) == 2
            and all(isinstance(n, int | torch.SymInt) and not isinstance(n, bool) and n >= -1 for n in window_size)
        ):
            raise ValueError(
                f"window_size: got {window_size!r}, expected (left, right): how many keys on each side of its own "
                "position a query sees, -1 for all; Transformers' sliding_window=W is (W - 1, 0)"
            )
        left, right = (min(n, _WIDEST) for n in window_size)
    return left, 0 if is_causal else right


_WIDEST = 1 << 30
"""Most keys on a side of a window: more than a tensor has, and a sum with a position is still an
int32. The call's own length would be kept by a trace.
"""


def rows_of(rows: Sequence[int] | Tensor | None, query: Tensor) -> Tensor:
    """The numbers of the query rows that were asked for, int64 [R] from 0 on; all of them for
    None.
    """
    length = query.size(2)
    if rows is None:
        return torch.arange(length, device=query.device)
    if not isinstance(rows, Tensor | Sequence) or isinstance(rows, str):
        raise TypeError(f"rows: got {type(rows).__name__}, expected integers [rows], as [-1] or a tensor")
    try:
        chosen = torch.as_tensor(rows, device=query.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"rows: got {rows!r}, expected integers [rows]: {error}") from None
    if not chosen.numel():
        chosen = chosen.long()  # an empty list is a float tensor
    if chosen.dim() != 1 or not _holds_integers(chosen):
        raise TypeError(f"rows: got dtype {chosen.dtype} and shape {_shape(chosen)}, expected integers [rows]")
    chosen = chosen.long()  # in an unsigned dtype -1 would be a large number
    if chosen.is_meta:
        return chosen
    outside = ((chosen < -length) | (chosen >= length)).any()
    if torch.compiler.is_compiling():  # compiled code looks when it runs
        torch._assert_async(~outside, "rows: got a number that no query has, expected -L to L - 1 for L queries")
    elif bool(outside):
        raise ValueError(
            f"rows: got {chosen.min()} to {chosen.max()}, expected numbers from {-length} to {length - 1}: there are "
            f"{length} queries"
        )
    return chosen % max(1, length)


def check_flag(name: str, x: object) -> None:
    """Refuses what is only truthy, such as "no" or a mask given in a flag's place."""
    one = isinstance(x, Tensor) and x.dtype == torch.bool and x.numel() == 1  # a traced flag
    if not (isinstance(x, bool) or one):
        kind = type(x)
        came = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise TypeError(f"{name}: got {came}, expected True or False")


def check_dropout(dropout_p: float, mechanism: Mechanism) -> None:
    """A probability; none for LASER."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise TypeError(f"dropout_p: got {type(dropout_p).__name__}, expected a probability in [0, 1]")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p: got {dropout_p}, expected a probability in [0, 1]")
    if dropout_p and mechanism.laser:
        raise ValueError(
            f"dropout_p: got {dropout_p} with a LASER mechanism, expected 0: a row whose weights are all dropped would "
            "be log 0; drop out the output instead. Of a Transformers model set the dropout of attention to 0"
        )
