"""1 / |x| of every query or key, for cosine similarity."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import rows as of
from softfocus.backends.triton.kernels import sight as see


@triton.jit
def norms(x, to, heads, length, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """1 / |x| [B, H, L, 1] for any norm that float32 holds: 0 for a zero vector, NaN where x is not finite."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = of.matrix(x, see.head_of(x, b, h), rows, tl.arange(0, WIDTH), length, width).to(tl.float32)
    largest = tl.max(tl.abs(part), 1)
    zero = largest < 2.0**-126
    over = 1.0 / tl.where(zero, 1.0, largest)
    scaled = part / tl.where(zero, 1.0, largest)[:, None]
    norm = over / tl.sqrt_rn(tl.sum(scaled * scaled, 1))
    norm = tl.where(zero, 0.0, norm)
    sum_of_zeros = tl.sum(part - part, 1)  # NaN where x is not finite
    tl.store(see.head_of(to, b, h) + rows * to.l, norm + sum_of_zeros, mask=rows < length)
