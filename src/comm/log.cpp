#include "comm/log.h"

#include <c10/util/Exception.h>

#include <iostream>
#include <sstream>

#include "comm/environment.h"

namespace fsdp::comm {
namespace {

LogLevel read_level() {
  const auto value = read_variable("FSDP_LOG").value_or("");
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
  const auto rank = read_variable("RANK").value_or("");
  std::ostringstream line;  // written at once: ranks and threads share the stream
  line << "[fsdp" << (rank.empty() ? "" : " rank " + rank) << "] " << text << "\n";
  std::cerr << line.str() << std::flush;
}

bool checks_every_collective() {
  const auto value = read_variable("FSDP_DEBUG").value_or("");
  TORCH_CHECK_VALUE(value.empty() || value == "off" || value == "detail", "FSDP_DEBUG is '", value,
                    "'; known: off, detail");
  return value == "detail";
}

}  // namespace fsdp::comm
