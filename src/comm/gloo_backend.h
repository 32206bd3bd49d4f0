#pragma once
// The gloo backend that LibTorch carries.
#include <fsdp/process_group.h>

namespace fsdp::comm {

// Binds to GLOO_SOCKET_IFNAME when set, else to the address by which this rank reaches the store's host (loopback on
// one host), never to what the host name happens to resolve to. Errors: c10::ValueError for a wrong GLOO_SOCKET_IFNAME.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendContext& context);

}  // namespace fsdp::comm
