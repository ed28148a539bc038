// Keys and values of a key head in the forms that the products read: packed panels, or rows of
// whole vectors. A non-finite element of a value is replaced by 0. A key with a non-finite element
// is replaced by 0 as a whole. The positions of both are recorded.
#pragma once

#include <vector>

#include "amx_tiles.h"
#include "laser.h"
#include "memory.h"
#include "tensor.h"
#include "tiling.h"

namespace softfocus {

struct ValueIndex {  // an element of V
  int64_t key, column;
};

// Keys and values of one key head, prepared for the products. All query heads of its group read
// them. Panels and the buffers with one element per key are allocated for Lk rounded up to BLOCK_K.
// They are filled up to the end of the last key's panel, in which the keys after the last one are
// 0. Later panels are neither written nor read.
struct KeyHeadData {
  Buffer<float> key_panels;  // [Lk / PANEL, D, PANEL]; unit vectors for cosine similarity
  // Where uses_amx(), in place of key_panels: [Lk / 16, D / 32, 16 pairs of dimensions, 16 keys,
  // 2], D rounded up to 32. A non-finite key is 0.
  Buffer<bfloat16> amx_keys;
  // [Lk], with amx_keys: what pack_amx_row() returned for a key, a factor of its dot products
  Buffer<float> key_dot_factor;
  // [Lk]; with cosine similarity 1 / |k|, or 0 for a key whose elements are all 0 or subnormal.
  // Without it 1. A non-finite key has 0 in both cases
  Buffer<float> key_rnorm;
  // [Lk / PANEL, Dv, PANEL], for a backward without re-weighting: V, with LASER e^V
  Buffer<float> value_panels;
  Buffer<float> value_rows;       // [Lk, Dv in whole vectors], V (needs_value_rows()); padding is 0
  Buffer<float> exp_values;       // [Lk, Dv in whole vectors], LASER's e^V; padding is not used
  Buffer<uint8_t> key_nonfinite;  // [Lk], whether a key has a non-finite element
  std::vector<ValueIndex> nonfinite_values;
  std::vector<ValueIndex> large_values;  // above LARGE_VALUE (laser.h), for LASER
  bool any_nonfinite_key = false;
  // False in decoding, which packs neither keys nor values; true in the backward of the same call
  bool packed = false;

  // A backward without re-weighting reads panels (compute_dense_grad_weights()).
  static bool needs_value_panels(const Params& params, bool backward) { return backward && !params.reweighted; }

  // A forward and a re-weighted or LASER backward read values as rows. They are copied unless they
  // can be read in place. A LASER backward without re-weighting reads both panels and rows.
  static bool needs_value_rows(const Params& params, bool backward) {
    return (!needs_value_panels(params, backward) || params.laser) &&
           !contiguous_float_rows(params.value, params.dtype, params.value_dim);
  }

  // Bytes of the large buffers, without padding, except that D is rounded up to 32 for AMX
  static int64_t bytes(const Params& params, bool backward) {
    // Floats per key; AMX's keys have half the size.
    int64_t key_columns = uses_amx(params) ? round_up(params.head_dim, AMX_DIMS) / 2 : params.head_dim;
    int64_t columns = key_columns + params.value_dim * (needs_value_panels(params, backward) +
                                                        needs_value_rows(params, backward) + params.laser);
    return 4 * params.key_length * columns;
  }

  // Allocates what pack_keys() and pack_values() fill.
  void reserve(const Params& params, bool backward) {
    int64_t length = round_up(params.key_length, BLOCK_K);
    packed = true;
    if (uses_amx(params)) {
      amx_keys.resize(length * round_up(params.head_dim, AMX_DIMS));
      key_dot_factor.resize(length);
    } else {
      key_panels.resize(length * params.head_dim);
    }
    key_rnorm.resize(length);
    key_nonfinite.resize(length);
    if (needs_value_panels(params, backward)) value_panels.resize(length * params.value_dim);
    if (needs_value_rows(params, backward)) value_rows.resize(params.key_length * round_up(params.value_dim, W));
    if (params.laser) exp_values.resize(params.key_length * round_up(params.value_dim, W));
  }
};

// The W rows [W, width] become W columns of a panel [width, PANEL]. `panel` is the address of the
// first of these columns. Dimensions after the last whole vector are copied one by one.
inline void transpose_rows(const float* rows, int64_t row_stride, int64_t width, float* panel) {
  for (int64_t d = 0; d < width; d += W) {
    if (d + W <= width) {
      transpose_square(rows + d, row_stride, panel + d * PANEL, PANEL);
    } else {
      for (int64_t dim = d; dim < width; ++dim)
        for (int64_t t = 0; t < W; ++t) panel[dim * PANEL + t] = rows[t * row_stride + dim];
    }
  }
}

// Packs the keys [start, stop) of a head into its panels, or amx_keys, and sets their
// key_dot_factor, key_rnorm and key_nonfinite. A non-finite key becomes 0, and so do the keys that
// fill the last panel. `start` is a multiple of BLOCK_K.
inline void pack_keys(const Params& params, KeyHeadData& key_data, int64_t b, int64_t key_head, int64_t start,
                      int64_t stop) {
  int64_t width = params.head_dim, amx_width = round_up(width, AMX_DIMS);
  bool amx = uses_amx(params);
  Buffer<float> rows(W * width);                       // [W, D]
  Buffer<bfloat16> amx_rows(amx ? W * amx_width : 0);  // [W, amx_width]
  for (int64_t first = start; first < round_up(stop, PANEL); first += W) {
    for (int64_t t = 0; t < W; ++t) {
      int64_t key = first + t;
      float* row = rows + t * width;
      key_data.key_rnorm[key] = 1.0f;
      key_data.key_nonfinite[key] = 0;
      if (key >= stop)
        std::fill(row, row + width, 0.0f);
      else
        read_row(params.key, params.dtype, b, key_head, key, width, row);
      if (!all_finite(row, width)) {
        key_data.key_nonfinite[key] = 1;
        key_data.key_rnorm[key] = 0.0f;
        std::fill(row, row + width, 0.0f);
      }
      if (amx) key_data.key_dot_factor[key] = pack_amx_row(row, width, params.cosine, amx_rows + t * amx_width);
      if (params.cosine && key < stop && !key_data.key_nonfinite[key])
        key_data.key_rnorm[key] = l2_normalise(row, width);
    }
    if (amx)
      transpose_amx_pairs(amx_rows, amx_width, key_data.amx_keys + first * amx_width);
    else
      transpose_rows(rows, width, width, key_data.key_panels + (first / PANEL * width) * PANEL + first % PANEL);
  }
}

// Reads the values [start, stop) of a head, fills value_rows and exp_values where they are
// allocated, and value_panels if `panels`. Appends non-finite and large values to the lists.
inline void pack_values(const Params& params, KeyHeadData& key_data, int64_t b, int64_t key_head, int64_t start,
                        int64_t stop, bool panels, std::vector<ValueIndex>& nonfinite, std::vector<ValueIndex>& large) {
  int64_t width = params.value_dim, stride = round_up(width, W);
  Buffer<float> rows(W * stride);  // [W, Dv in whole vectors]
  // Without a buffer to fill, values are only searched for non-finite elements. float32 rows are
  // then searched in place, without a copy.
  bool search_in_place =
      params.dtype == FLOAT32 && params.value.stride[3] == 1 && !panels && !key_data.value_rows && !key_data.exp_values;
  for (int64_t first = start; first < round_up(stop, PANEL); first += W) {
    if (!panels && first >= stop) break;
    for (int64_t t = 0; t < W; ++t) {
      int64_t key = first + t;
      float* row = rows + t * stride;
      if (search_in_place && key < stop && all_finite(row_pointer(params.value, b, key_head, key), width)) continue;
      std::fill(row, row + stride, 0.0f);
      if (key >= stop) continue;
      read_row(params.value, params.dtype, b, key_head, key, width, row);
      // The loop stops when no non-finite element is left.
      for (int64_t d = 0; d < width && !all_finite(row, width); ++d)
        if (!std::isfinite(row[d])) {
          nonfinite.push_back({key, d});
          row[d] = 0.0f;
        }
      if (key_data.value_rows) std::copy_n(row, stride, key_data.value_rows + key * stride);
      if (!key_data.exp_values) continue;
      exp_row(row, nullptr, stride, row, [&](int64_t d) { large.push_back({key, d}); });
      std::copy_n(row, stride, key_data.exp_values + key * stride);
    }
    if (panels)
      transpose_rows(rows, stride, width, key_data.value_panels + (first / PANEL * width) * PANEL + first % PANEL);
  }
}

// Rows of whole vectors. [n, stride] stands for n rows, `stride` floats from one row to the next.
struct RowView {
  const float* data;
  int64_t stride;
};

// The values [start, stop): in place if they can be read there, else in value_rows, or copied to
// `scratch` [stop - start, Dv in whole vectors]. If nonfinite_values lists an element of the head,
// no rows are read in place, and non-finite elements are 0. The first pass of decoding
// without LASER has no list yet: it reads values as given. Padding is 0.
inline RowView view_values(const Params& params, const KeyHeadData& key_data, int64_t b, int64_t key_head,
                           int64_t start, int64_t stop, float* scratch) {
  int64_t width = params.value_dim, stride = round_up(width, W);
  if (contiguous_float_rows(params.value, params.dtype, width) && key_data.nonfinite_values.empty())
    return {row_pointer(params.value, b, key_head, start), params.value.stride[2]};
  if (key_data.value_rows) return {key_data.value_rows + start * stride, stride};
  for (int64_t key = start; key < stop; ++key) {
    float* row = scratch + (key - start) * stride;
    read_row(params.value, params.dtype, b, key_head, key, width, row);
    if (!key_data.nonfinite_values.empty() && !all_finite(row, width))
      for (int64_t d = 0; d < width; ++d) row[d] = std::isfinite(row[d]) ? row[d] : 0.0f;
    std::fill(row + width, row + stride, 0.0f);
  }
  return {scratch, stride};
}

// The keys [start, stop) of a packed head, unit vectors for cosine similarity: in place, or copied
// to `scratch` [stop - start, D in whole vectors]. A non-finite key and padding are 0.
inline RowView view_keys(const Params& params, const KeyHeadData& key_data, int64_t b, int64_t key_head, int64_t start,
                         int64_t stop, float* scratch) {
  int64_t width = params.head_dim, stride = round_up(width, W);
  if (contiguous_float_rows(params.key, params.dtype, width) && !params.cosine && !key_data.any_nonfinite_key)
    return {row_pointer(params.key, b, key_head, start), params.key.stride[2]};
  for (int64_t key = start; key < stop; ++key) {
    float* row = scratch + (key - start) * stride;
    if (key_data.key_nonfinite[key]) {
      std::fill(row, row + stride, 0.0f);
      continue;
    }
    read_row(params.key, params.dtype, b, key_head, key, width, row);
    if (params.cosine) {
      float rnorm = key_data.key_rnorm[key];
      // x * rnorm has the bits of l2_normalise(), because its prescale is a power of two. Results
      // that are subnormal may differ.
      if (rnorm > SAFE_MIN && rnorm < SAFE_MAX)
        for (int64_t d = 0; d < width; ++d) row[d] *= rnorm;
      else
        l2_normalise(row, width);
    }
    std::fill(row + width, row + stride, 0.0f);
  }
  return {scratch, stride};
}

}  // namespace softfocus
