// Making root meshes.
#include <c10/util/StringUtil.h>
#include <fsdp/device_mesh.h>

#include <numeric>

#include "comm/group_state.h"
#include "mesh/mesh_data.h"
#include "mesh/mesh_groups.h"

namespace fsdp {
namespace {

bool is_in_default_group(const ProcessGroup& group) { return !comm::state_of(group)->global_ranks.empty(); }

// Whether all ranks of the default group can make groups over `ranks`. A mesh of some of them is this rank's part of
// something larger: the others hold other parts, or none.
bool spans_default_group(const at::Tensor& ranks, const std::vector<ProcessGroup>& groups) {
  return std::all_of(groups.begin(), groups.end(), is_in_default_group) && is_initialized() &&
         ranks.numel() == world_size();
}

std::vector<int64_t> ranks_of_group(const ProcessGroup& group) {
  const auto& global = comm::state_of(group)->global_ranks;
  if (!global.empty()) return {global.begin(), global.end()};
  std::vector<int64_t> ranks(group->getSize());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// What `mesh` says about the members of the group along `dim` must be what the group says.
void check_group_along(const ProcessGroup& group, int64_t dim, const at::Tensor& ranks,
                       const std::vector<int64_t>& coordinate) {
  if (!is_in_default_group(group)) return;
  at::Tensor row = ranks;
  for (int64_t other = ranks.dim() - 1; other >= 0; --other) {
    if (other != dim) row = row.select(other, coordinate[other]);
  }
  const auto members = ranks_of_group(group);
  const std::vector<int64_t> wanted = mesh::to_vector(row);
  TORCH_CHECK_VALUE(wanted == members, "from_group: the group of mesh dim ", dim, " has ranks ", members,
                    ", but the mesh has ", wanted, " along it");
}

}  // namespace

DeviceMesh init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                            std::vector<std::string> mesh_dim_names) {
  TORCH_CHECK_VALUE(!shape.empty(), "init_device_mesh: the shape is empty, at least one dim is needed");
  mesh::check_names(mesh_dim_names, static_cast<int64_t>(shape.size()));
  int64_t num_ranks = 1;
  for (const auto extent : shape) {
    TORCH_CHECK_VALUE(extent >= 1, "init_device_mesh: shape ", mesh::shape_text(shape), " has a dim below 1");
    num_ranks *= extent;
  }
  if (!is_initialized()) init_process_group();
  TORCH_CHECK(num_ranks <= world_size(), "init_device_mesh: shape ", mesh::shape_text(shape), " needs ", num_ranks,
              " ranks, but the world has ", world_size());
  const auto ranks = at::arange(num_ranks, at::kLong).view(shape);
  std::vector<ProcessGroup> groups;
  for (int64_t dim = 0; dim < ranks.dim(); ++dim) {
    const std::string description =
        mesh_dim_names.empty() ? c10::str("mesh_dim_", dim) : c10::str("mesh_", mesh_dim_names[dim]);
    groups.push_back(mesh::make_group_along(ranks, {dim}, description));
  }
  return DeviceMesh(mesh::make_root(device_type, ranks, std::move(mesh_dim_names), std::move(groups), rank(), true));
}

DeviceMesh init_device_mesh(const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> mesh_dim_names) {
  const c10::Device device(device_type);
  TORCH_CHECK(!device.has_index(), "init_device_mesh: device type \"", device_type,
              "\" has an index: give the type only, such as \"cuda\"; each rank's device follows from LOCAL_RANK");
  return init_device_mesh(device.type(), std::move(shape), std::move(mesh_dim_names));
}

DeviceMesh DeviceMesh::from_group(const ProcessGroup& group, c10::DeviceType device_type,
                                  std::vector<std::string> mesh_dim_names) {
  const auto ranks = ranks_of_group(group);
  mesh::check_names(mesh_dim_names, 1);
  const int own = static_cast<int>(ranks[group->getRank()]);
  const auto line = at::tensor(ranks, at::kLong);
  return DeviceMesh(
      mesh::make_root(device_type, line, std::move(mesh_dim_names), {group}, own, spans_default_group(line, {group})));
}

DeviceMesh DeviceMesh::from_group(const std::vector<ProcessGroup>& groups, c10::DeviceType device_type,
                                  const at::Tensor& mesh, std::vector<std::string> mesh_dim_names) {
  TORCH_CHECK_VALUE(!groups.empty(), "from_group: the list of groups is empty");
  TORCH_CHECK_VALUE(mesh.defined() && mesh.dim() == static_cast<int64_t>(groups.size()), "from_group: ", groups.size(),
                    " groups need a mesh of as many dims, one group a dim");
  TORCH_CHECK_VALUE(mesh_dim_names.size() == groups.size(), "from_group: ", groups.size(),
                    " groups need as many names, ", mesh_dim_names.size(), " were given");
  fsdp::mesh::check_names(mesh_dim_names, mesh.dim());
  const auto ranks = mesh.to(at::kCPU, at::kLong).contiguous();
  std::vector<int64_t> coordinate;
  for (int64_t dim = 0; dim < ranks.dim(); ++dim) {
    const auto& group = groups[static_cast<size_t>(dim)];
    TORCH_CHECK_VALUE(group.defined(), "from_group: the group of mesh dim ", dim,
                      " is null: this rank is not part of it");
    TORCH_CHECK_VALUE(group->getSize() == ranks.size(dim), "from_group: the group of mesh dim ", dim, " has ",
                      group->getSize(), " ranks, but the mesh has ", ranks.size(dim), " along it");
    coordinate.push_back(group->getRank());
  }
  at::Tensor own = ranks;
  for (const auto place : coordinate) own = own.select(0, place);
  for (size_t dim = 0; dim < groups.size(); ++dim) {
    check_group_along(groups[dim], static_cast<int64_t>(dim), ranks, coordinate);
  }
  return DeviceMesh(fsdp::mesh::make_root(device_type, ranks, std::move(mesh_dim_names), groups,
                                          static_cast<int>(own.item<int64_t>()), spans_default_group(ranks, groups)));
}

}  // namespace fsdp
