// Which weights of a block are dropped: the bits that softfocus/dropout.py defines. They are
// generated once per block, and every pass over the block reads them.
#pragma once

#include "visibility.h"

namespace softfocus {

typedef uint64_t vuint64 __attribute__((vector_size(W * 4)));

// The low 32 bits of each lane times `factor`: the 64-bit product
inline vuint64 multiply_low_words(vuint64 x, uint32_t factor) {
#if defined(__AVX512F__)
  return (vuint64)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (vuint64)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#else
  return (x & 0xffffffffu) * factor;
#endif
}

class DropoutMask {
 public:
  // 1 / (1 - p_drop), which multiplies the weights that are kept; 0 where p_drop is 1
  const float keep_scale;

  DropoutMask(const Params& call, int64_t most_rows, int64_t most_keys)
      : keep_scale(call.drop_below < 1 << 16 ? 65536.0f / (65536 - call.drop_below) : 0.0f),
        params(call),
        max_rows(most_rows) {
    if (params.drop_below) dropped_bits.resize(max_rows * (most_keys / SPAN_KEYS), /*huge_pages=*/false);
  }

  // For row r and the W keys from offset j on: dropped() is -1 in the lanes of dropped weights,
  // else 0; factors() is 0 in these lanes, else keep_scale.
  vint dropped(int64_t r, int64_t j) const {
    int32_t word = int32_t(dropped_bits[word_index(r, j)] >> (j % SPAN_KEYS));
    return (splat(word) & (1 << lane_index())) != 0;
  }
  vfloat factors(int64_t r, int64_t j) const { return dropped(r, j) ? vfloat{} : splat(keep_scale); }

  // Generates the bits of the keys that each row's strip sees. Other bits are arbitrary.
  void generate(const BlockVisibility& block) {
    uint32_t head_index = uint32_t(block.batch_index * params.heads + block.query_head);  // of all B * H
    block.each_tile([&](int64_t start_k) {
      for (int64_t r = 0; r < block.n_rows; ++r) {
        KeyRange strip_keys = block.strip_range(r, start_k);
        for (int64_t j = strip_keys.begin / SPAN_KEYS * SPAN_KEYS; j < strip_keys.end; j += SPAN_KEYS)
          dropped_bits[word_index(r, j)] = dropped_word(uint64_t(block.key_begin + j) / SPAN_KEYS * SPAN_COUNTERS,
                                                        uint32_t(block.start_q + r), head_index);
      }
    });
  }

 private:
  static constexpr int ROUNDS = 7;          // dropout.ROUNDS: the fewest that pass BigCrush
  static constexpr int64_t SPAN_KEYS = 64;  // keys whose bits are one word, as in dropout.py
  static constexpr int SPAN_COUNTERS = 8;   // counters of these keys, as in dropout.py
  static_assert(BLOCK_K % SPAN_KEYS == 0, "the keys of a tile are whole words");
  static_assert(SPAN_KEYS % W == 0, "the bits of a vector lie in one word");
  const Params& params;
  const int64_t max_rows;  // of a block
  // [tiles, max_rows, BLOCK_K / SPAN_KEYS], one bit per key: 1 where its weight is dropped
  Buffer<uint64_t> dropped_bits;

  int64_t word_index(int64_t r, int64_t j) const {
    return (j / BLOCK_K * max_rows + r) * (BLOCK_K / SPAN_KEYS) + j % BLOCK_K / SPAN_KEYS;
  }

  // Philox-4x32-7, with its standard constants, of W / 2 counters (first_counter + lane, row,
  // head_index, 0): four words of 32 bits per lane. The upper 32 bits of each lane are arbitrary.
  void philox(uint64_t first_counter, uint32_t row, uint32_t head_index, vuint64 (&words)[4]) const {
    vuint64 lane;
    for (int i = 0; i < W / 2; ++i) lane[i] = i;
    vuint64 a = lane + first_counter, b = vuint64{} + row, c = vuint64{} + head_index, d = vuint64{};
    uint32_t k = uint32_t(params.seed), m = uint32_t(params.seed >> 32);  // Philox's key
#pragma GCC unroll 7
    for (int round = 0; round < ROUNDS; ++round) {
      vuint64 x = multiply_low_words(a, 0xD2511F53), y = multiply_low_words(c, 0xCD9E8D57);
      a = (y >> 32) ^ b ^ k, b = y, c = (x >> 32) ^ d ^ m, d = x;
      k += 0x9E3779B9, m += 0xBB67AE85;
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
  }

  // The dropout bits of SPAN_KEYS keys: a bit is 1 where the key's 16-bit random number is below
  // drop_below. The SPAN_COUNTERS counters from first_counter on give 8 numbers each.
#if defined(__AVX512BW__)
  uint64_t dropped_word(uint64_t first_counter, uint32_t row, uint32_t head_index) const {
    // The permutation counts in 16-bit elements. Elements 4 l and 4 l + 1 of words[i] are the lower
    // and the upper half of lane l's 32 bits; elements 4 l + 2 and 4 l + 3 are arbitrary. Indices
    // from 32 on select from the second operand. Bit 8 n + l of the result belongs to number n of
    // lane l (dropout.py).
    alignas(64) static constexpr uint16_t order[32] = {0,  4,  8,  12, 16, 20, 24, 28, 1,  5,  9,  13, 17, 21, 25, 29,
                                                       32, 36, 40, 44, 48, 52, 56, 60, 33, 37, 41, 45, 49, 53, 57, 61};
    static_assert(W / 2 == SPAN_COUNTERS, "one call of philox() gives all numbers of a word");
    vuint64 words[4];
    philox(first_counter, row, head_index, words);
    // drop_below may be 2^16, which 16 bits do not hold; drop_below - 1 fits.
    __m512i indices = _mm512_load_si512(order), last = _mm512_set1_epi16(int16_t(params.drop_below - 1));
    __m512i low = _mm512_permutex2var_epi16((__m512i)words[0], indices, (__m512i)words[1]);
    __m512i high = _mm512_permutex2var_epi16((__m512i)words[2], indices, (__m512i)words[3]);
    return uint64_t(_mm512_cmple_epu16_mask(high, last)) << 32 | _mm512_cmple_epu16_mask(low, last);
  }
#else
  uint64_t dropped_word(uint64_t first_counter, uint32_t row, uint32_t head_index) const {
    uint64_t found = 0;
    for (int lane = 0; lane < SPAN_COUNTERS; lane += W / 2) {
      vuint64 words[4], dropped = vuint64{};
      philox(first_counter + lane, row, head_index, words);
      unroll<8>([&](int n) {
        vuint64 number = (words[n / 2] >> n % 2 * 16) & 0xffffu;
        // if number < drop_below, the subtraction borrows, and bit 16 is 1
        dropped |= ((number - uint64_t(params.drop_below)) >> 16 & 1) << 8 * n;
      });
      for (int i = 0; i < W / 2; ++i) found |= dropped[i] << (lane + i);
    }
    return found;
  }
#endif
};

}  // namespace softfocus
