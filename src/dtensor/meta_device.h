#pragma once
// MetaDeviceGuard adds the wrapper key to the thread's dispatch keys, so that every operator arrives in dispatch().
#include "dtensor/call.h"

namespace fsdp::dtensor {

// Whether the call is here for MetaDeviceGuard only: none of its tensors is sharded or gathered.
[[nodiscard]] bool is_under_meta_guard(Call& call);
// Runs it; a factory that names no device makes its tensor on the meta device.
void run_under_meta_guard(Call& call);

}  // namespace fsdp::dtensor
