// The device's random numbers. Like CUDA's they follow from a seed and from how many were drawn since, so that a draw can
// be repeated. The numbers themselves are the CPU's: each draw seeds a generator of its own.
#pragma once

#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>

namespace simulated {

class Generator final : public c10::GeneratorImpl {
 public:
  Generator() : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({2 * sizeof(uint64_t)}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }

  // What a kernel draws from, on the CPU.
  at::Generator draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    offset_ += 4;  // CUDA's are drawn by fours
    return at::detail::createCPUGenerator((seed_ * 0x9e3779b97f4a7c15ull) ^ (offset_ * 0xbf58476d1ce4e5b9ull));
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator();
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline const at::Generator& default_generator() {
  static auto* made = new at::Generator(at::make_generator<Generator>());
  return *made;
}

inline at::Generator draw(const std::optional<at::Generator>& generator) {
  return (generator.has_value() ? *generator : default_generator()).get<Generator>()->draw();
}

}  // namespace simulated
