// Part of class RowBlock; included by row_block.h. The constants of a row's weights.
#pragma once

#include "row_block.h"

namespace softfocus {

// From the stored scores, row_sum and maximum of a row: its statistics and the constants of its
// weights. Where e^(s - m) is to be stored, converts the scores.
template <typename Phi>
inline void RowBlock<Phi>::finish_row(int64_t r) {
  // Defaults. set_reweighting() replaces those of re-weighted rows: in a tied row only peak and
  // inverse_spread, in a non-finite row only peak.
  exp_tail[r] = false;
  threshold_on[r] = peak[r] = threshold[r] = live_threshold[r] = weight_scale[r] = 0.0f;
  power[r] = inverse_spread[r] = 1.0f;
  if (fully_masked[r]) {
    maximum[r] = log_norm[r] = -INF;
    row_sum[r] = 0.0f;
    if (maximum_first) exponentiate_row(r);  // writes zeros: the products of its strip read the row
    return;
  }
  if (maximum_first) {
    exponentiate_row(r);
  } else if (Phi::has_exp_tail && params.normaliser == L1 && maximum[r] < EXP_TAIL && std::isfinite(row_sum[r])) {
    exp_tail[r] = true;
    compute_scores(r, r + 1, /*keep_scores=*/true);
    exponentiate_row(r);
  } else {
    log_norm[r] = std::log(row_sum[r]);
  }
  if (std::isnan(row_sum[r])) maximum[r] = row_sum[r];  // max() has ignored the NaN
  if (params.normaliser != L1) {
    weight_scale[r] = compute_row_factor(params, count[r]);
    return;
  }
  if (row_sum[r] < MIN_ROW_SUM) {  // a row without weights: weight_scale stays 0, and u is 0
    row_sum[r] = 1.0f, log_norm[r] = -INF, inverse_spread[r] = 0.0f;
    return;
  }
  weight_scale[r] = std::isfinite(row_sum[r]) ? 1.0f / row_sum[r] : std::numeric_limits<float>::quiet_NaN();
  if (params.reweighted) set_reweighting(r);
}

// Threshold, spread and power of a row. A tied row keeps threshold 0 and p = 1, so that its weights
// are those of the l1 norm. A non-finite row keeps them, too; its output is NaN.
template <typename Phi>
inline void RowBlock<Phi>::set_reweighting(int64_t r) {
  if (!std::isfinite(row_sum[r])) {
    peak[r] = row_sum[r] - row_sum[r];  // NaN
    return;
  }
  // phi is non-decreasing, so the largest score has the largest phi.
  float largest_phi = stores_exp_minus_max(r) ? 1.0f : Phi::of_stored(Phi::to_stored(splat(maximum[r])))[0];
  threshold_on[r] = count[r] > MAX_UNTHRESHOLDED_COUNT ? 1.0f : 0.0f;
  float mean = row_sum[r] / count[r];
  peak[r] = std::max(largest_phi / mean - threshold_on[r], 0.0f);
  if (peak[r] <= TIE_TOLERANCE) {
    threshold_on[r] = 0.0f;
    inverse_spread[r] = std::ldexp(1.0f, -std::ilogb(largest_phi));
    return;
  }
  threshold[r] = threshold_on[r] * mean;
  inverse_spread[r] = 1.0f / (largest_phi - threshold[r]);
  power[r] = params.head_power ? params.head_power[query_head] : float(params.power);
  // Keys with small u are dropped. p u^(p-1) is the factor of a key's gradients. The limit below
  // has two effects: of a dropped key p u^(p-1) is at most eps/2, and over at most N dropped keys
  // it adds up to at most p^2 eps/2. Rounding causes as large an error: if u = 1 is rounded by
  // eps/2, p u^(p-1) changes by about p^2 eps/2. LASER drops no key with u > 0: e^(V - M) may be
  // large.
  float p = power[r];
  if (p > 1.0f && !params.laser) {
    // The largest u^(p-1) that is left out
    float limit_u_pm1 = 0.5f * std::numeric_limits<float>::epsilon() / (p * std::max(count[r] / (p * p), 1.0f));
    live_threshold[r] = std::pow(limit_u_pm1, 1.0f / (p - 1.0f));
  }
}

// The largest u that dropout keeps in a re-weighted row
template <typename Phi>
inline float RowBlock<Phi>::largest_kept_u(int64_t r) const {
  vfloat largest = vfloat{};
  with_row_phi(r, [&](auto phi) {
    each_tile([&](int64_t start_k) {
      KeyRange strip_keys = strip_range(r, start_k);
      const float* row = tile_row(r, start_k);
      for (int64_t j = strip_keys.begin; j < strip_keys.end; j += W)
        largest = max(dropout.dropped(r, j) ? vfloat{} : phi.of_stored(load(row + j)), largest);
    });
  });
  return std::max(reduce_max(largest) - threshold[r], 0.0f) * inverse_spread[r];
}

}  // namespace softfocus
