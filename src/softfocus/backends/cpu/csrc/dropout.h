// Which weights dropout drops: the bits that softfocus/dropout.py defines, made once for a block of rows and read by
// all its passes.
#pragma once

#include "sight.h"

namespace softfocus {

typedef uint64_t vq __attribute__((vector_size(W * 4)));

// Products, 64 bits wide, of the lower halves of each lane
inline vq multiply(vq x, uint32_t factor) {
#if defined(__AVX512F__)
  return (vq)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (vq)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#else
  return (x & 0xffffffffu) * factor;
#endif
}

class Drops {
 public:
  const float growth;  // what multiplies a weight that is kept

  Drops(const Problem& problem, int64_t block_rows, int64_t row_space)
      : growth(problem.dropped < 1 << 16 ? 65536.0f / (65536 - problem.dropped) : 0.0f), p(problem), rows(block_rows) {
    if (p.dropped) bits.resize(rows * (row_space / GROUP), false);
  }

  // Which weights of W keys are dropped, at an offset from a block's base; and what multiplies them
  vi dropped(int64_t r, int64_t j) const {
    int32_t some = int32_t(bits[place(r, j)] >> (j % GROUP));
    return (splat(some) & (1 << lanes())) != 0;
  }
  vf factors(int64_t r, int64_t j) const { return dropped(r, j) ? vf{} : splat(growth); }

  void draw(const Sight& block) {
    uint32_t head = uint32_t(block.b * p.heads + block.h);
    block.chunks([&](int64_t at) {
      for (int64_t r = 0; r < block.n; ++r) {
        Range seen = block.range(r, at);
        for (int64_t j = seen.low / GROUP * GROUP; j < seen.high; j += GROUP)
          bits[place(r, j)] = group_bits(uint64_t(block.base + j) / GROUP * 8, uint32_t(block.start + r), head);
      }
    });
  }

 private:
  static constexpr int64_t GROUP = 64;  // keys whose bits are one word
  const Problem& p;
  const int64_t rows;
  Buffer<uint64_t> bits;  // [chunks, rows, CHUNK / GROUP], a bit a key: 1 where its weight is dropped

  int64_t place(int64_t r, int64_t j) const { return (j / CHUNK * rows + r) * (CHUNK / GROUP) + j % CHUNK / GROUP; }

  // Philox-4x32 of counters (first + lane, row, head, 0); of the upper halves of the words nothing may be read
  void philox(uint64_t first, uint32_t row, uint32_t head, vq (&words)[4]) const {
    vq lane;
    for (int i = 0; i < W / 2; ++i) lane[i] = i;
    vq a = lane + first, b = vq{} + row, c = vq{} + head, d = vq{};
    uint32_t k = uint32_t(p.seed), m = uint32_t(p.seed >> 32);
#pragma GCC unroll 7
    for (int round = 0; round < 7; ++round) {
      vq x = multiply(a, 0xD2511F53), y = multiply(c, 0xCD9E8D57);
      a = (y >> 32) ^ b ^ k, b = y, c = (x >> 32) ^ d ^ m, d = x;
      k += 0x9E3779B9, m += 0xBB67AE85;
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
  }

#if defined(__AVX512BW__)
  uint64_t group_bits(uint64_t first, uint32_t row, uint32_t head) const {
    // 16 bits of a lane at a time: the lowest of two words, the next ones of both
    alignas(64) static constexpr uint16_t order[32] = {0,  4,  8,  12, 16, 20, 24, 28, 1,  5,  9,  13, 17, 21, 25, 29,
                                                       32, 36, 40, 44, 48, 52, 56, 60, 33, 37, 41, 45, 49, 53, 57, 61};
    vq words[4];
    philox(first, row, head, words);
    __m512i places = _mm512_load_si512(order), most = _mm512_set1_epi16(int16_t(p.dropped - 1));
    __m512i low = _mm512_permutex2var_epi16((__m512i)words[0], places, (__m512i)words[1]);
    __m512i high = _mm512_permutex2var_epi16((__m512i)words[2], places, (__m512i)words[3]);
    return uint64_t(_mm512_cmple_epu16_mask(high, most)) << 32 | _mm512_cmple_epu16_mask(low, most);
  }
#else
  uint64_t group_bits(uint64_t first, uint32_t row, uint32_t head) const {
    uint64_t found = 0;
    for (int lane = 0; lane < 8; lane += W / 2) {
      vq words[4], some = vq{};
      philox(first + lane, row, head, words);
      each<8>([&](int n) {
        vq number = (words[n / 2] >> n % 2 * 16) & 0xffffu;
        some |= ((number - uint64_t(p.dropped)) >> 16 & 1) << 8 * n;  // a borrow where it is less
      });
      for (int i = 0; i < W / 2; ++i) found |= some[i] << (lane + i);
    }
    return found;
  }
#endif
};

}  // namespace softfocus
