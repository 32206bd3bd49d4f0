#include "sharding/data_parallel_mesh.h"

#include <algorithm>

#include "mesh/agreement.h"

namespace fsdp::sharding {

namespace {

using Names = std::vector<std::string>;

// In the order of the mesh, as slices want them.
Names in_mesh_order(const DeviceMesh& mesh, const Names& names) {
  Names ordered;
  for (const auto& name : mesh.mesh_dim_names())
    if (std::find(names.begin(), names.end(), name) != names.end()) ordered.push_back(name);
  return ordered;
}

Names all_names(const DataParallelMeshDims& dims) {
  auto all = dims.shard;
  all.insert(all.end(), dims.replicate.begin(), dims.replicate.end());
  return all;
}

void check_names(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  TORCH_CHECK_VALUE(mesh.defined(), "dp_mesh_dims names dims of a mesh: set FullyShardOptions::mesh too");
  const auto all = all_names(dims);
  const auto& known = mesh.mesh_dim_names();
  for (const auto& name : all) {
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(), "dp_mesh_dims names '", name,
                      "', but the dims of the mesh are [", c10::Join(", ", known), "]");
    TORCH_CHECK_VALUE(std::count(all.begin(), all.end(), name) == 1, "dp_mesh_dims names '", name, "' twice");
  }
}

// Ranks that slice the mesh in different ways would wait for each other. Collective over `mesh`.
void check_same_dims(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  const auto own =
      c10::str("shard [", c10::Join(", ", dims.shard), "], replicate [", c10::Join(", ", dims.replicate), "]");
  const auto difference = difference_between_ranks(mesh, "dp_mesh_dims", own);
  TORCH_CHECK_VALUE(difference.empty(), "dp_mesh_dims differ between the ranks: ", difference);
}

// One mesh dim out of several.
DeviceMesh joined(const DeviceMesh& mesh, const Names& names) {
  const auto part = mesh.slice(in_mesh_order(mesh, names));
  return part.ndim() == 1 ? part : part.flatten();
}

// The global ranks of this rank's part of the mesh, [num_replicas, num_shards].
at::Tensor ranks_of(const DeviceMesh& mesh, const DataParallelMeshDims& dims, int64_t num_replicas) {
  const auto part = mesh.slice(in_mesh_order(mesh, all_names(dims)));
  const auto& names = part.mesh_dim_names();
  std::vector<int64_t> order;
  for (const auto* side : {&dims.replicate, &dims.shard})
    for (size_t i = 0; i < names.size(); ++i)
      if (std::find(side->begin(), side->end(), names[i]) != side->end()) order.push_back(static_cast<int64_t>(i));
  return part.mesh().permute(order).reshape({num_replicas, -1}).contiguous();
}

}  // namespace

DeviceMesh data_parallel_mesh(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  if (dims.empty()) return mesh;
  check_names(mesh, dims);
  check_same_dims(mesh, dims);
  if (dims.replicate.empty()) return joined(mesh, dims.shard);
  if (replicates_only(dims)) return joined(mesh, dims.replicate);
  const auto replicate = joined(mesh, dims.replicate);
  const auto shard = joined(mesh, dims.shard);
  return DeviceMesh::from_group({replicate.get_group(), shard.get_group()}, mesh.device_type(),
                                ranks_of(mesh, dims, replicate.size()), {"replicate", "shard"});
}

DeviceMesh replica_mesh(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  if (!dims.empty()) return joined(mesh, all_names(dims));
  return mesh.ndim() == 1 ? mesh : mesh.flatten();
}

}  // namespace fsdp::sharding
