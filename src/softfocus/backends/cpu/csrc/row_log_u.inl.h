// Part of class RowBlock; included by row_block.h. Logarithms of u, for LASER's exact sums. Without
// re-weighting u is what of_stored() gives, phi(s) or phi(s) e^-m; in a tied row u is that times a
// power of two.
#pragma once

#include "row_block.h"

namespace softfocus {

// Writes log u of a row to row_log_u [padded_keys()], by offset j; -inf for each key that the row
// does not see. With a threshold it is computed from the stored scores. Without one u is phi times
// a constant of the row and may underflow, so that log u is computed from the scores s. If the
// block stores phi(s) or e^(s - m), s is computed again, and at the end the stored form.
template <typename Phi>
inline void RowBlock<Phi>::compute_log_u(int64_t r, float* row_log_u) {
  std::fill(row_log_u, row_log_u + padded_keys(), -INF);
  auto each_vector = [&](auto log) {
    each_tile([&](int64_t start_k) {
      KeyRange strip_keys = strip_range(r, start_k);
      for (int64_t j = strip_keys.begin; j < strip_keys.end; j += W)
        store(row_log_u + j, log(load(tile_row(r, start_k) + j)));
    });
  };
  if (threshold[r] != 0.0f) return each_vector([&](vfloat x) { return log_u_of_stored(r, x); });
  auto from_score = [&](vfloat s) { return log_u_of_score(r, s); };
  if (Phi::stored_stands_for_score && !exp_tail[r]) return each_vector(from_score);
  float kept_row_sum = row_sum[r], kept_maximum = maximum[r];
  compute_scores(r, r + 1, /*keep_scores=*/true);
  row_sum[r] = kept_row_sum, maximum[r] = kept_maximum;
  each_vector(from_score);
  // Sets the same row_sum and log_norm again: the row is finite and has weights (each_exact_sum())
  if (stores_exp_minus_max(r)) return exponentiate_row(r);
  each_tile([&](int64_t start_k) {
    KeyRange strip_keys = strip_range(r, start_k);
    float* row = tile_row(r, start_k);
    for (int64_t j = strip_keys.begin; j < strip_keys.end; j += W) store(row + j, Phi::to_stored(load(row + j)));
  });
}

// Whether a key that a row sees may have a weight above 0
template <typename Phi>
inline bool RowBlock<Phi>::has_weight(int64_t r, int64_t key) const {
  if (threshold[r] == 0.0f && !Phi::has_zeros) return true;
  static_assert(!Phi::has_zeros || Phi::stored_stands_for_score, "a phi with zeros has a log_value() of stored scores");
  int64_t j = key - key_begin, vector_begin = j / W * W;
  vfloat x = load(tile_row(r, j / BLOCK_K * BLOCK_K) + vector_begin);
  // With threshold 0 only a phi with zeros gets here. Its log_value() takes the stored score.
  return (threshold[r] == 0.0f ? Phi::log_value(x) : log_u_of_stored(r, x))[j - vector_begin] != -INF;
}

// log u of W stored scores of a row; -inf where u is 0 or not a normal float
template <typename Phi>
inline vfloat RowBlock<Phi>::log_u_of_stored(int64_t r, vfloat stored_scores) const {
  vfloat y;
  with_row_phi(r, [&](auto phi) { y = phi.of_stored(stored_scores); });
  y = phi_to_u(r)(y);
  return y < MIN_NORMAL ? splat(-INF) : logarithm(y);
}

// log u of W scores of a row without a threshold: log(phi * inverse_spread). Except where that
// product underflows, its logarithm is more accurate than log phi + log inverse_spread, which
// cancel near u = 1.
template <typename Phi>
inline vfloat RowBlock<Phi>::log_u_of_score(int64_t r, vfloat s) const {
  if (stores_exp_minus_max(r)) return s - maximum[r];  // the largest phi and inverse_spread are 1
  vfloat u = Phi::of_stored(Phi::to_stored(s)) * inverse_spread[r], scale = splat(inverse_spread[r]);
  return u < SAFE_MIN ? Phi::log_value(s) + logarithm(scale) : logarithm(u);
}

}  // namespace softfocus
