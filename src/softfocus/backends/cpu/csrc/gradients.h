// The gradients of a block of rows. The scores are computed again, then dL/dA and its row sums,
// then dL/ds tile by tile. From dL/ds follow the gradients of queries, keys and bias, from A that
// of the values. Short forms: dA for dL/dA, dS for dL/ds, and so on.
//
// G is the gradient of what the weights are multiplied to: dO, with LASER dL/d(A e^(V - M)). So
// dA_j is G . v_j, with LASER G . e^(v_j - M). With dropout the dropout factor multiplies it. A is
// before dropout, except in dV += A^T G, where it is after.
//
// With D_i = sum_j A_ij dA_ij, the delta of FlashAttention (0 where the normaliser is not l1), o_i
// (threshold_on), and p, u as in row_block.h:
//     dS_j = (dA_j - D) * weight_scale * phi'(s_j)                without re-weighting
//     dS_j = (g_j - o mean(g)) * inverse_spread * phi'(s_j)       with it, where
//     g_j = p u_j^(p-1) (dA_j - D) / sum u^p
//     dL/dp = sum_j A_j (dA_j - D) log u_j
// g_j is dL/du_j. The spread is treated as a constant, because A does not change when all u of a
// row are multiplied by a number. The term o mean(g) comes from the threshold o sum_k phi_k / N:
// each phi lowers every u. dL/dp follows from the derivative of A_j by p, which is
// A_j (log u_j - sum_k A_k log u_k): u does not depend on p.
//
// LASER (gradients_laser.inl.h): G = dO / (A e^(V - M)). For an exact sum this quotient may
// overflow. There it is set to 0, so that dA_j lacks the columns with an exact sum. Their part of
// A_j dA_j is finite. It is kept as the exact term
//     X_j = sum_d dO_d A_j e^(v_jd - out_d)                       over the exact sums d of the row
// and is added to A_j dA_j wherever that product occurs. The formulas above contain it, because
// weight_scale is A_j / phi(s_j), and u_j^(p-1) / sum u^p is A_j / u_j:
//     D = sum_j (A_j dA_j + X_j)
//     dS_j = (A_j (dA_j - D) + X_j) phi'(s_j) / phi(s_j)          without re-weighting
//     g_j = p (A_j (dA_j - D) + X_j) / u_j                        with it
//     dL/dp = sum_j (A_j (dA_j - D) + X_j) log u_j
// The derivative of u_j by s_j is inverse_spread * phi'(s_j). With re-weighting X_j therefore
// enters dS_j as p X_j phi'(s_j) / (phi(s_j) - threshold), and all dS of the row through mean(g).
#pragma once

#include <numeric>

#include "output.h"

namespace softfocus {

struct GradientTensors {
  TensorView grad_out;                       // [B, H, Lq, Dv]
  void *grad_query, *grad_key, *grad_value;  // contiguous, of the query's dtype
  // float64 if it is broadcast, else float32; written through const_cast (add_bias_gradient());
  // data is null if it is not wanted
  TensorView grad_bias;
  // [B, H, Lq], for the caller to sum over B and Lq; or null
  float *grad_head_scale, *grad_power;
};

template <typename Phi>
class RowGradients {
 public:
  RowBlock<Phi> block;

  // The lists of live keys fill only a part of their buffers, which therefore take no huge pages.
  // max_row_stride has W elements more than the keys of a row need: room for writes past the last
  // list.
  explicit RowGradients(const Params& params)
      : block(params, rows_per_block(params, /*backward=*/true)),
        output(block),
        incoming_grad(BLOCK_Q * block.padded_value_dim),
        grad_queries(BLOCK_Q * block.padded_dim),
        scaled_queries(BLOCK_Q * block.padded_dim),
        weights(params.reweighted ? 0 : BLOCK_Q * TILE_STRIDE),
        grad_scores(BLOCK_Q * TILE_STRIDE),
        key_scratch(BLOCK_K * block.padded_dim),
        grad_shifted_exp_values(params.laser && !params.reweighted ? BLOCK_K * block.padded_value_dim : 0),
        listed_grad_values(params.reweighted ? BLOCK_K * block.padded_value_dim : 0),
        grad_weights_data(block.max_rows * block.max_row_stride, /*huge_pages=*/!params.reweighted),
        list_keys(params.reweighted ? block.max_rows * block.max_row_stride : 0, /*huge_pages=*/false),
        list_u(params.reweighted ? block.max_rows * block.max_row_stride : 0, /*huge_pages=*/false),
        list_start(block.max_padded_keys() / BLOCK_K * BLOCK_Q),
        list_length(block.max_padded_keys() / BLOCK_K * BLOCK_Q) {
    if (params.laser) exact_terms.resize(BLOCK_Q * block.max_row_stride);
    if (params.laser && !params.reweighted) shifted_exp_panels.resize(BLOCK_K * params.value_dim);
  }

  // Computes the gradients of the rows of a query head from start_q on. Adds to grad_keys [Lk,
  // padded_dim], grad_values [Lk, padded_value_dim] and grad_bias; writes grad_query,
  // grad_head_scale and grad_power.
  void run(int64_t b, int64_t query_head, int64_t start_q, const KeyHeadData& key_data, const GradientTensors& grads,
           float* grad_keys, float* grad_values) {
    block.compute(b, query_head, start_q, key_data);
    scale_queries();
    read_grad_out(grads);
    std::fill(grad_queries + 0, grad_queries + block.padded_rows() * block.padded_dim, 0.0f);
    for (int64_t r = 0; r < BLOCK_Q; ++r) has_exact[r] = false;
    if (block.params.laser) laser_backward(grad_values);
    if (block.params.reweighted)
      block.params.drop_below ? compute_listed_grad_weights</*DROPOUT=*/true>(grads)
                              : compute_listed_grad_weights</*DROPOUT=*/false>(grads);
    else
      compute_dense_grad_weights();
    block.each_tile([&](int64_t start_k) { tile_gradients(start_k, grads, grad_keys, grad_values); });
    write_query_gradients(grads);
  }

 private:
  BlockOutput<Phi> output;
  // [BLOCK_Q, padded_value_dim], G, the gradient of what the weights are multiplied to: dO. With
  // LASER dO at first, and dL/d(A e^(V - M)) once laser_backward() has run
  Buffer<float> incoming_grad;
  Buffer<float> grad_queries;    // [BLOCK_Q, padded_dim]
  Buffer<float> scaled_queries;  // [BLOCK_Q, padded_dim], c Q: for the gradients of keys
  Buffer<float> weights;         // [BLOCK_Q, TILE_STRIDE], A after dropout; without re-weighting
  Buffer<float> grad_scores;     // [BLOCK_Q, TILE_STRIDE], dL/ds of a tile
  Buffer<float> key_scratch;     // [BLOCK_K, padded_dim], for keys that cannot be read in place
  // With LASER and without re-weighting: dL/d(e^(V - M)) of a tile, [BLOCK_K, padded_value_dim],
  // and e^(V - M) of a tile, [BLOCK_K / PANEL, Dv, PANEL]
  Buffer<float> grad_shifted_exp_values, shifted_exp_panels;
  // With re-weighting: dV of a tile and this block's rows, [BLOCK_K, padded_value_dim]. So a sum
  // over many rows is one of blocks, not of single rows, whose float roundings would add up.
  Buffer<float> listed_grad_values;
  // dL/dA: without re-weighting an element for each score (grad_weights_row()), with re-weighting
  // one for each live key (grad_weights_of_lists())
  Buffer<float> grad_weights_data;
  // The live keys, counted from their tile's first. The lists of all rows follow one another.
  // gather_live() writes up to W elements past the end of a list.
  Buffer<uint8_t> list_keys;
  // u of the live keys, negative where dropout drops the weight; same indices
  Buffer<float> list_u;
  Buffer<int64_t> list_start;   // [tiles, BLOCK_Q], where the list of a tile and row begins
  Buffer<uint8_t> list_length;  // [tiles, BLOCK_Q], its length
  static_assert(BLOCK_K <= std::numeric_limits<uint8_t>::max());
  // [BLOCK_Q, row_stride], the exact terms X_j by offset j; only rows with has_exact are set
  Buffer<float> exact_terms;
  // [max_row_stride, padded_value_dim], dV of the exact sums of this block by offset j
  Buffer<float> exact_grad_values;
  bool has_exact[BLOCK_Q];            // rows with at least one exact sum
  double exact_term_log_u[BLOCK_Q];   // of these rows: sum_j X_j log u_j
  KeyRange strip_keys[BLOCK_Q / MR];  // the keys that each strip sees in the tile at hand
  float delta[BLOCK_Q];               // D_i
  // Re-weighted rows: D_i in double minus delta. Both are subtracted from dA, so that digits are
  // kept where one key dominates and its dA is nearly D_i.
  float delta_error[BLOCK_Q];
  // 1 / sum u^p, summed in double over the live keys; output.inverse_power_sum is the forward's,
  // whose tiles are summed in float
  float precise_inverse_power_sum[BLOCK_Q];
  float power_over_sum[BLOCK_Q];   // p / sum u^p
  float minus_mean_grad[BLOCK_Q];  // -o mean(g) * inverse_spread: every visible key receives it
  float grad_power[BLOCK_Q];       // dL/dp of each row
  // One key has all the weight. Without the l1 norm it is not set. laser_backward() sets it in rows
  // with an exact sum. Other dense rows set it only where phi has zeros: else constant_weights()
  // sees such a row by its count
  bool single_key[BLOCK_Q];

  // dL/dA of row r of a tile, without re-weighting: [tiles, max_rows, BLOCK_K], indexed by offset j
  float* grad_weights_row(int64_t r, int64_t start_k) {
    return block.tile_row(static_cast<float*>(grad_weights_data), r, start_k);
  }
  // dL/dA of the live keys, at the indices of list_keys
  float* grad_weights_of_lists() { return grad_weights_data; }

  // The index of a row and tile in list_start and list_length
  static int64_t list_index(int64_t r, int64_t start_k) { return start_k / BLOCK_K * BLOCK_Q + r; }

  void scale_queries() {
    int64_t width = block.padded_dim;
    for (int64_t r = 0; r < block.padded_rows(); ++r)
      for (int64_t d = 0; d < width; ++d)
        scaled_queries[r * width + d] = block.queries[r * width + d] * block.score_scale[r];
  }

  // Reads dO into incoming_grad and clears the rows' sums. Fully masked rows pass no gradient:
  // their dO is 0.
  void read_grad_out(const GradientTensors& grads) {
    const Params& params = block.params;
    for (int64_t r = 0; r < block.padded_rows(); ++r) {
      float* row = incoming_grad + r * block.padded_value_dim;
      std::fill(row, row + block.padded_value_dim, 0.0f);
      if (r < block.n_rows && !block.fully_masked[r])
        read_row(grads.grad_out, params.dtype, block.batch_index, block.query_head, block.start_q + r, params.value_dim,
                 row);
      delta[r] = power_over_sum[r] = minus_mean_grad[r] = grad_power[r] = 0.0f;
    }
    // Where a row sees a non-finite value, that column passes no gradient. This holds even where
    // decoding has left the output finite, because no live key has the non-finite value.
    for (auto [key, d] : block.key_data->nonfinite_values)
      for (int64_t r = 0; r < block.n_rows; ++r)
        if (block.sees(r, key)) incoming_grad[r * block.padded_value_dim + d] = 0.0f;
  }

  // Whether one key has all the weight of a row, and keeps it if its score changes a little. The
  // gradient of that score is then 0, and rounding must not change it.
  bool constant_weights(int64_t r) const {
    return block.params.normaliser == L1 && (block.count[r] == 1.0f || single_key[r]);
  }

  // gradients_laser.inl.h
  void laser_backward(float* grad_values);

  // gradients_dense.inl.h
  void compute_dense_grad_weights();
  void add_delta_terms(int64_t r, int64_t start_k, KeyRange keys, vfloat& delta_sum, vfloat& n_positive);
  void pack_shifted_exp_values(int64_t start_k);
  void clear_row(float* to, int64_t r, int64_t start_k);
  void set_seen_to_nan(float* row, int64_t r, int64_t start_k) const;
  void dense_grad_scores(int64_t r, int64_t start_k);

  // gradients_reweighted.inl.h
  struct PowerSums {  // over the live keys of a row; _da: each term times dA
    // For delta, sum g and dL/dp: sums of u^p, u^(p-1) and u^p log u
    DoubleSum u_p, u_p_da, u_pm1, u_pm1_da, u_p_log, u_p_log_da;
    int64_t n_live = 0;
  };
  template <bool DROPOUT>
  void compute_listed_grad_weights(const GradientTensors& grads);
  template <bool DROPOUT>
  void add_to_power_sums(float power, const float* u_list, int64_t n, bool with_log, float* da, PowerSums& sum) const;
  void finish_listed_row(int64_t r, const PowerSums& sum, bool with_log);
  float u_at(int64_t r, int64_t j) const;
  void add_exact_terms(int64_t r, double& delta_i, double& exact_over_u);
  // listed_grad_scores() computes dL/ds and also adds the dV of n keys, in scatter_grad_phi().
  template <bool DROPOUT>
  void listed_grad_scores(int64_t start_k, int64_t n, RowView v, float* grad_values);
  vfloat dropout_factor(vfloat u) const;
  template <bool DROPOUT>
  void scatter_grad_phi(int64_t r, int64_t start_k, RowView v);
  void multiply_by_derivative(int64_t r, int64_t start_k);

  // Computes A and dL/ds of a tile, and from them the gradients.
  void tile_gradients(int64_t start_k, const GradientTensors& grads, float* grad_keys, float* grad_values) {
    const Params& params = block.params;
    int64_t first_key = block.key_begin + start_k, stop_key = std::min(first_key + BLOCK_K, params.key_length),
            n = stop_key - first_key;
    RowView k = view_keys(params, *block.key_data, block.batch_index, block.key_head, first_key, stop_key, key_scratch);
    RowView shifted_exp_values{nullptr, 0};
    if (params.laser) shifted_exp_values = output.prepare_tile_operand(block, start_k);
    for (int64_t strip = 0; strip < block.padded_rows() / MR; ++strip)
      strip_keys[strip] = block.strip_range(strip * MR, start_k);
    float *tile_grad_keys = grad_keys + first_key * block.padded_dim,
          *tile_grad_values = grad_values + first_key * block.padded_value_dim;
    if (params.reweighted)
      params.drop_below ? listed_grad_scores</*DROPOUT=*/true>(start_k, n, shifted_exp_values, tile_grad_values)
                        : listed_grad_scores</*DROPOUT=*/false>(start_k, n, shifted_exp_values, tile_grad_values);
    else
      for (int64_t r = 0; r < block.padded_rows(); ++r) dense_grad_scores(r, start_k);
    if (grads.grad_bias.data) add_bias_gradient(start_k, n, grads.grad_bias);
    add_query_gradients(start_k, n, k);
    add_key_gradients(start_k, n, tile_grad_keys, tile_grad_values, shifted_exp_values);
  }

  // dQ += dS K for the n keys of a tile, strip by strip; write_query_gradients() multiplies by c_i
  void add_query_gradients(int64_t start_k, int64_t n, RowView k) {
    int64_t width = block.padded_dim;
    for (int64_t r = 0; r < block.n_rows; r += MR) {
      KeyRange keys = strip_keys[r / MR];
      if (keys.empty()) continue;
      int64_t skip = keys.begin - start_k, depth = std::min(keys.end - start_k, n) - skip;
      product<MR>(width / W, depth, grad_scores + r * TILE_STRIDE + skip, TILE_STRIDE, /*a_column_stride=*/1,
                  k.data + skip * k.stride, k.stride, grad_queries + r * width, width, /*add=*/true);
    }
  }

  // dK += dS^T (c Q). Without re-weighting also dV += A^T G; with LASER dV += (A^T G) * e^(V - M).
  // Re-weighted rows have added their dV already (listed_grad_scores()). For the n keys of a tile,
  // MR at a time and then one by one: to_keys [n, padded_dim], to_values [n, padded_value_dim].
  void add_key_gradients(int64_t start_k, int64_t n, float* to_keys, float* to_values, RowView shifted_exp_values) {
    int64_t width = block.padded_dim, padded_value_dim = block.padded_value_dim;
    bool laser = block.params.laser;
    bool all_keys = true;  // every strip sees the whole tile
    for (int64_t strip = 0; strip < block.padded_rows() / MR; ++strip)
      all_keys &= strip_keys[strip].begin == start_k && strip_keys[strip].end == start_k + BLOCK_K;
    for (int64_t t = 0, n_keys; t < n; t += n_keys) {
      n_keys = t + MR <= n ? MR : 1;
      auto [begin_row, stop_row] =
          all_keys ? std::pair(int64_t(0), block.padded_rows()) : rows_that_see(start_k, t, n_keys);
      if (begin_row >= stop_row) continue;
      int64_t depth = stop_row - begin_row;
      transposed_product(n_keys, grad_scores + begin_row * TILE_STRIDE + t, depth, scaled_queries + begin_row * width,
                         width, to_keys + t * width, /*add=*/true);
      if (block.params.reweighted) continue;
      float* to = laser ? grad_shifted_exp_values + t * padded_value_dim : to_values + t * padded_value_dim;
      transposed_product(n_keys, weights + begin_row * TILE_STRIDE + t, depth,
                         incoming_grad + begin_row * padded_value_dim, padded_value_dim, to, /*add=*/!laser);
      if (laser) add_shifted_exp_gradients(t, n_keys, shifted_exp_values, to_values);
    }
  }

  // From the first to the last strip that sees one of the n_keys keys of a tile from its t-th on.
  // dS and A of a strip in between that sees none are 0.
  std::pair<int64_t, int64_t> rows_that_see(int64_t start_k, int64_t t, int64_t n_keys) const {
    int64_t begin_row = BLOCK_Q, stop_row = 0;
    for (int64_t r = 0; r < block.n_rows; r += MR)
      if (strip_keys[r / MR].begin < start_k + t + n_keys && strip_keys[r / MR].end > start_k + t)
        begin_row = std::min(begin_row, r), stop_row = r + MR;
    return {begin_row, stop_row};
  }

  // dV += dL/d(e^(V - M)) * e^(V - M) for the n_keys keys of a tile from its t-th on
  void add_shifted_exp_gradients(int64_t t, int64_t n_keys, RowView shifted_exp_values, float* to_values) {
    int64_t width = block.padded_value_dim;
    for (int64_t i = t; i < t + n_keys; ++i)
      for (int64_t d = 0; d < width; d += W) {
        float* target = to_values + i * width + d;
        store(target, load(target) + load(grad_shifted_exp_values + i * width + d) *
                                         load(shifted_exp_values.data + i * shifted_exp_values.stride + d));
      }
  }

  // C [n_keys, width] (+)= A^T B for MR keys, or one: A [depth, TILE_STRIDE], B [depth, width]
  static void transposed_product(int64_t n_keys, const float* a, int64_t depth, const float* b, int64_t width, float* c,
                                 bool add) {
    if (n_keys == MR)
      product<MR>(width / W, depth, a, /*a_row_stride=*/1, TILE_STRIDE, b, width, c, width, add);
    else
      product<1>(width / W, depth, a, /*a_row_stride=*/1, TILE_STRIDE, b, width, c, width, add);
  }

  // Adds dS of the n keys of a tile to grad_bias, whose strides are 0 along dimensions of size 1.
  // If it is broadcast an element is a sum of so many terms that it is kept in double. Python's
  // Call.sums_bias has the same condition and makes the array.
  void add_bias_gradient(int64_t start_k, int64_t n, const TensorView& grad_bias) {
    const Params& params = block.params;
    int64_t sizes[] = {params.batch, params.heads, params.query_length, params.key_length};
    bool broadcast = false;
    for (int i = 0; i < 4; ++i) broadcast |= !grad_bias.stride[i] && sizes[i] > 1;
    if (broadcast)
      add_bias_gradient_as<double>(start_k, n, grad_bias);
    else
      add_bias_gradient_as<float>(start_k, n, grad_bias);
  }

  template <typename T>
  void add_bias_gradient_as(int64_t start_k, int64_t n, const TensorView& grad_bias) {
    for (int64_t r = 0; r < block.n_rows; ++r) {
      T* row = const_cast<T*>(row_pointer<T>(grad_bias, block.batch_index, block.query_head, block.start_q + r));
      const float* ds = grad_scores + r * TILE_STRIDE;
      if (grad_bias.stride[3])
        for (int64_t t = 0; t < n; ++t) row[(block.key_begin + start_k + t) * grad_bias.stride[3]] += ds[t];
      else
        row[0] += std::accumulate(ds, ds + n, T{0});
    }
  }

  // Writes grad_query from c_i dS K, and the rows' grad_head_scale and grad_power where wanted. The
  // gradient of the head scale is the dot product of base_scale dS K with the query.
  void write_query_gradients(const GradientTensors& grads) {
    const Params& params = block.params;
    // The index of row 0 among all rows [B, H, Lq]
    int64_t first_index = (block.batch_index * params.heads + block.query_head) * params.query_length + block.start_q;
    for (int64_t r = 0; r < block.n_rows; ++r) {
      float *grad = grad_queries + r * block.padded_dim, *query = block.queries + r * block.padded_dim;
      for (int64_t d = 0; d < block.padded_dim; d += W) store(grad + d, load(grad + d) * block.base_scale[r]);
      if (grads.grad_head_scale) grads.grad_head_scale[first_index + r] = dot(grad, query, block.padded_dim);
      if (grads.grad_power) grads.grad_power[first_index + r] = grad_power[r];
      if (params.head_scale)
        for (int64_t d = 0; d < block.padded_dim; d += W)
          store(grad + d, load(grad + d) * params.head_scale[block.query_head]);
      if (params.cosine) l2_normalise_backward(grad, query, block.query_rnorm[r], params.head_dim);
      write_row(grads.grad_query, params.dtype, (first_index + r) * params.head_dim, grad, params.head_dim);
    }
  }
};

}  // namespace softfocus

#include "gradients_dense.inl.h"
#include "gradients_laser.inl.h"
#include "gradients_reweighted.inl.h"
