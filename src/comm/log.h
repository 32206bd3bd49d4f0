#pragma once
// What the library tells of itself on standard error, when asked by FSDP_LOG=info or FSDP_LOG=debug.
#include <string>

namespace fsdp::comm {

enum class LogLevel { kOff, kInfo, kDebug };

// Errors: c10::ValueError when FSDP_LOG holds anything but off, info or debug.
[[nodiscard]] LogLevel log_level();
[[nodiscard]] inline bool logs_debug() { return log_level() == LogLevel::kDebug; }
void log_line(LogLevel level, const std::string& text);

// FSDP_DEBUG=detail: every collective first compares with the other ranks what it is. Errors: c10::ValueError for
// another value than off or detail.
[[nodiscard]] bool checks_every_collective();

}  // namespace fsdp::comm
