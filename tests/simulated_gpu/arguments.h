// What operators are given, and give.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace simulated {

inline bool is_written(const c10::Argument& argument) {
  auto* alias = argument.alias_info();
  if (!alias) return false;
  if (alias->isWrite()) return true;
  for (auto& inner : alias->containedTypes())
    if (inner.isWrite()) return true;
  return false;
}

inline bool holds_tensors(const at::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
}

// `value`, with what `change` makes of each tensor in it.
template <class Change>
at::IValue with_each(const at::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor.has_value() ? std::make_optional(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

}  // namespace simulated
