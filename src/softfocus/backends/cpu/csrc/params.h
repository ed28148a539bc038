// The arguments of a call, numbers and pointers laid out as call.py packs them.
#pragma once

#include <cstdint>

namespace softfocus {

struct TensorView {  // a tensor of four dimensions; data is null where the argument is absent
  const void* data;
  int64_t stride[4];  // in elements; 0 where broadcast
};

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16 };
enum LengthScale : int64_t { CONSTANT, LOG_N, LOG512_N };
enum ScoreBias : int64_t { NO_BIAS, MINUS_LOG_N, MINUS_LOG_L };
enum Normaliser : int64_t { L1, NONE, ONE_OVER_N, ONE_OVER_L, ONE_OVER_SQRT_HALF_N };

// validation.py and mechanism.py have checked the call. The kernels rely on that: key_heads > 0
// divides heads; head_dim and value_dim are > 0; with document_ids Lq <= Lk; re-weighting has the
// l1 norm; LASER has the l1 norm and no dropout. The backend refuses Lk >= 2^31 (__init__.py):
// convert_row() compares indices of keys in int32.
//
// Row i has position i + Lk - Lq: the queries are the last positions (bottom-right alignment).
struct Params {
  int64_t batch, heads, key_heads, query_length, key_length, head_dim, value_dim;
  int64_t left, right;   // the window: keys before and after a row's own position; -1 for no bound
  int64_t dtype;         // Dtype
  int64_t cosine;        // bool
  int64_t length_scale;  // LengthScale
  int64_t score_bias;    // ScoreBias
  int64_t phi;           // index in pointwise.FUSED
  int64_t normaliser;    // Normaliser
  int64_t reweighted;    // bool
  int64_t laser;         // bool
  int64_t threads;
  // Philox's key. A weight is dropped if its 16 random bits are below drop_below; 0: no dropout.
  int64_t seed, drop_below;
  double scale, power;                   // scale(d); the power of the re-weighting
  TensorView query, key, value;          // [B, H, Lq, D], [B, Hk, Lk, D], [B, Hk, Lk, Dv], of dtype
  TensorView mask;                       // bool [B, H, Lq, Lk]
  TensorView key_mask;                   // bool [B, 1, 1, Lk]
  TensorView document_ids;               // int64 [B, 1, 1, Lk]
  TensorView bias;                       // float32 [B, H, Lq, Lk]
  const float *head_scale, *head_power;  // [H] or null; head_power takes the place of power

  int64_t group() const { return heads / key_heads; }  // query heads that share a key head (GQA)
  int64_t key_head_of(int64_t query_head) const { return query_head / group(); }
};
static_assert(sizeof(Params) == 8 * 59, "call.py packs 59 numbers of eight bytes");

}  // namespace softfocus
