#pragma once
// Calls a wrapped module's forward with its policy applied at the boundary, which a C++ module does not show by itself.
//
//   auto logits = fsdp::call(*model, tokens);   // inputs in param_dtype, outputs in output_dtype
//
// Needed for output_dtype only: casts of activations happen at the ops as well. PyTorch: what fully_shard's hooks do
// around forward (MixedPrecisionPolicy.cast_forward_inputs, output_dtype).
#include <fsdp/policies.h>
#include <fsdp/tensor_tree.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <utility>

namespace fsdp {

// The policy `module` was wrapped with. Errors: c10::ValueError when it was not wrapped.
[[nodiscard]] const MixedPrecisionPolicy& mixed_precision_policy(const torch::nn::Module& module);

namespace detail {

// A copy whose floating tensors have `dtype`.
template <class Value>
Value cast_floating(Value value, const std::optional<at::ScalarType>& dtype) {
  for_each_tensor(value, [&dtype](at::Tensor& tensor) {
    if (dtype && tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(*dtype);
  });
  return value;
}

}  // namespace detail

// module.forward(args...). Tensors in arguments and result, also within what tensor_tree.h knows, are cast when they
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
