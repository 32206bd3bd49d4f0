#include "mesh/agreement.h"

#include <algorithm>
#include <sstream>

#include "comm/group_state.h"
#include "comm/meeting.h"

namespace fsdp {

namespace {

// Of two listings; "" when they are the same.
std::string first_difference(const std::string& of_first_rank, const std::string& own, int64_t rank) {
  std::istringstream a(of_first_rank);
  std::istringstream b(own);
  std::string x;
  std::string y;
  while (true) {
    const bool has_x = static_cast<bool>(std::getline(a, x));
    const bool has_y = static_cast<bool>(std::getline(b, y));
    if (!has_x && !has_y) return "";
    if (!has_x) x = "nothing more";
    if (!has_y) y = "nothing more";
    if (x != y) return c10::str("the first rank has '", x, "', rank ", rank, " has '", y, "'");
  }
}

}  // namespace

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

std::string difference_between_ranks(const DeviceMesh& mesh, const std::string& topic, const std::string& listing) {
  const auto compare = [&](const std::string& first) { return first_difference(first, listing, mesh.get_rank()); };
  if (mesh.ndim() == 1) return comm::meeting_of(mesh.get_group())->compare_with_rank0(topic, listing, compare);
  return any_complaint(mesh, topic, compare(text_of_first_rank(mesh, topic, listing)));
}

// Sums along the first dim and along the last, weighted by their places: rows or columns in another order count too.
std::string checksum(const at::Tensor& tensor) {
  auto values = tensor.detach();
  if (c10::isFloat8Type(values.scalar_type())) values = values.to(at::kFloat);  // they take no part in promotion
  if (values.is_complex()) values = at::view_as_real(values.resolve_conj());
  std::ostringstream text;
  text << std::hexfloat << at::sum(values, at::kDouble).item<double>();
  if (values.is_floating_point()) text << " " << at::norm(values, 2, at::kDouble).item<double>();
  if (values.dim() == 0 || values.numel() == 0) return text.str();
  for (const int64_t dim : {int64_t{0}, values.dim() - 1}) {
    const auto sums = at::sum(values.movedim(dim, 0).reshape({values.size(dim), -1}), {1}, false, at::kDouble);
    text << " " << at::dot(sums, at::arange(1, sums.numel() + 1, sums.options())).item<double>();
  }
  return text.str();
}

bool is_first_rank(const DeviceMesh& mesh) {
  const auto coordinate = mesh.get_coordinate();
  return coordinate && std::all_of(coordinate->begin(), coordinate->end(), [](int64_t c) { return c == 0; });
}

}  // namespace fsdp
