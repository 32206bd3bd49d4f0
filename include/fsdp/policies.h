#pragma once
// How fully_shard treats the parameters of one module: in which dtype they are gathered and reduced, and where they
// rest.
//
//   fsdp::fully_shard(*block, {.mesh = mesh, .mp_policy = {.param_dtype = torch::kBFloat16,
//                                                          .reduce_dtype = torch::kFloat32}});
//
// PyTorch: torch.distributed.fsdp.MixedPrecisionPolicy, OffloadPolicy, CPUOffloadPolicy.
#include <c10/core/ScalarType.h>
#include <fsdp/version.h>

#include <optional>

namespace fsdp {

// Shards, gradients and optimizer state always stay in the parameters' own dtype. docs/mixed_precision.md tells which
// op sees what.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype = std::nullopt;   // of gathers and of compute; unset: the parameter's own
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;  // of reductions and of unsynced accumulation; unset:
                                                              // that of the gradient
  std::optional<at::ScalarType> output_dtype = std::nullopt;  // of what fsdp::call() returns
  bool cast_forward_inputs = true;  // activations are cast to param_dtype where they meet a parameter
};

// Shards, gradients and optimizer state rest on the CPU while compute runs on the mesh's device.
struct CPUOffloadPolicy {
  bool pin_memory = true;
};

}  // namespace fsdp
