#pragma once
// What a module implements that stands in the place of another one and bears its names.
//
//   const auto& linear = fsdp::unwrapped(module);   // the Linear behind a CheckpointWrapper, or the module itself
#include <fsdp/version.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>

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

// What the wrappers of this library share: parameters, buffers and children are those of the wrapped module, under the
// same names, so that state dicts and files fit with and without wrapper. They are taken over when the wrapper is made;
// what the wrapped module itself registers later is not seen.
class WrapperModule : public torch::nn::Module, public ModuleWrapper {
 public:
  [[nodiscard]] torch::nn::Module& wrapped_module() const override { return *module_; }

  // These reach the wrapped module, which may have its own ways.
  void train(bool on = true) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  void zero_grad(bool set_to_none = true) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  [[nodiscard]] bool is_serializable() const override;
  void pretty_print(std::ostream& stream) const override;  // "CheckpointWrapper of torch::nn::Linear(...)"

 protected:
  // `kind`: the class's name for people. Errors: c10::ValueError for a null module.
  WrapperModule(std::string kind, std::shared_ptr<torch::nn::Module> module);

 private:
  std::string kind_;
  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace fsdp
