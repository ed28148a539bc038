// Keys and values as the products need them: packed once a head into panels of columns, or natural rows a chunk at a
// time.
#pragma once

#include <vector>

#include "problem.h"

namespace softfocus {

constexpr int64_t PANEL = PANEL_VECTORS * W;  // keys in a panel: [width][PANEL], 16 KB for 64 dimensions
constexpr int64_t CHUNK = 128;                // keys whose rows of 64 floats fill the first-level cache
static_assert(CHUNK % PANEL == 0, "a chunk is whole panels");

struct BrokenValue {
  int64_t key, column;
};

// What is prepared of one key head; every query block of its group reads it.
struct Head {
  Buffer<float> key_panels, inverse_norm;
  Buffer<float> value_panels;  // where the backward is dense; LASER's are e^V
  Buffer<float> values;  // natural rows, mended, [Lk, width in whole vectors]; where such are read and not as they lie
  Buffer<float> exponentials;  // LASER's e^V, [Lk, width in whole vectors]
  Buffer<uint8_t> broken_key;
  std::vector<BrokenValue> broken_values, high_values;
  bool any_broken_key = false;
  bool packed = false;  // not for a few queries: these read the keys as they lie

  static bool keeps_values(const Problem& p, bool backward) {
    return (!backward || p.sharpened || p.laser) && !in_place(p.value, p.dtype, p.value_dim);
  }

  // Bytes of what is reserved, but for what is small
  static int64_t bytes(const Problem& p, bool backward) {
    int64_t columns = p.head_dim + p.value_dim * ((backward && !p.sharpened) + keeps_values(p, backward) + p.laser);
    return 4 * p.key_length * columns;
  }

  void reserve(const Problem& p, bool backward) {
    int64_t length = round_up(p.key_length, CHUNK);
    packed = true;
    key_panels.resize(length * p.head_dim);
    inverse_norm.resize(length);
    broken_key.resize(length);
    if (backward && !p.sharpened) value_panels.resize(length * p.value_dim);
    if (keeps_values(p, backward)) values.resize(p.key_length * round_up(p.value_dim, W));
    if (p.laser) exponentials.resize(p.key_length * round_up(p.value_dim, W));
  }
};

// W rows of whole vectors into columns of a panel
inline void transpose(const float* rows, int64_t row_step, int64_t width, float* panel) {
  for (int64_t d = 0; d < width; d += W) {
    if (d + W <= width) {
      transpose_square(rows + d, row_step, panel + d * PANEL, PANEL);
    } else {
      for (int64_t e = d; e < width; ++e)
        for (int64_t j = 0; j < W; ++j) panel[e * PANEL + j] = rows[j * row_step + e];
    }
  }
}

// The keys [start, stop) of a head into its panels: directions for cosine similarity, 0 for what is not finite. `start`
// is a multiple of CHUNK; keys beyond the last are 0.
inline void pack_keys(const Problem& p, Head& head, int64_t b, int64_t h, int64_t start, int64_t stop) {
  int64_t width = p.head_dim;
  Buffer<float> rows(W * width);
  for (int64_t first = start; first < round_up(stop, PANEL); first += W) {
    for (int64_t j = 0; j < W; ++j) {
      int64_t key = first + j;
      float* row = rows + j * width;
      head.inverse_norm[key] = 1.0f;
      head.broken_key[key] = 0;
      if (key >= stop) {
        std::fill(row, row + width, 0.0f);
        continue;
      }
      read_row(p.key, p.dtype, b, h, key, width, row);
      if (!all_finite(row, width)) {
        head.broken_key[key] = 1;
        head.inverse_norm[key] = 0.0f;
        std::fill(row, row + width, 0.0f);
      } else if (p.cosine) {
        head.inverse_norm[key] = normalise(row, width);
      }
    }
    transpose(rows, width, width, head.key_panels + (first / PANEL * width) * PANEL + first % PANEL);
  }
}

constexpr float CLAMP = 80.0f;  // e^80 is finite, and so is its product with a weight of 0
constexpr float HIGH = 30.0f;   // above the shift + 30, a value that a row sees is summed exactly

// e^(x - shift) of a row of values, whole vectors; the columns that lie high are told to `above`
template <typename F>
inline void exponential_row(const float* x, const float* shift, int64_t width, float* to, F&& above) {
  for (int64_t d = 0; d < width; d += W) {
    vf y = load(x + d) - (shift ? load(shift + d) : vf{});
    vi high = y > HIGH;
    if (any(high))
      for (int i = 0; i < W; ++i)
        if (high[i]) above(d + i);
    store(to + d, exponential(min(y, splat(CLAMP))));
  }
}

// What is asked of the values [start, stop) of a head: which are not finite, natural rows, panels, LASER's exponentials
inline void pack_values(const Problem& p, Head& head, int64_t b, int64_t h, int64_t start, int64_t stop, bool panels,
                        std::vector<BrokenValue>& broken, std::vector<BrokenValue>& high) {
  int64_t width = p.value_dim, step = round_up(width, W);
  Buffer<float> rows(W * step);
  bool direct = p.dtype == FLOAT32 && p.value.stride[3] == 1 && !panels && !head.values && !head.exponentials;
  for (int64_t first = start; first < round_up(stop, PANEL); first += W) {
    if (!panels && first >= stop) break;
    for (int64_t j = 0; j < W; ++j) {
      int64_t key = first + j;
      float* row = rows + j * step;
      if (direct && key < stop && all_finite(row_in_place(p.value, b, h, key), width)) continue;
      std::fill(row, row + step, 0.0f);
      if (key >= stop) continue;
      read_row(p.value, p.dtype, b, h, key, width, row);
      for (int64_t d = 0; d < width && !all_finite(row, width); ++d)
        if (!std::isfinite(row[d])) {
          broken.push_back({key, d});
          row[d] = 0.0f;
        }
      if (head.values) std::copy_n(row, step, head.values + key * step);
      if (!head.exponentials) continue;
      exponential_row(row, nullptr, step, row, [&](int64_t d) { high.push_back({key, d}); });
      std::copy_n(row, step, head.exponentials + key * step);
    }
    if (panels) transpose(rows, step, width, head.value_panels + (first / PANEL * width) * PANEL + first % PANEL);
  }
}

// Natural rows of the keys [start, stop): where they lie if that can be, else copied, converted and mended into
// `space`.
struct Natural {
  const float* data;
  int64_t step;
};

inline Natural natural_values(const Problem& p, const Head& head, int64_t b, int64_t h, int64_t start, int64_t stop,
                              float* space) {
  int64_t width = p.value_dim, step = round_up(width, W);
  if (in_place(p.value, p.dtype, width) && head.broken_values.empty())
    return {row_in_place(p.value, b, h, start), p.value.stride[2]};
  if (head.values) return {head.values + start * step, step};
  for (int64_t key = start; key < stop; ++key) {
    float* row = space + (key - start) * step;
    read_row(p.value, p.dtype, b, h, key, width, row);
    if (!head.broken_values.empty() && !all_finite(row, width))
      for (int64_t d = 0; d < width; ++d) row[d] = std::isfinite(row[d]) ? row[d] : 0.0f;
    std::fill(row + width, row + step, 0.0f);
  }
  return {space, step};
}

inline Natural natural_keys(const Problem& p, const Head& head, int64_t b, int64_t h, int64_t start, int64_t stop,
                            float* space) {
  int64_t width = p.head_dim, step = round_up(width, W);
  if (in_place(p.key, p.dtype, width) && !p.cosine && !head.any_broken_key)
    return {row_in_place(p.key, b, h, start), p.key.stride[2]};
  for (int64_t key = start; key < stop; ++key) {
    float* row = space + (key - start) * step;
    if (head.broken_key[key]) {
      std::fill(row, row + step, 0.0f);
      continue;
    }
    read_row(p.key, p.dtype, b, h, key, width, row);
    if (p.cosine) {
      float inverse = head.inverse_norm[key];
      if (inverse > 1e-30f && inverse < 1e30f)
        for (int64_t d = 0; d < width; ++d) row[d] *= inverse;  // bit-equal to normalise(): its unit is a power of two
      else
        normalise(row, width);
    }
    std::fill(row + width, row + step, 0.0f);
  }
  return {space, step};
}

}  // namespace softfocus
