// What the device's memory is made of: addresses. Nobody reads or writes there, so the host has no page for them, and a
// device is as large as one likes.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace simulated {

constexpr size_t kTotal = size_t(139) << 30;  // an H200's

inline void* obtain(size_t nbytes, size_t) {
  void* data = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

inline void give_back(void* data, size_t nbytes) { munmap(data, nbytes); }

inline void poison(void*, size_t) {}

inline void retire(void* data, size_t nbytes, bool is_kept, int64_t, const std::vector<int64_t>&) {
  if (!is_kept) give_back(data, nbytes);
}

inline void copy_within(void*, const void*, size_t) {}

}  // namespace simulated
