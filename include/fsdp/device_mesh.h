#pragma once
// A named grid of ranks: which rank sits where, and one process group along each dimension.
//
//   auto mesh = fsdp::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "cp"});
//   mesh["dp"].get_group();          // the ranks that share my "cp" coordinate
//   mesh.get_local_rank("cp");       // my place along "cp"
//
// A DeviceMesh is a cheap handle (copies share everything). PyTorch: torch.distributed.device_mesh.
#include <fsdp/process_group.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {

// Errors of all methods: c10::ValueError when the mesh is undefined. A negative mesh dim counts from the last.
class DeviceMesh {
 public:
  struct Data;  // shared by all copies
  DeviceMesh() = default;
  explicit DeviceMesh(std::shared_ptr<const Data> data) : data_(std::move(data)) {}

  // One group: a 1-D mesh over it. Several: one group a mesh dim, with the global ranks [shape] and names. Makes no
  // groups. Groups of make_process_group work too: ranks count from 0 then, and the default group is not needed.
  // Errors: c10::ValueError for a null group, no group, or groups that do not match `mesh` in number, size or ranks;
  // c10::Error for names that are too few, too many or equal. PyTorch: DeviceMesh.from_group.
  static DeviceMesh from_group(const ProcessGroup& group, c10::DeviceType device_type,
                               std::vector<std::string> mesh_dim_names = {});
  static DeviceMesh from_group(const std::vector<ProcessGroup>& groups, c10::DeviceType device_type,
                               const at::Tensor& mesh, std::vector<std::string> mesh_dim_names);

  [[nodiscard]] bool defined() const { return data_ != nullptr; }
  [[nodiscard]] c10::DeviceType device_type() const;
  [[nodiscard]] int64_t ndim() const;
  [[nodiscard]] const std::vector<int64_t>& shape() const;
  [[nodiscard]] const std::vector<std::string>& mesh_dim_names() const;  // empty when unnamed
  [[nodiscard]] const at::Tensor& mesh() const;                          // int64 [shape], global ranks, on the CPU
  [[nodiscard]] int64_t size() const;                                    // number of ranks
  [[nodiscard]] int64_t size(int64_t mesh_dim) const;                    // c10::IndexError outside the mesh's dims

  [[nodiscard]] int get_rank() const;  // global rank of the caller

  // The caller's coordinate along one dim, and its group there. Without argument the mesh must be 1-D. Errors:
  // c10::Error on a rank outside the mesh, or without argument in several dims; c10::IndexError for a dim or name that
  // is not there.
  [[nodiscard]] int64_t get_local_rank() const;
  [[nodiscard]] int64_t get_local_rank(int64_t mesh_dim) const;
  [[nodiscard]] int64_t get_local_rank(const std::string& mesh_dim) const;
  [[nodiscard]] ProcessGroup get_group() const;
  [[nodiscard]] ProcessGroup get_group(int64_t mesh_dim) const;
  [[nodiscard]] ProcessGroup get_group(const std::string& mesh_dim) const;

  [[nodiscard]] std::optional<std::vector<int64_t>> get_coordinate() const;  // [ndim]; nullopt outside the mesh

  // The part of the mesh along these dims that holds the caller; shares the groups. Names are in the order of the mesh;
  // in a root mesh also those that flatten() made. Errors: c10::Error for a mesh without names or two names that cover
  // one dim; c10::IndexError for an unknown name, no name, or another order. PyTorch: mesh["dp"], mesh["dp", "cp"].
  [[nodiscard]] DeviceMesh operator[](const std::string& name) const;
  [[nodiscard]] DeviceMesh slice(const std::vector<std::string>& names) const;

  // A 1-D mesh over all dims, row-major, named `name` or all names joined by "_". The first call for some dims makes a
  // group, so every rank of the default group calls it; later calls use it again. Errors: c10::ValueError when the name
  // belongs to other dims; c10::Error for a mesh without names, or of several dims made from groups whose ranks are not
  // those of the default one. PyTorch: DeviceMesh._flatten.
  [[nodiscard]] DeviceMesh flatten(const std::string& name = "") const;

  bool operator==(const DeviceMesh& other) const;  // same rank map, device type and names
  [[nodiscard]] size_t hash() const;

 private:
  std::shared_ptr<const Data> data_;
};

// Ranks 0 .. prod(shape)-1 in row-major order, with one group along each dim; a dim that spans the world uses the
// default group. Initialises the default group when there is none. Every rank calls it, also one outside the mesh.
// Errors: c10::ValueError for an empty shape or a dim below 1; c10::Error for a shape larger than the world, or names
// that are too few, too many or equal. PyTorch: init_device_mesh.
[[nodiscard]] DeviceMesh init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                                          std::vector<std::string> mesh_dim_names = {});
// The device by name ("cpu", "cuda"). Errors: also c10::Error for an unknown name or one with an index ("cuda:0").
[[nodiscard]] DeviceMesh init_device_mesh(const std::string& device_type, std::vector<int64_t> shape,
                                          std::vector<std::string> mesh_dim_names = {});

}  // namespace fsdp
