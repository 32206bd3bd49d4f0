#include "comm/local_address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

namespace fsdp::comm {
namespace {

// A datagram socket that is "connected" sends nothing, but makes the kernel choose a route and with it our address.
std::optional<std::string> source_address(const addrinfo& target) {
  const int fd = socket(target.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::nullopt;
  sockaddr_storage own{};
  socklen_t own_size = sizeof(own);
  const bool ok = connect(fd, target.ai_addr, target.ai_addrlen) == 0 &&
                  getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) == 0;
  close(fd);
  if (!ok) return std::nullopt;
  char text[NI_MAXHOST] = {};
  const int failed =
      getnameinfo(reinterpret_cast<sockaddr*>(&own), own_size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return failed != 0 ? std::nullopt : std::optional<std::string>(text);
}

}  // namespace

std::optional<std::string> address_towards(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  for (const addrinfo* target = list; target != nullptr; target = target->ai_next) {
    if (auto address = source_address(*target)) return address;
  }
  return std::nullopt;
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

bool has_interface(const std::string& name) { return if_nametoindex(name.c_str()) != 0; }

}  // namespace fsdp::comm
