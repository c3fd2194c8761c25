// Streams and events. Each stream is a thread that does what is queued on it in order; an event is a place in a queue.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

namespace simulated {

using Clock = std::chrono::steady_clock;
using Work = std::function<void()>;

const c10::Device kDevice(c10::kCUDA, 0);
constexpr int kStreams = 33;  // the default one, and a pool of as many as CUDA's

// In microseconds. With it one in 16 of the things queued begins late, by up to so much: races that a lucky order would
// hide are lost. The orders are the same in each run, as far as the threads let them.
inline std::atomic<int> longest_delay{0};

// What went wrong in a stream, such as an index out of bounds: as on the hardware, whoever waits next is told.
inline std::mutex failure_mutex;
inline std::exception_ptr failure;

inline void raise_failure() {
  std::lock_guard<std::mutex> lock(failure_mutex);
  if (auto raised = std::exchange(failure, nullptr)) std::rethrow_exception(raised);
}

// A place in a queue. The stream has passed it once all that was queued in front of it is done.
class Mark {
 public:
  void pass() {
    std::lock_guard<std::mutex> lock(mutex_);
    at_ = Clock::now();
    passed_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return passed_; });
  }
  bool passed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return passed_;
  }
  Clock::time_point at() {
    std::lock_guard<std::mutex> lock(mutex_);
    return at_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  Clock::time_point at_;
};
using MarkPtr = std::shared_ptr<Mark>;

class Queue {
 public:
  void put(Work work) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    waiting_.push_back(std::move(work));
    more_.notify_one();
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return waiting_.empty() && !busy_;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return waiting_.empty() && !busy_; });
  }
  void number(int64_t stream) { random_.seed(stream + 1); }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      more_.wait(lock, [this] { return !waiting_.empty(); });
      auto work = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      linger();
      attempt(work);
      work = nullptr;  // what it holds goes before anybody hears that it is done
      lock.lock();
      busy_ = false;
      if (waiting_.empty()) idle_.notify_all();
    }
  }
  void linger() {
    if (int longest = longest_delay; longest && random_() % 16 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % longest));
  }
  static void attempt(const Work& work) {
    c10::InferenceMode no_autograd(true);
    try {
      work();
    } catch (...) {
      std::lock_guard<std::mutex> lock(failure_mutex);
      failure = std::current_exception();
    }
  }

  std::mutex mutex_;
  std::condition_variable more_, idle_;
  std::deque<Work> waiting_;
  std::minstd_rand random_;
  bool busy_ = false, started_ = false;
};

inline Queue& queue(int64_t stream) {
  static auto* queues = [] {  // never destroyed: their threads run until the process ends
    auto* made = new std::array<Queue, kStreams>();
    for (int stream = 0; stream < kStreams; ++stream) (*made)[stream].number(stream);
    return made;
  }();
  return (*queues)[stream];
}

inline void wait_for_all() {
  for (int stream = 0; stream < kStreams; ++stream) queue(stream).wait();
}

inline void synchronize(int64_t stream) {
  queue(stream).wait();
  raise_failure();
}

inline thread_local int64_t current = 0;  // the stream that this thread queues its work on

inline MarkPtr mark(int64_t stream) {
  auto made = std::make_shared<Mark>();
  if (queue(stream).idle())
    made->pass();
  else
    queue(stream).put([made] { made->pass(); });
  return made;
}

// Whether what this thread queues now has nothing in front of it, nor is to be late: it can as well be done at once,
// which spares two changes of threads.
inline bool at_once() { return !longest_delay && queue(current).idle(); }

inline void launch(Work work) {
  if (at_once())
    work();
  else
    queue(current).put(std::move(work));
}

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
  void synchronizeDevice(const c10::DeviceIndex) const override {
    wait_for_all();
    raise_failure();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, stream);
  }

  // An event is a pointer to the mark that it was last recorded as: whoever waits for it waits for what it was then.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr();
    of(*event) = mark(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto mark = of(event);
    if (!mark->passed()) queue(stream.id()).put([mark] { mark->wait(); });
  }
  bool queryEvent(void* event) const override { return !event || of(event)->passed(); }
  void synchronizeEvent(void* event) const override {
    if (event) of(event)->wait();
    raise_failure();
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
