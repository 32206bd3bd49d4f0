#include "dtensor/layout.h"

#include <sstream>

namespace fsdp::dtensor {

int64_t chunk_length(int64_t n, int64_t num_parts) { return (n + num_parts - 1) / num_parts; }

Extent chunk_extent(int64_t n, int64_t num_parts, int64_t index) {
  const auto length = chunk_length(n, num_parts);
  return {std::min(n, length * index), std::min(n, length * (index + 1))};
}

std::vector<int64_t> own_coordinate(const DeviceMesh& mesh) {
  auto coordinate = mesh.get_coordinate();
  TORCH_CHECK(coordinate, "this rank is not in the mesh, so it holds no part of the tensor");
  return *std::move(coordinate);
}

std::vector<Extent> local_extents(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                                  const std::vector<int64_t>& coordinate) {
  std::vector<Extent> extents;
  extents.reserve(sizes.size());
  for (const auto size : sizes) extents.push_back({0, size});
  for (size_t mesh_dim = 0; mesh_dim < placements.size(); ++mesh_dim) {
    const auto* shard = std::get_if<Shard>(&placements[mesh_dim]);
    if (!shard) continue;
    auto& extent = extents[shard->dim];
    const auto cut = chunk_extent(extent.size(), mesh.size(static_cast<int64_t>(mesh_dim)), coordinate[mesh_dim]);
    extent = {extent.begin + cut.begin, extent.begin + cut.end};
  }
  return extents;
}

std::vector<Extent> own_extents(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements) {
  return local_extents(sizes, mesh, placements, own_coordinate(mesh));
}

std::vector<int64_t> sizes_of(const std::vector<Extent>& extents) {
  std::vector<int64_t> sizes;
  sizes.reserve(extents.size());
  for (const auto& extent : extents) sizes.push_back(extent.size());
  return sizes;
}

std::vector<int64_t> sizes_before(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                                  const std::vector<int64_t>& coordinate, size_t mesh_dim) {
  const auto end = placements.begin() + static_cast<std::ptrdiff_t>(mesh_dim);
  return sizes_of(local_extents(sizes, mesh, {placements.begin(), end}, coordinate));
}

at::Tensor own_part(const at::Tensor& full, at::IntArrayRef sizes, const DeviceMesh& mesh,
                    const Placements& placements) {
  const auto extents = own_extents(sizes, mesh, placements);
  const auto missing = static_cast<int64_t>(sizes.size()) - full.dim();
  auto part = full;
  for (int64_t dim = 0; dim < full.dim(); ++dim) {
    const auto& extent = extents[dim + missing];
    if (full.size(dim) != sizes[dim + missing]) continue;  // broadcast
    part = part.narrow(dim, extent.begin, extent.size());
  }
  return part;
}

Placements checked_placements(Placements placements, int64_t tensor_ndim, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(placements.size()) == mesh.ndim(), "got ", placements.size(),
                    " placements for a mesh of ", mesh.ndim(), " dims; give one placement a mesh dim");
  for (auto& placement : placements) {
    auto* shard = std::get_if<Shard>(&placement);
    if (!shard) continue;
    if (shard->dim < 0) shard->dim += tensor_ndim;
    TORCH_CHECK_VALUE(shard->dim >= 0 && shard->dim < tensor_ndim, "Shard dim ", shard->dim, " is invalid for a ",
                      tensor_ndim, "D tensor");
  }
  return placements;
}

bool any_partial(const Placements& placements) { return std::any_of(placements.begin(), placements.end(), is_partial); }

}  // namespace fsdp::dtensor

namespace fsdp {

std::string to_string(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return "Shard(" + std::to_string(shard->dim) + ")";
  if (const auto* partial = std::get_if<Partial>(&placement)) return "Partial(" + partial->reduce_op + ")";
  return "Replicate";
}

std::string to_string(const Placements& placements) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < placements.size(); ++i) text << (i ? ", " : "") << to_string(placements[i]);
  text << "]";
  return text.str();
}

}  // namespace fsdp
