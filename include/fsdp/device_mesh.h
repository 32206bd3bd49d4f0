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

class DeviceMesh {
 public:
  struct Data;  // shared by all copies
  DeviceMesh() = default;
  explicit DeviceMesh(std::shared_ptr<const Data> data) : data_(std::move(data)) {}

  // One group: a 1-D mesh over it. Several: one group a mesh dim, with the global ranks [shape] and names.
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
  [[nodiscard]] int64_t size() const;
  [[nodiscard]] int64_t size(int64_t mesh_dim) const;

  [[nodiscard]] int get_rank() const;  // global rank of the caller
  [[nodiscard]] int64_t get_local_rank() const;
  [[nodiscard]] int64_t get_local_rank(int64_t mesh_dim) const;
  [[nodiscard]] int64_t get_local_rank(const std::string& mesh_dim) const;
  [[nodiscard]] std::optional<std::vector<int64_t>> get_coordinate() const;  // nullopt outside the mesh
  [[nodiscard]] ProcessGroup get_group() const;
  [[nodiscard]] ProcessGroup get_group(int64_t mesh_dim) const;
  [[nodiscard]] ProcessGroup get_group(const std::string& mesh_dim) const;

  [[nodiscard]] DeviceMesh operator[](const std::string& name) const;
  [[nodiscard]] DeviceMesh slice(const std::vector<std::string>& names) const;
  [[nodiscard]] DeviceMesh flatten(const std::string& name = "") const;

  bool operator==(const DeviceMesh& other) const;  // rank map, device type and names
  [[nodiscard]] size_t hash() const;

 private:
  std::shared_ptr<const Data> data_;
};

// Ranks 0 .. prod(shape)-1 in row-major order. Initialises the default group when there is none.
[[nodiscard]] DeviceMesh init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                                          std::vector<std::string> mesh_dim_names = {});
// The device by name ("cpu", "cuda"); a name with an index ("cuda:0") is refused.
[[nodiscard]] DeviceMesh init_device_mesh(const std::string& device_type, std::vector<int64_t> shape,
                                          std::vector<std::string> mesh_dim_names = {});

}  // namespace fsdp
