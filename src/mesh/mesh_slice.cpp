// Meshes cut out of others: by names, and flattened.
#include <c10/util/StringUtil.h>

#include "mesh/mesh_data.h"
#include "mesh/mesh_groups.h"

namespace fsdp {
namespace {

using FlattenedDim = DeviceMesh::Data::FlattenedDim;

FlattenedDim find_named_dim(const DeviceMesh::Data& data, const std::string& name) {
  if (const auto dim = mesh::find_dim(data, name)) return {data.root_dims[*dim], data.groups[*dim]};
  const std::lock_guard lock(data.mutex);
  if (const auto flattened = data.flattened.find(name); flattened != data.flattened.end()) return flattened->second;
  auto known = data.names;
  for (const auto& [flat_name, flattened] : data.flattened) known.push_back(flat_name);
  mesh::refuse_name(name, known);
}

// Dims must be disjoint and in the order of the mesh.
void check_slice_order(const std::vector<FlattenedDim>& dims, const DeviceMesh::Data& data,
                       const std::vector<std::string>& names) {
  std::vector<int64_t> all;
  for (const auto& dim : dims) all.insert(all.end(), dim.root_dims.begin(), dim.root_dims.end());
  auto sorted = all;
  std::sort(sorted.begin(), sorted.end());
  TORCH_CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "slice (", c10::Join(", ", names),
              "): two of the names cover the same dim of the mesh");
  TORCH_CHECK_INDEX(sorted == all, "slice (", c10::Join(", ", names),
                    "): names must be in the order of the mesh: ", c10::Join(", ", data.names));
}

// The dims under `name` when they are the same dims, nullopt when the name is new. Errors: c10::ValueError when `name`
// covers others.
std::optional<FlattenedDim> find_flattened(const DeviceMesh::Data& root, const std::string& name,
                                           const std::vector<int64_t>& dims) {
  const std::lock_guard lock(root.mutex);
  const auto found = root.flattened.find(name);
  const bool is_dim = mesh::find_dim(root, name).has_value();
  TORCH_CHECK_VALUE(!is_dim && (found == root.flattened.end() || found->second.root_dims == dims),
                    "flatten: the name \"", name, "\" belongs to other dims of this mesh: choose another");
  if (found == root.flattened.end()) return std::nullopt;
  return found->second;
}

ProcessGroup make_flattened(const DeviceMesh::Data& data, const DeviceMesh::Data& root, const std::string& name,
                            const std::vector<int64_t>& dims) {
  if (data.groups.size() == 1) return data.groups[0];
  TORCH_CHECK(data.in_default_group,
              "flatten: this mesh was made from groups whose ranks are not those of the default one, so no group over "
              "several of its dims can be made (replicate_below on it needs one): make it with init_device_mesh");
  return mesh::make_group_along(root.mesh, dims, c10::str("mesh_", name));
}

}  // namespace

DeviceMesh DeviceMesh::operator[](const std::string& name) const { return slice({name}); }

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  TORCH_CHECK(!fsdp::mesh::checked(data_).names.empty(),
              "slice: the mesh has no mesh_dim_names: give them to init_device_mesh");
  TORCH_CHECK_INDEX(!names.empty(), "slice: no name given; the mesh has ", c10::Join(", ", data_->names));
  if (names == data_->names) return *this;
  std::vector<FlattenedDim> dims;
  for (const auto& name : names) dims.push_back(find_named_dim(*data_, name));
  check_slice_order(dims, *data_, names);
  std::vector<std::vector<int64_t>> root_dims;
  std::vector<ProcessGroup> groups;
  for (const auto& dim : dims) {
    root_dims.push_back(dim.root_dims);
    groups.push_back(dim.group);
  }
  return DeviceMesh(mesh::make_slice(data_->root ? data_->root : data_, root_dims, names, std::move(groups)));
}

DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  TORCH_CHECK(!fsdp::mesh::checked(data_).names.empty(),
              "flatten: the mesh has no mesh_dim_names: give them to init_device_mesh");
  const std::string flat_name = name.empty() ? c10::Join("_", data_->names) : name;
  if (ndim() == 1 && flat_name == data_->names[0]) return *this;
  const auto root = data_->root ? data_->root : data_;
  std::vector<int64_t> dims;
  for (const auto& part : data_->root_dims) dims.insert(dims.end(), part.begin(), part.end());
  auto flat = find_flattened(*root, flat_name, dims);
  if (!flat) {
    flat = FlattenedDim{dims, make_flattened(*data_, *root, flat_name, dims)};
    const std::lock_guard lock(root->mutex);
    root->flattened.emplace(flat_name, *flat);
  }
  return DeviceMesh(mesh::make_slice(root, {dims}, {flat_name}, {flat->group}));
}

}  // namespace fsdp
