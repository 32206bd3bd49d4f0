#include "comm/environment.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>

namespace fsdp::comm {
namespace {

constexpr const char* kLaunchHint =
    "start the program with `fsdp run --nproc-per-node N program` or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR "
    "and MASTER_PORT";

std::string require_variable(const char* name) {
  auto value = read_variable(name);
  TORCH_CHECK_VALUE(value.has_value(), name, " is not set: ", kLaunchHint);
  return *value;
}

int parse_whole_number(const char* name, const std::string& text, int low, int high) {
  int number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  const bool ok = error == std::errc() && stop == end && number >= low && number <= high;
  TORCH_CHECK_VALUE(ok, name, " is \"", text, "\", but a whole number from ", low, " to ", high, " is needed");
  return number;
}

constexpr int kMaxRanks = 1 << 24;

std::optional<int> read_number(const char* name, int low, int high) {
  auto text = read_variable(name);
  if (!text) return std::nullopt;
  return parse_whole_number(name, *text, low, high);
}

bool read_bool(const char* name) {
  auto text = read_variable(name);
  if (!text) return false;
  std::string lower = *text;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (lower == "true" || lower == "1") return true;
  if (lower == "false" || lower == "0") return false;
  TORCH_CHECK_VALUE(false, name, " is \"", *text, "\", but True or False is needed");
}

}  // namespace

std::optional<std::string> read_variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nothing here writes the environment
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

bool spans_hosts() {
  const auto local_world_size = read_number("LOCAL_WORLD_SIZE", 1, kMaxRanks);
  const auto world_size = read_number("WORLD_SIZE", 1, kMaxRanks);
  return local_world_size && world_size && *local_world_size != *world_size;
}

Environment read_environment() {
  Environment env;
  env.rank = parse_whole_number("RANK", require_variable("RANK"), 0, kMaxRanks);
  env.world_size = parse_whole_number("WORLD_SIZE", require_variable("WORLD_SIZE"), 1, kMaxRanks);
  TORCH_CHECK_VALUE(env.rank < env.world_size, "RANK is ", env.rank, " but WORLD_SIZE is ", env.world_size,
                    ": RANK must be from 0 to WORLD_SIZE - 1");
  env.master_addr = require_variable("MASTER_ADDR");
  env.master_port =
      static_cast<uint16_t>(parse_whole_number("MASTER_PORT", require_variable("MASTER_PORT"), 1, UINT16_MAX));
  const auto local_rank = read_number("LOCAL_RANK", 0, kMaxRanks);
  env.local_rank = local_rank.value_or(env.rank);
  env.local_world_size = read_number("LOCAL_WORLD_SIZE", 1, kMaxRanks);
  if (env.local_world_size) {
    TORCH_CHECK_VALUE(*env.local_world_size <= env.world_size, "LOCAL_WORLD_SIZE is ", *env.local_world_size,
                      " but WORLD_SIZE is ", env.world_size, ": a host cannot have more ranks than the job");
    TORCH_CHECK_VALUE(env.local_rank < *env.local_world_size || !local_rank, "LOCAL_RANK is ", env.local_rank,
                      " but LOCAL_WORLD_SIZE is ", *env.local_world_size,
                      ": LOCAL_RANK must be from 0 to LOCAL_WORLD_SIZE - 1");
  }
  TORCH_CHECK_VALUE(env.local_rank < env.world_size, "LOCAL_RANK is ", env.local_rank, " but WORLD_SIZE is ",
                    env.world_size, ": LOCAL_RANK must be below it");
  env.use_agent_store = read_bool("TORCHELASTIC_USE_AGENT_STORE");
  env.run_id = read_variable("TORCHELASTIC_RUN_ID").value_or("");
  env.restart_count = read_number("TORCHELASTIC_RESTART_COUNT", 0, INT32_MAX).value_or(0);
  return env;
}

}  // namespace fsdp::comm
