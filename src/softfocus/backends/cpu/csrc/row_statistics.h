// RowBlock: from the sum and the maximum of a row to the constants of its weights; and logarithms
// of weights for LASER.
#pragma once

#include "row_block.h"

namespace softfocus {

template <typename Phi>
inline void RowBlock<Phi>::finish_row(int64_t r) {
  exp_tail[r] = false;
  threshold_factor[r] = peak[r] = threshold[r] = live_above[r] = weight_scale[r] = 0.0f;
  power[r] = inverse_spread[r] = 1.0f;
  if (fully_masked[r]) {
    maximum[r] = log_norm[r] = -INF;
    norm[r] = 0.0f;
    if (maximum_first) exponentiate_row(r);  // to zeros: the products of its strip read the row
    log_norm[r] = -INF;
    return;
  }
  float nan_or_zero = norm[r] - norm[r];
  if (maximum_first) {
    exponentiate_row(r);
  } else if (Phi::has_exp_tail && params.normaliser == L1 && maximum[r] < EXP_TAIL && nan_or_zero == 0.0f) {
    exp_tail[r] = true;
    compute_scores(r, r + 1, true);
    exponentiate_row(r);
  } else {
    log_norm[r] = std::log(norm[r]);
  }
  if (std::isnan(norm[r])) maximum[r] = norm[r];
  if (params.normaliser != L1) {
    weight_scale[r] = row_factor(params, count[r]);
    return;
  }
  if (norm[r] < MIN_ROW_SUM) norm[r] = 1.0f, log_norm[r] = -INF;  // no phi is positive: all weights are 0
  weight_scale[r] = std::isfinite(norm[r]) ? 1.0f / norm[r] : std::numeric_limits<float>::quiet_NaN();
  if (params.reweighted && log_norm[r] != -INF) set_reweighting(r);
}

// Threshold, spread and power of a row. A tied row, and a row that sees a NaN, keeps threshold 0
// and p = 1.
template <typename Phi>
inline void RowBlock<Phi>::set_reweighting(int64_t r) {
  if (!std::isfinite(norm[r])) {
    peak[r] = norm[r] - norm[r];  // NaN
    return;
  }
  float largest_phi = stores_shifted_exp(r) ? 1.0f : Phi::value(Phi::to_stored(splat(maximum[r])))[0];
  threshold_factor[r] = count[r] > FREE_ROWS ? 1.0f : 0.0f;
  float mean = norm[r] / count[r];
  peak[r] = std::max(largest_phi * count[r] / norm[r] - threshold_factor[r], 0.0f);
  if (peak[r] <= TIE_TOLERANCE) {
    threshold_factor[r] = 0.0f;
    return;
  }
  threshold[r] = threshold_factor[r] * mean;
  inverse_spread[r] = 1.0f / (largest_phi - threshold[r]);
  power[r] = params.head_power ? params.head_power[h] : float(params.power);
  // Below live_above the term p u^(p-1), which the gradients hold, is less than half a unit in the
  // last place of the largest weight. In rows of more than p^2 keys all such terms together are
  // less than what the rounding of u contributes.
  float p = power[r];
  if (p > 1.0f && !params.laser) {
    float most = 0.5f * std::numeric_limits<float>::epsilon() / (p * std::max(count[r] / (p * p), 1.0f));
    live_above[r] = std::pow(most, 1.0f / (p - 1.0f));
  }
}

// The largest u that dropout keeps in a re-weighted row: live_above is relative to it
template <typename Phi>
inline float RowBlock<Phi>::largest_kept_u(int64_t r) const {
  vf top = vf{};
  with_row_phi(r, [&](auto phi) {
    each_tile([&](int64_t start_k) {
      KeyRange seen = strip_range(r, start_k);
      const float* row = tile_row(r, start_k);
      for (int64_t j = seen.begin; j < seen.end; j += W)
        top = max(dropout.dropped(r, j) ? vf{} : phi.value(load(row + j)), top);
    });
  });
  return std::max(reduce_max(top) - threshold[r], 0.0f) * inverse_spread[r];
}

// log u of a re-weighted row, or log phi up to a constant of the row, by offset j; -inf in tiles
// that no row sees. Without a threshold u is phi but for a factor, and may underflow: its logarithm
// is made from the scores, which are computed again where they are not stored.
template <typename Phi>
inline void RowBlock<Phi>::row_logs(int64_t r, float* to) {
  std::fill(to, to + (row_stride - W), -INF);
  auto each_vector = [&](auto log) {
    each_tile([&](int64_t start_k) {
      KeyRange seen = strip_range(r, start_k);
      for (int64_t j = seen.begin; j < seen.end; j += W) store(to + j, log(load(tile_row(r, start_k) + j)));
    });
  };
  if (threshold[r] != 0.0f) return each_vector([&](vf x) { return log_u(r, x); });
  auto from_score = [&](vf s) { return log_phi(r, s); };
  if (Phi::stored_is_score && !exp_tail[r]) return each_vector(from_score);
  float total = norm[r], top = maximum[r];
  compute_scores(r, r + 1, true);
  norm[r] = total, maximum[r] = top;
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
  vf x = load(tile_row(r, j / BLOCK_K * BLOCK_K) + vector);
  return (threshold[r] == 0.0f ? Phi::log_value(x) : log_u(r, x))[j - vector] != -INF;
}

template <typename Phi>
inline vf RowBlock<Phi>::log_u(int64_t r, vf stored_scores) const {
  vf y;
  with_row_phi(r, [&](auto phi) { y = phi.value(stored_scores); });
  y = (y - threshold[r]) * inverse_spread[r];
  return y < MIN_NORMAL ? splat(-INF) : logarithm(y);
}

// log phi of scores up to a constant of the row. Near u = 1 the logarithm of u is more exact than a
// difference of two.
template <typename Phi>
inline vf RowBlock<Phi>::log_phi(int64_t r, vf s) const {
  if (stores_shifted_exp(r)) return s - maximum[r];
  vf u = Phi::value(Phi::to_stored(s)) * inverse_spread[r], scale = splat(inverse_spread[r]);
  return u < 1e-30f ? Phi::log_value(s) + logarithm(scale) : logarithm(u);
}

}  // namespace softfocus
