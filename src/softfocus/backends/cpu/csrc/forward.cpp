// out and the row statistics, a block of rows at a time.
#include <memory>

#include "mix.h"
#include "waves.h"

namespace softfocus {
namespace {

template <typename Phi>
struct Worker {
  Block<Phi> block;
  Mixer<Phi> mixer;
  explicit Worker(const Problem& p) : block(p, block_rows(p, false)), mixer(block) {}

  // A head with few queries. The values are looked through only when something that is not finite has come out, but for
  // LASER, whose exponentials would hide it.
  void run_few(int64_t b, int64_t h, void* out, float* statistics) {
    const Problem& p = block.p;
    Head head;
    auto look = [&] {
      pack_values(p, head, b, h / (p.heads / p.key_heads), 0, p.key_length, false, head.broken_values,
                  head.high_values);
    };
    if (p.laser) look();
    run(b, h, 0, head, out, statistics);
    if (p.laser || all_finite(mixer.out, block.n * block.value_width)) return;
    look();
    if (!head.broken_values.empty()) run(b, h, 0, head, out, statistics);
  }

  void run(int64_t b, int64_t h, int64_t start, const Head& head, void* out, float* statistics) {
    const Problem& p = block.p;
    block.open(b, h, start, head);
    mixer.mix(block);
    if (p.laser) take_logarithm();
    int64_t row = (b * p.heads + h) * p.query_length + start, rows = p.batch * p.heads * p.query_length;
    for (int64_t r = 0; r < block.n; ++r)
      if (float* made = mixer.out + r * block.value_width; block.blind[r]) std::fill(made, made + p.value_dim, 0.0f);
    for (auto [key, d] : head.broken_values)
      for (int64_t r = 0; r < block.n; ++r)
        if (block.sees(r, key)) mixer.out[r * block.value_width + d] = std::numeric_limits<float>::quiet_NaN();
    for (int64_t r = 0; r < block.n; ++r) {
      write_row(out, p.dtype, (row + r) * p.value_dim, mixer.out + r * block.value_width, p.value_dim);
      if (!statistics) continue;
      statistics[row + r] = block.count[r];
      statistics[rows + row + r] = block.maximum[r];
      statistics[2 * rows + row + r] = block.log_norm[r];
      statistics[3 * rows + row + r] = block.peak[r];
    }
  }

  void take_logarithm() {
    const Problem& p = block.p;
    int64_t first = block.base, n = block.end - block.base;
    std::vector<std::pair<int64_t, float>> sums;
    mixer.exact(block, [&](int64_t r, int64_t d, const float* logarithms) {
      float scale = p.sharpened ? mixer.share[r] : block.scale[r];
      auto value = value_column(d, first);
      double total = log_sum(n, [&](int64_t j) { return block.log_weight(r, logarithms[j]) + value(j); });
      sums.push_back({r * block.value_width + d, float(total + std::log(double(scale)))});
    });
    for (int64_t r = 0; r < block.n; ++r)
      for (int64_t d = 0; d < p.value_dim; ++d) {
        float& x = mixer.out[r * block.value_width + d];
        x = mixer.weightless[r] ? 0.0f : std::log(x) + mixer.shift.shift[d];
      }
    for (auto [at, total] : sums) mixer.out[at] = total;
    for (int64_t r = 0; r < block.n; ++r)
      if (p.normaliser == L1 && block.count[r] == 1.0f && !mixer.weightless[r] && std::isfinite(block.norm[r]))
        take_only(r);
  }

  // The value of the one key that a row sees, without the detour through e^V
  void take_only(int64_t r) {
    int64_t key = block.low[r];
    while (!block.sees(r, key)) ++key;
    for (int64_t d = 0; d < block.p.value_dim; ++d) mixer.out[r * block.value_width + d] = value_column(d, key)(0);
  }

  // The values of one column by offset from the first key; 0 in place of what is not finite
  auto value_column(int64_t d, int64_t first) {
    const Problem& p = block.p;
    Array column = p.value;
    column.data = static_cast<const char*>(p.value.data) + d * p.value.stride[3] * (p.dtype == FLOAT32 ? 4 : 2);
    int64_t b = block.b, h = block.h / (p.heads / p.key_heads), dtype = p.dtype;
    return [=](int64_t j) {
      float x;
      read_row(column, dtype, b, h, first + j, 1, &x);
      return std::isfinite(x) ? x : 0.0f;
    };
  }
};

template <typename Phi>
bool forward(const Problem& p, void* out, float* statistics) {
  int64_t wave = wave_size(p, false), key_heads = p.batch * p.key_heads, group = p.heads / p.key_heads;
  int64_t rows = block_rows(p, false), blocks = (p.query_length + rows - 1) / rows;
  std::vector<std::unique_ptr<Worker<Phi>>> workers(p.threads);
  if (p.query_length <= FEW_QUERIES) {
    return share_out(p.threads, p.batch * p.heads, [&](int64_t item) {
      auto& worker = workers[thread_number()];
      if (!worker) worker = std::make_unique<Worker<Phi>>(p);
      worker->run_few(item / p.heads, item % p.heads, out, statistics);
    });
  }
  std::vector<Head> heads(wave);
  for (Head& head : heads) head.reserve(p, false);
  for (int64_t first = 0; first < key_heads; first += wave) {
    int64_t n = std::min(wave, key_heads - first);
    if (!pack(p, heads, first, n, false)) return false;
    bool done = share_out(p.threads, n * group * blocks, [&](int64_t item) {
      auto& worker = workers[thread_number()];
      if (!worker) worker = std::make_unique<Worker<Phi>>(p);
      int64_t block = blocks - 1 - item / group % blocks;  // with a causal mask the last rows are the longest
      int64_t key_head = first + item / (group * blocks), h = key_head % p.key_heads * group + item % group;
      worker->run(key_head / p.key_heads, h, block * rows, heads[key_head - first], out, statistics);
    });
    if (!done) return false;
  }
  return true;
}

}  // namespace
}  // namespace softfocus

// out [B, H, Lq, Dv], of the query's dtype, and, unless null, statistics [4, B, H, Lq], both contiguous. 0, or 1 if
// memory ran out. Where query, key and value lie is told apart from the rest, which fits every call of the same layout.
extern "C" __attribute__((visibility("default"))) int softfocus_forward(const softfocus::Problem* layout,
                                                                        const void* query, const void* key,
                                                                        const void* value, void* out,
                                                                        float* statistics) {
  bool done = false;
  try {
    softfocus::Problem p = *layout;
    p.query.data = query, p.key.data = key, p.value.data = value;
    softfocus::with_phi(p.phi, [&](auto phi) { done = softfocus::forward<decltype(phi)>(p, out, statistics); });
  } catch (...) {  // nothing but std::bad_alloc is thrown here, and nothing may leave
  }
  return done ? 0 : 1;
}
