// A parallel loop, and the packing of key heads in waves. A wave is the key heads that are packed
// at the same time: as many as fit a cache, and at least one for each thread.
#pragma once

#include <atomic>

#include "packing.h"

#if defined(_OPENMP)
extern "C" int omp_get_thread_num(void);  // omp.h does not come with every compiler
#endif

namespace softfocus {

constexpr int64_t WAVE_BYTES = 8 << 20;  // of packed keys and values
constexpr int64_t PACK_KEYS = 1024;      // keys that one thread packs at a time; a multiple of BLOCK_K

// body(item) for 0 <= item < n on the threads, in any order. False if memory ran out.
template <typename F>
inline bool parallel_for([[maybe_unused]] int64_t threads, int64_t n, F&& body) {
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

inline int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Key heads of a wave
inline int64_t wave_size(const Params& params, bool backward) {
  int64_t heads = params.batch * params.key_heads;
  return std::min(heads, std::max(params.threads, WAVE_BYTES / std::max<int64_t>(KeyHead::bytes(params, backward), 1)));
}

inline void concatenate(const std::vector<std::vector<ValueIndex>>& from, int64_t first, int64_t n,
                        std::vector<ValueIndex>& to) {
  to.clear();
  for (int64_t i = first; i < first + n; ++i) to.insert(to.end(), from[i].begin(), from[i].end());
}

// Packs the key heads [first, first + n) of all B * Hk.
inline bool pack_wave(const Params& params, std::vector<KeyHead>& heads, int64_t first, int64_t n, bool backward) {
  int64_t parts = (params.key_length + PACK_KEYS - 1) / PACK_KEYS;
  std::vector<std::vector<ValueIndex>> nonfinite(n * parts), large(n * parts);
  bool done = parallel_for(params.threads, n * parts, [&](int64_t item) {
    KeyHead& head = heads[item / parts];
    int64_t b = (first + item / parts) / params.key_heads, h = (first + item / parts) % params.key_heads;
    int64_t start = item % parts * PACK_KEYS, stop = std::min(start + PACK_KEYS, params.key_length);
    pack_keys(params, head, b, h, start, stop);
    pack_values(params, head, b, h, start, stop, backward && !params.reweighted, nonfinite[item], large[item]);
  });
  for (int64_t i = 0; i < n; ++i) {
    concatenate(nonfinite, i * parts, parts, heads[i].nonfinite_values);
    concatenate(large, i * parts, parts, heads[i].large_values);
    heads[i].any_nonfinite_key = false;
    for (int64_t j = 0; j < params.key_length; ++j) heads[i].any_nonfinite_key |= heads[i].key_nonfinite[j];
  }
  return done;
}

}  // namespace softfocus
