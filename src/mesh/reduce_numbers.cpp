#include "mesh/reduce_numbers.h"

#include "comm/collectives.h"
#include "comm/group_state.h"
#include "comm/meeting.h"

namespace fsdp {

std::vector<double> reduce_numbers(const std::vector<double>& numbers, const DeviceMesh& mesh,
                                   const std::string& intent, c10d::ReduceOp::RedOpType op) {
  const c10::InferenceMode normal_tensors(false);
  auto tensor = at::tensor(numbers, at::kDouble).to(mesh.device_type());
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    const auto group = mesh.get_group(mesh_dim);
    if (mesh.size(mesh_dim) == 1) continue;
    comm::meeting_of(group)->meet_to(intent);
    for (auto& pending : comm::all_reduce({tensor}, group, "the numbers to " + intent, op)) pending.wait();
  }
  tensor = tensor.cpu();
  const auto* begin = tensor.const_data_ptr<double>();
  return {begin, begin + tensor.numel()};
}

}  // namespace fsdp
