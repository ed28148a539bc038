// Parallel loops, the buffers of each thread, and the packing of key heads.
#pragma once

#include <atomic>
#include <memory>

#include "packing.h"

#if defined(_OPENMP)
extern "C" int omp_get_thread_num(void);  // omp.h does not come with every compiler
#endif

namespace softfocus {

// What the threads read at the same time should fit in a shared cache. Key heads are therefore
// packed together only until their packed data take this many bytes, but at least as many heads as
// there are threads. The limit is one head of 16K keys with D = Dv = 64 where values are packed,
// too (16-bit inputs, LASER, a dense backward), and two heads where values are read in place.
// Chosen, not measured.
constexpr int64_t PACKED_BYTES = 8 << 20;
// Keys that one task packs; a multiple of BLOCK_K. With D = 64 they take 256 KiB: enough work to
// outweigh the cost of a task, and a few thousand keys still keep several threads busy.
constexpr int64_t PACK_KEYS = 1024;
static_assert(PACK_KEYS % BLOCK_K == 0, "a task packs whole tiles, and so whole panels");

// Calls body(item) for 0 <= item < n on the threads, in any order. Returns false if memory ran out.
template <typename F>
inline bool parallel_for([[maybe_unused]] int64_t threads, int64_t n, F&& body) {
  if (n <= 0) return true;
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(int(std::min(threads, n))) if (std::min(threads, n) > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < n; ++item) {
      try {
        if (!failed) body(item);
      } catch (...) {  // an exception must not leave a parallel region
        failed = true;
      }
    }
  }
  return !failed;
}

// One Worker per thread, which holds its buffers; created at the thread's first call of mine()
template <typename Worker>
class PerThread {
 public:
  explicit PerThread(const Params& call) : params(call), workers(params.threads) {}
  Worker& mine() {
    std::unique_ptr<Worker>& worker = workers[thread_number()];
    if (!worker) worker = std::make_unique<Worker>(params);
    return *worker;
  }

 private:
  const Params& params;
  std::vector<std::unique_ptr<Worker>> workers;

  static int thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
  }
};

// How many key heads are packed at the same time
inline int64_t key_heads_at_once(const Params& params, bool backward) {
  int64_t bytes = std::max<int64_t>(KeyHeadData::bytes(params, backward), 1);
  return std::min(params.batch * params.key_heads, std::max(params.threads, PACKED_BYTES / bytes));
}

// Sets `to` to the lists [first, first + n), one after another.
inline void concatenate(const std::vector<std::vector<ValueIndex>>& lists, int64_t first, int64_t n,
                        std::vector<ValueIndex>& to) {
  to.clear();
  for (int64_t i = first; i < first + n; ++i) to.insert(to.end(), lists[i].begin(), lists[i].end());
}

// Packs the key heads [first_key_head, first_key_head + n) of all B * Hk. key_data_at_once: [n] or
// more, one per key head packed in this round. Returns false if memory ran out.
inline bool pack_key_heads(const Params& params, std::vector<KeyHeadData>& key_data_at_once, int64_t first_key_head,
                           int64_t n, bool backward) {
  int64_t parts = ceil_div(params.key_length, PACK_KEYS);
  std::vector<std::vector<ValueIndex>> nonfinite(n * parts), large(n * parts);
  bool done = parallel_for(params.threads, n * parts, [&](int64_t item) {
    KeyHeadData& key_data = key_data_at_once[item / parts];
    int64_t key_head_index = first_key_head + item / parts;  // of all B * Hk
    int64_t b = key_head_index / params.key_heads, key_head = key_head_index % params.key_heads;
    int64_t start = item % parts * PACK_KEYS, stop = std::min(start + PACK_KEYS, params.key_length);
    pack_keys(params, key_data, b, key_head, start, stop);
    pack_values(params, key_data, b, key_head, start, stop, KeyHeadData::needs_value_panels(params, backward),
                nonfinite[item], large[item]);
  });
  if (!done) return false;
  for (int64_t i = 0; i < n; ++i) {
    concatenate(nonfinite, i * parts, parts, key_data_at_once[i].nonfinite_values);
    concatenate(large, i * parts, parts, key_data_at_once[i].large_values);
    key_data_at_once[i].any_nonfinite_key = false;
    for (int64_t key = 0; key < params.key_length; ++key)
      key_data_at_once[i].any_nonfinite_key |= key_data_at_once[i].key_nonfinite[key];
  }
  return true;
}

}  // namespace softfocus
