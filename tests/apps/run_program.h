#pragma once
// The fsdp program of this build, run as its users run it, with a bound on its time.
#include <string>

namespace fsdp::testing {

struct Outcome {
  int exit_code;       // -1: ended by a signal, or still running when the bound was reached
  std::string output;  // stdout and stderr together
};

// `arguments` are split at spaces.
[[nodiscard]] Outcome run_fsdp(const std::string& arguments);

// `fsdp run --nproc-per-node num_ranks -- fsdp arguments`; without launcher for num_ranks 0.
[[nodiscard]] Outcome run_fsdp_ranks(int num_ranks, const std::string& arguments);

}  // namespace fsdp::testing
