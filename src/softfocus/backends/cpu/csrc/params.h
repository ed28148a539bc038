// The arguments of a call, numbers and pointers laid out as call.py packs them; and the scales of a
// row that sees N keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace softfocus {

struct TensorView {  // a tensor of four dimensions; data is null where the argument is absent
  const void* data;
  int64_t stride[4];  // in elements; 0 where broadcast
};

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16 };
enum LengthScale : int64_t { CONSTANT, LOG_N, LOG512_N };
enum ScoreBias : int64_t { NO_BIAS, MINUS_LOG_N, MINUS_LOG_L };
enum Normaliser : int64_t { L1, NONE, ONE_OVER_N, ONE_OVER_L, ONE_OVER_SQRT_HALF_N };

struct Params {
  int64_t batch, heads, key_heads, query_length, key_length, head_dim, value_dim;
  int64_t left, right;  // the window: keys before and after a row's own position; -1 for no bound
  int64_t dtype, cosine, length_scale, score_bias, phi, normaliser, reweighted, laser, threads;
  int64_t seed, dropout_threshold;       // a weight is dropped if its 16 random bits are below; 0: no dropout
  double scale, power;                   // scale(d); the power of the re-weighting
  TensorView query, key, value;          // [B, H, Lq, D], [B, Hk, Lk, D], [B, Hk, Lk, Dv], of dtype
  TensorView mask;                       // bool [B, H, Lq, Lk]
  TensorView key_mask;                   // bool [B, 1, 1, Lk]
  TensorView document_ids;               // int64 [B, 1, 1, Lk]
  TensorView bias;                       // float32 [B, H, Lq, Lk]
  const float *head_scale, *head_power;  // [H] or null; head_power takes the place of power
};

constexpr float TIE_TOLERANCE = 128 * std::numeric_limits<float>::epsilon();  // reference.tie_tolerance
constexpr int64_t FREE_ROWS = 3;                                              // reference.FREE_ROWS

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
inline float row_factor(const Params& params, float count) {
  if (params.normaliser == ONE_OVER_N) return 1.0f / std::max(count, 1.0f);
  if (params.normaliser == ONE_OVER_SQRT_HALF_N) return 1.0f / std::sqrt(std::max(count, 1.0f) / 2.0f);
  return params.normaliser == ONE_OVER_L ? 1.0f / float(std::max<int64_t>(params.key_length, 1)) : 1.0f;
}

}  // namespace softfocus
