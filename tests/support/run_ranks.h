#pragma once
// Ranks as threads of this process, over one HashStore and gloo.
//
//   run_ranks(2, [](const fsdp::ProcessGroup& group, int rank) {
//     auto mesh = fsdp::DeviceMesh::from_group(group, torch::kCPU);
//     ...                                    // EXPECT_* work in every rank
//   });
#include <fsdp/process_group.h>

#include <chrono>
#include <functional>

namespace fsdp::testing {

using RankBody = std::function<void(const ProcessGroup& group, int rank)>;

// Runs `body` on `world_size` ranks and rethrows the error of the rank that failed first. `timeout` is that of the
// group's collectives; a run that takes longer than `limit` ends the process with a message, because a stuck thread
// cannot be stopped.
void run_ranks(int world_size, const RankBody& body, std::chrono::milliseconds timeout = std::chrono::seconds(30),
               std::chrono::seconds limit = std::chrono::seconds(120));

// what() without the C++ backtrace that LibTorch appends.
[[nodiscard]] std::string message_of(const std::exception& error);

}  // namespace fsdp::testing
