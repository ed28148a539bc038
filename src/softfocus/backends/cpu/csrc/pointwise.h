// phi as the kernels need it: what is kept of a score between the passes, phi and its slope from what is kept. Every phi here
// is non-negative; adding one is a struct and a line in `with_phi`: docs/adding-a-phi.md.
#pragma once

#include "vector.h"

namespace softfocus {

inline vf positive(vf s) { return max(vf{}, s); }  // a NaN stays one

constexpr float TAIL = -20.0f;  // far below zero, where softplus and sigmoid are e^s
constexpr float SMALLEST = std::numeric_limits<float>::min();

// What every phi has; `keep` and `slope` turn N vectors in place. LASER asks for two more, which are right where phi itself is too
// small for a float: `rate`, phi' / phi from what is kept (0 where there is no weight), and `log`, of phi, from the score.
template <typename Phi>
struct Pointwise {
  static constexpr bool after_maximum = false;
  static constexpr bool runs_along_exp = false;  // far below zero phi(s) = e^s: rows that lie there take e^(s - max)
  static constexpr bool vanishes = false;        // phi(s) = 0 for all s < 0
  static constexpr bool keeps_scores = false;    // those above 0 at least
  static constexpr float hidden = 0.0f;          // what stands for a key that cannot be seen
  static vf keep(vf s) { return s; }
  static vf value(vf kept) { return kept; }
  static vf log(vf s) {
    return s < TAIL ? s : logarithm(Phi::value(Phi::keep(s)));
  }
  template <int N>
  __attribute__((always_inline)) static void keep(vf (&s)[N]) {
    each<N>([&](int i) { s[i] = Phi::keep(s[i]); });
  }
  template <int N>
  __attribute__((always_inline)) static void slope(vf (&kept)[N]) {
    each<N>([&](int i) { kept[i] = Phi::slope(kept[i]); });
  }
};

struct Exp : Pointwise<Exp> {  // with the l1 norm the scores are kept first, and e^(s - max) once the maximum is known
  using Pointwise::keep, Pointwise::slope;
  static constexpr bool after_maximum = true;
  static vf keep(vf s) { return exponential(s); }
  static vf slope(vf kept) { return kept; }
  static vf rate(vf) { return splat(1.0f); }
  static vf log(vf s) { return s; }
};

struct Softplus : Pointwise<Softplus> {
  static constexpr bool runs_along_exp = true;
  static vf keep(vf s) {
    vf x[1] = {s};
    keep(x);
    return x[0];
  }
  template <int N>
  __attribute__((always_inline)) static void keep(vf (&s)[N]) {
    vf y[N];
    log1p_exp(s, y);
    each<N>([&](int i) { s[i] = s[i] < -87.0f ? vf{} : positive(s[i]) + y[i]; });  // as exp_negative has it
  }
  template <int N>
  __attribute__((always_inline)) static void slope(vf (&kept)[N]) {
    one_minus_exp(kept);  // sigmoid(s)
  }
  static vf rate(vf kept) {
    vf x[1] = {kept};
    slope(x);
    return kept == 0.0f ? splat(1.0f) : x[0] / kept;
  }
};

struct Sigmoid : Pointwise<Sigmoid> {  // near 1 its slope cannot be had from its value, so the score itself is kept
  using Pointwise::keep, Pointwise::slope;
  static constexpr bool runs_along_exp = true;
  static constexpr float hidden = -INF;
  static constexpr bool keeps_scores = true;
  static vf value(vf s) {
    vf e = exp_negative(-absolute(s));
    return (s < 0.0f ? e : splat(1.0f)) / (1.0f + e);
  }
  static vf slope(vf s) {
    vf e = exp_negative(-absolute(s));
    return e / ((1.0f + e) * (1.0f + e));
  }
  static vf rate(vf s) {
    vf e = exp_negative(-absolute(s));
    return (s < 0.0f ? splat(1.0f) : e) / (1.0f + e);
  }
};

struct Relu : Pointwise<Relu> {
  using Pointwise::keep, Pointwise::slope;
  static constexpr bool vanishes = true, keeps_scores = true;
  static vf keep(vf s) { return positive(s); }
  static vf slope(vf kept) { return kept > 0.0f ? splat(1.0f) : vf{}; }
  static vf rate(vf kept) { return kept < SMALLEST ? vf{} : 1.0f / kept; }
  static vf log(vf s) { return s < SMALLEST ? splat(-INF) : logarithm(s); }
};

struct Relu2 : Pointwise<Relu2> {
  using Pointwise::keep, Pointwise::slope;
  static constexpr bool vanishes = true, keeps_scores = true;
  static vf keep(vf s) { return positive(s); }
  static vf value(vf kept) { return kept * kept; }
  static vf slope(vf kept) { return 2.0f * kept; }
  static vf rate(vf kept) { return 2.0f * Relu::rate(kept); }
  static vf log(vf s) { return 2.0f * Relu::log(s); }
};

struct Relu6 : Pointwise<Relu6> {
  using Pointwise::keep, Pointwise::slope;
  static constexpr bool vanishes = true, keeps_scores = true;
  static vf keep(vf s) { return min(splat(6.0f), positive(s)); }
  static vf slope(vf kept) { return kept > 0.0f ? (kept < 6.0f ? splat(1.0f) : vf{}) : vf{}; }
  static vf rate(vf kept) { return kept < 6.0f ? Relu::rate(kept) : vf{}; }
  static vf log(vf s) { return Relu::log(keep(s)); }
};

// Calls f with the phi of a number, its place among the names of pointwise.FUSED. It is not called for any other.
template <typename F>
inline void with_phi(int32_t number, F&& f) {
  switch (number) {
    case 0: return f(Exp{});
    case 1: return f(Softplus{});
    case 2: return f(Sigmoid{});
    case 3: return f(Relu{});
    case 4: return f(Relu2{});
    case 5: return f(Relu6{});
  }
}

}  // namespace softfocus
