// LASER's shift M of a block, and its exponentiated values e^(V - M).
#pragma once

#include "row_block.h"

namespace softfocus {

// M is 0 for values of ordinary size, whose e^V the key head holds ready. Else M is, for each
// column, the maximum over the keys that every row of the block sees: no future value touches an
// earlier row. Values far above M are clamped and recorded.
struct ColumnShift {
  Buffer<float> shift;  // [value_width]
  Buffer<float> space;  // [BLOCK_K, value_width], e^(V - M) of a tile, unless M is 0
  std::vector<ValueIndex> large;
  bool ordinary = false;      // M is 0
  bool record_large = false;  // in the first sweep

  // Chooses M for a block. `value_space` [BLOCK_K, value_width].
  template <typename Phi>
  void choose(const RowBlock<Phi>& block, float* value_space) {
    const Params& params = block.params;
    int64_t width = block.value_width, begin = block.key_begin, end = block.key_end;
    shift.resize(width);
    std::fill(shift + 0, shift + width, -INF);
    std::vector<uint8_t> common;  // of the keys [begin, end): whether the masks show them to all rows
    for (int64_t r = 0; r < block.n_rows; ++r)
      if (!block.fully_masked[r])
        begin = std::max(begin, block.window_begin[r]), end = std::min(end, block.window_end[r]);
    if (begin < end && block.visible_row(0)) {
      common.assign(end - begin, 1);
      for (int64_t r = 0; r < block.n_rows; ++r)
        for (int64_t j = 0; j < end - begin && !block.fully_masked[r]; ++j)
          common[j] &= block.visible_row(r)[begin - block.key_begin + j];
    }
    block.each_tile([&](int64_t start_k) {
      int64_t first = std::max(begin, block.key_begin + start_k),
              stop = std::min({block.key_begin + start_k + BLOCK_K, params.key_length, end});
      if (first >= stop) return;
      RowView v = view_values(params, *block.head, block.b, block.h / (params.heads / params.key_heads), first, stop,
                              value_space);
      for (int64_t key = first; key < stop; ++key)
        if (common.empty() || common[key - begin])
          for (int64_t d = 0; d < width; d += W)
            store(shift + d, max(load(v.data + (key - first) * v.stride + d), load(shift + d)));
    });
    bool near_zero = true;
    for (int64_t d = 0; d < params.value_dim; ++d) {
      near_zero &= shift[d] == -INF || std::fabs(shift[d]) <= ORDINARY_MAX;
      shift[d] = shift[d] == -INF ? 0.0f : shift[d];
    }
    ordinary = near_zero && block.head->exp_values;
    record_large = true;
    if (ordinary) std::fill(shift + 0, shift + width, 0.0f);
    large.clear();
    if (ordinary) large = block.head->large_values;
    if (!ordinary) space.resize(BLOCK_K * width);
  }

  // e^(V - M) of the keys [first, first + n); calls values() for V only where the key head does not
  // hold the result
  template <typename F>
  RowView exp_values(const KeyHead& head, F&& values, int64_t first, int64_t n, int64_t width, int64_t value_dim) {
    if (ordinary) return {head.exp_values + first * width, width};
    RowView v = values();
    for (int64_t j = 0; j < n; ++j)
      exp_row(v.data + j * v.stride, shift, width, space + j * width, [&](int64_t d) {
        if (record_large && d < value_dim) large.push_back({first + j, d});
      });
    return {space, width};
  }
};

}  // namespace softfocus
