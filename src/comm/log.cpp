#include "comm/log.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <iostream>
#include <sstream>

namespace fsdp::comm {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nothing here writes the environment
  return value == nullptr ? "" : value;
}

LogLevel read_level() {
  const auto value = variable("FSDP_LOG");
  if (value.empty() || value == "off") return LogLevel::kOff;
  if (value == "info") return LogLevel::kInfo;
  if (value == "debug") return LogLevel::kDebug;
  TORCH_CHECK_VALUE(false, "FSDP_LOG is '", value, "'; known: off, info, debug");
}

}  // namespace

LogLevel log_level() {
  static const LogLevel level = read_level();
  return level;
}

void log_line(LogLevel level, const std::string& text) {
  if (log_level() < level) return;
  const auto rank = variable("RANK");
  std::ostringstream line;  // written at once: ranks and threads share the stream
  line << "[fsdp" << (rank.empty() ? "" : " rank " + rank) << "] " << text << "\n";
  std::cerr << line.str() << std::flush;
}

bool checks_every_collective() {
  const auto value = variable("FSDP_DEBUG");
  TORCH_CHECK_VALUE(value.empty() || value == "off" || value == "detail", "FSDP_DEBUG is '", value,
                    "'; known: off, detail");
  return value == "detail";
}

}  // namespace fsdp::comm
