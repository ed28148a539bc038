// The backward: threads share the blocks of rows of each key head. Their sums are added in a fixed
// order, so that the result does not depend on timing.
#include <memory>

#include "gradients.h"
#include "parallel.h"

namespace softfocus {
namespace {

// Where one task sums the gradients of a key head: in the result itself if that is float32 in whole
// vectors and no other task adds to it
struct KeyHeadSums {
  Buffer<float> key_space, value_space;
  float *key = nullptr, *value = nullptr;  // [Lk, width], [Lk, value_width]
};

template <typename Phi>
bool backward(const Params& params, const GradientTensors& to) {
  int64_t key_heads = params.batch * params.key_heads, group = params.heads / params.key_heads;
  int64_t rows = rows_per_block(params, true), blocks = (params.query_length + rows - 1) / rows;
  int64_t width = round_up(params.head_dim, W), value_width = round_up(params.value_dim, W);
  int64_t wave = wave_size(params, true);
  if (!wave) return true;
  // Tasks that add to the same elements of grad_bias must not run at the same time. So there is one
  // key head in a wave, or one task for a key head.
  const TensorView& bias = to.grad_bias;
  if (bias.data && ((!bias.stride[0] && params.batch > 1) || (!bias.stride[1] && params.heads > 1))) wave = 1;
  int64_t splits = wave >= params.threads || !blocks ? 1 : std::min((params.threads + wave - 1) / wave, blocks);
  if (bias.data && !bias.stride[2] && params.query_length > 1) splits = 1;
  std::vector<KeyHead> heads(wave);
  for (KeyHead& head : heads) head.reserve(params, true);
  std::vector<KeyHeadSums> sums(wave * splits);
  std::vector<std::unique_ptr<RowGradients<Phi>>> workers(params.threads);
  for (int64_t first = 0; first < key_heads; first += wave) {
    int64_t n = std::min(wave, key_heads - first);
    if (!pack_wave(params, heads, first, n, true)) return false;
    // A task takes every splits-th block of rows of a key head.
    bool done = parallel_for(params.threads, n * splits, [&](int64_t item) {
      auto& worker = workers[thread_number()];
      if (!worker) worker = std::make_unique<RowGradients<Phi>>(params);
      int64_t key_head = first + item / splits, split = item % splits;
      KeyHeadSums& sum = sums[item];
      auto place = [&](Buffer<float>& space, float*& sums_at, void* result, int64_t stride, int64_t dim) {
        bool direct = split == 0 && stride == dim && params.dtype == FLOAT32;
        if (!direct) space.resize(params.key_length * stride);
        sums_at = direct ? static_cast<float*>(result) + key_head * params.key_length * dim : space;
        std::fill(sums_at, sums_at + params.key_length * stride, 0.0f);
      };
      place(sum.key_space, sum.key, to.grad_key, width, params.head_dim);
      place(sum.value_space, sum.value, to.grad_value, value_width, params.value_dim);
      for (int64_t g = 0; g < group; ++g)
        for (int64_t block = split; block < blocks; block += splits)
          worker->run(key_head / params.key_heads, key_head % params.key_heads * group + g, block * rows,
                      heads[key_head - first], to, sum.key, sum.value);
    });
    if (!done) return false;
    // Adds the sums of the splits and writes them in the query's dtype.
    int64_t tiles = (params.key_length + BLOCK_K - 1) / BLOCK_K;
    done = parallel_for(params.threads, n * tiles, [&](int64_t item) {
      int64_t key_head = first + item / tiles, begin = item % tiles * BLOCK_K,
              end = std::min(begin + BLOCK_K, params.key_length);
      KeyHeadSums* split_sums = &sums[item / tiles * splits];
      Buffer<float> space(params.cosine ? BLOCK_K * width : 0);
      RowView directions{nullptr, 0};
      if (params.cosine)
        directions = view_keys(params, heads[key_head - first], key_head / params.key_heads,
                               key_head % params.key_heads, begin, end, space);
      for (int64_t key = begin; key < end; ++key) {
        float *k = split_sums[0].key + key * width, *v = split_sums[0].value + key * value_width;
        for (int64_t s = 1; s < splits; ++s) {
          for (int64_t d = 0; d < width; ++d) k[d] += split_sums[s].key[key * width + d];
          for (int64_t d = 0; d < value_width; ++d) v[d] += split_sums[s].value[key * value_width + d];
        }
        if (params.cosine)
          l2_normalise_backward(k, directions.data + (key - begin) * directions.stride,
                                heads[key_head - first].inverse_norm[key], params.head_dim);
        int64_t row = key_head * params.key_length + key;
        write_row(to.grad_key, params.dtype, row * params.head_dim, k, params.head_dim);
        write_row(to.grad_value, params.dtype, row * params.value_dim, v, params.value_dim);
      }
    });
    if (!done) return false;
  }
  return true;
}

}  // namespace
}  // namespace softfocus

// Writes grad_query, grad_key and grad_value, contiguous, of the query's dtype. Adds to grad_bias,
// which the caller has set to zero; it may be absent. Writes grad_head_scale and grad_power, [B, H,
// Lq] each, unless null. Returns 0, or 1 if memory ran out.
extern "C" __attribute__((visibility("default"))) int softfocus_backward(
    const softfocus::Params* params, const softfocus::TensorView* grad_out, const softfocus::TensorView* grad_bias,
    void* grad_query, void* grad_key, void* grad_value, float* grad_head_scale, float* grad_power) {
  bool done = false;
  try {
    softfocus::GradientTensors to{*grad_out, grad_query, grad_key, grad_value, *grad_bias, grad_head_scale, grad_power};
    softfocus::with_phi(params->phi, [&](auto phi) { done = softfocus::backward<decltype(phi)>(*params, to); });
  } catch (...) {  // only std::bad_alloc is thrown; it must not reach C
  }
  return done ? 0 : 1;
}
