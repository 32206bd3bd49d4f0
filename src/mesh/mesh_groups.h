#pragma once
// Process groups along dimensions of a mesh, made from the default group.
#include <fsdp/process_group.h>

namespace fsdp::mesh {

// The caller's group along `dims` (ascending) of the mesh `ranks` [shape]: all ranks that share its place in the other
// dims. Every rank of the default group calls it, because making a group takes all. Null for a rank outside the mesh.
// Dims that span the whole world give the default group itself.
[[nodiscard]] ProcessGroup make_group_along(const at::Tensor& ranks, const std::vector<int64_t>& dims,
                                            const std::string& description);

}  // namespace fsdp::mesh
