// A block of query rows with the scores of all the keys that they may see: what the forward and the backward share.
// (Over 300 lines: one class, whose parts all work on the same rows.)
//
// Scores are made once, chunk by chunk, and kept as phi needs them (pointwise.h); with whole rows at hand no reduction
// needs an online correction, and every mechanism is the same three steps: scores, the rows' statistics, weights. Row
// by row:
//     A_j = value(kept_j) * scale                       or, re-weighted,
//     u_j = (value(kept_j) - floor) * inverse,  A_j = u_j^p / sum u^p  where u_j > live, else 0
// A row that is tied, or that sees a NaN, is a re-weighted row with floor 0 and p = 1: its own l1 weights.
#pragma once

#include "dropout.h"
#include "few.h"
#include "pointwise.h"

namespace softfocus {

constexpr float TINY =
    1e-25f;  // a row whose phi (of relu's kind) add up to less has no weight: 1 / norm must be a number
constexpr int64_t SQUARING_LIMIT = 32;

// The backward of rows that are not re-weighted keeps two numbers a score: at great lengths of half as many rows
inline int64_t block_rows(const Problem& p, bool backward) {
  return backward && !p.sharpened && p.key_length > 8192 ? ROWS / 2 : ROWS;
}

template <typename Phi>
class Block : public Sight {
 public:
  const int64_t width, value_width;  // of rows of queries and of values, in whole vectors
  const Head* head = nullptr;
  Buffer<float> kept;       // [chunks, rows, CHUNK]: what is worked on together lies together
  Buffer<float> direction;  // [ROWS, width], the queries, normalised for cosine similarity
  Buffer<float>
      query;  // [ROWS, width], times c_i, for the keys' gradients; scores are scaled when they are summed: one rounding
  float factor[ROWS], full[ROWS], shift[ROWS], inverse_norm[ROWS], maximum[ROWS], norm[ROWS], log_norm[ROWS],
      peak[ROWS];
  float scale[ROWS], floor[ROWS], inverse[ROWS], live[ROWS], power[ROWS], offset[ROWS];
  bool broken[ROWS], tail[ROWS];
  Drops drops;

  Block(const Problem& problem, int64_t most)
      : Sight(problem, most),
        width(round_up(p.head_dim, W)),
        value_width(round_up(p.value_dim, W)),
        kept(rows * (row_space - W)),
        direction(ROWS * width),
        query(ROWS * width),
        drops(p, rows, row_space - W),
        two_steps(Phi::after_maximum && p.normaliser == L1),
        few(p, width) {}

  // Take the rows of a head from `first` on; their scores and everything up to the weights' constants.
  void open(int64_t batch, int64_t query_head, int64_t first, const Head& keys) {
    look(batch, query_head, first);
    head = &keys;
    read_queries();
    scores(0, n, false);
    for (int64_t r = 0; r < n; ++r) finish_row(r);
    for (int64_t r = n; r < padded(); ++r) scale[r] = 0.0f, tail[r] = false;
    if (!p.dropped) return;
    drops.draw(*this);
    for (int64_t r = 0; r < n && p.sharpened; ++r)
      if (live[r] > 0.0f) live[r] *= highest_left(r);
  }

  // A row's part of a chunk in an array [chunks, rows, CHUNK], to be indexed from base
  template <typename T>
  T* part(T* x, int64_t r, int64_t at) const {
    return x + at * rows + r * CHUNK - at;
  }
  float* part(int64_t r, int64_t at) { return part<float>(kept, r, at); }
  const float* part(int64_t r, int64_t at) const { return part<const float>(kept, r, at); }

  // Calls f with the phi that a row was made with
  template <typename F>
  void with_row_phi(int64_t r, F&& f) const {
    if constexpr (Phi::runs_along_exp)
      if (tail[r]) return f(Exp{});
    f(Phi{});
  }

  // A_j = scale * value(kept) needs no pass of its own where value(kept) is what is kept: the scale waits for the end
  bool weights_are_kept() const {
    return !p.dropped && p.normaliser == L1 && (std::is_same_v<Phi, Exp> || std::is_same_v<Phi, Softplus>);
  }

  // Calls f with what makes u^p and u^(p-1) of a u in (0, 1]
  template <typename F>
  static void with_powers(float p, F&& f) {
    if (p >= 1 && p <= SQUARING_LIMIT && p == int64_t(p))
      f([e = int64_t(p) - 1](vf u, vf& whole, vf& less) {
        vf square = u;
        less = splat(1.0f);
        for (int64_t rest = e; rest; rest >>= 1) {
          if (rest & 1) less = less * square;
          square = square * square;
        }
        whole = less * u;
      });
    else
      f([p](vf u, vf& whole, vf& less) {
        less = exponential(logarithm(u) * (p - 1.0f));
        whole = less * u;
      });
  }

  // Multiplies a row's weights of a chunk, or what passes through them, by 0 or 1 / (1 - p); `weights` counts from base
  void drop(int64_t r, Range seen, float* weights) const {
    for (int64_t j = seen.low; j < seen.high; j += W) store(weights + j, load(weights + j) * drops.factors(r, j));
  }

  // The keys of a chunk that weigh something in a re-weighted row, counted from the chunk's first, and their u,
  // negative where dropout takes the weight; both padded with 0
  template <bool DROPOUT>
  int64_t gather(int64_t r, int64_t at, uint8_t* keys, float* u) const {
    int64_t found = 0;
    Range seen = range(r, at);
    const float* row = part(r, at);
    for (int64_t j = 0; j < CHUNK; j += 16) __builtin_prefetch(row + at + rows * CHUNK + j, 0, 2);
    vf fl = splat(floor[r]), inv = splat(inverse[r]), threshold = splat(live[r]);
    with_row_phi(r, [&](auto phi) {
      vi key = lanes() + int32_t(seen.low - at);
      for (int64_t j = seen.low; j < seen.high; j += W, key += W) {
        vf x = (phi.value(load(row + j)) - fl) * inv;
#if defined(__AVX512F__)
        __mmask16 alive = _mm512_cmp_ps_mask((__m512)x, (__m512)threshold, _CMP_NLE_UQ);  // a NaN is alive
        if constexpr (DROPOUT) x = drops.dropped(r, j) ? -x : x;
        _mm512_storeu_ps(u + found, _mm512_maskz_compress_ps(alive, (__m512)x));
        _mm_storeu_si128((__m128i*)(keys + found),
                         _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(alive, (__m512i)key)));
        found += __builtin_popcount(alive);
#else
        vi dead = x <= threshold;
        if constexpr (DROPOUT) x = drops.dropped(r, j) ? -x : x;
        for (int i = 0; i < W; ++i) {
          u[found] = x[i];
          keys[found] = uint8_t(key[i]);
          found += dead[i] == 0;
        }
#endif
      }
    });
    store(u + found, vf{});
    *(vb_anywhere*)(keys + found) = vb{};  // a key that is there, for those who take whole vectors
    return found;
  }

  // The logarithms of a row's u, or of its phi, up to what norms them, at offsets from base; -inf where no chunk is
  // seen. Without a floor u is phi but for a factor, and may be too small for a float: its logarithm comes from the
  // scores, made once more where they are not kept.
  void logarithms(int64_t r, float* to) {
    std::fill(to, to + (ld - W), -INF);
    auto each_vector = [&](auto log) {
      chunks([&](int64_t at) {
        Range seen = range(r, at);
        for (int64_t j = seen.low; j < seen.high; j += W) store(to + j, log(load(part(r, at) + j)));
      });
    };
    if (floor[r] != 0.0f) return each_vector([&](vf kept) { return log_excess(r, kept); });
    auto log_phi = [&](vf s) { return log_without_floor(r, s); };
    if (Phi::keeps_scores && !tail[r]) return each_vector(log_phi);
    float total = norm[r], top = maximum[r];
    scores(r, r + 1, true);
    norm[r] = total, maximum[r] = top;
    each_vector(log_phi);
    if (shifted(r)) return exponentiate(r);
    chunks([&](int64_t at) {
      Range seen = range(r, at);
      float* row = part(r, at);
      for (int64_t j = seen.low; j < seen.high; j += W) store(row + j, Phi::keep(load(row + j)));
    });
  }

  // log A, but for what norms the row, from what `logarithms` has
  double log_weight(int64_t r, float log_u) const { return log_u == -INF ? -INF : double(power[r]) * log_u; }

  // Whether a key that a row sees may weigh something
  bool weighs(int64_t r, int64_t key) const {
    if (floor[r] == 0.0f && !Phi::vanishes) return true;
    int64_t j = key - base, whole = j / W * W;
    vf kept = load(part(r, j / CHUNK * CHUNK) + whole);
    return (floor[r] == 0.0f ? Phi::log(kept) : log_excess(r, kept))[j - whole] != -INF;
  }

 private:
  // The largest u of a re-weighted row that dropout leaves: what is below the rounding of the largest may count beside
  // it
  float highest_left(int64_t r) const {
    vf top = vf{};
    with_row_phi(r, [&](auto phi) {
      chunks([&](int64_t at) {
        Range seen = range(r, at);
        const float* row = part(r, at);
        for (int64_t j = seen.low; j < seen.high; j += W)
          top = max(drops.dropped(r, j) ? vf{} : phi.value(load(row + j)), top);
      });
    });
    return std::max(largest(top) - floor[r], 0.0f) * inverse[r];
  }

  // Whether e^(s - max) is kept
  bool shifted(int64_t r) const { return two_steps || tail[r]; }

  vf log_excess(int64_t r, vf kept) const {
    vf y;
    with_row_phi(r, [&](auto phi) { y = phi.value(kept); });
    y = (y - floor[r]) * inverse[r];
    return y < SMALLEST ? splat(-INF) : logarithm(y);
  }

  // From the scores; near 1 u's own logarithm is more exact than a difference of two
  vf log_without_floor(int64_t r, vf s) const {
    if (shifted(r)) return s - maximum[r];
    vf u = Phi::value(Phi::keep(s)) * inverse[r], scale = splat(inverse[r]);
    return u < 1e-30f ? Phi::log(s) + logarithm(scale) : logarithm(u);
  }

  const bool two_steps;
  FewRows few;

  void read_queries() {
    for (int64_t r = 0; r < padded(); ++r) {
      float *to = direction + r * width, *scaled = query + r * width;
      std::fill(to, to + width, 0.0f);
      broken[r] = false;
      factor[r] = shift[r] = 0.0f;
      if (r < n) {
        read_row(p.query, p.dtype, b, h, start + r, p.head_dim, to);
        broken[r] = !all_finite(to, p.head_dim);
        if (broken[r]) std::fill(to, to + width, 0.0f);
        inverse_norm[r] = p.cosine ? normalise(to, p.head_dim) : 1.0f;
        factor[r] = row_scale(p, count[r]);
        shift[r] = row_bias(p, count[r]);
      }
      full[r] = factor[r] * (p.head_scale ? p.head_scale[h] : 1.0f);
      for (int64_t d = 0; d < width; ++d) scaled[d] = to[d] * full[r];
    }
  }

  // What is kept, the sums of phi and the maxima of the rows [first, last): whole groups, or one row. `raw` keeps s
  // itself.
  void scores(int64_t first, int64_t last, bool raw) {
    vf sums[ROWS], tops[ROWS];
    for (int64_t r = first; r < last; ++r) sums[r] = vf{}, tops[r] = splat(-INF);
    raw |= two_steps;
    bool single = last - first == 1;
    auto keep_rows = [&](int64_t at) {
      for (int64_t i = first; i < last; ++i)
        if (Range seen = range(i, at); !seen.empty())
          raw ? keep<true>(i, at, seen, sums[i], tops[i]) : keep<false>(i, at, seen, sums[i], tops[i]);
    };
    if (!head->packed) {
      few.score(
          *this, direction + first * width, last - first,
          [&](int64_t r, int64_t j) { return part(first + r, j / CHUNK * CHUNK) + j; }, keep_rows);
    } else {
      chunks([&](int64_t at) {
        bool plain = !single && shown_whole(at) && !p.bias.data && !head->any_broken_key;
        const float* keys = head->key_panels + (base + at) * p.head_dim;
        for (int64_t r = first; r < last; r += single ? 1 : MR) {
          Range seen = range(r, at);
          if (seen.empty()) continue;
          if (!single && more(at)) prefetch_group(part(r, at) + at + rows * CHUNK);
          for (int64_t panel = at; panel < at + CHUNK; panel += PANEL) {
            Range some{std::max(seen.low, panel), std::min(seen.high, panel + PANEL)};
            if (some.empty()) continue;
            const float* columns = keys + (panel - at) * p.head_dim + some.low - panel;
            float *row = part(r, at) + some.low, *queries = direction + r * width;
            if (single)
              dots<1>(some.vectors(), p.head_dim, queries, width, columns, row, CHUNK);
            else
              dots<MR>(some.vectors(), p.head_dim, queries, width, columns, row, CHUNK);
          }
          Range open = plain ? inside(r, seen) : Range{seen.high, seen.high};
          if (!open.empty()) {
            raw ? keep_group<true>(r, at, open, sums + r, tops + r)
                : keep_group<false>(r, at, open, sums + r, tops + r);
          }
          for (Range rest : {Range{seen.low, open.low}, Range{open.high, seen.high}})
            for (int64_t i = r; i < (single ? last : std::min(r + MR, last)) && !rest.empty(); ++i)
              raw ? keep<true>(i, at, rest, sums[i], tops[i]) : keep<false>(i, at, rest, sums[i], tops[i]);
        }
      });
    }
    for (int64_t r = first; r < last; ++r) norm[r] = sum(sums[r]), maximum[r] = largest(tops[r]);
  }

  // Where MR rows' scores will be written: whole blocks of them lie in the third-level cache, or beyond
  static void prefetch_group(float* to) {
    for (int64_t j = 0; j < MR * CHUNK; j += 16) __builtin_prefetch(to + j, 1, 2);
  }

  // What of a range, in whole vectors, the window shows all of MR rows; nothing, at its end, where a row is not there
  // or broken
  Range inside(int64_t r, Range at) const {
    bool all = r + MR <= n;
    int64_t l = at.low, g = at.high;
    for (int64_t i = r; i < r + MR; ++i) {
      all &= !broken[i];
      l = std::max(l, round_up(low[i] - base, W)), g = std::min(g, (high[i] - base) / W * W);
    }
    return all && l < g ? Range{l, g} : Range{at.high, at.high};
  }

  // Scores of MR rows that see all of a range to what is kept of them
  template <bool RAW>
  void keep_group(int64_t r, int64_t at, Range seen, vf* sums, vf* tops) {
    vf total[MR], top[MR];
    each<MR>([&](int i) { total[i] = sums[i], top[i] = tops[i]; });
    float* row = part(r, at);
    for (int64_t j = seen.low; j < seen.high; j += W) {
      vf x[MR];
      each<MR>([&](int i) { x[i] = load(row + i * CHUNK + j) * full[r + i] + shift[r + i]; });
      each<MR>([&](int i) { top[i] = max(x[i], top[i]); });
      if constexpr (!RAW) {
        Phi::keep(x);
        each<MR>([&](int i) { total[i] += Phi::value(x[i]); });
      }
      each<MR>([&](int i) { store(row + i * CHUNK + j, x[i]); });
    }
    each<MR>([&](int i) { sums[i] = total[i], tops[i] = top[i]; });
  }

  // The same of one row, whatever it sees
  template <bool RAW>
  void keep(int64_t r, int64_t at, Range range, vf& total, vf& top) {
    float* row = part(r, at);
    vf nan = splat(std::numeric_limits<float>::quiet_NaN());
    for (int64_t j = range.low; j < range.high; j += W) {
      vf s = load(row + j) * full[r] + shift[r];
      if (p.bias.data) s += bias(r, j);
      if (broken[r]) s = nan;
      if (head->packed && head->any_broken_key) s = bytes(head->broken_key + base + j) != 0 ? nan : s;
      vi key = lanes() + int32_t(base + j);
      vi seen = (key >= int32_t(low[r])) & (key < int32_t(high[r]));
      if (masked) seen &= bytes(visible + r * ld + j) != 0;
      s = seen ? s : splat(-INF);
      top = max(s, top);
      vf x = s;
      if constexpr (!RAW) {
        x = seen ? Phi::keep(s) : splat(Phi::hidden);
        total += Phi::value(x);
      }
      store(row + j, x);
    }
  }

  static vi bytes(const uint8_t* x) { return __builtin_convertvector(*(const vb_anywhere*)x, vi); }

  vf bias(int64_t r, int64_t j) const {
    const Array& x = p.bias;
    const float* from =
        static_cast<const float*>(x.data) + b * x.stride[0] + h * x.stride[1] + (start + r) * x.stride[2];
    vf y = vf{};
    for (int i = 0; i < W; ++i) {
      int64_t key = base + j + i;
      if (key < p.key_length) y[i] = from[key * x.stride[3]];
    }
    return y == y ? y : splat(std::numeric_limits<float>::quiet_NaN());  // of one kind, which survives the bit tricks
  }

  // e^(s - max) for a row of raw scores
  void exponentiate(int64_t r) {
    float top = maximum[r] == -INF ? 0.0f : maximum[r];
    vf total = vf{};
    chunks([&](int64_t at) {
      Range seen = range(r, at);
      float* row = part(r, at);
      int64_t j = seen.low;
      for (; j + 4 * W <= seen.high; j += 4 * W) {
        vf x[4];
        each<4>([&](int i) { x[i] = load(row + j + i * W) - top; });
        exp_negative(x);
        each<4>([&](int i) { store(row + j + i * W, x[i]); });
        total += (x[0] + x[1]) + (x[2] + x[3]);
      }
      for (; j < seen.high; j += W) {
        vf x = exp_negative(load(row + j) - top);
        store(row + j, x);
        total += x;
      }
    });
    norm[r] = sum(total);
    log_norm[r] = std::log(norm[r]) + top;
  }

  void finish_row(int64_t r) {
    tail[r] = false;
    offset[r] = peak[r] = floor[r] = live[r] = scale[r] = 0.0f;
    power[r] = inverse[r] = 1.0f;
    if (blind[r]) {
      maximum[r] = log_norm[r] = -INF;
      norm[r] = 0.0f;
      if (two_steps) exponentiate(r);  // its group's products read the row
      log_norm[r] = -INF;
      return;
    }
    float nan = norm[r] - norm[r];
    if (two_steps) {
      exponentiate(r);
    } else if (Phi::runs_along_exp && p.normaliser == L1 && maximum[r] < TAIL && nan == 0.0f) {
      tail[r] = true;
      scores(r, r + 1, true);
      exponentiate(r);
    } else {
      log_norm[r] = std::log(norm[r]);
    }
    if (std::isnan(norm[r])) maximum[r] = norm[r];
    if (p.normaliser != L1) {
      scale[r] = row_factor(p, count[r]);
      return;
    }
    if (norm[r] < TINY) norm[r] = 1.0f, log_norm[r] = -INF;  // without a positive phi all weights are 0
    scale[r] = 1.0f / norm[r];
    if (p.sharpened) sharpen(r);
  }

  void sharpen(int64_t r) {
    if (!std::isfinite(norm[r])) {
      peak[r] = norm[r] - norm[r];
      return;
    }
    float high_f = shifted(r) ? 1.0f : Phi::value(Phi::keep(splat(maximum[r])))[0];
    offset[r] = count[r] > FREE_ROWS ? 1.0f : 0.0f;
    float mean = norm[r] / count[r];
    peak[r] = std::max(high_f * count[r] / norm[r] - offset[r], 0.0f);
    if (peak[r] <= TIE) {
      offset[r] = 0.0f;
      return;
    }
    floor[r] = offset[r] * mean;
    inverse[r] = 1.0f / (high_f - floor[r]);
    power[r] = p.powers ? p.powers[h] : float(p.power);
    // A u^(p-1) below this times p, as the gradients have it, is less than the rounding of the largest weight; and in
    // long rows all of them together than what the rounding of u makes of it.
    float p1 = power[r];
    if (p1 > 1.0f && !p.laser) {
      float most = 0.5f * std::numeric_limits<float>::epsilon() / (p1 * std::max(count[r] / (p1 * p1), 1.0f));
      live[r] = std::pow(most, 1.0f / (p1 - 1.0f));
    }
  }
};

}  // namespace softfocus
