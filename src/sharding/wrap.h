#pragma once
// What fully_shard and replicate have in common: the parameters below some modules become groups.
#include <fsdp/fully_shard.h>

#include <limits>

namespace fsdp::sharding {

// As FullyShardOptions::replicate_below: every parameter stays whole.
inline constexpr int64_t kAllWhole = std::numeric_limits<int64_t>::max();

// `caller`: for messages. Errors: docs/fully_shard.md.
FSDPModule wrap_modules(const char* caller, const std::vector<torch::nn::Module*>& modules,
                        const FullyShardOptions& options);

// Errors: c10::ValueError for a null module.
[[nodiscard]] std::vector<torch::nn::Module*> pointers_to(
    const char* caller, const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

}  // namespace fsdp::sharding
