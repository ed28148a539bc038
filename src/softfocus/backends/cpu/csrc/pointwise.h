// phi as the kernels need it. A block stores one number per score, in the form from which phi and
// its derivative are best computed: the score s, phi(s), e^(s - m), or relu(s) for relu2. All phi
// here are non-negative and non-decreasing, so the largest score has the largest phi. To add a phi,
// write a struct and a line in `with_phi` (docs/adding-a-phi.md).
#pragma once

#include "elementary.h"

namespace softfocus {

inline vfloat relu(vfloat s) { return max(vfloat{}, s); }  // a NaN stays NaN

constexpr float EXP_TAIL = -20.0f;  // below it softplus and sigmoid equal e^s in float32
constexpr float MIN_NORMAL = std::numeric_limits<float>::min();

// What every phi has. `to_stored` and `derivative` also, or only, have forms that convert N vectors
// in place.
//     to_stored(s)          the stored form of a score
//     of_stored(stored)     phi(s)
//     derivative(stored)    phi'(s)
// Where e^(s - m) is stored, of_stored(), derivative() and row_sum carry e^-m, which cancels in the
// weights.
// For LASER, accurate even where phi(s) itself underflows:
//     log_value(s)               log phi(s), from the score; -inf where phi(s) is 0
//     log_derivative(stored)     phi'(s) / phi(s); finite also where phi(s) is 0
template <typename Phi>
struct Pointwise {
  // With the l1 norm e^(s - m) is stored, once m is known.
  static constexpr bool shifted_by_maximum = false;
  // phi(s) = e^s far below zero. With the l1 norm, rows whose scores all lie there store e^(s - m).
  static constexpr bool has_exp_tail = false;
  // phi(s) = 0 for all s <= 0, stored as 0: such keys have weight 0 (single_key, has_weight)
  static constexpr bool has_zeros = false;
  // to_stored() and log_value() give the same for the stored form as for s: LASER needs no s again
  static constexpr bool stored_stands_for_score = false;
  // Stored for a key that the row does not see. phi and its derivative from it must be exactly 0.
  // It must equal to_stored(-inf): compute_log_u() converts scores again that are -inf where
  // masked.
  static constexpr float stored_masked = 0.0f;
  static vfloat to_stored(vfloat s) { return s; }
  static vfloat of_stored(vfloat stored) { return stored; }
  // For a phi with an exponential tail. Every other phi defines its own.
  static vfloat log_value(vfloat s) {
    static_assert(Phi::has_exp_tail, "log phi(s) is s below EXP_TAIL only with an exponential tail");
    return s < EXP_TAIL ? s : logarithm(Phi::of_stored(Phi::to_stored(s)));
  }
  template <int N>
  __attribute__((always_inline)) static void to_stored(vfloat (&s)[N]) {
    unroll<N>([&](int i) { s[i] = Phi::to_stored(s[i]); });
  }
  template <int N>
  __attribute__((always_inline)) static void derivative(vfloat (&stored)[N]) {
    unroll<N>([&](int i) { stored[i] = Phi::derivative(stored[i]); });
  }
};

struct Exp : Pointwise<Exp> {  // softmax; without the l1 norm e^s is stored
  using Pointwise::to_stored, Pointwise::derivative;
  static constexpr bool shifted_by_maximum = true;
  static vfloat to_stored(vfloat s) { return exponential(s); }
  static vfloat derivative(vfloat stored) { return stored; }
  static vfloat log_derivative(vfloat) { return splat(1.0f); }
  static vfloat log_value(vfloat s) { return s; }
};

// phi(s) is stored. It determines phi'(s): sigmoid(s) = 1 - e^-phi(s).
struct Softplus : Pointwise<Softplus> {
  static constexpr bool has_exp_tail = true;
  static vfloat to_stored(vfloat s) {
    vfloat x[1] = {s};
    to_stored(x);
    return x[0];
  }
  template <int N>
  __attribute__((always_inline)) static void to_stored(vfloat (&s)[N]) {
    vfloat y[N];
    log1p_exp(s, y);
    // log1p_exp() clamps s at EXP_MIN; below it phi is 0, as e^s is in exp_negative().
    unroll<N>([&](int i) { s[i] = s[i] < EXP_MIN ? vfloat{} : relu(s[i]) + y[i]; });
  }
  template <int N>
  __attribute__((always_inline)) static void derivative(vfloat (&stored)[N]) {
    one_minus_exp(stored);
  }
  static vfloat log_derivative(vfloat stored) {
    vfloat x[1] = {stored};
    derivative(x);
    return stored == 0.0f ? splat(1.0f) : x[0] / stored;
  }
};

// s is stored. Where phi(s) is near 1, it does not determine phi'(s).
struct Sigmoid : Pointwise<Sigmoid> {
  using Pointwise::to_stored, Pointwise::derivative;
  static constexpr bool has_exp_tail = true;
  static constexpr float stored_masked = -INF;
  static constexpr bool stored_stands_for_score = true;
  static vfloat of_stored(vfloat s) {
    vfloat e = exp_negative(-absolute(s));
    return (s < 0.0f ? e : splat(1.0f)) / (1.0f + e);
  }
  static vfloat derivative(vfloat s) {
    vfloat e = exp_negative(-absolute(s));
    return e / ((1.0f + e) * (1.0f + e));
  }
  static vfloat log_derivative(vfloat s) {
    vfloat e = exp_negative(-absolute(s));
    return (s < 0.0f ? splat(1.0f) : e) / (1.0f + e);
  }
};

struct Relu : Pointwise<Relu> {
  using Pointwise::to_stored, Pointwise::derivative;
  static constexpr bool has_zeros = true, stored_stands_for_score = true;
  static vfloat to_stored(vfloat s) { return relu(s); }
  static vfloat derivative(vfloat stored) { return stored > 0.0f ? splat(1.0f) : vfloat{}; }
  static vfloat log_derivative(vfloat stored) { return stored < MIN_NORMAL ? vfloat{} : 1.0f / stored; }
  static vfloat log_value(vfloat s) { return s < MIN_NORMAL ? splat(-INF) : logarithm(s); }
};

struct Relu2 : Pointwise<Relu2> {  // relu(s)^2; relu(s) is stored
  using Pointwise::to_stored, Pointwise::derivative;
  static constexpr bool has_zeros = true, stored_stands_for_score = true;
  static vfloat to_stored(vfloat s) { return relu(s); }
  static vfloat of_stored(vfloat stored) { return stored * stored; }
  static vfloat derivative(vfloat stored) { return 2.0f * stored; }
  static vfloat log_derivative(vfloat stored) { return 2.0f * Relu::log_derivative(stored); }
  static vfloat log_value(vfloat s) { return 2.0f * Relu::log_value(s); }
};

struct Relu6 : Pointwise<Relu6> {  // min(relu(s), 6)
  using Pointwise::to_stored, Pointwise::derivative;
  static constexpr bool has_zeros = true, stored_stands_for_score = true;
  static vfloat to_stored(vfloat s) { return min(splat(6.0f), relu(s)); }
  static vfloat derivative(vfloat stored) {
    return stored > 0.0f ? (stored < 6.0f ? splat(1.0f) : vfloat{}) : vfloat{};
  }
  static vfloat log_derivative(vfloat stored) { return stored < 6.0f ? Relu::log_derivative(stored) : vfloat{}; }
  static vfloat log_value(vfloat s) { return Relu::log_value(to_stored(s)); }
};

// Calls f with the phi of a number, its index in pointwise.FUSED. For any other number f is not
// called, and an entry point would report that memory ran out. The backend sends no other number:
// it raises a RuntimeError unless count_phi() is the length of FUSED (__init__.py).
template <typename F>
constexpr void with_phi(int64_t number, F&& f) {
  switch (number) {
    case 0:
      return f(Exp{});
    case 1:
      return f(Softplus{});
    case 2:
      return f(Sigmoid{});
    case 3:
      return f(Relu{});
    case 4:
      return f(Relu2{});
    case 5:
      return f(Relu6{});
  }
}

// How many phi with_phi() has a case for
constexpr int64_t count_phi() {
  int64_t n = 0;
  for (bool known = true; known; n += known) {
    known = false;
    with_phi(n, [&](auto) { known = true; });
  }
  return n;
}

}  // namespace softfocus
