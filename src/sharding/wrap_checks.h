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

// Makes the groups that a checked number of ranks needs, once all ranks agree on it. Collective.
void connect_neighbours(const ReshardAfterForward& reshard, const DeviceMesh& mesh);

// Warns where offloading has nothing to do. Errors: c10::NotImplementedError on other devices.
void check_offload(const std::optional<CPUOffloadPolicy>& policy, const DeviceMesh& mesh);

// All ranks of `mesh` must wrap the same structure; different values only warn. Collective through the store.
// Errors: c10::ValueError on every rank, naming the first difference. `title`: "fully_shard(Linear)".
void check_same_start(const std::vector<NamedParameter>& parameters, const std::string& title,
                      const FullyShardOptions& options);

// The first line in which two listings differ, this rank's and rank 0's; "" when they are the same.
[[nodiscard]] std::string first_difference(const std::string& mine, const std::string& theirs);

// Mesh rank 0's values of parameters and buffers on every rank. Collective.
void broadcast_start(const std::vector<NamedParameter>& parameters, const std::vector<torch::nn::Module*>& modules,
                     const DeviceMesh& mesh);

}  // namespace fsdp::sharding
