#pragma once
// Calls a wrapped module's forward with its policy applied at the boundary, which a C++ module does not show by itself.
//
//   auto logits = fsdp::call(*model, tokens);   // inputs in param_dtype, outputs in output_dtype
//
// Needed for output_dtype only: casts of activations happen at the ops as well. PyTorch: what fully_shard's hooks do
// around forward (MixedPrecisionPolicy.cast_forward_inputs, output_dtype).
#include <fsdp/policies.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <tuple>
#include <utility>
#include <vector>

namespace fsdp {

// The policy `module` was wrapped with. Errors: c10::ValueError when it was not wrapped.
[[nodiscard]] const MixedPrecisionPolicy& mixed_precision_policy(const torch::nn::Module& module);

namespace detail {

inline at::Tensor cast_floating(const at::Tensor& tensor, const std::optional<at::ScalarType>& dtype) {
  return dtype && tensor.defined() && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
}
template <class... Values>
std::tuple<Values...> cast_floating(std::tuple<Values...> values, const std::optional<at::ScalarType>& dtype);
template <class First, class Second>
std::pair<First, Second> cast_floating(std::pair<First, Second> values, const std::optional<at::ScalarType>& dtype);
template <class Value>
std::vector<Value> cast_floating(std::vector<Value> values, const std::optional<at::ScalarType>& dtype);
template <class Value>
Value cast_floating(Value value, const std::optional<at::ScalarType>& /*dtype*/) {
  return value;  // not a tensor: as it is
}

template <class... Values>
std::tuple<Values...> cast_floating(std::tuple<Values...> values, const std::optional<at::ScalarType>& dtype) {
  return std::apply([&](auto&... items) { return std::tuple<Values...>(cast_floating(items, dtype)...); }, values);
}
template <class First, class Second>
std::pair<First, Second> cast_floating(std::pair<First, Second> values, const std::optional<at::ScalarType>& dtype) {
  return {cast_floating(values.first, dtype), cast_floating(values.second, dtype)};
}
template <class Value>
std::vector<Value> cast_floating(std::vector<Value> values, const std::optional<at::ScalarType>& dtype) {
  for (auto& value : values) value = cast_floating(value, dtype);
  return values;
}

}  // namespace detail

// module.forward(args...). Tensors in arguments and result, also within tuples, pairs and vectors, are cast when they
// are floating; everything else passes as it is.
template <class M, class... Args>
auto call(M& module, Args&&... args) requires std::is_base_of_v<torch::nn::Module, M> {
  const auto& policy = mixed_precision_policy(module);
  const auto input_dtype = policy.cast_forward_inputs ? policy.param_dtype : std::nullopt;
  return detail::cast_floating(module.forward(detail::cast_floating(std::decay_t<Args>(args), input_dtype)...),
                               policy.output_dtype);
}
template <class Impl, class... Args>
auto call(const torch::nn::ModuleHolder<Impl>& holder, Args&&... args) {
  return call(*holder.ptr(), std::forward<Args>(args)...);
}

}  // namespace fsdp
