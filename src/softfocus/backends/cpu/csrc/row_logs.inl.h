// RowBlock: logarithms of weights, for LASER's exact sums.
#pragma once

#include "row_block.h"

namespace softfocus {

// Writes log u of a row with a threshold, or log phi up to a constant of the row, by offset j; -inf
// in tiles that no row sees. With a threshold the logarithm is computed from the stored scores.
// Without one u is phi times a constant of the row and may underflow, so that the logarithm is
// computed from the scores s. If the block stores phi(s) or e^(s - m), s is computed again, and the
// stored form is restored at the end.
template <typename Phi>
inline void RowBlock<Phi>::row_logs(int64_t r, float* logs) {
  std::fill(logs, logs + (row_stride - W), -INF);
  auto each_vector = [&](auto log) {
    each_tile([&](int64_t start_k) {
      KeyRange seen = strip_range(r, start_k);
      for (int64_t j = seen.begin; j < seen.end; j += W) store(logs + j, log(load(tile_row(r, start_k) + j)));
    });
  };
  if (threshold[r] != 0.0f) return each_vector([&](vfloat x) { return log_u(r, x); });
  auto from_score = [&](vfloat s) { return log_phi(r, s); };
  if (Phi::stored_stands_for_score && !exp_tail[r]) return each_vector(from_score);
  float kept_norm = norm[r], kept_maximum = maximum[r];
  compute_scores(r, r + 1, true);
  norm[r] = kept_norm, maximum[r] = kept_maximum;
  each_vector(from_score);
  if (stores_shifted_exp(r)) return exponentiate_row(r);
  each_tile([&](int64_t start_k) {
    KeyRange seen = strip_range(r, start_k);
    float* row = tile_row(r, start_k);
    for (int64_t j = seen.begin; j < seen.end; j += W) store(row + j, Phi::to_stored(load(row + j)));
  });
}

// Whether a key that a row sees may have a weight above 0
template <typename Phi>
inline bool RowBlock<Phi>::has_weight(int64_t r, int64_t key) const {
  if (threshold[r] == 0.0f && !Phi::has_zeros) return true;
  int64_t j = key - key_begin, vector = j / W * W;
  vfloat x = load(tile_row(r, j / BLOCK_K * BLOCK_K) + vector);
  return (threshold[r] == 0.0f ? Phi::log_value(x) : log_u(r, x))[j - vector] != -INF;
}

template <typename Phi>
inline vfloat RowBlock<Phi>::log_u(int64_t r, vfloat stored_scores) const {
  vfloat y;
  with_row_phi(r, [&](auto phi) { y = phi.value(stored_scores); });
  y = phi_to_u(r)(y);
  return y < MIN_NORMAL ? splat(-INF) : logarithm(y);
}

// log phi of scores up to a constant of the row: log(phi * inverse_spread). Except where that
// product underflows, its logarithm is more accurate than log phi + log inverse_spread, which
// cancel near u = 1.
template <typename Phi>
inline vfloat RowBlock<Phi>::log_phi(int64_t r, vfloat s) const {
  if (stores_shifted_exp(r)) return s - maximum[r];
  vfloat u = Phi::value(Phi::to_stored(s)) * inverse_spread[r], scale = splat(inverse_spread[r]);
  return u < SAFE_MIN ? Phi::log_value(s) + logarithm(scale) : logarithm(u);
}

}  // namespace softfocus
