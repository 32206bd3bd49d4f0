#pragma once
// A module as users hold it, by a TORCH_MODULE holder or a std::shared_ptr: what functions of a module take besides it.
//
//   template <detail::ModulePointer P>
//   FSDPModule replicate(const P& module, const ReplicateOptions& options = {}) {
//     return replicate(detail::module_of(module, "replicate"), options);
//   }
#include <fsdp/version.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>

namespace fsdp::detail {

// Errors: c10::ValueError, which says that it came from `function`, when there is no module.
template <std::derived_from<torch::nn::Module> M>
[[nodiscard]] torch::nn::Module& module_of(const std::shared_ptr<M>& module, const char* function) {
  TORCH_CHECK_VALUE(module, function, ": the module is null");
  return *module;
}
template <class Impl>
[[nodiscard]] torch::nn::Module& module_of(const torch::nn::ModuleHolder<Impl>& holder, const char* function) {
  TORCH_CHECK_VALUE(!holder.is_empty(), function, ": the module holder is empty: it was made from nullptr");
  return *holder.ptr();
}

template <class P>
concept ModulePointer = requires(const P& pointer) {
  module_of(pointer, "");
};

}  // namespace fsdp::detail
