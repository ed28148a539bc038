// A GPU that is slow and strict: Triton's PTX, instruction by instruction, for the tests (see
// plugin.py).
#include "kernel.h"

namespace {
int said(const std::exception& e, char* to, int bytes) {
  std::snprintf(to, bytes, "%s", e.what());
  return 1;
}
}  // namespace

extern "C" {

// parameters: offset and bytes of each, [n][2], with room for `most`; their number comes back in
// `count`.
int load(const char* text, void** kernel, int* parameters, int most, int* count, char* error, int error_bytes) {
  try {
    auto made = std::make_unique<Kernel>(text);
    auto& known = made->program().parameters;
    *count = int(known.size());
    if (*count > most) throw Error("more parameters than there is room for");
    for (int n = 0; n < *count; ++n) parameters[2 * n] = known[n].first, parameters[2 * n + 1] = known[n].second;
    *kernel = made.release();
    return 0;
  } catch (std::exception& e) {
    return said(e, error, error_bytes);
  }
}

// regions: first and last + 1 byte of each tensor that may be touched, [n][2].
int launch(const void* kernel, const uint32_t* grid, const uint8_t* parameters, const uint64_t* regions, int n,
           int shared_bytes, int warps, int backwards, char* error, int error_bytes) {
  try {
    Launch call{parameters, {grid[0], grid[1], grid[2]}, {}, backwards != 0};
    for (int i = 0; i < n; ++i) {
      uint64_t begin = regions[2 * i], end = regions[2 * i + 1];
      call.regions.push_back({begin, end, Zeros(end - begin), Zeros(end - begin)});
    }
    static_cast<const Kernel*>(kernel)->run(call, shared_bytes, warps);
    return 0;
  } catch (std::exception& e) {
    return said(e, error, error_bytes);
  }
}
}
