// Key heads prepared a few at a time, and the work on them shared out among the threads.
#pragma once

#include <atomic>

#include "keys.h"

#if defined(_OPENMP)
extern "C" int omp_get_thread_num(void);  // not omp.h, which not every compiler brings
#endif

namespace softfocus {

constexpr int64_t WAVE_BYTES = 8 << 20;  // of packed keys and values, unless a head each thread needs more
constexpr int64_t PACK_KEYS = 1024;      // packed by one thread at a time; a multiple of CHUNK

// Runs body(item) for 0 <= item < n on the threads, in whatever order they come. False if memory ran out.
template <typename F>
inline bool share_out([[maybe_unused]] int64_t threads, int64_t n, F&& body) {
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(int(std::min(threads, n))) if (std::min(threads, n) > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < n; ++item) {
      try {
        if (!failed) body(item);
      } catch (...) {  // nothing may leave a parallel region
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

// How many key heads are prepared together
inline int64_t wave_size(const Problem& p, bool backward) {
  int64_t heads = p.batch * p.key_heads;
  return std::min(heads, std::max(p.threads, WAVE_BYTES / std::max<int64_t>(Head::bytes(p, backward), 1)));
}

inline void gather(const std::vector<std::vector<BrokenValue>>& from, int64_t first, int64_t n,
                   std::vector<BrokenValue>& to) {
  to.clear();
  for (int64_t i = first; i < first + n; ++i) to.insert(to.end(), from[i].begin(), from[i].end());
}

// Packs the key heads [first, first + n), counted through the batches
inline bool pack(const Problem& p, std::vector<Head>& heads, int64_t first, int64_t n, bool backward) {
  int64_t pieces = (p.key_length + PACK_KEYS - 1) / PACK_KEYS;
  std::vector<std::vector<BrokenValue>> broken(n * pieces), high(n * pieces);
  bool done = share_out(p.threads, n * pieces, [&](int64_t item) {
    Head& head = heads[item / pieces];
    int64_t b = (first + item / pieces) / p.key_heads, h = (first + item / pieces) % p.key_heads;
    int64_t start = item % pieces * PACK_KEYS, stop = std::min(start + PACK_KEYS, p.key_length);
    pack_keys(p, head, b, h, start, stop);
    pack_values(p, head, b, h, start, stop, backward && !p.sharpened, broken[item], high[item]);
  });
  for (int64_t i = 0; i < n; ++i) {
    gather(broken, i * pieces, pieces, heads[i].broken_values);
    gather(high, i * pieces, pieces, heads[i].high_values);
    heads[i].any_broken_key = false;
    for (int64_t j = 0; j < p.key_length; ++j) heads[i].any_broken_key |= heads[i].broken_key[j];
  }
  return done;
}

}  // namespace softfocus
