// The one matrix product: C (+)= A B on a register tile, where B and C have rows of whole vectors and A is read element
// by element with any two strides (so A may be transposed). What is there is added at the end: sums of sums lose less
// than one long sum does.
#pragma once

#include <algorithm>

#include "vector.h"

namespace softfocus {

constexpr int MR = 4;          // rows of C held in registers
constexpr int64_t DEPTH = 64;  // dimensions of a dot product that are summed one after another

template <int ROWS, int VECTORS, typename T>
inline void product_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step,
                         float* c, int64_t c_row, bool add) {
  vf sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) sums[m][n] = vf{};
  for (int64_t k = 0; k < depth; ++k) {
    vf row[VECTORS];
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) row[n] = load(b + k * b_step + n * W);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      vf x = splat(a[m * a_row + k * a_step]);
#pragma GCC unroll 16
      for (int n = 0; n < VECTORS; ++n) sums[m][n] += x * row[n];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) {
      float* to = c + m * c_row + n * W;
      store(to, add ? load(to) + sums[m][n] : sums[m][n]);
    }
}

// ROWS rows of C, `vectors` vectors wide
template <int ROWS, typename T>
inline void product(int64_t vectors, int64_t depth, const float* a, int64_t a_row, int64_t a_step, const T* b,
                    int64_t b_step, float* c, int64_t c_row, bool add) {
  for (; vectors >= PANEL_VECTORS; vectors -= PANEL_VECTORS, b += PANEL_VECTORS * W, c += PANEL_VECTORS * W)
    product_tile<ROWS, PANEL_VECTORS>(depth, a, a_row, a_step, b, b_step, c, c_row, add);
  if (vectors == 1) product_tile<ROWS, 1>(depth, a, a_row, a_step, b, b_step, c, c_row, add);
  if constexpr (PANEL_VECTORS > 2) {
    if (vectors == 2) product_tile<ROWS, 2>(depth, a, a_row, a_step, b, b_step, c, c_row, add);
    if (vectors == 3) product_tile<ROWS, 3>(depth, a, a_row, a_step, b, b_step, c, c_row, add);
  }
}

// Dot products of ROWS vectors with those of a panel's columns
template <int ROWS>
inline void dots(int64_t vectors, int64_t dims, const float* a, int64_t a_row, const float* panel, float* c,
                 int64_t c_row) {
  constexpr int64_t step = PANEL_VECTORS * W;
  for (int64_t d = 0; d < dims; d += DEPTH)
    product<ROWS>(vectors, std::min(DEPTH, dims - d), a + d, a_row, 1, panel + d * step, step, c, c_row, d > 0);
}

}  // namespace softfocus
