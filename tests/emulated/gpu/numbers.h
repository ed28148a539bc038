// Numbers as the hardware has them: halves, and approximations that err by as much as the PTX
// manual allows.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>

template <class To>
To low(uint64_t bits) {
  To value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Signed numbers keep their sign in wider registers, as loads and conversions want it.
template <class From>
uint64_t bits_of(From value) {
  if constexpr (std::is_integral_v<From>) return static_cast<uint64_t>(static_cast<int64_t>(value));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

struct Half {
  _Float16 value;
  Half() = default;
  explicit Half(double x) : value(static_cast<_Float16>(x)) {}
  operator double() const { return static_cast<double>(value); }
};

struct Brain {
  uint16_t bits;
  Brain() = default;
  explicit Brain(double x) {
    // To odd first, so that the second rounding is the only one.
    float near = static_cast<float>(x);
    if (std::isnan(near)) {
      bits = 0x7fff;
      return;
    }
    if (double(near) != x && std::isfinite(near)) {
      if (std::fabs(double(near)) > std::fabs(x)) near = std::nextafter(near, 0.0f);
      near = std::bit_cast<float>(std::bit_cast<uint32_t>(near) | 1u);
    }
    uint32_t wide = std::bit_cast<uint32_t>(near);
    bits = static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  operator double() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// Chooses other errors within the manual's bounds. A test that passes with one choice alone has a
// tolerance that is too small.
inline const uint32_t LUCK = [] {
  const char* chosen = std::getenv("SOFTFOCUS_EMULATED_LUCK");
  return chosen ? 0x9e3779b9u * static_cast<uint32_t>(std::strtoul(chosen, nullptr, 10)) : 0u;
}();

// Between -1 and 1, by nothing but the number: the hardware errs the same way each time.
inline double luck(uint32_t x) {
  x ^= LUCK, x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  return x / 2147483647.5 - 1.0;
}

// What reciprocals err by does not depend on exponents.
inline uint32_t mantissa(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffff; }

inline float off_by(double exact, double relative, uint32_t seed) {
  return static_cast<float>(exact * (1.0 + relative * luck(seed)));
}

inline float exp2_approx(float x, bool flush) {
  if (flush) x = flushed(x);
  if (x == 0.0f) return 1.0f;
  float y = off_by(std::exp2(double(x)), 0x1p-22, std::bit_cast<uint32_t>(x));
  return flush ? flushed(y) : y;
}

inline float log2_approx(float x, bool flush) {
  if (flush) x = flushed(x);
  double y = std::log2(double(x));
  if (x > 0.5f && x < 2.0f) return static_cast<float>(y + 0x1p-22 * luck(std::bit_cast<uint32_t>(x)));
  return off_by(y, 0x1p-22, std::bit_cast<uint32_t>(x));
}

inline float quotient(float a, float b, bool full) {
  if (!full && std::fabs(b) > 0x1p126f && std::isfinite(b)) return std::isinf(a) ? NAN : 0.0f;
  return off_by(double(a) / double(b), 0x1p-22, mantissa(a) * 31 + mantissa(b));
}

// As tensor cores add: the sum cut off, not rounded.
inline float cut_off(double x) {
  float near = static_cast<float>(x);
  return std::isfinite(near) && std::fabs(double(near)) > std::fabs(x) ? std::nextafter(near, 0.0f) : near;
}

// What a product takes of an operand: the low bits are ignored.
inline float tf32(uint64_t bits) { return std::bit_cast<float>(uint32_t(bits) & 0xffffe000u); }

inline uint32_t rounded_to_tf32(float x) {
  return (std::bit_cast<uint32_t>(x) + (std::isfinite(x) ? 0x1000u : 0u)) & 0xffffe000u;
}
