// Matrices spread over the lanes of a warp: ldmatrix, mma, wgmma.
#pragma once

#include "machine.h"
#include "numbers.h"

inline std::vector<int> slots_of(const Operand& one) {
  std::vector<int> slots;
  if (one.kind != Operand::LIST) return {one.slot};
  for (auto& x : one.list) slots.push_back(x.slot);
  return slots;
}

inline void together(uint32_t mask, const char* what) {
  if (mask != ALL) throw Error(std::string(what) + " needs all lanes of a warp");
}

// 8 x 8 matrices of 16 bits, a row at the address of each lane; lane l gets two elements of row l /
// 4, or of column.
inline Step load_matrix(const Statement& s) {
  auto to = slots_of(s.operands[0]);
  auto from = s.operands[1];
  bool turned = s.has("trans");
  return [=](Warp& w, uint32_t mask) {
    together(mask, "ldmatrix");
    for (size_t m = 0; m < to.size(); ++m) {
      uint16_t matrix[8][8];
      for (int row = 0; row < 8; ++row) {
        uint64_t at = uint32_t(w.registers[from.slot][8 * m + row] + from.offset);
        w.block.read_by(w.number, at, 16);
        std::memcpy(matrix[row], &w.block.shared[at], 16);
      }
      for (int lane = 0; lane < LANES; ++lane) {
        int i = lane / 4, j = lane % 4 * 2;
        uint32_t first = turned ? matrix[j][i] : matrix[i][j], second = turned ? matrix[j + 1][i] : matrix[i][j + 1];
        w.registers[to[m]][lane] = first | second << 16;
      }
    }
  };
}

inline Step store_matrix(const Statement& s) {
  auto to = s.operands[0];
  auto from = slots_of(s.operands[1]);
  bool turned = s.has("trans");
  return [=](Warp& w, uint32_t mask) {
    together(mask, "stmatrix");
    for (size_t m = 0; m < from.size(); ++m) {
      uint16_t matrix[8][8];
      for (int lane = 0; lane < LANES; ++lane) {
        int i = lane / 4, j = lane % 4 * 2;
        uint32_t both = uint32_t(w.registers[from[m]][lane]);
        (turned ? matrix[j][i] : matrix[i][j]) = uint16_t(both);
        (turned ? matrix[j + 1][i] : matrix[i][j + 1]) = uint16_t(both >> 16);
      }
      for (int row = 0; row < 8; ++row)
        w.block.written_by(w.number, uint32_t(w.registers[to.slot][8 * m + row] + to.offset), 16, matrix[row]);
    }
  };
}

// What a register of an operand holds: two halves, or one number of tf32.
enum class Element { HALF, BRAIN, TF32 };

inline Element element(const std::string& name) {
  if (name == "f16") return Element::HALF;
  if (name == "bf16") return Element::BRAIN;
  if (name == "tf32") return Element::TF32;
  throw Error("products of " + name + " are not emulated");
}

inline double number(Element kind, uint32_t bits, int which) {
  if (kind == Element::TF32) return tf32(bits);
  uint16_t half = uint16_t(bits >> 16 * which);
  return kind == Element::HALF ? double(low<Half>(half)) : double(std::bit_cast<float>(uint32_t(half) << 16));
}

// A warp's 16 rows of the left operand, from four registers of each lane.
using Left = std::array<std::array<double, 16>, 16>;

inline Left left_of(const Warp& w, const std::vector<int>& slots, Element kind) {
  Left a{};
  int each = kind == Element::TF32 ? 1 : 2;  // elements of a register
  for (int lane = 0; lane < LANES; ++lane)
    for (int r = 0; r < 4; ++r)
      for (int e = 0; e < each; ++e)
        a[lane / 4 + 8 * (r % 2)][each * (lane % 4 + 4 * (r / 2)) + e] =
            number(kind, uint32_t(w.registers[slots[r]][lane]), e);
  return a;
}

// c += a b for 8 columns: registers c[0..3] of each lane have rows l / 4 and 8 + l / 4, columns 2
// (l % 4) and the next.
inline void multiply(Warp& w, const int* d, const int* c, const Left& a, const double (*b)[8], int depth, bool add) {
  for (int lane = 0; lane < LANES; ++lane)
    for (int r = 0; r < 4; ++r) {
      int row = lane / 4 + 8 * (r / 2), column = lane % 4 * 2 + r % 2;
      double sum = add ? double(low<float>(w.registers[c[r]][lane])) : 0.0;
      for (int k = 0; k < depth; ++k) sum += a[row][k] * b[k][column];
      w.registers[d[r]][lane] = bits_of(cut_off(sum));
    }
}

inline Step mma(const Statement& s) {
  bool wide = s.has("m16n8k16");
  auto& kinds = s.words;
  Element kind = element(kinds[kinds.size() - 2]);
  if (s.type() != "f32" || (!wide && !(s.has("m16n8k8") && kind == Element::TF32))) throw Error("not emulated");
  auto d = slots_of(s.operands[0]), a = slots_of(s.operands[1]), b = slots_of(s.operands[2]),
       c = slots_of(s.operands[3]);
  return [=](Warp& w, uint32_t mask) {
    together(mask, "mma");
    double right[16][8];
    int each = kind == Element::TF32 ? 1 : 2;
    for (int lane = 0; lane < LANES; ++lane)
      for (int r = 0; r < 2; ++r)
        for (int e = 0; e < each; ++e)
          right[each * (lane % 4 + 4 * r) + e][lane / 4] = number(kind, uint32_t(w.registers[b[r]][lane]), e);
    multiply(w, d.data(), c.data(), left_of(w, a, kind), right, 8 * each, true);
  };
}

// An operand of wgmma in shared memory, as its descriptor says: cores of 8 rows by 16 bytes,
// swizzled.
class Described {
 public:
  Described(uint64_t bits, Element kind, bool turned)
      : start_((bits & 0x3fff) << 4),
        leading_((bits >> 16 & 0x3fff) << 4),
        stride_((bits >> 32 & 0x3fff) << 4),
        bytes_(kind == Element::TF32 ? 4 : 2),
        turned_(turned),
        kind_(kind) {
    int mode = int(bits >> 62);  // 0: none, 1: 128 bytes, 2: 64, 3: 32
    swizzle_ = mode == 0 ? 0 : 4 - mode;
    if (bits >> 49 & 7) throw Error("wgmma: a base offset is not emulated");
    if (turned && mode == 0) throw Error("wgmma: turned without a swizzle is not emulated");
  }

  // Element (i, k) of a matrix of rows i, along which k is contiguous; turned: i is.
  double at(Warp& w, int i, int k) const {
    uint64_t width = swizzle_ ? uint64_t(16) << swizzle_ : 16;  // bytes of a row of a core's columns
    uint64_t place;
    if (!turned_) {
      uint64_t along = uint64_t(k) * bytes_;
      place = i / 8 * stride_ + i % 8 * width + (swizzle_ ? along : along / 16 * leading_ + along % 16);
    } else {
      uint64_t along = uint64_t(i) * bytes_;
      place = k / 8 * stride_ + k % 8 * width + along / width * leading_ + along % width;
    }
    uint64_t address = start_ + place;
    if (swizzle_) address ^= (address >> 7 & ((1u << swizzle_) - 1)) << 4;
    w.block.read_by(w.number, address, bytes_);
    uint32_t bits = 0;
    std::memcpy(&bits, &w.block.shared[address], bytes_);
    return number(kind_, bits, 0);
  }

 private:
  uint64_t start_, leading_, stride_;
  int bytes_;
  bool turned_;
  Element kind_;
  int swizzle_;
};

// Four warps have 16 rows each; computed when waited for.
inline Step wgmma(const Statement& s) {
  std::string shape;
  for (auto& word : s.words)
    if (word.rfind("m64n", 0) == 0) shape = word;
  int columns = std::stoi(shape.substr(4)), depth = std::stoi(shape.substr(shape.find('k') + 1));
  Element kind = element(s.type());
  if (!s.has("f32")) throw Error("not emulated");
  auto d = slots_of(s.operands[0]);
  bool in_registers = s.operands[1].kind == Operand::LIST;
  auto a = slots_of(s.operands[1]);
  int b = s.operands[2].slot, add = s.operands[3].slot;
  auto flag = [&](size_t n) { return n < s.operands.size() ? s.operands[n].slot : -1; };
  int sign_a = flag(4), sign_b = flag(5), turn_a = in_registers ? -1 : flag(6), turn_b = flag(in_registers ? 6 : 7);
  return [=](Warp& w, uint32_t mask) {
    together(mask, "wgmma");
    auto set = [&](int slot) { return slot >= 0 && w.registers[slot][0] != 0; };
    if (w.registers[sign_a][0] != 1 || w.registers[sign_b][0] != 1)
      throw Error("wgmma: negative operands are not emulated");
    bool adds = set(add), turned_a = set(turn_a), turned_b = set(turn_b);
    uint64_t of_a = w.registers[a[0]][0], of_b = w.registers[b][0];
    auto right_of = [=, &w](int n, double (*right)[8]) {
      Described memory(of_b, kind, turned_b);
      for (int k = 0; k < depth; ++k)
        for (int j = 0; j < 8; ++j) right[k][j] = memory.at(w, n + j, k);
    };
    auto left_in_memory = [=, &w] {
      Left left{};
      Described memory(of_a, kind, turned_a);
      for (int i = 0; i < 16; ++i)
        for (int k = 0; k < depth; ++k) left[i][k] = memory.at(w, 16 * (w.number % 4) + i, k);
      return left;
    };
    // It may read from now on; what it reads counts at the end, and both are compared with
    // what other warps write.
    double read[16][8];
    for (int n = 0; n < columns; n += 8) right_of(n, read);
    if (!in_registers) left_in_memory();
    w.products.add([=, &w] {
      Left left = in_registers ? left_of(w, a, kind) : left_in_memory();
      for (int n = 0; n < columns; n += 8) {
        double right[16][8];
        right_of(n, right);
        multiply(w, &d[n / 2], &d[n / 2], left, right, depth, adds);
      }
    });
  };
}
