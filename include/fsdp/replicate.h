#pragma once
// Data parallelism on fully_shard's machinery: parameters stay whole on every rank, backward all-reduces gradients.
//
//   for (auto& layer : *model->layers) fsdp::replicate(*layer, {.mesh = mesh});   // a group each: one all-reduce
//   fsdp::replicate(*model, {.mesh = mesh});
//   torch::optim::Adam optimizer(model->parameters(), 1e-2);
//   model->forward(x).mean().backward();                                          // no wrapper around forward
//
// Parameters are DTensors with the placement Replicate, so that state dicts, GradScaler and MixedPrecisionPolicy treat
// them as sharded ones. Beside fully_shard: replicate what is small and used often, shard the module around it.
// DistributedDataParallel keeps plain tensors instead, and needs its own forward.
// PyTorch: torch.distributed._composable.replicate_with_fsdp.replicate.
#include <fsdp/fully_shard.h>

namespace fsdp {

struct ReplicateOptions {
  DeviceMesh mesh = {};    // 1-D; unset: all ranks
  bool sync_init = false;  // start from rank 0's values instead of comparing
  MixedPrecisionPolicy mp_policy = {};
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  std::vector<at::Tensor> ignored_params = {};  // stay plain tensors, and their gradients are not reduced
};

// Wraps one module as one communication group: its parameters that no earlier call claimed. The result steers it as one
// of fully_shard: set_requires_gradient_sync, set_gradient_divide_factor, set_all_reduce_hook.
// Errors: c10::ValueError for a mesh of several dims; otherwise those of fully_shard, docs/fully_shard.md.
FSDPModule replicate(torch::nn::Module& module, const ReplicateOptions& options = {});
template <detail::ModulePointer P>
FSDPModule replicate(const P& module, const ReplicateOptions& options = {}) {
  return replicate(detail::module_of(module, "replicate"), options);
}

// Several modules as one communication group.
FSDPModule replicate(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                     const ReplicateOptions& options = {});

}  // namespace fsdp
