#pragma once
// What a launcher tells a worker through environment variables.
#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::comm {

struct Environment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;                   // LOCAL_RANK, or RANK when unset
  std::optional<int> local_world_size;  // LOCAL_WORLD_SIZE
  std::string master_addr;
  uint16_t master_port = 0;
  bool use_agent_store = false;  // the launcher hosts the store: every rank is a client
  std::string run_id;            // TORCHELASTIC_RUN_ID, "" when unset
  int restart_count = 0;         // TORCHELASTIC_RESTART_COUNT
};

// Errors: c10::ValueError naming the variable that is missing, malformed or contradictory.
[[nodiscard]] Environment read_environment();

// Whether a launcher said that the job runs on several hosts. Errors: c10::ValueError as above.
[[nodiscard]] bool spans_hosts();

// The variable's text; nullopt when it is unset or empty.
[[nodiscard]] std::optional<std::string> read_variable(const char* name);

}  // namespace fsdp::comm
