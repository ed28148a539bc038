// Dot products of a few query rows with their keys, for decoding (DECODE_QUERIES). Packing the keys
// would cost more than it saves. They are read in place if their rows are contiguous
// (contiguous_rows()), else copied W at a time. The class is not a template over phi and calls back
// through std::function: the template took three times as long to compile, and was no faster.
#pragma once

#include <functional>

#include "tensor.h"
#include "visibility.h"

namespace softfocus {

// Keys are read from memory as this many concurrent streams, because the hardware prefetches each
// stream. On one core that takes 21 ns per key instead of 28 (D and dtype were not recorded). Four
// streams gain half as much (docs/performance.md).
constexpr int STREAMS = 8;
// If all keys, counted over all heads, take no more bytes than this, a cache may hold them. One
// stream is then 5 % faster. The limit is a guess at what a third-level cache keeps.
constexpr int64_t STREAM_MIN_BYTES = 8 << 20;

class DecodeDots {
 public:
  using DotAddress = std::function<float*(int64_t, int64_t)>;  // address(r, j): see compute()

  DecodeDots(const Params& call, int64_t padded_head_dim)
      : params(call), padded_dim(padded_head_dim), in_place(contiguous_rows(params.key, params.head_dim)) {}

  // Computes the dot products of `queries` [n_rows, padded_dim] with the keys that a block sees:
  // with unit vectors for cosine similarity, NaN for a non-finite key. Row r's dot product with key
  // key_begin + j is written to address(r, j), in whole vectors. tile_done(start_k) is called after
  // the dot products of a tile are written.
  void compute(const BlockVisibility& block, const float* queries, int64_t n_rows, const DotAddress& address,
               const std::function<void(int64_t)>& tile_done) {
    with_element(params.dtype, [&](auto element) {
      compute_elements<decltype(element)>(block, queries, n_rows, address, tile_done);
    });
  }

 private:
  const Params& params;
  // D in whole vectors: the stride of queries. Keys are read up to it, too.
  const int64_t padded_dim;
  const bool in_place;                    // keys can be read in place: padded_dim is D
  int64_t batch_index = 0, key_head = 0;  // of the block in compute()
  Buffer<float> copies;                   // [W, padded_dim], keys that cannot be read in place
  Buffer<float> key_copy;                 // [padded_dim], the key of dot_safely() at hand

  // compute() for keys whose elements are of type T
  template <typename T>
  void compute_elements(const BlockVisibility& block, const float* queries, int64_t n_rows, const DotAddress& address,
                        const std::function<void(int64_t)>& tile_done) {
    int64_t key_begin = block.key_begin, n = block.key_end - key_begin;
    batch_index = block.batch_index, key_head = block.key_head;
    bool from_memory =
        params.batch * params.key_heads * params.key_length * params.head_dim * int64_t(sizeof(T)) > STREAM_MIN_BYTES;
    int64_t tiles = ceil_div(n, BLOCK_K), tiles_per_stream = in_place && from_memory ? tiles / STREAMS : 0;
    auto one_tile = [&](int64_t tile) {
      if (!block.tile_visible(tile * BLOCK_K)) return;
      int64_t begin = tile * BLOCK_K, end = std::min(begin + BLOCK_K, n);
      for (int64_t j = begin; j < end; j += W) dot_vectors<T, 1>({j}, key_begin, queries, n_rows, address);
      tile_done(begin);
    };
    // Stream i reads the i-th part of the tiles; a step of this loop does one tile of each.
    for (int64_t tile = 0; tile < tiles_per_stream; ++tile) {
      // Whether the tiles of all streams are read side by side: the last is whole, and the masks
      // skip none. Otherwise they are read one by one.
      bool side_by_side = key_begin + (tile + (STREAMS - 1) * tiles_per_stream + 1) * BLOCK_K <= params.key_length;
      for (int64_t i = 0; i < STREAMS; ++i) side_by_side &= block.tile_visible((tile + i * tiles_per_stream) * BLOCK_K);
      int64_t first_offset[STREAMS];
      for (int64_t j = tile * BLOCK_K; side_by_side && j < (tile + 1) * BLOCK_K; j += W) {
        for (int64_t i = 0; i < STREAMS; ++i) first_offset[i] = j + i * tiles_per_stream * BLOCK_K;
        dot_vectors<T, STREAMS>(first_offset, key_begin, queries, n_rows, address);
      }
      for (int64_t i = 0; i < STREAMS; ++i)
        if (side_by_side)
          tile_done((tile + i * tiles_per_stream) * BLOCK_K);
        else
          one_tile(tile + i * tiles_per_stream);
    }
    for (int64_t tile = tiles_per_stream * STREAMS; tile < tiles; ++tile) one_tile(tile);
  }

  // Dot products with W keys of each of N streams; first_offset[i] is the offset of stream i's
  // first key. Arrays [N] have an element for each stream. Only N = 1 may come with keys that must
  // be copied: keys that cannot be read in place, or fewer than W.
  template <typename T, int N>
  __attribute__((always_inline)) inline void dot_vectors(const int64_t (&first_offset)[N], int64_t key_begin,
                                                         const float* queries, int64_t n_rows,
                                                         const DotAddress& address) {
    int64_t n_keys = std::min<int64_t>(W, params.key_length - key_begin - first_offset[0]);
    if (in_place && n_keys == W) {
      const T* keys[N];
      for (int i = 0; i < N; ++i)
        keys[i] = row_pointer<T>(params.key, batch_index, key_head, key_begin + first_offset[i]);
      return dot_rows(first_offset, keys, params.key.stride[2], W, key_begin, queries, n_rows, address);
    }
    // N = 1 from here on
    if (!copies) copies.resize(W * padded_dim);
    if (n_keys < W || params.head_dim < padded_dim) std::fill(copies + 0, copies + W * padded_dim, 0.0f);
    for (int64_t i = 0; i < n_keys; ++i)
      read_row(params.key, params.dtype, batch_index, key_head, key_begin + first_offset[0] + i, params.head_dim,
               copies + i * padded_dim);
    const float* copied[1] = {copies};
    dot_rows({first_offset[0]}, copied, padded_dim, n_keys, key_begin, queries, n_rows, address);
  }

  // The same for keys [W, key_stride] of each stream, of which n_keys exist. A lane of rnorm,
  // recompute_dot and dot_product belongs to a key.
  template <typename T, int N>
  __attribute__((always_inline)) inline void dot_rows(const int64_t (&first_offset)[N], const T* const (&keys)[N],
                                                      int64_t key_stride, int64_t n_keys, int64_t key_begin,
                                                      const float* queries, int64_t n_rows, const DotAddress& address) {
    vfloat rnorm[N];  // 1 / |k|; 1 without cosine similarity
    // Lanes that are set: non-finite dot products, and keys whose squared norm may have overflowed
    // or underflowed. dot_safely() recomputes them
    vint recompute_dot[N];
    for (int i = 0; i < N; ++i) rnorm[i] = splat(1.0f), recompute_dot[i] = vint{};
    for (int64_t r = 0; r < n_rows; ++r) {
      vfloat products[N][W], squares[N][W];
      if (params.cosine && r == 0) {
        lane_products</*SQUARES=*/true>(queries, keys, key_stride, products, squares);
        for (int i = 0; i < N; ++i) {
          vfloat squared_norm = reduce_each(squares[i]);
          recompute_dot[i] = ~((squared_norm > SAFE_MIN) & (squared_norm < SAFE_MAX));
          rnorm[i] = 1.0f / square_root(squared_norm);
        }
      } else {
        lane_products</*SQUARES=*/false>(queries + r * padded_dim, keys, key_stride, products, squares);
      }
      for (int i = 0; i < N; ++i) {
        vfloat dot_product = reduce_each(products[i]) * rnorm[i];
        store(address(r, first_offset[i]), dot_product);
        recompute_dot[i] |= ~(absolute(dot_product) <= std::numeric_limits<float>::max());
      }
    }
    for (int i = 0; i < N; ++i)
      if (recompute_dot[i] &= lane_index() < int32_t(n_keys); any(recompute_dot[i]))
        dot_safely(first_offset[i], key_begin, recompute_dot[i], queries, n_rows, address);
  }

  // products[i][t]: lane-wise sums of the products of a query with key t of stream i. Lane l sums
  // the dimensions l, l + W, ...; the caller sums the lanes. squares[i][t]: the same for the key's
  // squares; set only if SQUARES.
  template <bool SQUARES, typename T, int N>
  __attribute__((always_inline)) inline void lane_products(const float* query, const T* const (&keys)[N],
                                                           int64_t key_stride, vfloat (&products)[N][W],
                                                           vfloat (&squares)[N][W]) const {
#pragma GCC unroll 16
    for (int t = 0; t < W; ++t)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        vfloat product = vfloat{}, square = vfloat{};
        for (int64_t d = 0; d < padded_dim; d += UNROLL * W)
          unroll<UNROLL>([&](int v) {
            if (d + v * W >= padded_dim) return;
            vfloat x = load(keys[i] + t * key_stride + d + v * W);
            product += x * load(query + d + v * W);
            if constexpr (SQUARES) square += x * x;
          });
        products[i][t] = product;
        if constexpr (SQUARES) squares[i][t] = square;
      }
  }

  // Computes the dot products with some of the W keys from `first_offset` on again: NaN for a
  // non-finite key, else with a norm that neither overflows nor underflows. Only lanes that are set
  // in recompute_dot are written. A key is normalised before the product here, which rounds
  // differently. Whether a key takes this path must not depend on the keys next to it: equal keys
  // have equal dot products.
  __attribute__((noinline)) void dot_safely(int64_t first_offset, int64_t key_begin, vint recompute_dot,
                                            const float* queries, int64_t n_rows, const DotAddress& address) {
    if (!key_copy) key_copy.resize(padded_dim);
    float* row = key_copy;
    for (int64_t i = 0; i < W; ++i) {
      if (!recompute_dot[i]) continue;
      std::fill(row, row + padded_dim, 0.0f);
      read_row(params.key, params.dtype, batch_index, key_head, key_begin + first_offset + i, params.head_dim, row);
      bool finite = all_finite(row, params.head_dim);
      if (finite && params.cosine) l2_normalise(row, params.head_dim);
      for (int64_t r = 0; r < n_rows; ++r) {
        float dot_product = dot(queries + r * padded_dim, row, padded_dim);
        address(r, first_offset)[i] = finite ? dot_product : std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
};

}  // namespace softfocus
