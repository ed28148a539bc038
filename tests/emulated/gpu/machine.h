// A block of threads at work: warps that run one after another from barrier to barrier, shared
// memory that knows who touched it since the last one, and memory outside that belongs to the
// call's tensors or to nobody.
#pragma once

#include <array>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <unordered_map>

#include "program.h"

constexpr int LANES = 32;
constexpr uint32_t ALL = 0xffffffffu;
constexpr uint64_t LOCAL = uint64_t(1) << 62;  // where a thread's own memory begins among all addresses
using Lanes = std::array<uint64_t, LANES>;

struct Warp;
using Step = std::function<void(Warp&, uint32_t)>;

// Numbers that are 0 at first. Of many, only the pages that are touched take memory.
class Zeros {
 public:
  explicit Zeros(uint64_t n) : data_(static_cast<uint32_t*>(std::calloc(n ? n : 1, sizeof(uint32_t))), std::free) {
    if (!data_) throw std::bad_alloc();
  }
  uint32_t& operator[](uint64_t at) { return data_.get()[at]; }

 private:
  std::unique_ptr<uint32_t, decltype(&std::free)> data_;
};

struct Region {
  uint64_t begin, end;
  Zeros writer, reader;  // of each byte: 1 + the block that wrote or read it
};
constexpr uint32_t MANY = 0xffffffffu;  // blocks have read it

struct Launch {
  const uint8_t* parameters;
  uint32_t grid[3];
  std::vector<Region> regions;
  bool backwards;  // blocks and warps from the last to the first

  Region& region(uint64_t address, uint64_t bytes) {
    for (auto& one : regions)
      if (one.begin <= address && address + bytes <= one.end) return one;
    std::ostringstream said;
    said << "out of bounds: " << bytes << " bytes at " << std::hex << address;
    for (auto& one : regions) {
      int64_t beyond = address >= one.begin ? int64_t(address + bytes - one.end) : -int64_t(one.begin - address);
      if (std::llabs(beyond) < (1 << 20))
        said << std::dec << "; " << std::llabs(beyond) << (beyond > 0 ? " beyond" : " before") << " a tensor of "
             << one.end - one.begin;
    }
    throw Error(said.str());
  }
};

struct Block {
  // Of one byte of shared memory, or four of the other: who wrote and who read since which barrier.
  struct Touched {
    uint32_t written = 0, read = 0;
    uint16_t writer = 0, readers = 0;
  };
  std::vector<uint8_t> shared;
  std::vector<Touched> touched;
  std::unordered_map<uint64_t, Touched> far;
  uint32_t phase = 1;
  int now = 0;  // the warp that runs
  uint32_t number;
  Launch& launch;

  Block(Launch& call, uint32_t at, int bytes) : shared(bytes, 0xff), touched(bytes), number(at), launch(call) {}

  void inside(uint64_t address, int bytes) {
    if (address + bytes > shared.size() || address % std::min(bytes, 16))
      throw Error("shared memory: " + std::to_string(bytes) + " bytes at " + std::to_string(address) + " of " +
                  std::to_string(shared.size()));
  }

  void read_by(int warp, uint64_t address, int bytes) {
    inside(address, bytes);
    for (auto* x = &touched[address]; x != &touched[address] + bytes; ++x) reads(*x, warp, "shared");
  }

  void reads(Touched& x, int warp, const char* where) {
    if (x.written == phase && x.writer != warp)
      throw Error(race(where, x.writer, "wrote what " + std::to_string(warp) + " reads"));
    if (x.read != phase) x.readers = 0;
    x.read = phase, x.readers |= 1 << warp;
  }

  void writes(Touched& x, int warp, const char* where) {
    if (x.written == phase && x.writer != warp)
      throw Error(race(where, x.writer, "wrote what " + std::to_string(warp) + " writes"));
    if (x.read == phase && x.readers & ~(1 << warp)) throw Error(race(where, warp, "writes what another has read"));
    x.written = phase, x.writer = uint16_t(warp);
  }

  // Storing what is there already hurts nobody; `contents` is null where they come later.
  void written_by(int warp, uint64_t address, int bytes, const void* contents) {
    inside(address, bytes);
    if (contents && !std::memcmp(&shared[address], contents, bytes)) return;
    for (auto* x = &touched[address]; x != &touched[address] + bytes; ++x) writes(*x, warp, "shared");
    if (contents) std::memcpy(&shared[address], contents, bytes);
  }

  static std::string race(const std::string& where, int warp, const std::string& does) {
    return "race in " + where + " memory: since the last barrier warp " + std::to_string(warp) + " " + does;
  }

  void load(uint64_t address, int bytes, void* to, int aligned = 0) {
    if (address % (aligned ? aligned : bytes))
      throw Error("not aligned: " + std::to_string(bytes) + " bytes at " + std::to_string(address));
    Region& one = launch.region(address, bytes);
    for (uint64_t at = address - one.begin; at < address + bytes - one.begin; ++at)
      if (one.writer[at] && one.writer[at] != number + 1)
        throw Error("race: reads what another block of the grid writes");
      else
        one.reader[at] = one.reader[at] && one.reader[at] != number + 1 ? MANY : number + 1;
    for (uint64_t word = address & ~3ull; word < address + bytes && bytes >= 4; word += 4)
      reads(far[word], now, "global");
    std::memcpy(to, reinterpret_cast<void*>(address), bytes);
  }

  void store(uint64_t address, int bytes, const void* from) {
    if (address % bytes) throw Error("not aligned: " + std::to_string(bytes) + " bytes at " + std::to_string(address));
    Region& one = launch.region(address, bytes);
    auto* there = reinterpret_cast<void*>(address);
    bool same = !std::memcmp(there, from, bytes);
    for (uint64_t at = address - one.begin; at < address + bytes - one.begin; ++at) {
      if (one.writer[at] && one.writer[at] != number + 1 && !same)
        throw Error("race: two blocks of the grid write different contents");
      if (one.reader[at] && one.reader[at] != number + 1 && !same)
        throw Error("race: writes what another block of the grid reads");
      one.writer[at] = number + 1;
    }
    for (uint64_t word = address; word < address + bytes && bytes >= 4 && !same; word += 4)
      writes(far[word], now, "global");
    std::memcpy(there, from, bytes);
  }
};

// What has been asked for and comes when it is waited for, no sooner.
class Later {
 public:
  void add(std::function<void()> work) { open_.push_back(std::move(work)); }
  void commit() { groups_.push_back(std::move(open_)), open_.clear(); }
  void wait(size_t pending) {
    for (; groups_.size() > pending; groups_.pop_front())
      for (auto& work : groups_.front()) work();
  }
  bool empty() const { return groups_.empty() && open_.empty(); }

 private:
  std::vector<std::function<void()>> open_;
  std::deque<std::vector<std::function<void()>>> groups_;
};

struct Warp {
  Block& block;
  int number;
  std::vector<Lanes> registers;
  std::array<int, LANES> at{};
  uint32_t live = ALL;
  Later copies, products;
  std::vector<uint8_t> local;  // each lane's own memory

  Warp(Block& home, int which, const Program& program)
      : block(home), number(which), registers(program.slots), local(LANES * program.local_bytes, 0xff) {
    for (auto& one : registers) one.fill(0x7fc0dead7fc0deadull);  // a number that no register holds by right
    for (auto& [slot, bits] : program.constants) registers[slot].fill(bits);
    uint32_t rest = home.number;
    for (auto& [name, slot] : program.special) {
      uint32_t* grid = home.launch.grid;
      char axis = name.back();
      uint32_t place[3] = {rest % grid[0], rest / grid[0] % grid[1], rest / grid[0] / grid[1]};
      for (int lane = 0; lane < LANES; ++lane) {
        uint64_t& x = registers[slot][lane];
        if (name == "%tid.x")
          x = LANES * which + lane;
        else if (name == "%laneid")
          x = lane;
        else if (name == "%warpid")
          x = which;
        else if (name.rfind("%ctaid.", 0) == 0)
          x = place[axis - 'x'];
        else if (name.rfind("%nctaid.", 0) == 0)
          x = grid[axis - 'x'];
        else if (name == "%ntid.x")
          x = program.threads;
        else
          throw Error("not emulated: " + name);
      }
    }
  }

  uint8_t* own(int lane, uint64_t address, int bytes) {
    uint64_t each = local.size() / LANES, at = address - LOCAL;
    if (at + bytes > each || at % bytes)
      throw Error("local memory: " + std::to_string(bytes) + " bytes at " + std::to_string(at));
    return &local[lane * each + at];
  }
};
