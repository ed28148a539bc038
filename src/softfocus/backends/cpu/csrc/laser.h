// LASER's arithmetic: out = log(A e^(V - M)) + M. LASER has the l1 norm (mechanism.py) and no
// dropout (validation.py). For some rows and columns the matrix product may overflow or lose all
// digits. These outputs are computed again as a log-sum-exp, the exact sum.
#pragma once

#include <algorithm>
#include <vector>

#include "elementary.h"

namespace softfocus {

// How far from 0 the maxima of columns may be with M = 0: e^-20 and e^20 are far from underflow and
// overflow. column_shift.h chooses M.
constexpr float SHIFT_TOLERANCE = 20.0f;
// A value above M + 30 is large: a (row, column) that gives it weight takes the exact sum, and so
// does a sum below SMALL_SUM. Both limits follow from underflow. A weight below 1e-38 underflows.
// On a value up to M + 30 it would add at most 1e-38 e^30 = 1e-25 to the sum. Half a million such
// keys add 5e-20, less than the rounding of a sum of 1e-12, 6e-20.
constexpr float LARGE_VALUE = 30.0f;
constexpr float SMALL_SUM = 1e-12f;
// Exponents are clamped here: e^80 times a weight of 0 is 0, not NaN.
constexpr float MAX_EXPONENT = 80.0f;

// Writes e^(x - shift) of a row of values x [width] to `to`, which may be x; `width` is a multiple
// of W. Calls large(column) for each large value; large(column) may also be called for padding
// columns. A null shift is 0.
template <typename F>
inline void exp_row(const float* x, const float* shift, int64_t width, float* to, F&& large) {
  for (int64_t d = 0; d < width; d += W) {
    vfloat y = load(x + d) - (shift ? load(shift + d) : vfloat{});
    vint above = y > LARGE_VALUE;
    if (any(above))
      for (int i = 0; i < W; ++i)
        if (above[i]) large(d + i);
    store(to + d, exponential(min(y, splat(MAX_EXPONENT))));
  }
}

// e^x for x <= 0, or 0 where float rounds it to 0. Most terms of an exact sum are that small.
inline double exponential_or_zero(double x) { return x < -105.0 ? 0.0 : std::exp(x); }

// log sum_i e^term(i), 0 <= i < n, in double: values may be large. At least one term is finite.
template <typename F>
inline double log_sum_exp(int64_t n, F&& term) {
  double maximum = -INF, sum = 0.0;
  for (int64_t i = 0; i < n; ++i) maximum = std::max(maximum, term(i));
  for (int64_t i = 0; i < n; ++i) sum += exponential_or_zero(term(i) - maximum);
  return maximum + std::log(sum);
}

// The keys of a row that have weight, for its exact sums: their offsets and log u^p, which is log A
// up to a constant of the row.
struct WeightedKeys {
  std::vector<int64_t> offsets;
  std::vector<double> log_weights;

  int64_t size() const { return int64_t(offsets.size()); }
  void clear() { offsets.clear(), log_weights.clear(); }
  void add(int64_t offset, double log_weight) { offsets.push_back(offset), log_weights.push_back(log_weight); }
};

}  // namespace softfocus
