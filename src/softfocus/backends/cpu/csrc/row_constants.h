// The constants of a row that sees N keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "params.h"

namespace softfocus {

// mechanism.TIED * eps. Chosen, not measured.
constexpr float TIE_TOLERANCE = 128 * std::numeric_limits<float>::epsilon();
constexpr int64_t FREE_ROWS = 3;  // mechanism.FREE_ROWS: a row of at most so many keys has no threshold

// c_i without the head scale, of a row that sees `count` keys
inline float compute_base_scale(const Params& params, float count) {
  float log_n = std::log(std::max(count, 1.0f));
  float length_scale = params.length_scale == LOG_N      ? log_n
                       : params.length_scale == LOG512_N ? log_n / std::log(512.0f)
                                                         : 1.0f;
  return float(params.scale) * length_scale;
}

inline float compute_row_bias(const Params& params, float count) {
  if (params.score_bias == MINUS_LOG_N) return -std::log(std::max(count, 1.0f));
  return params.score_bias == MINUS_LOG_L ? -std::log(float(std::max<int64_t>(params.key_length, 1))) : 0.0f;
}

// What multiplies phi where the normaliser is not l1
inline float compute_row_factor(const Params& params, float count) {
  if (params.normaliser == ONE_OVER_N) return 1.0f / std::max(count, 1.0f);
  if (params.normaliser == ONE_OVER_SQRT_HALF_N) return 1.0f / std::sqrt(std::max(count, 1.0f) / 2.0f);
  return params.normaliser == ONE_OVER_L ? 1.0f / float(std::max<int64_t>(params.key_length, 1)) : 1.0f;
}

}  // namespace softfocus
