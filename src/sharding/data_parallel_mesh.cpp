#include "sharding/data_parallel_mesh.h"

#include <algorithm>

#include "comm/group_state.h"

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

Names check_names(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  TORCH_CHECK_VALUE(mesh.defined(), "dp_mesh_dims names dims of a mesh: set FullyShardOptions::mesh too");
  auto all = dims.shard;
  all.insert(all.end(), dims.replicate.begin(), dims.replicate.end());
  const auto& known = mesh.mesh_dim_names();
  for (const auto& name : all) {
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(), "dp_mesh_dims names '", name,
                      "', but the dims of the mesh are [", c10::Join(", ", known), "]");
    TORCH_CHECK_VALUE(std::count(all.begin(), all.end(), name) == 1, "dp_mesh_dims names '", name, "' twice");
  }
  return all;
}

// One mesh dim out of several.
DeviceMesh joined(const DeviceMesh& mesh, const Names& names) {
  const auto part = mesh.slice(in_mesh_order(mesh, names));
  return part.ndim() == 1 ? part : part.flatten();
}

// The global ranks of this rank's part of the mesh, [replicas, shards].
at::Tensor ranks_of(const DeviceMesh& mesh, const Names& all, const DataParallelMeshDims& dims) {
  const auto part = mesh.slice(in_mesh_order(mesh, all));
  const auto& names = part.mesh_dim_names();
  std::vector<int64_t> order;
  for (const auto* side : {&dims.replicate, &dims.shard})
    for (size_t i = 0; i < names.size(); ++i)
      if (std::find(side->begin(), side->end(), names[i]) != side->end()) order.push_back(static_cast<int64_t>(i));
  return part.mesh().permute(order).reshape({joined(mesh, dims.replicate).size(), -1}).contiguous();
}

// Whole copies: shards of one rank.
DeviceMesh replicas_only(const DeviceMesh& mesh) {
  const auto group = mesh.get_group();
  return DeviceMesh::from_group({group, comm::neighbours_of(group, 1)}, mesh.device_type(),
                                mesh.mesh().view({mesh.size(), 1}), {"replicate", "shard"});
}

}  // namespace

DeviceMesh data_parallel_mesh(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  if (dims.empty()) return mesh;
  const auto all = check_names(mesh, dims);
  if (dims.replicate.empty()) return joined(mesh, dims.shard);
  if (dims.shard.empty()) return replicas_only(joined(mesh, dims.replicate));
  const auto replicate = joined(mesh, dims.replicate);
  const auto shard = joined(mesh, dims.shard);
  return DeviceMesh::from_group({replicate.get_group(), shard.get_group()}, mesh.device_type(),
                                ranks_of(mesh, all, dims), {"replicate", "shard"});
}

}  // namespace fsdp::sharding
