#include "mesh/mesh_data.h"

#include <c10/util/StringUtil.h>

#include <set>

namespace fsdp::mesh {
namespace {

std::optional<std::vector<int64_t>> find_coordinate(const at::Tensor& ranks, int rank) {
  const auto found = ranks.eq(rank).nonzero();  // [num_found, ndim]
  if (found.size(0) == 0) return std::nullopt;
  TORCH_CHECK_VALUE(found.size(0) == 1, "the mesh holds rank ", rank, " ", found.size(0), " times: each rank once");
  return to_vector(found[0]);
}

}  // namespace

const DeviceMesh::Data& checked(const DataPtr& data) {
  TORCH_CHECK_VALUE(data != nullptr, "the DeviceMesh is undefined: make one with init_device_mesh or from_group");
  return *data;
}

std::optional<int64_t> find_dim(const DeviceMesh::Data& data, const std::string& name) {
  const auto found = std::find(data.names.begin(), data.names.end(), name);
  if (found == data.names.end()) return std::nullopt;
  return found - data.names.begin();
}

void refuse_name(const std::string& name, const std::vector<std::string>& known) {
  TORCH_CHECK_INDEX(false, "the mesh has no dim named \"", name,
                    "\"; its names: ", known.empty() ? "none" : c10::Join(", ", known));
}

void check_names(const std::vector<std::string>& names, int64_t ndim) {
  if (names.empty()) return;
  TORCH_CHECK(static_cast<int64_t>(names.size()) == ndim, "mesh_dim_names has ", names.size(), " names (",
              c10::Join(", ", names), "), but the mesh has ", ndim, " dims: give one name a dim, or none");
  const std::set<std::string> unique(names.begin(), names.end());
  TORCH_CHECK(unique.size() == names.size(), "mesh_dim_names holds a name twice: ", c10::Join(", ", names));
}

std::vector<int64_t> to_vector(const at::Tensor& tensor) {
  const auto values = tensor.contiguous();
  return {values.data_ptr<int64_t>(), values.data_ptr<int64_t>() + values.numel()};
}

std::string shape_text(const std::vector<int64_t>& shape) { return c10::str("(", c10::Join(", ", shape), ")"); }

DataPtr make_root(c10::DeviceType device_type, const at::Tensor& ranks, std::vector<std::string> names,
                  std::vector<ProcessGroup> groups, int rank, bool in_default_group) {
  auto data = std::make_shared<DeviceMesh::Data>();
  data->device_type = device_type;
  data->mesh = ranks;
  data->shape = ranks.sizes().vec();
  data->names = std::move(names);
  data->groups = std::move(groups);
  data->rank = rank;
  data->coordinate = find_coordinate(ranks, rank);
  data->in_default_group = in_default_group;
  for (int64_t dim = 0; dim < ranks.dim(); ++dim) data->root_dims.push_back({dim});
  return data;
}

DataPtr make_slice(const DataPtr& root, const std::vector<std::vector<int64_t>>& root_dims,
                   std::vector<std::string> names, std::vector<ProcessGroup> groups) {
  auto data = std::make_shared<DeviceMesh::Data>();
  std::vector<int64_t> kept;
  for (const auto& dims : root_dims) {
    int64_t extent = 1;
    for (const auto dim : dims) extent *= root->shape[dim];
    data->shape.push_back(extent);
    kept.insert(kept.end(), dims.begin(), dims.end());
  }
  at::Tensor ranks = root->mesh;
  for (auto dim = static_cast<int64_t>(root->shape.size()) - 1; dim >= 0; --dim) {
    if (std::find(kept.begin(), kept.end(), dim) != kept.end()) continue;
    ranks = ranks.select(dim, root->coordinate ? (*root->coordinate)[dim] : 0);
  }
  data->device_type = root->device_type;
  data->mesh = ranks.reshape(data->shape).contiguous();
  data->names = std::move(names);
  data->groups = std::move(groups);
  data->rank = root->rank;
  if (root->coordinate) data->coordinate = find_coordinate(data->mesh, data->rank);
  data->in_default_group = root->in_default_group;
  data->root = root;
  data->root_dims = root_dims;
  return data;
}

}  // namespace fsdp::mesh
