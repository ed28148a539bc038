// Elements and rows of tensors: read as floats, written in a dtype, and normalised for cosine
// similarity.
#pragma once

#include <algorithm>

#include "params.h"
#include "vector.h"

namespace softfocus {

inline vfloat from_bfloat16(vhalf x) { return floats((vint)(__builtin_convertvector(x, vuint) << 16)); }

inline vfloat from_float16(vhalf x) {
  vuint u = __builtin_convertvector(x, vuint), magnitude = u & 0x7fff;
  // The exponent biases differ by 112. Below 0x400 are subnormal float16 numbers, multiples of
  // 2^-24, which is the ulp of 0.5: no step takes a subnormal float, which the processor may flush
  // to 0 (torch.set_flush_denormal). 0x7c00 is infinity; above it are NaNs.
  vuint subnormal = (vuint)(floats((vint)(magnitude + 0x3f000000u)) - 0.5f);
  vuint y = magnitude < 0x400 ? subnormal : (magnitude << 13) + (112u << 23);
  y |= magnitude >= 0x7c00 ? (vuint)splat(0x7f800000) : vuint{};
  return floats((vint)(y | (u & 0x8000) << 16));
}

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};
inline vfloat load(const bfloat16* p) { return from_bfloat16(*(const vhalf_unaligned*)p); }
inline vfloat load(const float16* p) { return from_float16(*(const vhalf_unaligned*)p); }

// Rounds to nearest, ties to even, as torch does
inline vhalf to_bfloat16(vfloat x) {
  vuint u = (vuint)x;
  u = x == x ? (u + 0x7fff + (u >> 16 & 1)) >> 16 : (vuint)splat(0x7fc0);
  return __builtin_convertvector(u, vhalf);
}

inline vhalf to_float16(vfloat x) {
  vuint sign = (vuint)x >> 16 & 0x8000;
  x = absolute(x);
  vuint normal = ((vuint)x - (112u << 23) + 0xfff + ((vuint)x >> 13 & 1)) >> 13;
  // The ulp of x + 0.5 is 2^-24, the ulp of subnormal float16 numbers, so the addition rounds.
  vuint subnormal = (vuint)(x + 0.5f) - 0x3f000000u;
  // float16 numbers are normal from 2^-14 on. From 65520 on they round to infinity (0x7c00). 0x7e00
  // is NaN.
  vuint u = x < 0x1p-14f ? subnormal : normal;
  u = x < 65520.0f ? u : x == x ? (vuint)splat(0x7c00) : (vuint)splat(0x7e00);
  return __builtin_convertvector(u | sign, vhalf);
}

// Counted so that Python can refuse a dtype that the kernels lack (__init__.py). Every switch over
// Dtype has a case for each of its values (-Werror=switch).
constexpr int64_t count_dtypes() {
  int64_t n = 0;
  for (bool known = true; known; n += known) {
    known = false;
    switch (Dtype(n)) {
      case FLOAT32:
      case BFLOAT16:
      case FLOAT16:
        known = true;
    }
  }
  return n;
}

// One element of x [B, H, L, width], as a float
inline float read_element(const TensorView& x, int64_t dtype, int64_t b, int64_t h, int64_t i, int64_t d) {
  int64_t offset = b * x.stride[0] + h * x.stride[1] + i * x.stride[2] + d * x.stride[3];
  switch (Dtype(dtype)) {
    case FLOAT32:
      return static_cast<const float*>(x.data)[offset];
    case BFLOAT16:
      return from_bfloat16(vhalf{static_cast<const uint16_t*>(x.data)[offset]})[0];
    case FLOAT16:
      return from_float16(vhalf{static_cast<const uint16_t*>(x.data)[offset]})[0];
  }
  return std::numeric_limits<float>::quiet_NaN();  // a number without a case
}

// Copies row i of head h of x [B, H, L, width] to `to` [width], as floats. Nothing is written after
// `width` elements.
inline void read_row(const TensorView& x, int64_t dtype, int64_t b, int64_t h, int64_t i, int64_t width, float* to) {
  int64_t offset = b * x.stride[0] + h * x.stride[1] + i * x.stride[2], stride = x.stride[3];
  auto copy = [&](const float* from) {
    if (stride == 1)
      std::memcpy(to, from, width * sizeof(float));
    else
      for (int64_t k = 0; k < width; ++k) to[k] = from[k * stride];
  };
  auto widen = [&](const uint16_t* from, auto to_float) {
    int64_t k = 0;
    for (; stride == 1 && k + W <= width; k += W) store(to + k, to_float(*(const vhalf_unaligned*)(from + k)));
    for (; k < width; ++k) to[k] = to_float(vhalf{from[k * stride]})[0];
  };
  switch (Dtype(dtype)) {
    case FLOAT32:
      return copy(static_cast<const float*>(x.data) + offset);
    case BFLOAT16:
      return widen(static_cast<const uint16_t*>(x.data) + offset, [](vhalf y) { return from_bfloat16(y); });
    case FLOAT16:
      return widen(static_cast<const uint16_t*>(x.data) + offset, [](vhalf y) { return from_float16(y); });
  }
}

// Writes `width` floats to a contiguous tensor, from its element `offset` on, in the tensor's
// dtype. For float32, `from` may point to that element itself.
inline void write_row(void* tensor, int64_t dtype, int64_t offset, const float* from, int64_t width) {
  auto copy = [&](float* to) {
    if (to != from) std::copy_n(from, width, to);
  };
  auto narrow = [&](uint16_t* to, auto to_half) {
    int64_t d = 0;
    for (; d + W <= width; d += W) *(vhalf_unaligned*)(to + d) = to_half(load(from + d));
    for (; d < width; ++d) to[d] = to_half(splat(from[d]))[0];
  };
  switch (Dtype(dtype)) {
    case FLOAT32:
      return copy(static_cast<float*>(tensor) + offset);
    case BFLOAT16:
      return narrow(static_cast<uint16_t*>(tensor) + offset, [](vfloat x) { return to_bfloat16(x); });
    case FLOAT16:
      return narrow(static_cast<uint16_t*>(tensor) + offset, [](vfloat x) { return to_float16(x); });
  }
}

// Pointer to row i of head h of x [B, H, L, width], whose elements are of type T
template <typename T = float>
inline const T* row_pointer(const TensorView& x, int64_t b, int64_t h, int64_t i) {
  return static_cast<const T*>(x.data) + b * x.stride[0] + h * x.stride[1] + i * x.stride[2];
}

// Whether rows are contiguous and whole vectors, so that vectors can be loaded in place; the second
// function also asks for float32
inline bool contiguous_rows(const TensorView& x, int64_t width) { return x.stride[3] == 1 && width % W == 0; }
inline bool contiguous_float_rows(const TensorView& x, int64_t dtype, int64_t width) {
  return dtype == FLOAT32 && contiguous_rows(x, width);
}

// Calls f(float{}), f(bfloat16{}) or f(float16{}): turns a Dtype number into a type
template <typename F>
inline void with_element(int64_t dtype, F&& f) {
  switch (Dtype(dtype)) {
    case FLOAT32:
      return f(float{});
    case BFLOAT16:
      return f(bfloat16{});
    case FLOAT16:
      return f(float16{});
  }
}

// Between these bounds a number and its inverse are both far from overflow and underflow.
constexpr float SAFE_MIN = 1e-30f, SAFE_MAX = 1e30f;

// The power of two whose product with x, positive and normal, is in [1, 2). For an x from 2^127 on
// that would be subnormal: it is 2^-126, and the product is in [2, 4). For a subnormal x or 0 it is
// 2^126.
inline float inverse_power_of_two(float x) {
  uint32_t x_bits;
  std::memcpy(&x_bits, &x, 4);
  uint32_t y_bits = std::clamp<uint32_t>(254 - (x_bits >> 23), 1, 253) << 23;
  float y;
  std::memcpy(&y, &y_bits, 4);
  return y;
}

// x * prescale * scaled_rnorm is x / |x|. The prescale is a power of two, so that the sum of the
// squares of x * prescale neither overflows nor underflows. scaled_rnorm is 1 / |x * prescale|; for
// a vector without a normal element it is 0.
struct Norm {
  float prescale, scaled_rnorm;
};

inline Norm l2_norm(const float* x, int64_t n) {
  vfloat maxima = vfloat{};
  int64_t k = 0;
  for (; k + W <= n; k += W) maxima = max(absolute(load(x + k)), maxima);
  float largest = reduce_max(maxima);
  for (; k < n; ++k) largest = std::max(largest, std::fabs(x[k]));
  float prescale = inverse_power_of_two(largest);
  if (largest < std::numeric_limits<float>::min()) return {prescale, 0.0f};
  vfloat squares = vfloat{};
  for (k = 0; k + W <= n; k += W) {
    vfloat y = load(x + k) * prescale;
    squares += y * y;
  }
  float sum = reduce_sum(squares);
  for (; k < n; ++k) sum += (x[k] * prescale) * (x[k] * prescale);
  return {prescale, 1.0f / std::sqrt(sum)};
}

// Replaces x [n] by x / |x|; returns 1 / |x|. A vector without a normal element becomes 0, and 0 is
// returned, so that no gradient passes through it, as in reference.unit.
inline float l2_normalise(float* x, int64_t n) {
  auto [prescale, scaled_rnorm] = l2_norm(x, n);
  if (scaled_rnorm == 0.0f) {
    std::fill(x, x + n, 0.0f);
    return 0.0f;
  }
  int64_t k = 0;
  for (; k + W <= n; k += W) store(x + k, load(x + k) * prescale * scaled_rnorm);
  for (; k < n; ++k) x[k] = x[k] * prescale * scaled_rnorm;
  return scaled_rnorm * prescale;
}

// Turns dL/d(x / |x|) into dL/dx, in place: grad [n]. `unit` [n] is x / |x|, and `rnorm` is what
// l2_normalise() returned.
inline void l2_normalise_backward(float* grad, const float* unit, float rnorm, int64_t n) {
  if (n == 1) rnorm = 0.0f;  // x / |x| of one element is its sign; rounding would give it a gradient
  vfloat products = vfloat{};
  int64_t k = 0;
  for (; k + W <= n; k += W) products += load(grad + k) * load(unit + k);
  float parallel = reduce_sum(products);
  for (; k < n; ++k) parallel += grad[k] * unit[k];
  for (k = 0; k < n; ++k) grad[k] = (grad[k] - unit[k] * parallel) * rnorm;
}

// The dot product of x and y [width]; `width` is a multiple of W
inline float dot(const float* x, const float* y, int64_t width) {
  vfloat sums = vfloat{};
  for (int64_t d = 0; d < width; d += W) sums += load(x + d) * load(y + d);
  return reduce_sum(sums);
}

}  // namespace softfocus
