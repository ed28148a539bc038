// LASER's shift M of a block, and its exponentiated values e^(V - M).
#pragma once

#include "row_block.h"

namespace softfocus {

// The maximum of a column is taken over the keys that every row of the block sees, so that no
// future value affects an earlier row. M is 0 if all column maxima are within SHIFT_TOLERANCE of 0
// and the key head's data holds e^V, which it does not in decoding (the forward of a call of at
// most DECODE_QUERIES queries). Otherwise M is the maximum of each column, or 0 if no key is seen
// by every row. Values above M + LARGE_VALUE are recorded, and exponents are clamped to
// MAX_EXPONENT (laser.h).
struct ColumnShift {
  Buffer<float> shift;    // [padded_value_dim], M
  Buffer<float> scratch;  // [BLOCK_K, padded_value_dim], e^(V - M) of a tile, unless zero_shift
  // Values above their M + LARGE_VALUE: with zero_shift of the key head, else of the block's tiles
  std::vector<ValueIndex> large;
  // M is 0, and the key head's data holds e^V, which is read. In decoding it holds none: this is
  // false even if M is 0. In the backward of the same call it may be true.
  bool zero_shift = false;
  // True in the first pass over the tiles after choose(), in which shifted_exp_values() appends to
  // `large`. Later passes would append the same values again.
  bool record_large = false;

  // Chooses M for a block. value_scratch [BLOCK_K, padded_value_dim] is for values to be copied.
  template <typename Phi>
  void choose(const RowBlock<Phi>& block, float* value_scratch) {
    const Params& params = block.params;
    int64_t padded_value_dim = block.padded_value_dim, begin = block.key_begin, end = block.key_end;
    shift.resize(padded_value_dim);
    std::fill(shift + 0, shift + padded_value_dim, -INF);
    for (int64_t r = 0; r < block.n_rows; ++r)
      if (!block.fully_masked[r])
        begin = std::max(begin, block.window_begin[r]), end = std::min(end, block.window_end[r]);
    std::vector<uint8_t> visible_to_all = keys_visible_to_all(block, begin, end);
    block.each_tile([&](int64_t start_k) {
      int64_t first_key = std::max(begin, block.key_begin + start_k),
              stop_key = std::min({block.key_begin + start_k + BLOCK_K, params.key_length, end});
      if (first_key >= stop_key) return;
      RowView v =
          view_values(params, *block.key_data, block.batch_index, block.key_head, first_key, stop_key, value_scratch);
      for (int64_t key = first_key; key < stop_key; ++key)
        if (visible_to_all.empty() || visible_to_all[key - begin])
          for (int64_t d = 0; d < padded_value_dim; d += W)
            store(shift + d, max(load(v.data + (key - first_key) * v.stride + d), load(shift + d)));
    });
    bool all_small = true;
    // Padding columns may keep -inf. They are computed, from e^MAX_EXPONENT, and ignored.
    for (int64_t d = 0; d < params.value_dim; ++d) {
      all_small &= shift[d] == -INF || std::fabs(shift[d]) <= SHIFT_TOLERANCE;
      shift[d] = shift[d] == -INF ? 0.0f : shift[d];
    }
    zero_shift = all_small && block.key_data->exp_values;
    record_large = true;
    large.clear();
    if (zero_shift) {
      std::fill(shift + 0, shift + padded_value_dim, 0.0f);
      large = block.key_data->large_values;
    } else {
      scratch.resize(BLOCK_K * padded_value_dim);
    }
  }

  // e^(V - M) of the keys [first_key, first_key + n): with zero_shift the key head's e^V, else
  // computed in `scratch`, which the next call overwrites. values() gives V [n, stride].
  template <typename F>
  RowView shifted_exp_values(const KeyHeadData& key_data, F&& values, int64_t first_key, int64_t n,
                             int64_t padded_value_dim, int64_t value_dim) {
    if (zero_shift) return {key_data.exp_values + first_key * padded_value_dim, padded_value_dim};
    RowView v = values();
    for (int64_t t = 0; t < n; ++t)
      exp_row(v.data + t * v.stride, shift, padded_value_dim, scratch + t * padded_value_dim, [&](int64_t d) {
        if (record_large && d < value_dim)  // d >= value_dim is padding
          large.push_back({first_key + t, d});
      });
    return {scratch, padded_value_dim};
  }

 private:
  // [end - begin]: 1 for each of the keys [begin, end) that every row sees, else 0; empty without
  // masks. Fully masked rows do not count.
  template <typename Phi>
  static std::vector<uint8_t> keys_visible_to_all(const RowBlock<Phi>& block, int64_t begin, int64_t end) {
    if (begin >= end || !block.masks_given) return {};
    std::vector<uint8_t> visible_to_all(end - begin, 1);
    for (int64_t r = 0; r < block.n_rows; ++r)
      if (!block.fully_masked[r])
        for (int64_t t = 0; t < end - begin; ++t) visible_to_all[t] &= uint8_t(block.sees(r, begin + t));
    return visible_to_all;
  }
};

}  // namespace softfocus
