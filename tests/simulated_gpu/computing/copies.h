// The device's memory as the CPU's kernels see it, and what is copied between the two.
#pragma once

#include "tensors.h"

#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/from_blob.h>

namespace simulated {

// The device's memory as a tensor of the CPU's. It owns nothing: like a kernel, it knows an address.
inline Tensor seen_by_cpu(const Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  TORCH_CHECK(tensor.has_storage(), "the simulated device has dense tensors only");
  auto& theirs = tensor.storage();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), theirs.nbytes(), c10::DataPtr(const_cast<void*>(theirs.data()), c10::kCPU),
      /*allocator=*/nullptr, /*resizable=*/false);
  auto made = over(std::move(storage), c10::DispatchKey::CPU, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// What the CPU computed, as a tensor of the device: its values appear in the stream's turn.
inline Tensor to_device(const Tensor& made) {
  if (!made.defined()) return made;
  Tensor result = at::detail::empty_strided_generic(
      made.sizes(), made.strides(), &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA), made.scalar_type());
  if (made.numel()) launch([to = seen_by_cpu(result), made]() mutable { to.copy_(made); });
  return result;
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  at::AutoDispatchBelowADInplaceOrView below;
  auto expanded = source.expand(self.sizes());
  auto from = seen_by_cpu(expanded), to = seen_by_cpu(self);
  if (self.is_cuda() && source.is_cuda()) {
    launch([to, from]() mutable { to.copy_(from); });
    return self;
  }
  auto& host = self.is_cuda() ? from : to;
  if (is_asynchronous(host, self.is_cuda() ? to : from, non_blocking)) {
    // As the hardware, which knows addresses and holds nothing. Always by the stream's thread: meanwhile others compute.
    host = at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options());
    queue(current).put([to, from]() mutable { to.copy_(from); });
    return self;
  }
  synchronize(current);
  to.copy_(from);
  return self;
}

inline at::Scalar local_scalar(const Tensor& self) {
  synchronize(current);
  return at::_local_scalar_dense(seen_by_cpu(self));
}

}  // namespace simulated
