// What the device's memory is made of: the host's. What nobody has written holds NaN, and what is freed holds NaN again,
// from its stream's turn on: whoever reads it on another stream without waiting finds that.
#pragma once

#include "queues.h"

#include <cstdlib>
#include <cstring>
#include <vector>

namespace simulated {

constexpr size_t kTotal = size_t(8) << 30;  // taken of the host's, as it is used

inline void* obtain(size_t nbytes, size_t alignment) {
  void* data = nullptr;
  return posix_memalign(&data, alignment, nbytes) == 0 ? data : nullptr;
}

inline void give_back(void* data, size_t) { free(data); }

inline void poison(void* data, size_t nbytes) { memset(data, 0xff, nbytes); }  // a NaN of every floating-point dtype

// Of a block that is not used any more, once the streams that it was used by are done with it. Large ones come and go
// without NaN: tests with gigabytes would take minutes, or all the memory.
inline void retire(void* data, size_t nbytes, bool is_kept, int64_t stream, const std::vector<int64_t>& used_by) {
  std::vector<MarkPtr> last_uses;
  for (auto user : used_by) last_uses.push_back(mark(user));
  bool now = queue(stream).idle() && !longest_delay;
  for (auto& use : last_uses) now = now && use->passed();
  Work clear = [data, nbytes, is_kept, last_uses] {
    for (auto& use : last_uses) use->wait();
    if (is_kept)
      poison(data, nbytes);
    else
      give_back(data, nbytes);
  };
  if (now)
    clear();
  else
    queue(stream).put(std::move(clear));
}

inline void copy_within(void* to, const void* from, size_t nbytes) {
  launch([to, from, nbytes] { memcpy(to, from, nbytes); });
}

}  // namespace simulated
