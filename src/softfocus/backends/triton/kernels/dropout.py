"""Which weights dropout keeps: the bits that ``softfocus.dropout`` defines, made where a tile is,
and again in the backward.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
"""As ``softfocus.dropout``, which says why."""
SPAN, LANES = tl.constexpr(64), tl.constexpr(8)
"""As in ``softfocus.dropout``: SPAN columns of a row share LANES counters, each of which gives
eight numbers of 16 bits.
"""


@triton.jit
def kept(inputs, b, h, q_offsets, first, KEYS: tl.constexpr, AXIS: tl.constexpr):
    """bool [Q, K], or [K, Q] where the keys' AXIS is 0: which weights of ``KEYS`` keys from
    ``first`` on, a multiple of that.

    A counter's eight columns lie eight apart, as those of a thread do in a product of tensor cores.
    """
    GROUPS: tl.constexpr = KEYS // SPAN if KEYS > SPAN else 1
    columns = first // SPAN * LANES + tl.arange(0, GROUPS * LANES)
    heads = tl.zeros_like(columns) + (b * inputs.heads + h)
    if AXIS == 1:
        columns, heads, q_offsets = columns[None, :], heads[None, :], q_offsets[:, None]
    else:
        columns, heads, q_offsets = columns[:, None], heads[:, None], q_offsets[None, :]
    # ``Inputs.seed`` is 2^63 + 2 seed + 1
    seed = (inputs.seed >> 1) & 0x3FFFFFFFFFFFFFFF
    w, x, y, z = tl.philox(seed, columns, q_offsets, heads, tl.zeros_like(heads), ROUNDS)
    if KEYS >= SPAN:
        low = tl.join(_kept_of_word(w, inputs.drop_below), _kept_of_word(x, inputs.drop_below))
        high = tl.join(_kept_of_word(y, inputs.drop_below), _kept_of_word(z, inputs.drop_below))
        # bits [Q, GROUPS * LANES, half, word of two, pair of words], or [GROUPS * LANES, Q, ...];
        # column = span * 64 + (4 pair + 2 word + half) * 8 + lane
        bits = tl.join(low, high)
        if AXIS == 1:
            bits = bits.reshape(bits.shape[0], GROUPS, LANES, 2, 2, 2).permute(0, 1, 5, 4, 3, 2)
            bits = bits.reshape(bits.shape[0], KEYS)
        else:
            bits = bits.reshape(GROUPS, LANES, bits.shape[1], 2, 2, 2).permute(0, 5, 4, 3, 1, 2)
            bits = bits.reshape(KEYS, bits.shape[5])
    elif KEYS == SPAN // 2:
        upper = first // KEYS % 2 == 1
        w, x = tl.where(upper, y, w), tl.where(upper, z, x)
        bits = tl.join(_kept_of_word(w, inputs.drop_below), _kept_of_word(x, inputs.drop_below))
        if AXIS == 1:
            bits = bits.permute(0, 3, 2, 1).reshape(bits.shape[0], KEYS)
        else:
            bits = bits.permute(3, 2, 0, 1).reshape(KEYS, bits.shape[1])
    else:
        tl.static_assert(KEYS == SPAN // 4)
        quarter = first // KEYS % 4
        w, y = tl.where(quarter == 1, x, w), tl.where(quarter == 3, z, y)
        bits = _kept_of_word(tl.where(quarter >= 2, y, w), inputs.drop_below)
        if AXIS == 1:
            bits = bits.permute(0, 2, 1).reshape(bits.shape[0], KEYS)
        else:
            bits = bits.permute(2, 0, 1).reshape(KEYS, bits.shape[1])
    return bits


@triton.jit
def _kept_of_word(word, dropped):
    """What the lower and the upper 16 bits of a word decide, in a last dimension."""
    return tl.join((word & 0xFFFF) >= dropped, (word >> 16) >= dropped)
