#pragma once
// Finds what fully_shard knows of a module. The module itself carries nothing; its parameters lead to the runtime.
#include <torch/nn/module.h>

#include "sharding/runtime.h"

namespace fsdp::sharding {

// The group that owns `tensor`; null for a tensor without one.
[[nodiscard]] std::shared_ptr<ParamGroup> group_of(const at::Tensor& tensor);

// The runtimes of the sharded parameters below `module`, each once.
[[nodiscard]] std::vector<std::shared_ptr<Runtime>> runtimes_below(const torch::nn::Module& module);

// The state of a wrapped module; null when it was not wrapped.
[[nodiscard]] std::shared_ptr<ModuleState> module_state_of(const torch::nn::Module& module);

// "torch::nn::LinearImpl" -> "Linear"
[[nodiscard]] std::string type_name(const torch::nn::Module& module);

}  // namespace fsdp::sharding
