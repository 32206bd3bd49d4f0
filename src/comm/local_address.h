#pragma once
// Which of this host's addresses other hosts can reach it by.
#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::comm {

// The source address the kernel would use to reach `host`; nullopt when `host` does not resolve or has no route.
[[nodiscard]] std::optional<std::string> address_towards(const std::string& host, uint16_t port);

[[nodiscard]] bool is_loopback(const std::string& address);
[[nodiscard]] bool has_interface(const std::string& name);

}  // namespace fsdp::comm
