// phi as the kernels need it: what is kept of a score between the passes, phi and its slope from what is kept. Every phi here
// is non-negative; adding one is a struct and a line in `with_phi`, and a name in the Python side's PHI.
#pragma once

#include "vector.h"

namespace softfocus {

inline vf positive(vf s) { return max(vf{}, s); }  // a NaN stays one

// What every phi has; `keep` and `slope` turn N vectors in place.
template <typename Phi>
struct Pointwise {
  static constexpr bool after_maximum = false;
  static constexpr bool runs_along_exp = false;  // far below zero phi(s) = e^s: rows that lie there take e^(s - max)
  static constexpr bool vanishes = false;        // phi(s) = 0 for all s < 0
  static constexpr float hidden = 0.0f;          // what stands for a key that cannot be seen
  static vf keep(vf s) { return s; }
  static vf value(vf kept) { return kept; }
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
};

struct Sigmoid : Pointwise<Sigmoid> {  // near 1 its slope cannot be had from its value, so the score itself is kept
  using Pointwise::keep, Pointwise::slope;
  static constexpr bool runs_along_exp = true;
  static constexpr float hidden = -INF;
  static vf value(vf s) {
    vf e = exp_negative(-absolute(s));
    return (s < 0.0f ? e : splat(1.0f)) / (1.0f + e);
  }
  static vf slope(vf s) {
    vf e = exp_negative(-absolute(s));
    return e / ((1.0f + e) * (1.0f + e));
  }
};

struct Relu : Pointwise<Relu> {
  using Pointwise::keep, Pointwise::slope;
  static constexpr bool vanishes = true;
  static vf keep(vf s) { return positive(s); }
  static vf slope(vf kept) { return kept > 0.0f ? splat(1.0f) : vf{}; }
};

struct Relu2 : Pointwise<Relu2> {
  using Pointwise::keep, Pointwise::slope;
  static constexpr bool vanishes = true;
  static vf keep(vf s) { return positive(s); }
  static vf value(vf kept) { return kept * kept; }
  static vf slope(vf kept) { return 2.0f * kept; }
};

struct Relu6 : Pointwise<Relu6> {
  using Pointwise::keep, Pointwise::slope;
  static constexpr bool vanishes = true;
  static vf keep(vf s) { return min(splat(6.0f), positive(s)); }
  static vf slope(vf kept) { return kept > 0.0f ? (kept < 6.0f ? splat(1.0f) : vf{}) : vf{}; }
};

// Calls f with the phi of a number: the order of the Python side's PHI.
template <typename F>
inline void with_phi(int32_t number, F&& f) {
  switch (number) {
    case 0: return f(Exp{});
    case 1: return f(Softplus{});
    case 2: return f(Sigmoid{});
    case 3: return f(Relu{});
    case 4: return f(Relu2{});
    default: return f(Relu6{});
  }
}

}  // namespace softfocus
