// Vectors of W floats on the compilers' vector extension: AVX-512, AVX2, NEON or SSE, as the flags
// say. The elementary functions are polynomials fitted to their ranges, with a relative error below
// 1e-7. They return NaN for NaN; `logarithm` need not.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns about its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace softfocus {

#if defined(__AVX512F__)
constexpr int W = 16;             // floats in a vector
constexpr int PANEL_VECTORS = 4;  // vectors in a row of a panel: 4 x 4 of the 32 registers hold sums
#elif defined(__AVX__)
constexpr int W = 8;
constexpr int PANEL_VECTORS = 2;  // 4 x 2 of the 16 registers hold sums
#elif defined(__aarch64__)
constexpr int W = 4;
constexpr int PANEL_VECTORS = 4;
#else
constexpr int W = 4;
constexpr int PANEL_VECTORS = 2;
#endif

// Indexing the elements of a vector is slow: only code off the hot path does it.
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));  // for sums that may wrap around: signed overflow is undefined
typedef uint8_t vb __attribute__((vector_size(W)));       // masks, and keys counted from a tile's first
typedef uint16_t vs __attribute__((vector_size(W * 2)));  // the bits of bfloat16 or float16
typedef float vf_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vs_unaligned __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef uint8_t vb_unaligned __attribute__((vector_size(W), aligned(1), may_alias));

constexpr float INF = std::numeric_limits<float>::infinity();

inline vf load(const float* p) { return *(const vf_unaligned*)p; }
inline void store(float* p, vf x) { *(vf_unaligned*)p = x; }
// All lanes x
inline vf splat(float x) { return x - vf{}; }
inline vi splat(int32_t x) { return x - vi{}; }
inline vi bits(vf x) { return (vi)x; }
inline vf floats(vi x) { return (vf)x; }
// With a NaN in either argument both return b, as the x86 instructions do: max(NaN, x) = x, max(x,
// NaN) = NaN.
#if defined(__AVX512F__)
inline vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
#endif
inline vf absolute(vf x) { return floats(bits(x) & 0x7fffffff); }

inline vf from_bfloat16(vs x) { return floats((vi)(__builtin_convertvector(x, vu) << 16)); }

inline vf from_float16(vs x) {
  vu u = __builtin_convertvector(x, vu), magnitude = u & 0x7fff;
  vu y = (vu)(floats((vi)(magnitude << 13)) * 0x1p112f);  // exponent biases differ by 112; denormals come out right
  y |= magnitude >= 0x7c00 ? (vu)splat(0x7f800000) : vu{};
  return floats((vi)(y | (u & 0x8000) << 16));
}

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};
inline vf load(const bfloat16* p) { return from_bfloat16(*(const vs_unaligned*)p); }
inline vf load(const float16* p) { return from_float16(*(const vs_unaligned*)p); }

// Rounds to nearest, ties to even, as torch does
inline vs to_bfloat16(vf x) {
  vu u = (vu)x;
  u = x == x ? (u + 0x7fff + (u >> 16 & 1)) >> 16 : (vu)splat(0x7fc0);
  return __builtin_convertvector(u, vs);
}

inline vs to_float16(vf x) {
  vu sign = (vu)x >> 16 & 0x8000;
  x = absolute(x);
  vu normal = ((vu)x - (112u << 23) + 0xfff + ((vu)x >> 13 & 1)) >> 13;
  vu denormal = (vu)(x + 0.5f) - 0x3f000000u;  // x + 0.5 has the last bit of a denormal half: the addition rounds
  vu u = x < 0x1p-14f ? denormal : normal;
  u = x < 65520.0f ? u : x == x ? (vu)splat(0x7c00) : (vu)splat(0x7e00);
  return __builtin_convertvector(u | sign, vs);
}

// {0, 1, ..., W - 1}
inline vi lane_index() {
  vi x;
  for (int i = 0; i < W; ++i) x[i] = i;
  return x;
}

// Lane i is element which[i] of a and b laid end to end
inline vf shuffle(vf a, vf b, vi which) {
#if defined(__clang__)
  vf y;
  for (int i = 0; i < W; ++i) y[i] = which[i] < W ? a[which[i]] : b[which[i] - W];
  return y;
#else
  return __builtin_shuffle(a, b, which);
#endif
}

inline float reduce_sum(vf x) {
  for (int step = W / 2; step; step /= 2) x += shuffle(x, x, lane_index() ^ step);
  return x[0];
}

// A sum in double, for sums that cancel
class DoubleSum {
 public:
  void add(vf x) { sum_ += half(x, 0) + half(x, 1); }
  void add(vf x, vf y) { sum_ += half(x, 0) * half(y, 0) + half(x, 1) * half(y, 1); }
  double total() const {
    double y = 0.0;
    for (int i = 0; i < W / 2; ++i) y += sum_[i];
    return y;
  }

 private:
  typedef double vd __attribute__((vector_size(W * 4)));
  typedef float vh __attribute__((vector_size(W * 2)));
  vd sum_{};

  static vd half(vf x, int which) {
    vh y[2];
    std::memcpy(y, &x, sizeof x);
    return __builtin_convertvector(y[which], vd);
  }
};

inline float reduce_max(vf x) {
  for (int step = W / 2; step; step /= 2) x = max(shuffle(x, x, lane_index() ^ step), x);
  return x[0];
}

inline vf square_root(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_sqrt_ps((__m512)x);
#else
  float y[W];
  store(y, x);
  for (float& z : y) z = std::sqrt(z);
  return load(y);
#endif
}

inline bool any(vi x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
  int32_t y = 0;
  for (int i = 0; i < W; ++i) y |= x[i];
  return y;
#endif
}

// Lane i of the result is reduce_sum(x[i]). Halves are folded onto one another: W sums cost little
// more than two.
__attribute__((always_inline)) inline vf reduce_each(vf (&x)[W]) {
#pragma GCC unroll 4
  for (int s = W / 2; s; s /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < s; ++i) {
      vi lane = lane_index(), second = (lane & s) != 0;
      vf a = second ? x[i + s] : x[i];
      vf c = shuffle(x[i], x[i + s], second ? lane - s + W : lane + s);
      x[i] = a + c;
    }
  return x[0];
}

// Whether x[0 .. n) holds no NaN and no infinity
inline bool all_finite(const float* x, int64_t n) {
  vf zero = vf{};  // 0 * NaN and 0 * infinity are NaN
  int64_t k = 0;
  for (; k + W <= n; k += W) zero += load(x + k) * 0.0f;
  float rest = reduce_sum(zero);
  for (; k < n; ++k) rest += x[k] * 0.0f;
  return rest == 0.0f;
}

// Transposes a [W, W] block: column j of `to` is row j of `from`. Each step exchanges squares of s
// x s.
inline void transpose_square(const float* from, int64_t from_step, float* to, int64_t to_step) {
  vf x[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) x[i] = load(from + i * from_step);
#pragma GCC unroll 4
  for (int s = 1; s < W; s *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      if (i & s) continue;
      vf a = x[i], c = x[i + s];
      vi lane = lane_index(), odd = (lane & s) != 0;
      x[i] = shuffle(a, c, odd ? lane - s + W : lane);
      x[i + s] = shuffle(a, c, odd ? lane + W : lane + s);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) store(to + i * to_step, x[i]);
}

// f(0) ... f(N - 1), unrolled. The elementary functions take N vectors at once, step by step, so
// that N chains of dependent operations overlap.
template <int N, typename F>
__attribute__((always_inline)) inline void unroll(F f) {
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) f(i);
}

constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer and leaves that in the low bits
constexpr float LOG2_E = 1.44269504f, LN2 = 0.693147182f, LN2_REST = -1.90465430e-9f;

// q = e^r - 1 for |r| <= ln 2 / 2
template <int N>
__attribute__((always_inline)) inline void expm1_reduced(const vf (&r)[N], vf (&q)[N]) {
  unroll<N>([&](int i) { q[i] = r[i] * 0.001381459638f + 0.008368717091f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i] + 0.04166838809f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i] + 0.1666652063f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i] + 0.4999999345f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i] + 1.0f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i]; });
}

// x = n ln 2 + r with |r| <= ln 2 / 2; n stands in the low bits of `shifted`
template <int N>
__attribute__((always_inline)) inline void reduce_argument(const vf (&x)[N], vf (&shifted)[N], vf (&r)[N]) {
  unroll<N>([&](int i) { shifted[i] = x[i] * LOG2_E + ROUND; });
  unroll<N>([&](int i) { r[i] = shifted[i] - ROUND; });
  unroll<N>([&](int i) { r[i] = (x[i] - r[i] * LN2) - r[i] * LN2_REST; });
}

// x * 2^n for the n that reduce_argument() leaves in the low bits; arbitrary where a float cannot
// hold it
inline vf times_power_of_two(vf x, vf shifted) { return (vf)((vu)x + ((vu)shifted << 23)); }

// e^x for x <= 0; exactly 0 below -87
template <int N>
__attribute__((always_inline)) inline void exp_negative(vf (&x)[N]) {
  vf shifted[N], r[N], q[N];
  reduce_argument(x, shifted, r);
  expm1_reduced(r, q);
  unroll<N>([&](int i) { q[i] = times_power_of_two(q[i] + 1.0f, shifted[i]); });
  unroll<N>([&](int i) { x[i] = x[i] < -87.0f ? vf{} : q[i]; });
}

// log(1 + e^-|s|) with full relative precision; arbitrary where s is non-finite
template <int N>
__attribute__((always_inline)) inline void log1p_exp(const vf (&s)[N], vf (&y)[N]) {
  vf x[N], shifted[N], e[N];
  unroll<N>([&](int i) { x[i] = min(absolute(s[i]), splat(87.0f)); });
  unroll<N>([&](int i) { shifted[i] = x[i] * -LOG2_E + ROUND; });
  unroll<N>([&](int i) { e[i] = shifted[i] - ROUND; });
  unroll<N>([&](int i) { x[i] = -(e[i] * LN2) - x[i]; });  // LN2_REST would add far less than the rounding of s
  expm1_reduced(x, e);
  unroll<N>([&](int i) { e[i] = times_power_of_two(e[i] + 1.0f, shifted[i]); });
  unroll<N>([&](int i) { y[i] = e[i] * 0.005232690027f - 0.02950521992f; });
  unroll<N>([&](int i) { y[i] = y[i] * e[i] + 0.07822591751f; });
  unroll<N>([&](int i) { y[i] = y[i] * e[i] - 0.136632425f; });
  unroll<N>([&](int i) { y[i] = y[i] * e[i] + 0.1910600499f; });
  unroll<N>([&](int i) { y[i] = y[i] * e[i] - 0.2484298169f; });
  unroll<N>([&](int i) { y[i] = y[i] * e[i] + 0.3331909673f; });
  unroll<N>([&](int i) { y[i] = y[i] * e[i] - 0.4999949314f; });
  unroll<N>([&](int i) { y[i] = y[i] * e[i] + 0.9999999699f; });
  unroll<N>([&](int i) { y[i] = y[i] * e[i]; });
}

// 1 - e^-f for f >= 0, with full relative precision
template <int N>
__attribute__((always_inline)) inline void one_minus_exp(vf (&f)[N]) {
  vf shifted[N], r[N], q[N];
  unroll<N>([&](int i) { f[i] = -min(splat(80.0f), f[i]); });
  reduce_argument(f, shifted, r);
  expm1_reduced(r, q);
  unroll<N>([&](int i) { r[i] = times_power_of_two(splat(1.0f), shifted[i]); });
  unroll<N>([&](int i) { f[i] = (1.0f - r[i]) - r[i] * q[i]; });
}

inline vf exp_negative(vf x) {
  vf y[1] = {x};
  exp_negative(y);
  return y[0];
}

// e^x for every x; infinity where a float cannot hold it, 0 below -87
inline vf exponential(vf x) {
  vf clamped[1] = {min(splat(88.8f), x)}, shifted[1], r[1], q[1];  // a NaN stays NaN
  reduce_argument(clamped, shifted, r);
  expm1_reduced(r, q);
  vi n = (vi)((vu)shifted[0] << 23) >> 23;
  vi half = n >> 1;  // the exponent in two steps: 2^128 is not a float
  vf y = (q[0] + 1.0f) * floats((half + 127) << 23) * floats((n - half + 127) << 23);
  return x < -87.0f ? vf{} : x > 88.8f ? splat(INF) : y;
}

// ln u for normal positive u
inline vf logarithm(vf u) {
  vi exponent = (vi)((vu)u - 0x3f3504f3u) >> 23;  // the mantissa lies in [sqrt 1/2, sqrt 2)
  vf x = (vf)((vu)u - ((vu)exponent << 23)) - 1.0f;
  vf n = __builtin_convertvector(exponent, vf);
  vf q = splat(-0.07974216399f);
  q = q * x + 0.1265569779f;
  q = q * x - 0.1298927653f;
  q = q * x + 0.1420994565f;
  q = q * x - 0.1664158159f;
  q = q * x + 0.2000120097f;
  q = q * x - 0.2500030392f;
  q = q * x + 0.3333332994f;
  vf correction = q * x * x * x - 0.5f * (x * x) + n * -1.90465430e-9f;
  return n * 0.693147182f + (x + correction);
}

}  // namespace softfocus
