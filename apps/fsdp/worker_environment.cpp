#include "worker_environment.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace fsdp::apps {
namespace {

std::map<std::string, std::string> job_variables(const LaunchSpec& spec, int local_rank, uint16_t master_port) {
  const std::string rank = std::to_string(local_rank);
  const std::string size = std::to_string(spec.num_workers);
  std::map<std::string, std::string> variables{{"RANK", rank},
                                               {"LOCAL_RANK", rank},
                                               {"GROUP_RANK", "0"},
                                               {"ROLE_RANK", rank},
                                               {"ROLE_NAME", spec.role},
                                               {"WORLD_SIZE", size},
                                               {"LOCAL_WORLD_SIZE", size},
                                               {"GROUP_WORLD_SIZE", "1"},
                                               {"ROLE_WORLD_SIZE", size},
                                               {"MASTER_ADDR", spec.master_addr},
                                               {"MASTER_PORT", std::to_string(master_port)},
                                               {"TORCHELASTIC_RESTART_COUNT", "0"},
                                               {"TORCHELASTIC_MAX_RESTARTS", "0"},
                                               {"TORCHELASTIC_RUN_ID", spec.run_id},
                                               {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  if (std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING") == nullptr) variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1";
  if (spec.set_one_thread) variables["OMP_NUM_THREADS"] = "1";
  return variables;
}

}  // namespace

std::vector<std::string> worker_environment(const LaunchSpec& spec, int local_rank, uint16_t master_port) {
  const auto variables = job_variables(spec, local_rank, master_port);
  std::vector<std::string> lines;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view line(*entry);
    if (!variables.contains(std::string(line.substr(0, line.find('='))))) lines.emplace_back(line);
  }
  for (const auto& [name, value] : variables) lines.emplace_back(name).append("=").append(value);
  return lines;
}

}  // namespace fsdp::apps
