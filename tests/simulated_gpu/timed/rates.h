// How long things take.
#pragma once

#include "queues.h"

namespace simulated {

// By the second; the launch of a kernel in seconds. device.py has their values.
struct Rates {
  double link, memory, products, attention, attention_backward, launch;
};
inline Rates rates;

// A kernel that does `amount` of something at `rate`.
inline void takes(double amount, double rate) { queue(current).put(rates.launch + amount / rate); }

}  // namespace simulated
