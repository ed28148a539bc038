// RowBlock: from queries and keys to stored scores, with the sum of phi and the maximum of each
// row.
#pragma once

#include "row_block.h"

namespace softfocus {

template <typename Phi>
inline void RowBlock<Phi>::read_queries() {
  for (int64_t r = 0; r < padded_rows(); ++r) {
    float *query = queries + r * width, *scaled = scaled_queries + r * width;
    std::fill(query, query + width, 0.0f);
    query_nonfinite[r] = false;
    base_scale[r] = row_bias[r] = 0.0f;
    if (r < n_rows) {
      read_row(params.query, params.dtype, b, h, start_q + r, params.head_dim, query);
      query_nonfinite[r] = !all_finite(query, params.head_dim);
      if (query_nonfinite[r]) std::fill(query, query + width, 0.0f);
      inverse_query_norm[r] = params.cosine ? l2_normalise(query, params.head_dim) : 1.0f;
      base_scale[r] = compute_base_scale(params, count[r]);
      row_bias[r] = compute_row_bias(params, count[r]);
    }
    score_scale[r] = base_scale[r] * (params.head_scale ? params.head_scale[h] : 1.0f);
    // the one NaN that the elementary functions preserve
    if (std::isnan(score_scale[r])) score_scale[r] = std::numeric_limits<float>::quiet_NaN();
    for (int64_t d = 0; d < width; ++d) scaled[d] = query[d] * score_scale[r];
  }
}

// Computes stored scores, norm and maximum of the rows [first, last): whole strips, or one row.
// `raw` stores s itself.
template <typename Phi>
inline void RowBlock<Phi>::compute_scores(int64_t first, int64_t last, bool raw) {
  vf sums[BLOCK_Q], maxima[BLOCK_Q];
  for (int64_t r = first; r < last; ++r) sums[r] = vf{}, maxima[r] = splat(-INF);
  raw |= maximum_first;
  bool single = last - first == 1;
  auto convert_rows = [&](int64_t start_k) {
    for (int64_t i = first; i < last; ++i)
      if (KeyRange seen = strip_range(i, start_k); !seen.empty())
        raw ? convert_row<true>(i, start_k, seen, sums[i], maxima[i])
            : convert_row<false>(i, start_k, seen, sums[i], maxima[i]);
  };
  if (!head->packed) {
    decode_scores.compute(
        *this, queries + first * width, last - first,
        [&](int64_t r, int64_t j) { return tile_row(first + r, j / BLOCK_K * BLOCK_K) + j; }, convert_rows);
  } else {
    each_tile([&](int64_t start_k) {
      bool plain = !single && tile_full(start_k) && !params.bias.data && !head->any_nonfinite_key;
      const float* panels = head->key_panels + (key_begin + start_k) * params.head_dim;
      for (int64_t r = first; r < last; r += single ? 1 : MR) {
        KeyRange seen = strip_range(r, start_k);
        if (seen.empty()) continue;
        if (!single && has_next_tile(start_k)) prefetch_strip(tile_row(r, start_k) + start_k + max_rows * BLOCK_K);
        for (int64_t panel = start_k; panel < start_k + BLOCK_K; panel += PANEL) {
          KeyRange keys{std::max(seen.begin, panel), std::min(seen.end, panel + PANEL)};
          if (keys.empty()) continue;
          const float* columns = panels + (panel - start_k) * params.head_dim + keys.begin - panel;
          float *row = tile_row(r, start_k) + keys.begin, *query = queries + r * width;
          if (single)
            panel_dots<1>(keys.vectors(), params.head_dim, query, width, columns, row, BLOCK_K);
          else
            panel_dots<MR>(keys.vectors(), params.head_dim, query, width, columns, row, BLOCK_K);
        }
        KeyRange unmasked = plain ? fully_seen(r, seen) : KeyRange{seen.end, seen.end};
        if (!unmasked.empty()) {
          raw ? convert_strip<true>(r, start_k, unmasked, sums + r, maxima + r)
              : convert_strip<false>(r, start_k, unmasked, sums + r, maxima + r);
        }
        for (KeyRange rest : {KeyRange{seen.begin, unmasked.begin}, KeyRange{unmasked.end, seen.end}})
          for (int64_t i = r; i < (single ? last : std::min(r + MR, last)) && !rest.empty(); ++i)
            raw ? convert_row<true>(i, start_k, rest, sums[i], maxima[i])
                : convert_row<false>(i, start_k, rest, sums[i], maxima[i]);
      }
    });
  }
  for (int64_t r = first; r < last; ++r) norm[r] = reduce_sum(sums[r]), maximum[r] = reduce_max(maxima[r]);
}

// Prefetches a strip for writing: a block of scores does not fit the second-level cache.
template <typename Phi>
inline void RowBlock<Phi>::prefetch_strip(float* to) {
  for (int64_t j = 0; j < MR * BLOCK_K; j += 16) __builtin_prefetch(to + j, 1, 2);
}

// The part of a range, in whole vectors, that the window shows all rows of a strip. Empty, at the
// range's end, where a row is beyond the block or its query non-finite.
template <typename Phi>
inline KeyRange RowBlock<Phi>::fully_seen(int64_t r, KeyRange range) const {
  bool all = r + MR <= n_rows;
  int64_t begin = range.begin, end = range.end;
  for (int64_t i = r; i < r + MR; ++i) {
    all &= !query_nonfinite[i];
    begin = std::max(begin, round_up(window_begin[i] - key_begin, W)),
    end = std::min(end, (window_end[i] - key_begin) / W * W);
  }
  return all && begin < end ? KeyRange{begin, end} : KeyRange{range.end, range.end};
}

// Turns dot products of a strip into stored scores. All rows see all keys of the range.
template <typename Phi>
template <bool RAW>
inline void RowBlock<Phi>::convert_strip(int64_t r, int64_t start_k, KeyRange seen, vf* sums, vf* maxima) {
  vf total[MR], top[MR];
  unroll<MR>([&](int i) { total[i] = sums[i], top[i] = maxima[i]; });
  float* row = tile_row(r, start_k);
  for (int64_t j = seen.begin; j < seen.end; j += W) {
    vf x[MR];
    unroll<MR>([&](int i) { x[i] = load(row + i * BLOCK_K + j) * score_scale[r + i] + row_bias[r + i]; });
    unroll<MR>([&](int i) { top[i] = max(x[i], top[i]); });
    if constexpr (!RAW) {
      Phi::to_stored(x);
      unroll<MR>([&](int i) { total[i] += Phi::value(x[i]); });
    }
    unroll<MR>([&](int i) { store(row + i * BLOCK_K + j, x[i]); });
  }
  unroll<MR>([&](int i) { sums[i] = total[i], maxima[i] = top[i]; });
}

// Turns dot products of a row into stored scores, with bias and masks. A score is NaN where the
// query or the key is non-finite.
template <typename Phi>
template <bool RAW>
inline void RowBlock<Phi>::convert_row(int64_t r, int64_t start_k, KeyRange range, vf& total, vf& top) {
  float* row = tile_row(r, start_k);
  vf nan = splat(std::numeric_limits<float>::quiet_NaN());
  for (int64_t j = range.begin; j < range.end; j += W) {
    vf s = load(row + j) * score_scale[r] + row_bias[r];
    if (params.bias.data) s += load_bias(r, j);
    if (query_nonfinite[r]) s = nan;
    if (head->packed && head->any_nonfinite_key) s = widen(head->key_nonfinite + key_begin + j) != 0 ? nan : s;
    vi key = lane_index() + int32_t(key_begin + j);
    vi seen = (key >= int32_t(window_begin[r])) & (key < int32_t(window_end[r]));
    if (masks_given) seen &= widen(visible + r * row_stride + j) != 0;
    s = seen ? s : splat(-INF);
    top = max(s, top);
    vf x = s;
    if constexpr (!RAW) {
      x = seen ? Phi::to_stored(s) : splat(Phi::stored_masked);
      total += Phi::value(x);
    }
    store(row + j, x);
  }
}

template <typename Phi>
inline vf RowBlock<Phi>::load_bias(int64_t r, int64_t j) const {
  const TensorView& x = params.bias;
  const float* from =
      static_cast<const float*>(x.data) + b * x.stride[0] + h * x.stride[1] + (start_q + r) * x.stride[2];
  vf y = vf{};
  for (int i = 0; i < W; ++i) {
    int64_t key = key_begin + j + i;
    if (key < params.key_length) y[i] = from[key * x.stride[3]];
  }
  return y == y ? y : splat(std::numeric_limits<float>::quiet_NaN());  // the NaN that the elementary functions preserve
}

// Turns raw scores of a row into e^(s - m). Sets norm and log_norm.
template <typename Phi>
inline void RowBlock<Phi>::exponentiate_row(int64_t r) {
  float top = maximum[r] == -INF ? 0.0f : maximum[r];
  vf total = vf{};
  each_tile([&](int64_t start_k) {
    KeyRange seen = strip_range(r, start_k);
    float* row = tile_row(r, start_k);
    int64_t j = seen.begin;
    for (; j + 4 * W <= seen.end; j += 4 * W) {
      vf x[4];
      unroll<4>([&](int i) { x[i] = load(row + j + i * W) - top; });
      exp_negative(x);
      unroll<4>([&](int i) { store(row + j + i * W, x[i]); });
      total += (x[0] + x[1]) + (x[2] + x[3]);
    }
    for (; j < seen.end; j += W) {
      vf x = exp_negative(load(row + j) - top);
      store(row + j, x);
      total += x;
    }
  });
  norm[r] = reduce_sum(total);
  log_norm[r] = std::log(norm[r]) + top;
}

}  // namespace softfocus
