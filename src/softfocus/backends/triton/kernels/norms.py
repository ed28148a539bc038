"""1 / |x| of every query or key, for cosine similarity."""

import triton
import triton.language as tl

from softfocus.backends.triton.kernels import rows as of
from softfocus.backends.triton.kernels import sight as see


@triton.jit
def norms(x, to, unit, own, heads, length, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """``rows.reciprocal_norm`` of every row, [B, H, L, 1]; x / |x| to ``unit`` and ``own`` [B, H, L, D], where given."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    part = of.matrix(x, see.head_of(x, b, h), rows, columns, length, width).to(tl.float32)
    norm = of.reciprocal_norm(part)
    tl.store(see.head_of(to, b, h) + rows * to.l, norm, mask=rows < length)
    if unit is not None:
        part, left = of.resting(part, norm)
        part = part * left[:, None]
        of.store_matrix(unit, see.head_of(unit, b, h), rows, columns, length, width, part)
        if own is not None:
            of.store_matrix(own, see.head_of(own, b, h), rows, columns, length, width, part)
