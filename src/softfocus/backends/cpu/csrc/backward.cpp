// Gradients: key heads prepared, blocks of rows shared out among the threads, their sums added up in a fixed order.
#include <memory>

#include "gradients.h"
#include "waves.h"

namespace softfocus {
namespace {

// What one task sums up: in the results themselves where these are floats in whole vectors and no other task adds to
// them
struct Sums {
  Buffer<float> key_space, value_space;
  float *key = nullptr, *value = nullptr;
};

template <typename Phi>
bool backward(const Problem& p, const Gradients& to) {
  int64_t key_heads = p.batch * p.key_heads, group = p.heads / p.key_heads;
  int64_t rows = block_rows(p, true), blocks = (p.query_length + rows - 1) / rows;
  int64_t width = round_up(p.head_dim, W), value_width = round_up(p.value_dim, W);
  int64_t wave = wave_size(p, true);
  if (!wave) return true;
  const Array& bias = to.bias;  // heads that share its gradient follow one another
  if (bias.data && ((!bias.stride[0] && p.batch > 1) || (!bias.stride[1] && p.heads > 1))) wave = 1;
  int64_t splits = wave >= p.threads || !blocks ? 1 : std::min((p.threads + wave - 1) / wave, blocks);
  if (bias.data && !bias.stride[2] && p.query_length > 1) splits = 1;
  std::vector<Head> heads(wave);
  for (Head& head : heads) head.reserve(p, true);
  std::vector<Sums> sums(wave * splits);
  std::vector<std::unique_ptr<RowGradients<Phi>>> workers(p.threads);
  for (int64_t first = 0; first < key_heads; first += wave) {
    int64_t n = std::min(wave, key_heads - first);
    if (!pack(p, heads, first, n, true)) return false;
    bool done = share_out(p.threads, n * splits, [&](int64_t item) {
      auto& worker = workers[thread_number()];
      if (!worker) worker = std::make_unique<RowGradients<Phi>>(p);
      int64_t key_head = first + item / splits, split = item % splits;
      Sums& sum = sums[item];
      auto settle = [&](Buffer<float>& space, float*& at, void* result, int64_t wide, int64_t narrow) {
        bool direct = split == 0 && wide == narrow && p.dtype == FLOAT32;
        if (!direct) space.resize(p.key_length * wide);
        at = direct ? static_cast<float*>(result) + key_head * p.key_length * narrow : space;
        std::fill(at, at + p.key_length * wide, 0.0f);
      };
      settle(sum.key_space, sum.key, to.key, width, p.head_dim);
      settle(sum.value_space, sum.value, to.value, value_width, p.value_dim);
      for (int64_t g = 0; g < group; ++g)
        for (int64_t block = split; block < blocks; block += splits)
          worker->run(key_head / p.key_heads, key_head % p.key_heads * group + g, block * rows, heads[key_head - first],
                      to, sum.key, sum.value);
    });
    if (!done) return false;
    int64_t pieces = (p.key_length + CHUNK - 1) / CHUNK;
    done = share_out(p.threads, n * pieces, [&](int64_t item) {
      int64_t key_head = first + item / pieces, low = item % pieces * CHUNK, high = std::min(low + CHUNK, p.key_length);
      Sums* all = &sums[item / pieces * splits];
      Buffer<float> space(p.cosine ? CHUNK * width : 0);
      Natural directions{nullptr, 0};
      if (p.cosine)
        directions =
            natural_keys(p, heads[key_head - first], key_head / p.key_heads, key_head % p.key_heads, low, high, space);
      for (int64_t key = low; key < high; ++key) {
        float *k = all[0].key + key * width, *v = all[0].value + key * value_width;
        for (int64_t s = 1; s < splits; ++s) {
          for (int64_t d = 0; d < width; ++d) k[d] += all[s].key[key * width + d];
          for (int64_t d = 0; d < value_width; ++d) v[d] += all[s].value[key * value_width + d];
        }
        if (p.cosine)
          normalise_backward(k, directions.data + (key - low) * directions.step,
                             heads[key_head - first].inverse_norm[key], p.head_dim);
        int64_t row = key_head * p.key_length + key;
        write_row(to.key, p.dtype, row * p.head_dim, k, p.head_dim);
        write_row(to.value, p.dtype, row * p.value_dim, v, p.value_dim);
      }
    });
    if (!done) return false;
  }
  return true;
}

}  // namespace
}  // namespace softfocus

// Gradients of query, key and value, contiguous, of the query's dtype; of the bias, zero when handed over; and [B, H,
// Lq] each of head_scale and power, or null. 0, or 1 if memory ran out.
extern "C" __attribute__((visibility("default"))) int softfocus_backward(const softfocus::Problem* p,
                                                                         const softfocus::Array* grad,
                                                                         const softfocus::Array* bias, void* query,
                                                                         void* key, void* value, float* head_scale,
                                                                         float* power) {
  bool done = false;
  try {
    softfocus::Gradients to{*grad, query, key, value, *bias, head_scale, power};
    softfocus::with_phi(p->phi, [&](auto phi) { done = softfocus::backward<decltype(phi)>(*p, to); });
  } catch (...) {  // nothing but std::bad_alloc is thrown here, and nothing may leave
  }
  return done ? 0 : 1;
}
