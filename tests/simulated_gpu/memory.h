// The device's memory, and host memory that is pinned for it. What nobody has written holds NaN, and what is freed holds
// NaN again, from its stream's turn on: whoever reads it on another stream without waiting finds that.
#pragma once

#include "streams.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace simulated {

constexpr size_t kTotal = size_t(8) << 30;  // taken of the host's, as it is used
constexpr size_t kGranule = 512;            // as torch's allocator for CUDA

// Larger blocks go back to the host, and come without NaN: tests with gigabytes would take minutes, or all the memory.
constexpr size_t kKept = size_t(64) << 20;

inline void poison(void* data, size_t nbytes) {
  if (nbytes <= kKept) memset(data, 0xff, nbytes);  // a NaN of every floating-point dtype
}

struct Block {
  void* data;
  size_t nbytes;
  int64_t stream;  // that it was taken on: its next user on that stream comes behind its last one
  std::vector<int64_t> used_by;
};

// Gives memory that was freed to whoever comes next on the same stream, at once, as torch's allocator does.
class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    if (wanted == 0) return {nullptr, nullptr, &drop, kDevice};
    size_t nbytes = (wanted + kGranule - 1) / kGranule * kGranule;
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(
        OutOfMemoryError, figures_.allocated + nbytes <= kTotal, "CUDA out of memory. Tried to allocate ", nbytes,
        " bytes of the simulated device's ", kTotal);
    auto* block = take(nbytes);
    figures_.allocated += nbytes;
    figures_.peak = std::max(figures_.peak, figures_.allocated);
    figures_.peak_reserved = std::max(figures_.peak_reserved, figures_.reserved);
    return {block->data, block, &drop, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    wait_for_all();
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [key, block] : unused_) {
      figures_.reserved -= block->nbytes;
      free(block->data);
      delete block;
    }
    unused_.clear();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &drop || !data.get_context()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = static_cast<Block*>(data.get_context());
    if (stream.id() != block->stream) block->used_by.push_back(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex = 0) override {
    std::lock_guard<std::mutex> lock(mutex_);
    figures_.peak = figures_.allocated;
    figures_.peak_reserved = figures_.reserved;
  }

  struct Figures {
    size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0;
  };
  Figures figures() {
    std::lock_guard<std::mutex> lock(mutex_);
    return figures_;
  }

 private:
  Block* take(size_t nbytes) {
    auto found = unused_.find({current, nbytes});
    if (found != unused_.end()) {
      auto* block = found->second;
      unused_.erase(found);
      return block;
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, kGranule, nbytes) == 0, "the host has no memory for the simulated device");
    poison(data, nbytes);
    figures_.reserved += nbytes;
    return new Block{data, nbytes, current, {}};
  }
  static void drop(void* context);

  std::mutex mutex_;
  Figures figures_;
  std::multimap<std::pair<int64_t, size_t>, Block*> unused_;
};

inline Memory& memory() {
  static auto* made = new Memory();  // never destroyed: tensors may outlive it
  return *made;
}

inline void Memory::drop(void* context) {
  if (!context) return;
  auto* block = static_cast<Block*>(context);
  bool is_kept = block->nbytes <= kKept;
  std::vector<MarkPtr> last_uses;
  for (auto stream : std::exchange(block->used_by, {})) last_uses.push_back(mark(stream));
  bool now = queue(block->stream).idle() && !longest_delay;
  for (auto& use : last_uses) now = now && use->passed();
  Work clear = [data = block->data, nbytes = block->nbytes, is_kept, last_uses] {
    for (auto& use : last_uses) use->wait();
    poison(data, nbytes);
    if (!is_kept) free(data);
  };
  if (now)
    clear();
  else
    queue(block->stream).put(std::move(clear));
  auto& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex_);
  all.figures_.allocated -= block->nbytes;
  if (is_kept) {
    all.unused_.emplace(std::make_pair(block->stream, block->nbytes), block);
  } else {
    all.figures_.reserved -= block->nbytes;
    delete block;
  }
}

inline void record_use(const c10::DataPtr& data, const c10::Stream& stream) { memory().recordStream(data, stream); }

// Host memory that is pinned, by address. The codes are CUDA's.
class Pinned {
 public:
  int add(uintptr_t address, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = ranges_.lower_bound(address);
    if (next != ranges_.end() && next->first < address + nbytes) return kAlreadyRegistered;
    if (holds(address)) return kAlreadyRegistered;
    ranges_[address] = nbytes;
    return 0;
  }
  int remove(uintptr_t address) {
    wait_for_all();  // as CUDA does: no copy may find its memory gone
    std::lock_guard<std::mutex> lock(mutex_);
    return ranges_.erase(address) ? 0 : kNotRegistered;
  }
  bool has(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return holds(reinterpret_cast<uintptr_t>(data));
  }

 private:
  static constexpr int kAlreadyRegistered = 712, kNotRegistered = 713;

  bool holds(uintptr_t address) {
    auto next = ranges_.upper_bound(address);
    return next != ranges_.begin() && std::prev(next)->first + std::prev(next)->second > address;
  }

  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

inline Pinned& pinned() {
  static auto* made = new Pinned();
  return *made;
}

// What `pin_memory()` takes.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &drop, c10::kCPU};
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 4096, nbytes) == 0, "the host has no memory to pin");
    pinned().add(reinterpret_cast<uintptr_t>(data), nbytes);
    return {data, data, &drop, c10::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

 private:
  static void drop(void* data) {
    if (!data) return;
    pinned().remove(reinterpret_cast<uintptr_t>(data));
    free(data);
  }
};

inline PinnedMemory& pinned_memory() {
  static auto* made = new PinnedMemory();
  return *made;
}

}  // namespace simulated
