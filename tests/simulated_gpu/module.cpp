// A CUDA device that is not there: memory, streams and events of the host's, under torch's name "cuda", for a torch that
// is built without CUDA. It must be loaded before torch is imported, which asks once what there is. There are two: with
// computing/ on the path of headers its streams are threads and its kernels the CPU's; with timed/ nothing is computed,
// and all takes the time that it would take on hardware.
#include "operators.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace simulated {

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  return copy_(to, self, non_blocking);
}

// What torch asks about CUDA.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return pinned().has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  void deviceSynchronize(c10::DeviceIndex) const override { Guard().synchronizeDevice(0); }
};

}  // namespace simulated

using namespace simulated;

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}
namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention);
}
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<kFallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", simulated::empty);
  m.impl("empty_strided", simulated::empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_stream);
  // Views look at no values.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);

  register_operators(m);
  // Without a kernel the former would look for cuDNN, and the latter be put together of others, with memory for each.
  for (auto* name : {"convolution", "convolution_overrideable", "convolution_backward", "silu_backward", "mish_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<kFallback>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;  // while others are waited for, who may need the interpreter
  c10::SetAllocator(c10::kCUDA, &memory(), 100);
  define(m);
  m.def("default_generator", [] { return default_generator(); });
  m.def("current_stream", [] { return current; });
  m.def("pin", [](uintptr_t address, size_t nbytes) { return pinned().add(address, nbytes); });
  m.def("unpin", [](uintptr_t address) { return pinned().remove(address); }, Unlocked());
  m.def("total_memory", [] { return kTotal; });
  m.def("memory_allocated", [] { return memory().figures().allocated; });
  m.def("max_memory_allocated", [] { return memory().figures().peak; });
  m.def("memory_reserved", [] { return memory().figures().reserved; });
  m.def("max_memory_reserved", [] { return memory().figures().peak_reserved; });
  m.def("reset_peak_memory_stats", [] { memory().resetPeakStats(); });
  m.def("empty_cache", [] { memory().emptyCache(); }, Unlocked());
  m.def("sleep", [](int64_t cycles) { simulated::sleep(cycles / 1.7e9); });
}
