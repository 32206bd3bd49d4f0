#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>
#include <fsdp/device_mesh.h>

#include "mesh/mesh_data.h"

namespace fsdp {
namespace {

int64_t dim_of_name(const DeviceMesh::Data& data, const std::string& name) {
  if (const auto dim = mesh::find_dim(data, name)) return *dim;
  mesh::refuse_name(name, data.names);
}

int64_t checked_mesh_dim(const DeviceMesh::Data& data, int64_t mesh_dim) {
  const auto ndim = static_cast<int64_t>(data.shape.size());
  TORCH_CHECK_INDEX(mesh_dim >= -ndim && mesh_dim < ndim, "mesh dim ", mesh_dim, " is outside a mesh of ", ndim,
                    " dims");
  return mesh_dim < 0 ? mesh_dim + ndim : mesh_dim;
}

void check_one_dim(const DeviceMesh::Data& data, const char* caller) {
  TORCH_CHECK(data.shape.size() == 1, caller, ": the mesh has ", data.shape.size(), " dims of shape ",
              mesh::shape_text(data.shape), ": say which one");
}

}  // namespace

c10::DeviceType DeviceMesh::device_type() const { return fsdp::mesh::checked(data_).device_type; }
int64_t DeviceMesh::ndim() const { return static_cast<int64_t>(fsdp::mesh::checked(data_).shape.size()); }
const std::vector<int64_t>& DeviceMesh::shape() const { return fsdp::mesh::checked(data_).shape; }
const std::vector<std::string>& DeviceMesh::mesh_dim_names() const { return fsdp::mesh::checked(data_).names; }
const at::Tensor& DeviceMesh::mesh() const { return fsdp::mesh::checked(data_).mesh; }
int64_t DeviceMesh::size() const { return fsdp::mesh::checked(data_).mesh.numel(); }
int DeviceMesh::get_rank() const { return fsdp::mesh::checked(data_).rank; }
std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const { return fsdp::mesh::checked(data_).coordinate; }

int64_t DeviceMesh::size(int64_t mesh_dim) const {
  const auto& data = fsdp::mesh::checked(data_);
  return data.shape[checked_mesh_dim(data, mesh_dim)];
}

int64_t DeviceMesh::get_local_rank() const {
  check_one_dim(fsdp::mesh::checked(data_), "get_local_rank");
  return get_local_rank(0);
}

int64_t DeviceMesh::get_local_rank(int64_t mesh_dim) const {
  const auto& data = fsdp::mesh::checked(data_);
  const int64_t dim = checked_mesh_dim(data, mesh_dim);
  TORCH_CHECK(data.coordinate.has_value(), "get_local_rank: rank ", data.rank, " is not in the mesh");
  return (*data.coordinate)[dim];
}

int64_t DeviceMesh::get_local_rank(const std::string& mesh_dim) const {
  return get_local_rank(dim_of_name(fsdp::mesh::checked(data_), mesh_dim));
}

ProcessGroup DeviceMesh::get_group() const {
  check_one_dim(fsdp::mesh::checked(data_), "get_group");
  return get_group(0);
}

ProcessGroup DeviceMesh::get_group(int64_t mesh_dim) const {
  const auto& data = fsdp::mesh::checked(data_);
  const auto& group = data.groups[checked_mesh_dim(data, mesh_dim)];
  TORCH_CHECK(group.defined(), "get_group: rank ", data.rank, " is not in the mesh");
  return group;
}

ProcessGroup DeviceMesh::get_group(const std::string& mesh_dim) const {
  return get_group(dim_of_name(fsdp::mesh::checked(data_), mesh_dim));
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  if (data_ == other.data_) return true;
  if (!data_ || !other.data_) return false;
  return data_->device_type == other.data_->device_type && data_->names == other.data_->names &&
         at::equal(data_->mesh, other.data_->mesh);
}

size_t DeviceMesh::hash() const {
  if (!data_) return 0;
  size_t seed = c10::get_hash(static_cast<int>(data_->device_type), data_->shape);
  for (const auto& name : data_->names) seed = c10::hash_combine(seed, c10::get_hash(name));
  const auto* ranks = data_->mesh.data_ptr<int64_t>();
  for (int64_t i = 0; i < data_->mesh.numel(); ++i) seed = c10::hash_combine(seed, c10::get_hash(ranks[i]));
  return seed;
}

}  // namespace fsdp
