// The live keys of re-weighted rows, listed tile by tile, and the products over these lists.
#pragma once

#include "row_block.h"

namespace softfocus {

// Number of lists that are made before any of them is used, so that no loop waits for a length that
// was just computed. They are the lists of LISTS rows of one tile, or in decoding without LASER of
// one row in LISTS tiles. Together with prefetching the next tile's values this reduced the time of
// the forward by a third. Other numbers were not measured.
constexpr int64_t LISTS = 16;
static_assert(BLOCK_Q % LISTS == 0, "add_live_tiles() takes LISTS rows of arrays [BLOCK_Q] at a time");

// LISTS lists of live keys, each of one row and one tile, with their u, later u^p
template <typename Phi>
struct LiveKeys {
  int64_t length[LISTS];

  LiveKeys() : keys(LISTS * (BLOCK_K + W)), u(LISTS * (BLOCK_K + W)) {}
  uint8_t* keys_of(int64_t i) { return keys + i * (BLOCK_K + W); }
  float* u_of(int64_t i) { return u + i * (BLOCK_K + W); }

  // Lists the rows [first_row, first_row + LISTS) of a tile.
  template <bool DROPOUT>
  void gather(const RowBlock<Phi>& block, int64_t first_row, int64_t start_k) {
    for (int64_t i = 0; i < LISTS; ++i) {
      int64_t r = first_row + i;
      length[i] = r < block.n_rows && !block.fully_masked[r]
                      ? block.template gather_live<DROPOUT>(r, start_k, keys_of(i), u_of(i))
                      : 0;
    }
  }

  // Turns the u of list i into u^p, 0 where dropout drops the weight. Returns the lane-wise sum of
  // u^p, including that of dropped weights.
  template <bool DROPOUT>
  vfloat raise_to_power(int64_t i, float power) {
    vfloat power_sum = vfloat{};
    if (!length[i]) return power_sum;
    float* x = u_of(i);
    RowBlock<Phi>::with_powers(power, [&](auto powers) {
      for (int64_t e = 0; e < length[i]; e += W) {
        vfloat y = load(x + e), u = DROPOUT ? absolute(y) : y, u_p, u_pm1;
        powers(u, u_p, u_pm1);
        u_p = u == 0.0f ? vfloat{} : u_p;  // entries after the list's end
        power_sum += u_p;
        if constexpr (DROPOUT) u_p = bits(y) < 0 ? vfloat{} : u_p;
        store(x + e, u_p);
      }
    });
    return power_sum;
  }

 private:
  Buffer<uint8_t> keys;  // [LISTS, BLOCK_K + W], keys counted from the tile's first
  Buffer<float> u;       // [LISTS, BLOCK_K + W]
};

// Prefetches row r of the next tile of `rows` [Lk, stride], because the order of live keys defeats
// the hardware's prefetcher. `rows` points to this tile's first row. A prefetch of an invalid
// address has no effect. Where `rows` is a scratch tile the prefetch is useless but harmless.
// Broadcast rows (stride 0) are in the cache already.
inline void prefetch_next_tile(const float* rows, int64_t stride, int64_t r, int64_t width) {
  for (int64_t d = 0; d < width && stride >= width; d += LINE_FLOATS)
    __builtin_prefetch(rows + (BLOCK_K + r) * stride + d);
}

// out [VECTORS * W] += sum_e w[e] * values[keys[e]]: w and keys [n], values [BLOCK_K, stride]. Even
// and odd e have separate sums, so that additions overlap.
template <int VECTORS, typename T>
inline void add_listed_rows(int64_t n, const uint8_t* keys, const float* w, const T* values, int64_t stride,
                            float* out) {
  vfloat even[VECTORS], odd[VECTORS];
  for (int v = 0; v < VECTORS; ++v) even[v] = load(out + v * W), odd[v] = vfloat{};
  int64_t e = 0;
  for (; e + 2 <= n; e += 2) {
    const T *x = values + keys[e] * stride, *y = values + keys[e + 1] * stride;
    for (int v = 0; v < VECTORS; ++v) even[v] += w[e] * load(x + v * W), odd[v] += w[e + 1] * load(y + v * W);
  }
  if (e < n)
    for (int v = 0; v < VECTORS; ++v) even[v] += w[e] * load(values + keys[e] * stride + v * W);
  for (int v = 0; v < VECTORS; ++v) store(out + v * W, even[v] + odd[v]);
}

// The same for out [vectors * W] of any width
template <typename T>
inline void add_listed_rows(int64_t vectors, int64_t n, const uint8_t* keys, const float* w, const T* values,
                            int64_t stride, float* out) {
  for (; vectors >= 4; vectors -= 4, values += 4 * W, out += 4 * W) add_listed_rows<4>(n, keys, w, values, stride, out);
  for (; vectors >= 1; vectors -= 1, values += W, out += W) add_listed_rows<1>(n, keys, w, values, stride, out);
}

// to[e] (+)= row . v[keys[e]]: row [VECTORS * W], v [BLOCK_K, stride]; `to` has room for n in whole
// vectors. Up to W/2 - 1 entries of `keys` after the list's end are read; they must be keys of
// the tile. A rest of at most W/2 keys reads only W/2 entries. Dot products of entries past n are
// overwritten with 0 by the caller below.
template <int VECTORS>
inline void listed_dots(const float* row, int64_t n, const uint8_t* keys, RowView v, float* to, bool add) {
  vfloat row_part[VECTORS];  // of the row, kept in registers
  unroll<VECTORS>([&](int d) { row_part[d] = load(row + d * W); });
  auto dot_products = [&](int64_t e, auto count) __attribute__((always_inline)) {
    constexpr int N = decltype(count)::value;
    vfloat x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      x[i] = vfloat{};
      if (i >= N) continue;
      const float* value = v.data + keys[e + i] * v.stride;
      x[i] = row_part[0] * load(value);
#pragma GCC unroll 4
      for (int d = 1; d < VECTORS; ++d) x[i] += row_part[d] * load(value + d * W);
    }
    vfloat y = reduce_each(x);
    store(to + e, add ? load(to + e) + y : y);
  };
  int64_t e = 0;
  for (; e + W / 2 < n; e += W) dot_products(e, std::integral_constant<int, W>{});
  if (e < n) dot_products(e, std::integral_constant<int, W / 2>{});
}

// The same for a row [width] of whole vectors, with 0 after the n-th dot product
inline void listed_dots(const float* row, int64_t width, int64_t n, const uint8_t* keys, RowView v, float* to) {
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W) listed_dots<4>(row + d, n, keys, {v.data + d, v.stride}, to, /*add=*/d > 0);
  for (; d < width; d += W) listed_dots<1>(row + d, n, keys, {v.data + d, v.stride}, to, /*add=*/d > 0);
  for (int64_t e = n; e < round_up(n, W); ++e) to[e] = 0.0f;
}

// to[keys[e]] += a[e] * row; with LASER times v[keys[e]], element by element. `to` [BLOCK_K,
// stride]; v is read with LASER only
template <int VECTORS, bool LASER>
inline void scatter_add(const float* row, int64_t n, const uint8_t* keys, const float* a, RowView v, float* to,
                        int64_t stride) {
  vfloat row_part[VECTORS];  // of the row, kept in registers
  unroll<VECTORS>([&](int d) { row_part[d] = load(row + d * W); });
  for (int64_t e = 0; e < n; ++e) {
    float* target = to + keys[e] * stride;
    vfloat weight = splat(a[e]);
    unroll<VECTORS>([&](int d) {
      vfloat x = row_part[d] * weight;
      if constexpr (LASER) x = x * load(v.data + keys[e] * v.stride + d * W);
      store(target + d * W, load(target + d * W) + x);
    });
  }
}

// The same for a row [width] of whole vectors: `to` [BLOCK_K, width]
template <bool LASER>
inline void scatter_add(const float* row, int64_t width, int64_t n, const uint8_t* keys, const float* a, RowView v,
                        float* to) {
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W)
    scatter_add<4, LASER>(row + d, n, keys, a, {v.data + d, v.stride}, to + d, width);
  for (; d < width; d += W) scatter_add<1, LASER>(row + d, n, keys, a, {v.data + d, v.stride}, to + d, width);
}

}  // namespace softfocus
