// Operators whose memory or time does not follow from their arguments' shapes.
#pragma once

#include "kernels.h"

#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace simulated {

// Which kernel attention takes: 1 is flash attention, 0 plain products.
inline int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor&, const std::optional<Tensor>& mask, double dropout, bool,
    std::optional<double>, bool) {
  return !mask.has_value() && dropout == 0 && query.dim() == 4 && query.size(-2) == key.size(-2) ? 1 : 0;
}

// Flash attention's layout has the tokens before the heads.
inline Tensor empty_as(const Tensor& tensor) {
  return at::empty(tensor.transpose(1, 2).sizes(), tensor.options()).transpose(1, 2);
}

// Of one product of the queries with the keys.
inline double attention_work(const Tensor& query, const Tensor& key, bool causal) {
  return 2.0 * double(query.numel()) * double(key.size(2)) * (causal ? 0.5 : 1);
}

using Attended = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

inline Attended attend(
    const Tensor& query, const Tensor& key, const Tensor&, double, bool causal, bool, std::optional<double>) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto sums = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  auto drawn = at::empty({2}, query.options().dtype(at::kLong));
  takes(2 * attention_work(query, key, causal), rates.attention);
  return {empty_as(query), sums, {}, {}, query.size(2), key.size(2), drawn, at::empty({0}, query.options()), {}};
}

inline std::tuple<Tensor, Tensor, Tensor> attend_backward(
    const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&, const Tensor&,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool causal, const Tensor&, const Tensor&,
    std::optional<double>) {
  at::AutoDispatchBelowADInplaceOrView below;
  // What the kernel takes meanwhile: the queries' gradients are summed in float32, and where several queries share a key
  // each has a gradient of it, and of its value, that are summed at last.
  auto sums = at::empty(query.sizes(), query.options().dtype(at::kFloat));
  Tensor keys, values;
  if (key.size(1) != query.size(1)) keys = at::empty_like(query), values = at::empty_like(query);
  takes(5 * attention_work(query, key, causal), rates.attention_backward);
  return {empty_as(query), empty_as(key), empty_as(value)};
}

constexpr auto* kFallback = &run_without_values;

inline void register_operators(torch::Library& m) {
  m.impl("_scaled_dot_product_flash_attention", attend);
  m.impl("_scaled_dot_product_flash_attention_backward", attend_backward);
}

inline void define(pybind11::module& m) {
  using pybind11::arg;
  m.def(
      "set_rates",
      [](double link, double memory, double products, double attention, double attention_backward, double launch) {
        rates = {link, memory, products, attention, attention_backward, launch};
      },
      arg("link"), arg("memory"), arg("products"), arg("attention"), arg("attention_backward"), arg("launch"));
}

}  // namespace simulated
