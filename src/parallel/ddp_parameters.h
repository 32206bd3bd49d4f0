#pragma once
// The parameters of a module that DistributedDataParallel takes, and what all ranks must have in common.
#include <fsdp/distributed_data_parallel.h>

#include "parallel/bucket_reducer.h"

namespace fsdp::parallel {

struct DdpParameters {
  std::vector<ReducedTensor> trained;  // each once, under its first path
  std::vector<ReducedTensor> frozen;
};

// Errors: c10::ValueError naming the parameter that cannot be taken, or when none requires grad.
[[nodiscard]] DdpParameters ddp_parameters(const torch::nn::Module& module, c10::DeviceType device_type);

// Collective, through the store. Errors: c10::ValueError on every rank, with the first difference: a parameter's path
// and both shapes; c10::DistError when ranks do not come.
void check_same_on_all_ranks(const DdpParameters& parameters, const torch::nn::Module& module,
                             const DistributedDataParallelOptions& options);

}  // namespace fsdp::parallel
