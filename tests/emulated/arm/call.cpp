// Runs one call of the kernels on memory that comes in a file, and writes that memory back: see
// plugin.py.
//
// The file, in 64-bit words: whether it is the backward, the numbers of regions and of arguments;
// address and bytes of each region; the arguments; what the regions hold. An argument is -1 and a
// pointer, or a structure: the number of its words, the words, and how many and which of them are
// pointers.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" int softfocus_forward(const void*, const void*, const void*, const void*, void*, float*);
extern "C" int softfocus_backward(const void*, const void*, const void*, void*, void*, void*, float*, float*);

namespace {

FILE* file;

void read(void* to, size_t bytes) {
  if (bytes && std::fread(to, bytes, 1, file) != 1) std::abort();
}

int64_t word() {
  int64_t x;
  read(&x, sizeof x);
  return x;
}

struct Region {
  int64_t address, bytes;
  char* data;
};

}  // namespace

int main(int, char** names) {
  file = std::fopen(names[1], "r+b");
  if (!file) std::abort();
  bool backward = word();
  std::vector<Region> regions(word());
  std::vector<void*> a(word());
  for (Region& r : regions) {
    r.address = word(), r.bytes = word();
    r.data = static_cast<char*>(std::aligned_alloc(64, (r.bytes + 63) / 64 * 64));
  }
  auto here = [&](int64_t pointer) -> void* {
    for (Region& r : regions)
      if (pointer >= r.address && pointer < r.address + r.bytes) return r.data + (pointer - r.address);
    return nullptr;
  };
  std::vector<std::vector<int64_t>> structures(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    int64_t words = word();
    if (words < 0) {
      a[i] = here(word());
      continue;
    }
    structures[i].resize(words);
    read(structures[i].data(), 8 * words);
    for (int64_t n = word(); n; --n) {
      int64_t& pointer = structures[i].at(word());
      pointer = reinterpret_cast<int64_t>(here(pointer));
    }
    a[i] = structures[i].data();
  }
  long start = std::ftell(file);
  for (Region& r : regions) read(r.data, r.bytes);
  auto floats = [&](size_t i) { return static_cast<float*>(a.at(i)); };
  int failed = backward ? softfocus_backward(a[0], a[1], a[2], a[3], a[4], a[5], floats(6), floats(7))
                        : softfocus_forward(a[0], a[1], a[2], a[3], a[4], floats(5));
  std::fseek(file, start, SEEK_SET);
  for (Region& r : regions)
    if (r.bytes && std::fwrite(r.data, r.bytes, 1, file) != 1) std::abort();
  return std::fclose(file) ? 2 : failed;
}
