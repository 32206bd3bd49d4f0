#include "mesh/agreement.h"

#include <algorithm>
#include <sstream>

#include "comm/group_state.h"
#include "comm/meeting.h"

namespace fsdp {

// Along the first dim, then the next: after dim i, all ranks that differ in the first i + 1 coordinates only know it.
std::string text_of_first_rank(const DeviceMesh& mesh, const std::string& topic, std::string text) {
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    const std::string own = text;
    (void)comm::meeting_of(mesh.get_group(mesh_dim))->compare_with_rank0(topic, own, [&](const std::string& first) {
      text = first;
      return std::string();
    });
  }
  return text;
}

std::string any_complaint(const DeviceMesh& mesh, const std::string& topic, std::string complaint) {
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    const auto meeting = comm::meeting_of(mesh.get_group(mesh_dim));
    const auto found = meeting->compare_with_rank0(
        topic, complaint, [&](const std::string& first) { return first.empty() ? complaint : first; });
    if (!found.empty()) complaint = found;
  }
  // Every rank has one now or none has; but two rows may have settled on different ones.
  if (complaint.empty() || mesh.ndim() == 1) return complaint;
  return text_of_first_rank(mesh, topic, complaint);
}

std::string compare_with_first_rank(const DeviceMesh& mesh, const std::string& topic, const std::string& record,
                                    const std::function<std::string(const std::string&)>& compare) {
  const auto complain = [&](const std::string& first) { return first == record ? std::string() : compare(first); };
  if (mesh.ndim() == 1) return comm::meeting_of(mesh.get_group())->compare_with_rank0(topic, record, complain);
  return any_complaint(mesh, topic, complain(text_of_first_rank(mesh, topic, record)));
}

std::string checksum(const at::Tensor& tensor) {
  auto values = tensor.detach();
  if (c10::isFloat8Type(values.scalar_type())) values = values.to(at::kFloat);  // they take no part in promotion
  if (values.is_complex()) values = at::view_as_real(values.resolve_conj());
  std::ostringstream text;
  text << std::hexfloat << at::sum(values, at::kDouble).item<double>();
  if (values.is_floating_point()) text << " " << at::norm(values, 2, at::kDouble).item<double>();
  return text.str();
}

bool is_first_rank(const DeviceMesh& mesh) {
  const auto coordinate = mesh.get_coordinate();
  return coordinate && std::all_of(coordinate->begin(), coordinate->end(), [](int64_t c) { return c == 0; });
}

}  // namespace fsdp
