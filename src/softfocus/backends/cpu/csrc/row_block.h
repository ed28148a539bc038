// A block of query rows with the scores of all keys that they may see. Forward and backward share
// it. row_scores.inl.h computes the scores, row_statistics.inl.h the statistics of the rows,
// row_log_u.inl.h the logarithms of u for LASER. docs/glossary.md defines the terms.
//
// Scores are computed tile by tile and stored in the form that phi needs (pointwise.h). The block
// holds whole rows, so that no reduction needs an online correction. Every mechanism takes three
// steps: scores, row statistics, weights. In each row
//     A_j = of_stored(stored_j) * weight_scale      or, re-weighted,
//     u_j = (of_stored(stored_j) - threshold) * inverse_spread
//     A_j = u_j^p / sum u^p  where u_j > live_threshold, else 0
// A tied row is computed as a re-weighted row with threshold 0 and p = 1, so that it keeps its l1
// weights. Its inverse_spread is the power of two that brings its largest u into [1, 2); a power of
// two rounds no weight. A non-finite row, whose row_sum is NaN or infinite, has threshold 0, p = 1
// and inverse_spread 1. A row without weights (MIN_ROW_SUM) has inverse_spread 0: all its u are 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "decode_dots.h"
#include "dropout.h"
#include "packing.h"
#include "params.h"
#include "pointwise.h"
#include "product.h"

namespace softfocus {

// With the l1 norm, a row whose `row_sum` is below this has no weights, and its u and sum u^p are
// 0.
//
// A row with weights that is not tied has a spread of at least TIE_TOLERANCE * row_sum / N, so that
// inverse_spread is finite for N up to 5e8. Its largest u is 1, that of a tied row is in [1, 2).
// sum u^p is at least 1, unless p is above some 1e8.
constexpr float MIN_ROW_SUM = 1e-25f;
// If row_sum is between these, sums over the row may take phi in place of the weights, and
// weight_scale multiplies the sum. Otherwise phi times a number could overflow or underflow where
// the weight times that number does not. Chosen, not measured. Row sums of exp are from 1 to N,
// those of softplus above 2e-9, where e^(s - m) is not stored.
constexpr float SMALL_ROW_SUM = 1e-9f, LARGE_ROW_SUM = 1e9f;
// Integer powers up to this are computed by squaring. Its own error is at most p units in the last
// place; at p = 31 it was five. The rounding of u adds about p units whatever the method, thirty at
// p = 31 (docs/performance.md). The limit itself is chosen, not measured.
constexpr int64_t SQUARING_LIMIT = 32;
// With more keys than this a block of the dense backward has 64 query rows, which halves the memory
// of a thread. Such a block keeps two floats for each score. With 128 rows they take 8 MiB at this
// limit, as much as the forward's scores at 16K keys. Chosen, not measured.
constexpr int64_t DENSE_BACKWARD_KEYS = 8192;

// Tiles that are summed in float before the sum moves to a DoubleSum. That is 64 float terms per
// lane: equal terms err by at most 2^-19, an eighth of TIE_TOLERANCE (docs/kernels-cpu.md).
constexpr int64_t TILES_PER_SUM = W / 2;
static_assert(TILES_PER_SUM * BLOCK_K / W == 64);

// A row whose peak, largest phi * N / Z - o, is at most this is tied: its largest weight exceeds
// the mean by rounding only. Equals mechanism.TIE_EPS * eps. Chosen, not measured.
constexpr float TIE_TOLERANCE = 128 * std::numeric_limits<float>::epsilon();
// The largest N_i of a row without threshold, as in mechanism.py
constexpr int64_t MAX_UNTHRESHOLDED_COUNT = 3;

// What the three functions below return for a number without a case, so that the row is NaN. Each
// of their switches has a case for every value (-Werror=switch).
constexpr float UNKNOWN = std::numeric_limits<float>::quiet_NaN();

// The constants of a row that sees `count` keys. The first is c_i without the head scale.
inline float compute_base_scale(const Params& params, float count) {
  switch (LengthScale(params.length_scale)) {
    case CONSTANT:
      return float(params.scale);
    case LOG_N:
      return float(params.scale) * std::log(std::max(count, 1.0f));
    case LOG512_N:
      return float(params.scale) * (std::log(std::max(count, 1.0f)) / std::log(512.0f));
  }
  return UNKNOWN;
}

inline float compute_row_bias(const Params& params, float count) {
  switch (ScoreBias(params.score_bias)) {
    case NO_BIAS:
      return 0.0f;
    case MINUS_LOG_N:
      return -std::log(std::max(count, 1.0f));
    case MINUS_LOG_L:
      return -std::log(float(std::max<int64_t>(params.key_length, 1)));
  }
  return UNKNOWN;
}

// What multiplies phi where the normaliser is not l1; 1 where it is
inline float compute_row_factor(const Params& params, float count) {
  switch (Normaliser(params.normaliser)) {
    case L1:
    case NONE:
      return 1.0f;
    case ONE_OVER_N:
      return 1.0f / std::max(count, 1.0f);
    case ONE_OVER_L:
      return 1.0f / float(std::max<int64_t>(params.key_length, 1));
    case ONE_OVER_SQRT_HALF_N:
      return 1.0f / std::sqrt(std::max(count, 1.0f) / 2.0f);
  }
  return UNKNOWN;
}

// The most query rows of a block
inline int64_t rows_per_block(const Params& params, bool backward) {
  return backward && !params.reweighted && params.key_length > DENSE_BACKWARD_KEYS ? BLOCK_Q / 2 : BLOCK_Q;
}

template <typename Phi>
class RowBlock : public BlockVisibility {
 public:
  const int64_t padded_dim, padded_value_dim;  // D and Dv in whole vectors
  const KeyHeadData* key_data = nullptr;       // of the key head that the rows read
  Buffer<float> stored;                        // [tiles, max_rows, BLOCK_K], stored form of scores
  // [BLOCK_Q, padded_dim]; unit vectors for cosine similarity. A non-finite query is 0 as a whole.
  Buffer<float> queries;
  // Where uses_amx(): [BLOCK_Q, D rounded up to AMX_DIMS]; 0 for non-finite queries and after the
  // last row
  Buffer<bfloat16> amx_queries;
  float base_scale[BLOCK_Q];  // c_i without the head scale
  // c_i; multiplies the dot products, not the query, which would round once more. Of the
  // queries only the copy RowGradients::scaled_queries is multiplied by it
  float score_scale[BLOCK_Q];
  float dot_scale[BLOCK_Q];    // score_scale; where uses_amx(), times what pack_amx_row() returned
  float row_bias[BLOCK_Q];     // b_i
  float query_rnorm[BLOCK_Q];  // what l2_normalise() returned; 1 without cosine similarity
  // maximum is m_i: NaN where row_sum is NaN, -inf in a fully masked row.
  // row_sum is the sum of of_stored(stored): Z_i, or Z_i e^(-m_i) where e^(s - m) is stored.
  // log_norm is log Z_i, whatever is stored. In a row without weights (MIN_ROW_SUM) row_sum is 1
  // and log_norm -inf; in a fully masked row row_sum is 0 and log_norm -inf.
  float maximum[BLOCK_Q], row_sum[BLOCK_Q], log_norm[BLOCK_Q], peak[BLOCK_Q];
  // 1 / row_sum, or the normaliser's row_factor; 0 in rows that are fully masked or without
  // weights, NaN in non-finite rows with the l1 norm
  float weight_scale[BLOCK_Q];
  // Without re-weighting threshold is 0, and inverse_spread and power are 1; but inverse_spread is
  // 0 in a row without weights
  float threshold[BLOCK_Q];       // o_i times the row mean
  float inverse_spread[BLOCK_Q];  // 1 / (largest phi - threshold)
  float live_threshold[BLOCK_Q];  // keys with a larger u are live
  float power[BLOCK_Q] = {};      // p; read for rows after n_rows, too, but then not used
  // o_i: 1 in re-weighted rows; 0 in rows without re-weighting, with N_i <= 3, tied, non-finite,
  // fully masked or without weights
  float threshold_on[BLOCK_Q];
  bool query_nonfinite[BLOCK_Q];
  bool exp_tail[BLOCK_Q];  // rows of a phi with an exponential tail that store e^(s - m)
  DropoutMask dropout;

  RowBlock(const Params& call, int64_t most_rows)
      : BlockVisibility(call, most_rows),
        padded_dim(round_up(params.head_dim, W)),
        padded_value_dim(round_up(params.value_dim, W)),
        stored(max_rows * max_padded_keys()),
        queries(BLOCK_Q * padded_dim),
        amx_queries(uses_amx(params) ? BLOCK_Q * round_up(params.head_dim, AMX_DIMS) : 0),
        dropout(params, max_rows, max_padded_keys()),
        amx(uses_amx(params)),
        maximum_first(Phi::shifted_by_maximum && params.normaliser == L1),
        decode_dots(params, padded_dim) {}

  // Moves to the rows of query head h from first_q on: computes scores, statistics, and the
  // constants of the weights.
  void compute(int64_t b, int64_t h, int64_t first_q, const KeyHeadData& data) {
    set_rows(b, h, first_q);
    key_data = &data;
    read_queries();
    compute_scores(0, n_rows, /*keep_scores=*/false);
    for (int64_t r = 0; r < n_rows; ++r) finish_row(r);
    // Rows after the last one: no pass uses these values, but they are defined.
    for (int64_t r = n_rows; r < padded_rows(); ++r) weight_scale[r] = 0.0f, exp_tail[r] = false;
    if (!params.drop_below) return;
    dropout.generate(*this);
    // If dropout drops the largest weights of a row, small ones count. The limit is therefore
    // relative to the largest kept u.
    for (int64_t r = 0; r < n_rows && params.reweighted; ++r)
      if (live_threshold[r] > 0.0f) live_threshold[r] *= largest_kept_u(r);
  }

  // Row r of the tile at start_k of x [tiles, max_rows, BLOCK_K]: a pointer p such that p[j] is the
  // element of the key at offset j, for start_k <= j < start_k + BLOCK_K. p itself is before that
  // row, but still in x, since max_rows >= 1. Rows are BLOCK_K apart, tiles max_rows * BLOCK_K.
  template <typename T>
  T* tile_row(T* x, int64_t r, int64_t start_k) const {
    return x + start_k * max_rows + r * BLOCK_K - start_k;
  }
  float* tile_row(int64_t r, int64_t start_k) { return tile_row<float>(stored, r, start_k); }
  const float* tile_row(int64_t r, int64_t start_k) const { return tile_row<const float>(stored, r, start_k); }

  // The first element of row r in the next tile, which need not exist
  const float* next_tile_row(int64_t r, int64_t start_k) const {
    return tile_row(r, start_k) + start_k + max_rows * BLOCK_K;
  }

  // Calls f(phi) with the Phi that turns a row's stored scores into phi(s), or phi(s) e^-m.
  template <typename F>
  void with_row_phi(int64_t r, F&& f) const {
    if constexpr (Phi::has_exp_tail)
      if (exp_tail[r]) return f(Exp{});
    f(Phi{});
  }

  // With the l1 norm: whether sums over a row may take phi in place of the weights (SMALL_ROW_SUM)
  bool row_sum_in_safe_range(int64_t r) const { return row_sum[r] >= SMALL_ROW_SUM && row_sum[r] <= LARGE_ROW_SUM; }

  // For rows without re-weighting: whether the products read the stored scores of a row in place of
  // its weights; weight_scale then multiplies the output. exp, and softplus in rows whose scores
  // are all below EXP_TAIL, store e^(s - m). Other rows of softplus store phi. relu and relu6 store
  // phi, too, but their products read weights: chosen, not measured. A fully masked row has row_sum
  // 0, outside the safe range, but stores zeros. It counts as one that reads stored scores, so that
  // it does not force the copy on its strip (fill_weights()).
  bool reads_stored_as_weights(int64_t r) const {
    return !params.drop_below && params.normaliser == L1 &&
           (std::is_same_v<Phi, Exp> || std::is_same_v<Phi, Softplus>) && (row_sum_in_safe_range(r) || fully_masked[r]);
  }

  // One element of V, 0 where non-finite
  float value_at(int64_t key, int64_t d) const {
    float x = read_element(params.value, params.dtype, batch_index, key_head, key, d);
    return std::isfinite(x) ? x : 0.0f;
  }

  // Calls f(powers); powers(u, u_p, u_pm1) sets u_p = u^p and u_pm1 = u^(p - 1) for a u in (0, 1].
  // With p = 1 u may be larger, as in tied rows. For u = 0 the results are arbitrary.
  template <typename F>
  static void with_powers(float p, F&& f) {
    if (p >= 1 && p <= SQUARING_LIMIT && p == int64_t(p))
      f([exponent = int64_t(p) - 1](vfloat u, vfloat& u_p, vfloat& u_pm1) {
        vfloat square = u;
        u_pm1 = splat(1.0f);
        for (int64_t bits_left = exponent; bits_left; bits_left >>= 1) {
          if (bits_left & 1) u_pm1 = u_pm1 * square;
          square = square * square;
        }
        u_p = u_pm1 * u;
      });
    else
      f([p](vfloat u, vfloat& u_p, vfloat& u_pm1) {
        u_pm1 = exponential(logarithm(u) * (p - 1.0f));
        u_p = u_pm1 * u;
      });
  }

  // A function from phi to u, for a re-weighted row
  auto phi_to_u(int64_t r) const {
    return [subtrahend = splat(threshold[r]), factor = splat(inverse_spread[r])](vfloat phi) {
      return (phi - subtrahend) * factor;
    };
  }

  // Applies dropout to weights of row r, or their gradients. row[0]: the key at range.begin
  void apply_dropout(int64_t r, KeyRange range, float* row) const {
    for (int64_t j = range.begin; j < range.end; j += W, row += W) store(row, load(row) * dropout.factors(r, j));
  }

  // Lists the live keys of a re-weighted row in a tile: the keys, counted from start_k, and their
  // u, negative where dropout drops the weight. Writes one vector of zeros after the end of each
  // list: both need room for the tile's keys and one vector. Returns the number of keys. A key that
  // the row does not see has phi 0, so u <= 0: it is not live.
  template <bool DROPOUT>
  int64_t gather_live(int64_t r, int64_t start_k, uint8_t* keys, float* u) const {
    int64_t n_live = 0;
    KeyRange strip_keys = strip_range(r, start_k);
    const float* row = tile_row(r, start_k);
    // Prefetches this row of the next tile into the second-level cache: it is used one tile later.
    for (int64_t element = 0; element < BLOCK_K; element += LINE_FLOATS)
      __builtin_prefetch(next_tile_row(r, start_k) + element, 0, 2);
    vfloat limit = splat(live_threshold[r]);
    auto to_u = phi_to_u(r);
    with_row_phi(r, [&](auto phi) {
      vint t = lane_index() + int32_t(strip_keys.begin - start_k);
      for (int64_t j = strip_keys.begin; j < strip_keys.end; j += W, t += W) {
        vfloat x = to_u(phi.of_stored(load(row + j)));
#if defined(__AVX512F__)
        __mmask16 live = _mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_NLE_UQ);  // true for NaN
        if constexpr (DROPOUT) x = dropout.dropped(r, j) ? -x : x;
        _mm512_storeu_ps(u + n_live, _mm512_maskz_compress_ps(live, (__m512)x));
        _mm_storeu_si128((__m128i*)(keys + n_live),
                         _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(live, (__m512i)t)));
        n_live += __builtin_popcount(live);
#else
        vint not_live = x <= limit;
        if constexpr (DROPOUT) x = dropout.dropped(r, j) ? -x : x;
        for (int i = 0; i < W; ++i) {
          u[n_live] = x[i];
          keys[n_live] = uint8_t(t[i]);
          n_live += not_live[i] == 0;
        }
#endif
      }
    });
    store(u + n_live, vfloat{});
    // Key 0 of the tile exists: its value may be read.
    *(vbyte_unaligned*)(keys + n_live) = vbyte{};
    return n_live;
  }

  // For LASER's exact sums (row_log_u.inl.h). compute_log_u() writes log u of each key, by its
  // offset. has_weight() says whether the weight of a key that the row sees may be above 0.
  void compute_log_u(int64_t r, float* row_log_u);
  bool has_weight(int64_t r, int64_t key) const;

 private:
  const bool amx;  // uses_amx()
  // exp with the l1 norm: rows store s at first, and e^(s - m) once their maximum m is known.
  const bool maximum_first;
  DecodeDots decode_dots;

  // row_scores.inl.h
  void read_queries();
  void compute_scores(int64_t first_row, int64_t stop_row, bool keep_scores);
  template <bool KEEP_SCORES, typename F>
  void score_rows(int64_t first_row, int64_t stop_row, vfloat* phi_sums, vfloat* maxima, F&& after_tile);
  template <bool KEEP_SCORES>
  void score_tile(int64_t first_row, int64_t stop_row, int64_t start_k, vfloat* phi_sums, vfloat* maxima);
  void strip_dots(int64_t r, int64_t start_k, KeyRange strip_keys, bool one_row);
  void amx_tile_dots(int64_t first_row, int64_t stop_row, int64_t start_k);
  static void prefetch_strip(const float* to);
  KeyRange range_visible_to_all(int64_t r, KeyRange range) const;
  template <bool KEEP_SCORES>
  void convert_strip(int64_t r, int64_t start_k, KeyRange range, vfloat* phi_sums, vfloat* maxima);
  template <bool KEEP_SCORES>
  void convert_row(int64_t r, int64_t start_k, KeyRange range, vfloat& phi_sum, vfloat& running_max);
  static vint widen(const uint8_t* bytes) { return __builtin_convertvector(*(const vbyte_unaligned*)bytes, vint); }
  vfloat load_bias(int64_t r, int64_t j) const;
  void exponentiate_row(int64_t r);

  // row_statistics.inl.h
  void finish_row(int64_t r);
  void set_reweighting(int64_t r);
  float largest_kept_u(int64_t r) const;
  bool stores_exp_minus_max(int64_t r) const { return maximum_first || exp_tail[r]; }  // e^(s - m)

  // row_log_u.inl.h
  vfloat log_u_of_stored(int64_t r, vfloat stored_scores) const;
  vfloat log_u_of_score(int64_t r, vfloat s) const;
};

}  // namespace softfocus

#include "row_log_u.inl.h"
#include "row_scores.inl.h"
#include "row_statistics.inl.h"
