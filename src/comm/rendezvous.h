#pragma once
// All ranks of a job meet in one store.
#include <chrono>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/environment.h"

namespace fsdp::comm {

// The store of the job, below a prefix that no earlier start of the job and no earlier init of this process used.
// Returns once all ranks are there. Errors: c10::DistError naming the port or the ranks that did not come in time,
// c10::ValueError when ranks contradict each other.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> join_world(const Environment& env, std::chrono::milliseconds timeout);

}  // namespace fsdp::comm
