// Scores of a few query rows, as in decoding: packing the keys would cost more than it saves, so they are read as they
// lie.
#pragma once

#include <functional>

#include "sight.h"

namespace softfocus {

constexpr int64_t FEW_QUERIES = 4;
// Where keys from memory are read at the same time: each is a stream that the machine fetches ahead.
constexpr int PLACES = 8;
// Bytes of keys, all heads together, up to which they may come from a cache: then in one place.
constexpr int64_t CACHED = 8 << 20;

class FewRows {
 public:
  using Places = std::function<float*(int64_t, int64_t)>;  // where the score of a row with a key belongs

  FewRows(const Problem& problem, int64_t row_width)
      : p(problem), width(row_width), direct(side_by_side(p.key, p.head_dim)) {}

  // The dot products of `rows` rows of `query` with the keys that a block sees: directions for cosine similarity, NaN
  // for a key that is not finite. to(r, j) is where the score of row r with key base + j belongs; whole vectors are
  // written. scored(at) is told of chunks whose scores are there.
  void score(const Sight& sight, const float* query, int64_t rows, const Places& to,
             const std::function<void(int64_t)>& scored) {
    with_element(p.dtype, [&](auto zero) { score_elements<decltype(zero)>(sight, query, rows, to, scored); });
  }

 private:
  const Problem& p;
  const int64_t width;
  const bool direct;
  int64_t b = 0, h = 0;
  Buffer<float> space;    // [W, width], of keys that cannot be read in place
  Buffer<float> careful;  // [width]

  template <typename T>
  void score_elements(const Sight& sight, const float* query, int64_t rows, const Places& to,
                      const std::function<void(int64_t)>& scored) {
    int64_t base = sight.base, n = sight.end - base;
    b = sight.b, h = sight.h / (p.heads / p.key_heads);
    bool far = p.batch * p.key_heads * p.key_length * p.head_dim * int64_t(sizeof(T)) > CACHED;
    int64_t chunks = (n + CHUNK - 1) / CHUNK, stride = direct && far ? chunks / PLACES : 0;
    auto one = [&](int64_t chunk) {
      if (!sight.shown(chunk * CHUNK)) return;
      int64_t low = chunk * CHUNK, high = std::min(low + CHUNK, n);
      for (int64_t j = low; j < high; j += W) score_vectors<T, 1>({j}, base, query, rows, to);
      scored(low);
    };
    for (int64_t chunk = 0; chunk < stride; ++chunk) {
      bool all = base + (chunk + (PLACES - 1) * stride + 1) * CHUNK <= p.key_length;
      for (int64_t i = 0; i < PLACES; ++i) all &= sight.shown((chunk + i * stride) * CHUNK);
      int64_t at[PLACES];
      for (int64_t j = chunk * CHUNK; all && j < (chunk + 1) * CHUNK; j += W) {
        for (int64_t i = 0; i < PLACES; ++i) at[i] = j + i * stride * CHUNK;
        score_vectors<T, PLACES>(at, base, query, rows, to);
      }
      for (int64_t i = 0; i < PLACES; ++i)
        if (all)
          scored((chunk + i * stride) * CHUNK);
        else
          one(chunk + i * stride);
    }
    for (int64_t chunk = stride * PLACES; chunk < chunks; ++chunk) one(chunk);
  }

  // W keys from each of N places on
  template <typename T, int N>
  __attribute__((always_inline)) inline void score_vectors(const int64_t (&at)[N], int64_t base, const float* query,
                                                           int64_t rows, const Places& to) {
    int64_t n_keys = std::min<int64_t>(W, p.key_length - base - at[0]);
    if (direct && n_keys == W) {
      const T* keys[N];
      for (int i = 0; i < N; ++i) keys[i] = row_in_place<T>(p.key, b, h, base + at[i]);
      return score_rows(at, keys, p.key.stride[2], W, base, query, rows, to);
    }
    if (!space) space.resize(W * width);
    if (n_keys < W || p.head_dim < width) std::fill(space + 0, space + W * width, 0.0f);
    for (int64_t i = 0; i < n_keys; ++i)
      read_row(p.key, p.dtype, b, h, base + at[0] + i, p.head_dim, space + i * width);
    const float* copied[1] = {space};
    score_rows({at[0]}, copied, width, n_keys, base, query, rows, to);
  }

  template <typename T, int N>
  __attribute__((always_inline)) inline void score_rows(const int64_t (&at)[N], const T* const (&keys)[N], int64_t step,
                                                        int64_t n_keys, int64_t base, const float* query, int64_t rows,
                                                        const Places& to) {
    vf inverse[N];
    vi odd[N];  // not finite, or a norm whose square may have overflowed or vanished
    for (int i = 0; i < N; ++i) inverse[i] = splat(1.0f), odd[i] = vi{};
    for (int64_t r = 0; r < rows; ++r) {
      vf products[N][W], squares[N][W];
      if (p.cosine && r == 0) {
        multiply<true>(query, keys, step, products, squares);
        for (int i = 0; i < N; ++i) {
          vf norm = sums(squares[i]);
          odd[i] = ~((norm > 1e-30f) & (norm < 1e30f));
          inverse[i] = 1.0f / square_root(norm);
        }
      } else {
        multiply<false>(query + r * width, keys, step, products, squares);
      }
      for (int i = 0; i < N; ++i) {
        vf s = sums(products[i]) * inverse[i];
        store(to(r, at[i]), s);
        odd[i] |= ~(absolute(s) <= std::numeric_limits<float>::max());
      }
    }
    for (int i = 0; i < N; ++i)
      if (odd[i] &= lanes() < int32_t(n_keys); any(odd[i])) score_carefully(at[i], base, odd[i], query, rows, to);
  }

  // The products, lane by lane, of a row with W keys of each place, and of the keys with themselves
  template <bool SQUARES, typename T, int N>
  __attribute__((always_inline)) inline void multiply(const float* row, const T* const (&keys)[N], int64_t step,
                                                      vf (&products)[N][W], vf (&squares)[N][W]) const {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
#pragma GCC unroll 8
      for (int place = 0; place < N; ++place) {
        vf product = vf{}, square = vf{};
        for (int64_t d = 0; d < width; d += 4 * W)
          each<4>([&](int v) {
            if (d + v * W >= width) return;
            vf x = load(keys[place] + i * step + d + v * W);
            product += x * load(row + d + v * W);
            if constexpr (SQUARES) square += x * x;
          });
        products[place][i] = product;
        if constexpr (SQUARES) squares[place][i] = square;
      }
  }

  // The odd ones of W keys: NaN for one that is not finite, the direction of one whose norm is extreme. Not the others:
  // keys that are equal have equal scores.
  __attribute__((noinline)) void score_carefully(int64_t j, int64_t base, vi odd, const float* query, int64_t rows,
                                                 const Places& to) {
    if (!careful) careful.resize(width);
    float* row = careful;
    for (int64_t i = 0; i < W; ++i) {
      if (!odd[i]) continue;
      std::fill(row, row + width, 0.0f);
      read_row(p.key, p.dtype, b, h, base + j + i, p.head_dim, row);
      bool finite = all_finite(row, p.head_dim);
      if (finite && p.cosine) normalise(row, p.head_dim);
      for (int64_t r = 0; r < rows; ++r) {
        vf total = vf{};
        for (int64_t d = 0; d < width; d += W) total += load(query + r * width + d) * load(row + d);
        to(r, j)[i] = finite ? sum(total) : std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
};

}  // namespace softfocus
