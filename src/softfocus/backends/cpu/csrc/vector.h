// Vectors of W floats on the compilers' vector extension: AVX-512, AVX2, AVX, NEON or SSE, as the
// compiler's flags select. A comparison of vectors gives -1 in the lanes where it holds, else 0.
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
constexpr int W = 16;  // floats in a vector
// Vectors of a panel's row: MR x PANEL_VECTORS (tiling.h), 4 x 4 of the 32 registers, hold sums
constexpr int PANEL_VECTORS = 4;
#elif defined(__AVX__)
constexpr int W = 8;
constexpr int PANEL_VECTORS = 2;  // MR x PANEL_VECTORS: 4 x 2 of the 16 registers
#elif defined(__aarch64__)
constexpr int W = 4;
constexpr int PANEL_VECTORS = 4;  // MR x PANEL_VECTORS: 4 x 4 of the 32 registers
#else
constexpr int W = 4;
constexpr int PANEL_VECTORS = 2;  // MR x PANEL_VECTORS: 4 x 2 of the 16 registers
#endif

// Indexing the elements of a vector is slow: only code off the hot path does it.
typedef float vfloat __attribute__((vector_size(W * 4)));
typedef int32_t vint __attribute__((vector_size(W * 4)));
typedef uint32_t vuint __attribute__((vector_size(W * 4)));  // overflow is defined, unlike vint's
// Mask bytes, or key indices within a tile
typedef uint8_t vbyte __attribute__((vector_size(W)));
typedef uint16_t vhalf __attribute__((vector_size(W * 2)));  // the bits of bfloat16 or float16
typedef float vfloat_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vhalf_unaligned __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef uint8_t vbyte_unaligned __attribute__((vector_size(W), aligned(1), may_alias));

constexpr float INF = std::numeric_limits<float>::infinity();

// load() and store() need no alignment
inline vfloat load(const float* p) { return *(const vfloat_unaligned*)p; }
inline void store(float* p, vfloat x) { *(vfloat_unaligned*)p = x; }
// All lanes x. x - 0 keeps the sign of -0; x + 0 would not.
inline vfloat splat(float x) { return x - vfloat{}; }
inline vint splat(int32_t x) { return x - vint{}; }
// The same bits as another type
inline vint bits(vfloat x) { return (vint)x; }
inline vfloat floats(vint x) { return (vfloat)x; }
// If either argument is NaN, max and min return b, as the x86 instructions do: max(NaN, x) = x and
// max(x, NaN) = NaN.
#if defined(__AVX512F__)
inline vfloat max(vfloat a, vfloat b) { return (vfloat)_mm512_max_ps((__m512)a, (__m512)b); }
inline vfloat min(vfloat a, vfloat b) { return (vfloat)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }
inline vfloat min(vfloat a, vfloat b) { return a < b ? a : b; }
#endif
inline vfloat absolute(vfloat x) { return floats(bits(x) & 0x7fffffff); }

// {0, 1, ..., W - 1}
inline vint lane_index() {
  vint x;
  for (int i = 0; i < W; ++i) x[i] = i;
  return x;
}

// Lane i is element which[i] of a and b laid end to end
inline vfloat shuffle(vfloat a, vfloat b, vint which) {
#if defined(__clang__)
  vfloat y;
  for (int i = 0; i < W; ++i) y[i] = which[i] < W ? a[which[i]] : b[which[i] - W];
  return y;
#else
  return __builtin_shuffle(a, b, which);
#endif
}

inline float reduce_sum(vfloat x) {
  for (int step = W / 2; step; step /= 2) x += shuffle(x, x, lane_index() ^ step);
  return x[0];
}

// A sum in double, for terms that cancel and for rows of many tiles. It has W / 2 lanes, each of
// which sums two lanes of the float vectors. A running sum of n equal terms in float has a relative
// error of up to n 2^-25: its roundings do not average out.
class DoubleSum {
 public:
  void add(vfloat x) { sum_ += to_double(x, 0) + to_double(x, 1); }
  void add_product(vfloat x, vfloat y) {
    sum_ += to_double(x, 0) * to_double(y, 0) + to_double(x, 1) * to_double(y, 1);
  }
  double total() const {
    double y = 0.0;
    for (int i = 0; i < W / 2; ++i) y += sum_[i];
    return y;
  }

 private:
  typedef double vdouble __attribute__((vector_size(W * 4)));
  typedef float vfloat_part __attribute__((vector_size(W * 2)));
  vdouble sum_{};

  // The lower (part 0) or the upper (part 1) W / 2 lanes of x
  static vdouble to_double(vfloat x, int part) {
    vfloat_part y[2];
    std::memcpy(y, &x, sizeof x);
    return __builtin_convertvector(y[part], vdouble);
  }
};

inline float reduce_max(vfloat x) {
  for (int step = W / 2; step; step /= 2) x = max(shuffle(x, x, lane_index() ^ step), x);
  return x[0];
}

inline vfloat square_root(vfloat x) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_sqrt_ps((__m512)x);
#else
  float y[W];
  store(y, x);
  for (float& z : y) z = std::sqrt(z);
  return load(y);
#endif
}

inline bool any(vint x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
  int32_t y = 0;
  for (int i = 0; i < W; ++i) y |= x[i];
  return y;
#endif
}

// Lane i of the result is reduce_sum(x[i]); x is overwritten. A step replaces x[i] and x[i + s],
// for each i < s, by one vector of partial sums: those of x[i] in the lanes where (lane & s) is 0,
// those of x[i + s] in the others. That takes W - 1 vector additions; W calls of reduce_sum() take
// W log2(W).
__attribute__((always_inline)) inline vfloat reduce_each(vfloat (&x)[W]) {
#pragma GCC unroll 4
  for (int s = W / 2; s; s /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < s; ++i) {
      vint lane = lane_index(), second = (lane & s) != 0;
      vfloat a = second ? x[i + s] : x[i];
      vfloat c = shuffle(x[i], x[i + s], second ? lane - s + W : lane + s);
      x[i] = a + c;
    }
  return x[0];
}

// Whether x[0 .. n) holds no NaN and no infinity
inline bool all_finite(const float* x, int64_t n) {
  vfloat zero = vfloat{};  // 0 * NaN and 0 * infinity are NaN
  int64_t k = 0;
  for (; k + W <= n; k += W) zero += load(x + k) * 0.0f;
  float sum = reduce_sum(zero);
  for (; k < n; ++k) sum += x[k] * 0.0f;
  return sum == 0.0f;
}

// Transposes a [W, W] square of floats: column j of `to` is row j of `from`. Strides are in floats.
// Step s exchanges, in every square of 2s x 2s, the upper right and the lower left square of s x s.
inline void transpose_square(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  vfloat x[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) x[i] = load(from + i * from_stride);
#pragma GCC unroll 4
  for (int s = 1; s < W; s *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      if (i & s) continue;
      vfloat a = x[i], c = x[i + s];
      vint lane = lane_index(), odd = (lane & s) != 0;
      x[i] = shuffle(a, c, odd ? lane - s + W : lane);
      x[i + s] = shuffle(a, c, odd ? lane + W : lane + s);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) store(to + i * to_stride, x[i]);
}

// Vectors of one step of a loop: their chains of dependent operations overlap. Chosen, not measured
constexpr int UNROLL = 4;

// f(0) ... f(N - 1), unrolled
template <int N, typename F>
__attribute__((always_inline)) inline void unroll(F f) {
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) f(i);
}

}  // namespace softfocus
