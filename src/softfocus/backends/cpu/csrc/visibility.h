// Which keys the rows of a block see. The window gives each row a range of keys; the masks give one
// byte per row and key. Tiles that no row sees are skipped.
#pragma once

#include <vector>

#include "memory.h"
#include "params.h"
#include "tiling.h"

namespace softfocus {

// The half-open range of keys that the window lets a query see. Query i has position i + Lk - Lq,
// which is negative for the first rows if Lq > Lk.
inline void window_range(const Params& params, int64_t query, int64_t& begin, int64_t& end) {
  int64_t position = query + params.key_length - params.query_length;
  begin = params.left < 0 ? 0 : std::max<int64_t>(0, position - params.left);
  end = params.right < 0 ? params.key_length : std::min(params.key_length, position + params.right + 1);
  if (end < begin) end = begin;
}

inline bool has_masks(const Params& params) {
  return params.mask.data || params.key_mask.data || params.document_ids.data;
}

// Writes to `to` [end - begin], for each of the keys [begin, end): 1 if all masks let a query see
// it, else 0. The window is not applied.
inline void read_masks(const Params& params, int64_t b, int64_t h, int64_t query, int64_t begin, int64_t end,
                       uint8_t* to) {
  std::memset(to, 1, end - begin);
  if (params.key_mask.data) {
    const uint8_t* x = static_cast<const uint8_t*>(params.key_mask.data) + b * params.key_mask.stride[0];
    for (int64_t key = begin; key < end; ++key) to[key - begin] &= x[key * params.key_mask.stride[3]] != 0;
  }
  if (params.document_ids.data) {
    const int64_t* x = static_cast<const int64_t*>(params.document_ids.data) + b * params.document_ids.stride[0];
    // position >= 0: attention() requires Lq <= Lk with document_ids.
    int64_t stride = params.document_ids.stride[3], position = query + params.key_length - params.query_length,
            document = x[position * stride];
    for (int64_t key = begin; key < end; ++key) to[key - begin] &= uint8_t(x[key * stride] == document);
  }
  if (params.mask.data) {
    const uint8_t* x = static_cast<const uint8_t*>(params.mask.data) + b * params.mask.stride[0] +
                       h * params.mask.stride[1] + query * params.mask.stride[2];
    for (int64_t key = begin; key < end; ++key) to[key - begin] &= x[key * params.mask.stride[3]] != 0;
  }
}

// Keys [begin, end) as offsets j, not indices into the tensor; both multiples of W. An empty range
// may have begin > end.
struct KeyRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  int64_t vectors() const { return (end - begin) / W; }
};

// What the masks hide of a tile. Keys outside the window do not count: of a tile that only the
// window cuts the masks hide nothing. strip_range(), range_visible_to_all() and convert_row() apply
// the window.
enum TileMask : uint8_t { HIDES_ALL, HIDES_SOME, HIDES_NOTHING };

// A block of query rows and the keys that it sees. The offset j of a key counts from key_begin;
// start_k is the offset of a tile's first key.
class BlockVisibility {
 public:
  const Params& params;
  const bool masks_given;
  int64_t batch_index = 0, query_head = 0;  // whose rows these are
  int64_t key_head = 0;                     // whose keys and values they read
  int64_t start_q = 0, n_rows = 0;          // the first row, the number of rows
  // [key_begin, key_end): from the first to the last key that the window lets some row see.
  // key_begin is rounded down to a multiple of BLOCK_K.
  int64_t key_begin = 0, key_end = 0;
  // Elements from one row to the next of `visible` and of RowGradients::exact_terms
  int64_t row_stride = 0;
  int64_t max_rows = 0;        // the most rows of a block; a multiple of MR
  int64_t max_row_stride = 0;  // the largest row_stride of a block
  // The keys that the window lets each row see, as indices into the tensor
  int64_t window_begin[BLOCK_Q], window_end[BLOCK_Q];
  float count[BLOCK_Q];  // N_i
  // N_i = 0; true for the rows from n_rows to padded_rows(), too, which every pass skips by it
  bool fully_masked[BLOCK_Q];

  BlockVisibility(const Params& call, int64_t most_rows) : params(call), masks_given(has_masks(params)) {
    // The most keys that a block sees. With n <= BLOCK_Q rows these are the `left` keys before the
    // first row's position, the n positions themselves, and the `right` keys after the last one's.
    // attention() limits both sides of a window to 2^30, so that their sum does not overflow.
    int64_t span = params.key_length;
    if (params.left >= 0 && params.right >= 0) span = std::min(span, params.left + params.right + BLOCK_Q);
    // A span may begin anywhere in a tile. W more: RowGradients has lists of live keys in buffers
    // [max_rows, max_row_stride], and writes up to W elements past its last list.
    max_row_stride = round_up(span + BLOCK_K - 1, BLOCK_K) + W;
    max_rows = std::min(most_rows, round_up(params.query_length, MR));
    if (masks_given) visible.resize(max_rows * max_row_stride);
    tile_masks.resize(max_padded_keys() / BLOCK_K);
  }

  // Moves to the rows of query head h from first_q on.
  void set_rows(int64_t b, int64_t h, int64_t first_q) {
    batch_index = b, query_head = h, key_head = params.key_head_of(h), start_q = first_q;
    n_rows = std::min(max_rows, params.query_length - first_q);
    set_windows();
    if (masks_given) {
      for (int64_t r = 0; r < n_rows; ++r) read_mask_row(r);
      classify_tiles();
    }
    for (int64_t r = 0; r < padded_rows(); ++r) fully_masked[r] = r >= n_rows || count[r] == 0.0f;
    set_strips();
  }

  int64_t padded_rows() const { return round_up(n_rows, MR); }
  // The keys of the block, and the most keys of a block, in whole tiles
  int64_t padded_keys() const { return row_stride - W; }
  int64_t max_padded_keys() const { return max_row_stride - W; }

  // Calls f(start_k) for each tile of the block, except those that the masks hide from all rows.
  template <typename F>
  void each_tile(F&& f) const {
    for (int64_t start_k = 0; start_k < key_end - key_begin; start_k += BLOCK_K)
      if (tile_visible(start_k)) f(start_k);
  }

  // Whether the tile at start_k is not the last; the masks may hide the next one.
  bool has_next_tile(int64_t start_k) const { return start_k + BLOCK_K < key_end - key_begin; }

  // The part of [start_k, start_k + n) that the window lets at least one row of row r's strip see,
  // widened to whole vectors. It may hold offsets after the last key, which no row sees. Fully
  // masked rows do not count. The masks are not applied.
  KeyRange strip_range(int64_t r, int64_t start_k, int64_t n = BLOCK_K) const {
    int64_t begin = strip_begin[r / MR] - key_begin, end = strip_end[r / MR] - key_begin;
    if (begin >= end) return {0, 0};
    begin = std::max(begin / W * W, start_k);
    end = std::min(round_up(end, W), start_k + n);
    return {begin, end};
  }

  bool tile_visible(int64_t start_k) const { return !masks_given || tile_masks[start_k / BLOCK_K] != HIDES_ALL; }
  bool tile_unmasked(int64_t start_k) const { return !masks_given || tile_masks[start_k / BLOCK_K] == HIDES_NOTHING; }

  // Whether row r sees a key, which is given by its index in [0, Lk)
  bool sees(int64_t r, int64_t key) const {
    return key >= window_begin[r] && key < window_end[r] && (!masks_given || visible[r * row_stride + key - key_begin]);
  }

 protected:
  Buffer<uint8_t> visible;  // [max_rows, row_stride], where masks are given

 private:
  // The keys that the window lets at least one row of a strip see, except fully masked rows; as
  // indices into the tensor
  int64_t strip_begin[BLOCK_Q / MR], strip_end[BLOCK_Q / MR];
  std::vector<uint8_t> tile_masks;  // [tiles], TileMask of each

  // Sets the keys that the window lets each row see, their number, and the range of the block.
  void set_windows() {
    key_begin = params.key_length, key_end = 0;
    for (int64_t r = 0; r < padded_rows(); ++r) {
      window_begin[r] = window_end[r] = 0;
      if (r < n_rows) window_range(params, start_q + r, window_begin[r], window_end[r]);
      count[r] = float(window_end[r] - window_begin[r]);
      if (window_begin[r] < window_end[r])
        key_begin = std::min(key_begin, window_begin[r]), key_end = std::max(key_end, window_end[r]);
    }
    key_begin = key_begin < key_end ? key_begin / BLOCK_K * BLOCK_K : 0;
    key_end = std::max(key_end, key_begin);
    // W more, so that the stride is no power of two, as with TILE_STRIDE (chosen, not measured).
    row_stride = round_up(key_end - key_begin, BLOCK_K) + W;
  }

  // Fills row r of `visible` and counts the keys that it sees.
  void read_mask_row(int64_t r) {
    uint8_t* row = visible + r * row_stride;
    int64_t begin = window_begin[r] - key_begin, end = window_end[r] - key_begin;
    if (begin >= end) {
      std::memset(row, 0, row_stride);
      return;
    }
    std::memset(row, 0, begin);
    read_masks(params, batch_index, query_head, start_q + r, window_begin[r], window_end[r], row + begin);
    std::memset(row + end, 0, row_stride - end);
    int64_t n_seen = 0;
    for (int64_t j = begin; j < end; ++j) n_seen += row[j];
    count[r] = float(n_seen);
  }

  void set_strips() {
    for (int64_t strip = 0; strip < padded_rows() / MR; ++strip) {
      strip_begin[strip] = params.key_length, strip_end[strip] = 0;
      for (int64_t r = strip * MR; r < (strip + 1) * MR; ++r)
        if (!fully_masked[r]) {
          strip_begin[strip] = std::min(strip_begin[strip], window_begin[r]);
          strip_end[strip] = std::max(strip_end[strip], window_end[r]);
        }
    }
  }

  void classify_tiles() {
    for (int64_t start_k = 0; start_k < key_end - key_begin; start_k += BLOCK_K) {
      bool any = false, all = true;
      for (int64_t r = 0; r < n_rows; ++r) {
        const uint8_t* row = visible + r * row_stride + start_k;
        int64_t begin = std::clamp<int64_t>(window_begin[r] - key_begin - start_k, 0, BLOCK_K),
                end = std::clamp<int64_t>(window_end[r] - key_begin - start_k, 0, BLOCK_K);
        int64_t n_seen = 0;
        for (int64_t t = begin; t < end; ++t) n_seen += row[t];
        any |= n_seen > 0;
        all &= n_seen == end - begin;
      }
      tile_masks[start_k / BLOCK_K] = any ? (all ? HIDES_NOTHING : HIDES_SOME) : HIDES_ALL;
    }
  }
};

}  // namespace softfocus
