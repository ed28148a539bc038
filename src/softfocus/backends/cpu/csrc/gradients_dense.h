// RowGradients: rows without re-weighting, over all keys that they see.
#pragma once

#include "gradients.h"

namespace softfocus {

// dL/dA of all tiles, and delta
template <typename Phi>
inline void RowGradients<Phi>::dense_grad_weights() {
  const Params& params = block.params;
  vf total[BLOCK_Q], n_positive[BLOCK_Q];  // lane-wise: sum of phi dA, number of keys with a weight
  for (int64_t r = 0; r < BLOCK_Q; ++r) total[r] = n_positive[r] = vf{};
  block.each_tile([&](int64_t start_k) {
    const float* panels = block.head->value_panels + (block.key_begin + start_k) * params.value_dim;
    if (params.laser && !output.shift.ordinary) {
      RowView v = tile_operand(start_k);
      int64_t n = std::min(BLOCK_K, params.key_length - block.key_begin - start_k);
      for (int64_t j = 0; j < BLOCK_K; ++j)
        for (int64_t d = 0; d < params.value_dim; ++d)
          exp_panels[j / PANEL * PANEL * params.value_dim + d * PANEL + j % PANEL] =
              j < n ? v.data[j * v.stride + d] : 0.0f;
      panels = exp_panels;
    }
    for (int64_t panel = start_k; panel < start_k + BLOCK_K; panel += PANEL)
      for (int64_t r = 0; r < block.n_rows; r += MR) {
        KeyRange seen = block.strip_range(r, panel, PANEL);
        if (seen.empty()) continue;
        const float* columns = panels + (panel - start_k) * params.value_dim + (seen.begin - panel);
        panel_dots<MR>(seen.vectors(), params.value_dim, grad_out + r * block.value_width, block.value_width, columns,
                       block.tile_row(static_cast<float*>(grad_weights), r, start_k) + seen.begin, BLOCK_K);
        for (int64_t i = r; i < std::min(r + MR, block.n_rows) && params.dropout_threshold; ++i)
          block.apply_dropout(i, seen, block.tile_row(static_cast<float*>(grad_weights), i, start_k));
        if (params.normaliser != L1) continue;
        for (int64_t i = r; i < std::min(r + MR, block.n_rows); ++i)
          block.with_row_phi(i, [&](auto phi) {
            const float *stored = block.tile_row(i, start_k),
                        *da = block.tile_row(static_cast<float*>(grad_weights), i, start_k);
            for (int64_t j = seen.begin; j < seen.end; j += W) {
              vf f = phi.value(load(stored + j));
              vf term = f * load(da + j);
              total[i] += f == 0.0f ? vf{} : term;  // dA of a key that the row does not see may overflow
              if constexpr (Phi::has_zeros) n_positive[i] += f == 0.0f ? vf{} : splat(1.0f);
            }
          });
      }
  });
  for (int64_t r = 0; r < block.n_rows && params.normaliser == L1; ++r) {
    delta[r] = reduce_sum(total[r]) * block.weight_scale[r];
    if (!has_exact[r]) single_key[r] = Phi::has_zeros && reduce_sum(n_positive[r]) == 1.0f;
    double exact_sum = 0.0;
    for (int64_t j = 0; j < block.key_end - block.key_begin && has_exact[r]; ++j)
      exact_sum += exact_terms[r * block.row_stride + j];
    delta[r] += exact_sum;
  }
}

// Zeros a row of a scratch tile, unless all of it will be written.
template <typename Phi>
inline void RowGradients<Phi>::clear_row(float* to, int64_t r, int64_t start_k) {
  KeyRange keys = strip_keys[r / MR];
  if (block.fully_masked[r] || !std::isfinite(block.weight_scale[r]) || keys.begin > start_k ||
      keys.end < start_k + BLOCK_K)
    std::fill(to + r * TILE_STRIDE, to + r * TILE_STRIDE + BLOCK_K, 0.0f);
}

// A and dL/ds of a row of a tile
template <typename Phi>
inline void RowGradients<Phi>::dense_grad_scores(int64_t r, int64_t start_k) {
  const Params& params = block.params;
  KeyRange seen = strip_keys[r / MR];
  clear_row(weights, r, start_k), clear_row(grad_scores, r, start_k);
  if (seen.empty() || block.fully_masked[r]) return;
  const float *stored = block.tile_row(r, start_k), *da = block.tile_row(static_cast<float*>(grad_weights), r, start_k);
  float *a = weights + r * TILE_STRIDE - start_k, *ds = grad_scores + r * TILE_STRIDE - start_k;
  if (!std::isfinite(block.weight_scale[r])) {  // a row that sees a NaN: NaN for the keys that it sees
    for (int64_t j = seen.begin; j < std::min(seen.end, params.key_length - block.key_begin); ++j)
      if (block.sees(r, block.key_begin + j)) a[j] = ds[j] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  vf scale = splat(block.weight_scale[r]), d = splat(delta[r]), grad_scale = constant_weights(r) ? vf{} : scale;
  block.with_row_phi(r, [&](auto phi) {
    auto vectors = [&](int64_t j, auto count) {
      constexpr int N = decltype(count)::value;
      vf x[N], f[N];
      unroll<N>([&](int i) { x[i] = load(stored + j + i * W); });
      unroll<N>([&](int i) { f[i] = phi.value(x[i]); });
      phi.derivative(x);
      unroll<N>([&](int i) {
        vf grad = load(da + j + i * W);
        vf grad_phi = (grad - d) * grad_scale;
        vf s =
            x[i] == 0.0f ? vf{} : grad_phi * x[i];  // 0 for a key that the row does not see, whatever dA and delta are
        if (has_exact[r] && !constant_weights(r)) {
          s += load(exact_terms + r * block.row_stride + j + i * W) * phi.log_derivative(load(stored + j + i * W));
        }
        store(a + j + i * W, f[i] * scale);
        store(ds + j + i * W, s);
      });
    };
    int64_t j = seen.begin;
    for (; j + 4 * W <= seen.end; j += 4 * W) vectors(j, std::integral_constant<int, 4>{});
    for (; j < seen.end; j += W) vectors(j, std::integral_constant<int, 1>{});
  });
  if (params.dropout_threshold) block.apply_dropout(r, seen, a);
}

}  // namespace softfocus
