// Who sees whom in a block of query rows: ranges of keys by the window, bytes where masks are given, chunks that can be
// left out.
#pragma once

#include "keys.h"
#include "product.h"

namespace softfocus {

constexpr int64_t ROWS = 128;  // of a block, at most

// The keys [low, high) as whole vectors of a chunk: offsets from the block's base
struct Range {
  int64_t low, high;
  bool empty() const { return low >= high; }
  int64_t vectors() const { return (high - low) / W; }
};

class Sight {
 public:
  const Problem& p;
  const bool masked;
  int64_t b = 0, h = 0, start = 0, n = 0;
  int64_t base = 0, end = 0, ld = 0;  // keys [base, end); bytes between the rows of `visible`
  int64_t rows = 0;                   // that are held: of a block, or the queries there are
  int64_t row_space = 0;              // the most that ld can be
  int64_t low[ROWS], high[ROWS];      // the keys that the window shows a row
  float count[ROWS];                  // N_i
  bool blind[ROWS];

  Sight(const Problem& problem, int64_t most) : p(problem), masked(has_masks(p)) {
    int64_t span = p.key_length;
    if (p.left >= 0 && p.right >= 0) span = std::min(span, p.left + p.right + ROWS);
    row_space = round_up(span + CHUNK - 1, CHUNK) + W;
    rows = std::min(most, round_up(p.query_length, MR));
    if (masked) visible.resize(rows * row_space);
    states.resize(row_space / CHUNK + 1);
  }

  // Take the rows of a head from `first` on.
  void look(int64_t batch, int64_t query_head, int64_t first) {
    b = batch, h = query_head, start = first;
    n = std::min(rows, p.query_length - first);
    base = p.key_length, end = 0;
    for (int64_t r = 0; r < padded(); ++r) {
      if (r < n)
        window(p, start + r, low[r], high[r]);
      else
        low[r] = high[r] = 0;
      if (low[r] < high[r]) base = std::min(base, low[r]), end = std::max(end, high[r]);
    }
    base = base < end ? base / CHUNK * CHUNK : 0;
    end = std::max(end, base);
    ld = round_up(end - base, CHUNK) + W;
    if (masked) {
      std::fill(states.begin(), states.end(), uint8_t(0));
      for (int64_t at = 0; at < end - base; at += CHUNK) states[at / CHUNK] = 2;
    }
    for (int64_t r = 0; r < n; ++r) {
      count[r] = float(high[r] - low[r]);
      if (masked && low[r] < high[r]) {
        uint8_t* row = visible + r * ld;
        masks_row(p, b, h, start + r, low[r], high[r], row + low[r] - base);
        std::memset(row, 0, low[r] - base);
        std::memset(row + high[r] - base, 0, ld - (high[r] - base));
        int64_t seen = 0;
        for (int64_t j = low[r] - base; j < high[r] - base; ++j) seen += row[j];
        count[r] = float(seen);
      } else if (masked) {
        std::memset(visible + r * ld, 0, ld);
      }
      blind[r] = count[r] == 0.0f;
    }
    for (int64_t r = n; r < padded(); ++r) blind[r] = true;
    if (masked) weigh_chunks();
    for (int64_t g = 0; g < padded() / MR; ++g) {
      group_low[g] = p.key_length, group_high[g] = 0;
      for (int64_t r = g * MR; r < (g + 1) * MR; ++r)
        if (!blind[r]) {
          group_low[g] = std::min(group_low[g], low[r]);
          group_high[g] = std::max(group_high[g], high[r]);
        }
    }
  }

  int64_t padded() const { return round_up(n, MR); }

  // The chunks, as offsets from base, that some row sees
  template <typename F>
  void chunks(F&& f) const {
    for (int64_t at = 0; at < end - base; at += CHUNK)
      if (shown(at)) f(at);
  }

  // Whether there are keys after the chunk
  bool more(int64_t at) const { return at + CHUNK < end - base; }

  // What of the keys [at, at + n) the MR rows from `r` see, in whole vectors
  Range range(int64_t r, int64_t at, int64_t n = CHUNK) const {
    int64_t l = group_low[r / MR] - base, g = group_high[r / MR] - base;
    if (l >= g) return {0, 0};
    l = std::max(l / W * W, at);
    g = std::min(round_up(g, W), at + n);
    return {l, g};
  }

  // Whether some row sees a key of the chunk at an offset from base, and whether the masks hide none of it from any
  bool shown(int64_t at) const { return !masked || states[at / CHUNK]; }
  bool shown_whole(int64_t at) const { return !masked || states[at / CHUNK] == 2; }

  // What the masks let a row see, at offsets from base; null without masks
  const uint8_t* visible_row(int64_t r) const { return masked ? visible + r * ld : nullptr; }

  // Whether a row may see a key
  bool sees(int64_t r, int64_t key) const {
    return key >= low[r] && key < high[r] && (!masked || visible[r * ld + key - base]);
  }

 protected:
  Buffer<uint8_t> visible;  // [rows, ld], where masks are given

 private:
  int64_t group_low[ROWS / MR], group_high[ROWS / MR];
  std::vector<uint8_t> states;  // of the chunks: 0 where no row sees a key, 1 mixed, 2 where the masks hide nothing

  void weigh_chunks() {
    for (int64_t at = 0; at < end - base; at += CHUNK) {
      bool any = false, all = true;
      for (int64_t r = 0; r < n; ++r) {
        const uint8_t* row = visible + r * ld + at;
        int64_t l = std::clamp<int64_t>(low[r] - base - at, 0, CHUNK),
                g = std::clamp<int64_t>(high[r] - base - at, 0, CHUNK);
        int64_t seen = 0;
        for (int64_t j = l; j < g; ++j) seen += row[j];
        any |= seen > 0;
        all &= seen == g - l;
      }
      states[at / CHUNK] = any ? (all ? 2 : 1) : 0;
    }
  }
};

}  // namespace softfocus
