// The keys that weigh something in re-weighted rows, and the products over them alone.
#pragma once

#include "rows.h"

namespace softfocus {

constexpr int64_t LISTS =
    16;  // rows gathered together, so that the next row's work need not wait for the last one's count

// The keys of a chunk that weigh something in some rows, and their u: a list a row.
template <typename Phi>
struct Lists {
  int64_t found[LISTS];

  Lists() : keys(LISTS * (CHUNK + W)), u(LISTS * (CHUNK + W)) {}
  uint8_t* keys_of(int64_t i) { return keys + i * (CHUNK + W); }
  float* u_of(int64_t i) { return u + i * (CHUNK + W); }

  // Rows from `first` on; keys count from `at`
  template <bool DROPOUT>
  void gather(const Block<Phi>& block, int64_t first, int64_t at) {
    for (int64_t i = 0; i < LISTS; ++i) {
      int64_t r = first + i;
      found[i] = r < block.n && !block.blind[r] ? block.template gather<DROPOUT>(r, at, keys_of(i), u_of(i)) : 0;
    }
  }

  // u to u^p, 0 where it is dropped; returns the sums of the lanes, the dropped ones included
  template <bool DROPOUT>
  vf raise(int64_t i, float power) {
    vf total = vf{};
    if (!found[i]) return total;  // of a row that is not there the power is not known
    float* x = u_of(i);
    Block<Phi>::with_powers(power, [&](auto powers) {
      for (int64_t e = 0; e < found[i]; e += W) {
        vf y = load(x + e), u = DROPOUT ? absolute(y) : y, whole, less;
        powers(u, whole, less);
        whole = u == 0.0f ? vf{} : whole;
        total += whole;
        if constexpr (DROPOUT) whole = bits(y) < 0 ? vf{} : whole;
        store(x + e, whole);
      }
    });
    return total;
  }

 private:
  Buffer<uint8_t> keys;
  Buffer<float> u;
};

// What a block asks for at its row r while it is at a chunk: that row of the next chunk, be it there or not. Keys that
// weigh something come in no order that a machine foresees. Rows laid one upon another (a stride of 0) are at hand.
static_assert(ROWS == CHUNK, "a whole block asks for every row once");
inline void prefetch_next(const float* rows, int64_t step, int64_t r, int64_t width) {
  for (int64_t d = 0; d < width && step >= width; d += 16) __builtin_prefetch(rows + (CHUNK + r) * step + d);
}

// out[0 .. VECTORS) += sum of w[e] * row keys[e] of the values; two sets of sums, so that additions need not wait
template <int VECTORS, typename T>
inline void add_rows(int64_t n, const uint8_t* keys, const float* w, const T* values, int64_t step, float* out) {
  vf even[VECTORS], odd[VECTORS];
  for (int v = 0; v < VECTORS; ++v) even[v] = load(out + v * W), odd[v] = vf{};
  int64_t e = 0;
  for (; e + 2 <= n; e += 2) {
    const T *x = values + keys[e] * step, *y = values + keys[e + 1] * step;
    for (int v = 0; v < VECTORS; ++v) even[v] += w[e] * load(x + v * W), odd[v] += w[e + 1] * load(y + v * W);
  }
  if (e < n)
    for (int v = 0; v < VECTORS; ++v) even[v] += w[e] * load(values + keys[e] * step + v * W);
  for (int v = 0; v < VECTORS; ++v) store(out + v * W, even[v] + odd[v]);
}

template <typename T>
inline void add_rows(int64_t vectors, int64_t n, const uint8_t* keys, const float* w, const T* values, int64_t step,
                     float* out) {
  for (; vectors >= 4; vectors -= 4, values += 4 * W, out += 4 * W) add_rows<4>(n, keys, w, values, step, out);
  for (; vectors >= 1; vectors -= 1, values += W, out += W) add_rows<1>(n, keys, w, values, step, out);
}

// to[e] = the dot product of a row with the values' row keys[e]; whole vectors of e, so keys are padded
template <int VECTORS>
inline void dots(const float* row, int64_t n, const uint8_t* keys, Natural v, float* to, bool add) {
  vf own[VECTORS];
  each<VECTORS>([&](int d) { own[d] = load(row + d * W); });
  auto some = [&](int64_t e, auto count) __attribute__((always_inline)) {
    constexpr int N = decltype(count)::value;
    vf x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      x[i] = vf{};
      if (i >= N) continue;
      const float* value = v.data + keys[e + i] * v.step;
      x[i] = own[0] * load(value);
#pragma GCC unroll 4
      for (int d = 1; d < VECTORS; ++d) x[i] += own[d] * load(value + d * W);
    }
    vf y = sums(x);
    store(to + e, add ? load(to + e) + y : y);
  };
  int64_t e = 0;
  for (; e + W / 2 < n; e += W) some(e, std::integral_constant<int, W>{});
  if (e < n) some(e, std::integral_constant<int, W / 2>{});
}

inline void dots(const float* row, int64_t width, int64_t n, const uint8_t* keys, Natural v, float* to) {
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W) dots<4>(row + d, n, keys, {v.data + d, v.step}, to, d > 0);
  for (; d < width; d += W) dots<1>(row + d, n, keys, {v.data + d, v.step}, to, d > 0);
  for (int64_t e = n; e < round_up(n, W); ++e) to[e] = 0.0f;
}

// The rows keys[e] of `to` += a[e] * row, times the values' row with LASER
template <int VECTORS, bool LASER>
inline void spread(const float* row, int64_t n, const uint8_t* keys, const float* a, Natural v, float* to,
                   int64_t step) {
  vf own[VECTORS];
  each<VECTORS>([&](int d) { own[d] = load(row + d * W); });
  for (int64_t e = 0; e < n; ++e) {
    float* target = to + keys[e] * step;
    vf share = splat(a[e]);
    each<VECTORS>([&](int d) {
      vf x = own[d] * share;
      if constexpr (LASER) x = x * load(v.data + keys[e] * v.step + d * W);
      store(target + d * W, load(target + d * W) + x);
    });
  }
}

template <bool LASER>
inline void spread(const float* row, int64_t width, int64_t n, const uint8_t* keys, const float* a, Natural v,
                   float* to) {
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W) spread<4, LASER>(row + d, n, keys, a, {v.data + d, v.step}, to + d, width);
  for (; d < width; d += W) spread<1, LASER>(row + d, n, keys, a, {v.data + d, v.step}, to + d, width);
}

}  // namespace softfocus
