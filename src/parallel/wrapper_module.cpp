#include <fsdp/module_wrapper.h>

#include "sharding/module_tree.h"

namespace fsdp {

WrapperModule::WrapperModule(std::string kind, std::shared_ptr<torch::nn::Module> module)
    : torch::nn::Module(module ? kind + "<" + sharding::type_name(*module) + ">" : kind),
      kind_(std::move(kind)),
      module_(std::move(module)) {
  TORCH_CHECK_VALUE(module_, kind_, ": there is no module to wrap (null)");
  for (const auto& item : module_->named_parameters(/*recurse=*/false)) parameters_.insert(item.key(), item.value());
  for (const auto& item : module_->named_buffers(/*recurse=*/false)) register_buffer(item.key(), item.value());
  for (const auto& item : module_->named_children()) register_module(item.key(), item.value());
  torch::nn::Module::train(module_->is_training());
}

void WrapperModule::train(bool on) {
  torch::nn::Module::train(on);
  module_->train(on);
}

void WrapperModule::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  module_->to(device, dtype, non_blocking);
}
void WrapperModule::to(torch::Dtype dtype, bool non_blocking) { module_->to(dtype, non_blocking); }
void WrapperModule::to(torch::Device device, bool non_blocking) { module_->to(device, non_blocking); }
void WrapperModule::zero_grad(bool set_to_none) { module_->zero_grad(set_to_none); }
void WrapperModule::save(torch::serialize::OutputArchive& archive) const { module_->save(archive); }
void WrapperModule::load(torch::serialize::InputArchive& archive) { module_->load(archive); }
bool WrapperModule::is_serializable() const { return module_->is_serializable(); }

void WrapperModule::pretty_print(std::ostream& stream) const {
  stream << kind_ << " of ";
  module_->pretty_print(stream);
}

}  // namespace fsdp
