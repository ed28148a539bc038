// Part of class RowGradients; included by gradients.h. LASER. With out = log(A e^(V - M)) + M, the
// gradient of A e^(V - M) is dL/dO / (A e^(V - M)).
#pragma once

#include "gradients.h"

namespace softfocus {

// Computes the output again. An exact sum gives key j the share w_j = A_j e^(v_j - out). The
// function adds dO w_j to grad_values, where it is dL/dv_j, block by block as in
// listed_grad_scores(), and to exact_terms (X_j), and sets that element of incoming_grad to 0. For
// the other outputs it turns incoming_grad from dO into G = dL/d(A e^(V - M)), which the matrix
// products use.
template <typename Phi>
inline void RowGradients<Phi>::laser_backward(float* grad_values) {
  const Params& params = block.params;
  output.compute(block);
  std::vector<int64_t> exact_indices;  // into incoming_grad
  int64_t width = block.padded_value_dim, exact_size = (block.key_end - block.key_begin) * width;
  output.each_exact_sum(block, [&](int64_t r, int64_t d, const WeightedKeys& keys, const float* log_u) {
    float* row = exact_terms + r * block.row_stride;
    if (exact_indices.empty()) {
      exact_grad_values.resize(block.max_row_stride * width);
      std::fill(exact_grad_values + 0, exact_grad_values + exact_size, 0.0f);
    }
    if (!has_exact[r]) {
      std::fill(row, row + block.row_stride, 0.0f);  // whole vectors are read
      single_key[r] = keys.size() == 1;
      exact_term_log_u[r] = 0.0;
    }
    has_exact[r] = true;
    exact_indices.push_back(r * width + d);
    float grad = incoming_grad[r * width + d];
    if (grad == 0.0f) return;
    auto term = [&](int64_t i) { return keys.log_weights[i] + block.value_at(block.key_begin + keys.offsets[i], d); };
    double log_sum = log_sum_exp(keys.size(), term);
    for (int64_t i = 0; i < keys.size(); ++i) {
      float grad_share = grad * float(exponential_or_zero(term(i) - log_sum));  // dO w_j
      int64_t j = keys.offsets[i];
      row[j] += grad_share;
      exact_term_log_u[r] += double(grad_share) * log_u[j];
      exact_grad_values[j * width + d] += grad_share;
    }
  });
  if (!exact_indices.empty())
    for (int64_t i = 0; i < exact_size; ++i) grad_values[block.key_begin * width + i] += exact_grad_values[i];
  for (int64_t r = 0; r < block.n_rows; ++r)
    for (int64_t d = 0; d < params.value_dim; ++d) {
      float& g = incoming_grad[r * width + d];
      float sum = output.out[r * width + d];  // A e^(V - M)
      // 0 where dO is 0, where the row has no weights, and where the sum is NaN. The last is a
      // non-finite row: its dL/ds is NaN whatever g is.
      g = output.zero_weights[r] || g == 0.0f || std::isnan(sum) ? 0.0f : g / sum;
    }
  for (int64_t index : exact_indices) incoming_grad[index] = 0.0f;
}

}  // namespace softfocus
