// Every operator that has no kernel of its own on the device: the CPU's kernel, on the device's memory.
//
// A kernel that only writes into tensors which are there already, as nearly all do at last, is queued on its stream, and
// the host goes on. What makes new tensors, or draws conclusions from values, is computed while the host waits.
#pragma once

#include "arguments.h"
#include "copies.h"
#include "random.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <set>
#include <string>

namespace simulated {

// They take indices that are on the CPU, and bring them over themselves.
const std::set<std::string> kTakeIndicesOfCpu = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

// A call as it was made, and the same call with tensors of the CPU's.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack), schema_(op.schema()) {
    auto count = schema_.arguments().size();
    given_.assign(stack->end() - count, stack->end());
    stack->resize(stack->size() - count);
    for (size_t i = 0; i < count; ++i) translated_.push_back(translate(given_[i], schema_.arguments()[i]));
    TORCH_CHECK(
        !any_of_device_ || !any_of_cpu_ || kTakeIndicesOfCpu.count(schema_.name()),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (when checking "
        "arguments for ", schema_.name(), ")");
    TORCH_CHECK(
        !op.hasTag(at::Tag::nondeterministic_seeded) || drawn_, schema_.name(),
        " draws random numbers and takes no generator: the simulated device needs a kernel for it");
  }

  void run() {
    if (!at_once() && can_be_queued())
      queue_up();
    else
      compute();
  }

 private:
  at::IValue translate(const at::IValue& value, const c10::Argument& argument) {
    bool write = is_written(argument);
    if (holds_tensors(value)) return with_each(value, [&](const Tensor& tensor) { return seen(tensor, write); });
    if (value.isDevice() && value.toDevice().is_cuda()) {
      makes_for_device_ = true;
      return c10::Device(c10::kCPU);
    }
    if (argument.name() == "generator" && op_.hasTag(at::Tag::nondeterministic_seeded)) {
      drawn_ = true;
      return draw(value.toOptional<at::Generator>());
    }
    return value;
  }

  Tensor seen(const Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      if (tensor.dim() == 0) return tensor.clone();  // a number: what it is now counts, however late the kernel is
      any_of_cpu_ = true;
      return tensor;
    }
    any_of_device_ = true;
    if (!write) return seen_by_cpu(tensor);
    // An output that is empty is there to be resized, which memory of the device's cannot be by the CPU.
    auto target = tensor.numel() ? seen_by_cpu(tensor) : at::empty({0}, tensor.options().device(c10::kCPU));
    written_.emplace_back(tensor, target);
    return target;
  }

  // Whether all results go to tensors that are large enough already. The shapes are computed without values.
  bool can_be_queued() {
    if (written_.empty()) return false;
    if (schema_.returns().size() != written_.size() || any_of_cpu_ || !op_.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
    for (auto& result : schema_.returns())
      if (!result.alias_info() || !result.alias_info()->isWrite()) return false;
    torch::jit::Stack shapes;
    std::vector<Tensor> outputs;
    for (size_t i = 0; i < given_.size(); ++i) {
      if (translated_[i].isTensorList() || translated_[i].isOptionalTensorList()) return false;
      if (!translated_[i].isTensor() || !translated_[i].toTensor().defined()) {
        shapes.push_back(translated_[i]);
        continue;
      }
      shapes.push_back(without_values(translated_[i].toTensor()));
      if (is_written(schema_.arguments()[i])) outputs.push_back(shapes.back().toTensor());
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
    for (size_t i = 0; i < outputs.size(); ++i)
      if (!outputs[i].sizes().equals(written_[i].second.sizes())) return false;
    return true;
  }

  void queue_up() {
    queue(current).put([op = op_, arguments = translated_]() mutable {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
    });
    for (auto& [tensor, target] : written_) stack_->push_back(tensor);
  }

  void compute() {
    synchronize(current);
    auto results = translated_;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
    for (auto& [tensor, target] : written_) {
      if (tensor.numel() || !target.numel()) continue;
      tensor.resize_(target.sizes());
      launch([to = seen_by_cpu(tensor), from = target]() mutable { to.copy_(from); });
    }
    for (auto& result : results) stack_->push_back(answer(result));
  }

  at::IValue answer(const at::IValue& value) {
    return with_each(value, [&](const Tensor& tensor) { return answer(tensor); });
  }

  Tensor answer(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [tensor, target] : written_)
      if (target.is_same(result)) return tensor;
    for (auto& argument : given_) {
      if (!argument.isTensor() || !on_device(argument.toTensor()) || !result.has_storage()) continue;
      auto& base = argument.toTensor();
      if (result.storage().data() && result.storage().data() == base.storage().data()) return view_of(base, result);
    }
    return any_of_device_ || makes_for_device_ ? to_device(result) : result;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const c10::FunctionSchema& schema_;
  std::vector<at::IValue> given_, translated_;
  std::vector<std::pair<Tensor, Tensor>> written_;  // of the device, and what the CPU writes instead
  bool any_of_device_ = false, any_of_cpu_ = false, makes_for_device_ = false, drawn_ = false;
};

inline void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call(op, stack).run();
}

}  // namespace simulated
