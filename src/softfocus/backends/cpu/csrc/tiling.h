// Sizes of the pieces in which the kernels work. A worker takes a block of query rows of one head
// and keeps all its scores:
//
//                    BLOCK_K keys   BLOCK_K keys   ...          tile:   [BLOCK_Q, BLOCK_K] scores
//     BLOCK_Q rows   [    tile    ] [    tile    ] ...          strip:  MR rows of a block or a tile
//                                                               panel:  PANEL keys or values, packed transposed
//
// One loop keeps [MR, PANEL] sums in registers. W floats are a vector (vector.h); ranges of keys
// are whole vectors.
#pragma once

#include "vector.h"

namespace softfocus {

constexpr int MR = 4;                         // rows of a strip
constexpr int64_t PANEL = PANEL_VECTORS * W;  // keys of a panel [D, PANEL]
constexpr int64_t BLOCK_Q = 128;              // query rows of a block, at most
constexpr int64_t BLOCK_K = 128;              // keys of a tile: 128 rows of 64 floats fill the first-level cache
constexpr int64_t TILE_STRIDE =
    BLOCK_K + W;  // of a scratch tile: no power of two, which would put all rows into one cache set
constexpr int64_t DECODE_QUERIES = 4;  // calls of at most this many queries do not pack the keys

static_assert(BLOCK_K % PANEL == 0, "a tile is whole panels");
static_assert(BLOCK_Q == BLOCK_K, "prefetch_next_tile(): one row of a block prefetches one key row of the next tile");

}  // namespace softfocus
