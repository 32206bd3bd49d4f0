#pragma once
// Which part of a tensor a rank holds: torch.chunk's rule, applied per mesh dimension.
#include <c10/util/ArrayRef.h>
#include <fsdp/device_mesh.h>
#include <fsdp/placement.h>

namespace fsdp::dtensor {

// Rows [begin, end) of `n` that part `index` of `num_parts` holds; chunk length is ceil(n / num_parts).
struct Extent {
  int64_t begin = 0;
  int64_t end = 0;
  [[nodiscard]] int64_t size() const { return end - begin; }
};
[[nodiscard]] int64_t chunk_length(int64_t n, int64_t num_parts);
[[nodiscard]] Extent chunk_extent(int64_t n, int64_t num_parts, int64_t index);

// The calling rank's place. Errors: c10::Error when it is outside the mesh.
[[nodiscard]] std::vector<int64_t> own_coordinate(const DeviceMesh& mesh);

// One extent a tensor dim: what the rank at `coordinate` holds of a tensor of global `sizes`.
[[nodiscard]] std::vector<Extent> local_extents(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                                const Placements& placements, const std::vector<int64_t>& coordinate);
// The same for the calling rank. Errors: c10::Error when the rank is outside the mesh.
[[nodiscard]] std::vector<Extent> own_extents(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                              const Placements& placements);
[[nodiscard]] std::vector<int64_t> sizes_of(const std::vector<Extent>& extents);
// What mesh dim `mesh_dim` finds of a tensor of global `sizes`: cut by the mesh dims before it.
[[nodiscard]] std::vector<int64_t> sizes_before(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                                const Placements& placements, const std::vector<int64_t>& coordinate,
                                                size_t mesh_dim);
// A view of the part of `full` that the calling rank holds. `full` broadcasts to `sizes`: dims that do stay whole.
[[nodiscard]] at::Tensor own_part(const at::Tensor& full, at::IntArrayRef sizes, const DeviceMesh& mesh,
                                  const Placements& placements);

// Normalises negative dims and checks counts and dims. Errors: c10::ValueError.
[[nodiscard]] Placements checked_placements(Placements placements, int64_t tensor_ndim, const DeviceMesh& mesh);

[[nodiscard]] bool any_partial(const Placements& placements);

}  // namespace fsdp::dtensor
