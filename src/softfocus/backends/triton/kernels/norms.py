"""1 / |x| of every query or key, for cosine similarity."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import rows as of
from softfocus.backends.triton.kernels import sight as see


@triton.jit
def norms(x, to, heads, length, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """``rows.reciprocal_norm`` of every row, [B, H, L, 1]."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = of.matrix(x, see.head_of(x, b, h), rows, tl.arange(0, WIDTH), length, width).to(tl.float32)
    tl.store(see.head_of(to, b, h) + rows * to.l, of.reciprocal_norm(part), mask=rows < length)
