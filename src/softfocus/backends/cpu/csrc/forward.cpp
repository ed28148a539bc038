// The forward: out and the row statistics, one block of rows at a time.
#include "output.h"
#include "parallel.h"

namespace softfocus {
namespace {

// The buffers of one thread
template <typename Phi>
struct Worker {
  RowBlock<Phi> block;
  BlockOutput<Phi> output;
  explicit Worker(const Params& params) : block(params, rows_per_block(params, /*backward=*/false)), output(block) {}

  // Computes a query head of a decoding call. Values are searched for non-finite elements only if
  // the output has one. If the search finds one, the head is computed again. With LASER they are
  // searched first, since the exponentials would hide them.
  void decode(int64_t b, int64_t query_head, void* out, float* statistics) {
    const Params& params = block.params;
    KeyHeadData key_data;
    auto search_values = [&] {
      pack_values(params, key_data, b, params.key_head_of(query_head), 0, params.key_length, /*panels=*/false,
                  key_data.nonfinite_values, key_data.large_values);
    };
    if (params.laser) search_values();
    run(b, query_head, 0, key_data, out, statistics);
    if (params.laser || all_finite(output.out, block.n_rows * block.padded_value_dim)) return;
    search_values();
    if (!key_data.nonfinite_values.empty()) run(b, query_head, 0, key_data, out, statistics);
  }

  // Computes the rows of a query head from start_q on.
  void run(int64_t b, int64_t query_head, int64_t start_q, const KeyHeadData& key_data, void* out, float* statistics) {
    const Params& params = block.params;
    block.compute(b, query_head, start_q, key_data);
    output.compute(block);
    if (params.laser) laser_logarithm();
    mark_nonfinite_values();
    // statistics [4, all_rows]
    // The index of row 0 among all rows [B, H, Lq], and their number
    int64_t first_index = (b * params.heads + query_head) * params.query_length + start_q,
            all_rows = params.batch * params.heads * params.query_length;
    for (int64_t r = 0; r < block.n_rows; ++r) {
      float* out_row = output.out + r * block.padded_value_dim;
      if (block.fully_masked[r]) std::fill(out_row, out_row + params.value_dim, 0.0f);
      write_row(out, params.dtype, (first_index + r) * params.value_dim, out_row, params.value_dim);
      if (!statistics) continue;
      statistics[first_index + r] = block.count[r];
      statistics[all_rows + first_index + r] = block.maximum[r];
      statistics[2 * all_rows + first_index + r] = block.log_norm[r];
      statistics[3 * all_rows + first_index + r] = block.peak[r];
    }
  }

  // Sets an output to NaN where its row sees a non-finite value. In decoding a re-weighted row
  // reads only the values of its live keys. A non-finite value that it read makes the output
  // non-finite. An output that is finite has read none and stays.
  void mark_nonfinite_values() {
    bool live_only = block.params.reweighted && !block.params.laser && !block.key_data->packed;
    for (auto [key, d] : block.key_data->nonfinite_values)
      for (int64_t r = 0; r < block.n_rows; ++r) {
        float& x = output.out[r * block.padded_value_dim + d];
        if ((!live_only || !std::isfinite(x)) && block.sees(r, key)) x = std::numeric_limits<float>::quiet_NaN();
      }
  }

  // Turns A e^(V - M) into log(A e^(V - M)) + M.
  void laser_logarithm() {
    const Params& params = block.params;
    std::vector<std::pair<int64_t, float>> exact_sums;  // index into output.out, and the output
    output.each_exact_sum(block, [&](int64_t r, int64_t d, const WeightedKeys& keys, const float*) {
      // log A is log u^p + log scale.
      float scale = params.reweighted ? output.inverse_power_sum[r] : block.weight_scale[r];
      double log_sum = log_sum_exp(keys.size(), [&](int64_t i) {
        return keys.log_weights[i] + block.value_at(block.key_begin + keys.offsets[i], d);
      });
      exact_sums.push_back({r * block.padded_value_dim + d, float(log_sum + std::log(double(scale)))});
    });
    for (int64_t r = 0; r < block.n_rows; ++r)
      for (int64_t d = 0; d < params.value_dim; ++d) {
        float& x = output.out[r * block.padded_value_dim + d];
        x = output.zero_weights[r] ? 0.0f : std::log(x) + output.column_shift.shift[d];
      }
    for (auto [index, output_element] : exact_sums) output.out[index] = output_element;
    for (int64_t r = 0; r < block.n_rows; ++r)
      if (block.count[r] == 1.0f && !output.zero_weights[r] && std::isfinite(block.row_sum[r])) copy_only_value(r);
  }

  // The output of a row that sees one key: its value, without the rounding of log(e^v)
  void copy_only_value(int64_t r) {
    int64_t key = block.window_begin[r];
    while (!block.sees(r, key)) ++key;
    for (int64_t d = 0; d < block.params.value_dim; ++d)
      output.out[r * block.padded_value_dim + d] = block.value_at(key, d);
  }
};

template <typename Phi>
bool forward(const Params& params, void* out, float* statistics) {
  PerThread<Worker<Phi>> workers(params);
  if (params.query_length <= DECODE_QUERIES)
    return parallel_for(params.threads, params.batch * params.heads, [&](int64_t item) {
      workers.mine().decode(item / params.heads, item % params.heads, out, statistics);
    });
  int64_t all_key_heads = params.batch * params.key_heads, at_once = key_heads_at_once(params, /*backward=*/false);
  int64_t block_rows = rows_per_block(params, /*backward=*/false), blocks = ceil_div(params.query_length, block_rows),
          group = params.group();
  std::vector<KeyHeadData> key_data_at_once(at_once);
  for (KeyHeadData& key_data : key_data_at_once) key_data.reserve(params, /*backward=*/false);
  for (int64_t first_key_head = 0; first_key_head < all_key_heads; first_key_head += at_once) {
    int64_t n = std::min(at_once, all_key_heads - first_key_head);
    if (!pack_key_heads(params, key_data_at_once, first_key_head, n, /*backward=*/false)) return false;
    // `item` is an index of [n key heads, blocks, query heads of a group].
    bool done = parallel_for(params.threads, n * group * blocks, [&](int64_t item) {
      // The last rows go first, because they take longest under a causal mask.
      int64_t block_index = blocks - 1 - item / group % blocks;
      int64_t key_head_index = first_key_head + item / (group * blocks);  // of all B * Hk
      int64_t query_head = key_head_index % params.key_heads * group + item % group;
      workers.mine().run(key_head_index / params.key_heads, query_head, block_index * block_rows,
                         key_data_at_once[key_head_index - first_key_head], out, statistics);
    });
    if (!done) return false;
  }
  return true;
}

}  // namespace
}  // namespace softfocus

// Writes out [B, H, Lq, Dv], of the query's dtype, and statistics [4, B, H, Lq] (count, maximum,
// log_norm, peak) unless null; both contiguous. Returns 0, or 1 if memory ran out; out and
// statistics are then arbitrary. The pointers of query, key and value are separate arguments, so
// that calls of one layout can share `params_template`.
extern "C" __attribute__((visibility("default"))) int softfocus_forward(const softfocus::Params* params_template,
                                                                        const void* query, const void* key,
                                                                        const void* value, void* out,
                                                                        float* statistics) {
  bool done = false;
  try {
    softfocus::Params params = *params_template;
    params.query.data = query, params.key.data = key, params.value.data = value;
    softfocus::with_phi(params.phi,
                        [&](auto phi) { done = softfocus::forward<decltype(phi)>(params, out, statistics); });
  } catch (...) {  // only std::bad_alloc is thrown; it must not reach C
  }
  return done ? 0 : 1;
}

// The caller compares them with the lengths of pointwise.FUSED and SUPPORTED.dtypes.
extern "C" {
extern __attribute__((visibility("default"))) const int64_t softfocus_phi_count, softfocus_dtype_count;
const int64_t softfocus_phi_count = softfocus::count_phi(), softfocus_dtype_count = softfocus::count_dtypes();
}
