// What streams and events are: a stream is the moment until which it is busy, an event a moment. Nothing is done in them;
// whoever waits sleeps until the moment has come.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

namespace simulated {

using Clock = std::chrono::steady_clock;

constexpr int kStreams = 33;  // the default one, and a pool of as many as CUDA's

class Mark {
 public:
  explicit Mark(Clock::time_point at) : at_(at) {}
  void wait() const { std::this_thread::sleep_until(at_); }
  bool passed() const { return at_ <= Clock::now(); }
  Clock::time_point at() const { return at_; }

 private:
  Clock::time_point at_;
};
using MarkPtr = std::shared_ptr<Mark>;

class Queue {
 public:
  void put(double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    busy_until_ = std::max(busy_until_, Clock::now()) +
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  void wait_until(Clock::time_point moment) {
    std::lock_guard<std::mutex> lock(mutex_);
    busy_until_ = std::max(busy_until_, moment);
  }
  Clock::time_point end() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::max(busy_until_, Clock::now());
  }
  bool idle() { return end() <= Clock::now(); }
  void wait() { std::this_thread::sleep_until(end()); }

 private:
  std::mutex mutex_;
  Clock::time_point busy_until_;
};

inline Queue& queue(int64_t stream) {
  static auto* queues = new std::array<Queue, kStreams>();
  return (*queues)[stream];
}

inline thread_local int64_t current = 0;  // the stream that this thread queues its work on

inline void wait_for_all() {
  for (int stream = 0; stream < kStreams; ++stream) queue(stream).wait();
}

inline void synchronize(int64_t stream) { queue(stream).wait(); }
inline void synchronize(const MarkPtr& mark) { mark->wait(); }
inline void synchronize_all() { wait_for_all(); }

inline MarkPtr mark(int64_t stream) { return std::make_shared<Mark>(queue(stream).end()); }
inline void have_wait(int64_t stream, const MarkPtr& mark) { queue(stream).wait_until(mark->at()); }

// Have the stream do nothing else for so long.
inline void sleep(double seconds) { queue(current).put(seconds); }

}  // namespace simulated
