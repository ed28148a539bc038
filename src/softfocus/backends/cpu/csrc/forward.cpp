// The forward: out and the row statistics, a block of rows at a time.
#include <memory>

#include "output.h"
#include "parallel.h"

namespace softfocus {
namespace {

// What a thread works in
template <typename Phi>
struct Worker {
  RowBlock<Phi> block;
  BlockOutput<Phi> output;
  explicit Worker(const Params& params) : block(params, rows_per_block(params, false)), output(block) {}

  // A head of a decoding call. Values are searched for non-finite ones only if the output has one;
  // with LASER always, since the exponentials would hide them.
  void decode(int64_t b, int64_t h, void* out, float* statistics) {
    const Params& params = block.params;
    KeyHead head;
    auto check_values = [&] {
      pack_values(params, head, b, h / (params.heads / params.key_heads), 0, params.key_length, false,
                  head.nonfinite_values, head.large_values);
    };
    if (params.laser) check_values();
    run(b, h, 0, head, out, statistics);
    if (params.laser || all_finite(output.out, block.n_rows * block.value_width)) return;
    check_values();
    if (!head.nonfinite_values.empty()) run(b, h, 0, head, out, statistics);
  }

  // The rows of query head h from start_q on
  void run(int64_t b, int64_t h, int64_t start_q, const KeyHead& head, void* out, float* statistics) {
    const Params& params = block.params;
    block.compute(b, h, start_q, head);
    output.compute(block);
    if (params.laser) laser_logarithm();
    int64_t row = (b * params.heads + h) * params.query_length + start_q,
            rows = params.batch * params.heads * params.query_length;
    for (int64_t r = 0; r < block.n_rows; ++r)
      if (float* out_row = output.out + r * block.value_width; block.fully_masked[r])
        std::fill(out_row, out_row + params.value_dim, 0.0f);
    for (auto [key, d] : head.nonfinite_values)
      for (int64_t r = 0; r < block.n_rows; ++r)
        if (block.sees(r, key)) output.out[r * block.value_width + d] = std::numeric_limits<float>::quiet_NaN();
    for (int64_t r = 0; r < block.n_rows; ++r) {
      write_row(out, params.dtype, (row + r) * params.value_dim, output.out + r * block.value_width, params.value_dim);
      if (!statistics) continue;
      statistics[row + r] = block.count[r];
      statistics[rows + row + r] = block.maximum[r];
      statistics[2 * rows + row + r] = block.log_norm[r];
      statistics[3 * rows + row + r] = block.peak[r];
    }
  }

  // Turns A e^(V - M) into log(A e^(V - M)) + M.
  void laser_logarithm() {
    const Params& params = block.params;
    int64_t first = block.key_begin, n = block.key_end - block.key_begin;
    std::vector<std::pair<int64_t, float>> exact_sums;  // index into output.out, and the output
    output.each_exact_sum(block, [&](int64_t r, int64_t d, const float* logs) {
      float scale = params.reweighted ? output.inverse_power_sum[r] : block.weight_scale[r];
      auto value = value_column(d, first);
      double total = log_sum_exp(n, [&](int64_t j) { return block.log_weight(r, logs[j]) + value(j); });
      exact_sums.push_back({r * block.value_width + d, float(total + std::log(double(scale)))});
    });
    for (int64_t r = 0; r < block.n_rows; ++r)
      for (int64_t d = 0; d < params.value_dim; ++d) {
        float& x = output.out[r * block.value_width + d];
        x = output.zero_weights[r] ? 0.0f : std::log(x) + output.shift.shift[d];
      }
    for (auto [index, total] : exact_sums) output.out[index] = total;
    for (int64_t r = 0; r < block.n_rows; ++r)
      if (params.normaliser == L1 && block.count[r] == 1.0f && !output.zero_weights[r] && std::isfinite(block.norm[r]))
        copy_only_value(r);
  }

  // The output of a row that sees one key: its value, without the rounding of log(e^v)
  void copy_only_value(int64_t r) {
    int64_t key = block.window_begin[r];
    while (!block.sees(r, key)) ++key;
    for (int64_t d = 0; d < block.params.value_dim; ++d)
      output.out[r * block.value_width + d] = value_column(d, key)(0);
  }

  // A function from j to element d of value first + j; 0 where non-finite
  auto value_column(int64_t d, int64_t first) {
    const Params& params = block.params;
    TensorView column = params.value;
    column.data =
        static_cast<const char*>(params.value.data) + d * params.value.stride[3] * (params.dtype == FLOAT32 ? 4 : 2);
    int64_t b = block.b, h = block.h / (params.heads / params.key_heads), dtype = params.dtype;
    return [=](int64_t j) {
      float x;
      read_row(column, dtype, b, h, first + j, 1, &x);
      return std::isfinite(x) ? x : 0.0f;
    };
  }
};

template <typename Phi>
bool forward(const Params& params, void* out, float* statistics) {
  int64_t wave = wave_size(params, false), key_heads = params.batch * params.key_heads,
          group = params.heads / params.key_heads;
  int64_t rows = rows_per_block(params, false), blocks = (params.query_length + rows - 1) / rows;
  std::vector<std::unique_ptr<Worker<Phi>>> workers(params.threads);
  if (params.query_length <= DECODE_QUERIES) {
    return parallel_for(params.threads, params.batch * params.heads, [&](int64_t item) {
      auto& worker = workers[thread_number()];
      if (!worker) worker = std::make_unique<Worker<Phi>>(params);
      worker->decode(item / params.heads, item % params.heads, out, statistics);
    });
  }
  std::vector<KeyHead> heads(wave);
  for (KeyHead& head : heads) head.reserve(params, false);
  for (int64_t first = 0; first < key_heads; first += wave) {
    int64_t n = std::min(wave, key_heads - first);
    if (!pack_wave(params, heads, first, n, false)) return false;
    bool done = parallel_for(params.threads, n * group * blocks, [&](int64_t item) {
      auto& worker = workers[thread_number()];
      if (!worker) worker = std::make_unique<Worker<Phi>>(params);
      int64_t block =
          blocks - 1 - item / group % blocks;  // with a causal mask the last rows take longest: they go first
      int64_t key_head = first + item / (group * blocks), h = key_head % params.key_heads * group + item % group;
      worker->run(key_head / params.key_heads, h, block * rows, heads[key_head - first], out, statistics);
    });
    if (!done) return false;
  }
  return true;
}

}  // namespace
}  // namespace softfocus

// Writes out [B, H, Lq, Dv], of the query's dtype, and statistics [4, B, H, Lq] (count, maximum,
// log_norm, peak) unless null; both contiguous. Returns 0, or 1 if memory ran out. The pointers of
// query, key and value are arguments of their own: the rest fits every call of the same layout.
extern "C" __attribute__((visibility("default"))) int softfocus_forward(const softfocus::Params* layout,
                                                                        const void* query, const void* key,
                                                                        const void* value, void* out,
                                                                        float* statistics) {
  bool done = false;
  try {
    softfocus::Params params = *layout;
    params.query.data = query, params.key.data = key, params.value.data = value;
    softfocus::with_phi(params.phi,
                        [&](auto phi) { done = softfocus::forward<decltype(phi)>(params, out, statistics); });
  } catch (...) {  // only std::bad_alloc is thrown; it must not reach C
  }
  return done ? 0 : 1;
}
