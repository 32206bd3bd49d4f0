#pragma once
// Shards the parameters, gradients and optimizer state of a module over a mesh.
//
//   for (auto& layer : *model->layers) fsdp::fully_shard(*layer, {.mesh = mesh});   // bottom up
//   fsdp::fully_shard(*model, {.mesh = mesh});
//   torch::optim::Adam optimizer(model->parameters(), 1e-2);                        // after wrapping, unmodified
//
// PyTorch: torch.distributed.fsdp.fully_shard, FSDPModule.
#include <fsdp/device_mesh.h>
#include <fsdp/fsdp_module.h>
#include <fsdp/memory_stats.h>
#include <fsdp/module_pointer.h>
#include <fsdp/placement.h>
#include <fsdp/policies.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {

namespace sharding {
class ModuleState;
}

// What becomes of gathered parameters after their use in forward: unset (freed, but kept by the root), true (freed),
// false (kept), or a number p of ranks: kept in parts, over p neighbouring ranks, from which backward gathers.
class ReshardAfterForward {
 public:
  ReshardAfterForward() = default;
  // Options are written as plain values, hence implicit. NOLINTBEGIN(google-explicit-constructor)
  ReshardAfterForward(bool reshard) : num_ranks_(reshard ? kAll : 1) {}
  ReshardAfterForward(std::optional<bool> reshard)
      : ReshardAfterForward(reshard ? ReshardAfterForward(*reshard) : ReshardAfterForward()) {}
  ReshardAfterForward(int num_ranks) : num_ranks_(num_ranks), is_number_(true) {}
  // NOLINTEND(google-explicit-constructor)

  static constexpr int64_t kAll = -1;  // freed
  // Over how many ranks parameters stay sharded; 1: they are kept whole. `is_root` decides when unset.
  [[nodiscard]] int64_t num_ranks(bool is_root) const { return num_ranks_.value_or(is_root ? 1 : kAll); }
  [[nodiscard]] bool is_number() const { return is_number_; }

 private:
  std::optional<int64_t> num_ranks_;
  bool is_number_ = false;
};

// Where one parameter is cut, and over which mesh when not over that of the options (experts).
struct ShardPlacementResult {
  Shard placement = Shard{0};
  DeviceMesh mesh = {};
};
// nullopt: Shard(0). Must answer alike whenever it is asked.
using ShardPlacementFn =
    std::function<std::optional<ShardPlacementResult>(const std::string& path, const at::Tensor& parameter)>;

// Which dims of a mesh that serves several parallelisms hold the data-parallel ranks.
//
//   {.mesh = mesh, .dp_mesh_dims = {.shard = {"dp", "cp"}}}               // cut over all ranks of (dp, cp)
//   {.mesh = mesh, .dp_mesh_dims = {.shard = {"dp"}, .replicate = {"cp"}}}  // cut over dp, averaged over cp too
//
// PyTorch: DataParallelMeshDims, for plain parameters here.
struct DataParallelMeshDims {
  std::vector<std::string> shard = {};      // parameters are cut over these dims, taken as one
  std::vector<std::string> replicate = {};  // whole copies along these; gradients are averaged over them too
  [[nodiscard]] bool empty() const { return shard.empty() && replicate.empty(); }
};

struct FullyShardOptions {
  // 1-D: Shard(0) over it; 2-D: replicated over dim 0, sharded over dim 1. Unset: all ranks, 1-D. With `dp_mesh_dims` a
  // named mesh of any dims.
  DeviceMesh mesh = {};
  DataParallelMeshDims dp_mesh_dims = {};
  ReshardAfterForward reshard_after_forward = {};
  bool sync_init = false;  // start from the values of each mesh's first rank instead of comparing
  MixedPrecisionPolicy mp_policy = {};
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  ShardPlacementFn shard_placement_fn = {};
  std::vector<at::Tensor> ignored_params = {};  // stay plain tensors: neither sharded nor reduced
  // Parameters of fewer elements stay whole on every rank (biases, norms): no gather, an all-reduce of their gradients.
  // Alike on every rank, because with several dims the mesh needs a group over all its ranks.
  int64_t replicate_below = 0;
};

// Wraps one module as one communication group: its parameters that no earlier call claimed become sharded in place.
// Errors: see docs/fully_shard.md.
FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});
template <detail::ModulePointer P>
FSDPModule fully_shard(const P& module, const FullyShardOptions& options = {}) {
  return fully_shard(detail::module_of(module, "fully_shard"), options);
}

// Several modules as one communication group: their parameters are gathered and reduced together.
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                       const FullyShardOptions& options = {});

[[nodiscard]] bool is_fsdp(const torch::nn::Module& module);

// The module tree with the FSDP prefix, global and local shapes and placements. Never communicates.
[[nodiscard]] std::string describe(const torch::nn::Module& module);

}  // namespace fsdp
