// Weights times values for a block of rows, dense or over the keys that weigh something; and LASER's log(A exp V).
#pragma once

#include "live.h"

namespace softfocus {

constexpr float REACH = 20.0f;  // LASER's shift stays 0 while the values' maxima are within this
// A sum of phi e^(v - M) below this is made exactly: what weighs too little for a float, times e^HIGH, would show
constexpr float LOW = 1e-12f;

// The column shifts M of a block for exp(V - M): 0 for values of an ordinary size, whose exponentials the head holds
// ready; else the maximum over the keys that every row of the block sees, so that no future value touches an earlier
// row. The exponent is clamped, and what lies too high above M is remembered.
struct Shift {
  Buffer<float> shift, space;
  std::vector<BrokenValue> high;
  bool ordinary = false, noting = false;

  template <typename Phi>
  void open(const Block<Phi>& block, float* natural) {
    const Problem& p = block.p;
    int64_t width = block.value_width, low = block.base, end = block.end;
    shift.resize(width);
    std::fill(shift + 0, shift + width, -INF);
    std::vector<uint8_t> common;  // of the keys [low, end), where masks make holes
    for (int64_t r = 0; r < block.n; ++r)
      if (!block.blind[r]) low = std::max(low, block.low[r]), end = std::min(end, block.high[r]);
    if (low < end && block.visible_row(0)) {
      common.assign(end - low, 1);
      for (int64_t r = 0; r < block.n; ++r)
        for (int64_t j = 0; j < end - low && !block.blind[r]; ++j)
          common[j] &= block.visible_row(r)[low - block.base + j];
    }
    block.chunks([&](int64_t at) {
      int64_t first = std::max(low, block.base + at), stop = std::min({block.base + at + CHUNK, p.key_length, end});
      if (first >= stop) return;
      Natural v = natural_values(p, *block.head, block.b, block.h / (p.heads / p.key_heads), first, stop, natural);
      for (int64_t key = first; key < stop; ++key)
        if (common.empty() || common[key - low])
          for (int64_t d = 0; d < width; d += W)
            store(shift + d, max(load(v.data + (key - first) * v.step + d), load(shift + d)));
    });
    bool near = true;
    for (int64_t d = 0; d < p.value_dim; ++d) {
      near &= shift[d] == -INF || std::fabs(shift[d]) <= REACH;
      shift[d] = shift[d] == -INF ? 0.0f : shift[d];
    }
    ordinary = near && block.head->exponentials;
    noting = true;
    if (ordinary) std::fill(shift + 0, shift + width, 0.0f);
    high.clear();
    if (ordinary) high = block.head->high_values;
    if (!ordinary) space.resize(CHUNK * width);
  }

  // exp(V - M) of the keys [first, first + n); `v` is asked for the values only where the head does not hold the result
  template <typename F>
  Natural exponential(const Head& head, F&& v, int64_t first, int64_t n, int64_t width, int64_t value_dim) {
    if (ordinary) return {head.exponentials + first * width, width};
    Natural values = v();
    for (int64_t j = 0; j < n; ++j)
      exponential_row(values.data + j * values.step, shift, width, space + j * width, [&](int64_t d) {
        if (noting && d < value_dim) high.push_back({first + j, d});
      });
    return {space, width};
  }
};

template <typename Phi>
class Mixer {
 public:
  Buffer<float> out;      // [ROWS, value_width]: A V, or with LASER A exp(V - M)
  Buffer<float> natural;  // [CHUNK, value_width]
  float share[ROWS];      // re-weighted rows: 1 / sum u^p
  bool weightless[ROWS];
  Shift shift;

  explicit Mixer(const Block<Phi>& block)
      : out(ROWS * block.value_width),
        natural(CHUNK * block.value_width),
        scratch(MR * CHUNK),
        column(block.p.laser ? block.row_space : 0) {}

  void mix(const Block<Phi>& block) { block.p.dropped ? mix<true>(block) : mix<false>(block); }

  // Calls f(r, column, logarithms) for what LASER must sum exactly, row by row: as Block::logarithms has them.
  template <typename F>
  void exact(Block<Phi>& block, F&& f) {
    const Problem& p = block.p;
    std::vector<uint8_t> marked(block.n * p.value_dim, 0);
    for (auto [key, d] : shift.high)
      for (int64_t r = 0; r < block.n; ++r)
        if (!block.blind[r] && block.sees(r, key) && block.weighs(r, key)) marked[r * p.value_dim + d] = 1;
    for (int64_t r = 0; r < block.n; ++r) {
      if (weightless[r] || block.blind[r] || !std::isfinite(block.norm[r])) continue;
      bool ready = false;
      float low = p.sharpened ? LOW : LOW / std::min(block.norm[r], 1.0f);  // the largest u is 1; phi may be all small
      for (int64_t d = 0; d < p.value_dim; ++d) {
        if (!marked[r * p.value_dim + d] && !(out[r * block.value_width + d] < low)) continue;
        if (!ready) block.logarithms(r, column);
        ready = true;
        f(r, d, static_cast<const float*>(column));
      }
    }
  }

 private:
  Lists<Phi> lists;
  Buffer<float> scratch;  // [MR, CHUNK]
  Buffer<float> column;

  // The same, compiled apart for dropout: the lists are where the time goes
  template <bool DROPOUT>
  void mix(const Block<Phi>& block) {
    const Problem& p = block.p;
    int64_t width = block.value_width, vectors = width / W, key_head = block.h / (p.heads / p.key_heads);
    std::fill(out + 0, out + block.padded() * width, 0.0f);
    vf sums[ROWS];
    for (int64_t r = 0; r < ROWS; ++r) sums[r] = vf{};
    if (p.laser) shift.open(block, natural);
    if (p.sharpened && !p.laser && !block.head->packed) {
      return with_element(p.dtype, [&](auto zero) {
        for (int64_t r = 0; r < block.n; ++r) finish(block, r, pick<DROPOUT, decltype(zero)>(block, r));
      });
    }
    block.chunks([&](int64_t at) {
      int64_t first = block.base + at, stop = std::min(first + CHUNK, p.key_length);
      auto values = [&] { return natural_values(p, *block.head, block.b, key_head, first, stop, natural); };
      if (!p.sharpened && direct(block))
        return with_element(p.dtype, [&](auto zero) {
          add_chunk(block, at, row_in_place<decltype(zero)>(p.value, block.b, key_head, first), p.value.stride[2]);
        });
      Natural v = p.laser ? shift.exponential(*block.head, values, first, stop - first, width, p.value_dim) : values();
      if (p.sharpened) {
        for (int64_t r = 0; r < block.n; r += LISTS) {
          lists.template gather<DROPOUT>(block, r, at);
          for (int64_t i = 0; i < LISTS; ++i) {
            sums[r + i] += lists.template raise<DROPOUT>(i, block.power[r + i]);
            if (block.more(at)) prefetch_next(v.data, v.step, r + i, width);
            add_rows(vectors, lists.found[i], lists.keys_of(i), lists.u_of(i), v.data, v.step, out + (r + i) * width);
          }
        }
        return;
      }
      add_chunk(block, at, v.data, v.step);
    });
    for (int64_t r = 0; r < block.n; ++r) finish(block, r, sum(sums[r]));
    shift.noting = false;
  }

  // Whether values are taken where they lie, whatever their dtype: by few queries, each value once
  static bool direct(const Block<Phi>& block) {
    const Problem& p = block.p;
    return !block.head->packed && !p.laser && block.head->broken_values.empty() && side_by_side(p.value, p.value_dim);
  }

  // The rows' weights of a chunk times its values, where no row is re-weighted
  template <typename T>
  void add_chunk(const Block<Phi>& block, int64_t at, const T* values, int64_t step) {
    int64_t width = block.value_width, vectors = width / W,
            last = std::min(at + CHUNK, block.p.key_length - block.base);
    for (int64_t r = 0; r < block.n; r += MR) {
      Range seen = block.range(r, at);
      if (seen.empty()) continue;
      int64_t depth = std::min(seen.high, last) - seen.low, there = std::min<int64_t>(MR, block.n - r);
      const float* weights = block.part(r, at) + seen.low;
      if (!block.weights_are_kept()) {
        for (int64_t i = 0; i < there; ++i)
          block.with_row_phi(r + i, [&](auto phi) {
            vf scale = splat(block.scale[r + i]);
            for (int64_t j = 0; j < seen.high - seen.low; j += W)
              store(scratch + i * CHUNK + j, phi.value(load(weights + i * CHUNK + j)) * scale);
            if (block.p.dropped) block.drop(r + i, seen, scratch + i * CHUNK - seen.low);
          });
        weights = scratch;
      }
      const T* from = values + (seen.low - at) * step;
      if (there == MR) product<MR>(vectors, depth, weights, CHUNK, 1, from, step, out + r * width, width, true);
      for (int64_t i = 0; i < there && there < MR; ++i)
        product<1>(vectors, depth, weights + i * CHUNK, CHUNK, 1, from, step, out + (r + i) * width, width, true);
    }
  }

  // One re-weighted row: the values of the keys that weigh something are fetched, and no others
  template <bool DROPOUT, typename T>
  float pick(const Block<Phi>& block, int64_t r) {
    const Problem& p = block.p;
    int64_t width = block.value_width, key_head = block.h / (p.heads / p.key_heads);
    bool direct = side_by_side(p.value, p.value_dim);
    std::vector<int64_t> some;
    vf total = vf{};
    auto add = [&] {
      for (size_t i = 0; i < some.size(); ++i) {
        total += lists.template raise<DROPOUT>(i, block.power[r]);
        int64_t n = lists.found[i], first = block.base + some[i];
        const uint8_t* keys = lists.keys_of(i);
        auto add_values = [&](const auto* values, int64_t step) {
          add_rows(width / W, n, keys, lists.u_of(i), values, step, out + r * width);
        };
        if (direct) {
          add_values(row_in_place<T>(p.value, block.b, key_head, first), p.value.stride[2]);
          continue;
        }
        for (int64_t e = 0; e < n; ++e) {
          float* row = natural + keys[e] * width;
          read_row(p.value, p.dtype, block.b, key_head, first + keys[e], p.value_dim, row);
          std::fill(row + p.value_dim, row + width, 0.0f);
        }
        add_values(static_cast<const float*>(natural), width);
      }
      some.clear();
    };
    if (!block.blind[r])
      block.chunks([&](int64_t at) {
        int64_t i = some.size();
        lists.found[i] = block.template gather<DROPOUT>(r, at, lists.keys_of(i), lists.u_of(i));
        some.push_back(at);
        if (direct)
          for (int64_t e = 0; e < lists.found[i]; ++e) {
            const T* row = row_in_place<T>(p.value, block.b, key_head, block.base + at + lists.keys_of(i)[e]);
            for (int64_t d = 0; d < width; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
          }
        if (some.size() == LISTS) add();
      });
    add();
    return sum(total);
  }

  void finish(const Block<Phi>& block, int64_t r, float total) {
    float factor = 1.0f;
    share[r] = 1.0f;
    weightless[r] = block.p.normaliser == L1 && block.log_norm[r] == -INF;
    if (block.p.sharpened)
      factor = (share[r] = total < TINY ? 1.0f : 1.0f / total) * block.drops.growth;
    else if (block.weights_are_kept())
      factor = block.scale[r];
    float* row = out + r * block.value_width;
    for (int64_t d = 0; d < block.value_width; d += W) store(row + d, load(row + d) * factor);
  }
};

// log of the sum of e^term over the keys of a row, of which some term is finite; in double, since values may be large
template <typename F>
inline double log_sum(int64_t n, F&& term) {
  double top = -INF, total = 0.0;
  for (int64_t j = 0; j < n; ++j) top = std::max(top, term(j));
  for (int64_t j = 0; j < n; ++j) total += std::exp(term(j) - top);
  return top + std::log(total);
}

}  // namespace softfocus
