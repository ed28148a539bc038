"""Which weights dropout keeps: the bits that ``softfocus.dropout`` defines. Every kernel generates
them for its tile, and the backward generates them again.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
"""As in ``softfocus.dropout``, whose docstring gives the reason."""
SPAN_KEYS, SPAN_COUNTERS = tl.constexpr(64), tl.constexpr(8)
"""As in ``softfocus.dropout``: SPAN_KEYS columns (keys) of a row share SPAN_COUNTERS counters. A
counter gives four words of 32 bits, which are eight numbers of 16 bits.
"""


@triton.jit
def kept(inputs, b, h, q_offsets, first, KEYS: tl.constexpr, KEY_AXIS: tl.constexpr):
    """Whether dropout keeps each weight: bool [Q, KEYS], or [KEYS, Q] where KEY_AXIS, the keys'
    axis, is 0.

    The keys are the KEYS keys from ``first`` on, and ``first`` is a multiple of KEYS. A counter's
    eight columns lie eight apart, as those of a thread do in a product of tensor cores.
    """
    SPANS: tl.constexpr = KEYS // SPAN_KEYS if KEYS > SPAN_KEYS else 1
    counters = first // SPAN_KEYS * SPAN_COUNTERS + tl.arange(0, SPANS * SPAN_COUNTERS)  # [SPANS * SPAN_COUNTERS]
    heads = tl.zeros_like(counters) + (b * inputs.heads + h)  # [SPANS * SPAN_COUNTERS]
    # [1, SPANS * SPAN_COUNTERS] and [Q, 1], or [SPANS * SPAN_COUNTERS, 1] and [1, Q]
    if KEY_AXIS == 1:
        counters, heads, q_offsets = counters[None, :], heads[None, :], q_offsets[:, None]
    else:
        counters, heads, q_offsets = counters[:, None], heads[:, None], q_offsets[None, :]
    # ``Inputs.seed`` is 2^63 + 2 seed + 1, so that Triton compiles one kernel for all seeds. A seed
    # is below 2^62: the mask removes the 2^63
    seed = (inputs.seed >> 1) & 0x3FFFFFFFFFFFFFFF
    # Words of 32 bits: [Q, SPANS * SPAN_COUNTERS], or [SPANS * SPAN_COUNTERS, Q]
    w, x, y, z = tl.philox(seed, counters, q_offsets, heads, tl.zeros_like(heads), ROUNDS)
    if KEYS >= SPAN_KEYS:
        low = tl.join(_kept_of_word(w, inputs.drop_below), _kept_of_word(x, inputs.drop_below))
        high = tl.join(_kept_of_word(y, inputs.drop_below), _kept_of_word(z, inputs.drop_below))
        # [Q, SPANS * SPAN_COUNTERS, part, word, pair], or [SPANS * SPAN_COUNTERS, Q, ...]: each
        # tl.join appends an axis. A part is the lower or the upper 16 bits, and the pairs of words
        # are (w, x) and (y, z). The last axes are brought into the order of the columns:
        # column in tile = span * SPAN_KEYS + (4 pair + 2 word + part) * SPAN_COUNTERS + lane,
        # where the lane is the counter's place in its span
        keep = tl.join(low, high)
        if KEY_AXIS == 1:
            keep = keep.reshape(keep.shape[0], SPANS, SPAN_COUNTERS, 2, 2, 2).permute(0, 1, 5, 4, 3, 2)
            keep = keep.reshape(keep.shape[0], KEYS)  # [Q, KEYS]
        else:
            keep = keep.reshape(SPANS, SPAN_COUNTERS, keep.shape[1], 2, 2, 2).permute(0, 5, 4, 3, 1, 2)
            keep = keep.reshape(KEYS, keep.shape[5])  # [KEYS, Q]
    elif KEYS == SPAN_KEYS // 2:  # one pair of words
        upper = first // KEYS % 2 == 1
        first_word, second_word = tl.where(upper, y, w), tl.where(upper, z, x)
        # [Q, SPAN_COUNTERS, part, word], or [SPAN_COUNTERS, Q, part, word]:
        # column in tile = (2 word + part) * SPAN_COUNTERS + lane
        keep = tl.join(_kept_of_word(first_word, inputs.drop_below), _kept_of_word(second_word, inputs.drop_below))
        if KEY_AXIS == 1:
            keep = keep.permute(0, 3, 2, 1).reshape(keep.shape[0], KEYS)
        else:
            keep = keep.permute(3, 2, 0, 1).reshape(KEYS, keep.shape[1])
    else:  # one word
        tl.static_assert(KEYS == SPAN_KEYS // 4)
        quarter = first // KEYS % 4
        of_first_pair, of_second_pair = tl.where(quarter == 1, x, w), tl.where(quarter == 3, z, y)
        word = tl.where(quarter >= 2, of_second_pair, of_first_pair)
        # [Q, SPAN_COUNTERS, part], or [SPAN_COUNTERS, Q, part]:
        # column in tile = part * SPAN_COUNTERS + lane
        keep = _kept_of_word(word, inputs.drop_below)
        if KEY_AXIS == 1:
            keep = keep.permute(0, 2, 1).reshape(keep.shape[0], KEYS)
        else:
            keep = keep.permute(2, 0, 1).reshape(KEYS, keep.shape[1])
    return keep


@triton.jit
def _kept_of_word(word, drop_below):
    """Whether the lower and the upper 16 bits of words [...] keep their weights, bool [..., 2]."""
    return tl.join((word & 0xFFFF) >= drop_below, (word >> 16) >= drop_below)
