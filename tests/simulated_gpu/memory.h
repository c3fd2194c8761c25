// The device's memory, and host memory that is pinned for it. What a block is made of, computing/ and timed/ say, each in
// a blocks.h.
#pragma once

#include "blocks.h"
#include "streams.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <map>
#include <vector>

namespace simulated {

constexpr size_t kGranule = 512;            // as torch's allocator for CUDA
constexpr size_t kKept = size_t(64) << 20;  // larger blocks go back to the host at once

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
      give_back(block->data, block->nbytes);
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
    void* data = obtain(nbytes, kGranule);
    TORCH_CHECK(data, "the host has no memory for the simulated device");
    if (nbytes <= kKept) poison(data, nbytes);
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
  retire(block->data, block->nbytes, is_kept, block->stream, std::exchange(block->used_by, {}));
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
