#include <fsdp/checkpoint_wrapper.h>

#include "sharding/module_tree.h"

namespace fsdp {

CheckpointWrapperBase::CheckpointWrapperBase(std::shared_ptr<torch::nn::Module> module,
                                             const CheckpointOptions& options)
    : torch::nn::Module(module ? "CheckpointWrapper<" + sharding::type_name(*module) + ">" : "CheckpointWrapper"),
      module_(std::move(module)),
      options_(options) {
  TORCH_CHECK_VALUE(module_, "CheckpointWrapper: there is no module to wrap (null)");
  for (const auto& item : module_->named_parameters(/*recurse=*/false)) parameters_.insert(item.key(), item.value());
  for (const auto& item : module_->named_buffers(/*recurse=*/false)) register_buffer(item.key(), item.value());
  for (const auto& item : module_->named_children()) register_module(item.key(), item.value());
  torch::nn::Module::train(module_->is_training());
}

void CheckpointWrapperBase::train(bool on) {
  torch::nn::Module::train(on);
  module_->train(on);
}

void CheckpointWrapperBase::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  module_->to(device, dtype, non_blocking);
}
void CheckpointWrapperBase::to(torch::Dtype dtype, bool non_blocking) { module_->to(dtype, non_blocking); }
void CheckpointWrapperBase::to(torch::Device device, bool non_blocking) { module_->to(device, non_blocking); }
void CheckpointWrapperBase::zero_grad(bool set_to_none) { module_->zero_grad(set_to_none); }
void CheckpointWrapperBase::save(torch::serialize::OutputArchive& archive) const { module_->save(archive); }
void CheckpointWrapperBase::load(torch::serialize::InputArchive& archive) { module_->load(archive); }
bool CheckpointWrapperBase::is_serializable() const { return module_->is_serializable(); }

void CheckpointWrapperBase::pretty_print(std::ostream& stream) const {
  stream << "CheckpointWrapper of ";
  module_->pretty_print(stream);
}

AnyCheckpointWrapper::AnyCheckpointWrapper(torch::nn::AnyModule module, const CheckpointOptions& options)
    : CheckpointWrapperBase(module.ptr(), options), any_(std::move(module)) {}

at::Tensor AnyCheckpointWrapper::forward(at::Tensor x) {
  return checkpoint(
      options(), [module = any_](const at::Tensor& input) mutable { return module.forward<at::Tensor>(input); }, x);
}

std::shared_ptr<torch::nn::Module> AnyCheckpointWrapper::clone(const std::optional<torch::Device>& device) const {
  return std::make_shared<AnyCheckpointWrapper>(any_.clone(device), options());
}

}  // namespace fsdp
