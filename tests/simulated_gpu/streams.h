// What torch asks about streams and events. What these are, computing/ and timed/ say, each in a queues.h.
#pragma once

#include "queues.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

const c10::Device kDevice(c10::kCUDA, 0);

void record_use(const c10::DataPtr& data, const c10::Stream& stream);  // of memory.h

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return numbered(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return numbered(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return next(); }
  c10::Stream getNewStream(c10::Device, int) const override { return next(); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return numbered(std::exchange(current, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override { return queue(stream.id()).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, stream);
  }

  // An event is a pointer to the mark that it was last recorded as: whoever waits for it waits for what it was then.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr();
    of(*event) = mark(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) have_wait(stream.id(), of(event));
  }
  bool queryEvent(void* event) const override { return !event || of(event)->passed(); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(of(event));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(of(from)->passed() && of(to)->passed(), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(of(to)->at() - of(from)->at()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }

 private:
  static MarkPtr& of(void* event) { return *static_cast<MarkPtr*>(event); }
  static c10::Stream numbered(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  static c10::Stream next() {
    static std::atomic<int> given{0};
    return numbered(1 + given++ % (kStreams - 1));
  }
};

}  // namespace simulated
