"""``torch.nn``'s attention module with any mechanism in place of softmax."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softfocus import validation
from softfocus.catalog import LEARNABLE, learned_parameters, name_of
from softfocus.functional import HIDDEN, attention, may_be_added
from softfocus.mechanism import Mechanism
from softfocus.row_weights import weights

__all__ = ["MultiheadAttention"]


class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with a mechanism: the same arguments, masks, parameters and
    state dict.

    Its masks are PyTorch's: in a bool ``key_padding_mask`` or ``attn_mask`` True hides a key, the
    opposite of :func:`softfocus.attention`. A floating mask is added to the scores, and hides keys
    at -5,000 or lower.

    The differences are: ``attn_mask`` is applied also if ``is_causal`` is true. The output of a row
    that sees no key is the output projection's bias, not NaN. The returned weights are those before
    dropout. It has no fast path, and ``torch.nn.TransformerEncoder`` and
    ``TransformerEncoderLayer`` do not use theirs with it, which would run softmax.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
            device, dtype: as in ``torch.nn.MultiheadAttention``. LASER refuses dropout.
        mechanism: a name of :func:`softfocus.mechanisms`, a combination, or a
            :class:`softfocus.Mechanism`. A learned factor or power that belongs to it, such as
            SSMax's, is a parameter ``softfocus_head_scale`` or ``softfocus_power`` [num_heads].

    Raises:
        ValueError, TypeError: an argument that does not fit.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: str | Mechanism = "lssar",
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.mechanism = validation.mechanism_of(mechanism)
        validation.check_dropout(self.dropout, self.mechanism)
        weight = self.out_proj.weight
        self._initial = learned_parameters(mechanism)
        for name, initial in self._initial.items():
            parameter = torch.full((self.num_heads,), initial, device=weight.device, dtype=weight.dtype)
            self.register_parameter(f"softfocus_{name}", torch.nn.Parameter(parameter))
        # torch's encoders check this before they use their fused softmax kernel
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        """torch's, which looks at the flag that ``__init__`` sets; and the mechanism's own."""
        flag, self._qkv_same_embed_dim = self._qkv_same_embed_dim, self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = flag
        for name, initial in getattr(self, "_initial", {}).items():  # torch's __init__ calls it, too
            torch.nn.init.constant_(getattr(self, f"softfocus_{name}"), initial)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``torch.nn.MultiheadAttention.forward``. ``need_weights=True``, the default, takes
        memory O(L^2).

        Returns:
            out, shaped as the query; and the weights [N, L, S], or [N, num_heads, L, S] with
            ``average_attn_weights=False``, or None.

        Raises:
            ValueError, TypeError: an argument that does not fit.
        """
        if isinstance(query, Tensor) and query.is_nested:
            raise TypeError(
                "query: got a nested tensor, expected a dense one; build torch.nn.TransformerEncoder with "
                "enable_nested_tensor=False, or set encoder.use_nested_tensor = False in one that is built"
            )
        for name, x, size in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            validation.check_class(name, x)
            if x.dim() != query.dim() or x.dim() not in (2, 3) or x.size(-1) != size:
                raise ValueError(
                    f"{name}: got shape {list(x.shape)}, expected [length, batch, {size}], [batch, length, {size}] "
                    f"with batch_first=True, or [length, {size}] without a batch; query, key and value alike"
                )
        flags = {"need_weights": need_weights, "average_attn_weights": average_attn_weights, "is_causal": is_causal}
        for name, flag in flags.items():
            validation.check_flag(name, flag)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal: is a hint about attn_mask, which is None; pass the mask as well")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if key.size(0) != query.size(0):
            raise ValueError(f"key: got batch {key.size(0)}, expected the query's, {query.size(0)}")
        if value.shape[:2] != key.shape[:2]:
            of_batch = "batch {} and length {}" if batched else "length {1}"
            came, expected = (of_batch.format(*x.shape[:2]) for x in (value, key))
            raise ValueError(f"value: got {came}, expected the key's, {expected}")
        q, k, v = self._projected(query, key, value)
        more = k.size(2) - key.size(1)  # keys of add_bias_kv and add_zero_attn, which no mask hides
        masks: dict[str, Any] = {
            **_of_padding(key_padding_mask, key, more, batched),
            "attn_mask": _of_attn_mask(attn_mask, (query.size(0), self.num_heads, query.size(1), key.size(1)), more),
            **{name: getattr(self, f"softfocus_{name}", None) for name in LEARNABLE},
            "mechanism": self.mechanism,
        }
        out = attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, **masks)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        shown = weights(q, k, **masks).to(out.dtype) if need_weights else None
        if shown is not None and average_attn_weights:
            shown = shown.mean(1)
        if not batched:
            return out[0], None if shown is None else shown[0]
        return out if self.batch_first else out.transpose(0, 1), shown

    def extra_repr(self) -> str:
        """The mechanism."""
        return f"mechanism={name_of(self.mechanism)!r}"

    def _projected(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value [N, H, L, d]."""
        if self.in_proj_weight is None:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            matrices = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, matrix, bias) for x, matrix, bias in zip(inputs, matrices, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, bias.expand(x.size(0), 1, -1)], 1) for x, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        return q, k, v


def _of_padding(mask: Tensor | None, key: Tensor, more: int, batched: bool) -> dict[str, Tensor | None]:
    """key_padding_mask [N, S], or [S] without a batch, as arguments of ``attention()``: which keys
    are real, and what is added to the scores. key is [N, S, E].
    """
    if mask is None:
        return {}
    validation.check_tensor("key_padding_mask", mask, key.device)
    expected = key.shape[:2] if batched else key.shape[1:2]
    if mask.shape != expected:
        sizes = "[batch, key length]" if batched else "[key length]"
        raise ValueError(f"key_padding_mask: got shape {list(mask.shape)}, expected {sizes} = {list(expected)}")
    mask = mask if batched else mask[None]
    if mask.dtype == torch.bool:
        return {"key_mask": F.pad(~mask, (0, more), value=True)}
    _check_dtype("key_padding_mask", mask)
    real = ~(mask <= HIDDEN)  # a NaN is no hidden key: it makes the row NaN
    return {
        "key_mask": F.pad(real, (0, more), value=True),
        "bias": F.pad(mask.masked_fill(~real, 0.0), (0, more))[:, None, None],
    }


def _of_attn_mask(mask: Tensor | None, sizes: tuple[int, int, int, int], more: int) -> Tensor | None:
    """attn_mask [L, S] or [N * H, L, S] as an argument of ``attention()``: True where a key may be
    seen, and [L, S] or [N, H, L, S]. ``sizes`` is (N, H, L, S).
    """
    if mask is None:
        return None
    validation.check_class("attn_mask", mask)
    batch, heads, *lengths = sizes
    fits = all(have == 1 or have == want for have, want in zip(mask.shape[-2:], lengths, strict=False))
    # [H, L, S] would be ambiguous where N is H: torch refuses it, too
    if not fits or mask.dim() not in (2, 3) or (mask.dim() == 3 and mask.size(0) != batch * heads):
        of_samples = fits and mask.dim() == 3 and mask.size(0) == batch
        raise ValueError(
            f"attn_mask: got shape {list(mask.shape)}, expected [query length, key length] = {lengths} or "
            f"[batch * heads, query length, key length] = {[batch * heads, *lengths]}"
            f"{f'; of one mask per sample pass attn_mask.repeat_interleave({heads}, 0)' if of_samples else ''}"
        )
    _check_dtype("attn_mask", mask)
    mask = ~mask if mask.dtype == torch.bool else mask
    if more:
        mask = mask.expand(*mask.shape[:-1], lengths[1])
    mask = F.pad(mask, (0, more), value=mask.dtype == torch.bool)
    return mask if mask.dim() == 2 else mask.unflatten(0, (-1, heads))


def _check_dtype(name: str, mask: Tensor) -> None:
    """Here, because True shows a key in what ``attention()`` says of its own masks."""
    if mask.dtype != torch.bool and not may_be_added(mask):
        raise TypeError(
            f"{name}: got dtype {mask.dtype}, expected torch.bool, where True hides a key, or floating point of "
            f"16 bits or more; if 1 marks a visible key, pass {name} == 0"
        )
