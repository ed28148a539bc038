// The output of a block: A V, or with LASER A e^(V - M); over all keys, or over the live keys of
// re-weighted rows.
#pragma once

#include "column_shift.h"
#include "live_keys.h"

namespace softfocus {

template <typename Phi>
class BlockOutput {
 public:
  Buffer<float> out;                 // [BLOCK_Q, value_width]
  Buffer<float> value_space;         // [BLOCK_K, value_width], values of a tile that cannot be read in place
  float inverse_power_sum[BLOCK_Q];  // 1 / sum u^p of re-weighted rows
  bool zero_weights[BLOCK_Q];        // rows whose weights are all 0
  ColumnShift shift;

  explicit BlockOutput(const RowBlock<Phi>& block)
      : out(BLOCK_Q * block.value_width),
        value_space(BLOCK_K * block.value_width),
        weights(MR * BLOCK_K),
        logs(block.params.laser ? block.max_row_stride : 0) {}

  void compute(const RowBlock<Phi>& block) {
    block.params.dropout_threshold ? compute<true>(block) : compute<false>(block);
  }

  // f(r, column, logs) for each exact sum, row by row. `logs` is what RowBlock::row_logs wrote.
  template <typename F>
  void each_exact_sum(RowBlock<Phi>& block, F&& f) {
    const Params& params = block.params;
    std::vector<uint8_t> sees_large(block.n_rows * params.value_dim, 0);
    for (auto [key, d] : shift.large)
      for (int64_t r = 0; r < block.n_rows; ++r)
        if (!block.fully_masked[r] && block.sees(r, key) && block.has_weight(r, key))
          sees_large[r * params.value_dim + d] = 1;
    for (int64_t r = 0; r < block.n_rows; ++r) {
      if (zero_weights[r] || block.fully_masked[r] || !std::isfinite(block.norm[r])) continue;
      bool ready = false;
      // the largest u is 1, but all phi of a row may be small
      float small = params.reweighted ? SMALL_SUM : SMALL_SUM / std::min(block.norm[r], 1.0f);
      for (int64_t d = 0; d < params.value_dim; ++d) {
        if (!sees_large[r * params.value_dim + d] && !(out[r * block.value_width + d] < small)) continue;
        if (!ready) block.row_logs(r, logs);
        ready = true;
        f(r, d, static_cast<const float*>(logs));
      }
    }
  }

 private:
  LiveKeys<Phi> live;
  Buffer<float> weights;  // [MR, BLOCK_K], of a strip
  Buffer<float> logs;     // [row_stride], LASER's

  // DROPOUT is a template argument: listing live keys takes most of the time.
  template <bool DROPOUT>
  void compute(const RowBlock<Phi>& block) {
    const Params& params = block.params;
    int64_t width = block.value_width, vectors = width / W, key_head = block.h / (params.heads / params.key_heads);
    std::fill(out + 0, out + block.padded_rows() * width, 0.0f);
    vf power_sums[BLOCK_Q];
    for (int64_t r = 0; r < BLOCK_Q; ++r) power_sums[r] = vf{};
    if (params.laser) shift.choose(block, value_space);
    if (params.reweighted && !params.laser && !block.head->packed) {
      return with_element(params.dtype, [&](auto zero) {
        for (int64_t r = 0; r < block.n_rows; ++r)
          scale_row(block, r, add_live_values<DROPOUT, decltype(zero)>(block, r));
      });
    }
    block.each_tile([&](int64_t start_k) {
      int64_t first = block.key_begin + start_k, stop = std::min(first + BLOCK_K, params.key_length);
      auto values = [&] { return view_values(params, *block.head, block.b, key_head, first, stop, value_space); };
      if (!params.reweighted && values_in_place(block))
        return with_element(params.dtype, [&](auto zero) {
          add_tile(block, start_k, row_pointer<decltype(zero)>(params.value, block.b, key_head, first),
                   params.value.stride[2]);
        });
      RowView v =
          params.laser ? shift.exp_values(*block.head, values, first, stop - first, width, params.value_dim) : values();
      if (params.reweighted) {
        for (int64_t r = 0; r < block.n_rows; r += LIST_ROWS) {
          live.template gather<DROPOUT>(block, r, start_k);
          for (int64_t i = 0; i < LIST_ROWS; ++i) {
            power_sums[r + i] += live.template raise_to_power<DROPOUT>(i, block.power[r + i]);
            if (block.has_next_tile(start_k)) prefetch_next_tile(v.data, v.stride, r + i, width);
            add_listed_rows(vectors, live.length[i], live.keys_of(i), live.u_of(i), v.data, v.stride,
                            out + (r + i) * width);
          }
        }
        return;
      }
      add_tile(block, start_k, v.data, v.stride);
    });
    for (int64_t r = 0; r < block.n_rows; ++r) scale_row(block, r, reduce_sum(power_sums[r]));
    shift.record_large = false;
  }

  // In decoding each value is read once: in place, whatever the dtype
  static bool values_in_place(const RowBlock<Phi>& block) {
    const Params& params = block.params;
    return !block.head->packed && !params.laser && block.head->nonfinite_values.empty() &&
           contiguous_rows(params.value, params.value_dim);
  }

  // out += weights of a tile [BLOCK_Q, BLOCK_K] times its values [BLOCK_K, stride], without
  // re-weighting
  template <typename T>
  void add_tile(const RowBlock<Phi>& block, int64_t start_k, const T* values, int64_t stride) {
    int64_t width = block.value_width, vectors = width / W,
            end = std::min(start_k + BLOCK_K, block.params.key_length - block.key_begin);
    for (int64_t r = 0; r < block.n_rows; r += MR) {
      KeyRange seen = block.strip_range(r, start_k);
      if (seen.empty()) continue;
      int64_t depth = std::min(seen.end, end) - seen.begin, strip_rows = std::min<int64_t>(MR, block.n_rows - r);
      const float* a = block.tile_row(r, start_k) + seen.begin;
      if (!block.stored_is_weight()) {
        for (int64_t i = 0; i < strip_rows; ++i)
          block.with_row_phi(r + i, [&](auto phi) {
            vf scale = splat(block.weight_scale[r + i]);
            for (int64_t j = 0; j < seen.end - seen.begin; j += W)
              store(weights + i * BLOCK_K + j, phi.value(load(a + i * BLOCK_K + j)) * scale);
            if (block.params.dropout_threshold) block.apply_dropout(r + i, seen, weights + i * BLOCK_K - seen.begin);
          });
        a = weights;
      }
      const T* v = values + (seen.begin - start_k) * stride;
      if (strip_rows == MR) product<MR>(vectors, depth, a, BLOCK_K, 1, v, stride, out + r * width, width, true);
      for (int64_t i = 0; i < strip_rows && strip_rows < MR; ++i)
        product<1>(vectors, depth, a + i * BLOCK_K, BLOCK_K, 1, v, stride, out + (r + i) * width, width, true);
    }
  }

  // Decoding a re-weighted row: reads the values of the live keys only. Returns sum u^p.
  template <bool DROPOUT, typename T>
  float add_live_values(const RowBlock<Phi>& block, int64_t r) {
    const Params& params = block.params;
    int64_t width = block.value_width, key_head = block.h / (params.heads / params.key_heads);
    bool in_place = contiguous_rows(params.value, params.value_dim);
    std::vector<int64_t> tiles;  // that are listed: start_k
    vf power_sum = vf{};
    auto add_listed = [&] {
      for (size_t i = 0; i < tiles.size(); ++i) {
        power_sum += live.template raise_to_power<DROPOUT>(i, block.power[r]);
        int64_t n = live.length[i], first = block.key_begin + tiles[i];
        const uint8_t* keys = live.keys_of(i);
        auto add_values = [&](const auto* values, int64_t stride) {
          add_listed_rows(width / W, n, keys, live.u_of(i), values, stride, out + r * width);
        };
        if (in_place) {
          add_values(row_pointer<T>(params.value, block.b, key_head, first), params.value.stride[2]);
          continue;
        }
        for (int64_t e = 0; e < n; ++e) {
          float* row = value_space + keys[e] * width;
          read_row(params.value, params.dtype, block.b, key_head, first + keys[e], params.value_dim, row);
          std::fill(row + params.value_dim, row + width, 0.0f);
        }
        add_values(static_cast<const float*>(value_space), width);
      }
      tiles.clear();
    };
    if (!block.fully_masked[r])
      block.each_tile([&](int64_t start_k) {
        int64_t i = tiles.size();
        live.length[i] = block.template gather_live<DROPOUT>(r, start_k, live.keys_of(i), live.u_of(i));
        tiles.push_back(start_k);
        if (in_place)
          for (int64_t e = 0; e < live.length[i]; ++e) {
            const T* row =
                row_pointer<T>(params.value, block.b, key_head, block.key_begin + start_k + live.keys_of(i)[e]);
            for (int64_t d = 0; d < width; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
          }
        if (tiles.size() == LIST_ROWS) add_listed();
      });
    add_listed();
    return reduce_sum(power_sum);
  }

  // Applies the factors that the products left out: 1 / sum u^p and the dropout scale, or
  // weight_scale.
  void scale_row(const RowBlock<Phi>& block, int64_t r, float power_sum) {
    float factor = 1.0f;
    inverse_power_sum[r] = 1.0f;
    zero_weights[r] = block.params.normaliser == L1 && block.log_norm[r] == -INF;
    if (block.params.reweighted)
      factor = (inverse_power_sum[r] = power_sum < MIN_ROW_SUM ? 1.0f : 1.0f / power_sum) * block.dropout.keep_scale;
    else if (block.stored_is_weight())
      factor = block.weight_scale[r];
    float* row = out + r * block.value_width;
    for (int64_t d = 0; d < block.value_width; d += W) store(row + d, load(row + d) * factor);
  }
};

}  // namespace softfocus
