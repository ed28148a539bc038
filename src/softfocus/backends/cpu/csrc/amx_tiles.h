// Dot products of bfloat16 rows by Intel's AMX: the processor multiplies an AMX tile [16 rows, 32
// dimensions] by another [32 dimensions, 16 keys]. Products of bfloat16 are exact in float, and
// sums are in float, so that dot products of normal elements round no more than those of
// register_tile(). AMX flushes subnormal elements to 0. Rows are therefore multiplied by a power of
// two first (pack_amx_row()). Without cosine similarity:
//
//     row's largest element   row times  elements flushed to 0, as given
//     below 2^-60             prescale   none: bfloat16 ends at 2^-133
//     from 2^-60 to 2^61      1          below 2^-126
//     2^61 or more            2^-60      below 2^-66
//
// Rows of small elements are scaled up, so that none is flushed. The other row may hold elements
// up to 2^128. Rows from 2^61 on are therefore scaled down: otherwise a dot product could overflow
// that does not overflow for the rows as given. Rows in between are left alone. A flushed element
// times an element up to 2^100 (2^40 in the last line) of the other row is below 2^-26. So each
// flushed element changes s by less than 2^-26 times the score scale, and e^s by as much relative
// to itself. Rounding changes e^s by up to 2^-24 relative to itself. With a score scale of at most
// 4 a flushed element therefore changes e^s by less than rounding does; with a larger one its
// error grows in proportion. Beyond 2^100 (2^40) the error grows with the other element. Such rows
// are not treated specially.
//
// With cosine similarity every row is multiplied by its prescale. In unit vectors a flushed element
// is below 2^-126, and so is its term of the dot product.
#pragma once

#include "memory.h"
#include "tensor.h"
#include "tiling.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define SOFTFOCUS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define SOFTFOCUS_AMX 0
#endif

namespace softfocus {

// An AMX tile holds 16 rows or keys by 32 dimensions: 1 KiB
constexpr int64_t AMX_ROWS = 16, AMX_DIMS = 32;
// Bytes of a row of a tile of keys: 16 keys, 2 dimensions of each, 2 bytes of each
constexpr int64_t AMX_PAIRS_BYTES = AMX_ROWS * 2 * 2;
// The most dimensions of one sum: longer float sums round too much (DOT_DIMS in product.h)
constexpr int64_t AMX_DOT_DIMS = 64;

// Whether the dot products of a call run on AMX. A call of at most DECODE_QUERIES queries does not
// use it: its forward does not pack the keys, and its backward packs them as panels.
inline bool uses_amx([[maybe_unused]] const Params& params) {
#if SOFTFOCUS_AMX
  // Linux gives a process the registers when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM,
  // XFEATURE_XTILEDATA), by number 0x1023 and 18. Threads that exist have them, too.
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted && params.dtype == BFLOAT16 && params.query_length > DECODE_QUERIES;
#else
  return false;
#endif
}

// The limits of the prescale in the table above. The prescale is 1 / the row's largest element,
// rounded up to a power of two, and limited to 2^-126 to 2^126. A row is multiplied by its prescale
// if that is above AMX_MAX_UNSCALED (elements below 2^-60), and by AMX_MIN_PRESCALE if its prescale
// is below that (elements from 2^61 on). What pack_amx_row() returns for two rows has a product of
// at most 2^120, which times a score scale below 2^8 is finite. read_queries() multiplies the
// query's by the score scale, which gives dot_scale. convert_strip() and convert_row() multiply
// that by the key's.
constexpr float AMX_MIN_PRESCALE = 0x1p-60f, AMX_MAX_UNSCALED = 0x1p60f;

// Writes a row [width] as bfloat16, perhaps times a power of two, with zeros after it: `to` [width
// rounded up to AMX_DIMS]. Returns the factor by which its dot products are multiplied: with cosine
// similarity 1 / |row as written|, or 0 where l2_normalise() returns 0; else 1 / the power of two.
inline float pack_amx_row(const float* row, int64_t width, bool cosine, bfloat16* to) {
  auto [prescale, scaled_rnorm] = l2_norm(row, width);
  if (!cosine && prescale <= AMX_MAX_UNSCALED) prescale = prescale < AMX_MIN_PRESCALE ? AMX_MIN_PRESCALE : 1.0f;
  int64_t d = 0;
  for (; d + W <= width; d += W) *(vhalf_unaligned*)(to + d) = to_bfloat16(load(row + d) * prescale);
  for (; d < width; ++d) to[d].bits = to_bfloat16(splat(row[d] * prescale))[0];
  for (; d < round_up(width, AMX_DIMS); ++d) to[d].bits = 0;
  return cosine ? scaled_rnorm : 1.0f / prescale;
}

// Writes 16 packed rows [AMX_ROWS, amx_width] as the tiles of 16 keys: [amx_width / AMX_DIMS,
// AMX_DIMS / 2, AMX_ROWS, 2]. A pair of dimensions has the size of a float, and is moved as one.
// Without AMX W may differ; the function is then not called.
inline void transpose_amx_pairs(const bfloat16* rows, int64_t amx_width, bfloat16* to) {
  static_assert(sizeof(bfloat16) == 2);
  if constexpr (W == AMX_ROWS)
    for (int64_t d = 0; d < amx_width; d += AMX_DIMS)
      transpose_square((const float*)(rows + d), amx_width / 2, (float*)(to + d * AMX_ROWS), AMX_ROWS);
}

#if SOFTFOCUS_AMX
// The thread's tile registers, from construction to destruction: all eight are whole tiles.
class AmxRegisters {
 public:
  AmxRegisters() {
    // Intel's layout of a tile configuration
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    // All tiles have 16 rows of 64 bytes: 32 dimensions of a query, pairs of 16 keys, or 16 sums
    static_assert(AMX_PAIRS_BYTES == AMX_DIMS * 2 && AMX_ROWS * sizeof(float) == AMX_DIMS * 2);
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = AMX_DIMS * 2, config.rows[i] = AMX_ROWS;
    static_assert(sizeof config == 64);
    // GCC 12 declares that _tile_loadconfig reads eight bytes. Without this line it may drop the
    // stores to the other 56.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~AmxRegisters() { _tile_release(); }
  AmxRegisters(const AmxRegisters&) = delete;
  AmxRegisters& operator=(const AmxRegisters&) = delete;
};

// Dot products of 16 rows [AMX_ROWS, amx_width] with 16 N keys, written to C [AMX_ROWS, 16 N].
// `keys` is what transpose_amx_pairs() wrote for 16 keys, N times: [N, amx_width / AMX_DIMS,
// AMX_DIMS / 2, AMX_ROWS, 2]. Needs an AmxRegisters.
template <int N>
inline void amx_dots(const bfloat16* rows, int64_t amx_width, const bfloat16* keys, float* c, int64_t c_row_stride) {
  static_assert(N == 1 || N == 2);
  // Sums over AMX_DOT_DIMS dimensions from first_dim on, written to `to` [AMX_ROWS, to_row_stride]
  auto sum_to = [&](int64_t first_dim, float* to, int64_t to_row_stride) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = first_dim; d < std::min(first_dim + AMX_DOT_DIMS, amx_width); d += AMX_DIMS) {
      _tile_loadd(2, rows + d, amx_width * 2);
      _tile_loadd(3, keys + d * AMX_ROWS, AMX_PAIRS_BYTES);
      _tile_dpbf16ps(0, 2, 3);
      if constexpr (N == 2) {
        _tile_loadd(4, keys + (amx_width + d) * AMX_ROWS, AMX_PAIRS_BYTES);
        _tile_dpbf16ps(1, 2, 4);
      }
    }
    _tile_stored(0, to, to_row_stride * sizeof(float));
    if constexpr (N == 2) _tile_stored(1, to + AMX_ROWS, to_row_stride * sizeof(float));
  };
  sum_to(0, c, c_row_stride);
  alignas(64) float sums[AMX_ROWS * N * AMX_ROWS];  // [AMX_ROWS, 16 N]
  for (int64_t d = AMX_DOT_DIMS; d < amx_width; d += AMX_DOT_DIMS) {
    sum_to(d, sums, N * AMX_ROWS);
    for (int64_t r = 0; r < AMX_ROWS; ++r)
      for (int64_t t = 0; t < N * AMX_ROWS; t += AMX_ROWS)
        store(c + r * c_row_stride + t, load(c + r * c_row_stride + t) + load(sums + r * N * AMX_ROWS + t));
  }
}
#endif

}  // namespace softfocus
