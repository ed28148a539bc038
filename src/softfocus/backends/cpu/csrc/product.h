// The matrix product C (+)= A B on register tiles: C += A B if `add`, else C = A B. B and C have
// rows of whole vectors. A is read element by element, with a stride for rows and one for columns,
// so that it may be transposed. A and C are float; B is float, bfloat16 or float16. Strides are in
// elements. C must not overlap A or B. The register sums start at 0, and C is added at the end: a
// sum of partial sums rounds less than one long sum.
#pragma once

#include <algorithm>

#include "tiling.h"

namespace softfocus {

// The most dimensions of a dot product that panel_dots() adds up in one sum. Longer sums round too
// much: errors of scores of 256 dimensions were two to five times those of the reference
// (docs/performance.md).
constexpr int64_t DOT_DIMS = 64;

// One register tile: A [M, depth], B [depth, VECTORS * W], C [M, VECTORS * W]
template <int M, int VECTORS, typename T>
inline void register_tile(int64_t depth, const float* a, int64_t a_row_stride, int64_t a_column_stride, const T* b,
                          int64_t b_row_stride, float* c, int64_t c_row_stride, bool add) {
  vfloat sums[M][VECTORS];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) sums[m][n] = vfloat{};
  for (int64_t k = 0; k < depth; ++k) {
    vfloat row[VECTORS];
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) row[n] = load(b + k * b_row_stride + n * W);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      vfloat x = splat(a[m * a_row_stride + k * a_column_stride]);
#pragma GCC unroll 16
      for (int n = 0; n < VECTORS; ++n) sums[m][n] += x * row[n];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) {
      float* to = c + m * c_row_stride + n * W;
      store(to, add ? load(to) + sums[m][n] : sums[m][n]);
    }
}

// The same for C [M, vectors * W] of any width: A [M, depth], B [depth, vectors * W]
template <int M, typename T>
inline void product(int64_t vectors, int64_t depth, const float* a, int64_t a_row_stride, int64_t a_column_stride,
                    const T* b, int64_t b_row_stride, float* c, int64_t c_row_stride, bool add) {
  for (; vectors >= PANEL_VECTORS; vectors -= PANEL_VECTORS, b += PANEL_VECTORS * W, c += PANEL_VECTORS * W)
    register_tile<M, PANEL_VECTORS>(depth, a, a_row_stride, a_column_stride, b, b_row_stride, c, c_row_stride, add);
  if (vectors == 1) register_tile<M, 1>(depth, a, a_row_stride, a_column_stride, b, b_row_stride, c, c_row_stride, add);
  if constexpr (PANEL_VECTORS > 2) {
    if (vectors == 2)
      register_tile<M, 2>(depth, a, a_row_stride, a_column_stride, b, b_row_stride, c, c_row_stride, add);
    if (vectors == 3)
      register_tile<M, 3>(depth, a, a_row_stride, a_column_stride, b, b_row_stride, c, c_row_stride, add);
  }
}

// Dot products of M rows [M, dims] with `vectors * W` <= PANEL columns of a panel [dims, PANEL],
// written to C [M, vectors * W]
template <int M>
inline void panel_dots(int64_t vectors, int64_t dims, const float* rows, int64_t row_stride, const float* panel,
                       float* c, int64_t c_row_stride) {
  for (int64_t d = 0; d < dims; d += DOT_DIMS)
    product<M>(vectors, std::min(DOT_DIMS, dims - d), rows + d, row_stride, /*a_column_stride=*/1, panel + d * PANEL,
               PANEL, c, c_row_stride, /*add=*/d > 0);
}

}  // namespace softfocus
