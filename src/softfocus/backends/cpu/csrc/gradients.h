// The gradients of a block of rows: the scores are made again, then dL/dA, then dL/ds chunk by chunk into the products.
// (Over 300 lines: one class, whose parts share what is kept of the rows.)
//
// With D = sum_j A_j dA_j of a row (0 where the normaliser does not depend on phi):
//     dS_j = (dA_j - D) * scale * phi'(s_j)                                    l1 rows, and the others with D = 0
//     dS_j = (g_j - o mean(g)) * inverse * phi'(s_j),  g_j = p u_j^(p-1) (dA_j - D) / sum u^p     re-weighted rows
// LASER hands on dL/d(A exp(V - M)) in place of dL/dO. What it sums exactly comes as A * dL/dA (`scaled`), since
// dL/dA alone might be too large for a float.
#pragma once

#include "mix.h"

namespace softfocus {

struct Gradients {
  Array grad;                 // dL/dO [B, H, Lq, Dv]
  void *query, *key, *value;  // of the query's dtype
  Array bias;                 // or no data; written through
  float *head_scale, *power;  // [B, H, Lq], to be summed over B and Lq; or null
};

constexpr int64_t LDC = CHUNK + W;  // floats between the rows of a chunk's scratch

inline float dot(const float* x, const float* y, int64_t width) {
  vf total = vf{};
  for (int64_t d = 0; d < width; d += W) total += load(x + d) * load(y + d);
  return sum(total);
}

template <typename Phi>
class RowGradients {
 public:
  Block<Phi> block;

  explicit RowGradients(const Problem& p)
      : block(p, block_rows(p, true)),
        mixer(block),
        grads(ROWS * block.value_width),
        query_grads(ROWS * block.width),
        weights(p.sharpened ? 0 : ROWS * LDC),
        slopes(ROWS * LDC),
        keys(CHUNK * block.width),
        values(CHUNK * block.value_width),
        part(p.laser ? CHUNK * block.value_width : 0),
        products(block.rows * block.row_space, !p.sharpened),
        list_keys(p.sharpened ? block.rows * block.row_space : 0, false),
        list_u(p.sharpened ? block.rows * block.row_space : 0, false),
        places(block.row_space / CHUNK * ROWS + ROWS),
        found(block.row_space / CHUNK * ROWS + ROWS) {
    if (p.laser) panels.resize(CHUNK * p.value_dim), scaled.resize(ROWS * block.row_space);
  }

  // The rows of a head from `start` on into the gradients; key_grads [Lk, width] and value_grads [Lk, value_width]
  void run(int64_t b, int64_t h, int64_t start, const Head& head, const Gradients& to, float* key_grads,
           float* value_grads) {
    block.open(b, h, start, head);
    read_grads(to);
    std::fill(query_grads + 0, query_grads + block.padded() * block.width, 0.0f);
    for (int64_t r = 0; r < ROWS; ++r) exact[r] = false;
    if (block.p.laser) take_laser(value_grads);
    if (block.p.sharpened)
      block.p.dropped ? sparse<true>(to) : sparse<false>(to);
    else
      dense();
    block.chunks([&](int64_t at) { chunk(at, to, key_grads, value_grads); });
    finish_rows(to);
  }

 private:
  Mixer<Phi> mixer;
  Buffer<float> grads;         // dL/dO, or LASER's dL/d(A exp(V - M)), [ROWS, value_width]
  Buffer<float> query_grads;   // [ROWS, width]
  Buffer<float> weights;       // A of a chunk, [ROWS, LDC]
  Buffer<float> slopes;        // dL/ds of a chunk, [ROWS, LDC]
  Buffer<float> keys, values;  // natural rows of a chunk
  Buffer<float> part;          // dL/dV of a chunk before LASER's factor
  Buffer<float> panels;        // LASER's exp(V - M) of a chunk, transposed
  Buffer<float> products;  // dL/dA, [chunks, rows, CHUNK]; of re-weighted rows only where A is not 0, list after list
  Buffer<uint8_t> list_keys;  // of these lists the keys, and u
  Buffer<float> list_u;
  Buffer<int64_t> places;  // where in them the list of a row and a chunk begins
  Buffer<uint8_t> found;   // and how long it is
  Buffer<float> scaled;    // A * dL/dA of what LASER sums exactly, [ROWS, ld], of the rows that `exact` marks
  bool exact[ROWS];
  double scaled_log[ROWS];  // of these rows sum A dL/dA log u
  Range seen[ROWS / MR];    // what groups of rows see of the chunk at hand
  float inner[ROWS];  // D: of re-weighted rows but for inner_rest, since dL/dA - D may be little where one key weighs
                      // most
  float inner_rest[ROWS];
  float share[ROWS];   // 1 / sum u^p
  float lead[ROWS];    // p / sum u^p
  float ground[ROWS];  // - o mean(g) * inverse
  float power_grad[ROWS];
  bool alone[ROWS];  // whether but one key weighs something: of re-weighted rows, and where phi is 0 on a side

  int64_t key_head() const { return block.h / (block.p.heads / block.p.key_heads); }

  Natural natural(int64_t at) {
    int64_t first = block.base + at, stop = std::min(first + CHUNK, block.p.key_length);
    return natural_values(block.p, *block.head, block.b, key_head(), first, stop, values);
  }

  Natural mixed_values(int64_t at) {
    if (!block.p.laser) return natural(at);
    int64_t n = std::min(CHUNK, block.p.key_length - block.base - at);
    return mixer.shift.exponential(
        *block.head, [&] { return natural(at); }, block.base + at, n, block.value_width, block.p.value_dim);
  }

  void read_grads(const Gradients& to) {
    const Problem& p = block.p;
    for (int64_t r = 0; r < block.padded(); ++r) {
      float* row = grads + r * block.value_width;
      std::fill(row, row + block.value_width, 0.0f);
      if (r < block.n && !block.blind[r])
        read_row(to.grad, p.dtype, block.b, block.h, block.start + r, p.value_dim, row);
      inner[r] = lead[r] = ground[r] = power_grad[r] = 0.0f;
    }
    for (auto [key, d] : block.head->broken_values)  // outputs that are NaN by rule pass nothing on
      for (int64_t r = 0; r < block.n; ++r)
        if (block.sees(r, key)) grads[r * block.value_width + d] = 0.0f;
  }

  void take_laser(float* value_grads) {
    const Problem& p = block.p;
    mixer.mix(block);
    int64_t n = block.end - block.base;
    std::vector<int64_t> done;
    mixer.exact(block, [&](int64_t r, int64_t d, const float* logs) {
      float* row = scaled + r * block.ld;
      if (!exact[r]) {
        std::fill(row, row + block.ld, 0.0f);  // whole vectors are read
        alone[r] = n - std::count(logs, logs + n, -INF) == 1;
        scaled_log[r] = 0.0;
      }
      exact[r] = true;
      done.push_back(r * block.value_width + d);
      float grad = grads[r * block.value_width + d];
      auto term = [&](int64_t j) { return block.log_weight(r, logs[j]) + read_value(block.base + j, d); };
      double total = log_sum(n, term);
      for (int64_t j = 0; j < n && grad != 0.0f; ++j)
        if (logs[j] != -INF) {
          float share = grad * float(std::exp(term(j) - total));
          row[j] += share;
          scaled_log[r] += double(share) * logs[j];
          value_grads[(block.base + j) * block.value_width + d] += share;
        }
    });
    for (int64_t r = 0; r < block.n; ++r)
      for (int64_t d = 0; d < p.value_dim; ++d) {
        float &g = grads[r * block.value_width + d], total = mixer.out[r * block.value_width + d];
        g = mixer.weightless[r] || g == 0.0f || std::isnan(total) ? 0.0f : g / total;
      }
    for (int64_t at : done) grads[at] = 0.0f;
  }

  float read_value(int64_t key, int64_t d) const {
    Array column = block.p.value;
    column.data = static_cast<const char*>(column.data) + d * column.stride[3] * (block.p.dtype == FLOAT32 ? 4 : 2);
    float x;
    read_row(column, block.p.dtype, block.b, key_head(), key, 1, &x);
    return std::isfinite(x) ? x : 0.0f;
  }

  // dL/dA everywhere, and D
  void dense() {
    const Problem& p = block.p;
    vf total[ROWS], positive[ROWS];
    for (int64_t r = 0; r < ROWS; ++r) total[r] = positive[r] = vf{};
    block.chunks([&](int64_t at) {
      const float* source = block.head->value_panels + (block.base + at) * p.value_dim;
      if (p.laser && !mixer.shift.ordinary) {
        Natural v = mixed_values(at);
        int64_t n = std::min(CHUNK, p.key_length - block.base - at);
        for (int64_t j = 0; j < CHUNK; ++j)
          for (int64_t d = 0; d < p.value_dim; ++d)
            panels[j / PANEL * PANEL * p.value_dim + d * PANEL + j % PANEL] = j < n ? v.data[j * v.step + d] : 0.0f;
        source = panels;
      }
      for (int64_t panel = at; panel < at + CHUNK; panel += PANEL)
        for (int64_t r = 0; r < block.n; r += MR) {
          Range seen = block.range(r, panel, PANEL);
          if (seen.empty()) continue;
          const float* columns = source + (panel - at) * p.value_dim + (seen.low - panel);
          dots<MR>(seen.vectors(), p.value_dim, grads + r * block.value_width, block.value_width, columns,
                   block.part(static_cast<float*>(products), r, at) + seen.low, CHUNK);
          for (int64_t i = r; i < std::min(r + MR, block.n) && p.dropped; ++i)
            block.drop(i, seen, block.part(static_cast<float*>(products), i, at));
          if (p.normaliser != L1) continue;
          for (int64_t i = r; i < std::min(r + MR, block.n); ++i)
            block.with_row_phi(i, [&](auto phi) {
              const float *kept = block.part(i, at), *product = block.part(static_cast<float*>(products), i, at);
              for (int64_t j = seen.low; j < seen.high; j += W) {
                vf f = phi.value(load(kept + j));
                vf term = f * load(product + j);
                total[i] += p.laser ? (f == 0.0f ? vf{} : term) : term;
                if constexpr (Phi::vanishes) positive[i] += f == 0.0f ? vf{} : splat(1.0f);
              }
            });
        }
    });
    for (int64_t r = 0; r < block.n && p.normaliser == L1; ++r) {
      inner[r] = sum(total[r]) * block.scale[r];
      if (!exact[r]) alone[r] = Phi::vanishes && sum(positive[r]) == 1.0f;
      double more = 0.0;
      for (int64_t j = 0; j < block.end - block.base && exact[r]; ++j) more += scaled[r * block.ld + j];
      inner[r] += more;
    }
  }

  // dL/dA where a re-weighted row's A is not 0, and what of the row's sums the gradients need
  template <bool DROPOUT>
  void sparse(const Gradients& to) {
    struct Totals {
      Sum norm, inner, less, less_inner, log, log_inner;
      int64_t found = 0;
    } all[ROWS];
    int64_t next = 0;
    block.chunks([&](int64_t at) {
      Natural v = mixed_values(at);
      for (int64_t first = 0; first < block.n; first += LISTS) {
        int64_t last = std::min(first + LISTS, block.n);
        for (int64_t r = first; r < last; ++r) {
          int64_t i = at / CHUNK * ROWS + r,
                  n = block.blind[r] ? 0 : block.template gather<DROPOUT>(r, at, list_keys + next, list_u + next);
          places[i] = next, found[i] = uint8_t(n), next += n;
        }
        for (int64_t r = first; r < last; ++r) {
          int64_t place = places[at / CHUNK * ROWS + r], n = found[at / CHUNK * ROWS + r];
          float* list = products + place;
          const float* list_u = this->list_u + place;
          if (block.more(at)) prefetch_next(v.data, v.step, r, block.value_width);
          dots(grads + r * block.value_width, block.value_width, n, list_keys + place, v, list);
          Totals& s = all[r];
          s.found += n;
          Block<Phi>::with_powers(block.power[r], [&](auto powers) {
            for (int64_t e = 0; e < n; e += W) {
              vf u = lanes() < int32_t(n - e) ? load(list_u + e) : vf{}, product = load(list + e), whole, less;
              if constexpr (DROPOUT) {
                product *= left(u);
                store(list + e, product);
                u = absolute(u);
              }
              powers(u, whole, less);
              whole = u == 0.0f ? vf{} : whole;
              less = u == 0.0f ? vf{} : less;
              s.norm.add(whole), s.inner.add(whole, product);
              s.less.add(less), s.less_inner.add(less, product);
              if (to.power) {
                vf log = u == 0.0f ? vf{} : whole * logarithm(u);
                s.log.add(log), s.log_inner.add(log, product);
              }
            }
          });
        }
      }
    });
    for (int64_t r = 0; r < block.n; ++r) {
      if (block.blind[r]) continue;
      const Totals& s = all[r];
      double norm = s.norm.total(), power = block.power[r], d = norm < TINY ? 0.0 : s.inner.total() / norm;
      if (!exact[r]) alone[r] = s.found == 1;
      share[r] = norm < TINY ? 1.0f : float(1.0 / norm);
      double direct = 0.0;  // of what is summed exactly
      if (exact[r]) exact_sums(r, d, direct);
      inner[r] = float(d);
      inner_rest[r] = float(d - inner[r]);
      if (constant(r)) continue;
      lead[r] = power * share[r];
      double slope_sum = lead[r] * (s.less_inner.total() - d * s.less.total()) + power * direct;
      ground[r] = block.offset[r] == 0.0f ? 0.0f : float(-slope_sum / block.count[r] * block.inverse[r]);
      if (to.power && block.peak[r] > TIE)
        power_grad[r] = float((s.log_inner.total() - d * s.log.total()) * share[r] + (exact[r] ? scaled_log[r] : 0.0));
    }
  }

  // A row of which one key has all the weight, whatever its score: rounding must not give it a gradient
  bool constant(int64_t r) const { return block.p.normaliser == L1 && (block.count[r] == 1.0f || alone[r]); }

  // u of a re-weighted row at an offset from base
  float u(int64_t r, int64_t j) const {
    int64_t whole = j / W * W;
    vf f;
    block.with_row_phi(r, [&](auto phi) { f = phi.value(load(block.part(r, j / CHUNK * CHUNK) + whole)); });
    return (f[j - whole] - block.floor[r]) * block.inverse[r];
  }

  void exact_sums(int64_t r, double& d, double& direct) {
    for (int64_t j = 0; j < block.end - block.base; ++j)
      if (float x = scaled[r * block.ld + j]; x != 0.0f) {
        d += x;
        if (block.floor[r] != 0.0f) direct += x / u(r, j);
      }
  }

  // A and dL/ds of a chunk, and from them the gradients
  void chunk(int64_t at, const Gradients& to, float* key_grads, float* value_grads) {
    const Problem& p = block.p;
    int64_t first = block.base + at, stop = std::min(first + CHUNK, p.key_length), n = stop - first;
    int64_t width = block.width, value_width = block.value_width;
    Natural k = natural_keys(p, *block.head, block.b, key_head(), first, stop, keys);
    Natural v{nullptr, 0};
    if (p.laser) v = mixed_values(at);
    bool whole = true;
    for (int64_t g = 0; g < block.padded() / MR; ++g) {
      seen[g] = block.range(g * MR, at);
      whole &= seen[g].low == at && seen[g].high == at + CHUNK;
    }
    if (p.sharpened)
      p.dropped ? sparse_slopes<true>(at, v, value_grads + first * value_width)
                : sparse_slopes<false>(at, v, value_grads + first * value_width);
    else
      for (int64_t r = 0; r < block.padded(); ++r) dense_slopes(r, at);
    if (to.bias.data) add_bias(at, n, to.bias);

    for (int64_t r = 0; r < block.n; r += MR) {
      Range keys = seen[r / MR];
      int64_t skip = keys.low - at, depth = std::min(keys.high - at, n) - skip;
      if (!keys.empty())
        product<MR>(width / W, depth, slopes + r * LDC + skip, LDC, 1, k.data + skip * k.step, k.step,
                    query_grads + r * width, width, true);
    }
    for (int64_t j = 0; j < n;) {
      int64_t step = j + MR <= n ? MR : 1, low = whole ? 0 : ROWS, high = whole ? block.padded() : 0;
      for (int64_t r = 0; r < block.n && !whole; r += MR)
        if (seen[r / MR].low < at + j + step && seen[r / MR].high > at + j) low = std::min(low, r), high = r + MR;
      if (low < high) {
        transposed(step, slopes + low * LDC + j, high - low, block.query + low * width, width,
                   key_grads + (first + j) * width, true);
        if (!p.sharpened)
          transposed(step, weights + low * LDC + j, high - low, grads + low * value_width, value_width,
                     p.laser ? part + j * value_width : value_grads + (first + j) * value_width, !p.laser);
        if (!p.sharpened && p.laser)
          for (int64_t i = j; i < j + step; ++i)
            for (int64_t d = 0; d < value_width; d += W) {
              float* target = value_grads + (first + i) * value_width + d;
              store(target, load(target) + load(part + i * value_width + d) * load(v.data + i * v.step + d));
            }
      }
      j += step;
    }
  }

  // `step` rows of C (+)= (columns of A)^T B
  static void transposed(int64_t step, const float* a, int64_t depth, const float* b, int64_t width, float* c,
                         bool add) {
    if (step == MR)
      product<MR>(width / W, depth, a, 1, LDC, b, width, c, width, add);
    else
      product<1>(width / W, depth, a, 1, LDC, b, width, c, width, add);
  }

  // A row of a chunk's scratch, unless all of it is to be written
  void clear(float* to, int64_t r, int64_t at) {
    Range keys = seen[r / MR];
    if (block.blind[r] || !std::isfinite(block.scale[r]) || keys.low > at || keys.high < at + CHUNK)
      std::fill(to + r * LDC, to + r * LDC + CHUNK, 0.0f);
  }

  void dense_slopes(int64_t r, int64_t at) {
    const Problem& p = block.p;
    Range seen = this->seen[r / MR];
    clear(weights, r, at), clear(slopes, r, at);
    if (seen.empty() || block.blind[r]) return;
    const float *kept = block.part(r, at), *product = block.part(static_cast<float*>(products), r, at);
    float *a = weights + r * LDC - at, *ds = slopes + r * LDC - at;
    if (!std::isfinite(block.scale[r])) {  // a row that sees a NaN: so are its weights, but for what it cannot see
      for (int64_t j = seen.low; j < std::min(seen.high, p.key_length - block.base); ++j)
        if (block.sees(r, block.base + j)) a[j] = ds[j] = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    vf scale = splat(block.scale[r]), d = splat(inner[r]), rate = constant(r) ? vf{} : scale;
    block.with_row_phi(r, [&](auto phi) {
      auto some = [&](int64_t j, auto count) {
        constexpr int N = decltype(count)::value;
        vf x[N], f[N];
        each<N>([&](int i) { x[i] = load(kept + j + i * W); });
        each<N>([&](int i) { f[i] = phi.value(x[i]); });
        phi.slope(x);
        each<N>([&](int i) {
          vf da = load(product + j + i * W);
          if (p.laser) da = f[i] == 0.0f ? vf{} : da;
          vf g = (da - d) * rate;
          vf s = g * x[i];
          if (exact[r] && !constant(r)) {
            s += load(scaled + r * block.ld + j + i * W) * phi.rate(load(kept + j + i * W));
          }
          store(a + j + i * W, f[i] * scale);
          store(ds + j + i * W, s);
        });
      };
      int64_t j = seen.low;
      for (; j + 4 * W <= seen.high; j += 4 * W) some(j, std::integral_constant<int, 4>{});
      for (; j < seen.high; j += W) some(j, std::integral_constant<int, 1>{});
    });
    if (p.dropped) block.drop(r, seen, a);
  }

  // A few rows' rates, then their slopes: numbers stored one by one are not read at once as vectors
  template <bool DROPOUT>
  void sparse_slopes(int64_t at, Natural v, float* value_grads) {
    for (int64_t first = 0; first < block.padded(); first += LISTS) {
      int64_t last = std::min(first + LISTS, block.padded());
      for (int64_t r = first; r < last; ++r) rates<DROPOUT>(r, at, v, value_grads);
      for (int64_t r = first; r < last; ++r) times_slopes(r, at);
    }
  }

  // What dropout makes of a weight, or of what passes through it, by the sign of its u
  vf left(vf u) const { return bits(u) < 0 ? vf{} : splat(block.drops.growth); }

  // dL/df of the keys in a re-weighted row's list to `slopes`, 0 elsewhere, and A into dL/dV
  template <bool DROPOUT>
  void rates(int64_t r, int64_t at, Natural v, float* value_grads) {
    float* to = slopes + r * LDC;
    std::fill(to, to + CHUNK, 0.0f);
    if (block.more(at)) prefetch_next(value_grads, block.value_width, r, block.value_width);
    if (block.blind[r] || seen[r / MR].empty()) return;
    int64_t place = places[at / CHUNK * ROWS + r], n = found[at / CHUNK * ROWS + r], width = block.value_width;
    const float *list = products + place, *list_u = this->list_u + place;
    const uint8_t* key = list_keys + place;
    float rate[CHUNK + W], a[CHUNK + W];
    Block<Phi>::with_powers(block.power[r], [&](auto powers) {
      for (int64_t e = 0; e < n; e += W) {
        vf u = load(list_u + e), factor = splat(share[r]), whole, less;
        if constexpr (DROPOUT) {
          factor *= left(u);
          u = absolute(u);
        }
        powers(u, whole, less);
        store(a + e, whole * factor);
        store(rate + e, less * (load(list + e) - inner[r] - inner_rest[r]) * (lead[r] * block.inverse[r]));
      }
    });
    for (int64_t e = 0; e < n; ++e) to[key[e]] = rate[e];
    if (block.p.laser)
      spread<true>(grads + r * width, width, n, key, a, v, value_grads);
    else
      spread<false>(grads + r * width, width, n, key, a, v, value_grads);
  }

  // dL/df and what all keys of the row share, times phi'(s)
  void times_slopes(int64_t r, int64_t at) {
    Range keys = seen[r / MR];
    if (block.blind[r]) return;
    const float* kept = block.part(r, at);
    float* ds = slopes + r * LDC - at;
    vf all = splat(ground[r]);
    bool summed_exactly = exact[r] && !constant(r);
    block.with_row_phi(r, [&](auto phi) {
      auto some = [&](int64_t j, auto count) {
        constexpr int N = decltype(count)::value;
        vf x[N];
        each<N>([&](int i) { x[i] = load(kept + j + i * W); });
        phi.slope(x);
        each<N>([&](int i) {
          vf s = x[i] * (load(ds + j + i * W) + all);
          if (summed_exactly) {
            vf share = load(scaled + r * block.ld + j + i * W);
            vf old = load(kept + j + i * W), rate = phi.rate(old);
            if (block.floor[r] != 0.0f) rate = x[i] / (phi.value(old) - block.floor[r]);
            s += share == 0.0f ? vf{} : share * (block.power[r] * rate);
          }
          store(ds + j + i * W, s);
        });
      };
      int64_t j = keys.low;
      for (; j + 4 * W <= keys.high; j += 4 * W) some(j, std::integral_constant<int, 4>{});
      for (; j < keys.high; j += W) some(j, std::integral_constant<int, 1>{});
    });
  }

  void add_bias(int64_t at, int64_t n, const Array& to) {
    for (int64_t r = 0; r < block.n; ++r) {
      float* row = static_cast<float*>(const_cast<void*>(to.data)) + block.b * to.stride[0] + block.h * to.stride[1] +
                   (block.start + r) * to.stride[2];
      for (int64_t j = 0; j < n; ++j) row[(block.base + at + j) * to.stride[3]] += slopes[r * LDC + j];
    }
  }

  void finish_rows(const Gradients& to) {
    const Problem& p = block.p;
    int64_t first = (block.b * p.heads + block.h) * p.query_length + block.start;
    for (int64_t r = 0; r < block.n; ++r) {
      float *grad = query_grads + r * block.width, *direction = block.direction + r * block.width;
      for (int64_t d = 0; d < block.width; d += W) store(grad + d, load(grad + d) * block.factor[r]);
      if (to.head_scale) to.head_scale[first + r] = dot(grad, direction, block.width);
      if (to.power) to.power[first + r] = power_grad[r];
      if (p.head_scale)
        for (int64_t d = 0; d < block.width; d += W) store(grad + d, load(grad + d) * p.head_scale[block.h]);
      if (p.cosine) normalise_backward(grad, direction, block.inverse_norm[r], p.head_dim);
      write_row(to.query, p.dtype, (first + r) * p.head_dim, grad, p.head_dim);
    }
  }
};

}  // namespace softfocus
