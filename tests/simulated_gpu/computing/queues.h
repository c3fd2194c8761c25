// What streams and events are: each stream is a thread that does what is queued on it in order, an event a place in a queue.
#pragma once

#include <c10/core/InferenceMode.h>

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

inline void synchronize(const MarkPtr& mark) {
  mark->wait();
  raise_failure();
}

inline void synchronize_all() {
  wait_for_all();
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

inline void have_wait(int64_t stream, const MarkPtr& mark) {
  if (!mark->passed()) queue(stream).put([mark] { mark->wait(); });
}

// Have the stream do nothing else for so long.
inline void sleep(double seconds) {
  queue(current).put([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
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

}  // namespace simulated
