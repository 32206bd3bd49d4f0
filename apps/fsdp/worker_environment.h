#pragma once
// The environment of a worker, as torchrun sets it.
#include <map>
#include <string>
#include <vector>

#include "launch_spec.h"

namespace fsdp::apps {

// "NAME=value" lines: this process' own environment, with the variables that describe a job replaced.
[[nodiscard]] std::vector<std::string> worker_environment(const LaunchSpec& spec, int local_rank, uint16_t master_port);

}  // namespace fsdp::apps
