// Part of class RowBlock; included by row_block.h. From queries and keys to stored scores, with the
// sum of phi and the maximum of each row.
#pragma once

#include "row_block.h"

namespace softfocus {

// Reads the rows' queries. Sets the constants of their scores that depend on the query and on N_i
// alone: s = dot product * dot_scale + row_bias + b_ij, on AMX also times the key's key_dot_factor.
template <typename Phi>
inline void RowBlock<Phi>::read_queries() {
  int64_t amx_width = round_up(params.head_dim, AMX_DIMS);
  if (amx) std::fill(amx_queries + n_rows * amx_width, amx_queries + BLOCK_Q * amx_width, bfloat16{0});
  for (int64_t r = 0; r < padded_rows(); ++r) {
    float* query = queries + r * padded_dim;
    std::fill(query, query + padded_dim, 0.0f);
    query_nonfinite[r] = false;
    base_scale[r] = row_bias[r] = 0.0f;
    dot_scale[r] = 1.0f;
    if (r < n_rows) {
      read_row(params.query, params.dtype, batch_index, query_head, start_q + r, params.head_dim, query);
      query_nonfinite[r] = !all_finite(query, params.head_dim);
      if (query_nonfinite[r]) std::fill(query, query + padded_dim, 0.0f);
      // AMX reads the query as given, perhaps times a power of two. l2_normalise() replaces `query`
      // by its unit vector, and therefore comes second. The factor that pack_amx_row() returns
      // makes AMX's dot products those of the final `query`.
      if (amx) dot_scale[r] = pack_amx_row(query, params.head_dim, params.cosine, amx_queries + r * amx_width);
      query_rnorm[r] = params.cosine ? l2_normalise(query, params.head_dim) : 1.0f;
      base_scale[r] = compute_base_scale(params, count[r]);
      row_bias[r] = compute_row_bias(params, count[r]);
    }
    score_scale[r] = base_scale[r] * (params.head_scale ? params.head_scale[query_head] : 1.0f);
    // Replaces any NaN by the one that exp_negative() propagates (elementary.h)
    if (std::isnan(score_scale[r])) score_scale[r] = std::numeric_limits<float>::quiet_NaN();
    dot_scale[r] *= score_scale[r];
  }
}

// Computes stored scores, row_sum and maximum of the rows [first_row, stop_row): all rows of the
// block, or one row. With `keep_scores`, and where maximum_first, it stores s itself and sums
// nothing: row_sum is 0 until exponentiate_row() or the caller sets it.
template <typename Phi>
inline void RowBlock<Phi>::compute_scores(int64_t first_row, int64_t stop_row, bool keep_scores) {
  DoubleSum totals[BLOCK_Q];
  vfloat phi_sums[BLOCK_Q], maxima[BLOCK_Q];
  for (int64_t r = first_row; r < stop_row; ++r) phi_sums[r] = vfloat{}, maxima[r] = splat(-INF);
  int64_t tiles_done = 0;
  auto after_tile = [&] {
    if (++tiles_done % TILES_PER_SUM != 0) return;
    for (int64_t r = first_row; r < stop_row; ++r) totals[r].add(phi_sums[r]), phi_sums[r] = vfloat{};
  };
  if (keep_scores || maximum_first)
    score_rows</*KEEP_SCORES=*/true>(first_row, stop_row, phi_sums, maxima, after_tile);
  else
    score_rows</*KEEP_SCORES=*/false>(first_row, stop_row, phi_sums, maxima, after_tile);
  for (int64_t r = first_row; r < stop_row; ++r) {
    totals[r].add(phi_sums[r]);
    row_sum[r] = float(totals[r].total()), maximum[r] = reduce_max(maxima[r]);
  }
}

// Computes stored scores of the rows [first_row, stop_row). phi_sums and maxima [BLOCK_Q], indexed
// by row, are lane-wise and updated. `after_tile` is called after each tile.
template <typename Phi>
template <bool KEEP_SCORES, typename F>
inline void RowBlock<Phi>::score_rows(int64_t first_row, int64_t stop_row, vfloat* phi_sums, vfloat* maxima,
                                      F&& after_tile) {
  if (key_data->packed)
    return each_tile([&](int64_t start_k) {
      score_tile<KEEP_SCORES>(first_row, stop_row, start_k, phi_sums, maxima);
      after_tile();
    });
  decode_dots.compute(
      *this, queries + first_row * padded_dim, stop_row - first_row,
      [&](int64_t r, int64_t j) { return tile_row(first_row + r, j / BLOCK_K * BLOCK_K) + j; },
      [&](int64_t start_k) {
        for (int64_t r = first_row; r < stop_row; ++r)
          if (KeyRange strip_keys = strip_range(r, start_k); !strip_keys.empty())
            convert_row<KEEP_SCORES>(r, start_k, strip_keys, phi_sums[r], maxima[r]);
        after_tile();
      });
}

// Computes the stored scores of a tile from packed keys: strip by strip, or for one row.
template <typename Phi>
template <bool KEEP_SCORES>
inline void RowBlock<Phi>::score_tile(int64_t first_row, int64_t stop_row, int64_t start_k, vfloat* phi_sums,
                                      vfloat* maxima) {
  // One row: recomputed for its exponential tail or for LASER, or the only row of the block
  bool one_row = stop_row - first_row == 1;
  if (amx) amx_tile_dots(first_row, stop_row, start_k);
  // Whole strips are converted at once if the masks hide nothing of the tile, no bias is given and
  // no key of the key head is non-finite.
  bool by_strips = !one_row && tile_unmasked(start_k) && !params.bias.data && !key_data->any_nonfinite_key;
  for (int64_t r = first_row; r < stop_row; r += one_row ? 1 : MR) {
    KeyRange strip_keys = strip_range(r, start_k);
    if (strip_keys.empty()) continue;
    if (!one_row && has_next_tile(start_k)) prefetch_strip(next_tile_row(r, start_k));
    if (!amx) strip_dots(r, start_k, strip_keys, one_row);
    // The strip's range is cut in three: row by row, visible to all rows, row by row. If no key is
    // visible to all, the middle is empty at the end of the range, and the first part is the range.
    KeyRange visible_to_all =
        by_strips ? range_visible_to_all(r, strip_keys) : KeyRange{strip_keys.end, strip_keys.end};
    if (!visible_to_all.empty()) convert_strip<KEEP_SCORES>(r, start_k, visible_to_all, phi_sums + r, maxima + r);
    for (KeyRange row_by_row :
         {KeyRange{strip_keys.begin, visible_to_all.begin}, KeyRange{visible_to_all.end, strip_keys.end}})
      for (int64_t i = r; i < std::min(r + (one_row ? 1 : MR), stop_row) && !row_by_row.empty(); ++i)
        convert_row<KEEP_SCORES>(i, start_k, row_by_row, phi_sums[i], maxima[i]);
  }
}

// Writes to `stored` the dot products of a strip, or of one row, with the keys that it sees in a
// tile. Panels [D, PANEL] follow one another: a key is a column of D floats in its panel.
template <typename Phi>
inline void RowBlock<Phi>::strip_dots(int64_t r, int64_t start_k, KeyRange strip_keys, bool one_row) {
  const float* tile_panels = key_data->key_panels + (key_begin + start_k) * params.head_dim;
  for (int64_t start_panel = start_k; start_panel < start_k + BLOCK_K; start_panel += PANEL) {
    KeyRange keys{std::max(strip_keys.begin, start_panel), std::min(strip_keys.end, start_panel + PANEL)};
    if (keys.empty()) continue;
    // From the first key of `keys` on
    const float* columns = tile_panels + (start_panel - start_k) * params.head_dim + keys.begin - start_panel;
    float *dots = tile_row(r, start_k) + keys.begin, *query = queries + r * padded_dim;
    if (one_row)
      panel_dots<1>(keys.vectors(), params.head_dim, query, padded_dim, columns, dots, BLOCK_K);
    else
      panel_dots<MR>(keys.vectors(), params.head_dim, query, padded_dim, columns, dots, BLOCK_K);
  }
}

// The same on AMX for the rows [first_row, stop_row), 16 at a time. The keys are those that one of
// the 16 sees. A row therefore also gets dot products outside its strip's range, which are not
// used. The factors of query and key (dot_scale, key_dot_factor) are applied later, by
// convert_strip() and convert_row(). A row's dot products do not depend on the rows beside it: a
// row that is computed alone gets the same ones.
template <typename Phi>
inline void RowBlock<Phi>::amx_tile_dots([[maybe_unused]] int64_t first_row, [[maybe_unused]] int64_t stop_row,
                                         [[maybe_unused]] int64_t start_k) {
#if SOFTFOCUS_AMX
  AmxRegisters registers;
  int64_t width = round_up(params.head_dim, AMX_DIMS);
  for (int64_t begin16 = first_row / AMX_ROWS * AMX_ROWS; begin16 < stop_row; begin16 += AMX_ROWS) {
    int64_t row_begin = std::max(first_row, begin16), row_end = std::min(stop_row, begin16 + AMX_ROWS);
    KeyRange keys{BLOCK_K + start_k, start_k};  // empty
    for (int64_t r = row_begin; r < row_end; ++r)
      if (KeyRange strip_keys = strip_range(r, start_k); !strip_keys.empty())
        keys = {std::min(keys.begin, strip_keys.begin), std::max(keys.end, strip_keys.end)};
    // AMX writes 16 rows. `stored` may end before the last of them. If only one row is computed,
    // the other rows must keep their stored scores.
    bool in_place = begin16 + AMX_ROWS <= max_rows && stop_row - first_row > 1;
    alignas(64) float scratch[AMX_ROWS * 2 * AMX_ROWS];  // [AMX_ROWS, 2 AMX_ROWS]
    for (int64_t j = keys.begin; j < keys.end; j += 2 * AMX_ROWS) {
      int64_t key = key_begin + j, n = std::min(2 * AMX_ROWS, keys.end - j);
      float* to = in_place ? tile_row(begin16, start_k) + j : scratch;
      int64_t stride = in_place ? BLOCK_K : 2 * AMX_ROWS;
      auto dots = [&](auto amx_tiles) {
        amx_dots<amx_tiles.value>(amx_queries + begin16 * width, width, key_data->amx_keys + key * width, to, stride);
      };
      if (n > AMX_ROWS)
        dots(std::integral_constant<int, 2>{});
      else
        dots(std::integral_constant<int, 1>{});
      for (int64_t r = row_begin; r < row_end && !in_place; ++r)
        std::copy_n(scratch + (r - begin16) * stride, n, tile_row(r, start_k) + j);
    }
  }
#endif
}

// Prefetches a strip of the next tile for writing, into the second-level cache, one tile before its
// use. The previous row block wrote this memory last. In long rows it is no longer in that cache,
// which is smaller than a block's scores.
template <typename Phi>
inline void RowBlock<Phi>::prefetch_strip(const float* to) {
  for (int64_t element = 0; element < MR * BLOCK_K; element += LINE_FLOATS) __builtin_prefetch(to + element, 1, 2);
}

// The part of a strip's range, in whole vectors, that the window lets all rows of the strip see.
// The caller has checked that the masks hide nothing of it. If there is none, or the strip has a
// row after the block's last or a non-finite query, it is {range.end, range.end}: convert_row()
// then takes the whole range.
template <typename Phi>
inline KeyRange RowBlock<Phi>::range_visible_to_all(int64_t r, KeyRange range) const {
  bool all = r + MR <= n_rows;
  int64_t begin = range.begin, end = range.end;
  for (int64_t i = r; i < r + MR; ++i) {
    all &= !query_nonfinite[i];
    begin = std::max(begin, round_up(window_begin[i] - key_begin, W)),
    end = std::min(end, (window_end[i] - key_begin) / W * W);
  }
  return all && begin < end ? KeyRange{begin, end} : KeyRange{range.end, range.end};
}

// Turns dot products of a strip into stored scores. All rows see all keys of the range. phi_sums
// and maxima [MR] are those of the strip's rows, lane-wise.
template <typename Phi>
template <bool KEEP_SCORES>
inline void RowBlock<Phi>::convert_strip(int64_t r, int64_t start_k, KeyRange range, vfloat* phi_sums, vfloat* maxima) {
  vfloat phi_sum[MR], running_max[MR];
  unroll<MR>([&](int i) { phi_sum[i] = phi_sums[i], running_max[i] = maxima[i]; });
  float* row = tile_row(r, start_k);
  for (int64_t j = range.begin; j < range.end; j += W) {
    vfloat x[MR];
    if (amx) {
      vfloat factors = load(key_data->key_dot_factor + key_begin + j);
      unroll<MR>([&](int i) { x[i] = load(row + i * BLOCK_K + j) * (factors * dot_scale[r + i]) + row_bias[r + i]; });
    } else {
      unroll<MR>([&](int i) { x[i] = load(row + i * BLOCK_K + j) * dot_scale[r + i] + row_bias[r + i]; });
    }
    unroll<MR>([&](int i) { running_max[i] = max(x[i], running_max[i]); });
    if constexpr (!KEEP_SCORES) {
      Phi::to_stored(x);
      unroll<MR>([&](int i) { phi_sum[i] += Phi::of_stored(x[i]); });
    }
    unroll<MR>([&](int i) { store(row + i * BLOCK_K + j, x[i]); });
  }
  unroll<MR>([&](int i) { phi_sums[i] = phi_sum[i], maxima[i] = running_max[i]; });
}

// Turns dot products of a row into stored scores, with bias and masks. A score is NaN where the
// query or the key is non-finite.
template <typename Phi>
template <bool KEEP_SCORES>
inline void RowBlock<Phi>::convert_row(int64_t r, int64_t start_k, KeyRange range, vfloat& phi_sum,
                                       vfloat& running_max) {
  float* row = tile_row(r, start_k);
  vfloat nan = splat(std::numeric_limits<float>::quiet_NaN());
  for (int64_t j = range.begin; j < range.end; j += W) {
    vfloat scale = splat(dot_scale[r]);
    if (amx) scale *= load(key_data->key_dot_factor + key_begin + j);
    vfloat s = load(row + j) * scale + row_bias[r];
    if (params.bias.data) s += load_bias(r, j);
    if (query_nonfinite[r]) s = nan;
    // In decoding the dot product of a non-finite key is already NaN (DecodeDots).
    if (key_data->packed && key_data->any_nonfinite_key)
      s = widen(key_data->key_nonfinite + key_begin + j) != 0 ? nan : s;
    vint key = lane_index() + int32_t(key_begin + j);  // Lk < 2^31 (params.h)
    vint row_sees = (key >= int32_t(window_begin[r])) & (key < int32_t(window_end[r]));
    if (masks_given) row_sees &= widen(visible + r * row_stride + j) != 0;
    s = row_sees ? s : splat(-INF);
    running_max = max(s, running_max);
    vfloat x = s;
    if constexpr (!KEEP_SCORES) {
      x = row_sees ? Phi::to_stored(s) : splat(Phi::stored_masked);
      phi_sum += Phi::of_stored(x);
    }
    store(row + j, x);
  }
}

// The bias b_ij of row r and the W keys from offset j on
template <typename Phi>
inline vfloat RowBlock<Phi>::load_bias(int64_t r, int64_t j) const {
  const TensorView& x = params.bias;
  const float* from = static_cast<const float*>(x.data) + batch_index * x.stride[0] + query_head * x.stride[1] +
                      (start_q + r) * x.stride[2];
  int64_t first_key = key_begin + j, n_keys = std::min<int64_t>(W, params.key_length - first_key);
  vfloat y = vfloat{};
  if (x.stride[3] == 1 && n_keys == W)
    y = load(from + first_key);
  else
    for (int64_t i = 0; i < n_keys; ++i) y[i] = from[(first_key + i) * x.stride[3]];
  // Replaces any NaN by the one that exp_negative() propagates (elementary.h)
  return y == y ? y : splat(std::numeric_limits<float>::quiet_NaN());
}

// Turns the scores of a row, stored as such, into e^(s - m). Sets row_sum and log_norm.
template <typename Phi>
inline void RowBlock<Phi>::exponentiate_row(int64_t r) {
  float row_max = maximum[r] == -INF ? 0.0f : maximum[r];  // -inf - -inf would be NaN, not -inf
  DoubleSum total;
  vfloat phi_sum = vfloat{};
  int64_t tiles_done = 0;
  each_tile([&](int64_t start_k) {
    KeyRange strip_keys = strip_range(r, start_k);
    float* row = tile_row(r, start_k);
    int64_t j = strip_keys.begin;
    for (; j + UNROLL * W <= strip_keys.end; j += UNROLL * W) {
      vfloat x[UNROLL];
      unroll<UNROLL>([&](int i) { x[i] = load(row + j + i * W) - row_max; });
      exp_negative(x);
      unroll<UNROLL>([&](int i) { store(row + j + i * W, x[i]); });
      static_assert(UNROLL == 4);
      phi_sum += (x[0] + x[1]) + (x[2] + x[3]);
    }
    for (; j < strip_keys.end; j += W) {
      vfloat x = exp_negative(load(row + j) - row_max);
      store(row + j, x);
      phi_sum += x;
    }
    if (++tiles_done % TILES_PER_SUM == 0) total.add(phi_sum), phi_sum = vfloat{};
  });
  total.add(phi_sum);
  row_sum[r] = float(total.total());
  log_norm[r] = std::log(row_sum[r]) + row_max;
}

}  // namespace softfocus
