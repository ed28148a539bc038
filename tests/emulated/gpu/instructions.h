// What each instruction does to the registers of a warp's lanes.
// Over 400 lines: one table of instructions.
#pragma once

#include <algorithm>

#include "memory.h"

template <class To, class From, class F>
Step unary(const Statement& s, F f) {
  int d = s.operands.at(0).slot, a = s.operands.at(1).slot;
  return [=](Warp& w, uint32_t mask) {
    each_lane(mask, [&](int l) { w.registers[d][l] = bits_of(To(f(low<From>(w.registers[a][l])))); });
  };
}

template <class To, class From, class F>
Step binary(const Statement& s, F f) {
  int d = s.operands.at(0).slot, a = s.operands.at(1).slot, b = s.operands.at(2).slot;
  return [=](Warp& w, uint32_t mask) {
    each_lane(mask, [&](int l) {
      w.registers[d][l] = bits_of(To(f(low<From>(w.registers[a][l]), low<From>(w.registers[b][l]))));
    });
  };
}

template <class To, class From, class F>
Step ternary(const Statement& s, F f) {
  int d = s.operands.at(0).slot, a = s.operands.at(1).slot, b = s.operands.at(2).slot, c = s.operands.at(3).slot;
  return [=](Warp& w, uint32_t mask) {
    each_lane(mask, [&](int l) {
      auto& r = w.registers;
      r[d][l] = bits_of(To(f(low<From>(r[a][l]), low<From>(r[b][l]), r[c][l])));
    });
  };
}

// Calls make<T>() for the type of that name.
#define WITH_INTEGER(name, make)                                                   \
  if (name == "s16") return make.template operator()<int16_t>();                   \
  if (name == "u16" || name == "b16") return make.template operator()<uint16_t>(); \
  if (name == "s32") return make.template operator()<int32_t>();                   \
  if (name == "u32" || name == "b32") return make.template operator()<uint32_t>(); \
  if (name == "s64") return make.template operator()<int64_t>();                   \
  if (name == "u64" || name == "b64") return make.template operator()<uint64_t>();
#define WITH_FLOAT(name, make)                                  \
  if (name == "f32") return make.template operator()<float>();  \
  if (name == "f64") return make.template operator()<double>(); \
  if (name == "f16") return make.template operator()<Half>();   \
  if (name == "bf16") return make.template operator()<Brain>();

template <class T>
constexpr bool is_float = !std::is_integral_v<T>;

// One rounding, whatever the type: float's results are taken in double.
template <class T>
T rounded(double x, bool flush) {
  if constexpr (std::is_same_v<T, float>)
    return flush ? flushed(float(x)) : float(x);
  else
    return T(x);
}

template <class T>
double taken(T x, bool flush) {
  if constexpr (std::is_same_v<T, float>)
    return flush ? flushed(x) : x;
  else
    return double(x);
}

// a b + c rounded once: the exact product of floats fits double, its sum with c may round twice,
// which 2^-29 of cases see.
template <class T>
T fused(T a, T b, T c, bool flush) {
  if constexpr (std::is_same_v<T, float>) {
    if (flush) return flushed(std::fma(flushed(a), flushed(b), flushed(c)));
    return std::fma(a, b, c);
  } else {
    return T(double(a) * double(b) + double(c));
  }
}

template <class T>
T extreme(T a, T b, bool largest, bool nan) {
  if constexpr (is_float<T>) {
    double x = double(a), y = double(b);
    if (std::isnan(x) || std::isnan(y)) return nan || (std::isnan(x) && std::isnan(y)) ? T(NAN) : std::isnan(x) ? b : a;
    if (x == 0 && y == 0) return std::signbit(x) == largest ? b : a;  // -0 < 0
    return (x > y) == largest ? a : b;
  } else {
    return (a > b) == largest ? a : b;
  }
}

// Instructions on two numbers of a register are done on each.
template <class T, class F>
uint64_t on_both(F f, uint64_t a, uint64_t b, uint64_t c) {
  uint64_t result = 0;
  for (int half = 0; half < 2; ++half)
    result |= (bits_of(T(f(low<T>(a >> 16 * half), low<T>(b >> 16 * half), low<T>(c >> 16 * half)))) & 0xffff)
              << 16 * half;
  return result;
}

inline void only(const Statement& s, std::initializer_list<const char*> known) {
  for (size_t n = 1; n + 1 < s.words.size(); ++n)
    if (std::none_of(known.begin(), known.end(), [&](const char* word) { return s.words[n] == word; })) unknown();
}

inline Step arithmetic(const Statement& s) {
  const char* names[] = {"fma", "add", "sub", "mul", "neg", "abs", "min", "max"};
  enum { FMA, ADD, SUB, MUL, NEG, ABS, MIN, MAX };
  int op = int(std::find(names, names + 8, s.words[0]) - names);
  bool flush = s.has("ftz"), nan = s.has("NaN"), saturated = s.has("sat");
  only(s, {"rn", "ftz", "NaN", "sat"});
  auto plain = [=]<class T>(T a, T b, T c) -> T {
    double x = taken(a, flush), y = taken(b, flush);
    switch (op) {
      case FMA:
        return fused(a, b, c, flush);
      case ADD:
        return rounded<T>(x + y, flush);
      case SUB:
        return rounded<T>(x - y, flush);
      case MUL:
        return rounded<T>(x * y, flush);
      case NEG:
        return rounded<T>(-x, flush);
      case ABS:
        return rounded<T>(std::fabs(x), flush);
      default:
        return extreme(a, b, op == MAX, nan);
    }
  };
  auto apply = [=]<class T>(T a, T b, T c) -> T {
    T x = plain(a, b, c);
    if (saturated) return double(x) > 0 ? T(std::min(double(x), 1.0)) : T(0);  // NaN too becomes 0
    return x;
  };
  if (s.type() == "f16x2" || s.type() == "bf16x2") {
    int d = s.operands[0].slot, a = s.operands[1].slot, b = s.operands[s.operands.size() > 2 ? 2 : 1].slot,
        c = s.operands[s.operands.size() > 3 ? 3 : 1].slot;
    bool brain = s.type() == "bf16x2";
    return [=](Warp& w, uint32_t mask) {
      auto& r = w.registers;
      each_lane(mask, [&](int l) {
        r[d][l] =
            brain ? on_both<Brain>(apply, r[a][l], r[b][l], r[c][l]) : on_both<Half>(apply, r[a][l], r[b][l], r[c][l]);
      });
    };
  }
  auto make = [&]<class T>() -> Step {
    if (s.operands.size() == 2) return unary<T, T>(s, [=](T a) { return apply(a, a, a); });
    if (s.operands.size() == 3) return binary<T, T>(s, [=](T a, T b) { return apply(a, b, b); });
    return ternary<T, T>(s, [=](T a, T b, uint64_t c) { return apply(a, b, low<T>(c)); });
  };
  WITH_FLOAT(s.type(), make)
  unknown();
}

inline Step integers(const Statement& s) {
  auto& op = s.words[0];
  only(s, {"lo", "hi", "wide", "relu"});
  bool relu = s.has("relu"), high = s.has("hi"), wide = s.has("wide");
  auto make = [&]<class T>() -> Step {
    using U = std::make_unsigned_t<T>;
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    if (op == "neg") return unary<T, T>(s, [](T a) { return T(U(0) - U(a)); });
    if (op == "abs") return unary<T, T>(s, [](T a) { return a < T(0) ? T(U(0) - U(a)) : a; });
    if (op == "add") return binary<T, T>(s, [](T a, T b) { return T(U(a) + U(b)); });
    if (op == "sub") return binary<T, T>(s, [](T a, T b) { return T(U(a) - U(b)); });
    if (op == "max" || op == "min")
      return binary<T, T>(s, [=](T a, T b) {
        T x = extreme(a, b, op == "max", false);
        return relu && x < T(0) ? T(0) : x;
      });
    if (op == "div" || op == "rem")
      return binary<T, T>(s, [=](T a, T b) {
        if (b == 0) throw Error("division by zero");
        return op == "div" ? T(a / b) : T(a % b);
      });
    if (high) {
      auto upper = [](T a, T b) { return T((__int128(a) * __int128(b)) >> (8 * sizeof(T))); };
      if (op == "mul") return binary<T, T>(s, upper);
      return ternary<T, T>(s, [=](T a, T b, uint64_t c) { return T(U(upper(a, b)) + U(c)); });
    }
    if (op == "mul" && wide) return binary<Wide, T>(s, [](T a, T b) { return Wide(a) * Wide(b); });
    if (op == "mad" && wide)
      return ternary<Wide, T>(s, [](T a, T b, uint64_t c) { return Wide(uint64_t(Wide(a) * Wide(b)) + c); });
    if (op == "mul") return binary<T, T>(s, [](T a, T b) { return T(U(uint64_t(a) * uint64_t(b))); });
    if (op == "mad") return ternary<T, T>(s, [](T a, T b, uint64_t c) { return T(U(uint64_t(a) * uint64_t(b) + c)); });
    unknown();
  };
  WITH_INTEGER(s.type(), make)
  unknown();
}

inline Step bitwise(const Statement& s) {
  auto& op = s.words[0];
  if (s.type() == "pred") {
    int d = s.operands[0].slot, a = s.operands[1].slot, b = s.operands.back().slot;
    bool not_a = s.operands[1].negated, not_b = s.operands.back().negated;
    return [=](Warp& w, uint32_t mask) {
      each_lane(mask, [&](int l) {
        bool x = (w.registers[a][l] & 1) != not_a, y = (w.registers[b][l] & 1) != not_b;
        w.registers[d][l] = op == "and" ? x && y : op == "or" ? x || y : op == "xor" ? x != y : op == "not" ? !x : x;
      });
    };
  }
  auto make = [&]<class T>() -> Step {
    constexpr uint32_t width = 8 * sizeof(T);
    if (op == "not") return unary<T, T>(s, [](T a) { return T(~a); });
    if (op == "popc") return unary<uint32_t, T>(s, [](T a) { return uint32_t(__builtin_popcountll(a)); });
    if (op == "brev")
      return unary<T, T>(s, [](T a) {
        T r = 0;
        for (uint32_t n = 0; n < width; ++n) r |= T(a >> n & 1) << (width - 1 - n);
        return r;
      });
    if (op == "and") return binary<T, T>(s, [](T a, T b) { return T(a & b); });
    if (op == "or") return binary<T, T>(s, [](T a, T b) { return T(a | b); });
    if (op == "xor") return binary<T, T>(s, [](T a, T b) { return T(a ^ b); });
    int d = s.operands[0].slot, a = s.operands[1].slot, b = s.operands[2].slot;
    if (op == "shl" || op == "shr") {
      bool left = op == "shl";
      return [=](Warp& w, uint32_t mask) {
        each_lane(mask, [&](int l) {
          T x = low<T>(w.registers[a][l]);
          uint32_t by = uint32_t(w.registers[b][l]);
          T beyond = std::is_signed_v<T> && x < T(0) ? T(-1) : T(0);
          w.registers[d][l] = bits_of(T(left ? (by < width ? T(x << by) : T(0)) : (by < width ? T(x >> by) : beyond)));
        });
      };
    }
    if (op == "bfe") {
      int c = s.operands[3].slot;
      return [=](Warp& w, uint32_t mask) {
        each_lane(mask, [&](int l) {
          auto& r = w.registers;
          uint32_t from = r[b][l] & 255, count = r[c][l] & 255;
          uint64_t x = uint64_t(int64_t(low<T>(r[a][l])));
          if constexpr (!std::is_signed_v<T>) x = low<T>(r[a][l]);
          uint64_t part = from < 64 ? (std::is_signed_v<T> ? uint64_t(int64_t(x) >> from) : x >> from) : 0;
          if (count < 64) part &= (uint64_t(1) << count) - 1;
          if (std::is_signed_v<T> && count && count < 64 && part >> (count - 1) & 1) part |= ~uint64_t(0) << count;
          r[d][l] = bits_of(T(part));
        });
      };
    }
    unknown();
  };
  WITH_INTEGER(s.type(), make)
  unknown();
}

inline Step permuted(const Statement& s) {
  if (s.words.size() != 2) unknown();
  return ternary<uint32_t, uint32_t>(s, [](uint32_t a, uint32_t b, uint64_t how) {
    uint64_t both = a | uint64_t(b) << 32;
    uint32_t result = 0;
    for (int n = 0; n < 4; ++n) {
      uint32_t which = how >> 4 * n & 15, byte = both >> 8 * (which & 7) & 255;
      if (which & 8) byte = byte & 128 ? 255 : 0;
      result |= byte << 8 * n;
    }
    return result;
  });
}

enum class Compare { EQ, NE, LT, LE, GT, GE, NUM, NAN_ };

// Whether a name means it also where one is NaN.
inline std::pair<Compare, bool> comparison(const std::string& name) {
  static const std::map<std::string, Compare> names = {
      {"eq", Compare::EQ}, {"ne", Compare::NE}, {"lt", Compare::LT},   {"le", Compare::LE},
      {"gt", Compare::GT}, {"ge", Compare::GE}, {"lo", Compare::LT},   {"ls", Compare::LE},
      {"hi", Compare::GT}, {"hs", Compare::GE}, {"num", Compare::NUM}, {"nan", Compare::NAN_}};
  bool unordered = name.size() == 3 && name.back() == 'u';
  auto found = names.find(unordered ? name.substr(0, 2) : name);
  if (found == names.end()) unknown();
  return {found->second, unordered};
}

template <class T>
bool compares(std::pair<Compare, bool> how, T a, T b) {
  auto ordered = [&](auto x, auto y) {
    switch (how.first) {
      case Compare::EQ:
        return x == y;
      case Compare::NE:
        return x != y;
      case Compare::LT:
        return x < y;
      case Compare::LE:
        return x <= y;
      case Compare::GT:
        return x > y;
      case Compare::GE:
        return x >= y;
      default:
        return how.first == Compare::NUM;
    }
  };
  if constexpr (is_float<T>) {
    if (std::isnan(double(a)) || std::isnan(double(b))) return how.second || how.first == Compare::NAN_;
    return ordered(double(a), double(b));
  } else {
    return ordered(a, b);
  }
}

inline Step predicate(const Statement& s) {
  auto how = comparison(s.words.at(1));
  bool flush = s.has("ftz");
  for (size_t n = 2; n + 1 < s.words.size(); ++n)
    if (s.words[n] != "ftz") unknown();
  auto d = slots_of(s.operands[0]);
  int a = s.operands[1].slot, b = s.operands[2].slot;
  if (s.type() == "f16x2" || s.type() == "bf16x2") {
    bool brain = s.type() == "bf16x2";
    return [=](Warp& w, uint32_t mask) {
      each_lane(mask, [&](int l) {
        for (int half = 0; half < 2; ++half) {
          uint64_t x = w.registers[a][l] >> 16 * half, y = w.registers[b][l] >> 16 * half;
          w.registers[d.at(half)][l] =
              brain ? compares(how, low<Brain>(x), low<Brain>(y)) : compares(how, low<Half>(x), low<Half>(y));
        }
      });
    };
  }
  if (d.size() != 1) unknown();
  auto make = [&]<class T>() -> Step {
    return [=](Warp& w, uint32_t mask) {
      each_lane(mask, [&](int l) {
        T x = low<T>(w.registers[a][l]), y = low<T>(w.registers[b][l]);
        if constexpr (std::is_same_v<T, float>)
          if (flush) x = flushed(x), y = flushed(y);
        w.registers[d[0]][l] = compares(how, x, y);
      });
    };
  };
  WITH_INTEGER(s.type(), make)
  WITH_FLOAT(s.type(), make)
  unknown();
}

inline Step selected(const Statement& s) {
  int d = s.operands[0].slot, a = s.operands[1].slot, b = s.operands[2].slot, p = s.operands[3].slot;
  return [=](Warp& w, uint32_t mask) {
    each_lane(mask, [&](int l) { w.registers[d][l] = w.registers[w.registers[p][l] & 1 ? a : b][l]; });
  };
}

// The lists of a mov have the lower bits first.
inline Step moved(const Statement& s) {
  auto& to = s.operands[0];
  auto& from = s.operands[1];
  int width = s.type() == "b64" || s.type() == "u64" ? 64 : s.type() == "b16" || s.type() == "u16" ? 16 : 32;
  if (from.kind == Operand::LIST) {
    auto parts = slots_of(from);
    int d = to.slot, each = width / int(parts.size());
    return [=](Warp& w, uint32_t mask) {
      each_lane(mask, [&](int l) {
        uint64_t all = 0;
        for (size_t n = 0; n < parts.size(); ++n)
          all |= (w.registers[parts[n]][l] & ((uint64_t(1) << each) - 1)) << each * n;
        w.registers[d][l] = all;
      });
    };
  }
  int a = from.slot;
  if (to.kind == Operand::LIST) {
    auto parts = to.list;
    int each = width / int(parts.size());
    return [=](Warp& w, uint32_t mask) {
      each_lane(mask, [&](int l) {
        for (size_t n = 0; n < parts.size(); ++n)
          if (parts[n].kind != Operand::NONE)
            w.registers[parts[n].slot][l] = w.registers[a][l] >> each * n & ((uint64_t(1) << each) - 1);
      });
    };
  }
  int d = to.slot;
  return [=](Warp& w, uint32_t mask) { each_lane(mask, [&](int l) { w.registers[d][l] = w.registers[a][l]; }); };
}

template <class To, class From>
Step conversion(const Statement& s) {
  bool flush = s.has("ftz"), down = s.has("rmi"), up = s.has("rpi"), zero = s.has("rzi"), near = s.has("rni");
  if constexpr (is_float<From> && !is_float<To>) {
    if (!(down || up || zero || near)) unknown();
    return unary<To, From>(s, [=](From a) {
      double x = taken(a, flush);
      x = down ? std::floor(x) : up ? std::ceil(x) : zero ? std::trunc(x) : std::nearbyint(x);
      double least = double(std::numeric_limits<To>::min()), most = double(std::numeric_limits<To>::max());
      if (std::isnan(x)) return To(0);
      return x <= least ? std::numeric_limits<To>::min() : x >= most ? std::numeric_limits<To>::max() : To(x);
    });
  } else if constexpr (is_float<From> || is_float<To>) {
    return unary<To, From>(s, [=](From a) {
      double x = taken(a, flush);
      if (down) x = std::floor(x);
      if (up) x = std::ceil(x);
      if (zero) x = std::trunc(x);
      if (near) x = std::nearbyint(x);
      return rounded<To>(x, flush);
    });
  } else {
    return unary<To, From>(s, [](From a) { return To(a); });
  }
}

inline Step converted(const Statement& s) {
  auto& to = s.words[s.words.size() - 2];
  auto& from = s.type();
  if (to == "tf32" && from == "f32" && s.has("rna")) return unary<uint32_t, float>(s, rounded_to_tf32);
  for (auto word : {"rz", "rna", "rm", "rp", "sat", "satfinite", "relu"})
    if (s.has(word)) unknown();
  if (to == "bf16x2" || to == "f16x2") {
    int d = s.operands[0].slot, a = s.operands[1].slot, b = s.operands[2].slot;
    bool brain = to == "bf16x2";
    if (from != "f32") unknown();
    auto half = [=](uint64_t x) {
      return (brain ? bits_of(Brain(low<float>(x))) : bits_of(Half(low<float>(x)))) & 0xffff;
    };
    return [=](Warp& w, uint32_t mask) {
      each_lane(mask, [&](int l) { w.registers[d][l] = half(w.registers[a][l]) << 16 | half(w.registers[b][l]); });
    };
  }
  auto make_to = [&]<class To>() -> Step {
    auto make_from = [&]<class From>() -> Step { return conversion<To, From>(s); };
    if (from == "s8") return make_from.template operator()<int8_t>();
    if (from == "u8") return make_from.template operator()<uint8_t>();
    WITH_INTEGER(from, make_from)
    WITH_FLOAT(from, make_from)
    unknown();
  };
  if (to == "s8") return make_to.template operator()<int8_t>();
  if (to == "u8") return make_to.template operator()<uint8_t>();
  WITH_INTEGER(to, make_to)
  WITH_FLOAT(to, make_to)
  unknown();
}

inline Step special_function(const Statement& s) {
  auto& op = s.words[0];
  bool flush = s.has("ftz"), approximate = s.has("approx");
  if (s.type() != "f32") unknown();
  only(s, {"approx", "rn", "ftz"});
  auto flushes = [=](auto f) {
    return unary<float, float>(s, [=](float x) { return flush ? flushed(f(flushed(x))) : f(x); });
  };
  auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  if (op == "ex2") return unary<float, float>(s, [=](float x) { return exp2_approx(x, flush); });
  if (op == "lg2") return unary<float, float>(s, [=](float x) { return log2_approx(x, flush); });
  if (op == "sqrt")
    return flushes(
        [=](float x) { return approximate ? off_by(std::sqrt(double(x)), 0x1p-23, bits(x)) : std::sqrt(x); });
  if (op == "rsqrt") return flushes([=](float x) { return off_by(1 / std::sqrt(double(x)), 0x1p-22, bits(x)); });
  if (op == "rcp")
    return flushes([=](float x) { return approximate ? off_by(1 / double(x), 0x1p-23, mantissa(x)) : 1.0f / x; });
  unknown();
}

inline Step divided(const Statement& s) {
  if (s.type() != "f32") return integers(s);
  only(s, {"rn", "full", "approx", "ftz"});
  if (s.has("rn")) return binary<float, float>(s, [](float a, float b) { return a / b; });
  bool full = s.has("full"), flush = s.has("ftz");
  return binary<float, float>(s, [=](float a, float b) {
    float x = quotient(flush ? flushed(a) : a, flush ? flushed(b) : b, full);
    return flush ? flushed(x) : x;
  });
}

inline Step step_of(const Statement& s) {
  auto& op = s.words[0];
  auto one_of = [&](std::initializer_list<const char*> names) {
    for (auto name : names)
      if (op == name) return true;
    return false;
  };
  char kind = s.type()[0];
  bool floating = kind == 'f' || s.type().rfind("bf16", 0) == 0;
  if (op == "div") return divided(s);
  if (floating && one_of({"add", "sub", "mul", "fma", "min", "max", "neg", "abs"})) return arithmetic(s);
  if (one_of({"add", "sub", "mul", "mad", "min", "max", "neg", "abs", "rem"})) return integers(s);
  if (one_of({"and", "or", "xor", "not", "shl", "shr", "bfe", "popc", "brev"})) return bitwise(s);
  if (one_of({"ex2", "lg2", "sqrt", "rsqrt", "rcp"})) return special_function(s);
  if (op == "mov") return s.type() == "pred" ? bitwise(s) : moved(s);
  if (op == "prmt") return permuted(s);
  if (op == "setp") return predicate(s);
  if (op == "selp") return selected(s);
  if (op == "cvt") return converted(s);
  if (op == "bar" && s.has("warp")) return [](Warp&, uint32_t) {};
  if (op == "cvta" && s.has("local") && !s.has("to"))
    return unary<uint64_t, uint64_t>(s, [](uint64_t a) { return a + LOCAL; });
  if (op == "ld") return loaded(s);
  if (op == "st") return stored(s);
  if (op == "shfl") return shuffled(s);
  if (op == "redux") return reduced(s);
  if (op == "vote") return voted(s);
  if (op == "ldmatrix") return load_matrix(s);
  if (op == "stmatrix") return store_matrix(s);
  if (op == "mma") return mma(s);
  if (op == "cp" && s.words[1] == "async" && s.words[2] == "commit_group")
    return [](Warp& w, uint32_t) { w.copies.commit(); };
  if (op == "cp" && s.words[1] == "async" && s.words[2] == "wait_group") {
    int pending = s.operands[0].slot;
    return [=](Warp& w, uint32_t) { w.copies.wait(w.registers[pending][0]); };
  }
  if (op == "cp" && s.words[1] == "async" && s.words[2] != "bulk") return copied_later(s);
  if (op == "wgmma" && s.words[1] == "mma_async") return wgmma(s);
  if (op == "wgmma" && s.words[1] == "commit_group") return [](Warp& w, uint32_t) { w.products.commit(); };
  if (op == "wgmma" && s.words[1] == "wait_group") {
    int pending = s.operands[0].slot;
    return [=](Warp& w, uint32_t) { w.products.wait(w.registers[pending][0]); };
  }
  if ((op == "wgmma" && s.words[1] == "fence") || op == "fence") return [](Warp&, uint32_t) {};
  unknown();
}
