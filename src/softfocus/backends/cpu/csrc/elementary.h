// Elementary functions on vectors, in a reduced argument: f(x) = fixed terms + x^k * polynomial.
// The third column is the quotient that the polynomial approximates, the last one the largest error
// relative to the function if the polynomial is evaluated without rounding:
//
//     function    fixed      polynomial for              degree  interval                    error
//     e^r         1 + r      (e^r - 1 - r) / r^2              4  [-ln 2 / 2, ln 2 / 2]       3.1e-9
//     ln(1 + t)   none       ln(1 + t) / t                    8  [0, 1]                      3.0e-8
//     ln(1 + x)   x - x^2/2  (ln(1 + x) - x + x^2/2) / x^3    7  [sqrt 1/2 - 1, sqrt 2 - 1]  2.2e-8
//
// The coefficients are minimax: their errors equioscillate (6, 10 and 9 extrema, in float64). The
// first two polynomials minimise the error relative to the function. The third minimises the error
// relative to its quotient, which is 4.1e-7; relative to the function that is 2.2e-8.
//
// Largest relative errors in float32, measured over every range with fused multiply-adds: 8e-8 for
// e^x, 9e-8 for ln u, 1.2e-7 for 1 - e^-f, 2.1e-7 for log(1 + e^-|s|). Without fused multiply-adds
// (SSE, and AVX before AVX2) the error of e^x reaches 4e-6 at the ends of its range, since the
// argument is reduced less exactly.
//
// `exp_negative` propagates a NaN only if its low nine bits are 0, because it shifts these bits
// into the exponent. The NaN of std::numeric_limits and of invalid operations on x86 and Arm is
// such a NaN. Other NaNs of a caller are replaced by it before (row_scores.inl.h). `exponential`
// and `one_minus_exp` propagate every NaN, `logarithm` and `log1p_exp` none.
//
// The functions that loops call take N vectors at once and apply each step to all of them, so that
// N chains of dependent operations overlap.
#pragma once

#include "vector.h"

namespace softfocus {

// 1.5 * 2^23: adding it rounds to an integer and leaves that in the low bits
constexpr float ROUND_MAGIC = 12582912.0f;
constexpr float LOG2_E = 1.44269504f;
constexpr float LN2 = 0.693147182f, LN2_REST = -1.90465430e-9f;  // LN2 + LN2_REST = ln 2
// e^-87 is near the smallest normal float. Below it the exponentials return 0.
constexpr float EXP_MIN = -87.0f;
constexpr float EXP_MAX = 88.8f;  // just above the logarithm of the largest float, 88.72
// one_minus_exp() clamps its argument f here. 1 - e^-f is 1 in float from f = 18 on, and 2^n, with
// n = round(-f / ln 2), is still a normal float.
constexpr float EXPM1_MAX = 80.0f;

// q = e^r - 1 for |r| <= ln 2 / 2
template <int N>
__attribute__((always_inline)) inline void expm1_reduced(const vfloat (&r)[N], vfloat (&q)[N]) {
  unroll<N>([&](int i) { q[i] = r[i] * 0.001381459638f + 0.008368717091f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i] + 0.04166838809f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i] + 0.1666652063f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i] + 0.4999999345f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i] + 1.0f; });
  unroll<N>([&](int i) { q[i] = q[i] * r[i]; });
}

// x = n ln 2 + r with |r| <= ln 2 / 2. `biased` is n + ROUND_MAGIC: n is in its low bits.
template <int N>
__attribute__((always_inline)) inline void reduce_argument(const vfloat (&x)[N], vfloat (&biased)[N], vfloat (&r)[N]) {
  unroll<N>([&](int i) { biased[i] = x[i] * LOG2_E + ROUND_MAGIC; });
  unroll<N>([&](int i) { r[i] = biased[i] - ROUND_MAGIC; });
  unroll<N>([&](int i) { r[i] = (x[i] - r[i] * LN2) - r[i] * LN2_REST; });
}

// x * 2^n for the n in the low bits of `biased` (reduce_argument()). The result is arbitrary if it
// is not a normal float.
inline vfloat times_power_of_two(vfloat x, vfloat biased) { return (vfloat)((vuint)x + ((vuint)biased << 23)); }

// e^x for x <= 0; exactly 0 below EXP_MIN
template <int N>
__attribute__((always_inline)) inline void exp_negative(vfloat (&x)[N]) {
  vfloat biased[N], r[N], q[N];
  reduce_argument(x, biased, r);
  expm1_reduced(r, q);
  unroll<N>([&](int i) { q[i] = times_power_of_two(q[i] + 1.0f, biased[i]); });
  unroll<N>([&](int i) { x[i] = x[i] < EXP_MIN ? vfloat{} : q[i]; });
}

// log(1 + e^-|s|) with full relative precision. Where s is NaN or infinite the result is that of
// |s| = 87, a finite number: Softplus adds it to relu(s), which carries the NaN or infinity.
template <int N>
__attribute__((always_inline)) inline void log1p_exp(const vfloat (&s)[N], vfloat (&y)[N]) {
  vfloat x[N], biased[N], e[N];
  // As in exp_negative(), of -|s| = n ln 2 + r. Two arrays are reused, because separate ones make
  // other code, whose speed was not measured. In order
  //     x: |s|, r
  //     e: n, e^r - 1, e^-|s|
  unroll<N>([&](int i) { x[i] = min(absolute(s[i]), splat(-EXP_MIN)); });
  unroll<N>([&](int i) { biased[i] = x[i] * -LOG2_E + ROUND_MAGIC; });
  unroll<N>([&](int i) { e[i] = biased[i] - ROUND_MAGIC; });
  // LN2_REST would add far less than the rounding of s.
  unroll<N>([&](int i) { x[i] = -(e[i] * LN2) - x[i]; });
  expm1_reduced(x, e);
  unroll<N>([&](int i) { e[i] = times_power_of_two(e[i] + 1.0f, biased[i]); });
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
__attribute__((always_inline)) inline void one_minus_exp(vfloat (&f)[N]) {
  vfloat biased[N], r[N], q[N];
  unroll<N>([&](int i) { f[i] = -min(splat(EXPM1_MAX), f[i]); });
  reduce_argument(f, biased, r);
  expm1_reduced(r, q);
  unroll<N>([&](int i) { r[i] = times_power_of_two(splat(1.0f), biased[i]); });
  // r is 2^n now, and e^r - 1 of the reduced argument is q: 1 - 2^n (1 + q)
  unroll<N>([&](int i) { f[i] = (1.0f - r[i]) - r[i] * q[i]; });
}

inline vfloat exp_negative(vfloat x) {
  vfloat y[1] = {x};
  exp_negative(y);
  return y[0];
}

// e^x for every x; infinity where a float cannot hold it, 0 below EXP_MIN
inline vfloat exponential(vfloat x) {
  vfloat clamped[1] = {min(splat(EXP_MAX), x)}, biased[1], r[1], q[1];  // a NaN stays NaN
  reduce_argument(clamped, biased, r);
  expm1_reduced(r, q);
  vint n = (vint)((vuint)biased[0] << 23) >> 23;  // the low nine bits, with their sign
  // The exponent in two steps: 2^128 is not a float.
  vint half = n >> 1;
  vfloat y = (q[0] + 1.0f) * floats((half + 127) << 23) * floats((n - half + 127) << 23);
  return x < EXP_MIN ? vfloat{} : x > EXP_MAX ? splat(INF) : y;
}

// ln u for normal positive u
inline vfloat logarithm(vfloat u) {
  vint exponent = (vint)((vuint)u - 0x3f3504f3u) >> 23;  // the mantissa lies in [sqrt 1/2, sqrt 2)
  vfloat x = (vfloat)((vuint)u - ((vuint)exponent << 23)) - 1.0f;
  vfloat n = __builtin_convertvector(exponent, vfloat);
  vfloat q = splat(-0.07974216399f);
  q = q * x + 0.1265569779f;
  q = q * x - 0.1298927653f;
  q = q * x + 0.1420994565f;
  q = q * x - 0.1664158159f;
  q = q * x + 0.2000120097f;
  q = q * x - 0.2500030392f;
  q = q * x + 0.3333332994f;
  vfloat correction = q * x * x * x - 0.5f * (x * x) + n * LN2_REST;
  return n * LN2 + (x + correction);
}

}  // namespace softfocus
