// A program made of steps, and its blocks run one after another.
#pragma once

#include "instructions.h"

class Kernel {
 public:
  explicit Kernel(const std::string& text) : program_(text) {
    for (auto& s : program_.statements) {
      auto& word = s.words[0];
      bool moves = word == "bra" || word == "ret" || word == "exit" || is_barrier(s);
      try {
        steps_.push_back(moves ? Step() : step_of(s));
      } catch (std::exception& e) {
        throw Error(std::string(e.what()) + ": " + s.text);
      }
    }
  }

  const Program& program() const { return program_; }

  void run(Launch& launch, int shared_bytes, int warps) const {
    uint32_t blocks = launch.grid[0] * launch.grid[1] * launch.grid[2];
    for (uint32_t n = 0; n < blocks; ++n) {
      Block block(launch, launch.backwards ? blocks - 1 - n : n, shared_bytes);
      std::vector<std::unique_ptr<Warp>> all;
      for (int w = 0; w < warps; ++w) all.push_back(std::make_unique<Warp>(block, w, program_));
      for (bool going = true; going;) {
        int waiting = -1, ended = 0;
        for (int w = 0; w < warps; ++w) {
          block.now = launch.backwards ? warps - 1 - w : w;
          Warp& warp = *all[block.now];
          int stop = until_barrier(warp);
          if (stop < 0)
            ++ended;
          else if (waiting >= 0 && waiting != stop)
            throw Error("warps wait at different barriers");
          else
            waiting = stop;
        }
        if (ended && waiting >= 0) throw Error("some warps wait at a barrier, others have ended");
        going = waiting >= 0;
        ++block.phase;
      }
      for (auto& warp : all)
        if (!warp->copies.empty() || !warp->products.empty()) throw Error("ended before what it had asked for came");
    }
  }

 private:
  Program program_;
  std::vector<Step> steps_;

  // Of all threads; lanes of a warp run together anyway.
  static bool is_barrier(const Statement& s) {
    return (s.words[0] == "bar" || s.words[0] == "barrier") && !s.has("warp");
  }

  // The barrier a warp waits at, -1 where it has ended. Lanes that have parted run from the one
  // furthest behind.
  int until_barrier(Warp& warp) const {
    while (warp.live) {
      int now = INT32_MAX;
      uint32_t mask = 0;
      for (int lane = 0; lane < LANES; ++lane) {
        if (!(warp.live >> lane & 1) || warp.at[lane] > now) continue;
        if (warp.at[lane] < now) now = warp.at[lane], mask = 0;
        mask |= 1u << lane;
      }
      // Together: on and on without looking, until a branch parts them.
      bool together = mask == warp.live;
      for (bool on = true; on;) {
        auto& s = program_.statements[now];
        uint32_t acting = mask;
        if (s.guard >= 0) {
          acting = 0;
          auto& guard = warp.registers[s.guard];
          for (int lane = 0; lane < LANES; ++lane)
            if (mask >> lane & 1 && (guard[lane] & 1) != s.guard_negated) acting |= 1u << lane;
        }
        on = together;
        int next = now + 1;
        if (steps_[now]) {
          try {
            if (acting) steps_[now](warp, acting);
          } catch (std::exception& e) {
            throw Error(std::string(e.what()) + "\n  in " + s.text + "\n  of " + s.source);
          }
        } else if (s.words[0] == "bra") {
          if (acting == mask)
            next = s.target;
          else if (acting) {
            for (int lane = 0; lane < LANES; ++lane)
              if (mask >> lane & 1) warp.at[lane] = acting >> lane & 1 ? s.target : next;
            break;
          }
        } else if (is_barrier(s)) {
          if (s.operands.size() > 1) throw Error("not emulated: " + s.text);
          if (acting != warp.live || warp.live != ALL) throw Error("a barrier that not all threads of a warp meet");
          warp.at.fill(next);
          return now;
        } else {
          warp.live &= ~acting;
          mask &= ~acting;
          if (!warp.live) return -1;
          on = false;
        }
        now = next;
        if (!on)
          for (int lane = 0; lane < LANES; ++lane)
            if (mask >> lane & 1) warp.at[lane] = now;
      }
    }
    return -1;
  }
};
