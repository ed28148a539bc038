// Sizes of the pieces in which the kernels work. A worker takes a block of query rows of one head
// and keeps all its scores:
//
//                  BLOCK_K keys   BLOCK_K keys   ...    tile:   [BLOCK_Q, BLOCK_K] scores
//   BLOCK_Q rows   [    tile    ] [    tile    ] ...    strip:  MR rows of a block or a tile
//                                                       panel:  PANEL keys or values, transposed
//
// One loop keeps up to [MR, PANEL] sums in registers. W floats are a vector (vector.h). A KeyRange
// is whole vectors.
//
// In a block start_k and j are offsets from key_begin; t counts the keys of a tile, of a range, or
// of the W keys that are transposed or read together, from the first. r is a row, counted from
// start_q, or from the first row that a function is given; d a dimension; e an entry of a list.
// key, first_key, stop_key, start_q, and the limits key_begin, window_begin, strip_begin and their
// ends are indices into the tensor. A KeyRange is in offsets. Any other range, [begin, end) or
// [start, stop), is counted as the variable that runs over it. Keys of a list are counted from
// their tile's first.
#pragma once

#include "vector.h"

namespace softfocus {

// The measurements are in the log of docs/performance.md.
//
// Rows of a strip. 5, 6, 7 and 8 rows were no faster. 12 rows of fewer vectors were slower.
constexpr int MR = 4;
constexpr int64_t PANEL = PANEL_VECTORS * W;  // keys of a panel [D, PANEL]
// The most query rows of a block. 64 rows were slower: keys, values and their gradients are then
// read twice as often. More rows would need more memory for scores.
constexpr int64_t BLOCK_Q = 128;
// Keys of a tile. With 64 floats each they fill a first-level cache of 32 KiB. 64 and 256 were as
// fast.
constexpr int64_t BLOCK_K = 128;
// Floats from one row of a scratch tile to the next. The backward also reads such a tile by columns
// (transposed_product()). With a power of two a column would map to a few cache sets. The stride of
// stored scores (RowBlock::tile_row()) may be a power of two: they are read by rows only, at most
// MR at a time.
constexpr int64_t TILE_STRIDE = BLOCK_K + W;
// The forward of a call of at most this many queries is called decoding. It packs neither keys nor
// values. It reads keys in place where their rows are contiguous, and values, too, with the
// exceptions of BlockOutput::values_in_place(). Its rows fit one strip, so that each query head
// reads every key once. The backward of such a call is that of any other: it packs the keys. One
// query was measured; the limit itself was not.
constexpr int64_t DECODE_QUERIES = 4;

static_assert(DECODE_QUERIES <= MR, "the rows of a decoding call fit one strip");
static_assert(BLOCK_K % PANEL == 0, "a tile is whole panels");
static_assert(BLOCK_Q == BLOCK_K, "prefetch_next_tile(): one row of a block prefetches one key row of the next tile");

}  // namespace softfocus
