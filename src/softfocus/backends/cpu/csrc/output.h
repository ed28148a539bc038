// The output of a block: A V, or with LASER A e^(V - M). The sum runs over all keys, or over the
// live keys of re-weighted rows.
#pragma once

#include "column_shift.h"
#include "live_keys.h"

namespace softfocus {

template <typename Phi>
class BlockOutput {
 public:
  Buffer<float> out;  // [BLOCK_Q, padded_value_dim]
  // 1 / sum u^p of re-weighted rows; a tile is summed in float, the tiles in double
  float inverse_power_sum[BLOCK_Q];
  bool zero_weights[BLOCK_Q];  // rows fully masked or without weights; with the l1 norm only
  ColumnShift column_shift;

  explicit BlockOutput(const RowBlock<Phi>& block)
      : out(BLOCK_Q * block.padded_value_dim),
        value_scratch(BLOCK_K * block.padded_value_dim),
        weights(MR * BLOCK_K),
        row_log_u(block.params.laser ? block.max_padded_keys() : 0) {}

  // Computes the public members for a block whose weights are known.
  void compute(const RowBlock<Phi>& block) {
    block.params.drop_below ? compute</*DROPOUT=*/true>(block) : compute</*DROPOUT=*/false>(block);
  }

  // What the weights of a tile multiply: V, with LASER e^(V - M). [n, stride] for the n <= BLOCK_K
  // keys that exist. It may be in a scratch buffer, which the next call overwrites. With LASER and
  // without zero_shift, the first pass over the tiles after choose() also records the large values.
  RowView prepare_tile_operand(const RowBlock<Phi>& block, int64_t start_k) {
    const Params& params = block.params;
    int64_t first_key = block.key_begin + start_k, stop_key = std::min(first_key + BLOCK_K, params.key_length);
    auto values = [&] {
      return view_values(params, *block.key_data, block.batch_index, block.key_head, first_key, stop_key,
                         value_scratch);
    };
    if (!params.laser) return values();
    return column_shift.shifted_exp_values(*block.key_data, values, first_key, stop_key - first_key,
                                           block.padded_value_dim, params.value_dim);
  }

  // Calls f(r, column, keys, log_u) for each exact sum, row by row; `keys` are the row's
  // WeightedKeys, log_u [padded_keys()] is what RowBlock::compute_log_u() writes.
  template <typename F>
  void each_exact_sum(RowBlock<Phi>& block, F&& f) {
    const Params& params = block.params;
    std::vector<uint8_t> sees_large(block.n_rows * params.value_dim, 0);  // [n_rows, Dv]
    std::vector<uint8_t> has_weight(block.n_rows);                        // of last_key, by row
    int64_t last_key = -1;
    for (auto [key, d] : column_shift.large) {  // the entries of a key come together
      if (key != last_key)
        for (int64_t r = 0; r < block.n_rows; ++r)
          has_weight[r] = !block.fully_masked[r] && block.sees(r, key) && block.has_weight(r, key);
      last_key = key;
      for (int64_t r = 0; r < block.n_rows; ++r)
        if (has_weight[r]) sees_large[r * params.value_dim + d] = 1;
    }
    for (int64_t r = 0; r < block.n_rows; ++r) {
      if (zero_weights[r] || !std::isfinite(block.row_sum[r])) continue;
      bool ready = false;
      // A phi below 1e-38 underflows. That is a weight of 1e-38 / row_sum, so the limit grows as
      // 1 / row_sum. Re-weighted rows need no such factor: their largest u^p is 1, in
      // tied rows from 1 to 2.
      float smallest_sum = params.reweighted ? SMALL_SUM : SMALL_SUM / std::min(block.row_sum[r], 1.0f);
      for (int64_t d = 0; d < params.value_dim; ++d) {
        if (!sees_large[r * params.value_dim + d] && !(out[r * block.padded_value_dim + d] < smallest_sum)) continue;
        if (!ready) {
          block.compute_log_u(r, row_log_u);
          weighted_keys.clear();
          for (int64_t j = 0; j < block.key_end - block.key_begin; ++j)
            if (row_log_u[j] != -INF) weighted_keys.add(j, double(block.power[r]) * row_log_u[j]);
        }
        ready = true;
        f(r, d, weighted_keys, static_cast<const float*>(row_log_u));
      }
    }
  }

 private:
  LiveKeys<Phi> live;
  // [BLOCK_K, padded_value_dim], values of a tile that cannot be read in place
  Buffer<float> value_scratch;
  Buffer<float> weights;    // [MR, BLOCK_K], of a strip in a tile: weights, or phi (fill_weights())
  Buffer<float> row_log_u;  // [padded_keys()], for LASER: log u of a row (compute_log_u())
  WeightedKeys weighted_keys;

  // DROPOUT is a template argument because listing live keys takes most of the time: a test inside
  // that loop would slow down calls without dropout.
  template <bool DROPOUT>
  void compute(const RowBlock<Phi>& block) {
    const Params& params = block.params;
    std::fill(out + 0, out + block.padded_rows() * block.padded_value_dim, 0.0f);
    float power_sum[BLOCK_Q] = {};  // sum u^p of re-weighted rows
    if (params.laser) column_shift.choose(block, value_scratch);
    // In decoding (the forward of a call of at most DECODE_QUERIES queries) only the values of live
    // keys are read, except with LASER, whose shift needs all.
    if (params.reweighted && !params.laser && !block.key_data->packed)
      with_element(params.dtype, [&](auto element) {
        for (int64_t r = 0; r < block.n_rows; ++r) power_sum[r] = add_live_values<DROPOUT, decltype(element)>(block, r);
      });
    else if (params.reweighted)
      add_live_tiles<DROPOUT>(block, power_sum);
    else
      add_dense_tiles(block);
    for (int64_t r = 0; r < block.n_rows; ++r) scale_row(block, r, power_sum[r]);
    column_shift.record_large = false;
  }

  // out += u^p times values, over the live keys of re-weighted rows. Sets power_sum [BLOCK_Q].
  template <bool DROPOUT>
  void add_live_tiles(const RowBlock<Phi>& block, float* power_sum) {
    int64_t padded_value_dim = block.padded_value_dim;
    DoubleSum power_sums[BLOCK_Q];
    block.each_tile([&](int64_t start_k) {
      RowView v = prepare_tile_operand(block, start_k);
      for (int64_t r = 0; r < block.n_rows; r += LISTS) {
        // Rows after n_rows have empty lists. Their `out` is not used.
        live.template gather<DROPOUT>(block, r, start_k);
        for (int64_t i = 0; i < LISTS; ++i) {
          power_sums[r + i].add(live.template raise_to_power<DROPOUT>(i, block.power[r + i]));
          if (block.has_next_tile(start_k)) prefetch_next_tile(v.data, v.stride, r + i, padded_value_dim);
          add_listed_rows(padded_value_dim / W, live.length[i], live.keys_of(i), live.u_of(i), v.data, v.stride,
                          out + (r + i) * padded_value_dim);
        }
      }
    });
    for (int64_t r = 0; r < block.n_rows; ++r) power_sum[r] = float(power_sums[r].total());
  }

  // out += weights times values, without re-weighting
  void add_dense_tiles(const RowBlock<Phi>& block) {
    const TensorView& value = block.params.value;
    block.each_tile([&](int64_t start_k) {
      if (values_in_place(block))
        return with_element(block.params.dtype, [&](auto element) {
          int64_t first_key = block.key_begin + start_k;
          add_dense_tile(block, start_k,
                         row_pointer<decltype(element)>(value, block.batch_index, block.key_head, first_key),
                         value.stride[2]);
        });
      RowView v = prepare_tile_operand(block, start_k);
      add_dense_tile(block, start_k, v.data, v.stride);
    });
  }

  // In decoding a query head reads each value once, and therefore in place, in every dtype. There
  // are two exceptions: LASER, which multiplies e^(V - M), and a head with a non-finite value,
  // which counts as 0. For these, and outside decoding, prepare_tile_operand() gives float rows.
  static bool values_in_place(const RowBlock<Phi>& block) {
    const Params& params = block.params;
    return !block.key_data->packed && !params.laser && block.key_data->nonfinite_values.empty() &&
           contiguous_rows(params.value, params.value_dim);
  }

  // out += weights of a tile times its values [BLOCK_K, stride], without re-weighting
  template <typename T>
  void add_dense_tile(const RowBlock<Phi>& block, int64_t start_k, const T* values, int64_t stride) {
    int64_t padded_value_dim = block.padded_value_dim, vectors = padded_value_dim / W,
            end = std::min(start_k + BLOCK_K, block.params.key_length - block.key_begin);
    for (int64_t r = 0; r < block.n_rows; r += MR) {
      KeyRange strip_keys = block.strip_range(r, start_k);
      if (strip_keys.empty()) continue;
      int64_t depth = std::min(strip_keys.end, end) - strip_keys.begin,
              strip_rows = std::min<int64_t>(MR, block.n_rows - r);
      const float* a = block.tile_row(r, start_k) + strip_keys.begin;  // [strip_rows, BLOCK_K]
      bool all_read_stored = true;
      for (int64_t i = 0; i < strip_rows; ++i) all_read_stored &= block.reads_stored_as_weights(r + i);
      if (!all_read_stored) {
        for (int64_t i = 0; i < strip_rows; ++i) fill_weights(block, r + i, start_k, strip_keys, weights + i * BLOCK_K);
        a = weights;
      }
      const T* v = values + (strip_keys.begin - start_k) * stride;
      if (strip_rows == MR)
        product<MR>(vectors, depth, a, BLOCK_K, /*a_column_stride=*/1, v, stride, out + r * padded_value_dim,
                    padded_value_dim, /*add=*/true);
      else
        for (int64_t i = 0; i < strip_rows; ++i)
          product<1>(vectors, depth, a + i * BLOCK_K, BLOCK_K, /*a_column_stride=*/1, v, stride,
                     out + (r + i) * padded_value_dim, padded_value_dim, /*add=*/true);
    }
  }

  // Writes a row's weights in a tile to row_weights, of which row_weights[0] belongs to the key at
  // keys.begin. A row that may read stored scores takes scale 1 here, too: its output has the same
  // bits whether or not other rows of the strip need this copy. scale_row() multiplies it.
  void fill_weights(const RowBlock<Phi>& block, int64_t r, int64_t start_k, KeyRange keys, float* row_weights) {
    const float* stored = block.tile_row(r, start_k) + keys.begin;
    vfloat scale = splat(block.reads_stored_as_weights(r) ? 1.0f : block.weight_scale[r]);
    block.with_row_phi(r, [&](auto phi) {
      for (int64_t t = 0; t < keys.end - keys.begin; t += W)
        store(row_weights + t, phi.of_stored(load(stored + t)) * scale);
    });
    if (block.params.drop_below) block.apply_dropout(r, keys, row_weights);
  }

  // decode_output.inl.h
  template <bool DROPOUT, typename T>
  float add_live_values(const RowBlock<Phi>& block, int64_t r);

  // Applies the factors that the products left out: 1 / sum u^p and the dropout scale, or
  // weight_scale. For other rows without re-weighting fill_weights() has applied all: factor 1.
  void scale_row(const RowBlock<Phi>& block, int64_t r, float power_sum) {
    float factor = 1.0f;
    inverse_power_sum[r] = power_sum == 0.0f ? 1.0f : 1.0f / power_sum;
    zero_weights[r] = block.params.normaliser == L1 && block.log_norm[r] == -INF;
    if (block.params.reweighted && !std::isfinite(block.row_sum[r]))
      factor = std::numeric_limits<float>::quiet_NaN();  // u and its sum may be finite
    else if (block.params.reweighted)
      factor = inverse_power_sum[r] * block.dropout.keep_scale;
    else if (block.reads_stored_as_weights(r))
      factor = block.weight_scale[r];
    float* row = out + r * block.padded_value_dim;
    for (int64_t d = 0; d < block.padded_value_dim; d += W) store(row + d, load(row + d) * factor);
  }
};

}  // namespace softfocus

#include "decode_output.inl.h"
