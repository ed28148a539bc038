// What moves between registers and memory, and between the lanes of a warp.
#pragma once

#include "tensor_cores.h"

[[noreturn]] inline void unknown() { throw Error("not emulated"); }

template <class F>
void each_lane(uint32_t mask, F f) {
  for (int lane = 0; lane < LANES; ++lane)
    if (mask >> lane & 1) f(lane);
}

inline int bytes_of(const std::string& type) {
  for (int bytes : {1, 2, 4, 8})
    if (type.substr(1) == std::to_string(8 * bytes)) return bytes;
  unknown();
}

inline uint64_t widened(const std::string& type, uint64_t bits) {
  if (type == "s8") return bits_of(low<int8_t>(bits));
  if (type == "s16") return bits_of(low<int16_t>(bits));
  if (type == "s32") return bits_of(low<int32_t>(bits));
  return bits;
}

inline Step loaded(const Statement& s) {
  auto to = slots_of(s.operands[0]);
  auto from = s.operands[1];
  int bytes = bytes_of(s.type()), all = bytes * int(to.size());
  auto type = s.type();
  if (from.kind == Operand::PARAMETER)
    return [=](Warp& w, uint32_t mask) {
      uint64_t bits = 0;
      std::memcpy(&bits, w.block.launch.parameters + from.offset, bytes);
      each_lane(mask, [&](int l) { w.registers[to[0]][l] = widened(type, bits); });
    };
  bool shared = s.has("shared");
  if (s.has("local")) unknown();
  return [=](Warp& w, uint32_t mask) {
    each_lane(mask, [&](int l) {
      uint8_t line[16];
      uint64_t at = w.registers[from.slot][l];
      if (!shared && at >= LOCAL) {
        std::memcpy(line, w.own(l, at + from.offset, all), all);
      } else if (shared) {
        at = uint32_t(at + from.offset);
        w.block.read_by(w.number, at, all);
        std::memcpy(line, &w.block.shared[at], all);
      } else {
        w.block.load(at + from.offset, all, line);
      }
      for (size_t n = 0; n < to.size(); ++n) {
        uint64_t bits = 0;
        std::memcpy(&bits, line + n * bytes, bytes);
        w.registers[to[n]][l] = widened(type, bits);
      }
    });
  };
}

inline Step stored(const Statement& s) {
  auto to = s.operands[0];
  auto from = slots_of(s.operands[1]);
  int bytes = bytes_of(s.type()), all = bytes * int(from.size());
  bool shared = s.has("shared");
  if (s.has("local")) unknown();
  return [=](Warp& w, uint32_t mask) {
    each_lane(mask, [&](int l) {
      uint8_t line[16];
      for (size_t n = 0; n < from.size(); ++n) std::memcpy(line + n * bytes, &w.registers[from[n]][l], bytes);
      uint64_t at = w.registers[to.slot][l];
      if (!shared && at >= LOCAL)
        std::memcpy(w.own(l, at + to.offset, all), line, all);
      else if (shared)
        w.block.written_by(w.number, uint32_t(at + to.offset), all, line);
      else
        w.block.store(at + to.offset, all, line);
    });
  };
}

// What is copied into shared memory comes when it is waited for; until then nobody may look.
inline Step copied_later(const Statement& s) {
  auto to = s.operands[0], from = s.operands[1];
  int bytes = s.operands[2].slot, there = s.operands.size() > 3 ? s.operands[3].slot : bytes;
  return [=](Warp& w, uint32_t mask) {
    each_lane(mask, [&](int l) {
      auto& r = w.registers;
      uint32_t at = uint32_t(r[to.slot][l] + to.offset);
      int all = int(r[bytes][l]), given = int(uint32_t(r[there][l]));
      std::array<uint8_t, 16> line{};
      if (given > all) throw Error("cp.async: more bytes than it copies");
      if (given) {
        uint64_t source = r[from.slot][l] + from.offset;
        if (source % all || at % all) throw Error("not aligned: cp.async of " + std::to_string(all) + " bytes");
        w.block.load(source, given, line.data(), 1);
      }
      w.block.written_by(w.number, at, all, nullptr);
      w.copies.add([=, &w] { w.block.written_by(w.number, at, all, line.data()); });
    });
  };
}

inline Step shuffled(const Statement& s) {
  auto d = slots_of(s.operands[0]);
  int a = s.operands[1].slot, b = s.operands[2].slot, c = s.operands[3].slot, members = s.operands[4].slot;
  auto how = s.words[2];
  return [=](Warp& w, uint32_t mask) {
    auto before = w.registers[a];
    if (uint32_t(w.registers[members][0]) != mask) throw Error("shfl: not the lanes that it names");
    Lanes in = d.size() > 1 ? w.registers[d[1]] : Lanes{};
    each_lane(mask, [&](int l) {
      uint32_t by = uint32_t(w.registers[b][l]), segments = w.registers[c][l] >> 8 & 31, clamp = w.registers[c][l] & 31;
      int most = (l & segments) | (clamp & ~segments), j;
      bool inside;
      if (how == "bfly")
        j = l ^ int(by), inside = j <= most;
      else if (how == "idx")
        j = int((l & segments) | (by & ~segments & 31)), inside = j <= most;
      else if (how == "down")
        j = l + int(by), inside = j <= most;
      else if (how == "up")
        j = l - int(by), inside = j >= most;
      else
        unknown();
      in[l] = inside;
      w.registers[d[0]][l] = before[inside ? j : l];
    });
    if (d.size() > 1) w.registers[d[1]] = in;
  };
}

inline Step reduced(const Statement& s) {
  auto op = s.words[2];
  bool is_signed = s.type() == "s32";
  int d = s.operands[0].slot, a = s.operands[1].slot;
  return [=](Warp& w, uint32_t mask) {
    together(mask, "redux");
    uint32_t all = uint32_t(w.registers[a][0]);
    for (int l = 1; l < LANES; ++l) {
      uint32_t x = uint32_t(w.registers[a][l]);
      bool more = is_signed ? int32_t(x) > int32_t(all) : x > all;
      if (op == "add")
        all += x;
      else if (op == "and")
        all &= x;
      else if (op == "or")
        all |= x;
      else if (op == "xor")
        all ^= x;
      else if (op == "max")
        all = more ? x : all;
      else if (op == "min")
        all = more ? all : x;
      else
        unknown();
    }
    w.registers[d].fill(all);
  };
}

inline Step voted(const Statement& s) {
  int d = s.operands[0].slot, a = s.operands[1].slot;
  bool negated = s.operands[1].negated;
  auto how = s.words[2];
  if (how != "any" && how != "all" && how != "ballot") unknown();
  return [=](Warp& w, uint32_t mask) {
    uint32_t votes = 0;
    each_lane(mask, [&](int l) { votes |= uint32_t((w.registers[a][l] & 1) != negated) << l; });
    uint64_t result = how == "any" ? votes != 0 : how == "all" ? votes == mask : votes;
    each_lane(mask, [&](int l) { w.registers[d][l] = result; });
  };
}
