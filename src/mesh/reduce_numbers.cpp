#include "mesh/reduce_numbers.h"

#include <functional>

#include "comm/collectives.h"
#include "comm/group_state.h"
#include "comm/meeting.h"

namespace fsdp {

namespace {

// `before`: is given each group in turn.
std::vector<double> reduce_over(const std::vector<double>& numbers, const DeviceMesh& mesh, const std::string& what,
                                c10d::ReduceOp::RedOpType op, const std::function<void(const ProcessGroup&)>& before) {
  const c10::InferenceMode normal_tensors(false);
  auto tensor = at::tensor(numbers, at::kDouble).to(mesh.device_type());
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    const auto group = mesh.get_group(mesh_dim);
    if (mesh.size(mesh_dim) == 1) continue;
    before(group);
    for (auto& pending : comm::all_reduce({tensor}, group, what, op)) pending.wait();
  }
  tensor = tensor.cpu();
  const auto* begin = tensor.const_data_ptr<double>();
  return {begin, begin + tensor.numel()};
}

}  // namespace

std::vector<double> reduce_numbers(const std::vector<double>& numbers, const DeviceMesh& mesh,
                                   const std::string& intent, c10d::ReduceOp::RedOpType op) {
  return reduce_over(numbers, mesh, "the numbers to " + intent, op,
                     [&](const ProcessGroup& group) { comm::meeting_of(group)->meet_to(intent); });
}

std::vector<double> reduce_numbers_at_once(const std::vector<double>& numbers, const DeviceMesh& mesh,
                                           const std::string& what, c10d::ReduceOp::RedOpType op) {
  return reduce_over(numbers, mesh, what, op, [](const ProcessGroup&) {});
}

}  // namespace fsdp
