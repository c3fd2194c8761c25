// Tensors of the device: made, shown, and given other memory. What copies them is a kernel, and a mode's own.
#pragma once

#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

namespace simulated {

using at::Tensor;

inline bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

inline Tensor over(c10::Storage storage, c10::DispatchKey key, const Tensor& shown) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), shown.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shown.sizes(), shown.strides(), shown.storage_offset());
  if (shown.is_conj()) made._set_conj(true);
  if (shown.is_neg()) made._set_neg(true);
  return made;
}

// The device's tensor that shows of `base` what `shown`, a view of the same memory, does.
inline Tensor view_of(const Tensor& base, const Tensor& shown) {
  return over(c10::Storage(base.storage()), c10::DispatchKey::CUDA, shown);
}

inline Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// Whether a copy between host and device is left to the stream. Any other is made of parts that the host waits for.
inline bool is_asynchronous(const Tensor& host, const Tensor& device, bool non_blocking) {
  bool alike = host.scalar_type() == device.scalar_type() && host.strides() == device.strides() &&
      host.is_non_overlapping_and_dense();
  if (!alike || !non_blocking || !pinned().has(host.data_ptr())) return false;
  auto* last = static_cast<const char*>(host.data_ptr()) + host.nbytes() - 1;
  TORCH_CHECK(pinned().has(last), "CUDA error: invalid argument (the end of this host memory is not pinned)");
  return true;
}

// What `tensor` is, without its values: what torch computes with it are shapes.
inline Tensor without_values(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// ---------------------------------------------------------------- other memory

inline void make_room(c10::StorageImpl* storage, size_t nbytes) {
  size_t had = storage->nbytes();
  if (nbytes <= had) return;
  auto fresh = memory().allocate(nbytes);
  if (had) copy_within(fresh.get(), storage->data(), had);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    make_room(self.storage().unsafeGetStorageImpl(), (self.numel() + self.storage_offset()) * self.element_size());
  }
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

inline Tensor& set_storage(
    Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  return self;
}

inline Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.element_size();
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline Tensor& set_nothing(Tensor& self) {
  at::Storage storage(c10::Storage::use_byte_size_t(), 0, memory().allocate(0), &memory(), /*resizable=*/true);
  return set_storage(self, std::move(storage), 0, {0}, {1});
}

inline bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().is_alias_of(other.storage()) && self.storage_offset() == other.storage_offset() &&
      self.sizes() == other.sizes() && self.strides() == other.strides();
}

inline void record_stream(Tensor& self, at::Stream stream) {
  memory().recordStream(self.storage().data_ptr(), stream);
}

}  // namespace simulated
