#include <fsdp/distributed_data_parallel.h>

#include "parallel/ddp_state.h"

namespace fsdp {

NoSync::NoSync(std::shared_ptr<parallel::DdpState> state)
    : state_(std::move(state)), before_(state_->set_requires_sync(false)) {}

NoSync::~NoSync() {
  if (state_) (void)state_->set_requires_sync(before_);
}

DistributedDataParallelBase::DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module,
                                                         const DistributedDataParallelOptions& options)
    : WrapperModule("DistributedDataParallel", std::move(module)),
      state_(std::make_shared<parallel::DdpState>(wrapped_module(), options)) {}

void DistributedDataParallelBase::join(const std::function<void()>& loop, const JoinOptions& options) {
  state_->join(loop, options);
}

void DistributedDataParallelBase::before_forward() { state_->before_forward(); }

void DistributedDataParallelBase::after_forward(std::vector<at::Tensor>& outputs) { state_->after_forward(outputs); }

void DistributedDataParallelBase::after_forward_without_tensors(const std::type_info& type) {
  TORCH_CHECK_VALUE(!state_->needs_outputs(), "DistributedDataParallel: forward returns ", c10::demangle(type.name()),
                    ", in which no tensors can be found, but find_unused_parameters and static_graph have to see them: "
                    "return a tensor, or a tuple, vector, optional or map of tensors, or give the struct a member "
                    "for_each_tensor (fsdp/tensor_tree.h)");
  std::vector<at::Tensor> none;
  state_->after_forward(none);
}

void DistributedDataParallelBase::check_same_kind(std::optional<torch::Device> device,
                                                  std::optional<torch::Dtype> dtype) const {
  for (const auto& item : wrapped_module().named_parameters()) {
    const auto& tensor = item.value();
    const bool is_same =
        !tensor.defined() || ((!device || tensor.device() == *device) && (!dtype || tensor.scalar_type() == *dtype));
    TORCH_CHECK_VALUE(is_same, "DistributedDataParallel: parameter '", item.key(), "' is ", tensor.scalar_type(),
                      " on ", tensor.device(),
                      ", as are the buckets of its gradients; convert the module before it is wrapped");
  }
}

void DistributedDataParallelBase::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  check_same_kind(device, dtype);
  WrapperModule::to(device, dtype, non_blocking);
}
void DistributedDataParallelBase::to(torch::Dtype dtype, bool non_blocking) {
  check_same_kind(std::nullopt, dtype);
  WrapperModule::to(dtype, non_blocking);
}
void DistributedDataParallelBase::to(torch::Device device, bool non_blocking) {
  check_same_kind(device, std::nullopt);
  WrapperModule::to(device, non_blocking);
}

}  // namespace fsdp
