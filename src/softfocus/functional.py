"""``attention()``: one call shaped like ``torch.nn.functional.scaled_dot_product_attention``, for
every mechanism.
"""

from types import NoneType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from softfocus import dispatch, ops, validation
from softfocus.contract import Call, Dropout, RowStatistics
from softfocus.dispatch import Explanation
from softfocus.mechanism import Mechanism, default_scale
from softfocus.visibility import Visibility
from softfocus.warn import warn

__all__ = ["HIDDEN", "RowStatistics", "attention", "explain"]

HIDDEN = -5.0e3
"""Entries of a floating attn_mask at or below this hide their key. Models write -inf, finfo.min,
half of it, -1e9 or -1e4 for "hidden": softmax's exp is then exactly zero. As plain numbers they
would count as visible keys in N.

The limit is half way between 0 and -1e4. bfloat16 rounds -1e4 to -9984, and models add position
biases to their masks: learned ones (T5, Swin) are within some hundred. ALiBi's steepest heads reach
-5,000 at 5,000 to 10,000 tokens, and no limit separates their far keys from hidden ones. Pass ALiBi
as ``bias``, which hides none.
"""


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mechanism: str | Mechanism = "lssar",
    window_size: tuple[int, int] | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    bias: Tensor | None = None,
    head_scale: Tensor | None = None,
    power: Tensor | None = None,
    return_statistics: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mechanism: str | Mechanism = "lssar",
    window_size: tuple[int, int] | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    bias: Tensor | None = None,
    head_scale: Tensor | None = None,
    power: Tensor | None = None,
    return_statistics: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, RowStatistics]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mechanism: str | Mechanism = "lssar",
    window_size: tuple[int, int] | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    bias: Tensor | None = None,
    head_scale: Tensor | None = None,
    power: Tensor | None = None,
    return_statistics: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, RowStatistics]:
    """Attention by any mechanism of the algebra.

    A query sees the keys that *all* of the masking arguments allow; N_i, the number of keys that
    row i sees, is counted from them. A row that sees no key is zero and passes no gradient. NaN and
    infinities that a row cannot see never affect it. Those that it sees make it NaN, and so does a
    NaN in a floating mask or bias. One exception is fused decoding of re-weighted rows, which does
    not read a value of negligible weight (docs/numerics.md). Scores, weights and statistics are
    computed in float32 (float64 for float64), but for three exceptions on GPUs (docs/precision.md).

    Args:
        query: [B, H, Lq, D], float64, float32, bfloat16 or float16.
        key: [B, Hk, Lk, D], same dtype and device. Hk = H, or a divisor of it with ``enable_gqa``.
        value: [B, Hk, Lk, Dv]. Dv need not be D, but at least 1.
        attn_mask: bool, True where the key may be seen, or floating: added to the scores, and
            hiding keys where it is -5,000 or lower (:data:`HIDDEN`; position biases that go so far,
            as ALiBi's may, are a ``bias``). Broadcastable to [B, H, Lq, Lk]. A floating mask is
            split into a bool and an additive tensor of its size, unless it only hides, on a CPU;
            with ``bias`` as well, into their sum, in float32 at least. Or a
            ``torch.nn.attention.bias.CausalBias``: ``causal_upper_left`` is SDPA's ``is_causal``,
            ``causal_lower_right`` the ``is_causal`` here.
        dropout_p: probability with which a weight is dropped (the others grow by 1 / (1 - p)), as a
            multiple of 2^-16; 0 when not training. Which weights are dropped follows from a seed
            drawn from torch's CPU generator, on every backend and device alike
            (:mod:`softfocus.dropout`). In code that inductor compiles, the seed is inductor's own
            random number. LASER refuses it.
        is_causal: a query sees no later key. Aligned **bottom-right**: the last query is at the
            last key, as a KV cache needs. SDPA's own ``is_causal`` is aligned top-left; the two
            agree where Lq = Lk.
        scale: replaces the mechanism's d-dependent factor 1/sqrt(d), log(d) or 1; the length scale
            stays. If softmax's 1/sqrt(d) replaces another factor, there is one warning.
        enable_gqa: grouped-query attention: head h of the query uses key head h // (H / Hk).
        mechanism: a name of :func:`softfocus.mechanisms`, a combination (``"laser(lssar)"``,
            ``"sharpened(lssa, 3)"``), or a :class:`softfocus.Mechanism`. The default is LSSAR with
            p = 15, not softmax.
        window_size: (left, right), how many keys on each side of its own position a query sees, -1
            for all.
        key_mask: bool [B, Lk], True where the key is real, False for padding: as ``attn_mask``, the
            opposite of ``torch.nn.MultiheadAttention``'s key_padding_mask.
        document_ids: integer [B, Lk]; a query sees the keys of its own document only (packed
            sequences). The queries are the last Lq of the keys. From lengths:
            :func:`softfocus.document_ids_from_lengths`.
        bias: floating and finite, added to the scores after scaling, with gradient. Broadcastable
            to [B, H, Lq, Lk]. It hides no key, however low; ``attn_mask`` does.
        head_scale: [H], multiplies the scores, with gradient: the learned factor of SSMax, QK-norm
            and Shen's ReLU. Without it these mechanisms use 1.
        power: [H], replaces the mechanism's power, with gradient. Values below 1 have unbounded
            gradients.
        return_statistics: also return :class:`RowStatistics`, without gradient.
        backend: "auto", or one by name, which then never falls back; :func:`softfocus.explain` says
            which backend "auto" chooses. "reference" is differentiable twice.

    Returns:
        out [B, H, Lq, Dv] in the query's dtype; with ``return_statistics`` the pair (out,
        RowStatistics).

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it.
        NotImplementedError: a tensor has a forward-mode tangent, which only the reference supports.

    Source: arXiv 2501.13428 (softplus attention and the whole catalogue of its tables), arXiv
    2411.03493 (LASER).
    """
    layout: tuple[Any, ...] | None = None
    if (
        attn_mask is key_mask is document_ids is bias is head_scale is power is None
        and return_statistics is False
        and type(dropout_p) in (float, int)
        and not dropout_p
        and ops.can_bypass_dispatcher(query, key, value)
    ):
        layout = _layout(query, key, value, is_causal, scale, enable_gqa, mechanism, window_size, backend)
        if runner := ops.runners.get(layout):
            return runner(query, key, value)
    validation.check_flag("return_statistics", return_statistics)
    call = validated_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, mechanism=mechanism,
        window_size=window_size, key_mask=key_mask, document_ids=document_ids, bias=bias, head_scale=head_scale,
        power=power,
    )  # fmt: skip
    chosen = dispatch.module_for(dispatch.choose(call, backend), backend)
    if layout:
        ops.add_runner(call, chosen, layout)
    if dropout_p:
        call = call._replace(dropout=Dropout(dropout_p, torch.randint(2**62, (), device="cpu")))
    out, rows = ops.run(call, chosen)
    return (out, RowStatistics(*rows[:4].unbind(0))) if return_statistics else out


def _layout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mechanism: str | Mechanism,
    window_size: tuple[int, int] | None,
    backend: str,
) -> tuple[Any, ...] | None:
    """The layout of a call without optional tensors: all that decides how it is validated and
    dispatched.

    None if an argument is not of exactly these types: a list is mutable, and True == 1 would share
    a key.
    """
    device = None if query.is_cpu and key.is_cpu and value.is_cpu else query.device
    if (
        not (device is None or (device.type == "cuda" and key.device == value.device == device))
        or torch.is_autocast_enabled("cpu" if device is None else "cuda")
        or type(is_causal) is not bool
        or type(enable_gqa) is not bool
        or type(scale) not in (float, int, NoneType)
        or type(mechanism) not in (str, Mechanism)
        or type(backend) is not str
        or not (window_size is None or (type(window_size) is tuple and all(type(n) is int for n in window_size)))
    ):
        return None
    return (
        query.dtype, key.dtype, value.dtype, query.shape, key.shape, value.shape,
        query.stride(), key.stride(), value.stride(), torch.get_num_threads(),
        is_causal, scale, enable_gqa, mechanism, window_size, backend, device,
    )  # fmt: skip


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    return_statistics: bool = False,
    backend: str = "auto",
    **keywords: Any,
) -> Explanation:
    """Which backend ``attention()`` with the same arguments runs on, and why the others were not
    chosen. Print it.

    Raises:
        ValueError, TypeError: as ``attention()``.
    """
    validation.check_flag("return_statistics", return_statistics)
    return dispatch.account(validated_call(query, key, value, *arguments, **keywords), backend)


def validated_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mechanism: str | Mechanism = "lssar",
    window_size: tuple[int, int] | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    bias: Tensor | None = None,
    head_scale: Tensor | None = None,
    power: Tensor | None = None,
) -> Call:
    """The :class:`Call` of the arguments of ``attention()``, validated. The seed of dropout is not
    drawn yet.
    """
    algebra = validation.mechanism_of(mechanism)
    query, key, value = _autocast(query, key, value)
    validation.check_tensors(query, key, value, enable_gqa)
    validation.check_dropout(dropout_p, algebra)
    left, right = validation.window_of(window_size, is_causal)
    if variant := validation.causal_bias(attn_mask, query, key):
        attn_mask, right = _of_causal_bias(variant, query, key, right)
    mask, bias = _mask_and_bias(attn_mask, bias, query, key)
    if key_mask is not None:
        validation.check_key_mask(key_mask, key)
    if document_ids is not None:
        document_ids = validation.document_ids_of(document_ids, query, key)
    validation.check_learned(head_scale, power, query, algebra)
    d = query.size(-1)
    scale = default_scale(algebra, d) if scale is None else validation.scale_of(scale, algebra, d)
    visibility = Visibility(query.size(2), key.size(2), left, right, mask, key_mask, document_ids)
    return Call(query, key, value, visibility, algebra, scale, bias, head_scale, power, Dropout(dropout_p))


def _autocast(*tensors: Any) -> tuple[Tensor, ...]:
    """As SDPA does inside autocast, casts floating inputs other than float64 to autocast's
    dtype.
    """
    device_type = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not ops.autocasts(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def _of_causal_bias(variant: str, query: Tensor, key: Tensor, right: int) -> tuple[Tensor | None, int]:
    """A CausalBias as a bool mask, or as the window's right bound, which costs no memory."""
    if variant == "LOWER_RIGHT" or query.size(2) == key.size(2):
        return None, 0
    return torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril(), right


def may_be_added(x: Tensor) -> bool:
    """float8 may not: torch neither compares nor adds it."""
    return x.is_floating_point() and x.dtype.itemsize > 1


def _unexpanded(given: Tensor, full: Tensor) -> Tensor:
    """``full``, a view of a mask or bias, with its expanded dimensions of size 1, so that what is
    computed from it is not expanded.

    Not where a graph is recorded, which may run on tensors that are not expanded, and not where a
    gradient of the given shape may be asked for.
    """
    if 0 not in full.stride() or not ops.can_bypass_dispatcher(given):
        return full
    return full[tuple(slice(0, 1) if step == 0 else slice(None) for step in full.stride())]


def _mask_and_bias(
    attn_mask: Tensor | None, bias: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The mask (bool) and the bias (floating) that ``attn_mask`` and ``bias`` stand for."""
    mask = None
    if bias is not None:
        bias = _unexpanded(bias, validation.check_broadcast("bias", bias, query, key))
        if not may_be_added(bias):
            raise TypeError(
                f"bias: got dtype {bias.dtype}, expected floating point of 16 bits or more; a bool mask is attn_mask"
            )
    if attn_mask is not None:
        attn_mask = _unexpanded(attn_mask, validation.check_broadcast("attn_mask", attn_mask, query, key))
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        elif may_be_added(attn_mask):
            hidden = attn_mask <= HIDDEN
            mask = ~hidden
            added = attn_mask.masked_fill(hidden, 0.0)
            # Most masks hold only 0 and "hidden". On a GPU the question would wait for the device
            if attn_mask.is_cpu and ops.can_bypass_dispatcher(attn_mask):
                if not added.any():
                    return mask, bias
                if not hidden.any() and torch.equal(added, added.bool().to(added.dtype)):
                    warn(  # softfocus.nn gets here, too
                        "attn_mask: got only 0 and 1 in a floating mask, which are added to the scores and hide "
                        "nothing; if 1 marks a visible key, pass attn_mask == 1 to softfocus.attention(), and "
                        "attn_mask == 0 to softfocus.nn.MultiheadAttention, where True hides",
                        UserWarning,
                    )
            if bias is not None:  # in float32 at least: the bias's gradient sums this tensor's gradient
                wide = torch.promote_types(torch.promote_types(bias.dtype, added.dtype), torch.float32)
                added = bias.to(wide) + added
            bias = added
        else:
            raise TypeError(
                f"attn_mask: got dtype {attn_mask.dtype}, expected torch.bool or floating point of 16 bits or more; "
                "if 1 marks a visible key, pass attn_mask.bool()"
            )
    return mask, bias
