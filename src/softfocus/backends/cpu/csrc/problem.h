// What a call is told: plain numbers and pointers, laid out as call.py packs them. And how elements are read.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

#include "vector.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#ifndef SOFTFOCUS_POOL_BYTES  // 0 shows a sanitizer every piece of memory that is taken and given back
#define SOFTFOCUS_POOL_BYTES (16 << 20)
#endif

namespace softfocus {

struct Array {  // a view as it comes; strides count elements, 0 where broadcast; no data where the argument is not
                // given
  const void* data;
  int64_t stride[4];
};

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16 };
enum LengthScale : int64_t { CONSTANT, LOG_N, LOG512_N };
enum ScoreBias : int64_t { NO_BIAS, MINUS_LOG_N, MINUS_LOG_L };
enum Normaliser : int64_t { L1, NONE, ONE_OVER_N, ONE_OVER_L, ONE_OVER_SQRT_HALF_N };

struct Problem {
  int64_t batch, heads, key_heads, query_length, key_length, head_dim, value_dim;
  int64_t left, right;  // the window, -1 for no bound
  int64_t dtype, cosine, length_scale, score_bias, phi, normaliser, sharpened, laser, threads;
  int64_t seed, dropped;  // of dropout: weights whose 16 bits are less than `dropped`
  double scale, power;
  Array query, key, value;           // [B, H, Lq, D], [B, Hk, Lk, D], [B, Hk, Lk, Dv]
  Array mask;                        // bool [B, H, Lq, Lk]
  Array key_mask;                    // bool [B, 1, 1, Lk]
  Array document_ids;                // int64 [B, 1, 1, Lk]
  Array bias;                        // float32 [B, H, Lq, Lk]
  const float *head_scale, *powers;  // [H] or null
};

constexpr float TIE = 128 * std::numeric_limits<float>::epsilon();  // reference.tie_tolerance
constexpr int64_t FREE_ROWS = 3;                                    // reference.FREE_ROWS

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Memory given back is kept for the next call, a few pieces of it: fresh pages cost more than the work on short
// sequences.
class Pool {
 public:
  // `whole`: all of it will be used, so that huge pages waste nothing
  static void* take(int64_t bytes, bool whole) {
    Pool& pool = instance();
    {
      std::lock_guard<std::mutex> lock(pool.mutex_);
      for (Piece& piece : pool.pieces_)
        if (piece.data && piece.bytes == bytes) return pool.held_ -= bytes, std::exchange(piece.data, nullptr);
    }
    bool large = whole && bytes >= HUGE_PAGE;
    void* data = std::aligned_alloc(large ? HUGE_PAGE : 64, large ? round_up(bytes, HUGE_PAGE) : bytes);
    if (!data) throw std::bad_alloc();
#if defined(__linux__)
    if (large) madvise(data, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);  // only a wish; fewer page tables to walk
#endif
    return data;
  }

  static void give(void* data, int64_t bytes) {
    Pool& pool = instance();
    std::lock_guard<std::mutex> lock(pool.mutex_);
    Piece& oldest = pool.pieces_[pool.next_];
    if (bytes > MOST / 2) return std::free(data);
    pool.next_ = (pool.next_ + 1) % PIECES;
    if (oldest.data) pool.held_ -= oldest.bytes, std::free(oldest.data);
    oldest = {nullptr, 0};
    if (pool.held_ + bytes > MOST) return std::free(data);
    oldest = {data, bytes};
    pool.held_ += bytes;
  }

 private:
  struct Piece {
    void* data;
    int64_t bytes;
  };
  static constexpr int64_t HUGE_PAGE = 2 << 20;
  static constexpr int64_t MOST = SOFTFOCUS_POOL_BYTES, PIECES = 64;
  static Pool& instance() {
    static Pool* pool = make();
    return *pool;
  }
  static Pool* make() {
#if defined(__unix__) || defined(__APPLE__)
    // A child that is forked while another thread is in here must not inherit a lock that nobody will open
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
#endif
    return new Pool;  // never destroyed: threads may outlive static objects
  }
  std::mutex mutex_;
  Piece pieces_[PIECES] = {};
  int64_t next_ = 0, held_ = 0;
};

// Memory on a cache line's border; not initialised.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n, bool whole = true) { resize(n, whole); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }
  void resize(int64_t n, bool whole = true) {
    int64_t bytes = round_up(std::max<int64_t>(n, 1) * int64_t(sizeof(T)), 64);
    if (bytes == bytes_) return;
    release();
    data_ = static_cast<T*>(Pool::take(bytes, whole));
    bytes_ = bytes;
  }
  operator T*() { return data_; }
  operator const T*() const { return data_; }

 private:
  void release() {
    if (data_) Pool::give(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
  }
  T* data_ = nullptr;
  int64_t bytes_ = 0;
};

// A row of a [B, H, L, width] array as floats
inline void read_row(const Array& x, int64_t dtype, int64_t b, int64_t h, int64_t i, int64_t width, float* to) {
  int64_t at = b * x.stride[0] + h * x.stride[1] + i * x.stride[2], step = x.stride[3];
  if (dtype == FLOAT32) {
    const float* from = static_cast<const float*>(x.data) + at;
    if (step == 1)
      std::memcpy(to, from, width * sizeof(float));
    else
      for (int64_t k = 0; k < width; ++k) to[k] = from[k * step];
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + at;
    auto wide = [&](vs y) { return dtype == BFLOAT16 ? from_bfloat16(y) : from_float16(y); };
    int64_t k = 0;
    for (; step == 1 && k + W <= width; k += W) store(to + k, wide(*(const vs_anywhere*)(from + k)));
    for (; k < width; ++k) to[k] = wide(vs{from[k * step]})[0];
  }
}

// A row of floats into a result of a dtype, from its element `at` on; nothing where it lies there already
inline void write_row(void* result, int64_t dtype, int64_t at, const float* from, int64_t width) {
  if (dtype == FLOAT32) {
    float* to = static_cast<float*>(result) + at;
    if (to != from) std::copy_n(from, width, to);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(result) + at;
  auto rounded = [&](vf x) { return dtype == BFLOAT16 ? to_bfloat16(x) : to_float16(x); };
  int64_t d = 0;
  for (; d + W <= width; d += W) *(vs_anywhere*)(to + d) = rounded(load(from + d));
  for (; d < width; ++d) to[d] = rounded(splat(from[d]))[0];
}

template <typename T = float>
inline const T* row_in_place(const Array& x, int64_t b, int64_t h, int64_t i) {
  return static_cast<const T*>(x.data) + b * x.stride[0] + h * x.stride[1] + i * x.stride[2];
}

// Whether rows can be used where they lie: elements side by side, whole vectors; and in_place, floats besides
inline bool side_by_side(const Array& x, int64_t width) { return x.stride[3] == 1 && width % W == 0; }
inline bool in_place(const Array& x, int64_t dtype, int64_t width) {
  return dtype == FLOAT32 && side_by_side(x, width);
}

// Calls f with an element of a dtype
template <typename F>
inline void with_element(int64_t dtype, F&& f) {
  if (dtype == FLOAT32) return f(float{});
  if (dtype == BFLOAT16) return f(bfloat16{});
  f(float16{});
}

// The power of two that brings a normal positive number to [1, 2), but for the largest and the smallest
inline float power_of_two(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  uint32_t exponent = std::clamp<uint32_t>(254 - (wide >> 23), 1, 253) << 23;
  float y;
  std::memcpy(&y, &exponent, 4);
  return y;
}

// x / |x| in place; returns 1 / |x|. Zero vectors stay zero and return 0, so that no gradient passes them.
inline float normalise(float* x, int64_t n) {
  vf tops = vf{};
  int64_t k = 0;
  for (; k + W <= n; k += W) tops = max(absolute(load(x + k)), tops);
  float high = largest(tops);
  for (; k < n; ++k) high = std::max(high, std::fabs(x[k]));
  if (high < std::numeric_limits<float>::min()) {
    std::fill(x, x + n, 0.0f);
    return 0.0f;
  }
  float unit = power_of_two(high);  // squares of x * unit neither overflow nor vanish
  vf squares = vf{};
  for (k = 0; k + W <= n; k += W) {
    vf y = load(x + k) * unit;
    squares += y * y;
  }
  float rest = sum(squares);
  for (; k < n; ++k) rest += (x[k] * unit) * (x[k] * unit);
  float inverse = 1.0f / std::sqrt(rest);
  for (k = 0; k + W <= n; k += W) store(x + k, load(x + k) * unit * inverse);
  for (; k < n; ++k) x[k] = x[k] * unit * inverse;
  return inverse * unit;
}

// dL/d(x/|x|) to dL/dx, in place
inline void normalise_backward(float* grad, const float* direction, float inverse_norm, int64_t n) {
  if (n == 1) inverse_norm = 0.0f;  // a line's direction does not turn; the rounding of 1 / |x| would pass for a turn
  vf products = vf{};
  int64_t k = 0;
  for (; k + W <= n; k += W) products += load(grad + k) * load(direction + k);
  float along = sum(products);
  for (; k < n; ++k) along += grad[k] * direction[k];
  for (k = 0; k < n; ++k) grad[k] = (grad[k] - direction[k] * along) * inverse_norm;
}

// The half-open range of keys that the window lets a query see
inline void window(const Problem& p, int64_t query, int64_t& low, int64_t& high) {
  int64_t at = query + p.key_length - p.query_length;
  low = p.left < 0 ? 0 : std::max<int64_t>(0, at - p.left);
  high = p.right < 0 ? p.key_length : std::min(p.key_length, at + p.right + 1);
  if (high < low) high = low;
}

inline bool has_masks(const Problem& p) { return p.mask.data || p.key_mask.data || p.document_ids.data; }

// Whether the masks, the window aside, let each of the keys [low, high) be seen
inline void masks_row(const Problem& p, int64_t b, int64_t h, int64_t query, int64_t low, int64_t high, uint8_t* to) {
  std::memset(to, 1, high - low);
  if (p.key_mask.data) {
    const uint8_t* x = static_cast<const uint8_t*>(p.key_mask.data) + b * p.key_mask.stride[0];
    for (int64_t j = low; j < high; ++j) to[j - low] &= x[j * p.key_mask.stride[3]] != 0;
  }
  if (p.document_ids.data) {
    const int64_t* x = static_cast<const int64_t*>(p.document_ids.data) + b * p.document_ids.stride[0];
    int64_t step = p.document_ids.stride[3], mine = x[(query + p.key_length - p.query_length) * step];
    for (int64_t j = low; j < high; ++j) to[j - low] &= uint8_t(x[j * step] == mine);
  }
  if (p.mask.data) {
    const uint8_t* x = static_cast<const uint8_t*>(p.mask.data) + b * p.mask.stride[0] + h * p.mask.stride[1] +
                       query * p.mask.stride[2];
    for (int64_t j = low; j < high; ++j) to[j - low] &= x[j * p.mask.stride[3]] != 0;
  }
}

// c_i without the head's own factor; the row's own bias; what multiplies phi where the normaliser does not depend on
// phi
inline float row_scale(const Problem& p, float count) {
  float log_n = std::log(std::max(count, 1.0f));
  float length = p.length_scale == LOG_N ? log_n : p.length_scale == LOG512_N ? log_n / std::log(512.0f) : 1.0f;
  return float(p.scale) * length;
}

inline float row_bias(const Problem& p, float count) {
  if (p.score_bias == MINUS_LOG_N) return -std::log(std::max(count, 1.0f));
  return p.score_bias == MINUS_LOG_L ? -std::log(float(std::max<int64_t>(p.key_length, 1))) : 0.0f;
}

inline float row_factor(const Problem& p, float count) {
  if (p.normaliser == ONE_OVER_N) return 1.0f / std::max(count, 1.0f);
  if (p.normaliser == ONE_OVER_SQRT_HALF_N) return 1.0f / std::sqrt(std::max(count, 1.0f) / 2.0f);
  return p.normaliser == ONE_OVER_L ? 1.0f / float(std::max<int64_t>(p.key_length, 1)) : 1.0f;
}

}  // namespace softfocus
