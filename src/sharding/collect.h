#pragma once
// Which parameters a fully_shard call takes, and where each is cut.
#include <fsdp/fully_shard.h>

#include "sharding/param_group.h"

namespace fsdp::sharding {

// The parameters of `modules` that no earlier fully_shard claimed, each once under its first dotted name. Those that
// stay whole are over the mesh of the options still. Local.
// Errors: c10::ValueError (0-dim, replaced member, some but not all on the meta device), c10::NotImplementedError (not
// contiguous, a DTensor that belongs to no group, Shard(d > 0) that does not divide), c10::Error (inference tensor, no
// such dim), each naming the path.
[[nodiscard]] std::vector<NamedParameter> unclaimed_parameters(const std::vector<torch::nn::Module*>& modules,
                                                               const FullyShardOptions& options);

}  // namespace fsdp::sharding
