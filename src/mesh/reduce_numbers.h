#pragma once
// A few numbers reduced over all ranks of a mesh.
#include <fsdp/device_mesh.h>

#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace fsdp {

// One all-reduce a mesh dim. The ranks meet first, because one of them may have gone another way; `intent` starts with
// an infinitive: "count the tokens of all ranks". Errors: c10::DistError naming the ranks that did not come.
[[nodiscard]] std::vector<double> reduce_numbers(const std::vector<double>& numbers, const DeviceMesh& mesh,
                                                 const std::string& intent, c10d::ReduceOp::RedOpType op);

// The same without meeting, where all ranks are sure to come, as in every step of a training loop. `what`: for
// messages.
[[nodiscard]] std::vector<double> reduce_numbers_at_once(const std::vector<double>& numbers, const DeviceMesh& mesh,
                                                         const std::string& what, c10d::ReduceOp::RedOpType op);

}  // namespace fsdp
