#pragma once
// What `fsdp run` was asked to start.
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::apps {

struct LaunchSpec {
  std::vector<std::string> program;  // path and arguments; "${local_rank}" in an argument becomes the worker's
  int num_workers = 1;               // on this node, which is the only one
  std::string master_addr = "127.0.0.1";
  std::optional<uint16_t> master_port;  // unset: a free one
  std::string run_id;
  std::string role = "default";
  std::chrono::seconds grace{30};  // between asking workers to stop and killing them
  bool set_one_thread = false;     // OMP_NUM_THREADS was not set and there are several workers
};

}  // namespace fsdp::apps
