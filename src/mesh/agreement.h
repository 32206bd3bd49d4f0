#pragma once
// What one rank of a mesh knows, told to all of them through the store. For checks before a collective: every rank then
// raises the same error, and none waits for a rank that gave up.
//
//   const auto complaint = any_complaint(mesh, "keys to load", my_complaint);
//   TORCH_CHECK_VALUE(complaint.empty(), complaint);
//
// The first three are collective. Errors: c10::DistError when a rank does not come, or comes with another `topic`.
#include <fsdp/device_mesh.h>

#include <string>

namespace fsdp {

// The text of the mesh's first rank, on every rank.
[[nodiscard]] std::string text_of_first_rank(const DeviceMesh& mesh, const std::string& topic, std::string text);

// One of the complaints of all ranks, the same on every rank, and the first rank's if it has one; "" when nobody
// complains.
[[nodiscard]] std::string any_complaint(const DeviceMesh& mesh, const std::string& topic, std::string complaint);

// "" when all ranks have the same `listing`. Otherwise the first line in which a rank's differs from the first rank's,
// the same text on every rank: "the first rank has 'weight [4, 3]', rank 2 has 'weight [5, 3]'".
[[nodiscard]] std::string difference_between_ranks(const DeviceMesh& mesh, const std::string& topic,
                                                   const std::string& listing);

// Text that differs between tensors of different values, up to collisions, also where rows or columns change places;
// their shapes are not part of it. For comparing through the store what is too large for it. Local.
[[nodiscard]] std::string checksum(const at::Tensor& tensor);

// Whether this rank's coordinate is 0 in every dim.
[[nodiscard]] bool is_first_rank(const DeviceMesh& mesh);

}  // namespace fsdp
