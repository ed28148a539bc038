// Part of class RowGradients; included by gradients.h. Re-weighted rows ("listed"). dL/dA, A and g
// are needed for live keys only, which are listed. dL/ds is needed for all keys: through the
// threshold every visible key gets -o mean(g).
#pragma once

#include "gradients.h"

namespace softfocus {

// Lists the live keys of all tiles with their dL/dA. Computes of each row delta, delta_error,
// single_key, precise_inverse_power_sum, power_over_sum, minus_mean_grad and grad_power.
template <typename Phi>
template <bool DROPOUT>
inline void RowGradients<Phi>::compute_listed_grad_weights(const GradientTensors& grads) {
  PowerSums sums[BLOCK_Q];
  bool with_log = grads.grad_power;  // the sums of u^p log u are wanted
  // The lists of all rows and tiles follow one another without gaps. A loop over whole vectors
  // reads past the end of a list. It then reads the list of the next row of the same tile, or
  // zeros. Both are keys of the tile, so that their values may be read. Their u is set to 0. Writes
  // of dL/dA past the end of a list are overwritten when the next list is computed.
  int64_t next = 0;  // where the next list begins
  block.each_tile([&](int64_t start_k) {
    RowView v = output.prepare_tile_operand(block, start_k);
    for (int64_t first_row = 0; first_row < block.n_rows; first_row += LISTS) {
      int64_t stop_row = std::min(first_row + LISTS, block.n_rows);
      for (int64_t r = first_row; r < stop_row; ++r) {
        int64_t i = list_index(r, start_k), n = 0;
        if (!block.fully_masked[r])
          n = block.template gather_live<DROPOUT>(r, start_k, list_keys + next, list_u + next);
        list_start[i] = next, list_length[i] = uint8_t(n), next += n;
      }
      for (int64_t r = first_row; r < stop_row; ++r) {
        int64_t start = list_start[list_index(r, start_k)], n = list_length[list_index(r, start_k)];
        float* da = grad_weights_of_lists() + start;
        if (block.has_next_tile(start_k)) prefetch_next_tile(v.data, v.stride, r, block.padded_value_dim);
        listed_dots(incoming_grad + r * block.padded_value_dim, block.padded_value_dim, n, list_keys + start, v, da);
        add_to_power_sums<DROPOUT>(block.power[r], list_u + start, n, with_log, da, sums[r]);
      }
    }
  });
  for (int64_t r = 0; r < block.n_rows; ++r)
    if (!block.fully_masked[r]) finish_listed_row(r, sums[r], with_log);
}

// Adds the n keys of a list to the sums of its row. Applies the dropout factors to `da`, dL/dA.
template <typename Phi>
template <bool DROPOUT>
__attribute__((always_inline)) inline void RowGradients<Phi>::add_to_power_sums(float power, const float* u_list,
                                                                                int64_t n, bool with_log, float* da,
                                                                                PowerSums& sum) const {
  sum.n_live += n;
  RowBlock<Phi>::with_powers(power, [&](auto powers) {
    for (int64_t e = 0; e < n; e += W) {
      vfloat u = lane_index() < int32_t(n - e) ? load(u_list + e) : vfloat{}, da_e = load(da + e), u_p, u_pm1;
      if constexpr (DROPOUT) {
        da_e *= dropout_factor(u);
        store(da + e, da_e);
        u = absolute(u);
      }
      powers(u, u_p, u_pm1);
      u_p = u == 0.0f ? vfloat{} : u_p;  // entries after the list's end
      u_pm1 = u == 0.0f ? vfloat{} : u_pm1;
      sum.u_p.add(u_p), sum.u_p_da.add_product(u_p, da_e);
      sum.u_pm1.add(u_pm1), sum.u_pm1_da.add_product(u_pm1, da_e);
      if (with_log) {
        // After the list's end u is 0, and log u is -inf.
        vfloat u_p_log = u == 0.0f ? vfloat{} : u_p * logarithm(u);
        sum.u_p_log.add(u_p_log), sum.u_p_log_da.add_product(u_p_log, da_e);
      }
    }
  });
}

// Computes the constants of a row's gradients from its sums.
template <typename Phi>
inline void RowGradients<Phi>::finish_listed_row(int64_t r, const PowerSums& sum, bool with_log) {
  double power_sum = sum.u_p.total(), power = block.power[r],
         delta_i = power_sum == 0.0 ? 0.0 : sum.u_p_da.total() / power_sum;
  if (!has_exact[r]) single_key[r] = sum.n_live == 1;  // else laser_backward() has set it
  precise_inverse_power_sum[r] = power_sum == 0.0 ? 1.0f : float(1.0 / power_sum);
  if (!std::isfinite(block.row_sum[r])) precise_inverse_power_sum[r] = std::numeric_limits<float>::quiet_NaN();
  double exact_over_u = 0.0;  // sum_j X_j / u_j
  if (has_exact[r]) add_exact_terms(r, delta_i, exact_over_u);
  delta[r] = float(delta_i);
  delta_error[r] = float(delta_i - delta[r]);
  // Where one key has all the weight, dS and dL/dp are 0: power_over_sum, minus_mean_grad and
  // grad_power stay 0.
  if (constant_weights(r)) return;
  power_over_sum[r] = power * precise_inverse_power_sum[r];
  // sum_j g_j; the exact term's part of g_j is p X_j / u_j
  double g_sum = power_over_sum[r] * (sum.u_pm1_da.total() - delta_i * sum.u_pm1.total()) + power * exact_over_u;
  minus_mean_grad[r] = block.threshold_on[r] == 0.0f ? 0.0f : float(-g_sum / block.count[r] * block.inverse_spread[r]);
  // dL/dp = sum_j (A_j (dA_j - D) + X_j) log u_j, but 0 in a tied row, which keeps its l1 weights.
  // In a non-finite row peak is NaN and the condition holds: a NaN reaches dL/dp.
  if (with_log && !(block.peak[r] <= TIE_TOLERANCE))
    grad_power[r] = float((sum.u_p_log_da.total() - delta_i * sum.u_p_log.total()) * precise_inverse_power_sum[r] +
                          (has_exact[r] ? exact_term_log_u[r] : 0.0));
}

// u of a row at offset j
template <typename Phi>
inline float RowGradients<Phi>::u_at(int64_t r, int64_t j) const {
  int64_t vector_begin = j / W * W;
  vfloat f;
  block.with_row_phi(
      r, [&](auto phi) { f = phi.of_stored(load(block.tile_row(r, j / BLOCK_K * BLOCK_K) + vector_begin)); });
  return block.phi_to_u(r)(f)[j - vector_begin];
}

// Adds X_j of all keys to delta_i, and in a row with a threshold X_j / u_j to exact_over_u. A row
// without one does not need the second sum, since no mean of g reaches its keys. There u_j may also
// underflow. With a threshold u_j is a normal number wherever X_j is not 0 (log_u_of_stored()).
template <typename Phi>
inline void RowGradients<Phi>::add_exact_terms(int64_t r, double& delta_i, double& exact_over_u) {
  for (int64_t j = 0; j < block.key_end - block.key_begin; ++j)
    if (float term = exact_terms[r * block.row_stride + j]; term != 0.0f) {
      delta_i += term;
      if (block.threshold[r] != 0.0f) exact_over_u += term / u_at(r, j);
    }
}

// Computes dL/ds of a tile; adds A^T G to grad_values [n, padded_value_dim], the rows of its n
// keys. v is e^(V - M), read with LASER only. LISTS rows are scattered before any of them is read:
// a vector load right after scalar stores to the same addresses stalls until the stores have left
// the store buffer (store forwarding fails).
template <typename Phi>
template <bool DROPOUT>
inline void RowGradients<Phi>::listed_grad_scores(int64_t start_k, int64_t n, RowView v, float* grad_values) {
  std::fill(listed_grad_values + 0, listed_grad_values + n * block.padded_value_dim, 0.0f);
  for (int64_t first_row = 0; first_row < block.padded_rows(); first_row += LISTS) {
    int64_t stop_row = std::min(first_row + LISTS, block.padded_rows());
    for (int64_t r = first_row; r < stop_row; ++r) scatter_grad_phi<DROPOUT>(r, start_k, v);
    for (int64_t r = first_row; r < stop_row; ++r) multiply_by_derivative(r, start_k);
  }
  for (int64_t i = 0; i < n * block.padded_value_dim; i += W)
    store(grad_values + i, load(grad_values + i) + load(listed_grad_values + i));
}

// The dropout factor of a weight, by the sign of its u
template <typename Phi>
inline vfloat RowGradients<Phi>::dropout_factor(vfloat u) const {
  return bits(u) < 0 ? vfloat{} : splat(block.dropout.keep_scale);
}

// Writes the live keys' part of dL/dphi of a row, g * inverse_spread, to grad_scores; 0 elsewhere.
// Adds A G to listed_grad_values, with LASER times v.
template <typename Phi>
template <bool DROPOUT>
inline void RowGradients<Phi>::scatter_grad_phi(int64_t r, int64_t start_k, RowView v) {
  float* to = grad_scores + r * TILE_STRIDE;
  std::fill(to, to + BLOCK_K, 0.0f);
  if (block.fully_masked[r] || strip_keys[r / MR].empty()) return;
  int64_t start = list_start[list_index(r, start_k)], n = list_length[list_index(r, start_k)],
          width = block.padded_value_dim;
  const float *da = grad_weights_of_lists() + start, *u_list = list_u + start;
  const uint8_t* keys = list_keys + start;
  float grad_phi[BLOCK_K + W], a[BLOCK_K + W];  // whole vectors, past the end of the list
  RowBlock<Phi>::with_powers(block.power[r], [&](auto powers) {
    // Entries after the list's end are computed but not used.
    for (int64_t e = 0; e < n; e += W) {
      vfloat u = load(u_list + e), factor = splat(precise_inverse_power_sum[r]), u_p, u_pm1;
      if constexpr (DROPOUT) {
        factor *= dropout_factor(u);
        u = absolute(u);
      }
      powers(u, u_p, u_pm1);
      store(a + e, u_p * factor);
      store(grad_phi + e,
            u_pm1 * (load(da + e) - delta[r] - delta_error[r]) * (power_over_sum[r] * block.inverse_spread[r]));
    }
  });
  for (int64_t e = 0; e < n; ++e) to[keys[e]] = grad_phi[e];
  if (block.params.laser)
    scatter_add</*LASER=*/true>(incoming_grad + r * width, width, n, keys, a, v, listed_grad_values);
  else
    scatter_add</*LASER=*/false>(incoming_grad + r * width, width, n, keys, a, v, listed_grad_values);
}

// Turns g * inverse_spread of a row into dL/ds: adds minus_mean_grad, multiplies by phi'(s), adds
// the exact terms, p X_j d log u_j / ds_j.
template <typename Phi>
inline void RowGradients<Phi>::multiply_by_derivative(int64_t r, int64_t start_k) {
  KeyRange keys = strip_keys[r / MR];
  if (block.fully_masked[r]) return;
  const float* stored = block.tile_row(r, start_k);
  float* ds = grad_scores + r * TILE_STRIDE;  // ds[0]: the key at start_k
  // relu' of a NaN is 0, which would hide that the row is NaN.
  if (!std::isfinite(block.weight_scale[r])) return set_seen_to_nan(ds, r, start_k);
  vfloat minus_mean = splat(minus_mean_grad[r]);
  bool add_exact = has_exact[r] && !constant_weights(r);
  block.with_row_phi(r, [&](auto phi) {
    auto convert_vectors = [&](int64_t first, auto n_vectors) {
      constexpr int N = decltype(n_vectors)::value;
      vfloat x[N];
      unroll<N>([&](int i) { x[i] = load(stored + first + i * W); });
      phi.derivative(x);  // x is phi'(s) from here on
      unroll<N>([&](int i) {
        int64_t j = first + i * W;
        // 0 for a key that the row does not see, even if delta or minus_mean_grad is NaN
        vfloat grad_s = x[i] == 0.0f ? vfloat{} : x[i] * (load(ds + (j - start_k)) + minus_mean);
        if (add_exact) {
          vfloat term = load(exact_terms + r * block.row_stride + j);
          // d log u / ds is phi' / (phi - threshold). Without a threshold it is phi' / phi, which
          // log_derivative() gives even where phi underflows.
          vfloat stored_j = load(stored + j), log_u_derivative = phi.log_derivative(stored_j);
          if (block.threshold[r] != 0.0f) log_u_derivative = x[i] / (phi.of_stored(stored_j) - block.threshold[r]);
          grad_s += term == 0.0f ? vfloat{} : term * (block.power[r] * log_u_derivative);
        }
        store(ds + (j - start_k), grad_s);
      });
    };
    int64_t j = keys.begin;
    for (; j + UNROLL * W <= keys.end; j += UNROLL * W) convert_vectors(j, std::integral_constant<int, UNROLL>{});
    for (; j < keys.end; j += W) convert_vectors(j, std::integral_constant<int, 1>{});
  });
}

}  // namespace softfocus
