// What is copied: nothing, but it takes its time.
#pragma once

#include "rates.h"
#include "tensors.h"

#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/ones.h>

namespace simulated {

// What the host waits for it may look at: so little of it is zero. More is left alone, since touched memory is taken.
constexpr int64_t kLookedAt = 4096;

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  at::AutoDispatchBelowADInplaceOrView below;
  if (self.is_cuda() && source.is_cuda()) {
    takes(double(self.nbytes() + source.nbytes()), rates.memory);
    return self;
  }
  takes(double(self.nbytes()), rates.link);
  auto expanded = source.expand(self.sizes());
  if (is_asynchronous(self.is_cuda() ? expanded : self, self.is_cuda() ? self : expanded, non_blocking)) return self;
  synchronize(current);
  if (!self.is_cuda() && self.numel() <= kLookedAt) self.zero_();
  return self;
}

// Whatever number the host asks for is 1.
inline at::Scalar local_scalar(const Tensor& self) {
  synchronize(current);
  return at::_local_scalar_dense(at::ones({}, self.options().device(c10::kCPU)));
}

}  // namespace simulated
