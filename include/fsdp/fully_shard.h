#pragma once
// Shards the parameters, gradients and optimizer state of a module over a mesh.
//
//   for (auto& layer : *model->layers) fsdp::fully_shard(*layer, {.mesh = mesh});   // bottom up
//   fsdp::fully_shard(*model, {.mesh = mesh});
//   torch::optim::Adam optimizer(model->parameters(), 1e-2);                        // after wrapping, unmodified
//
// PyTorch: torch.distributed.fsdp.fully_shard, FSDPModule.
#include <fsdp/device_mesh.h>
#include <fsdp/memory_stats.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>

namespace fsdp {

namespace sharding {
class ModuleState;
}

struct FullyShardOptions {
  // 1-D: Shard(0) over it; 2-D: replicated over dim 0, sharded over dim 1. Unset: all ranks, 1-D.
  DeviceMesh mesh = {};
  std::optional<bool> reshard_after_forward = std::nullopt;  // unset: true, but false for the root
  bool sync_init = false;                                    // start from rank 0's values instead of comparing
};

// What fully_shard returns: the handle by which a wrapped module's sharding is steered.
class FSDPModule {
 public:
  explicit FSDPModule(std::shared_ptr<sharding::ModuleState> state) : state_(std::move(state)) {}
  // Errors: c10::ValueError when `module` was not wrapped.
  [[nodiscard]] static FSDPModule of(const torch::nn::Module& module);

  void unshard();  // gathers this module's own parameters now; they stay until reshard() or the end of backward
  void reshard();  // frees them

 private:
  std::shared_ptr<sharding::ModuleState> state_;
};

// Wraps one module as one communication group: its parameters that no earlier call claimed become sharded in place.
// Errors: see docs/fully_shard.md.
FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});
template <class Impl>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Impl>& holder, const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*holder.ptr()), options);
}
template <class M>
FSDPModule fully_shard(const std::shared_ptr<M>& module, const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*module), options);
}

[[nodiscard]] bool is_fsdp(const torch::nn::Module& module);

// The module tree with the FSDP prefix, global and local shapes and placements. Never communicates.
[[nodiscard]] std::string describe(const torch::nn::Module& module);

}  // namespace fsdp
