#pragma once
// What one rank of a mesh knows, told to all of them through the store. For checks before a collective: every rank then
// raises the same error, and none waits for a rank that gave up.
//
//   const auto complaint = any_complaint(mesh, "keys to load", my_complaint);
//   TORCH_CHECK_VALUE(complaint.empty(), complaint);
//
// The first three are collective. Errors: c10::DistError when a rank does not come, or comes with another `topic`.
#include <fsdp/device_mesh.h>

#include <functional>
#include <string>

namespace fsdp {

// The text of the mesh's first rank, on every rank.
[[nodiscard]] std::string text_of_first_rank(const DeviceMesh& mesh, const std::string& topic, std::string text);

// One of the complaints of all ranks, the same on every rank, and the first rank's if it has one; "" when nobody
// complains.
[[nodiscard]] std::string any_complaint(const DeviceMesh& mesh, const std::string& topic, std::string complaint);

// "" when all ranks have the same `record`. Otherwise one complaint, the same on every rank: what `compare` makes of
// the first rank's record on a rank whose own is another.
[[nodiscard]] std::string compare_with_first_rank(const DeviceMesh& mesh, const std::string& topic,
                                                  const std::string& record,
                                                  const std::function<std::string(const std::string&)>& compare);

// Text that differs between tensors of different values, up to collisions; their shapes are not part of it. For
// comparing through the store what is too large for it. Local.
[[nodiscard]] std::string checksum(const at::Tensor& tensor);

// Whether this rank's coordinate is 0 in every dim.
[[nodiscard]] bool is_first_rank(const DeviceMesh& mesh);

}  // namespace fsdp
