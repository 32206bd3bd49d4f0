#pragma once
// What fully_shard verifies before it touches anything.
#include <fsdp/fully_shard.h>

#include "sharding/param_group.h"

namespace fsdp::sharding {

// The mesh to use: the given one, or all ranks as a 1-D mesh. Errors: c10::ValueError for more than two dims.
[[nodiscard]] DeviceMesh checked_mesh(const DeviceMesh& mesh);

// `reshard` with a number of ranks replaced by what it means on `mesh`. Errors: c10::ValueError for a number that is
// not from 1 to the number of shards, or does not divide it.
[[nodiscard]] ReshardAfterForward checked_reshard(const ReshardAfterForward& reshard, const DeviceMesh& mesh);

// The same for the meshes that shard_placement_fn gave `parameters`; where one has no more shards than that, they are
// freed. Errors: c10::ValueError naming the parameter.
void check_reshard_of(const std::vector<NamedParameter>& parameters, const ReshardAfterForward& reshard);

// Makes the groups that a checked number of ranks needs, once all ranks agree on it. Collective.
void connect_neighbours(const std::vector<NamedParameter>& parameters, const ReshardAfterForward& reshard);

// Warns where offloading has nothing to do. Errors: c10::NotImplementedError on other devices.
void check_offload(const std::optional<CPUOffloadPolicy>& policy, const DeviceMesh& mesh);

// All ranks of the options' mesh must wrap the same structure; with sync_init the same buffers too. Collective through
// the store. Errors: c10::ValueError on every rank, naming the first difference. `title`: "fully_shard(Linear)".
void check_same_structure(const std::vector<NamedParameter>& parameters, const std::vector<torch::nn::Module*>& modules,
                          const std::string& title, const FullyShardOptions& options);

// Warns on every rank where parameters differ between the ranks of their mesh. Collective through the store.
void compare_start(const std::vector<NamedParameter>& parameters, const std::string& title);

// The values of the mesh's first rank on every rank: of parameters over their own mesh, of buffers over `mesh`.
// Collective.
void broadcast_start(const std::vector<NamedParameter>& parameters, const std::vector<torch::nn::Module*>& modules,
                     const DeviceMesh& mesh);

}  // namespace fsdp::sharding
