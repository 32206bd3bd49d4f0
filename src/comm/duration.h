#pragma once
// Durations in messages.
#include <chrono>
#include <string>

namespace fsdp::comm {

// "5.0 s"
[[nodiscard]] std::string to_seconds(std::chrono::milliseconds duration);

}  // namespace fsdp::comm
