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
  return complaint;
}

std::string checksum(const at::Tensor& tensor) {
  auto values = tensor.detach();
  if (c10::isFloat8Type(values.scalar_type())) values = values.to(at::kFloat);  // they take no part in promotion
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
