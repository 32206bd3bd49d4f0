#include <fsdp/checkpoint_wrapper.h>

namespace fsdp {

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
