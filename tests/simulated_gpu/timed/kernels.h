// Every operator that has no kernel of its own on the device: results of the right shapes, without values, after a time.
#pragma once

#include "arguments.h"
#include "copies.h"
#include "random.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <map>
#include <set>
#include <string>

namespace simulated {

const std::set<std::string> kProducts = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};

// What cuBLAS takes on Hopper, once for each thread and stream, and keeps.
constexpr int64_t kWorkspace = 32 << 20;

inline void take_workspace() {
  static thread_local std::map<int64_t, Tensor> taken;
  if (!taken.count(current)) taken[current] = simulated::empty({kWorkspace}, at::kByte, {}, {}, {}, {});
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack), schema_(op.schema()) {
    given_ = torch::jit::pop(*stack, schema_.arguments().size());
    for (size_t i = 0; i < given_.size(); ++i) see(given_[i], schema_.arguments()[i]);
  }

  void run() {
    if (only_writes())
      answer_with_what_is_written();
    else if (tells_whether())
      stack_->push_back(true);  // whatever is compared is equal
    else
      answer_with_shapes();
    if (kProducts.count(schema_.name())) {
      take_workspace();
      auto& right = tensors_.at(factor() + 1);
      takes(2.0 * tensors_[factor()].numel() * right.size(-1), rates.products);
    } else {
      takes(nbytes_, rates.memory);
    }
  }

 private:
  void see(const at::IValue& value, const c10::Argument& argument) {
    if (argument.name() == "generator") draw(value.toOptional<at::Generator>());
    with_each(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      tensors_.push_back(tensor);
      nbytes_ += double(tensor.nbytes());
      if (is_written(argument)) written_.push_back(tensor);
      return tensor;
    });
  }

  size_t factor() const { return schema_.name() == "aten::addmm" || schema_.name() == "aten::baddbmm" ? 1 : 0; }

  bool only_writes() const {
    for (auto& result : schema_.returns())
      if (!result.alias_info() || !result.alias_info()->isWrite()) return false;
    return true;
  }

  bool tells_whether() const {
    return schema_.returns().size() == 1 && schema_.returns()[0].type()->kind() == c10::TypeKind::BoolType;
  }

  // Shapes are asked for where the output is to get its own alone: that takes the host longer than hardware's launch.
  void answer_with_what_is_written() {
    if (written_.size() == 1 && written_[0].numel() == 0) {
      auto shapes = without_values();
      op_.callBoxed(&shapes);
      if (shapes.size() == 1 && shapes[0].isTensor()) written_[0].resize_(shapes[0].toTensor().sizes());
    }
    for (size_t i = 0; i < schema_.returns().size(); ++i) stack_->push_back(written_.at(i));
  }

  void answer_with_shapes() {
    auto shapes = without_values();
    op_.callBoxed(&shapes);
    for (auto& result : shapes)
      stack_->push_back(with_each(result, [&](const Tensor& shown) {
        if (!shown.defined() || !shown.is_meta()) return shown;
        Tensor made = simulated::empty_strided(shown.sizes(), shown.strides(), shown.scalar_type(), {}, {}, {});
        nbytes_ += double(made.nbytes());
        return made;
      }));
  }

  torch::jit::Stack without_values() const {
    torch::jit::Stack arguments;
    for (auto& value : given_) {
      if (value.isDevice())
        arguments.push_back(c10::Device(c10::kMeta));
      else if (value.isGenerator())
        arguments.emplace_back();
      else
        arguments.push_back(with_each(value, [](const Tensor& tensor) { return simulated::without_values(tensor); }));
    }
    return arguments;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const c10::FunctionSchema& schema_;
  std::vector<at::IValue> given_;
  std::vector<Tensor> tensors_, written_;
  double nbytes_ = 0;
};

inline void run_without_values(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call(op, stack).run();
}

}  // namespace simulated
