// Part of class BlockOutput; included by output.h. Re-weighted rows in decoding, without LASER.
#pragma once

#include "output.h"

namespace softfocus {

// Adds u^p times the values of the live keys of a row to `out`. No other values are read. Returns
// sum u^p. The live keys of LISTS tiles of the row are listed, and their values prefetched, before
// any list is used. (Otherwise add_live_tiles() lists LISTS rows of one tile.)
template <typename Phi>
template <bool DROPOUT, typename T>
inline float BlockOutput<Phi>::add_live_values(const RowBlock<Phi>& block, int64_t r) {
  const Params& params = block.params;
  int64_t padded_value_dim = block.padded_value_dim, batch_index = block.batch_index, key_head = block.key_head;
  bool in_place = contiguous_rows(params.value, params.value_dim);
  std::vector<int64_t> listed_tiles;  // start_k of each tile whose live keys are listed
  DoubleSum power_sum;
  auto add_lists = [&] {  // of the listed tiles
    for (size_t i = 0; i < listed_tiles.size(); ++i) {
      power_sum.add(live.template raise_to_power<DROPOUT>(i, block.power[r]));
      int64_t n = live.length[i], first_key = block.key_begin + listed_tiles[i];
      const uint8_t* keys = live.keys_of(i);
      auto add_values = [&](const auto* values, int64_t stride) {
        add_listed_rows(padded_value_dim / W, n, keys, live.u_of(i), values, stride, out + r * padded_value_dim);
      };
      if (in_place) {
        add_values(row_pointer<T>(params.value, batch_index, key_head, first_key), params.value.stride[2]);
        continue;
      }
      for (int64_t e = 0; e < n; ++e) {
        float* row = value_scratch + keys[e] * padded_value_dim;
        read_row(params.value, params.dtype, batch_index, key_head, first_key + keys[e], params.value_dim, row);
        std::fill(row + params.value_dim, row + padded_value_dim, 0.0f);
      }
      add_values(static_cast<const float*>(value_scratch), padded_value_dim);
    }
    listed_tiles.clear();
  };
  if (!block.fully_masked[r])
    block.each_tile([&](int64_t start_k) {
      int64_t i = listed_tiles.size();
      live.length[i] = block.template gather_live<DROPOUT>(r, start_k, live.keys_of(i), live.u_of(i));
      listed_tiles.push_back(start_k);
      if (in_place)
        for (int64_t e = 0; e < live.length[i]; ++e) {
          const T* row =
              row_pointer<T>(params.value, batch_index, key_head, block.key_begin + start_k + live.keys_of(i)[e]);
          for (int64_t d = 0; d < padded_value_dim; d += CACHE_LINE / sizeof(T)) __builtin_prefetch(row + d);
        }
      if (listed_tiles.size() == LISTS) add_lists();
    });
  add_lists();
  return float(power_sum.total());
}

}  // namespace softfocus
