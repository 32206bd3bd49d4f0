#pragma once
// What all copies of a DeviceMesh share.
#include <fsdp/device_mesh.h>

#include <map>
#include <mutex>

namespace fsdp {

struct DeviceMesh::Data {
  c10::DeviceType device_type = c10::kCPU;
  at::Tensor mesh;  // int64 [shape], global ranks; of a slice: the one that holds the caller
  std::vector<int64_t> shape;
  std::vector<std::string> names;    // empty when unnamed
  std::vector<ProcessGroup> groups;  // one a mesh dim; null when the caller is outside
  int rank = 0;                      // of the caller
  std::optional<std::vector<int64_t>> coordinate;
  bool in_default_group = true;  // every rank of the default group has this mesh, so new groups can be made

  std::shared_ptr<const Data> root;             // the mesh this one was cut from; null for a root
  std::vector<std::vector<int64_t>> root_dims;  // by mesh dim: the dims of the root that it covers, in order

  // Of a root: dims made by flatten(), by name. Not whole meshes, which would keep their root alive in a circle.
  struct FlattenedDim {
    std::vector<int64_t> root_dims;
    ProcessGroup group;
  };
  mutable std::mutex mutex;
  mutable std::map<std::string, FlattenedDim> flattened;
};

namespace mesh {

using DataPtr = std::shared_ptr<const DeviceMesh::Data>;

// Errors: c10::ValueError when there is none.
[[nodiscard]] const DeviceMesh::Data& checked(const DataPtr& data);

// A root mesh; finds the caller's coordinate. `groups` has one entry a dim.
[[nodiscard]] DataPtr make_root(c10::DeviceType device_type, const at::Tensor& ranks, std::vector<std::string> names,
                                std::vector<ProcessGroup> groups, int rank, bool in_default_group);

// The cut of `root` along mesh dims that each cover some dims of the root, at the caller's place in all other dims.
[[nodiscard]] DataPtr make_slice(const DataPtr& root, const std::vector<std::vector<int64_t>>& root_dims,
                                 std::vector<std::string> names, std::vector<ProcessGroup> groups);

// The place of `name` in the names of the mesh itself; nullopt when it is not there.
[[nodiscard]] std::optional<int64_t> find_dim(const DeviceMesh::Data& data, const std::string& name);
// c10::IndexError: `known` are the names that would do.
[[noreturn]] void refuse_name(const std::string& name, const std::vector<std::string>& known);

// Errors: c10::Error when there are names but not one a dim, or one of them twice.
void check_names(const std::vector<std::string>& names, int64_t ndim);

// The values of an int64 tensor, row-major.
[[nodiscard]] std::vector<int64_t> to_vector(const at::Tensor& tensor);

// "(2, 4)"
[[nodiscard]] std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace mesh
}  // namespace fsdp
