#pragma once
// What a module implements that stands in the place of another one and bears its names.
//
//   const auto& linear = fsdp::unwrapped(module);   // the Linear behind a CheckpointWrapper, or the module itself
#include <fsdp/version.h>
#include <torch/nn/module.h>

namespace fsdp {

class ModuleWrapper {
 public:
  virtual ~ModuleWrapper() = default;
  [[nodiscard]] virtual torch::nn::Module& wrapped_module() const = 0;
};

// Whoever asks a module for its type asks this one.
[[nodiscard]] inline torch::nn::Module& unwrapped(torch::nn::Module& module) {
  auto* inner = &module;
  while (const auto* wrapper = dynamic_cast<const ModuleWrapper*>(inner)) inner = &wrapper->wrapped_module();
  return *inner;
}
[[nodiscard]] inline const torch::nn::Module& unwrapped(const torch::nn::Module& module) {
  const auto* inner = &module;
  while (const auto* wrapper = dynamic_cast<const ModuleWrapper*>(inner)) inner = &wrapper->wrapped_module();
  return *inner;
}

}  // namespace fsdp
