// Aligned memory, and a pool that keeps some of it between calls, because page faults cost time on
// short sequences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

// The most bytes that the pool may hold. On short sequences page faults were 5 % of a call
// (docs/performance.md); on long ones they do not matter. With 0 a sanitizer sees every allocation.
#ifndef SOFTFOCUS_POOL_BYTES
#define SOFTFOCUS_POOL_BYTES (16 << 20)
#endif

namespace softfocus {

constexpr int64_t CACHE_LINE = 64;  // bytes
constexpr int64_t LINE_FLOATS = CACHE_LINE / int64_t(sizeof(float));

inline int64_t ceil_div(int64_t n, int64_t step) { return (n + step - 1) / step; }
inline int64_t round_up(int64_t n, int64_t step) { return ceil_div(n, step) * step; }

// A ring of at most SLOTS free pieces of memory; take() reuses only a piece of exactly the same
// size
class Pool {
 public:
  // Uninitialised memory, aligned to a cache line; the caller returns it by give_back(). `bytes` is
  // a multiple of CACHE_LINE. `huge_pages`: the caller uses all of the memory, so that huge pages
  // waste none. Throws std::bad_alloc.
  static void* take(int64_t bytes, bool huge_pages) {
    Pool& pool = instance();
    {
      std::lock_guard<std::mutex> lock(pool.mutex_);
      for (Slot& slot : pool.slots_)
        if (slot.data && slot.bytes == bytes) {
          pool.held_ -= bytes;
          return std::exchange(slot.data, nullptr);
        }
    }
    bool huge = huge_pages && bytes >= HUGE_PAGE;
    void* data = std::aligned_alloc(huge ? HUGE_PAGE : CACHE_LINE, huge ? round_up(bytes, HUGE_PAGE) : bytes);
    if (!data) throw std::bad_alloc();
#if defined(__linux__)
    // A hint, which may fail
    if (huge) madvise(data, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
#endif
    return data;
  }

  // `data` is from take(), for the same `bytes`.
  static void give_back(void* data, int64_t bytes) {
    Pool& pool = instance();
    std::lock_guard<std::mutex> lock(pool.mutex_);
    if (bytes > CAPACITY / 2) return std::free(data);  // a large piece leaves no room for others
    // The next slot of the ring is reused. It may be empty, or hold the oldest piece. That piece is
    // freed even if the new one does not fit.
    Slot& slot = pool.slots_[pool.next_];
    pool.next_ = (pool.next_ + 1) % SLOTS;
    if (slot.data) pool.held_ -= slot.bytes, std::free(slot.data);
    slot = {nullptr, 0};
    if (pool.held_ + bytes > CAPACITY) return std::free(data);
    slot = {data, bytes};
    pool.held_ += bytes;
  }

 private:
  struct Slot {
    void* data;
    int64_t bytes;
  };
  static constexpr int64_t HUGE_PAGE = 2 << 20;
  static constexpr int64_t CAPACITY = SOFTFOCUS_POOL_BYTES;
  // The backward's buffers of two threads, some 30 each: chosen, not measured. With more threads
  // the ring wraps around: the oldest pieces are freed, and the next call allocates them again.
  static constexpr int64_t SLOTS = 64;
  static Pool& instance() {
    static Pool* pool = make();
    return *pool;
  }
  static Pool* make() {
#if defined(__unix__) || defined(__APPLE__)
    // fork() while another thread holds the lock would leave it locked in the child for ever
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
#endif
    return new Pool;  // never destroyed: threads may outlive static objects
  }
  std::mutex mutex_;
  Slot slots_[SLOTS] = {};
  int64_t next_ = 0, held_ = 0;  // the slot to reuse; bytes in all slots
};

// Uninitialised elements, aligned to a cache line. A Buffer is null until its first resize();
// resize(0) allocates, too. resize() does not keep the elements unless the size in bytes is the
// same.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n, bool huge_pages = true) { resize(n, huge_pages); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }
  void resize(int64_t n, bool huge_pages = true) {
    int64_t bytes = round_up(std::max<int64_t>(n, 1) * int64_t(sizeof(T)), CACHE_LINE);
    if (bytes == bytes_) return;
    release();
    data_ = static_cast<T*>(Pool::take(bytes, huge_pages));
    bytes_ = bytes;
  }
  // Where a template would deduce Buffer, as in std::fill, `buffer + 0` gives the pointer.
  operator T*() { return data_; }
  operator const T*() const { return data_; }

 private:
  void release() {
    if (data_) Pool::give_back(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
  }
  T* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace softfocus
