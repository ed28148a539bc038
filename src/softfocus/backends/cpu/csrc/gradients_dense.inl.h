// Part of class RowGradients; included by gradients.h. Rows without re-weighting ("dense"). The
// sums run over all keys that a row sees.
#pragma once

#include "gradients.h"

namespace softfocus {

// dL/dA of all tiles, and with the l1 norm delta and single_key
template <typename Phi>
inline void RowGradients<Phi>::compute_dense_grad_weights() {
  const Params& params = block.params;
  // Sums of phi dA, or of A dA where row_sum is outside its safe range (row_sum_in_safe_range()).
  // At the end weight_scale multiplies the former.
  vfloat delta_sum[BLOCK_Q];       // over at most TILES_PER_SUM tiles, lane-wise
  DoubleSum delta_total[BLOCK_Q];  // over all tiles
  vfloat n_positive[BLOCK_Q];      // lane-wise number of keys with phi > 0; where Phi::has_zeros
  int64_t tiles_done = 0;
  for (int64_t r = 0; r < BLOCK_Q; ++r) delta_sum[r] = n_positive[r] = vfloat{};
  block.each_tile([&](int64_t start_k) {
    const float* panels = block.key_data->value_panels + (block.key_begin + start_k) * params.value_dim;
    if (params.laser && !output.column_shift.zero_shift) {
      pack_shifted_exp_values(start_k);
      panels = shifted_exp_panels;
    }
    for (int64_t start_panel = start_k; start_panel < start_k + BLOCK_K; start_panel += PANEL)
      for (int64_t r = 0; r < block.n_rows; r += MR) {
        KeyRange keys = block.strip_range(r, start_panel, PANEL);
        if (keys.empty()) continue;
        const float* columns = panels + (start_panel - start_k) * params.value_dim + (keys.begin - start_panel);
        panel_dots<MR>(keys.vectors(), params.value_dim, incoming_grad + r * block.padded_value_dim,
                       block.padded_value_dim, columns, grad_weights_row(r, start_k) + keys.begin, BLOCK_K);
        for (int64_t i = r; i < std::min(r + MR, block.n_rows); ++i) {
          if (params.drop_below) block.apply_dropout(i, keys, grad_weights_row(i, start_k) + keys.begin);
          if (params.normaliser == L1) add_delta_terms(i, start_k, keys, delta_sum[i], n_positive[i]);
        }
      }
    if (++tiles_done % TILES_PER_SUM == 0)
      for (int64_t r = 0; r < block.n_rows; ++r) delta_total[r].add(delta_sum[r]), delta_sum[r] = vfloat{};
  });
  if (params.normaliser != L1) return;
  for (int64_t r = 0; r < block.n_rows; ++r) {
    delta_total[r].add(delta_sum[r]);
    delta[r] = float(delta_total[r].total()) * (block.row_sum_in_safe_range(r) ? block.weight_scale[r] : 1.0f);
    // Where phi underflows, this count misses keys. laser_backward() has counted them by log u.
    if (!has_exact[r]) single_key[r] = Phi::has_zeros && reduce_sum(n_positive[r]) == 1.0f;
    double exact_delta = 0.0;  // sum of exact_terms
    if (has_exact[r])
      for (int64_t j = 0; j < block.key_end - block.key_begin; ++j)
        exact_delta += exact_terms[r * block.row_stride + j];
    delta[r] += exact_delta;
  }
}

// Adds a row's terms of delta for a range of keys of a tile.
template <typename Phi>
__attribute__((always_inline)) inline void RowGradients<Phi>::add_delta_terms(int64_t r, int64_t start_k, KeyRange keys,
                                                                              vfloat& delta_sum, vfloat& n_positive) {
  const float *stored = block.tile_row(r, start_k), *da = grad_weights_row(r, start_k);
  bool take_phi = block.row_sum_in_safe_range(r);
  block.with_row_phi(r, [&](auto phi) {
    for (int64_t j = keys.begin; j < keys.end; j += W) {
      vfloat f = phi.of_stored(load(stored + j));
      vfloat term = (take_phi ? f : f * block.weight_scale[r]) * load(da + j);
      // dA of a key that the row does not see may overflow.
      delta_sum += f == 0.0f ? vfloat{} : term;
      if constexpr (Phi::has_zeros) n_positive += f == 0.0f ? vfloat{} : splat(1.0f);
    }
  });
}

// Packs e^(V - M) of a tile in shifted_exp_panels; the keys that fill the last panel are 0.
template <typename Phi>
inline void RowGradients<Phi>::pack_shifted_exp_values(int64_t start_k) {
  int64_t value_dim = block.params.value_dim;
  RowView v = output.prepare_tile_operand(block, start_k);
  int64_t n = std::min(BLOCK_K, block.params.key_length - block.key_begin - start_k);
  Buffer<float>& scratch = output.column_shift.scratch;  // the buffer that v points into
  std::fill(scratch + n * v.stride, scratch + BLOCK_K * v.stride, 0.0f);
  for (int64_t t = 0; t < BLOCK_K; t += W)
    transpose_rows(v.data + t * v.stride, v.stride, value_dim,
                   shifted_exp_panels + t / PANEL * PANEL * value_dim + t % PANEL);
}

// Sets row r of a scratch tile `to` [BLOCK_Q, TILE_STRIDE] to 0, unless all of it will be written.
template <typename Phi>
inline void RowGradients<Phi>::clear_row(float* to, int64_t r, int64_t start_k) {
  KeyRange keys = strip_keys[r / MR];
  if (block.fully_masked[r] || !std::isfinite(block.weight_scale[r]) || keys.begin > start_k ||
      keys.end < start_k + BLOCK_K)
    std::fill(to + r * TILE_STRIDE, to + r * TILE_STRIDE + BLOCK_K, 0.0f);
}

// Sets `row` to NaN for the keys of a tile that row r sees. row[0] belongs to the key at start_k.
template <typename Phi>
inline void RowGradients<Phi>::set_seen_to_nan(float* row, int64_t r, int64_t start_k) const {
  KeyRange keys = strip_keys[r / MR];
  for (int64_t j = keys.begin; j < std::min(keys.end, block.params.key_length - block.key_begin); ++j)
    if (block.sees(r, block.key_begin + j)) row[j - start_k] = std::numeric_limits<float>::quiet_NaN();
}

// Writes A and dL/ds of a row of a tile to `weights` and `grad_scores`.
template <typename Phi>
inline void RowGradients<Phi>::dense_grad_scores(int64_t r, int64_t start_k) {
  const Params& params = block.params;
  KeyRange keys = strip_keys[r / MR];
  clear_row(weights, r, start_k), clear_row(grad_scores, r, start_k);
  if (keys.empty() || block.fully_masked[r]) return;
  const float *stored = block.tile_row(r, start_k), *da = grad_weights_row(r, start_k);
  // a[0], ds[0]: the key at start_k
  float *a = weights + r * TILE_STRIDE, *ds = grad_scores + r * TILE_STRIDE;
  if (!std::isfinite(block.weight_scale[r])) {  // a non-finite row; with the l1 norm only
    set_seen_to_nan(a, r, start_k);
    set_seen_to_nan(ds, r, start_k);
    return;
  }
  vfloat scale = splat(block.weight_scale[r]), delta_i = splat(delta[r]),
         grad_scale = constant_weights(r) ? vfloat{} : scale;
  block.with_row_phi(r, [&](auto phi) {
    auto convert_vectors = [&](int64_t first, auto n_vectors) {
      constexpr int N = decltype(n_vectors)::value;
      vfloat x[N], f[N];
      unroll<N>([&](int i) { x[i] = load(stored + first + i * W); });
      unroll<N>([&](int i) { f[i] = phi.of_stored(x[i]); });
      phi.derivative(x);  // x is phi'(s) from here on
      unroll<N>([&](int i) {
        int64_t j = first + i * W;
        vfloat grad_phi = (load(da + j) - delta_i) * grad_scale;
        // 0 for a key that the row does not see, whatever dA and delta are
        vfloat grad_s = x[i] == 0.0f ? vfloat{} : grad_phi * x[i];
        if (has_exact[r] && !constant_weights(r))
          grad_s += load(exact_terms + r * block.row_stride + j) * phi.log_derivative(load(stored + j));
        store(a + (j - start_k), f[i] * scale);
        store(ds + (j - start_k), grad_s);
      });
    };
    int64_t j = keys.begin;
    for (; j + UNROLL * W <= keys.end; j += UNROLL * W) convert_vectors(j, std::integral_constant<int, UNROLL>{});
    for (; j < keys.end; j += W) convert_vectors(j, std::integral_constant<int, 1>{});
  });
  if (params.drop_below) block.apply_dropout(r, keys, a + (keys.begin - start_k));
}

}  // namespace softfocus
