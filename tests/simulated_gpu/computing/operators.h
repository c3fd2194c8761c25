// What the device has kernels for that the CPU has not, or has others for.
#pragma once

#include "kernels.h"

#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace simulated {

// Which kernel attention takes: 2 is the memory-efficient one, which CUDA chooses for float32; 0 plain products. The
// former where the CPU's, which computes it here, can do it.
inline int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout, bool,
    std::optional<double>, bool grouped) {
  bool can = !mask.has_value() && dropout == 0 && !grouped && query.dim() == 4 && query.size(-2) == key.size(-2) &&
      query.size(-1) == value.size(-1);
  return can ? 2 : 0;
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> attend(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>&, bool, double dropout,
    bool causal, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  synchronize(current);
  auto [output, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      seen_by_cpu(query), seen_by_cpu(key), seen_by_cpu(value), dropout, causal, std::nullopt, scale);
  auto drawn = at::zeros({}, at::kLong);
  return {to_device(output), to_device(sums), drawn, drawn.clone()};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&,
    const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&, double dropout, std::array<bool, 4>,
    bool causal, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  synchronize(current);
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      seen_by_cpu(gradient), seen_by_cpu(query), seen_by_cpu(key), seen_by_cpu(value), seen_by_cpu(output),
      seen_by_cpu(sums), dropout, causal, std::nullopt, scale);
  return {to_device(q), to_device(k), to_device(v), {}};
}

// What recurrent modules compute where there is no cuDNN. Forward alone: no test needs their gradients on a device.
inline std::vector<Tensor> gates(const Tensor& gates, const std::optional<Tensor>& bias, int64_t parts) {
  return (bias.has_value() && bias->defined() ? gates.add(*bias) : gates).chunk(parts, 1);
}

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& cell, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto all = gates(at::add(gates(input, input_bias, 1)[0], hidden), hidden_bias, 4);
  auto next = all[1].sigmoid().mul(cell).add(all[0].sigmoid().mul(all[2].tanh()));
  return {all[3].sigmoid().mul(next.tanh()), next, at::empty({0}, input.options())};
}

inline std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& state, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto in = gates(input, input_bias, 3), had = gates(hidden, hidden_bias, 3);
  auto fresh = in[2].add(in[0].add(had[0]).sigmoid().mul(had[2])).tanh();
  return {in[1].add(had[1]).sigmoid().mul(state.sub(fresh)).add(fresh), at::empty({0}, input.options())};
}

// The CPU's takes no generator.
inline std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto kept = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) return {input.clone(), kept.fill_(true)};
  kept.bernoulli_(1 - p);
  return {input.mul(kept).mul_(p == 1 ? 0.0 : 1 / (1 - p)), kept};
}

// CUDA's counts whole numbers too.
inline Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  at::AutoDispatchBelowADInplaceOrView below;
  synchronize(current);
  auto seen = seen_by_cpu(self);
  return to_device(at::histc(seen.to(at::kDouble), bins, low, high).to(seen.scalar_type()));
}

constexpr auto* kFallback = &run_on_cpu;

inline void register_operators(torch::Library& m) {
  m.impl("_scaled_dot_product_efficient_attention", attend);
  m.impl("_scaled_dot_product_efficient_attention_backward", attend_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("native_dropout", dropout);
  m.impl("histc", simulated::histc);
}

inline void define(pybind11::module& m) {
  m.def("delay", [](int microseconds) { longest_delay = microseconds; });
}

}  // namespace simulated
